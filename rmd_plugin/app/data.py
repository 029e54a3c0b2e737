"""The data module of ``rmd-train``: the loaders of a benchmark.

It offers ``fit_dataloader`` and ``ood_dataloaders``, which :class:`rmd_plugin.OODMonitor` finds by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from rmd_plugin.benchmarks.base import OODBenchmark, Split

Transform = Callable[[Any], Tensor]


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

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training samples behind the training transform."""
        return self._loader(self.benchmark.train_set(), self.train_transform, shuffle=True)

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
        return DataLoader(
            data if transform is None else data.with_transform(transform),
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            # a generator of its own: other loaders and callbacks cannot change the order of the training data
            generator=torch.Generator().manual_seed(self.seed),
        )
