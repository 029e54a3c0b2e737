"""What a training needs around ``trainer.fit``: a first stage, where to go on, Ctrl-C, quiet warnings, early errors."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from pytorch_lightning.callbacks import ModelCheckpoint

from rmd_plugin.app.classifier import Classifier
from rmd_plugin.app.data import BenchmarkData
from rmd_plugin.app.ddp import single_job
from rmd_plugin.app.trainer import make_trainer
from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.fetch import find_checkpoint
from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.report.run_folder import RunFolder

log = logging.getLogger(__name__)

#: folders below the output folder
CHECKPOINTS, PRETRAINED = "checkpoints", "pretrained"


def pretrain(cfg: DictConfig, backbone: Backbone, data: BenchmarkData | None, folder: RunFolder) -> None:
    """First stage: train the encoder without labels.

    A finished stage is loaded instead when the job resumes, and where there is no data.
    """
    stage, done = instantiate(cfg.pretrain.stage)(backbone), folder.path / PRETRAINED / "done.ckpt"
    if data is None or (cfg.resume and done.is_file()):
        log.info("pre-training was finished before: %s", done)
        stage.load_state_dict(torch.load(done, map_location="cpu", weights_only=True)["state_dict"])
        return
    keep = ModelCheckpoint(folder.path / PRETRAINED, "last", enable_version_counter=False)
    last = folder.path / PRETRAINED / "last.ckpt"
    trainer = make_trainer(cfg.trainer, callbacks=[keep], max_epochs=cfg.pretrain.max_epochs, logger=False)
    with stoppable(trainer), single_job():
        trainer.fit(stage, datamodule=data, ckpt_path=last if cfg.resume and last.is_file() else None)
    if trainer.interrupted:
        raise KeyboardInterrupt
    trainer.save_checkpoint(done)


def resume_point(cfg: DictConfig, backbone: Backbone, folder: RunFolder) -> Path | None:
    """The checkpoint that a training goes on from, looked at before: Lightning's own errors are long.

    Raises:
        OSError, ValueError: if it is missing, damaged, of another network, or holds weights only.
    """
    last = folder.path / CHECKPOINTS / "last.ckpt"
    path = last if cfg.resume and last.is_file() else cfg.ckpt_path
    if path is None:
        return None
    found = find_checkpoint(path, option="ckpt_path")
    backbone.load_checkpoint(found)
    content = torch.load(found, map_location="cpu", weights_only=True)
    if "optimizer_states" not in content or "loops" not in content:
        raise CheckpointError(
            f"{found} holds weights, but not the state of a training to go on from. "
            f"To start from these weights: backbone.checkpoint={path} ckpt_path=null."
        )
    return found


def check_optimizer(module: Classifier) -> None:
    """Make the optimizer once before the training, so that options that do not fit are said early."""
    try:
        module.configure_optimizers()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the optimizer cannot be made of the options of optimizer=: {error}.") from error


@contextmanager
def logged_warnings() -> Iterator[None]:
    """Log what our detectors warn of, without Python's lines about where: a user of a command has no lines there."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, NumericalWarning):
            log.warning("%s", message)
        else:
            before(message, category, *place, **more)

    with warnings.catch_warnings():
        # Lightning's own call of torch
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        before, warnings.showwarning = warnings.showwarning, show
        yield


@contextmanager
def stoppable(trainer: pl.Trainer) -> Iterator[None]:
    """Let a job go on after Ctrl-C in its training: Lightning would end the process and ignore further Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        if not trainer.interrupted:
            raise
        log.warning("the training was stopped: what follows is about the best weights so far")
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
