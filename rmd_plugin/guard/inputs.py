"""What is to be scored: pictures, texts or features from folders, lists and tables that somebody else made, one by one.

Nothing is held in memory but the names of one folder and some rows of a table. What cannot be read is an item with its
reason; what a user typed wrongly, and a path that leaves the folder of its list, is an error before anything is scored.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from rmd_plugin.benchmarks.readers.arrays import read_npy
from rmd_plugin.guard.line_files import csv_columns, csv_rows, read_lines
from rmd_plugin.guard.parquet_files import parquet_count, parquet_files, parquet_values
from rmd_plugin.pictures import is_picture
from rmd_plugin.untrusted import DataFormatError, check_regular

Kind = Literal["images", "texts", "features"]

#: what a guard of each kind takes, for errors
_TAKES = {
    "images": "a folder of pictures, pictures, a .txt list of paths or a CSV file with a column 'path'",
    "texts": "a CSV, JSONL or Parquet file, or a folder of Parquet files, with a column of texts",
    "features": "a Parquet file, a folder of Parquet files with a column of lists of numbers, or an .npy file",
}
#: option that names a column -> kind that has it, usual name
_COLUMNS = {"text": ("texts", "text"), "features": ("features", "embedding")}
#: names that stand for all those that were left out
_EXAMPLES = 3


class Item(NamedTuple):
    """One thing to score: its name in the table, itself (a path, a text, a vector), or why there is none."""

    name: str
    raw: Any
    reason: str | None = None


class Inputs:
    """The items of some places, in a fixed order; may be walked through any number of times.

    Args:
        places: folders and files, as typed.
        kind: what the guard judges.
        text: column of the texts in a table, by default ``text``.
        features: column of the features in Parquet files, by default ``embedding``.
        id: column that names the rows of a table of texts or features; by default they are ``FILE:ROW``, from 0 on.

    Raises:
        ValueError: if a place is not what a guard of this kind takes, or an option does not belong to the kind.
        OSError: if there is no such place.
    """

    def __init__(
        self,
        places: Sequence[str],
        kind: Kind,
        *,
        text: str | None = None,
        features: str | None = None,
        id: str | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"the guard judges {kind!r}; {', '.join(get_args(Kind))} are known.")
        for name, given in (("text", text), ("features", features)):
            if given is not None and _COLUMNS[name][0] != kind:
                raise ValueError(f"{name}={given} is for a guard of {_COLUMNS[name][0]}; this one judges {kind}.")
        if id is not None and kind == "images":
            raise ValueError(f"id={id} is for tables of texts or features; pictures are named by their paths.")
        column = (text or features) or next((usual for of, usual in _COLUMNS.values() if of == kind), "path")
        self.kind = kind
        #: what decides on the items, to compare with another run's
        self.settings: dict[str, Any] = {
            "inputs": [os.path.normpath(place) for place in places],
            "folder": None if all(map(os.path.isabs, places)) else os.getcwd(),
            "column": column,
            "id": id,
        }
        self._sources = [_open(os.path.normpath(place), kind, column, id) for place in places]

    def __iter__(self) -> Iterator[Item]:
        for source in self._sources:
            for item in source:
                # a table in UTF-8 has no place for the bytes of a name that are none
                yield item._replace(name=item.name.encode("utf-8", "backslashreplace").decode())

    def count(self) -> int:
        """How many items there are. Reads lists and CSV files once, and refuses what leaves their folder."""
        return sum(source.count() for source in self._sources)

    def left_out(self) -> list[str]:
        """What was left out in the last walk, a sentence for each kind of thing."""
        return [sentence for source in self._sources for sentence in source.left_out()]

    def find(self, names: Collection[str]) -> dict[str, Any]:
        """The raw items of some names, as far as there are any, in one walk; not of a name that two items share."""
        found: dict[str, Any] = {}
        doubtful = set()
        for item in self if names else ():
            if item.name in names and item.reason is None:
                if item.name in found and self.kind != "images":
                    doubtful.add(item.name)
                found[item.name] = item.raw
        return {name: raw for name, raw in found.items() if name not in doubtful}


class _Source(ABC):
    """The items of one place."""

    @abstractmethod
    def __iter__(self) -> Iterator[Item]: ...

    def count(self) -> int:
        return sum(1 for _ in self)

    def left_out(self) -> list[str]:
        return []


def _open(place: str, kind: Kind, column: str, id: str | None) -> _Source:
    if not os.path.lexists(place):
        raise FileNotFoundError(f"there is no {place}.")
    ending = os.path.splitext(place)[1].lower()
    if os.path.isdir(place):
        return _PictureFolder(place) if kind == "images" else _Parquet(place, kind, column, id)
    if kind == "images" and is_picture(place):
        return _OnePicture(place)
    check_regular(place)
    if kind == "images" and ending == ".txt":
        return _PathList(place)
    if kind == "images" and ending == ".csv":
        return _PathTable(place)
    if kind == "texts" and ending == ".csv":
        return _TextTable(place, column, id)
    if kind == "texts" and ending == ".jsonl":
        return _TextLines(place, column, id)
    if kind != "images" and ending == ".parquet":
        return _Parquet(place, kind, column, id)
    if kind == "features" and ending == ".npy":
        if id is not None:
            raise ValueError(f"{place}: an .npy file has no column id={id}; its rows are named FILE:ROW.")
        return _Rows(place)
    raise ValueError(f"{place} cannot be scored: the guard judges {kind} and takes {_TAKES[kind]}.")


# -- pictures ---------------------------------------------------------------------------------------------------------


class _OnePicture(_Source):
    def __init__(self, place: str) -> None:
        self._place = place

    def __iter__(self) -> Iterator[Item]:
        yield Item(self._place, self._place)


class _PictureFolder(_Source):
    """Pictures of a folder and all below it, by their endings, in the order of their names."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._skipped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def __iter__(self) -> Iterator[Item]:
        self._skipped, self._examples = Counter(), {}
        for path, what in _walk(self._place):
            if what is None:
                yield Item(path, path)
            elif isinstance(what, OSError):
                yield Item(path, None, f"the folder cannot be read: {what.strerror or what}")
            else:
                self._skipped[what] += 1
                if self._skipped[what] <= _EXAMPLES:
                    self._examples.setdefault(what, []).append(os.path.relpath(path, self._place))

    def left_out(self) -> list[str]:
        return [
            f"{self._place}: {number} {what}: {', '.join(self._examples[what])}"
            + (", ..." if number > _EXAMPLES else "")
            for what, number in self._skipped.items()
        ]


def _walk(top: str) -> Iterator[tuple[str, OSError | str | None]]:
    """Everything below a folder, by name: (path, None) for a picture, else why it is none or cannot be read."""
    root = os.path.realpath(top)
    stack: list[Iterator[os.DirEntry[str] | OSError]] = [
        iter(_entries(top))
    ]  # not by recursion: folders nest deeper than Python calls
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
        elif isinstance(entry, OSError):
            yield entry.filename, entry
        elif entry.is_symlink() and not _is_below(os.path.realpath(entry.path), root):
            yield entry.path, "links lead out of the folder and are not followed"
        elif entry.is_dir(follow_symlinks=False):
            stack.append(iter(_entries(entry.path)))
        elif entry.is_symlink() and os.path.isdir(entry.path):
            pass  # what it leads to is met under its own name, and a loop has no end
        elif is_picture(entry.name):
            yield entry.path, None
        else:
            yield entry.path, "files are no pictures by their ending"


def _entries(folder: str) -> Sequence[os.DirEntry[str] | OSError]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        return [error]


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


class _PathList(_Source):
    """Paths, one on each line, relative to the folder of the list."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __iter__(self) -> Iterator[Item]:
        for number, line in enumerate(read_lines(self._place), start=1):
            if name := line.rstrip("\r\n"):
                path = _inside(self._place, number, name)
                yield Item(path, path)


class _PathTable(_Source):
    """The same from the column ``path`` of a CSV file."""

    def __init__(self, place: str) -> None:
        self._place = place
        csv_columns(place, ["path"])

    def __iter__(self) -> Iterator[Item]:
        for row, (line, (name,)) in enumerate(csv_rows(self._place, ["path"])):
            if name:
                path = _inside(self._place, line, name)
                yield Item(path, path)
            else:
                yield Item(f"{self._place}:{row}", None, "has no path")


def _inside(table: str, line: int, name: str) -> str:
    """The path of a line of a list, which must not leave the folder of the list, by no link either."""
    folder = os.path.dirname(table)
    if "\0" in name:
        raise DataFormatError(table, f"line {line} is no path: {name[:60]!r}")
    path = os.path.join(folder, name)
    absolute = os.path.isabs(name) or os.path.splitdrive(name)[0]
    if absolute or os.path.normpath(name).split(os.sep)[0] == os.pardir:
        raise DataFormatError(table, f"line {line}: {name[:200]!r} is refused: paths are relative to the folder of the "
                              "list and stay below it")  # fmt: skip
    if not _is_below(os.path.realpath(path), os.path.realpath(folder or os.curdir)):
        raise DataFormatError(
            table, f"line {line}: {name[:200]!r} is refused: a link leads out of the folder of the list"
        )
    return path


# -- texts and features -----------------------------------------------------------------------------------------------


def _text_item(name: str, text: object) -> Item:
    if text is None or text == "":
        return Item(name, None, "has no text")
    if not isinstance(text, str):
        return Item(name, None, f"holds a {type(text).__name__} in place of a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Item(name, None, "the text is not in UTF-8")
    return Item(name, text)


class _TextTable(_Source):
    """A column of texts of a CSV file."""

    def __init__(self, place: str, column: str, id: str | None) -> None:
        self._place, self._columns = place, [column] if id is None else [column, id]
        csv_columns(place, self._columns)

    def __iter__(self) -> Iterator[Item]:
        for row, (_, (text, *id)) in enumerate(csv_rows(self._place, self._columns)):
            yield _text_item(next(filter(None, id), f"{self._place}:{row}"), text)


class _TextLines(_Source):
    """A JSON object on each line."""

    def __init__(self, place: str, column: str, id: str | None) -> None:
        self._place, self._column, self._id = place, column, id

    def __iter__(self) -> Iterator[Item]:
        row = -1
        for line in read_lines(self._place):
            if line.isspace():
                continue
            row += 1
            name = f"{self._place}:{row}"
            try:
                found = json.loads(line)
            except RecursionError:
                yield Item(name, None, "is not JSON of ours: nested too deeply")
                continue
            except ValueError as error:
                yield Item(name, None, f"is not JSON: {error}")
                continue
            if not isinstance(found, dict) or self._column not in found:
                keys = f"the keys {', '.join(map(str, list(found)[:10]))}" if isinstance(found, dict) else "no object"
                yield Item(name, None, f"has no {self._column!r}: it holds {keys}. Name the texts by text=KEY")
                continue
            given = None if self._id is None else found.get(self._id)
            yield _text_item(name if given is None else str(given), found[self._column])


class _Parquet(_Source):
    """A column of texts or of lists of numbers of a Parquet file, or of all those of a folder."""

    def __init__(self, place: str, kind: Kind, column: str, id: str | None) -> None:
        self._place, self._kind, self._column, self._id = place, kind, column, id
        self._alone = not os.path.isdir(place)
        if not self._alone and next(parquet_files(place), None) is None:
            raise ValueError(f"{place} holds no .parquet file: the guard judges {kind} and takes {_TAKES[kind]}.")

    def _files(self) -> Iterator[str]:
        return iter([self._place]) if self._alone else parquet_files(self._place)

    def count(self) -> int:
        total = 0
        for path in self._files():
            try:
                total += parquet_count(path, self._column, self._id, texts=self._kind == "texts")
            except DataFormatError:
                if self._alone:  # of a folder it is one row with its reason
                    raise
                total += 1
        return total

    def __iter__(self) -> Iterator[Item]:
        for path in self._files():
            try:
                values = parquet_values(path, self._column, self._id, texts=self._kind == "texts")
                for row, (value, id) in enumerate(values):
                    name = f"{path}:{row}" if id is None else str(id)
                    if self._kind == "texts":
                        yield _text_item(name, value)
                    else:
                        yield Item(name, value, "holds null in place of numbers" if value is None else None)
            except DataFormatError as error:
                yield Item(path, None, error.reason)


class _Rows(_Source):
    """Rows of an .npy file, which is mapped, not read."""

    def __init__(self, place: str) -> None:
        self._place, self._rows = place, read_npy(place)
        if self._rows.ndim != 2 or self._rows.dtype.kind not in "fiu":
            found = f"{self._rows.dtype} of shape {self._rows.shape}"
            raise DataFormatError(place, f"must hold real numbers of shape (N, D), got {found}")

    def count(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Item]:
        for row in range(len(self._rows)):
            yield Item(f"{self._place}:{row}", np.array(self._rows[row]))  # a copy: the map does not go to workers
