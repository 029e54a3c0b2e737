"""Fit and score any detector of the framework on encoded batches: what to feed it follows from what it offers.

=====================================  ==================================================  =======================
the detector                           is fitted by                                        is scored by
=====================================  ==================================================  =======================
has ``new_moments``, ``fit_moments``   streaming moments, shared by detectors with the     ``predict_features``
                                       same options: constant memory
is a ``FeaturesDetector``              ``fit_features`` on all features                    ``predict_features``
is a ``LogitsDetector``                ``fit_logits`` on all logits                        ``predict_logits``
is any other                           ``fit`` on a loader                                 ``predict`` on the inputs
=====================================  ==================================================  =======================

Names no detector. Whatever is distributed is held by torchmetrics metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_ood.api import Detector, FeaturesDetector, LogitsDetector
from torch import Tensor, nn
from torchmetrics import Metric

from rmd_plugin.compare.metrics import FeatureRows, quiet_compute
from rmd_plugin.detectors.base import raise_if_interrupted
from rmd_plugin.encoding.batch_encoder import Encoded, EncodingError, batch_inputs
from rmd_plugin.encoding.isolation import visiting

Food = Literal["moments", "features", "logits", "inputs", "nothing"]


def food(detector: Detector) -> Food:
    """What a detector is fitted on."""
    if hasattr(detector, "new_moments") and hasattr(detector, "fit_moments"):
        return "moments"
    if not detector.requires_fit:
        return "nothing"
    if isinstance(detector, FeaturesDetector):
        return "features"
    return "logits" if isinstance(detector, LogitsDetector) else "inputs"


def score_batch(detector: Detector, encoded: Encoded, batch: Any, module: nn.Module, seed: int) -> Tensor:
    """Outlier scores of a batch.

    Args:
        detector: fitted, if it requires a fit.
        encoded: the encoded batch.
        batch: the batch itself, for detectors that are scored on the inputs.
        module: the network, which such detectors run and which is afterwards as it was.
        seed: of what such a detector draws.

    Returns:
        Scores of shape (B,), higher means more likely OOD.
    """
    if isinstance(detector, FeaturesDetector):
        with torch.no_grad():
            return detector.predict_features(encoded.features)
    if isinstance(detector, LogitsDetector):
        if encoded.logits is None:
            raise ValueError(f"{type(detector).__name__} needs logits, but the head's output is not a tensor (B, C).")
        with torch.no_grad():
            return detector.predict_logits(encoded.logits)
    # such detectors may differentiate: copies made outside of inference mode can take part in autograd
    with visiting(module, seed), torch.inference_mode(False), torch.enable_grad():
        inputs = apply_to_collection(batch_inputs(batch), Tensor, torch.clone)
        return detector.predict(inputs).detach()


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

    food: Food
    metric: Metric
    names: list[str] = field(default_factory=list)
    error: Exception | None = None

    def update(self, encoded: Encoded, labels: Tensor, places: Tensor) -> None:
        if self.food == "moments":
            self.metric.update(encoded.features, labels)
        elif self.food == "features":
            self.metric.update(encoded.features, labels, places)
        elif encoded.logits is None:
            raise ValueError("the head's output is not a tensor (B, C), so there are no logits to fit on.")
        else:
            self.metric.update(encoded.logits, labels, places)


class Refit:
    """One fit of several detectors from the same batches, over any number of processes.

    Call :meth:`update` with every batch, then :meth:`finish` on every process. Errors are kept, not raised: a process
    that left would let the others wait for ever.

    Args:
        detectors: by name.
        device: for the metrics.
    """

    def __init__(self, detectors: Mapping[str, Detector], device: torch.device) -> None:
        self.seconds = 0.0
        self._groups: dict[object, _Group] = {}
        for name, detector in detectors.items():
            kind = food(detector)
            if kind == "moments":
                metric: Metric = detector.new_moments()  # type: ignore[attr-defined]
                key: object = (kind, *_options(metric))
            elif kind in ("features", "logits"):
                metric, key = FeatureRows(), kind
            else:
                continue
            if key not in self._groups:
                # float64 sums do not exist on MPS; rows are collected on the CPU
                place = "cpu" if device.type == "mps" else device
                self._groups[key] = _Group(kind, metric.to(place) if kind == "moments" else metric)
            self._groups[key].names.append(name)
        self._device = device

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of the detectors that share an accumulator."""
        return [tuple(group.names) for group in self._groups.values()]

    def update(self, encoded: Encoded, places: Tensor) -> None:
        """Add a batch.

        Args:
            encoded: with labels; samples with a label below zero are skipped.
            places: order of the samples over all processes, shape (B,).

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
        detectors: Mapping[str, Detector],
        *,
        agree: Callable[[list[bool]], list[bool]],
        loader: Callable[[], Iterable[Any]],
        module: nn.Module,
        seed: int,
    ) -> dict[str, Outcome]:
        """Fit the detectors. Every process has to call it, and gives all detectors the same fit.

        Args:
            detectors: the same names as before.
            agree: true where any process says true.
            loader: gives pairs (x, y) of the whole set, for detectors that are fitted on inputs.
            module: the network; it is afterwards as it was.
            seed: of what the fits draw.

        Returns:
            The outcome for each detector that was to be fitted.
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
                    fit = _fit_call(group.food, detectors[name], data)
                    self._attempt(outcomes[name], detectors[name], fit, module, seed)
        for name, detector in detectors.items():
            if food(detector) == "inputs":
                outcomes[name] = Outcome()
                self._attempt(outcomes[name], detector, _fit_call("inputs", detector, loader), module, seed)
        flags = agree([outcome.failed or outcome.error is not None for outcome in outcomes.values()])
        for outcome, failed in zip(outcomes.values(), flags, strict=True):
            outcome.failed = failed
        return outcomes

    def _collect(self, group: _Group) -> Any:
        try:
            if group.food != "moments" and self._device.type == "cuda":
                group.metric.to(self._device)  # NCCL moves only what is on its devices
            with quiet_compute():
                return group.metric.compute()
        except Exception as error:
            group.error = error
            return None

    @staticmethod
    def _attempt(outcome: Outcome, detector: Detector, fit: Callable[[], object], module: nn.Module, seed: int) -> None:
        start = time.perf_counter()
        try:
            with visiting(module, seed), torch.inference_mode(False), torch.enable_grad():
                fit()
            raise_if_interrupted(detector)
        except Exception as error:
            outcome.error = error
        outcome.seconds += time.perf_counter() - start

    # -- saving a stream in the middle of an epoch ---------------------------------------------------------------------

    def moments_state(self) -> list[dict[str, Any]]:
        """What the moments have gathered so far, over all processes. Every process has to call it.

        Features and logits are not part of it: they would fill the checkpoint.
        """
        states = []
        for group in self._groups.values():
            if group.food == "moments":
                with group.metric.sync_context():
                    names = group.metric._defaults
                    tensors = {name: getattr(group.metric, name).detach().cpu().clone() for name in names}
                states.append({"names": list(group.names), "tensors": tensors})
        return states

    def load_moments(self, states: list[dict[str, Any]]) -> None:
        """Go on from :meth:`moments_state`. Only one process may take it over."""
        for state in states:
            for group in self._groups.values():
                if group.food == "moments" and list(group.names) == state["names"]:
                    for name, tensor in state["tensors"].items():
                        setattr(group.metric, name, tensor.to(group.metric.device))
                    group.metric._update_count = 1


def _options(metric: Metric) -> list[tuple[str, Any]]:
    # accumulators with the same public settings collect the same
    plain = (bool, int, float, str, type(None))
    settings = sorted((k, v) for k, v in vars(metric).items() if not k.startswith("_") and isinstance(v, plain))
    return [("type", type(metric)), *settings]


def _fit_call(kind: Food, detector: Any, data: Any) -> Callable[[], object]:
    if kind == "moments":
        return lambda: detector.fit_moments(data)
    if kind == "inputs":
        return lambda: detector.fit(data())
    rows, labels = data
    if not hasattr(detector, "state_dict"):
        rows, labels = rows.cpu(), labels.cpu()  # the framework fits on the CPU, partly with numpy
    return lambda: (detector.fit_features if kind == "features" else detector.fit_logits)(rows, labels)
