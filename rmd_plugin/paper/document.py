"""The paper's numbers beside ours: as a table, and all studies together as a document."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from rmd_plugin.atomic import replacing
from rmd_plugin.paper.order import order, rankings, smallest_lead
from rmd_plugin.paper.published import ADDRESS, TABLES, TITLE
from rmd_plugin.paper.result import PaperNumber
from rmd_plugin.paper.studies import SUMMARY
from rmd_plugin.report.table import Cell, Column, Table, to_markdown


@dataclass
class StudySummary:
    """One finished study on disk: what the document is made of."""

    study: str
    about: str  #: which part of the paper it belongs to
    scale: str
    comparisons: list[PaperNumber] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)  #: file names of its pictures, without suffix -> caption
    seconds: float = math.nan  #: how long it took, runs that were found ready not counted
    commands: dict[str, str] = field(default_factory=dict)  #: how each line is run at the paper's scale
    command: str = ""  #: how this was made
    versions: dict[str, Any] = field(default_factory=dict)
    machine: str = ""

    @property
    def ready(self) -> dict[str, str]:
        """Lines that were not run here, with the command that runs each."""
        missing = dict.fromkeys(item.what for item in self.comparisons if not item.run)
        return {what: self.commands[what] for what in missing if what in self.commands}

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write it as JSON; NaN, which JSON does not have, as null."""
        content = asdict(self)
        content["comparisons"] = [
            {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in item.items()}
            for item in content["comparisons"]
        ]
        with replacing(Path(folder) / SUMMARY) as file:
            json.dump(content, file, indent=2)
            file.write("\n")

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> StudySummary:
        """Read what :meth:`write` wrote, and refuse anything else."""
        path = Path(folder) / SUMMARY
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            items: list[dict[str, Any]] = [
                {key: math.nan if value is None else value for key, value in item.items()}
                for item in content.pop("comparisons")
            ]
            return cls(comparisons=[PaperNumber(**item) for item in items], **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} does not hold the summary of a study: {error}") from error


def comparison_table(comparisons: Sequence[PaperNumber], title: str = "", *, remarks_below: bool = False) -> Table:
    """Paper, ours and the difference; then what we ran and why it differs.

    With ``remarks_below`` the latter goes below the table, where a terminal is too narrow for another column.
    """
    columns = [Column("Setting of the paper", "left"), Column("Number", "left")]
    columns += [Column("paper"), Column("ours"), Column("difference")]
    rows, remarks = [], []
    for item in comparisons:
        numbers = (_number(item.paper, item.metric), _ours(item), _number(item.difference, item.metric, sign="+"))
        rows.append([Cell(text) for text in (item.what, item.metric, *numbers)])
        remarks.append((item.what, _remark(item)))
    if remarks_below:
        notes = [f"{what}: {remark}." for what, remark in dict.fromkeys(remarks) if remark]
        return Table(columns, rows, title=title, notes=notes)
    for row, remark, before in zip(rows, remarks, [None, *remarks], strict=False):
        row.append(Cell("" if remark == before else remark[1]))  # what stands in the line above is not said again
    return Table([*columns, Column("What we ran, and why it differs", "left")], rows, title=title)


def order_table(comparisons: Sequence[PaperNumber]) -> Table | None:
    """Who leads whom in the paper and in ours, and whether that is the same; None if the paper compares nothing."""
    columns = [Column(title, "left") for title in ("Setting of the paper", "order in the paper", "ours", "same order")]
    columns += [Column("smallest lead, paper"), Column("ours")]
    rows = []
    for item in rankings(comparisons):
        texts = item.what, order(item.paper), order(item.ours) if item.ours else "not run"
        same = Cell({True: "yes", False: "no", None: ""}[item.same], bold=item.same is False)
        leads = [_number(smallest_lead(values), "") for values in (item.paper, item.ours)]
        rows.append([*map(Cell, texts), same, *map(Cell, leads)])
    return Table(columns, rows) if rows else None


def reproduction_document(summaries: Sequence[StudySummary], pictures: Mapping[str, str]) -> str:
    """The document: for every study its table and pictures, what was run on what, and what was not run."""
    numbers = [item for summary in summaries for item in summary.comparisons]
    # Markdown, not HTML: nothing is escaped
    environment = Environment(loader=PackageLoader("rmd_plugin.paper"), trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("reproduction.md").render(
        title=TITLE,
        address=ADDRESS,
        measured=sum(item.run and not math.isnan(item.paper) for item in numbers),
        missing=sum(not item.run for item in numbers),
        orders=[item for summary in summaries if summary.study in TABLES for item in rankings(summary.comparisons)],
        machines=_machines(summaries),
        summaries=summaries,
        pictures=pictures,
        table=lambda summary: to_markdown(comparison_table(summary.comparisons)),
        leads=lambda summary: to_markdown(found) if (found := order_table(summary.comparisons)) else "",
    )
    return text.rstrip() + "\n"


def write_document(
    path: str | os.PathLike[str], folders: Sequence[Path], *, pictures_dir: str = "reproduction"
) -> Path:
    """Write the document, with the pictures in a folder beside it."""
    path = Path(path)
    found = [(folder, StudySummary.read(folder)) for folder in folders if (folder / SUMMARY).is_file()]
    if not found:
        raise ValueError("no study was run yet, so there is nothing to document. Run rmd-reproduce study=NAME first.")
    target = path.parent / pictures_dir
    target.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for folder, summary in found:
        for name in summary.figures:
            source = folder / f"{name}.png"
            if source.is_file():
                shutil.copyfile(source, target / source.name)
                pictures[name] = f"{pictures_dir}/{source.name}"
    with replacing(path) as file:
        file.write(reproduction_document([summary for _, summary in found], pictures))
    return path


def _machines(summaries: Sequence[StudySummary]) -> str:
    machines = dict.fromkeys(summary.machine for summary in summaries if summary.machine)
    commits = dict.fromkeys(str(summary.versions.get("commit", "")) for summary in summaries)
    packages = summaries[0].versions.get("packages", {}) if summaries else {}
    shown = [f"{name} {packages[name]}" for name in ("torch", "pytorch-ood", "pytorch-lightning") if name in packages]
    short = [commit[:12] + ("+changes" if commit.endswith("+changes") else "") for commit in commits if commit]
    text = f"Run on {'; '.join(machines)}" if machines else "Run"
    text += f" with {', '.join(shown)}" if shown else ""
    text += f", commit {', '.join(short)}" if short else ""
    total = sum(summary.seconds for summary in summaries if not math.isnan(summary.seconds))
    return f"{text}; {total / 60:.0f} minutes in all, without trainings that were finished before."


def _remark(item: PaperNumber) -> str:
    if not item.run:
        return f"not run: {item.reason}" if item.reason else "not run"
    return ". ".join(part for part in (item.setting, item.reason) if part)


def _number(value: float, metric: str, *, sign: str = "") -> str:
    if math.isnan(value):
        return ""
    counts = metric.startswith(("leading directions", "d at"))
    return f"{value:{sign}.{0 if counts else 2}f}"


def _ours(item: PaperNumber) -> str:
    if not item.run:
        return "not run"
    text = _number(item.ours, item.metric)
    return text if math.isnan(item.spread) else f"{text} ± {item.spread:.2f}"
