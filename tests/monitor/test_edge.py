"""Unusual runs: sanity check, limits, several validations, none at all, and failures."""

import signal
import warnings
from contextlib import nullcontext

import callback_kit as kit
import oracle
import pytest
import torch
from callback_kit import OOD, OTHER, TRAIN, VAL, Classifier, features_of, fit, loader, told, values
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_ood.detector import KNN, MaxSoftmax
from torch.utils.data import Dataset

from rmd_plugin import RMD, Mahalanobis, NumericalWarning
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.monitor.callback import OODMonitor, OODMonitorWarning
from rmd_plugin.monitor.sharding import shard

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def monitored(**options):
    return OODMonitor({"rmd": RMD()}, **{"head": "model.fc", "ood": {"svhn": loader(OOD)}, **options})


def auroc_of(module, train=TRAIN, val=VAL, ood=OOD):
    z, z_id, z_ood = (features_of(module, data[0]) for data in (train, val, ood))
    return oracle.auroc(oracle.rmd(z, train[1], z_id), oracle.rmd(z, train[1], z_ood))


def first(data, count):
    return data[0][:count], data[1][:count]


def epochs(monitor):
    return [row["epoch"] for row in monitor.history if (row["ood"], row["metric"]) == ("svhn", "AUROC")]


def test_the_sanity_check_fits_and_logs_nothing():
    monitor = monitored()
    fit(monitor, num_sanity_val_steps=2, max_epochs=0)
    assert monitor.history == []
    assert not monitor.detectors["rmd"].fitted
    fit(monitor, num_sanity_val_steps=2)
    assert epochs(monitor) == [0]


def test_the_sanity_check_finds_wrong_settings_before_the_training():
    class Never(Classifier):
        def training_step(self, batch, batch_idx):
            raise AssertionError("training has begun")

    triples = loader((*VAL, VAL[1]))
    with pytest.raises(EncodingError, match="Pass forward="):
        fit(monitored(), module=Never(), val=triples, num_sanity_val_steps=1)


def test_a_fast_dev_run_fits_on_one_batch(monkeypatch):
    monitor = OODMonitor({"knn": KNN(None, k=2)}, ood={"svhn": loader(OOD)})
    fit(monitor, fast_dev_run=True)
    assert monitor.detectors["knn"].knn.n_samples_fit_ == 16
    assert values(monitor)["knn", "svhn"] > 0.5


def test_limited_validation_scores_what_was_validated():
    monitor = monitored()
    _, module = fit(monitor, limit_val_batches=1)
    ((rows,),) = shard(loader((torch.arange(len(OOD[1])),)), limit=1).batches
    expected = auroc_of(module, val=first(VAL, 16), ood=(OOD[0][rows], OOD[1][rows]))
    assert values(monitor)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)
    monitor = monitored(limit_ood_batches=1.0)
    _, module = fit(monitor, limit_val_batches=1)
    assert values(monitor)["rmd", "svhn"] == pytest.approx(auroc_of(module, val=first(VAL, 16)), abs=1e-12)


def test_limited_training_limits_the_fit_unless_told_otherwise():
    for options, count in (({}, 32), ({"limit_fit_batches": 1.0}, 90)):
        monitor = OODMonitor({"knn": KNN(None, k=2)}, ood={"svhn": loader(OOD)}, **options)
        fit(monitor, limit_train_batches=2)
        assert monitor.detectors["knn"].knn.n_samples_fit_ == count


def test_several_validation_dataloaders_are_all_id_unless_they_are_named():
    half = len(VAL[1]) // 2
    split = [loader(first(VAL, half)), loader(OTHER), loader((VAL[0][half:], VAL[1][half:]))]
    monitor = monitored(ood_dataloaders={1: "noise"})
    _, module = fit(monitor, val=split)
    assert values(monitor)["rmd", "svhn"] == pytest.approx(auroc_of(module), abs=1e-12)
    assert values(monitor)["rmd", "noise"] == pytest.approx(auroc_of(module, ood=OTHER), abs=1e-12)


def test_gradient_accumulation_and_half_precision():
    monitor = monitored()
    _, module = fit(monitor, accumulate_grad_batches=3, max_epochs=2)
    assert values(monitor, epoch=1)["rmd", "svhn"] == pytest.approx(auroc_of(module), abs=1e-12)
    monitor = monitored()
    _, module = fit(monitor, precision="bf16-mixed")
    module.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        z, z_id, z_ood = (module.model.features(data[0]).float() for data in (TRAIN, VAL, OOD))
    expected = oracle.auroc(oracle.rmd(z, TRAIN[1], z_id), oracle.rmd(z, TRAIN[1], z_ood))
    assert values(monitor)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)


def test_validation_decides_when_the_detectors_are_fitted():
    monitor = monitored()
    fit(monitor, check_val_every_n_epoch=2, max_epochs=4)
    assert epochs(monitor) == [1, 3]
    monitor = monitored()
    fit(monitor, val_check_interval=0.5, max_epochs=2)
    assert epochs(monitor) == [0, 0, 1, 1]
    steps = [row["step"] for row in monitor.history if (row["ood"], row["metric"]) == ("svhn", "AUROC")]
    assert steps == [3, 6, 9, 12]


def test_a_stream_covers_the_epoch_so_far_or_what_came_since_the_last_validation():
    counts = []

    class Counting(KNN):
        def fit_features(self, z, labels):
            counts.append(len(z))
            return super().fit_features(z, labels)

    def run(**kwargs):
        counts.clear()
        monitor = OODMonitor({"knn": Counting(None, k=2)}, "model.fc", {"svhn": loader(OOD)}, refit="stream")
        fit(monitor, max_epochs=2, **kwargs)
        return list(counts)

    assert run() == [90, 90]
    assert run(val_check_interval=0.5) == [48, 90, 48, 90]
    # validation does not follow the epochs of 90 = 5 * 16 + 10 samples
    assert run(val_check_interval=4, check_val_every_n_epoch=None) == [64, 16 + 10 + 32, 32 + 16 + 10]


@pytest.mark.parametrize("refit", ["pass", "stream"])
def test_without_validation_the_detectors_are_fitted_and_saved_and_one_warning_says_so(tmp_path, refit):
    monitor = monitored(refit=refit, every_n_epochs=2)
    with pytest.warns(OODMonitorWarning, match="no validation: the detectors are fitted and saved, but not") as caught:
        _, module = fit(monitor, ModelCheckpoint(tmp_path, save_last=True), max_epochs=4, limit_val_batches=0)
    assert len(told(caught)) == 1
    assert [(row["epoch"], row["metric"]) for row in monitor.history] == [(1, "fit_seconds"), (3, "fit_seconds")]
    assert OODMonitor.load_detectors(tmp_path / "last.ckpt")["rmd"].fitted
    if refit == "pass":
        z = features_of(module, OOD[0])
        expected = RMD().fit_features(features_of(module, TRAIN[0]), TRAIN[1]).predict_features(z)
        torch.testing.assert_close(monitor.detectors["rmd"].predict_features(z), expected)


@pytest.mark.parametrize("refit", ["pass", "stream"])
def test_a_training_that_ends_before_its_validation_is_fitted_to_its_final_weights(tmp_path, refit):
    monitor, checkpoint = monitored(refit=refit), ModelCheckpoint(tmp_path, filename="end", save_last=True)
    with pytest.warns(OODMonitorWarning, match="ended before the detectors were due to be scored") as caught:
        run, module = fit(monitor, checkpoint, max_steps=5, max_epochs=-1)
    assert len(told(caught)) == 1
    assert [(row["step"], row["metric"]) for row in monitor.history] == [(5, "fit_seconds")]
    run.save_checkpoint(tmp_path / "mine.ckpt")
    z = features_of(module, OOD[0])
    for name in ("end", "last", "mine"):
        saved = OODMonitor.load_detectors(tmp_path / f"{name}.ckpt")["rmd"]
        assert torch.equal(saved.predict_features(z), monitor.detectors["rmd"].predict_features(z))
    if refit == "pass":
        expected = RMD().fit_features(features_of(module, TRAIN[0]), TRAIN[1]).predict_features(z)
        torch.testing.assert_close(monitor.detectors["rmd"].predict_features(z), expected)


@pytest.mark.slow
def test_the_last_weights_are_fitted_to_whenever_the_training_ends():
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *rest):
            trainer.should_stop = trainer.global_step == 3

    class StopAtTheEndOfAnEpoch(Callback):
        def on_train_epoch_end(self, trainer, module):
            trainer.should_stop = True

    def steps(*callbacks, every_n_epochs=1, **options):
        monitor = monitored(every_n_epochs=every_n_epochs)
        fit(monitor, *callbacks, **options)
        return [row["step"] for row in monitor.history if row["metric"] == "fit_seconds"]

    assert steps(Stop(), max_epochs=5) == [3]  # Lightning validates before it stops
    assert steps(max_epochs=3, every_n_epochs=2) == [12, 18]
    assert steps(StopAtTheEndOfAnEpoch(), max_epochs=5, every_n_epochs=1) == [6]
    assert steps(max_epochs=2, val_check_interval=4) == [4, 10, 12]
    assert steps(max_steps=9, max_epochs=-1) == [6, 9]
    late = monitored(every_n_epochs=2)
    with pytest.warns(OODMonitorWarning, match="before the detectors were due"):
        _, module = fit(late, StopAtTheEndOfAnEpoch(), max_epochs=5)
    z = features_of(module, OOD[0])
    expected = RMD().fit_features(features_of(module, TRAIN[0]), TRAIN[1]).predict_features(z)
    torch.testing.assert_close(late.detectors["rmd"].predict_features(z), expected)
    with pytest.warns(OODMonitorWarning, match="there is no validation"):
        assert steps(max_steps=4, max_epochs=-1, limit_val_batches=0) == [4]


def test_a_stream_that_never_began_is_told():
    monitor = monitored(refit="stream", warmup_epochs=3)
    with pytest.warns(OODMonitorWarning, match="due to be fitted: warmup_epochs=3") as caught:
        fit(monitor)
    assert len(told(caught)) == 1


def test_a_fit_that_failed_at_the_last_validation_is_not_tried_again():
    class Fails(Mahalanobis):
        def fit_moments(self, moments):
            raise ArithmeticError("no")

    monitor = OODMonitor({"md": Fails()}, "model.fc", {"svhn": loader(OOD)})
    with pytest.warns(OODMonitorWarning) as caught:
        fit(monitor)
    assert len(told(caught)) == 1


@pytest.mark.parametrize("names", [[0, 1], ["a", "b"]])
def test_several_training_dataloaders_are_refused_with_a_way_that_works(names):
    class Both(Classifier):
        def training_step(self, batch, batch_idx):
            return sum(super(Both, self).training_step(batch[name], batch_idx) for name in names)

    loaders = [loader(TRAIN), loader(first(TRAIN, 40))]
    train = dict(zip(names, loaders, strict=True)) if "a" in names else loaders
    with pytest.raises(EncodingError, match=r"stream.* 2 training dataloaders.*Use refit='pass' with fit_loader="):
        fit(monitored(refit="stream"), module=Both(), train=train)
    with pytest.raises(EncodingError, match=r"expected one training DataLoader.* got .* Pass fit_loader=") as caught:
        fit(monitored(), module=Both(), train=train)
    assert "stream" not in str(caught.value)
    monitor = monitored(fit_loader=loader(TRAIN))
    _, module = fit(monitor, module=Both(), train=train)
    assert values(monitor)["rmd", "svhn"] == pytest.approx(auroc_of(module), abs=1e-12)


@pytest.mark.parametrize("options", [{"limit_val_batches": 0}, {"max_steps": 4, "max_epochs": -1}])
def test_a_monitor_that_is_used_again_is_fitted_to_the_new_weights(options):
    monitor = monitored()
    for seed in (1, 2):
        module = Classifier()
        torch.nn.init.normal_(module.model.body[0].weight, generator=torch.Generator().manual_seed(seed))
        with pytest.warns(OODMonitorWarning) if seed == 1 else nullcontext():  # told once
            fit(monitor, module=module, **options)
        z = features_of(module, OOD[0])
        expected = RMD().fit_features(features_of(module, TRAIN[0]), TRAIN[1]).predict_features(z)
        torch.testing.assert_close(monitor.detectors["rmd"].predict_features(z), expected)


def test_no_validation_is_not_confused_with_validation_that_is_still_to_come():
    monitor = monitored()
    fit(monitor, check_val_every_n_epoch=2, max_epochs=2)  # no sanity check: the loaders are not there in epoch 0
    assert {row["epoch"] for row in monitor.history} == {1}


def test_barebones_training_logs_nothing_but_keeps_the_history():
    monitor = monitored()
    trainer, _ = fit(monitor, barebones=True, enable_checkpointing=None, logger=None, num_sanity_val_steps=None)
    assert epochs(monitor) == [0]
    assert not trainer.callback_metrics


# -- failures ---------------------------------------------------------------------------------------------------------


class Broken(Classifier):
    """Gives NaN features to one part of the data in one epoch."""

    def __init__(self, epoch=1, where="fit"):
        super().__init__()
        self.bad_epoch, self.where = epoch, where

    def forward(self, x):
        hit = self.trainer.validating and self.trainer.current_epoch == self.bad_epoch
        part = {len(TRAIN[1]) % 16: "fit", len(OOD[1]) % 16: "ood", len(VAL[1]) % 16: "val"}.get(len(x))
        return self.model(x * torch.nan if hit and part == self.where else x)


def test_features_that_are_nan_for_an_epoch_cost_that_epochs_metrics_and_one_warning():
    assert len({len(TRAIN[1]) % 16, len(OOD[1]) % 16, len(VAL[1]) % 16}) == 3
    monitor = OODMonitor(
        {"rmd": RMD(), "md": Mahalanobis(), "knn": KNN(None, k=2), "msp": MaxSoftmax(None)},
        head="model.fc",
        ood={"svhn": loader(OOD)},
    )
    alone = Classifier()
    fit(None, module=alone, max_epochs=3)
    with pytest.warns(OODMonitorWarning) as caught:
        trainer, module = fit(monitor, module=Broken(), max_epochs=3)
    assert trainer.current_epoch == 3
    messages = told(caught)
    assert len(messages) == 2  # one for each reason
    assert "rmd, md could not be fitted in epoch 1" in messages[0]
    assert "NaN" in messages[0]
    assert "knn could not be fitted in epoch 1" in messages[1]
    for epoch in range(3):
        for (detector, _), value in values(monitor, epoch=epoch).items():
            assert (value != value) == (epoch == 1 and detector != "msp")
    for a, b in zip(alone.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("where", "sets"), [("ood", {"svhn", "mean"}), ("val", {"svhn", "noise", "mean"})])
def test_scores_that_are_nan_hit_only_the_sets_that_need_them(where, sets):
    monitor = monitored(ood={"svhn": loader(OOD), "noise": loader(OTHER)})
    with pytest.warns(OODMonitorWarning, match="'rmd' has no result on '.*': scores contain") as caught:
        fit(monitor, module=Broken(where=where), max_epochs=2)
    assert len(told(caught)) == len(sets - {"mean"})
    assert {ood for (_, ood), value in values(monitor, epoch=1).items() if value != value} == sets


def test_a_checkpoint_of_a_failed_epoch_says_so(tmp_path):
    monitor = monitored()
    with pytest.warns(OODMonitorWarning):
        fit(monitor, ModelCheckpoint(tmp_path, save_last=True), module=Broken(epoch=0))
    with pytest.warns(OODMonitorWarning, match="the checkpoint does not hold 'rmd': it could not be fitted in epoch 0"):
        assert OODMonitor.load_detectors(tmp_path / "last.ckpt") == {}
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"][monitor.state_key]
    assert "could not be fitted in epoch 0" in state["unfit"]["rmd"]


def test_on_request_a_failure_ends_the_training():
    with pytest.raises(RuntimeError, match=r"rmd could not be fitted in epoch 1\. ValueError: .*NaN"):
        fit(monitored(on_error="raise"), module=Broken(), max_epochs=3)


class Unreadable(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        raise OSError("disk is gone")


def test_data_that_cannot_be_read_cost_only_what_needs_them():
    unreadable = torch.utils.data.DataLoader(Unreadable(), 5)
    monitor = monitored(ood={"svhn": loader(OOD), "lost": unreadable})
    with pytest.warns(OODMonitorWarning, match="the OOD set 'lost' failed: OSError: disk is gone") as caught:
        fit(monitor)
    assert len(told(caught)) == 1
    found = values(monitor)
    assert found["rmd", "svhn"] > 0.5
    assert all(found["rmd", name] != found["rmd", name] for name in ("lost", "mean"))
    monitor = OODMonitor({"rmd": RMD(), "msp": MaxSoftmax(None)}, ood={"svhn": loader(OOD)}, fit_loader=unreadable)
    with pytest.warns(OODMonitorWarning, match="rmd could not be fitted in epoch 0. OSError: disk is gone"):
        fit(monitor)
    assert values(monitor)["msp", "svhn"] > 0.5


def test_a_detector_that_cannot_score_is_nan():
    class Fails(MaxSoftmax):
        def predict_logits(self, logits):
            raise ArithmeticError("no")

    monitor = OODMonitor({"rmd": RMD(), "fails": Fails(None)}, ood={"svhn": loader(OOD)})
    with pytest.warns(OODMonitorWarning, match="'fails' failed to score: ArithmeticError: no"):
        fit(monitor)
    found = values(monitor)
    assert found["rmd", "svhn"] > 0.5
    assert found["fails", "svhn"] != found["fails", "svhn"]


def test_an_empty_set_is_nan():
    monitor = monitored(ood={"svhn": loader(OOD), "empty": []})
    with pytest.warns(OODMonitorWarning, match="no result on 'empty': there are 37 ID samples and 0 OOD samples"):
        fit(monitor)
    assert values(monitor)["rmd", "svhn"] > 0.5


@pytest.mark.slow
def test_a_checkpoint_that_monitors_a_failed_metric_is_written_all_the_same(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="ood/rmd/svhn/AUROC", mode="max")
    with pytest.warns(OODMonitorWarning):
        fit(monitored(), checkpoint, module=Broken(epoch=0), max_epochs=2)
    assert checkpoint.best_model_path.endswith("epoch=1-step=12.ckpt")


class EndsEarly(RMD):
    """Takes Ctrl-C as a wish to end its training, as flows do."""

    def fit_moments(self, moments):
        self.interrupted = True
        return super().fit_moments(moments)


def test_ctrl_c_in_a_fit_that_takes_it_as_its_own_stops_the_training_too():
    monitor = OODMonitor({"ends": EndsEarly()}, head="model.fc", ood={"svhn": loader(OOD)})
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(monitor, max_epochs=3)
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores it from here on
    assert monitor.history == []


class TwoHeads(Classifier):
    """Half of the classes have a head of their own, which is run last."""

    def __init__(self):
        super().__init__()
        self.model.pair = torch.nn.Linear(16, 2)

    def forward(self, x):
        z = self.model.features(x)
        logits = self.model.fc(z)
        self.model.pair(z)
        return logits


@pytest.mark.parametrize("refit", ["pass", "stream"])
def test_a_head_with_too_few_outputs_for_the_classes_is_refused(refit):
    with pytest.raises(EncodingError, match=r"model\.pair gives 2 logits, but there is a sample of class 3.*model\.fc"):
        fit(monitored(head="model.pair", refit=refit), module=TwoHeads())
    monitor = monitored(
        head=None, ood={"svhn": loader((OOD[0], OOD[1] + 99))}, refit=refit
    )  # labels of OOD data are free
    fit(monitor, module=TwoHeads())
    assert monitor.head == "model.fc"
    assert values(monitor)["rmd", "svhn"] > 0.5


@pytest.mark.parametrize("refit", ["pass", "stream"])
def test_few_samples_for_the_features_are_told_once_in_many_epochs(refit):
    few, seen = loader(first(TRAIN, 70)), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", NumericalWarning)
        warnings.showwarning = lambda message, category, *place: seen.append(str(message))
        monitor = OODMonitor({"rmd": RMD(), "md": Mahalanobis()}, ood={"svhn": loader(OOD)}, refit=refit)
        fit(monitor, train=few, max_epochs=2)
        assert len(seen) == 1
        assert seen[0].startswith("70 samples are few for the covariance of 16 features")
        auto = OODMonitor({"rmd": RMD(shrinkage="auto")}, ood={"svhn": loader(OOD)}, refit=refit)
        fit(auto, train=few)
    assert len(seen) == 1
    assert auto.detectors["rmd"].intensity > 0
