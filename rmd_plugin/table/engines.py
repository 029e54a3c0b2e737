"""Where files are worked on: a pool of processes, or Ray. Both map a function over files, whatever it does."""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
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
        results: list[str] = _ray_get(_ray_tasks(function, items))
        return results
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
        merge = require("ray", "ray", needed_by="engine=ray").remote(add).remote
        total: Result = _ray_get(tree_sum(_ray_tasks(function, items), merge))
        return total
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
    work = function if count == 1 else partial(_in_worker, function)
    done = kills = 0
    while done < len(items):
        # in order, and no more than a few results wait in memory for the one before them
        pool = Parallel(n_jobs=count, return_as="generator", pre_dispatch="2*n_jobs", batch_size=1, max_nbytes=None)
        try:
            for result in pool(delayed(work)(item) for item in items[done:]):
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


def _in_worker(function: Callable[[Item], Result], item: Item) -> Result:
    _freeze_imports()
    return function(item)


@lru_cache(maxsize=1)
def _freeze_imports() -> None:
    """Keep the objects of all imports out of the collection of garbage, which joblib asks for every second."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries count what is left at the end as leaks, and say so


# -- Ray --------------------------------------------------------------------------------------------------------------


def _ray_tasks(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Any]:
    """A task for each item: not actors, whose processes would start and import anew at every call."""
    ray = require("ray", "ray", needed_by="engine=ray")
    if not ray.is_initialized():
        ray.init()  # the cluster that RAY_ADDRESS names, or one on this machine
    shared = ray.put(function)  # once for all tasks: it may hold a detector
    work = ray.remote(_call)
    return [work.remote(shared, item) for item in items]


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    return function(item)


def _ray_get(tasks: Any) -> Any:
    """Results of tasks; our own error as it was, which one task may have passed on to the next."""
    ray = require("ray", "ray", needed_by="engine=ray")
    try:
        return ray.get(tasks)
    except ray.exceptions.RayTaskError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        raise (cause if isinstance(cause, DataFormatError) else error) from None
