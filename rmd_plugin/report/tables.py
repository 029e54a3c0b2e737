"""Rows -> tables of a comparison and its decisions, in four formats; and which detector to take."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from jinja2 import Environment, PackageLoader, StrictUndefined

from rmd_plugin.compare import rows as results
from rmd_plugin.compare.rows import ACCURACY, AUROC, FALSE_ALARMS, FPR95, JOINT, at_level, levels, select, unique
from rmd_plugin.report.run import ID, Scores

Best = Literal["highest", "lowest"]
Show = Callable[[float], str]
Names = Iterable[str]
Judged = Literal["near", "all"]

#: detectors of this package; the others come from pytorch-ood or from the user
OURS = ("rmd", "mahalanobis", "fused", "marginal", "partial", "flow_likelihood", "relative_flow")

#: detector -> name for readers. Its position picks colour and dash, so no two look alike. The first seven, which are
#: shown together most often, differ in colour.
LABELS: dict[str, str] = json.loads(Path(__file__).with_name("labels.json").read_text(encoding="utf-8"))

#: columns that tell one comparison from another
COMPARISON = ["benchmark", "backbone", "seed"]
#: why a detector may rank OOD below ID samples
_BLIND = {"knn": "it scales features to unit length, so how far they reach does not count"}
#: with fewer samples in a set, a variance of ranks may be zero by chance
_FEW = 10


def label(detector: str) -> str:
    """Name of a detector for readers; one that is not in the table keeps its own."""
    return LABELS.get(detector, detector)


# -- tables and their formats -----------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Text of one cell, bold if it is the best of its column, and small print beside it, for example an interval."""

    text: str
    bold: bool = False
    detail: str = ""


class Column(NamedTuple):
    """Head of a column, with small print beside its title, for example a unit."""

    title: str
    detail: str = ""
    align: Literal["left", "right"] = "right"


class Table(NamedTuple):
    """A table without a format: heads, as many cells in each row, a title, and notes, one sentence each."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()


def frame_table(frame: pd.DataFrame, title: str = "", notes: Sequence[str] = ()) -> Table:
    """A data frame as a table: texts to the left; numbers to the right, whole ones or with one digit."""

    def show(value: object) -> str:
        return value if isinstance(value, str) else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"

    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in frame]
    columns = [Column(name, align="right" if right else "left") for name, right in zip(frame, numeric, strict=True)]
    return Table(columns, [[Cell(show(value)) for value in row] for row in frame.itertuples(index=False)], title, notes)


def detector_table(
    detectors: Iterable[str], columns: Mapping[Column, Sequence[Cell]], title: str, notes: Sequence[str] = ()
) -> Table:
    """A table with a line for each detector: each column has a cell for each."""
    cells = [[Cell(label(name)) for name in detectors], *columns.values()]
    return Table([Column("Detector", align="left"), *columns], list(zip(*cells, strict=True)), title, notes)


def number_cells(
    values: pd.Series, show: Show, details: Names | None = None, best: Best | None = None, eligible: Names | None = None
) -> list[Cell]:
    """Numbers by detector as cells: NaN is a dash, and what reads like the best is bold, unless it stands alone.

    ``eligible`` are the detectors that can be the best; by default all of them.
    """
    rated = values if eligible is None else values[values.index.isin(eligible)]
    top = show(rated.min() if best == "lowest" else rated.max()) if best and values.count() > 1 else None
    return [
        Cell("–") if math.isnan(value) else Cell(show(value), name in rated and show(value) == top, detail)
        for (name, value), detail in zip(values.items(), details or [""] * len(values), strict=True)
    ]


def markdown_text(text: str) -> str:
    """A text whose letters mean nothing to Markdown."""
    # an underscore inside a word is harmless, and most names have one; ]( makes a link or loads a picture
    return re.sub(r"([\\|*`<>]|(?<!\w)_|_(?!\w)|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))


_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$", "–": "--", "−": "$-$", "·": r"$\cdot$"}
)


_TEMPLATES = Environment(
    loader=PackageLoader("rmd_plugin.report"),
    autoescape=lambda name: name is None or name.endswith((".html", ".css")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {"markdown": markdown_text, "label": label, "latex": lambda text: text.translate(_LATEX)}


def render(template: str, **content: Any) -> str:
    """A template of the folder ``templates`` filled in; in HTML every text is escaped."""
    return _TEMPLATES.get_template(template).render(content)


def to_markdown(table: Table) -> str:
    """The table in Markdown (GitHub's), the best numbers in bold."""
    return render("table.md", table=table)


def to_latex(table: Table, *, label: str = "") -> str:
    r"""The table in LaTeX: an environment ``table``, with ``label`` for ``\ref``. It needs ``booktabs`` only."""
    return render("table.tex", table=table, label=label)


def to_html(table: Table) -> str:
    """The table as an HTML fragment without style; its classes for a style sheet stand in ``templates/macros.html``."""
    return str(_TEMPLATES.get_template("macros.html").module.show_table(table))  # type: ignore[attr-defined]


def print_tables(tables: Iterable[Table], *, width: int | None = None) -> None:
    """Print tables to the terminal: the best numbers bold, the small print dim, the notes below.

    Where a table is wider than the terminal, the small print goes below the numbers. Into a file or pipe at full width.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(width=width or (None if sys.stdout.isatty() else 200))
    for table in tables:
        for between in (" ", "\n"):
            grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=between != " ")
            for column in table.columns:
                detail = f"{between}{column.detail}".rstrip()
                head = Text.assemble(column.title.replace(" ", between), (detail, "dim"))
                grid.add_column(head, justify=column.align, overflow="fold")
            for row in table.rows:
                pieces = [
                    ((cell.text, "bold" * cell.bold), (f"{between}{cell.detail}".rstrip(), "dim")) for cell in row
                ]
                grid.add_row(*(Text.assemble(*texts) for texts in pieces))
            if console.measure(grid, options=console.options.update(max_width=10_000)).maximum <= console.width:
                break
        console.print(Text(table.title, style="bold"), grid, sep="\n")
        for note in table.notes:
            console.print(Text(note, style="dim"))


def percent(value: float) -> str:
    """A fraction in percent with two digits; empty for NaN."""
    return "" if math.isnan(value) else f"{100 * value:.2f}"


def interval(low: float, high: float) -> str:
    """An interval in percent with one digit; empty if there is none."""
    # without a space, so that a narrow terminal folds it below the number in one piece
    return "" if math.isnan(low) or math.isnan(high) else f"[{100 * low:.1f}–{100 * high:.1f}]"


# -- of rows ----------------------------------------------------------------------------------------------------------


def comparison_tables(rows: pd.DataFrame) -> list[Table]:
    """The table of a comparison; none without rows. See :func:`comparison_table`."""
    return [comparison_table(rows, _heading(rows))] if len(rows) else []


def decision_tables(rows: pd.DataFrame) -> list[Table]:
    """What the detectors flag at a level of false alarms, one table for every level among the rows.

    Detectors stand as in :func:`comparison_tables`: the share of every OOD set that is flagged with its interval, that
    of the ID test set, that of every ID set under a covariate shift, and the threshold. Only what is detected without
    more false alarms than promised can be bold. Why one has no decisions stands below the table of the comparison.
    """
    tables = [_decision_table(rows, alpha) for alpha in levels(rows)]
    return [table for table in tables if table.rows]


def joint_tables(rows: pd.DataFrame) -> list[Table]:
    """Detector and classifier together: is a sample unknown, or the answer wrong? None without such numbers."""
    detectors = ranking(rows)
    columns = _mean_columns(rows, detectors, JOINT)
    if not columns:
        return []
    risk = near_far_means(rows, results.RISK90)[judged_sets(rows)].reindex(detectors).dropna()
    notes = [
        f"With {label(name)}, if 90 % of the ID samples are accepted, {100 * value:.1f} % of the accepted are wrong or "
        "unknown (risk90), with as many OOD samples as in the test sets."
        for name, value in risk[:1].items()
    ]
    title = f"{_heading(rows)}: unknown or wrong, in %"
    return [detector_table(detectors, columns, title, notes)]


def near_far_means(rows: pd.DataFrame, metric: str = AUROC) -> pd.DataFrame:
    """Mean of a metric over the OOD sets of one comparison: a line for each detector, columns near, far and all.

    It is NaN where there is no such set or one of them failed.
    """
    rated = rows[(rows["metric"] == metric) & (rows["detector"] != "") & (rows["ood"] != "")]
    groups = pd.concat([rated, rated.assign(distance="all")]).groupby(["detector", "distance"])["value"]
    means = groups.agg(lambda values: values.mean(skipna=False)).unstack()
    return means.reindex(index=unique(rated, "detector"), columns=["near", "far", "all"]).astype(float)


def judged_sets(rows: pd.DataFrame) -> Judged:
    """By which OOD sets detectors are judged: the near ones, or all where none is near."""
    return "near" if "near" in ood_sets(rows).values() else "all"


def ranking(rows: pd.DataFrame) -> list[str]:
    """Detectors that have numbers, the best first: by near mean, then by the mean over all OOD sets.

    Without any OOD set they stand as they come.
    """
    if not ood_sets(rows):
        return unique(select(rows, status="ok"), "detector")
    means = near_far_means(rows).dropna(subset="all")
    means["near"] = means["near"].fillna(means["all"])
    return list(means.sort_values(["near", "all"], ascending=False, kind="stable").index)


def ood_sets(rows: pd.DataFrame) -> dict[str, str]:
    """OOD sets that detectors were rated on, in the order of the rows -> ``near``, ``far`` or empty."""
    rated = rows[(rows["metric"] == AUROC) & (rows["ood"] != "")].drop_duplicates("ood")
    return dict(zip(rated["ood"], rated["distance"], strict=True))


def near_first(distances: Mapping[str, str]) -> list[str]:
    """Names of OOD sets, those that are far behind the others."""
    return sorted(distances, key=lambda name: distances[name] == "far")


def set_title(name: str, distances: Mapping[str, str]) -> str:
    """Name of an OOD set with its distance, where that is known."""
    return f"{name} ({distances[name]})" if distances.get(name) else name


def _heading(rows: pd.DataFrame) -> str:
    return "{}, {}, seed {}".format(*rows[COMPARISON].iloc[0])


def numbers_of(rows: pd.DataFrame, detectors: Sequence[str], metric: str, ood: str = "") -> pd.DataFrame:
    """Columns value, low and high of a metric, a line for each detector; NaN where it is missing."""
    numbers = select(rows, metric=metric, ood=ood, status="ok").drop_duplicates("detector").set_index("detector")
    return numbers[["value", "low", "high"]].reindex(detectors)


def decision_of(rows: pd.DataFrame, detector: str) -> tuple[float, float]:
    """Level of false alarms and threshold of a detector; both are NaN if it makes no decisions."""
    alpha = next(iter(levels(select(rows, detector=detector, status="ok"))), math.nan)
    return alpha, float(numbers_of(rows, [detector], at_level(results.THRESHOLD, alpha)).loc[detector, "value"])


def comparison_table(rows: pd.DataFrame, heading: str) -> Table:
    """Detectors x OOD sets of one comparison.

    Detectors are ordered by their near-OOD mean (by the mean over all sets where no set is near), the best numbers of a
    column are bold, and what failed or was skipped stands in the notes with its reason.
    """
    detectors, sets = ranking(rows), ood_sets(rows)
    columns = _set_columns(rows, detectors, AUROC, "AUROC")
    means = near_far_means(rows).reindex(detectors)
    for distance in ("near", "far"):
        if len(sets) > 1 and distance in sets.values():
            columns[Column(f"{distance} mean")] = number_cells(means[distance], percent, best="highest")
    columns |= _mean_columns(rows, detectors, [FPR95])
    for title, metric in (("fit", results.FIT_SECONDS), ("score", results.SCORE_SECONDS)):
        columns[Column(title, "(s)")] = number_cells(numbers_of(rows, detectors, metric)["value"], "{:.2f}".format)
    notes = _notes(rows)
    if sets or not detectors:
        resampled = select(rows, metric=AUROC)["low"].notna().any()
        heading += f": AUROC in %{' with 95 % bootstrap interval' if resampled else ''}"
    else:
        notes.insert(0, "There is no OOD data, so there is no AUROC: only false alarms are known.")
    return detector_table(detectors, columns, heading, notes)


def best_of(metric: str) -> Best:
    """Whether the highest or the lowest number of a metric is the best."""
    lowest = (FPR95, *results.SECONDS, *JOINT[1:], FALSE_ALARMS)  # of the joint ones, the first is OSCR
    return "lowest" if metric.partition("@")[0] in lowest else "highest"


def _mean_columns(rows: pd.DataFrame, detectors: Sequence[str], metrics: Iterable[str]) -> dict[Column, list[Cell]]:
    """A column for each metric that there is: its mean over the judged OOD sets, or the number itself of AURC."""
    judged, columns = judged_sets(rows), {}
    for metric in metrics:
        of_id = metric == results.AURC
        values = numbers_of(rows, detectors, metric)["value"] if of_id else near_far_means(rows, metric)[judged]
        if values.notna().any():
            column = Column(metric.removesuffix("TPR"), "" if of_id or len(ood_sets(rows)) == 1 else f"({judged})")
            columns[column] = number_cells(values.reindex(detectors), percent, best=best_of(metric))
    return columns


def _set_columns(
    rows: pd.DataFrame, detectors: Sequence[str], metric: str, title: str, eligible: Names | None = None
) -> dict[Column, list[Cell]]:
    """A column of a metric for each OOD set, under the title and its name where there is but one."""
    sets = ood_sets(rows)
    return {
        Column(name if len(sets) > 1 else f"{title}, {name}", f"({distance})" if distance else ""): _share_cells(
            rows, detectors, metric, name, best="highest", eligible=eligible
        )
        for name, distance in sets.items()
    }


def _share_cells(rows: pd.DataFrame, detectors: Sequence[str], metric: str, ood: str = "", **bold: Any) -> list[Cell]:
    numbers = numbers_of(rows, detectors, metric, ood)
    return number_cells(numbers["value"], percent, map(interval, numbers["low"], numbers["high"]), **bold)


def _decision_table(rows: pd.DataFrame, alpha: float) -> Table:
    metrics = results.THRESHOLD, FALSE_ALARMS, results.SHIFT_ALARMS, results.DETECTED
    names = threshold, alarms, shifted, detected = [at_level(metric, alpha) for metric in metrics]
    decided = select(rows, metric=alarms, status="ok")
    detectors = [name for name in ranking(rows) if name in set(decided["detector"])]
    # a remark there says that the promise is not kept
    columns = _set_columns(rows, detectors, detected, "Detected", eligible=select(decided, reason="")["detector"])
    columns[Column("False alarms", "(ID test set)")] = _share_cells(rows, detectors, alarms)
    for name in unique(select(rows, metric=shifted), "ood"):
        columns[Column(f"False alarms, {name}", "(shifted ID)")] = _share_cells(rows, detectors, shifted, name)
    columns[Column("threshold")] = number_cells(numbers_of(rows, detectors, threshold)["value"], "{:.4g}".format)
    title = (
        f"{_heading(rows)}: % flagged as OOD, calibrated on the validation data for at most {100 * alpha:g} % false "
        "alarms, with 95 % binomial interval"
    )
    return detector_table(detectors, columns, title, _reasons(rows[rows["metric"].isin(names)], "ok", "Remark"))


def _notes(rows: pd.DataFrame) -> list[str]:
    notes = []
    for row in select(rows, metric=ACCURACY).itertuples():
        remark = f" ({row.reason})" if row.reason else ""
        if row.status == "ok":
            notes.append(f"Accuracy on the in-distribution test set: {percent(row.value)} %{remark}.")
        elif row.reason:
            notes.append(f"No accuracy: {row.reason}.")
    for row in select(rows, metric=results.SHIFT_ACCURACY, status="ok").itertuples():
        notes.append(f"Accuracy on {row.ood}, in-distribution under a covariate shift: {percent(row.value)} %.")
    rated = select(rows, metric=AUROC, status="ok")
    for name, part in rated[rated["high"].fillna(rated["value"]) < 0.5].groupby("detector", sort=False):
        why = f": {_BLIND[name]}" if name in _BLIND else ""
        sets = ", ".join(unique(part, "ood"))
        notes.append(f"Below chance: {label(name)} on {sets} ranks OOD samples below ID ones{why}.")
    decides = rows["metric"].str.contains("@")
    openings: dict[results.Status, str] = {"ok": "Remark", "failed": "Failed", "skipped": "Not supported"}
    notes += [note for status, opening in openings.items() for note in _reasons(rows[~decides], status, opening)]
    return notes + _reasons(rows[decides], "skipped", "No decisions")


def _reasons(rows: pd.DataFrame, status: results.Status, opening: str) -> list[str]:
    """A line for each reason, with the detectors that it is about."""
    about = rows[(rows["status"] == status) & (rows["detector"] != "") & (rows["reason"] != "")]
    return [
        f"{opening}: {', '.join(map(label, unique(part, 'detector')))} ({reason.rstrip('.')})."
        for reason, part in about.groupby("reason", sort=False)
    ]


# -- which detector to take -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The detector that leads a comparison."""

    detector: str
    judged: Judged  #: the OOD sets that it was judged by
    auroc: float  #: mean over them
    rivals: Sequence[str] | None  #: detectors that the samples do not tell from it; None without scores
    alpha: float  #: level of false alarms that decisions were made at; NaN without decisions
    detected: float  #: share of the OOD samples that are found there, mean over the judged sets
    alarms: float  #: share of the ID test set that is flagged there
    alarms_interval: tuple[float, float]


def choose(rows: pd.DataFrame, scores: Scores | None = None) -> Choice | None:
    """The leader of one comparison by the mean AUROC over near-OOD sets, or over all where none is near; None without.

    With the scores, the rivals are all detectors that may be as good as the leader: all saw the same samples, so a
    paired difference is told from none long before the intervals of the two AUROC part. The level is divided by the
    number of pairs, of which the leader picks some: in 95 % of comparisons or more, all equally good ones are named.

    Example:
        >>> from rmd_plugin.compare.rows import make_row, make_rows
        >>> pairs = [("rmd", 0.9), ("msp", 0.8)]
        >>> rows = make_rows([make_row("b", "x", "net", name, 0, "AUROC", value) for name, value in pairs])
        >>> choose(rows).detector
        'rmd'
    """
    sets, ranked = ood_sets(rows), ranking(rows)
    if not sets or not ranked:
        return None
    judged = judged_sets(rows)
    names = [name for name, distance in sets.items() if judged == "all" or distance == "near"]
    best = ranked[0]
    scored = {name: by_set for name, by_set in (scores or {}).items() if name in ranked and {ID, *names} <= set(by_set)}
    rivals = _rivals(best, scored, names, ranked) if best in scored else None
    alpha, _ = decision_of(rows, best)
    alarms = numbers_of(rows, [best], at_level(FALSE_ALARMS, alpha)).loc[best]
    detected = select(rows, detector=best, metric=at_level(results.DETECTED, alpha))
    share = detected.loc[detected["ood"].isin(names), "value"].mean(skipna=False)
    area = near_far_means(rows).loc[best, judged]
    return Choice(best, judged, area, rivals, alpha, share, alarms["value"], (alarms["low"], alarms["high"]))


def advice(choice: Choice | None) -> list[str]:
    """Why this detector, in words; none without a choice."""
    if choice is None:
        return []
    lines = render("advice.txt", choice=choice, label=label).splitlines()
    return [line.strip() for line in lines]


def _rivals(best: str, scores: Scores, names: Sequence[str], ranked: Sequence[str]) -> list[str]:
    """Detectors whose difference to the best in the mean AUROC over sets is within its standard errors."""
    from rmd_plugin.compare.rows import placements

    quantile = NormalDist().inv_cdf(1 - 0.05 / max(2, len(scores) * (len(scores) - 1)))
    # the ID samples are those of every set, so their shares are averaged; the OOD samples are each set's own
    shares = {}
    for detector, by_set in scores.items():
        of_id, of_ood = zip(*(placements(by_set[ID], by_set[name]) for name in names), strict=True)
        shares[detector] = [np.mean(of_id, axis=0), *(part / len(names) for part in of_ood)]
    rivals = []
    for other in ranked:
        if other in shares and other != best:
            differences = [first - second for first, second in zip(shares[best], shares[other], strict=True)]
            variances = [part.var(ddof=1) / len(part) if len(part) >= _FEW else math.inf for part in differences]
            error = math.sqrt(sum(variances))
            if abs(differences[0].mean()) <= quantile * error:
                rivals.append(other)
    return rivals


# -- in the format of OpenOOD -----------------------------------------------------------------------------------------

#: OpenOOD's columns, in its order
OPENOOD = {FPR95: "FPR@95", AUROC: "AUROC", "AUPR-IN": "AUPR_IN", "AUPR-OUT": "AUPR_OUT", ACCURACY: "ACC"}
#: its names of data sets, where they are not ours in lower case; beside CIFAR it says texture, beside ImageNet textures
_OPENOOD_SETS = {"TinyImageNet": "tin", "Textures": "texture", "SSBHard": "ssb_hard", "OpenImagesO": "openimage_o"}


def openood_tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The results of one comparison as OpenOOD's evaluator gives them: a table in percent for each detector.

    Lines are the near-OOD sets, their mean (``nearood``), the far-OOD sets and theirs (``farood``); sets without a
    distance count as far. OpenOOD takes OOD samples as the positive class, as we do.
    """
    accuracy = select(rows, metric=ACCURACY, status="ok")["value"]
    names = {name: _OPENOOD_SETS.get(name, name.lower()) for name in unique(rows, "ood")}
    if "SSBHard" in names:
        names["Textures"] = "textures"
    rated = rows[rows["metric"].isin(list(OPENOOD)) & (rows["detector"] != "") & (rows["ood"] != "")]
    tables = {}
    for detector, part in rated.groupby("detector", sort=False):
        values = part.drop_duplicates(["ood", "metric"]).pivot(index="ood", columns="metric", values="value")
        values[ACCURACY] = accuracy.iloc[0] if len(accuracy) else math.nan
        blocks = []
        for mean, sets in (("nearood", part["distance"] == "near"), ("farood", part["distance"] != "near")):
            if sets.any():
                block = values.loc[part["ood"][sets].unique()]
                blocks += [block.rename(index=names), block.mean(skipna=False).to_frame(mean).T]
        tables[str(detector)] = 100 * pd.concat(blocks)[list(OPENOOD)].rename(columns=OPENOOD)
    return tables
