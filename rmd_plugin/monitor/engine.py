"""What a monitor does at each of Lightning's hooks. :class:`rmd_plugin.OODMonitor` connects it to them."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from rmd_plugin.compare.adapters import Representation
from rmd_plugin.compare.metrics import ACCEPTED, METRICS
from rmd_plugin.compare.rows import FALSE_ALARMS, THRESHOLD
from rmd_plugin.detectors.calibrated import Calibrated
from rmd_plugin.detectors.calibration_scores import CalibrationScores
from rmd_plugin.detectors.conformal import required_samples
from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.batches import Encoded, EncodingError
from rmd_plugin.encoding.isolation import isolated_rng, visiting
from rmd_plugin.monitor.evaluation import Evaluation, check_names
from rmd_plugin.monitor.journal import Journal
from rmd_plugin.monitor.lockstep import in_lockstep
from rmd_plugin.monitor.refit import Refit, TrainingStream
from rmd_plugin.monitor.roster import Roster, Spec, parts_of
from rmd_plugin.monitor.sharding import own_samples
from rmd_plugin.monitor.trainer_access import DataSource, as_validation, has_validation, running_loaders

if TYPE_CHECKING:
    from rmd_plugin.monitor.callback import OODMonitor


#: encoded batches and the positions of their samples in the set
Encodings = Generator[tuple[Encoded, Tensor], None, None]


class OODMonitorWarning(UserWarning):
    """A detector could not be fitted or scored; its metrics are NaN and the training goes on."""


class Engine:
    """Listens to a module, fits the detectors and scores them. The options are those of ``monitor``."""

    def __init__(self, monitor: OODMonitor, detectors: Mapping[str, Spec | str] | Sequence[str]) -> None:
        self.monitor = monitor
        self.roster = Roster(detectors)
        self.journal = Journal(monitor.prefix, monitor.figures_dir)
        self.stream = TrainingStream()
        self.saved_head: str | None = None  #: the head, as a checkpoint says
        self.datamodule_ood: dict[str, Iterable[Any]] | None = None  #: its OOD loaders, once they are made
        self._encoder: BatchEncoder | None = None
        self._evaluation: Evaluation | None = None
        self._seen: defaultdict[int, int] = defaultdict(int)  # samples of each evaluation dataloader
        self._told: set[str] = set()
        self.fit_step: int | None = None  #: of the last fit in this training, failed or not

    # -- listening ------------------------------------------------------------------------------------------------

    @property
    def encoder(self) -> BatchEncoder:
        """Listens to the module between :meth:`attach` and :meth:`detach`."""
        if self._encoder is None:
            raise RuntimeError("OODMonitor is not set up. It works only inside of a Trainer.")
        return self._encoder

    def new_encoder(self, module: pl.LightningModule) -> BatchEncoder:
        """An encoder for the module, which refuses a layer that there is not."""
        given = self.monitor
        return BatchEncoder(module, given.head, encoder=given.encoder, forward=given.forward, labels=given.labels)

    def attach(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Build the detectors and get ready to listen."""
        if self._encoder is not None:
            return
        encoder = self.new_encoder(module)
        self._build(module, encoder)
        encoder.layers = self.roster.listen(module, fitting=trainer.state.fn == TrainerFn.FITTING)
        adapters = self.roster.adapters
        inputs = Representation.INPUTS
        on_inputs = [name for name, found in adapters.items() if found.fitted_on is inputs]
        running = [name for name, found in adapters.items() if found.scored_on is inputs or name in on_inputs]
        if running and in_lockstep(trainer):
            raise ValueError(
                f"{', '.join(running)} would run the network, which under {type(trainer.strategy).__name__} all "
                "processes do together: an error on one would leave the others waiting. Take detectors on features "
                "or logits."
            )
        if self.monitor.refit == "stream" and on_inputs:
            raise ValueError(
                f"refit='stream' has no inputs to fit {', '.join(on_inputs)} on. Use refit='pass', or a second "
                "OODMonitor with another prefix for these detectors."
            )
        if self.monitor.refit == "stream" and not encoder.passive:
            raise ValueError(
                f"refit='stream' only listens, but encoder={self.monitor.encoder!r} has to be called. "
                "Use refit='pass', or name a layer with head= or encoder=."
            )
        encoder.logits = any(Representation.LOGITS in (x.fitted_on, x.scored_on) for x in adapters.values())
        self._encoder = encoder

    def detach(self) -> None:
        """Stop listening."""
        if self._encoder is not None:
            self._encoder.stop()
        self.roster.stop_listening()
        self._encoder = self._evaluation = self.stream.refit = None

    def _build(self, module: pl.LightningModule, encoder: BatchEncoder, names: list[str] | None = None) -> None:
        # copies of weights that are made in inference mode could not take part in autograd
        with isolated_rng(self.monitor.seed), torch.inference_mode(False):
            self.roster.build(module, parts_of(encoder, head=self.saved_head, seed=self.monitor.seed), names)

    def check_dataloaders(self, trainer: pl.Trainer) -> None:
        """Refuse names of dataloaders that there are not."""
        count = len(running_loaders(trainer))
        missing = [f"{index} ({name})" for index, name in self.monitor.ood_dataloaders.items() if index >= count]
        if missing:
            message = f"ood_dataloaders names dataloader {', '.join(missing)}, but there are only {count}."
            if trainer.state.fn == TrainerFn.FITTING:
                raise ValueError(f"{message} Return the OOD dataloaders after the others.")
            self.complain(message)

    def _heard(self, batch: Any) -> Encoded | None:
        encoded = self.encoder.take(batch)
        self.monitor.head = self.monitor.head or self.encoder.head
        if self.encoder.taken:
            self.say(f"{self.encoder.taken}.")
        return encoded

    # -- fitting --------------------------------------------------------------------------------------------------

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether the detectors are to be fitted and scored in this epoch."""
        epoch = trainer.current_epoch
        due = epoch >= self.monitor.warmup_epochs and (epoch + 1) % self.monitor.every_n_epochs == 0
        return due or trainer.state.fn != TrainerFn.FITTING

    def listen(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
        """Get ready to hear the training step of a batch."""
        if any(not found.found for found in self.encoder.layers):
            with visiting(module, self.monitor.seed), trainer.precision_plugin.forward_context():
                self.encoder.find_layers(batch)
        self.encoder.start()

    def add_to_stream(self, trainer: pl.Trainer, batch: Any) -> None:
        """Add what was heard of a training batch to the stream."""
        encoded = self._heard(batch)
        if encoded is None:
            raise self.encoder.problem or EncodingError(
                f"{self.monitor.head or 'nn.Linear'} took no part in the training step, so there is nothing to stream "
                "from. Name the classification layer with head=, or use refit='pass' (as well for a network that was "
                "compiled and run before)."
            )
        self.encoder.check_width(encoded)
        self.stream.add(trainer, self.roster.adapters, encoded)

    def refit(
        self, trainer: pl.Trainer, module: pl.LightningModule, names: list[str], *, record: bool = True
    ) -> list[str]:
        """Fit the detectors of these names and return the names of those that failed."""
        self.fit_step = trainer.global_step
        data, encoder = self._fit_data(trainer), self.encoder
        if self.roster.needs_parts and encoder.by_head and encoder.head is None:
            data.find_head()
        if any(not found.found for found in encoder.layers):
            data.find_layers()
        self._build(module, encoder, names)
        for name, found in self.roster.head_users().items():
            logits = f"the head {encoder.head!r}" if found else "its own Gaussians, for want of a linear head"
            self.say(f"{name!r} takes the logits of {logits}.")
        adapters = {name: self.roster.adapters[name] for name in names}
        streaming = self.monitor.refit == "stream" and trainer.state.fn == TrainerFn.FITTING
        # a stream may have had no training batch since the last time
        refit = (self.stream.refit if streaming else None) or Refit(adapters, module.device)
        if not streaming and refit.groups:
            refit.feed(self._checked(data.batches()))
        outcomes = refit.finish(adapters, trainer, data, self.monitor.seed)
        if trainer.check_val_every_n_epoch is None:
            self.stream.refit = None
        for name, outcome in outcomes.items() if record else ():
            self.journal.record(trainer, name, "", "fit_seconds", outcome.seconds)
        for problem in self.roster.note(outcomes, epoch=trainer.current_epoch, step=trainer.global_step):
            self.complain(problem)
        return [name for name, outcome in outcomes.items() if outcome.failed]

    def _checked(self, batches: Encodings) -> Encodings:
        with closing(batches):
            for encoded, positions in batches:
                self.encoder.check_width(encoded)
                yield encoded, positions

    def refit_unscored(self, trainer: pl.Trainer, module: pl.LightningModule, *, record: bool = True) -> None:
        """Fit the detectors to weights that no validation has fitted them to, so that checkpoints hold them fitted."""
        if trainer.global_step == self.fit_step:
            return
        if self.monitor.refit == "stream" and self.stream.refit is None:
            if not self.roster.fitted:
                given = f"warmup_epochs={self.monitor.warmup_epochs}, every_n_epochs={self.monitor.every_n_epochs}"
                self.complain(f"the training ended before the detectors were due to be fitted: {given}.", once=True)
            return
        with as_validation(trainer):
            self.refit(trainer, module, list(self.roster.detectors), record=record)
        if not has_validation(trainer):
            self.complain("there is no validation: the detectors are fitted and saved, but not scored.", once=True)
        elif not any(row["ood"] for row in self.journal.rows):
            self.complain(
                "the training ended before the detectors were due to be scored: they are fitted to its final weights "
                "and saved, but not scored.",
                once=True,
            )

    def _fit_data(self, trainer: pl.Trainer) -> DataSource:
        given = self.monitor
        limit = trainer.limit_train_batches if given.limit_fit_batches is None else given.limit_fit_batches
        tell = partial(self.complain, once=True)
        return DataSource(trainer, self.encoder, given.fit_loader, limit, given.seed, tell)

    # -- scoring --------------------------------------------------------------------------------------------------

    @property
    def scoring(self) -> bool:
        """Whether an evaluation is under way."""
        return self._evaluation is not None

    def begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refit, if the module is being trained, and get ready to score."""
        self._evaluation = None
        self._seen.clear()
        if trainer.sanity_checking:
            return
        count = len(running_loaders(trainer))
        named = [name for index, name in self.monitor.ood_dataloaders.items() if index < count]
        sets = [*self._ood_loaders(trainer), *dict.fromkeys(named)]
        if not self.due(trainer):
            metrics = (*METRICS, ACCEPTED) if self.monitor.calibrate else METRICS
            self.journal.repeat(trainer, self.roster.detectors, sets, metrics)
            return
        names = list(self.roster.detectors)
        if trainer.state.fn != TrainerFn.FITTING:
            unfitted = [name for name in names if not self.roster.is_fitted(name)]
            names = unfitted if self._fit_data(trainer).chosen else []
        failed = self.refit(trainer, module, names) if names else []
        self._evaluation = Evaluation(self.roster.adapters, check_names(sets), module=module, seed=self.monitor.seed)
        for name, reason in self.roster.unusable.items():
            self._evaluation.fail(name, "" if name in failed else reason)  # "": has been told already

    def score(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, dataloader_idx: int) -> None:
        """Score what was heard of an evaluation batch."""
        encoded = self._heard(batch) if self.encoder.passive else None
        if encoded is None:  # the step did not come by the head, or an encoder has to be called
            with visiting(module, self.monitor.seed), trainer.precision_plugin.forward_context():
                encoded = self.encoder(batch)
        if self._evaluation is None:
            return  # the sanity check has seen that batches can be encoded
        loaders, start = running_loaders(trainer), self._seen[dataloader_idx]
        self._seen[dataloader_idx] += len(encoded)
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        keep = own_samples(loader, start, len(encoded), rank=trainer.global_rank, world=trainer.world_size)
        self._evaluation.add(encoded, ood=self.monitor.ood_dataloaders.get(dataloader_idx), keep=keep)

    def finish(self, trainer: pl.Trainer) -> None:
        """Score the OOD loaders, then log the metrics."""
        if self._evaluation is None:
            return
        evaluation, self._evaluation = self._evaluation, None
        for name, loader in self._ood_loaders(trainer).items():
            self._score_loader(trainer, evaluation, name, loader)
        results = evaluation.finish(trainer, partial(self._decide, trainer) if self.monitor.calibrate else None)
        for detector, values in results.values.items():
            for key, value in values.items():
                ood, metric = key.rsplit("/", 1)
                self.journal.record(trainer, detector, ood, metric, value)
        for detector, threshold in results.thresholds.items():
            self.journal.record(trainer, detector, "", THRESHOLD, threshold)
            if trainer.state.fn != TrainerFn.FITTING:  # there the samples are those of the calibration
                alarms = ~(results.scores[detector][0] <= threshold)
                self.journal.record(trainer, detector, "", FALSE_ALARMS, float(alarms.double().mean()))
        self.journal.draw(trainer, results.scores)
        for problem in results.problems:
            self.complain(problem, once=not any(results.values.values()))

    def _decide(self, trainer: pl.Trainer, name: str, id_scores: Tensor) -> float:
        """The threshold of a detector; while the module is trained, calibrated by these scores of ID samples."""
        detector, alpha = self.roster.detectors[name], self.monitor.alpha
        if isinstance(detector, Calibrated):
            alpha = detector.alpha
            if detector.per_class:
                self.say(f"{name!r} has per_class=True, so it is not calibrated here: call calibrate() yourself.")
                return math.nan
        if trainer.state.fn == TrainerFn.FITTING and len(id_scores) and not bool(id_scores.isnan().any()):
            metric = CalibrationScores(sync_on_compute=False)
            metric.update(id_scores.cpu())
            self.roster.calibrate(name, metric.compute())
        calibration = self.roster.calibrations.get(name)
        if calibration is None:
            return math.nan
        if len(calibration) < required_samples(alpha):
            few = f"{len(calibration)} ID validation samples are too few to decide at alpha={alpha:g}"
            self.say(f"{few}, which takes {required_samples(alpha)}: no threshold.")
            return math.nan
        return float(calibration.threshold(alpha))

    def _score_loader(self, trainer: pl.Trainer, evaluation: Evaluation, name: str, loader: Iterable[Any]) -> None:
        limit = self.monitor.limit_ood_batches
        if limit is None:
            limit = trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches
        with closing(DataSource(trainer, self.encoder, loader, limit, self.monitor.seed).batches()) as batches:
            try:
                for encoded, _ in batches:
                    evaluation.add(encoded, ood=name)
            except EncodingError:
                raise
            except Exception as error:
                evaluation.broken_sets[name] = error

    def _ood_loaders(self, trainer: pl.Trainer) -> dict[str, Iterable[Any]]:
        if self.monitor.ood is not None:
            return self.monitor.ood
        if self.datamodule_ood is None:
            datamodule: Any = getattr(trainer, "datamodule", None)
            with isolated_rng(self.monitor.seed):
                self.datamodule_ood = dict(getattr(datamodule, "ood_dataloaders", dict)())
        return self.datamodule_ood

    def say(self, news: str) -> None:
        """Tell what is no problem, once."""
        if news not in self._told:
            self._told.add(news)
            rank_zero_info(f"OODMonitor: {news}")

    def complain(self, problem: str, *, once: bool = False) -> None:
        """Warn, or end the training, as the options say."""
        if once and problem in self._told:
            return
        self._told.add(problem)
        if self.monitor.on_error == "raise" and not once:
            raise RuntimeError(f"OODMonitor: {problem}")
        warnings.warn(f"OODMonitor: {problem}", OODMonitorWarning, stacklevel=3)
