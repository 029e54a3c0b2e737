"""Where the shipped configs are, and what a detector's config says, without Hydra."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]


def config_path(part: str = "") -> str:
    """Search path of the configs, or of a folder of them: in ``rmd_plugin.conf``, else in the checkout's ``conf``."""
    if find_spec("rmd_plugin.conf") is not None:
        return f"pkg://rmd_plugin.conf{'.' + part if part else ''}"
    checkout = Path(__file__).resolve().parents[1] / "conf" / part
    if not checkout.is_dir():
        raise FileNotFoundError(f"the configs of rmd-plugin are neither installed nor in {checkout}: install it again.")
    return str(checkout)


def config_root() -> Any:
    """The folder of the configs."""
    place = config_path()
    return files(place.removeprefix("pkg://")) if place.startswith("pkg://") else Path(place)


def detector_options(choice: str) -> dict[str, dict[str, Any]]:
    """What ``detector=choice`` stands for: by name, the ``_target_`` and options of each detector.

    Example:
        >>> detector_options("msp")
        {'msp': {'_target_': 'pytorch_ood.detector.MaxSoftmax', 't': 1.0}}
    """
    folder = config_root().joinpath("detector")
    file = folder.joinpath(f"{choice}.yaml")
    if not file.is_file():
        names = sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))
        near = get_close_matches(choice, names) or names
        raise ValueError(f"there is no detector {choice!r}. Did you mean {', '.join(near)}?")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    found = {name: options for part in content.pop("defaults", []) for name, options in detector_options(part).items()}
    return found | content
