"""Many runs -> one summary: mean and spread over seeds, ranks over benchmarks, paired differences to a reference."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin.compare.rows import ACCURACY, AUROC, SCORE_SECONDS, SECONDS, THRESHOLD, make_rows, select
from rmd_plugin.files import parse_yaml, replacing
from rmd_plugin.report import tables
from rmd_plugin.report.run import ROWS, STATUS, RunFolder, RunIdentity
from rmd_plugin.report.tables import COMPARISON, Best, Column, Table, frame_table, label, number_cells

#: that of its status; ``unfinished`` where a job has none, ``unreadable`` where its files are damaged or missing
Outcome = Literal["done", "failed", "running", "interrupted", "unfinished", "unreadable"]

#: what stands for an OOD set where the mean over the near, the far, or all of them is meant
NEAR, ALL = "mean (near)", "mean (all)"

#: columns that make a group of runs, which differ in nothing but their seed
_GROUP = ["benchmark", "backbone", "setting"]
_OVERRIDES = ".hydra/overrides.yaml"
#: parts of a config that say where and how a run works, not what it computes
_NOT_SETTINGS = re.compile(
    r"\b(hydra|paths|names|logger|monitor|figures|resamples|num_workers|resume|verbose|progress|devices?"
    r"|enable_progress_bar|enable_model_summary|ood_monitor|lr_monitor|model_summary|rich_progress|dirpath)\b"
    r"|(seed|dir)(\.|$)|^format$"
)


# -- runs on disk -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """One run on disk; only the rows of ``done`` runs count."""

    path: Path
    outcome: Outcome
    reason: str = ""  #: why it is not done
    rows: pd.DataFrame = field(default_factory=make_rows)
    about: RunIdentity = field(default_factory=dict)  #: ``benchmark``, ``backbone`` and ``seed``, where known
    config: Mapping[str, Any] = field(default_factory=dict)
    #: in what its config differs from the other runs of its benchmark and backbone; of a job that failed before these
    #: were known, its overrides
    setting: str = ""
    ended: float = 0.0  #: to tell the newer of two equal runs

    @property
    def name(self) -> str:
        """What the run is, for people: benchmark, backbone, setting, seed."""
        benchmark, backbone, seed = (self.about.get(key, "") for key in COMPARISON)
        words = benchmark, backbone, self.setting, f"seed {seed}" if seed != "" else ""
        return ", ".join(str(word) for word in words if word)


def gather_runs(folders: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """Every run in and below the folders, each folder once, in the order of their paths.

    A folder is a run if it holds ``status.json`` or ``rows.csv``, or if Hydra started a job in it. What cannot be read
    is a run too, with the outcome ``unreadable`` and the reason.
    """
    runs: dict[Path, Run] = {}
    for top in map(Path, folders):
        if not top.is_dir():
            runs[top] = Run(top, "unreadable", "it is not a folder" if top.exists() else "there is no such folder")
            continue
        paths = {file.parent for name in (STATUS, ROWS) for file in top.rglob(name)}
        # Hydra started something here, and it wrote nothing
        jobs = {file.parents[1] for file in top.rglob(_OVERRIDES)}
        paths |= {job for job in jobs if not any(job in path.parents for path in paths)}
        outermost = [path for path in paths if paths.isdisjoint(path.parents)]
        # job 10 follows job 9
        for path in sorted(outermost, key=lambda path: re.sub(r"\d+", lambda digits: digits[0].zfill(20), str(path))):
            runs.setdefault(path.resolve(), read_run(path))
    return _name_settings(list(runs.values()))


def read_run(path: str | os.PathLike[str]) -> Run:
    """One run from its folder; never raises for what the folder holds."""
    folder = RunFolder(path)
    overrides: list[str] = []
    try:
        if folder.file(_OVERRIDES).is_file():
            overrides = parse_yaml(folder.file(_OVERRIDES).read_text(encoding="utf-8"))
        status = folder.read_status() if folder.file(STATUS).exists() else None
        rows, config = folder.read_rows(), folder.read_config()
        ended = datetime.fromisoformat(status.ended).timestamp() if status is not None and status.ended else 0.0
    except (OSError, ValueError) as error:
        return Run(folder.path, "unreadable", " ".join(str(error).split()))
    about = rows.loc[0, COMPARISON].to_dict() if len(rows) else {} if status is None else status.about
    outcome: Outcome
    if status is None:
        # rows without a status: put there by hand; the file appears only when it is whole
        outcome, reason = ("done", "") if len(rows) else ("unfinished", f"Hydra started it, but it wrote no {STATUS}")
    elif status.state == "done" and not len(rows):
        outcome, reason = "unreadable", f"it says that it is done, but has no rows in {ROWS}"
    else:
        outcome, reason = status.state, status.reason
        if outcome == "running":
            reason = f"process {status.pid} on {status.host}, since {status.started}; if that is gone, it was killed"
    rows = rows if outcome == "done" else make_rows()
    return Run(folder.path, outcome, reason, rows, about, config, "" if about else ", ".join(overrides), ended)


def _name_settings(runs: Sequence[Run]) -> list[Run]:
    """Name the options, the seed aside, in which runs of one benchmark and backbone differ."""
    configs = pd.json_normalize([dict(run.config) for run in runs])
    configs = configs[[name for name in configs if not _NOT_SETTINGS.search(name)]].map(str, na_action="ignore")
    about = pd.DataFrame([run.about for run in runs], columns=COMPARISON).astype(str)
    settings = pd.Series("", range(len(runs)))
    for _, group in about.loc[[bool(run.config) for run in runs]].groupby(["benchmark", "backbone"]):
        options = configs.loc[group.index]
        # which detectors were run is no setting, and the options of one tell only those runs apart that have it
        varying = [name for name in options if options[name].nunique(dropna=name.startswith("detector")) > 1]
        # weights often differ from seed to seed: they are a setting only where runs would be the same without them
        others = [name for name in varying if not name.endswith(("path", "checkpoint"))]
        varying = varying if options[others].assign(seed=group["seed"]).duplicated().any() else others
        for number, values in options[varying].fillna("unset").iterrows():
            settings[number] = ", ".join(f"{name}={value}" for name, value in values.items())
    return [replace(run, setting=setting or run.setting) for run, setting in zip(runs, settings, strict=True)]


# -- numbers ----------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Paired difference to the reference detector with its 95 % interval; NaN where there are too few pairs."""

    difference: float  #: mean over the groups of the mean over their seeds
    low: float = math.nan
    high: float = math.nan


class Summary:
    """All runs in numbers of one metric, and against one reference detector.

    Runs that differ in nothing but their seed form a group. Of two runs with the same group, seed and detector the
    newer one counts. Seeds that all gave the same numbers, to the last bit, are no sample and count as one. Runs that
    are not done give no numbers and stay in the list.

    Raises:
        ValueError: if there are numbers, but none of this metric; the message lists those that there are.
    """

    def __init__(self, runs: Sequence[Run], *, metric: str = AUROC, reference: str = "rmd") -> None:
        self.runs, self.metric, self.reference = runs, metric, reference
        self.best: Best = tables.best_of(metric)
        self.notes: list[str] = []  #: what was left out, one sentence each
        frames = [run.rows.assign(setting=run.setting, run=number, ended=run.ended) for number, run in enumerate(runs)]
        empty = make_rows().assign(setting="", run=0, ended=0.0)
        rows = pd.concat([frame for frame in frames if len(frame)] or [empty], ignore_index=True)
        # a threshold is a score, which another detector's cannot be compared with
        metrics = [name for name in rows[rows["detector"] != ""]["metric"].unique() if not name.startswith(THRESHOLD)]
        if metrics and metric not in metrics:
            raise ValueError(f"no run has the metric {metric!r}; there are {', '.join(metrics)}.")
        rows["group"] = rows.groupby(_GROUP, sort=False).ngroup()
        rows = rows.sort_values(["group", "seed", "ended"], kind="stable")
        groups = rows.groupby("group")[_GROUP].first()
        groups["seeds"] = rows.groupby("group")["seed"].agg(lambda seeds: list(seeds.unique()))
        groups["title"] = [", ".join(filter(None, names)) for names in groups[_GROUP].itertuples(index=False)]
        #: a line for each group: benchmark, backbone, setting, title, seeds, and ``judged``, the mean that counts
        self.groups = groups
        # runs of other detectors add to each other
        newest = rows.groupby(["group", "seed", "detector"])["run"].transform("last")
        older = rows.assign(newest=newest)[(rows["run"] != newest) & (rows["detector"] != "")]
        for (group, seed, run), part in older.groupby(["group", "seed", "newest"], sort=False):
            names = ", ".join(map(label, part["detector"].unique()))
            where = f"{groups.loc[group, 'title']}, seed {seed}"
            self.notes.append(f"{where}: run more than once ({names}); the newest counts, {runs[run].path}.")
        self.rows = rows[rows["run"] == newest]  #: those that count, with the number of their group and run
        values = _pivot(self.rows, metric)
        rated = set(values.index.droplevel("seed"))
        groups["judged"] = [NEAR if (group, NEAR) in rated else ALL for group in groups.index]
        for group, part in values.groupby(level="group"):
            title, seeds = groups.loc[group, ["title", "seeds"]]
            if len(seeds) > 1 and (part.groupby(level="ood").nunique() <= 1).all(axis=None):
                values = values.drop(part.index[part.index.get_level_values("seed") != seeds[0]])
                self.notes.append(f"{title}: all seeds gave the same numbers; they count as one run.")
        #: a line for each group, OOD set (or mean over sets) and seed, a column for each detector; means over the seeds
        self.values, self.means = values, values.groupby(level=["group", "ood"], sort=False).mean()
        keys = [key for key in zip(groups.index, groups["judged"], strict=True) if key in self.means.index]
        #: of the means, for each group that over the near-OOD sets where there are any, else over all
        self.judged = self.means.loc[keys]

    @cached_property
    def overall(self) -> pd.DataFrame:
        """A line for each detector, the best first.

        Columns: mean ``rank`` from 1 over so many (``count``) groups, equal detectors sharing their places; ``mean``
        over the groups, NaN unless it has a number in each; paired ``difference`` to the reference with its interval
        (``low``, ``high``); ``cost``, the time to score in times of the reference's.
        """
        ranks = self.judged.rank(axis=1, ascending=self.best == "lowest")
        columns = {"rank": ranks.mean(), "count": ranks.count(), "mean": self.judged.mean(skipna=False)}
        overall = pd.DataFrame(columns).assign(some=self.judged.mean() * (1 if self.best == "lowest" else -1))
        overall = overall.query("count > 0").sort_values(["rank", "some"], kind="stable")
        times = _pivot(self.rows, SCORE_SECONDS).groupby(level="group").mean()
        if self.reference in times:
            overall["cost"] = np.exp(np.log(times.div(times[self.reference], axis=0)).mean(skipna=False))
        differences = [self.difference(name) for name in overall.index]
        return overall.drop(columns="some").assign(**pd.DataFrame(differences, overall.index, Difference._fields))

    def difference(self, detector: str) -> Difference:
        """Paired difference of a detector to the reference over the groups. See :func:`paired_difference`."""
        if detector == self.reference or not {self.reference, detector} <= set(self.values):
            return Difference(math.nan)
        apart = self.values[detector] - self.values[self.reference]
        return paired_difference([apart.loc[key].dropna() for key in self.judged.index])


def _pivot(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Numbers of a metric: a line for each group, OOD set (or mean over sets) and seed, a column for each detector."""
    rows = rows[(rows["metric"] == metric) & (rows["detector"] != "")]
    kinds = [rows[rows["ood"] != ""]]
    kinds += [rows[rows["distance"] == distance].assign(ood=f"mean ({distance})") for distance in ("near", "far")]
    # times belong to no OOD set, and to the mean over all
    everything = pd.concat([*kinds, rows.assign(ood=ALL)])
    means = everything.groupby(["group", "ood", "seed", "detector"], sort=False)["value"].agg(
        lambda values: values.mean(skipna=False)
    )
    detectors = means.index.unique("detector")  # in their order: sort=False of unstack mixes up numbers before pandas 3
    return means.astype(float).unstack("detector")[detectors].dropna(axis=0, how="all").sort_index()


def paired_difference(groups: Sequence[Sequence[float] | pd.Series]) -> Difference:
    """Mean of paired differences, a list for each group, with the 95 % t interval; every group weighs the same.

    Where every group has three seeds or more, the groups are taken as they are and the seeds as a sample: the variance
    is that of a mean of independent group means, with Welch and Satterthwaite's degrees of freedom. For one group this
    is the paired t interval. Where a group has fewer, the group means are the sample, if there are three or more. Two
    of anything give no interval: with one degree of freedom it is thirteen standard errors wide.
    """
    arrays = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    if not arrays:
        return Difference(math.nan)
    means = np.array([array.mean() for array in arrays])
    if all(len(array) > 2 for array in arrays):
        variances = np.array([array.var(ddof=1) / len(array) for array in arrays]) / len(arrays) ** 2
        weighted = float(np.sum(variances**2 / np.array([len(array) - 1 for array in arrays])))
        error = math.sqrt(variances.sum())
        # without any spread there is no degree of freedom to estimate, and the interval is a point
        freedom = error**4 / weighted if weighted else 1.0
    elif len(arrays) > 2:
        error, freedom = means.std(ddof=1) / math.sqrt(len(arrays)), len(arrays) - 1.0
    else:
        return Difference(float(means.mean()))
    from scipy.special import stdtrit  # not scipy.stats, whose import takes a second

    value, half = float(means.mean()), float(stdtrit(freedom, 0.975)) * error
    return Difference(value, value - half, value + half)


# -- files ------------------------------------------------------------------------------------------------------------


def write_summary(summary: Summary, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a summary in every format to a folder, and return the files, the page first."""
    from rmd_plugin.report.figures import cost_figure, save_figure  # imports matplotlib
    from rmd_plugin.report.page import picture

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    cost = cost_figure(summary)
    overall, each = overall_tables(summary), group_tables(summary)
    records = [{**run.about, **vars(run), "run": os.path.relpath(run.path, target)} for run in summary.runs]
    runs = pd.DataFrame(records, columns=["run", *_GROUP, "seed", "outcome", "reason"], dtype=object).fillna("")
    missing = frame_table(runs[runs["outcome"] != "done"], "Runs without results")
    drawn = [] if cost is None else [picture(cost, f"{summary.metric} of each detector against its time to score")]
    page = tables.render(
        "summary.html",
        benchmarks=summary.groups["benchmark"].unique().tolist(),
        counts=_count_outcomes(summary.runs),
        overall=overall,
        pictures=drawn,
        each=each,
        missing=missing,
        counted=frame_table(runs[runs["outcome"] == "done"]),
    )
    written = [*overall, *each, *([missing] if missing.rows else [])]
    # none of these names is that of a file of a run
    files = {
        "summary.html": page,
        "summary.md": "\n".join(map(tables.to_markdown, written)),
        "summary.tex": "\n".join(map(tables.to_latex, written)),
        "summary.csv": _numbers_frame(summary).to_csv(index=False, lineterminator="\n"),
        "runs.csv": runs.to_csv(index=False, lineterminator="\n"),
    }
    for name, text in files.items():
        with replacing(target / name, newline="") as file:
            file.write(text)
    saved = [] if cost is None else save_figure(cost, target / "summary_cost")
    return [*(target / name for name in files), *saved]


def _numbers_frame(summary: Summary) -> pd.DataFrame:
    """One line per group, OOD set (or mean over sets) and detector, then one per detector over all groups."""
    values = summary.values.melt(ignore_index=False, var_name="detector")
    seeds = values.groupby(["group", "ood", "detector"], sort=False)["value"]
    numbers = seeds.agg(mean="mean", deviation="std", count="count").query("count > 0")
    numbers = numbers.reset_index().merge(summary.groups[_GROUP], left_on="group", right_index=True)
    overall = summary.overall.rename_axis("detector").reset_index().assign(ood="overall")
    columns = [*_GROUP, "ood", "detector", "metric", "mean", "deviation", "count", "rank", *Difference._fields]
    return pd.concat([numbers, overall]).assign(metric=summary.metric).reindex(columns=columns)


# -- tables -----------------------------------------------------------------------------------------------------------


def overall_tables(summary: Summary) -> list[Table]:
    """Detectors x groups: mean ± standard deviation over the seeds, mean rank, difference to the reference."""
    overall, groups = summary.overall, summary.groups
    if not len(groups):
        return []
    scale, digits, unit = (1, 3, "s") if summary.metric in SECONDS else (100, 2, "%")

    def show(value: float, sign: str = "") -> str:
        return f"{scale * value:{sign}.{digits}f}".replace("-", "−")

    def signed(value: float) -> str:
        return show(value, "+")

    deviations = summary.values.groupby(level=["group", "ood"], sort=False).std()
    columns = {}
    for group in groups.itertuples():
        key = (group.Index, group.judged)
        means, spreads = (frame.reindex([key])[overall.index].iloc[0] for frame in (summary.means, deviations))
        details = ["" if math.isnan(spread) else f"± {show(spread)}" for spread in spreads]
        about = ", ".join(filter(None, (group.backbone, group.setting, "" if group.judged == NEAR else "all sets")))
        columns[Column(group.benchmark, f"({about})")] = number_cells(means, show, details, best=summary.best)
    if len(groups) > 1:
        details = ["" if count == len(groups) else f"(in {count} of {len(groups)})" for count in overall["count"]]
        columns[Column("mean rank")] = number_cells(overall["rank"], "{:.2f}".format, details, best="lowest")
        columns[Column("mean")] = number_cells(overall["mean"], show, best=summary.best)
    if summary.reference in overall.index:
        ends = zip(overall["low"], overall["high"], strict=True)
        details = ["" if math.isnan(low) else f"[{signed(low)}, {signed(high)}]" for low, high in ends]
        column = Column(f"to {label(summary.reference)}", "(paired)")
        columns[column] = number_cells(overall["difference"], signed, details)
    on = " on near-OOD" if (groups["judged"] == NEAR).any() else ""
    spread = ", mean ± standard deviation over seeds" if (groups["seeds"].map(len) > 1).any() else ""
    title = f"{summary.metric} in {unit}{on}{spread}"
    return [tables.detector_table(overall.index, columns, title, list(_notes(summary)))]


def group_tables(summary: Summary) -> list[Table]:
    """Detectors x OOD sets of every group: the table of a comparison, with means over the seeds."""
    averaged = []
    for group, rows in summary.rows.groupby("group"):
        key = ["ood", "detector", "metric", "distance", "status", "reason"]
        means = rows.groupby(key, sort=False)["value"].mean().reset_index().assign(low=math.nan, high=math.nan)
        title, seeds = summary.groups.loc[group, ["title", "seeds"]]
        averaged.append(tables.comparison_table(means, f"{title}, {_seeds(seeds)}"))
    return averaged


def _count_outcomes(runs: Iterable[Run]) -> str:
    """How many runs ended how, in words; empty without runs."""
    counts = pd.Series([run.outcome for run in runs], dtype=object).value_counts(sort=False).sort_index()
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _notes(summary: Summary) -> Iterator[str]:
    """What stands below the overall table: how differences are taken, the seeds, and all that is missing."""
    reference, rows, titles = label(summary.reference), summary.rows, summary.groups["title"]
    if summary.reference in summary.overall.index:
        yield (
            f"To {reference}: mean difference to {reference} in the same run, every benchmark weighing the same. The "
            "95 % t interval is over seeds, or over benchmarks where one has fewer than three; for fewer there is none."
        )
    else:
        yield f"No difference: no run has the reference detector {reference}."
    for seeds, part in summary.groups.groupby(summary.groups["seeds"].map(tuple), sort=False):
        where = "Every benchmark with " if len(part) == len(summary.groups) else f"{'; '.join(part['title'])}: "
        yield f"{where}{_seeds(seeds)}."
    # behind where the classifier comes from stands what is odd about its accuracy: hardly above chance, untrained
    accuracy = select(rows, metric=ACCURACY, detector="", status="ok")
    for row in accuracy[accuracy["reason"].str.contains(";")].itertuples():
        remark = row.reason.partition(";")[2].strip().rstrip(".")
        yield f"{titles[row.group]}, seed {row.seed}: the accuracy is {100 * row.value:.1f} % ({remark})."
    bad = rows[(rows["detector"] != "") & (rows["status"] != "ok") & (rows["reason"] != "")]
    # those that failed before those that were skipped
    bad = bad.sort_values(["group", "status"], kind="stable").assign(decides=bad["metric"].str.contains("@"))
    for (group, status, reason, decides), part in bad.groupby(["group", "status", "reason", "decides"], sort=False):
        names = ", ".join(map(label, part["detector"].unique()))
        verb = "without decisions" if decides else "failed" if status == "failed" else "not supported"
        runs = f"{part['seed'].nunique()} of {len(summary.groups.loc[group, 'seeds'])} runs"
        yield f"{titles[group]}: {names} {verb} in {runs} ({reason})."
    if missing := _count_outcomes(run for run in summary.runs if run.outcome != "done"):
        yield f"Not counted: {missing} of {len(summary.runs)} runs."
    yield from summary.notes
