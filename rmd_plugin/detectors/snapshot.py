"""Fitted detectors of any kind as plain data: what a checkpoint or a file holds of them.

Detectors with a ``state_dict`` of their own (all of ours) are asked for it. The framework's have none: their attributes
are taken as far as they are tensors, arrays, numbers, texts and containers of these, or scikit-learn's neighbours, of
which the training features are kept and which are fitted again at load. Networks, heads and functions are left out: who
loads such a detector gives an instance that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytorch_ood.detector
import torch
from pytorch_ood.api import Detector
from torch import Tensor, nn

from rmd_plugin.detectors.detectors import load_detector

#: what the framework's detectors call their networks
NETWORKS = ("encoder", "backbone", "model")
#: marks a dict that stands for something else than a dict
_KIND = "__kind__"


class NotKeptError(ValueError):
    """The fit of a detector cannot be kept as plain data. The message says why."""


def take_snapshot(detector: Detector) -> dict[str, Any]:
    """The fitted state of a detector on the CPU, without its networks.

    Raises:
        NotKeptError: if it holds something that is no plain data.
    """
    name = type(detector).__name__
    if hasattr(detector, "state_dict"):
        return {"detector": name, "state": _encode(detector.state_dict())}
    left_out = sorted(key for key, value in vars(detector).items() if _is_network(value))
    attributes = {key: value for key, value in vars(detector).items() if key not in left_out and key != "_device"}
    return {"detector": name, "attributes": _encode(attributes), "networks": left_out}


def restore_snapshot(detector: Any, snapshot: Mapping[str, Any]) -> None:
    """Give a detector the fitted state of a snapshot. Its networks stay.

    Raises:
        ValueError: if the snapshot is of a detector of another class.
    """
    if snapshot["detector"] != type(detector).__name__:
        raise ValueError(f"the snapshot is of {snapshot['detector']}, but the detector is {type(detector).__name__}.")
    if "state" in snapshot:
        detector.load_state_dict(snapshot["state"])
        return
    for key, value in snapshot["attributes"].items():
        inner = getattr(detector, key, None)
        if isinstance(inner, Detector):
            restore_snapshot(inner, value["value"])  # it keeps its networks, too
        elif key not in NETWORKS:
            setattr(detector, key, _decode(value))


def build_detector(snapshot: Mapping[str, Any]) -> Detector:
    """Make a detector from its snapshot, if it is one of ours or of the framework's. Its networks are None.

    Raises:
        ValueError: if its class belongs to neither, or it holds more than plain data.
    """
    if "state" in snapshot:
        return load_detector(snapshot["state"])
    # only classes of these two packages: the file must not choose what is run
    kind = getattr(pytorch_ood.detector, snapshot["detector"], None)
    if not isinstance(kind, type) or not issubclass(kind, Detector):
        raise ValueError(f"{snapshot['detector']} is no detector of pytorch_ood. Pass an instance to load into.")
    if unknown := sorted(set(snapshot["networks"]) - set(NETWORKS)):
        raise NotKeptError(f"{snapshot['detector']} was saved without its {unknown}. Pass an instance to load into.")
    detector = kind.__new__(kind)
    for key in {*snapshot["networks"], *snapshot["attributes"]} & set(NETWORKS):
        setattr(detector, key, None)
    restore_snapshot(detector, snapshot)
    return detector


def give_encoder(detector: Detector, network: Any) -> None:
    """Put a network in front of a detector, under the name that it has for it; ValueError if it has none."""
    name = next((name for name in NETWORKS if name in vars(detector)), None)
    nested = [value for value in vars(detector).values() if isinstance(value, Detector)]
    if name is None and not nested:
        raise ValueError(f"{type(detector).__name__} has no network: it scores features or logits only.")
    if name is not None:
        setattr(detector, name, network)
    for inner in nested:
        give_encoder(inner, network)


def _is_network(value: object) -> bool:
    if isinstance(value, (list, tuple)) and value:
        return all(_is_network(item) for item in value)
    if isinstance(value, (nn.ParameterDict, Detector)):
        return False
    return isinstance(value, nn.Module) or callable(value)


def _encode(value: Any) -> Any:
    """The same as tensors, numbers, texts, lists and dicts with texts as keys; a tuple becomes a list."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_KIND: "array", "value": torch.from_numpy(value.copy())}
    if isinstance(value, nn.ParameterDict):
        return {_KIND: "parameters", "value": _encode(dict(value))}
    if isinstance(value, Detector):
        return {_KIND: "detector", "value": take_snapshot(value)}
    if type(value).__module__.startswith("sklearn.neighbors") and hasattr(value, "_fit_X"):
        bank = torch.from_numpy(np.array(value._fit_X))  # the neighbours are found from it
        return {_KIND: "neighbors", "options": _encode(value.get_params()), "value": bank}
    raise NotKeptError(f"it holds a {type(value).__name__}, which is no tensor, number or text.")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _decode(item) for key, item in value.items()}
    content = value["value"]
    if kind == "array":
        return content.numpy()
    if kind == "parameters":
        return nn.ParameterDict({key: nn.Parameter(item, requires_grad=False) for key, item in content.items()})
    if kind == "detector":
        return build_detector(content)
    from sklearn.neighbors import NearestNeighbors  # takes a second

    return NearestNeighbors(**value["options"]).fit(content.numpy())
