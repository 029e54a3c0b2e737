"""One fit of several detectors from the same encoded batches, over any number of processes.

What each of them is fed says :mod:`rmd_plugin.compare.adapters`. Whatever is distributed is held by metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from rmd_plugin.compare.adapters import Adapter, take
from rmd_plugin.compare.metrics import FeatureRows, quiet_compute
from rmd_plugin.compare.parts import Representation
from rmd_plugin.encoding.batches import Encoded, EncodingError
from rmd_plugin.encoding.isolation import visiting

_MOMENTS, _LOGITS, _INPUTS = Representation.MOMENTS, Representation.LOGITS, Representation.INPUTS


@dataclass
class Outcome:
    """How the fit of one detector went.

    Attributes:
        seconds: the shared pass over the data, and the detector's own fit.
        error: what went wrong on this process; None if nothing did.
        failed: whether it went wrong on any process.
    """

    seconds: float = 0.0
    error: Exception | None = None
    failed: bool = False


@dataclass
class _Group:
    """Detectors that are fed from one metric."""

    fed: Representation
    metric: Metric
    names: list[str] = field(default_factory=list)
    error: Exception | None = None

    def update(self, encoded: Encoded, labels: Tensor, places: Tensor) -> None:
        where = () if self.fed is _MOMENTS else (places,)
        self.metric.update(take(self.fed, encoded), labels, *where)

    def collect(self, device: torch.device) -> Any:
        """What the detectors are fitted on, from all processes together."""
        if self.fed is not _MOMENTS and device.type == "cuda":
            self.metric.to(device)  # NCCL moves only what is on its devices
        with quiet_compute():
            found = self.metric.compute()
        if self.fed is _MOMENTS:
            return found
        rows, labels = found
        return Encoded(rows, rows if self.fed is _LOGITS else None, labels)


class Refit:
    """One fit of several detectors from the same batches, over any number of processes.

    Call :meth:`update` with every batch, then :meth:`finish` on every process. Errors are kept, not raised: a process
    that left would let the others wait for ever.

    Args:
        adapters: the detectors by name.
        device: for the metrics.
    """

    def __init__(self, adapters: Mapping[str, Adapter], device: torch.device) -> None:
        self.seconds = 0.0
        self._groups: dict[tuple[Any, ...], _Group] = {}
        for name, adapter in adapters.items():
            if adapter.fitted_on in (None, _INPUTS):
                continue
            options: tuple[Any, ...] = ()
            if adapter.fitted_on is _MOMENTS:
                # float64 sums do not exist on MPS; rows are collected on the CPU
                metric: Metric = adapter.detector.new_moments()  # type: ignore[attr-defined]
                fed, options = _MOMENTS, _options(metric)
                metric.to("cpu" if device.type == "mps" else device)
            else:
                # all that is made from features shares their rows
                fed, metric = _LOGITS if adapter.fitted_on is _LOGITS else Representation.FEATURES, FeatureRows()
            self._groups.setdefault((fed, *options), _Group(fed, metric)).names.append(name)
        self._device = device

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of the detectors that share an accumulator."""
        return [tuple(group.names) for group in self._groups.values()]

    def update(self, encoded: Encoded, places: Tensor) -> None:
        """Add a batch with labels; ``places`` is the order of its samples over all processes, shape (B,).

        Raises:
            EncodingError: if the batch has no labels.
        """
        if encoded.labels is None:
            raise EncodingError("the batches to fit on have no labels. Pass labels=, which takes them from the batch.")
        for group in self._groups.values():
            if group.error is None:
                try:
                    group.update(encoded, encoded.labels, places)
                except Exception as error:
                    group.error = error

    def fail(self, error: Exception) -> None:
        """Give up the fit on this process, say because its data could not be read."""
        for group in self._groups.values():
            group.error = group.error or error

    def finish(
        self,
        adapters: Mapping[str, Adapter],
        *,
        agree: Callable[[list[bool]], list[bool]],
        loader: Callable[[], Iterable[Any]],
        module: nn.Module,
        seed: int,
    ) -> dict[str, Outcome]:
        """Fit the detectors. Every process has to call it, and gives all detectors the same fit.

        Args:
            adapters: the same names as before.
            agree: true where any process says true.
            loader: gives pairs (x, y) of the whole set, for detectors that are fitted on inputs.
            module: the network; it is afterwards as it was.
            seed: of what the fits draw.
        """
        outcomes: dict[str, Outcome] = {}
        groups = list(self._groups.values())
        for group, failed in zip(groups, agree([group.error is not None for group in groups]), strict=True):
            start = time.perf_counter()
            data = None if failed else self._collect(group)
            shared = self.seconds + time.perf_counter() - start
            for name in group.names:
                outcomes[name] = Outcome(shared, group.error, failed)
                if data is not None:
                    _attempt(outcomes[name], adapters[name], data, module, seed)
        for name, adapter in adapters.items():
            if adapter.fitted_on is _INPUTS:
                outcomes[name] = Outcome()
                _attempt(outcomes[name], adapter, loader(), module, seed)
        flags = agree([outcome.failed or outcome.error is not None for outcome in outcomes.values()])
        for outcome, failed in zip(outcomes.values(), flags, strict=True):
            outcome.failed = failed
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

        Features and logits are not part of it: they would fill the checkpoint.
        """
        states = []
        for group in self._groups.values():
            if group.fed is _MOMENTS:
                with group.metric.sync_context():
                    names = group.metric._defaults
                    tensors = {name: getattr(group.metric, name).detach().cpu().clone() for name in names}
                states.append({"names": list(group.names), "tensors": tensors})
        return states

    def load_moments(self, states: list[dict[str, Any]]) -> None:
        """Go on from :meth:`moments_state`. Only one process may take it over."""
        for state in states:
            for group in self._groups.values():
                if group.fed is _MOMENTS and list(group.names) == state["names"]:
                    for name, tensor in state["tensors"].items():
                        setattr(group.metric, name, tensor.to(group.metric.device))
                    group.metric._update_count = 1


def _options(metric: Metric) -> tuple[Any, ...]:
    # accumulators with the same public settings collect the same
    plain = (bool, int, float, str, type(None))
    settings = sorted((k, v) for k, v in vars(metric).items() if not k.startswith("_") and isinstance(v, plain))
    return (type(metric), *settings)


def _attempt(outcome: Outcome, adapter: Adapter, data: Any, module: nn.Module, seed: int) -> None:
    start = time.perf_counter()
    try:
        with visiting(module, seed), torch.inference_mode(False), torch.enable_grad():
            adapter.fit(data)
    except Exception as error:
        outcome.error = error
    outcome.seconds += time.perf_counter() - start
