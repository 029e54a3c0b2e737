"""``conf/trainer`` -> a Lightning trainer: every argument passes straight through, and a wrong one is one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import pytorch_lightning as pl
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from rmd_plugin.app.device import choose_device
from rmd_plugin.app.parts import build

#: ``sync_batchnorm: auto``
_AUTO = "auto"


def make_trainer(node: DictConfig, **ours: Any) -> pl.Trainer:
    """The trainer of a config, where ``sync_batchnorm: auto`` is true on GPUs; our own arguments win over the config's.

    Raises:
        ValueError: if an argument is unknown or of the wrong kind, or if there is no such device here.
    """
    kind = get_class(node._target_)
    known = inspect.signature(kind).parameters
    given: dict[str, Any] = {str(name): node[name] for name in node if name != "_target_"}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        # listed in conf/trainer, but not in this release of Lightning
        given = {name: value for name, value in given.items() if name in known or value is not None}
        for name in given.keys() - known.keys():
            raise ValueError(
                f"trainer.{name} is no argument of {node._target_} {pl.__version__}; it has {', '.join(known)}."
            )
    for name in given.keys() & ours.keys() & {"callbacks", "logger"}:
        raise ValueError(f"trainer.{name} comes from {name}=: add one by +{name}.NAME._target_=package.Class.")
    _check_kinds(kind, given)
    if given.get("sync_batchnorm") == _AUTO:
        given["sync_batchnorm"] = evaluation_device(given) != torch.device("cpu")
    plain = OmegaConf.create({"_target_": node._target_, **given})
    try:
        return cast(pl.Trainer, build(plain, _partial_=True)(**ours))
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        where = f"accelerator={given.get('accelerator')} devices={given.get('devices')}"
        raise ValueError(
            f"Lightning makes no trainer of these options ({where}): {' '.join(str(error).split())} "
            "Change trainer.NAME=VALUE; trainer=cpu runs everywhere."
        ) from error


def evaluation_device(node: Mapping[str, Any] | DictConfig) -> torch.device:
    """The device that a trainer of these options works on, in its first process."""
    # that a GPU is missing Lightning says itself, where it is asked to train
    found = torch.device("cpu") if node.get("accelerator") == "cpu" else choose_device(_AUTO)
    devices = node.get("devices")
    first = devices[0] if isinstance(devices, Sequence) and not isinstance(devices, str) else None
    return found if found.type == "cpu" or not isinstance(first, int) else torch.device(found.type, first)


def _check_kinds(trainer: type, given: Mapping[str, Any]) -> None:
    """Refuse words where numbers belong: Lightning would compare them with numbers somewhere inside the training."""
    try:
        hints = get_type_hints(trainer.__init__)  # type: ignore[misc]
    except (NameError, TypeError):
        return
    for name, value in given.items():
        kinds = dict.fromkeys(_kinds(hints.get(name, Any)))
        if isinstance(value, str) and value != _AUTO and not kinds.keys() & {str, Path, Any, value}:
            wanted = ("null" if kind is type(None) else kind.__name__ for kind in kinds if isinstance(kind, type))
            raise ValueError(f"trainer.{name} must be {' or '.join(wanted)}, got {value!r}.")


def _kinds(hint: Any) -> list[Any]:
    """The alternatives of a type hint; of ``Literal`` its values."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    parts = get_args(hint)
    if not parts or get_origin(hint) in (list, dict):
        return [hint]
    return [kind for part in parts for kind in _kinds(part)]
