"""The folder of ``rmd-score``: parts while it runs, ``scores.parquet`` and ``scores.csv`` at its end.

    score.json            which guard, inputs and alpha: what must be the same to go on
    parts/000000.parquet  whole batches of rows, in the order of the inputs; each appears whole or not at all
    scores.parquet        all rows; scores.csv the same for people

What counts are the parts, if there are any, else ``scores.parquet``: a kill loses no row of either.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from filelock import FileLock, Timeout

from rmd_plugin.atomic import replacing
from rmd_plugin.npz import brief
from rmd_plugin.untrusted import DataFormatError, one_line, read_mapping, to_csv_cell

SETTINGS, PARTS, SCORES, TABLE, REPORT = "score.json", "parts", "scores.parquet", "scores.csv", "report.html"
_LOCK, _OLD = ".lock", ".parts-gathered"
#: a part is written after so many rows or seconds, whichever comes first, and always after whole batches
_PART_ROWS, _PART_SECONDS = 1000, 5.0
#: rows that are read at a time, and those of a row group of the whole table, about
_READ, _GROUP = 1 << 13, 1 << 16
#: what each setting is called in an error
_WORDS = {
    "guard": "guard", "alpha": "alpha", "inputs": "inputs", "folder": "current folder", "column": "column",
    "id": "id column",
}  # fmt: skip


class ScoreFolder:
    """Rows that survive a kill, and go on where they ended.

    Args:
        path: the folder.
        schema: columns of the rows.
    """

    def __init__(self, path: str | os.PathLike[str], schema: pa.Schema) -> None:
        self.path, self.schema = Path(path), schema

    @contextmanager
    def opened(self, settings: Mapping[str, Any], *, resume: bool) -> Iterator[ScoreFolder]:
        """Hold the folder for a run with these settings.

        Raises:
            ValueError: if the folder is not empty, or with ``resume`` holds rows of other settings, or another process
                writes to it.
        """
        # hidden files may be left of a run that was killed before it wrote anything
        used = self.path.is_dir() and any(not path.name.startswith(".") for path in self.path.iterdir())
        if used and not resume:
            raise ValueError(
                f"{self.path} is not empty. Give another out=FOLDER, or resume=true to go on with what is there."
            )
        if used:
            self._check_settings(settings)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path / _LOCK, timeout=0):
                with replacing(self.path / SETTINGS) as file:
                    json.dump(dict(settings), file, indent=1)
                self._start()
                yield self
        except Timeout:
            raise ValueError(
                f"another process writes to {self.path}. Wait for it, or give another out=FOLDER."
            ) from None

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        if not (self.path / SETTINGS).is_file():
            raise ValueError(
                f"{self.path} holds no {SETTINGS}: it is not a folder of rmd-score. Give another out=FOLDER."
            )
        before = read_mapping(self.path / SETTINGS)
        # through JSON, as those of the file came
        for name, value in json.loads(json.dumps(dict(settings))).items():
            if before.get(name) != value:
                raise ValueError(
                    f"resume=true with another {_WORDS[name]}: {self.path} was made with {before.get(name)}, now it is "
                    f"{value}. Give the same, or another out=FOLDER."
                )

    def _start(self) -> None:
        shutil.rmtree(self.path / _OLD, ignore_errors=True)  # a kill may have left it
        (self.path / PARTS).mkdir(exist_ok=True)
        if not self._parts() and (self.path / SCORES).is_file():
            os.replace(self.path / SCORES, self._part(0))  # of a run that had ended: it is the first part of this one
        self._next = 1 + max((int(path.stem) for path in self._parts()), default=-1)
        self._waiting: list[pa.Table] = []
        self._written = time.monotonic()

    def _part(self, number: int) -> Path:
        return self.path / PARTS / f"{number:06}.parquet"

    def _parts(self) -> list[Path]:
        found = (path for path in (self.path / PARTS).glob("*.parquet") if path.stem.isdecimal())
        return sorted(found, key=lambda path: int(path.stem))

    def add(self, rows: pa.Table) -> None:
        """Take the rows of a batch; a part is written when there are enough of them, or after some seconds."""
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= _PART_ROWS or time.monotonic() - self._written >= _PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait as a part of their own."""
        if self._waiting:
            with replacing(self._part(self._next), "wb") as file:
                pq.write_table(pa.concat_tables(self._waiting), file)
            # together: Ctrl-C in between would have the rows written twice
            self._next, self._waiting = self._next + 1, []
        self._written = time.monotonic()

    def tables(self) -> Iterator[pa.Table]:
        """The rows so far, some at a time."""
        for path in self._parts():
            try:
                with pq.ParquetFile(path) as file:
                    if not file.schema_arrow.equals(self.schema):
                        raise DataFormatError(path, "is not a part of these scores: it has other columns")
                    for batch in file.iter_batches(_READ):
                        yield pa.Table.from_batches([batch])
            except (pa.ArrowException, OSError) as error:
                raise DataFormatError(
                    path, f"cannot be read: {brief(error)}. Remove {self.path} and start anew"
                ) from None

    def names(self) -> Iterator[str]:
        """The names of the rows so far, in their order."""
        for table in self.tables():
            yield from table.column(0).to_pylist()

    def gather(self, *, done: bool) -> None:
        """Write all rows as one table, Parquet and CSV; the parts go if everything was scored."""
        self.flush()
        with replacing(self.path / TABLE, newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.schema.names)
            for table in self.tables():
                columns = [_to_cells(table.column(name)) for name in self.schema.names]
                writer.writerows(zip(*columns, strict=True))
        with (
            replacing(self.path / SCORES, "wb") as file,
            pq.ParquetWriter(file, self.schema) as writer,
        ):
            waiting: list[pa.Table] = []
            for table in self.tables():
                waiting.append(table)
                if sum(map(len, waiting)) >= _GROUP:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
        if done:
            os.rename(self.path / PARTS, self.path / _OLD)  # all at once: some of the parts alone would count as all
            shutil.rmtree(self.path / _OLD)


def _to_cells(column: pa.ChunkedArray) -> list[object]:
    """Cells of a CSV file: texts on one line and no formulas, numbers as they are, nothing for null."""
    values = column.to_pylist()
    if not pa.types.is_string(column.type):
        return ["" if value is None else value for value in values]
    return ["" if value is None else to_csv_cell(one_line(value)) for value in values]
