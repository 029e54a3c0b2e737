"""Which detector to take after a comparison, and what its yes or no is worth: what a page leads with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rmd_plugin.compare.rows import AUROC, DETECTED, FALSE_ALARMS, Row, at_level, levels, mean, select
from rmd_plugin.report.tables import near_far_means, ood_sets, ranking


@dataclass(frozen=True)
class Choice:
    """The detector that leads a comparison."""

    detector: str
    judged: Literal["near", "all"]  #: the OOD sets that it was judged by
    auroc: float  #: mean over them
    rivals: Sequence[str] = ()  #: detectors whose intervals overlap with its own on each of these sets
    alpha: float = math.nan  #: level of false alarms that decisions were made at; NaN without decisions
    detected: float = math.nan  #: share of the OOD samples that are found there, mean over the judged sets
    alarms: Row | None = None  #: share of the ID test set that is flagged there, with its interval


def choose(rows: Sequence[Row]) -> Choice | None:
    """The leader of one comparison by the mean AUROC over near-OOD sets, or over all where none is near; None without.

    Example:
        >>> rows = [Row("b", "x", "net", name, 0, "AUROC", value) for name, value in [("rmd", 0.9), ("msp", 0.8)]]
        >>> choose(rows).detector
        'rmd'
    """
    sets, ranked = ood_sets(rows), ranking(rows)
    if not sets or not ranked:
        return None
    judged: Literal["near", "all"] = "near" if "near" in sets.values() else "all"
    names = [name for name, distance in sets.items() if judged == "all" or distance == "near"]
    best = ranked[0]
    areas = {(row.detector, row.ood): row for row in select(rows, metric=AUROC, status="ok")}

    def overlap(other: str) -> bool:
        pairs = [(areas.get((other, name)), areas[best, name]) for name in names]
        return all(mine is not None and mine.high >= theirs.low for mine, theirs in pairs)

    choice = Choice(best, judged, near_far_means(rows)[best][judged], [name for name in ranked[1:] if overlap(name)])
    for alpha in levels(rows):
        found = select(rows, metric=at_level(DETECTED, alpha), detector=best, status="ok")
        alarms = select(rows, metric=at_level(FALSE_ALARMS, alpha), detector=best, status="ok")
        if alarms:
            detected = mean([row.value for row in found if row.ood in names])
            return Choice(best, judged, choice.auroc, choice.rivals, alpha, detected, alarms[0])
    return choice
