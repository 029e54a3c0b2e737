"""The state of a monitor in a Lightning checkpoint: plain data, which ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from pytorch_ood.api import Detector

from rmd_plugin.monitor.roster import load_roster

#: what every state begins with
HEADER = {"kind": "rmd_plugin.OODMonitor", "format": 1}


def monitor_states(path: str | PathLike[str], map_location: str | torch.device) -> dict[str, dict[str, Any]]:
    """The states of all monitors in a checkpoint, by the key of the callback."""
    states = torch.load(path, map_location=map_location, weights_only=True).get("callbacks", {})
    return {
        key: state for key, state in states.items() if isinstance(state, dict) and state.get("kind") == HEADER["kind"]
    }


def check_format(state: Mapping[str, Any]) -> None:
    """Refuse a state of something else, or of another version."""
    if any(state.get(key) != value for key, value in HEADER.items()):
        expected, found = HEADER["format"], state.get("format")
        raise ValueError(f"expected the state of an OODMonitor, format {expected}, got format {found!r}.")


def detectors_of(
    path: str | PathLike[str],
    detectors: Mapping[str, Detector] | None,
    prefix: str | None,
    map_location: str | torch.device,
) -> dict[str, Detector]:
    """The fitted detectors in a checkpoint, see :meth:`rmd_plugin.OODMonitor.load_detectors`."""
    found = monitor_states(path, map_location)
    if prefix is not None:
        found = {key: state for key, state in found.items() if f"'prefix': {prefix!r}" in key}
    if len(found) != 1:
        raise ValueError(
            f"expected the state of one OODMonitor in {str(path)!r}, found {len(found)}: {', '.join(found)}. "
            "Was it saved with save_weights_only=True? With several monitors, pass prefix=."
        )
    state = next(iter(found.values()))
    check_format(state)
    return load_roster(state, detectors)
