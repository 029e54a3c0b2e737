"""The page about a table of scores: ``report.html`` of ``rmd-score``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rmd_plugin.atomic import replacing
from rmd_plugin.report import style
from rmd_plugin.report.cards import Card, make_card
from rmd_plugin.report.document import Picture, picture, render
from rmd_plugin.report.score_summary import P_BINS, REASONS, ScoreRow, ScoreSummary
from rmd_plugin.report.table import Cell, Column, Table
from rmd_plugin.untrusted import one_line

#: classes in the table
_CLASSES = 50
_FLAGGED = style.PALETTE["vermilion"]


class Histogram(NamedTuple):
    """Bins of shape (B + 1,) and how many scores lie in each, shape (B,)."""

    edges: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class ScoringRun:
    """What a page says beside the numbers of the table."""

    guard: str  #: its name
    inputs: Sequence[str]
    alpha: float
    threshold: float | None = None  #: where there is one for all classes
    reference: Histogram | None = None  #: scores of the guard's own validation data
    total: int = 0  #: items that there are
    interrupted: bool = False


#: names of samples -> what they look like: a thumbnail or the text, as far as there is one
Previews = Callable[[Collection[str]], Mapping[str, "Picture | str"]]


def write_scores_page(path: str | os.PathLike[str], summary: ScoreSummary, run: ScoringRun, previews: Previews) -> Path:
    """Write the page, self-contained and without script. See :func:`render_scores`."""
    page = render_scores(summary, run, previews)
    with replacing(path) as file:
        file.write(page)
    return Path(path)


def render_scores(summary: ScoreSummary, run: ScoringRun, previews: Previews) -> str:
    """The page about scores as HTML: how many were flagged, the most unknown samples, the most ordinary, each class."""
    seen = previews({row.name for row in (*summary.highest, *summary.lowest)})
    return render(
        "scores.html",
        title=f"OOD scores of {one_line(', '.join(run.inputs))}",
        guard=one_line(run.guard),
        run=run,
        summary=summary,
        tiles=_tiles(summary, run),
        expected=f"{100 * run.alpha:g} %",
        found=percent(summary.share),
        pictures=_pictures(summary, run),
        highest=[_card(row, seen.get(row.name)) for row in summary.highest],
        lowest=[_card(row, seen.get(row.name)) for row in summary.lowest],
        classes=_class_table(summary),
        reasons=_reason_table(summary),
    )


def percent(share: float) -> str:
    """A share for readers: ``23 %``, with a digit more where it is small."""
    if math.isnan(share):
        return "–"
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def number(value: float) -> str:
    """A score for readers: four digits."""
    return f"{value:.4g}".replace("-", "−")


def _tiles(summary: ScoreSummary, run: ScoringRun) -> list[tuple[str, str, str]]:
    """Name, number and small print of each."""
    rest = f"of {run.total:,}" if run.total > summary.scored else ""
    return [
        ("Scored", f"{summary.scored:,}", rest),
        ("Flagged as OOD", f"{summary.flagged:,}", f"{percent(summary.share)} of the scored"),
        ("Not readable", f"{summary.broken:,}", "listed below" if summary.broken else ""),
        ("False alarms", f"≤ {100 * run.alpha:g} %", "of ID samples, on average"),
    ]


def _card(row: ScoreRow, seen: Picture | str | None) -> Card:
    details = [f"score {number(row.score)}", f"p-value {row.p_value:.2g}", f"nearest: {row.nearest}"]
    return make_card(row.name, details, row.is_ood, seen)


def _class_table(summary: ScoreSummary) -> Table:
    """Most flagged first."""
    ordered = sorted(summary.classes.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
    rows = [
        [Cell(name), Cell(f"{scored:,}"), Cell(f"{flagged:,}"), Cell(percent(flagged / scored))]
        for name, (scored, flagged) in ordered[:_CLASSES]
    ]
    left = len(ordered) - len(rows)
    notes = [f"{left} further classes with fewer flagged ones are in scores.parquet."] if left > 0 else []
    columns = [Column("Predicted class", "left"), Column("Scored"), Column("Flagged"), Column("Share")]
    return Table(columns, rows, notes=notes)


def _reason_table(summary: ScoreSummary) -> Table:
    left = summary.with_reason - len(summary.reasons)
    notes = [f"The first {REASONS} of {summary.with_reason:,}; the others are in scores.parquet."] if left > 0 else []
    columns = [Column("Sample", "left", wrap=True), Column("Reason", "left")]
    return Table(columns, [[Cell(name), Cell(reason)] for name, reason in summary.reasons], notes=notes)


# -- figures ----------------------------------------------------------------------------------------------------------


def _pictures(summary: ScoreSummary, run: ScoringRun) -> list[Picture]:
    if not summary.counts.sum():
        return []
    above = "" if run.threshold is None else f"; the threshold is {number(run.threshold)}"
    return [
        picture(
            scores_figure(summary, run),
            f"Histogram of {summary.scored} scores, of which {summary.flagged} are flagged{above}",
        ),
        picture(
            p_values_figure(summary, run),
            f"Histogram of the p-values: {percent(summary.share)} are at most {run.alpha:g}, where in-distribution "
            f"samples would have {100 * run.alpha:g} %",
        ),
    ]


def scores_figure(summary: ScoreSummary, run: ScoringRun) -> Figure:
    """Histogram of the scores, those flagged on top of the others, with the threshold and the guard's own data."""
    edges, share = summary.edges, summary.counts / max(int(summary.counts.sum()), 1)
    with style.house_style():
        figure, (axes,) = style.new_panels(1, (6.4, 4.2))
        axes.stairs(share[0], edges, fill=True, color=style.ID_COLOUR, alpha=0.75, label="not flagged")
        if summary.counts[1].any():
            axes.stairs(
                share.sum(axis=0), edges, baseline=share[0], fill=True, color=_FLAGGED, alpha=0.85, label="flagged"
            )
        if run.reference is not None:
            # the same share of a bin of ours, whatever the width of theirs
            widths = np.diff(run.reference.edges)
            heights = run.reference.counts / run.reference.counts.sum() * (edges[1] - edges[0]) / widths
            axes.stairs(heights, run.reference.edges, color="black", linewidth=1.4, label="the guard's validation data")
        if run.threshold is not None and edges[0] <= run.threshold <= edges[-1]:
            axes.axvline(run.threshold, color="black", linewidth=1.2, linestyle=style.DASHES[1], label="threshold")
        axes.set_xlim(edges[0], edges[-1])
        _finish(axes, "score, higher = more OOD", "share of the scored")
    return figure


def p_values_figure(summary: ScoreSummary, run: ScoringRun) -> Figure:
    """Histogram of the p-values, and the line that in-distribution samples would follow."""
    edges = np.linspace(0.0, 1.0, P_BINS + 1)
    with style.house_style():
        figure, (axes,) = style.new_panels(1, (6.4, 4.2))
        share = summary.p_counts / max(int(summary.p_counts.sum()), 1)
        axes.stairs(share, edges, fill=True, color=style.PALETTE["sky"], label="found")
        axes.axhline(1 / P_BINS, color="black", linewidth=1.4, label="if all were in-distribution")
        axes.axvline(run.alpha, color="black", linewidth=1.2, linestyle=style.DASHES[1], label=f"α = {run.alpha:g}")
        axes.set_xlim(0.0, 1.0)
        _finish(axes, "p-value, lower = more OOD", "share of the scored")
    return figure


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.locator_params(axis="both", nbins=6)
    axes.set_ylim(bottom=0)
    style.quiet_grid(axes, axis="y")
    # above the panel, where no bar can be behind it
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False, fontsize=style.SMALL, borderaxespad=0.2
    )
