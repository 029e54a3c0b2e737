"""Figures of a comparison: intervals of AUROC, ROC curves, score histograms. Readable on a slide, labelled in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from rmd_plugin.compare.rows import AUROC, Row, select, unique
from rmd_plugin.report.names import OURS, label
from rmd_plugin.report.scores import ID, Scores
from rmd_plugin.report.style import (
    CYCLE,
    DASHES,
    DISTANCE_COLOURS,
    ID_COLOUR,
    QUIET,
    SMALL,
    TITLE,
    house_style,
    new_figure,
    quiet_grid,
)
from rmd_plugin.report.tables import near_far_means, ranking

#: a bin at either end takes what lies beyond these quantiles of all scores
_CLIP = (0.005, 0.995)
_BINS = 40

LineStyle: TypeAlias = dict[str, Any]


def choose_detectors(rows: Sequence[Row], count: int = 6) -> list[str]:
    """Detectors worth a colour: RMD and MD first, then the best of the table, in the order of the table.

    Args:
        rows: rows of one comparison.
        count: how many.
    """
    ranked = ranking(rows)
    chosen = [name for name in OURS[:2] if name in ranked]
    chosen += [name for name in ranked if name not in chosen]
    return [name for name in ranked if name in chosen[:count]]


def auroc_figure(rows: Sequence[Row], title: str = "") -> Figure:
    """AUROC of every detector with its interval: one line per detector, the best on top.

    Near-OOD sets stand as discs, far-OOD sets as squares; a set has the same colour in every figure.

    Args:
        rows: rows of one benchmark, backbone and seed.
        title: heading.

    Returns:
        The figure.
    """
    detectors = ranking(rows)
    distances = _distances(rows)
    colours = set_colours(distances)
    with house_style():
        figure = new_figure((10.0, max(3.0, 1.9 + 0.36 * len(detectors))))
        axes = figure.subplots()
        for offset, (name, distance) in zip(_spread(len(distances), 0.5), distances.items(), strict=True):
            mine = {row.detector: row for row in select(rows, metric=AUROC, ood=name) if row.ok}
            places = [(place, mine[d]) for place, d in enumerate(detectors) if d in mine]
            height = np.array([-place + offset for place, _ in places])
            value = np.array([100 * row.value for _, row in places])
            ends = np.array([(row.low, row.high) if not math.isnan(row.low) else (row.value,) * 2 for _, row in places])
            axes.hlines(height, *(100 * ends.reshape(-1, 2).T), color=colours[name], linewidth=2.0)
            entry = f"{name} ({distance})" if distance else name
            marker = "s" if distance == "far" else "o"
            axes.plot(value, height, marker, color=colours[name], markersize=7, label=entry)
        axes.set_yticks([-place for place in range(len(detectors))], [label(name) for name in detectors])
        for tick, name in zip(axes.get_yticklabels(), detectors, strict=True):
            tick.set_fontweight("bold" if name in OURS else "normal")
        axes.set_ylim(-len(detectors) + 0.4, 0.6)
        axes.set_xlabel("AUROC (%), 95 % interval" if any(not math.isnan(row.low) for row in rows) else "AUROC (%)")
        left, right = axes.get_xlim()
        axes.set_xlim(left, min(right, 100.5))
        if left < 50 < right:
            axes.axvline(50, color=QUIET, linewidth=1.2, linestyle=DASHES[1])
        quiet_grid(axes, axis="x")
        axes.tick_params(axis="y", length=0)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=3,
            frameon=False,
            labelcolor="linecolor",
            handletextpad=0.2,
            columnspacing=1.2,
            borderaxespad=0.0,
        )
    return figure


def roc_figure(
    scores: Scores, rows: Sequence[Row], *, detectors: Sequence[str] | None = None, title: str = "", panels: int = 4
) -> Figure:
    """ROC curves, one panel per OOD set: the chosen detectors in colour and named in place, the others in grey.

    Args:
        scores: scores of every detector.
        rows: rows of the same comparison.
        detectors: which to name; by default :func:`choose_detectors`.
        title: heading.
        panels: at most so many OOD sets, near ones first.

    Returns:
        The figure.
    """
    chosen = list(choose_detectors(rows) if detectors is None else detectors)
    named = [name for name in chosen if name in scores][: len(CYCLE)]
    sets = _near_first(_distances(rows))[:panels]
    with house_style():
        columns = min(len(sets), 2)
        lines = -(-len(sets) // columns)
        figure = new_figure((6.4 * columns, 0.6 + 5.6 * lines))
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, (name, distance) in zip(grid, sets, strict=False):
            for detector in scores:
                if detector not in named and name in scores[detector]:
                    axes.plot(*roc_points(scores[detector][ID], scores[detector][name]), color="#DADADA", linewidth=1.0)
            values = {row.detector: row.value for row in select(rows, metric=AUROC, ood=name) if row.ok}
            entries = []
            for index, detector in enumerate(named):
                if name not in scores[detector]:
                    continue
                style: LineStyle = {"color": CYCLE[index], "linestyle": DASHES[index % len(DASHES)]}
                axes.plot(*roc_points(scores[detector][ID], scores[detector][name]), **style)
                entries.append((values.get(detector, math.nan), label(detector), style))
            _rank_labels(axes, sorted(entries, key=lambda entry: entry[0]))
            axes.plot([0, 1], [0, 1], color=QUIET, linewidth=1.0, linestyle=DASHES[2])
            axes.set(xlim=(0, 1), ylim=(0, 1.003), aspect="equal")
            axes.set_xlabel("in-distribution flagged (false positives)")
            axes.set_ylabel("OOD found (true positives)")
            axes.set_title(f"{name} ({distance})" if distance else name)
            quiet_grid(axes)
        for axes in grid[len(sets) :]:
            axes.set_axis_off()
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return figure


def histogram_figure(
    scores: Scores, rows: Sequence[Row], *, detectors: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Histograms of the scores, one panel per detector: in-distribution filled, OOD sets as lines named in place.

    Scores beyond the outer half percent are counted in the outermost bins: a few wild ones do not squeeze the rest.

    Args:
        scores: scores of every detector.
        rows: rows of the same comparison.
        detectors: which to draw; by default :func:`choose_detectors`.
        title: heading.

    Returns:
        The figure.
    """
    chosen = [name for name in (choose_detectors(rows) if detectors is None else detectors) if name in scores]
    distances = _distances(rows)
    colours = set_colours(distances)
    means = near_far_means(rows)
    with house_style():
        columns = min(len(chosen), 3) or 1
        lines = -(-len(chosen) // columns) or 1
        figure = new_figure((5.0 * columns, 0.5 + 3.5 * lines))
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, detector in zip(grid, chosen, strict=False):
            mine = scores[detector]
            order = [ID, *(name for name, _ in _near_first(distances) if name in mine)]
            edges = _edges([mine[name] for name in order])
            curves = []
            for name in order:
                heights, _ = np.histogram(np.clip(mine[name], edges[0], edges[-1]), bins=edges)
                density = heights / max(heights.sum(), 1)
                colour = ID_COLOUR if name == ID else colours[name]
                axes.stairs(
                    density, edges, color=colour, fill=name == ID, alpha=0.35 if name == ID else 1.0, linewidth=2.2
                )
                if name == ID:
                    axes.stairs(density, edges, color=colour, linewidth=1.2)
                curves.append((_set_name(name), colour, density))
            _curve_labels(axes, curves, edges)
            near = means.get(detector, {}).get("near", math.nan)
            axes.set_title(
                label(detector) + ("" if math.isnan(near) else f", near AUROC {100 * near:.1f}"), fontsize=SMALL + 1
            )
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            axes.set_xlabel("score, higher = more OOD", fontsize=SMALL)
            axes.locator_params(axis="x", nbins=4)
        for axes in grid[len(chosen) :]:
            axes.set_axis_off()
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return figure


def roc_points(known: np.ndarray, unknown: np.ndarray, points: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """The ROC curve with OOD as the positive class, thinned to what a picture can show.

    Args:
        known: scores of in-distribution samples, shape (N,).
        unknown: scores of OOD samples, shape (M,).
        points: about how many points to keep.

    Returns:
        False and true positive rates, each of shape (P,), from (0, 0) to (1, 1).
    """
    scores = np.concatenate([known, unknown])
    positive = np.concatenate([np.zeros(len(known)), np.ones(len(unknown))])
    order = np.argsort(-scores, kind="stable")
    # equal scores enter together: keep the last of each group
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    found = np.cumsum(positive[order])[last]
    tpr = np.append(0.0, found / max(len(unknown), 1))
    fpr = np.append(0.0, (last + 1 - found) / max(len(known), 1))
    # evenly along the curve, whose steep start would otherwise lose its points
    along = np.append(0.0, np.cumsum(np.abs(np.diff(fpr)) + np.abs(np.diff(tpr))))
    keep = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)).clip(0, len(along) - 1))
    return fpr[keep], tpr[keep]


def set_colours(distances: Mapping[str, str]) -> dict[str, str]:
    """A colour for every OOD set, warm for near and cold for far; they repeat after three of a kind."""
    colours, used = {}, dict.fromkeys(DISTANCE_COLOURS, 0)
    for name, distance in distances.items():
        choices = DISTANCE_COLOURS[distance]
        colours[name] = choices[used[distance] % len(choices)]
        used[distance] += 1
    return colours


def _distances(rows: Sequence[Row]) -> dict[str, str]:
    rated = [row for row in rows if row.metric == AUROC]
    return {name: next(row.distance for row in rated if row.ood == name) for name in unique(rated, "ood")}


def _near_first(distances: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(distances.items(), key=lambda item: item[1] == "far")


def _set_name(name: str) -> str:
    return "in-distribution" if name == ID else name


def _spread(count: int, width: float) -> list[float]:
    return [0.0] if count == 1 else list(np.linspace(width / 2, -width / 2, count))


def _edges(arrays: Sequence[np.ndarray]) -> np.ndarray:
    values = np.concatenate([array[np.isfinite(array)] for array in arrays]).astype(np.float64)
    low, high = np.quantile(values, _CLIP) if len(values) else (0.0, 1.0)
    if not high > low:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, _BINS + 1)


def _rank_labels(axes: Axes, entries: Sequence[tuple[float, str, LineStyle]]) -> None:
    """Names below the diagonal, the best on top, each with a piece of its line."""
    for place, (value, name, style) in enumerate(entries):
        height = 0.05 + 0.058 * place
        axes.plot([0.42, 0.50], [height, height], **style)
        text = name if math.isnan(value) else f"{name}  {100 * value:.1f}"
        axes.text(0.52, height, text, va="center", fontsize=SMALL, color=str(style["color"]))


def _curve_labels(axes: Axes, curves: Sequence[tuple[str, str, np.ndarray]], edges: np.ndarray) -> None:
    """Each name in free space above its own curve: never across a curve, never across another name.

    Of all places along the upper half of its curve a name takes the one where least lies between the two.

    Args:
        axes: the panel.
        curves: name, colour and heights (B,) of every curve.
        edges: edges of the bins, shape (B + 1,).
    """
    skyline = np.max([heights for _, _, heights in curves], axis=0)
    top, width = float(skyline.max()), float(edges[-1] - edges[0])
    line = 0.115 * top
    placed: list[tuple[float, float, float]] = []
    for name, colour, heights in sorted(curves, key=lambda curve: float(curve[2].max())):
        half = (0.006 + 0.0115 * len(name)) * width
        found: list[tuple[float, float, float]] = []
        for place in np.flatnonzero(heights >= 0.4 * heights.max()):
            # centred on the bin, or beginning or ending with it
            for anchor in (edges[place : place + 2].mean(), edges[place] + half, edges[place + 1] - half):
                # a name never leaves the panel
                x = min(max(float(anchor), float(edges[0]) + half), float(edges[-1]) - half)
                slack = 1e-9 * width  # a bin that only touches the name does not lie below it
                below = (edges[1:] > x - half + slack) & (edges[:-1] < x + half - slack)
                y = float(skyline[below].max()) + 0.03 * top
                while any(abs(x - other) < half + reach and abs(y - level) < line for other, level, reach in placed):
                    y += 0.25 * line
                # the higher its curve there, the better: a name belongs to a peak
                found.append((y - 1.5 * float(heights[place]), x, y))
        _, x, y = min(found)
        placed.append((x, y, half))
        text = axes.text(x, y, name, color=colour, ha="center", va="bottom", fontsize=SMALL - 1, fontweight="bold")
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])
    axes.set_ylim(0, max(level for _, level, _ in placed) + 1.3 * line)
    axes.set_xlim(float(edges[0]), float(edges[-1]))
