"""Figures about one run, one panel each, so that a page can place them side by side or below each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from rmd_plugin.compare.rows import AUROC
from rmd_plugin.report.directions import Directions, Profile
from rmd_plugin.report.figures import set_colours
from rmd_plugin.report.names import label
from rmd_plugin.report.scores import ID
from rmd_plugin.report.style import CYCLE, DASHES, ID_COLOUR, QUIET, SMALL, house_style, new_figure, quiet_grid

#: name that the monitor gives to the mean over the OOD sets
MEAN = "mean"
_SIZE = (6.4, 4.2)
#: more directions than this stand on a logarithmic axis
_LINEAR = 40


def epochs_figure(
    history: Sequence[Mapping[str, Any]],
    ood: str,
    *,
    metric: str = AUROC,
    detectors: Sequence[str] | None = None,
    title: str = "",
) -> Figure:
    """A metric on one OOD set over the epochs, one line per detector, named at its end.

    Args:
        history: rows with epoch, step, detector, ood, metric and value, as a monitor keeps them.
        ood: the OOD set, or ``mean``.
        metric: the metric.
        detectors: those that have a colour, in its order; by default as they appear. The others are grey.
        title: heading.

    Returns:
        The figure. A missing value is a gap in its line.
    """
    rows = [row for row in history if row["ood"] == ood and row["metric"] == metric]
    found = list(dict.fromkeys(str(row["detector"]) for row in rows))
    named = [name for name in (found if detectors is None else detectors) if name in found][: len(CYCLE)]
    # several validations within an epoch need a finer scale
    points = {(row["epoch"], row["step"]) for row in rows}
    by_epoch = len({epoch for epoch, _ in points}) == len(points)
    with house_style():
        figure = new_figure(_SIZE)
        axes = figure.subplots()
        ends = []
        for name in sorted(found, key=lambda name: name in named):
            mine = [row for row in rows if row["detector"] == name]
            x = [row["epoch"] + 1 if by_epoch else row["step"] for row in mine]
            y = [100 * float(row["value"]) for row in mine]
            place = named.index(name) if name in named else None
            colour = QUIET if place is None else CYCLE[place]
            dash = DASHES[(place or 0) % len(DASHES)]
            # a line through few points shows them; through many they would hide it
            axes.plot(x, y, color=colour, linestyle=dash, marker="o" if len(x) <= 25 else "", markersize=4.5)
            last = next((value for value in reversed(y) if not math.isnan(value)), math.nan)
            if place is not None and not math.isnan(last):
                ends.append((last, label(name), colour))
        axes.set_xlabel("epoch" if by_epoch else "step")
        axes.set_ylabel(f"{metric} (%)")
        axes.margins(x=0.03)
        if by_epoch:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        quiet_grid(axes, axis="y")
        _name_ends(axes, ends)
        if title:
            axes.set_title(title, fontsize=SMALL + 2)
    return figure


def contributions_figure(
    profiles: Mapping[str, Profile], distances: Mapping[str, str], *, order: str = "", title: str = ""
) -> Figure:
    """What each direction of a detector adds to its score: mean and [10 %, 90 %] band of each set.

    Where there are near-OOD sets, the far ones are left out.

    Args:
        profiles: set -> profile of one detector.
        distances: OOD set -> ``near``, ``far`` or empty, in the order of the rows: gives a set its colour.
        order: what the directions are ordered by, for the axis.
        title: heading.

    Returns:
        The figure.
    """
    colours = set_colours({name: distances.get(name, "") for name in {**distances, **profiles} if name != ID})
    colours[ID] = ID_COLOUR
    # far-OOD contributions are often a hundred times larger and would flatten what is of interest
    near = [name for name in profiles if distances.get(name) == "near"]
    profiles = {name: profiles[name] for name in [ID, *(near or [name for name in profiles if name != ID])]}
    with house_style():
        figure = new_figure(_SIZE)
        axes = figure.subplots()
        ends = []
        for name, profile in profiles.items():
            x = np.arange(1, len(profile.mean) + 1)
            axes.fill_between(x, profile.low, profile.high, color=colours[name], alpha=0.16, linewidth=0)
            axes.plot(x, profile.mean, color=colours[name], marker="o" if len(x) <= 12 else "", markersize=5)
            ends.append((float(profile.mean[-1]), _set_name(name), colours[name]))
        _direction_axis(axes, len(profiles[ID].mean), order)
        axes.set_ylabel("contribution to the score")
        axes.axhline(0, color=QUIET, linewidth=1.0)
        axes.set_ylim(*_limits(profiles))
        quiet_grid(axes, axis="y")
        _name_ends(axes, ends)
        if title:
            axes.set_title(title, fontsize=SMALL + 2)
    return figure


def partial_sums_figure(
    directions: Directions, ood: str, *, detectors: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """AUROC on one OOD set when only the first d directions count, one line per detector.

    The nearest class is that of the whole score; the last point of a line is the detector's AUROC.

    Args:
        directions: detector -> set -> profile.
        ood: the OOD set.
        detectors: order of the colours, as in :func:`epochs_figure`.
        title: heading.

    Returns:
        The figure.
    """
    found = {name: 100 * sets[ood].auroc for name, sets in directions.items() if ood in sets}
    order = list(dict.fromkeys([*(name for name in detectors or () if name in found), *found]))
    widest = max(map(len, found.values()))
    with house_style():
        figure = new_figure(_SIZE)
        axes = figure.subplots()
        ends = []
        for name, y in found.items():
            place = order.index(name)
            colour, dash = CYCLE[place % len(CYCLE)], DASHES[place % len(DASHES)]
            axes.plot(np.arange(1, len(y) + 1), y, color=colour, linestyle=dash)
            # RMD has fewer directions than MD: mark where a line ends and its detector stands
            axes.plot(len(y), y[-1], "o", color=colour, markersize=7)
            if len(y) == widest:
                ends.append((float(y[-1]), label(name), colour))
            else:
                text = axes.annotate(label(name), (len(y), y[-1]), (8, 0), textcoords="offset points", va="center")
                text.set(color=colour, fontsize=SMALL, fontweight="bold")
                text.set_path_effects([withStroke(linewidth=3, foreground="white")])
        _direction_axis(axes, widest, "", name="directions that count, from the first")
        axes.set_ylabel("AUROC (%)")
        low, high = axes.get_ylim()
        if low < 50 < high:
            axes.axhline(50, color=QUIET, linewidth=1.0, linestyle=DASHES[2])
        quiet_grid(axes, axis="y")
        _name_ends(axes, ends)
        if title:
            axes.set_title(title, fontsize=SMALL + 2)
    return figure


def _direction_axis(axes: Axes, count: int, order: str, name: str = "direction") -> None:
    if count > _LINEAR:
        axes.set_xscale("log")
        ticks = [step * 10**power for power in range(6) for step in (1, 3)]
        axes.set_xticks([tick for tick in ticks if tick <= count], minor=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlim(0.93, count * 1.07)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_xlim(0.7, max(count, 1) + 0.3)
    axes.set_xlabel(f"{name}, {order}" if order else name)


def _limits(profiles: Mapping[str, Profile]) -> tuple[float, float]:
    # a single wild direction must not flatten all others
    low = float(np.quantile(np.concatenate([profile.low for profile in profiles.values()]), 0.01))
    high = float(np.quantile(np.concatenate([profile.high for profile in profiles.values()]), 0.99))
    low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _set_name(name: str) -> str:
    return "in-distribution" if name == ID else name


def _name_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Each name to the right of its line's end, moved apart where names would meet."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top)
    gap = 0.075 * (top - bottom)
    order = sorted(ends, key=lambda end: end[0])
    heights = [min(max(value, bottom), top) for value, _, _ in order]
    for place in range(1, len(heights)):
        heights[place] = max(heights[place], heights[place - 1] + gap)
    # what was pushed above the panel comes back down, and pushes the ones below it
    limit = top
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], limit)
        limit = heights[place] - gap
    for height, (_, name, colour) in zip(heights, order, strict=True):
        text = axes.annotate(
            name, (1.015, height), xycoords=("axes fraction", "data"), color=colour, va="center", fontsize=SMALL,
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
