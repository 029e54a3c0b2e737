"""Text, JSON and tables of bounded size, read strictly."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import DataFormatError


def read_text(path: str | Path, max_bytes: int = 1 << 28) -> str:
    """UTF-8 text of a file of bounded size; a larger one is refused."""
    with open(path, "rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DataFormatError(path, f"is larger than the {max_bytes} bytes expected of such a file", max_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFormatError(path, f"is not UTF-8 text: {error.reason}", error.start) from None


def read_json(path: str | Path, max_bytes: int = 1 << 28) -> object:
    """Value of a JSON file, read strictly: no NaN, no doubled keys, bounded size and depth.

    Raises:
        DataFormatError: the file is not such JSON; the offset says where.
    """

    def no_constant(name: str) -> object:
        raise ValueError(f"the constant {name} is not JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("an object holds the same key twice")
        return found

    text = read_text(path, max_bytes)
    try:
        value: object = json.loads(text, parse_constant=no_constant, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode("utf-8", "surrogatepass"))
        raise DataFormatError(path, f"is not JSON: {error.msg}", offset) from None
    except RecursionError:
        raise DataFormatError(path, "is not JSON of this benchmark: nested too deeply") from None
    except ValueError as error:
        raise DataFormatError(path, f"is not JSON: {error}") from None
    return value


def read_table(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[int, list[bytes]]]:
    """Rows of a table of tab-separated cells under a line of column names, as (offset of the line, cells).

    Raises:
        DataFormatError: the columns are others, or a row has more or fewer cells.
    """
    offset = 0
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            cells = line.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf").split(b"\t")
            if number > 1 and len(cells) != len(columns):
                raise DataFormatError(
                    path, f"line {number} has {len(cells)} cells, {len(columns)} are expected: {line[:60]!r}", offset
                )
            if number == 1 and cells != [column.encode() for column in columns]:
                break
            if number > 1:
                yield offset, cells
            offset += len(line)
    if offset == 0:
        raise DataFormatError(path, f"the first line must be the columns {', '.join(columns)}, separated by tabs", 0)
