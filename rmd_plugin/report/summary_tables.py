"""A summary of many runs as tables: detectors x benchmarks, each benchmark, and the runs that gave no numbers."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from rmd_plugin.compare.rows import ACCURACY, SECONDS
from rmd_plugin.report.aggregate import FAR, GROUP, NEAR, Difference, Estimate, Group, Summary, estimate
from rmd_plugin.report.gather import Outcome, Run
from rmd_plugin.report.names import label
from rmd_plugin.report.table import Cell, Column, DetectorTable, Table, number_cells

#: more groups than this do not stand side by side in one table
_WIDEST = 6


def summary_tables(summary: Summary, *, base: Path | None = None) -> list[Table]:
    """All tables: the overall ones, one per group where that says more, and the runs that gave no numbers."""
    missing = [run for run in summary.runs if run.outcome != "done"]
    last = [runs_table(missing, title="Runs without results", base=base)] if missing else []
    return [*overall_tables(summary), *group_tables(summary), *last]


def overall_tables(summary: Summary, *, columns: int = _WIDEST) -> list[Table]:
    """Detectors x groups: mean ± standard deviation over the seeds, mean rank, difference to the reference.

    With more groups than ``columns`` they come so many at a time, and the last two in a table of their own.
    """
    groups = list(summary.groups)
    if not groups:
        return []
    detectors = summary.ordered()
    if len(groups) <= columns:
        return [_detector_table(summary, detectors, groups, overall=True)]
    chunks = [groups[start : start + columns] for start in range(0, len(groups), columns)]
    parts = [_detector_table(summary, detectors, chunk, overall=False) for chunk in chunks]
    return [*parts, _detector_table(summary, detectors, [], overall=True)]


def terminal_tables(summary: Summary, width: int) -> list[Table]:
    """The overall tables with as many groups side by side as a terminal of so many columns has room for."""
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
    table = DetectorTable(detectors)
    for group in groups:
        judged = "" if summary.which(group) == NEAR else ", all sets"
        column = Column(group.benchmark, detail=f"({', '.join(filter(None, group[1:]))}{judged})")
        table.add(column, _estimates(summary, [summary.estimate(group, name) for name in detectors]))
    count = len(summary.groups)
    if overall and count > 1:
        places = [summary.mean_rank(name) for name in detectors]
        details = ["" if found == count else f"(in {found} of {count})" for _, found in places]
        cells = number_cells([place for place, _ in places], "{:.2f}".format, details, best="lowest")
        table.add(Column("mean rank"), cells)
    notes = []
    if overall and summary.reference in detectors:
        notes += _difference_notes(summary, _add_differences(table, summary, detectors, "paired"))
    elif overall:
        notes.append(f"No difference: no run has the reference detector {label(summary.reference)}.")
    if overall:
        notes += [*_seed_notes(summary), *_failed_detectors(summary), *_missing_runs(summary), *summary.notes]
    return table.finish(_title(summary) if groups else f"{summary.metric} over all {count} columns above", notes)


def group_tables(summary: Summary) -> list[Table]:
    """Detectors x OOD sets of every group that has several sets."""
    return [_group_table(summary, group) for group in summary.groups if len(summary.sets(group)) > 1]


def _group_table(summary: Summary, group: Group) -> Table:
    sets = summary.sets(group)
    places = summary.ranks(group)
    detectors = sorted(places, key=lambda name: places[name])
    table = DetectorTable(detectors)
    for ood, distance in sets.items():
        found = [summary.estimate(group, name, ood=ood) for name in detectors]
        table.add(Column(ood, detail=f"({distance})" if distance else ""), _estimates(summary, found))
    for which in (NEAR, FAR):
        if list(sets.values()).count(which) > 1:
            found = [summary.estimate(group, name, which) for name in detectors]
            table.add(Column(f"{which} mean"), _estimates(summary, found))
    if summary.reference in detectors and len(detectors) > 1:
        judged = "near" if summary.which(group) == NEAR else "all sets"
        _add_differences(table, summary, detectors, judged, [group])
    notes = []
    rows = summary.rows[(summary.rows[GROUP] == list(group)).all(axis=1)]
    accuracy = rows[(rows["metric"] == ACCURACY) & (rows["detector"] == "") & (rows["status"] == "ok")]["value"]
    if len(accuracy):
        item = estimate(accuracy.tolist())
        spread = "" if math.isnan(item.deviation) else f" ± {100 * item.deviation:.2f}"
        notes.append(f"Accuracy on the in-distribution test set: {100 * item.mean:.2f}{spread} %.")
    return table.finish(f"{group}: {summary.metric}{_unit(summary)}, {_seeds(summary.groups[group])}", notes)


def runs_table(runs: Sequence[Run], *, title: str = "Runs", base: Path | None = None) -> Table:
    """Runs with their outcome and reason; paths below ``base`` are shown relative to it."""
    columns = [
        Column("Run", "left", wrap=True),
        Column("What", "left", wrap=True),
        Column("Outcome", "left"),
        Column("Reason", "left"),
    ]
    cells = [[Cell(_relative(run.path, base)), Cell(run.name), Cell(run.outcome), Cell(run.reason)] for run in runs]
    return Table(columns, cells, title=title)


def count_outcomes(runs: Iterable[Run]) -> str:
    """How many runs ended how, in words; empty without runs."""
    counts = Counter(run.outcome for run in runs)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome) if counts[outcome])


# -- cells and notes --------------------------------------------------------------------------------------------------


def _number(summary: Summary, value: float, sign: str = "") -> str:
    scale, digits = (1, 3) if summary.metric in SECONDS else (100, 2)
    return f"{scale * value:{sign}.{digits}f}".replace("-", "−")


def _estimates(summary: Summary, found: Sequence[Estimate]) -> list[Cell]:
    spreads = ["" if math.isnan(item.deviation) else f"± {_number(summary, item.deviation)}" for item in found]
    best: Literal["lowest", "highest"] = "lowest" if summary.lower else "highest"
    return number_cells([item.mean for item in found], lambda value: _number(summary, value), spreads, best=best)


def _add_differences(
    table: DetectorTable, summary: Summary, detectors: Sequence[str], remark: str, groups: Sequence[Group] | None = None
) -> list[Difference]:
    """Add the column of differences to the reference, which itself has none, and return those of the others."""

    def signed(value: float) -> str:
        return _number(summary, value, "+")

    others = {name: summary.difference(name, groups) for name in detectors if name != summary.reference}
    found = [others.get(name, Difference(math.nan)) for name in detectors]
    details = ["" if math.isnan(item.low) else f"[{signed(item.low)}, {signed(item.high)}]" for item in found]
    cells = number_cells([item.value for item in found], signed, details)
    table.add(Column(f"to {label(summary.reference)}", detail=f"({remark})"), cells)
    return list(others.values())


def _title(summary: Summary) -> str:
    several = any(len(seeds) > 1 for seeds in summary.groups.values())
    on = " on near-OOD" if any(summary.which(group) == NEAR for group in summary.groups) else ""
    spread = ", mean ± standard deviation over seeds" if several else ""
    return f"{summary.metric}{_unit(summary)}{on}{spread}"


def _unit(summary: Summary) -> str:
    return " in s" if summary.metric in SECONDS else " in %"


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
    rows = summary.rows
    bad = rows[(rows["detector"] != "") & (rows["status"] != "ok") & (rows["reason"] != "")]
    # those that failed before those that were skipped
    bad = bad.sort_values(["group", "status"], kind="stable")
    notes = []
    for (*key, status, reason), part in bad.groupby([*GROUP, "status", "reason"], sort=False):
        group, names = Group(*key), ", ".join(map(label, part["detector"].unique()))
        verb = "failed" if status == "failed" else "not served"
        total = len(summary.groups[group])
        notes.append(f"{group}: {names} {verb} in {part['seed'].nunique()} of {total} runs ({reason}).")
    return notes


def _missing_runs(summary: Summary) -> list[str]:
    missing = count_outcomes(run for run in summary.runs if run.outcome != "done")
    return [f"Not counted: {missing} of {len(summary.runs)} runs."] if missing else []


def _relative(path: Path, base: Path | None) -> str:
    try:
        return os.fspath(path.resolve().relative_to(base.resolve())) if base is not None else str(path)
    except ValueError:
        return str(path)
