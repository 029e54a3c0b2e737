"""The columns of features and labels of Parquet and Arrow files, batch by batch in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import torch
from torch import Tensor

from rmd_plugin.arrow_columns import ARROW, ipc_reader, is_list, list_numbers, no_nulls, read_batches
from rmd_plugin.table.places import TableFile, opened
from rmd_plugin.tables import naming
from rmd_plugin.untrusted import DataFormatError

#: of a batch of float32 features: small enough for the cache of a processor
_BATCH_BYTES = 4 << 20
#: files whose footers are read at a time, before the work starts
_THREADS = 16


class Columns(NamedTuple):
    """The names of the columns that are read."""

    features: str
    labels: str | None = None

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return [name for name in self if name is not None]


class Footer(NamedTuple):
    """What a file says about itself."""

    types: dict[str, pa.DataType]
    width: float | None  #: numbers of a row, on average; None if only its rows tell


def check_files(
    files: Sequence[TableFile], columns: Columns, width: int | None, on_bad: Callable[[DataFormatError], None]
) -> tuple[list[TableFile], int | None]:
    """The files that can be opened, and the width of their features, from the footers of all.

    Args:
        files: of a table.
        columns: that are wanted.
        width: D, if it is known.
        on_bad: is told of a file that cannot be opened, and raises or returns.

    Raises:
        DataFormatError: if the columns of a file are missing, or of another type or width than those of the first.
    """
    good: list[TableFile] = []
    first: tuple[TableFile, Footer] | None = None
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, footer in zip(files, pool.map(partial(_try_footer, features=columns.features), files), strict=True):
            if isinstance(footer, DataFormatError):
                on_bad(footer)
                continue
            _check_types(file, footer.types, columns)
            first = first or (file, footer)
            for name in columns.names:
                if footer.types[name] != first[1].types[name]:
                    raise DataFormatError(
                        file.path,
                        f"column {name!r} is {footer.types[name]}, but {first[1].types[name]} in {first[0].path}. "
                        "All files of a table must have the same columns",
                    )
            if footer.width is not None:
                expected = footer.width // 1 if width is None else width
                if footer.width != expected:
                    raise DataFormatError(
                        file.path,
                        f"column {columns.features!r} has {footer.width:g} numbers a row, {expected:g} are expected",
                    )
                width = int(expected)
            good.append(file)
    return good, width


def read_features(file: TableFile, columns: Columns, width: int | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Features (B, D) in the type of the file, and labels (B,) of int64; the tensors must not be written to.

    Raises:
        DataFormatError: with the row and the column, if numbers are missing or there are more or fewer than D.
    """
    start, rows = 0, max(256, _BATCH_BYTES // (4 * (width or 1024)))
    with naming(file.path), opened(file.path) as stream:
        for batch in read_batches(stream, columns.names, rows, parquet=_is_parquet(file)):
            values, width = list_numbers(file.path, start, batch, columns.features, width)
            features, labels = torch.from_dlpack(values).view(len(batch), width), None
            if columns.labels is not None:
                column = batch.column(columns.labels)
                no_nulls(file.path, start, column, columns.labels, ". Mark rows that are not to be used by -1")
                labels = torch.from_dlpack(column.cast(pa.int64()))
            yield features if features.is_floating_point() else features.float(), labels
            start += len(batch)


# -- footers ----------------------------------------------------------------------------------------------------------


def _is_parquet(file: TableFile) -> bool:
    return not file.path.partition("?")[0].lower().endswith(ARROW)


def _try_footer(file: TableFile, features: str) -> Footer | DataFormatError:
    try:
        with naming(file.path), opened(file.path) as stream:
            if not _is_parquet(file):
                schema, width = ipc_reader(stream).schema, None
            else:
                with pq.ParquetFile(stream, pre_buffer=False) as parquet:
                    schema, width = parquet.schema_arrow, _mean_width(parquet.metadata, features)
            return Footer({field.name: field.type for field in schema}, width)
    except DataFormatError as error:
        return error


def _mean_width(meta: pq.FileMetaData, features: str) -> float | None:
    """Numbers a row that the footer of a Parquet file counts."""
    groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    numbers = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.split(".")[0] == features)
    return numbers / meta.num_rows if meta.num_rows else None


def _check_types(file: TableFile, types: dict[str, pa.DataType], columns: Columns) -> None:
    for name in columns.names:
        if name not in types:
            have = ", ".join(f"{key} ({kind})" for key, kind in list(types.items())[:20]) or "none"
            option = "features" if name == columns.features else "labels"
            raise DataFormatError(file.path, f"has no column {name!r}; it has {have}. Name it by {option}=")
    kind = types[columns.features]
    if not is_list(kind):
        raise DataFormatError(file.path, f"column {columns.features!r} is {kind}; lists of numbers are expected")
    if columns.labels is not None and not pa.types.is_integer(types[columns.labels]):
        raise DataFormatError(
            file.path, f"column {columns.labels!r} is {types[columns.labels]}; labels are integers, 0 to K - 1"
        )
