"""Calibrated: any detector decides, and what it decides survives saving and export."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from conftest import make_blobs
from pytorch_ood.api import RequiresFittingException
from pytorch_ood.detector import KNN, ODIN, EnergyBased, MaxSoftmax
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import (
    RMD,
    Calibrated,
    CalibrationScores,
    FusedRMD,
    Mahalanobis,
    MarginalMahalanobis,
    NumericalWarning,
    load_detector,
)

FEATURES = {
    "rmd": lambda **options: Calibrated(RMD(), **options),
    "fused": lambda **options: Calibrated(FusedRMD(), **options),
    "mahalanobis": lambda **options: Calibrated(Mahalanobis(shrinkage=0.1), **options),
    "marginal": lambda **options: Calibrated(MarginalMahalanobis(), **options),
    "knn": lambda **options: Calibrated(KNN(None, k=5), **options),
}


def make_network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


@pytest.mark.parametrize("name", FEATURES)
def test_the_share_of_alarms_is_that_of_the_p_values_of_its_own_scores(name):
    z, y, _ = make_blobs(per_class=200, dtype=torch.float32)
    found = FEATURES[name]().fit_features(z[:400], y[:400]).calibrate_features(z[400:700])
    rest = z[700:]
    scores, calibration = found.detector.predict_features(rest), found.detector.predict_features(z[400:700])
    expected = (1 + (calibration[None] >= scores[:, None]).sum(1)).double() / 301
    assert torch.equal(found.p_value_features(rest), expected)
    assert torch.equal(found.is_ood_features(rest), expected <= 0.05)
    assert torch.equal(found.is_ood_features(rest, 0.2), expected <= 0.2)
    assert torch.equal(found.is_ood_features(rest), scores > found.threshold())
    assert found.threshold(0.05, 0.95) > found.threshold(0.05)
    assert torch.equal(found.predict_features(rest), scores)


@pytest.mark.parametrize("make", [MaxSoftmax, EnergyBased])
def test_a_detector_on_logits_decides_from_inputs_and_from_logits(make):
    net = make_network().eval()
    x, y = torch.randn(500, 12), torch.randint(0, 5, (500,))
    found = Calibrated(make(net)).calibrate(DataLoader(TensorDataset(x, y), 64))
    logits = net(x).detach()
    assert torch.equal(found.is_ood(x), found.is_ood_logits(logits))
    assert torch.equal(found.p_value(x), found.p_value_logits(logits))
    assert int(found.is_ood(x).sum()) == 24  # above the 25th largest of their own 500 scores
    assert torch.equal(found.select(x, 0.5), found.select_logits(logits, 0.5))


def test_a_detector_that_differentiates_is_calibrated_too():
    x = torch.randn(60, 12)
    found = Calibrated(ODIN(make_network().eval(), norm_std=None))
    with torch.inference_mode():
        found.calibrate(DataLoader(TensorDataset(x, torch.zeros(60)), 20))
    assert torch.equal(found.p_value(x) <= 0.05, found.is_ood(x))


def test_calibrating_leaves_out_ood_labels_and_the_state_of_the_network():
    z, y, _ = make_blobs(dtype=torch.float32)
    net = make_network()[:3].train()
    before = copy.deepcopy(net.state_dict())
    labels = y.clone()
    labels[::3] = -1
    loader = DataLoader(TensorDataset(z, labels), 32)
    found = Calibrated(RMD(net, shrinkage="oas")).fit(loader).calibrate(loader)
    assert len(found.calibration) == int((labels >= 0).sum())
    assert net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    by_features = copy.deepcopy(found).calibrate_features(net.eval()(z).detach(), labels)
    torch.testing.assert_close(by_features.calibration.scores, found.calibration.scores)
    assert len(found.calibrate_scores(torch.arange(5.0), torch.tensor([0, -1, 2, -5, 1])).calibration) == 3


@pytest.mark.parametrize("per_class", [False, True])
def test_decisions_are_those_of_the_network_in_evaluation_mode(per_class):
    z, y, x = make_blobs(dtype=torch.float32)
    net = make_network().eval()
    found = Calibrated(MaxSoftmax(net), 0.2, per_class=per_class)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # small classes
        found.calibrate([(z, y)])
    expected = found.is_ood_logits(net(x).detach()), found.p_value_logits(net(x).detach())
    net.train()
    assert torch.equal(found.is_ood(x[:7]), expected[0][:7])
    assert torch.equal(found.p_value(x[:7]), expected[1][:7])
    assert net.training


def test_a_new_fit_forgets_the_calibration():
    z, y, _ = make_blobs()
    found = Calibrated(RMD())
    with pytest.raises(RequiresFittingException, match="not calibrated"):
        found.threshold()
    found.fit_features(z, y).calibrate_features(z)
    assert found.n_classes == 5
    for refit in (
        lambda: found.fit_features(z, y),
        lambda: found.fit_moments(found.detector._moments),
        lambda: found.fit([(z, y)]),
    ):
        found.detector.encoder = nn.Identity()
        found.calibrate_features(z)
        assert refit() is found
        with pytest.raises(RequiresFittingException, match="after its last fit"):
            found.is_ood_features(z)


def test_each_class_has_its_own_threshold_and_small_ones_share_that_of_all():
    z, y, _ = make_blobs(per_class=100)
    z[y == 1] += 0.4 * torch.randn(100, 12).double() * z.std()  # a class with larger scores
    few = (y != 4) | (torch.arange(len(y)) < 50)
    found = Calibrated(Mahalanobis(), per_class=True).fit_features(z, y)
    with pytest.warns(NumericalWarning, match=r"classes have fewer than the 19 .*: 4\. They are compared with all"):
        found.calibrate_features(z[few])
    nearest, scores = found.nearest_class(z), found.predict_features(z)
    assert torch.equal(found.is_ood_features(z), found.p_value_features(z) <= 0.05)
    assert torch.equal(found.is_ood_features(z), scores > found.threshold()[nearest])
    pooled = Calibrated(found.detector).calibrate_features(z[few])
    assert float(found.threshold()[4]) == pooled.threshold()
    own = nearest[few] == 1
    assert torch.equal(
        found.p_value_features(z[nearest == 1]),
        Calibrated(found.detector).calibrate_scores(scores[few][own]).p_value_features(z[nearest == 1]),
    )
    with pytest.raises(ValueError, match=r"class \d has \d+ calibration samples, but alpha=0.001 needs 999"):
        found.is_ood_features(z, 0.001)


@pytest.mark.filterwarnings("ignore:2 of 7 classes have no sample")
@pytest.mark.parametrize("make", [RMD, Mahalanobis, FusedRMD, lambda: RMD(covariance="diagonal")])
def test_score_and_nearest_class_come_from_one_pass_as_from_two(make):
    z, y, x = make_blobs(per_class=100)
    detector = make().fit_features(z, y + 2 * (y > 2))  # classes 3 and 4 have no sample
    scores, labels = detector.scored_classes(x)
    assert torch.equal(scores, detector.predict_features(x))
    assert torch.equal(labels, detector.class_scores(x).argmin(1))
    assert set(labels.tolist()) == {0, 1, 2, 5, 6}


def test_two_detectors_may_share_the_collected_scores():
    z, y, _ = make_blobs(per_class=100)
    rmd = RMD().fit_features(z, y)
    metric = CalibrationScores(5, sync_on_compute=False)
    metric.update(rmd.predict_features(z), torch.arange(500) % 25 % 5 * (torch.arange(500) > 100))
    first = Calibrated(rmd, 0.05, per_class=True).calibrate_scores(metric)
    before = first.threshold()
    with pytest.warns(NumericalWarning, match="alpha=0.01 needs"):
        second = Calibrated(rmd, 0.01, per_class=True).calibrate_scores(metric)
    assert torch.equal(first.threshold(), before)
    with pytest.warns(NumericalWarning, match="alpha=0.01 needs"):
        alone = Calibrated(rmd, 0.01, per_class=True).calibrate_scores(copy.deepcopy(metric))
    assert torch.equal(second.threshold(), alone.threshold())


def test_classes_are_refused_where_there_are_none():
    z, y, _ = make_blobs()
    with pytest.raises(ValueError, match=r"MarginalMahalanobis on features is not\. Use per_class=False"):
        Calibrated(MarginalMahalanobis(), per_class=True).fit_features(z, y).calibrate_features(z)
    with pytest.raises(ValueError, match="KNN on features is not"):
        Calibrated(KNN(None, k=5), per_class=True).fit_features(z, y).calibrate_features(z)
    with pytest.raises(ValueError, match="collect them in a CalibrationScores"):
        Calibrated(RMD(), per_class=True).fit_features(z, y).calibrate_scores(z[:, 0])


def test_scores_may_be_a_list_or_an_array():
    scores = torch.randn(99, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = Calibrated(RMD()).calibrate_scores(scores).threshold()
    for given in (scores.tolist(), scores.numpy()):
        assert Calibrated(RMD()).calibrate_scores(given).threshold() == expected
    with pytest.raises(ValueError, match=r"confidence must be a number between 0 and 1, for example 0\.95, got 95"):
        Calibrated(RMD()).calibrate_scores(scores).threshold(confidence=95)


def test_what_is_no_detector_is_refused():
    with pytest.raises(TypeError, match=r"got <class .*RMD'>. Make one: RMD\(\.\.\.\)"):
        Calibrated(RMD)
    with pytest.raises(TypeError, match="not calibrated yet"):
        Calibrated(Calibrated(RMD()))
    with pytest.raises(ValueError, match="alpha must be a number between 0 and 1"):
        Calibrated(RMD(), 5)
    with pytest.raises(ValueError, match="no ID sample"):
        Calibrated(MaxSoftmax(make_network())).calibrate([])
    with pytest.raises(ValueError, match="no ID sample"):
        Calibrated(MaxSoftmax(None)).calibrate_logits(torch.zeros(2, 3), torch.tensor([-1, -2]))
    with pytest.raises(ValueError, match=r"must yield pairs \(x, y\), got a Tensor of length 2"):
        Calibrated(MaxSoftmax(make_network())).calibrate([torch.zeros(2, 12)])
    with pytest.raises(TypeError, match="KNN does not score logits"):
        Calibrated(KNN(None)).p_value_logits(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"one score for each of the 2 samples, got \(2, 4, 4\)"):
        Calibrated(MaxSoftmax(None)).calibrate_logits(torch.zeros(2, 3, 4, 4))


def test_nan_features_are_flagged():
    z, y, _ = make_blobs()
    found = Calibrated(RMD()).fit_features(z, y).calibrate_features(z)
    bad = z[:1] * math.nan
    assert found.is_ood_features(bad).tolist() == [True]
    assert found.p_value_features(bad).tolist() == [1 / 301]


@pytest.mark.parametrize("name", FEATURES)
def test_saved_and_loaded_it_decides_the_same(name, tmp_path):
    z, y, x = make_blobs(dtype=torch.float32)
    found = FEATURES[name](alpha=0.1).fit_features(z, y).calibrate_features(z)
    found.save(tmp_path / "detector.safetensors")
    for again in (Calibrated.load(tmp_path / "detector.safetensors"), load_detector(tmp_path / "detector.safetensors")):
        assert again.alpha == 0.1
        assert torch.equal(again.p_value_features(x), found.p_value_features(x))
        assert again.threshold() == found.threshold()


def test_a_loaded_detector_takes_the_network(tmp_path):
    z, y, x = make_blobs(dtype=torch.float32)
    net = make_network().eval()
    encoder = net[:3]
    rmd = Calibrated(RMD(encoder, shrinkage="oas")).fit([(z, y)]).calibrate([(z, y)])
    rmd.save(tmp_path / "rmd")
    assert torch.equal(Calibrated.load(tmp_path / "rmd", encoder).is_ood(x), rmd.is_ood(x))
    energy = Calibrated(EnergyBased(net)).calibrate([(z, y)])
    energy.save(tmp_path / "energy")
    assert torch.equal(Calibrated.load(tmp_path / "energy", net).is_ood(x), energy.is_ood(x))


def test_a_damaged_calibration_is_refused(tmp_path):
    z, y, _ = make_blobs()
    state = Calibrated(RMD()).fit_features(z, y).calibrate_features(z).state_dict()
    state["tensors"]["weights"] = state["tensors"]["weights"] * 0
    with pytest.raises(ValueError, match="weights below one"):
        Calibrated.from_state(state)
    with pytest.raises(ValueError, match="not the state of a calibrated detector"):
        Calibrated.from_state(RMD().fit_features(z, y).state_dict())


def exported_cases():
    z, y, x = make_blobs(dtype=torch.float32, per_class=100)
    # no calibration sample: the last bit of a graph's score may be another one, and a tie no tie
    queries = torch.cat([z[:300], x, torch.full((1, 12), math.nan)])
    yield "all", Calibrated(RMD()).fit_features(z[:300], y[:300]).calibrate_features(z[300:]), queries
    per_class = Calibrated(Mahalanobis(), alpha=0.2, per_class=True).fit_features(z[:300], y[:300])
    yield "per class", per_class.calibrate_features(z[300:]), queries
    yield "logits", Calibrated(MaxSoftmax(None), alpha=0.1, per_class=True).calibrate_logits(z[300:]), queries


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*calibration samples that alpha")
@pytest.mark.parametrize("case", ["all", "per class", "logits"])
def test_one_exported_graph_gives_score_p_value_and_decision(case):
    found, queries = next((found, queries) for name, found, queries in exported_cases() if name == case)
    module = found.to_module()
    program = torch.export.export(module, (queries[:3],), dynamic_shapes={"values": {0: torch.export.Dim("batch")}})
    suffix = "logits" if case == "logits" else "features"
    predict, p_value, is_ood = (getattr(found, f"{name}_{suffix}") for name in ("predict", "p_value", "is_ood"))
    for graph in (module, program.module()):
        scores, p_values, flagged = graph(queries)
        torch.testing.assert_close(scores, predict(queries), equal_nan=True)
        assert torch.equal(p_values, p_value(queries))
        assert torch.equal(flagged, is_ood(queries))


def test_what_runs_only_in_python_is_not_exported():
    z, y, _ = make_blobs()
    with pytest.raises(TypeError, match="KNN has no to_module"):
        Calibrated(KNN(None, k=5)).fit_features(z, y).calibrate_features(z).to_module()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnxruntime_decides_as_python_does(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for name, found, queries in exported_cases():
        if name == "logits":
            continue
        shapes = {"values": {0: torch.export.Dim("batch")}}
        path = tmp_path / f"{name}.onnx"
        torch.onnx.export(found.to_module(), (queries[:3],), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        scores, p_values, flagged = session.run(None, {session.get_inputs()[0].name: queries.numpy()})
        expected = found.predict_features(queries).numpy()
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(expected)))
        np.testing.assert_allclose(p_values, found.p_value_features(queries).numpy(), atol=0.02)
        np.testing.assert_array_equal(flagged, found.is_ood_features(queries).numpy())
