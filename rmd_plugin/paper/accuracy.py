"""The Lightning callback that records what figure 3 shows above the AUROC: accuracy on training and held-out samples.

Config: ``callbacks.accuracy: {_target_: rmd_plugin.paper.accuracy.AccuracyRecorder}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from rmd_plugin.atomic import replacing
from rmd_plugin.encoding.isolation import evaluating

#: what it leaves in the folder of a run
ACCURACIES = "accuracies.json"

Point = tuple[int, float, float]


class AccuracyRecorder(Callback):
    """Notes the accuracy on training and held-out samples at every validation, and writes it when the training ends.

    So many training samples come from ``fit_dataloader`` of the data module: in order and without augmentation.
    """

    def __init__(self, samples: int = 1000) -> None:
        self.samples = samples
        self.points: list[Point] = []  #: step, training accuracy, held-out accuracy

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add a point."""
        held_out = trainer.callback_metrics.get("val/acc")
        if trainer.sanity_checking or held_out is None or not trainer.is_global_zero:
            return
        self.points.append((trainer.global_step, self._train_accuracy(trainer, pl_module), float(held_out)))

    def _train_accuracy(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        loader = cast(Any, trainer).datamodule.fit_dataloader()
        count = min(self.samples, len(loader.dataset))
        # every class is in it: the training data may be sorted by class
        chosen = Subset(loader.dataset, torch.linspace(0, len(loader.dataset) - 1, count).long().tolist())
        right = 0
        with evaluating(pl_module), torch.no_grad():
            # a generator of its own: the training must not notice
            for x, y in DataLoader(chosen, loader.batch_size, generator=torch.Generator()):
                predicted = cast(Tensor, pl_module(x.to(pl_module.device))).argmax(1)
                right += int((predicted.cpu() == y).sum())
        return right / max(count, 1)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write all points into the folder of the run."""
        if trainer.is_global_zero:
            with replacing(Path(trainer.default_root_dir) / ACCURACIES) as file:
                json.dump(self.points, file)

    def state_dict(self) -> dict[str, Any]:
        """The points, so that a training that goes on keeps them."""
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the points of a checkpoint."""
        self.points = list(state_dict["points"])


def read_accuracies(folder: Path) -> list[Point]:
    """What a recorder left in the folder of a run; empty if there was none."""
    file = folder / ACCURACIES
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [(step, train, held_out) for step, train, held_out in found]
