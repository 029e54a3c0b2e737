"""A summary of many runs as tables, one picture and files: CSV, Markdown, LaTeX, HTML."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import ACCURACY, select, unique
from rmd_plugin.report.aggregate import ALL, FAR, NEAR, SECONDS, Difference, Estimate, Group, Summary, estimate
from rmd_plugin.report.gather import Run
from rmd_plugin.report.names import label
from rmd_plugin.report.table import Cell, Column, Table, to_latex, to_markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: files of a summary; none of them is a file of a run
CSV, MARKDOWN, LATEX, HTML, RUNS = "summary.csv", "summary.md", "summary.tex", "summary.html", "runs.csv"

_MISSING = Cell("–")
#: more groups than this do not stand side by side in one table
_WIDEST = 6


def write_summary(summary: Summary, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a summary in every format.

    Args:
        summary: the summary.
        folder: where to; it is made if it is not there.

    Returns:
        The files, the page first.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    tables = summary_tables(summary, base=place)
    texts = {
        HTML: render_summary(summary, base=place),
        MARKDOWN: "\n".join(map(to_markdown, tables)),
        LATEX: "\n".join(map(to_latex, tables)),
    }
    for name, text in texts.items():
        with replacing(place / name) as file:
            file.write(text)
    _write_csv(place / CSV, _CSV_COLUMNS, _records(summary))
    columns = ("run", "outcome", "reason", "benchmark", "backbone", "setting", "seed")
    about = [[run.about.get("benchmark", ""), run.about.get("backbone", ""), run.setting] for run in summary.runs]
    lines = [
        [str(run.path), run.outcome, run.reason, *item, run.about.get("seed", "")]
        for run, item in zip(summary.runs, about, strict=True)
    ]
    _write_csv(place / RUNS, columns, lines)
    return [place / name for name in (HTML, MARKDOWN, LATEX, CSV, RUNS)]


def summary_tables(summary: Summary, *, base: Path | None = None) -> list[Table]:
    """All tables: the overall one, one per group where that says more, and the runs that gave no numbers.

    Args:
        summary: the summary.
        base: folder that paths of runs are shown relative to.
    """
    tables = overall_tables(summary)
    tables += [_group_table(summary, group) for group in summary.groups if len(summary.sets(group)) > 1]
    missing = [run for run in summary.runs if run.outcome != "done"]
    return tables + ([runs_table(missing, title="Runs without results", base=base)] if missing else [])


def overall_tables(summary: Summary, *, columns: int = _WIDEST) -> list[Table]:
    """Detectors x groups: mean ± standard deviation over the seeds, mean rank, difference to the reference.

    With many groups the overall table has only the last two, and the groups come before it, some at a time.

    Args:
        summary: the summary.
        columns: at most so many groups side by side.
    """
    if not summary.groups:
        return []
    detectors = summary.ordered()
    groups = list(summary.groups)
    if len(groups) <= columns:
        return [_detector_table(summary, detectors, groups, overall=True)]
    chunks = [groups[start : start + columns] for start in range(0, len(groups), columns)]
    parts = [_detector_table(summary, detectors, chunk, overall=False) for chunk in chunks]
    return [*parts, _detector_table(summary, detectors, [], overall=True)]


def terminal_tables(summary: Summary, width: int) -> list[Table]:
    """The overall tables with as many groups side by side as the terminal has room for.

    Args:
        summary: the summary.
        width: columns of the terminal.
    """
    for columns in range(_WIDEST, 1, -1):
        tables = overall_tables(summary, columns=columns)
        if all(_folded_width(table) <= width for table in tables):
            return tables
    return overall_tables(summary, columns=1)


def _folded_width(table: Table) -> int:
    """Width of the table on a terminal with the small print below the numbers."""
    total = 0
    for number, column in enumerate(table.columns):
        texts = [*column.title.split(), column.detail]
        texts += [text for row in table.rows for text in (row[number].text, row[number].detail)]
        total += max(map(len, texts)) + 3
    return total


def _detector_table(summary: Summary, detectors: Sequence[str], groups: Sequence[Group], *, overall: bool) -> Table:
    columns, cells = [Column("Detector", "left")], [[Cell(label(name)) for name in detectors]]
    for group in groups:
        judged = "" if summary.which(group) == NEAR else ", all sets"
        columns.append(Column(group.benchmark, detail=f"({', '.join(filter(None, group[1:]))}{judged})"))
        cells.append(_estimates(summary, [summary.estimate(group, name) for name in detectors]))
    if overall and len(summary.groups) > 1:
        places = {name: summary.mean_rank(name) for name in detectors}
        best = min((place for place, _ in places.values()), default=math.nan)
        columns.append(Column("mean rank"))
        cells.append([_rank_cell(*places[name], len(summary.groups), best) for name in detectors])
    notes = []
    if overall:
        differences = {name: summary.difference(name) for name in detectors if name != summary.reference}
        if summary.reference in detectors:
            columns.append(Column(f"to {label(summary.reference)}", detail="(paired)"))
            cells.append([_difference_cell(summary, differences.get(name)) for name in detectors])
            notes += _difference_notes(summary, differences.values())
        else:
            notes.append(f"No difference: no run has the reference detector {label(summary.reference)}.")
        notes += [*_seed_notes(summary), *_failed_detectors(summary), *_missing_runs(summary), *summary.notes]
    title = _title(summary) if groups else f"{summary.metric} over all {len(summary.groups)} columns above"
    return Table(columns, list(zip(*cells, strict=True)), title=title, notes=notes)


def _group_table(summary: Summary, group: Group) -> Table:
    sets = summary.sets(group)
    places = summary.ranks(group)
    detectors = sorted(places, key=lambda name: places[name])
    columns, cells = [Column("Detector", "left")], [[Cell(label(name)) for name in detectors]]
    for ood, distance in sets:
        columns.append(Column(ood, detail=f"({distance})" if distance else ""))
        cells.append(_estimates(summary, [summary.estimate(group, name, ood=ood) for name in detectors]))
    for which in (NEAR, FAR):
        if sum(distance == which for _, distance in sets) > 1:
            columns.append(Column(f"{which} mean"))
            cells.append(_estimates(summary, [summary.estimate(group, name, which) for name in detectors]))
    if summary.reference in detectors and len(detectors) > 1:
        columns.append(Column(f"to {label(summary.reference)}", detail=f"({_judged(summary, group)})"))
        others = {name: summary.difference(name, [group]) for name in detectors if name != summary.reference}
        cells.append([_difference_cell(summary, others.get(name)) for name in detectors])
    seeds = summary.groups[group]
    notes = []
    accuracy = [row.value for rows in seeds.values() for row in select(rows, metric=ACCURACY, detector="") if row.ok]
    if accuracy:
        found = estimate(accuracy)
        notes.append(f"Accuracy on the in-distribution test set: {100 * found.mean:.2f}{_spread(100, found)} %.")
    title = f"{group}: {summary.metric}{_unit(summary)}, {_seeds(seeds)}"
    return Table(columns, list(zip(*cells, strict=True)), title=title, notes=notes)


def runs_table(runs: Sequence[Run], *, title: str = "Runs", base: Path | None = None) -> Table:
    """Runs with their outcome and reason.

    Args:
        runs: the runs.
        title: heading.
        base: folder that paths are shown relative to, where they lie below it.
    """
    columns = [
        Column("Run", "left", wrap=True),
        Column("What", "left", wrap=True),
        Column("Outcome", "left"),
        Column("Reason", "left"),
    ]
    cells = [[Cell(_relative(run.path, base)), Cell(run.name), Cell(run.outcome), Cell(run.reason)] for run in runs]
    return Table(columns, cells, title=title)


def render_summary(summary: Summary, *, base: Path | None = None) -> str:
    """The summary as one self-contained page without script.

    Args:
        summary: the summary.
        base: folder that paths of runs are shown relative to.
    """
    from rmd_plugin.report import document as doc  # imports matplotlib

    runs, groups = summary.runs, summary.groups
    counts = {outcome: sum(run.outcome == outcome for run in runs) for outcome in ("done", "failed", "unfinished")}
    counts["unreadable"] = sum(run.outcome == "unreadable" for run in runs)
    lead = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "none found"
    benchmarks = list(dict.fromkeys(group.benchmark for group in groups))
    heading = f"Near-OOD detection on {', '.join(benchmarks)}" if benchmarks else "No results"
    body = [doc.heading(heading, level=1), doc.paragraph(f"Runs: {lead}", kind="lead")]
    missing = [run for run in runs if run.outcome != "done"]
    if missing:
        text = f"{len(missing)} of {len(runs)} runs gave no results: see the end of the page."
        body.append(doc.paragraph(text, kind="notice mild"))
    if groups:
        body += [doc.heading("All detectors"), *map(doc.table_block, overall_tables(summary))]
        figure = difference_figure(summary)
        if figure is not None:
            alt = f"Paired difference of each detector to {label(summary.reference)}, with 95 % interval"
            body.append(doc.panels([doc.picture(figure, alt)], wide=True))
        several = [group for group in groups if len(summary.sets(group)) > 1]
        if several:
            body.append(doc.heading("Each benchmark"))
            body += [doc.table_block(_group_table(summary, group)) for group in several]
    if missing:
        body += [doc.heading("Runs without results"), doc.table_block(runs_table(missing, title="", base=base))]
    done = [run for run in runs if run.outcome == "done"]
    if done:
        body.append(doc.folded(f"The runs that count ({len(done)})", doc.table_block(runs_table(done, base=base))))
    return doc.document(heading, body)


def difference_figure(summary: Summary) -> Figure | None:
    """Paired difference of every detector to the reference with its interval, the best on top.

    Args:
        summary: the summary.

    Returns:
        The figure, or None where there is nothing to draw.
    """
    from rmd_plugin.report.style import BODY, CYCLE, QUIET, house_style, new_figure, quiet_grid

    others = [name for name in summary.ordered() if name != summary.reference]
    found = {name: item for name in others if not math.isnan((item := summary.difference(name)).value)}
    if not found:
        return None
    scale = 1 if summary.metric in SECONDS else 100
    unit = "seconds" if summary.metric in SECONDS else "points"
    with house_style():
        figure = new_figure((8.0, 1.5 + 0.42 * len(found)))
        axes = figure.subplots()
        for place, item in enumerate(found.values()):
            better = item.value < 0 if summary.lower else item.value > 0
            colour = CYCLE[2] if better else CYCLE[0]
            if not math.isnan(item.low):
                axes.hlines(-place, scale * item.low, scale * item.high, color=colour, linewidth=2.4)
            axes.plot(scale * item.value, -place, "o", color=colour, markersize=8)
        axes.axvline(0, color=QUIET, linewidth=1.4)
        axes.set_yticks([-place for place in range(len(found))], [label(name) for name in found])
        axes.set_ylim(-len(found) + 0.4, 0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"{summary.metric}, {unit} against {label(summary.reference)}", fontsize=BODY)
        quiet_grid(axes, axis="x")
    return figure


# -- cells and notes --------------------------------------------------------------------------------------------------


def _estimates(summary: Summary, found: Sequence[Estimate]) -> list[Cell]:
    texts = ["" if math.isnan(item.mean) else _number(summary, item.mean) for item in found]
    numbers = [item.mean for item in found if not math.isnan(item.mean)]
    best = _number(summary, min(numbers) if summary.lower else max(numbers)) if len(numbers) > 1 else None
    scale = 1 if summary.metric in SECONDS else 100
    return [
        Cell(text, bold=text == best, detail=_spread(scale, item).strip()) if text else _MISSING
        for text, item in zip(texts, found, strict=True)
    ]


def _number(summary: Summary, value: float) -> str:
    return f"{value:.3f}" if summary.metric in SECONDS else f"{100 * value:.2f}"


def _spread(scale: float, item: Estimate) -> str:
    return "" if math.isnan(item.deviation) else f" ± {scale * item.deviation:.{3 if scale == 1 else 2}f}"


def _rank_cell(place: float, count: int, groups: int, best: float) -> Cell:
    return Cell(f"{place:.2f}", bold=place == best, detail="" if count == groups else f"(in {count} of {groups})")


def _difference_cell(summary: Summary, item: Difference | None) -> Cell:
    if item is None or math.isnan(item.value):
        return _MISSING
    scale, digits = (1, 3) if summary.metric in SECONDS else (100, 2)

    def signed(value: float) -> str:
        return f"{scale * value:+.{digits}f}".replace("-", "−")

    detail = "" if math.isnan(item.low) else f"[{signed(item.low)}, {signed(item.high)}]"
    return Cell(signed(item.value), detail=detail)


def _title(summary: Summary) -> str:
    several = any(len(seeds) > 1 for seeds in summary.groups.values())
    on = " on near-OOD" if any(summary.which(group) == NEAR for group in summary.groups) else ""
    spread = ", mean ± standard deviation over seeds" if several else ""
    return f"{summary.metric}{_unit(summary)}{on}{spread}"


def _unit(summary: Summary) -> str:
    return " in s" if summary.metric in SECONDS else " in %"


def _judged(summary: Summary, group: Group) -> str:
    return "near" if summary.which(group) == NEAR else "all sets"


def _seeds(seeds: Iterable[int]) -> str:
    numbers = list(seeds)
    return f"seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _difference_notes(summary: Summary, found: Iterable[Difference]) -> list[str]:
    reference = label(summary.reference)
    over = {item.over for item in found}
    notes = []
    if "seeds" in over:
        notes.append(
            f"To {reference}: mean difference to {reference} in the same run, every benchmark weighing the same, with "
            "the 95 % t interval over seeds (Welch and Satterthwaite's degrees of freedom); the benchmarks are taken "
            "as they are, not as a sample."
        )
    if "benchmarks" in over:
        notes.append(
            f"To {reference}: mean difference to {reference} in the same run, with the 95 % t interval over the "
            "benchmarks, because there are benchmarks with one seed only."
        )
    if "" in over:
        notes.append("A difference without interval has too few runs for one: it takes two seeds or three benchmarks.")
    return notes


def _seed_notes(summary: Summary) -> list[str]:
    seeds: dict[tuple[int, ...], list[str]] = {}
    for group, runs in summary.groups.items():
        seeds.setdefault(tuple(runs), []).append(str(group))
    if len(seeds) == 1:
        return [f"Every benchmark with {_seeds(next(iter(seeds)))}."]
    return [f"{_seeds(numbers).capitalize()}: {'; '.join(groups)}." for numbers, groups in seeds.items()]


def _failed_detectors(summary: Summary) -> list[str]:
    notes = []
    for group, seeds in summary.groups.items():
        rows = [row for runs in seeds.values() for row in runs if row.detector and not row.ok]
        for status, verb in (("failed", "failed"), ("skipped", "not served")):
            bad = [row for row in rows if row.status == status]
            for reason in unique(bad, "reason"):
                names = ", ".join(label(name) for name in unique((r for r in bad if r.reason == reason), "detector"))
                count = len({row.seed for row in bad if row.reason == reason})
                notes.append(f"{group}: {names} {verb} in {count} of {len(seeds)} runs ({reason}).")
    return notes


def _missing_runs(summary: Summary) -> list[str]:
    missing = [run for run in summary.runs if run.outcome != "done"]
    counts = {outcome: sum(run.outcome == outcome for run in missing) for outcome in ("failed", "unfinished")}
    parts = [f"{count} {outcome}" for outcome, count in counts.items() if count]
    unreadable = len(missing) - sum(counts.values())
    parts += [f"{unreadable} unreadable"] * bool(unreadable)
    return [f"Not counted: {', '.join(parts)} of {len(summary.runs)} runs."] if parts else []


def _relative(path: Path, base: Path | None) -> str:
    try:
        return os.fspath(path.resolve().relative_to(base.resolve())) if base is not None else str(path)
    except ValueError:
        return str(path)


# -- CSV --------------------------------------------------------------------------------------------------------------

_CSV_COLUMNS = (
    "benchmark", "backbone", "setting", "ood", "detector", "metric", "mean", "deviation", "count", "rank",
    "difference", "low", "high",
)  # fmt: skip


def _records(summary: Summary) -> list[list[object]]:
    """One line per group, OOD set (or mean over sets) and detector; rank and difference where they are judged."""
    lines: list[list[object]] = []
    for group in summary.groups:
        places = summary.ranks(group)
        kinds: list[tuple[str, str | None, str | None]] = [(ood, None, ood) for ood, _ in summary.sets(group)]
        kinds += [(f"mean ({which})", which, None) for which in (NEAR, FAR, ALL)]
        for name, which, ood in kinds:
            for detector in summary.detectors(group):
                found = summary.estimate(group, detector, which, ood=ood)
                if not found.count:
                    continue
                line: list[object] = [*group, name, detector, summary.metric, found.mean, found.deviation, found.count]
                if ood is None and which == summary.which(group):
                    paired = summary.difference(detector, [group])
                    line += [places[detector], paired.value, paired.low, paired.high]
                lines.append(line + [""] * (len(_CSV_COLUMNS) - len(line)))
    for detector in summary.ordered():
        paired = summary.difference(detector)
        rank, count = summary.mean_rank(detector)
        overall = ["", "", "", "overall", detector, summary.metric, "", "", count]
        lines.append([*overall, rank, paired.value, paired.low, paired.high])
    return lines


def _write_csv(path: Path, columns: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    with replacing(path, newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for line in lines:
            # repr is the shortest text that reads back to the same bits
            writer.writerow([_plain(cell) for cell in line])


def _plain(cell: object) -> str:
    if isinstance(cell, float):
        return "" if math.isnan(cell) else repr(cell)
    return str(cell)
