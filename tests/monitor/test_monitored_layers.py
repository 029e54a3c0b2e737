"""Detectors on several layers in a monitor: the layers are heard in the passes that give the features."""

import callback_kit as kit
import numpy as np
import oracle
import pytest
import torch
from callback_kit import OOD, TRAIN, VAL, Classifier, fit, loader, trainer, values
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from rmd_plugin import RMD, Calibrated, Mahalanobis, MultiLayer, OODMonitor
from rmd_plugin.encoding.batches import EncodingError

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]

NAMES = ["model.body.0", "model.body.2"]


def several(*args, **options):
    return MultiLayer(RMD(shrinkage=0.1), *args, **{"layers": NAMES, **options})


def monitored(detectors, **options):
    return OODMonitor(detectors, **{"head": "model.fc", "ood": {"svhn": loader(OOD)}, **options})


@torch.no_grad()
def by_hand(module, x):
    """Output of the two layers in evaluation mode."""
    body = module.eval().model.body
    first = body[0](x)
    return dict(zip(NAMES, (first, body[2](body[1](first))), strict=True))


def expected_auroc(module):
    train, val, ood = (by_hand(module, data[0]) for data in (TRAIN, VAL, OOD))
    detector = several().fit_layers(train, TRAIN[1])
    return oracle.auroc(detector.predict_layers(val), detector.predict_layers(ood))


class Counting(Classifier):
    """Counts the samples that pass."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)


@pytest.mark.parametrize("spec", [several, lambda: MultiLayerClass, lambda: lambda module: several()])
def test_layers_are_fitted_and_scored_from_the_passes_that_there_are_anyway(spec):
    module, alone = Counting(), Counting()
    monitor = monitored({"layers": spec(), "rmd": RMD()})
    fit(monitor, module=module, max_epochs=2)
    fit(monitored({"rmd": RMD()}), module=alone, max_epochs=2)
    assert module.seen == alone.seen
    assert values(monitor, epoch=1)["layers", "svhn"] == pytest.approx(expected_auroc(module), abs=1e-3)
    assert list(monitor.detectors["layers"].detectors) == NAMES


def MultiLayerClass(module):
    return several()


def test_names_are_those_of_the_part_that_the_detector_was_given():
    module = Classifier()
    monitor = monitored({"layers": several(module.model, layers=["body.0", "body.2"])})
    fit(monitor, module=module, max_epochs=2)
    assert values(monitor, epoch=1)["layers", "svhn"] == pytest.approx(expected_auroc(module), abs=1e-3)
    # and it scores inputs with that network afterwards
    scores = monitor.detectors["layers"].predict(OOD[0])
    expected = several().fit_layers(by_hand(module, TRAIN[0]), TRAIN[1]).predict_layers(by_hand(module, OOD[0]))
    assert torch.allclose(scores, expected, rtol=1e-3, atol=1e-3)


def test_a_network_that_is_no_part_of_the_module_is_run_by_the_detector():
    other = Classifier().eval()
    with torch.no_grad():
        other.model.body[0].weight.mul_(2)
    monitor = monitored({"layers": several(other.model, layers=["body.0", "body.2"])})
    fit(monitor)
    assert values(monitor)["layers", "svhn"] == pytest.approx(expected_auroc(other), abs=1e-3)
    with pytest.raises(ValueError, match="refit='stream' has no inputs to fit layers on"):
        fit(monitored({"layers": several(other.model, layers="body.0")}, refit="stream"))


@pytest.mark.filterwarnings("ignore:the within-class covariance has rank")
@pytest.mark.parametrize("refit", ["pass", "stream"])
@pytest.mark.parametrize("spec", [MultiLayer, MultiLayer(), "multi_layer"], ids=["class", "instance", "name"])
def test_the_stages_are_found_from_a_batch(spec, refit):
    module = Classifier()
    monitor = monitored({"layers": spec}, refit=refit)
    fit(monitor, module=module)
    assert list(monitor.detectors["layers"].detectors) == ["model.body.0", "model.body.1"]  # those with parameters
    assert not np.isnan(values(monitor)["layers", "svhn"])


class Noting(Classifier):
    """Keeps what its layers gave in training."""

    def __init__(self):
        super().__init__()
        self.kept = {name: [] for name in NAMES}
        for name in NAMES:
            self.get_submodule(name).register_forward_hook(
                lambda layer, _, output, name=name: self.kept[name].append(output.detach()) if layer.training else None
            )


def test_a_stream_is_fitted_on_what_the_training_steps_gave():
    module, monitor = Noting(), monitored({"layers": several(), "unit": several(pooling="cls")}, refit="stream")
    fit(monitor, module=module)
    train = {name: torch.cat(parts) for name, parts in module.kept.items()}
    expected = several().fit_layers(train, TRAIN[1])
    x = by_hand(module, OOD[0])
    for name in ("layers", "unit"):  # vectors are not pooled
        assert torch.allclose(
            monitor.detectors[name].predict_layers(x), expected.predict_layers(x), rtol=1e-4, atol=1e-4
        )


def test_detectors_with_the_same_layers_share_their_moments(monkeypatch):
    found = []
    from rmd_plugin.monitor.refit import Refit

    finish = Refit.finish
    monkeypatch.setattr(Refit, "finish", lambda self, *args: found.append(self.groups) or finish(self, *args))
    unit = MultiLayer(Mahalanobis(normalize=True, shrinkage=0.1), layers=NAMES[0])
    fit(monitored({"a": several(), "b": several(fusion="p-values"), "unit": unit, "rmd": RMD()}))
    assert found == [[("a", "b"), ("a", "b"), ("unit",), ("rmd",)]]


@pytest.mark.parametrize("in_part", [False, True])
def test_checkpoints_hold_the_layers_and_score_inputs(in_part, tmp_path):
    def make(module):
        return several(module.model, layers=["body.0", "body.2"]) if in_part else several()

    module = Classifier()
    before = monitored({"layers": make(module)})
    fit(before, ModelCheckpoint(tmp_path, save_last=True), module=module)
    after_module = Classifier()
    after = monitored({"layers": make(after_module)})
    run = trainer(None, after)
    run.validate(after_module, loader(VAL), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert values(after, stage="validate") == pytest.approx(values(before), abs=1e-12)
    module.train()  # what is loaded evaluates
    [loaded] = OODMonitor.load_detectors(tmp_path / "last.ckpt", module).values()
    assert isinstance(loaded, Calibrated)
    expected = several().fit_layers(by_hand(module, TRAIN[0]), TRAIN[1]).predict_layers(by_hand(module, OOD[0]))
    module.train()
    assert torch.allclose(loaded.predict(OOD[0]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*the checkpoint holds a fit with other options.*")
def test_training_that_goes_on_keeps_the_layers_that_are_asked_for(tmp_path):
    fit(monitored({"layers": several()}), ModelCheckpoint(tmp_path, save_last=True))
    monitor = monitored({"layers": MultiLayer(Mahalanobis(shrinkage=0.1), layers=NAMES[1])})
    run = trainer(None, monitor, max_epochs=2)
    run.fit(Classifier(), loader(TRAIN), loader(VAL), ckpt_path=tmp_path / "last.ckpt")
    [(name, detector)] = monitor.detectors["layers"].detectors.items()
    assert name == NAMES[1]
    assert isinstance(detector, Mahalanobis)


@pytest.mark.filterwarnings("ignore:.*the training ended before the detectors were due to be scored")
def test_a_stream_that_a_checkpoint_interrupts_goes_on(tmp_path):
    def make():
        return monitored({"layers": several()}, refit="stream")

    fit(make(), ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1), max_steps=3)
    monitor, module = make(), Noting()
    trainer(None, monitor).fit(module, loader(TRAIN), loader(VAL), ckpt_path=next(tmp_path.glob("*step=3.ckpt")))
    after = sum(map(len, module.kept[NAMES[0]]))
    for scores in monitor.detectors["layers"]._left_out.values():
        assert len(scores) == 3 * 16 + after  # those of before, too


def test_wrong_layers_are_told_before_the_training():
    class Never(Classifier):
        def training_step(self, batch, batch_idx):
            raise AssertionError("training has begun")

    with pytest.raises(EncodingError, match=r"Never has no layer 'body.0'.*Candidates: .*model.body.0"):
        fit(monitored({"layers": several(layers="body.0")}), module=Never())


def test_layers_that_take_no_part_are_told():
    class Spare(Classifier):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    for refit in ("pass", "stream"):
        with pytest.raises(EncodingError, match=r"spare did not take part in the forward pass. Name other layers"):
            fit(monitored({"layers": several(layers=["spare"])}, refit=refit), module=Spare())


def test_layers_that_see_other_samples_than_the_batch_holds_are_told():
    class Views(Classifier):
        def training_step(self, batch, batch_idx):
            self.model.body[0](torch.cat([batch[0], batch[0]]))  # last: of two views
            return F.cross_entropy(self(batch[0]), batch[1]) + self.model.body[0](batch[0][:3]).mean()

    with pytest.raises(EncodingError, match=r"model.body.0 saw 3 samples, but the batch has 16.*refit='pass'"):
        fit(monitored({"layers": several()}, refit="stream"), module=Views())


def test_calibrated_ones_decide():
    monitor = monitored({"layers": Calibrated(several(), alpha=0.2)})
    fit(monitor)
    detector = monitor.detectors["layers"]
    assert detector.calibration is not None
    assert values(monitor, "threshold")["layers", ""] == pytest.approx(float(detector.calibration.threshold(0.2)))
