"""A Lightning callback that records what figure 3 shows above the AUROC: accuracy on training and held-out samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from rmd_plugin.detectors.detectors import evaluating
from rmd_plugin.files import replacing

#: what it leaves in the folder of a run
ACCURACIES = "accuracies.json"


class AccuracyRecorder(Callback):
    """Notes the accuracy on training and held-out samples at every validation, and writes it when the training ends.

    So many training samples come from ``fit_dataloader`` of the data module: in order and without augmentation.
    """

    def __init__(self, samples: int = 1000) -> None:
        self.samples = samples
        self.points: list[tuple[int, float, float]] = []  #: step, training accuracy, held-out accuracy

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add a point."""
        held_out = trainer.callback_metrics.get("val/acc")
        if trainer.sanity_checking or held_out is None or not trainer.is_global_zero:
            return
        loader = cast(Any, trainer).datamodule.fit_dataloader()
        count = min(self.samples, len(loader.dataset))
        # every class is in it: the training data may be sorted by class
        chosen = Subset(loader.dataset, torch.linspace(0, len(loader.dataset) - 1, count).long().tolist())
        right = 0
        with evaluating(pl_module), torch.no_grad():
            # a generator of its own: the training must not notice
            for x, y in DataLoader(chosen, loader.batch_size, generator=torch.Generator()):
                logits = cast(Tensor, pl_module(x.to(pl_module.device)))
                right += int((logits.argmax(1).cpu() == y).sum())
        self.points.append((trainer.global_step, right / max(count, 1), float(held_out)))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write all points into the folder of the run."""
        if trainer.is_global_zero:
            with replacing(Path(trainer.default_root_dir) / ACCURACIES) as file:
                json.dump(self.points, file)

    def state_dict(self) -> dict[str, Any]:
        """The points, so that a resumed training keeps them."""
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the points of a checkpoint."""
        self.points = list(state_dict["points"])
