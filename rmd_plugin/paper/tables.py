"""Tables 1 to 3: MD, RMD and MSP of one benchmark and backbone after the other, beside the published line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rmd_plugin.compare.rows import ACCURACY, AUROC, Row
from rmd_plugin.paper.published import TABLES, TableRow
from rmd_plugin.paper.result import Comparison, StudyResult, percent

NAMES = {"mahalanobis": "MD", "rmd": "RMD", "msp": "MSP"}


@dataclass(frozen=True)
class Measured:
    """What was run for one line of a table.

    Attributes:
        benchmark: the benchmark as the paper calls it.
        backbone: the network as the paper calls it, beside which this stands.
        rows: our rows; those of the first near-OOD set count.
        setting: what was run.
        reason: why that differs from the paper's setting.
    """

    benchmark: str
    backbone: str
    rows: Sequence[Row]
    setting: str
    reason: str = ""


@dataclass(frozen=True)
class Absent:
    """A line of a table that was not run here.

    Attributes:
        benchmark: the benchmark as the paper calls it.
        backbone: the network as the paper calls it.
        reason: why it was not run.
    """

    benchmark: str
    backbone: str
    reason: str


@dataclass
class _Line:
    row: TableRow
    measured: list[Measured] = field(default_factory=list)
    reason: str = "not part of this run"


def run(table: str, measured: Sequence[Measured], absent: Sequence[Absent] = ()) -> StudyResult:
    """One of the paper's tables.

    Every published line appears: with our number, or with the reason why there is none.

    Args:
        table: ``table1``, ``table2`` or ``table3``.
        measured: what was run.
        absent: what was not run.

    Raises:
        ValueError: if something was run for a line that the table does not have.
    """
    result = StudyResult(table)
    lines = {(row.benchmark, row.backbone): _Line(row) for row in TABLES[table]}
    items: list[Measured | Absent] = [*measured, *absent]
    for item in items:
        if (item.benchmark, item.backbone) not in lines:
            have = "; ".join(", ".join(key) for key in lines)
            raise ValueError(f"{table} has no line {item.benchmark}, {item.backbone}. It has: {have}.")
        line = lines[item.benchmark, item.backbone]
        if isinstance(item, Measured):
            line.measured.append(item)
            result.rows += item.rows
        else:
            line.reason = item.reason
    for (benchmark, backbone), line in lines.items():
        for found in line.measured:
            result.comparisons += _compare(line.row, found)
        if not line.measured:
            result.comparisons += [
                Comparison(f"{benchmark}, {backbone}", f"AUROC of {NAMES[name]}", value, reason=line.reason)
                for name, value in line.row.auroc.items()
            ]
    return result


def _compare(published: TableRow, item: Measured) -> list[Comparison]:
    found = []
    what = f"{published.benchmark}, {published.backbone}"
    for name, value in published.auroc.items():
        ours = near_auroc(item.rows, name)
        found.append(
            Comparison(what, f"AUROC of {NAMES[name]}", value, percent(ours), setting=item.setting, reason=item.reason)
        )
    accuracy = [row.value for row in item.rows if row.metric == ACCURACY and row.ok]
    if accuracy and "msp" in published.auroc:
        found.append(Comparison(what, "accuracy", ours=percent(accuracy[0]), setting=item.setting, reason=item.reason))
    return found


def near_auroc(rows: Sequence[Row], detector: str) -> float:
    """AUROC of a detector on the first near-OOD set; NaN if there is none."""
    found = [row.value for row in rows if row.detector == detector and row.metric == AUROC and row.distance == "near"]
    return found[0] if found else math.nan
