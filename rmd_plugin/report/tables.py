"""Rows -> the comparison table: detectors x OOD sets, near and far means, intervals, times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rmd_plugin.compare.rows import ACCURACY, AUROC, FIT_SECONDS, FPR95, SCORE_SECONDS, Row, mean, select, unique
from rmd_plugin.report.names import label
from rmd_plugin.report.table import Column, DetectorTable, Table, number_cells


def comparison_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for every benchmark, backbone and seed among the rows, in the order of their first appearance.

    Detectors are ordered by their near-OOD mean (by the mean over all sets where no set is near), the best numbers of a
    column are bold, and what failed or was skipped stands in the notes with its reason.
    """
    keys = list(dict.fromkeys((row.benchmark, row.backbone, row.seed) for row in rows))
    return [_comparison_table(select(rows, benchmark=b, backbone=n, seed=s), b, n, s) for b, n, s in keys]


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
    """Detectors that have numbers, the best first: by near mean, then by the mean over all OOD sets."""
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
        column = Column(name if len(sets) > 1 else f"AUROC, {name}", detail=f"({distance})" if distance else "")
        table.add(column, number_cells(values, percent, details, best="highest"))
    means = near_far_means(rows)
    for distance in ("near", "far"):
        if len(sets) > 1 and distance in sets.values():
            values = [means[detector][distance] for detector in detectors]
            table.add(Column(f"{distance} mean"), number_cells(values, percent, best="highest"))
    fpr = near_far_means(rows, FPR95)
    which = "near" if "near" in sets.values() else "all"
    values = [fpr.get(detector, {}).get(which, math.nan) for detector in detectors]
    table.add(Column("FPR95" if len(sets) == 1 else f"FPR95, {which}"), number_cells(values, percent, best="lowest"))
    for title, metric in (("fit", FIT_SECONDS), ("score", SCORE_SECONDS)):
        times = {row.detector: row.value for row in select(rows, metric=metric, status="ok")}
        values = [times.get(detector, math.nan) for detector in detectors]
        table.add(Column(title, detail="(s)"), number_cells(values, seconds))
    heading = f"{benchmark}, {backbone}, seed {seed}: AUROC in %"
    if any(not math.isnan(row.low) for row in rows):
        heading += " with 95 % bootstrap interval"
    return table.finish(heading, _notes(rows))


def ood_sets(rows: Iterable[Row]) -> dict[str, str]:
    """OOD sets that detectors were rated on, in the order of the rows -> ``near``, ``far`` or empty."""
    found = [row for row in rows if row.metric == AUROC]
    return {name: next(row.distance for row in found if row.ood == name) for name in unique(found, "ood")}


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
    about = [row for row in rows if row.detector and row.reason]
    for status, opening in (("ok", "Remark"), ("failed", "Failed"), ("skipped", "Not supported")):
        for reason in unique((row for row in about if row.status == status), "reason"):
            who = unique((row for row in about if row.status == status and row.reason == reason), "detector")
            notes.append(f"{opening}: {', '.join(map(label, who))} ({reason.rstrip('.')}).")
    return notes


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
