"""Rows -> tables: the comparison, detectors x OOD sets with intervals and times; and what its decisions are worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rmd_plugin.compare.rows import (
    ACCURACY,
    AUROC,
    DETECTED,
    FALSE_ALARMS,
    FIT_SECONDS,
    FPR95,
    SCORE_SECONDS,
    SHIFT_ACCURACY,
    SHIFT_ALARMS,
    THRESHOLD,
    Row,
    Status,
    at_level,
    levels,
    mean,
    select,
    unique,
)
from rmd_plugin.report.names import label
from rmd_plugin.report.table import Column, DetectorTable, Table, number_cells

#: the words of a table, a line each
WORDS = {
    "AUROC": "chance that an OOD sample scores higher than an ID one: 50 % is guessing, 100 % no overlap",
    "FPR95": "share of ID samples that are flagged when the threshold is so low that 95 % of the OOD samples are found",
    "near": "OOD that resembles the training data, such as new classes of the same kind: the hard case",
    "far": "OOD of another kind altogether, such as noise: the easy case",
}
#: why a detector may rank OOD below ID samples
_BLIND = {"knn": "it scales features to unit length, so how far they reach does not count"}


def comparison_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for every benchmark, backbone and seed among the rows, in the order of their first appearance.

    Detectors are ordered by their near-OOD mean (by the mean over all sets where no set is near), the best numbers of a
    column are bold, and what failed or was skipped stands in the notes with its reason.
    """
    keys = list(dict.fromkeys((row.benchmark, row.backbone, row.seed) for row in rows))
    return [_comparison_table(select(rows, benchmark=b, backbone=n, seed=s), b, n, s) for b, n, s in keys]


def decision_tables(rows: Sequence[Row]) -> list[Table]:
    """What the detectors flag at a level of false alarms, one table for every comparison and level among the rows.

    Detectors stand as in :func:`comparison_tables`: their threshold, the share of the ID test set that is flagged with
    its interval, that of every ID set under a covariate shift, and that of every OOD set. Why one has no decisions
    stands below the table of the comparison.
    """
    keys = list(dict.fromkeys((row.benchmark, row.backbone, row.seed) for row in rows))
    parts = [select(rows, benchmark=b, backbone=n, seed=s) for b, n, s in keys]
    tables = [_decision_table(part, alpha) for part in parts for alpha in levels(part)]
    return [table for table in tables if table.rows]


def near_far_means(rows: Iterable[Row], metric: str = AUROC) -> dict[str, dict[str, float]]:
    """Mean of a metric over the OOD sets of one comparison: detector -> ``near``, ``far`` and ``all`` -> mean.

    It is NaN where there is no such set or one of them failed.
    """
    rows = [row for row in rows if row.metric == metric and row.detector and row.ood]

    def average(detector: str, *distances: str) -> float:
        return mean([row.value for row in rows if row.detector == detector and row.distance in distances])

    kinds = {"near": ("near",), "far": ("far",), "all": ("near", "far", "")}
    return {name: {kind: average(name, *kinds[kind]) for kind in kinds} for name in unique(rows, "detector")}


def ranking(rows: Iterable[Row]) -> list[str]:
    """Detectors that have numbers, the best first: by near mean, then by the mean over all OOD sets.

    Without any OOD set they stand as they come.
    """
    rows = list(rows)
    if not ood_sets(rows):
        return unique([row for row in rows if row.ok], "detector")
    means = near_far_means(rows)
    usable = [name for name, values in means.items() if not math.isnan(values["all"])]

    def order(name: str) -> tuple[float, float]:
        near, everything = means[name]["near"], means[name]["all"]
        return -(everything if math.isnan(near) else near), -everything

    return sorted(usable, key=order)


def _comparison_table(rows: list[Row], benchmark: str, backbone: str, seed: int) -> Table:
    detectors = ranking(rows)
    sets = ood_sets(rows)
    table = DetectorTable(detectors)
    for name, distance in sets.items():
        mine = {row.detector: row for row in select(rows, metric=AUROC, ood=name, status="ok")}
        values = [mine[detector].value if detector in mine else math.nan for detector in detectors]
        details = [interval(mine[detector]) if detector in mine else "" for detector in detectors]
        title, detail = name if len(sets) > 1 else f"AUROC, {name}", f"({distance})" if distance else ""
        table.add(
            Column(title, detail=detail, hint=f"AUROC: {WORDS['AUROC']}"),
            number_cells(values, percent, details, best="highest"),
        )
    means = near_far_means(rows)
    for distance in ("near", "far"):
        if len(sets) > 1 and distance in sets.values():
            values = [means[detector][distance] for detector in detectors]
            column = Column(f"{distance} mean", hint=f"mean AUROC over {distance}-OOD sets: {WORDS[distance]}")
            table.add(column, number_cells(values, percent, best="highest"))
    if sets:
        fpr = near_far_means(rows, FPR95)
        which = "near" if "near" in sets.values() else "all"
        values = [fpr.get(detector, {}).get(which, math.nan) for detector in detectors]
        title = "FPR95" if len(sets) == 1 else f"FPR95, {which}"
        table.add(Column(title, hint=WORDS["FPR95"]), number_cells(values, percent, best="lowest"))
    for title, metric in (("fit", FIT_SECONDS), ("score", SCORE_SECONDS)):
        times = {row.detector: row.value for row in select(rows, metric=metric, status="ok")}
        values = [times.get(detector, math.nan) for detector in detectors]
        table.add(Column(title, detail="(s)"), number_cells(values, seconds))
    heading = f"{benchmark}, {backbone}, seed {seed}"
    if sets or not detectors:
        heading += ": AUROC in %"
    if has_intervals(rows):
        heading += " with 95 % bootstrap interval"
    notes = (
        [] if sets or not detectors else ["There is no OOD data, so there is no AUROC: only false alarms are known."]
    )
    return table.finish(heading, notes + _notes(rows))


def _decision_table(rows: list[Row], alpha: float) -> Table:
    names = {at_level(metric, alpha): metric for metric in (THRESHOLD, FALSE_ALARMS, SHIFT_ALARMS, DETECTED)}
    mine = {(names[row.metric], row.ood, row.detector): row for row in rows if row.metric in names}
    detectors = [name for name in ranking(rows) if (THRESHOLD, "", name) in mine]
    table = DetectorTable(detectors)

    def add(column: Column, metric: str, ood: str = "", *, best: Literal["highest"] | None = None) -> None:
        found = [mine.get((metric, ood, name)) for name in detectors]
        values = [math.nan if row is None else row.value for row in found]
        details = ["" if row is None else interval(row) for row in found]
        table.add(column, number_cells(values, percent, details, best=best))

    add(Column("False alarms", detail="(ID test set)"), FALSE_ALARMS)
    for name in dict.fromkeys(ood for metric, ood, _ in mine if metric == SHIFT_ALARMS):
        add(Column(f"False alarms, {name}", detail="(shifted ID)"), SHIFT_ALARMS, name)
    sets = ood_sets(rows)
    for name, distance in sets.items():
        add(Column(name if len(sets) > 1 else f"Detected, {name}", detail=f"({distance})" if distance else ""),
            DETECTED, name, best="highest")  # fmt: skip
    thresholds = [mine[THRESHOLD, "", name].value for name in detectors]
    table.add(Column("threshold"), number_cells(thresholds, lambda value: f"{value:.4g}"))
    first = rows[0]
    heading = f"{first.benchmark}, {first.backbone}, seed {first.seed}: % flagged as OOD, calibrated on the validation "
    heading += f"data for at most {100 * alpha:g} % false alarms, with 95 % binomial interval"
    return table.finish(heading, _reasons([row for row in rows if row.metric in names], "ok", "Remark"))


def ood_sets(rows: Iterable[Row]) -> dict[str, str]:
    """OOD sets that detectors were rated on, in the order of the rows -> ``near``, ``far`` or empty."""
    found = [row for row in rows if row.metric == AUROC]
    return {name: next(row.distance for row in found if row.ood == name) for name in unique(found, "ood")}


def has_intervals(rows: Iterable[Row]) -> bool:
    """Whether there are intervals of AUROC."""
    return any(not math.isnan(row.low) for row in rows if row.metric == AUROC)


def set_title(name: str, distances: Mapping[str, str]) -> str:
    """Name of an OOD set with its distance, where that is known."""
    return f"{name} ({distances[name]})" if distances.get(name) else name


def _notes(rows: list[Row]) -> list[str]:
    notes = []
    for row in select(rows, metric=ACCURACY):
        remark = f" ({row.reason})" if row.reason else ""
        if row.ok:
            notes.append(f"Accuracy on the in-distribution test set: {percent(row.value)} %{remark}.")
        elif row.reason:
            notes.append(f"No accuracy: {row.reason}.")
    for row in select(rows, metric=SHIFT_ACCURACY, status="ok"):
        notes.append(f"Accuracy on {row.ood}, in-distribution under a covariate shift: {percent(row.value)} %.")
    notes += _below_chance(rows)
    notes += _detector_notes([row for row in rows if "@" not in row.metric])
    return notes + _reasons([row for row in rows if "@" in row.metric], "skipped", "No decisions")


def _below_chance(rows: list[Row]) -> list[str]:
    """A remark on each detector that finds OOD samples more ordinary than ID ones, which surprises."""
    below = [
        row
        for row in select(rows, metric=AUROC, status="ok")
        if (row.value if math.isnan(row.high) else row.high) < 0.5
    ]
    notes = []
    for name in unique(below, "detector"):
        sets = ", ".join(unique(select(below, detector=name), "ood"))
        why = f": {_BLIND[name]}" if name in _BLIND else ""
        notes.append(f"Below chance: {label(name)} on {sets} finds OOD samples more ordinary than ID ones{why}.")
    return notes


def _detector_notes(rows: list[Row]) -> list[str]:
    openings: dict[Status, str] = {"ok": "Remark", "failed": "Failed", "skipped": "Not supported"}
    return [note for status, opening in openings.items() for note in _reasons(rows, status, opening)]


def _reasons(rows: list[Row], status: Status, opening: str) -> list[str]:
    """A line for each reason, with the detectors that it is about."""
    about = [row for row in select(rows, status=status) if row.detector and row.reason]
    who = {reason: unique(select(about, reason=reason), "detector") for reason in unique(about, "reason")}
    return [f"{opening}: {', '.join(map(label, names))} ({reason.rstrip('.')})." for reason, names in who.items()]


def percent(value: float) -> str:
    """A fraction in percent with two digits; empty for NaN."""
    return "" if math.isnan(value) else f"{100 * value:.2f}"


def interval(row: Row) -> str:
    """The interval of a row in percent with one digit; empty if it has none."""
    # without a space, so that a narrow terminal folds it below the number in one piece
    return "" if math.isnan(row.low) or math.isnan(row.high) else f"[{100 * row.low:.1f}–{100 * row.high:.1f}]"


def seconds(value: float) -> str:
    """A duration with two or three digits."""
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
