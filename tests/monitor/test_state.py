"""Checkpoints: what they hold, resuming, evaluating, and loading detectors without the training code."""

import callback_kit as kit
import oracle
import pytest
import torch
from callback_kit import OOD, TRAIN, VAL, Classifier, features_of, fit, loader, told, trainer, values
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.detector import KNN, MaxSoftmax

from rmd_plugin import RMD, Mahalanobis
from rmd_plugin.monitor.callback import OODMonitor, OODMonitorWarning, unpack_history

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def monitored(detectors=None, **options):
    return kit.monitored(detectors or {"rmd": RMD(), "md": Mahalanobis()}, **options)


def rows(monitor):
    return [row for row in monitor.history if row["metric"] != "fit_seconds"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run of two epochs, its monitor and its last checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    monitor = monitored()
    _, module = fit(monitor, ModelCheckpoint(folder, save_last=True), max_epochs=2)
    return folder / "last.ckpt", monitor, module


def test_a_checkpoint_holds_plain_data_and_gives_the_detectors_back_bit_by_bit(checkpoint):
    path, monitor, module = checkpoint
    state = torch.load(path, weights_only=True)["callbacks"][monitor.state_key]
    assert unpack_history(state["history"]) == monitor.history
    assert state["head"] == "model.fc"
    assert state["step"] == 12
    z = features_of(module, OOD[0])
    detectors = OODMonitor.load_detectors(path)
    assert list(detectors) == ["rmd", "md"]
    for name, detector in detectors.items():
        assert torch.equal(detector.predict_features(z), monitor.detectors[name].predict_features(z))


def test_of_several_monitors_one_has_to_be_chosen(tmp_path):
    pair = [monitored(), monitored({"msp": MaxSoftmax(None)}, prefix="baseline")]
    fit(*pair, ModelCheckpoint(tmp_path, save_last=True))
    with pytest.raises(ValueError, match="found 2"):
        OODMonitor.load_detectors(tmp_path / "last.ckpt")
    assert list(OODMonitor.load_detectors(tmp_path / "last.ckpt", prefix="baseline")) == ["msp"]
    with pytest.raises(ValueError, match="found 0"):
        OODMonitor.load_detectors(tmp_path / "last.ckpt", prefix="other")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"refit": "stream"}, {"every_n_epochs": 2}])
def test_a_resumed_training_goes_on_as_if_it_had_never_stopped(tmp_path, options):
    def run(monitor, epochs, folder, **kwargs):
        callback = ModelCheckpoint(folder, monitor="ood/rmd/svhn/AUROC", mode="max", save_top_k=-1, save_last=True)
        module = Classifier()
        module.model.body[3].p = 0.0  # Lightning does not restore the random state of dropout
        trainer(tmp_path, monitor, callback, max_epochs=epochs).fit(module, loader(TRAIN), loader(VAL), **kwargs)
        return callback, module

    whole, resumed = monitored(**options), monitored(**options)
    best, module = run(whole, 4, tmp_path / "whole")
    run(monitored(**options), 2, tmp_path / "parts")
    best_resumed, module_resumed = run(resumed, 4, tmp_path / "parts", ckpt_path=tmp_path / "parts" / "last.ckpt")
    assert all(map(torch.equal, module.state_dict().values(), module_resumed.state_dict().values()))
    assert rows(resumed) == rows(whole)
    assert [r["epoch"] for r in resumed.history] == [r["epoch"] for r in whole.history]
    assert best.best_model_score == best_resumed.best_model_score
    z = features_of(module, OOD[0])
    assert torch.equal(*(m.detectors["rmd"].predict_features(z) for m in (whole, resumed)))


@pytest.mark.parametrize(("stage", "restored"), [("validate", "by Lightning"), ("test", "by the monitor")])
def test_detectors_of_a_checkpoint_are_evaluated_and_not_fitted_again(checkpoint, stage, restored, monkeypatch):
    path, before, _ = checkpoint
    if restored == "by the monitor":  # as in Lightning before 2.6
        connector = "pytorch_lightning.trainer.connectors.checkpoint_connector._CheckpointConnector"
        monkeypatch.setattr(f"{connector}.restore_callbacks", lambda self: None)
    monitor = monitored({"rmd": RMD(), "md": Mahalanobis(), "msp": MaxSoftmax(None)})
    run, module = trainer(None, monitor), Classifier()
    getattr(run, stage)(module, loader(VAL), ckpt_path=path)
    expected = values(before, epoch=1)
    found = values(monitor, stage=stage)
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-12)
    assert "ood/rmd/svhn/AUROC" in run.callback_metrics
    assert 0 < found["msp", "svhn"] < 1
    assert not [row for row in monitor.history if row["metric"] == "fit_seconds" and row["stage"] == stage]


def test_testing_the_best_checkpoint_keeps_the_history_of_the_training(tmp_path):
    monitor = monitored()
    best = ModelCheckpoint(tmp_path, monitor="ood/rmd/svhn/AUROC", mode="max", save_top_k=-1)
    run, module = fit(monitor, best, max_epochs=3)
    history = list(monitor.history)
    first = next(path for path in best.best_k_models if "epoch=0" in path)
    run.test(module, loader(VAL), ckpt_path=first)
    assert monitor.history[: len(history)] == history
    assert values(monitor, stage="test") == pytest.approx(values(monitor, stage="fit", epoch=0), abs=1e-12)


def test_what_a_checkpoint_cannot_hold_is_named_and_fitted_again_if_there_is_a_fit_loader(tmp_path):
    class Unkept(KNN):
        def __init__(self, encoder, k):
            super().__init__(encoder, k)
            self.lock = object()

    monitor = monitored({"rmd": RMD(), "knn": Unkept(None, k=3)})
    path = tmp_path / "last.ckpt"
    with pytest.warns(OODMonitorWarning, match="no checkpoint holds the fit of 'knn'") as caught:
        run, module = fit(monitor, ModelCheckpoint(tmp_path, save_last=True))
    assert len(told(caught)) == 1
    with pytest.warns(OODMonitorWarning, match="the checkpoint does not hold 'knn'"):
        assert list(OODMonitor.load_detectors(path)) == ["rmd"]
    with pytest.warns(OODMonitorWarning, match="'knn' failed to score: the checkpoint does not hold its fit"):
        run.test(module, loader(VAL), ckpt_path=path, verbose=False)
    again = monitored({"rmd": RMD(), "knn": Unkept(None, k=3)}, fit_loader=loader(TRAIN))
    trainer(None, again).test(Classifier(), loader(VAL), ckpt_path=path, verbose=False)
    assert values(again, stage="test") == pytest.approx(values(monitor, stage="fit"), abs=1e-12)
    assert [r["detector"] for r in again.history if (r["metric"], r["stage"]) == ("fit_seconds", "test")] == ["knn"]


def test_a_detector_that_was_fitted_before_is_evaluated_without_checkpoint():
    module = Classifier()
    fitted = RMD().fit_features(features_of(module, TRAIN[0]), TRAIN[1])
    monitor = monitored({"rmd": fitted})
    trainer(None, monitor).validate(module, loader(VAL), verbose=False)
    z, z_id, z_ood = (features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
    expected = oracle.auroc(oracle.rmd(z, TRAIN[1], z_id), oracle.rmd(z, TRAIN[1], z_ood))
    assert values(monitor)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)


def test_options_that_were_changed_for_a_resume_hold(tmp_path):
    fit(monitored({"rmd": RMD()}), ModelCheckpoint(tmp_path, save_last=True))
    changed = monitored({"rmd": RMD(shrinkage=0.3), "new": Mahalanobis()})
    run = trainer(tmp_path, changed, ModelCheckpoint(tmp_path), max_epochs=2)
    run.fit(Classifier(), loader(TRAIN), loader(VAL), ckpt_path=tmp_path / "last.ckpt")
    assert changed.detectors["rmd"].shrinkage == 0.3
    assert changed.detectors["rmd"].options == RMD(shrinkage=0.3).options
    assert values(changed, epoch=1)["new", "svhn"] > 0.5
    # an evaluation takes the fit as it is
    fresh = monitored({"rmd": RMD(shrinkage=0.9)})
    trainer(None, fresh).validate(Classifier(), loader(VAL), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert fresh.detectors["rmd"].shrinkage == 0.0


def test_a_state_of_another_format_is_refused():
    state = monitored().state_dict()
    with pytest.raises(ValueError, match="got 99"):
        monitored().load_state_dict(state | {"format": 99})
