"""Figures: one style for all of them, those of a comparison, of one run, and of many runs.

Figures are made by matplotlib's object interface with the Agg canvas; ``matplotlib.pyplot`` is never imported.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from rmd_plugin.compare.rows import AUROC, MEAN, SECONDS, make_rows
from rmd_plugin.files import replacing
from rmd_plugin.report import tables
from rmd_plugin.report.run import CALIBRATION, ID, Scores
from rmd_plugin.report.tables import LABELS, OURS, label, near_first, ood_sets, ranking, set_title

if TYPE_CHECKING:
    from rmd_plugin.report.summary import Summary

#: rows with stage, epoch, step, detector, ood, metric and value, as a monitor keeps them
History = Sequence[Mapping[str, Any]]

#: Okabe and Ito's colours, which people with any kind of colour vision tell apart
PALETTE = {
    "blue": "#0072B2", "black": "#000000", "vermilion": "#D55E00", "green": "#009E73", "orange": "#E69F00",
    "sky": "#56B4E9", "purple": "#CC79A7",
}  # fmt: skip
DASHES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, ()), (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 2)),
    (0, (9, 1.5, 3, 1.5)),
)  # fmt: skip
#: the same meaning in every figure: in-distribution blue, near-OOD vermilion and its kin, far-OOD green and its kin
ID_COLOUR = PALETTE["blue"]
NEAR_COLOURS = (PALETTE["vermilion"], PALETTE["orange"], PALETTE["purple"])
FAR_COLOURS = (PALETTE["green"], PALETTE["sky"], PALETTE["black"])
QUIET = "#9A9A9A"
SLIDE = (10.0, 5.625)  # 16:9
SMALL = 12.0
_PANEL = (6.0, 3.9)

#: detectors that have a colour and a name in one figure
NAMED = 12
#: up to which level of false alarms calibration is drawn: larger ones are not used in practice
_LEVELS = 0.2
#: scores further from the bulk than so many times its width are counted in the outermost bins
_REACH = 5.0


# -- the style ---------------------------------------------------------------------------------------------------------


@contextmanager
def house_style() -> Iterator[None]:
    """Settings for making and saving a figure, also as a decorator; the caller's own come back afterwards."""
    with style.context(Path(__file__).with_name("house.mplstyle")):
        yield


def new_panels(count: int, size: tuple[float, float], columns: int = 1, title: str = "") -> tuple[Figure, list[Axes]]:
    """A figure of equal panels, at most ``columns`` beside each other, each of so many inches."""
    columns = max(min(count, columns), 1)
    lines = max(-(-count // columns), 1)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid[:count]


def name_lines(axes: Axes) -> None:
    """Names of the lines that have a label to the right of the panel, the line that ends highest on top."""

    def last_height(line: Any) -> float:
        return float(pd.Series(line.get_ydata(), dtype=float).ffill().tail(1).sum())

    lines = sorted(axes.get_legend_handles_labels()[0], key=last_height, reverse=True)
    axes.legend(handles=lines, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor="linecolor", handlelength=1.6)


def detector_style(detector: str) -> dict[str, Any]:
    """How the line of a detector is drawn in every figure: ``color`` and ``linestyle`` for ``axes.plot``.

    A detector that is not in the table has the last dash, in a colour that depends on its name alone.
    """
    known, colours = list(LABELS), list(PALETTE.values())
    index = known.index(detector) if detector in LABELS else len(known) + crc32(detector.encode()) % len(colours)
    dash, number = divmod(index, len(colours))
    return {"color": colours[number], "linestyle": DASHES[dash]}


def colour(detector: str) -> str:
    """Colour of a detector in every figure."""
    return str(detector_style(detector)["color"])


def set_colours(distances: Mapping[str, str]) -> dict[str, str]:
    """A colour for every OOD set, warm for near and cold for far; they repeat after three of a kind."""
    colours = {"near": cycle(NEAR_COLOURS), "far": cycle(FAR_COLOURS), "": cycle(NEAR_COLOURS)}
    return {name: next(colours[distance]) for name, distance in distances.items()}


def save_figure(figure: Figure, stem: str | os.PathLike[str], formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
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


# -- of a comparison --------------------------------------------------------------------------------------------------


def choose_detectors(rows: pd.DataFrame, count: int = 6) -> list[str]:
    """So many detectors worth a colour: RMD and MD, then the best of the table, in the order of the table."""
    ranked = ranking(rows)
    chosen = [name for name in OURS[:2] if name in ranked]
    chosen += [name for name in ranked if name not in chosen]
    return [name for name in ranked if name in chosen[:count]]


@house_style()
def roc_figure(
    scores: Scores, rows: pd.DataFrame, *, detectors: Sequence[str] | None = None, title: str = "", panels: int = 4
) -> Figure | None:
    """ROC curves, one panel per OOD set, near ones first: some detectors in colour and with a name, the others grey.

    By default :func:`choose_detectors` says which are named. None without any OOD set.
    """
    named = [name for name in (choose_detectors(rows) if detectors is None else detectors) if name in scores]
    distances = ood_sets(rows)
    sets = near_first(distances)[:panels]
    if not sets:
        return None
    figure, grid = new_panels(len(sets), (6.4, 5.9), columns=2, title=title)
    for axes, name in zip(grid, sets, strict=True):
        values = tables.numbers_of(rows, named, AUROC, name)["value"].sort_values(ascending=False)
        for detector in [*(other for other in scores if other not in named), *values.index]:
            if name in scores[detector]:
                look: dict[str, Any] = {"color": "#DADADA", "linewidth": 1.0}
                if detector in named:
                    look = {**detector_style(detector), "label": f"{label(detector)}  {100 * values[detector]:.1f}"}
                axes.plot(*roc_points(scores[detector][ID], scores[detector][name]), **look)
        axes.plot([0, 1], [0, 1], color=QUIET, linewidth=1.0, linestyle=DASHES[2])
        axes.set(xlim=(0, 1), ylim=(0, 1.003), aspect="equal", title=set_title(name, distances))
        axes.set(xlabel="in-distribution flagged (false positives)", ylabel="OOD found (true positives)")
        axes.legend(loc="lower right", labelcolor="linecolor")
        axes.grid()
    return figure


@house_style()
def histogram_figure(
    scores: Scores, rows: pd.DataFrame | None = None, *, detectors: Sequence[str] | None = None, title: str = ""
) -> Figure:
    """Histograms of the scores, one panel per detector: in-distribution filled, OOD sets as lines.

    The rows of the comparison tell near from far, the threshold of each detector, and by :func:`choose_detectors` which
    to draw. See :func:`histogram_panel`.
    """
    rows = make_rows() if rows is None else rows
    chosen = [name for name in (choose_detectors(rows) if detectors is None else detectors) if name in scores]
    distances = ood_sets(rows)
    distances |= {name: "" for sets in scores.values() for name in sets if name not in (ID, CALIBRATION, *distances)}
    colours = {**set_colours(distances), ID: ID_COLOUR}
    near = tables.near_far_means(rows)["near"]
    figure, grid = new_panels(len(chosen), (5.0, 3.8), columns=3, title=title)
    for axes, detector in zip(grid, chosen, strict=True):
        names = [ID, *(name for name in near_first(distances) if name in scores[detector])]
        finite = {name: scores[detector][name] for name in names if np.isfinite(scores[detector][name]).any()}
        histogram_panel(axes, finite, colours, "score, higher = more OOD")
        alpha, threshold = tables.decision_of(rows, detector)
        if axes.get_xlim()[0] < threshold < axes.get_xlim()[1]:
            axes.axvline(threshold, color="black", linewidth=1.2, linestyle=DASHES[1])
            axes.set_xlabel(f"{axes.get_xlabel()}; dashed: {100 * alpha:g} % false alarms", fontsize=SMALL)
        area = near.get(detector, math.nan)
        axes.set_title(label(detector) + ("" if math.isnan(area) else f", near AUROC {100 * area:.1f}"))
    return figure


def histogram_edges(scores: np.ndarray, bulk: np.ndarray, threshold: float = math.nan) -> np.ndarray:
    """Bins of equal width over nearly all scores, and over the threshold if there is one, shape (B + 1,).

    They end not far from the bulk, whose scores would be squeezed into one bar otherwise: those beyond belong into the
    outermost bins.
    """
    scores, bulk = (np.clip(array[np.isfinite(array)].astype(np.float64), -1e300, 1e300) for array in (scores, bulk))
    low, high = np.quantile(scores, (0.005, 0.995)) if len(scores) else (0.0, 1.0)
    lower, middle, upper = np.quantile(bulk, (0.1, 0.5, 0.9)) if len(bulk) else (low, low, low)
    if upper > lower:
        reach = _REACH * (upper - lower)
        low, high = max(low, middle - reach), min(high, middle + reach)
    if math.isfinite(threshold):
        low, high = min(low, threshold), max(high, threshold + 0.05 * (threshold - low))
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-200):  # as good as equal: bins would have no width
        room = max(0.5, 1e-9 * abs(low))
        low, high = low - room, high + room
    # a bin of a small set would hold one score or none
    return np.linspace(low, high, min(40, max(8, int(2 * len(bulk) ** 0.5))) + 1)


def histogram_panel(axes: Axes, samples: Mapping[str, np.ndarray], colours: Mapping[str, str], text: str) -> None:
    """Histograms of samples by name with :func:`histogram_edges`: ID filled, the others as lines, ``text`` below."""
    edges = histogram_edges(np.concatenate([*samples.values(), np.empty(0)]), samples.get(ID, np.empty(0)))
    for name, values in samples.items():
        finite = values[np.isfinite(values)].astype(np.float64)  # an edge in float32 may lie outside of the bins
        heights, _ = np.histogram(np.clip(finite, edges[0], edges[-1]), bins=edges)
        shares = heights / heights.sum()
        if name == ID:
            axes.stairs(shares, edges, fill=True, alpha=0.35, color=colours[name])
        text_of_set = "in-distribution" if name == ID else name
        axes.stairs(shares, edges, linewidth=1.2 if name == ID else 2.2, label=text_of_set, color=colours[name])
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(edges[0], edges[-1]), yticks=[])
    axes.set_xlabel(text, fontsize=SMALL)
    axes.locator_params(axis="x", nbins=4)
    if samples:
        axes.legend(labelcolor="linecolor", fontsize=SMALL - 1, handlelength=1.0, borderaxespad=0.0)


@house_style()
def calibration_figure(
    scores: Scores, rows: pd.DataFrame, *, detectors: Sequence[str] | None = None, title: str = ""
) -> Figure | None:
    """Requested false alarms against those on the ID test set, one line per detector; None without any.

    The band holds 95 % of what exchangeable data give: the Beta-binomial law of both sizes. A line above has more
    false alarms than were promised. By default :func:`choose_detectors` says which are drawn.
    """
    chosen = choose_detectors(rows) if detectors is None else detectors
    pairs = {name: (sets[CALIBRATION], sets[ID]) for name in chosen if CALIBRATION in (sets := scores.get(name, {}))}
    if not pairs:
        return None
    size, tested = map(len, next(iter(pairs.values())))
    asked = np.linspace(0.0, _LEVELS, 101)[1:]
    alarms = np.floor(asked * (size + 1) + 1e-9)
    from scipy.stats import betabinom  # takes a moment

    figure, (axes,) = new_panels(1, _PANEL, title=title)
    usable = alarms > 0
    band = [betabinom.ppf(share, tested, alarms[usable], size + 1 - alarms[usable]) for share in (0.025, 0.975)]
    axes.fill_between(100 * asked[usable], *(100 * edge / tested for edge in band), color="#E6E6E6", linewidth=0)
    axes.plot([0, 100 * _LEVELS], [0, 100 * _LEVELS], color=QUIET, linewidth=1.0, linestyle=DASHES[2])
    for name, (held_out, test) in pairs.items():
        # p <= level, p being (1 + number of calibration scores that reach the score) / (size + 1)
        reached = 1 + size - np.searchsorted(np.sort(held_out), test, side="left")
        flagged = 100 * np.mean(reached <= alarms[:, None], axis=1)
        axes.plot(100 * asked, flagged, label=label(name), **detector_style(name))
    axes.set(xlim=(0, 100 * _LEVELS), xlabel="requested false alarms (%)", ylabel="flagged of the ID test set (%)")
    axes.set_ylim(bottom=0)
    axes.grid()
    name_lines(axes)
    return figure


def roc_points(id_scores: np.ndarray, ood_scores: np.ndarray, points: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates (P,) of the ROC curve, OOD being positive: steps of at most 2 / P on both axes."""
    shares = np.linspace(0, 1, points // 2)
    both = [np.sort(id_scores), np.sort(ood_scores)]
    thresholds = np.unique(np.concatenate([np.quantile(scores, shares, method="higher") for scores in both]))[::-1]
    fpr, tpr = ((len(scores) - np.searchsorted(scores, thresholds)) / len(scores) for scores in both)
    return np.append(0.0, fpr), np.append(0.0, tpr)


# -- of one run -------------------------------------------------------------------------------------------------------


def history_sets(history: History) -> list[str]:
    """OOD sets that have curves of AUROC, their mean first; of one set the mean is the same curve and left out."""
    sets = list(dict.fromkeys(str(row["ood"]) for row in history if row["metric"] == AUROC and row["ood"]))
    if len(sets) == 2:
        sets = [name for name in sets if name != MEAN]
    return sorted(sets, key=lambda name: name != MEAN)


@house_style()
def epochs_figure(
    history: History, detectors: Sequence[str] = (), distances: Mapping[str, str] | None = None
) -> Figure:
    """AUROC over the epochs, one panel per OOD set, one line per detector; a gap where it is missing.

    Args:
        history: of the monitor.
        detectors: those that have a name, as far as there is room; without any, all. The others are grey.
        distances: OOD set -> ``near`` or ``far``, for its heading.
    """
    sets = history_sets(history)
    rows = pd.DataFrame([row for row in history if row["ood"] in sets and row["metric"] == AUROC])
    drawn = list(rows["detector"].unique()) if len(rows) else []
    named = [name for name in detectors or drawn if name in drawn][:NAMED]
    figure, grid = new_panels(len(sets), _PANEL, columns=3)
    for axes, ood in zip(grid, sets, strict=True):
        set_rows = rows[rows["ood"] == ood]
        # several validations within an epoch need a finer scale
        by_epoch = set_rows["epoch"].nunique() == len(set_rows[["epoch", "step"]].drop_duplicates())
        for name in sorted(drawn, key=lambda name: name in named):
            curve = set_rows[set_rows["detector"] == name]
            look = {**detector_style(name), "label": label(name)} if name in named else {"color": QUIET}
            # a line through few points shows them; through many they would hide it
            marker = "o" if len(curve) <= 25 else ""
            x = curve["epoch"] + 1 if by_epoch else curve["step"]
            axes.plot(x, 100 * curve["value"].astype(float), marker=marker, markersize=4.5, **look)
        axes.margins(x=0.03)
        if by_epoch:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        title = "mean over the OOD sets" if ood == MEAN else set_title(ood, distances or {})
        axes.set(xlabel="epoch" if by_epoch else "step", ylabel="AUROC (%)", title=title)
        axes.grid(axis="y")
        name_lines(axes)
    return figure


# -- of many runs -----------------------------------------------------------------------------------------------------


@house_style()
def cost_figure(summary: Summary) -> Figure | None:
    """Mean number of every detector against its time to score, in times of the reference's; None without times.

    Upper left is better: no detector stands above and to the left of those on the line. Ours are bold.
    """
    points = summary.overall.reindex(columns=["cost", "mean"]).dropna()
    if len(points) < 3 or summary.metric in SECONDS:
        return None
    sign = -1 if summary.best == "lowest" else 1
    ordered = points.assign(good=sign * points["mean"]).sort_values(["cost", "good"], ascending=[True, False])
    front = ordered[ordered["good"] > ordered["good"].cummax().shift(fill_value=-math.inf)]
    figure, (axes,) = new_panels(1, (10.0, 7.0))
    axes.set_xscale("log")
    axes.step(front["cost"], 100 * front["mean"], where="post", color=QUIET, linewidth=1.4)
    for name, x, y in points.itertuples():
        axes.plot(x, 100 * y, "o", color=colour(name), markersize=9 if name in OURS else 6)
        text = axes.annotate(label(name), (x, 100 * y), (7, -4), textcoords="offset points", color=colour(name))
        text.set(fontsize=SMALL - 2, fontweight="bold" if name in OURS else "normal")
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])  # readable across a line
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set_xlabel(f"time to score the test sets, {label(summary.reference)} = 1")
    on = " on near-OOD" if (summary.groups["judged"] == "mean (near)").all() else ""
    axes.set_ylabel(f"{summary.metric} (%){on}, mean over {len(summary.groups)} benchmarks")
    axes.margins(x=0.12, y=0.06)
    axes.grid()
    return figure
