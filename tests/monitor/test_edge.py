"""Unusual runs: sanity check, limits, several validations, none at all, and failures."""

from contextlib import nullcontext

import callback_kit as kit
import oracle
import pytest
import torch
from callback_kit import OOD, OTHER, TRAIN, VAL, Classifier, features_of, fit, loader, monitored, told, values
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.detector import KNN, MaxSoftmax
from torch.utils.data import Dataset

from rmd_plugin import RMD, Mahalanobis
from rmd_plugin.monitor.callback import OODMonitor, OODMonitorWarning
from rmd_plugin.monitor.fitting import Share

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


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


@pytest.mark.parametrize(
    ("limits", "options", "count"),
    [
        ({"fast_dev_run": True}, {}, 16),
        ({"limit_train_batches": 2}, {}, 32),
        ({"limit_train_batches": 2}, {"limit_fit_batches": 1.0}, 90),
        ({}, {"limit_fit_batches": 2.0}, 32),  # as LightningCLI may read 2
    ],
)
def test_limited_training_limits_the_fit_unless_told_otherwise(limits, options, count):
    monitor = OODMonitor({"knn": KNN(None, k=2)}, ood={"svhn": loader(OOD)}, **options)
    fit(monitor, **limits)
    assert monitor.detectors["knn"].knn.n_samples_fit_ == count


def test_limited_validation_scores_what_was_validated():
    monitor = monitored()
    _, module = fit(monitor, limit_val_batches=1)
    [((rows,), _)] = Share(loader((torch.arange(len(OOD[1])),)), limit=1)
    expected = auroc_of(module, val=first(VAL, 16), ood=(OOD[0][rows], OOD[1][rows]))
    assert values(monitor)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)


def test_several_validation_dataloaders_are_all_id_unless_they_are_named():
    half = len(VAL[1]) // 2
    split = [loader(first(VAL, half)), loader(OTHER), loader((VAL[0][half:], VAL[1][half:]))]
    monitor = monitored(ood_dataloaders={1: "noise"})
    _, module = fit(monitor, val=split)
    assert values(monitor)["rmd", "svhn"] == pytest.approx(auroc_of(module), abs=1e-12)
    assert values(monitor)["rmd", "noise"] == pytest.approx(auroc_of(module, ood=OTHER), abs=1e-12)


def test_half_precision_is_that_of_the_training():
    monitor = monitored()
    _, module = fit(monitor, precision="bf16-mixed")
    module.eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        z, z_id, z_ood = (module.model.features(data[0]).float() for data in (TRAIN, VAL, OOD))
    expected = oracle.auroc(oracle.rmd(z, TRAIN[1], z_id), oracle.rmd(z, TRAIN[1], z_ood))
    assert values(monitor)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)


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


def check_fitted_to_final_weights(monitor, module):
    z = features_of(module, OOD[0])
    expected = RMD().fit_features(features_of(module, TRAIN[0]), TRAIN[1]).predict_features(z)
    torch.testing.assert_close(monitor.detectors["rmd"].predict_features(z), expected)


@pytest.mark.parametrize("refit", ["pass", "stream"])
def test_without_validation_the_detectors_are_fitted_and_saved_and_one_warning_says_so(tmp_path, refit):
    monitor = monitored(refit=refit, every_n_epochs=2)
    with pytest.warns(OODMonitorWarning, match="no validation") as caught:
        _, module = fit(monitor, ModelCheckpoint(tmp_path, save_last=True), max_epochs=4, limit_val_batches=0)
    assert len(told(caught)) == 1
    assert [(row["epoch"], row["metric"]) for row in monitor.history] == [(1, "fit_seconds"), (3, "fit_seconds")]
    assert OODMonitor.load_detectors(tmp_path / "last.ckpt")["rmd"].fitted
    if refit == "pass":
        check_fitted_to_final_weights(monitor, module)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 4, "check_val_every_n_epoch": 2}, [12, 24]),
        ({"max_epochs": 2, "val_check_interval": 0.5}, [3, 6, 9, 12]),
        ({"max_epochs": 3, "every_n_epochs": 2}, [12, 18]),
        ({"max_epochs": 2, "val_check_interval": 4}, [4, 10, 12]),
        ({"max_steps": 9, "max_epochs": -1}, [6, 9]),
    ],
)
def test_validation_decides_when_the_detectors_are_fitted_and_so_does_the_end_of_the_training(options, steps):
    monitor = monitored(every_n_epochs=options.pop("every_n_epochs", 1))
    fit(monitor, **options)
    assert [row["step"] for row in monitor.history if row["metric"] == "fit_seconds"] == steps


def test_a_monitor_that_is_used_again_is_fitted_to_the_new_weights():
    monitor = monitored()
    for seed in (1, 2):
        module = Classifier()
        torch.nn.init.normal_(module.model.body[0].weight, generator=torch.Generator().manual_seed(seed))
        with pytest.warns(OODMonitorWarning) if seed == 1 else nullcontext():  # told once
            fit(monitor, module=module, limit_val_batches=0)
        check_fitted_to_final_weights(monitor, module)


def test_barebones_training_logs_nothing_but_keeps_the_history():
    monitor = monitored()
    trainer, _ = fit(monitor, barebones=True, enable_checkpointing=None, logger=None, num_sanity_val_steps=None)
    assert epochs(monitor) == [0]
    assert not trainer.callback_metrics


# -- failures ---------------------------------------------------------------------------------------------------------


class Broken(Classifier):
    """Gives NaN features to a part of the data to fit on in one epoch."""

    def __init__(self, epoch=1):
        super().__init__()
        self.bad_epoch = epoch

    def forward(self, x):
        hit = self.trainer.validating and self.trainer.current_epoch == self.bad_epoch
        return self.model(x * torch.nan if hit and len(x) == len(TRAIN[1]) % 16 else x)


def test_features_that_are_nan_for_an_epoch_cost_that_epochs_metrics_and_one_warning():
    assert len({len(TRAIN[1]) % 16, len(OOD[1]) % 16, len(VAL[1]) % 16}) == 3
    monitor = OODMonitor(
        {"rmd": RMD(), "md": Mahalanobis(), "knn": KNN(None, k=2), "msp": MaxSoftmax(None)},
        head="model.fc",
        ood={"svhn": loader(OOD)},
    )
    with pytest.warns(OODMonitorWarning) as caught:
        trainer, _ = fit(monitor, module=Broken(), max_epochs=3)
    assert trainer.current_epoch == 3
    messages = told(caught)
    assert ["could not be fitted in epoch 1" in message for message in messages] == [True] * 3
    assert "NaN" in messages[0]
    for epoch in range(3):
        for (detector, _), value in values(monitor, epoch=epoch).items():
            assert (value != value) == (epoch == 1 and detector != "msp")


def test_a_checkpoint_of_a_failed_epoch_says_so(tmp_path):
    monitor = monitored()
    with pytest.warns(OODMonitorWarning):
        fit(monitor, ModelCheckpoint(tmp_path, save_last=True), module=Broken(epoch=0))
    with pytest.warns(OODMonitorWarning, match="the checkpoint does not hold 'rmd': it could not be fitted in epoch 0"):
        assert OODMonitor.load_detectors(tmp_path / "last.ckpt") == {}


class Unreadable(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        raise OSError("disk is gone")


def test_what_fails_costs_only_what_needs_it():
    class Fails(MaxSoftmax):
        def predict_logits(self, logits):
            raise ArithmeticError("no")

    unreadable = torch.utils.data.DataLoader(Unreadable(), 5)
    monitor = monitored(
        {"rmd": RMD(), "fails": Fails(None)}, ood={"svhn": loader(OOD), "lost": unreadable, "empty": []}
    )
    with pytest.warns(OODMonitorWarning) as caught:
        fit(monitor)
    for message in ("'lost' failed: OSError", "'fails' failed to score: ArithmeticError", "'empty': there are 37 ID"):
        assert sum(message in text for text in told(caught)) == 1
    assert values(monitor)["rmd", "svhn"] > 0.5
    lost = {key for key, value in values(monitor).items() if value != value}
    assert lost == values(monitor).keys() - {("rmd", "svhn")}
    monitor = monitored({"rmd": RMD(), "msp": MaxSoftmax(None)}, fit_loader=unreadable)
    with pytest.warns(OODMonitorWarning, match="rmd could not be fitted in epoch 0. OSError: disk is gone"):
        fit(monitor)
    assert values(monitor)["msp", "svhn"] > 0.5
