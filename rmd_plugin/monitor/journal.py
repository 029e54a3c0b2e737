"""What becomes of a monitor's numbers: rows of history, Lightning's log, figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from rmd_plugin.compare.metrics import MEAN, METRICS

STAGES = {TrainerFn.FITTING: "fit", TrainerFn.VALIDATING: "validate", TrainerFn.TESTING: "test"}


class Journal:
    """Keeps and logs one value for each epoch, detector, OOD set and metric. Figures go to ``folder``, if any."""

    def __init__(self, prefix: str, folder: str | PathLike[str] | None = None) -> None:
        self.prefix = prefix
        self.folder = None if folder is None else Path(folder)
        self.rows: list[dict[str, Any]] = []

    def record(self, trainer: pl.Trainer, detector: str, ood: str, metric: str, value: float) -> None:
        """Keep a value and log it. An empty ``ood`` means that it belongs to no OOD set."""
        when = {"stage": stage_of(trainer), "epoch": trainer.current_epoch, "step": trainer.global_step}
        self.rows.append({**when, "detector": detector, "ood": ood, "metric": metric, "value": value})
        name = "/".join(part for part in (detector, ood, metric) if part)
        self._log(trainer, name, value)

    def repeat(
        self, trainer: pl.Trainer, detectors: Iterable[str], sets: Sequence[str], metrics: Sequence[str] = METRICS
    ) -> None:
        """Show the last values, or NaN before the first, to the callbacks that monitor a metric; loggers get none.

        ``ModelCheckpoint`` and ``EarlyStopping`` end the training if the metric that they monitor is missing. Lightning
        refuses a name that is logged with other options in the same hook, so call it in another one than ``record``.
        """
        last = {(row["detector"], row["ood"], row["metric"]): row["value"] for row in self.rows if row["ood"]}
        for detector in detectors:
            for ood in [*sets, MEAN] if sets else []:
                for metric in metrics:
                    last.setdefault((detector, ood, metric), math.nan)
        for key, value in last.items():
            self._log(trainer, "/".join(key), value, logger=False)

    def _log(self, trainer: pl.Trainer, name: str, value: float, *, logger: bool | None = None) -> None:
        if not trainer.barebones:
            module = trainer.lightning_module
            number = _Number().to(module.device)
            number.update(value)
            options: dict[str, Any] = {"on_step": False, "on_epoch": True, "add_dataloader_idx": False}
            module.log(f"{self.prefix}/{name}", number, logger=logger, metric_attribute=self.prefix, **options)

    def draw(self, trainer: pl.Trainer, scores: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        """Draw histograms of the scores, ID and of each OOD set, and, in a fit, the curves of AUROC."""
        loggers = _image_loggers(trainer)
        if not trainer.is_global_zero or not scores or not (self.folder or loggers):
            return
        from rmd_plugin.report.figures import histogram_figure  # imports matplotlib
        from rmd_plugin.report.run_figures import epochs_figure
        from rmd_plugin.report.scores import ID
        from rmd_plugin.report.style import publish

        arrays = {
            name: {ood: found.cpu().numpy() for ood, found in {ID: on_id, **on_ood}.items()}
            for name, (on_id, on_ood) in scores.items()
        }
        stage = stage_of(trainer)
        figures = {f"histograms-{stage}": histogram_figure(arrays, detectors=list(arrays))}
        if stage == "fit":
            figures["auroc"] = epochs_figure([row for row in self.rows if row["stage"] == "fit"])
        try:
            publish(figures, self.folder, loggers, prefix=self.prefix, step=trainer.global_step)
        except Exception as error:  # a full disk or a lost connection; only this process draws, so it must not stop
            rank_zero_warn(f"OODMonitor: the figures could not be saved. {type(error).__name__}: {error}")


class _Number(Metric):
    """A number that is the same on every process: logged as a metric, it needs none of Lightning's reductions."""

    full_state_update: bool = False
    value: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("value", torch.tensor(math.nan))

    def update(self, value: float) -> None:
        self.value = torch.tensor(value, dtype=self.value.dtype, device=self.value.device)

    def compute(self) -> Tensor:
        return self.value


def stage_of(trainer: pl.Trainer) -> str:
    """``"fit"``, ``"validate"`` or ``"test"``."""
    return STAGES[trainer.state.fn]  # type: ignore[index]


def _image_loggers(trainer: pl.Trainer) -> list[Any]:
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return []  # its dummy logger takes anything
    return [
        logger
        for logger in trainer.loggers
        if hasattr(logger, "log_image") or hasattr(getattr(logger, "experiment", None), "add_figure")
    ]
