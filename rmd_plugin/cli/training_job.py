"""One job of ``rmd-train``: assemble, pre-train, train, compare, report. Composed by :mod:`rmd_plugin.cli.train`."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_only

from rmd_plugin.callback import OODMonitor
from rmd_plugin.cli.relaunch import single_job
from rmd_plugin.training import BenchmarkData, Classifier

log = logging.getLogger(__name__)

#: file names below the output folder
CHECKPOINTS, PRETRAINED = "checkpoints", "pretrained"


def make_trainer(config: DictConfig, folder: Path, callbacks: list[Callback], **changes: Any) -> pl.Trainer:
    """The Lightning trainer of the config.

    Args:
        config: the job's config; ``trainer`` passes straight through to ``pytorch_lightning.Trainer``.
        folder: output folder.
        callbacks: what to attach.
        changes: arguments that replace the config's.
    """
    loggers = [instantiate(node) for node in config.logger.values()]
    trainer = instantiate(config.trainer, _partial_=True)
    return trainer(callbacks=callbacks, **{"logger": loggers or False, "default_root_dir": folder, **changes})


def checkpointing(folder: Path, metric: str, mode: str) -> ModelCheckpoint:
    """Keep the best weights by a metric of the validation data, and the last ones to go on from."""
    return ModelCheckpoint(
        dirpath=folder, filename="best", monitor=metric, mode=mode, save_last=True, enable_version_counter=False
    )


def pretrain(config: DictConfig, backbone: Any, data: BenchmarkData, folder: Path) -> None:
    """First stage: train the encoder without labels. A finished stage is loaded instead when the job resumes."""
    done, last = folder / PRETRAINED / "done.ckpt", folder / PRETRAINED / "last.ckpt"
    stage = instantiate(config.pretrain.stage)(backbone)
    if config.resume and done.is_file():
        log.info("pre-training was finished: %s", done)
        stage.load_state_dict(torch.load(done, map_location="cpu", weights_only=True)["state_dict"])
        return
    keep = checkpointing(folder / PRETRAINED, "val/loss", "min")
    trainer = make_trainer(config, folder, [keep], max_epochs=config.pretrain.max_epochs, logger=False)
    with single_job():
        trainer.fit(stage, datamodule=data, ckpt_path=last if config.resume and last.is_file() else None)
    trainer.save_checkpoint(done)


def train(config: DictConfig, module: Classifier, data: BenchmarkData, monitor: OODMonitor, folder: Path) -> pl.Trainer:
    """Second stage: train the classifier and leave its best weights in the module."""
    keep = checkpointing(folder / CHECKPOINTS, "val/acc", "max")
    trainer = make_trainer(config, folder, [monitor, keep])
    last = folder / CHECKPOINTS / "last.ckpt"
    path = last if config.resume and last.is_file() else config.ckpt_path
    with single_job():
        trainer.fit(module, datamodule=data, ckpt_path=path)
    if keep.best_model_path:
        load_weights(module, keep.best_model_path)
    return trainer


def load_weights(module: Classifier, path: str | Path) -> None:
    """Take over the weights of a Lightning checkpoint; nothing in the file is executed."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    module.load_state_dict(checkpoint["state_dict"])
