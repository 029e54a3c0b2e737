"""Checkpoints: what they hold, resuming, evaluating, and loading detectors without the training code."""

import callback_kit as kit
import oracle
import pytest
import torch
from callback_kit import OOD, OTHER, TRAIN, VAL, Classifier, features_of, fit, loader, told, trainer, values
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.detector import (
    ASH,
    KNN,
    SHE,
    EnergyBased,
    KLMatching,
    MahalanobisODIN,
    MaxSoftmax,
    ReAct,
    TemperatureScaling,
    ViM,
)
from pytorch_ood.detector import Mahalanobis as FrameworkMahalanobis

from rmd_plugin import RMD, FusedRMD, Mahalanobis, PartialMahalanobis
from rmd_plugin.detectors.snapshot import NotKeptError, build_detector, give_encoder, restore_snapshot, take_snapshot
from rmd_plugin.monitor.callback import OODMonitor, OODMonitorWarning

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def monitored(detectors=None, **options):
    detectors = {"rmd": RMD(), "md": Mahalanobis()} if detectors is None else detectors
    return OODMonitor(detectors, **{"head": "model.fc", "ood": {"svhn": loader(OOD)}, **options})


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
    assert state["history"] == monitor.history
    assert state["head"] == "model.fc"
    assert state["fitted"] == {name: {"epoch": 1, "step": 12} for name in ("rmd", "md")}
    z = features_of(module, OOD[0])
    detectors = OODMonitor.load_detectors(path)
    assert list(detectors) == ["rmd", "md"]
    for name, detector in detectors.items():
        assert torch.equal(detector.predict_features(z), monitor.detectors[name].predict_features(z))


def test_detectors_of_a_checkpoint_go_on_from_their_moments(tmp_path):
    monitor = monitored({"rmd": RMD(keep_moments=True), "fused": FusedRMD(keep_moments=True), "md": Mahalanobis()})
    _, module = fit(monitor, ModelCheckpoint(tmp_path, save_last=True))
    z, y = features_of(module, TRAIN[0]), TRAIN[1]
    detectors = OODMonitor.load_detectors(tmp_path / "last.ckpt")
    assert detectors["md"].moments is None
    for name in ("rmd", "fused"):
        once = monitor.detectors[name].predict_features(z)
        assert torch.equal(detectors[name].predict_features(z), once)
        assert detectors[name].update(z, y).moments.num_samples == 2 * len(z)
        torch.testing.assert_close(detectors[name].forget(z, y).predict_features(z), once, rtol=1e-4, atol=1e-4)


def test_a_damaged_checkpoint_gives_no_detectors(checkpoint, tmp_path):
    path, monitor, _ = checkpoint
    whole = path.read_bytes()
    place = whole.index(monitor.detectors["rmd"].state_dict()["tensors"]["projection"].numpy().tobytes())
    (tmp_path / "flipped.ckpt").write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
    with pytest.raises(ValueError, match=r"flipped\.ckpt' is damaged, .*CRC"):
        OODMonitor.load_detectors(tmp_path / "flipped.ckpt")
    content = torch.load(path, weights_only=True)
    content["callbacks"][monitor.state_key]["detectors"]["rmd"]["state"]["tensors"]["shift"][0] = torch.nan
    torch.save(content, tmp_path / "nan.ckpt")
    with pytest.raises(ValueError, match="'shift' has 1 NaN"):
        OODMonitor.load_detectors(tmp_path / "nan.ckpt")


def test_a_checkpoint_without_a_monitor_is_refused(tmp_path):
    fit(None, ModelCheckpoint(tmp_path, save_last=True))
    with pytest.raises(ValueError, match=r"expected the state of one OODMonitor in .*, found 0.*save_weights_only"):
        OODMonitor.load_detectors(tmp_path / "last.ckpt")


def test_of_two_monitors_one_has_to_be_chosen(tmp_path):
    pair = [monitored(), monitored({"msp": MaxSoftmax(None)}, prefix="baseline")]
    fit(*pair, ModelCheckpoint(tmp_path, save_last=True))
    with pytest.raises(ValueError, match="found 2"):
        OODMonitor.load_detectors(tmp_path / "last.ckpt")
    assert list(OODMonitor.load_detectors(tmp_path / "last.ckpt", prefix="baseline")) == ["msp"]
    assert list(OODMonitor.load_detectors(tmp_path / "last.ckpt", prefix="ood")) == ["rmd", "md"]


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


def test_a_training_without_validation_resumes_too(tmp_path):
    def run(monitor, epochs, **kwargs):
        callback = ModelCheckpoint(tmp_path, save_last=True)
        run = trainer(tmp_path, monitor, callback, max_epochs=epochs, limit_val_batches=0)
        with pytest.warns(OODMonitorWarning, match="no validation"):
            run.fit(Classifier(), loader(TRAIN), **kwargs)

    run(monitored(), 2)
    resumed = monitored()
    run(resumed, 4, ckpt_path=tmp_path / "last.ckpt")
    assert [row["epoch"] for row in resumed.history if row["detector"] == "rmd"] == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("restored", ["by Lightning", "by the monitor"])
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


def test_testing_after_training_uses_the_last_fit():
    monitor = monitored({"rmd": RMD(), "knn": KNN(None, k=3)})
    run, module = fit(monitor, max_epochs=2)
    run.validate(module, loader(VAL), verbose=False)
    assert values(monitor, stage="validate") == pytest.approx(values(monitor, stage="fit", epoch=1), abs=1e-12)


def test_what_a_checkpoint_cannot_hold_is_named_and_fitted_again_if_there_is_a_fit_loader(tmp_path, monkeypatch):
    monkeypatch.setattr("rmd_plugin.detectors.snapshot.MAX_BYTES", 5_000)
    monitor = monitored({"rmd": RMD(), "knn": KNN(None, k=3)})
    path = tmp_path / "last.ckpt"
    with pytest.warns(OODMonitorWarning, match="no checkpoint holds the fit of 'knn': the fit of KNN takes") as caught:
        run, module = fit(monitor, ModelCheckpoint(tmp_path, save_last=True))
    assert len(told(caught)) == 1
    with pytest.warns(OODMonitorWarning, match="the checkpoint does not hold 'knn': the fit of KNN takes"):
        assert list(OODMonitor.load_detectors(path)) == ["rmd"]
    with pytest.warns(OODMonitorWarning, match="'knn' failed to score: the checkpoint does not hold its fit") as caught:
        run.test(module, loader(VAL), ckpt_path=path, verbose=False)
    assert len(told(caught)) == 1
    found = values(monitor, stage="test")
    assert found["rmd", "svhn"] == pytest.approx(values(monitor, stage="fit")["rmd", "svhn"])
    assert found["knn", "svhn"] != found["knn", "svhn"]
    again = monitored({"rmd": RMD(), "knn": KNN(None, k=3)}, fit_loader=loader(TRAIN))
    trainer(None, again).test(Classifier(), loader(VAL), ckpt_path=path, verbose=False)
    assert values(again, stage="test") == pytest.approx(values(monitor, stage="fit"), abs=1e-12)
    assert [r["detector"] for r in again.history if (r["metric"], r["stage"]) == ("fit_seconds", "test")] == ["knn"]


def test_unfitted_detectors_are_told_in_an_evaluation_without_checkpoint():
    with pytest.warns(OODMonitorWarning, match="'rmd' failed to score: .*not fitted"):
        trainer(None, monitored({"rmd": RMD()})).validate(Classifier(), loader(VAL), verbose=False)
    module = Classifier()
    fitted = RMD().fit_features(features_of(module, TRAIN[0]), TRAIN[1])
    monitor = monitored({"rmd": fitted})
    trainer(None, monitor).validate(module, loader(VAL), verbose=False)
    z, z_id, z_ood = (features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
    expected = oracle.auroc(oracle.rmd(z, TRAIN[1], z_id), oracle.rmd(z, TRAIN[1], z_ood))
    assert values(monitor)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)


def test_a_named_dataloader_that_a_test_does_not_have_is_told(checkpoint):
    monitor = monitored({"rmd": RMD()}, ood_dataloaders={1: "noise"})
    run = trainer(None, monitor)
    with pytest.warns(OODMonitorWarning, match=r"names dataloader 1 \(noise\), but there are only 1"):
        run.test(Classifier(), loader(VAL), ckpt_path=checkpoint[0], verbose=False)
    assert values(monitor, stage="test").keys() == {("rmd", "svhn"), ("rmd", "mean")}
    run.test(Classifier(), [loader(VAL), loader(OTHER)], ckpt_path=checkpoint[0], verbose=False)
    assert ("rmd", "noise") in values(monitor, stage="test")


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


def test_another_detector_under_the_same_name_is_told(checkpoint):
    monitor = monitored({"rmd": PartialMahalanobis(components=2), "md": Mahalanobis()})
    with pytest.warns(OODMonitorWarning, match="'rmd' failed to score: the snapshot is of RMD"):
        trainer(None, monitor).validate(Classifier(), loader(VAL), ckpt_path=checkpoint[0], verbose=False)


@pytest.mark.slow
def test_a_stream_that_was_stopped_within_an_epoch_goes_on(tmp_path):
    counts = []

    class Counting(RMD):
        def fit_moments(self, moments):
            counts.append(int(moments.counts.sum()))
            return super().fit_moments(moments)

    middle = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(monitored({"rmd": Counting()}, refit="stream"), middle)
    assert counts == [90]
    state = torch.load(tmp_path / "epoch=0-step=4.ckpt", weights_only=True)["callbacks"]
    stream = next(s for key, s in state.items() if key.startswith("OODMonitor"))["stream"]
    assert int(stream[0]["tensors"]["counts"].sum()) == 64
    counts.clear()
    run = trainer(tmp_path, monitored({"rmd": Counting()}, refit="stream"), max_epochs=1)
    run.fit(Classifier(), loader(TRAIN), loader(VAL), ckpt_path=tmp_path / "epoch=0-step=4.ckpt")
    assert counts == [64 + 2 * 16]  # Lightning begins the loader anew, for the two batches that are left


def test_a_state_of_another_format_is_refused():
    state = monitored().state_dict()
    with pytest.raises(ValueError, match="got format 99"):
        monitored().load_state_dict(state | {"format": 99})


# -- snapshots of the framework's detectors ---------------------------------------------------------------------------

with torch.random.fork_rng():
    torch.manual_seed(0)
    NET = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).requires_grad_(False)


def encode(x):
    return NET[:2](x)


def fitted_she():
    """SHE keeps samples that are classified right, of every class."""
    z = encode(TRAIN[0])
    classes, y = NET[2](z).argmax(1).unique(return_inverse=True)
    head = torch.nn.Linear(6, len(classes)).requires_grad_(False)
    head.weight.copy_(NET[2].weight[classes])
    head.bias.copy_(NET[2].bias[classes])
    return SHE(encode, head).fit_features(z, y)


def fitted_detectors():
    z, y = encode(TRAIN[0]), TRAIN[1]
    return {
        "md": (FrameworkMahalanobis(encode).fit_features(z, y), FrameworkMahalanobis(encode)),
        "klm": (KLMatching(NET).fit_logits(NET(TRAIN[0]), y), KLMatching(NET)),
        "vim": (
            ViM(encode, 2, NET[2].weight, NET[2].bias).fit_features(z, y),
            ViM(encode, 2, NET[2].weight * 0, NET[2].bias),
        ),
        "she": (fitted_she(), None),
        "react": (ReAct(encode, NET[2], threshold=0.3), ReAct(encode, NET[2])),
        "ash": (ASH(encode, torch.nn.Sequential(torch.nn.Flatten(1), NET[2]), percentile=0.5), None),
        "ts": (TemperatureScaling(NET).fit_logits(NET(TRAIN[0]), y), TemperatureScaling(NET)),
        "energy": (EnergyBased(NET, t=3.0), EnergyBased(NET)),
        "odin": (MahalanobisODIN(encode, eps=0.1).fit_features(z, y), MahalanobisODIN(encode)),
    }


@pytest.mark.parametrize("name", ["md", "klm", "vim", "she", "react", "ash", "ts", "energy", "odin"])
def test_detectors_of_the_framework_are_saved_by_their_attributes(name, tmp_path):
    detector, fresh = fitted_detectors()[name]
    torch.save(take_snapshot(detector), tmp_path / "snapshot.pt")
    snapshot = torch.load(tmp_path / "snapshot.pt", weights_only=True)
    built = build_detector(snapshot)
    assert type(built) is type(detector)
    if fresh is not None:
        restore_snapshot(fresh, snapshot)
        assert torch.equal(fresh.predict(OOD[0]), detector.predict(OOD[0]))
    if hasattr(detector, "predict_logits"):
        assert torch.equal(built.predict_logits(NET(OOD[0])), detector.predict_logits(NET(OOD[0])))
    elif name in ("md", "vim", "she"):
        assert torch.equal(built.predict_features(encode(OOD[0])), detector.predict_features(encode(OOD[0])))
    elif name == "ash":
        maps = encode(OOD[0]).abs()[:, :, None, None]  # it divides by the sum of activations
        assert torch.equal(built.predict_feature_maps(maps), detector.predict_feature_maps(maps))
    if name not in ("klm", "ts", "energy"):
        give_encoder(built, encode)
        if name != "ash":
            assert torch.equal(built.predict(OOD[0]), detector.predict(OOD[0]))


@pytest.mark.parametrize(
    "function",
    [
        "os:system",
        "pytorch_ood.detector.energy:torch.save",
        "torch.nn.functional:handle_torch_function.__globals__",
        "x",
    ],
)
def test_a_file_does_not_choose_what_is_run(function):
    snapshot = take_snapshot(ReAct(encode, NET[2]))
    assert snapshot["attributes"]["detector"] == {"__function__": "pytorch_ood.detector.energy:EnergyBased.score"}
    snapshot["attributes"]["detector"] = {"__function__": function}
    with pytest.raises(ValueError, match="is no function of a detector"):
        build_detector(snapshot)


def test_a_head_of_the_wrong_shape_is_refused():
    snapshot = take_snapshot(SHE(encode, NET[2]))
    snapshot["attributes"]["head"]["__linear__"]["bias"] = torch.zeros(5)
    with pytest.raises(ValueError, match="damaged"):
        build_detector(snapshot)


def test_a_live_head_stays_and_one_that_cannot_be_kept_is_named(tmp_path):
    head = torch.nn.Linear(6, 4)
    live = SHE(encode, head)
    restore_snapshot(live, take_snapshot(fitted_she()))
    assert live.head is head
    with pytest.raises(NotKeptError, match="SHE holds what only an instance knows: head"):
        build_detector(take_snapshot(SHE(encode, lambda z: z)))


def test_a_detector_that_keeps_other_things_is_not_saved():
    detector = EnergyBased(None)
    detector.helper = object()
    with pytest.raises(NotKeptError, match="it holds a object, which is no tensor, number or text"):
        take_snapshot(detector)


def test_the_neighbours_of_knn_are_kept():
    knn = KNN(None, k=3, algorithm="kd_tree").fit_features(*TRAIN)
    again = build_detector(take_snapshot(knn))
    assert again.knn.get_params() == knn.knn.get_params()
    assert torch.equal(again.predict_features(OOD[0]), knn.predict_features(OOD[0]))


def test_a_class_that_the_file_names_is_only_taken_from_the_two_libraries():
    class Own(EnergyBased):
        pass

    class Ours(RMD):
        pass

    with pytest.raises(ValueError, match="Ours is neither a detector of rmd_plugin nor of pytorch_ood"):
        build_detector(take_snapshot(Ours().fit_features(*TRAIN)))
    snapshot = take_snapshot(Own(None, t=2.0))
    with pytest.raises(ValueError, match="Own is neither a detector of rmd_plugin nor of pytorch_ood"):
        build_detector(snapshot)
    target = Own(None)
    restore_snapshot(target, snapshot)
    assert target.t == 2.0


def test_instances_can_be_filled_when_loading(tmp_path):
    class Own(EnergyBased):
        pass

    fit(monitored({"own": Own(None, t=2.0)}), ModelCheckpoint(tmp_path, save_last=True))
    own = Own(None)
    assert OODMonitor.load_detectors(tmp_path / "last.ckpt", detectors={"own": own})["own"].detector is own
    assert own.t == 2.0
