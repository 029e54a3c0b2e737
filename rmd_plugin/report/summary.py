"""A summary of many runs as files: HTML, Markdown, LaTeX, CSV."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin.atomic import replacing
from rmd_plugin.report.aggregate import ALL, FAR, GROUP, NEAR, Summary
from rmd_plugin.report.document import picture, render
from rmd_plugin.report.names import label
from rmd_plugin.report.summary_tables import (
    count_outcomes,
    group_tables,
    overall_tables,
    runs_table,
    summary_tables,
    terminal_tables,
)
from rmd_plugin.report.table import to_latex, to_markdown

__all__ = ["render_summary", "terminal_tables", "write_summary"]

#: files of a summary; none of them is a file of a run
CSV, MARKDOWN, LATEX, HTML, RUNS = "summary.csv", "summary.md", "summary.tex", "summary.html", "runs.csv"

_CSV_COLUMNS = [
    *GROUP, "ood", "detector", "metric", "mean", "deviation", "count", "rank", "difference", "low", "high",
]  # fmt: skip


def write_summary(summary: Summary, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a summary in every format to a folder, and return the files, the page first."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tables = summary_tables(summary, base=target)
    texts = {
        HTML: render_summary(summary, base=target),
        MARKDOWN: "\n".join(map(to_markdown, tables)),
        LATEX: "\n".join(map(to_latex, tables)),
    }
    for name, text in texts.items():
        with replacing(target / name) as file:
            file.write(text)
    for name, frame in ((CSV, _numbers(summary)), (RUNS, _runs(summary))):
        with replacing(target / name, newline="") as file:
            frame.to_csv(file, index=False, lineterminator="\n")
    return [target / name for name in (HTML, MARKDOWN, LATEX, CSV, RUNS)]


def render_summary(summary: Summary, *, base: Path | None = None) -> str:
    """The summary as one self-contained page without script; paths of runs are shown relative to ``base``."""
    from rmd_plugin.report.figures import difference_figure  # imports matplotlib

    figure = difference_figure(summary)
    alt = f"Paired difference of each detector to {label(summary.reference)}, with 95 % interval"
    benchmarks = list(dict.fromkeys(group.benchmark for group in summary.groups))
    return render(
        "summary.html",
        title=f"Near-OOD detection on {', '.join(benchmarks)}" if benchmarks else "No results",
        counts=count_outcomes(summary.runs),
        overall=overall_tables(summary),
        pictures=[picture(figure, alt)] if figure is not None else [],
        each=group_tables(summary),
        missing=runs_table([run for run in summary.runs if run.outcome != "done"], title="", base=base),
        counted=runs_table([run for run in summary.runs if run.outcome == "done"], base=base),
    )


def _numbers(summary: Summary) -> pd.DataFrame:
    """One line per group, OOD set (or mean over sets) and detector; rank and difference where they are judged."""
    lines: list[list[object]] = []
    for group in summary.groups:
        kinds: list[tuple[str, str | None, str | None]] = [(ood, None, ood) for ood in summary.sets(group)]
        kinds += [(f"mean ({which})", which, None) for which in (NEAR, FAR, ALL)]
        for name, which, ood in kinds:
            for detector in summary.detectors(group):
                found = summary.estimate(group, detector, which, ood=ood)
                if not found.count:
                    continue
                line: list[object] = [*group, name, detector, summary.metric, found.mean, found.deviation, found.count]
                if ood is None and which == summary.which(group):
                    paired = summary.difference(detector, [group])
                    line += [summary.ranks(group)[detector], paired.value, paired.low, paired.high]
                lines.append(line + [None] * (len(_CSV_COLUMNS) - len(line)))
    for detector in summary.ordered():
        paired = summary.difference(detector)
        rank, count = summary.mean_rank(detector)
        overall = ["", "", "", "overall", detector, summary.metric, None, None, count]
        lines.append([*overall, rank, paired.value, paired.low, paired.high])
    return pd.DataFrame(lines, columns=_CSV_COLUMNS)


def _runs(summary: Summary) -> pd.DataFrame:
    about = ("benchmark", "backbone", "setting", "seed")
    lines = [
        [run.path, run.outcome, run.reason, *({**run.about, "setting": run.setting}.get(name, "") for name in about)]
        for run in summary.runs
    ]
    return pd.DataFrame(lines, columns=["run", "outcome", "reason", *about], dtype=object)
