"""One look for all figures: colours for everybody, type that a slide can carry, no global state.

Figures are made by matplotlib's object interface with the Agg canvas; ``matplotlib.pyplot`` is never imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rmd_plugin.atomic import replacing
from rmd_plugin.report.names import CYCLE, DASHES, LABELS, PALETTE, colour, label, line_style

__all__ = [
    "BODY", "CYCLE", "DASHES", "DISTANCE_COLOURS", "ID_COLOUR", "LABELS", "PALETTE", "QUIET", "SLIDE", "SMALL", "TITLE",
    "colour", "detector_style", "house_style", "label", "new_figure", "quiet_grid", "save_figure",
]  # fmt: skip

#: the same meaning in every figure: in-distribution blue, near-OOD vermilion and its kin, far-OOD green and its kin
ID_COLOUR = PALETTE["blue"]
DISTANCE_COLOURS: Mapping[str, tuple[str, ...]] = {
    "near": (PALETTE["vermilion"], PALETTE["orange"], PALETTE["purple"]),
    "far": (PALETTE["green"], PALETTE["sky"], PALETTE["black"]),
    "": (PALETTE["vermilion"], PALETTE["orange"], PALETTE["purple"]),
}
QUIET = "#9A9A9A"

SLIDE = (10.0, 5.625)  # 16:9
BODY, SMALL, TITLE = 14.0, 12.0, 16.0

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a picture is the same everywhere
    "font.size": BODY,
    "axes.titlesize": TITLE,
    "axes.labelsize": BODY,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "lines.linewidth": 2.2,
    "text.parse_math": False,  # a name may hold a dollar sign
    "pdf.fonttype": 42,  # outlines that editors can open as text
    "svg.fonttype": "none",
    "svg.hashsalt": "rmd-plugin",
}


def detector_style(detector: str) -> dict[str, Any]:
    """How the line of a detector is drawn in every figure: ``color`` and ``linestyle`` for ``axes.plot``."""
    colour, dash = line_style(detector)
    return {"color": colour, "linestyle": dash}


@contextmanager
def house_style() -> Iterator[None]:
    """Settings for making and saving a figure; the caller's own come back afterwards."""
    with rc_context(_SETTINGS):
        yield


def new_figure(size: tuple[float, float] = SLIDE) -> Figure:
    """An empty figure with its own canvas, outside pyplot.

    Args:
        size: width and height in inches.
    """
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def quiet_grid(axes: Axes, *, axis: str = "both") -> None:
    """A grid that stays behind the data."""
    axes.grid(True, axis=axis, color="#E3E3E3", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def save_figure(
    figure: Figure, stem: str | os.PathLike[str], *, formats: tuple[str, ...] = ("png", "pdf")
) -> list[Path]:
    """Write a figure in several formats. Equal figures give equal files: no date is written.

    Args:
        figure: the figure.
        stem: path without suffix.
        formats: suffixes, among those that matplotlib knows.

    Returns:
        The files.
    """
    undated: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    paths = []
    for suffix in formats:
        path = Path(f"{os.fspath(stem)}.{suffix}")
        with house_style(), _quiet("fontTools"), replacing(path, "wb") as file:
            figure.savefig(file, format=suffix, dpi=160, metadata=undated.get(suffix))
        paths.append(path)
    return paths


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a library's remarks out of the log: the PDF writer tells about every font table."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
