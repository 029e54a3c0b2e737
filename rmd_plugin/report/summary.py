"""A summary of many runs: detectors x benchmarks, each benchmark, the runs without numbers; as tables and as files."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import ACCURACY, SECONDS
from rmd_plugin.report.aggregate import ALL, FAR, GROUP, NEAR, Difference, Group, Summary, estimate
from rmd_plugin.report.document import picture, render
from rmd_plugin.report.gather import Outcome, Run
from rmd_plugin.report.names import label
from rmd_plugin.report.table import Cell, Column, DetectorTable, Table, number_cells, to_latex, to_markdown
from rmd_plugin.untrusted import one_line, to_csv_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: more groups than this do not stand side by side in one table
_WIDEST = 6


def write_summary(summary: Summary, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a summary in every format to a folder, and return the files, the page first."""
    from rmd_plugin.report.figures import cost_figure  # imports matplotlib
    from rmd_plugin.report.style import save_figure

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tables, cost = summary_tables(summary, target), cost_figure(summary)
    # none of these names is that of a file of a run
    files = {
        "summary.html": _render(summary, target, cost),
        "summary.md": "\n".join(map(to_markdown, tables)),
        "summary.tex": "\n".join(map(to_latex, tables)),
        "summary.csv": _to_csv(_numbers_frame(summary)),
        "runs.csv": _to_csv(_runs_frame(summary)),
    }
    for name, text in files.items():
        with replacing(target / name, newline="") as file:
            file.write(text)
    pictures = [] if cost is None else save_figure(cost, target / "summary_cost")
    return [*(target / name for name in files), *pictures]


def _render(summary: Summary, base: Path, cost: Figure | None) -> str:
    """The summary as one self-contained page without script; paths of runs are shown relative to ``base``."""
    from rmd_plugin.report.figures import difference_figure

    alt = f"Paired difference of each detector to {label(summary.reference)}, with 95 % interval"
    figures = {
        alt: difference_figure(summary),
        f"{summary.metric} of each detector against its time to score": cost,
    }
    benchmarks = list(dict.fromkeys(group.benchmark for group in summary.groups))
    return render(
        "summary.html",
        title=f"Near-OOD detection on {', '.join(benchmarks)}" if benchmarks else "No results",
        counts=count_outcomes(summary.runs),
        overall=overall_tables(summary),
        pictures=[picture(figure, alt) for alt, figure in figures.items() if figure is not None],
        each=group_tables(summary),
        missing=runs_table([run for run in summary.runs if run.outcome != "done"], "", base),
        counted=runs_table([run for run in summary.runs if run.outcome == "done"], "Runs", base),
    )


def _to_csv(frame: pd.DataFrame) -> str:
    def plain(value: object) -> object:
        return to_csv_cell(one_line(value)) if isinstance(value, (str, Path)) else value

    return str(frame.apply(lambda column: column.map(plain)).to_csv(index=False, lineterminator="\n"))


def _numbers_frame(summary: Summary) -> pd.DataFrame:
    """One line per group, OOD set (or mean over sets) and detector; rank and difference where they are judged."""
    records: list[dict[str, object]] = []
    for group in summary.groups:
        for ood, detector in product((*summary.sets[group], NEAR, FAR, ALL), summary.detectors(group)):
            if summary.values(group, detector, ood):
                found = summary.estimate(group, detector, ood)
                records.append({**group._asdict(), "ood": ood, "detector": detector, **vars(found)})
                if ood == summary.which(group):
                    paired = summary.difference(detector, [group])
                    records[-1] |= {"rank": summary.ranks[group][detector], **paired._asdict()}
    for detector in summary.ordered():
        rank, count = summary.mean_rank(detector)
        paired = summary.difference(detector)
        records.append({"ood": "overall", "detector": detector, "count": count, "rank": rank, **paired._asdict()})
    columns = [*GROUP, "ood", "detector", "metric", "mean", "deviation", "count", "rank", "value", "low", "high"]
    frame = pd.DataFrame(records, columns=columns).assign(metric=summary.metric)
    return frame.rename(columns={"value": "difference"})


def _runs_frame(summary: Summary) -> pd.DataFrame:
    columns = ["run", "outcome", "reason", "benchmark", "backbone", "setting", "seed"]
    records = [
        {**run.about, "run": run.path, "outcome": run.outcome, "reason": run.reason, "setting": run.setting}
        for run in summary.runs
    ]
    return pd.DataFrame(records, columns=columns, dtype=object)


# -- tables ---------------------------------------------------------------------------------------------------------


def summary_tables(summary: Summary, base: Path) -> list[Table]:
    """All tables: the overall ones, one per group where that says more, and the runs that gave no numbers."""
    missing = runs_table([run for run in summary.runs if run.outcome != "done"], "Runs without results", base)
    return [*overall_tables(summary), *group_tables(summary), *([missing] if missing.rows else [])]


def overall_tables(summary: Summary) -> list[Table]:
    """Detectors x groups: mean ± standard deviation over the seeds, mean rank, difference to the reference.

    Many groups come a few at a time, and the last two columns in a table of their own.
    """
    groups = list(summary.groups)
    if not groups:
        return []
    detectors = summary.ordered()
    if len(groups) <= _WIDEST:
        return [_detector_table(summary, detectors, groups, overall=True)]
    chunks = [groups[start : start + _WIDEST] for start in range(0, len(groups), _WIDEST)]
    parts = [_detector_table(summary, detectors, chunk, overall=False) for chunk in chunks]
    return [*parts, _detector_table(summary, detectors, [], overall=True)]


def _detector_table(summary: Summary, detectors: Sequence[str], groups: Sequence[Group], *, overall: bool) -> Table:
    table = DetectorTable(detectors)
    for group in groups:
        judged = "" if summary.which(group) == NEAR else ", all sets"
        column = Column(group.benchmark, detail=f"({', '.join(filter(None, group[1:]))}{judged})")
        table.add(column, _estimates(summary, detectors, group))
    count = len(summary.groups)
    if overall and count > 1:
        places = [summary.mean_rank(name) for name in detectors]
        details = ["" if found == count else f"(in {found} of {count})" for _, found in places]
        cells = number_cells([place for place, _ in places], "{:.2f}".format, details, best="lowest")
        table.add(Column("mean rank"), cells)
        means = [summary.mean_number(name) for name in detectors]
        best: Literal["lowest", "highest"] = "lowest" if summary.lower else "highest"
        table.add(Column("mean"), number_cells(means, lambda value: _number(summary, value), best=best))
    title = _title(summary) if groups else f"{summary.metric} over all {count} columns above"
    if not overall:
        return table.finish(title)
    compared = summary.reference in detectors
    differences = _add_differences(table, summary, detectors, "paired") if compared else []
    return table.finish(title, list(_notes(summary, differences)))


def group_tables(summary: Summary) -> list[Table]:
    """Detectors x OOD sets of every group that has several sets."""
    return [_group_table(summary, group) for group in summary.groups if len(summary.sets[group]) > 1]


def _group_table(summary: Summary, group: Group) -> Table:
    sets = summary.sets[group]
    detectors = sorted(summary.ranks[group], key=summary.ranks[group].__getitem__)
    table = DetectorTable(detectors)
    for ood, distance in sets.items():
        column = Column(ood, detail=f"({distance})" if distance else "")
        table.add(column, _estimates(summary, detectors, group, ood))
    for distance in ("near", "far"):
        if list(sets.values()).count(distance) > 1:
            table.add(Column(f"{distance} mean"), _estimates(summary, detectors, group, f"mean ({distance})"))
    if summary.reference in detectors and len(detectors) > 1:
        judged = "near" if summary.which(group) == NEAR else "all sets"
        _add_differences(table, summary, detectors, judged, [group])
    notes = []
    rows = summary.rows[(summary.rows[GROUP] == list(group)).all(axis=1)]
    accuracy = rows[(rows["metric"] == ACCURACY) & (rows["detector"] == "") & (rows["status"] == "ok")]["value"]
    if len(accuracy):
        item = estimate(accuracy.tolist())
        spread = "" if math.isnan(item.deviation) else f" ± {100 * item.deviation:.2f}"
        notes.append(f"Accuracy on the in-distribution test set: {100 * item.mean:.2f}{spread} %.")
    return table.finish(f"{group}: {summary.metric}{_unit(summary)}, {_seeds(summary.groups[group])}", notes)


def runs_table(runs: Sequence[Run], title: str, base: Path) -> Table:
    """Runs with their outcome and reason; paths below ``base`` are shown relative to it."""
    columns = [Column(name, "left", wrap=name in ("Run", "What")) for name in ("Run", "What", "Outcome", "Reason")]
    cells = []
    for run in runs:
        whole, inside = run.path.resolve(), base.resolve()
        path = whole.relative_to(inside) if whole.is_relative_to(inside) else run.path
        cells.append([Cell(str(path)), Cell(run.name), Cell(run.outcome), Cell(run.reason)])
    return Table(columns, cells, title=title)


def count_outcomes(runs: Iterable[Run]) -> str:
    """How many runs ended how, in words; empty without runs."""
    counts = Counter(run.outcome for run in runs)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome) if counts[outcome])


# -- cells and notes --------------------------------------------------------------------------------------------------


def _number(summary: Summary, value: float, sign: str = "") -> str:
    scale, digits = (1, 3) if summary.metric in SECONDS else (100, 2)
    return f"{scale * value:{sign}.{digits}f}".replace("-", "−")


def _estimates(summary: Summary, detectors: Sequence[str], group: Group, ood: str | None = None) -> list[Cell]:
    found = [summary.estimate(group, name, ood) for name in detectors]
    spreads = ["" if math.isnan(item.deviation) else f"± {_number(summary, item.deviation)}" for item in found]
    best: Literal["lowest", "highest"] = "lowest" if summary.lower else "highest"
    return number_cells([item.mean for item in found], lambda value: _number(summary, value), spreads, best=best)


def _add_differences(
    table: DetectorTable, summary: Summary, detectors: Sequence[str], remark: str, groups: Sequence[Group] | None = None
) -> list[Difference]:
    """Add the column of differences to the reference, which itself has none, and return those of the others."""

    def signed(value: float) -> str:
        return _number(summary, value, "+")

    others = {name: summary.difference(name, groups) for name in detectors if name != summary.reference}
    found = [others.get(name, Difference(math.nan)) for name in detectors]
    details = ["" if math.isnan(item.low) else f"[{signed(item.low)}, {signed(item.high)}]" for item in found]
    cells = number_cells([item.value for item in found], signed, details)
    table.add(Column(f"to {label(summary.reference)}", detail=f"({remark})"), cells)
    return list(others.values())


def _title(summary: Summary) -> str:
    several = any(len(seeds) > 1 for seeds in summary.groups.values())
    on = " on near-OOD" if any(summary.which(group) == NEAR for group in summary.groups) else ""
    spread = ", mean ± standard deviation over seeds" if several else ""
    return f"{summary.metric}{_unit(summary)}{on}{spread}"


def _unit(summary: Summary) -> str:
    return " in s" if summary.metric in SECONDS else " in %"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _notes(summary: Summary, differences: Iterable[Difference]) -> Iterator[str]:
    """What stands below the overall table: how differences are taken, the seeds, and all that is missing."""
    reference = label(summary.reference)
    over = {item.over for item in differences}
    if "seeds" in over:
        yield (
            f"To {reference}: mean difference to {reference} in the same run, every benchmark weighing the same, with "
            "the 95 % t interval over seeds (Welch and Satterthwaite's degrees of freedom); the benchmarks are taken "
            "as they are, not as a sample."
        )
    if "benchmarks" in over:
        yield (
            f"To {reference}: mean difference to {reference} in the same run, with the 95 % t interval over the "
            "benchmarks, because there are benchmarks with fewer than three seeds."
        )
    if summary.seedless:
        where = "; ".join(map(str, summary.seedless))
        yield f"All seeds gave the same numbers, nothing depends on them, and they count as one run: {where}."
    if "" in over:
        yield "A difference without interval has too few runs for one: it takes three seeds or three benchmarks."
    if summary.reference not in summary.ordered():
        yield f"No difference: no run has the reference detector {reference}."
    seeds: dict[tuple[int, ...], list[str]] = {}
    for group, numbers in summary.groups.items():
        seeds.setdefault(tuple(numbers), []).append(str(group))
    for runs, groups in seeds.items():
        where = "; ".join(groups)
        yield f"Every benchmark with {_seeds(runs)}." if len(seeds) == 1 else f"{_seeds(runs).capitalize()}: {where}."
    rows = summary.rows
    bad = rows[(rows["detector"] != "") & (rows["status"] != "ok") & (rows["reason"] != "")]
    # those that failed before those that were skipped
    bad = bad.sort_values(["group", "status"], kind="stable").assign(decides=bad["metric"].str.contains("@"))
    for (*key, status, reason, decides), part in bad.groupby([*GROUP, "status", "reason", "decides"], sort=False):
        names = ", ".join(map(label, part["detector"].unique()))
        verb = "without decisions" if decides else "failed" if status == "failed" else "not supported"
        count, total = part["seed"].nunique(), len(summary.groups[Group(*key)])
        yield f"{Group(*key)}: {names} {verb} in {count} of {total} runs ({reason})."
    missing = count_outcomes(run for run in summary.runs if run.outcome != "done")
    if missing:
        yield f"Not counted: {missing} of {len(summary.runs)} runs."
    yield from summary.notes
