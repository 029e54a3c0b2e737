"""``resume=true``: is anything left to do, does the config still fit, and where does the training go on."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rmd_plugin.app.configs import repeatable
from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.fetch import find_checkpoint
from rmd_plugin.report.run_folder import CONFIG, RunFolder, RunFolderError

log = logging.getLogger(__name__)

#: folders below the output folder
CHECKPOINTS, PRETRAINED = "checkpoints", "pretrained"
#: parts of a config that change neither weights nor results: where a run lies, how it is told, how fast it is
_NO_MATTER = (
    "defaults", "paths", "resume", "cache_dir", "num_workers", "logger", "paper", "callbacks.last_checkpoint",
    "callbacks.lr_monitor", "callbacks.model_summary", "callbacks.progress", "trainer.enable_progress_bar",
    "trainer.enable_model_summary", "trainer.profiler", "trainer.log_every_n_steps",
)  # fmt: skip
#: parts that change only what is made of the trained weights
_EVALUATION = ("detector", "head", "weights", "resamples", "figures", "names", "monitor", "callbacks.ood_monitor")
_MAX_EPOCHS = "trainer.max_epochs"


def nothing_left(cfg: DictConfig, folder: RunFolder) -> bool:
    """Whether a job that is resumed was finished before, with the same config.

    Raises:
        ValueError: if its folder holds weights that were trained with other options; it names them all.
    """
    trained = [*folder.path.glob(f"{CHECKPOINTS}/*.ckpt"), *folder.path.glob(f"{PRETRAINED}/*.ckpt")]
    if trained and not folder.file(CONFIG).is_file():
        raise ValueError(
            f"resume=true cannot go on in {folder.path}: there are weights, but no {CONFIG} that says how they were "
            f"trained. Train in another folder (hydra.run.dir=FOLDER ckpt_path={trained[0]})."
        )
    changes = _changes(cfg, folder)
    training = {key: change for key, change in changes.items() if not _is_part(key, _EVALUATION)}
    if trained and training and not _only_longer(cfg, training):
        told = ", ".join(f"{key}={new} (was {old})" for key, (old, new) in training.items())
        raise ValueError(
            f"resume=true cannot go on in {folder.path}, where other options were trained with: {told}. Give the old "
            f"values, or train in another folder (hydra.run.dir=FOLDER), without or with the weights so far "
            f"(ckpt_path={folder.path / CHECKPOINTS / 'last.ckpt'})."
        )
    if folder.done and changes:
        log.info("finished before; run again from its weights, because these changed: %s", ", ".join(changes))
    elif folder.done:
        log.info("finished before, not run again: %s", folder.path)
    return folder.done and not changes


def _changes(cfg: DictConfig, folder: RunFolder) -> dict[str, tuple[Any, Any]]:
    """Options whose values differ from those kept in the folder: the old value and the new one."""
    if not folder.file(CONFIG).is_file():
        return {}
    now: Any = OmegaConf.create(repeatable(cfg, "train"))
    now.paths = cfg.paths  # wherever they lie: the data are the same, and the references resolve
    new = dict(_options(now))
    try:
        kept: Any = OmegaConf.create(folder.read_text(CONFIG))
        kept.paths = cfg.paths
        old = dict(_options(kept))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RunFolderError(f"{folder.file(CONFIG)} is damaged: delete {folder.path} to run it again.") from error
    # an option that there was not yet, or is no longer, had its default
    return {key: (old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)}


def _options(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, resolved, of all options that matter."""
    if _is_part(name, _NO_MATTER):
        return
    if isinstance(node, DictConfig | Mapping) and len(node):
        for key in node:
            missing = isinstance(node, DictConfig) and OmegaConf.is_missing(node, key)
            yield from _options("???" if missing else node[key], f"{name}.{key}" if name else str(key))
    else:
        yield name, OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _is_part(key: str, parts: tuple[str, ...]) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in parts)


def _only_longer(cfg: DictConfig, changes: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether the training shall only have more epochs, which gives the same as if it had had them from the start."""
    averaging = any("WeightAveraging" in str(node._target_) for node in (cfg.get("callbacks") or {}).values() if node)
    if list(changes) != [_MAX_EPOCHS] or averaging:
        return False
    old, new = changes[_MAX_EPOCHS]
    return isinstance(old, int) and isinstance(new, int) and 0 <= old < new


def resume_point(cfg: DictConfig, backbone: Backbone, folder: RunFolder) -> Path | None:
    """The checkpoint that a training goes on from, looked at before: Lightning's own errors are long.

    Raises:
        OSError, ValueError: if it is missing, of another network, or holds weights only.
    """
    path = (newest_whole(folder.path / CHECKPOINTS) if cfg.resume else None) or cfg.ckpt_path
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
    if not _between_epochs(content):
        log.warning("%s was saved inside of an epoch: the rest of this epoch sees other batches", found)
    return found


def newest_whole(folder: Path) -> Path | None:
    """``last.ckpt`` of a folder; if it is damaged, the newest other checkpoint of the end of an epoch, with a warning.

    None if there is no ``last.ckpt`` yet, or nothing is whole: the training then begins again.
    """
    last = folder / "last.ckpt"
    if not last.is_file() or is_whole(last):
        return last if last.is_file() else None
    others = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others:
        if is_whole(path) and _between_epochs(torch.load(path, map_location="cpu", weights_only=True)):
            log.warning("%s is damaged: going on from %s", last, path)
            return path
    log.warning("%s is damaged, and no other checkpoint can be gone on from: the training begins again", last)
    return None


def is_whole(path: Path) -> bool:
    """Whether every byte of a checkpoint is as it was written: torch itself notices only missing ones."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile, ValueError):
        return False


def _between_epochs(content: Mapping[str, Any]) -> bool:
    try:
        count = content["loops"]["fit_loop"]["epoch_progress"]["current"]
        return bool(count["ready"] == count["processed"])
    except (KeyError, TypeError):
        return False
