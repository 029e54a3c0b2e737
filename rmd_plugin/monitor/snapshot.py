"""Monitors and fitted detectors as plain data, which ``torch.load(..., weights_only=True)`` reads.

Detectors with a ``state_dict`` of their own (all of ours) are asked for it. The framework's have none: their attributes
are taken as far as they are tensors, numbers, texts and containers of these; networks are left out, because they are
saved elsewhere. A detector that keeps anything else (a scikit-learn estimator, say) cannot be saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import isroutine
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_ood.detector
import torch
from pytorch_ood.api import Detector
from torch import Tensor, nn

import rmd_plugin
from rmd_plugin.detectors.base import load_detector
from rmd_plugin.monitor.inert import Checkpoint

#: what every state begins with
HEADER = {"kind": "rmd_plugin.OODMonitor", "format": 1}

_PARAMETERS = "__parameters__"
_ARRAY = "__array__"
_DETECTOR = "__detector__"


def monitor_states(path: str | PathLike[str], map_location: str | torch.device) -> dict[str, dict[str, Any]]:
    """The states of all monitors in a checkpoint, by the key of the callback. Nothing else of it is read or run."""
    # sharded ones are folders, in which this file holds all but the weights
    checkpoint = Checkpoint(Path(path, "meta.pt") if Path(path).is_dir() else path)
    states = checkpoint.content.get("callbacks", {}) if isinstance(checkpoint.content, dict) else {}
    return {
        key: checkpoint.plain(state, map_location)
        for key, state in (states.items() if isinstance(states, dict) else ())
        if isinstance(state, dict) and state.get("kind") == HEADER["kind"]
    }


def check_format(state: Mapping[str, Any]) -> None:
    """Refuse a state of something else, or of another version."""
    if any(state.get(key) != value for key, value in HEADER.items()):
        expected, found = HEADER["format"], state.get("format")
        raise ValueError(f"expected the state of an OODMonitor, format {expected}, got format {found!r}.")
    if not isinstance(state.get("detectors"), dict):
        raise _damaged(state.get("detectors"))


def take_snapshot(detector: Detector) -> dict[str, Any] | None:
    """The fitted state of a detector on the CPU, without its networks; None if it cannot be told as plain data."""
    name = type(detector).__name__
    try:
        if hasattr(detector, "state_dict"):
            return {"detector": name, "state": _plain(detector.state_dict())}
        networks = sorted(key for key, value in vars(detector).items() if _is_network(value))
        attributes = {
            key: _plain(value) for key, value in vars(detector).items() if key not in networks and key != "_device"
        }
    except _NotPlainError:
        return None
    return {"detector": name, "attributes": attributes, "networks": networks}


def restore_snapshot(detector: Any, snapshot: Mapping[str, Any]) -> None:
    """Give a detector the fitted state of a snapshot. Its networks stay.

    Raises:
        ValueError: if the snapshot is of a detector of another class, or damaged.
    """
    _check(snapshot)
    if snapshot["detector"] != type(detector).__name__:
        raise ValueError(f"the snapshot is of {snapshot['detector']}, but the detector is {type(detector).__name__}.")
    if "state" in snapshot:
        detector.load_state_dict(snapshot["state"])
        return
    done: dict[int, Any] = {}
    for key, value in snapshot["attributes"].items():
        inner = getattr(detector, key, None)
        if isinstance(inner, Detector) and isinstance(value, dict) and _DETECTOR in value:
            restore_snapshot(inner, value[_DETECTOR])  # it keeps its networks, too
        else:
            setattr(detector, key, _unplain(value, done))


def build_detector(snapshot: Mapping[str, Any]) -> Detector:
    """Make a detector from its snapshot, if it is one of ours or of the framework's. Its networks are None.

    Raises:
        ValueError: if its class belongs to neither, or the snapshot is damaged.
    """
    _check(snapshot)
    # only classes of these two packages: the file must not choose what is run
    if "state" in snapshot and snapshot["detector"] in rmd_plugin.__all__:
        return load_detector(snapshot["state"])
    kind = None if "state" in snapshot else getattr(pytorch_ood.detector, snapshot["detector"], None)
    if not isinstance(kind, type) or not issubclass(kind, Detector):
        raise ValueError(
            f"{snapshot['detector']} is neither a detector of rmd_plugin nor of pytorch_ood. "
            "Pass an instance of it to be filled."
        )
    detector = kind.__new__(kind)
    for key in snapshot["networks"]:
        setattr(detector, key, None)
    restore_snapshot(detector, snapshot)
    return detector


class _NotPlainError(Exception):
    pass


def _is_network(value: object) -> bool:
    if isinstance(value, nn.ParameterDict):
        return False
    if isinstance(value, (list, tuple)) and value:
        return all(_is_network(item) for item in value)
    return isinstance(value, (nn.Module, partial)) or isroutine(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, Detector):
        inner = take_snapshot(value)
        if inner is not None:
            return {_DETECTOR: inner}
    if isinstance(value, nn.ParameterDict):
        return {_PARAMETERS: {key: _plain(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    raise _NotPlainError


def _unplain(value: Any, done: dict[int, Any]) -> Any:
    if not isinstance(value, (list, tuple, dict)):
        return value
    if id(value) not in done:  # what stands in several places is made once
        done[id(value)] = _rebuild(value, done)
    return done[id(value)]


def _rebuild(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_unplain(item, done) for item in value])
    if value.keys() == {_ARRAY}:
        return value[_ARRAY].numpy()
    if value.keys() == {_DETECTOR}:
        return build_detector(value[_DETECTOR])
    if value.keys() == {_PARAMETERS}:
        items = value[_PARAMETERS].items()
        return nn.ParameterDict({key: nn.Parameter(item, requires_grad=False) for key, item in items})
    return {key: _unplain(item, done) for key, item in value.items()}


def _check(snapshot: Any) -> None:
    """Refuse what :func:`take_snapshot` cannot have made."""
    found = snapshot if isinstance(snapshot, Mapping) else {}
    attributes, networks = found.get("attributes"), found.get("networks")
    whole = isinstance(found.get("state"), dict)
    if not whole and isinstance(attributes, dict) and isinstance(networks, list):
        whole = all(isinstance(name, str) and not name.startswith("__") for name in (*attributes, *networks))
    if not whole or not isinstance(found.get("detector"), str):
        raise _damaged(snapshot)


def _damaged(found: object) -> ValueError:
    what = type(found).__name__ + (f" with {sorted(map(str, found))}" if isinstance(found, Mapping) else "")
    return ValueError(f"expected fitted detectors as OODMonitor saves them, got {what}. The checkpoint is damaged.")
