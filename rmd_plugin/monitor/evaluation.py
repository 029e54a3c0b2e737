"""One evaluation of several detectors: encoded batches -> scores -> metrics for each detector and OOD set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_ood.api import Detector
from torch import Tensor, nn

from rmd_plugin.compare.metrics import MEAN, METRICS, OODScores, compare_sets, quiet_compute
from rmd_plugin.encoding.batch_encoder import Encoded
from rmd_plugin.encoding.isolation import isolated_rng
from rmd_plugin.monitor.refit import score_batch

#: the OOD set of samples that are known only by their label below zero
UNKNOWN = "unknown"


@dataclass
class Results:
    """What an evaluation found.

    Attributes:
        values: for each detector the values under ``"<set>/<metric>"`` and ``"mean/<metric>"``; NaN where it failed.
        scores: for each detector that did not fail, the scores of the ID samples and those of each OOD set.
        problems: sentences about what went wrong.
    """

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    scores: dict[str, tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Evaluation:
    """Scores batches with all detectors and keeps the scores. Errors are kept too: a detector that failed is NaN.

    Args:
        detectors: by name.
        sets: names of the OOD sets that are expected.
        module: the network, for detectors that are scored on inputs.
        device: for the scores.
        seed: of what detectors may draw while they score.
    """

    def __init__(
        self,
        detectors: Mapping[str, Detector],
        sets: Sequence[str],
        *,
        module: nn.Module,
        device: torch.device,
        seed: int,
    ) -> None:
        self.sets = tuple(sets)
        self._detectors = dict(detectors)
        self._module = module
        self._seed = seed
        self._errors: dict[str, object] = {}
        self._broken_sets: dict[str, object] = {}
        self._unknown_seen = False
        place = torch.device("cpu") if device.type == "mps" else device
        self._metrics = {name: OODScores((*self.sets, UNKNOWN)).to(place) for name in detectors}

    def add(self, encoded: Encoded, batch: Any, *, ood: str | None = None, keep: Tensor | None = None) -> None:
        """Score a batch.

        Args:
            encoded: the encoded batch.
            batch: the batch itself.
            ood: the OOD set that all of its samples belong to. If None, samples with labels below zero belong to the
                set "unknown" and the others are ID.
            keep: mask of shape (B,) of the samples that count; None for all.
        """
        if ood is not None:
            labels = torch.full((len(encoded),), -1)
        else:
            labels = torch.zeros(len(encoded), dtype=torch.long) if encoded.labels is None else encoded.labels.cpu()
        keep = torch.ones(len(encoded), dtype=torch.bool) if keep is None else keep.cpu()
        self._unknown_seen |= ood is None and bool((labels[keep] < 0).any())
        with isolated_rng(self._seed):
            for name, detector in self._detectors.items():
                if name in self._errors:
                    continue
                try:
                    scores = score_batch(detector, encoded, batch, self._module, self._seed)
                    self._metrics[name].update(scores[keep.to(scores.device)], labels[keep], ood or UNKNOWN)
                except Exception as error:
                    self._errors[name] = error

    def fail(self, name: str, reason: object) -> None:
        """Give up a detector, with the error or a sentence that says why; "" if it has been told already."""
        self._errors.setdefault(name, reason)

    def fail_set(self, ood: str, reason: object) -> None:
        """Give up an OOD set, say because it could not be read."""
        self._broken_sets.setdefault(ood, reason)

    def fail_all(self, reason: object) -> None:
        """Give up all detectors."""
        for name in self._detectors:
            self.fail(name, reason)

    def finish(self, agree: Callable[[list[bool]], list[bool]]) -> Results:
        """Compute the metrics. Every process has to call it, and gets the same values.

        Args:
            agree: true where any process says true.
        """
        names = list(self._detectors)
        flags = [self._unknown_seen, *(s in self._broken_sets for s in self.sets), *(n in self._errors for n in names)]
        unknown, *flags = agree(flags)
        broken, failed = flags[: len(self.sets)], flags[len(self.sets) :]
        results = Results()
        sets = (*self.sets, UNKNOWN) if unknown else self.sets
        for name, bad in zip(self.sets, broken, strict=True):
            if bad:
                results.problems.append(f"the OOD set {name!r} failed: {_reason(self._broken_sets.get(name))}")
        lost = {name for name, bad in zip(self.sets, broken, strict=True) if bad}
        for name, bad in zip(names, failed, strict=True):
            values = {f"{s}/{metric}": math.nan for s in sets for metric in METRICS}
            if bad:
                if self._errors.get(name) != "":
                    results.problems.append(f"{name!r} failed to score: {_reason(self._errors.get(name))}")
            else:
                with quiet_compute():
                    inliers, outliers = self._metrics[name].gather()
                results.scores[name] = inliers, outliers
                for ood in (s for s in sets if s not in lost):
                    try:
                        values.update(_compare(inliers, outliers.get(ood), ood))
                    except ValueError as error:
                        results.problems.append(f"{name!r} has no result on {ood!r}: {error}")
            for metric in METRICS if sets else ():
                values[f"{MEAN}/{metric}"] = sum(values[f"{s}/{metric}"] for s in sets) / len(sets)
            results.values[name] = values
        if not sets:
            results.problems.append(
                "there are no OOD samples to score. Pass ood={name: loader} or ood_dataloaders={index: name}, "
                "or validate on samples with labels below zero."
            )
        return results


def _compare(inliers: Tensor, outliers: Tensor | None, ood: str) -> dict[str, float]:
    if outliers is None or not len(inliers):
        raise ValueError(f"there are {len(inliers)} ID samples and {0 if outliers is None else len(outliers)} of it.")
    values = compare_sets(inliers, {ood: outliers})
    return {key: float(values[key]) for key in (f"{ood}/{metric}" for metric in METRICS)}


def _reason(error: object) -> str:
    if error is None:
        return "see the error of another process."
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
