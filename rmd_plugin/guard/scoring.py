"""Score any number of items with a guard, in constant memory; a broken one is a row with its reason."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from rmd_plugin.guard.inputs import Inputs, Item
from rmd_plugin.guard.score_folder import ScoreFolder
from rmd_plugin.report.score_summary import score_schema
from rmd_plugin.untrusted import DataFormatError, one_line

if TYPE_CHECKING:
    from rmd_plugin.guard.guard import Guard

_LONGEST_REASON = 300
NOT_A_NUMBER = "the score is not a number: flagged as OOD"


@dataclass(frozen=True)
class Progress:
    """How far a run came."""

    total: int  #: items that there are
    before: int  #: rows that were there when it began
    scored: int  #: rows that it added, broken ones too
    interrupted: bool


def score_items(
    guard: Guard,
    inputs: Inputs,
    out: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    resume: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> Progress:
    """Score all items into ``scores.parquet`` and ``scores.csv`` of a folder.

    Ctrl-C ends the run early: what was scored is in both files. A run that was stopped or killed goes on with
    ``resume=True`` behind the rows that it has written, and ends with the rows of a run that never was; items that
    appeared in between are scored too.

    Args:
        guard: prepares and judges the items.
        inputs: what is scored; of the guard's kind.
        out: the folder, empty or new unless a run is resumed.
        alpha: share of false alarms; by default the guard's.
        batch_size: items that are judged together.
        num_workers: processes that read and prepare the items.
        resume: go on in a folder of the same guard, inputs and alpha.
        say: is told what was left out and how much had been done before, a sentence each.

    Raises:
        ValueError: if the folder cannot be used, there is nothing to score, or an input is refused.
    """
    folder = ScoreFolder(out, score_schema("path" if inputs.kind == "images" else "id"))
    settings = {"guard": guard.digest, "alpha": guard.alpha if alpha is None else alpha, **inputs.settings}
    total = inputs.count()
    for sentence in inputs.left_out():
        say(sentence)
    if not total:
        raise ValueError(f"there is nothing to score in {', '.join(inputs.settings['inputs'])}.")
    with folder.opened(settings, resume=resume):
        before = sum(map(len, folder.tables()))
        if resume:
            say(f"{before} of {total} were scored before.")
        batches = _batches(_unscored(iter(inputs), folder.names()), batch_size)
        loader: DataLoader[Any] = DataLoader(
            _Preparing(guard.prepare),
            batch_sampler=batches,  # the items take the place of indices: drawn as needed
            collate_fn=_collate,
            num_workers=num_workers,
            worker_init_fn=_end_quietly,
        )
        scored, interrupted = 0, False
        try:
            with tqdm(total=total, initial=min(before, total), desc="score", leave=False, disable=None) as bar:
                for prepared in loader:
                    rows = _judge(guard, prepared, folder.schema, alpha)
                    folder.add(rows)
                    scored += len(rows)
                    bar.update(len(rows))
        except KeyboardInterrupt:
            interrupted = True
        folder.gather(done=not interrupted)
    return Progress(total, before, scored, interrupted)


def _end_quietly(_: int) -> None:
    """A worker leaves Ctrl-C to the process that started it, and says nothing where that hangs up on a hand-over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (EOFError, ConnectionError)):
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook  # the thread that serves file descriptors reports to it


def _unscored(items: Iterator[Item], names: Iterator[str]) -> Iterator[Item]:
    """Items that have no row yet. Memory is taken only if items came or went since the rows were written."""
    for item in items:
        name = next(names, None)
        if name != item.name:
            # rows that do not stand where they stood: by name, and as often as it was there
            rest = Counter(names if name is None else chain([name], names))
            for other in chain([item], items):
                if rest[other.name] > 0:
                    rest[other.name] -= 1
                else:
                    yield other
            return


def _batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while batch := list(islice(items, size)):
        yield batch


class _Prepared(NamedTuple):
    """A batch as a worker hands it over; tensors of one shape are one, or each would take a file descriptor."""

    names: list[str]
    reasons: list[str | None]
    groups: list[tuple[list[int], Tensor]]  #: places in the batch, and their prepared items


class _Preparing(Dataset[Any]):
    """Prepares the item that it is asked for by itself."""

    def __init__(self, prepare: Callable[[Any], Tensor]) -> None:
        self._prepare = prepare

    def __getitem__(self, item: Item) -> tuple[str, Tensor | None, str | None]:
        if item.reason is not None:
            return item.name, None, item.reason
        try:
            return item.name, self._prepare(item.raw), None
        except Exception as error:  # the tools that read others' files raise nearly every kind
            return item.name, None, describe(error)


def describe(error: BaseException) -> str:
    """Why an item could not be scored; its name stands beside it."""
    if isinstance(error, DataFormatError):
        return error.reason
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _collate(items: Iterable[tuple[str, Tensor | None, str | None]]) -> _Prepared:
    names: list[str] = []
    reasons: list[str | None] = []
    places: dict[Any, list[tuple[int, Tensor]]] = {}
    for place, (name, tensor, reason) in enumerate(items):
        names.append(name)
        reasons.append(reason)
        if tensor is not None:
            places.setdefault((tensor.shape, tensor.dtype), []).append((place, tensor))
    groups = [([place for place, _ in group], torch.stack([each for _, each in group])) for group in places.values()]
    return _Prepared(names, reasons, groups)


def _judge(guard: Guard, batch: _Prepared, schema: pa.Schema, alpha: float | None) -> pa.Table:
    """The rows of a batch, in its order."""
    columns: dict[str, list[Any]] = {name: [None] * len(batch.names) for name in schema.names}
    columns[schema.names[0]], columns["reason"] = batch.names, list(batch.reasons)
    for places, prepared in batch.groups:
        try:
            found = guard.judge(prepared)
        except ValueError as error:  # what the guard refuses, such as features of another width
            for place in places:
                columns["reason"][place] = describe(error)
            continue
        scores, p_values = found.score.tolist(), found.p_value.tolist()
        flagged = found.is_ood if alpha is None else found.p_value <= alpha
        for place, score, p_value, is_ood, label, nearest in zip(
            places, scores, p_values, flagged.tolist(), found.label.tolist(), found.nearest.tolist(), strict=True
        ):
            columns["score"][place], columns["p_value"][place] = score, p_value
            columns["is_ood"][place] = is_ood or score != score
            columns["class"][place] = _class_name(guard, label)
            columns["nearest_class"][place] = _class_name(guard, nearest)
            if score != score:
                columns["reason"][place] = NOT_A_NUMBER
    columns["reason"] = [None if text is None else one_line(text)[:_LONGEST_REASON] for text in columns["reason"]]
    return pa.Table.from_pydict(columns, schema=schema)


def _class_name(guard: Guard, number: int) -> str:
    return one_line(guard.class_names[number]) if 0 <= number < len(guard.class_names) else str(number)
