"""Conformal decisions: against counting by hand, exact laws over random splits, and around detectors of any kind."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from conftest import make_blobs
from pytorch_ood.api import RequiresFittingException
from pytorch_ood.detector import KNN, ODIN, EnergyBased, MaxSoftmax
from pytorch_ood.detector import Mahalanobis as FrameworkMahalanobis
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import (
    RMD,
    Calibrated,
    CalibrationScores,
    FlowLikelihood,
    FusedRMD,
    MarginalMahalanobis,
    NumericalWarning,
    load_detector,
)
from rmd_plugin.benchmarks import Intents
from rmd_plugin.detectors.conformal import Calibration, allowed_alarms, benjamini_hochberg, required_samples

SLOW = pytest.mark.slow
LEVELS = (0.01, 0.05, 0.07, 0.29, 0.5)

# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 19, 100, 257])
def test_p_values_are_counted_as_defined_and_decide_with_ties(n):
    own, scores = torch.randint(0, 12, (n,)).double(), torch.arange(-2.0, 15.0).double()
    calibration = Calibration(own)
    p_values = calibration.p_value(scores)
    expected = [(1 + sum(c >= s for c in own.tolist())) / (n + 1) for s in scores.tolist()]
    np.testing.assert_array_equal(p_values.numpy(), expected)
    for alpha in LEVELS:
        if n < required_samples(alpha):
            assert not bool((p_values <= alpha).any())
            with pytest.raises(ValueError, match=f"needs {required_samples(alpha)}"):
                calibration.is_ood(scores, alpha=alpha)
        else:
            assert torch.equal(calibration.is_ood(scores, alpha=alpha), p_values <= alpha)


def test_nan_is_never_in_distribution_and_infinity_is_no_nan():
    calibration = Calibration(torch.tensor([*range(98), math.inf]))
    scores = torch.tensor([math.nan, math.inf, -math.inf])
    assert calibration.is_ood(scores, alpha=0.05).tolist() == [True, True, False]
    assert calibration.p_value(scores).tolist() == [1 / 100, 2 / 100, 1.0]


@pytest.mark.parametrize("confidence", [None, 0.8, 0.999])
def test_as_many_samples_are_required_as_the_first_alarm_takes(confidence):
    for alpha in LEVELS:
        n = required_samples(alpha, confidence)
        assert allowed_alarms(n, alpha, confidence) >= 1
        assert n == 0 or allowed_alarms(n - 1, alpha, confidence) == 0


@pytest.mark.parametrize("n", [59, 1000, 10_000])
def test_the_rank_with_confidence_is_the_largest_that_the_beta_law_allows(n):
    for alpha in (0.05, 0.29):
        for confidence in (0.5, 0.95):
            m = allowed_alarms(n, alpha, confidence)
            assert stats.beta.cdf(alpha, m, n + 1 - m) >= confidence > stats.beta.cdf(alpha, m + 1, n - m)


def test_a_selection_is_that_of_benjamini_and_hochberg():
    p_values, fdr = torch.rand(50, dtype=torch.float64) ** 3, 0.2
    expected = stats.false_discovery_control(p_values.numpy()) <= fdr
    assert 0 < expected.sum() < 50
    np.testing.assert_array_equal(benjamini_hochberg(p_values, fdr), expected)
    assert not bool(benjamini_hochberg(torch.tensor([0.9, 0.5, 0.4]), 0.1).any())
    assert benjamini_hochberg(torch.zeros(0), 0.1).shape == (0,)


def test_each_class_is_calibrated_by_its_own_samples():
    scores, classes = torch.randn(5000).double(), torch.randint(0, 4, (5000,))
    scores = ((scores + 3 * classes) * 20).round()  # with ties
    queries, of = (20 * torch.randn(300).double() + 80).round(), torch.randint(0, 4, (300,))
    metric = CalibrationScores(4)
    for part, labels in zip(scores.split(64), classes.split(64), strict=True):
        metric.update(part, labels)
    calibration = metric.compute()
    for k in range(4):
        own = Calibration(scores[classes == k])
        assert torch.equal(calibration.p_value(queries, of)[of == k], own.p_value(queries[of == k]))
        assert float(calibration.threshold(0.05)[k]) == own.threshold(0.05)
    for alpha in (0.01, 0.5):
        assert torch.equal(calibration.is_ood(queries, of, alpha=alpha), calibration.p_value(queries, of) <= alpha)
    with pytest.raises(ValueError, match="classes"):
        calibration.p_value(queries)


def test_parts_merge_to_the_calibration_of_the_whole():
    values = torch.randn(1000)
    first, second = CalibrationScores(), CalibrationScores()
    first.update(values[:300])
    second.update(values[300:])
    first.merge_state(second)
    assert torch.equal(first.compute().scores, values.double().sort().values)
    with pytest.raises(ValueError, match="CalibrationScores"):
        first.merge_state({"scores": values})


def test_what_cannot_calibrate_is_refused():
    metric = CalibrationScores()
    for scores, classes, key in (
        (torch.tensor([1.0, math.nan]), None, "1 of 2"),
        (torch.zeros(2, 2), None, "shape"),
        (torch.zeros(2), torch.zeros(2), "classes"),
    ):
        with pytest.raises(ValueError, match=key):
            metric.update(scores, classes)
    metric.update(torch.zeros(0))
    with pytest.raises(ValueError, match="no ID sample"):
        metric.compute()
    for alpha in (0, 1, -0.1, "0.05", True):
        with pytest.raises(ValueError, match="alpha"):
            Calibration(torch.zeros(99)).threshold(alpha)
    with pytest.raises(ValueError, match="confidence"):
        Calibration(torch.zeros(99)).threshold(0.05, 95)


# -- the laws, for the scores of fitted detectors ---------------------------------------------------------------------

SPLITS, TESTS, ALPHA = 1000, 500, 0.05


@pytest.fixture(scope="module")
def pools():
    """Scores of ID and OOD samples, and the same rounded to a few values.

    The splits are drawn from the pool: ranks decide, so the laws are exact for splits of one pool, of any detector.
    """
    z, y, mixed = make_blobs(per_class=900, separation=0.7, dtype=torch.float32)
    detector = RMD().fit_features(z[:500], y[:500])
    exact = detector.predict_features(z[500:]).double(), detector.predict_features(5 * mixed[40:]).double()
    return {"different": exact, "ties": tuple((3 * scores / exact[0].std()).round() for scores in exact)}


def uniforms(alarms, n):
    """Uniform in [0, 1] if the numbers of alarms follow the law of exchangeable scores; smaller if they are fewer."""
    m = round(ALPHA * (n + 1))
    law, alarms = stats.betabinom(TESTS, m, n + 1 - m), np.asarray(alarms)
    return law.cdf(alarms - 1) + np.random.default_rng(0).uniform(size=len(alarms)) * law.pmf(alarms)


@pytest.mark.parametrize("n", [19, 99, 1000])
def test_false_alarms_follow_the_exact_law_and_with_ties_there_are_fewer(pools, n):
    generator = torch.Generator().manual_seed(1)
    for kind in ("different", "ties"):
        pool, alarms, p_values = pools[kind][0], [], []
        for _ in range(SPLITS):
            drawn = pool[torch.randperm(len(pool))[: n + TESTS]]
            calibration, scores = Calibration(drawn[:n]), drawn[n:]
            alarms.append(int(calibration.is_ood(scores, alpha=ALPHA).sum()))
            p_values.append(float(calibration.p_value(scores[:1], generator=generator)))
        alternative = "two-sided" if kind == "different" else "less"
        assert stats.kstest(uniforms(alarms, n), "uniform", alternative=alternative).pvalue > 0.001
        assert stats.kstest(p_values, "uniform").pvalue > 0.001  # at random among ties: exactly uniform


@pytest.mark.parametrize("kind", ["different", "ties"])
def test_a_threshold_with_confidence_holds_for_that_share_of_calibration_sets(pools, kind):
    pool, _ = pools[kind]
    for n, confidence in ((59, 0.95), (200, 0.9)):
        draws = pool[torch.randint(len(pool), (400, n))]
        alarms = [(pool > Calibration(draw).threshold(ALPHA, confidence)).double().mean() for draw in draws]
        held = np.mean([float(rate) <= ALPHA for rate in alarms])
        assert held >= confidence - 4 * np.sqrt(confidence * (1 - confidence) / 400)


@pytest.mark.parametrize("kind", ["different", "ties"])
def test_a_selection_has_at_most_its_share_of_false_discoveries(pools, kind):
    (pool, outlier), fdr = pools[kind], 0.2
    shares, found = [], []
    for _ in range(400):
        calibration, inlier = pool[torch.randint(len(pool), (580,))].split([500, 80])
        others = outlier[torch.randint(len(outlier), (20,))]
        selected = benjamini_hochberg(Calibration(calibration).p_value(torch.cat([inlier, others])), fdr)
        shares.append(float(selected[:80].sum()) / max(1, int(selected.sum())))
        found.append(float(selected[80:].double().mean()))
    assert np.mean(shares) <= 0.8 * fdr + 3 * np.std(shares) / 20
    assert np.mean(found) > 0.1


# -- around detectors -------------------------------------------------------------------------------------------------


def make_network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


@pytest.mark.parametrize("make", [MaxSoftmax, EnergyBased])
def test_a_detector_on_logits_decides_from_inputs_and_from_logits(make, tmp_path):
    network = make_network().eval()
    x, y = torch.randn(500, 12), torch.randint(0, 5, (500,))
    detector = Calibrated(make(network)).calibrate(DataLoader(TensorDataset(x, y), 64))
    logits = network(x).detach()
    assert torch.equal(detector.is_ood(x), detector.is_ood_logits(logits))
    assert torch.equal(detector.p_value(x), detector.p_value_logits(logits))
    assert int(detector.is_ood(x).sum()) == 24  # above the 25th largest of their own 500 scores
    assert torch.equal(detector.select(x, 0.5), detector.select_logits(logits, 0.5))
    detector.save(tmp_path / "detector")
    assert torch.equal(Calibrated.load(tmp_path / "detector", network).is_ood(x), detector.is_ood(x))


def test_the_class_of_logits_is_the_predicted_one():
    logits = torch.randn(500, 5)
    predicted = logits.argmax(1)
    detector = Calibrated(MaxSoftmax(None), per_class=True).calibrate_logits(logits)
    for k in range(5):
        own = logits[predicted == k]
        alone = Calibrated(MaxSoftmax(None)).calibrate_logits(own)
        assert torch.equal(detector.p_value_logits(own), alone.p_value_logits(own))


def test_a_detector_that_differentiates_is_calibrated_too():
    x = torch.randn(60, 12)
    detector = Calibrated(ODIN(make_network().eval(), norm_std=None))
    with torch.inference_mode():
        detector.calibrate(DataLoader(TensorDataset(x, torch.zeros(60)), 20))
    assert torch.equal(detector.p_value(x) <= 0.05, detector.is_ood(x))


def test_calibrating_leaves_out_ood_labels_and_leaves_the_network_alone():
    z, y, _ = make_blobs(dtype=torch.float32)
    network = make_network()[:3].train()
    before, labels = copy.deepcopy(network.state_dict()), torch.where(torch.arange(300) % 3 == 0, -1, y)
    loader = DataLoader(TensorDataset(z, labels), 32)
    detector = Calibrated(RMD(network, shrinkage="oas")).fit(loader).calibrate(loader)
    assert len(detector.calibration) == 200
    assert network.training
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    by_features = copy.deepcopy(detector).calibrate_features(network.eval()(z).detach(), labels)
    torch.testing.assert_close(by_features.calibration.scores, detector.calibration.scores)
    assert len(detector.calibrate_scores(torch.arange(5.0), torch.tensor([0, -1, 2, -5, 1])).calibration) == 3
    for scores in ([0.5, 0.25], np.array([0.5, 0.25])):
        assert detector.calibrate_scores(scores).calibration.scores.tolist() == [0.25, 0.5]


@pytest.mark.parametrize("per_class", [False, True])
def test_decisions_are_those_of_the_network_in_evaluation_mode(per_class):
    z, y, x = make_blobs(dtype=torch.float32)
    network = make_network().eval()
    detector = Calibrated(MaxSoftmax(network), 0.2, per_class=per_class)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # small classes
        detector.calibrate([(z, y)])
    expected = detector.is_ood_logits(network(x).detach())
    network.train()
    assert torch.equal(detector.is_ood(x[:7]), expected[:7])
    assert network.training


@pytest.mark.parametrize("per_class", [False, True])
def test_a_network_that_is_set_later_is_the_one_that_decides(per_class):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = Calibrated(RMD(), 0.2, per_class=per_class).fit_features(z, y).calibrate_features(z)
    detector.encoder = nn.Flatten()
    assert torch.equal(detector.is_ood(x), detector.is_ood_features(x))
    detector.encoder, detector.keep_moments = lambda inputs: -inputs, True
    assert torch.equal(detector.is_ood(-x), detector.is_ood_features(x))
    assert torch.equal(detector.predict(-x), detector.predict_features(x))
    assert "moments.counts" in detector.state_dict()["inner"]["state"]["tensors"]


def test_a_new_fit_and_a_change_forget_the_calibration_and_a_refusal_does_not():
    z, y, x = make_blobs()
    detector = Calibrated(RMD(nn.Identity()))
    with pytest.raises(RequiresFittingException, match="calibrate"):
        detector.threshold()
    detector.fit_features(z, y)
    for change in (
        lambda: detector.fit_features(z, y),
        lambda: detector.fit_moments(detector.moments),
        lambda: detector.fit([(z, y)]),
        lambda: detector.update(z[:20], y[:20]),
        lambda: detector.forget(z[:20], y[:20]),
    ):
        flags = detector.calibrate_features(z).is_ood_features(x)
        with pytest.raises(ValueError, match="more samples"):
            detector.forget(z.repeat(3, 1), y.repeat(3))
        assert torch.equal(detector.is_ood_features(x), flags)
        assert change() is detector
        with pytest.raises(RequiresFittingException, match="calibrate"):
            detector.is_ood_features(z)
    assert detector.calibrate_features(z).add_class(z[:20]) == 5
    assert detector.calibration is None


def test_a_fit_that_fails_leaves_no_calibration_of_another_detector():
    z, y, _ = make_blobs(dtype=torch.float32)
    for use in (lambda d: d.fit_features(z[:2], y[:2] + 3), lambda d: d.fit_calibrate_features(z[:3], y[:3], folds=2)):
        detector = Calibrated(FrameworkMahalanobis(None)).fit_features(z, y).calibrate_features(z)
        with pytest.raises((IndexError, AssertionError, RuntimeError)):
            use(detector)
        with pytest.raises(RequiresFittingException, match="calibrate"):
            detector.is_ood_features(z)


def test_scores_that_are_nan_cannot_calibrate_folds():
    class Broken(KNN):
        def predict_features(self, z):
            return super().predict_features(z).where(z[:, 0] > 0, torch.nan)

    z, y, _ = make_blobs()
    with pytest.raises(ValueError, match="NaN"):
        Calibrated(Broken(None, k=3)).fit_calibrate_features(z, y, folds=3)


def test_the_error_of_too_few_samples_is_about_the_class_that_has_too_few():
    scores, classes = torch.arange(95.0), torch.tensor([0] * 60 + [1] * 20 + [2] * 15)
    with pytest.raises(ValueError, match=r"alpha=0\.04 needs 24 .* class 1, there are 20"):
        Calibration(scores, classes).threshold(0.04)


def test_each_class_has_its_own_threshold_and_small_ones_share_that_of_all():
    z, y, _ = make_blobs(per_class=100)
    z[y == 1] += 0.4 * torch.randn(100, 12).double() * z.std()  # a class with larger scores
    few = (y != 4) | (torch.arange(len(y)) < 50)
    detector = Calibrated(RMD(), per_class=True).fit_features(z, y)
    with pytest.warns(NumericalWarning, match=": .4"):
        detector.calibrate_features(z[few])
    nearest, scores, flags = detector.nearest_class(z), detector.predict_features(z), detector.is_ood_features(z)
    assert torch.equal(flags, detector.p_value_features(z) <= 0.05)
    assert torch.equal(flags, scores > detector.threshold()[nearest])
    pooled = Calibrated(detector.detector).calibrate_features(z[few])
    assert float(detector.threshold()[4]) == pooled.threshold()
    own = Calibrated(detector.detector).calibrate_scores(scores[few & (nearest == 1)])
    assert torch.equal(detector.p_value_features(z[nearest == 1]), own.p_value_features(z[nearest == 1]))
    for result, expected in zip(detector.judge(z), (scores, nearest, detector.p_value_features(z), flags), strict=True):
        assert torch.equal(result, expected)
    with pytest.raises(ValueError, match="999"):
        detector.is_ood_features(z, 0.001)


@pytest.mark.parametrize(
    ("use", "error", "key"),
    [
        (lambda z: Calibrated(RMD), TypeError, "instance"),
        (lambda z: Calibrated(Calibrated(RMD())), TypeError, "calibrated yet"),
        (lambda z: Calibrated(RMD(), 5), ValueError, "alpha"),
        (lambda z: Calibrated(MaxSoftmax(None)).calibrate_logits(z, 0 * z[:, 0] - 1), ValueError, "no ID sample"),
        (lambda z: Calibrated(MaxSoftmax(make_network())).calibrate([z]), ValueError, "pairs"),
        (lambda z: Calibrated(KNN(None)).calibrate_logits(z), TypeError, "logits"),
        (lambda z: Calibrated(MaxSoftmax(None)).calibrate_logits(torch.zeros(2, 3, 4, 4)), ValueError, "one score"),
        (lambda z: Calibrated(RMD(), per_class=True).calibrate_scores(z[:, 0]), ValueError, "CalibrationScores"),
    ],
)
def test_what_cannot_decide_is_refused(use, error, key):
    with pytest.raises(error, match=key):
        use(make_blobs()[0])


def test_a_calibration_per_class_needs_classes_and_an_export_needs_a_module(blobs):
    z, y, _ = blobs
    for detector in (MarginalMahalanobis(), KNN(None, k=5)):
        with pytest.raises(ValueError, match="per_class"):
            Calibrated(detector, per_class=True).fit_features(z, y).calibrate_features(z)
    with pytest.raises(TypeError, match="to_module"):
        Calibrated(detector).calibrate_features(z).to_module()


@pytest.mark.parametrize("make", [RMD, FusedRMD, lambda encoder: KNN(encoder, k=5)], ids=["rmd", "fused", "knn"])
def test_rows_with_nan_are_ood_with_the_smallest_p_value_for_every_detector(make, tmp_path):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = Calibrated(make(nn.Identity())).fit_features(z, y).calibrate_features(z)
    clean = detector.p_value_features(x)
    x[3, 2], x[7] = torch.nan, torch.inf
    expected = clean.index_fill(0, torch.tensor([3, 7]), 1 / 301)
    for p_values, flags in (
        (detector.p_value_features(x), detector.is_ood_features(x)),
        (detector.p_value(x), detector.is_ood(x)),
    ):
        assert torch.equal(p_values, expected)
        assert torch.equal(flags, expected <= 0.05)
    detector.save(tmp_path / "detector")
    assert torch.equal(load_detector(tmp_path / "detector").p_value_features(x), expected)


@pytest.mark.parametrize("make", [RMD, lambda net: KNN(net, k=5), MaxSoftmax], ids=["rmd", "knn", "msp"])
def test_inputs_may_be_dicts_and_a_sample_that_the_network_makes_nan_is_ood(make):
    class Net(nn.Module):
        def forward(self, inputs):
            return inputs["x"] / inputs["scale"]

    z, y, x = make_blobs(dtype=torch.float32)
    scale = torch.ones(len(x), 1)
    x[4], scale[4] = 0.0, 0.0
    detector = Calibrated(make(Net())).to("cpu")
    if not isinstance(detector.detector, MaxSoftmax):
        detector.fit_features(z, y)
    detector.calibrate([({"x": z, "scale": torch.ones(len(z), 1)}, y)])
    p_values = detector.p_value({"x": x, "scale": scale})
    assert p_values[4] == 1 / (len(z) + 1)
    assert torch.equal(detector.is_ood({"x": x, "scale": scale}), p_values <= 0.05)
    others = torch.arange(len(x)) != 4
    predict = "logits" if isinstance(detector.detector, MaxSoftmax) else "features"
    assert torch.equal(getattr(detector, f"p_value_{predict}")(x[others]), p_values[others])


@pytest.mark.parametrize("make", [RMD, lambda: KNN(None, k=5)], ids=["rmd", "knn"])
def test_decisions_of_no_samples_are_none(make):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = Calibrated(make()).fit_features(z, y).calibrate_features(z)
    for decide in (detector.is_ood_features, detector.p_value_features, detector.select_features):
        assert decide(x[:0]).shape == (0,)


# -- folds in place of held-out data ----------------------------------------------------------------------------------


def flow():
    return FlowLikelihood(max_epochs=1, progress=False)


@pytest.mark.parametrize("make", [RMD, FusedRMD, flow, lambda: KNN(None, k=3)], ids=["rmd", "fused", "flow", "knn"])
def test_cross_calibrated_p_values_are_counted_by_the_detector_of_each_fold(make):
    z, y, x = make_blobs(per_class=30)
    keep = torch.arange(150) % 15 != 0
    detector = Calibrated(make(), 0.1).fit_calibrate_features(z, torch.where(keep, y, -1), folds=4)
    z, y = z[keep], y[keep]
    fold_of = torch.randperm(140, generator=torch.Generator().manual_seed(0)) % 4
    reached = torch.zeros(len(x))
    for fold in range(4):
        alone = make().fit_features(z[fold_of != fold], y[fold_of != fold])
        left_out, scores = alone.predict_features(z[fold_of == fold]), alone.predict_features(x)
        reached += (left_out >= scores[:, None]).sum(1)
    torch.testing.assert_close(detector.p_value_features(x), (1 + reached).double() / 141)
    assert torch.equal(detector.is_ood_features(x), detector.p_value_features(x) <= 0.1)
    torch.testing.assert_close(detector.predict_features(x), make().fit_features(z, y).predict_features(x))
    assert "140 samples of 4 folds" in repr(detector)


@pytest.mark.parametrize(("make", "per_class"), [(RMD, 4), (RMD, 40), (FusedRMD, 4)])
@pytest.mark.filterwarnings("ignore::rmd_plugin.NumericalWarning")
def test_false_alarms_of_a_cross_calibration_are_below_twice_alpha_with_few_shots_and_many(make, per_class):
    alarms = []
    for seed in range(20):
        torch.manual_seed(seed)
        means, width = torch.randn(8, 40), 40
        y, new = torch.arange(8 * per_class) % 8, torch.arange(500) % 8
        z, x = means[y] + torch.randn(len(y), width), means[new] + torch.randn(500, width)
        detector = Calibrated(make(), 0.1).fit_calibrate_features(z, y, folds=5)
        alarms.append(float(detector.is_ood_features(x).float().mean()))
    assert 0 < np.mean(alarms) < 0.15  # 2 alpha is promised, with few shots there are fewer than alpha
    assert per_class == 4 or np.mean(alarms) > 0.05


@pytest.mark.filterwarnings("ignore:.*rank 381")
def test_real_features_are_flagged_as_often_as_alpha_without_held_out_data():
    data = Intents()

    def part(split):
        rows = [split[i] for i in range(len(split))]
        return torch.stack([z for z, _ in rows]), torch.tensor([int(y) for _, y in rows])

    detector = Calibrated(RMD(), 0.05).fit_calibrate_features(*part(data.fit_set()), folds=5)
    assert 0.03 < float(detector.is_ood_features(part(data.test_in)[0]).float().mean()) < 0.08
    assert float(detector.is_ood_features(part(data.test_oods[0])[0]).float().mean()) > 0.8


@pytest.mark.parametrize("make", [RMD, FusedRMD, lambda encoder: KNN(encoder, k=5)], ids=["rmd", "fused", "knn"])
def test_a_cross_calibration_is_saved_and_runs_the_network_once(make, tmp_path):
    z, y, x = make_blobs(dtype=torch.float32)
    passes = []

    class Counted(nn.Module):
        def forward(self, batch):
            passes.append(len(batch))
            return batch

    encoder = Counted()
    detector = Calibrated(make(encoder)).fit_calibrate(DataLoader(TensorDataset(z, y), 100), folds=5)
    assert sum(passes) == len(z)
    expected = detector.p_value_features(x)
    assert torch.equal(detector.p_value(x), expected)
    assert sum(passes) == len(z) + len(x)
    assert all(fold.encoder is None for fold in detector.fold_detectors if not isinstance(fold, KNN))
    detector.save(tmp_path / "detector")
    loaded = load_detector(tmp_path / "detector")
    assert torch.equal(loaded.p_value_features(x), expected)
    assert torch.equal(loaded.judge(x)[3], detector.is_ood(x))
    x[0] = torch.nan
    assert float(loaded.p_value_features(x)[0]) == 1 / 301
    detector.calibrate_features(z)
    assert detector.fold_detectors == []


@pytest.mark.parametrize(
    ("use", "error", "key"),
    [
        (lambda d, z, y: d.threshold(), ValueError, "threshold"),
        (lambda d, z, y: d.is_ood_features(z, confidence=0.9), ValueError, "confidence"),
        (lambda d, z, y: d.is_ood_features(z, 0.001), ValueError, "999"),
        (lambda d, z, y: d.drift_alarm(), ValueError, "held-out"),
        (lambda d, z, y: d.fit_calibrate_features(z, y, folds=301), ValueError, "300"),
        (lambda d, z, y: d.fit_calibrate([]), ValueError, "empty"),
        (lambda d, z, y: Calibrated(RMD(), per_class=True).fit_calibrate_features(z, y), ValueError, "per_class"),
        (lambda d, z, y: Calibrated(MaxSoftmax(None)).fit_calibrate_features(z, y), TypeError, "features"),
    ],
)
def test_what_folds_cannot_do_is_refused(use, error, key):
    z, y, _ = make_blobs()
    with pytest.raises(error, match=key):
        use(Calibrated(RMD()).fit_calibrate_features(z, y, folds=2), z, y)


# -- one graph --------------------------------------------------------------------------------------------------------


def exported(case):
    z, y, x = make_blobs(dtype=torch.float32, per_class=100)
    # no calibration sample: the last bit of a graph's score may be another one, and a tie no tie
    queries = torch.cat([z[:300], x, torch.full((1, 12), math.nan)])
    if case == "folds":
        return Calibrated(FusedRMD()).fit_calibrate_features(z[300:], y[300:], folds=3), queries
    if case == "logits":
        return Calibrated(MaxSoftmax(None), alpha=0.1, per_class=True).calibrate_logits(z[300:]), queries
    detector = Calibrated(RMD()) if case == "all" else Calibrated(FusedRMD(), alpha=0.2, per_class=True)
    return detector.fit_features(z[:300], y[:300]).calibrate_features(z[300:]), queries


@pytest.mark.filterwarnings("ignore:.*classes have fewer")
@pytest.mark.parametrize("case", ["per class", *(pytest.param(c, marks=SLOW) for c in ("all", "logits", "folds"))])
def test_one_exported_graph_gives_score_p_value_and_decision(case):
    detector, queries = exported(case)
    module = detector.to_module()
    program = torch.export.export(module, (queries[:3],), dynamic_shapes={"values": {0: torch.export.Dim("batch")}})
    suffix = "logits" if case == "logits" else "features"
    predict, p_value, is_ood = (getattr(detector, f"{name}_{suffix}") for name in ("predict", "p_value", "is_ood"))
    for graph in (module, program.module()):
        scores, p_values, flagged = graph(queries)
        torch.testing.assert_close(scores, predict(queries), equal_nan=True)
        assert torch.equal(p_values, p_value(queries))
        assert torch.equal(flagged, is_ood(queries))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", ["all", "per class", "folds"])
def test_onnxruntime_decides_as_python_does(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    detector, queries = exported(case)
    shapes, path = {"values": {0: torch.export.Dim("batch")}}, tmp_path / "detector.onnx"
    torch.onnx.export(detector.to_module(), (queries[:3],), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    scores, p_values, flagged = session.run(None, {session.get_inputs()[0].name: queries.numpy()})
    expected = detector.predict_features(queries).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(expected)))
    np.testing.assert_allclose(p_values, detector.p_value_features(queries).numpy(), atol=0.02)
    np.testing.assert_array_equal(flagged, detector.is_ood_features(queries).numpy())
