"""Columns of Parquet and Arrow files: their batches, which hold the features, and what is wrong with a row."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rmd_plugin.untrusted import DataFormatError, check_size

log = logging.getLogger(__name__)

PARQUET, ARROW = (".parquet",), (".arrow", ".feather")
#: of a packed table after unpacking
_MAX_BYTES = 1 << 42
#: of a file that are read at once: requests to an object store are slow, and many files are read at a time
_READ_BYTES = 4 << 20
_STRING_VIEW = pa.string_view().id if hasattr(pa, "string_view") else -1  # younger than our lowest version


class Rows(NamedTuple):
    """Some rows of a file as they stand in it."""

    features: np.ndarray  #: shape (B, D), any real numbers
    labels: np.ndarray | None  #: shape (B,): int64, or objects (whole numbers, texts, None)
    splits: np.ndarray | None  #: shape (B,): texts as objects


class Columns(NamedTuple):
    """The columns that are read."""

    schema: pa.Schema
    features: list[str]  #: one column of lists, or many of floats
    labels: str | None
    split: str | None

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.features, *(name for name in (self.labels, self.split) if name is not None)]

    @property
    def titles(self) -> list[str]:
        """Names of the features, where each has a column."""
        return [] if is_list(self.schema.field(self.features[0]).type) else self.features


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists of numbers."""
    kind = getattr(kind, "storage_type", kind)
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and _is_number(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def read_schema(file: Path) -> pa.Schema:
    """Names and types of the columns of a file."""
    if file.suffix.lower() in PARQUET:
        with pq.ParquetFile(file) as opened:
            return opened.schema_arrow
    with _reader(file) as (reader, _):
        return reader.schema


def choose_columns(
    file: Path, schema: pa.Schema, features: str | None, labels: str | None, split: str | None
) -> Columns:
    """The columns of these names; without one of the features the only one of lists, else all of floats."""
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise DataFormatError(file, f"two columns are called {twice[0]!r}")
    have = ", ".join(f"{field.name} ({field.type})" for field in list(schema)[:20])[:500] or "nothing"
    labels, split = (name if name in schema.names else None for name in (labels, split))
    others = [field for field in schema if field.name not in (labels, split)]
    if features is not None:
        if features not in schema.names:
            raise DataFormatError(
                file,
                f"has no column {features!r}; it has {have}. Name the column of lists with features=, or take "
                "all columns of floats with features=null",
            )
        chosen = [features]
    else:
        chosen = [field.name for field in others if is_list(field.type)]
        if len(chosen) > 1:
            raise DataFormatError(file, f"has several columns of lists: {', '.join(chosen)}. Choose one: features=NAME")
        chosen = chosen or [field.name for field in others if pa.types.is_floating(field.type)]
        if not chosen:
            raise DataFormatError(file, f"has no column of lists of numbers and none of floats; it has {have}")
        log.info("Features of %s are the columns %s.", file, ", ".join(chosen))
    kind = schema.field(chosen[0]).type
    if not is_list(kind) and not pa.types.is_floating(kind):
        raise DataFormatError(file, f"column {chosen[0]!r} is {kind}; lists of numbers, or floats, are expected")
    return Columns(schema, chosen, labels, split)


@contextlib.contextmanager
def _reader(file: Path) -> Iterator[tuple[Any, pa.Buffer]]:
    """A reader of an IPC file or stream, and the mapped file that it reads."""
    with pa.memory_map(os.fspath(file)) as mapped:
        content = mapped.read_buffer()
        yield ipc_reader(pa.BufferReader(content)), content


def ipc_reader(stream: pa.NativeFile) -> Any:
    """A reader of what an opened file holds, an IPC file or an IPC stream."""
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(stream)


def _ipc_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def _picked(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    part = pa.RecordBatch.from_arrays([batch.column(batch.schema.get_field_index(name)) for name in names], names)
    part.validate(full=True)  # offsets that lead out of the file would be followed
    return part


def read_batches(stream: pa.NativeFile, names: list[str], rows: int, *, parquet: bool) -> Iterator[pa.RecordBatch]:
    """Columns of an opened Parquet or IPC file, at most so many rows at once, and at least one."""
    with contextlib.ExitStack() as stack:
        if parquet:
            # page by page: a row group may be as large as the file
            file = stack.enter_context(pq.ParquetFile(stream, pre_buffer=False, buffer_size=_READ_BYTES))
            batches = file.iter_batches(rows, columns=names, use_threads=False)
        else:
            batches = (_picked(batch, names) for batch in _ipc_batches(ipc_reader(stream)))
        for batch in batches:
            yield from (batch.slice(place, rows) for place in range(0, len(batch), rows))


def read_rows(file: Path, columns: Columns, rows: int) -> Iterator[Rows]:
    """The rows of a file, at most so many at once.

    Raises:
        DataFormatError: with row and column; what the file itself is, is an error of Arrow.
    """
    schema = read_schema(file)
    for name in columns.names:
        expected, found = columns.schema.field(name).type, schema.field(name).type if name in schema.names else None
        if found != expected:
            what = "is not there" if found is None else f"is {found}"
            raise DataFormatError(file, f"column {name!r} {what}; in the first file of the table it is {expected}")
    start, numbers, width = 0, 0, None
    parquet = file.suffix.lower() in PARQUET
    with (pa.OSFile if parquet else pa.memory_map)(os.fspath(file)) as stream:
        for part in read_batches(stream, columns.names, rows, parquet=parquet):
            features = read_matrix(file, start, part, columns, width)
            width = features.shape[1]
            numbers += features.size
            if parquet:  # a few bytes of it may stand for any number of rows
                check_size(file, 4 * numbers, _MAX_BYTES, packed=os.path.getsize(file))
            yield Rows(
                features,
                None if columns.labels is None else _labels(file, start, part, columns.labels),
                None if columns.split is None else _texts(file, start, part, columns.split),
            )
            start += len(part)


def find_lists(file: Path, columns: Columns) -> tuple[np.dtype[Any], list[tuple[int, int]]] | None:
    """Where the lists of an IPC file lie as plain numbers: their type, and (offset in bytes, numbers) of each batch.

    None if they are packed, or stand in many columns.
    """
    if columns.titles:
        return None
    found = []
    with _reader(file) as (reader, content):
        kind = getattr(columns.schema.field(columns.features[0]).type, "storage_type", None)
        kind = (kind or columns.schema.field(columns.features[0]).type).value_type
        dtype = np.dtype(kind.to_pandas_dtype())
        for batch in _ipc_batches(reader):
            column = _picked(batch, columns.features).column(0)
            values = getattr(column, "storage", column).flatten()
            if len(values) == 0:
                continue
            offset = values.buffers()[1].address - content.address + values.offset * dtype.itemsize
            if not 0 <= offset <= content.size - len(values) * dtype.itemsize:
                return None
            found.append((offset, len(values)))
    return dtype, found


def no_nulls(file: str | Path, start: int, column: pa.Array, name: str, remedy: str = "") -> None:
    """Refuse a column in which a value is missing, with its row."""
    if column.null_count:
        row = start + column.is_null().index(True).as_py()
        raise DataFormatError(file, f"row {row}, column {name!r} is missing{remedy}")


def read_matrix(file: Path, start: int, batch: pa.RecordBatch, columns: Columns, width: int | None) -> np.ndarray:
    """Features of a batch, shape (B, D), in the type of the file; D is that of the rows before, if there are any."""
    if not is_list(batch.column(columns.features[0]).type):
        arrays = [batch.column(name) for name in columns.features]
        for column, name in zip(arrays, columns.features, strict=True):
            no_nulls(file, start, column, name)
        return np.column_stack([column.to_numpy(zero_copy_only=False) for column in arrays])
    values, width = list_numbers(file, start, batch, columns.features[0], width)
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False).reshape(len(batch), width)
    return numbers


def list_numbers(
    file: str | Path, start: int, batch: pa.RecordBatch, name: str, width: int | None
) -> tuple[pa.Array, int]:
    """The numbers of a column of lists one after the other, without a copy, and how many a row has, all the same."""
    column = batch.column(name)
    column = getattr(column, "storage", column)  # of tensors, an extension of lists
    no_nulls(file, start, column, name)
    lengths = np.full(len(column), column.type.list_size) if pa.types.is_fixed_size_list(column.type) else None
    if lengths is None:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    width = int(lengths[0]) if width is None else width
    other = np.flatnonzero((lengths != width) | (lengths == 0))
    if len(other):
        found = f"row {start + other[0]}, column {name!r} has {lengths[other[0]]} numbers"
        raise DataFormatError(file, f"{found}; the rows before have {width}" if width else found)
    values = column.flatten()
    if values.null_count:
        place = values.is_null().index(True).as_py()
        raise DataFormatError(file, f"row {start + place // width}, column {name!r}: number {place % width} is missing")
    return values, width


def _labels(file: Path, start: int, batch: pa.RecordBatch, name: str) -> np.ndarray:
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_integer(kind) and not column.null_count:
        return column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or _is_text(kind)):
        raise DataFormatError(file, f"column {name!r} is {kind}; labels are whole numbers or texts")
    values = column.to_pylist()
    if pa.types.is_floating(kind):  # pandas makes floats of whole numbers where some are missing
        for row, value in enumerate(values):
            if value is not None and value == value and not float(value).is_integer():
                raise DataFormatError(file, f"row {start + row}, column {name!r} is {value}; labels are whole numbers")
        values = [None if value is None or value != value else int(value) for value in values]
    return as_objects(values)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind.id == _STRING_VIEW


def _texts(file: Path, start: int, batch: pa.RecordBatch, name: str) -> np.ndarray:
    column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not _is_text(column.type):
        raise DataFormatError(file, f"column {name!r} is {column.type}; texts are expected")
    no_nulls(file, start, column, name)
    return as_objects(column.to_pylist())


def as_objects(values: list[Any]) -> np.ndarray:
    """A one-dimensional array of Python objects."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found
