"""What the user sees: metrics, names, detectors, OOD sets, choices of the fit."""

import csv

import callback_kit as kit
import oracle
import pytest
import pytorch_lightning as pl
import torch
from callback_kit import OOD, OTHER, TRAIN, VAL, Classifier, features_of, fit, loader, values
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_ood.detector import KNN, MahalanobisODIN, MaxSoftmax
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from rmd_plugin import RMD, Mahalanobis
from rmd_plugin.compare.adapters import EncodingError
from rmd_plugin.compare.metrics import METRICS
from rmd_plugin.monitor.callback import OODMonitor

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def test_the_metrics_are_those_of_the_textbook_on_the_networks_features(tmp_path):
    monitor = OODMonitor({"rmd": RMD(), "md": Mahalanobis()}, head="model.fc", ood={"svhn": loader(OOD)})
    checkpoint = ModelCheckpoint(tmp_path, monitor="ood/rmd/svhn/AUROC", mode="max")
    trainer, module = fit(monitor, checkpoint, tmp_path=tmp_path)
    z, z_id, z_ood = (features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
    for name, score in (("rmd", oracle.rmd), ("md", oracle.mahalanobis)):
        expected = oracle.auroc(score(z, TRAIN[1], z_id), score(z, TRAIN[1], z_ood))
        assert values(monitor)[name, "svhn"] == pytest.approx(expected, abs=1e-12)
        assert float(trainer.callback_metrics[f"ood/{name}/svhn/AUROC"]) == pytest.approx(expected, abs=1e-6)
    assert 0.5 < expected < 1
    assert checkpoint.best_model_score == trainer.callback_metrics["ood/rmd/svhn/AUROC"]
    rmd = OODMonitor.load_detectors(checkpoint.best_model_path)["rmd"]
    assert torch.equal(rmd.predict_features(z_ood), monitor.detectors["rmd"].predict_features(z_ood))


def test_one_forward_pass_serves_all_detectors_and_validation_needs_no_second_one():
    calls = 0  # not an attribute of the module: the monitor puts those back

    class Counting(Classifier):
        def forward(self, x):
            nonlocal calls
            calls += len(x)
            return super().forward(x)

    module = Counting()
    detectors = {"rmd": RMD(), "md": Mahalanobis(), "msp": MaxSoftmax(None), "knn": KNN(None, k=3)}
    fit(OODMonitor(detectors, head="model.fc", ood={"svhn": loader(OOD)}), module=module)
    # training, the pass of the refit, validation, OOD, and one batch that is tried before
    assert calls == 2 * len(TRAIN[1]) + len(VAL[1]) + len(OOD[1]) + 16
    calls = 0
    fit(OODMonitor(detectors, head="model.fc", ood={"svhn": loader(OOD)}, refit="stream"), module=module)
    assert calls == len(TRAIN[1]) + len(VAL[1]) + len(OOD[1])


def test_names_in_the_log_are_those_of_the_manual(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = OODMonitor({"rmd": RMD(), "msp": MaxSoftmax(None)}, ood={"svhn": loader(OOD), "noise": loader(OTHER)})
    trainer, _ = fit(monitor, logger=logger, log_every_n_steps=1)
    metrics = (*METRICS, "detected")
    names = {f"ood/{d}/{s}/{m}" for d in ("rmd", "msp") for s in ("svhn", "noise", "mean") for m in metrics}
    names |= {"ood/rmd/fit_seconds", "ood/rmd/threshold", "ood/msp/threshold"}
    assert {n for n in trainer.callback_metrics if n.startswith("ood/")} == names
    with open(tmp_path / "metrics.csv") as file:
        [row] = [row for row in csv.DictReader(file) if row["ood/rmd/svhn/AUROC"]]
    for (detector, ood), value in values(monitor).items():
        assert float(row[f"ood/{detector}/{ood}/AUROC"]) == pytest.approx(value, abs=1e-6)
    assert values(monitor)["rmd", "mean"] == pytest.approx(
        sum(values(monitor)["rmd", name] for name in ("svhn", "noise")) / 2
    )


def test_ood_data_may_come_from_loaders_from_validation_dataloaders_or_from_labels():
    everything = torch.cat([VAL[0], OOD[0]]), torch.cat([VAL[1], torch.full((len(OOD[1]),), -7)])
    ways = {
        "svhn": (OODMonitor({"rmd": RMD()}, ood={"svhn": loader((OOD[0],))}), loader(VAL)),
        "extra": (OODMonitor({"rmd": RMD()}, ood_dataloaders={1: "extra"}), [loader(VAL), loader(OOD)]),
        "unknown": (OODMonitor({"rmd": RMD()}), loader(everything, shuffle=True)),
    }
    found = {}
    for name, (monitor, val) in ways.items():
        fit(monitor, val=val)
        assert values(monitor).keys() == {("rmd", name), ("rmd", "mean")}
        found[name] = values(monitor)["rmd", name], values(monitor, "FPR95TPR")["rmd", name]
    assert found["svhn"] == pytest.approx(found["extra"], abs=1e-9)
    assert found["svhn"] == pytest.approx(found["unknown"], abs=1e-9)


def test_a_datamodule_may_offer_a_clean_fit_set_and_ood_sets():
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader((TRAIN[0] + 10, TRAIN[1]))

        def fit_dataloader(self):
            return loader(TRAIN)

        def val_dataloader(self):
            return loader(VAL)

        def ood_dataloaders(self):
            return {"svhn": loader(OOD)}

    monitor, module = OODMonitor({"rmd": RMD()}), Classifier()
    kit.trainer(None, monitor).fit(module, datamodule=Data())
    z, z_id, z_ood = (features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
    expected = oracle.auroc(*(oracle.rmd(z, TRAIN[1], x) for x in (z_id, z_ood)))
    assert values(monitor)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)


def test_an_encoder_is_the_other_way_to_the_features():
    module = Classifier()
    by_encoder = OODMonitor({"rmd": RMD(), "msp": MaxSoftmax(None)}, encoder="model.body", ood={"svhn": loader(OOD)})
    fit(by_encoder, module=module)
    by_head = OODMonitor({"rmd": RMD(), "msp": MaxSoftmax(None)}, head="model.fc", ood={"svhn": loader(OOD)})
    fit(by_head)
    assert values(by_encoder) == pytest.approx(values(by_head), abs=1e-12)


# -- the fit ----------------------------------------------------------------------------------------------------------


def test_the_stream_takes_the_moments_of_the_training_passes_of_the_epoch():
    class Keeping(Classifier):
        def training_step(self, batch, batch_idx):
            z = self.model.features(batch[0])
            self.kept = [] if batch_idx == 0 else self.kept
            self.kept.append((z.detach(), batch[1]))
            return nn.functional.cross_entropy(self.model.fc(z), batch[1])

    module = Keeping()
    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)}, refit="stream")
    fit(monitor, module=module, train=loader(TRAIN, shuffle=True), max_epochs=2)
    z, y = (torch.cat(part) for part in zip(*module.kept, strict=True))
    assert len(z) == len(TRAIN[1])
    z_id, z_ood = features_of(module, VAL[0]), features_of(module, OOD[0])
    expected = oracle.auroc(oracle.rmd(z, y, z_id), oracle.rmd(z, y, z_ood))
    assert values(monitor, epoch=1)["rmd", "svhn"] == pytest.approx(expected, abs=1e-12)


def test_a_detector_that_is_fitted_on_inputs_is_refused():
    module = Classifier()
    with pytest.raises(ValueError, match="'odin' is fitted on inputs"):
        fit(OODMonitor({"odin": MahalanobisODIN(module.model.features)}), module=module)


def test_the_fit_set_is_the_part_of_the_dataset_that_is_trained_on():
    monitor = OODMonitor({"knn": KNN(None, k=2)}, ood={"svhn": loader(OOD)})
    _, module = fit(monitor, train=loader(TRAIN, sampler=SubsetRandomSampler(range(30))))
    expected = nn.functional.normalize(features_of(module, TRAIN[0][:30]))
    assert monitor.detectors["knn"].knn._fit_X == pytest.approx(expected.numpy(), abs=1e-5)


def test_training_data_that_cannot_be_read_twice_asks_for_a_fit_loader():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(*TRAIN, strict=True))

    with pytest.raises(EncodingError, match="fit_loader="):
        fit(OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}), train=DataLoader(Stream(), 16))
    monitor = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, refit="stream")
    fit(monitor, train=DataLoader(Stream(), 16))
    assert values(monitor)["rmd", "svhn"] > 0.5


def test_epochs_can_be_left_out_and_monitoring_callbacks_still_find_the_metric(tmp_path):
    monitor = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, every_n_epochs=2, warmup_epochs=2)
    seen = []

    class Watch(pl.Callback):
        def on_validation_end(self, trainer, module):
            seen.append(float(trainer.callback_metrics["ood/rmd/svhn/AUROC"]))

    logger = CSVLogger(tmp_path, name="", version="")
    callbacks = [
        Watch(),
        ModelCheckpoint(tmp_path, monitor="ood/rmd/svhn/AUROC", mode="max"),
        EarlyStopping("ood/rmd/mean/FPR95TPR", check_finite=False, patience=9),
    ]
    fit(monitor, *callbacks, max_epochs=6, logger=logger, log_every_n_steps=1)
    found = [row["value"] for row in monitor.history if (row["ood"], row["metric"]) == ("svhn", "AUROC")]
    assert sorted({row["epoch"] for row in monitor.history}) == [3, 5]
    assert seen[:3] == pytest.approx([torch.nan] * 3, nan_ok=True)
    assert seen[3:] == pytest.approx([found[0], found[0], found[1]], abs=1e-6)
    with open(tmp_path / "metrics.csv") as file:  # loggers get no repetitions
        assert [row["epoch"] for row in csv.DictReader(file) if row["ood/rmd/svhn/AUROC"]] == ["3", "5"]


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"detectors": RMD()}, TypeError, "by name"),
        ({"detectors": {"rmd": lambda module: RMD()}}, TypeError, "'rmd' must be"),
        ({"detectors": {"a/b": RMD()}}, TypeError, "without '/'"),
        ({"ood": [loader(OOD)]}, TypeError, "by name.*got list"),
        ({"ood": {"svhn": OOD[0]}}, TypeError, "by name.*DataLoader.*got Tensor"),
        ({"refit": "never"}, ValueError, "refit="),
        ({"head": "fc", "encoder": "body"}, ValueError, "not both"),
        ({"ood": {"unknown": []}}, ValueError, "each once"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        OODMonitor(**{"detectors": {"rmd": RMD()}, **arguments})


def test_the_hooks_are_gone_afterwards_even_after_an_error():
    class Broken(Classifier):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    module = Broken()
    with pytest.raises(ZeroDivisionError):
        fit(OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, refit="stream"), module=module)
    assert not any(layer._forward_hooks for layer in module.modules())


def test_a_set_whose_labels_are_missing_is_told():
    with pytest.raises(EncodingError, match=r"have no labels\. Pass labels="):
        fit(OODMonitor({"rmd": RMD()}, fit_loader=DataLoader(TensorDataset(TRAIN[0]), 16)))
