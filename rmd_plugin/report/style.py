"""One look for all figures: colours for everybody, type that a slide can carry, no global state.

Figures are made by matplotlib's object interface with the Agg canvas; ``matplotlib.pyplot`` is never imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text

from rmd_plugin.atomic import replacing
from rmd_plugin.report.names import CYCLE, DASHES, PALETTE, colour, detector_style, label

__all__ = [
    "BODY", "CYCLE", "DASHES", "DISTANCE_COLOURS", "ID_COLOUR", "PALETTE", "QUIET", "SLIDE", "SMALL", "TITLE",
    "colour", "detector_style", "house_style", "label", "name_ends", "new_figure", "new_panels", "outline", "publish",
    "quiet_grid", "save_figure",
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
#: height of a line of text with its white rim, in sizes of its letters
_LINE = 1.4

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


def house_style() -> AbstractContextManager[None]:
    """Settings for making and saving a figure; the caller's own come back afterwards."""
    return rc_context(_SETTINGS)


def new_figure(size: tuple[float, float] = SLIDE) -> Figure:
    """An empty figure of so many inches with its own canvas, outside pyplot."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_panels(
    count: int, size: tuple[float, float], columns: int = 1, *, title: str = ""
) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels, at most ``columns`` beside each other, each of so many inches."""
    columns = max(min(count, columns), 1)
    lines = max(-(-count // columns), 1)
    figure = new_figure((size[0] * columns, size[1] * lines))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid[:count]


def quiet_grid(axes: Axes, *, axis: str = "both") -> None:
    """A grid that stays behind the data."""
    axes.grid(True, axis=axis, color="#E3E3E3", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def outline(text: Text) -> None:
    """A white rim, so that a name can be read across a line."""
    text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def name_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names to the right of the panel, at the heights of their lines' ends, moved apart where they would meet.

    None stands above or below the panel; where it has no room for all, they are smaller. Call it when everything else
    is in the figure: the room is measured. ``ends`` are height, name and colour of each line.
    """
    if not ends:
        return
    axes.set_ylim(axes.get_ylim())
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # the size of the panel is known from here on
    panel = axes.get_window_extent()
    room = 72 * panel.height / axes.figure.dpi  # in points, as the size of letters
    size = min(SMALL, room / (_LINE * len(ends)))
    gap = _LINE * size / room
    height = -gap / 2
    for place, (value, name, tint) in enumerate(sorted(ends, key=lambda end: end[0]), start=1):
        at = (axes.transData.transform((axes.get_xlim()[1], value))[1] - panel.y0) / panel.height
        # above the one before, with room for those to come
        height = min(max(at, height + gap), 1 - gap / 2 - gap * (len(ends) - place))
        text = axes.annotate(
            name, (1.015, height), xycoords="axes fraction", color=tint, va="center", fontsize=size,
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip
        outline(text)


def save_figure(
    figure: Figure, stem: str | os.PathLike[str], *, formats: tuple[str, ...] = ("png", "pdf")
) -> list[Path]:
    """Write a figure as ``stem.png`` and so on, and return the files. Equal figures give equal files."""
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # the PDF writer tells about every font table
    undated: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    paths = []
    for suffix in formats:
        path = Path(f"{os.fspath(stem)}.{suffix}")
        with house_style(), replacing(path, "wb") as file:
            figure.savefig(file, format=suffix, dpi=160, metadata=undated.get(suffix))
        paths.append(path)
    return paths


def publish(
    figures: Mapping[str, Figure], folder: Path | None, loggers: Sequence[Any], *, prefix: str, step: int
) -> None:
    """Write figures as ``<name>.png`` to a folder, if there is one, and hand them to loggers as ``<prefix>/<name>``.

    Loggers have ``log_image`` (Weights & Biases), or an experiment with ``add_figure`` (TensorBoard).
    """
    for name, figure in figures.items():
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(figure, folder / name, formats=("png",))
        for logger in loggers:
            key = f"{prefix}/{name}"
            with house_style():
                if hasattr(logger, "log_image"):
                    canvas = FigureCanvasAgg(figure)
                    canvas.draw()
                    logger.log_image(key, [np.asarray(canvas.buffer_rgba())], step=step)
                else:
                    logger.experiment.add_figure(key, figure, global_step=step, close=False)
