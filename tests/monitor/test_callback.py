"""What the user sees: metrics, names, detectors, OOD sets, choices of the fit."""

import csv
import logging

import callback_kit as kit
import oracle
import pytest
import pytorch_lightning as pl
import torch
from callback_kit import OOD, OTHER, TRAIN, VAL, Classifier, features_of, fit, loader, told, values
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_ood.detector import KNN, ODIN, EnergyBased, KLMatching, MahalanobisODIN, MaxSoftmax, ViM
from pytorch_ood.detector import Mahalanobis as FrameworkMahalanobis
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from rmd_plugin import RMD, ClassMoments, Mahalanobis
from rmd_plugin.compare.adapters import adopt
from rmd_plugin.compare.metrics import METRICS
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.monitor.callback import OODMonitor, OODMonitorWarning
from rmd_plugin.monitor.refit import Refit

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


@pytest.mark.slow
def test_every_detector_of_the_framework_gets_what_it_would_get_without_lightning():
    framework = {
        "msp": MaxSoftmax(None),
        "energy": EnergyBased(None),
        "klm": KLMatching(None),
        "knn": KNN(None, k=5),
        "md": FrameworkMahalanobis(None),
        "vim": lambda module: ViM(None, d=4, w=module.model.fc.weight, b=module.model.fc.bias),
        "odin": lambda module: ODIN(module.model),
        "inputs": lambda module: MahalanobisODIN(module.model.features, eps=0.1),
    }
    monitor = OODMonitor(framework, ood={"svhn": loader(OOD)})
    _, module = fit(monitor, max_epochs=2)
    module.eval()
    net = module.model

    def score(detector, x):
        with torch.no_grad():
            z = net.features(x)
            if hasattr(detector, "predict_logits"):
                return detector.predict_logits(net.fc(z))
            return detector.predict_features(z)

    with torch.no_grad():
        z, logits = net.features(TRAIN[0]), net(TRAIN[0])
    fitted = {
        "msp": MaxSoftmax(None),
        "energy": EnergyBased(None),
        "klm": KLMatching(None).fit_logits(logits, TRAIN[1]),
        "knn": KNN(None, k=5).fit_features(z, TRAIN[1]),
        "md": FrameworkMahalanobis(None).fit_features(z, TRAIN[1]),
        "vim": ViM(None, d=4, w=net.fc.weight, b=net.fc.bias).fit_features(z, TRAIN[1]),
    }
    result = values(monitor, epoch=1)
    for name, detector in fitted.items():
        expected = oracle.auroc(score(detector, VAL[0]), score(detector, OOD[0]))
        assert result[name, "svhn"] == pytest.approx(expected, abs=1e-3), name
    odin = ODIN(net)
    assert result["odin", "svhn"] == pytest.approx(oracle.auroc(odin(VAL[0]).detach(), odin(OOD[0]).detach()), abs=1e-3)
    fitted_on_inputs = MahalanobisODIN(net.features, eps=0.1).fit(loader(TRAIN))
    expected = oracle.auroc(fitted_on_inputs(VAL[0]).detach(), fitted_on_inputs(OOD[0]).detach())
    assert result["inputs", "svhn"] == pytest.approx(expected, abs=1e-3)


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
    # training, the pass of the refit, validation, OOD
    assert calls == 2 * len(TRAIN[1]) + len(VAL[1]) + len(OOD[1])
    calls = 0
    fit(OODMonitor(detectors, head="model.fc", ood={"svhn": loader(OOD)}, refit="stream"), module=module)
    assert calls == len(TRAIN[1]) + len(VAL[1]) + len(OOD[1])


def test_detectors_with_the_same_options_share_their_moments():
    detectors = {"a": RMD(), "b": Mahalanobis(), "c": RMD(normalize=True), "d": KNN(None), "e": MaxSoftmax(None)}
    adapters = {name: adopt(detector) for name, detector in detectors.items()}
    assert Refit(adapters, torch.device("cpu")).groups == [("a", "b"), ("c",), ("d",)]


def test_names_in_the_log_are_those_of_the_manual(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = OODMonitor({"rmd": RMD(), "msp": MaxSoftmax(None)}, ood={"svhn": loader(OOD), "noise": loader(OTHER)})
    trainer, _ = fit(monitor, logger=logger, log_every_n_steps=1, max_epochs=2)
    metrics = (*METRICS, "FPR@alpha")
    names = {f"ood/{d}/{s}/{m}" for d in ("rmd", "msp") for s in ("svhn", "noise", "mean") for m in metrics}
    names |= {"ood/rmd/fit_seconds", "ood/rmd/threshold", "ood/msp/threshold"}
    assert {n for n in trainer.callback_metrics if n.startswith("ood/")} == names
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["ood/rmd/svhn/AUROC"]]
    assert [row["epoch"] for row in rows] == ["0", "1"]
    for row, epoch in zip(rows, (0, 1), strict=True):
        for (detector, ood), value in values(monitor, epoch=epoch).items():
            assert float(row[f"ood/{detector}/{ood}/AUROC"]) == pytest.approx(value, abs=1e-6)
        both = [values(monitor, epoch=epoch)["rmd", name] for name in ("svhn", "noise")]
        assert values(monitor, epoch=epoch)["rmd", "mean"] == pytest.approx(sum(both) / 2)
    fits = [row for row in monitor.history if row["metric"] == "fit_seconds"]
    assert [row["epoch"] for row in fits] == [0, 1]
    assert all(row["value"] > 0 and row["step"] > 0 for row in fits)


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


def test_the_head_that_was_found_is_named_in_the_log(caplog):
    monitor = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)})
    module = Classifier()
    run = kit.trainer(None, monitor)
    logger = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    logger.addHandler(caplog.handler)
    logging.getLogger("pytorch_lightning").setLevel(logging.INFO)
    run.fit(module, loader(TRAIN), loader(VAL))
    logger.removeHandler(caplog.handler)
    assert monitor.head == "model.fc"
    said = {id(record): record.getMessage() for record in caplog.records}.values()  # two handlers see the same record
    layer = module.model.fc
    assert [text for text in said if "head" in text] == [
        f"OODMonitor: the head is 'model.fc', {layer}; the features are its input."
    ]


def test_a_wrong_head_is_refused_before_anything_runs_and_the_candidates_are_listed():
    with pytest.raises(EncodingError, match=r"no layer named 'model.fx'. Candidates: .*model\.fc"):
        fit(OODMonitor({"rmd": RMD()}, head="model.fx"))


def test_a_head_that_is_built_by_the_module_itself_is_found_later():
    class Late(Classifier):
        def __init__(self):
            super().__init__()
            self.built = self.model
            del self.model

        def configure_model(self):
            self.model = self.built

    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)})
    fit(monitor, module=Late())
    assert values(monitor)["rmd", "svhn"] > 0.5
    with pytest.raises(EncodingError, match=r"no layer named 'model\.fx'"):
        fit(OODMonitor({"rmd": RMD()}, head="model.fx"), module=Late())


@pytest.mark.parametrize("encoder", ["model.body", "model.features", "callable"])
def test_an_encoder_is_the_other_way_to_the_features(encoder):
    module = Classifier()
    chosen = (lambda x: module.model.features(x)) if encoder == "callable" else encoder
    by_encoder = OODMonitor({"rmd": RMD(), "msp": MaxSoftmax(None)}, encoder=chosen, ood={"svhn": loader(OOD)})
    fit(by_encoder, module=module)
    by_head = OODMonitor({"rmd": RMD(), "msp": MaxSoftmax(None)}, head="model.fc", ood={"svhn": loader(OOD)})
    fit(by_head)
    assert values(by_encoder) == pytest.approx(values(by_head), abs=1e-12)


def test_dicts_and_batches_of_any_other_kind():
    class Dicts(Classifier):
        def forward(self, pixels, extra=None):
            return self.model(pixels)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch["pixels"]), batch["labels"])

        def validation_step(self, batch, batch_idx):
            self(batch["pixels"])

    class Odd(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[2]), batch[0])

        def validation_step(self, batch, batch_idx):
            self(batch[2])

    def dicts(data):
        rows = [{"pixels": x, "labels": y} for x, y in zip(*data, strict=True)]
        return DataLoader(rows, 16)

    def odd(data):
        return loader((data[1], torch.arange(len(data[1])), data[0]))

    plain = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)})
    fit(plain)
    with_dicts = OODMonitor({"rmd": RMD()}, ood={"svhn": dicts(OOD)})
    fit(with_dicts, module=Dicts(), train=dicts(TRAIN), val=dicts(VAL))
    options = {"forward": lambda module, batch: module(batch[2]), "labels": lambda batch: batch[0]}
    with_callables = OODMonitor({"rmd": RMD()}, ood={"svhn": odd(OOD)}, **options)
    fit(with_callables, module=Odd(), train=odd(TRAIN), val=odd(VAL))
    assert values(plain) == values(with_dicts) == values(with_callables)


def test_a_module_whose_step_never_comes_by_the_head_is_run_once_more():
    class Blind(Classifier):
        def validation_step(self, batch, batch_idx):
            pass

    blind, seeing = (OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)}) for _ in range(2))
    fit(blind, module=Blind())
    fit(seeing)
    assert values(blind) == values(seeing)


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


def test_other_detectors_stream_too_but_not_those_that_need_inputs():
    monitor = OODMonitor({"knn": KNN(None, k=3)}, head="model.fc", ood={"svhn": loader(OOD)}, refit="stream")
    fit(monitor)
    assert values(monitor)["knn", "svhn"] > 0.5
    on_inputs = OODMonitor({"odin": lambda m: MahalanobisODIN(m.model.features)}, refit="stream")
    with pytest.raises(ValueError, match="refit='stream' has no inputs to fit odin on"):
        fit(on_inputs)
    with pytest.raises(ValueError, match="has to be called"):
        fit(OODMonitor({"rmd": RMD()}, encoder="model.features", refit="stream"))


def spy_moments(monkeypatch):
    """Labels of the samples that each ClassMoments has seen."""
    seen = []
    update = ClassMoments._accumulate

    def spy(self, features, labels):
        seen.append(labels.clone())
        return update(self, features, labels)

    monkeypatch.setattr(ClassMoments, "_accumulate", spy)
    return seen


def test_a_limited_fit_is_spread_over_a_set_that_is_sorted_by_class(monkeypatch):
    order = TRAIN[1].argsort(stable=True)
    by_class = TRAIN[0][order], TRAIN[1][order]
    for limit, count in ((2, 20), (0.5, 50)):
        seen = spy_moments(monkeypatch)
        monitor = OODMonitor({"rmd": RMD(shrinkage="auto")}, ood={"svhn": loader(OOD)}, limit_fit_batches=limit)
        fit(monitor, train=loader(by_class, 10))
        labels = torch.cat(seen)
        assert len(labels) == count
        assert (labels.bincount() - count / 4).abs().max() <= 1


def test_the_fit_set_is_the_part_of_the_dataset_that_is_trained_on(monkeypatch):
    seen = spy_moments(monkeypatch)
    part = torch.arange(30)
    train = loader(TRAIN, sampler=SubsetRandomSampler(part))
    fit(OODMonitor({"rmd": RMD(shrinkage="auto")}, ood={"svhn": loader(OOD)}), train=train)
    assert torch.equal(torch.cat(seen), TRAIN[1][part])


def test_a_loader_of_the_users_is_fitted_on_instead(monkeypatch):
    for chosen in (loader(VAL, 5, shuffle=True), [VAL], loader(VAL, batch_size=len(VAL[1]))):
        seen = spy_moments(monkeypatch)
        monitor = OODMonitor({"rmd": RMD(shrinkage="auto")}, ood={"svhn": loader(OOD)}, fit_loader=chosen)
        fit(monitor)
        assert torch.equal(torch.cat(seen), VAL[1])


def test_training_data_that_cannot_be_read_twice_asks_for_a_fit_loader():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(*TRAIN, strict=True))

    with pytest.raises(EncodingError, match=r"got DataLoader over Stream\. Pass fit_loader=.*refit='stream'"):
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
        ({"detectors": {}}, TypeError, "detectors by name"),
        ({"detectors": RMD()}, TypeError, "detectors by name"),
        ({"detectors": {"rmd": 3}}, TypeError, "'rmd' must be a pytorch_ood Detector.*got int"),
        ({"detectors": {"a/b": RMD()}}, ValueError, "without '/'"),
        ({"refit": "never"}, ValueError, "refit must be one of"),
        ({"on_error": "ignore"}, ValueError, "on_error must be one of"),
        ({"every_n_epochs": 0}, ValueError, "every_n_epochs >= 1"),
        ({"head": "fc", "encoder": "body"}, ValueError, "not both"),
        ({"ood": {"mean": []}}, ValueError, "not 'mean'"),
        ({"ood": {"unknown": []}}, ValueError, "must not be named 'unknown'"),
        ({"ood": {"a": []}, "ood_dataloaders": {1: "a"}}, ValueError, "each once"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        OODMonitor(**{"detectors": {"rmd": RMD()}, **arguments})


def test_detectors_of_ours_may_be_given_by_name():
    assert list(OODMonitor(["RMD", "Mahalanobis"]).detectors) == ["rmd", "mahalanobis"]
    assert isinstance(OODMonitor({"relative": "RMD"}).detectors["relative"], RMD)


def test_a_function_that_makes_no_detector_is_refused():
    with pytest.raises(TypeError, match="'rmd' must be a pytorch_ood Detector, got Classifier"):
        fit(OODMonitor({"rmd": lambda module: module}))


def test_a_set_dataloader_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"dataloader 2 \(svhn\), but there are only 1"):
        fit(OODMonitor({"rmd": RMD()}, ood_dataloaders={2: "svhn"}))


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_go_to_the_folder_and_to_loggers_that_take_images(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path / "logs", name="", version="")
    monitor = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, figures_dir=tmp_path / "figures")
    fit(monitor, logger=logger, log_every_n_steps=1, max_epochs=2)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"auroc.png", "histograms-fit.png"}
    events = event_accumulator.EventAccumulator(str(tmp_path / "logs"), size_guidance={"images": 0})
    events.Reload()
    assert set(events.Tags()["images"]) == {"ood/auroc", "ood/histograms-fit"}
    assert [image.step for image in events.Images("ood/auroc")] == [6, 12]


def test_figures_that_cannot_be_saved_do_not_end_the_training(tmp_path):
    (tmp_path / "file").write_text("")
    monitor = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, figures_dir=tmp_path / "file", on_error="raise")
    with pytest.warns(UserWarning, match="figures could not be saved"):
        fit(monitor)
    assert values(monitor)["rmd", "svhn"] > 0.5


def test_without_ood_data_there_is_one_warning_and_the_detectors_are_fitted():
    monitor = OODMonitor({"rmd": RMD()})
    with pytest.warns(OODMonitorWarning, match="no OOD samples") as caught:
        fit(monitor, max_epochs=2)
    assert len(told(caught)) == 1
    assert monitor.detectors["rmd"].fitted


def test_two_monitors_stand_side_by_side():
    first = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)})
    second = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, refit="stream", prefix="stream")
    trainer, _ = fit(first, second)
    assert {"ood/rmd/svhn/AUROC", "stream/rmd/svhn/AUROC"} <= trainer.callback_metrics.keys()


def test_the_hooks_are_gone_afterwards_even_after_an_error():
    class Broken(Classifier):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    for module, error in ((Classifier(), None), (Broken(), ZeroDivisionError)):
        try:
            fit(OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}), module=module)
        except ZeroDivisionError:
            assert error
        assert not any(layer._forward_hooks for layer in module.modules())


def test_a_set_whose_labels_are_missing_is_told():
    with pytest.raises(EncodingError, match=r"have no labels\. Pass labels="):
        fit(OODMonitor({"rmd": RMD()}, fit_loader=DataLoader(TensorDataset(TRAIN[0]), 16)))
