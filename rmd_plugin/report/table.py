"""A table without a format, and the formats: terminal, Markdown, LaTeX, HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rmd_plugin.report.document import render

if TYPE_CHECKING:
    from rich.console import Group

Align = Literal["left", "right"]


@dataclass(frozen=True)
class Cell:
    """Text of one cell.

    Attributes:
        text: what it says.
        bold: whether it is the best of its column.
        detail: small print beside it, for example an interval.
    """

    text: str
    bold: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Column:
    """Head of a column.

    Attributes:
        title: its name.
        align: side on which its cells stand.
        detail: small print beside the name, for example a unit.
        wrap: break its cells anywhere where a page is narrow: for paths, which may be long and hold no space.
    """

    title: str
    align: Align = "right"
    detail: str = ""
    wrap: bool = False


@dataclass(frozen=True)
class Table:
    """A table without a format.

    Attributes:
        columns: heads of the columns.
        rows: cells, as many in each row as there are columns.
        title: what it shows, on one line.
        notes: remarks below it, one sentence each.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"row {number} has {len(row)} cells, the table has {len(self.columns)} columns.")


def to_markdown(table: Table) -> str:
    """The table in Markdown (GitHub's), the best numbers in bold."""

    def text(item: str) -> str:
        # an underscore inside a word is harmless, and most names have one
        return re.sub(r"([\\|*`<>]|(?<!\w)_|_(?!\w))", r"\\\1", item)

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


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
    "·": r"$\cdot$",
    "α": r"$\alpha$",
}


def to_latex(table: Table, *, label: str = "") -> str:
    r"""The table in LaTeX: an environment ``table`` that needs the package ``booktabs`` only.

    Args:
        table: the table.
        label: for ``\ref``, for example ``tab:clinc``.
    """

    def text(item: str) -> str:
        return "".join(_LATEX.get(letter, letter) for letter in item)

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
    """The table as an HTML fragment without style: ``<figure class="table">`` with caption, table and notes.

    Classes for a style sheet: ``best`` (bold cells), ``detail`` (small print), ``left`` (names), ``wrap`` (long
    paths), ``notes``, ``scroll`` (what a narrow screen scrolls).
    """
    return render("table.html", table=table)


def to_terminal(table: Table, *, width: int | None = None) -> Group:
    """The table for ``rich.print``: the best numbers in bold, the small print dim, the notes below.

    Args:
        table: the table.
        width: columns of the terminal, by default of this one; where the table is wider, the small print goes below
            the numbers.
    """
    from rich import box
    from rich.console import Console, Group
    from rich.table import Table as RichTable
    from rich.text import Text

    def draw(between: str) -> RichTable:
        def cell(item: Cell, style: str = "") -> Text:
            text = Text(item.text, style="bold" if item.bold else style)
            return text.append(f"{between}{item.detail}", style="dim") if item.detail else text

        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in table.columns:
            head = Cell(column.title if between == " " else column.title.replace(" ", "\n"), detail=column.detail)
            # wider than the terminal rather than without its last columns
            drawn.add_column(cell(head, "bold"), justify=column.align, no_wrap=True, min_width=1)
        for row in table.rows:
            drawn.add_row(*map(cell, row))
        return drawn

    console = Console(width=width)
    wide = draw(" ")
    fits = console.measure(wide, options=console.options.update(max_width=10_000)).maximum <= console.width
    # not the table's own title, which would be as narrow as the table
    title = [Text(table.title, style="bold")] if table.title else []
    return Group(*title, wide if fits else draw("\n"), *(Text(note, style="dim") for note in table.notes))
