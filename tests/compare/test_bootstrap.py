import numpy as np
import pytest
import torch
from pytorch_ood.metrics.functional import auroc

from rmd_plugin.compare import bootstrap
from rmd_plugin.compare.bootstrap import Bootstrap


def framework_auroc(known, unknown):
    labels = torch.cat([torch.zeros(len(known)), -torch.ones(len(unknown))])
    return float(auroc(torch.from_numpy(np.concatenate([known, unknown])), labels))


@pytest.mark.parametrize("ties", [False, True])
def test_every_resample_has_the_frameworks_auroc(ties):
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(size=40), rng.normal(1, size=30)
    if ties:
        known, unknown = known.round(1), unknown.round(1)
    boot = Bootstrap(40, 30, resamples=60, seed=3)
    found = boot.distribution(known, unknown)
    expected = [
        framework_auroc(np.repeat(known, a), np.repeat(unknown, b))
        for times_known, times_unknown in boot._draw()
        for a, b in zip(times_known, times_unknown, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-12)


def test_resamples_are_as_large_as_the_sets_and_follow_the_seed():
    (times_known, times_unknown), *_ = Bootstrap(40, 30, seed=1)._draw()
    assert set(times_known.sum(1)) == {40}
    assert set(times_unknown.sum(1)) == {30}
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(size=40), rng.normal(1, size=30)
    same = [Bootstrap(40, 30, seed=1).interval(known, unknown) for _ in range(2)]
    assert same[0] == same[1] != Bootstrap(40, 30, seed=2).interval(known, unknown)


def test_large_sets_are_drawn_anew_with_the_same_result(monkeypatch):
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(size=40), rng.normal(1, size=30)
    kept = Bootstrap(40, 30).interval(known, unknown)
    monkeypatch.setattr(bootstrap, "_KEEP_BYTES", 0)
    fresh = Bootstrap(40, 30)
    assert fresh._kept is None
    assert fresh.interval(known, unknown) == fresh.interval(known, unknown) == kept


def test_the_interval_has_the_width_that_theory_gives():
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(size=600), rng.normal(1, size=300)
    # DeLong: the variance of AUROC from the placements of each sample among the other set
    wins = (unknown[:, None] > known[None]).astype(float)
    spread = np.sqrt(wins.mean(0).var(ddof=1) / 600 + wins.mean(1).var(ddof=1) / 300)
    low, high = Bootstrap(600, 300, resamples=3000).interval(known, unknown)
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.06)
    assert (high + low) / 2 == pytest.approx(framework_auroc(known, unknown), abs=0.1 * spread)


def test_perfect_separation_has_no_width():
    assert Bootstrap(5, 5).interval(np.zeros(5), np.ones(5)) == (1.0, 1.0)


def test_infinite_scores_are_ranked_and_nan_is_refused():
    known, unknown = np.array([-np.inf, 0.0, 1.0]), np.array([np.inf, np.inf])
    assert Bootstrap(3, 2).interval(known, unknown) == (1.0, 1.0)
    with pytest.raises(ValueError, match="NaN"):
        Bootstrap(3, 2).interval(known, np.array([np.nan, 0]))


def test_scores_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(2,\), got \(2,\) and \(2,\)"):
        Bootstrap(3, 2).interval(np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match="at least 1"):
        Bootstrap(0, 2)
