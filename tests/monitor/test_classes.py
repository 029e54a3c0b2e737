"""Detectors that are given as classes: built before each refit from what the module offers."""

from functools import partial

import callback_kit as kit
import oracle
import pytest
import torch
from callback_kit import CLASSES, OOD, TRAIN, VAL, Classifier, fit, loader, trainer, values
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.detector import NACUE, ODIN, GradNorm, Gram, MahalanobisODIN, MaxSoftmax, ReAct, ViM
from torch import nn

from rmd_plugin import RMD, Calibrated, FusedRMD, OODMonitor

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


class Misleading(Classifier):
    """Its last linear layer is not the head."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 7)


def monitored(detectors, **options):
    return kit.monitored(detectors, **{"head": None, **options})


def test_a_class_is_the_detector_that_the_user_would_make_of_the_networks_parts():
    classes = {"rmd": RMD, "vim": partial(ViM, d=4), "msp": MaxSoftmax, "odin": partial(ODIN, eps=0.01), "react": ReAct}
    monitor = monitored(classes)
    _, module = fit(monitor, module=Misleading(), max_epochs=2)
    net = module.eval().model
    z, z_val, z_ood = (kit.features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
    vim = ViM(None, d=4, w=net.fc.weight, b=net.fc.bias).fit_features(z, TRAIN[1])
    react = ReAct(lambda x: x, lambda maps: net.fc(maps.flatten(1))).fit_feature_maps(z[:, :, None, None], TRAIN[1])
    odin = ODIN(net, eps=0.01)
    with torch.no_grad():
        expected = {
            "rmd": [oracle.rmd(z, TRAIN[1], part) for part in (z_val, z_ood)],
            "vim": [vim.predict_features(part) for part in (z_val, z_ood)],
            "msp": [MaxSoftmax(net)(data[0]) for data in (VAL, OOD)],
            "react": [react.predict_feature_maps(part[:, :, None, None]) for part in (z_val, z_ood)],
        }
    expected["odin"] = [odin(data[0]).detach() for data in (VAL, OOD)]
    for name, scores in expected.items():
        assert values(monitor, epoch=1)[name, "svhn"] == pytest.approx(oracle.auroc(*scores), abs=1e-3), name
    assert monitor.head == "model.fc"
    assert monitor.detectors["odin"].model is module
    assert monitor.detectors["rmd"].n_classes == CLASSES


@pytest.mark.parametrize(
    ("detector", "options", "reason"),
    [
        (Gram, {}, "'it' cannot be monitored while the network trains: it needs"),
        (MahalanobisODIN, {}, "'it' cannot be monitored .* needs the inputs and the network"),
        (partial(ViM, d=4), {"encoder": "model.body"}, "'it' cannot .* it needs a classifier, and there is no linear"),
    ],
)
def test_what_cannot_be_monitored_is_told_by_name_before_the_training(detector, options, reason):
    class Never(Classifier):
        def training_step(self, batch, batch_idx):
            raise AssertionError("training has begun")

    with pytest.raises(ValueError, match=reason):
        fit(monitored({"it": detector}, **options), module=Never())


def test_a_checkpoint_fills_classes(tmp_path):
    classes = {"rmd": RMD, "vim": ViM, "msp": MaxSoftmax}
    before = monitored(classes)
    fit(before, ModelCheckpoint(tmp_path, save_last=True), module=Misleading())
    after = monitored(classes)
    trainer(None, after).validate(Misleading(), loader(VAL), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert values(after, stage="validate") == pytest.approx(values(before), abs=1e-12)


def test_detectors_that_differentiate_the_head_work_in_an_evaluation_alone():
    monitor = monitored({"gradnorm": GradNorm, "nac": NACUE}, fit_loader=loader(TRAIN))
    trainer(None, monitor).validate(Classifier(), loader(VAL), verbose=False)
    assert all(0 <= value <= 1 for value in values(monitor).values())


# -- detectors that have a use for the network's head ------------------------------------------------------------------


def expected_auroc(module, head):
    z, z_val, z_ood = (kit.features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
    detector = FusedRMD(head=head).fit_features(z, TRAIN[1])
    return oracle.auroc(*(detector.predict_features(part) for part in (z_val, z_ood)))


def test_a_detector_without_a_head_gets_the_networks_at_each_refit(tmp_path):
    mine = nn.Linear(16, 3)
    monitor = monitored(
        {"instance": FusedRMD(), "calibrated": Calibrated(FusedRMD()), "class": FusedRMD, "mine": FusedRMD(head=mine)}
    )
    _, module = fit(monitor, ModelCheckpoint(tmp_path, save_last=True), max_epochs=2)
    expected = expected_auroc(module, module.model.fc)
    for name in ("instance", "calibrated", "class"):
        head = monitor.detectors[name].head
        assert head is not module.model.fc
        assert torch.equal(head.weight, module.model.fc.weight)  # that of the last epoch
        assert values(monitor, epoch=1)[name, "svhn"] == pytest.approx(expected)
    assert monitor.detectors["mine"].head is mine
    assert values(monitor, epoch=1)["mine", "svhn"] == pytest.approx(expected_auroc(module, mine))
    loaded = OODMonitor.load_detectors(tmp_path / "last.ckpt")["instance"]
    assert torch.equal(loaded.detector.head.weight, module.model.fc.weight.double())


def test_where_no_head_is_known_the_logits_are_its_own():
    monitor = monitored({"fused": FusedRMD(), "again": FusedRMD}, encoder="model.body")
    _, module = fit(monitor)
    assert values(monitor)["fused", "svhn"] == pytest.approx(expected_auroc(module, None))
