"""Figures about one run: detectors over the epochs of training, and what the directions of a detector contribute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmd_plugin.compare.rows import AUROC
from rmd_plugin.report import style
from rmd_plugin.report.figures import set_colours
from rmd_plugin.report.names import label
from rmd_plugin.report.scores import ID, Directions, Profile
from rmd_plugin.report.tables import set_title

#: name that the monitor gives to the mean over the OOD sets
MEAN = "mean"
_SIZE = (6.4, 4.2)
#: more names than this have no room beside a panel
_NAMES = 12
#: more directions than this stand on a logarithmic axis
_LINEAR = 40


def history_sets(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """OOD sets that have curves of AUROC, their mean first; of one set the mean is the same curve and left out."""
    sets = list(dict.fromkeys(str(row["ood"]) for row in history if row["metric"] == AUROC and row["ood"]))
    if len(sets) == 2:
        sets = [name for name in sets if name != MEAN]
    return sorted(sets, key=lambda name: name != MEAN)


def history_title(ood: str, distances: Mapping[str, str]) -> str:
    """Heading of the curves on an OOD set, or of their mean."""
    return "mean over the OOD sets" if ood == MEAN else set_title(ood, distances)


def epochs_figure(
    history: Sequence[Mapping[str, Any]],
    sets: Sequence[str] | None = None,
    *,
    detectors: Sequence[str] | None = None,
    distances: Mapping[str, str] | None = None,
) -> Figure:
    """AUROC over the epochs, one panel per OOD set, one line per detector, named at its end; a gap where it is missing.

    Args:
        history: rows with epoch, step, detector, ood, metric and value, as a monitor keeps them.
        sets: the OOD sets, or ``mean``; by default :func:`history_sets`.
        detectors: those that have a name, as far as there is room; by default as they appear. The others are grey.
        distances: OOD set -> ``near`` or ``far``, for its heading.
    """
    sets = history_sets(history) if sets is None else sets
    rows = [row for row in history if row["ood"] in sets and row["metric"] == AUROC]
    found = list(dict.fromkeys(str(row["detector"]) for row in rows))
    named = [name for name in (found if detectors is None else detectors) if name in found][:_NAMES]
    # several validations within an epoch need a finer scale
    points = {(row["epoch"], row["step"]) for row in rows}
    by_epoch = len({epoch for epoch, _ in points}) == len(points)
    with style.house_style():
        figure, grid = style.new_panels(len(sets), _SIZE, columns=3)
        for axes, ood in zip(grid, sets, strict=True):
            ends = []
            for name in sorted(found, key=lambda name: name in named):
                mine = [row for row in rows if row["detector"] == name and row["ood"] == ood]
                x = [row["epoch"] + 1 if by_epoch else row["step"] for row in mine]
                y = [100 * float(row["value"]) for row in mine]
                look = style.detector_style(name) if name in named else {"color": style.QUIET}
                # a line through few points shows them; through many they would hide it
                axes.plot(x, y, marker="o" if len(x) <= 25 else "", markersize=4.5, **look)
                last = next((value for value in reversed(y) if not math.isnan(value)), math.nan)
                if name in named and not math.isnan(last):
                    ends.append((last, label(name), look["color"]))
            axes.margins(x=0.03)
            if by_epoch:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
            _finish(axes, "epoch" if by_epoch else "step", "AUROC (%)", history_title(ood, distances or {}), ends)
    return figure


def contributions_figure(
    profiles: Mapping[str, Profile], distances: Mapping[str, str], *, order: str = "", title: str = ""
) -> Figure:
    """What each direction of a detector adds to its score: mean and [10 %, 90 %] band of each set.

    Where there are near-OOD sets, the far ones are left out. A set has the colour that ``distances``, in the order of
    the rows, give it; ``order`` says on the axis what the directions are ordered by.
    """
    colours = set_colours({name: distances.get(name, "") for name in {**distances, **profiles} if name != ID})
    colours[ID] = style.ID_COLOUR
    # far-OOD contributions are often a hundred times larger and would flatten what is of interest
    near = [name for name in profiles if distances.get(name) == "near"]
    profiles = {name: profiles[name] for name in [ID, *(near or [name for name in profiles if name != ID])]}
    with style.house_style():
        figure, (axes,) = style.new_panels(1, _SIZE)
        ends = []
        for name, profile in profiles.items():
            x = np.arange(1, len(profile.mean) + 1)
            axes.fill_between(x, profile.low, profile.high, color=colours[name], alpha=0.16, linewidth=0)
            axes.plot(x, profile.mean, color=colours[name], marker="o" if len(x) <= 12 else "", markersize=5)
            ends.append((float(profile.mean[-1]), "in-distribution" if name == ID else name, colours[name]))
        _direction_axis(axes, len(profiles[ID].mean))
        axes.axhline(0, color=style.QUIET, linewidth=1.0)
        axes.set_ylim(*_limits(profiles))
        _finish(axes, f"direction, {order}" if order else "direction", "contribution to the score", title, ends)
    return figure


def partial_sums_figure(directions: Directions, ood: str, *, title: str = "") -> Figure:
    """AUROC on one OOD set when only the first d directions count, one line per detector.

    The nearest class is that of the whole score; the last point of a line is the detector's AUROC.
    """
    found = {name: 100 * sets[ood].auroc for name, sets in directions.items() if ood in sets}
    widest = max(map(len, found.values()))
    with style.house_style():
        figure, (axes,) = style.new_panels(1, _SIZE)
        ends = []
        for name, y in found.items():
            look = style.detector_style(name)
            axes.plot(np.arange(1, len(y) + 1), y, **look)
            # RMD has fewer directions than MD: mark where a line ends and its detector stands
            axes.plot(len(y), y[-1], "o", color=look["color"], markersize=7)
            if len(y) == widest:
                ends.append((float(y[-1]), label(name), look["color"]))
            else:
                text = axes.annotate(label(name), (len(y), y[-1]), (8, 0), textcoords="offset points", va="center")
                text.set(color=look["color"], fontsize=style.SMALL, fontweight="bold")
                style.outline(text)
        _direction_axis(axes, widest)
        low, high = axes.get_ylim()
        if low < 50 < high:
            axes.axhline(50, color=style.QUIET, linewidth=1.0, linestyle=style.DASHES[2])
        _finish(axes, "directions that count, from the first", "AUROC (%)", title, ends)
    return figure


def _finish(axes: Axes, x: str, y: str, title: str, ends: Sequence[tuple[float, str, str]]) -> None:
    axes.set(xlabel=x, ylabel=y)
    style.quiet_grid(axes, axis="y")
    if title:
        axes.set_title(title, fontsize=style.SMALL + 2)
    style.name_ends(axes, ends)


def _direction_axis(axes: Axes, count: int) -> None:
    if count > _LINEAR:
        axes.set_xscale("log")
        ticks = [step * 10**power for power in range(6) for step in (1, 3)]
        axes.set_xticks([tick for tick in ticks if tick <= count], minor=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlim(0.93, count * 1.07)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_xlim(0.7, max(count, 1) + 0.3)


def _limits(profiles: Mapping[str, Profile]) -> tuple[float, float]:
    # a single wild direction must not flatten all others
    low = float(np.quantile(np.concatenate([profile.low for profile in profiles.values()]), 0.01))
    high = float(np.quantile(np.concatenate([profile.high for profile in profiles.values()]), 0.99))
    low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room
