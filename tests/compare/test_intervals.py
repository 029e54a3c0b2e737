"""AUROC by ranks against the framework's, and intervals that hold the truth as often as they say."""

import numpy as np
import pytest
import torch
from pytorch_ood.metrics.functional import auroc as tensor_auroc
from scipy.stats import norm

from rmd_plugin.compare import rows
from rmd_plugin.compare.rows import auroc, auroc_interval, bootstrap, placements


def framework_auroc(id_scores, ood_scores):
    labels = torch.cat([torch.zeros(len(id_scores)), -torch.ones(len(ood_scores))])
    return float(tensor_auroc(torch.from_numpy(np.concatenate([id_scores, ood_scores])), labels))


def draw(rng, n_id, n_ood, truth, spread=1.0):
    return rng.normal(size=n_id), rng.normal(norm.ppf(truth) * np.sqrt(1 + spread**2), spread, size=n_ood)


@pytest.mark.parametrize("decimals", [1, 8])
def test_auroc_is_the_frameworks_and_the_mean_of_the_placements(decimals):
    id_scores, ood_scores = (scores.round(decimals) for scores in draw(np.random.default_rng(0), 400, 30, 0.8))
    value = auroc(id_scores, ood_scores)
    assert value == pytest.approx(framework_auroc(id_scores, ood_scores), abs=1e-12)
    assert [part.mean() for part in placements(id_scores, ood_scores)] == pytest.approx([value, value])


def test_infinite_scores_are_ranked_and_nan_and_empty_sets_refused():
    assert auroc(np.array([np.inf, 0.0]), np.array([np.inf])) == 0.75
    with pytest.raises(ValueError, match="NaN"):
        auroc(np.array([0.0]), np.array([np.nan]))
    with pytest.raises(ValueError, match="got 0 and 1"):
        auroc(np.zeros(0), np.zeros(1))


def test_every_resample_has_the_frameworks_auroc(monkeypatch):
    id_scores, ood_scores = (scores.round(1) for scores in draw(np.random.default_rng(0), 40, 30, 0.8))
    expected = [
        framework_auroc(np.repeat(id_scores, a), np.repeat(ood_scores, b))
        for id_times, ood_times in rows._draw(40, 30, 60, 3)
        for a, b in zip(id_times, ood_times, strict=True)
    ]
    assert bootstrap(id_scores, ood_scores, 60, seed=3) == pytest.approx(expected, abs=1e-12)
    monkeypatch.setattr(rows, "_KEEP_BYTES", 0)  # drawn anew for every detector
    assert bootstrap(id_scores, ood_scores, 60, seed=3) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("n_id", "n_ood", "truth", "spread"),
    [(30, 30, 0.95, 1.0), (30, 30, 0.9, 2.0), (20, 100, 0.9, 1.0)],
)
def test_intervals_of_small_sets_cover_the_truth_as_often_as_they_say(n_id, n_ood, truth, spread):
    rng = np.random.default_rng(0)
    ends = [auroc_interval(*draw(rng, n_id, n_ood, truth, spread)) for _ in range(600)]
    covered = np.mean([low <= truth <= high for low, high in ends])
    # three standard errors of 600 draws are 2.7 %; percentiles of a bootstrap cover 85 to 92 % of these
    assert 0.95 - 0.02 <= covered <= 0.995


def test_intervals_of_large_sets_have_the_width_that_theory_gives():
    id_scores, ood_scores = draw(np.random.default_rng(0), 600, 300, 0.76)
    # DeLong: the variance of AUROC from the placements of each sample among the other set
    wins = (ood_scores[:, None] > id_scores[None]).astype(float)
    spread = np.sqrt(wins.mean(0).var(ddof=1) / 600 + wins.mean(1).var(ddof=1) / 300)
    low, high = auroc_interval(id_scores, ood_scores, resamples=3000)
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.06)


def test_sets_that_are_apart_have_an_interval_that_ends_at_one():
    low, high = auroc_interval(np.zeros(30), np.ones(30))
    assert 0.9 < low < 0.97
    assert high == 1
    assert auroc_interval(np.ones(1), np.zeros(1)) == (0.0, pytest.approx(1 - 0.2, abs=0.15))
