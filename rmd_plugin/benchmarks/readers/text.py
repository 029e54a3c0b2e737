"""JSON and tables, read strictly."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rmd_plugin.untrusted import read_bytes

from ..errors import DataFormatError

# of a table; a read has 250 letters
_LONGEST_LINE = 1 << 16


def strict_json(text: str) -> object:
    """Value of a JSON text: no NaN, no doubled keys, bounded depth; else a ValueError."""

    def no_constant(name: str) -> object:
        raise ValueError(f"the constant {name} is not JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("an object holds the same key twice")
        return found

    try:
        value: object = json.loads(text, parse_constant=no_constant, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def read_json(path: str | Path, max_bytes: int = 1 << 25) -> object:
    """Value of a JSON file by :func:`strict_json`, of bounded size, or an error with the offset."""
    content = read_bytes(path, max_bytes)
    try:
        text = content.decode("utf-8-sig")
        return strict_json(text)
    except UnicodeDecodeError as error:
        raise DataFormatError(path, f"is not UTF-8 text: {error.reason}", error.start) from None
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode("utf-8", "surrogatepass"))
        raise DataFormatError(path, f"is not JSON: {error.msg}", offset) from None
    except ValueError as error:
        raise DataFormatError(path, f"is not JSON: {error}") from None


def read_table(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[int, list[bytes]]]:
    """Rows of a table of tab-separated cells under a line of column names, as (offset of the line, cells)."""
    with open(path, "rb") as stream:
        header = stream.readline(_LONGEST_LINE)
        if header.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf") != "\t".join(columns).encode():
            raise DataFormatError(path, f"the first line must be the columns {', '.join(columns)}, tab-separated", 0)
        offset = len(header)
        for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE), b""), start=2):
            cells = line.rstrip(b"\r\n").split(b"\t")
            if len(cells) != len(columns):
                raise DataFormatError(
                    path, f"line {number} has {len(cells)} cells, {len(columns)} are expected: {line[:60]!r}", offset
                )
            yield offset, cells
            offset += len(line)
