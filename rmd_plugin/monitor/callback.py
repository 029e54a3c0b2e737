"""OODMonitor: a Lightning callback that refits detectors at each validation and logs how well they find OOD data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn, TrainerStatus
from pytorch_ood.api import Detector
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rmd_plugin.detectors.calibrated import Calibrated, bare
from rmd_plugin.detectors.conformal import check_level
from rmd_plugin.detectors.snapshot import NotKeptError, build_detector, restore_snapshot
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.monitor.engine import Engine, OODMonitorWarning
from rmd_plugin.monitor.evaluation import check_names
from rmd_plugin.monitor.inert import CheckpointError
from rmd_plugin.monitor.journal import STAGES
from rmd_plugin.monitor.lightning_roots import Callback, builds_itself
from rmd_plugin.monitor.lockstep import check_strategy
from rmd_plugin.monitor.roster import Spec, give_network, read_calibrations
from rmd_plugin.monitor.snapshot import HEADER, check_format, monitor_states
from rmd_plugin.monitor.trainer_access import ends_now, has_validation, pack_metrics, training_loaders

__all__ = ["OODMonitor", "OODMonitorWarning"]

#: the first is for LightningCLI, which builds what is named by class
Loader = DataLoader | Iterable[Any]


class OODMonitor(Callback):
    """Fits OOD detectors on the training features at each validation, scores them, and logs the metrics.

    The module needs no change. Training with the monitor gives the same weights as without it, bit for bit. Under DDP
    and FSDP2 (``ModelParallelStrategy``) every sample counts once. Logged are, for each detector and OOD set,
    ``ood/<detector>/<set>/{AUROC,AUPR-IN,AUPR-OUT,FPR95TPR}``, their mean over the sets as ``ood/<detector>/mean/...``,
    and ``ood/<detector>/fit_seconds``; ``ModelCheckpoint`` and ``EarlyStopping`` can monitor them. The fitted detectors
    and the history travel in the Lightning checkpoint.

    The ID validation scores also calibrate the detectors: ``ood/<detector>/threshold`` is the score above which a
    sample is OOD at ``alpha``, ``ood/<detector>/<set>/FPR@alpha`` the share of an OOD set that is accepted, and in
    ``validate`` and ``test`` ``ood/<detector>/false_alarms`` the share of ID samples that is not. A validation set that
    also chose the epoch or stopped the training makes the promise weaker, see docs/decisions.md.

    ID scores come from the validation batches that the trainer runs anyway. Without validation the detectors are
    refitted at the end of the training epochs and saved, but not scored; likewise at the end of the training, if its
    last step has had no validation (``max_steps`` within an epoch). The sanity check only checks that the batches
    can be encoded. In ``validate`` and ``test`` the detectors of the checkpoint are scored; one that it does not hold
    is fitted if there is a ``fit_loader``. With ``ddp_spawn`` the history stays in the worker processes (read it from a
    checkpoint), and Lightning hangs at the end of a fit that has logged more than about 200 metrics: use ``ddp``.

    Args:
        detectors: detectors by name; or names alone, those of rmd_plugin's classes and those that ``detector=`` of the
            commands takes, as ``["rmd", "knn"]``. In place of a detector may stand such a name, its class, as such or
            by its dotted name, or a ``functools.partial`` of it (``_partial_: true`` in Hydra): it is built before each
            refit from what the module offers, the weights of the head, the number of classes, or the module itself for
            detectors on inputs. Or a function that makes a detector from the LightningModule, called before each refit.
            The framework's detectors ask for a network that the monitor does not use: not ``KNN()``, which Python
            refuses, but ``KNN``, ``partial(KNN, k=50)``, ``KNN(None, k=50)`` or ``"knn"``.
            A :class:`rmd_plugin.FusedRMD` without a head gets the network's; the log says which. The layers of a
            :class:`rmd_plugin.MultiLayer` are those of the module (``"model.layer*"``) or of the part of it that it was
            given, and are heard in the passes that give the features.
        head: dotted name of the classification layer, whose input is the features and whose output is the logits. By
            default the ``nn.Linear`` whose output the network returns. Of tokens or maps, the features are the position
            that is classified, or the mean, whichever gives the network's logits.
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
        limit_fit_batches: batches per process (int) or fraction (float) of the fit loader, drawn from all over
            the set. By default the trainer's ``limit_train_batches``.
        limit_ood_batches: the same for ``ood``. By default the trainer's ``limit_val_batches``.
        every_n_epochs: refit and score at the validations of every n-th epoch. In between, monitoring callbacks see
            the last values; loggers get none.
        warmup_epochs: epochs to wait before the first time. Meanwhile monitoring callbacks see NaN, at which
            ``EarlyStopping`` stops unless it has ``check_finite=False``.
        figures_dir: folder for the figures. Loggers that take images get them in any case.
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
        encoder: str | Callable[[Any], Tensor] | None = None,
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
        calibrate: bool = True,
        alpha: float = 0.05,
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
        check_level("alpha", alpha)
        if head is not None and encoder is not None:
            raise ValueError(f"give head or encoder, not both: got head={head!r} and encoder={encoder!r}.")
        # Hydra gives mappings of its own kind
        self.ood = None if ood is None else {str(name): ood[name] for name in ood}
        self.ood_dataloaders = {int(index): str(name) for index, name in (ood_dataloaders or {}).items()}
        check_names((*(self.ood or ()), *dict.fromkeys(self.ood_dataloaders.values())))
        #: the classification layer, once it is found
        self.head = self._given_head = head
        self.encoder, self.forward, self.labels = encoder, forward, labels
        self.refit, self.fit_loader = refit, fit_loader
        self.limit_fit_batches, self.limit_ood_batches = _limit(limit_fit_batches), _limit(limit_ood_batches)
        self.every_n_epochs, self.warmup_epochs = every_n_epochs, warmup_epochs
        self.calibrate, self.alpha = calibrate, float(alpha)
        self.figures_dir, self.on_error, self.prefix, self.seed = figures_dir, on_error, prefix, seed
        self._engine = Engine(self, detectors)
        self._resuming = True  # else the state is only evaluated
        self._loaded = False

    @property
    def detectors(self) -> dict[str, Detector]:
        """The detectors by name, as last fitted."""
        return self._engine.roster.detectors

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row for each epoch, detector, OOD set and metric: stage, epoch, step, detector, ood, metric, value."""
        return self._engine.journal.rows

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint."""
        return self._generate_state_key(prefix=self.prefix)

    # -- setup --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the strategy, and the name of the head, unless the module is still to be built."""
        if stage not in STAGES.values():
            return
        if untested := check_strategy(trainer):
            self._engine.complain(untested, once=True)
        self.head = self._given_head
        self._engine.datamodule_ood = self._engine.fit_step = None
        self._resuming, self._loaded = stage == "fit", False
        try:
            self._engine.new_encoder(pl_module)
        except EncodingError:
            if not builds_itself(pl_module):
                raise

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the hooks in place."""
        self._engine.attach(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the hooks in place, if this is not part of a fit."""
        if trainer.state.fn != TrainerFn.FITTING and not self._loaded and trainer.ckpt_path:
            self._load_checkpoint(str(trainer.ckpt_path))  # Lightning restores callbacks here only since 2.6
        self._engine.attach(trainer, pl_module)
        self._engine.check_dataloaders(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the hooks away."""
        self._engine.detach()
        pack_metrics(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the hooks away: Lightning does not call ``teardown`` after an error."""
        self._engine.detach()

    # -- training -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a stream of which nobody knows which labels belong to which features."""
        count = len(training_loaders(trainer))
        if self.refit == "stream" and count > 1:
            raise EncodingError(
                f"refit='stream' cannot tell apart the samples of {count} training dataloaders. Use refit='pass' with "
                "fit_loader=."
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a new stream. Where validation does not follow the epochs, a stream runs from one to the next."""
        if trainer.check_val_every_n_epoch is not None:
            self._engine.stream.clear()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Listen to the forward pass, if the detectors are fitted on those of the training."""
        if self.refit == "stream" and self._engine.due(trainer):
            self._engine.listen(trainer, pl_module, batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add what was heard to the stream."""
        if self.refit == "stream" and self._engine.due(trainer):
            self._engine.add_to_stream(trainer, batch)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refit without validation, and at the end of the training, so that the checkpoints hold fitted detectors."""
        if ends_now(trainer) or (self._engine.due(trainer) and not has_validation(trainer)):
            self._engine.refit_unscored(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refit, if somebody has stopped the training since; here Lightning takes no metrics any more."""
        self._engine.refit_unscored(trainer, pl_module, record=False)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refit, if the module is being trained, and get ready to score."""
        self._engine.begin(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Listen to the forward pass of the evaluation step."""
        if self._engine.scoring or trainer.sanity_checking:
            self._engine.encoder.start()

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
        if self._engine.scoring or trainer.sanity_checking:
            self._engine.score(trainer, pl_module, batch, dataloader_idx)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the OOD loaders, then log the metrics."""
        self._engine.finish(trainer)

    on_test_start = on_validation_start
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Fitted detectors and history, as plain data for ``torch.load(..., weights_only=True)``."""
        history = [dict(row) for row in self.history]
        layer = self.encoder if isinstance(self.encoder, str) else None
        more = {"head": self.head, "encoder": layer, "alpha": self.alpha, "history": history, "stream": []}
        found: dict[str, Any] = {**HEADER, **more} | self._engine.roster.state_dict()
        for name, reason in found["unkept"].items():
            self._engine.complain(f"no checkpoint holds the fit of {name!r}: {reason}", once=True)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a checkpoint. Evaluation alone keeps the history of the training before it."""
        check_format(state_dict)
        if self._resuming or not self.history:
            self._engine.journal.rows = [dict(row) for row in state_dict["history"]]
        self._loaded, self._engine.saved_head = True, state_dict["head"]
        self._engine.stream.saved = list(state_dict["stream"])
        self._engine.roster.load_state_dict(state_dict, resuming=self._resuming)
        self._engine.fit_step = max((when["step"] for when in self._engine.roster.fitted.values()), default=None)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the moments of an unfinished stream, those of all processes together."""
        # after an error the other processes may not come by here
        if self._engine.stream.refit is not None and trainer.state.status != TrainerStatus.INTERRUPTED:
            checkpoint["callbacks"][self.state_key]["stream"] = self._engine.stream.refit.moments_state()

    def _load_checkpoint(self, path: str) -> None:
        try:
            state = monitor_states(path, "cpu").get(self.state_key)
        except (CheckpointError, OSError) as error:
            self._engine.complain(f"the detectors of {path!r} could not be read. {error}")
        else:
            if state is not None:
                self.load_state_dict(state)

    @classmethod
    def load_detectors(
        cls,
        path: str | PathLike[str],
        module: nn.Module | None = None,
        *,
        detectors: Mapping[str, Detector] | None = None,
        prefix: str | None = None,
        map_location: str | torch.device = "cpu",
    ) -> dict[str, Detector]:
        """Fitted detectors from a Lightning checkpoint, without the code or data of the training.

        Nothing else of the checkpoint is read, and nothing that is pickled in it is run.

        Args:
            path: of the checkpoint.
            module: the network with the weights of this checkpoint. Given, the detectors take inputs:
                ``detectors["rmd"].is_ood(x)``.
            detectors: instances to be filled, for detectors that are neither rmd_plugin's nor the framework's.
            prefix: which monitor's, if there were several.
            map_location: device for their tensors.

        Returns:
            The fitted detectors by name, :class:`rmd_plugin.Calibrated` where the checkpoint holds a calibration.

        Raises:
            ValueError: if the checkpoint has no state of a monitor, or of several; if the file is damaged.
        """
        states = monitor_states(path, map_location)
        if prefix is not None:
            states = {key: state for key, state in states.items() if f"'prefix': {prefix!r}" in key}
        if len(states) != 1:
            raise ValueError(
                f"expected the state of one OODMonitor in {str(path)!r}, found {len(states)}: {', '.join(states)}. "
                "Was it saved with save_weights_only=True? With several monitors, pass prefix=."
            )
        [state] = states.values()
        check_format(state)
        found = dict(detectors or {})
        missing = {**state.get("unfit", {}), **state.get("unkept", {})}
        for name, snapshot in state["detectors"].items():
            try:
                if name in found:
                    restore_snapshot(found[name], snapshot)
                else:
                    found[name] = build_detector(snapshot)
            except NotKeptError as error:
                missing[name] = f"{error} (detectors=)"
        for name, reason in missing.items():
            if name not in found:
                warnings.warn(f"the checkpoint does not hold {name!r}: {reason}", OODMonitorWarning, stacklevel=2)
        calibrations = read_calibrations(state)
        kept = [name for name in state["detectors"] if name in found]
        for name in kept:
            if module is not None:
                part = str(state.get("networks", {}).get(name, ""))
                give_network(bare(found[name]), module, head=state["head"], encoder=state.get("encoder"), part=part)
            if name in calibrations and not isinstance(found[name], Calibrated):
                calibrated = Calibrated(found[name], state.get("alpha", 0.05))
                calibrated.calibration = calibrations[name].to(map_location)
                found[name] = calibrated
        return {name: found[name] for name in kept}


def _limit(batches: int | float | None) -> int | float | None:
    # LightningCLI reads 5 as 5.0 where it has met "float | int" before
    return int(batches) if isinstance(batches, float) and batches > 1 and batches.is_integer() else batches
