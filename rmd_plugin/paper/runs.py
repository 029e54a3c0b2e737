"""Experiments of the paper as run folders: composed, run once by the job of ``rmd-train``, and read.

A run's folder holds its weights, history and rows. A finished one is not run again; an unfinished one goes on from its
last checkpoint. Studies share runs, and features lie in a cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rmd_plugin.app.configs import compose_train
from rmd_plugin.app.errors import explain
from rmd_plugin.app.train import load_run, train
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.fetch import PACKAGED
from rmd_plugin.compare.extraction import TEST, TRAIN
from rmd_plugin.compare.rows import ACCURACY, Row
from rmd_plugin.paper.accuracy import read_accuracies
from rmd_plugin.paper.result import FeatureSet, FinishedRun
from rmd_plugin.paper.studies import cell_name, config_name, reproduce_command
from rmd_plugin.report.run_folder import RunFolder

log = logging.getLogger(__name__)

#: parts of a config that change where a run lies or how it is told, but not what it does
_NO_MATTER = ("paths", "names", "paper", "resume", "cache_dir", "num_workers", "figures", "trust_config")


def compose_experiment(experiment: str, config: DictConfig) -> DictConfig:
    """The config of ``rmd-train`` for an experiment, with a folder that changes whenever the config does.

    Raises:
        ValueError: if the overrides of ``extra`` do not fit.
    """
    chosen = f"experiment={config_name(experiment, config.scale)}"
    try:
        cfg = compose_train([chosen, "resume=true", f"seed={config.seed}", *map(str, config.extra)])
        content: Any = OmegaConf.to_container(cfg, resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"cell {cell_name(experiment)}: {explain(error)}") from error
    does = {name: value for name, value in content.items() if name not in _NO_MATTER}
    key = hashlib.sha256(json.dumps(does, sort_keys=True).encode()).hexdigest()[:10]
    root = Path(str(config.output))
    with open_dict(cfg):
        cfg.paths.output_dir = str(root / "cells" / f"{experiment.replace('/', '-')}-{key}")
        cfg.cache_dir = str(root / "features") if config.cache_dir is None else config.cache_dir
        if config.paths.data_dir is not None:
            cfg.paths.data_dir = config.paths.data_dir
        cfg.trainer.enable_model_summary = False
        if not sys.stderr.isatty():
            cfg.trainer.enable_progress_bar = False
    return cfg


def finish(experiment: str, cfg: DictConfig, config: DictConfig) -> FinishedRun:
    """Run a composed experiment unless it was run before, and read what it left behind.

    Raises:
        OSError, ValueError, ImportError: if data, weights or libraries are missing; the message says which.
    """
    place = RunFolder(cfg.paths.output_dir)
    log.info("%s: %s", experiment, "found" if place.done else "running")
    alone = {"seed": config.seed, "cells": [cell_name(experiment)], "extra": config.extra}
    try:
        train(cfg, command=reproduce_command(experiment.partition("/")[0], config.scale, **alone))
        extractor = load_run(cfg, trust_config=True)  # composed here, not read from a folder
    except CheckpointError as error:
        if not (place.path / "checkpoints").is_dir():
            raise
        raise CheckpointError(f"{error} Delete {place.path} to run it again.") from error
    rows = place.read_rows()
    ood = next(name for name, distance in extractor.distance.items() if distance == "near")
    fit = extractor.features(TRAIN)
    features = FeatureSet(
        benchmark=str(cfg.names.benchmark),
        backbone=str(cfg.names.backbone),
        ood_name=ood,
        train=fit.features,
        train_labels=fit.labels,
        test=extractor.features(TEST).features,
        ood=extractor.features(ood).features,
        seed=int(cfg.seed),
        setting=describe(cfg, tuple(fit.features.shape), rows),
        reason=str(cfg.paper.reason),
    )
    line = str(cfg.paper.benchmark), str(cfg.paper.backbone)
    return FinishedRun(line, rows, features, place.read_history(), read_accuracies(place.path))


def describe(cfg: DictConfig, shape: tuple[int, ...], rows: Sequence[Row]) -> str:
    """What was run, in a few words: backbone, data (training features of shape (N, D)), training, accuracy."""
    name = str(cfg.names.backbone)
    if cfg.backbone.get("name"):
        name = f"{name} ({cfg.backbone.name})"
    parts = [f"{name}, D={shape[1]}", f"{shape[0]:,} training samples"]
    if cfg.pretrain:
        parts.append(f"{cfg.pretrain.max_epochs} epochs of masked tokens")
    if cfg.train:
        steps, epochs = cfg.trainer.get("max_steps") or -1, cfg.trainer.max_epochs
        parts.append(f"{steps:,} steps" if steps > 0 else "1 epoch" if epochs == 1 else f"{epochs} epochs")
    elif checkpoint := cfg.backbone.get("checkpoint"):
        own = str(checkpoint).startswith(PACKAGED)
        parts.append("weights of scale=medium, which come with this package" if own else "published weights")
    accuracy = [row.value for row in rows if row.metric == ACCURACY and row.ok]
    if accuracy:
        parts.append(f"accuracy {100 * accuracy[0]:.1f} %")
    return ", ".join(parts)
