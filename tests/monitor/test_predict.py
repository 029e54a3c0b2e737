"""``trainer.predict`` with the monitor: score, p-value and decision of each sample; and what trackers get."""

import resource
from types import SimpleNamespace

import callback_kit as kit
import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from callback_kit import OOD, OTHER, TRAIN, VAL, Classifier, features_of, fit, loader, told, trainer, values
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from rmd_plugin import RMD, Calibrated, OODMonitor
from rmd_plugin.monitor.callback import OODMonitorWarning, pack_history, unpack_history

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def monitored(**options):
    detectors = {"rmd": RMD(), "msp": "msp"}
    return OODMonitor(detectors, **{"head": "model.fc", "ood": {"svhn": loader(OOD)}, "alpha": 0.1, **options})


def test_predictions_are_those_of_the_detectors_of_the_checkpoint(tmp_path):
    fit(monitored(), ModelCheckpoint(tmp_path, filename="best"))
    path, file, module = tmp_path / "best.ckpt", tmp_path / "predictions.parquet", Classifier()
    monitor = monitored(predictions=file)
    returned = trainer(None, monitor).predict(module, DataLoader(OTHER[0], 7), ckpt_path=path)
    alone = trainer(None).predict(Classifier(), DataLoader(OTHER[0], 7), ckpt_path=path)
    assert all(map(torch.equal, returned, alone))
    table = monitor.predictions
    assert list(table) == [f"{name}/{column}" for name in ("rmd", "msp") for column in ("score", "p_value", "is_ood")]
    for name, detector in OODMonitor.load_detectors(path, module).items():
        np.testing.assert_allclose(table[f"{name}/score"], detector.predict(OTHER[0]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(table[f"{name}/p_value"], detector.p_value(OTHER[0]), atol=0.03)
        assert (table[f"{name}/is_ood"].to_numpy() == detector.is_ood(OTHER[0]).numpy()).mean() > 0.9
    pd.testing.assert_frame_equal(pd.read_parquet(file), table)
    assert {name: alarm.count for name, alarm in monitor.drift_alarms.items()} == {"rmd": len(table), "msp": len(table)}
    trainer(None, monitor).predict(module, DataLoader(OTHER[0].repeat(9, 1), 7), ckpt_path=path)
    assert monitor.drift_alarms["rmd"].count == 9 * len(table)


def test_several_dataloaders_are_told_apart_and_a_detector_without_a_fit_is_nan():
    monitor = monitored()
    run, module = fit(monitor)
    run.predict(module, [DataLoader(VAL[0], 16), DataLoader(OTHER[0], 16)])
    assert monitor.predictions["dataloader_idx"].tolist() == [0] * len(VAL[0]) + [1] * len(OTHER[0])
    unfitted = monitored()
    with pytest.warns(OODMonitorWarning, match="'rmd' failed to score"):
        trainer(None, unfitted).predict(Classifier(), DataLoader(VAL[0], 16))
    assert unfitted.predictions["rmd/score"].isna().all()
    assert unfitted.predictions["msp/score"].notna().all()


def test_a_calibration_by_folds_needs_more_than_scores_so_there_are_only_scores():
    module = Classifier()
    own = Calibrated(RMD()).fit_calibrate_features(features_of(module, TRAIN[0]), TRAIN[1], folds=3)
    monitor = OODMonitor({"own": own}, head="model.fc")
    trainer(None, monitor).predict(module, DataLoader(OTHER[0], 7))
    assert list(monitor.predictions) == ["own/score"]
    expected = own.predict_features(features_of(module, OTHER[0]))
    np.testing.assert_allclose(monitor.predictions["own/score"], expected, rtol=1e-4)


def test_the_history_of_ten_thousand_validations_takes_two_megabytes(tmp_path):
    monitor = monitored()
    fit(monitor)
    rows = [row for row in monitor.history if row["detector"] == "rmd"]
    history = [{**row, "epoch": epoch, "step": 100 * epoch} for epoch in range(10_000) for row in rows]
    packed = pack_history(history)
    torch.save(packed, tmp_path / "history.pt")
    assert (tmp_path / "history.pt").stat().st_size <= 2_000_000
    assert unpack_history(torch.load(tmp_path / "history.pt", weights_only=True)) == history


@pytest.mark.slow
def test_two_hundred_validations_need_no_more_memory():
    """Everything but the history, which grows by rows of a dozen numbers, is freed after each validation."""
    peaks = []  # MiB

    class Measure(pl.Callback):
        def on_validation_end(self, trainer, module):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

    class Data(pl.LightningDataModule):
        """Makes new loaders whenever it is asked."""

        def train_dataloader(self):
            return loader(kit.samples(400, 0))

        def fit_dataloader(self):
            return loader(kit.samples(400, 0))

        def val_dataloader(self):
            return loader(kit.samples(2000, 1), 500)

        def ood_dataloaders(self):
            return {"svhn": loader(kit.samples(2000, 2, shift=0.6), 500)}

    monitor = OODMonitor({"rmd": RMD(), "msp": "msp"}, head="model.fc", limit_fit_batches=1.0)
    run = trainer(None, monitor, Measure(), max_epochs=200, limit_train_batches=1)
    run.fit(Classifier(), datamodule=Data())
    assert len(values(monitor, epoch=199)) == 4
    assert peaks[-1] - peaks[30] < 10


# -- trackers ---------------------------------------------------------------------------------------------------------


def test_a_logger_without_pictures_gets_files_in_its_folder(tmp_path):
    fit(monitored(), logger=CSVLogger(tmp_path, name="", version="run"), log_every_n_steps=1)
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == {"auroc.png", "histograms-fit.png"}


@pytest.mark.slow
def test_mlflow_gets_figures_and_the_table(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger("experiment", tracking_uri=f"file:{tmp_path}/mlruns")
    monitor = monitored()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        fit(monitor, logger=logger, max_epochs=2, log_every_n_steps=1)
    client = mlflow.MlflowClient(f"file:{tmp_path}/mlruns")
    names = {item.path for item in client.list_artifacts(logger.run_id, "ood")}
    assert {"ood/fit.json", "ood/auroc", "ood/histograms-fit"} <= names
    table = pd.read_json(client.download_artifacts(logger.run_id, "ood/fit.json"), orient="split")
    row = table[(table["detector"] == "rmd") & (table["ood"] == "svhn")]
    assert row["AUROC"].tolist() == pytest.approx([values(monitor, epoch=1)["rmd", "svhn"]])  # of the last epoch alone


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_gets_figures_and_the_table(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    fit(monitored(), logger=logger, log_every_n_steps=1)
    logger.experiment.finish()
    media = [path.as_posix() for path in tmp_path.rglob("media/**/*") if path.is_file()]
    assert any("images/ood/auroc" in path for path in media)
    assert any("table/ood/fit" in path for path in media)


@pytest.mark.slow
def test_tensorboard_gets_figures(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="")
    fit(monitored(figures_dir=tmp_path / "figures"), logger=logger, log_every_n_steps=1, max_epochs=2)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"auroc.png", "histograms-fit.png"}
    events = accumulator.EventAccumulator(str(tmp_path / "logs"), size_guidance={"images": 0})
    events.Reload()
    assert [image.step for image in events.Images("ood/auroc")] == [6, 12]


class Images(SimpleNamespace):
    """Keeps what Comet's and Neptune's experiments are handed."""

    def log_figure(self, figure_name, figure, step):
        self.handed.append((figure_name, type(figure), step))

    def __getitem__(self, key):
        return SimpleNamespace(append=lambda figure, step: self.log_figure(key, figure, step))


@pytest.mark.parametrize("name", ["CometLogger", "NeptuneLogger"])
def test_comet_and_neptune_get_figures_through_their_experiments(name):
    # stand-ins with the interface of Lightning's loggers, whose packages need an account
    logger = type(name, (DummyLogger,), {"experiment": Images(handed=[])})()
    fit(monitored(), logger=logger, log_every_n_steps=1)
    assert logger.experiment.handed == [("ood/histograms-fit", Figure, 6), ("ood/auroc", Figure, 6)]


def test_figures_that_cannot_be_saved_do_not_end_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    monitor = monitored(figures_dir=tmp_path / "file", on_error="raise")
    with pytest.warns(UserWarning, match="figures could not be saved") as caught:
        fit(monitor)
    assert values(monitor)["rmd", "svhn"] > 0.5
    assert told(caught)
