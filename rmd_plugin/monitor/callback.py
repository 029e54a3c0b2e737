"""OODMonitor: a Lightning callback that refits detectors at each validation and logs how well they find OOD data."""

from __future__ import annotations

import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_ood.api import Detector, LogitsDetector
from torch import Tensor

from rmd_plugin.compare.metrics import check_set_names
from rmd_plugin.encoding.batch_encoder import BatchEncoder, Encoded, EncodingError
from rmd_plugin.encoding.isolation import isolated_rng, visiting
from rmd_plugin.monitor.evaluation import UNKNOWN, Evaluation
from rmd_plugin.monitor.journal import STAGES, Journal
from rmd_plugin.monitor.refit import Refit, food
from rmd_plugin.monitor.roster import Roster, Spec, load_roster
from rmd_plugin.monitor.sharding import own_samples
from rmd_plugin.monitor.trainer_access import (
    FitData,
    any_process,
    as_validation,
    encoded_batches,
    has_validation,
    running_loaders,
    trainer_limit,
    training_loaders,
)

_KIND, _FORMAT = "rmd_plugin.OODMonitor", 1


class OODMonitorWarning(UserWarning):
    """A detector could not be fitted or scored; its metrics are NaN and the training goes on."""


class OODMonitor(pl.Callback):
    """Fits OOD detectors on the training features at each validation, scores them, and logs the metrics.

    The module needs no change. Training with the monitor gives the same weights as without it, bit for bit. Under DDP
    every sample counts once, whatever the number of processes. Logged are, for each detector and OOD set,
    ``ood/<detector>/<set>/{AUROC,AUPR-IN,AUPR-OUT,FPR95TPR}``, their mean over the sets as ``ood/<detector>/mean/...``,
    and ``ood/<detector>/fit_seconds``; ``ModelCheckpoint`` and ``EarlyStopping`` can monitor them. The fitted detectors
    and the history travel in the Lightning checkpoint.

    ID scores come from the validation batches that the trainer runs anyway. Without validation the detectors are
    refitted at the end of the training epochs and saved, but not scored. The sanity check only checks that the batches
    can be encoded. In ``validate`` and ``test`` the detectors of the checkpoint are scored; one that it does not hold
    is fitted if there is a ``fit_loader``. With ``ddp_spawn`` the history stays in the worker processes (read it from a
    checkpoint), and Lightning hangs at the end of a fit that has logged more than about 200 metrics: use ``ddp``.

    Args:
        detectors: detectors by name, or names of rmd_plugin's. In place of a detector may stand a function that makes
            one from the LightningModule, called before each refit: for those that take weights of the network.
        head: dotted name of the classification layer, whose input is the features and whose output is the logits. By
            default the last ``nn.Linear`` that fires.
        ood: loaders of OOD data by name; their labels are ignored. By default ``ood_dataloaders()`` of the datamodule,
            if it has that method.
        encoder: the other way to the features, see :class:`rmd_plugin.encoding.batch_encoder.BatchEncoder`.
        forward: ``forward(module, batch)``, for batches that are neither (x, y) nor dicts.
        labels: ``labels(batch)``, the same.
        ood_dataloaders: validation (and test) dataloaders that hold OOD data: name by index.
        refit: ``"pass"``: a pass of its own over the fit loader, in evaluation mode. ``"stream"``: from the forward
            passes of the training epoch, at no cost, but of weights that were still changing, and in training mode.
        fit_loader: what to fit on. By default ``fit_dataloader()`` of the datamodule or module if there is one, else
            the training set, unshuffled, with its augmentation.
        limit_fit_batches: batches per process (int) or fraction (float) of the fit loader, spread over the set. By
            default the trainer's ``limit_train_batches``.
        limit_ood_batches: the same for ``ood``. By default the trainer's ``limit_val_batches``.
        every_n_epochs: refit and score at the validations of every n-th epoch. In between, monitoring callbacks see
            the last values; loggers get none.
        warmup_epochs: epochs to wait before the first time. Meanwhile monitoring callbacks see NaN, at which
            ``EarlyStopping`` stops unless it has ``check_finite=False``.
        figures_dir: folder for the figures. Loggers that take images get them in any case.
        on_error: ``"warn"``: a detector that fails is NaN for this epoch, with one warning. ``"raise"``: stop instead.
        prefix: first part of the metrics' names; several monitors need different ones.
        seed: of whatever detectors and loaders draw. The global random states are not touched.

    Example:
        >>> from rmd_plugin import RMD
        >>> from rmd_plugin.monitor.callback import OODMonitor
        >>> monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood_dataloaders={1: "svhn"})
    """

    def __init__(
        self,
        detectors: Mapping[str, Spec | str] | Sequence[str],
        head: str | None = None,
        ood: Mapping[str, Iterable[Any]] | None = None,
        *,
        encoder: str | Callable[[Any], Tensor] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        labels: Callable[[Any], Tensor | None] | None = None,
        ood_dataloaders: Mapping[int, str] | None = None,
        refit: Literal["pass", "stream"] = "pass",
        fit_loader: Iterable[Any] | None = None,
        limit_fit_batches: int | float | None = None,
        limit_ood_batches: int | float | None = None,
        every_n_epochs: int = 1,
        warmup_epochs: int = 0,
        figures_dir: str | PathLike[str] | None = None,
        on_error: Literal["warn", "raise"] = "warn",
        prefix: str = "ood",
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, choices in (("refit", refit, ("pass", "stream")), ("on_error", on_error, ("warn", "raise"))):
            if value not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
        if every_n_epochs < 1 or warmup_epochs < 0:
            raise ValueError(
                f"expected every_n_epochs >= 1 and warmup_epochs >= 0, got {every_n_epochs} and {warmup_epochs}."
            )
        if head is not None and encoder is not None:
            raise ValueError(f"give head or encoder, not both: got head={head!r} and encoder={encoder!r}.")
        self._roster = Roster(detectors)
        #: the classification layer, once it is found
        self.head = self._given_head = head
        # Hydra gives mappings of its own kind
        self.ood = None if ood is None else {str(name): ood[name] for name in ood}
        self.ood_dataloaders = {int(index): str(name) for index, name in (ood_dataloaders or {}).items()}
        check_names((*(self.ood or ()), *dict.fromkeys(self.ood_dataloaders.values())))
        self.encoder = encoder
        self.forward = forward
        self.labels = labels
        self.refit = refit
        self.fit_loader = fit_loader
        self.limit_fit_batches = limit_fit_batches
        self.limit_ood_batches = limit_ood_batches
        self.every_n_epochs = every_n_epochs
        self.warmup_epochs = warmup_epochs
        self.on_error = on_error
        self.prefix = prefix
        self.seed = seed
        self._journal = Journal(prefix, None if figures_dir is None else Path(figures_dir))
        self._saved_stream: list[dict[str, Any]] = []
        self._datamodule_ood: dict[str, Iterable[Any]] | None = None
        self._resuming = True  # else the state is only evaluated
        self._loaded = False
        self._told: set[str] = set()
        self._tap: BatchEncoder | None = None
        self._stream: Refit | None = None
        self._evaluation: Evaluation | None = None
        self._seen: defaultdict[int, int] = defaultdict(int)  # samples of each evaluation dataloader
        self._train_seen = 0

    # -- setup --------------------------------------------------------------------------------------------------------

    @property
    def detectors(self) -> dict[str, Detector]:
        """The detectors by name, as last fitted."""
        return self._roster.detectors

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row for each epoch, detector, OOD set and metric: stage, epoch, step, detector, ood, metric, value."""
        return self._journal.rows

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint."""
        return self._generate_state_key(prefix=self.prefix)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the name of the head, unless the module is still to be built."""
        if stage not in STAGES.values():
            return
        self.head, self._datamodule_ood = self._given_head, None
        self._resuming, self._loaded = stage == "fit", False
        try:
            self._new_tap(pl_module)
        except EncodingError:
            if not any(is_overridden(hook, pl_module) for hook in ("setup", "configure_model")):
                raise

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the hooks in place."""
        self._prepare(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the hooks in place, if this is not part of a fit."""
        if trainer.state.fn != TrainerFn.FITTING and not self._loaded and trainer.ckpt_path:
            self._load_checkpoint(str(trainer.ckpt_path))  # Lightning restores callbacks here only since 2.6
        self._prepare(pl_module)
        count = len(running_loaders(trainer))
        missing = [f"{index} ({name})" for index, name in self.ood_dataloaders.items() if index >= count]
        if missing:
            message = f"ood_dataloaders names dataloader {', '.join(missing)}, but there are only {count}."
            if trainer.state.fn == TrainerFn.FITTING:
                raise ValueError(f"{message} Return the OOD dataloaders after the others.")
            self._complain(message)

    on_test_start = on_validation_start

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the hooks away."""
        if self._tap is not None:
            self._tap.detach()
        self._tap = self._evaluation = self._stream = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the hooks away: Lightning does not call ``teardown`` after an error."""
        self.teardown(trainer, pl_module, "")

    def _new_tap(self, pl_module: pl.LightningModule) -> BatchEncoder:
        options: dict[str, Any] = {"encoder": self.encoder, "forward": self.forward, "labels": self.labels}
        return BatchEncoder(pl_module, self.head, **options)

    def _prepare(self, pl_module: pl.LightningModule) -> None:
        if self._tap is not None:
            return
        with isolated_rng(self.seed):
            self._roster.build(pl_module)
        on_inputs = [name for name, detector in self.detectors.items() if food(detector) == "inputs"]
        if self.refit == "stream" and on_inputs:
            raise ValueError(
                f"refit='stream' has no inputs to fit {', '.join(on_inputs)} on. Use refit='pass', or a second "
                "OODMonitor with another prefix for these detectors."
            )
        tap = self._new_tap(pl_module)
        if self.refit == "stream" and not tap.passive:
            raise ValueError(
                f"refit='stream' only listens, but encoder={self.encoder!r} has to be called. Use refit='pass', or "
                "name a layer with head= or encoder=."
            )
        tap.logits = any(isinstance(detector, LogitsDetector) for detector in self.detectors.values())
        self._tap = tap.attach()

    @property
    def _hooks(self) -> BatchEncoder:
        if self._tap is None:
            raise RuntimeError("OODMonitor is not set up. It works only inside of a Trainer.")
        return self._tap

    # -- training -----------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a new stream. Where validation does not follow the epochs, a stream runs from one to the next."""
        if trainer.check_val_every_n_epoch is not None:
            self._stream, self._saved_stream = None, []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Listen to the forward pass, if the detectors are fitted on those of the training."""
        if self.refit == "stream" and self._due(trainer):
            self._hooks.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add what was heard to the stream."""
        if self.refit != "stream" or not self._due(trainer):
            return
        if self._stream is None:
            self._stream, self._train_seen = Refit(self.detectors, pl_module.device), 0
            if trainer.is_global_zero:
                self._stream.load_moments(self._saved_stream)
            self._saved_stream = []
        encoded = self._heard(batch)
        if encoded is None:
            raise EncodingError(
                f"{self.head or 'nn.Linear'} took no part in the training step, so there is nothing to stream from. "
                "Name the classification layer with head=, or use refit='pass'."
            )
        start, rank, world = self._train_seen, trainer.global_rank, trainer.world_size
        self._train_seen += len(encoded)
        places = torch.arange(start, self._train_seen) * world + rank
        loaders = training_loaders(trainer)
        keep = own_samples(loaders[0], start, len(encoded), rank=rank, world=world) if len(loaders) == 1 else None
        if keep is not None:
            encoded, places = encoded.select(keep), places[keep]
        self._stream.update(encoded, places)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Without validation: refit, so that the checkpoints hold fitted detectors."""
        if has_validation(trainer) or not self._due(trainer):
            return
        with as_validation(trainer):
            self._refit(trainer, pl_module, list(self.detectors))
        self._complain("there is no validation: the detectors are fitted and saved, but not scored.", once=True)

    def _due(self, trainer: pl.Trainer) -> bool:
        epoch = trainer.current_epoch
        due = epoch >= self.warmup_epochs and (epoch + 1) % self.every_n_epochs == 0
        return due or trainer.state.fn != TrainerFn.FITTING

    # -- fitting ------------------------------------------------------------------------------------------------------

    def _refit(self, trainer: pl.Trainer, pl_module: pl.LightningModule, names: list[str]) -> list[str]:
        """Fit the detectors of these names and return the names of those that failed."""
        with isolated_rng(self.seed):
            self._roster.build(pl_module, names)
        detectors = {name: self.detectors[name] for name in names}
        data = self._fit_data(trainer, pl_module)
        streaming = self.refit == "stream" and trainer.state.fn == TrainerFn.FITTING
        refit = self._stream if streaming else Refit(detectors, pl_module.device)
        if refit is None:  # no training batch since the last time
            refit = Refit(detectors, pl_module.device)
        elif not streaming and refit.groups:
            data.feed(refit)
        outcomes = refit.finish(
            detectors,
            agree=lambda flags: any_process(trainer, pl_module, flags),
            loader=lambda: data,
            module=pl_module,
            seed=self.seed,
        )
        if trainer.check_val_every_n_epoch is None:
            self._stream = None
        for name, outcome in outcomes.items():
            self._journal.record(trainer, pl_module, name, "", "fit_seconds", outcome.seconds)
        for problem in self._roster.note(outcomes, epoch=trainer.current_epoch, step=trainer.global_step):
            self._complain(problem)
        return [name for name, outcome in outcomes.items() if outcome.failed]

    def _fit_data(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> FitData:
        options: dict[str, Any] = {"loader": self.fit_loader, "limit": self.limit_fit_batches, "seed": self.seed}
        return FitData(trainer, pl_module, self._hooks, **options)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refit, if the module is being trained, and get ready to score."""
        self._evaluation = None
        self._seen.clear()
        if trainer.sanity_checking:
            return
        sets = (*self._ood_loaders(trainer), *self._ood_among(trainer))
        if not self._due(trainer):
            self._journal.repeat(trainer, pl_module, self.detectors, sets)
            return
        failed: list[str] = []
        if trainer.state.fn == TrainerFn.FITTING:
            failed = self._refit(trainer, pl_module, list(self.detectors))
        else:
            unfitted = [name for name in self.detectors if not self._roster.is_fitted(name)]
            if unfitted and self._fit_data(trainer, pl_module).chosen:
                failed = self._refit(trainer, pl_module, unfitted)
        self._evaluation = Evaluation(
            self.detectors, check_names(sets), module=pl_module, device=pl_module.device, seed=self.seed
        )
        for name, reason in self._roster.unusable.items():
            self._evaluation.fail(name, "" if name in failed else reason)  # "": has been told already

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Listen to the forward pass of the evaluation step."""
        if self._evaluation is not None or trainer.sanity_checking:
            self._hooks.start()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Score what was heard."""
        if self._evaluation is None and not trainer.sanity_checking:
            return
        encoded = self._heard(batch) if self._hooks.passive else None
        if encoded is None:  # the step did not come by the head, or an encoder has to be called
            with visiting(pl_module, self.seed), trainer.precision_plugin.forward_context():
                encoded = self._hooks(batch)
        if self._evaluation is None:
            return  # the sanity check has seen that batches can be encoded
        loaders, start = running_loaders(trainer), self._seen[dataloader_idx]
        self._seen[dataloader_idx] += len(encoded)
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        keep = own_samples(loader, start, len(encoded), rank=trainer.global_rank, world=trainer.world_size)
        self._evaluation.add(encoded, batch, ood=self.ood_dataloaders.get(dataloader_idx), keep=keep)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the OOD loaders, then log the metrics."""
        if self._evaluation is None:
            return
        evaluation, self._evaluation = self._evaluation, None
        for name, loader in self._ood_loaders(trainer).items():
            self._score_loader(trainer, pl_module, evaluation, name, loader)
        results = evaluation.finish(lambda flags: any_process(trainer, pl_module, flags))
        for name, values in results.values.items():
            for key, value in values.items():
                ood, metric = key.rsplit("/", 1)
                self._journal.record(trainer, pl_module, name, ood, metric, value)
        self._journal.draw(trainer, results.scores)
        for problem in results.problems:
            self._complain(problem, once=not any(results.values.values()))

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _heard(self, batch: Any) -> Encoded | None:
        encoded = self._hooks.take(batch)
        if self.head is None and self._hooks.head is not None:
            self.head = self._hooks.head
            rank_zero_info(f"OODMonitor: the head is {self.head!r}, the last nn.Linear that fired.")
        return encoded

    def _score_loader(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        evaluation: Evaluation,
        name: str,
        loader: Iterable[Any],
    ) -> None:
        limit = self.limit_ood_batches
        if limit is None:
            limit = trainer_limit(trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches)
        batches = encoded_batches(trainer, pl_module, self._hooks, lambda: loader, limit=limit, seed=self.seed)
        with closing(batches):
            try:
                for batch, encoded, _ in batches:
                    evaluation.add(encoded, batch, ood=name)
            except EncodingError:
                raise
            except Exception as error:
                evaluation.fail_set(name, error)

    def _ood_loaders(self, trainer: pl.Trainer) -> dict[str, Iterable[Any]]:
        if self.ood is not None:
            return self.ood
        if self._datamodule_ood is None:
            datamodule: Any = getattr(trainer, "datamodule", None)
            with isolated_rng(self.seed):
                self._datamodule_ood = dict(
                    datamodule.ood_dataloaders() if hasattr(datamodule, "ood_dataloaders") else {}
                )
        return self._datamodule_ood

    def _ood_among(self, trainer: pl.Trainer) -> list[str]:
        count = len(running_loaders(trainer))
        return list(dict.fromkeys(name for index, name in self.ood_dataloaders.items() if index < count))

    def _complain(self, problem: str, *, once: bool = False) -> None:
        if once and problem in self._told:
            return
        self._told.add(problem)
        if self.on_error == "raise" and not once:
            raise RuntimeError(f"OODMonitor: {problem}")
        warnings.warn(f"OODMonitor: {problem}", OODMonitorWarning, stacklevel=3)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Fitted detectors and history, as plain data for ``torch.load(..., weights_only=True)``."""
        history = [dict(row) for row in self.history]
        own = {"kind": _KIND, "format": _FORMAT, "head": self.head, "history": history, "stream": []}
        return own | self._roster.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint. Evaluation alone keeps the history of the training before it."""
        _check_format(state_dict)
        if self._resuming or not self.history:
            self._journal.rows = [dict(row) for row in state_dict["history"]]
        self._loaded = True
        self._saved_stream = list(state_dict["stream"])
        self._roster.load_state_dict(state_dict, resuming=self._resuming)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the moments of an unfinished stream, those of all processes together."""
        # after an error the other processes may not come by here
        if self._stream is not None and trainer.state.status != TrainerStatus.INTERRUPTED:
            checkpoint["callbacks"][self.state_key]["stream"] = self._stream.moments_state()

    def _load_checkpoint(self, path: str) -> None:
        try:
            state = _monitor_states(path, "cpu").get(self.state_key)
        except (pickle.UnpicklingError, OSError) as error:
            self._complain(f"the detectors of {path!r} could not be read. {error}")
        else:
            if state is not None:
                self.load_state_dict(state)

    @classmethod
    def load_detectors(
        cls,
        path: str | PathLike[str],
        *,
        detectors: Mapping[str, Detector] | None = None,
        prefix: str | None = None,
        map_location: str | torch.device = "cpu",
    ) -> dict[str, Detector]:
        """Fitted detectors from a Lightning checkpoint, without the code or data of the training.

        Args:
            path: of the checkpoint.
            detectors: instances to be filled, for detectors that are neither rmd_plugin's nor the framework's.
            prefix: which monitor's, if there were several.
            map_location: device for their tensors.

        Returns:
            The fitted detectors by name, without encoder.

        Raises:
            ValueError: if the checkpoint has no state of a monitor, or of several.
        """
        found = _monitor_states(path, map_location)
        if prefix is not None:
            found = {key: state for key, state in found.items() if f"'prefix': {prefix!r}" in key}
        if len(found) != 1:
            raise ValueError(
                f"expected the state of one OODMonitor in {str(path)!r}, found {len(found)}: {', '.join(found)}. "
                "Was it saved with save_weights_only=True? With several monitors, pass prefix=."
            )
        state = next(iter(found.values()))
        _check_format(state)
        return load_roster(state, detectors)


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse names of OOD sets that cannot be told apart, or that mean something else."""
    if UNKNOWN in names:
        raise ValueError(f"an OOD set must not be named {UNKNOWN!r}: samples with labels below zero are.")
    return check_set_names(names) if names else ()


def _monitor_states(path: str | PathLike[str], map_location: str | torch.device) -> dict[str, dict[str, Any]]:
    states = torch.load(path, map_location=map_location, weights_only=True).get("callbacks", {})
    return {key: state for key, state in states.items() if isinstance(state, dict) and state.get("kind") == _KIND}


def _check_format(state: Mapping[str, Any]) -> None:
    if state.get("kind") != _KIND or state.get("format") != _FORMAT:
        raise ValueError(f"expected the state of an OODMonitor, format {_FORMAT}, got format {state.get('format')!r}.")
