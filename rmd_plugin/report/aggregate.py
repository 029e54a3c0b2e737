"""Many runs -> one summary: mean and spread over seeds, ranks over benchmarks, paired differences to a reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from rmd_plugin.compare.rows import AUROC, FPR95, SECONDS, Row, mean, unique
from rmd_plugin.report.gather import Run
from rmd_plugin.report.names import label
from rmd_plugin.report.tables import near_far_means

#: metrics of which less is better
LOWER_IS_BETTER = (FPR95, *SECONDS)
#: what the value of a detector in a run is: the mean over near sets, far sets, all sets
NEAR, FAR, ALL = "near", "far", "all"


class Group(NamedTuple):
    """Runs that differ in nothing but their seed."""

    benchmark: str
    backbone: str
    setting: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


@dataclass(frozen=True)
class Estimate:
    """A number over several runs.

    Attributes:
        mean: their mean, NaN if there are none.
        deviation: sample standard deviation; NaN for fewer than two.
        count: how many numbers.
    """

    mean: float
    deviation: float
    count: int


@dataclass(frozen=True)
class Difference:
    """Paired difference to the reference detector.

    Attributes:
        value: mean over the groups of the mean over their seeds; NaN if there is no pair.
        low: lower end of the 95 % interval, NaN if there are too few pairs.
        high: upper end.
        pairs: how many runs had both numbers.
        over: what the interval is taken over: ``seeds``, ``benchmarks``, or nothing.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    pairs: int = 0
    over: str = ""


@dataclass(frozen=True)
class Summary:
    """All runs in numbers.

    Attributes:
        metric: the metric of the summary.
        reference: the detector that the others are compared with.
        groups: group -> seed -> rows.
        runs: every run, those without rows too.
        notes: what was left out, one sentence each.
    """

    metric: str
    reference: str
    groups: Mapping[Group, Mapping[int, Sequence[Row]]]
    runs: Sequence[Run]
    notes: Sequence[str] = ()

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return self.metric in LOWER_IS_BETTER

    def which(self, group: Group) -> str:
        """The mean that a detector is judged by in a group: ``near`` where there are near-OOD sets, else ``all``."""
        rows = (row for runs in self.groups[group].values() for row in runs)
        return NEAR if any(row.distance == "near" and row.metric == self.metric for row in rows) else ALL

    def detectors(self, group: Group | None = None) -> list[str]:
        """Detectors that have a number in a group (or anywhere), in order of appearance."""
        groups = self.groups if group is None else [group]
        return list(dict.fromkeys(name for item in groups for name in self._numbers[item]))

    def values(
        self, group: Group, detector: str, which: str | None = None, *, ood: str | None = None
    ) -> dict[int, float]:
        """Numbers of a detector in a group.

        Args:
            group: the group.
            detector: the detector.
            which: ``near``, ``far`` or ``all``; by default :meth:`which`.
            ood: name of an OOD set, instead of a mean over sets.

        Returns:
            seed -> number, without those that are missing.
        """
        found = self._numbers[group].get(detector, {})
        return found.get(_set_key(ood) if ood is not None else which or self.which(group), {})

    def estimate(self, group: Group, detector: str, which: str | None = None, *, ood: str | None = None) -> Estimate:
        """Mean and spread over the seeds. See :meth:`values`."""
        return estimate(list(self.values(group, detector, which, ood=ood).values()))

    def sets(self, group: Group) -> list[tuple[str, str]]:
        """OOD sets of a group with their distance, in order of appearance."""
        rows = [row for rows in self.groups[group].values() for row in rows if row.metric == self.metric]
        return [(name, next(row.distance for row in rows if row.ood == name)) for name in unique(rows, "ood")]

    def ranks(self, group: Group) -> dict[str, float]:
        """Place of each detector by its mean over the seeds; equal means share the mean of their places."""
        means = {name: self.estimate(group, name).mean for name in self.detectors(group)}
        return ranks({name: value for name, value in means.items() if not math.isnan(value)}, lower=self.lower)

    def mean_rank(self, detector: str) -> tuple[float, int]:
        """Mean place over the groups in which the detector has one, and how many these are."""
        places = [found[detector] for found in map(self.ranks, self.groups) if detector in found]
        return mean(places), len(places)

    def difference(self, detector: str, groups: Sequence[Group] | None = None) -> Difference:
        """Paired difference of a detector to the reference over the groups. See :func:`paired_difference`."""
        pairs = []
        for group in self.groups if groups is None else groups:
            mine, theirs = self.values(group, detector), self.values(group, self.reference)
            pairs.append([mine[seed] - theirs[seed] for seed in mine if seed in theirs])
        return paired_difference(pairs)

    def ordered(self) -> list[str]:
        """Detectors with numbers, the best first: by mean place, then by mean number."""

        def key(name: str) -> tuple[float, float]:
            numbers = [self.estimate(group, name).mean for group in self.groups]
            average = mean([number for number in numbers if not math.isnan(number)])
            return self.mean_rank(name)[0], average if self.lower else -average

        return sorted((name for name in self.detectors() if self.mean_rank(name)[1]), key=key)

    @cached_property
    def _numbers(self) -> dict[Group, dict[str, dict[str, dict[int, float]]]]:
        """Group -> detector -> near, far, all or OOD set -> seed -> number."""
        return {group: _values(runs, self.metric) for group, runs in self.groups.items()}


def summarise(runs: Sequence[Run], *, metric: str = AUROC, reference: str = "rmd") -> Summary:
    """Put runs together.

    Runs with the same benchmark, backbone and setting form a group and differ in their seed. Of two runs with the
    same seed and detector the newer one counts.

    Args:
        runs: the runs; those that are not done give no numbers and stay in the list.
        metric: the metric.
        reference: the detector that the others are compared with.

    Returns:
        The summary.

    Raises:
        ValueError: if there are numbers, but none of this metric; the message lists those that there are.
    """
    found: dict[Group, dict[int, dict[str, list[Row]]]] = {}
    notes = []
    # the older first: what comes later takes its place
    for run in sorted(runs, key=lambda run: run.ended):
        parts: dict[tuple[Group, int], dict[str, list[Row]]] = {}
        for row in run.rows:
            key = (Group(row.benchmark, row.backbone, run.setting), row.seed)
            parts.setdefault(key, {}).setdefault(row.detector, []).append(row)
        for (group, seed), mine in parts.items():
            # runs of other detectors add to each other
            before = found.setdefault(group, {}).setdefault(seed, {})
            twice = [label(name) for name in mine if name and name in before]
            if twice:
                which = ", ".join(twice)
                notes.append(f"{group}, seed {seed}: run more than once ({which}); the newest counts, {run.path}.")
            before.update(mine)
    metrics = unique((row for run in runs for row in run.rows if row.detector), "metric")
    if metrics and metric not in metrics:
        raise ValueError(f"no run has the metric {metric!r}; there are {', '.join(metrics)}.")
    order = dict.fromkeys(Group(row.benchmark, row.backbone, run.setting) for run in runs for row in run.rows)
    groups = {
        group: {seed: list(chain(*mine.values())) for seed, mine in sorted(found[group].items())} for group in order
    }
    return Summary(metric, reference, groups, runs, notes)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and sample standard deviation.

    Example:
        >>> estimate([1.0, 2.0, 3.0])
        Estimate(mean=2.0, deviation=1.0, count=3)
    """
    average = mean(values)
    deviation = math.nan
    if len(values) > 1:
        deviation = math.sqrt(math.fsum((value - average) ** 2 for value in values) / (len(values) - 1))
    return Estimate(average, deviation, len(values))


def ranks(values: Mapping[str, float], *, lower: bool = False) -> dict[str, float]:
    """Places from 1, the best first; equal values share the mean of their places.

    Args:
        values: name -> number.
        lower: whether less is better.

    Example:
        >>> ranks({"a": 0.9, "b": 0.7, "c": 0.9})
        {'a': 1.5, 'b': 3.0, 'c': 1.5}
    """
    signed = {name: value if lower else -value for name, value in values.items()}
    return {
        name: 1 + sum(other < value for other in signed.values()) + (sum(o == value for o in signed.values()) - 1) / 2
        for name, value in signed.items()
    }


def paired_difference(groups: Sequence[Sequence[float]], *, level: float = 0.95) -> Difference:
    """Mean of paired differences with a t interval, every group weighing the same.

    Where every group has two seeds or more, the groups are taken as they are and the seeds as a sample: the variance is
    that of a mean of independent group means, with Welch and Satterthwaite's degrees of freedom. For one group this is
    the paired t interval. Where a group has one seed only, the group means are the sample, if there are three or more.

    Args:
        groups: for each group the differences of its runs; empty groups do not count.
        level: coverage of the interval.

    Returns:
        The difference with its interval.
    """
    groups = [group for group in groups if group]
    estimates = [estimate(group) for group in groups]
    pairs = sum(map(len, groups))
    if not groups:
        return Difference(math.nan)
    value = mean([item.mean for item in estimates])
    if all(item.count > 1 for item in estimates):
        parts = [item.deviation**2 / item.count / len(groups) ** 2 for item in estimates]
        freedom_parts = math.fsum(part**2 / (item.count - 1) for part, item in zip(parts, estimates, strict=True))
        error = math.sqrt(math.fsum(parts))
        # without any spread there is no degree of freedom to estimate, and the interval is a point
        freedom = error**4 / freedom_parts if freedom_parts else 1.0
        over = "seeds"
    elif len(groups) > 2:
        spread = estimate([item.mean for item in estimates])
        error, freedom, over = spread.deviation / math.sqrt(len(groups)), len(groups) - 1.0, "benchmarks"
    else:
        return Difference(value, pairs=pairs)
    from scipy.special import stdtrit  # not scipy.stats, whose import takes a second

    half = float(stdtrit(freedom, 0.5 + level / 2)) * error
    return Difference(value, value - half, value + half, pairs, over)


def _values(runs: Mapping[int, Sequence[Row]], metric: str) -> dict[str, dict[str, dict[int, float]]]:
    found: dict[str, dict[str, dict[int, float]]] = {}
    for seed, rows in runs.items():
        mine = [row for row in rows if row.metric == metric and row.detector]
        numbers: dict[str, dict[str, float]] = near_far_means(mine, metric)
        for row in mine:
            # times belong to no OOD set
            numbers.setdefault(row.detector, {})[_set_key(row.ood) if row.ood else ALL] = row.value
        for detector, values in numbers.items():
            for which, value in values.items():
                if not math.isnan(value):
                    found.setdefault(detector, {}).setdefault(which, {})[seed] = value
    return found


def _set_key(ood: str) -> str:
    # a set may be called "near"
    return f"set {ood}"
