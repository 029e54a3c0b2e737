import numpy as np
import pytest
import torch
from pytorch_ood.metrics.functional import auroc as tensor_auroc

from rmd_plugin.compare import bootstrap
from rmd_plugin.compare.bootstrap import Bootstrap, auroc


def framework_auroc(id_scores, ood_scores):
    labels = torch.cat([torch.zeros(len(id_scores)), -torch.ones(len(ood_scores))])
    return float(tensor_auroc(torch.from_numpy(np.concatenate([id_scores, ood_scores])), labels))


@pytest.mark.parametrize("decimals", [1, 8])
def test_auroc_is_the_frameworks(decimals):
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(size=400).round(decimals), rng.normal(1, size=30).round(decimals)
    assert auroc(id_scores, ood_scores) == pytest.approx(framework_auroc(id_scores, ood_scores), abs=1e-12)
    assert auroc(ood_scores, id_scores) == pytest.approx(1 - auroc(id_scores, ood_scores), abs=1e-12)


def test_auroc_ranks_infinite_scores_and_refuses_nan_and_empty_sets():
    assert auroc(np.array([-np.inf, 0.0]), np.array([np.inf, np.inf])) == 1.0
    assert auroc(np.array([np.inf, 0.0]), np.array([np.inf])) == 0.75
    with pytest.raises(ValueError, match="NaN"):
        auroc(np.array([0.0]), np.array([np.nan]))
    with pytest.raises(ValueError, match="got 0 and 1"):
        auroc(np.zeros(0), np.zeros(1))


@pytest.mark.parametrize("ties", [False, True])
def test_every_resample_has_the_frameworks_auroc(ties):
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(size=40), rng.normal(1, size=30)
    if ties:
        id_scores, ood_scores = id_scores.round(1), ood_scores.round(1)
    boot = Bootstrap(40, 30, resamples=60, seed=3)
    found = boot.distribution(id_scores, ood_scores)
    expected = [
        framework_auroc(np.repeat(id_scores, a), np.repeat(ood_scores, b))
        for id_times, ood_times in boot._draw()
        for a, b in zip(id_times, ood_times, strict=True)
    ]
    assert found == pytest.approx(expected, abs=1e-12)


def test_resamples_are_as_large_as_the_sets_and_follow_the_seed():
    (id_times, ood_times), *_ = Bootstrap(40, 30, seed=1)._draw()
    assert set(id_times.sum(1)) == {40}
    assert set(ood_times.sum(1)) == {30}
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(size=40), rng.normal(1, size=30)
    same = [Bootstrap(40, 30, seed=1).interval(id_scores, ood_scores) for _ in range(2)]
    assert same[0] == same[1] != Bootstrap(40, 30, seed=2).interval(id_scores, ood_scores)


def test_large_sets_are_drawn_anew_with_the_same_result(monkeypatch):
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(size=40), rng.normal(1, size=30)
    kept = Bootstrap(40, 30).interval(id_scores, ood_scores)
    monkeypatch.setattr(bootstrap, "_KEEP_BYTES", 0)
    fresh = Bootstrap(40, 30)
    assert fresh._kept is None
    assert fresh.interval(id_scores, ood_scores) == fresh.interval(id_scores, ood_scores) == kept


def test_the_interval_has_the_width_that_theory_gives():
    rng = np.random.default_rng(0)
    id_scores, ood_scores = rng.normal(size=600), rng.normal(1, size=300)
    # DeLong: the variance of AUROC from the placements of each sample among the other set
    wins = (ood_scores[:, None] > id_scores[None]).astype(float)
    spread = np.sqrt(wins.mean(0).var(ddof=1) / 600 + wins.mean(1).var(ddof=1) / 300)
    low, high = Bootstrap(600, 300, resamples=3000).interval(id_scores, ood_scores)
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.06)
    assert (high + low) / 2 == pytest.approx(framework_auroc(id_scores, ood_scores), abs=0.1 * spread)


def test_perfect_separation_has_no_width():
    assert Bootstrap(5, 5).interval(np.zeros(5), np.ones(5)) == (1.0, 1.0)


def test_infinite_scores_are_ranked_and_nan_is_refused():
    id_scores, ood_scores = np.array([-np.inf, 0.0, 1.0]), np.array([np.inf, np.inf])
    assert Bootstrap(3, 2).interval(id_scores, ood_scores) == (1.0, 1.0)
    with pytest.raises(ValueError, match="NaN"):
        Bootstrap(3, 2).interval(id_scores, np.array([np.nan, 0]))


def test_scores_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(2,\), got \(2,\) and \(2,\)"):
        Bootstrap(3, 2).interval(np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match="at least 1"):
        Bootstrap(0, 2)
