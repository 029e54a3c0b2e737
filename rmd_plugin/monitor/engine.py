"""What a monitor does at each of Lightning's hooks. :class:`rmd_plugin.OODMonitor` connects it to them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from rmd_plugin.compare.parts import Representation
from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.batches import Encoded, EncodingError
from rmd_plugin.encoding.isolation import isolated_rng, visiting
from rmd_plugin.monitor.evaluation import Evaluation, check_names
from rmd_plugin.monitor.journal import Journal
from rmd_plugin.monitor.refit import Refit
from rmd_plugin.monitor.roster import Roster, Spec, parts_of
from rmd_plugin.monitor.sharding import own_samples
from rmd_plugin.monitor.stream import TrainingStream
from rmd_plugin.monitor.trainer_access import (
    FitData,
    Limit,
    any_process,
    encoded_batches,
    ood_loaders_of,
    running_loaders,
    trainer_limit,
)


class OODMonitorWarning(UserWarning):
    """A detector could not be fitted or scored; its metrics are NaN and the training goes on."""


@dataclass
class Options:
    """The options of :class:`rmd_plugin.OODMonitor`, which explains them."""

    head: str | None
    ood: dict[str, Iterable[Any]] | None
    encoder: str | Callable[[Any], Tensor] | None
    forward: Callable[[Any, Any], Any] | None
    labels: Callable[[Any], Tensor | None] | None
    ood_dataloaders: dict[int, str]
    refit: str
    fit_loader: Iterable[Any] | None
    limit_fit_batches: Limit
    limit_ood_batches: Limit
    every_n_epochs: int
    warmup_epochs: int
    figures_dir: str | PathLike[str] | None
    on_error: str
    prefix: str
    seed: int

    def __post_init__(self) -> None:
        for name, choices in (("refit", ("pass", "stream")), ("on_error", ("warn", "raise"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")
        if self.every_n_epochs < 1 or self.warmup_epochs < 0:
            raise ValueError(
                "expected every_n_epochs >= 1 and warmup_epochs >= 0, "
                f"got {self.every_n_epochs} and {self.warmup_epochs}."
            )
        if self.head is not None and self.encoder is not None:
            raise ValueError(f"give head or encoder, not both: got head={self.head!r} and encoder={self.encoder!r}.")
        check_names((*(self.ood or ()), *dict.fromkeys(self.ood_dataloaders.values())))


class Engine:
    """Listens to a module, fits the detectors and scores them, as :class:`rmd_plugin.OODMonitor` explains."""

    def __init__(self, detectors: Mapping[str, Spec | str] | Sequence[str], options: Options) -> None:
        self.options = options
        self.roster = Roster(detectors)
        folder = None if options.figures_dir is None else Path(options.figures_dir)
        self.journal = Journal(options.prefix, folder)
        self.stream = TrainingStream()
        #: the classification layer, once it is found
        self.head = options.head
        #: where a checkpoint says it is
        self.saved_head: str | None = None
        self._encoder: BatchEncoder | None = None
        self._evaluation: Evaluation | None = None
        self._datamodule_ood: dict[str, Iterable[Any]] | None = None
        self._seen: defaultdict[int, int] = defaultdict(int)  # samples of each evaluation dataloader
        self._told: set[str] = set()

    # -- listening ------------------------------------------------------------------------------------------------

    @property
    def encoder(self) -> BatchEncoder:
        """Listens to the module between :meth:`attach` and :meth:`detach`."""
        if self._encoder is None:
            raise RuntimeError("OODMonitor is not set up. It works only inside of a Trainer.")
        return self._encoder

    def reset(self) -> None:
        """Forget what belonged to another module or datamodule."""
        self.head, self._datamodule_ood = self.options.head, None

    def new_encoder(self, module: pl.LightningModule) -> BatchEncoder:
        """An encoder for the module, which refuses a layer that there is not."""
        given = self.options
        return BatchEncoder(module, self.head, encoder=given.encoder, forward=given.forward, labels=given.labels)

    def attach(self, module: pl.LightningModule) -> None:
        """Build the detectors and put the hooks in place."""
        if self._encoder is not None:
            return
        encoder = self.new_encoder(module)
        self._build(module, encoder)
        adapters = self.roster.adapters
        on_inputs = [name for name, found in adapters.items() if found.fitted_on is Representation.INPUTS]
        if self.options.refit == "stream" and on_inputs:
            raise ValueError(
                f"refit='stream' has no inputs to fit {', '.join(on_inputs)} on. Use refit='pass', or a second "
                "OODMonitor with another prefix for these detectors."
            )
        if self.options.refit == "stream" and not encoder.passive:
            raise ValueError(
                f"refit='stream' only listens, but encoder={self.options.encoder!r} has to be called. "
                "Use refit='pass', or name a layer with head= or encoder=."
            )
        encoder.logits = any(Representation.LOGITS in (x.fitted_on, x.scored_on) for x in adapters.values())
        self._encoder = encoder.attach()

    def detach(self) -> None:
        """Take the hooks away."""
        if self._encoder is not None:
            self._encoder.detach()
        self._encoder = self._evaluation = self.stream.refit = None

    def _build(self, module: pl.LightningModule, encoder: BatchEncoder, names: list[str] | None = None) -> None:
        # copies of weights that are made in inference mode could not take part in autograd
        with isolated_rng(self.options.seed), torch.inference_mode(False):
            parts = parts_of(encoder, head=self.saved_head, seed=self.options.seed)
            self.roster.build(module, parts, names)

    def check_dataloaders(self, trainer: pl.Trainer) -> None:
        """Refuse names of dataloaders that there are not."""
        count = len(running_loaders(trainer))
        missing = [f"{index} ({name})" for index, name in self.options.ood_dataloaders.items() if index >= count]
        if missing:
            message = f"ood_dataloaders names dataloader {', '.join(missing)}, but there are only {count}."
            if trainer.state.fn == TrainerFn.FITTING:
                raise ValueError(f"{message} Return the OOD dataloaders after the others.")
            self.complain(message)

    def _heard(self, batch: Any) -> Encoded | None:
        encoded = self.encoder.take(batch)
        if self.head is None and self.encoder.head is not None:
            self.head = self.encoder.head
            rank_zero_info(f"OODMonitor: the head is {self.head!r}, the last nn.Linear that fired.")
        return encoded

    # -- fitting --------------------------------------------------------------------------------------------------

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether the detectors are to be fitted and scored in this epoch."""
        epoch = trainer.current_epoch
        due = epoch >= self.options.warmup_epochs and (epoch + 1) % self.options.every_n_epochs == 0
        return due or trainer.state.fn != TrainerFn.FITTING

    def add_to_stream(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
        """Add what was heard of a training batch to the stream."""
        encoded = self._heard(batch)
        if encoded is None:
            raise EncodingError(
                f"{self.head or 'nn.Linear'} took no part in the training step, so there is nothing to stream from. "
                "Name the classification layer with head=, or use refit='pass'."
            )
        self.stream.add(trainer, module, self.roster.adapters, encoded)

    def refit(self, trainer: pl.Trainer, module: pl.LightningModule, names: list[str]) -> list[str]:
        """Fit the detectors of these names and return the names of those that failed."""
        data, encoder = self._fit_data(trainer, module), self.encoder
        if self.roster.needs_parts and encoder.by_head and encoder.head is None:
            data.find_head()
        self._build(module, encoder, names)
        adapters = {name: self.roster.adapters[name] for name in names}
        streaming = self.options.refit == "stream" and trainer.state.fn == TrainerFn.FITTING
        refit = self.stream.refit if streaming else Refit(adapters, module.device)
        if refit is None:  # no training batch since the last time
            refit = Refit(adapters, module.device)
        elif not streaming and refit.groups:
            data.feed(refit)
        outcomes = refit.finish(
            adapters,
            agree=lambda flags: any_process(trainer, module, flags),
            loader=lambda: data,
            module=module,
            seed=self.options.seed,
        )
        if trainer.check_val_every_n_epoch is None:
            self.stream.refit = None
        for name, outcome in outcomes.items():
            self.journal.record(trainer, module, name, "", "fit_seconds", outcome.seconds)
        for problem in self.roster.note(outcomes, epoch=trainer.current_epoch, step=trainer.global_step):
            self.complain(problem)
        return [name for name, outcome in outcomes.items() if outcome.failed]

    def _fit_data(self, trainer: pl.Trainer, module: pl.LightningModule) -> FitData:
        given = self.options
        return FitData(
            trainer, module, self.encoder, loader=given.fit_loader, limit=given.limit_fit_batches, seed=given.seed
        )

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
        sets = self._ood_names(trainer)
        if not self.due(trainer):
            self.journal.repeat(trainer, module, self.roster.detectors, sets)
            return
        names = list(self.roster.detectors)
        if trainer.state.fn != TrainerFn.FITTING:
            unfitted = [name for name in names if not self.roster.is_fitted(name)]
            names = unfitted if unfitted and self._fit_data(trainer, module).chosen else []
        failed = self.refit(trainer, module, names) if names else []
        seed = self.options.seed
        self._evaluation = Evaluation(
            self.roster.adapters, check_names(sets), module=module, device=module.device, seed=seed
        )
        for name, reason in self.roster.unusable.items():
            self._evaluation.fail(name, "" if name in failed else reason)  # "": has been told already

    def score(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, dataloader_idx: int) -> None:
        """Score what was heard of an evaluation batch."""
        encoded = self._heard(batch) if self.encoder.passive else None
        if encoded is None:  # the step did not come by the head, or an encoder has to be called
            with visiting(module, self.options.seed), trainer.precision_plugin.forward_context():
                encoded = self.encoder(batch)
        if self._evaluation is None:
            return  # the sanity check has seen that batches can be encoded
        loaders, start = running_loaders(trainer), self._seen[dataloader_idx]
        self._seen[dataloader_idx] += len(encoded)
        loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
        keep = own_samples(loader, start, len(encoded), rank=trainer.global_rank, world=trainer.world_size)
        self._evaluation.add(encoded, ood=self.options.ood_dataloaders.get(dataloader_idx), keep=keep)

    def finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Score the OOD loaders, then log the metrics."""
        if self._evaluation is None:
            return
        evaluation, self._evaluation = self._evaluation, None
        for name, loader in self._ood_loaders(trainer).items():
            self._score_loader(trainer, module, evaluation, name, loader)
        results = evaluation.finish(lambda flags: any_process(trainer, module, flags))
        self.journal.record_all(trainer, module, results.values)
        self.journal.draw(trainer, results.scores)
        for problem in results.problems:
            self.complain(problem, once=not any(results.values.values()))

    def _score_loader(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        evaluation: Evaluation,
        name: str,
        loader: Iterable[Any],
    ) -> None:
        limit = self.options.limit_ood_batches
        if limit is None:
            limit = trainer_limit(trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches)
        batches = encoded_batches(trainer, module, self.encoder, lambda: loader, limit=limit, seed=self.options.seed)
        with closing(batches):
            try:
                for encoded, _ in batches:
                    evaluation.add(encoded, ood=name)
            except EncodingError:
                raise
            except Exception as error:
                evaluation.fail_set(name, error)

    def _ood_loaders(self, trainer: pl.Trainer) -> dict[str, Iterable[Any]]:
        if self.options.ood is not None:
            return self.options.ood
        if self._datamodule_ood is None:
            with isolated_rng(self.options.seed):
                self._datamodule_ood = ood_loaders_of(trainer)
        return self._datamodule_ood

    def _ood_names(self, trainer: pl.Trainer) -> list[str]:
        count = len(running_loaders(trainer))
        named = [name for index, name in self.options.ood_dataloaders.items() if index < count]
        return [*self._ood_loaders(trainer), *dict.fromkeys(named)]

    def complain(self, problem: str, *, once: bool = False) -> None:
        """Warn, or end the training, as the options say."""
        if once and problem in self._told:
            return
        self._told.add(problem)
        if self.options.on_error == "raise" and not once:
            raise RuntimeError(f"OODMonitor: {problem}")
        warnings.warn(f"OODMonitor: {problem}", OODMonitorWarning, stacklevel=3)
