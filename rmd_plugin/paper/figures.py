"""Figures of the studies: drawn from arrays and numbers alone, at the size of a slide, labelled in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rmd_plugin.compare.rows import auroc
from rmd_plugin.paper.document import order, rankings
from rmd_plugin.paper.reproduce import SIMULATION
from rmd_plugin.paper.studies import StudyResult
from rmd_plugin.report import figures as style
from rmd_plugin.report.figures import SMALL, colour, histogram_panel, label
from rmd_plugin.report.run import ID

Arrays = Mapping[str, np.ndarray]
#: figure name -> figure and caption
Figures = dict[str, tuple[Figure, str]]

_BOTH = ("mahalanobis", "rmd")
_OOD_COLOUR = style.NEAR_COLOURS[0]


def make_figures(result: StudyResult) -> Figures:
    """The figures of a study by file name, each with a caption."""
    study = result.study
    by_run: dict[str, dict[str, np.ndarray]] = {}
    for key, value in result.arrays.items():
        run, _, name = key.partition("//")
        by_run.setdefault(run, {})[name] = value
    numbers = pd.DataFrame(result.numbers)
    with style.house_style():
        if study == SIMULATION:
            return _simulation_figures(numbers, result.arrays)
        if study == "robustness":
            return {study: (robustness_figure(by_run), "Accuracy and AUROC over the training steps")}
        if study in _PER_RUN:
            draw, caption = _PER_RUN[study]
            stems = {run: re.sub(r"\W+", "_", run) for run in by_run}
            return {f"{study}_{stems[run]}": (draw(part, run), f"{caption}: {run}") for run, part in by_run.items()}
        title = "Gaussians and flows" if study == "flows" else f"Table {study[-1]}: paper and ours"
        return {study: (paired_figure(numbers, title), title)}


# -- simulation -------------------------------------------------------------------------------------------------------


def _simulation_figures(numbers: pd.DataFrame, arrays: Arrays) -> Figures:
    panels = {
        "x1": ("The one coordinate that tells classes apart", "x₁"),
        "rest": ("The other coordinates, shared by all", "xᵢ, i > 1"),
        "identity/mahalanobis": (f"MD: AUROC {numbers['ours'][0]:.1f} %", "min MDₖ"),
        "identity/rmd": (f"RMD: AUROC {numbers['ours'][1]:.1f} %", "min MDₖ - MD₀"),
    }
    units = {key.removesuffix("/id"): key.split("/")[0] for key in arrays if re.match("one_layer.*/id", key)}
    hidden = {key: (f"{label(key.split('/')[1])}, {network}", "OOD score") for key, network in units.items()}
    figures = {
        "simulation": (histograms_figure(arrays, panels), "Histograms of one draw; AUROC is the mean over seeds"),
        "simulation_sweep": (sweep_figure(arrays), "Where MD breaks: mean over seeds, band from least to largest"),
    }
    if hidden:
        caption = "Scores on the hidden units of a trained one-layer network"
        figures["simulation_network"] = (histograms_figure(arrays, hidden), caption)
    return figures


def histograms_figure(arrays: Arrays, panels: Mapping[str, tuple[str, str]]) -> Figure:
    """Figure 5: ID and OOD samples as histograms, two panels a line; name of the arrays -> title and axis."""
    figure = Figure(figsize=(10.0, 3.3 * (len(panels) // 2)))
    for axes, (name, (title, text)) in zip(figure.subplots(len(panels) // 2, 2).flat, panels.items(), strict=True):
        _histogram(axes, arrays[f"{name}/id"], arrays[f"{name}/ood"], text)
        axes.set_title(title)
    return figure


def sweep_figure(arrays: Arrays) -> Figure:
    """Where MD breaks: AUROC over the number of dimensions and over sigma, mean and range over seeds."""
    figure = Figure(figsize=style.SLIDE)
    both = figure.subplots(1, 2, sharey=True)
    for axes, name, text in zip(both, ("dim", "sigma"), ("dimensions D", "standard deviation σ"), strict=True):
        values = arrays[f"sweep_{name}/values"]
        x = np.arange(len(values))
        axes.set_xticks(x, [f"{value:g}" for value in values])
        for detector in reversed(_BOTH):
            areas = 100 * arrays[f"sweep_{name}/{detector}"]
            axes.fill_between(x, areas.min(1), areas.max(1), color=colour(detector), alpha=0.2, linewidth=0)
            axes.plot(x, areas.mean(1), "o-", color=colour(detector), markersize=6, label=label(detector))
        limit = {"linewidth": 1.6, "label": "MD with the true parameters"}
        axes.plot(x, 100 * arrays[f"sweep_{name}/limit"], color=style.QUIET, linestyle=style.DASHES[1], **limit)
        axes.set_xlabel(text)
        axes.grid()
    both[0].set_ylabel("AUROC (%)")
    both[0].legend(loc="lower left")
    return figure


# -- spectrum and partial ---------------------------------------------------------------------------------------------


def spectrum_figure(arrays: Arrays, run: str) -> Figure:
    """Figure 1: MD and RMD along every direction (mean and [10 %, 90 %] band), and the histograms of both."""
    threshold, count = int(arrays["threshold"]), len(arrays["rmd/id/mean"])
    x, wide = np.arange(1, count + 1), count > 100
    figure = Figure(figsize=(12.0, 6.9))
    grid = figure.subplots(2, 2, width_ratios=(2.1, 1))
    for (axes, panel), name in zip(grid, _BOTH, strict=True):
        limits = [0.0]
        for kind, text, shade in (("id", "in-distribution", style.ID_COLOUR), ("ood", "OOD", _OOD_COLOUR)):
            mean, low, high = (arrays[f"{name}/{kind}/{key}"] for key in ("mean", "low", "high"))
            axes.plot(x, mean, color=shade, linewidth=1.6, label=text, drawstyle="steps-mid")
            axes.fill_between(x, low, high, color=shade, alpha=0.18, linewidth=0, step="mid")
            # the means whole, and the bands but for a few directions that lie far beyond all others
            limits += [mean.min(), mean.max(), np.quantile(low, 0.02), np.quantile(high, 0.98)]
        axes.set_ylim(1.06 * min(limits), 1.06 * max(limits))
        axes.axvline(threshold + 0.5, color="#000000", linestyle=style.DASHES[1], linewidth=1.4)
        axes.set_xlim(0.7, count + 0.5)
        if wide:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        title = f"{label(name)}: mean and [10 %, 90 %] of the samples"
        axes.set(title=title, ylabel=f"{label(name)} per direction")
        axes.grid(axis="y")
        scores = arrays[f"{name}/id/scores"], arrays[f"{name}/ood/scores"]
        _histogram(panel, *scores, "score")
        panel.set_title(f"{label(name)}: AUROC {100 * auroc(*scores):.1f} %")
    # above the panel: inside of it the line of the threshold may stand anywhere
    above: Any = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2, "borderaxespad": 0.2}
    grid[0][0].legend(**above, labelcolor="linecolor", handlelength=0)
    falling = "falling variance of the class means" if run.startswith(SIMULATION) else "falling variance"
    grid[1][0].set_xlabel(f"direction, by {falling}{' (log)' if wide else ''}; dashed: {threshold} leading ones")
    figure.suptitle(run, x=0.01, ha="left")
    return figure


def partial_figure(arrays: Arrays, run: str) -> Figure:
    """Appendix C: AUROC of PMD over d, largest and smallest directions, with the lines of RMD, MD and MMD."""
    largest, smallest = 100 * arrays["largest"], 100 * arrays["smallest"]
    lines = {name: 100 * float(arrays[name]) for name in ("rmd", "mahalanobis", "marginal")}
    best = int(largest.argmax())
    figure = Figure(figsize=(12.0, 5.6))
    left, right = figure.subplots(1, 2, sharey=True)
    left.plot(np.arange(1, len(largest) + 1), largest, color=colour("partial"), linewidth=2.6)
    left.plot(best + 1, largest[best], "o", color=colour("partial"), markersize=9)
    title = f"PMD on the first d directions; best d = {best + 1}: {largest[best]:.1f}"
    left.set(title=title, xlabel="d, directions of largest variance used", ylabel="AUROC (%)")
    right.plot(np.arange(len(smallest)), smallest, color=colour("partial"), linewidth=2.6)
    right.set(title="PMD on the others", xlabel="d, directions of largest variance left out")
    for axes in (left, right):
        for name, value in lines.items():
            line = {"linewidth": 1.8, "linestyle": style.DASHES[name != "rmd"], "label": f"{label(name)} {value:.1f}"}
            axes.axhline(value, color=colour(name), **line)
        axes.grid()
    figure.suptitle(run, x=0.01, ha="left")
    style.name_lines(right)
    return figure


# -- robustness, tables and flows -------------------------------------------------------------------------------------


def robustness_figure(trainings: Mapping[str, Arrays]) -> Figure:
    """Figure 3: accuracies above, AUROC of every detector below, over the steps; a column for each training."""
    figure = Figure(figsize=(6.4 * len(trainings), 7.2))
    grid = figure.subplots(2, len(trainings), squeeze=False, sharex="col", height_ratios=(1, 1.5))
    for column, (run, arrays) in zip(grid.T, trainings.items(), strict=True):
        top, bottom = column
        steps, *accuracies = arrays.get("accuracy", ((),))
        names = "training", "held-out"
        curves = [(top, steps, values, name, "#000000") for values, name in zip(accuracies, names, strict=False)]
        drawn = [name for name in (*_BOTH, "msp") if name in arrays]
        curves += [(bottom, *arrays[name], label(name), colour(name)) for name in drawn]
        for axes, steps, values, name, shade in curves:
            line = {"linestyle": style.DASHES[name == "training"], "label": f"{name} {100 * values[-1]:.1f}"}
            axes.plot(steps, 100 * values, marker="o", color=shade, markersize=4, **line)
        top.set_title(run)
        bottom.set_xlabel("training step")
        bottom.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    grid[0][0].set_ylabel("accuracy (%)")
    grid[1][0].set_ylabel("AUROC (%)")
    for axes in grid.flat:
        axes.grid()
        style.name_lines(axes)
    return figure


def paired_figure(numbers: pd.DataFrame, title: str) -> Figure:
    """The paper's numbers above ours on one scale, a line from one to the other; lines that cross change the order.

    Beside each setting stands the order itself, in the paper and in ours.
    """
    numbers = numbers[numbers["detector"] != ""]
    groups = list(numbers.groupby("line", sort=False))
    hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.8}
    figure = Figure(figsize=(12.0, 1.9 + 0.86 * len(groups)))
    axes = figure.subplots()
    names = []
    for row, (line, group) in enumerate(groups):
        upper, lower = -row + 0.26, -row - 0.26
        for item in group.itertuples():
            shade = colour(item.detector)
            # a number that is missing is not drawn, nor the line to it
            axes.plot([item.paper, item.ours], [upper, lower], color=shade, linewidth=1.6, alpha=0.7, zorder=2)
            axes.plot(item.paper, upper, "o", markersize=8, color=shade, zorder=3, **hollow)
            axes.plot(item.ours, lower, "o", markersize=8, color=shade, zorder=3)
        settings = group["setting"][group["ours"].notna()].tolist()
        network = settings[0].split(",")[0] if settings else ""
        # a stand-in must not pass for the paper's network
        remark = "\n(not run)" if not settings else f"\nours: {network}" if network not in line else ""
        names.append(line.replace(", ", "\n", 1) + remark)
        beside: Any = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": SMALL - 2}
        for ranking in rankings(group)[:1]:
            axes.annotate(f"paper: {order(ranking.paper)}", (1.015, upper), annotation_clip=False, **beside)
            text = f"{'=' if ranking.same else '≠'} ours: {order(ranking.ours)}" if ranking.ours else ""
            axes.annotate(text, (1.015, lower), annotation_clip=False, **beside)
    axes.set_yticks([-row for row in range(len(groups))], names, fontsize=SMALL - 1)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-len(groups) + 0.45, 0.55)
    axes.set_xlabel("AUROC (%), paper (hollow) above ours")
    for row in range(1, len(groups)):
        axes.axhline(0.5 - row, color="#E3E3E3", linewidth=1.0)
    axes.grid(axis="x")
    for name in numbers["detector"].unique():
        axes.plot([], [], "o", color=colour(name), label=label(name))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=9, borderaxespad=0.2)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


#: studies with a figure for each run, and its caption
_PER_RUN: dict[str, tuple[Callable[[Arrays, str], Figure], str]] = {
    "spectrum": (spectrum_figure, "MD and RMD along the directions"),
    "partial": (partial_figure, "PMD for every d"),
}


# -- pieces -----------------------------------------------------------------------------------------------------------


def _histogram(axes: Axes, id_values: np.ndarray, ood_values: np.ndarray, text: str) -> None:
    histogram_panel(axes, {ID: id_values, "OOD": ood_values}, {ID: style.ID_COLOUR, "OOD": _OOD_COLOUR}, text)
