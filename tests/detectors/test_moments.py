import io
from dataclasses import FrozenInstanceError, replace

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from rmd_plugin import ClassMoments, Moments
from rmd_plugin.detectors.files import write_state

FIELDS = ("counts", "means", "covariance", "background_mean", "background_covariance", "between_covariance")


def collect(z, y, *, batch=None, **options):
    metric = ClassMoments(**options)
    for rows, labels in zip(z.split(batch or len(z)), y.split(batch or len(y)), strict=True):
        metric.update(rows, labels)
    return metric.compute()


def assert_same(a, b, rtol=1e-10, atol=1e-10):
    for field in FIELDS:
        torch.testing.assert_close(getattr(a, field), getattr(b, field), rtol=rtol, atol=atol, equal_nan=True)


def test_moments_equal_the_textbook(blobs):
    z, y, _ = blobs
    moments = collect(z, y, batch=17)
    means, sigma, mu_0, sigma_0, between = oracle.moments(z, y)
    np.testing.assert_allclose(moments.means, np.stack([means[k] for k in sorted(means)]), rtol=1e-12)
    np.testing.assert_allclose(moments.covariance, sigma, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(moments.background_mean, mu_0, rtol=1e-12)
    np.testing.assert_allclose(moments.background_covariance, sigma_0, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(moments.between_covariance, between, rtol=1e-11, atol=1e-11)


def test_background_covariance_is_within_plus_between(blobs):
    moments = collect(*blobs[:2])
    torch.testing.assert_close(moments.background_covariance, moments.covariance + moments.between_covariance)


def test_diagonal_moments_are_the_diagonal_of_the_full_ones(blobs):
    z, y, _ = blobs
    full, diagonal = collect(z, y), collect(z, y, diagonal=True)
    assert diagonal.second.shape == (12,)
    for field in ("covariance", "background_covariance", "between_covariance"):
        torch.testing.assert_close(getattr(diagonal, field), getattr(full, field).diagonal())
    assert_same(full.to_diagonal(), diagonal)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 119), max_size=5),
    seed=st.integers(0, 2**16),
    offset=st.sampled_from([0.0, 100.0, 1e4]),
    diagonal=st.booleans(),
)
def test_any_split_in_any_order_gives_the_same_moments(cuts, seed, offset, diagonal):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(120, 4, generator=generator, dtype=torch.float64) + offset
    y = torch.randint(-1, 5, (120,), generator=generator)
    whole = collect(z, y, num_classes=5, diagonal=diagonal)
    order = torch.randperm(120, generator=generator)
    parts = [part for part in order.tensor_split(sorted(cuts)) if (y[part] >= 0).any()]
    streamed = ClassMoments(num_classes=5, diagonal=diagonal)
    for part in parts:
        streamed.update(z[part], y[part])
    assert_same(streamed.compute(), whole, atol=1e-9)
    assert_same(sum(collect(z[part], y[part], diagonal=diagonal) for part in parts).with_classes(5), whole, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3))
def test_moments_follow_affine_maps(seed, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (50,), generator=generator)
    plain, mapped = collect(z, y, num_classes=3), collect(scale * z + shift, y, num_classes=3)
    torch.testing.assert_close(mapped.means, scale * plain.means + shift, equal_nan=True, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mapped.covariance, scale**2 * plain.covariance, rtol=1e-7, atol=1e-9 * scale**2)


def test_float32_features_of_mean_1e4_keep_their_covariance():
    z = torch.randn(500, 6) + 1e4
    y = torch.arange(500) % 3
    _, sigma, *_ = oracle.moments(z, y)
    np.testing.assert_allclose(collect(z, y, batch=32).covariance, sigma, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_features_are_summed_in_float64(dtype):
    z, y, _ = make_blobs(dtype=dtype)
    assert_same(collect(z, y, batch=7), collect(z.double(), y))
    assert collect(z, y).second.dtype == torch.float64


def test_negative_labels_are_ignored(blobs):
    z, y, x = blobs
    mixed = collect(torch.cat([z, x]), torch.cat([y, torch.full((len(x),), -1)]))
    assert_same(mixed, collect(z, y))


def test_sizes_are_inferred_and_grow_with_the_labels():
    metric = ClassMoments()
    metric.update(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    metric.update(torch.randn(2, 3), torch.tensor([4, -1]))
    moments = metric.compute()
    assert (moments.num_classes, moments.num_features, moments.num_samples) == (5, 3, 5)
    assert moments.counts.tolist() == [2, 2, 0, 0, 1]
    assert moments.means[2].isnan().all()


def test_empty_and_all_ood_batches_change_nothing(blobs):
    z, y, _ = blobs
    metric = ClassMoments()
    metric.update(z[:0], y[:0])
    metric.update(z[:5], torch.full((5,), -3))
    metric.update(z, y)
    metric.update(z[:0], y[:0])
    assert_same(metric.compute(), collect(z, y))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_with_bad_values_is_refused_whole(blobs, bad):
    z, y, _ = blobs
    metric = ClassMoments()
    metric.update(z, y)
    broken = z.clone()
    broken[3, 2] = broken[3, 4] = broken[7, 1] = bad
    nan, inf = (3, 0) if bad != bad else (0, 3)
    with pytest.raises(
        ValueError, match=f"batch 1 has {nan} NaN and {inf} infinite feature values in 2 of 300 samples"
    ):
        metric.update(broken, y)
    assert_same(metric.compute(), collect(z, y), rtol=0, atol=0)


def test_bad_values_of_ood_samples_do_not_matter(blobs):
    z, y, _ = blobs
    broken, labels = torch.cat([z, torch.full((1, 12), torch.nan)]), torch.cat([y, torch.tensor([-1])])
    assert_same(collect(broken, labels), collect(z, y))


@pytest.mark.parametrize(
    ("features", "labels", "error", "message"),
    [
        (torch.zeros(4, 3), torch.full((4,), 0.5), TypeError, "with the value 0.5"),
        (torch.zeros(4, 3), torch.zeros(3).long(), ValueError, r"shape \(4,\), one per sample, got \(3,\)"),
        (torch.zeros(4, 3), torch.zeros(4, 1).long(), ValueError, r"got \(4, 1\)"),
        (torch.zeros(4, 3), [0, 0, 0, 0], TypeError, "must be integers .* got list"),
        (torch.zeros(4, 3).long(), torch.zeros(4).long(), TypeError, "floating-point"),
        (torch.zeros(4, 5, 3), torch.zeros(4).long(), ValueError, "Pool tokens"),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 7]), ValueError, "below num_classes=5, got 7"),
        (torch.zeros(4, 2), torch.zeros(4).long(), ValueError, r"shape \(B, 3\), got \(4, 2\)"),
    ],
)
def test_malformed_batches_are_refused_with_a_reason(features, labels, error, message):
    with pytest.raises(error, match=message):
        ClassMoments(num_classes=5, num_features=3).update(features, labels)


def test_a_label_that_looks_like_an_identifier_is_refused():
    with pytest.raises(ValueError, match="would mean 123456790 classes"):
        ClassMoments().update(torch.zeros(1, 2), torch.tensor([123456789]))


def test_nothing_seen_is_an_error():
    metric = ClassMoments()
    metric.update(torch.zeros(3, 2), torch.tensor([-1, -1, -2]))
    with pytest.raises(ValueError, match="no in-distribution sample"):
        metric.compute()


@pytest.mark.parametrize("sizes", [{"num_classes": 0}, {"num_features": -1}])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match="must be a positive integer"):
        ClassMoments(**sizes)


def test_moments_of_different_kinds_do_not_add_up(blobs):
    z, y, _ = blobs
    with pytest.raises(ValueError, match="num_features=12 and num_features=3"):
        collect(z, y) + collect(z[:, :3], y)
    with pytest.raises(ValueError, match="diagonal"):
        collect(z, y) + collect(z, y, diagonal=True)
    with pytest.raises(ValueError, match="normalized"):
        collect(z, y) + collect(z, y, normalize=True)


def test_moments_are_frozen_and_survive_a_file(blobs, tmp_path):
    moments = collect(*blobs[:2])
    with pytest.raises(FrozenInstanceError):
        moments.counts = torch.zeros(1)
    buffer = io.BytesIO()
    torch.save(moments, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert isinstance(loaded, Moments)
    assert_same(loaded, moments, rtol=0, atol=0)
    moments.save(tmp_path / "moments.pt")
    assert_same(Moments.load(tmp_path / "moments.pt"), moments, rtol=0, atol=0)
    torch.save(torch.zeros(1), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds a Tensor"):
        Moments.load(tmp_path / "other.pt")


def test_reset_forgets_everything(blobs):
    z, y, x = blobs
    metric = ClassMoments()
    metric.update(x[:, :4], torch.zeros(len(x)).long())
    metric.reset()
    metric.update(z, y)
    assert_same(metric.compute(), collect(z, y))


def test_forward_returns_the_moments_of_the_batch(blobs):
    z, y, _ = blobs
    metric = ClassMoments()
    assert metric(z[:50], y[:50]).num_samples == 50
    metric(z[50:], y[50:])
    assert_same(metric.compute(), collect(z, y))


def test_accumulators_merge(blobs):
    z, y, _ = blobs
    first, second, empty = ClassMoments(), ClassMoments(), ClassMoments()
    first.update(z[:100], y[:100])
    second.update(z[100:], y[100:])
    first.merge_state(empty)
    first.merge_state(second)
    assert_same(first.compute(), collect(z, y))
    empty.merge_state(first)
    assert_same(empty.compute(), collect(z, y))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"normalize": True}, "normalized"), ({"diagonal": True}, "diagonal"), ({"num_classes": 4}, "num_classes")],
)
@pytest.mark.parametrize("started", [False, True])
def test_accumulators_of_other_options_do_not_merge(blobs, options, name, started):
    z, y, _ = blobs
    own, other = ClassMoments(**options), ClassMoments()
    if started:
        own.update(z[:8], torch.zeros(8).long())
    other.update(z, y)
    before = {key: value.clone() for key, value in own.metric_state.items()}
    with pytest.raises(ValueError, match=rf"{name}=.* and {name}="):
        own.merge_state(other)
    assert all(torch.equal(value, before[key]) for key, value in own.metric_state.items())


@pytest.mark.parametrize("options", [{}, {"diagonal": True}, {"normalize": True}, {"num_classes": 5}], ids=str)
def test_a_state_merges_as_its_accumulator_does(blobs, options):
    z, y, _ = blobs
    first, second, empty = (ClassMoments(**options) for _ in range(3))
    first.update(z[:100], y[:100])
    second.update(z[100:], y[100:])
    first.merge_state(second.metric_state)
    assert_same(first.compute(), collect(z, y, **options))
    empty.merge_state({name: value.clone() for name, value in first.metric_state.items()})
    assert_same(empty.compute(), collect(z, y, **options))


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_what_is_no_state_does_not_merge(blobs, damage):
    metric = ClassMoments()
    metric.update(*blobs[:2])
    state = dict(metric.metric_state)
    if damage == "missing":
        del state["shift"]
    else:
        state["counts"] = state["counts"][:2]
    with pytest.raises(ValueError, match="expected the state of a ClassMoments"):
        ClassMoments().merge_state(state)
    with pytest.raises(ValueError, match="another ClassMoments or its state to merge, got int"):
        metric.merge_state(3)


def test_maps_of_half_precision_are_averaged_in_float64():
    maps = (torch.randn(40, 3, 5, 5) + 100).bfloat16()
    y = torch.arange(40) % 2
    assert_same(collect(maps, y, batch=7), collect(maps.double().mean((2, 3)), y))


def test_a_single_feature_keeps_its_shape():
    moments = collect(torch.randn(10, 1), torch.zeros(10).long())
    assert moments.covariance.shape == (1, 1)
    assert moments.counts.shape == (1,)


def test_states_stay_float64_inside_a_half_precision_parent(blobs):
    z, y, _ = blobs
    parent = nn.ModuleDict({"moments": ClassMoments(), "layer": nn.Linear(2, 2)})
    parent["moments"].update(z[:100], y[:100])
    parent.to(torch.bfloat16)
    parent["moments"].update(z[100:], y[100:])
    assert parent["layer"].weight.dtype == torch.bfloat16
    assert_same(parent["moments"].compute(), collect(z, y))


def test_updates_may_cross_the_border_of_inference_mode(blobs):
    z, y, _ = blobs
    metric = ClassMoments()
    with torch.inference_mode():
        metric.update(z[:100] + 0.0, y[:100])
    metric.update(z[100:], y[100:])
    assert_same(metric.compute(), collect(z, y))


def test_normalized_moments_are_those_of_unit_vectors(blobs):
    z, y, _ = blobs
    moments = collect(z, y, normalize=True)
    assert moments.normalized
    unit = collect(nn.functional.normalize(z, dim=1), y)
    torch.testing.assert_close(moments.covariance, unit.covariance)


# -- taking away ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    cut=st.integers(40, 110),
    offset=st.sampled_from([0.0, 100.0, 1e4]),
    options=st.sampled_from([{}, {"diagonal": True}, {"normalize": True}]),
)
def test_what_was_added_can_be_taken_away(seed, cut, offset, options):
    assume(not options.get("normalize") or offset < 1e4)  # unit vectors that far away differ in their last digits only
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(120, 4, generator=generator, dtype=torch.float64) + offset
    y = torch.randint(-1, 5, (120,), generator=generator)
    y[:5] = torch.arange(5)
    first, second = (collect(z[part], y[part], **options) for part in (slice(cut), slice(cut, None)))
    atol = 1e-9 if not options.get("normalize") else 1e-15
    assert_same(first + second - second, first, rtol=1e-8, atol=atol)
    assert_same(collect(z, y, **options) - second, first, rtol=1e-8, atol=atol)


def test_a_difference_is_the_textbook_of_what_remains(blobs):
    z, y, _ = blobs
    left = collect(z, y, batch=17) - collect(z[3:270], y[3:270], batch=50)
    rest = torch.cat([z[:3], z[270:]]), torch.cat([y[:3], y[270:]])
    means, sigma, mu_0, sigma_0, _ = oracle.moments(*rest)
    assert left.counts.tolist() == rest[1].bincount().tolist()
    np.testing.assert_allclose(left.means, np.stack([means[k] for k in sorted(means)]), rtol=1e-11)
    np.testing.assert_allclose(left.covariance, sigma, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(left.background_mean, mu_0, rtol=1e-11)
    np.testing.assert_allclose(left.background_covariance, sigma_0, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("diagonal", [False, True])
def test_nothing_remains_of_moments_without_themselves(blobs, diagonal):
    z, y, _ = blobs
    moments = collect(z, y, diagonal=diagonal)
    nothing = moments - collect(z.flip(0), y.flip(0), batch=7, diagonal=diagonal)
    assert nothing.num_samples == 0
    assert not any(bool(tensor.any()) for tensor in (nothing.counts, nothing.sums, nothing.second))
    assert_same(nothing + moments, moments)


def test_a_class_whose_samples_are_taken_away_leaves_no_trace(blobs):
    z, y, _ = blobs
    left = collect(z, y) - collect(z[y == 2], y[y == 2])
    assert_same(left, collect(z[y != 2], y[y != 2]))
    assert not left.sums[2].any()


@pytest.mark.parametrize("diagonal", [False, True])
def test_samples_that_were_never_added_cannot_be_taken_away(blobs, diagonal):
    z, y, x = blobs

    def take(rows, labels, message):
        whole = collect(z, y, diagonal=diagonal)
        with pytest.raises(ValueError, match=rf"{message}.*not all added before. Take away what was added"):
            whole - collect(rows, labels, diagonal=diagonal)

    take(torch.cat([z, z[:1]]), torch.cat([y, y[:1]]), "class 0 has 60 samples, fewer than the 61")
    take(z[:1], y[:1] + 5, "class 5 has 0 samples, fewer than the 1")
    take(x[:60], torch.full((60,), 2), "a class without samples would keep a sum of")
    take(1e3 * z[:1], y[:1], "variances would be left that no samples have, wrong by (1|0.98) of")
    # the same means, twice the spread
    centre = torch.stack([z[y == k].mean(0) for k in range(5)])[y]
    take(2 * z - centre, y, "variances would be left that no samples have")


def test_with_fewer_samples_than_features_a_single_foreign_one_is_found_out():
    z, y = torch.randn(30, 40, dtype=torch.float64), torch.arange(30) % 3
    left = collect(z, y) - collect(z[:1], y[:1])
    assert_same(left, collect(z[1:], y[1:]))
    with pytest.raises(ValueError, match="not all added before"):
        collect(z, y) - collect(torch.randn(1, 40), y[:1])


def test_only_moments_of_one_kind_can_be_taken_away(blobs):
    z, y, _ = blobs
    with pytest.raises(ValueError, match="num_features=12 and num_features=3"):
        collect(z, y) - collect(z[:, :3], y)
    with pytest.raises(ValueError, match="normalized"):
        collect(z, y) - collect(z, y, normalize=True)
    with pytest.raises(TypeError):
        collect(z, y) - 3


def by_hand(z, y, classes):
    """The moments of a batch around its mean, without the accumulator."""
    centred, one_hot = z - z.mean(0), nn.functional.one_hot(y, classes).double()
    return Moments(one_hot.sum(0), z.mean(0), one_hot.T @ centred, centred.T @ centred)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_ten_thousand_small_parts_do_not_drift(offset):
    z, y, _ = make_blobs(num_classes=3, width=6, per_class=10_000)
    z = z + offset
    parts = [by_hand(rows, labels, 3) for rows, labels in zip(z.split(3), y.split(3), strict=True)]
    total = sum(parts)
    _, sigma, *_ = oracle.moments(z, y)
    np.testing.assert_allclose(total.covariance, sigma, rtol=1e-10, atol=1e-10)
    for part in parts[100:]:
        total = total - part
    _, sigma, *_ = oracle.moments(z[:300], y[:300])
    np.testing.assert_allclose(total.covariance, sigma, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_window_over_a_stream_that_moves_away_keeps_its_digits():
    z, y, _ = make_blobs(num_classes=3, width=6, per_class=2000)
    z = z + torch.linspace(0, 1e5, len(z), dtype=torch.float64)[:, None]
    parts = [by_hand(rows, labels, 3) for rows, labels in zip(z.split(6), y.split(6), strict=True)]
    window = sum(parts[:50])
    for new, old in zip(parts[50:], parts, strict=False):
        window = window + new - old
    _, sigma, *_ = oracle.moments(z[-300:], y[-300:])
    np.testing.assert_allclose(window.covariance, sigma, rtol=1e-9, atol=1e-9 * sigma.max())


@pytest.mark.parametrize("diagonal", [False, True])
def test_moments_without_a_class_keep_the_other_labels_and_the_common_covariance(blobs, diagonal):
    z, y, _ = blobs
    moments = collect(z, y, diagonal=diagonal)
    left, rest = moments.without([1, 3]), collect(z[(y != 1) & (y != 3)], y[(y != 1) & (y != 3)], diagonal=diagonal)
    for field in ("counts", "means", "background_mean", "between_covariance"):
        torch.testing.assert_close(getattr(left, field), getattr(rest, field), equal_nan=True)
    torch.testing.assert_close(left.covariance, moments.covariance)
    assert left.without([]).num_samples == 180
    assert moments.without(range(5)).num_samples == 0


def test_where_the_covariance_is_common_a_class_is_taken_out_exactly(blobs):
    z, y, _ = blobs
    z = z[y == 0]
    shifted = torch.cat([z, z + 5.0, z - 2.0]), torch.arange(3).repeat_interleave(60)
    assert_same(collect(*shifted).without([2]).with_classes(2), collect(shifted[0][:120], shifted[1][:120]))


def test_classes_that_are_not_there_cannot_be_taken_out(blobs):
    moments = collect(*blobs[:2])
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=f"there are classes 0 to 4, got {wrong}"):
            moments.without([0, wrong])
    with pytest.raises(ValueError, match=r"num_classes=3 leaves no room for class 4.*without"):
        moments.with_classes(3)
    assert moments.without([4]).with_classes(4).num_classes == 4
    assert moments.with_classes(7).counts.tolist() == [60] * 5 + [0, 0]


def test_a_file_of_impossible_moments_is_refused(blobs, tmp_path):
    moments = collect(*blobs[:2])
    for counts in (-moments.counts, moments.counts + 0.5):
        replace(moments, counts=counts).save(tmp_path / "moments.pt")
        with pytest.raises(ValueError, match="other than 0, 1, 2"):
            Moments.load(tmp_path / "moments.pt")
    state = {"moments": {"normalized": False}, "tensors": {"counts": moments.counts}}
    write_state(tmp_path / "moments.pt", state)
    with pytest.raises(ValueError, match="the moments lack shift, sums, second"):
        Moments.load(tmp_path / "moments.pt")
