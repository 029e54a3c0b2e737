"""Figures of the studies: drawn from arrays and numbers alone, at the size of a slide, labelled in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from rmd_plugin.compare.rows import AUROC, mean, select
from rmd_plugin.paper.order import order, rankings
from rmd_plugin.paper.result import PaperNumber, StudyResult
from rmd_plugin.paper.studies import SIMULATION
from rmd_plugin.report.figures import histogram_panel
from rmd_plugin.report.scores import ID
from rmd_plugin.report.style import (
    DASHES,
    DISTANCE_COLOURS,
    ID_COLOUR,
    PALETTE,
    QUIET,
    SLIDE,
    SMALL,
    TITLE,
    colour,
    house_style,
    label,
    name_ends,
    new_figure,
    outline,
    quiet_grid,
)

Arrays = Mapping[str, np.ndarray]
#: figure name -> figure and caption
Figures = dict[str, tuple[Figure, str]]

_BOTH = ("mahalanobis", "rmd")
#: how far above and below the middle of its setting a row of numbers stands
_TRACK = 0.26
_KINDS = (("id", "in-distribution", ID_COLOUR), ("ood", "OOD", DISTANCE_COLOURS["near"][0]))
#: grey that can be read as text
_READABLE = "#6A6A6A"


def make_figures(result: StudyResult) -> Figures:
    """The figures of a study by file name, each with a caption."""
    name, arrays = result.study, result.arrays
    if name == SIMULATION:
        inputs = [row for row in select(result.rows, backbone="identity") if not row.reason]
        areas = {detector: mean([row.value for row in select(inputs, detector=detector)]) for detector in _BOTH}
        found: Figures = {
            name: (simulation_figure(arrays, areas), "Histograms of one draw; AUROC is the mean over seeds"),
            f"{name}_sweep": (sweep_figure(arrays), "Where MD breaks: mean over seeds, band from least to largest"),
        }
        if activations := list(dict.fromkeys(key.split("/")[0] for key in arrays if key.count("/") == 2)):
            caption = "Scores on the hidden units of a trained one-layer network"
            found[f"{name}_network"] = (network_figure(arrays, activations), caption)
        return found
    if name in ("spectrum", "partial"):
        return {f"{name}_{_stem(text)}": _of_one_set(result, text, part) for text, part in _by_label(arrays).items()}
    if name == "robustness":
        return {name: (robustness_figure(_by_label(arrays)), "Accuracy and AUROC over the training steps")}
    if name == "flows":
        title = "Gaussians and flows"
        detectors = {item.metric: row.detector for item, row in zip(result.comparisons, result.rows, strict=True)}
    else:
        title = f"Table {name[-1]}: paper and ours"
        detectors = {f"AUROC of {label(detector)}": detector for detector in (*_BOTH, "msp")}
    return {name: (paired_figure(result.comparisons, detectors, title), title)}


def _of_one_set(result: StudyResult, text: str, arrays: Arrays) -> tuple[Figure, str]:
    if result.study == "partial":
        return partial_figure(arrays, text), f"PMD for every d: {text}"
    areas = {
        row.detector: row.value
        for row in select(result.rows, metric=AUROC)
        if f"{row.benchmark}, {row.backbone}" == text
    }
    order = "falling variance of the class means" if text.startswith(SIMULATION) else "falling variance"
    return spectrum_figure(arrays, text, areas, order=order), f"MD and RMD along the directions: {text}"


def _by_label(arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
    """Arrays named ``LABEL//NAME`` by label."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        text, _, name = key.partition("//")
        found.setdefault(text, {})[name] = value
    return found


def _stem(text: str) -> str:
    return "_".join("".join(letter if letter.isalnum() else " " for letter in text).split())


# -- simulation -------------------------------------------------------------------------------------------------------


def simulation_figure(arrays: Arrays, areas: Mapping[str, float]) -> Figure:
    """Figure 5: the two kinds of coordinate, MD and RMD, each as a histogram of ID and OOD samples."""
    panels = [
        ("x1", "The one coordinate that tells classes apart", "x₁"),
        ("rest", "The other coordinates, shared by all", "xᵢ, i > 1"),
        ("mahalanobis", _with_area("mahalanobis", areas), "min MDₖ"),
        ("rmd", _with_area("rmd", areas), "min MDₖ - MD₀"),
    ]
    with house_style():
        figure = new_figure((10.0, 6.6))
        for axes, (name, title, text) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            _histogram(axes, arrays[f"{name}/id"], arrays[f"{name}/ood"], text)
            axes.set_title(title, fontsize=SMALL + 2)
    return figure


def network_figure(arrays: Arrays, activations: Sequence[str]) -> Figure:
    """MD and RMD on the hidden units of one-layer networks, one line of panels for each activation."""
    with house_style():
        figure = new_figure((10.0, 3.4 * len(activations)))
        grid = figure.subplots(len(activations), 2, squeeze=False)
        for line, activation in zip(grid, activations, strict=True):
            for axes, name in zip(line, _BOTH, strict=True):
                key = f"{activation}/{name}"
                _histogram(axes, arrays[f"{key}/id"], arrays[f"{key}/ood"], "OOD score")
                axes.set_title(f"{label(name)} on {activation} units", fontsize=SMALL + 2)
    return figure


def sweep_figure(arrays: Arrays) -> Figure:
    """Where MD breaks: AUROC over the number of dimensions and over sigma, mean and range over seeds."""
    with house_style():
        figure = new_figure(SLIDE)
        both = figure.subplots(1, 2, sharey=True)
        for axes, name, text in zip(both, ("dim", "sigma"), ("dimensions D", "standard deviation σ"), strict=True):
            x, limit = arrays[f"sweep_{name}/values"], 100 * arrays[f"sweep_{name}/limit"]
            axes.plot(x, limit, color=QUIET, linestyle=DASHES[1], linewidth=1.6)
            for detector, end, offset, side in (("rmd", 0, (0, 7), "left"), ("mahalanobis", -1, (-8, -6), "right")):
                values = 100 * arrays[f"sweep_{name}/{detector}"]
                centre = values.mean(1)
                axes.fill_between(x, values.min(1), values.max(1), color=colour(detector), alpha=0.2, linewidth=0)
                axes.plot(x, centre, "o-", color=colour(detector), markersize=6)
                _name(axes, label(detector), (x[end], centre[end]), offset, colour(detector), ha=side)
            axes.set_xscale("log")
            _plain_ticks(axes, x)
            axes.set_xlabel(text)
            quiet_grid(axes)
        both[0].set_ylabel("AUROC (%)")
        both[0].set_ylim(None, 104)
        # x and limit are those of sigma: right of the fall there is room
        middle = int(np.abs(limit - (limit.max() + limit.min()) / 2).argmin())
        _name(both[1], "MD with the\ntrue parameters", (x[middle], limit[middle]), (16, 4), _READABLE, ha="left")
    return figure


# -- spectrum and partial ---------------------------------------------------------------------------------------------


def spectrum_figure(arrays: Arrays, title: str, areas: Mapping[str, float], *, order: str) -> Figure:
    """Figure 1: MD and RMD along every direction (mean and [10 %, 90 %] band), and the histograms of both."""
    threshold, count = int(arrays["threshold"]), len(arrays["rmd/id/mean"])
    x, wide = np.arange(1, count + 1), count > 100
    with house_style():
        figure = new_figure((12.0, 6.9))
        grid = figure.subplots(2, 2, width_ratios=(2.1, 1))
        for (axes, panel), name in zip(grid, _BOTH, strict=True):
            for kind, text, shade in _KINDS:
                mine = {key: arrays[f"{name}/{kind}/{key}"] for key in ("mean", "low", "high")}
                axes.fill_between(x, mine["low"], mine["high"], color=shade, alpha=0.18, linewidth=0, step="mid")
                axes.plot(x, mine["mean"], color=shade, linewidth=1.6, label=text, drawstyle="steps-mid")
            axes.axvline(threshold + 0.5, color=PALETTE["black"], linestyle=DASHES[1], linewidth=1.4)
            axes.set_xlim(0.7, count + 0.5)
            if wide:
                axes.set_xscale("log")
                _plain_ticks(axes, [value for value in (1, 10, 100, 1000, 10_000) if value <= count])
            axes.set_ylim(*_clipped(arrays, name))
            axes.set_ylabel(f"{label(name)} per direction")
            axes.set_title(f"{label(name)}: mean and [10 %, 90 %] of the samples", fontsize=SMALL + 1)
            quiet_grid(axes, axis="y")
            _histogram(panel, arrays[f"{name}/id/scores"], arrays[f"{name}/ood/scores"], "score")
            panel.set_title(_with_area(name, areas), fontsize=SMALL + 1)
        upper, lower = grid[0][0], grid[1][0]
        along = lower.transAxes.inverted().transform(lower.transData.transform((threshold + 0.5, 0.0)))[0]
        place: Any = {"xycoords": ("data", "axes fraction"), "va": "top", "ha": "left" if along < 0.7 else "right"}
        note = lower.annotate(f" {threshold} leading ", (threshold + 0.5, 1.0), fontsize=SMALL, **place)
        outline(note)
        # above the panel: inside of it the line of the threshold may stand anywhere
        above: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2, "borderaxespad": 0.2}
        upper.legend(**above, frameon=False, labelcolor="linecolor", handlelength=0, fontsize=SMALL)
        lower.set_xlabel(f"direction, by {order}" + (" (log)" if wide else ""))
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return figure


def _clipped(arrays: Arrays, name: str) -> tuple[float, float]:
    """Limits that hold the means whole and the bands but for a few directions."""
    means, lows, highs = (
        np.concatenate([arrays[f"{name}/{kind}/{key}"] for kind, _, _ in _KINDS]) for key in ("mean", "low", "high")
    )
    top = max(float(means.max()), float(np.quantile(highs, 0.98)))
    bottom = min(0.0, float(means.min()), float(np.quantile(lows, 0.02)))
    pad = 0.06 * (top - bottom)
    return bottom - (pad if bottom < 0 else 0.0), top + pad


def partial_figure(arrays: Arrays, title: str) -> Figure:
    """Appendix C: AUROC of PMD over d, largest and smallest directions, with the lines of RMD, MD and MMD."""
    largest, smallest = 100 * arrays["largest"], 100 * arrays["smallest"]
    lines = {name: 100 * float(arrays[name]) for name in ("rmd", "mahalanobis", "marginal")}
    peak = int(largest.argmax())
    with house_style():
        figure = new_figure((12.0, 5.6))
        left, right = figure.subplots(1, 2, sharey=True)
        left.plot(np.arange(1, len(largest) + 1), largest, color=colour("partial"), linewidth=2.6)
        right.plot(np.arange(len(smallest)), smallest, color=colour("partial"), linewidth=2.6)
        left.plot(peak + 1, largest[peak], "o", color=colour("partial"), markersize=9)
        # above the highest point there is nothing of the curve
        left.margins(y=0.1)
        text, side = f"best d = {peak + 1}: {largest[peak]:.1f}", "right" if peak > len(largest) // 2 else "left"
        _name(left, text, (peak + 1, float(largest[peak])), (0, 9), "#9A6A00", ha=side)
        for axes, which, words in (
            (left, "on the first d directions", "used"),
            (right, "on the others", "left out"),
        ):
            for name, value in lines.items():
                axes.axhline(value, color=colour(name), linewidth=1.8, linestyle=DASHES[0 if name == "rmd" else 1])
            axes.set_xlabel(f"d, directions of largest variance {words}")
            axes.set_title(f"PMD {which}", fontsize=SMALL + 2)
            quiet_grid(axes)
        left.set_ylabel("AUROC (%)")
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
        name_ends(right, [(value, f"{label(name)} {value:.1f}", colour(name)) for name, value in lines.items()])
    return figure


# -- robustness, tables and flows -------------------------------------------------------------------------------------


def robustness_figure(trainings: Mapping[str, Arrays]) -> Figure:
    """Figure 3: accuracies above, AUROC of every detector below, over the steps; a column for each training."""
    with house_style():
        figure = new_figure((6.4 * len(trainings), 7.2))
        grid = figure.subplots(2, len(trainings), squeeze=False, sharex="col", height_ratios=(1, 1.5))
        ends: list[tuple[Axes, list[tuple[float, str, str]]]] = []
        for (top, bottom), (text, arrays) in zip(grid.T, trainings.items(), strict=True):
            above, below = [], []
            if "accuracy" in arrays:
                steps, train, held_out = arrays["accuracy"]
                top.plot(steps, 100 * train, color=QUIET, linestyle=DASHES[1])
                top.plot(steps, 100 * held_out, color=PALETTE["black"])
                above = [(100 * train[-1], "training", _READABLE), (100 * held_out[-1], "held-out", "#000000")]
            for name in (*_BOTH, "msp"):
                if name in arrays:
                    steps, values = arrays[name]
                    bottom.plot(steps, 100 * values, "o-", color=colour(name), markersize=4)
                    below.append((100 * values[-1], f"{label(name)} {100 * values[-1]:.1f}", colour(name)))
            ends += [(top, above), (bottom, below)]
            top.set_title(text, fontsize=SMALL + 2)
            bottom.set_xlabel("training step")
            bottom.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            quiet_grid(top)
            quiet_grid(bottom)
        grid[0][0].set_ylabel("accuracy (%)")
        grid[1][0].set_ylabel("AUROC (%)")
        for axes, names in ends:
            name_ends(axes, names)
    return figure


def paired_figure(numbers: Sequence[PaperNumber], names: Mapping[str, str], title: str) -> Figure:
    """The paper's numbers above ours on one scale, a line from one to the other; lines that cross change the order.

    Beside each setting stands the order itself, in the paper and in ours.
    """
    chosen = [item for item in numbers if item.metric in names]
    lines = list(dict.fromkeys(item.what for item in chosen))
    detectors = list(dict.fromkeys(names[item.metric] for item in chosen))
    hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.8}
    with house_style():
        figure = new_figure((12.0, 1.9 + 0.86 * len(lines)))
        axes = figure.subplots()
        for item in chosen:
            upper, lower = -lines.index(item.what) + _TRACK, -lines.index(item.what) - _TRACK
            shade = colour(names[item.metric])
            # a number that is missing is not drawn, nor the line to it
            axes.plot([item.paper, item.ours], [upper, lower], color=shade, linewidth=1.6, alpha=0.7, zorder=2)
            axes.plot(item.paper, upper, "o", markersize=8, color=shade, zorder=3, **hollow)
            axes.plot(item.ours, lower, "o", markersize=8, color=shade, zorder=3)
        labels = []
        for place, line in enumerate(lines):
            mine = [item for item in chosen if item.what == line]
            settings = [item.setting for item in mine if item.run]
            network = settings[0].split(",")[0] if settings else ""
            # a stand-in must not pass for the paper's network
            remark = "\n(not run)" if not settings else f"\nours: {network}" if network not in line else ""
            labels.append(line.replace(", ", "\n", 1) + remark)
            for offset, text, weight in _orders(mine, names):
                at: Any = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
                axes.annotate(text, (1.015, offset - place), fontsize=SMALL - 2, fontweight=weight, **at)
        axes.set_yticks([-place for place in range(len(lines))], labels, fontsize=SMALL - 1)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-len(lines) + 0.45, 0.55)
        axes.set_xlabel("AUROC (%)")
        for place in range(1, len(lines)):
            axes.axhline(0.5 - place, color="#E3E3E3", linewidth=1.0)
        quiet_grid(axes, axis="x")
        handles = [axes.plot([], [], "o", color=colour(name), label=label(name))[0] for name in detectors]
        handles += axes.plot([], [], "o", color=QUIET, label="paper, above", **hollow)
        handles += axes.plot([], [], "o", color=QUIET, label="ours, below")
        space = {"borderaxespad": 0.2, "handletextpad": 0.1, "columnspacing": 1.3}
        place_above: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": len(handles), **space}
        axes.legend(handles=handles, frameon=False, fontsize=SMALL, **place_above)
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return figure


def _orders(items: Sequence[PaperNumber], names: Mapping[str, str]) -> Iterator[tuple[float, str, str]]:
    """Texts beside one setting: height, the order in the paper or in ours or whether they agree, weight."""
    titled = [replace(item, metric=f"AUROC of {label(names[item.metric])}") for item in items]
    for ranking in rankings(titled):
        yield _TRACK, f"paper: {order(ranking.paper)}", "normal"
        if ranking.ours:
            yield 0.0, "= same order" if ranking.same else "≠ other order", "bold"
            yield -_TRACK, f"ours: {order(ranking.ours)}", "normal"
        return
    ours = {label(names[item.metric]): item.ours for item in items if item.run}
    yield -_TRACK, f"ours: {order(ours)}", "normal"


# -- pieces -----------------------------------------------------------------------------------------------------------


def _histogram(axes: Axes, id_values: np.ndarray, ood_values: np.ndarray, text: str) -> None:
    colours = {ID: ID_COLOUR, "OOD": DISTANCE_COLOURS["near"][0]}
    histogram_panel(axes, {ID: id_values, "OOD": ood_values}, colours, text)


def _with_area(name: str, areas: Mapping[str, float]) -> str:
    return f"{label(name)}: AUROC {100 * areas[name]:.1f} %"


def _name(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], shade: str, *, ha: str) -> None:
    """A name beside a point, readable on top of lines."""
    look: Any = {"textcoords": "offset points", "fontsize": SMALL, "fontweight": "bold", "ha": ha}
    note = axes.annotate(text, at, offset, color=shade, **look)
    outline(note)


def _plain_ticks(axes: Axes, values: Sequence[float] | np.ndarray) -> None:
    """Numbers as they are on a logarithmic axis."""
    axes.set_xticks(list(values))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
