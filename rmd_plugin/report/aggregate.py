"""Many runs -> one summary: mean and spread over seeds, ranks over benchmarks, paired differences to a reference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin.compare.rows import AUROC, COLUMNS, FALSE_ALARMS, FPR95, SCORE_SECONDS, SECONDS, THRESHOLD, mean
from rmd_plugin.report.gather import Run
from rmd_plugin.report.names import label

#: what stands for an OOD set where the mean over the near, the far, or all of them is meant
NEAR, FAR, ALL = "mean (near)", "mean (far)", "mean (all)"


class Group(NamedTuple):
    """Runs that differ in nothing but their seed."""

    benchmark: str
    backbone: str
    setting: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


#: columns of a frame that make a group
GROUP = list(Group._fields)


@dataclass(frozen=True)
class Estimate:
    """Mean and sample standard deviation over so many runs; NaN for none, and for fewer than two."""

    mean: float
    deviation: float
    count: int


class Difference(NamedTuple):
    """Paired difference to the reference detector with its 95 % interval; NaN where there are too few pairs."""

    #: mean over the groups of the mean over their seeds
    value: float
    low: float = math.nan
    high: float = math.nan
    #: what the interval is taken over: ``seeds``, ``benchmarks``, or nothing
    over: str = ""


@dataclass(frozen=True, eq=False)
class Summary:
    """All runs in numbers of one metric, and against one reference detector."""

    metric: str
    reference: str
    #: those that count, with the setting of their run; group by group, seed by seed
    rows: pd.DataFrame
    #: those without rows too
    runs: Sequence[Run]
    #: what was left out, one sentence each
    notes: Sequence[str] = ()

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return self.metric in (FPR95, *SECONDS) or self.metric.startswith(FALSE_ALARMS)

    @cached_property
    def groups(self) -> dict[Group, list[int]]:
        """Every group with its seeds."""
        return {Group(*key): part["seed"].unique().tolist() for key, part in self.rows.groupby(GROUP, sort=False)}

    @cached_property
    def sets(self) -> dict[Group, dict[str, str]]:
        """OOD sets of every group in order of appearance -> ``near``, ``far`` or empty."""
        rows = self.rows[(self.rows["metric"] == self.metric) & (self.rows["ood"] != "")]
        parts = rows.drop_duplicates([*GROUP, "ood"]).groupby(GROUP, sort=False)
        found = {Group(*key): dict(zip(part["ood"], part["distance"], strict=True)) for key, part in parts}
        return {group: found.get(group, {}) for group in self.groups}

    def which(self, group: Group) -> str:
        """The mean that a detector is judged by in a group: over the near-OOD sets where there are any, else all."""
        return NEAR if "near" in self.sets[group].values() else ALL

    def detectors(self, group: Group) -> list[str]:
        """Detectors that have a number in a group, in order of appearance."""
        return list(dict.fromkeys(name for key, name, _ in self._numbers if key == group))

    def values(self, group: Group, detector: str, ood: str | None = None) -> dict[int, float]:
        """Numbers of a detector in a group: seed -> number, without those that are missing.

        They are those of one OOD set or of :data:`NEAR`, :data:`FAR` or :data:`ALL`, by default as :meth:`which` says.
        """
        return self._numbers.get((group, detector, ood or self.which(group)), {})

    def estimate(self, group: Group, detector: str, ood: str | None = None) -> Estimate:
        """Mean and spread over the seeds. See :meth:`values`."""
        return estimate(list(self.values(group, detector, ood).values()))

    @cached_property
    def ranks(self) -> dict[Group, dict[str, float]]:
        """In every group the place of each detector by its mean over the seeds. See :func:`ranks`."""
        means = {g: {name: self.estimate(g, name).mean for name in self.detectors(g)} for g in self.groups}
        return {group: ranks(found, lower=self.lower) for group, found in means.items()}

    def mean_rank(self, detector: str) -> tuple[float, int]:
        """Mean place over the groups in which the detector has one, and how many these are."""
        places = [found[detector] for found in self.ranks.values() if detector in found]
        return mean(places), len(places)

    def mean_number(self, detector: str) -> float:
        """Mean over the groups of the mean over their seeds; NaN unless the detector has a number in each."""
        return mean([self.estimate(group, detector).mean for group in self.groups])

    def relative_cost(self, detector: str) -> float:
        """Time to score, in times of the reference's: geometric mean over the groups; NaN unless all have both."""
        times = replace(self, metric=SCORE_SECONDS)
        found = [(times.estimate(g, detector).mean, times.estimate(g, self.reference).mean) for g in self.groups]
        usable = found and all(mine > 0 and theirs > 0 for mine, theirs in found)
        return math.exp(mean([math.log(mine / theirs) for mine, theirs in found])) if usable else math.nan

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
            average = mean([self.estimate(group, name).mean for group in self.groups if self.values(group, name)])
            return self.mean_rank(name)[0], average if self.lower else -average

        return sorted(dict.fromkeys(name for found in self.ranks.values() for name in found), key=key)

    @cached_property
    def seedless(self) -> list[Group]:
        """Groups in which all seeds gave the same numbers, to the last bit: they are no sample and count as one run."""
        found: dict[Group, bool] = {}
        for (group, *_), values in self._all_numbers.items():
            found[group] = found.get(group, True) and len(values) > 1 and len(set(values.values())) == 1
        return [group for group, same in found.items() if same]

    @cached_property
    def _numbers(self) -> dict[tuple[Group, str, str], dict[int, float]]:
        """Group, detector and OOD set or mean -> seed -> number; of seeds that change nothing the first."""
        found = self._all_numbers.items()
        return {key: dict(list(values.items())[:1]) if key[0] in self.seedless else values for key, values in found}

    @cached_property
    def _all_numbers(self) -> dict[tuple[Group, str, str], dict[int, float]]:
        rows = self.rows[(self.rows["metric"] == self.metric) & (self.rows["detector"] != "")]
        # times belong to no OOD set, and to the mean over all
        kinds = [rows.assign(ood=ALL), rows[rows["ood"] != ""]]
        kinds += [rows[rows["distance"] == distance].assign(ood=f"mean ({distance})") for distance in ("near", "far")]
        parts = pd.concat(kinds).groupby([*GROUP, "detector", "ood", "seed"], sort=False)["value"]
        found: dict[tuple[Group, str, str], dict[int, float]] = {}
        for (*group, detector, ood, seed), values in parts:
            number = mean(values.tolist())
            if not math.isnan(number):
                found.setdefault((Group(*group), detector, ood), {})[int(seed)] = number
        return found


def summarise(runs: Sequence[Run], *, metric: str = AUROC, reference: str = "rmd") -> Summary:
    """Put runs together.

    Runs with the same benchmark, backbone and setting form a group and differ in their seed. Of two runs with the
    same seed and detector the newer one counts. Those that are not done give no numbers and stay in the list.

    Raises:
        ValueError: if there are numbers, but none of this metric; the message lists those that there are.
    """
    rows = pd.DataFrame(
        [
            {**vars(row), "setting": run.setting, "run": number, "ended": run.ended}
            for number, run in enumerate(runs)
            for row in run.rows
        ],
        columns=[*COLUMNS, "setting", "run", "ended"],
    )
    # a threshold is a score, which another detector's cannot be compared with
    metrics = [name for name in rows.loc[rows["detector"] != "", "metric"].unique() if not name.startswith(THRESHOLD)]
    if metrics and metric not in metrics:
        raise ValueError(f"no run has the metric {metric!r}; there are {', '.join(metrics)}.")
    rows["group"] = rows.groupby(GROUP, sort=False).ngroup()
    rows = rows.sort_values(["group", "seed", "ended"], kind="stable")
    # runs of other detectors add to each other
    rows["newest"] = rows.groupby(["group", "seed", "detector"])["run"].transform("last")
    older = rows[(rows["run"] != rows["newest"]) & (rows["detector"] != "")]
    notes = [
        f"{Group(*group)}, seed {seed}: run more than once ({', '.join(map(label, part['detector'].unique()))}); "
        f"the newest counts, {runs[newest].path}."
        for (*group, seed, newest), part in older.groupby([*GROUP, "seed", "newest"], sort=False)
    ]
    return Summary(metric, reference, rows[rows["run"] == rows["newest"]], runs, notes)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and sample standard deviation.

    Example:
        >>> estimate([1.0, 2.0, 3.0])
        Estimate(mean=2.0, deviation=1.0, count=3)
    """
    return Estimate(mean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


def ranks(values: Mapping[str, float], *, lower: bool = False) -> dict[str, float]:
    """Places from 1, the best first; equal values share the mean of their places, missing ones have none.

    Example:
        >>> ranks({"a": 0.9, "b": 0.7, "c": 0.9})
        {'a': 1.5, 'b': 3.0, 'c': 1.5}
    """
    return pd.Series(values, dtype=float).dropna().rank(ascending=lower).to_dict()


def paired_difference(groups: Sequence[Sequence[float]]) -> Difference:
    """Mean of paired differences, a list for each group, with the 95 % t interval; every group weighs the same.

    Where every group has three seeds or more, the groups are taken as they are and the seeds as a sample: the variance
    is that of a mean of independent group means, with Welch and Satterthwaite's degrees of freedom. For one group this
    is the paired t interval. Where a group has fewer, the group means are the sample, if there are three or more. Two
    of anything give no interval: with one degree of freedom it is thirteen standard errors wide.
    """
    estimates = [estimate(group) for group in groups if group]
    if not estimates:
        return Difference(math.nan)
    between = estimate([item.mean for item in estimates])
    if all(item.count > 2 for item in estimates):
        parts = [item.deviation**2 / item.count / len(estimates) ** 2 for item in estimates]
        freedom_parts = math.fsum(part**2 / (item.count - 1) for part, item in zip(parts, estimates, strict=True))
        error = math.sqrt(math.fsum(parts))
        # without any spread there is no degree of freedom to estimate, and the interval is a point
        freedom = error**4 / freedom_parts if freedom_parts else 1.0
        over = "seeds"
    elif len(estimates) > 2:
        error, freedom, over = between.deviation / math.sqrt(len(estimates)), len(estimates) - 1.0, "benchmarks"
    else:
        return Difference(between.mean)
    from scipy.special import stdtrit  # not scipy.stats, whose import takes a second

    half = float(stdtrit(freedom, 0.975)) * error
    return Difference(between.mean, between.mean - half, between.mean + half, over)
