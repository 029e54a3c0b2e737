"""One column of a Parquet file that somebody else wrote, row by row, some rows in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rmd_plugin.npz import brief
from rmd_plugin.untrusted import DataFormatError, check_regular

#: rows that are decoded at a time
_ROWS = 1024


def parquet_files(folder: str) -> Iterator[str]:
    """The Parquet files of a folder and all below it, by name; hidden ones and those with ``_`` are other programs'."""
    for here, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if not name.startswith((".", "_")))
        for name in sorted(files):
            if name.lower().endswith(".parquet") and not name.startswith((".", "_")):
                yield os.path.join(here, name)


def parquet_count(path: str, column: str, id: str | None, *, texts: bool) -> int:
    """Number of rows, of a file that has the columns.

    Raises:
        DataFormatError: if it cannot be read.
        ValueError: if it lacks a column, or the column holds something else.
    """
    with _opened(path) as file:
        _check_columns(path, file.schema_arrow, column, id, texts=texts)
        return int(file.metadata.num_rows)


def parquet_values(path: str, column: str, id: str | None, *, texts: bool) -> Iterator[tuple[Any, Any]]:
    """Text or vector (D,) and id of each row; None where there is none. Raises as :func:`parquet_count` does."""
    with _opened(path) as file:
        _check_columns(path, file.schema_arrow, column, id, texts=texts)
        for batch in file.iter_batches(_ROWS, columns=[column, *([] if id is None else [id])]):
            values = batch.column(column)
            ids = [None] * len(batch) if id is None else batch.column(id).to_pylist()
            if texts:
                yield from zip(values.to_pylist(), ids, strict=True)
            else:
                for value, name in zip(values, ids, strict=True):
                    # a copy: torch warns of arrays that cannot be written to
                    yield np.array(value.values) if value.is_valid else None, name


@contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    try:
        check_regular(path)
        with pq.ParquetFile(path) as file:
            yield file
    except DataFormatError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataFormatError(path, f"cannot be read as Parquet: {brief(error)}") from None


def _check_columns(path: str, schema: pa.Schema, column: str, id: str | None, *, texts: bool) -> None:
    option = "text" if texts else "features"
    for name, of in ((column, option), (id, "id")):
        if name is not None and schema.names.count(name) != 1:
            shown = ", ".join(map(repr, schema.names[:20])) or "none"
            raise ValueError(f"{path} has no column {name!r}; it has {shown}. Name it by {of}=COLUMN.")
    found = schema.field(column).type
    if texts:
        if pa.types.is_dictionary(found):
            found = found.value_type
        right = pa.types.is_string(found) or pa.types.is_large_string(found)
    else:
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        right = any(test(found) for test in lists) and (
            pa.types.is_floating(found.value_type) or pa.types.is_integer(found.value_type)
        )
    if not right:
        expected = "texts" if texts else "lists of numbers"
        raise ValueError(
            f"{path}: column {column!r} holds {found}, {expected} are expected. Name it by {option}=COLUMN."
        )
