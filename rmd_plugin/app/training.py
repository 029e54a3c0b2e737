"""Training a backbone on a benchmark with Lightning: the module and the data module that ``rmd-train`` uses.

Neither knows detectors. ``BenchmarkData`` offers ``fit_dataloader`` and ``ood_dataloaders``, which
:class:`rmd_plugin.OODMonitor` finds by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from rmd_plugin.backbones.base import Backbone
    from rmd_plugin.benchmarks.base import OODBenchmark, Split

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]
Transform = Callable[[Any], Tensor]


class Classifier(pl.LightningModule):
    """A backbone trained with cross-entropy; a frozen one trains its head only.

    Samples with a negative label (OOD) are left out. Logs ``train/loss``, ``val/loss`` and the accuracies.

    Args:
        backbone: network with a head, ``backbone(x) -> logits``.
        optimizer: makes the optimizer from the parameters that may learn; AdamW with lr 1e-3 by default.
        scheduler: makes a learning-rate scheduler from the optimizer.
        interval: whether the scheduler steps once per ``"epoch"`` or per ``"step"``.

    Raises:
        ValueError: if the backbone has no head.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
        interval: str = "epoch",
    ) -> None:
        super().__init__()
        if backbone.head is None:
            raise ValueError("the backbone has no head to train. Pass num_classes, or call reset_head(num_classes).")
        self.backbone = backbone
        self._make_optimizer = optimizer
        self._make_scheduler = scheduler
        self._interval = interval

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, K)."""
        return self.backbone(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        return self._step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        return self._step(batch, "val")

    def _step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        x, y = batch
        logits = self(x)
        known = y >= 0
        # a batch without a known label gives a zero that still reaches every weight, as DDP wants
        loss = F.cross_entropy(logits[known], y[known]) if bool(known.any()) else 0.0 * logits.sum()
        count = int(known.sum())
        if count:
            accuracy = (logits[known].argmax(1) == y[known]).float().mean()
            values = {f"{stage}/loss": loss, f"{stage}/acc": accuracy}
            self.log_dict(
                values, prog_bar=True, on_epoch=True, on_step=False, batch_size=count, sync_dist=stage == "val"
            )
        return loss

    def configure_optimizers(self) -> Any:
        """Optimizer and scheduler over the parameters that may learn."""
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = (
            torch.optim.AdamW(learning, lr=1e-3) if self._make_optimizer is None else self._make_optimizer(learning)
        )
        if self._make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._make_scheduler(optimizer), "interval": self._interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class BenchmarkData(pl.LightningDataModule):
    """The loaders of a benchmark.

    Args:
        benchmark: where the data comes from.
        train_transform: what the network wants in front of training items; None leaves it to the benchmark.
        test_transform: the same for all other items.
        batch_size: samples per batch.
        num_workers: worker processes per loader.
        seed: of the shuffling; the global random state is not used.
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
