"""Rows of CSV and JSONL files, each with its line."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from rmd_plugin.untrusted import read_text

from ..errors import DataFormatError
from .text import strict_json

ENDINGS = (".csv", ".jsonl")
_MAX_BYTES = 1 << 28
_SHOWN = 300  # letters of names in an error


def read_records(
    path: Path, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, list[object]]]:
    """Line and values of every row, in the order of the names; None where an optional column or key is missing.

    CSV has a line of column names and texts as values; of JSONL each line is an object. UTF-8, at most 256 MiB
    (``RMD_MAX_GIB``: more). Blank lines are passed over.

    Raises:
        DataFormatError: with the line.
    """
    if path.suffix.lower() not in ENDINGS:
        raise DataFormatError(path, f"rows are read from {' or '.join(ENDINGS)} files")
    text = read_text(path, _MAX_BYTES)
    rows = _csv_rows(path, text) if path.suffix.lower() == ".csv" else _jsonl_rows(path, text)
    for line, values in rows:
        missing = [name for name in required if name not in values]
        if missing:
            have = ", ".join(map(str, values))[:_SHOWN] or "nothing"
            raise DataFormatError(path, f"line {line}: there is no {missing[0]!r}; there is {have}")
        yield line, [values.get(name) for name in (*required, *optional)]


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    start = 1
    try:
        for cells in reader:
            line, start = start, reader.line_num + 1
            if not cells:
                continue
            if not header:
                header = [name.strip() for name in cells]
                if len(set(header)) < len(header):
                    raise DataFormatError(
                        path, f"line {line}: two columns have the same name: {', '.join(header)[:_SHOWN]}"
                    )
            elif len(cells) != len(header):
                raise DataFormatError(
                    path,
                    f"line {line} has {len(cells)} cells, {len(header)} are expected: {', '.join(header)[:_SHOWN]}",
                )
            else:
                yield line, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataFormatError(path, f"line {start} is not CSV: {error}") from None


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    # not splitlines(), which also splits where a text holds a line separator of Unicode
    for number, line in enumerate(io.StringIO(text), start=1):
        if not line.strip():
            continue
        try:
            value = strict_json(line)
        except ValueError as error:
            raise DataFormatError(path, f"line {number} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise DataFormatError(path, f"line {number} must be an object, it is {type(value).__name__}")
        yield number, value
