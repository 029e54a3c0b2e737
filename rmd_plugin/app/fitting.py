"""What a training needs around ``trainer.fit``: a first stage, Ctrl-C, quiet warnings, early errors."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from rmd_plugin.app.classifier import Classifier
from rmd_plugin.app.data import BenchmarkData
from rmd_plugin.app.ddp import rank, single_job
from rmd_plugin.app.last_checkpoint import LastCheckpoint
from rmd_plugin.app.resume import PRETRAINED, is_whole, newest_whole
from rmd_plugin.app.trainer import make_trainer
from rmd_plugin.backbones.base import Backbone
from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.report.run_folder import RunFolder

log = logging.getLogger(__name__)


def pretrain(cfg: DictConfig, backbone: Backbone, data: BenchmarkData | None, folder: RunFolder) -> None:
    """First stage: train the encoder without labels.

    A finished stage is loaded instead when the job resumes, and where there is no data.
    """
    stage, keep = instantiate(cfg.pretrain.stage)(backbone), LastCheckpoint(folder.path / PRETRAINED)
    done = keep.path.with_name("done.ckpt")
    if data is None or (cfg.resume and done.is_file() and is_whole(done)):
        log.info("pre-training was finished before: %s", done)
        content = torch.load(done, map_location="cpu", weights_only=True)
        stage.load_state_dict(content["state_dict"])
        if data is not None:
            keep.restore_random_states(content["callbacks"].get(keep.state_key), rank())
        return
    ours = {"max_epochs": cfg.pretrain.max_epochs, "logger": False, "enable_checkpointing": False}
    trainer = make_trainer(cfg.trainer, callbacks=[keep], **ours)
    with stoppable(trainer), single_job():
        trainer.fit(stage, datamodule=data, ckpt_path=newest_whole(keep.path.parent) if cfg.resume else None)
    if trainer.interrupted:
        raise KeyboardInterrupt
    if trainer.is_global_zero:
        os.replace(keep.path, done)


def check_optimizer(module: Classifier) -> None:
    """Make the optimizer once before the training, so that options that do not fit are said early."""
    try:
        module.configure_optimizers()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the optimizer cannot be made of the options of optimizer=: {error}.") from error


@contextmanager
def logged_warnings(*, resumed: bool = False) -> Iterator[None]:
    """Log what our detectors warn of, without Python's lines about where: a user of a command has no lines there."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, NumericalWarning):
            log.warning("%s", message)
        else:
            before(message, category, *place, **more)

    with warnings.catch_warnings():
        # Lightning's own call of torch
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        if resumed:  # the checkpoints are what it goes on from, and LastCheckpoint brings the lines of the logs back
            warnings.filterwarnings("ignore", message=r"(Experiment logs|Checkpoint) directory .* is not empty")
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
