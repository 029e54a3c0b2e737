"""The paper's numbers beside ours: as tables, and all studies together as a document."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd  # type: ignore[import-untyped]
from jinja2 import Environment, PackageLoader

from rmd_plugin.files import replacing
from rmd_plugin.paper.published import ADDRESS, TABLES, TITLE
from rmd_plugin.paper.reproduce import SUMMARY
from rmd_plugin.report.tables import Cell, Column, Table, label, to_markdown


class Ranking(NamedTuple):
    """AUROC of the methods in one setting, in percent by name; the same methods on both sides, unless ours is empty."""

    line: str
    paper: dict[str, float]
    ours: dict[str, float]

    @property
    def same(self) -> bool | None:
        """Whether the methods come in the same order; None if there is nothing of ours to compare."""
        return order(self.paper) == order(self.ours) if self.ours else None


def rankings(numbers: pd.DataFrame) -> list[Ranking]:
    """The settings for which the paper has at least two methods, with ours where at least two of them were run."""
    published = numbers[(numbers["detector"] != "") & numbers["paper"].notna()]
    result = []
    for (line, _), group in published.groupby(["line", "setting"], sort=False):
        measured = group[group["ours"].notna()]
        methods = measured if len(measured) > 1 else group
        if len(methods) > 1:
            values = methods.set_index(methods["detector"].map(label))
            ours = values["ours"].to_dict() if len(measured) > 1 else {}
            result.append(Ranking(line, values["paper"].to_dict(), ours))
    return result


def order(values: Mapping[str, float]) -> str:
    """Names with the best first; those that are printed the same stand in the order of their names.

    Example:
        >>> order({"MD": 74.91, "RMD": 81.01, "MSP": 80.14})
        'RMD > MSP > MD'
        >>> order({"RMD": 72.041, "MD": 72.039})
        'MD = RMD'
    """
    ranked = sorted((-round(value, 2), name) for name, value in values.items())
    text = ranked[0][1]
    for (before, _), (value, name) in pairwise(ranked):
        text += f" {'=' if value == before else '>'} {name}"
    return text


def smallest_lead(values: Mapping[str, float]) -> float:
    """The least difference between neighbours of the order, in points; NaN below two methods."""
    return min((one - other for one, other in pairwise(sorted(values.values(), reverse=True))), default=math.nan)


def comparison_table(numbers: pd.DataFrame, title: str = "") -> Table:
    """Paper, ours and the difference; then what we ran and why it differs, not repeated from line to line."""
    columns = [Column("Setting of the paper", align="left"), Column("Number", align="left")]
    columns += [*map(Column, ("paper", "ours", "difference")), Column("What we ran, and why it differs", align="left")]
    rows, previous = [], None
    for item in numbers.itertuples():
        ours = _shown(item.ours, item.metric) or "not run"
        ours += "" if math.isnan(item.spread) else f" ± {item.spread:.2f}"
        difference = _shown(item.ours - item.paper, item.metric, sign="+")
        texts = [item.setting, item.reason] if not math.isnan(item.ours) else ["not run", item.reason]
        remark = (": " if texts[0] == "not run" else ". ").join(filter(None, texts))
        shown = "" if (item.line, remark) == previous else remark
        rows.append([*map(Cell, (item.line, item.metric, _shown(item.paper, item.metric), ours, difference, shown))])
        previous = item.line, remark
    return Table(columns, rows, title=title)


def order_table(numbers: pd.DataFrame) -> Table:
    """Who leads whom in the paper and in ours, and whether that is the same."""
    titles = "Setting of the paper", "order in the paper", "ours", "same order"
    columns = [Column(title, align="left") for title in titles]
    columns += [Column("smallest lead, paper"), Column("ours")]
    rows = []
    for ranking in rankings(numbers):
        texts = ranking.line, order(ranking.paper), order(ranking.ours) if ranking.ours else "not run"
        same = Cell({True: "yes", False: "no", None: ""}[ranking.same], bold=ranking.same is False)
        leads = [Cell(_shown(smallest_lead(values))) for values in (ranking.paper, ranking.ours)]
        rows.append([*map(Cell, texts), same, *leads])
    return Table(columns, rows)


def _shown(value: float, metric: str = "", *, sign: str = "") -> str:
    counts = metric.startswith(("leading directions", "d at"))
    return "" if math.isnan(value) else f"{value:{sign}.{0 if counts else 2}f}"


def write_study(folder: Path, numbers: pd.DataFrame, **about: Any) -> None:
    """Write the summary of a finished study, from which the document is made."""
    records = json.loads(numbers.to_json(orient="records", double_precision=15))  # NaN, which JSON has not, as null
    with replacing(folder / SUMMARY) as file:
        json.dump({**about, "numbers": records}, file, indent=2)


def read_study(folder: Path) -> dict[str, Any]:
    """What :func:`write_study` wrote."""
    summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    numbers = pd.DataFrame(summary["numbers"])
    return {**summary, "numbers": numbers.astype(dict.fromkeys(("paper", "ours", "spread"), float))}


def write_document(path: Path, folders: Sequence[Path], *, pictures_dir: str = "reproduction") -> None:
    """Write the document about all finished studies, with the pictures in a folder beside it."""
    summaries = {folder: read_study(folder) for folder in folders if (folder / SUMMARY).is_file()}
    if not summaries:
        raise ValueError("no study was run yet, so there is nothing to document. Run rmd-reproduce study=NAME first.")
    target = path.parent / pictures_dir
    target.mkdir(parents=True, exist_ok=True)
    for folder, summary in summaries.items():
        for name in summary["figures"]:
            shutil.copyfile(folder / f"{name}.png", target / f"{name}.png")
    with replacing(path) as file:
        file.write(reproduction_document(list(summaries.values()), pictures_dir))


def reproduction_document(summaries: Sequence[Mapping[str, Any]], pictures_dir: str) -> str:
    """The document: for every study its table and pictures, what was run on what, and what was not run."""
    numbers = pd.concat([summary["numbers"] for summary in summaries])
    versions = [summary["versions"] for summary in summaries]
    # Markdown, not HTML: nothing is escaped
    environment = Environment(loader=PackageLoader("rmd_plugin.paper"), trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("reproduction.md").render(
        title=TITLE,
        address=ADDRESS,
        measured=int((numbers["ours"].notna() & numbers["paper"].notna()).sum()),
        missing=int(numbers["ours"].isna().sum()),
        orders=[item for summary in summaries if summary["study"] in TABLES for item in rankings(summary["numbers"])],
        machines=sorted({summary["machine"] for summary in summaries}),
        packages=versions[0]["packages"],
        commits=list(dict.fromkeys(item["commit"][:12] + item["commit"][40:] for item in versions if "commit" in item)),
        minutes=sum(summary["seconds"] for summary in summaries) / 60,
        summaries=summaries,
        pictures_dir=pictures_dir,
        table=lambda numbers: to_markdown(comparison_table(numbers)),
        leads=lambda numbers: to_markdown(order_table(numbers)) if rankings(numbers) else "",
        not_run=lambda numbers: list(dict.fromkeys(numbers["line"][numbers["ours"].isna()])),
    )
    return text.rstrip() + "\n"
