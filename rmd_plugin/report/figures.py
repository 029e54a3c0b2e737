"""Figures of a comparison: intervals of AUROC, ROC curves, score histograms. Readable on a slide, labelled in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmd_plugin.compare.rows import AUROC, SECONDS, THRESHOLD, Row, at_level, levels, select
from rmd_plugin.report import style
from rmd_plugin.report.names import OURS, label
from rmd_plugin.report.score_axis import ScoreAxis, score_axis
from rmd_plugin.report.scores import CALIBRATION, ID, Scores
from rmd_plugin.report.tables import has_intervals, near_far_means, ood_sets, ranking, set_title

if TYPE_CHECKING:
    from rmd_plugin.report.aggregate import Summary

#: up to which level of false alarms calibration is drawn: beyond, nobody decides
_LEVELS = 0.2


def choose_detectors(rows: Sequence[Row], count: int = 6) -> list[str]:
    """So many detectors worth a colour: RMD and MD, then the best of the table, in the order of the table."""
    ranked = ranking(rows)
    chosen = [name for name in OURS[:2] if name in ranked]
    chosen += [name for name in ranked if name not in chosen]
    return [name for name in ranked if name in chosen[:count]]


def auroc_figure(rows: Sequence[Row], title: str = "") -> Figure | None:
    """AUROC of every detector of one comparison with its interval: one line per detector, the best on top.

    Near-OOD sets stand as discs, far-OOD sets as squares; a set has the same colour in every figure. None without any.
    """
    detectors = ranking(rows)
    distances = ood_sets(rows)
    if not distances:
        return None
    colours = set_colours(distances)
    offsets = np.linspace(0.25, -0.25, len(distances)) if len(distances) > 1 else [0.0]
    with style.house_style():
        figure, (axes,) = style.new_panels(1, (10.0, max(3.0, 1.9 + 0.36 * len(detectors))), title=title)
        for offset, (name, distance) in zip(offsets, distances.items(), strict=False):
            mine = {row.detector: row for row in select(rows, metric=AUROC, ood=name) if row.ok}
            found = [(place, mine[d]) for place, d in enumerate(detectors) if d in mine]
            height = np.array([-place + offset for place, _ in found])
            value = np.array([100 * row.value for _, row in found])
            ends = np.array([(row.low, row.high) if not math.isnan(row.low) else (row.value,) * 2 for _, row in found])
            axes.hlines(height, *(100 * ends.reshape(-1, 2).T), color=colours[name], linewidth=2.0)
            marker = "s" if distance == "far" else "o"
            axes.plot(value, height, marker, color=colours[name], markersize=7, label=set_title(name, distances))
        _detector_axis(axes, detectors)
        for tick, name in zip(axes.get_yticklabels(), detectors, strict=True):
            tick.set_fontweight("bold" if name in OURS else "normal")
        axes.set_xlabel("AUROC (%), 95 % interval" if has_intervals(rows) else "AUROC (%)")
        left, right = axes.get_xlim()
        axes.set_xlim(left, min(right, 100.5))
        if left < 50 < right:
            axes.axvline(50, color=style.QUIET, linewidth=1.2, linestyle=style.DASHES[1])
        axes.legend(
            loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, frameon=False, labelcolor="linecolor",
            handletextpad=0.2, columnspacing=1.2, borderaxespad=0.0,
        )  # fmt: skip
    return figure


def roc_figure(
    scores: Scores, rows: Sequence[Row], *, detectors: Sequence[str] | None = None, title: str = "", panels: int = 4
) -> Figure | None:
    """ROC curves, one panel per OOD set, near ones first: some detectors in colour and named in place, the others grey.

    By default :func:`choose_detectors` says which are named. None without any OOD set.
    """
    chosen = choose_detectors(rows) if detectors is None else detectors
    named = [name for name in chosen if name in scores][: len(style.CYCLE)]
    distances = ood_sets(rows)
    sets = _near_first(distances)[:panels]
    if not sets:
        return None
    with style.house_style():
        figure, grid = style.new_panels(len(sets), (6.4, 5.9), columns=2, title=title)
        for axes, name in zip(grid, sets, strict=True):
            values = {row.detector: row.value for row in select(rows, metric=AUROC, ood=name) if row.ok}
            entries = []
            for detector in sorted(scores, key=lambda name: name in named):
                if name not in scores[detector]:
                    continue
                look: dict[str, Any] = {"color": "#DADADA", "linewidth": 1.0}
                if detector in named:
                    look = style.detector_style(detector)
                    entries.append((values.get(detector, math.nan), label(detector), look))
                axes.plot(*roc_points(scores[detector][ID], scores[detector][name]), **look)
            _rank_labels(axes, sorted(entries, key=lambda entry: entry[0]))
            axes.plot([0, 1], [0, 1], color=style.QUIET, linewidth=1.0, linestyle=style.DASHES[2])
            axes.set(xlim=(0, 1), ylim=(0, 1.003), aspect="equal", title=set_title(name, distances))
            axes.set(xlabel="in-distribution flagged (false positives)", ylabel="OOD found (true positives)")
            style.quiet_grid(axes)
    return figure


def histogram_figure(
    scores: Scores, rows: Sequence[Row] = (), *, detectors: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Histograms of the scores, one panel per detector: in-distribution filled, OOD sets as lines named in place.

    Scores beyond the outer half percent are counted in the outermost bins, and where OOD scores reach far the axis is
    stretched around the ID scores (see :func:`score_axis`): a few wild ones do not squeeze the rest.
    The rows of the comparison tell near from far, the threshold of each detector, and by :func:`choose_detectors` which
    to draw.
    """
    chosen = [name for name in (choose_detectors(rows) if detectors is None else detectors) if name in scores]
    distances = ood_sets(rows)
    distances |= {name: "" for sets in scores.values() for name in sets if name not in (ID, CALIBRATION, *distances)}
    colours = {**set_colours(distances), ID: style.ID_COLOUR}
    means = near_far_means(rows)
    with style.house_style():
        figure, grid = style.new_panels(len(chosen), (5.0, 3.8), columns=3, title=title)
        for axes, detector in zip(grid, chosen, strict=True):
            names = [ID, *(name for name in _near_first(distances) if name in scores[detector])]
            mine = {name: scores[detector][name] for name in names if np.isfinite(scores[detector][name]).any()}
            axis = histogram_panel(axes, mine, colours, "score, higher = more OOD")
            if marked := _mark_threshold(axes, axis, [row for row in rows if row.detector == detector]):
                axes.set_xlabel(f"{axes.get_xlabel()}; {marked}", fontsize=style.SMALL)
            near = means.get(detector, {}).get("near", math.nan)
            area = "" if math.isnan(near) else f", near AUROC {100 * near:.1f}"
            axes.set_title(label(detector) + area, fontsize=style.SMALL + 1)
    return figure


def histogram_panel(axes: Axes, samples: Mapping[str, np.ndarray], colours: Mapping[str, str], text: str) -> ScoreAxis:
    """Histograms of samples by name, ID filled and the others as lines, each named in place; ``text`` is below.

    Returns where scores stand on the axis.
    """
    axis = score_axis(list(samples.values()), samples.get(ID, np.empty(0)))
    edges, places = axis.edges, axis.place(axis.edges)
    curves = []
    for name, values in samples.items():
        heights, _ = np.histogram(np.clip(values, edges[0], edges[-1]), bins=edges)
        density = heights / heights.sum()
        if name == ID:
            axes.stairs(density, places, color=colours[name], fill=True, alpha=0.35)
        axes.stairs(density, places, color=colours[name], linewidth=1.2 if name == ID else 2.2)
        curves.append(("in-distribution" if name == ID else name, colours[name], density))
    if curves:
        _curve_labels(axes, curves, places)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(text, fontsize=style.SMALL)
    if axis.width:
        axes.set_xticks(*axis.ticks())
    else:
        axes.locator_params(axis="x", nbins=4)
    return axis


def _mark_threshold(axes: Axes, axis: ScoreAxis, rows: Sequence[Row]) -> str:
    """A line at the threshold of the smallest level, and what it means in words; none beyond the axis."""
    for alpha in levels(rows):
        for row in select(rows, metric=at_level(THRESHOLD, alpha), status="ok"):
            if axis.edges[0] < row.value < axis.edges[-1]:
                axes.axvline(float(axis.place(row.value)), color="black", linewidth=1.2, linestyle=style.DASHES[1])
                return f"dashed: {100 * alpha:g} % false alarms"
    return ""


def calibration_figure(
    scores: Scores, rows: Sequence[Row] = (), *, detectors: Sequence[str] | None = None, title: str = ""
) -> Figure | None:
    """False alarms that were asked for against those on the ID test set, one line per detector; None without any.

    The band holds 95 % of what exchangeable data give: the Beta-binomial law of both sizes. A line above has more
    false alarms than were promised. By default :func:`choose_detectors` says which are drawn.
    """
    chosen = choose_detectors(rows) if detectors is None else detectors
    found = {name: scores[name] for name in chosen if {ID, CALIBRATION} <= scores.get(name, {}).keys()}
    found = {name: sets for name, sets in found.items() if min(len(sets[ID]), len(sets[CALIBRATION]))}
    if not found:
        return None
    some = next(iter(found.values()))
    size, tested = len(some[CALIBRATION]), len(some[ID])
    asked = np.linspace(0.0, _LEVELS, 101)[1:]
    alarms = np.floor(asked * (size + 1) + 1e-9)
    from scipy.stats import betabinom  # takes a moment

    with style.house_style():
        figure, (axes,) = style.new_panels(1, (6.4, 5.4), title=title)
        usable = alarms > 0
        band = [betabinom.ppf(share, tested, alarms[usable], size + 1 - alarms[usable]) for share in (0.025, 0.975)]
        axes.fill_between(100 * asked[usable], *(100 * edge / tested for edge in band), color="#E6E6E6", linewidth=0)
        axes.plot([0, 100 * _LEVELS], [0, 100 * _LEVELS], color=style.QUIET, linewidth=1.0, linestyle=style.DASHES[2])
        ends = []
        for name, sets in found.items():
            held_out = np.sort(sets[CALIBRATION])
            # p <= level, p being (1 + number of calibration scores that reach the score) / (size + 1)
            reached = 1 + len(held_out) - np.searchsorted(held_out, sets[ID], side="left")
            flagged = 100 * np.mean(reached <= alarms[:, None], axis=1)
            look = style.detector_style(name)
            axes.plot(100 * asked, flagged, **look)
            ends.append((float(flagged[-1]), label(name), look["color"]))
        axes.set(xlim=(0, 100 * _LEVELS), xlabel="false alarms asked for (%)", ylabel="flagged of the ID test set (%)")
        axes.set_ylim(bottom=0)
        style.quiet_grid(axes)
        style.name_ends(axes, ends)
    return figure


def difference_figure(summary: Summary) -> Figure | None:
    """Paired difference of every detector to the reference with its interval, the best on top; None without any."""
    others = [name for name in summary.ordered() if name != summary.reference]
    found = {name: item for name in others if not math.isnan((item := summary.difference(name)).value)}
    if not found:
        return None
    scale, unit = (1, "seconds") if summary.metric in SECONDS else (100, "points")
    with style.house_style():
        figure, (axes,) = style.new_panels(1, (8.0, 1.5 + 0.42 * len(found)))
        for place, (name, item) in enumerate(found.items()):
            if not math.isnan(item.low):
                axes.hlines(-place, scale * item.low, scale * item.high, color=style.colour(name), linewidth=2.4)
            axes.plot(scale * item.value, -place, "o", color=style.colour(name), markersize=8)
        axes.axvline(0, color=style.QUIET, linewidth=1.4)
        _detector_axis(axes, list(found))
        axes.set_xlabel(f"{summary.metric}, {unit} against {label(summary.reference)}")
    return figure


def cost_figure(summary: Summary) -> Figure | None:
    """Mean number of every detector against its time to score, in times of the reference's; None without times.

    Upper left is better: no detector stands above and to the left of those on the line. Ours are bold.
    """
    scale = 1 if summary.metric in SECONDS else 100
    found = {name: (summary.relative_cost(name), scale * summary.mean_number(name)) for name in summary.ordered()}
    found = {name: point for name, point in found.items() if not any(map(math.isnan, point))}
    if len(found) < 3 or summary.metric in SECONDS:
        return None
    sign = -1 if summary.lower else 1
    with style.house_style():
        figure, (axes,) = style.new_panels(1, (10.0, 7.0))
        axes.set_xscale("log")
        best = -math.inf
        front = []
        for x, y in sorted(found.values(), key=lambda point: (point[0], -sign * point[1])):
            if sign * y > best:
                best = sign * y
                front.append((x, y))
        axes.step(*zip(*front, strict=True), where="post", color=style.QUIET, linewidth=1.4)
        for name, (x, y) in found.items():
            axes.plot(x, y, "o", color=style.colour(name), markersize=9 if name in OURS else 6)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(f"time to score the test sets, {label(summary.reference)} = 1")
        on = " on near-OOD" if all("near" in sets.values() for sets in summary.sets.values()) else ""
        axes.set_ylabel(f"{summary.metric} (%){on}, mean over {len(summary.groups)} benchmarks")
        axes.margins(x=0.12, y=0.06)
        style.quiet_grid(axes)
        figure.draw_without_rendering()  # places are known from here on
        _name_points(axes, found)
    return figure


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Each name beside its point, where it covers no other name or point, as far as there is such a place."""
    spots = {name: axes.transData.transform(point) for name, point in points.items()}
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in spots.values()]
    for name, (x, y) in spots.items():
        width, height = 7.4 * len(label(name)), 15.0  # of a letter of this size, in pixels
        places = [(x + 7, y - 7), (x - 7 - width, y - 7), (x - width / 2, y + 7), (x - width / 2, y - 7 - height)]
        places += [(x + 7, y + 5), (x + 7, y - 19), (x - 7 - width, y + 5), (x - 7 - width, y - 19)]
        boxes = [(left, low, left + width, low + height) for left, low in places]
        box = min(boxes, key=lambda box: sum(_overlap(box, other) for other in taken))
        taken.append(box)
        left, low = axes.transData.inverted().transform(box[:2])
        text = axes.text(left, low, label(name), fontsize=style.SMALL - 2)
        text.set(color=style.colour(name), fontweight="bold" if name in OURS else "normal")
        style.outline(text)


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def roc_points(id_scores: np.ndarray, ood_scores: np.ndarray, points: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates (P,) of the ROC curve, OOD being positive; about as many as a picture can show."""
    scores = np.concatenate([id_scores, ood_scores])
    positive = np.concatenate([np.zeros(len(id_scores)), np.ones(len(ood_scores))])
    order = np.argsort(-scores, kind="stable")
    # equal scores enter together: keep the last of each group
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    found = np.cumsum(positive[order])[last]
    tpr = np.append(0.0, found / max(len(ood_scores), 1))
    fpr = np.append(0.0, (last + 1 - found) / max(len(id_scores), 1))
    # evenly along the curve, whose steep start would otherwise lose its points
    along = np.append(0.0, np.cumsum(np.abs(np.diff(fpr)) + np.abs(np.diff(tpr))))
    keep = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)).clip(0, len(along) - 1))
    return fpr[keep], tpr[keep]


def set_colours(distances: Mapping[str, str]) -> dict[str, str]:
    """A colour for every OOD set, warm for near and cold for far; they repeat after three of a kind."""
    colours = {distance: cycle(found) for distance, found in style.DISTANCE_COLOURS.items()}
    return {name: next(colours[distance]) for name, distance in distances.items()}


def _near_first(distances: Mapping[str, str]) -> list[str]:
    return sorted(distances, key=lambda name: distances[name] == "far")


def _detector_axis(axes: Axes, detectors: Sequence[str]) -> None:
    """One detector per line, the first on top."""
    axes.set_yticks([-place for place in range(len(detectors))], [label(name) for name in detectors])
    axes.set_ylim(-len(detectors) + 0.4, 0.6)
    axes.tick_params(axis="y", length=0)
    style.quiet_grid(axes, axis="x")


def _rank_labels(axes: Axes, entries: Sequence[tuple[float, str, dict[str, Any]]]) -> None:
    """Names below the diagonal, the best on top, each with a piece of its line."""
    for place, (value, name, look) in enumerate(entries):
        height = 0.05 + 0.058 * place
        axes.plot([0.42, 0.50], [height, height], **look)
        text = name if math.isnan(value) else f"{name}  {100 * value:.1f}"
        axes.text(0.52, height, text, va="center", fontsize=style.SMALL, color=str(look["color"]))


def _curve_labels(axes: Axes, curves: Sequence[tuple[str, str, np.ndarray]], edges: np.ndarray) -> None:
    """Each name in free space above its own curve: never across a curve, never across another name.

    Of all places along the upper half of its curve a name takes the one where least lies between the two. ``curves``
    are name, colour and heights (B,) of each, ``edges`` those of the bins, shape (B + 1,).
    """
    skyline = np.max([heights for _, _, heights in curves], axis=0)
    top, width = float(skyline.max()) or 1.0, float(edges[-1] - edges[0])
    line = 0.115 * top
    placed: list[tuple[float, float, float]] = []
    for name, tint, heights in sorted(curves, key=lambda curve: float(curve[2].max())):
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
        text = axes.text(x, y, name, color=tint, ha="center", va="bottom", fontsize=style.SMALL - 1, fontweight="bold")
        style.outline(text)
    axes.set_ylim(0, max(level for _, level, _ in placed) + 1.3 * line)
    axes.set_xlim(float(edges[0]), float(edges[-1]))
