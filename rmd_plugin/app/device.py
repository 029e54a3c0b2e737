"""The device that a user asks for. Imports torch alone: not every command needs Lightning and Hydra."""

from __future__ import annotations

import torch


def choose_device(wanted: str) -> torch.device:
    """The device of a config; ``auto`` takes the accelerator if there is one.

    Raises:
        ValueError: if there is no such device here.
    """
    if wanted == "auto":
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if current is None else current
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={wanted} cannot be used here: {reason}. Try device=cpu or device=auto.") from error
    return device
