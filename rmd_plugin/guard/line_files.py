"""Lines and CSV that somebody else wrote, read one at a time."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from rmd_plugin.untrusted import DataFormatError, check_regular

#: letters of a line: without an end of line nothing else would end the reading
_LONGEST_LINE = 1 << 24


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file, with their ends."""
    check_regular(path)
    # bytes that are no UTF-8 come through: they spoil their row alone
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        number = 1
        while line := file.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise DataFormatError(path, f"line {number} is longer than {_LONGEST_LINE} letters")
            yield line
            number += 1


def csv_columns(path: str, wanted: Sequence[str]) -> list[int]:
    """Where the wanted columns stand. DataFormatError if one is missing."""
    try:
        header = next(csv.reader(read_lines(path), strict=True), [])
    except csv.Error as error:
        raise DataFormatError(path, f"line 1 is not CSV: {error}") from None
    missing = [name for name in wanted if name not in header]
    if missing:
        shown = ", ".join(map(repr, header[:20])) or "none"
        raise DataFormatError(path, f"has no column {missing[0]!r}; its first line names {shown}")
    return [header.index(name) for name in wanted]


def csv_rows(path: str, wanted: Sequence[str]) -> Iterator[tuple[int, list[str | None]]]:
    """Number of the last line and the wanted cells of each row; None where a row ends early."""
    places = csv_columns(path, wanted)
    reader = csv.reader(read_lines(path), strict=True)
    next(reader)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataFormatError(path, f"line {reader.line_num} is not CSV: {error}") from None
        if cells is None:
            return
        if cells:
            yield reader.line_num, [cells[place] if place < len(cells) else None for place in places]
