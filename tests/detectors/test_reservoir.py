"""The sample beside the moments: the same for every order and split, of bounded size, and a fair draw."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import make_blobs
from torch import multiprocessing as mp

from rmd_plugin import FusedRMD, Moments, NumericalWarning
from rmd_plugin.detectors import reservoir
from rmd_plugin.detectors.files import DetectorFileError, write_state
from rmd_plugin.detectors.reservoir import RESERVOIR_SIZE, SampledClassMoments, SampledMoments, content_keys


def collected(z, y, batch=1000, seed=0):
    metric = SampledClassMoments(seed=seed)
    for rows, labels in zip(z.split(batch), y.split(batch), strict=True):
        metric.update(rows, labels)
    return metric


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.sample, other.sample, strict=True))


@pytest.fixture(scope="module")
def many():
    """More samples than are kept, some of them several times."""
    torch.manual_seed(0)
    z, y = torch.randn(26_000, 3), torch.arange(26_000) % 7
    return torch.cat([z, z[:4000], z[:1000]]), torch.cat([y, y[:4000], y[:1000]])


def test_the_sample_does_not_depend_on_order_or_batches(many):
    z, y = many
    whole = collected(z, y, len(z)).compute()
    assert len(whole.sample.keys) == RESERVOIR_SIZE
    assert torch.equal(whole.sample.keys, whole.sample.keys.unique())
    order = torch.randperm(len(z))
    for rows, labels, batch in ((z, y, 777), (z[order], y[order], 2048), (z.flip(0), y.flip(0), 9999)):
        assert same(collected(rows, labels, batch).compute(), whole)


def test_parts_merge_to_the_sample_of_the_whole(many):
    z, y = many
    whole = collected(z, y).compute()
    for cuts in ((12_000, 19_000), (1, 30_999), (500, 15_000, 3500, 12_000)):
        parts = [collected(rows, labels) for rows, labels in zip(z.split(cuts), y.split(cuts), strict=True)]
        assert same(sum(part.compute() for part in parts), whole)
        first, *rest = parts
        for part in rest:
            first.merge_state(part if len(cuts) == 2 else part.metric_state)
        assert same(first.compute(), whole)
        np.testing.assert_allclose(first.compute().covariance, whole.covariance, rtol=1e-12)


def test_the_sample_holds_features_labels_and_how_often_they_occur(many):
    z, y = many
    seen = Counter((*row, label) for row, label in zip(z.tolist(), y.tolist(), strict=True))
    sample = collected(z, y).compute().sample
    found = zip(sample.rows.tolist(), sample.labels.tolist(), sample.copies.tolist(), strict=True)
    assert all(seen[(*row, label)] == copies for row, label, copies in found)
    assert set(sample.copies.tolist()) == {1, 2, 3}


def test_the_draw_is_fair_and_the_seed_changes_it(many):
    z, y = many[0][:26_000], many[1][:26_000]
    first, second = (collected(z, y, seed=seed).compute().sample for seed in (0, 1))
    share = RESERVOIR_SIZE / len(z)
    error = (share * (1 - share) / len(z)) ** 0.5
    for sample in (first, second):
        counts = torch.bincount(sample.labels) / torch.bincount(y)
        assert (abs(counts - share) < 4 * error * 7**0.5).all()
        assert abs(sample.rows.mean(0)).max() < 4 / RESERVOIR_SIZE**0.5
    keys = [set(map(tuple, sample.rows.tolist())) for sample in (first, second)]
    expected = RESERVOIR_SIZE * share
    assert abs(len(keys[0] & keys[1]) - expected) < 0.05 * expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_tell_apart_what_differs_in_one_bit(dtype):
    row = torch.randn(1, 9, dtype=dtype)
    rows = row.repeat(200, 1)
    words = rows.view(torch.int32)
    for k in range(1, 200):
        words[k, k % words.shape[1]] ^= 1 << k % 31
    labels = torch.zeros(200, dtype=torch.long)
    keys = content_keys(rows, labels, 0)
    assert len(keys.unique()) == len(rows.unique(dim=0))
    assert not (content_keys(rows, labels + 1, 0) == keys).any()
    assert not (content_keys(rows, labels, 1) == keys).any()
    # each bit of a key is set in half of them
    bits = torch.stack([(keys >> k & 1).double().mean() for k in range(64)])
    assert ((bits - 0.5).abs() < 0.2).all()


def test_memory_is_bounded_while_it_streams(monkeypatch):
    monkeypatch.setattr(reservoir, "RESERVOIR_SIZE", 100)
    metric = SampledClassMoments()
    for _ in range(200):
        metric.update(torch.randn(32, 2), torch.randint(0, 3, (32,)))
        assert sum(map(len, metric.sample_rows)) <= 232
    assert len(metric.compute().sample.keys) == 100
    metric.reset()
    assert metric.sample_rows == []


def test_the_sample_is_a_copy_of_the_features():
    z, y, _ = make_blobs(dtype=torch.float32)
    metric = collected(z, y)
    before = metric.compute().sample.rows.clone()
    z.zero_()
    assert torch.equal(metric.compute().sample.rows, before)
    assert before.dtype == torch.float32


def test_a_batch_that_raises_leaves_the_sample_as_it_was(many):
    z, y = many
    metric = collected(z[:100], y[:100])
    before = metric.compute()
    bad = z[100:200].clone()
    bad[3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        metric.update(bad, y[100:200])
    metric.num_classes = 7
    with pytest.raises(ValueError, match="labels must be below"):
        metric.update(z[100:200], y[100:200] + 5)
    assert same(metric.compute(), before)


def test_more_samples_than_are_kept_give_nearly_the_scores_of_all(monkeypatch):
    z, y, x = make_blobs(per_class=6000, dtype=torch.float32)
    sampled = FusedRMD().fit_features(z, y).predict_features(x)
    monkeypatch.setattr(reservoir, "RESERVOIR_SIZE", 10**6)
    torch.testing.assert_close(sampled, FusedRMD().fit_features(z, y).predict_features(x), rtol=0.05, atol=0.1)
    assert not torch.equal(sampled, FusedRMD().fit_features(z, y).predict_features(x))


def test_samples_of_other_seeds_or_of_none_do_not_add_up(many):
    z, y = many[0][:50], many[1][:50]
    one, other = collected(z, y), collected(z, y, seed=5)
    with pytest.raises(ValueError, match="seed=0 and seed=5"):
        one.compute() + other.compute()
    with pytest.raises(ValueError, match="seed=0, the one to merge 5"):
        one.merge_state(other)
    plain = one.compute().plain()
    for total in (plain + one.compute(), one.compute() + plain):
        assert type(total) is Moments
        assert total.num_samples == 100
    with pytest.raises(ValueError, match="expected the states"):
        one.merge_state({"counts": torch.zeros(1)})


def test_moments_and_sample_are_saved_together(many, tmp_path):
    z, y = many
    moments = collected(z, y, seed=4).compute()
    moments.save(tmp_path / "moments.pt")
    loaded = SampledMoments.load(tmp_path / "moments.pt")
    assert same(loaded, moments)
    assert loaded.seed == 4
    assert torch.equal(Moments.load(tmp_path / "moments.pt").second, moments.second)
    moments.plain().save(tmp_path / "plain.pt")
    with pytest.raises(DetectorFileError, match="moments without a sample"):
        SampledMoments.load(tmp_path / "plain.pt")
    assert same(copy.deepcopy(moments).to("cpu"), moments)


# -- taking away ------------------------------------------------------------------------------------------------------


def rows_of(moments):
    rows, labels = moments.sample.rows.tolist(), moments.sample.labels.tolist()
    return Counter((*row, label) for row, label in zip(rows, labels, strict=True))


def test_up_to_the_size_of_the_sample_a_difference_is_the_sample_of_what_remains(many):
    z, y = many[0][-9000:], many[1][-9000:]  # 1,000 of them three times, here or there
    z, y = torch.cat([z, z[:500]]), torch.cat([y, y[:500]])
    left = collected(z, y).compute() - collected(z[4000:], y[4000:]).compute()
    assert same(left, collected(z[:4000], y[:4000]).compute())
    assert same(left + collected(z[4000:], y[4000:]).compute(), collected(z, y).compute())


def test_what_is_taken_away_is_gone_from_the_sample_and_the_rest_is_a_fair_draw(many):
    z, y = many[0][:26_000], many[1][:26_000]
    whole, gone = collected(z, y).compute(), collected(z[:12_000], y[:12_000]).compute()
    left = whole - gone
    forgotten = {(*row, label) for row, label in zip(z[:12_000].tolist(), y[:12_000].tolist(), strict=True)}
    assert not forgotten & rows_of(left).keys()
    expected = {row for row in rows_of(whole) if row not in forgotten}
    assert rows_of(left).keys() == expected
    # later samples are cut at the same key: as large a share of them is kept as of the others
    new = torch.randn(3000, 3)
    more = left + collected(new, y[:3000]).compute()
    kept = len({(*row, label) for row, label in zip(new.tolist(), y.tolist(), strict=False)} & rows_of(more).keys())
    assert kept / 3000 == pytest.approx(RESERVOIR_SIZE / 26_000, rel=0.1)
    assert len(more.sample.keys) == kept + len(expected)


def test_a_sample_that_was_never_added_is_found_out_by_any_bit(many):
    z, y = many[0][:5000], many[1][:5000]
    whole, wrong = collected(z, y).compute(), z[:3].clone()
    wrong[1, 0] = torch.nextafter(wrong[1, 0], torch.tensor(9.0))
    with pytest.raises(
        ValueError, match=r"1 of the 3 samples that can be looked up are not in the sample.*not all added"
    ):
        whole - collected(wrong, y[:3]).compute()
    with pytest.raises(ValueError, match="1 of the 2 samples"):
        whole - collected(z[[0, 0]], y[[0, 0]]).compute()


def test_a_sample_that_has_shrunk_is_told(many):
    z, y = many[0][:26_000], many[1][:26_000]
    whole = collected(z, y).compute()
    with pytest.warns(
        NumericalWarning, match=r"shrunk to \d+ of the 6000 samples that remain; a new fit would draw 6000"
    ):
        left = whole - collected(z[6000:], y[6000:]).compute()
    assert len(left.sample.keys) == pytest.approx(6000 * RESERVOIR_SIZE / 26_000, rel=0.1)


def test_a_class_that_is_taken_out_leaves_the_sample_too(many):
    z, y = many
    moments = collected(z, y).compute()
    left = moments.without([3, 4])
    assert set(left.sample.labels.tolist()) == {0, 1, 2, 5, 6}
    assert left.limit == int(moments.sample.keys[-1])
    assert left.counts[[3, 4]].tolist() == [0, 0]


def test_differences_need_samples_of_one_seed_or_give_none(many):
    z, y = many[0][:500], many[1][:500]
    whole, part = collected(z, y), collected(z[:50], y[:50])
    assert type(whole.compute() - part.compute().plain()) is Moments
    with pytest.raises(ValueError, match="seed=0 and seed=5"):
        whole.compute() - collected(z[:50], y[:50], seed=5).compute()


def test_how_far_a_sample_is_complete_is_saved_and_files_from_before_load(many, tmp_path):
    z, y = many[0][:26_000], many[1][:26_000]
    left = collected(z, y).compute() - collected(z[:100], y[:100]).compute()
    left.save(tmp_path / "moments.pt")
    loaded = SampledMoments.load(tmp_path / "moments.pt")
    assert loaded.limit == left.limit < 2**63 - 1
    plain, tensors = left._parts()
    del tensors["sample.limit"]
    write_state(tmp_path / "before.pt", {"moments": plain, "tensors": tensors})
    assert SampledMoments.load(tmp_path / "before.pt").limit == 2**63 - 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("labels", lambda t: t + 1),
        ("labels", lambda t: t - 1),
        ("copies", lambda t: t - 1),
        ("keys", lambda t: t.flip(0)),
    ],
)
def test_a_sample_that_no_draw_can_have_left_is_refused(name, change, many, tmp_path):
    plain, tensors = collected(many[0][:500], many[1][:500]).compute()._parts()
    tensors[f"sample.{name}"] = change(tensors[f"sample.{name}"])
    write_state(tmp_path / "moments.pt", {"moments": plain, "tensors": tensors})
    with pytest.raises(DetectorFileError, match="keys out of order, unknown labels or empty places"):
        SampledMoments.load(tmp_path / "moments.pt")


# -- two processes ----------------------------------------------------------------------------------------------------

SPLITS = {"uneven": (0, 9000, 31_000), "second empty": (0, 31_000, 31_000), "first empty": (0, 0, 31_000)}


def run(rank, folder, z, y):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, cuts in SPLITS.items():
        start, stop = cuts[rank : rank + 2]
        metric = SampledClassMoments()
        if stop > start:
            metric = collected(z[start:stop], y[start:stop])
        found = metric.compute()
        scores = FusedRMD().fit_moments(found).predict_features(z[:500])
        results[name] = {"sample": list(found.sample), "scores": scores, "own": sum(map(len, metric.sample_keys))}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.ddp
def test_two_processes_draw_the_sample_of_one(many, tmp_path):
    z, y = many
    mp.spawn(run, (tmp_path, z, y), nprocs=2)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole = collected(z, y).compute()
    expected = FusedRMD().fit_moments(whole).predict_features(z[:500])
    for name, cuts in SPLITS.items():
        for rank, found in enumerate((one[name], two[name])):
            assert all(torch.equal(a, b) for a, b in zip(found["sample"], whole.sample, strict=True))
            torch.testing.assert_close(found["scores"], expected, rtol=1e-5, atol=1e-5)
            assert (found["own"] > 0) == (cuts[rank + 1] > cuts[rank])  # compute() gives each its own state back
