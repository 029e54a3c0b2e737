"""Fitted detectors of any kind as plain data: what a checkpoint or a file holds of them.

Detectors with a ``state_dict`` of their own (all of ours) are asked for it. The framework's have none: their attributes
are taken as far as they are tensors, numbers, texts, containers of these, linear heads, functions of the framework, or
the neighbours of scikit-learn; networks are left out, because they are saved elsewhere. A detector that keeps anything
else, or too much, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from inspect import isfunction, isroutine
from typing import Any

import numpy as np
import pytorch_ood.detector
import torch
from pytorch_ood.api import Detector
from torch import Tensor, nn

import rmd_plugin
from rmd_plugin.detectors.base import load_detector

#: a larger fit, such as a bank of all training features, is not kept
MAX_BYTES = 1 << 30

_ARRAY, _DETECTOR, _DTYPE, _ITEMS = "__array__", "__detector__", "__dtype__", "__items__"
_NEIGHBORS, _PARAMETERS, _TUPLE = "__neighbors__", "__parameters__", "__tuple__"
_FUNCTION, _LINEAR = "__function__", "__linear__"

#: what the framework's detectors call their networks
NETWORKS = ("encoder", "backbone", "model")
#: modules whose functions a detector may hold; a file must not choose what else is run
_MODULES = ("pytorch_ood.detector.", "torch.nn.functional")


class NotKeptError(ValueError):
    """The fit of a detector cannot be kept as plain data. The message says why."""


def take_snapshot(detector: Detector) -> dict[str, Any]:
    """The fitted state of a detector on the CPU, without its networks.

    Raises:
        NotKeptError: if it cannot be told as plain data, or is larger than :data:`MAX_BYTES`.
    """
    name = type(detector).__name__
    if hasattr(detector, "state_dict"):
        snapshot = {"detector": name, "state": _plain(detector.state_dict())}
    else:
        networks = sorted(key for key, value in vars(detector).items() if _is_network(value))
        kept = {key: value for key, value in vars(detector).items() if key not in networks and key != "_device"}
        snapshot = {"detector": name, "attributes": _plain(kept), "networks": networks}
    size = _bytes(snapshot)
    if size > MAX_BYTES:
        raise NotKeptError(f"the fit of {name} takes {size / 2**30:.1f} GiB, more than {MAX_BYTES / 2**30:g} GiB.")
    return snapshot


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
        if isinstance(value, dict) and _LINEAR in value and isinstance(inner, nn.Module):
            continue
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
    if lost := [name for name in snapshot["networks"] if name not in NETWORKS]:
        raise NotKeptError(
            f"{snapshot['detector']} holds what only an instance knows: {', '.join(lost)}. Pass one to be filled."
        )
    detector = kind.__new__(kind)
    for key in snapshot["networks"]:
        setattr(detector, key, None)
    restore_snapshot(detector, snapshot)
    return detector


def give_encoder(detector: Detector, network: Any) -> None:
    """Put a network in front of a detector, under the name that it has for it; ValueError if it has none."""
    name = next((name for name in NETWORKS if name in vars(detector)), None)
    within = [value for value in vars(detector).values() if isinstance(value, Detector)]
    if name is None and not within:
        raise ValueError(f"{type(detector).__name__} has no network: it scores features or logits only.")
    if name is not None:
        setattr(detector, name, network)
    for inner in within:
        give_encoder(inner, network)


def _is_network(value: object) -> bool:
    if isinstance(value, nn.ParameterDict) or _linear(value) is not None or _function(value) is not None:
        return False
    if isinstance(value, (list, tuple)) and value:
        return all(_is_network(item) for item in value)
    return isinstance(value, (nn.Module, partial)) or isroutine(value)


def _linear(value: object) -> nn.Linear | None:
    """The linear layer of a head, which may flatten feature maps before."""
    if type(value) is nn.Sequential and len(value) == 2 and type(value[0]) is nn.Flatten:
        value = value[1]
    return value if type(value) is nn.Linear else None


def _function(value: object) -> str | None:
    """Name of a function of the framework or of torch, by which it is found again."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    known = isfunction(value) and module.startswith(_MODULES) and "<" not in name
    return f"{module}:{name}" if known else None


def _find_function(name: str) -> Any:
    module, _, path = str(name).partition(":")
    found: Any = import_module(module) if module.startswith(_MODULES) else None
    for part in path.split("."):
        found = getattr(found, part, None)
    if _function(found) != name:
        raise ValueError(f"{name!r} is no function of a detector.")
    return found


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_bytes, parts))


def _plain(value: Any) -> Any:
    """The same as tensors, numbers, texts, lists and dicts with texts as keys."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if (function := _function(value)) is not None:
        return {_FUNCTION: function}
    if (linear := _linear(value)) is not None:
        return {_LINEAR: {**_plain(dict(linear.state_dict())), "flatten": linear is not value}}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, Detector):
        return {_DETECTOR: take_snapshot(value)}
    if isinstance(value, nn.ParameterDict):
        return {_PARAMETERS: {key: _plain(item) for key, item in value.items()}}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {_ITEMS: [[_plain(key), _plain(item)] for key, item in value.items()]}
    if type(value).__module__.startswith("sklearn.neighbors") and hasattr(value, "kneighbors"):
        bank = getattr(value, "_fit_X", np.zeros((0, 0)))  # what it was fitted on: the neighbours are found from it
        return {_NEIGHBORS: {"options": _plain(value.get_params()), "bank": _plain(np.asarray(bank))}}
    raise NotKeptError(f"it holds a {type(value).__name__}, which is no tensor, number or text.")


def _unplain(value: Any, done: dict[int, Any]) -> Any:
    if not isinstance(value, (list, tuple, dict)):
        return value
    if id(value) not in done:  # what stands in several places is made once
        done[id(value)] = _rebuild(value, done)
    return done[id(value)]


def _rebuild(value: Any, done: dict[int, Any]) -> Any:
    content: Any
    if isinstance(value, (list, tuple)):  # tuples: of earlier versions
        return type(value)([_unplain(item, done) for item in value])
    kind, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if kind == _ARRAY:
        return content.numpy()
    if kind == _DTYPE:
        return _dtype(content)
    if kind == _DETECTOR:
        return build_detector(content)
    if kind == _FUNCTION:
        return _find_function(content)
    if kind == _LINEAR:
        return _rebuild_linear(content)
    if kind == _PARAMETERS:
        items = {key: nn.Parameter(item, requires_grad=False) for key, item in content.items()}
        return nn.ParameterDict(items)
    if kind == _TUPLE:
        return tuple(_unplain(content, done))
    if kind == _ITEMS:
        return {_unplain(key, done): _unplain(item, done) for key, item in content}
    if kind == _NEIGHBORS:
        from sklearn.neighbors import NearestNeighbors  # takes a second

        neighbors, bank = NearestNeighbors(**_unplain(content["options"], done)), _unplain(content["bank"], done)
        return neighbors.fit(bank) if len(bank) else neighbors
    return {key: _unplain(item, done) for key, item in value.items()}


def _rebuild_linear(content: Mapping[str, Any]) -> nn.Module:
    weight, bias = content["weight"], content.get("bias")
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise damaged(content)
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, dtype=weight.dtype, device="meta")
    linear.load_state_dict({name: value for name, value in content.items() if name != "flatten"}, assign=True)
    return (nn.Sequential(nn.Flatten(1), linear) if content["flatten"] else linear).eval().requires_grad_(False)


def _check(snapshot: Any) -> None:
    """Refuse what :func:`take_snapshot` cannot have made."""
    found = snapshot if isinstance(snapshot, Mapping) else {}
    attributes, networks = found.get("attributes"), found.get("networks")
    whole = isinstance(found.get("state"), dict)
    if not whole and isinstance(attributes, dict) and isinstance(networks, list):
        whole = all(isinstance(name, str) and not name.startswith("__") for name in (*attributes, *networks))
    if not whole or not isinstance(found.get("detector"), str):
        raise damaged(snapshot)


def damaged(found: object) -> ValueError:
    """The error about something that is none of the detectors that were saved."""
    what = type(found).__name__ + (f" with {sorted(map(str, found))}" if isinstance(found, Mapping) else "")
    return ValueError(f"expected fitted detectors as OODMonitor saves them, got {what}. The checkpoint is damaged.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors.")
    return found
