"""Figures of the studies: drawn from arrays and comparisons alone, at the size of a slide, labelled in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from rmd_plugin.report.style import (
    DASHES,
    ID_COLOUR,
    PALETTE,
    QUIET,
    SLIDE,
    SMALL,
    TITLE,
    house_style,
    new_figure,
    quiet_grid,
)

Arrays = Mapping[str, np.ndarray]

OOD_COLOUR = PALETTE["vermilion"]
#: a detector has one colour in all figures of the studies
COLOURS = {
    "mahalanobis": PALETTE["vermilion"],
    "rmd": PALETTE["blue"],
    "msp": PALETTE["green"],
    "marginal": PALETTE["purple"],
    "partial": PALETTE["orange"],
    "flow_likelihood": PALETTE["orange"],
    "relative_flow": PALETTE["sky"],
}
NAMES = {
    "mahalanobis": "MD",
    "rmd": "RMD",
    "msp": "MSP",
    "marginal": "MMD",
    "partial": "PMD",
    "flow_likelihood": "flow",
    "relative_flow": "flow ratio",
}
_KINDS = (("known", "in-distribution", ID_COLOUR), ("unknown", "OOD", OOD_COLOUR))


class Compared(Protocol):
    """What :func:`paired_figure` needs of a comparison with the paper."""

    @property
    def what(self) -> str:
        """What was measured."""

    @property
    def metric(self) -> str:
        """Which number of it."""

    @property
    def paper(self) -> float:
        """The published number."""

    @property
    def ours(self) -> float:
        """Our number."""

    @property
    def setting(self) -> str:
        """What we ran, our network first."""


# -- simulation -------------------------------------------------------------------------------------------------------


def simulation_figure(arrays: Arrays, areas: Mapping[str, float] | None = None) -> Figure:
    """Figure 5: the two kinds of coordinate, MD and RMD, each as a histogram of ID and OOD samples.

    Args:
        arrays: ``x1``, ``rest``, ``mahalanobis`` and ``rmd``, each with ``/known`` and ``/unknown``.
        areas: mean AUROC of the two detectors, for their headings.
    """
    panels = [
        ("x1", "The one coordinate that tells classes apart", "x₁"),
        ("rest", "The other coordinates, shared by all", "xᵢ, i > 1"),
        ("mahalanobis", _with_area("MD", areas, "mahalanobis"), "min MDₖ"),
        ("rmd", _with_area("RMD", areas, "rmd"), "min MDₖ - MD₀"),
    ]
    with house_style():
        figure = new_figure((10.0, 6.6))
        for axes, (name, title, label) in zip(figure.subplots(2, 2).flat, panels, strict=True):
            _histogram(axes, arrays[f"{name}/known"], arrays[f"{name}/unknown"], label)
            axes.set_title(title, fontsize=SMALL + 2)
    return figure


def network_figure(arrays: Arrays, activations: Sequence[str]) -> Figure:
    """MD and RMD on the hidden units of one-layer networks, one line of panels for each activation.

    Args:
        arrays: ``ACTIVATION/DETECTOR/known`` and ``.../unknown``.
        activations: which to draw.
    """
    with house_style():
        figure = new_figure((10.0, 3.4 * len(activations)))
        grid = figure.subplots(len(activations), 2, squeeze=False)
        for line, activation in zip(grid, activations, strict=True):
            for axes, name in zip(line, ("mahalanobis", "rmd"), strict=True):
                _histogram(
                    axes, arrays[f"{activation}/{name}/known"], arrays[f"{activation}/{name}/unknown"], "outlier score"
                )
                axes.set_title(f"{NAMES[name]} on {activation} units", fontsize=SMALL + 2)
    return figure


def sweep_figure(arrays: Arrays) -> Figure:
    """Where MD breaks: AUROC over the number of dimensions and over sigma, mean and range over seeds.

    Args:
        arrays: ``sweep_dim/...`` and ``sweep_sigma/...`` as the simulation study gives them.
    """
    panels = (("dim", "dimensions D"), ("sigma", "standard deviation σ"))
    with house_style():
        figure = new_figure(SLIDE)
        both = figure.subplots(1, 2, sharey=True)
        for axes, (name, label) in zip(both, panels, strict=True):
            x = arrays[f"sweep_{name}/values"]
            axes.plot(x, 100 * arrays[f"sweep_{name}/limit"], color=QUIET, linestyle=DASHES[1], linewidth=1.6)
            for detector in ("rmd", "mahalanobis"):
                values = 100 * arrays[f"sweep_{name}/{detector}"]
                axes.fill_between(x, values.min(1), values.max(1), color=COLOURS[detector], alpha=0.2, linewidth=0)
                axes.plot(x, values.mean(1), "o-", color=COLOURS[detector], markersize=6)
                above = detector == "rmd"
                at = (x[0], values.mean(1)[0]) if above else (x[-1], values.mean(1)[-1])
                offset = (0, 7) if above else (-8, -6)
                _name(axes, NAMES[detector], at, offset, COLOURS[detector], ha="left" if above else "right")
            axes.set_xscale("log")
            _plain_ticks(axes, x)
            axes.set_xlabel(label)
            quiet_grid(axes)
        both[0].set_ylabel("AUROC (%)")
        both[0].set_ylim(None, 104)
        x, limit = arrays["sweep_sigma/values"], 100 * arrays["sweep_sigma/limit"]
        # right of the fall there is room
        place = int(np.abs(limit - (limit.max() + limit.min()) / 2).argmin())
        _name(both[1], "MD with the\ntrue parameters", (x[place], limit[place]), (16, 4), "#6A6A6A", ha="left")
    return figure


# -- spectrum ---------------------------------------------------------------------------------------------------------


def spectrum_figure(
    arrays: Arrays, title: str, areas: Mapping[str, float], *, order: str = "falling variance"
) -> Figure:
    """Figure 1: MD and RMD along every direction (mean and [10 %, 90 %] band), and the histograms of both.

    Args:
        arrays: as :func:`rmd_plugin.paper.spectrum.analyse` gives them.
        title: heading.
        areas: AUROC of MD and RMD.
        order: what the directions are ordered by.
    """
    threshold = int(arrays["threshold"])
    with house_style():
        figure = new_figure((12.0, 6.9))
        grid = figure.subplots(2, 2, width_ratios=(2.1, 1))
        for line, name in zip(grid, ("mahalanobis", "rmd"), strict=True):
            axes = line[0]
            x = np.arange(1, len(arrays[f"{name}/known/mean"]) + 1)
            for kind, label, colour in _KINDS:
                low, high = arrays[f"{name}/{kind}/low"], arrays[f"{name}/{kind}/high"]
                axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0, step="mid")
                mean = arrays[f"{name}/{kind}/mean"]
                axes.plot(x, mean, color=colour, linewidth=1.6, label=label, drawstyle="steps-mid")
            axes.axvline(threshold + 0.5, color=PALETTE["black"], linestyle=DASHES[1], linewidth=1.4)
            axes.set_xlim(0.7, x[-1] + 0.5)
            if len(x) > 100:
                axes.set_xscale("log")
                _plain_ticks(axes, [v for v in (1, 10, 100, 1000, 10_000) if v <= x[-1]])
            axes.set_ylim(*_clipped(arrays, name))
            axes.set_ylabel(f"{NAMES[name]} per direction")
            axes.set_title(f"{NAMES[name]}: mean and [10 %, 90 %] of the samples", fontsize=SMALL + 1)
            quiet_grid(axes, axis="y")
            _histogram(line[1], arrays[f"{name}/known/scores"], arrays[f"{name}/unknown/scores"], "score")
            line[1].set_title(_with_area(NAMES[name], areas, name), fontsize=SMALL + 1)
        # in the lower panel: the upper one has the names of the colours
        lower = grid[1][0]
        place = lower.transAxes.inverted().transform(lower.transData.transform((threshold + 0.5, 0.0)))[0]
        note = lower.annotate(
            f" {threshold} leading ",
            (threshold + 0.5, 1.0),
            xycoords=("data", "axes fraction"),
            ha="left" if place < 0.7 else "right",
            va="top",
            fontsize=SMALL,
        )
        note.set_path_effects([withStroke(linewidth=3, foreground="white")])
        grid[0][0].legend(loc="upper right", frameon=False, labelcolor="linecolor", handlelength=0, fontsize=SMALL)
        grid[1][0].set_xlabel(f"direction, by {order}" + (" (log)" if len(x) > 100 else ""))
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return figure


def _clipped(arrays: Arrays, name: str) -> tuple[float, float]:
    """Limits that hold the means whole and the bands but for a few directions."""
    means = np.concatenate([arrays[f"{name}/{kind}/mean"] for kind, _, _ in _KINDS])
    highs = np.concatenate([arrays[f"{name}/{kind}/high"] for kind, _, _ in _KINDS])
    lows = np.concatenate([arrays[f"{name}/{kind}/low"] for kind, _, _ in _KINDS])
    top = max(float(means.max()), float(np.quantile(highs, 0.98)))
    bottom = min(0.0, float(means.min()), float(np.quantile(lows, 0.02)))
    pad = 0.06 * (top - bottom)
    return bottom - (pad if bottom < 0 else 0.0), top + pad


# -- partial ----------------------------------------------------------------------------------------------------------


def partial_figure(arrays: Arrays, title: str) -> Figure:
    """Appendix C: AUROC of PMD over d, largest and smallest directions, with the lines of RMD, MD and MMD.

    Args:
        arrays: ``largest`` and ``smallest``, and the AUROC ``rmd``, ``mahalanobis`` and ``marginal``.
        title: heading.
    """
    largest, smallest = 100 * arrays["largest"], 100 * arrays["smallest"]
    with house_style():
        figure = new_figure((12.0, 5.6))
        left, right = figure.subplots(1, 2, sharey=True)
        left.plot(np.arange(1, len(largest) + 1), largest, color=COLOURS["partial"], linewidth=2.6)
        right.plot(np.arange(len(smallest)), smallest, color=COLOURS["partial"], linewidth=2.6)
        peak = int(largest.argmax())
        left.plot(peak + 1, largest[peak], "o", color=COLOURS["partial"], markersize=9)
        beyond = peak > len(largest) // 2
        _name(
            left,
            f"best d = {peak + 1}: {largest[peak]:.1f}",
            (peak + 1, float(largest[peak])),
            (-8 if beyond else 8, -20),
            "#9A6A00",
            ha="right" if beyond else "left",
        )
        lines = {name: 100 * float(arrays[name]) for name in ("rmd", "mahalanobis", "marginal")}
        for axes in (left, right):
            for name, value in lines.items():
                axes.axhline(value, color=COLOURS[name], linewidth=1.8, linestyle=DASHES[0 if name == "rmd" else 1])
            quiet_grid(axes)
        left.set_xlabel("d, directions of largest variance used")
        right.set_xlabel("d, directions of largest variance left out")
        left.set_ylabel("AUROC (%)")
        left.set_title("PMD on the first d directions", fontsize=SMALL + 2)
        right.set_title("PMD on the others", fontsize=SMALL + 2)
        texts = {name: (value, f"{NAMES[name]} {value:.1f}", COLOURS[name]) for name, value in lines.items()}
        _beside(right, list(texts.values()))
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return figure


# -- robustness -------------------------------------------------------------------------------------------------------


def robustness_figure(arrays: Arrays, labels: Sequence[str]) -> Figure:
    """Figure 3: accuracies above, AUROC of every detector below, over the training steps; a column for each training.

    Args:
        arrays: ``LABEL//accuracy`` (3, C): step, training and held-out accuracy; ``LABEL//DETECTOR`` (2, C).
        labels: the trainings.
    """
    with house_style():
        figure = new_figure((6.4 * len(labels), 7.2))
        grid = figure.subplots(2, len(labels), squeeze=False, sharex="col", height_ratios=(1, 1.5))
        for column, label in enumerate(labels):
            top, bottom = grid[0][column], grid[1][column]
            accuracy = arrays.get(f"{label}//accuracy")
            ends = []
            if accuracy is not None:
                for line, name, style, colour in ((1, "training", 1, QUIET), (2, "held-out", 0, PALETTE["black"])):
                    top.plot(accuracy[0], 100 * accuracy[line], color=colour, linestyle=DASHES[style])
                    ends.append((100 * float(accuracy[line][-1]), name, "#6A6A6A" if line == 1 else colour))
                _beside(top, ends)
            ends = []
            for name in ("mahalanobis", "rmd", "msp"):
                curve = arrays.get(f"{label}//{name}")
                if curve is None:
                    continue
                bottom.plot(curve[0], 100 * curve[1], "o-", color=COLOURS[name], markersize=4)
                ends.append((100 * float(curve[1][-1]), f"{NAMES[name]} {100 * curve[1][-1]:.1f}", COLOURS[name]))
            _beside(bottom, ends)
            top.set_title(label, fontsize=SMALL + 2)
            bottom.set_xlabel("training step")
            bottom.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            for axes in (top, bottom):
                quiet_grid(axes)
        grid[0][0].set_ylabel("accuracy (%)")
        grid[1][0].set_ylabel("AUROC (%)")
    return figure


# -- tables and flows -------------------------------------------------------------------------------------------------


def paired_figure(comparisons: Sequence[Compared], names: Mapping[str, str], title: str) -> Figure:
    """The paper's numbers and ours on one scale: hollow for the paper, filled for ours, a line for each setting.

    Args:
        comparisons: the numbers; only those whose metric is in ``names`` are drawn.
        names: metric -> detector.
        title: heading.
    """
    chosen = [item for item in comparisons if item.metric in names]
    lines = list(dict.fromkeys(item.what for item in chosen))
    detectors = list(dict.fromkeys(names[item.metric] for item in chosen))
    spread = np.linspace(0.24, -0.24, len(detectors)) if len(detectors) > 1 else np.zeros(1)
    with house_style():
        figure = new_figure((11.0, 1.9 + 0.86 * len(lines)))
        axes = figure.subplots()
        for item in chosen:
            detector = names[item.metric]
            y = -lines.index(item.what) + spread[detectors.index(detector)]
            colour = COLOURS[detector]
            if not (math.isnan(item.paper) or math.isnan(item.ours)):
                axes.plot([item.paper, item.ours], [y, y], color=colour, linewidth=1.2, alpha=0.6)
            if not math.isnan(item.paper):
                axes.plot(item.paper, y, "o", markersize=8, markerfacecolor="white", color=colour, markeredgewidth=1.8)
            if not math.isnan(item.ours):
                axes.plot(item.ours, y, "o", markersize=8, color=colour)
        labels = []
        for line in lines:
            settings = [item.setting for item in chosen if item.what == line and not math.isnan(item.ours)]
            network = settings[0].split(",")[0] if settings else ""
            # a stand-in must not pass for the paper's network
            remark = "\n(not run)" if not settings else f"\nours: {network}" if network not in line else ""
            labels.append(line.replace(", ", "\n", 1) + remark)
        axes.set_yticks([-place for place in range(len(lines))], labels, fontsize=SMALL - 1)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-len(lines) + 0.45, 0.55)
        axes.set_xlabel("AUROC (%)")
        for place in range(1, len(lines)):
            axes.axhline(0.5 - place, color="#E3E3E3", linewidth=1.0)
        quiet_grid(axes, axis="x")
        handles = [axes.plot([], [], "o", color=COLOURS[name], label=NAMES[name])[0] for name in detectors]
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.8}
        handles += axes.plot([], [], "o", color=QUIET, label="paper", **hollow)
        handles += axes.plot([], [], "o", color=QUIET, label="ours")
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=len(handles),
            frameon=False,
            borderaxespad=0.2,
            handletextpad=0.1,
            columnspacing=1.3,
            fontsize=SMALL,
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=TITLE)
    return figure


# -- pieces -----------------------------------------------------------------------------------------------------------


def _histogram(axes: Axes, known: np.ndarray, unknown: np.ndarray, label: str) -> None:
    """ID filled, OOD as a line, both named; scores beyond the outer half percent go to the outermost bins."""
    values = np.concatenate([known, unknown]).astype(np.float64)
    low, high = np.quantile(values, (0.005, 0.995))
    low, high = (low - 0.5, high + 0.5) if not high > low else (low, high)
    edges = np.linspace(low, high, 41)
    peaks = []
    for (_, name, colour), part in zip(_KINDS, (known, unknown), strict=True):
        heights, _ = np.histogram(np.clip(part, low, high), bins=edges)
        density = heights / max(heights.sum(), 1)
        filled = name == "in-distribution"
        axes.stairs(density, edges, color=colour, fill=filled, alpha=0.35 if filled else 1.0, linewidth=2.0)
        if filled:
            axes.stairs(density, edges, color=colour, linewidth=1.2)
        peaks.append(float(density.max()))
    axes.set_ylim(0, 1.3 * max(peaks))
    axes.set_xlim(low, high)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label, fontsize=SMALL)
    axes.locator_params(axis="x", nbins=5)
    for (_, name, colour), x, side in zip(_KINDS, (0.48, 0.56), ("right", "left"), strict=True):
        axes.text(x, 0.99, name, transform=axes.transAxes, ha=side, va="top", color=colour, fontsize=SMALL)


def _with_area(text: str, areas: Mapping[str, float] | None, name: str) -> str:
    return text if not areas or name not in areas else f"{text}: AUROC {100 * areas[name]:.1f} %"


def _name(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], colour: str, **align: Any
) -> None:
    """A name beside a point, readable on top of lines."""
    label = axes.annotate(
        text, at, offset, textcoords="offset points", color=colour, fontsize=SMALL, fontweight="bold", **align
    )
    label.set_path_effects([withStroke(linewidth=3, foreground="white")])


def _beside(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names to the right of a panel at the height of their lines, moved apart where they would meet."""
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height or 1.0
    # in constrained layout the final height is not known yet: about 60 % of the figure's share
    gap = (high - low) * 1.5 * SMALL * (axes.figure.dpi / 72) / max(height, 120)
    ordered = sorted(ends)
    levels: list[float] = []
    for value, _, _ in ordered:
        levels.append(max(value, levels[-1] + gap) if levels else value)
    # names that were pushed above the panel come down again, from the highest on
    ceiling = high
    for place in reversed(range(len(levels))):
        levels[place] = min(levels[place], ceiling)
        ceiling = levels[place] - gap
    for (_, text, colour), level in zip(ordered, levels, strict=True):
        axes.annotate(
            text,
            (1.0, level),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=SMALL,
            annotation_clip=False,
        )


def _plain_ticks(axes: Axes, values: Sequence[float] | np.ndarray) -> None:
    """Numbers as they are on a logarithmic axis."""
    axes.set_xticks(list(values))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
