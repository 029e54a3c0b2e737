"""Where files are worked on: a pool of processes, or Ray. Both map a function over files, whatever it does."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from joblib import Parallel, delayed  # type: ignore[import-untyped]
from joblib.externals.loky.process_executor import TerminatedWorkerError  # type: ignore[import-untyped]

from rmd_plugin.extras import require
from rmd_plugin.untrusted import DataFormatError

log = logging.getLogger(__name__)

ENGINES = ("local", "ray")
#: of workers without a file that is finished in between, until it is given up
_KILLS = 3

Item = TypeVar("Item")
Result = TypeVar("Result")


def check_engine(engine: str, workers: int | None) -> None:
    """Refuse an engine that there is not, or that is not installed."""
    if engine not in ENGINES:
        raise ValueError(
            f"engine must be {' or '.join(map(repr, ENGINES))}, got {engine!r}. Other engines map table_state over the "
            "files and add up what it gives, see docs/scale.md."
        )
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, or None for all processors, got {workers}.")
    if engine == "ray":
        require("ray", "ray", needed_by="engine=ray")


def map_files(
    engine: str, function: Callable[[Item], str], items: Sequence[Item], workers: int | None
) -> Iterable[str]:
    """What a function gives for each item, a text, in their order."""
    if engine == "ray":
        return _ray_map(function, items, workers)
    return _local_map(function, items, workers)


def reduce_files(
    engine: str,
    function: Callable[[Item], Result],
    add: Callable[[Result, Result], Result],
    items: Sequence[Item],
    workers: int | None,
) -> Result:
    """The sum of what a function gives for each item, by the same tree on every engine."""
    if engine == "ray":
        return _ray_reduce(function, add, items)
    return tree_sum(_local_map(function, items, workers), add)


def tree_sum(parts: Iterable[Result], add: Callable[[Result, Result], Result]) -> Result:
    """Sum of at least one part by a binary tree over their order; as many as the tree is high are held at a time.

    Example:
        >>> tree_sum("abcde", lambda a, b: f"({a}{b})")
        '(((ab)(cd))e)'
    """
    sums: list[tuple[int, Result]] = []
    for part in parts:
        size = 1
        while sums and sums[-1][0] == size:
            part, size = add(sums.pop()[1], part), 2 * size
        sums.append((size, part))
    total = sums.pop()[1]
    while sums:
        total = add(sums.pop()[1], total)
    return total


# -- processes of this machine ----------------------------------------------------------------------------------------


def _local_map(function: Callable[[Item], Result], items: Sequence[Item], workers: int | None) -> Iterator[Result]:
    count = min(workers or os.cpu_count() or 1, len(items))
    done = kills = 0
    while done < len(items):
        # in order, and no more than a few results wait in memory for the one before them
        pool = Parallel(n_jobs=count, return_as="generator", pre_dispatch="2*n_jobs", batch_size=1, max_nbytes=None)
        try:
            for result in pool(delayed(function)(item) for item in items[done:]):
                done, kills = done + 1, 0
                yield result
        except TerminatedWorkerError:
            kills += 1
            if kills == _KILLS:
                raise RuntimeError(
                    f"a worker process was killed {kills} times at file {done + 1} of {len(items)} or soon after it. "
                    "Was there enough memory? Fewer workers need less: workers=."
                ) from None
            log.warning("a worker process was killed: going on at file %d of %d", done + 1, len(items))


# -- Ray --------------------------------------------------------------------------------------------------------------


class _Actor:
    """Holds the function, with what it has loaded, for all files that come to its process."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> None:
        self.function, self.items = function, items

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"], "result": [self.function(self.items[number]) for number in batch["id"]]}


def _ray_reduce(
    function: Callable[[Item], Result], add: Callable[[Result, Result], Result], items: Sequence[Item]
) -> Result:
    ray = _start_ray()

    @ray.remote
    def work(item: Item) -> Result:
        return function(item)

    @ray.remote
    def merge(first: Result, second: Result) -> Result:
        return add(first, second)

    try:
        found: Result = ray.get(tree_sum(map(work.remote, items), merge.remote))
    except ray.exceptions.RayTaskError as error:
        # our own error, which one task has passed on to the next
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        raise (cause if isinstance(cause, DataFormatError) else error) from None
    return found


def _ray_map(function: Callable[[Item], str], items: Sequence[Item], workers: int | None) -> list[str]:
    ray = _start_ray()
    data = require("ray.data", "ray", needed_by="engine=ray")
    count = min(workers or max(1, int(ray.cluster_resources().get("CPU", 1))), len(items))
    # not data.range: its tasks would wait for ever on processors that the actors hold
    numbers = data.from_items([{"id": number} for number in range(len(items))], override_num_blocks=len(items))
    rows = numbers.map_batches(
        _Actor, fn_constructor_args=(function, items), batch_size=1, compute=data.ActorPoolStrategy(size=count)
    ).take_all()
    return [row["result"] for row in sorted(rows, key=lambda row: row["id"])]


def _start_ray() -> Any:
    """Ray, with the cluster that the user has started or that RAY_ADDRESS names; else one on this machine."""
    ray = require("ray", "ray", needed_by="engine=ray")
    if not ray.is_initialized():
        ray.init()
    return ray
