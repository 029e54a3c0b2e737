"""Each process's share of a loader: no padding, no duplicates, no trace in the global random state.

Lightning's ``DistributedSampler`` repeats samples until every rank has as many as the others. Here a loader is made
anew around the same dataset, in order and with a generator of its own, and each rank takes every world-th sample. Where
Lightning's sampler is in use, :func:`own_samples` tells which samples of a batch are repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler


@dataclass(frozen=True)
class Shard:
    """A process's share of a loader: samples dealt out one by one (``by_sample``), or whole batches."""

    batches: Iterable[Any]
    rank: int
    world: int
    by_sample: bool

    def positions(self, batch: int, start: int, size: int) -> Tensor:
        """Numbers (size,) that put the samples of all processes into one order, the loader's own if it has one.

        ``start`` is the number of samples in the batches of this share before the one with the number ``batch``.
        """
        offsets = torch.arange(size)
        if self.by_sample:
            return (start + offsets) * self.world + self.rank
        return ((batch * self.world + self.rank) << 32) + offsets


def shard(
    loader: Iterable[Any], *, rank: int = 0, world: int = 1, limit: float | int | None = None, seed: int = 0
) -> Shard:
    """The share of one process.

    A ``DataLoader`` over a map-style dataset is rebuilt: same dataset, batch size, collation and number of workers, but
    unshuffled, with its own generator, and restricted to the indices of a ``SubsetRandomSampler`` if it has one. With a
    limit, samples (of a list its batches) are drawn from all over the set, whatever the order of its labels, and the
    same for any number of processes. Of other iterables each process takes every world-th batch, with a limit the first
    ones; a loader over an ``IterableDataset`` has to share itself out between the processes, as always in Lightning.

    Args:
        loader: yields batches.
        rank: of this process.
        world: number of processes.
        limit: batches per process (int), or the fraction of all batches (float); None for all.
        seed: of the draws, and of the loader's generator, which seeds its workers.
    """
    if limit is not None and (isinstance(limit, bool) or limit <= 0 or (isinstance(limit, float) and limit > 1)):
        raise ValueError(f"the limit must be a positive number of batches or a fraction up to 1.0, got {limit!r}.")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return _shard_batches(loader, rank, world, limit, seed)
    indices = _dataset_indices(loader)
    # batch_size None: the dataset yields whole batches
    whole = loader.batch_sampler is None
    size = 1 if whole else loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 64
    if limit is not None:
        batches = limit * world if isinstance(limit, int) else math.ceil(limit * math.ceil(len(indices) / size))
        count = min(len(indices), batches * size)
        indices = [indices[i] for i in _spread(len(indices), count, seed)]
    batches_of_rank: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=None if whole else size,
        sampler=indices[rank::world],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        generator=torch.Generator().manual_seed(seed),
    )
    return Shard(batches_of_rank, rank, world, by_sample=not whole)


def own_samples(loader: object, start: int, size: int, *, rank: int, world: int) -> Tensor | None:
    """Which samples of a batch count on this process, so that over all processes each counts once.

    The batch holds ``size`` samples of a loader that Lightning runs, after ``start`` others. Gives a mask of shape
    (size,), or None if all of them count, or if the loader does not tell.
    """
    if world == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    positions = torch.arange(start, start + size)
    if isinstance(sampler, DistributedSampler):
        # rank r holds positions r, r + world, ... of the set, which is padded at its end by its first samples
        return positions * sampler.num_replicas + sampler.rank < len(sampler.dataset)  # type: ignore[arg-type]
    if isinstance(sampler, SequentialSampler):
        return positions % world == rank  # use_distributed_sampler=False: every process runs the whole set
    return None


def _spread(total: int, count: int, seed: int) -> list[int]:
    """A random index from each of ``count`` equal strata of ``range(total)``."""
    # neither the first ones nor every n-th: labels may be sorted, and they may be interleaved
    edges = torch.arange(count + 1) * total // count
    draws = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (edges[:-1] + (draws * edges.diff()).long()).tolist()


def _shard_batches(loader: Iterable[Any], rank: int, world: int, limit: float | int | None, seed: int) -> Shard:
    self_sharding = isinstance(loader, DataLoader)
    if isinstance(limit, float):
        if limit == 1.0:
            limit = None
        elif isinstance(loader, Sized):
            limit = math.ceil(limit * len(loader) / (1 if self_sharding else world))
        else:
            raise ValueError(f"a loader without a length cannot be limited to the fraction {limit}. Give an integer.")
    if limit is not None and isinstance(loader, Sequence):
        chosen = _spread(len(loader), min(len(loader), int(limit) * world), seed)
        return Shard([loader[i] for i in chosen[rank::world]], rank, world, by_sample=False)
    start, step = (0, 1) if self_sharding else (rank, world)
    share = islice(loader, start, None if limit is None else int(limit) * step, step)
    return Shard(share, rank, world, by_sample=False)


def _dataset_indices(loader: DataLoader[Any]) -> Sequence[int]:
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    # Lightning wraps a sampler of the user's into a distributed one: dataset -> _sampler
    while isinstance(sampler, DistributedSampler) and hasattr(sampler.dataset, "_sampler"):
        sampler = sampler.dataset._sampler
    indices = getattr(sampler, "indices", None)
    if isinstance(indices, Tensor):
        indices = indices.tolist()
    return indices if isinstance(indices, (list, tuple, range)) else range(len(loader.dataset))  # type: ignore[arg-type]
