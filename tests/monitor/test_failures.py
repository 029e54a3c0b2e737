"""What fails costs only what it concerns: a sample, a detector, a logger; and the advice of each error works."""

import callback_kit as kit
import numpy as np
import pytest
import torch
from callback_kit import OOD, TRAIN, VAL, Classifier, features_of, fit, loader, monitored, told, trainer, values
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_ood.detector import MaxSoftmax, fDBD
from torch import nn
from torch.utils.data import DataLoader

from rmd_plugin import RMD, OODMonitor
from rmd_plugin.monitor.callback import OODMonitorWarning

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


class Fails(MaxSoftmax):
    def predict_logits(self, logits):
        raise ArithmeticError("no")


def test_a_sample_with_nan_is_ood_and_no_other_for_any_detector():
    monitor = monitored(["rmd", "knn", "msp"])
    run, module = fit(monitor)
    x = VAL[0].repeat(5, 1)
    run.predict(module, DataLoader(x, 16))
    without = monitor.predictions
    x[40] = torch.nan
    run.predict(module, DataLoader(x, 16))
    table, others = monitor.predictions, np.arange(len(x)) != 40
    for name in ("rmd", "knn", "msp"):
        assert table.loc[40, f"{name}/is_ood"]
        assert table.loc[40, f"{name}/p_value"] == table[f"{name}/p_value"].min()
        for column in ("p_value", "is_ood"):
            assert (table[f"{name}/{column}"] == without[f"{name}/{column}"])[others].all()
        assert not monitor.drift_alarms[name].alarm


def test_nan_in_one_ood_set_costs_no_other_set():
    broken = OOD[0].clone()
    broken[3] = torch.nan
    monitor = monitored(["knn"], ood={"svhn": loader(OOD), "broken": loader((broken, OOD[1]))})
    with pytest.warns(OODMonitorWarning, match="'broken'"):
        fit(monitor)
    assert values(monitor)["knn", "svhn"] > 0.5


def test_a_detector_that_fails_in_predict_decides_nothing():
    monitor = monitored({"rmd": RMD(), "msp": MaxSoftmax(None)})
    run, module = fit(monitor)
    monitor.detectors["msp"].__class__ = Fails
    with pytest.warns(OODMonitorWarning, match="'msp' failed to score: ArithmeticError"):
        run.predict(module, DataLoader(VAL[0], 16))
    table = monitor.predictions
    assert table[["msp/score", "msp/p_value", "msp/is_ood"]].isna().all(axis=None)
    assert table["rmd/is_ood"].dtype == bool
    assert set(monitor.drift_alarms) == {"rmd"}


def test_predictions_go_to_a_folder_that_is_made_and_one_that_cannot_be_costs_a_warning(tmp_path):
    monitor = monitored(predictions=tmp_path / "new" / "predictions.parquet")
    run, module = fit(monitor)
    run.predict(module, DataLoader(VAL[0], 16))
    assert (tmp_path / "new" / "predictions.parquet").is_file()
    (tmp_path / "file").touch()
    monitor.predictions_path = tmp_path / "file" / "predictions.parquet"
    with pytest.warns(OODMonitorWarning, match="predictions"):
        assert len(run.predict(module, DataLoader(VAL[0], 16))) == 3


def test_a_network_that_diverges_does_not_end_the_training():
    class Diverging(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (torch.nan if self.current_epoch else 1)

    monitor = monitored(["vim", "rmd"])
    with pytest.warns(OODMonitorWarning) as caught:
        run, _ = fit(monitor, module=Diverging(), max_epochs=3)
    assert run.current_epoch == 3
    assert any("vim could not be fitted" in message for message in told(caught))
    for epoch in range(3):
        assert all((value != value) == (epoch > 0) for value in values(monitor, epoch=epoch).values())


def test_names_of_ood_sets_are_checked_before_the_training():
    class Data(kit.pl.LightningDataModule):
        def train_dataloader(self):
            return loader(TRAIN)

        def val_dataloader(self):
            return [loader(VAL), loader(OOD)]

        def ood_dataloaders(self):
            return {"far": loader(OOD)}

    monitor = OODMonitor({"rmd": RMD()}, ood_dataloaders={1: "far"})
    run = trainer(None, monitor)
    with pytest.raises(ValueError, match="far"):
        run.fit(Classifier(), datamodule=Data())
    assert run.global_step == 0


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_the_frameworks_detectors_score_networks_of_other_precisions(precision):
    names = ["react", "ash", "nnguide", "gradnorm", "fdbd", "she", "vim", "fused", "rmd"]
    monitor = monitored(names, on_error="raise")
    dtype = torch.float64 if precision == "64-true" else torch.bfloat16
    fit(monitor, precision=precision, module=Classifier().to(dtype))
    assert all(value == value for value in values(monitor).values())


def test_the_advice_for_a_head_that_is_no_linear_layer_works_when_it_is_followed():
    class Wrapped(Classifier):
        def __init__(self):
            super().__init__()
            self.model.fc = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, kit.CLASSES))

    for detector in ("react", "vim", fDBD):
        with pytest.raises(ValueError, match=r"'d' cannot be monitored.*head=.*model\.fc\.1") as refused:
            fit(monitored({"d": detector}, head="model.fc"), module=Wrapped())
        assert "linear_probe" not in str(refused.value)
    monitor = monitored({"d": "react"}, head="model.fc.1")
    fit(monitor, module=Wrapped())
    assert values(monitor)["d", "svhn"] == values(monitor)["d", "svhn"]


def test_a_validation_set_of_foreign_labels_is_told_without_any_fit_too():
    other = loader((OOD[0], OOD[1] + 7))
    monitor = monitored({"msp": MaxSoftmax(None)})
    with pytest.warns(OODMonitorWarning, match=r'ood_dataloaders=\{1: "name"\}'):
        fit(monitor, val=[loader(VAL), other])


def test_a_predict_step_may_leave_out_the_number_of_the_batch():
    class Steps(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch["a"]), batch["y"])

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self(batch["a"])

        def predict_step(self, batch):
            return self(batch["a"])

    def named(data):
        return DataLoader([{"a": x, "y": y} for x, y in zip(*data, strict=True)], 16)

    monitor = monitored(ood={"svhn": named(OOD)})
    fit(monitor, module=Steps(), train=named(TRAIN), val=named(VAL), num_sanity_val_steps=1)
    assert values(monitor)["rmd", "svhn"] > 0.5


def test_a_logger_that_fails_keeps_no_figures_from_the_others(tmp_path):
    class Broken(DummyLogger):
        def log_image(self, *args, **kwargs):
            raise ConnectionError("gone")

    with pytest.warns(UserWarning, match="gone"):
        fit(monitored(), logger=[Broken(), CSVLogger(tmp_path, name="", version="run")], log_every_n_steps=1)
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"auroc.png", "histograms-fit.png"}


def test_a_test_without_a_checkpoint_names_what_is_missing():
    with pytest.warns(OODMonitorWarning, match=r"not fitted.*ckpt_path=.*fit_loader="):
        trainer(None, monitored()).test(Classifier(), loader(VAL), verbose=False)


def test_other_weights_of_a_plain_module_are_refused_with_advice_that_works(tmp_path):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = kit.Net()

        def forward(self, x):
            return self.model(x)

    path, module = tmp_path / "best.ckpt", Plain()
    fit(monitored(), kit.pl.callbacks.ModelCheckpoint(tmp_path, filename="best"))
    with pytest.raises(ValueError, match="load_state_dict"):
        OODMonitor.load_detectors(path, module)
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    rmd = OODMonitor.load_detectors(path, module)["rmd"]
    assert torch.equal(rmd.predict(VAL[0]), rmd.predict_features(features_of(module, VAL[0])))
