"""Which detector to take after a comparison, and what its yes or no is worth: what a page leads with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np

from rmd_plugin.compare.bootstrap import placements
from rmd_plugin.compare.rows import DETECTED, FALSE_ALARMS, Row, at_level, levels, mean, select
from rmd_plugin.report.names import label
from rmd_plugin.report.scores import ID, Scores
from rmd_plugin.report.tables import near_far_means, ood_sets, ranking

#: with fewer samples in a set, a variance of ranks may be zero by chance
_FEW = 10


@dataclass(frozen=True)
class Choice:
    """The detector that leads a comparison."""

    detector: str
    judged: Literal["near", "all"]  #: the OOD sets that it was judged by
    auroc: float  #: mean over them
    rivals: Sequence[str] | None = None  #: detectors that the samples do not tell from it; None without scores
    alpha: float = math.nan  #: level of false alarms that decisions were made at; NaN without decisions
    detected: float = math.nan  #: share of the OOD samples that are found there, mean over the judged sets
    alarms: Row | None = None  #: share of the ID test set that is flagged there, with its interval


def choose(rows: Sequence[Row], scores: Scores | None = None) -> Choice | None:
    """The leader of one comparison by the mean AUROC over near-OOD sets, or over all where none is near; None without.

    With the scores, the rivals are all detectors that may be as good as the leader: all saw the same samples, so a
    paired difference is told from none long before the intervals of the two AUROC part. The level is divided by the
    number of pairs, of which the leader picks some: in 95 % of comparisons or more, all equally good ones are named.

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
    scored = {name: found for name, found in (scores or {}).items() if name in ranked and {ID, *names} <= set(found)}
    rivals = _rivals(best, scored, names, ranked) if best in scored else None
    choice = Choice(best, judged, near_far_means(rows)[best][judged], rivals)
    for alpha in levels(rows):
        found = select(rows, metric=at_level(DETECTED, alpha), detector=best, status="ok")
        alarms = select(rows, metric=at_level(FALSE_ALARMS, alpha), detector=best, status="ok")
        if alarms:
            detected = mean([row.value for row in found if row.ood in names])
            return replace(choice, alpha=alpha, detected=detected, alarms=alarms[0])
    return choice


def advice(choice: Choice | None) -> list[str]:
    """Why this detector, in sentences."""
    if choice is None:
        return []
    sets = "near-OOD sets" if choice.judged == "near" else "OOD sets"
    lines = [f"{label(choice.detector)} ranks OOD above ID samples best, by its mean AUROC over the {sets}."]
    if choice.rivals:
        names = ", ".join(map(label, choice.rivals))
        lines.append(
            f"These samples do not tell it from {names}: chance alone could make such a difference, so the simplest or "
            "fastest of them will do."
        )
    if choice.rivals is None:
        lines.append("Whether others are as good was not tested: there are no scores.")
    if choice.alarms is not None and choice.alarms.low > choice.alpha:
        lines.append(
            "It flags more of the ID test set than was asked for: the validation data that set the threshold are not "
            "like the test data, or the training chose its weights by them."
        )
    lines.append("It was chosen by the test sets shown here; OOD data of another kind may have another order.")
    return lines


def _rivals(best: str, scores: Scores, names: Sequence[str], ranked: Sequence[str]) -> list[str]:
    """Detectors whose difference to the best in the mean AUROC over sets is within its standard errors."""
    quantile = NormalDist().inv_cdf(1 - 0.05 / max(2, len(scores) * (len(scores) - 1)))
    # the ID samples are those of every set, so their shares are averaged; the OOD samples are each set's own
    shares = {}
    for detector, found in scores.items():
        of_id, of_ood = zip(*(placements(found[ID], found[name]) for name in names), strict=True)
        shares[detector] = [np.mean(of_id, axis=0), *(part / len(names) for part in of_ood)]
    rivals = []
    for other in ranked:
        if other in shares and other != best:
            apart = [mine - theirs for mine, theirs in zip(shares[best], shares[other], strict=True)]
            error = math.sqrt(sum(map(_variance_of_mean, apart)))
            if abs(apart[0].mean()) <= quantile * error:
                rivals.append(other)
    return rivals


def _variance_of_mean(values: np.ndarray) -> float:
    return float(values.var(ddof=1) / len(values)) if len(values) >= _FEW else math.inf
