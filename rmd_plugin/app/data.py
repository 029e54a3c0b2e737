"""The data module of ``rmd-train``: the loaders of a benchmark.

It offers ``fit_dataloader`` and ``ood_dataloaders``, which :class:`rmd_plugin.OODMonitor` finds by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from rmd_plugin.benchmarks.base import OODBenchmark, Split

Transform = Callable[[Any], Tensor]


class _ShuffledLoader(DataLoader[Any]):
    """A loader whose order does not change if an iterator is asked for again before its first batch was taken.

    That is what Lightning before 2.6 does when a training goes on.
    """

    _before: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._before is not None:
            self.generator.set_state(self._before)
        self._before = self.generator.get_state()
        return self._batches(super().__iter__())

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._before = None
            yield batch


class BenchmarkData(pl.LightningDataModule):
    """The loaders of a benchmark.

    The transforms are what the network wants in front of training items and of all others; None leaves it to the
    benchmark. ``seed`` is that of the shuffling: the global random state is not used.
    """

    def __init__(
        self,
        benchmark: OODBenchmark,
        *,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        batch_size: int = 128,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.benchmark = benchmark
        self.train_transform = train_transform
        self.test_transform = test_transform
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._shuffling: torch.Generator | None = None  # of the training loader in use
        self._saved: Tensor | None = None  # its state in the checkpoint that the training goes on from

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training samples behind the training transform."""
        loader = self._loader(self.benchmark.train_set(), self.train_transform, shuffle=True)
        self._shuffling, saved, self._saved = loader.generator, self._saved, None
        if saved is not None:
            loader.generator.set_state(saved)
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Where the shuffling is: between two epochs that says in which order the next one comes."""
        return {} if self._shuffling is None else {"shuffling": self._shuffling.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next training loader go on from there."""
        self._saved = state_dict["shuffling"]

    def val_dataloader(self) -> DataLoader[Any]:
        """Held-out in-distribution samples."""
        return self._loader(self.benchmark.val_set(), self.test_transform)

    def fit_dataloader(self) -> DataLoader[Any]:
        """Training samples behind the clean transform, in order: what detectors are fitted on."""
        return self._loader(self.benchmark.fit_set(), self.test_transform)

    def ood_dataloaders(self) -> dict[str, DataLoader[Any]]:
        """OOD test sets by name. They are only looked at, never trained or selected on."""
        sets = zip(self.benchmark.ood_names, self.benchmark.test_oods, strict=True)
        return {name: self._loader(data, self.test_transform) for name, data in sets}

    def _loader(self, data: Split, transform: Transform | None, *, shuffle: bool = False) -> DataLoader[Any]:
        kind = _ShuffledLoader if shuffle else DataLoader
        return kind(
            data if transform is None else data.with_transform(transform),
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            # workers that shuffle and augment begin anew with each epoch: their random states are in no checkpoint
            persistent_workers=self.num_workers > 0 and not shuffle,
            # a generator of its own: other loaders and callbacks cannot change the order of the training data
            generator=torch.Generator().manual_seed(self.seed),
        )
