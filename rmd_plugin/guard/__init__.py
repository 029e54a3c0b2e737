"""Guards: a classifier, its preprocessing and a calibrated detector in one folder that can be deployed."""

import json
from pathlib import Path
from typing import Any

FORMAT, ABOUT = 1, "guard.json"


def read_about(folder: Path) -> dict[str, Any]:
    """The content of ``guard.json``, without importing torch: ``rmd-score`` reads it first."""
    path = folder / ABOUT
    if not path.is_file():
        raise ValueError(f"{folder} is no guard: there is no {ABOUT} in it. Give a folder that rmd-fit has written.")
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} has format {about.get('format')!r}, not {FORMAT}. Was it written by a newer version?")
    return about
