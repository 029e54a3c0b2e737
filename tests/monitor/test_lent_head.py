"""Detectors that have a use for the network's head: they get it as it is at each refit, and the log says which."""

import logging

import callback_kit as kit
import oracle
import pytest
import torch
from callback_kit import OOD, TRAIN, VAL, Classifier, fit, loader, trainer, values
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from rmd_plugin import RMD, Calibrated, FusedRMD, OODMonitor

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]
WAYS = {
    "instance": lambda: {"fused": FusedRMD()},
    "calibrated": lambda: {"fused": Calibrated(FusedRMD())},
    "class": lambda: {"fused": FusedRMD},
    "name of the config": lambda: ["fused"],
}


def monitored(detectors, **options):
    return OODMonitor(detectors, **{"ood": {"svhn": loader(OOD)}, **options})


def expected_auroc(module, head):
    z, z_val, z_ood = (kit.features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
    detector = FusedRMD(head=head).fit_features(z, TRAIN[1])
    return oracle.auroc(*(detector.predict_features(part) for part in (z_val, z_ood)))


@pytest.fixture
def said(caplog):
    """What the monitor has said, without its own name."""
    logger = logging.getLogger("pytorch_lightning.utilities.rank_zero")

    def run(monitor, module=None, **options):
        runner = trainer(None, monitor, **options)
        logging.getLogger("pytorch_lightning").setLevel(logging.INFO)
        logger.addHandler(caplog.handler)
        module = module or Classifier()
        runner.fit(module, loader(TRAIN), loader(VAL))
        logger.removeHandler(caplog.handler)
        found = dict.fromkeys(record.getMessage() for record in caplog.records)
        return module, [text.removeprefix("OODMonitor: ") for text in found if "takes the logits" in text]

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("refit", ["pass", "stream"])
def test_a_detector_without_a_head_gets_the_networks_at_each_refit(way, refit, said):
    monitor = monitored(WAYS[way](), refit=refit)
    module, messages = said(monitor, max_epochs=2)
    assert messages == ["'fused' takes the logits of the head 'model.fc'."]
    head = monitor.detectors["fused"].head
    assert head is not module.model.fc
    assert torch.equal(head.weight, module.model.fc.weight)  # that of the last epoch
    if refit == "pass":
        assert values(monitor, epoch=1)["fused", "svhn"] == pytest.approx(expected_auroc(module, module.model.fc))


def test_a_head_that_was_given_stays(said):
    mine = nn.Linear(16, 3)
    monitor = monitored({"fused": FusedRMD(head=mine)})
    module, messages = said(monitor)
    assert messages == []
    assert monitor.detectors["fused"].head is mine
    assert values(monitor)["fused", "svhn"] == pytest.approx(expected_auroc(module, mine))


def test_where_no_head_is_known_the_logits_are_its_own_and_this_is_said(said):
    monitor = monitored({"fused": FusedRMD(), "again": FusedRMD}, encoder="model.body")
    module, messages = said(monitor)
    assert messages == [
        f"{name!r} takes the logits of its own Gaussians, for want of a linear head." for name in ("fused", "again")
    ]
    assert values(monitor)["fused", "svhn"] == pytest.approx(expected_auroc(module, None))


def test_the_weights_of_the_training_are_those_without_the_monitor():
    _, alone = fit(None, max_epochs=2)
    _, watched = fit(monitored({"fused": FusedRMD()}), max_epochs=2)
    for mine, theirs in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert theirs.requires_grad


def test_a_checkpoint_holds_the_head(tmp_path):
    last = ModelCheckpoint(tmp_path, save_last=True)
    monitor = monitored({"fused": FusedRMD()})
    _, module = fit(monitor, last, tmp_path=tmp_path)
    loaded = OODMonitor.load_detectors(tmp_path / "last.ckpt")["fused"]
    z = kit.features_of(module, OOD[0])
    assert torch.equal(loaded.predict_features(z), monitor.detectors["fused"].predict_features(z))
    assert torch.equal(loaded.detector.head.weight, module.model.fc.weight.double())
    again = monitored({"fused": FusedRMD()})
    trainer(None, again).validate(Classifier(), loader(VAL), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert values(again, stage="validate") == pytest.approx(values(monitor))


def test_a_stream_that_was_stopped_within_an_epoch_goes_on_with_its_sample(tmp_path):
    found = []

    class Keeping(FusedRMD):
        def fit_moments(self, moments):
            found.append(moments)
            return super().fit_moments(moments)

    middle = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(monitored({"fused": Keeping(), "rmd": RMD()}, refit="stream"), middle)
    run = trainer(tmp_path, monitored({"fused": Keeping(), "rmd": RMD()}, refit="stream"), max_epochs=1)
    run.fit(Classifier(), loader(TRAIN), loader(VAL), ckpt_path=tmp_path / "epoch=0-step=4.ckpt")
    assert [moments.num_samples for moments in found] == [90, 64 + 2 * 16]
    assert [int(moments.sample.copies.sum()) for moments in found] == [90, 64 + 2 * 16]
