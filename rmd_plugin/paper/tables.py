"""Tables 1 to 3: MD, RMD and MSP of one benchmark and backbone after the other, beside the published line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rmd_plugin.compare.rows import ACCURACY, AUROC, Row
from rmd_plugin.paper.published import TABLES, Line, TableRow
from rmd_plugin.paper.result import FinishedRun, PaperNumber, StudyResult
from rmd_plugin.report.names import label


def run(table: str, runs: Sequence[FinishedRun], absent: Mapping[Line, str]) -> StudyResult:
    """One of the paper's tables. Every published line appears: with our number, or with the reason why there is none.

    ``absent`` says of lines why they were not run.

    Raises:
        ValueError: if something was run for a line that the table does not have.
    """
    lines = {(row.benchmark, row.backbone): row for row in TABLES[table]}
    for line in [*(item.line for item in runs), *absent]:
        if line not in lines:
            have = "; ".join(", ".join(key) for key in lines)
            raise ValueError(f"{table} has no line {', '.join(line)}. It has: {have}.")
    result = StudyResult(table, rows=[row for item in runs for row in item.rows])
    for line, published in lines.items():
        found = [item for item in runs if item.line == line]
        for item in found:
            result.comparisons += _beside(published, item)
        if not found:
            reason = absent.get(line, "not part of this run")
            result.comparisons += [
                PaperNumber(", ".join(line), f"AUROC of {label(name)}", value, reason=reason)
                for name, value in published.auroc.items()
            ]
    return result


def _beside(published: TableRow, item: FinishedRun) -> list[PaperNumber]:
    what = f"{published.benchmark}, {published.backbone}"
    ours = {f"AUROC of {label(name)}": (value, near_auroc(item.rows, name)) for name, value in published.auroc.items()}
    accuracy = [row.value for row in item.rows if row.metric == ACCURACY and row.ok]
    if accuracy and "msp" in published.auroc:
        ours["accuracy"] = math.nan, accuracy[0]
    setting, reason = item.features.setting, item.features.reason
    return [
        PaperNumber(what, metric, paper, 100 * value, setting=setting, reason=reason)
        for metric, (paper, value) in ours.items()
    ]


def near_auroc(rows: Sequence[Row], detector: str) -> float:
    """AUROC of a detector on the first near-OOD set; NaN if there is none."""
    found = [row.value for row in rows if row.detector == detector and row.metric == AUROC and row.distance == "near"]
    return found[0] if found else math.nan
