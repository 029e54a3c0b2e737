"""A table without a format, and the formats: terminal, Markdown, LaTeX, HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rmd_plugin.report.document import render
from rmd_plugin.report.names import label as detector_label
from rmd_plugin.untrusted import one_line

if TYPE_CHECKING:
    from rich.console import Group


def _make_plain(thing: object, *names: str) -> None:
    """Whatever a name in the results holds, a table shows it on one line and without control characters."""
    for name in names:
        object.__setattr__(thing, name, one_line(getattr(thing, name)))


@dataclass(frozen=True)
class Cell:
    """Text of one cell, bold if it is the best of its column, and small print beside it, for example an interval."""

    text: str
    bold: bool = False
    detail: str = ""

    def __post_init__(self) -> None:
        _make_plain(self, "text", "detail")


#: where there is no number
MISSING = Cell("–")


@dataclass(frozen=True)
class Column:
    """Head of a column, with small print beside its title, for example a unit."""

    title: str
    align: Literal["left", "right"] = "right"
    detail: str = ""
    #: break its cells anywhere where a page is narrow: for paths, which may be long and hold no space
    wrap: bool = False
    #: what the title means, shown where a page can
    hint: str = ""

    def __post_init__(self) -> None:
        _make_plain(self, "title", "detail")


@dataclass(frozen=True)
class Table:
    """A table without a format: heads, as many cells in each row, a title on one line, and notes, one sentence each."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        _make_plain(self, "title")
        object.__setattr__(self, "notes", [one_line(note) for note in self.notes])
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"row {number} has {len(row)} cells, the table has {len(self.columns)} columns.")


class DetectorTable:
    """A table that grows column by column, its lines being detectors."""

    def __init__(self, detectors: Sequence[str]) -> None:
        self._columns = [Column("Detector", "left")]
        self._cells: list[Sequence[Cell]] = [[Cell(detector_label(name)) for name in detectors]]

    def add(self, column: Column, cells: Sequence[Cell]) -> None:
        """Add a column with a cell for each detector."""
        self._columns.append(column)
        self._cells.append(cells)

    def finish(self, title: str, notes: Sequence[str] = ()) -> Table:
        """The table so far."""
        return Table(self._columns, list(zip(*self._cells, strict=True)), title=title, notes=notes)


def number_cells(
    values: Sequence[float],
    show: Callable[[float], str],
    details: Sequence[str] | None = None,
    *,
    best: Literal["highest", "lowest"] | None = None,
) -> list[Cell]:
    """Numbers as cells: NaN is a dash, and what reads like the best is bold, unless it stands alone."""
    numbers = [value for value in values if not math.isnan(value)]
    top = show(min(numbers) if best == "lowest" else max(numbers)) if best and len(numbers) > 1 else None
    return [
        MISSING if math.isnan(value) else Cell(show(value), bold=show(value) == top, detail=detail)
        for value, detail in zip(values, details or [""] * len(values), strict=True)
    ]


def markdown_text(item: str) -> str:
    """A text whose letters mean nothing to Markdown."""
    # an underscore inside a word is harmless, and most names have one; ]( makes a link or loads a picture
    return re.sub(r"([\\|*`<>]|(?<!\w)_|_(?!\w)|\](?=[(\[:]))", r"\\\1", item)


def to_markdown(table: Table) -> str:
    """The table in Markdown (GitHub's), the best numbers in bold."""
    text = markdown_text

    def cell(item: Cell) -> str:
        main = f"**{text(item.text)}**" if item.bold and item.text else text(item.text)
        return f"{main} {text(item.detail)}".strip()

    lines = [f"**{text(table.title)}**", ""] if table.title else []
    heads = [f"{text(column.title)} {text(column.detail)}".strip() for column in table.columns]
    lines.append(f"| {' | '.join(heads)} |")
    lines.append(f"|{'|'.join('---' if column.align == 'left' else '---:' for column in table.columns)}|")
    lines += [f"| {' | '.join(map(cell, row))} |" for row in table.rows]
    for note in table.notes:
        lines += ["", text(note)]
    return "\n".join(lines) + "\n"


_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "±": r"$\pm$", "–": "--", "·": r"$\cdot$", "α": r"$\alpha$"}
)


def to_latex(table: Table, *, label: str = "") -> str:
    r"""The table in LaTeX: an environment ``table``, with ``label`` for ``\ref``. It needs ``booktabs`` only."""

    def text(item: str) -> str:
        return item.translate(_LATEX)

    def cell(item: Cell) -> str:
        main = rf"\textbf{{{text(item.text)}}}" if item.bold and item.text else text(item.text)
        return rf"{main} {{\scriptsize {text(item.detail)}}}" if item.detail else main

    lines = [r"\begin{table}", r"\centering"]
    if table.title:
        lines.append(rf"\caption{{{text(table.title)}}}")
    if label:
        lines.append(rf"\label{{{label}}}")
    alignment = "".join("l" if column.align == "left" else "r" for column in table.columns)
    lines += [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    lines.append(" & ".join(cell(Cell(column.title, detail=column.detail)) for column in table.columns) + r" \\")
    lines.append(r"\midrule")
    # {}: a row that begins with [ would be taken for the length that may follow \\
    lines += ["{}" + " & ".join(map(cell, row)) + r" \\" for row in table.rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {text(note)}}}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def to_html(table: Table) -> str:
    """The table as an HTML fragment without style; its classes for a style sheet stand in ``templates/table.html``."""
    return render("table.html", table=table)


def to_terminal(table: Table, *, width: int | None = None) -> Group:
    """The table for ``rich.print``: the best numbers in bold, the small print dim, the notes below.

    Where it is wider than ``width`` columns, by default those of this terminal, the small print goes below the numbers;
    where that is still too wide, the columns come in several tables below each other, each with the first column.
    """
    from rich import box
    from rich.console import Console, Group
    from rich.table import Table as RichTable
    from rich.text import Text

    def draw(between: str, places: Sequence[int]) -> RichTable:
        def cell(item: Cell) -> Text:
            return with_detail(Text(item.text, style="bold" if item.bold else ""), item.detail)

        def with_detail(text: Text, detail: str) -> Text:
            return text.append(f"{between}{detail}", style="dim") if detail else text

        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in (table.columns[place] for place in places):
            head = with_detail(Text(column.title.replace(" ", between), style="bold"), column.detail)
            # wider than the terminal rather than without its last digits
            drawn.add_column(head, justify=column.align, no_wrap=True, min_width=1)
        for row in table.rows:
            drawn.add_row(*(cell(row[place]) for place in places))
        return drawn

    console = Console(width=width)

    def fits(drawn: RichTable) -> bool:
        return console.measure(drawn, options=console.options.update(max_width=10_000)).maximum <= console.width

    everything = range(len(table.columns))
    drawn = [draw(" ", everything)]
    if not fits(drawn[0]):
        parts: list[list[int]] = [[0]]
        for place in everything[1:]:
            if len(parts[-1]) == 1 or fits(draw("\n", [*parts[-1], place])):
                parts[-1].append(place)
            else:
                parts.append([0, place])
        drawn = [draw("\n", part) for part in parts]
    # not the table's own title, which would be as narrow as the table
    title = [Text(table.title, style="bold")] if table.title else []
    return Group(*title, *drawn, *(Text(note, style="dim") for note in table.notes))
