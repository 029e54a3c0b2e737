"""OODMonitor: a Lightning callback that refits detectors at each validation and logs how well they find OOD data."""

from __future__ import annotations

import math
import pickle
import time
import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from os import PathLike
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, cast

import pandas as pd  # type: ignore[import-untyped]
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.rank_zero import WarningCache
from pytorch_ood.api import Detector
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from rmd_plugin.compare import adapters
from rmd_plugin.compare.adapters import Encoded, EncodingError, Representation
from rmd_plugin.compare.metrics import MEAN, METRICS, check_set_names, compare_scores
from rmd_plugin.compare.rows import DETECTED, FALSE_ALARMS, THRESHOLD
from rmd_plugin.detectors.conformal import Calibrated, Calibration
from rmd_plugin.detectors.drift import DriftAlarm, check_level
from rmd_plugin.detectors.snapshot import NotKeptError, build_detector, restore_snapshot, take_snapshot
from rmd_plugin.files import detector_options, replacing
from rmd_plugin.monitor import Callback, fitting
from rmd_plugin.monitor.features import BatchEncoder, Encoding, as_linear, is_linear, isolated_rng, visiting
from rmd_plugin.monitor.fitting import Fit, Share, Watched, encode_share, reason_of, runs_together, training_loader

__all__ = ["OODMonitor", "OODMonitorWarning"]

#: a detector; or the name, the class or a partial of the class of one
Spec = Detector | Callable[..., Detector]
#: the first is for LightningCLI, which builds what is named by class
Loader = DataLoader | Iterable[Any]

#: the OOD set of samples that only their label below zero marks
UNKNOWN = "unknown"
#: of the states in checkpoints
FORMAT = "rmd_plugin.OODMonitor 4"


class OODMonitorWarning(UserWarning):
    """A detector could not be fitted or scored; its metrics are NaN and the training goes on."""


class OODMonitor(Callback):
    """Fits OOD detectors on the training features at each validation, scores them, and logs the metrics.

    The module needs no change. Training with the monitor gives the same weights as without it, bit for bit, unless the
    data keep state of their own in the main process (docs/lightning.md). Under DDP and FSDP2
    (``ModelParallelStrategy``) every sample counts once. Logged are, for each detector and OOD set,
    ``ood/<detector>/<set>/{AUROC,AUPR-IN,AUPR-OUT,FPR95TPR}``, their mean over the sets as ``ood/<detector>/mean/...``,
    and ``ood/<detector>/fit_seconds``; ``ModelCheckpoint`` and ``EarlyStopping`` can monitor them. The fitted detectors
    and the history travel in the Lightning checkpoint.

    The ID validation scores also calibrate the detectors: ``ood/<detector>/threshold`` is the score above which a
    sample is OOD at ``alpha``, ``ood/<detector>/<set>/detected`` the share of an OOD set that is flagged, and in
    ``validate`` and ``test`` ``ood/<detector>/false_alarms`` the share of ID samples that is flagged. A validation set
    that also chose the epoch or stopped the training makes the promise weaker, see docs/decisions.md.

    ID scores come from the validation batches that the trainer runs anyway. Without validation the detectors are
    refitted at the end of the training epochs and saved, but not scored; likewise at the end of the training, if its
    last step has had no validation (``max_steps`` within an epoch). In ``validate`` and ``test`` the detectors of the
    checkpoint are scored; one that it does not hold is fitted if there is a ``fit_loader``. Wrong settings are errors
    before the first training step; later, with ``on_error="warn"``, nothing of the monitor ends a training.

    Args:
        detectors: detectors by name; or names alone, those that ``detector=`` of the commands takes, as
            ``["rmd", "knn"]``. In place of a detector may stand such a name, its class, or a ``functools.partial`` of
            it with options (``_partial_: true`` in Hydra): it is built before each refit from what the module offers,
            the weights of the head, the number of classes, or the module itself for detectors on inputs. The
            framework's detectors ask for a network that the monitor does not use: ``KNN``, ``partial(KNN, k=50)``,
            ``KNN(None, k=50)`` or ``"knn"``. A :class:`rmd_plugin.FusedRMD` without a head gets the network's.
        head: dotted name of the classification layer, whose input is the features and whose output is the logits. By
            default the last linear layer whose output the network returns; the log names it. Of tokens the features
            are the position that is classified, or the mean, whichever gives the network's logits.
        ood: loaders of OOD data by name; their labels are ignored. By default ``ood_dataloaders()`` of the datamodule
            or module, if there is one.
        encoder: the other way to the features: dotted name of the submodule whose output they are.
        forward: ``forward(module, batch)`` runs the module in the monitor's own passes. By default the module's own
            ``predict_step``, else ``forward`` with the inputs, which dicts keep under the usual names.
        labels: ``labels(batch)`` gives the labels of a batch. By default the second of a pair, or the entry of a dict
            under one of the usual names.
        ood_dataloaders: validation, test and predict dataloaders that hold OOD data: name by index. A stage that has
            fewer dataloaders goes without.
        refit: ``"pass"``: a pass of its own over the fit loader, in evaluation mode. ``"stream"``: from the forward
            passes of the training epoch, at no cost, but of weights that were still changing, and in training mode.
        fit_loader: what to fit on. By default ``fit_dataloader()`` of the datamodule or module if there is one, else
            the training set, unshuffled, with its augmentation.
        limit_fit_batches: batches per process (int) or fraction (float) of the fit loader, drawn from all over
            the set. By default the trainer's ``limit_train_batches``. A stream has all batches of the training.
        limit_ood_batches: the same for ``ood``. By default the trainer's ``limit_val_batches``.
        every_n_epochs: refit and score at the validations of every n-th epoch. In between, monitoring callbacks see
            the last values; loggers get none.
        warmup_epochs: epochs to wait before the first time. Meanwhile monitoring callbacks see NaN, at which
            ``EarlyStopping`` stops unless it has ``check_finite=False``.
        figures_dir: folder for the figures. Loggers get them in any case.
        predictions: Parquet file for what ``trainer.predict`` gives, see :attr:`predictions`.
        calibrate: whether the ID validation scores calibrate the detectors.
        alpha: share of ID samples that may be flagged.
        on_error: ``"warn"``: a detector that fails is NaN for this epoch, with one warning. ``"raise"``: stop instead.
        prefix: first part of the metrics' names; several monitors need different ones.
        seed: of whatever detectors and loaders draw. The global random states are not touched.

    Example:
        >>> from pytorch_ood.detector import ViM
        >>> from rmd_plugin import RMD, OODMonitor
        >>> monitor = OODMonitor({"rmd": RMD(), "vim": ViM}, head="model.fc", ood_dataloaders={1: "svhn"})
    """

    def __init__(
        self,
        # str first: LightningCLI would take a name of ours for the framework's detector of that name
        detectors: Mapping[str, str | Spec] | Sequence[str],
        head: str | None = None,
        ood: Mapping[str, Loader] | None = None,
        *,
        encoder: str | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        labels: Callable[[Any], Tensor | None] | None = None,
        ood_dataloaders: Mapping[int, str] | None = None,
        refit: Literal["pass", "stream"] = "pass",
        fit_loader: Loader | None = None,
        limit_fit_batches: int | float | None = None,
        limit_ood_batches: int | float | None = None,
        every_n_epochs: int = 1,
        warmup_epochs: int = 0,
        figures_dir: str | PathLike[str] | None = None,
        predictions: str | PathLike[str] | None = None,
        calibrate: bool = True,
        alpha: float = 0.05,
        on_error: Literal["warn", "raise"] = "warn",
        prefix: str = "ood",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if refit not in ("pass", "stream") or on_error not in ("warn", "raise") or every_n_epochs < 1:
            options = f"refit={refit!r}, on_error={on_error!r}, every_n_epochs={every_n_epochs}"
            raise ValueError(f"expected 'pass' or 'stream', 'warn' or 'raise', and a positive number, got {options}.")
        if head is not None and encoder is not None:
            raise ValueError(f"give head or encoder, not both: got head={head!r} and encoder={encoder!r}.")
        check_level("alpha", alpha)
        self._watched = {name: Watched(spec, float(alpha)) for name, spec in read_detectors(detectors).items()}
        self.ood = None if ood is None else check_loaders(ood)
        self.ood_dataloaders = {int(index): str(name) for index, name in (ood_dataloaders or {}).items()}
        check_set_names((*(self.ood or ()), *dict.fromkeys(self.ood_dataloaders.values()), UNKNOWN))
        self._head, self.encoder, self.forward, self.labels = head, encoder, forward, labels
        self.refit, self.fit_loader = refit, fit_loader
        self.limit_fit_batches, self.limit_ood_batches = limit_fit_batches, limit_ood_batches
        self.every_n_epochs, self.warmup_epochs = every_n_epochs, warmup_epochs
        self.calibrate, self.alpha = calibrate, float(alpha)
        self.figures_dir, self.predictions_path = figures_dir, predictions
        self.on_error, self.prefix, self.seed = on_error, prefix, seed
        self.history: list[dict[str, Any]] = []  #: rows: stage, epoch, step, detector, ood, metric, value
        #: after ``trainer.predict``: score, p-value and decision of each detector for each sample
        self.predictions: pd.DataFrame | None = None
        #: after ``trainer.predict``: has the stream changed? One for each calibrated detector
        self.drift_alarms: dict[str, DriftAlarm] = {}
        self._metrics = (*METRICS, DETECTED) if calibrate else METRICS
        self._classes: set[int] = set()  # labels of the samples of the last fit
        self._num_classes = 0  # of the logits; 0 if it is not known
        self._fit_step: int | None = None  # of the last fit in this training, failed or not
        self._saved: dict[str, Any] = {}  # the state of a checkpoint, until the detectors are built
        self._told = WarningCache()
        # of one run
        self._stage = "fit"
        self._encoder: Any = None  # a BatchEncoder
        self._fit_source: Any = None  # what to fit on, if not on the training set
        self._fit_share: Share | None = None
        self._ood_shares: dict[str, Share] = {}
        self._stream: Fit | None = None
        self._evaluation: Evaluation | None = None

    @property
    def head(self) -> str | None:
        """Name of the classification layer, once it is found."""
        return self._head if self._encoder is None else self._encoder.head

    @property
    def detectors(self) -> dict[str, Detector]:
        """The detectors by name, as last fitted."""
        return {name: watched.adapter.detector for name, watched in self._watched.items() if watched.adapter}

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint."""
        return self._generate_state_key(prefix=self.prefix)

    # -- setup --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that keeps the network or samples elsewhere, and begin a new run."""
        strategy: Any = trainer.strategy
        names = {base.__name__ for base in type(strategy).__mro__}  # by name: there are two roots of Lightning
        tensor_parallel = "ModelParallelStrategy" in names and strategy.device_mesh["tensor_parallel"].size() > 1
        if tensor_parallel or names & {"FSDPStrategy", "DeepSpeedStrategy"}:
            supported = "Use DDP, or fully_shard (FSDP2) and ModelParallelStrategy(tensor_parallel_size=1)."
            raise ValueError(f"OODMonitor does not work with {type(strategy).__name__} as it is set. {supported}")
        self._stage = stage.lower()  # a plain string: Lightning passes an Enum
        self._encoder = self._fit_step = self._fit_source = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the detectors and get ready to record features."""
        if self._encoder is not None:
            return
        if self._stage != "fit" and not self._saved and trainer.ckpt_path:
            try:  # Lightning restores callbacks here only since 2.6
                state = load_checkpoint(trainer.ckpt_path, "cpu").get("callbacks", {}).get(self.state_key)
                if state is not None:
                    self.load_state_dict(state)
            except (ValueError, OSError) as error:
                self._complain(f"the checkpoint could not be read for its detectors. {error}")
        self._encoder = BatchEncoder(pl_module, self._head, self.encoder, self.forward, self.labels)
        self._build([name for name, watched in self._watched.items() if watched.adapter is None or watched.problem])
        for name, watched in self._watched.items():
            if watched.adapter.fitted_on is Representation.INPUTS:
                raise ValueError(f"{name!r} is fitted on inputs, but the monitor only records features and logits.")
            if watched.adapter.scored_on is Representation.INPUTS and runs_together(trainer):
                raise ValueError(f"{name!r} would run the network, which under FSDP2 all processes do together.")
        if self._stage == "predict":
            return
        self._fit_source = self._offered(trainer, "fit_dataloader") if self.fit_loader is None else self.fit_loader
        ood = check_loaders(self._offered(trainer, "ood_dataloaders") or {}) if self.ood is None else self.ood
        limit = trainer.limit_test_batches if self._stage == "test" else trainer.limit_val_batches
        limit = limit if self.limit_ood_batches is None else self.limit_ood_batches
        place = (trainer.global_rank, trainer.world_size)
        check_set_names((*ood, *dict.fromkeys(self.ood_dataloaders.values()), UNKNOWN))
        self._ood_shares = {
            name: Share(loader, *place, limit, seed=self.seed, rebuild=False) for name, loader in ood.items()
        }

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hooks."""
        if self._encoder is not None:
            self._encoder.stop()
        self._evaluation = self._stream = self._fit_share = None
        self._ood_shares = {}

    on_exception = teardown  # type: ignore[assignment]  # after an error Lightning does not call teardown

    def _build(self, names: Iterable[str]) -> None:
        """Build the detectors that are given as classes; give the head to those without; restore saved fits."""
        encoder = self._encoder
        layers = dict(encoder.module.named_modules())
        # before the first pass has found the head, it is the one of the checkpoint, or the last linear layer
        linear = [name for name, layer in layers.items() if is_linear(layer)]
        head = next((h for h in (encoder.head, self._saved.get("head"), *linear[::-1]) if h in layers), None)
        layer = as_linear(layers[head]) if encoder.by_head and head else None
        layer = layer and layer.float()  # as the features are, whatever the precision of the module is
        width, classes = (None, None) if layer is None else (layer.in_features, layer.out_features)
        self._num_classes = classes or 0
        remedy, model = "" if layer else f"name a linear layer by head= ({encoder.candidates})", encoder.target
        parts = adapters.NetworkParts(
            width, classes, head=layer, has_logits=True, model=model, seed=self.seed, remedy=remedy
        )
        # copies of weights that are made in inference mode could not take part in autograd
        with isolated_rng(self.seed), torch.inference_mode(False):
            for name in names:
                try:
                    self._watched[name].build(parts)
                except adapters.NotSupported as reason:
                    raise ValueError(f"{name!r} cannot be monitored while the network trains: it {reason}.") from reason
        if self._saved:
            self._restore_saved()

    # -- training -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Try the first batch to fit on, so that wrong settings are told before the training."""
        if self.refit == "stream":
            training_loader(trainer, twice=False)
            return
        with closing(encode_share(trainer, self._encoder, self._sharing(trainer))) as batches:
            try:
                next(batches)
            except EncodingError:
                raise
            except Exception:  # data that cannot be read are told at the first fit
                return

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the forward pass, if the detectors are fitted on those of the training.

        A stream covers an epoch; where validation does not follow the epochs, it runs from one validation to the next.
        """
        if batch_idx == 0 and trainer.check_val_every_n_epoch is not None:
            self._stream = None
        if self.refit == "stream" and self._due(trainer):
            self._encoder.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add what was recorded to the stream."""
        if self.refit != "stream" or not self._due(trainer):
            return
        stream = self._stream = self._stream or Fit(self._watched, pl_module.device)
        try:
            encoded, seen = self._encoder.take(batch), stream.num_samples
            positions, keep = fitting.dataset_positions(trainer.train_dataloader, seen, len(encoded), trainer)
            stream.num_samples += len(encoded)
            stream.update(encoded, positions, keep)
        except Exception as error:
            stream.fail(error)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refit without validation, and at the end of the training, so that the checkpoints hold fitted detectors."""
        reached = ((trainer.global_step, trainer.max_steps), (trainer.current_epoch + 1, trainer.max_epochs))
        ends = any(limit is not None and 0 <= limit <= count for count, limit in reached)
        validation = trainer.fit_loop.epoch_loop.val_loop
        # before the first validation its loaders are not there yet
        validates = validation._combined_loader is None or any(trainer.num_val_batches)
        due = ends or (self._due(trainer) and not (trainer.enable_validation and validates))
        if not due or trainer.global_step == self._fit_step:
            return
        if self.refit == "pass" or self._stream is not None:
            self._fit(trainer, list(self.detectors))
        if not any(row["ood"] for row in self.history):
            epochs = f"warmup_epochs={self.warmup_epochs}, every_n_epochs={self.every_n_epochs}"
            self._remark(f"the detectors are not scored: no validation in an epoch of theirs ({epochs}).")

    def _due(self, trainer: Trainer) -> bool:
        """Whether the detectors are to be fitted and scored in this epoch."""
        epoch = trainer.current_epoch
        due = epoch >= self.warmup_epochs and (epoch + 1) % self.every_n_epochs == 0
        return due or self._stage != "fit"

    # -- fitting ------------------------------------------------------------------------------------------------------

    def _offered(self, trainer: Trainer, method: str) -> Any:
        """What a method of the datamodule or of the module gives; None without the method."""
        owners: Any = (getattr(trainer, "datamodule", None), trainer.lightning_module)
        make = next((getattr(owner, method) for owner in owners if hasattr(owner, method)), None)
        with isolated_rng(self.seed):
            return None if make is None else make()

    def _sharing(self, trainer: Trainer) -> Share:
        """This process's share of what to fit on, kept for the sake of persistent workers."""
        source = training_loader(trainer, twice=True) if self._fit_source is None else self._fit_source
        if self._fit_share is None or self._fit_share.source is not source:
            limit = trainer.limit_train_batches if self.limit_fit_batches is None else self.limit_fit_batches
            self._fit_share = Share(source, trainer.global_rank, trainer.world_size, limit, seed=self.seed)
        return self._fit_share

    def _fit(self, trainer: Trainer, names: Sequence[str]) -> None:
        """Fit detectors. Every process has to call it."""
        start, self._fit_step = time.perf_counter(), trainer.global_step
        # a stream may have had no training batch since the last time
        fit = self._stream or Fit({name: self._watched[name] for name in names}, trainer.lightning_module.device)
        if self.refit == "pass" or self._stage != "fit":
            with closing(encode_share(trainer, self._encoder, self._sharing(trainer), fail=fit.fail)) as batches:
                for batch in batches if fit.metrics else ():
                    fit.update(*batch)
        if self._encoder.by_head:
            self._told.info(f"OODMonitor: the head is {self._encoder.head!r}; its input is the features.")
        broken = dict[str, str]()
        for name in names:
            try:
                self._build([name])
            except Exception as error:  # some compute with the head, which may have become NaN
                broken[name] = reason_of(error)
                if name not in fit.keys:
                    self._complain(f"{name} could not be built in epoch {trainer.current_epoch}. {broken[name]}")
        shared = time.perf_counter() - start
        for name, seconds, problem in fit.finish(trainer.lightning_module, self.seed):
            problem = broken.get(name, problem)
            self._record(trainer, name, "", "fit_seconds", shared + seconds)
            reason = f"could not be fitted in epoch {trainer.current_epoch}. {problem}"
            self._watched[name].problem = f"it {reason}" if problem else ""
            self._watched[name].calibrated.calibration = None
            if problem:
                self._complain(f"{name} {reason}")
        self._classes = fit.classes or self._classes
        if trainer.check_val_every_n_epoch is None:
            self._stream = None

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refit, if the module is being trained, and get ready to score."""
        self._evaluation = None
        if trainer.sanity_checking:
            return
        loaders: Any = trainer._active_loop._combined_loader  # type: ignore[union-attr]
        named = [] if self._stage == "predict" else self.ood_dataloaders.items()
        sets = [*self._ood_shares, *dict.fromkeys(ood for index, ood in named if index < len(loaders.flattened))]
        if not self._due(trainer):
            # ModelCheckpoint and EarlyStopping end the training if the metric that they monitor is missing: they see
            # the last values, or NaN before the first; loggers get none
            keys = [(name, ood, m) for name in self.detectors for ood in (*sets, MEAN) if sets for m in self._metrics]
            last = {(r["detector"], r["ood"], r["metric"]): r["value"] for r in self.history if r["ood"]}
            for (name, ood, metric), value in (dict.fromkeys(keys, math.nan) | last).items():
                self._record(trainer, name, ood, metric, value, new=False)
            return
        names = list(self.detectors)
        if self._stage != "fit":
            names = [] if self._fit_source is None else list(self._unscorable())
        if names:
            self._fit(trainer, names)
        # "": the fit has told it
        errors = {name: "" if name in names else reason for name, reason in self._unscorable().items()}
        self._evaluation = Evaluation({ood: -1 - number for number, ood in enumerate(sets)}, errors)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the forward pass of the evaluation step."""
        if not self._encoder.compiled and (self._evaluation is not None or trainer.sanity_checking):
            self._encoder.start()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Score what was recorded. The sanity check only tries whether batches can be encoded."""
        evaluation, ood = self._evaluation, self.ood_dataloaders.get(dataloader_idx)
        labelled = ood is None and self._stage != "predict"
        if trainer.sanity_checking:
            self._encode(trainer, batch, labelled)  # a module without forward() may tell its head here
            self._encode(trainer, batch, labelled, recorded=False)
        if evaluation is None:
            return
        try:
            encoded = self._encode(trainer, batch, labelled)
            loader = trainer._active_loop._combined_loader.flattened[dataloader_idx]  # type: ignore[union-attr]
            start = evaluation.seen[dataloader_idx]
            evaluation.seen[dataloader_idx] += len(encoded)
            positions, keep = fitting.dataset_positions(loader, start, len(encoded), trainer)
            source = evaluation.sets.get(ood or "", dataloader_idx)
            self._score(trainer, source, encoded, positions, keep)
        except Exception as error:
            if runs_together(trainer):
                raise  # the others wait for this process
            for name in self.detectors:
                evaluation.errors.setdefault(name, reason_of(error))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the OOD loaders, then log the metrics."""
        evaluation = self._evaluation
        if evaluation is None:
            return
        for ood, share in self._ood_shares.items():
            problems: list[Exception] = []
            for batch in encode_share(trainer, self._encoder, share, labelled=False, fail=problems.append):
                self._score(trainer, evaluation.sets[ood], *batch)
            if problems:
                evaluation.broken[ood] = reason_of(problems[0])
        self._evaluation = None
        self._finish(trainer, evaluation)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _encode(self, trainer: Trainer, batch: Any, labelled: bool, *, recorded: bool = True) -> Encoded:
        """What was recorded of a batch; if nothing was, or the step did not come by the head, a pass of our own."""
        if recorded and not self._encoder.compiled:
            with suppress(EncodingError):  # a pass of our own may tell more
                return self._encoder.take(batch, labelled=labelled)
        with visiting(trainer.lightning_module, self.seed), trainer.precision_plugin.forward_context():
            return self._encoder(batch, labelled=labelled)

    def _score(self, trainer: Trainer, source: int, encoded: Encoded, positions: Tensor, keep: Any) -> None:
        """Add a row for each sample that is to be kept: source, position, label, and the score of each detector."""
        evaluation = cast(Evaluation, self._evaluation)
        rows = torch.full((len(encoded), 3 + len(self.detectors)), math.nan, dtype=torch.float64)
        rows[:, 0], rows[:, 1] = source, positions
        if encoded.labels is not None:
            rows[:, 2] = encoded.labels.cpu()
        for column, name in enumerate(self.detectors, start=3):
            adapter = self._watched[name].adapter
            if name in evaluation.errors or not len(encoded):
                continue
            runs_network = adapter.scored_on is Representation.INPUTS
            try:
                with visiting(trainer.lightning_module, self.seed) if runs_network else isolated_rng(self.seed):
                    values = encoded.take(adapter.scored_on)
                    rows[:, column] = adapter.score(values).detach().cpu().reshape(len(encoded))
            except Exception as error:
                evaluation.errors[name] = reason_of(error)
        evaluation.rows.append(rows[keep])

    def _gather(self, evaluation: Evaluation) -> tuple[Tensor, Mapping[str, str], Mapping[str, str]]:
        """Rows in the order of the loaders, and errors, of all processes. Every process has to call it."""
        parts = fitting.gathered(evaluation)
        none = torch.zeros(0, 3 + len(self.detectors), dtype=torch.float64)
        rows = torch.cat([none, *(batch for part in parts for batch in part.rows)])
        rows = rows[rows[:, 1].argsort(stable=True)]
        errors, broken = ChainMap(*(part.errors for part in parts)), ChainMap(*(part.broken for part in parts))
        return rows[rows[:, 0].argsort(stable=True)], errors, broken

    def _finish(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Compute and log the metrics. Every process has to call it."""
        rows, errors, broken = self._gather(evaluation)
        source, labels = rows[:, 0], rows[:, 2]  # a batch without labels has NaN
        is_id, unknown = (source >= 0) & ~(labels < 0), (source >= 0) & (labels < 0)
        problems = [f"the OOD set {ood!r} failed: {reason}" for ood, reason in broken.items()]
        problems += [f"{name!r} failed to score: {reason}" for name, reason in errors.items() if reason]
        known = self._classes or set(range(self._num_classes))  # a label beyond the logits is in no training sample
        for index in source[is_id].unique().tolist():
            classes = set(labels[(source == index) & (labels >= 0)].tolist())
            if classes and known and not classes & known:
                is_id &= source != index
                problems.append(
                    f"no training sample has a label of dataloader {index:g}, so its samples do not count as ID. If "
                    f'they are OOD, pass ood_dataloaders={{{index:g}: "name"}}.'
                )
        masks = {ood: source == number for ood, number in evaluation.sets.items()}
        if bool(unknown.any()):
            masks[UNKNOWN] = unknown
        scores: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        for column, (name, watched) in enumerate(self._watched.items(), start=3):
            values = {(ood, metric): math.nan for ood in masks for metric in self._metrics}
            threshold = None
            if name not in errors:
                on_id, on_ood = rows[is_id, column], {ood: rows[mask, column] for ood, mask in masks.items()}
                scores[name] = on_id, {ood: of_set for ood, of_set in on_ood.items() if len(of_set)}
                threshold = self._threshold(name, watched.calibrated, on_id)
                for ood in (ood for ood in masks if ood not in broken):
                    try:
                        compared = compare_scores(on_id, on_ood[ood])
                    except ValueError as error:
                        problems.append(f"{name!r} has no result on {ood!r}: {error}")
                        continue
                    values |= {(ood, metric): float(value) for metric, value in compared.items()}
                    if threshold is not None:
                        values[ood, DETECTED] = float((on_ood[ood] > threshold).double().mean())
            if masks:
                values |= {(MEAN, m): sum(values[ood, m] for ood in masks) / len(masks) for m in self._metrics}
            if threshold is not None:
                values["", THRESHOLD] = threshold
                if self._stage != "fit":  # there the samples are those of the calibration
                    values["", FALSE_ALARMS] = float((~(on_id <= threshold)).double().mean())  # NaN is flagged
            for (ood, metric), value in values.items():
                self._record(trainer, name, ood, metric, value)
        self._publish(trainer, scores)
        for problem in problems:
            self._complain(problem)
        if not masks:
            self._remark("no OOD samples to score, so no AUROC. Pass ood= or ood_dataloaders=.")

    def _threshold(self, name: str, detector: Calibrated, on_id: Tensor) -> float | None:
        """The threshold of a detector; while the module is trained, calibrated by these scores of ID samples."""
        if not self.calibrate or detector.per_class:
            return None
        if self._stage == "fit" and len(on_id) and not bool(on_id.isnan().any()):
            detector.calibration = Calibration(on_id)
        try:
            return None if detector.calibration is None else float(detector.calibration.threshold(detector.alpha))
        except ValueError as too_few:
            self._told.info(f"OODMonitor: {name!r} has no threshold: {too_few}")
            return None

    # -- prediction ---------------------------------------------------------------------------------------------------

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the scores of all processes into one table, in the order of the loader."""
        evaluation, self._evaluation = cast(Evaluation, self._evaluation), None
        rows, errors, _ = self._gather(evaluation)
        table = {"dataloader_idx": rows[:, 0].long().numpy()} if len(evaluation.seen) > 1 else {}
        self.drift_alarms = {}
        for column, (name, watched) in enumerate(self._watched.items(), start=3):
            scores, calibration = rows[:, column].contiguous(), watched.calibrated.calibration
            table[f"{name}/score"] = scores.numpy()
            if calibration is None or len(calibration.sizes) > 1:  # of classes or of folds
                continue
            if name in errors:
                table[f"{name}/p_value"] = scores.numpy() * math.nan
                table[f"{name}/is_ood"] = pd.array([pd.NA] * len(scores), "boolean")
            else:
                self.drift_alarms[name] = alarm = DriftAlarm(calibration.scores)
                if alarm.update(scores.masked_fill(scores.isnan(), math.inf)):
                    rank_zero_info(f"OODMonitor: the scores of {name!r} have changed since about sample {alarm.since}.")
                table[f"{name}/p_value"] = calibration.p_value(scores).numpy()
                table[f"{name}/is_ood"] = calibration.is_ood(scores, alpha=watched.calibrated.alpha).numpy()
        self.predictions = pd.DataFrame(table)
        if self.predictions_path is not None and trainer.is_global_zero:
            try:
                Path(self.predictions_path).parent.mkdir(parents=True, exist_ok=True)
                with replacing(self.predictions_path, "wb") as file:
                    self.predictions.to_parquet(file)
            except OSError as error:
                self._complain(f"the predictions could not be written. {reason_of(error)}")
        for name, reason in errors.items():
            self._complain(f"{name!r} failed to score: {reason}")

    # -- the log ------------------------------------------------------------------------------------------------------

    def _record(
        self, trainer: Trainer, detector: str, ood: str, metric: str, value: float, *, new: bool = True
    ) -> None:
        """Log a value and keep it; one that is not new is for other callbacks only. An empty ``ood`` is of no set."""
        if new:
            moment = {"stage": self._stage, "epoch": trainer.current_epoch, "step": trainer.global_step}
            self.history.append({**moment, "detector": detector, "ood": ood, "metric": metric, "value": value})
        if not trainer.barebones:
            # a metric, because the value is the same on every process: it needs none of Lightning's reductions
            number = MeanMetric(nan_strategy="disable", sync_on_compute=False).to(trainer.lightning_module.device)
            number.update(value)
            options: Any = {"on_step": False, "on_epoch": True, "add_dataloader_idx": False}
            name = "/".join(filter(None, (self.prefix, detector, ood, metric)))
            logger = None if new else False
            trainer.lightning_module.log(name, number, metric_attribute=self.prefix, logger=logger, **options)

    def _publish(self, trainer: Trainer, scores: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        """Histograms of the scores, in a fit the curves of AUROC, and the last table: to the loggers and the folder."""
        loggers = [] if trainer.fast_dev_run else trainer.loggers  # type: ignore[attr-defined]
        if not trainer.is_global_zero or not scores or not (self.figures_dir or loggers):
            return
        from rmd_plugin.monitor.trackers import publish  # imports matplotlib

        try:
            publish(self.history, scores, self._stage, loggers, self.figures_dir, self.prefix, trainer.global_step)
        except Exception as error:  # a full disk or a lost connection; only this process draws, so it must not stop
            rank_zero_warn(f"OODMonitor: the figures could not be saved. {reason_of(error)}")

    def _remark(self, remark: str) -> None:
        """Warn once about what is not an error."""
        self._told.warn(f"OODMonitor: {remark}", category=OODMonitorWarning)

    def _complain(self, problem: str) -> None:
        """Warn, or end the training, as the options say."""
        if self.on_error == "raise":
            raise RuntimeError(f"OODMonitor: {problem}")
        rank_zero_warn(f"OODMonitor: {problem}", category=OODMonitorWarning)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _unscorable(self) -> dict[str, str]:
        """The detectors that cannot score, and why."""
        problems = {name: self._watched[name].problem for name, d in self.detectors.items() if d.requires_fit}
        return {name: problem for name, problem in problems.items() if problem}

    def state_dict(self) -> dict[str, Any]:
        """Fitted detectors and history, as plain data for ``torch.load(..., weights_only=True)``."""
        snapshots, unfit = {}, self._unscorable()
        for name in self.detectors:
            try:
                if name not in unfit:
                    snapshots[name] = take_snapshot(self._watched[name].calibrated)
            except NotKeptError as reason:
                unfit[name] = str(reason)
                self._remark(f"no checkpoint holds the fit of {name!r}: {reason}")
        return {
            "format": FORMAT,
            "prefix": self.prefix,
            "head": self.head,
            "encoder": self.encoder,
            "history": pack_history(self.history),
            "classes": sorted(self._classes),
            "step": self._fit_step,
            "detectors": snapshots,
            "unfit": unfit,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint. Evaluation alone keeps the history of the training before it."""
        if state_dict.get("format") != FORMAT:
            raise ValueError(f"expected a state of the format {FORMAT!r}, got {state_dict.get('format')!r}.")
        if self._stage == "fit" or not self.history:
            self.history = unpack_history(state_dict["history"])
        self._saved = dict(state_dict)
        self._fit_step, self._classes = state_dict["step"], set(state_dict["classes"])
        for name in self._watched.keys() - state_dict["detectors"].keys():
            reason = "the checkpoint does not hold its fit. Pass fit_loader= to fit it again."
            self._watched[name].problem = f"{reason} {state_dict['unfit'].get(name, '')}".rstrip()
        if self._encoder is not None:  # FSDP2 loads checkpoints later
            self._restore_saved()

    def _restore_saved(self) -> None:
        """Give the detectors the fits of the checkpoint."""
        saved, self._saved = self._saved, {}
        for name in saved["detectors"].keys() & self.detectors.keys():
            self._watched[name].restore(saved["detectors"][name], resumes=self._stage == "fit")

    @classmethod
    def load_detectors(
        cls,
        path: str | PathLike[str],
        module: nn.Module | None = None,
        *,
        weights_only: bool | None = None,
        detectors: Mapping[str, Detector] | None = None,
        prefix: str | None = None,
        map_location: str | torch.device = "cpu",
    ) -> dict[str, Detector]:
        """Fitted detectors from a Lightning checkpoint, without the code or data of the training.

        Args:
            path: of the checkpoint.
            module: the network with the weights of this checkpoint. Given, the detectors take inputs:
                ``detectors["rmd"].is_ood(x)``.
            weights_only: handed to ``torch.load``; by default nothing that is pickled in the file is run. A checkpoint
                that holds other objects than tensors and plain data (OmegaConf, partials) is refused until you say
                ``weights_only=False``, as by ``load_from_checkpoint``.
            detectors: instances to load into, for detectors that are neither rmd_plugin's nor the framework's.
            prefix: which monitor's, if there were several.
            map_location: device for their tensors.

        Returns:
            The fitted detectors by name, :class:`rmd_plugin.Calibrated` where the checkpoint holds a calibration.

        Raises:
            ValueError: if the checkpoint has no state of a monitor, or of several; if ``module`` has other weights.
        """
        checkpoint = load_checkpoint(path, map_location, weights_only)
        states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
        states = [s for s in states if s.get("format") == FORMAT and prefix in (None, s["prefix"])]
        if len(states) != 1:
            raise ValueError(
                f"expected one state of the format {FORMAT!r} in {str(path)!r}, found {len(states)}. Was it saved with "
                "save_weights_only=True, or by another version? With several monitors, pass prefix=."
            )
        [state] = states
        if module is not None:
            check_weights(module, checkpoint.get("state_dict", {}), path)
        loaded, missing = dict[str, Detector](), dict(state["unfit"])
        for name, snapshot in state["detectors"].items():
            try:
                detector: Any = (detectors or {}).get(name)
                if detector is None:
                    detector = build_detector(snapshot)
                else:
                    detector = detector if isinstance(detector, Calibrated) else Calibrated(detector)
                    restore_snapshot(detector, snapshot)
            except NotKeptError as error:
                missing[name] = f"{error} (detectors=)"
                continue
            if module is not None:  # its features, its logits, or the whole of it
                fed = adapters.fed_with(type(detector.detector))
                encoding = Encoding(BatchEncoder(module, state["head"], state["encoder"]), fed)
                setattr(detector.detector, "encoder" if fed is Representation.FEATURES else "model", encoding)
            loaded[name] = detector.detector if detector.calibration is None else detector
        for name, reason in missing.items():
            warnings.warn(f"the checkpoint does not hold {name!r}: {reason}", OODMonitorWarning, stacklevel=2)
        return loaded


@dataclass
class Evaluation:
    """What one evaluation has gathered on this process."""

    sets: dict[str, int]  #: OOD sets, and their numbers in the rows; those of other dataloaders are their indices
    errors: dict[str, str]  #: why a detector is given up; "" if it has been told already
    broken: dict[str, str] = field(default_factory=dict)  #: OOD sets that could not be read
    seen: Counter[int] = field(default_factory=Counter)  #: samples of each dataloader
    rows: list[Tensor] = field(default_factory=list)  #: for each batch: source, position, label, scores


# -- options -----------------------------------------------------------------------------------------------------------


def check_loaders(ood: Any) -> dict[str, Iterable[Any]]:
    """Refuse OOD data that are not loaders by name."""
    loaders = {str(name): ood[name] for name in ood} if isinstance(ood, Mapping) else {"": ood}
    for name, loader in loaders.items():
        if not name or isinstance(loader, (Tensor, str)) or not hasattr(loader, "__iter__"):
            kind = type(loader).__name__
            raise TypeError(f"expected loaders by name, ood={{'svhn': DataLoader(TensorDataset(x), 64)}}, got {kind}.")
    return loaders


def read_detectors(detectors: Any) -> dict[str, Spec]:
    """Detectors by name; what may stand for one explains :class:`OODMonitor`."""
    if isinstance(detectors, str) or not isinstance(detectors, (Mapping, Sequence)) or not len(detectors):
        raise TypeError(f"expected detectors by name, such as {{'rmd': RMD()}}, got {detectors!r}.")
    specs: dict[str, Any] = {}
    for name, spec in (detectors if isinstance(detectors, Mapping) else {name: name for name in detectors}).items():
        named = {name: spec}
        if isinstance(spec, str):
            choices = detector_options(spec)  # several have names of their own
            keys = choices if len(choices) > 1 else named
            built = [partial(resolve_name(options.pop("_target_")), **options) for options in choices.values()]
            named = dict(zip(keys, built, strict=True))
        specs |= named
    for name, spec in specs.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise TypeError(f"the name of a detector must be a text without '/', got {name!r}.")
        if not isinstance(spec, Detector) and adapters.detector_class(spec) is None:
            raise TypeError(f"{name!r} must be a pytorch_ood Detector, its class, or a partial of that, got {spec!r}.")
    return specs


# -- checkpoints -------------------------------------------------------------------------------------------------------


def pack_history(rows: list[dict[str, Any]]) -> Tensor:
    """The history as the bytes of a compressed Parquet file, about 10 bytes for each row."""
    return torch.frombuffer(bytearray(pd.DataFrame(rows).to_parquet(compression="zstd")), dtype=torch.uint8)


def unpack_history(packed: Tensor) -> list[dict[str, Any]]:
    """The rows that were packed."""
    return pd.read_parquet(BytesIO(packed.numpy().tobytes())).to_dict("records")


def load_checkpoint(path: str | PathLike[str], map_location: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """The content of a Lightning checkpoint; of a sharded one, which is a folder, all but the weights."""
    file = Path(path, "meta.pt") if Path(path).is_dir() else path
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{str(path)!r} holds more than plain data: trust it by weights_only=False. {error}"
        ) from error


def check_weights(module: nn.Module, saved: Mapping[str, Tensor], path: Any) -> None:
    """Refuse a network with other weights than those of the checkpoint, which the detectors were fitted to.

    The network may be the LightningModule or a part of it. Weights that the checkpoint does not name are not compared.
    """
    saved = {f".{name.replace('_orig_mod.', '')}": value for name, value in saved.items()}
    for name, value in module.state_dict().items():
        others = [other for key, other in saved.items() if key.endswith(f".{name.replace('_orig_mod.', '')}")]
        if others and not any(value.shape == other.shape and torch.equal(value, other.to(value)) for other in others):
            raise ValueError(
                f"{name!r} of {type(module).__name__} differs from the weights in {str(path)!r}, which the detectors "
                "were fitted to. Load them first, by load_from_checkpoint or load_state_dict."
            )
