"""Detectors fitted on the forward passes of the training itself: no pass of their own, weights that still change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch

from rmd_plugin.compare.adapters import Adapter
from rmd_plugin.encoding.batches import Encoded
from rmd_plugin.monitor.refit import Refit
from rmd_plugin.monitor.sharding import own_samples
from rmd_plugin.monitor.trainer_access import training_loaders


class TrainingStream:
    """Gathers encoded training batches until the next refit. Every sample counts once, over all processes."""

    def __init__(self) -> None:
        #: what has been gathered; None before the first batch
        self.refit: Refit | None = None
        self._seen = 0
        self._saved: list[dict[str, Any]] = []  # moments of a checkpoint in the middle of an epoch

    def clear(self) -> None:
        """Forget what has been gathered."""
        self.refit, self._saved = None, []

    def load(self, saved: list[dict[str, Any]]) -> None:
        """Go on from the moments of a checkpoint."""
        self._saved = list(saved)

    def add(
        self, trainer: pl.Trainer, module: pl.LightningModule, adapters: Mapping[str, Adapter], encoded: Encoded
    ) -> None:
        """Add a training batch."""
        if self.refit is None:
            self.refit, self._seen = Refit(adapters, module.device), 0
            if trainer.is_global_zero:
                self.refit.load_moments(self._saved)
            self._saved = []
        start, rank, world = self._seen, trainer.global_rank, trainer.world_size
        self._seen += len(encoded)
        places = torch.arange(start, self._seen) * world + rank
        loaders = training_loaders(trainer)
        keep = own_samples(loaders[0], start, len(encoded), rank=rank, world=world) if len(loaders) == 1 else None
        if keep is not None:
            encoded, places = encoded.select(keep), places[keep]
        self.refit.update(encoded, places)
