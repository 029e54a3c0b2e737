"""The state of a monitor in a checkpoint, as plain data, which ``torch.load(..., weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from rmd_plugin.detectors.snapshot import damaged
from rmd_plugin.monitor.inert import Checkpoint

#: what every state begins with
HEADER = {"kind": "rmd_plugin.OODMonitor", "format": 1}


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
        raise damaged(state.get("detectors"))
