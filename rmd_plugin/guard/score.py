"""Score any number of pictures, texts or features with a guard, into a folder that survives a kill.

    score.json       guard, inputs and alpha: what must be the same to resume
    scores.csv.part  rows so far, in the order of the inputs; a kill may cut its last line
    scores.csv       all rows at the end; scores.parquet the same with types

What cannot be read is a row with its reason. :class:`Inputs` checks paths and columns without importing torch.
"""

from __future__ import annotations

import csv
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rmd_plugin.benchmarks.dataset_files import column_names, read_columns
from rmd_plugin.files import is_picture, name_file_in_errors, replacing

if TYPE_CHECKING:
    from rmd_plugin.guard.guard import Guard

SETTINGS, PART, TABLE = "score.json", "scores.csv.part", "scores.csv"
SCORES, REPORT = "scores.parquet", "report.html"
NOT_A_NUMBER = "the score is not a number: flagged as OOD"
#: what a guard of each kind takes: the usual column, and the endings of tables
_TABLES = {
    "images": ("path", (".csv", ".txt")),
    "texts": ("text", (".csv", ".jsonl", ".parquet")),
    "features": ("embedding", (".parquet", ".npy")),
}


# -- inputs -----------------------------------------------------------------------------------------------------------


class Item(NamedTuple):
    """One thing to score: its name in the table, itself (a path, a text, a vector), or why there is none."""

    name: str
    raw: Any
    reason: str | None = None


class Inputs:
    """The items of some paths, in a fixed order; may be iterated over any number of times.

    Args:
        paths: folders and files, as typed.
        kind: what the guard judges: ``images``, ``texts`` or ``features``.
        column: of the texts (by default ``text``) or features (``embedding``) in a table.
        id: column that names the rows of a table of texts or features; by default they are ``FILE:ROW``, from 0 on.

    Raises:
        ValueError: if a file is not what a guard of this kind takes, or a table has no such column.
        OSError: if there is no such path, or it cannot be read.
    """

    def __init__(self, paths: Sequence[str], kind: str, column: str | None = None, id: str | None = None) -> None:
        usual, self._endings = _TABLES[kind]
        self.kind, self.column, self.id = kind, column or usual, id
        self.paths = [os.path.normpath(path) for path in paths]
        self.files: list[str] = []  #: pictures and tables, in order
        self.left_out: list[str] = []  #: files of folders that are neither
        for path in self.paths:
            if os.path.isdir(path):
                for file in map(str, sorted(file for file in Path(path).rglob("*") if not file.is_dir())):
                    (self.files if self._belongs(file) else self.left_out).append(file)
            elif os.path.lexists(path):
                self.files.append(path)
            else:
                raise FileNotFoundError(f"there is no {path}.")
        if not self.files:
            raise ValueError(f"there is nothing to score in {', '.join(paths)}.")
        for path in self.files:
            if kind != "images" or not is_picture(path):
                self._check(path)

    def _belongs(self, path: str) -> bool:
        if self.kind == "images":
            return is_picture(path)
        return path.endswith(".parquet") and not os.path.basename(path).startswith((".", "_"))

    def _check(self, path: str) -> None:
        if not path.endswith(self._endings):
            takes = ", ".join(self._endings)
            raise ValueError(f"{path} cannot be scored: a guard of {self.kind} takes {takes} and folders.")
        columns = column_names(Path(path)) or next(self._rows(path), [self.column, self.id])
        for name in (self.column, self.id):
            if name is not None and name not in columns:
                raise ValueError(f"{path}: there is no column {name!r} in {', '.join(map(str, columns))}.")
        if path.endswith(".parquet"):
            values = pq.read_schema(path).field(self.column).type
            if pa.types.is_nested(values) != (self.kind == "features"):
                raise ValueError(f"{path}: column {self.column!r} of {values} holds no {self.kind}.")

    def __iter__(self) -> Iterator[Item]:
        for path in self.files:
            try:
                for item in self._items(path):
                    # neither bytes that are no UTF-8 nor a lone carriage return survive a CSV file
                    name = item.name.encode("utf-8", "backslashreplace").decode().replace("\r", "\\r")
                    yield item._replace(name=name)
            except (pa.ArrowException, OSError) as error:
                yield Item(path, None, f"cannot be read: {error}")

    def _items(self, path: str) -> Iterator[Item]:
        if self.kind == "images" and is_picture(path):
            yield Item(path, path)
            return
        for number, row in enumerate(self._rows(path)):
            value, name = row.get(self.column), f"{path}:{number}"
            if self.kind == "images" and value:
                value = name = os.path.join(os.path.dirname(path), value)
            elif self.id is not None and row.get(self.id) not in (None, ""):
                name = str(row[self.id])
            there = isinstance(value, (list, np.ndarray) if self.kind == "features" else str) and len(value) > 0
            yield Item(name, value) if there else Item(name, None, f"the row has no {self.column}")

    def _rows(self, path: str) -> Iterator[dict[Any, Any]]:
        """Rows of a table, by column."""
        if path.endswith(".parquet"):  # in batches; a row may have no vector
            columns = [self.column] if self.id is None else [self.column, self.id]
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(1024, columns=columns):
                    yield from batch.to_pylist()
        elif path.endswith(".txt"):
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
            yield from ({self.column: line.strip()} for line in lines if line.strip())
        else:
            table = read_columns(Path(path), [self.column, self.id])
            yield from (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))

    def find(self, names: Collection[str]) -> dict[str, Any]:
        """The raw items of some names, as far as there are any."""
        return {item.name: item.raw for item in self if item.name in names and item.reason is None} if names else {}


# -- scoring ----------------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """How far a run came."""

    before: int  #: rows that were there when it began
    interrupted: bool


def score_schema(name: str) -> pa.Schema:
    """Columns of a table of scores; the first one, ``path`` or ``id``, names the sample.

    ``is_ood`` and the numbers are null where there is no score, ``reason`` says why and is null where all is well.
    """
    numbers = {"score": pa.float64(), "p_value": pa.float64(), "is_ood": pa.bool_()}
    order = (name, *numbers, "class", "nearest_class", "reason")
    return pa.schema([(column, numbers.get(column, pa.string())) for column in order])


def score_items(
    guard: Guard,
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    resume: bool = False,
) -> Progress:
    """Score all items into ``scores.parquet`` and ``scores.csv`` of a folder.

    Ctrl-C ends the run early: what was scored is in both files. A run that was stopped or killed continues with
    ``resume=True`` behind the rows that it has written; items that appeared in between are scored too.

    Args:
        guard: prepares and judges the items.
        inputs: what is scored; of the guard's kind.
        out: the folder, empty or new unless a run is resumed.
        alpha: share of false alarms; by default the guard's.
        batch_size: items that are judged together.
        num_workers: processes that read and prepare the items.
        resume: continue in a folder of the same guard, inputs and alpha.

    Raises:
        ValueError: if the folder cannot be used.
    """
    import joblib  # type: ignore[import-untyped]
    from filelock import FileLock, Timeout
    from torch.utils.data import DataLoader
    from tqdm.auto import tqdm

    folder, interrupted = Path(out), False
    settings = {"guard": joblib.hash(guard.about), "alpha": guard.alpha if alpha is None else alpha}
    settings |= {"inputs": list(map(os.path.abspath, inputs.paths)), "column": inputs.column, "id": inputs.id}
    if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        if not resume:
            raise ValueError(f"{folder} is not empty. Give another out=FOLDER, or resume=true to continue there.")
        earlier = json.loads((folder / SETTINGS).read_text())
        if changed := [name for name in settings if earlier.get(name) != settings[name]]:
            raise ValueError(f"resume=true in {folder} with another {changed[0]}. Give another out=FOLDER.")
    folder.mkdir(parents=True, exist_ok=True)
    schema, part = score_schema("path" if inputs.kind == "images" else "id"), folder / PART
    try:
        with FileLock(folder / ".lock", timeout=0):
            with replacing(folder / SETTINGS) as file:
                json.dump(settings, file, indent=1)
            if not part.exists() and (folder / TABLE).exists():
                os.replace(folder / TABLE, part)  # a finished run continues
            with name_file_in_errors(part), open(part, "a+", encoding="utf-8", newline="") as rows:
                done = _count_whole_rows(rows, schema.names)
                before = done.total()
                loader: Any = DataLoader(
                    _Preparing(guard.prepare),  # type: ignore[arg-type]
                    batch_sampler=_batches(inputs, done, batch_size),  # items in place of indices: drawn as needed
                    collate_fn=list,
                    num_workers=num_workers,
                    worker_init_fn=_ignore_interrupt,
                )
                total = len(inputs.files) if inputs.kind == "images" else None
                try:
                    with tqdm(total=total, initial=before, desc="score", leave=False, disable=None) as bar:
                        for batch in loader:
                            judged = _judge(guard, batch, schema.names[0], alpha)
                            csv.DictWriter(rows, schema.names, lineterminator="\n").writerows(judged)
                            rows.flush()
                            bar.update(len(batch))
                except KeyboardInterrupt:
                    interrupted = True
            _write_parquet(part, schema, folder / SCORES)
            os.replace(part, folder / TABLE)
    except Timeout:
        raise ValueError(f"another process writes to {folder}. Wait for it, or give another out=FOLDER.") from None
    return Progress(before, interrupted)


def _count_whole_rows(file: IO[str], columns: Sequence[str]) -> Counter[str]:
    """How often each item has a row; what a kill has left of a row is cut off, and an empty file gets its header."""
    file.seek(0)
    done: Counter[str] = Counter()
    end = 0
    # a line that was cut has no end; of a row with line breaks in its name some columns are missing
    for row in csv.reader(iter(lambda: line if (line := file.readline()).endswith("\n") else "", "")):
        if len(row) == len(columns):
            done.update(row[:1] if end else ())
            end = file.tell()
    file.seek(end)
    file.truncate()
    if not end:
        file.write(",".join(columns) + "\n")
    return done


def _write_parquet(table: Path, schema: pa.Schema, path: Path) -> None:
    batches = pa.csv.open_csv(
        table,
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(column_types=schema, null_values=[""], strings_can_be_null=True),
    )
    with replacing(path, "wb") as file, pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _ignore_interrupt(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a worker leaves Ctrl-C to the process that started it


def _batches(inputs: Inputs, done: Counter[str], size: int) -> Iterator[list[Item]]:
    """Items without a row, in batches."""

    def without_row(item: Item) -> bool:
        done[item.name] -= 1
        return done[item.name] < 0

    items = filter(without_row, inputs)
    while batch := list(islice(items, size)):
        yield batch


class _Preparing:
    """Prepares the item that it is asked for by itself."""

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare

    def __getitem__(self, item: Item) -> Item:
        if item.reason is not None:
            return item
        try:
            # as numpy: between processes each tensor would take a file descriptor
            return Item(item.name, self._prepare(item.raw).numpy())
        except Exception as error:  # the tools that read others' files raise nearly every kind
            return Item(item.name, None, " ".join(str(error).split()) or type(error).__name__)


def _judge(guard: Guard, batch: list[Item], name: str, alpha: float | None) -> list[dict[str, Any]]:
    """The rows of a batch of prepared items, in its order; ``name`` is the column of their names."""
    import torch

    rows: list[dict[str, Any]] = [{name: item.name, "reason": item.reason} for item in batch]
    ready = [(row, item.raw) for row, item in zip(rows, batch, strict=True) if item.reason is None]
    if not ready:
        return rows
    verdicts = guard.judge(torch.from_numpy(np.stack([array for _, array in ready])))
    flagged = verdicts.is_ood if alpha is None else verdicts.p_value <= alpha
    columns = (verdicts.score, verdicts.p_value, flagged, verdicts.label, verdicts.nearest)
    for (row, _), score, p_value, is_ood, label, nearest in zip(ready, *(x.tolist() for x in columns), strict=True):
        row |= {"score": score, "p_value": p_value, "is_ood": is_ood or score != score}
        row |= {"class": guard.class_names[label], "nearest_class": guard.class_names[nearest]}
        if score != score:
            row["reason"] = NOT_A_NUMBER
    return rows
