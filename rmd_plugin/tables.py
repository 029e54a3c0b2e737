"""Tables of features on disk, streamed in batches of constant memory or mapped, never loaded whole.

==================  ===================================================================================================
file                features, labels and splits are
==================  ===================================================================================================
.parquet, a folder  columns; features are a column of lists, or many columns of floats; a folder is one table
.arrow, .feather    the same (IPC, as a file or as a stream)
.npz, .safetensors  arrays by those names, features of shape (N, D)
.npy                the features; ``a.npy`` has its labels in ``a.label.npy``, if that is what they are called
==================  ===================================================================================================

Nothing here unpickles a Python object. Numbers that are missing, NaN or infinite, lists of different lengths and other
types are refused with file, row and column.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open

from rmd_plugin.arrow_columns import (
    ARROW,
    PARQUET,
    Columns,
    Rows,
    as_objects,
    choose_columns,
    find_lists,
    read_rows,
    read_schema,
)
from rmd_plugin.npz import brief, check_header
from rmd_plugin.untrusted import DataFormatError, check_regular, check_zip

_ARRAYS = (".npy", ".npz", ".safetensors")
ENDINGS = (*PARQUET, *ARROW, *_ARRAYS)
#: of a packed array after unpacking
_MAX_BYTES = 1 << 42
#: of the header of a safetensors file, as its own reader has it
_MAX_HEADER = 100_000_000
_SAFETENSORS = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U8": "u1",
}


class Batch(NamedTuple):
    """Rows of a table, in order."""

    features: np.ndarray  #: shape (B, D), float32, finite
    labels: np.ndarray | None  #: shape (B,): int64, or objects (whole numbers or texts, None where there is none)
    splits: np.ndarray | None  #: shape (B,): texts as objects
    path: Path  #: the file that they are from
    start: int  #: which row of it the first one is


class Piece(NamedTuple):
    """Rows of features that lie in a file as plain numbers, one after the other."""

    path: str
    offset: int  #: in bytes
    rows: int


@dataclass(frozen=True)
class Layout:
    """Where the features of a table lie, as numpy can map them."""

    dtype: str  #: of numpy
    width: int  #: D
    pieces: Sequence[Piece]


class Table:
    """One table of features, in a file or a folder of Parquet files.

    Args:
        path: the file or folder.
        features: name of the features; None takes the only column of lists, or else all columns of floats.
        labels: name of the labels; a table need not have them.
        split: name of the column that says to which split a row belongs; a table need not have it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/a.npz", embedding=np.eye(3), label=np.array([0, 1, 1]))
        ...     [(batch.features.shape, batch.labels.tolist()) for batch in Table(f"{folder}/a.npz").batches(2)]
        [((2, 3), [0, 1]), ((1, 3), [1])]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        features: str | None = "embedding",
        labels: str | None = "label",
        split: str | None = "split",
    ) -> None:
        self.path = Path(path)
        self.features, self.labels, self.split = features, labels, split
        if self.path.is_dir():
            self.files = sorted(file for file in self.path.rglob("*.parquet") if not file.name.startswith((".", "_")))
            if not self.files:
                raise DataFormatError(self.path, "is a folder without Parquet files")
        else:
            self.files = [self.path]
        for file in self.files:
            check_regular(file)
        if not self.path.is_dir() and self._ending not in ENDINGS:
            raise DataFormatError(self.path, f"tables of features are read from {', '.join(ENDINGS)} files")

    @property
    def _ending(self) -> str:
        return self.files[0].suffix.lower()

    def batches(self, rows: int = 8192) -> Iterator[Batch]:
        """The whole table in batches of at most so many rows, in order. All have the width of the first.

        Raises:
            DataFormatError: with file, row and column.
        """
        width = None
        for file in self.files:
            start = 0
            with naming(file):
                for found in self._rows(file, rows):
                    if width not in (None, found.features.shape[1]):
                        raise DataFormatError(
                            file, f"row {start} has {found.features.shape[1]} features, the rows before have {width}"
                        )
                    width = found.features.shape[1]
                    features = check_finite(file, start, found.features, self._titles)
                    yield Batch(features, found.labels, found.splits, file, start)
                    start += len(features)

    def layout(self) -> Layout | None:
        """Where the features lie, if they are plain numbers in one file; None if they have to be decoded."""
        file = self.files[0]
        with naming(file):
            if self._ending in _ARRAYS:
                return _find_arrays(file, self)[0].layout()
            found = find_lists(file, self._columns) if self._ending in ARROW else None
        if found is None or not found[1]:
            return None
        width = next(self.batches(1)).features.shape[1]
        pieces = [Piece(os.fspath(file), offset, numbers // width) for offset, numbers in found[1]]
        return Layout(found[0].str, width, pieces)

    @cached_property
    def _columns(self) -> Columns:
        """The columns to read, by the schema of the first file."""
        file = self.files[0]
        return choose_columns(file, read_schema(file), self.features, self.labels, self.split)

    @property
    def _titles(self) -> list[str]:
        return [] if self._ending in _ARRAYS else self._columns.titles

    def _rows(self, file: Path, rows: int) -> Iterator[Rows]:
        if self._ending not in _ARRAYS:
            return read_rows(file, self._columns, rows)
        return _array_rows(file, *_find_arrays(file, self), rows)


@contextlib.contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Errors of the libraries about the content of a file as ours, with its name."""
    try:
        yield
    except DataFormatError:
        raise
    except Exception as error:  # the libraries raise nearly every kind on garbage
        # of the system; those about the content have no number, or say that there is no such place in the file
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DataFormatError(file, f"cannot be read: {brief(error)}") from None


def check_finite(file: Path, start: int, features: np.ndarray, names: Sequence[object] = ()) -> np.ndarray:
    """Features of shape (B, D) as float32, refused with row and column if one is NaN or infinite there."""
    # in the target type: a float64 beyond float32's range would become infinite later
    with np.errstate(over="ignore", invalid="ignore"):
        plain = np.ascontiguousarray(features, dtype=np.float32)
    bad = np.argwhere(~np.isfinite(plain))
    if len(bad):
        row, column = bad[0]
        name = names[column] if names else int(column)
        raise DataFormatError(
            file, f"row {start + row}, column {name!r} is {features[row, column]}; finite numbers are expected"
        )
    return plain


# -- arrays -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Array:
    """An array in a file, plain or packed as a member of an npz file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0  #: of its numbers in the file, or in the unpacked member
    by_columns: bool = False
    packed: bool = False
    halves: bool = False  #: whether it is bfloat16, which numpy does not have: the upper halves of float32

    def layout(self) -> Layout | None:
        if self.packed or self.by_columns or self.halves:
            return None
        return Layout(self.dtype.str, self.shape[1], [Piece(os.fspath(self.path), self.offset, self.shape[0])])

    def chunks(self, rows: int) -> Iterator[np.ndarray]:
        """Its rows, at most so many at once."""
        starts = range(0, self.shape[0], rows)
        if self.packed and self.by_columns:
            raise DataFormatError(self.path, f"array {self.name!r} is packed column by column; save it row by row")
        if self.packed:
            size = math.prod(self.shape[1:]) * self.dtype.itemsize
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.name}.npy") as stream:
                stream.read(self.offset)
                for start in starts:
                    count = min(rows, self.shape[0] - start)
                    content = stream.read(count * size)
                    yield np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])
            return
        if math.prod(self.shape) == 0:  # nothing that could be mapped
            return
        order: Any = "F" if self.by_columns else "C"
        mapped = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)
        for start in starts:
            part = np.asarray(mapped[start : start + rows])
            yield (part.astype(np.uint32) << 16).view(np.float32) if self.halves else part


def _find_arrays(file: Path, table: Table) -> tuple[_Array, _Array | None, _Array | None]:
    """Features, labels and splits of a file of arrays, their shapes checked."""
    ending = file.suffix.lower()
    found = {".npy": _npy_arrays, ".npz": _npz_arrays, ".safetensors": _safetensors_arrays}[ending](file, table)
    have = ", ".join(f"{array.name} {array.shape}" for array in found.values())[:500] or "nothing"
    name = table.features
    if name is None:
        tables = [array.name for array in found.values() if len(array.shape) == 2]
        if len(tables) != 1:
            raise DataFormatError(file, f"must have one array of shape (N, D), or features=NAME; it has {have}")
        (name,) = tables
    if name not in found:
        raise DataFormatError(file, f"has no array {name!r}; it has {have}. Name the features with features=")
    features, labels, splits = (found.get(key) if key else None for key in (name, table.labels, table.split))
    if features is None or len(features.shape) != 2 or features.dtype.kind not in "fiu" or not features.shape[1]:
        shape = None if features is None else f"{features.dtype} of shape {features.shape}"
        raise DataFormatError(file, f"{name!r} must be real numbers of shape (N, D), got {shape}")
    for array, kinds, what in ((labels, "iuU", "whole numbers or texts"), (splits, "U", "texts")):
        if array is not None and (array.shape != features.shape[:1] or array.dtype.kind not in kinds):
            raise DataFormatError(
                array.path,
                f"{array.name!r} must be {what} of shape ({features.shape[0]},), got {array.dtype} of shape "
                f"{array.shape}",
            )
    return features, labels, splits


def _array_rows(
    file: Path, features: _Array, labels: _Array | None, splits: _Array | None, rows: int
) -> Iterator[Rows]:
    others = [None if array is None else array.chunks(rows) for array in (labels, splits)]
    for part in features.chunks(rows):
        found, words = (None if chunks is None else next(chunks) for chunks in others)
        if found is not None:
            if found.dtype.kind == "u" and len(found) and int(found.max()) > np.iinfo(np.int64).max:
                raise DataFormatError(file, f"the labels hold {found.max()}, which is no class number")
            found = as_objects(found.tolist()) if found.dtype.kind == "U" else found.astype(np.int64)
        yield Rows(part, found, None if words is None else as_objects(words.tolist()))


def _npy_arrays(file: Path, table: Table) -> dict[str, _Array]:
    """The features under the name that is asked for, and what lies beside them."""
    found = {}
    beside = {name: file.with_suffix(f".{name}.npy") for name in (table.labels, table.split) if name}
    for name, path in {table.features or "features": file, **beside}.items():
        if path.is_file():
            check_regular(path)
            with open(path, "rb") as stream:
                shape, by_columns, dtype = check_header(stream, os.path.getsize(path), path, "the file")
                found[name] = _Array(path, name, shape, dtype, stream.tell(), by_columns)
    return found


def _npz_arrays(file: Path, table: Table) -> dict[str, _Array]:
    found = {}
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        check_zip(file, _MAX_BYTES, members)
        for member in members:
            name = member.filename.removesuffix(".npy")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataFormatError(file, f"array {name!r} is packed in a way that numpy does not write")
            with archive.open(member) as stream:
                shape, by_columns, dtype = check_header(stream, member.file_size, file, f"array {name!r}")
                array = _Array(file, name, shape, dtype, stream.tell(), by_columns, packed=True)
            if member.compress_type == zipfile.ZIP_STORED:
                start = _member_start(file, member)
                array = replace(array, offset=start + array.offset, packed=False)
                if start + member.file_size > os.path.getsize(file):
                    raise DataFormatError(file, f"array {name!r} ends behind the end of the file")
            found[name] = array
    return found


def _member_start(file: Path, member: zipfile.ZipInfo) -> int:
    """Where the content of a member begins: behind its own header, whose last two parts have any length."""
    with open(file, "rb") as stream:
        stream.seek(member.header_offset)
        header = stream.read(30)
    return member.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))


def _safetensors_arrays(file: Path, table: Table) -> dict[str, _Array]:
    with safe_open(file, "numpy"):  # refuses a header that does not fit the file
        pass
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _MAX_HEADER:
            raise DataFormatError(file, f"has a header of {length} bytes")
        header = json.loads(stream.read(length))
    found = {}
    for name, item in header.items():
        if name != "__metadata__" and (item["dtype"] in _SAFETENSORS or item["dtype"] == "BF16"):
            halves = item["dtype"] == "BF16"
            dtype = np.dtype("<u2" if halves else f"<{_SAFETENSORS[item['dtype']]}")
            begin = 8 + length + int(item["data_offsets"][0])
            found[name] = _Array(file, name, tuple(item["shape"]), dtype, begin, halves=halves)
    return found
