"""The LightningModule of ``rmd-train``: a backbone trained with cross-entropy. Knows no detector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from rmd_plugin.backbones.checkpoint import PREPROCESSING
from rmd_plugin.backbones.transforms import ImageTransform

if TYPE_CHECKING:
    from rmd_plugin.backbones.base import Backbone

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]


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
        id_ = y >= 0
        # a batch without an ID sample gives a zero that still reaches every weight, as DDP wants
        loss = F.cross_entropy(logits[id_], y[id_]) if bool(id_.any()) else 0.0 * logits.sum()
        count = int(id_.sum())
        if count:
            accuracy = (logits[id_].argmax(1) == y[id_]).float().mean()
            values = {f"{stage}/loss": loss, f"{stage}/acc": accuracy}
            self.log_dict(
                values, prog_bar=True, on_epoch=True, on_step=False, batch_size=count, sync_dist=stage == "val"
            )
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note how pictures were prepared, for whoever loads the weights."""
        transform = self.backbone.test_transform
        if isinstance(transform, ImageTransform):
            checkpoint[PREPROCESSING] = repr(transform)

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
