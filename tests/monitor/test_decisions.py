"""The monitor calibrates: from a checkpoint to yes or no."""

from functools import partial

import callback_kit as kit
import pytest
import torch
from callback_kit import OOD, TRAIN, VAL, Classifier, fit, loader, trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.detector import KNN, EnergyBased, ViM

from rmd_plugin import RMD, Calibrated
from rmd_plugin.monitor.callback import OODMonitor

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]
EVERY = {"rmd": RMD, "knn": partial(KNN, k=3), "energy": EnergyBased, "vim": ViM}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    monitor = OODMonitor(dict(EVERY), head="model.fc", ood={"svhn": loader(OOD)}, alpha=0.1)
    _, module = fit(monitor, ModelCheckpoint(folder, save_last=True))
    return folder / "last.ckpt", monitor, module


def logged(monitor, metric, ood="", stage="fit"):
    return {
        r["detector"]: r["value"]
        for r in monitor.history
        if (r["metric"], r["ood"], r["stage"]) == (metric, ood, stage)
    }


def test_the_checkpoint_decides_as_the_validation_scores_do(run):
    path, monitor, module = run
    detectors = OODMonitor.load_detectors(path, module)
    assert list(detectors) == list(EVERY)
    for name, detector in detectors.items():
        assert isinstance(detector, Calibrated)
        assert detector.alpha == 0.1
        flagged, scores = detector.is_ood(VAL[0]), detector.predict(VAL[0]).double()
        # every validation sample but those above the m-th largest, m = 0.1 (n + 1)
        m = int(0.1 * (len(VAL[0]) + 1))
        assert float(scores.sort().values[-m]) == pytest.approx(detector.threshold(), rel=1e-4)
        assert int(flagged.sum()) == pytest.approx(m - 1, abs=1)
        assert logged(monitor, "threshold")[name] == pytest.approx(detector.threshold())
        flagged = float(detector.is_ood(OOD[0]).double().mean())
        assert logged(monitor, "detected", "svhn")[name] == pytest.approx(flagged, abs=1.5 / len(OOD[0]))


def test_a_test_uses_the_thresholds_of_the_training_and_tells_the_false_alarms(run):
    path, _, _ = run
    monitor = OODMonitor(dict(EVERY), head="model.fc", ood={"svhn": loader(OOD)}, alpha=0.1)
    train_set = TRAIN[0][:200], TRAIN[1][:200]
    trainer(None, monitor).test(Classifier(), loader(train_set), ckpt_path=path, verbose=False)
    module = Classifier()
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    detectors = OODMonitor.load_detectors(path, module)
    for name in ("rmd", "energy"):
        expected = float(detectors[name].is_ood(train_set[0]).double().mean())
        assert logged(monitor, "false_alarms", stage="test")[name] == pytest.approx(expected, abs=1.5 / 200)
        assert logged(monitor, "threshold", stage="test")[name] == pytest.approx(detectors[name].threshold())


def test_a_calibrated_detector_in_the_dict_keeps_its_own_level():
    own = Calibrated(RMD(), alpha=0.2)
    monitor = OODMonitor({"own": own, "rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)})
    fit(monitor)
    assert own.threshold() == logged(monitor, "threshold")["own"] < logged(monitor, "threshold")["rmd"]


def test_too_few_samples_have_no_threshold_and_that_is_said(monkeypatch):
    told = []
    monkeypatch.setattr("lightning_utilities.core.rank_zero.rank_zero_info", lambda text, **_: told.append(text))
    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)}, alpha=0.001)
    fit(monitor)
    assert logged(monitor, "threshold") == {}
    assert all(value != value for value in logged(monitor, "detected", "svhn").values())
    assert "needs 999" in "".join(told)


def test_without_calibration_nothing_is_logged_or_kept(tmp_path):
    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)}, calibrate=False)
    fit(monitor, ModelCheckpoint(tmp_path, save_last=True))
    assert {row["metric"] for row in monitor.history}.isdisjoint({"threshold", "detected"})
    assert isinstance(OODMonitor.load_detectors(tmp_path / "last.ckpt")["rmd"], RMD)


def test_detectors_are_given_by_names():
    named = OODMonitor(["rmd", "gaussian", "msp"], head="model.fc", ood={"svhn": loader(OOD)})
    fit(named)
    assert {"rmd", "mahalanobis", "msp"} <= set(logged(named, "AUROC", "svhn"))
    with pytest.raises(ValueError, match="Did you mean knn"):
        OODMonitor(["kn"])
