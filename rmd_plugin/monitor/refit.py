"""One fit of several detectors from the same encoded batches, over any number of processes.

The batches come from a pass of their own, or from the training itself. What each detector is fed says
:mod:`rmd_plugin.compare.adapters`. Whatever is distributed is held by metrics.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from rmd_plugin.compare.adapters import Adapter, Representation, take
from rmd_plugin.compare.metrics import FeatureRows, quiet_compute
from rmd_plugin.encoding.batches import Encoded, EncodingError
from rmd_plugin.encoding.isolation import visiting
from rmd_plugin.monitor.sharding import own_samples
from rmd_plugin.monitor.trainer_access import training_loaders

_MOMENTS, _LOGITS, _INPUTS = Representation.MOMENTS, Representation.LOGITS, Representation.INPUTS
_POOLED = Representation.POOLED
#: what is fitted on moments
_ON_MOMENTS = (_MOMENTS, _POOLED)


@dataclass
class FitOutcome:
    """How the fit of one detector went."""

    seconds: float = 0.0  #: of the shared pass over the data, and the detector's own fit
    error: Exception | None = None  #: what went wrong on this process
    failed: bool = False  #: whether it went wrong on any process


@dataclass
class _Group:
    """Detectors that are fed from one metric."""

    fed: Representation
    metric: Metric
    names: list[str] = field(default_factory=list)
    error: Exception | None = None
    layer: str = ""  #: of whose features the moments are, as ``Encoded.layers`` calls it

    def update(self, encoded: Encoded, labels: Tensor, positions: Tensor) -> None:
        where = () if self.fed in _ON_MOMENTS else (positions,)
        values = take(self.fed, encoded)
        self.metric.update(values[self.layer] if self.fed is _POOLED else values, labels, *where)

    def collect(self, device: torch.device) -> Any:
        """What the detectors are fitted on, from all processes together."""
        if self.fed not in _ON_MOMENTS and device.type == "cuda":
            self.metric.to(device)  # NCCL moves only what is on its devices
        with quiet_compute():
            found = self.metric.compute()
        if self.fed in _ON_MOMENTS:
            return found
        rows, labels = found
        return Encoded(rows, rows if self.fed is _LOGITS else None, labels)


class Refit:
    """One fit of several detectors from the same batches, over any number of processes.

    Call :meth:`update` with every batch, then :meth:`finish` on every process. Errors are kept, not raised: a process
    that left would let the others wait for ever.
    """

    def __init__(self, adapters: Mapping[str, Adapter], device: torch.device) -> None:
        self.seconds = 0.0
        self._groups: dict[tuple[Any, ...], _Group] = {}
        for name, adapter in adapters.items():
            if adapter.fitted_on in (None, _INPUTS):
                continue
            detector: Any = adapter.detector
            if adapter.fitted_on is _POOLED:
                for layer in adapter.layers.keys().values() if adapter.layers else ():
                    self._join(name, _POOLED, detector.new_layer_moments(), device, layer)
            elif adapter.fitted_on is _MOMENTS:
                self._join(name, _MOMENTS, detector.new_moments(), device)
            else:
                # all that is made from features shares their rows
                fed = _LOGITS if adapter.fitted_on is _LOGITS else Representation.FEATURES
                self._groups.setdefault((fed,), _Group(fed, FeatureRows())).names.append(name)
        self._device = device

    def _join(self, name: str, fed: Representation, metric: Metric, device: torch.device, layer: str = "") -> None:
        """Let a detector share the moments of others with the same settings."""
        # float64 sums do not exist on MPS; rows are collected on the CPU
        metric.to("cpu" if device.type == "mps" else device)
        group = _Group(fed, metric, layer=layer)
        self._groups.setdefault((fed, layer, *_options(metric)), group).names.append(name)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of the detectors that share an accumulator."""
        return [tuple(group.names) for group in self._groups.values()]

    def update(self, encoded: Encoded, positions: Tensor) -> None:
        """Add a batch with labels; ``positions`` is the order of its samples over all processes, shape (B,).

        Raises:
            EncodingError: if the batch has no labels.
        """
        if encoded.labels is None:
            raise EncodingError("the batches to fit on have no labels. Pass labels=, which takes them from the batch.")
        for group in self._groups.values():
            if group.error is None:
                try:
                    group.update(encoded, encoded.labels, positions)
                except Exception as error:
                    group.error = error

    def feed(self, batches: Generator[tuple[Encoded, Tensor], None, None]) -> None:
        """One pass over this process's share of the data; an error of the data is kept, one of the settings raised."""
        start = time.perf_counter()
        with closing(batches):
            try:
                for encoded, positions in batches:
                    self.update(encoded, positions)
            except EncodingError:
                raise  # a wrong setting, not bad luck
            except Exception as error:
                for group in self._groups.values():
                    group.error = group.error or error
        self.seconds = time.perf_counter() - start

    def finish(
        self, adapters: Mapping[str, Adapter], trainer: pl.Trainer, data: Iterable[tuple[Any, Tensor]], seed: int
    ) -> dict[str, FitOutcome]:
        """Fit the detectors. Every process has to call it, and gives all detectors the same fit.

        The adapters have the same names as before; ``data`` is the whole set, for detectors that are fitted on inputs.
        """
        module, anywhere = trainer.lightning_module, partial(trainer.strategy.reduce_boolean_decision, all=False)
        outcomes: dict[str, FitOutcome] = {}
        moments: dict[str, dict[str, Any]] = {}  # of detectors on several layers, by layer
        for group in self._groups.values():
            start = time.perf_counter()
            failed = anywhere(group.error is not None)
            found = None if failed else self._collect(group)
            seconds = time.perf_counter() - start
            for name in group.names:
                outcome = outcomes.setdefault(name, FitOutcome(self.seconds))
                outcome.seconds += seconds
                outcome.error, outcome.failed = outcome.error or group.error, outcome.failed or failed
                if found is not None and group.fed is _POOLED:
                    moments.setdefault(name, {})[group.layer] = found
                elif found is not None:
                    _attempt(outcome, adapters[name], found, module, seed)
        for name, adapter in adapters.items():
            layers = adapter.layers.keys() if adapter.layers else {}
            if adapter.fitted_on is _POOLED and not layers:
                outcomes[name] = FitOutcome(error=EncodingError("no batch has shown its layers. Name them."))
            elif adapter.fitted_on is _POOLED and moments.get(name, {}).keys() == set(layers.values()):
                found = {layer: moments[name][key] for layer, key in layers.items()}
                _attempt(outcomes[name], adapter, found, module, seed)
        for name, adapter in adapters.items():
            if adapter.fitted_on is _INPUTS:
                outcomes[name] = FitOutcome()
                _attempt(outcomes[name], adapter, data, module, seed)
        for outcome in outcomes.values():
            outcome.failed = anywhere(outcome.failed or outcome.error is not None)
        return outcomes

    def _collect(self, group: _Group) -> Any:
        try:
            return group.collect(self._device)
        except Exception as error:
            group.error = error
            return None

    # -- saving a stream in the middle of an epoch ---------------------------------------------------------------------

    def moments_state(self) -> list[dict[str, Any]]:
        """What the moments have gathered so far, over all processes. Every process has to call it.

        The features and logits of all samples are not part of it: they would fill the checkpoint.
        """
        states = []
        for group in self._groups.values():
            if group.fed in _ON_MOMENTS:
                with group.metric.sync_context():
                    tensors = {name: _joined(value).cpu().clone() for name, value in group.metric.metric_state.items()}
                states.append({"names": list(group.names), "layer": group.layer, "tensors": tensors})
        return states

    def load_moments(self, states: list[dict[str, Any]]) -> None:
        """Go on from :meth:`moments_state`. Only one process may take it over."""
        for state in states:
            for group in self._groups.values():
                place = state["names"], state.get("layer", "")
                if group.fed in _ON_MOMENTS and (list(group.names), group.layer) == place:
                    group.metric.merge_state(state["tensors"])


class TrainingStream:
    """Gathers the encoded batches of the training itself until the next refit; every sample counts once."""

    def __init__(self) -> None:
        self.refit: Refit | None = None  #: what has been gathered; None before the first batch
        self.saved: list[dict[str, Any]] = []  #: moments of a checkpoint in the middle of an epoch, to go on from
        self._seen = 0

    def clear(self) -> None:
        """Forget what has been gathered."""
        self.refit, self.saved = None, []

    def add(self, trainer: pl.Trainer, adapters: Mapping[str, Adapter], encoded: Encoded) -> None:
        """Add a training batch."""
        if self.refit is None:
            self.refit, self._seen = Refit(adapters, trainer.lightning_module.device), 0
            if trainer.is_global_zero:
                self.refit.load_moments(self.saved)
            self.saved = []
        start, rank, world = self._seen, trainer.global_rank, trainer.world_size
        self._seen += len(encoded)
        positions = torch.arange(start, self._seen) * world + rank
        [loader] = training_loaders(trainer)
        keep = own_samples(loader, start, len(encoded), rank=rank, world=world)
        if keep is not None:
            encoded, positions = encoded.select(keep), positions[keep]
        self.refit.update(encoded, positions)


def _joined(state: Tensor | list[Tensor]) -> Tensor:
    """The state of a metric as one tensor."""
    if isinstance(state, list):
        return torch.cat(state) if state else torch.zeros(0)
    return state.detach()


def _options(metric: Metric) -> tuple[Any, ...]:
    # accumulators with the same public settings collect the same
    plain = (bool, int, float, str, type(None))
    settings = sorted((k, v) for k, v in vars(metric).items() if not k.startswith("_") and isinstance(v, plain))
    return (type(metric), *settings)


def _attempt(outcome: FitOutcome, adapter: Adapter, data: Any, module: nn.Module, seed: int) -> None:
    start = time.perf_counter()
    try:
        with visiting(module, seed), torch.inference_mode(False), torch.enable_grad():
            adapter.fit(data)
    except Exception as error:
        outcome.error = error
    outcome.seconds += time.perf_counter() - start
