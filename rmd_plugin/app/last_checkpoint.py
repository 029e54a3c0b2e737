"""The Lightning callback that keeps ``last.ckpt``, from which a killed training goes on as if it had never stopped."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.trainer.states import TrainerFn

from rmd_plugin.encoding.isolation import random_states, restore_random_states


class LastCheckpoint(pl.Callback):
    """Writes ``last.ckpt`` when an epoch is over with all its logs, and when the training is.

    Beside what Lightning saves it holds the random states of every process, the lines of CSV loggers, and whether the
    training was stopped early. It must be the first callback: what the others do when an epoch begins is done again
    after a resume. The file is written aside and renamed, so it is whole at every moment.

    Args:
        dirpath: folder of the checkpoint.
    """

    def __init__(self, dirpath: str | os.PathLike[str]) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self._state: dict[str, Any] = {}
        self._found: dict[str, Any] | None = None  # state of the checkpoint that the training goes on from
        self._max_steps = -1
        self._saving = False

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Get ready to go on: bring the lines of the logs back, and do not go on where the training was over."""
        loop = trainer.fit_loop
        if trainer.state.fn != TrainerFn.FITTING:
            return
        # with max_steps Lightning would take up an epoch again that is over
        self._max_steps, loop.epoch_loop.max_steps = loop.max_steps, -1
        self._found = checkpoint.get("callbacks", {}).get(self.state_key)
        if self._found is None:
            return
        own = Path(str(trainer.ckpt_path)).absolute().parent == self.path.absolute().parent
        trainer.should_stop = own and self._found["stopped"]
        before, now = self._found.get("folder"), self._folder
        if own and before not in (None, now):  # else Lightning would take the best weights from where they were
            states = checkpoint["callbacks"]
            states.update({key: _moved(state, before, now) for key, state in states.items()})
        for logger, text in zip(_csv_loggers(trainer), self._found["logs"], strict=False):
            rows = csv.DictReader(io.StringIO(text))
            # it has deleted its file, and writes what it holds
            logger.experiment.metrics = [{name: value for name, value in row.items() if value} for row in rows]
            logger.save()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the limit of steps back."""
        if self._max_steps != -1:
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save that the epoch before is over, or go on from there."""
        if self._found is not None:
            self._go_on(trainer)
        elif trainer.current_epoch > 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect what the checkpoints of other callbacks hold."""
        self._collect(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the very end: averaged weights count, and what came after the last validation."""
        over = self._found is not None and Path(str(trainer.ckpt_path)).absolute() == self.path.absolute()
        self._go_on(trainer)
        if not over:  # else nothing was left to be trained
            self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Random states by process, text of the CSV logs, whether the training was stopped, the folder; plain data."""
        return self._state

    @property
    def _folder(self) -> str:
        return os.path.realpath(self.path.parent)  # as ModelCheckpoint writes it

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the progress down as Lightning does at the end of an epoch: that is how it goes on with a new one."""
        if self._saving:
            for count in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
                over = count["processed"]
                count.update(ready=over, started=over, completed=over - 1)

    def _collect(self, trainer: pl.Trainer) -> None:
        """Collect this callback's state, in every process at the same time."""
        states: list[Any] = [random_states()] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, random_states())
        logs = []
        for logger in _csv_loggers(trainer):
            logger.save()
            file = Path(logger.experiment.metrics_file_path)
            logs.append(file.read_text(encoding="utf-8") if file.is_file() else "")
        steps = trainer.max_steps
        stopped = bool(trainer.should_stop) or (steps > 0 and trainer.global_step >= steps)
        self._state = {"random": states, "logs": logs, "stopped": stopped, "folder": self._folder}

    def _save(self, trainer: pl.Trainer) -> None:
        self._collect(trainer)
        aside = self.path.with_name(f".{self.path.name}.tmp")
        self._saving = True
        try:
            trainer.save_checkpoint(aside, weights_only=False)
        except OSError:
            aside.unlink(missing_ok=True)  # a full disk needs the room
            raise
        finally:
            self._saving = False
        if trainer.is_global_zero:
            os.replace(aside, self.path)

    def _go_on(self, trainer: pl.Trainer) -> None:
        found, self._found = self._found, None
        self.restore_random_states(found, trainer.global_rank)

    @staticmethod
    def restore_random_states(state: Mapping[str, Any] | None, rank: int) -> None:
        """Bring back the random states of a process from this callback's state, if it holds them."""
        saved = (state or {}).get("random", [])
        if rank < len(saved):
            restore_random_states(saved[rank])


def _moved(state: Any, before: str, now: str) -> Any:
    """The state of a checkpoint callback whose folder was moved: with the paths of its files where they are now."""
    if not isinstance(state, dict) or state.get("dirpath") != before:
        return state

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {move(key): item for key, item in value.items()}
        return value.replace(before, now, 1) if isinstance(value, str) and value.startswith(before) else value

    return {name: move(value) for name, value in state.items()}


def _csv_loggers(trainer: pl.Trainer) -> list[Any]:
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger) and trainer.is_global_zero]
