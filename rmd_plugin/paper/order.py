"""Who leads whom: the order of the methods in the paper and in ours, one setting after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rmd_plugin.paper.result import PaperNumber

_METRIC = "AUROC of "


@dataclass(frozen=True)
class Ranking:
    """AUROC of the methods in one setting, in percent by name; the same methods on both sides, unless ours is empty."""

    what: str  #: the setting of the paper
    paper: dict[str, float] = field(default_factory=dict)
    ours: dict[str, float] = field(default_factory=dict)

    @property
    def same(self) -> bool | None:
        """Whether the methods come in the same order; None if there is nothing of ours to compare."""
        return order(self.paper) == order(self.ours) if self.ours else None


def rankings(numbers: Sequence[PaperNumber]) -> list[Ranking]:
    """The settings for which the paper has at least two methods, with ours where at least two of them were run."""
    settings: dict[tuple[str, str], list[PaperNumber]] = {}
    for item in numbers:
        if item.metric.startswith(_METRIC) and not math.isnan(item.paper):
            settings.setdefault((item.what, item.setting), []).append(item)
    found = []
    for (what, _), items in settings.items():
        run = [item for item in items if item.run]
        both = run if len(run) > 1 else items
        names = [item.metric.removeprefix(_METRIC) for item in both]
        paper = dict(zip(names, (item.paper for item in both), strict=True))
        ours = dict(zip(names, (item.ours for item in run), strict=True)) if both is run else {}
        if len(both) > 1:
            found.append(Ranking(what, paper, ours))
    return found


def order(values: Mapping[str, float]) -> str:
    """Names with the best first; those that are printed the same stand in the order of their names.

    Example:
        >>> order({"MD": 74.91, "RMD": 81.01, "MSP": 80.14})
        'RMD > MSP > MD'
        >>> order({"RMD": 72.041, "MD": 72.039})
        'MD = RMD'
    """
    ranked = sorted((-round(value, 2), name) for name, value in values.items())
    signs = ["=" if one[0] == other[0] else ">" for one, other in pairwise(ranked)]
    return " ".join(part for (_, name), sign in zip(ranked, [*signs, ""], strict=True) for part in (name, sign) if part)


def smallest_lead(values: Mapping[str, float]) -> float:
    """The least difference between neighbours of the order, in points; NaN below two methods."""
    return min((one - other for one, other in pairwise(sorted(values.values(), reverse=True))), default=math.nan)
