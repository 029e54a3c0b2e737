"""The promises of conformal decisions, for the scores of fitted detectors: exact laws over 1,000 random splits.

The splits are drawn from a pool of scores of samples that the detectors were not fitted on. Ranks decide, so the laws
are exact for splits of one pool, and the splits are independent. Drawn with replacement, the pool is the population.
"""

import numpy as np
import pytest
import torch
from conftest import make_blobs
from pytorch_ood.detector import KNN, MaxSoftmax
from scipy import stats
from torch import nn

from rmd_plugin import RMD, Calibrated
from rmd_plugin.detectors.conformal import Calibration, benjamini_hochberg

SPLITS, ALPHA, FITTED = 1000, 0.05, 500
TESTS = 500  # samples that are decided in each split
NAMES, SIZES = ("rmd", "knn", "msp"), (19, 99, 1000)
QUICK = (("rmd", 19), ("knn", 99), ("msp", 1000))
EVERY = [pytest.param(name, n, marks=() if (name, n) in QUICK else pytest.mark.slow) for name in NAMES for n in SIZES]


@pytest.fixture(scope="module")
def detectors():
    """Fitted detectors on inputs, ID samples that they have not seen, and OOD samples for each."""
    z, y, mixed = make_blobs(per_class=900, separation=0.7, dtype=torch.float32)
    head = nn.Linear(z.shape[1], 5)
    with torch.no_grad():  # linear discriminants, flat enough that no softmax is rounded to 1
        means = torch.stack([z[:FITTED][y[:FITTED] == k].mean(0) for k in range(5)])
        head.weight.copy_(0.05 * means)
        head.bias.copy_(-0.025 * means.square().sum(1))
        doubt = -torch.linalg.pinv(head.weight - head.weight.mean(0)) @ (head.bias - head.bias.mean())
    found = {"rmd": RMD(nn.Identity()), "knn": KNN(nn.Identity(), k=5), "msp": MaxSoftmax(head)}
    for name in ("rmd", "knn"):
        found[name].fit_features(z[:FITTED], y[:FITTED])
    far, amidst = 5 * mixed[40:], doubt + 0.02 * mixed[40:]
    return found, z[FITTED:], {"rmd": far, "knn": far, "msp": amidst}


@pytest.fixture(scope="module")
def pools(detectors):
    """Scores of the ID and the OOD samples by each detector, all different, and rounded to a few values."""
    found, inlier, outlier = detectors
    result = {}
    for name, detector in found.items():
        with torch.no_grad():
            exact = detector.predict(inlier).double(), detector.predict(outlier[name]).double()
        rounded = tuple((3 * scores / exact[0].std()).round() for scores in exact)
        assert len(exact[0].unique()) >= len(inlier) - 2  # float32
        assert 5 < len(rounded[0].unique()) < 50
        result[name, "different"], result[name, "ties"] = exact, rounded
    return result


def split(pool, n):
    """A calibration on n scores of the pool, and others of it to decide."""
    drawn = pool[torch.randperm(len(pool))[: n + TESTS]]
    return Calibration(drawn[:n]), drawn[n:]


def uniforms(alarms, n):
    """Uniform in [0, 1] if the numbers of alarms follow the law of exchangeable scores; smaller if they are fewer."""
    m = round(ALPHA * (n + 1))
    law, alarms = stats.betabinom(TESTS, m, n + 1 - m), np.asarray(alarms)
    return law.cdf(alarms - 1) + np.random.default_rng(0).uniform(size=len(alarms)) * law.pmf(alarms)


@pytest.mark.parametrize(("name", "n"), EVERY)
def test_false_alarms_follow_the_exact_law(pools, name, n):
    pool, _ = pools[name, "different"]
    splits = (split(pool, n) for _ in range(SPLITS))
    alarms = [int(found.is_ood(scores, alpha=ALPHA).sum()) for found, scores in splits]
    assert stats.kstest(uniforms(alarms, n), "uniform").pvalue > 0.001


@pytest.mark.parametrize(("name", "n"), EVERY)
def test_with_ties_there_are_fewer_false_alarms_and_at_random_exactly_as_many(pools, name, n):
    pool, _ = pools[name, "ties"]
    generator, alarms, p_values = torch.Generator().manual_seed(1), [], []
    for _ in range(SPLITS):
        found, scores = split(pool, n)
        alarms.append(int(found.is_ood(scores, alpha=ALPHA).sum()))
        p_values.append(float(found.p_value(scores[:1], generator=generator)))
    assert stats.kstest(uniforms(alarms, n), "uniform", alternative="less").pvalue > 0.001
    assert stats.kstest(p_values, "uniform").pvalue > 0.001


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*sklearn.utils.parallel.delayed")  # KNN in joblib's threads
@pytest.mark.parametrize(("name", "n"), QUICK)
def test_the_law_holds_from_inputs_to_decisions(detectors, name, n):
    found, inlier, _ = detectors
    detector, alarms = Calibrated(found[name], ALPHA), []
    for _ in range(SPLITS):
        drawn = inlier[torch.randperm(len(inlier))[: n + TESTS]]
        detector.calibrate([(part, torch.zeros(len(part))) for part in drawn[:n].split(400)])
        alarms.append(int(detector.is_ood(drawn[n:]).sum()))
    assert stats.kstest(uniforms(alarms, n), "uniform").pvalue > 0.001


@pytest.mark.parametrize("kind", ["different", "ties"])
@pytest.mark.parametrize("name", NAMES)
def test_a_threshold_with_confidence_holds_for_that_share_of_calibration_sets(pools, name, kind):
    pool, _ = pools[name, kind]
    for n, confidence in ((59, 0.95), (200, 0.9)):
        draws = pool[torch.randint(len(pool), (400, n))]
        alarms = [(pool > Calibration(draw).threshold(ALPHA, confidence)).double().mean() for draw in draws]
        held = np.mean([float(rate) <= ALPHA for rate in alarms])
        assert held >= confidence - 4 * np.sqrt(confidence * (1 - confidence) / 400)


@pytest.mark.parametrize("kind", ["different", "ties"])
@pytest.mark.parametrize("name", NAMES)
def test_a_selection_has_at_most_its_share_of_false_discoveries(pools, name, kind):
    (pool, outlier), fdr = pools[name, kind], 0.2
    shares, found = [], []
    for _ in range(400):
        calibration, inlier = pool[torch.randint(len(pool), (580,))].split([500, 80])
        others = outlier[torch.randint(len(outlier), (20,))]
        selected = benjamini_hochberg(Calibration(calibration).p_value(torch.cat([inlier, others])), fdr)
        shares.append(float(selected[:80].sum()) / max(1, int(selected.sum())))
        found.append(float(selected[80:].double().mean()))
    assert np.mean(shares) <= 0.8 * fdr + 3 * np.std(shares) / 20
    assert np.mean(found) > 0.1
