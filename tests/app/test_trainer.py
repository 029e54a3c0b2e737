"""``conf/trainer`` and ``conf/logger``: every file becomes what it names, and a wrong option is one sentence."""

import inspect
import re

import config_kit
import pytest
import pytorch_lightning as pl
import torch
from config_kit import choices
from hydra.errors import ConfigCompositionException
from hydra.utils import get_class
from omegaconf import OmegaConf

from rmd_plugin.app.parts import build
from rmd_plugin.app.trainer import evaluation_device, make_trainer

#: what the job gives itself
OURS = {"logger", "callbacks"}
#: arguments that came with Lightning 2.6, where older releases are supported too
NEW = {"enable_autolog_hparams", "model_registry"}


@pytest.fixture
def composed(tmp_path):
    fixed = [f"paths.output_dir='{tmp_path}'", "names.benchmark=digits", "names.backbone=mlp", "detector=[rmd]"]
    return lambda *overrides: config_kit.composed("train", *fixed, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("choice", choices("trainer"))
def test_every_trainer_is_made(composed, choice):
    if choice == "gpu" and not torch.accelerator.is_available():
        with pytest.raises(ValueError, match=r"accelerator=gpu devices=1\).*trainer=cpu runs everywhere"):
            make_trainer(composed("trainer=gpu").trainer)
        return
    trainer = make_trainer(composed(f"trainer={choice}", "trainer.max_epochs=3").trainer)
    assert isinstance(trainer, pl.Trainer)
    assert trainer.max_epochs == 3


@pytest.mark.slow
@pytest.mark.parametrize("choice", choices("logger"))
def test_every_logger_is_made_or_says_what_to_install(composed, choice, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for name, node in composed(f"logger={choice}").logger.items():
        assert inspect.isclass(get_class(node._target_))
        try:
            logger = build(node)
        except ModuleNotFoundError as error:
            assert re.search(r"install|No module", str(error)), error  # noqa: PT017
            pytest.skip(f"{name} is not installed")
        assert isinstance(logger, pl.loggers.Logger)
        assert str(tmp_path) in str(logger.save_dir)


def test_every_argument_of_the_trainer_can_be_given_without_a_plus(composed):
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"} - OURS - NEW
    assert arguments == set(composed().trainer) - {"_target_"}
    node = composed(
        "trainer.gradient_clip_val=1", "trainer.accumulate_grad_batches=4", "trainer.check_val_every_n_epoch=null"
    ).trainer
    trainer = make_trainer(node)
    assert (trainer.gradient_clip_val, trainer.accumulate_grad_batches) == (1, 4)
    assert trainer.check_val_every_n_epoch is None


def test_what_is_listed_is_what_lightning_does_anyway(composed):
    defaults = inspect.signature(pl.Trainer.__init__).parameters
    ours = {"max_epochs", "devices", "deterministic", "default_root_dir", "num_sanity_val_steps", "log_every_n_steps"}
    node = composed("trainer=default").trainer
    assert {name: node[name] for name in node if name not in ours | {"_target_"}} == {
        name: defaults[name].default for name in node if name not in ours | {"_target_"}
    }


def test_an_unknown_argument_is_refused(composed):
    with pytest.raises(ConfigCompositionException, match="bogus"):
        composed("trainer.bogus=1")
    with pytest.raises(ValueError, match=r"trainer.bogus is no argument of pytorch_lightning.Trainer .*max_epochs"):
        make_trainer(composed("+trainer.bogus=1").trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("trainer.max_epochs=x", "trainer.max_epochs must be int or null, got 'x'"),
        ("trainer.limit_val_batches=few", "trainer.limit_val_batches must be"),
        ("trainer.deterministic=maybe", "trainer.deterministic must be"),
        ("trainer.precision=7", "options .*7"),
        ("trainer.strategy=magic", "options .*magic"),
        ("trainer.val_check_interval=2.5", "options .*2.5"),
    ],
)
def test_a_wrong_value_is_refused_before_the_training(composed, option, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(composed(option).trainer)


def test_batch_norm_is_synchronised_on_gpus_only(composed, monkeypatch):
    made = {}
    monkeypatch.setattr(
        pl.Trainer, "__init__", lambda self, sync_batchnorm=False, **rest: made.update(s=sync_batchnorm)
    )
    make_trainer(composed("trainer=ddp", "trainer.accelerator=cpu").trainer)
    assert made == {"s": False}
    gpu = torch.device("cuda")
    monkeypatch.setattr("rmd_plugin.app.trainer.choose_device", lambda wanted: gpu)
    make_trainer(composed("trainer=ddp").trainer)
    assert made == {"s": True}
    make_trainer(composed("trainer=ddp", "trainer.accelerator=cpu").trainer)
    assert made == {"s": False}


@pytest.mark.parametrize(
    ("accelerator", "devices", "device"),
    [
        ("cpu", 1, "cpu"),
        ("cpu", 2, "cpu"),
        ("gpu", 1, "cuda"),
        ("auto", "auto", "cuda"),
        ("gpu", [3], "cuda:3"),
    ],
)
def test_the_weights_are_evaluated_where_they_were_trained(monkeypatch, accelerator, devices, device):
    monkeypatch.setattr("rmd_plugin.app.trainer.choose_device", lambda wanted: torch.device("cuda"))
    node = OmegaConf.create({"accelerator": accelerator, "devices": devices})
    assert evaluation_device(node) == torch.device(device)
