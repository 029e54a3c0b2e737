"""Truths of conformal decisions: against counting by hand, exact laws, and all scores kept."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from rmd_plugin import CalibrationScores
from rmd_plugin.detectors.conformal import Calibration, allowed_alarms, benjamini_hochberg, required_samples

LEVELS = (0.01, 0.05, 0.07, 0.1, 0.29, 0.5)


def by_hand(calibration, scores):
    """The definition, one score at a time."""
    n = len(calibration)
    return np.array([(1 + sum(c >= s for c in calibration)) / (n + 1) for s in scores])


@pytest.mark.parametrize("n", [1, 19, 20, 99, 257])
def test_p_values_are_counted_as_defined_with_ties(n):
    calibration, scores = torch.randint(0, 12, (n,)).double(), torch.randint(-2, 15, (200,)).double()
    found = Calibration(calibration).p_value(scores)
    np.testing.assert_array_equal(found.numpy(), by_hand(calibration.tolist(), scores.tolist()))
    assert bool((found > 0).all())
    assert bool((found <= 1).all())


@pytest.mark.parametrize("n", [19, 20, 99, 100, 257])
@pytest.mark.parametrize("alpha", LEVELS)
def test_a_decision_is_a_p_value_of_at_most_alpha(n, alpha):
    calibration, scores = torch.randint(0, 40, (n,)).double(), torch.arange(-2.0, 45.0).double()
    found = Calibration(calibration)
    if n < required_samples(alpha):
        assert not bool((found.p_value(scores) <= alpha).any())
        with pytest.raises(ValueError, match=f"there are {n} .* needs {required_samples(alpha)}"):
            found.is_ood(scores, alpha=alpha)
    else:
        assert torch.equal(found.is_ood(scores, alpha=alpha), found.p_value(scores) <= alpha)


def test_nan_is_never_in_distribution_and_infinity_is_no_nan():
    found = Calibration(torch.tensor([*range(98), math.inf]))
    scores = torch.tensor([math.nan, math.inf, -math.inf])
    assert found.is_ood(scores, alpha=0.05).tolist() == [True, True, False]
    assert found.p_value(scores).tolist() == [1 / 100, 2 / 100, 1.0]


@pytest.mark.parametrize("confidence", [None, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("alpha", LEVELS)
def test_as_many_samples_are_required_as_the_first_alarm_takes(alpha, confidence):
    n = required_samples(alpha, confidence)
    assert allowed_alarms(n, alpha, confidence) >= 1
    assert n == 0 or allowed_alarms(n - 1, alpha, confidence) == 0


@pytest.mark.parametrize("n", [59, 100, 1000, 10_000])
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.29])
def test_the_rank_with_confidence_is_the_largest_that_the_beta_law_allows(n, alpha):
    for confidence in (0.5, 0.9, 0.95):
        m = allowed_alarms(n, alpha, confidence)
        assert stats.beta.cdf(alpha, m, n + 1 - m) >= confidence > stats.beta.cdf(alpha, m + 1, n - m)


@pytest.mark.parametrize("n", [59, 1000])
def test_a_threshold_with_confidence_holds_for_that_share_of_calibration_sets(n):
    generator = torch.Generator().manual_seed(2)
    draws = torch.rand(600, n, generator=generator, dtype=torch.float64)
    # the false alarms of uniform scores above t are 1 - t
    held = np.mean([1 - Calibration(draw).threshold(0.05, 0.9) <= 0.05 for draw in draws])
    expected = stats.beta.cdf(0.05, m := allowed_alarms(n, 0.05, 0.9), n + 1 - m)
    assert expected >= 0.9
    assert abs(held - expected) < 4 * math.sqrt(0.09 / len(draws))


def test_a_selection_is_that_of_the_definition():
    p_values, fdr = torch.rand(50, dtype=torch.float64) ** 3, 0.2
    ordered = sorted(p_values.tolist())
    last = max(k for k in range(51) if k == 0 or ordered[k - 1] <= fdr * k / 50)
    assert last > 0
    assert benjamini_hochberg(p_values, fdr).tolist() == [p <= ordered[last - 1] for p in p_values.tolist()]
    assert not bool(benjamini_hochberg(torch.tensor([0.9, 0.5, 0.4]), 0.1).any())
    assert benjamini_hochberg(torch.zeros(0), 0.1).shape == (0,)


SERIES = {
    "random": lambda n: torch.randn(n),
    "rising": lambda n: torch.arange(float(n)),
    "falling": lambda n: -torch.arange(float(n)),
    "ties": lambda n: torch.randint(0, 50, (n,)).double(),
}


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("n", [256, 5_000, 60_000])
def test_a_sketch_only_raises_p_values_and_by_no_more_than_it_says(series, n):
    values, metric = SERIES[series](n).double(), CalibrationScores(limit=256)
    for part in values.split(100):
        metric.update(part)
    found, exact = metric.compute(), Calibration(values)
    assert len(found) == n
    assert (found.rank_error == 0) == (n == 256)
    assert found.rank_error <= (math.log2(n / 256) + 1) / 256
    assert len(found.scores) <= 256 * (math.log2(n / 256) + 3)
    queries = torch.cat([values, values + 0.5])
    gap = found.p_value(queries) - exact.p_value(queries)
    assert float(gap.min()) >= 0
    assert float(gap.max()) <= found.rank_error
    assert found.threshold(0.05) >= exact.threshold(0.05)


def test_each_class_is_calibrated_by_its_own_samples_as_by_hand_and_as_a_sketch():
    scores, classes = torch.randn(5000).double(), torch.randint(0, 4, (5000,))
    scores += 3 * classes
    queries, of = torch.randn(300).double() + 4, torch.randint(0, 4, (300,))
    metric, sketch = CalibrationScores(4), CalibrationScores(4, limit=512)
    for one in (metric, sketch):
        for part, labels in zip(scores.split(64), classes.split(64), strict=True):
            one.update(part, labels)
    exact, rough = metric.compute(), sketch.compute()
    thresholds = exact.threshold(0.05)
    assert rough.rank_error > 0
    for k in range(4):
        own = Calibration(scores[classes == k])
        expected = own.p_value(queries[of == k])
        assert torch.equal(exact.p_value(queries, of)[of == k], expected)
        assert float(thresholds[k]) == own.threshold(0.05)
        bound = int(rough.overcount[k]) / (len(own) + 1)
        gap = rough.p_value(queries, of)[of == k] - expected
        assert 0 <= float(gap.min()) <= float(gap.max()) <= bound
    for one in (exact, rough):
        for alpha in (0.01, 0.05, 0.5):
            assert torch.equal(one.is_ood(queries, of, alpha=alpha), one.p_value(queries, of) <= alpha)


def test_a_rare_class_keeps_its_scores_and_the_error_is_that_of_the_worst_class():
    scores, classes = torch.randn(20_000).double(), torch.zeros(20_000, dtype=torch.long)
    classes[::500] = 1
    metric = CalibrationScores(2, limit=512)
    for part, labels in zip(scores.split(100), classes.split(100), strict=True):
        metric.update(part, labels)
    found = metric.compute()
    queries, rare = torch.randn(500).double(), torch.ones(500, dtype=torch.long)
    assert torch.equal(found.p_value(queries, rare), Calibration(scores[classes == 1]).p_value(queries))
    gap = found.p_value(queries, 0 * rare) - Calibration(scores[classes == 0]).p_value(queries)
    assert 0 < float(gap.max()) <= found.rank_error < 0.05
    assert len(found.scores) < 5_000


def test_parts_merge_to_the_calibration_of_the_whole():
    values = torch.randn(1000)
    whole, first, second = (CalibrationScores() for _ in range(3))
    whole.update(values)
    first.update(values[:300])
    second.update(values[300:])
    first.merge_state(second)
    assert torch.equal(first.compute().scores, whole.compute().scores)
    small, other = CalibrationScores(limit=64), CalibrationScores(limit=64)
    for part in values.split(50):
        (small if len(part) and part[0] > 0 else other).update(part)
    small.merge_state(other.metric_state)
    found, exact = small.compute(), whole.compute()
    gap = found.p_value(values) - exact.p_value(values)
    assert len(found) == 1000
    assert 0 <= float(gap.min()) <= float(gap.max()) <= found.rank_error
    with pytest.raises(ValueError, match="num_classes=None, those to merge of num_classes=3"):
        small.merge_state(CalibrationScores(3))


def test_what_cannot_calibrate_is_refused():
    metric = CalibrationScores()
    with pytest.raises(ValueError, match="2 of 3 calibration scores are NaN"):
        metric.update(torch.tensor([1.0, math.nan, math.nan]))
    with pytest.raises(ValueError, match=r"shape \(B,\)"):
        metric.update(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="no classes with num_classes=None"):
        metric.update(torch.zeros(2), torch.zeros(2))
    metric.update(torch.zeros(0))
    with pytest.raises(ValueError, match="no ID sample"):
        metric.compute()
    for alpha in (0, 1, -0.1, "0.05", True):
        with pytest.raises(ValueError, match="alpha must be a number between 0 and 1"):
            Calibration(torch.zeros(99)).threshold(alpha)
