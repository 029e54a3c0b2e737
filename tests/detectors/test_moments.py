"""Moments against the textbook: any split into batches, parts and processes, added and taken away, saved and loaded."""

from dataclasses import FrozenInstanceError

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rmd_plugin import RMD, CalibrationScores, ClassMoments, Moments, NumericalWarning

FIELDS = ("counts", "means", "covariance", "background_mean", "background_covariance", "between_covariance")


def collect(z, y, *, batch=None, **options):
    metric = ClassMoments(**options)
    for rows, labels in zip(z.split(batch or len(z)), y.split(batch or len(y)), strict=True):
        metric.update(rows, labels)
    return metric.compute()


def assert_same(a, b, rtol=1e-10, atol=1e-10):
    for field in FIELDS:
        torch.testing.assert_close(getattr(a, field), getattr(b, field), rtol=rtol, atol=atol, equal_nan=True)


def assert_textbook(moments, z, y):
    means, *others = oracle.moments(z, y)
    np.testing.assert_allclose(moments.means, np.stack([means[k] for k in sorted(means)]), rtol=1e-10)
    for name, expected in zip(("covariance", "background_mean", *FIELDS[4:]), others, strict=True):
        np.testing.assert_allclose(getattr(moments, name), expected, rtol=1e-9, atol=1e-9)


def test_moments_equal_the_textbook_in_any_precision():
    for dtype, offset in ((torch.float64, 0.0), (torch.float32, 1e4), (torch.bfloat16, 0.0)):
        z, y, x = make_blobs()
        z, x = (z + offset).to(dtype), x.to(dtype)
        mixed = torch.cat([z, x]), torch.cat([y, torch.full((len(x),), -1)])  # OOD samples are left out
        moments = collect(*mixed, batch=17)
        assert moments.second.dtype == torch.float64
        assert_textbook(moments, z.double(), y)
        torch.testing.assert_close(moments.background_covariance, moments.covariance + moments.between_covariance)


def test_more_columns_and_rows_than_are_added_at_a_time():
    z, y, _ = make_blobs(width=200, per_class=500)
    assert_textbook(collect(z, y), z, y)


def test_diagonal_moments_are_the_diagonal_of_the_full_ones(blobs):
    z, y, _ = blobs
    full, diagonal = collect(z, y), collect(z, y, diagonal=True)
    assert diagonal.second.shape == (12,)
    for field in ("covariance", "background_covariance", "between_covariance"):
        torch.testing.assert_close(getattr(diagonal, field), getattr(full, field).diagonal())
    assert_same(full.to_diagonal(), diagonal)


def test_maps_of_half_precision_are_averaged_in_float64():
    maps, y = (torch.randn(40, 3, 5, 5) + 100).bfloat16(), torch.arange(40) % 2
    assert_same(collect(maps, y, batch=7), collect(maps.double().mean((2, 3)), y))


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 119), max_size=5),
    seed=st.integers(0, 2**16),
    offset=st.sampled_from([0.0, 100.0, 1e4]),
    diagonal=st.booleans(),
)
def test_any_split_in_any_order_adds_up_and_can_be_taken_away(cuts, seed, offset, diagonal):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(120, 4, generator=generator, dtype=torch.float64) + offset
    y = torch.randint(-1, 5, (120,), generator=generator)
    whole = collect(z, y, num_classes=5, diagonal=diagonal)
    order = torch.randperm(120, generator=generator)
    parts = [part for part in order.tensor_split(sorted(cuts)) if (y[part] >= 0).any()]
    streamed, merged = (ClassMoments(num_classes=5, diagonal=diagonal) for _ in range(2))
    added = [collect(z[part], y[part], diagonal=diagonal) for part in parts]
    for part in parts:
        streamed.update(z[part], y[part])
        other = ClassMoments(diagonal=diagonal)
        other.update(z[part], y[part])
        merged.merge_state(other)
    for total in (streamed.compute(), merged.compute(), sum(added).with_classes(5)):
        assert_same(total, whole, atol=1e-8)
    first, *rest = added
    if rest and first.num_samples > 20:
        assert_same(whole - sum(rest), first.with_classes(5), rtol=1e-7, atol=1e-8)


def test_a_difference_that_cannot_be_is_refused_and_a_small_rest_is_told(blobs):
    z, y, _ = blobs
    with pytest.raises(ValueError, match="class 2"):
        collect(z, y) - collect(z[y == 2].repeat(2, 1), torch.full((120,), 2))
    with pytest.warns(NumericalWarning, match="13 of 300"):
        collect(z, y) - collect(z[13:], y[13:])
    without = collect(z, y) - collect(z[y == 1], y[y == 1])
    assert without.counts.tolist() == [60, 0, 60, 60, 60]
    assert not without.sums[1].any()


def test_sizes_are_inferred_and_grow_with_the_labels():
    metric = ClassMoments()
    metric.update(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    metric.update(torch.randn(2, 3), torch.tensor([4, -1]))
    moments = metric.compute()
    assert (moments.num_classes, moments.num_features, moments.num_samples) == (5, 3, 5)
    assert moments.counts.tolist() == [2, 2, 0, 0, 1]
    assert moments.means[2].isnan().all()
    assert collect(torch.randn(10, 1), torch.zeros(10).long()).covariance.shape == (1, 1)


def test_empty_and_all_ood_batches_change_nothing_and_reset_forgets(blobs):
    z, y, x = blobs
    metric = ClassMoments()
    metric.update(x[:, :4], torch.zeros(80).long())
    metric.reset()
    for rows, labels in ((z[:0], y[:0]), (z[:5] * torch.nan, torch.full((5,), -3)), (z, y), (z[:0], y[:0])):
        metric.update(rows, labels)
    assert_same(metric.compute(), collect(z, y))
    metric.reset()
    with pytest.raises(ValueError, match="in-distribution"):
        metric.compute()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_with_bad_values_is_refused_whole(blobs, bad):
    z, y, _ = blobs
    metric = ClassMoments()
    metric.update(z, y)
    broken = z.clone()
    broken[3, 2] = broken[3, 4] = broken[7, 1] = bad
    with pytest.raises(ValueError, match="2 of 300 samples of batch 1"):
        metric.update(broken, y)
    assert_same(metric.compute(), collect(z, y), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("features", "labels", "error", "key"),
    [
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 7]), ValueError, "below 5"),
        (torch.zeros(4, 2), torch.zeros(4).long(), ValueError, "layer"),
        (torch.zeros(4, 3, 3, 8), torch.zeros(4).long(), ValueError, "permute"),
    ],
)
def test_malformed_batches_are_refused(features, labels, error, key):
    with pytest.raises(error, match=key):
        ClassMoments(num_classes=5, num_features=3).update(features, labels)


def test_a_label_that_looks_like_an_identifier_is_refused():
    with pytest.raises(ValueError, match="123456789"):
        ClassMoments().update(torch.zeros(1, 2), torch.tensor([123456789]))


@pytest.mark.parametrize(
    ("options", "key"),
    [({"normalize": True}, "normalized"), ({"diagonal": True}, "diagonal"), ({"num_classes": 4}, "4")],
)
def test_moments_of_other_options_do_not_add_up(blobs, options, key):
    z, y, _ = blobs
    own, other = ClassMoments(**options), ClassMoments()
    own.update(z[:8], torch.zeros(8).long())
    other.update(z, y)
    with pytest.raises(ValueError, match=key):
        own.merge_state(other)
    if "num_classes" not in options:
        with pytest.raises(ValueError, match=key):
            own.compute() + other.compute()
    with pytest.raises(ValueError, match="num_features"):
        collect(z, y) + collect(z[:, :3], y)
    with pytest.raises(ValueError, match="ClassMoments"):
        own.merge_state({"counts": torch.zeros(1)})


def test_moments_are_frozen_and_survive_a_file(blobs, tmp_path):
    moments = collect(*blobs[:2], normalize=True)
    with pytest.raises(FrozenInstanceError):
        moments.counts = torch.zeros(1)
    moments.save(tmp_path / "moments")
    loaded = Moments.load(tmp_path / "moments")
    assert_same(loaded, moments, rtol=0, atol=0)
    assert loaded.normalized
    RMD().fit_features(*blobs[:2]).save(tmp_path / "rmd")
    (tmp_path / "text").write_text("moments")
    (tmp_path / "short").write_bytes((tmp_path / "moments").read_bytes()[:-50])
    for name in ("rmd", "text", "short"):
        with pytest.raises(ValueError, match=name):
            Moments.load(tmp_path / name)


def test_it_is_a_metric_of_torchmetrics(blobs):
    z, y, _ = blobs
    metric = ClassMoments()
    assert metric(z[:50], y[:50]).num_samples == 50
    metric(z[50:], y[50:])
    assert_same(metric.compute(), collect(z, y))
    # MetricTracker asks for it; more is neither better nor worse
    assert ClassMoments.higher_is_better is CalibrationScores.higher_is_better is None


def test_states_stay_float64_inside_a_half_precision_parent_and_outside_of_inference_mode(blobs):
    z, y, _ = blobs
    parent = nn.ModuleDict({"moments": ClassMoments(), "layer": nn.Linear(2, 2)})
    with torch.inference_mode():
        parent["moments"].update(z[:100] + 0.0, y[:100])
    parent.to(torch.bfloat16)
    parent["moments"].update(z[100:], y[100:])
    assert parent["layer"].weight.dtype == torch.bfloat16
    assert_same(parent["moments"].compute(), collect(z, y))
