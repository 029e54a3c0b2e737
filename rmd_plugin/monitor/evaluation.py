"""One evaluation of several detectors: encoded batches -> scores -> metrics for each detector and OOD set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rmd_plugin.compare.adapters import Adapter
from rmd_plugin.compare.metrics import MEAN, METRICS, OODScores, check_set_names, compare_scores, quiet_compute
from rmd_plugin.compare.parts import Representation
from rmd_plugin.encoding.batches import Encoded
from rmd_plugin.encoding.isolation import isolated_rng, visiting

#: the OOD set of samples that are known only by their label below zero
UNKNOWN = "unknown"


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse names of OOD sets that cannot be told apart, or that mean something else."""
    if UNKNOWN in names:
        raise ValueError(f"an OOD set must not be named {UNKNOWN!r}: samples with labels below zero are.")
    return check_set_names(names) if names else ()


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
        adapters: the detectors by name.
        sets: names of the OOD sets that are expected.
        module: the network, for detectors that are scored on inputs.
        device: for the scores.
        seed: of what detectors may draw while they score.
    """

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        sets: Sequence[str],
        *,
        module: nn.Module,
        device: torch.device,
        seed: int,
    ) -> None:
        self.sets = tuple(sets)
        self._adapters = dict(adapters)
        self._module = module
        self._seed = seed
        self._errors: dict[str, object] = {}
        self._broken_sets: dict[str, object] = {}
        self._unknown_seen = False
        place = torch.device("cpu") if device.type == "mps" else device
        self._metrics = {name: OODScores((*self.sets, UNKNOWN)).to(place) for name in adapters}

    def add(self, encoded: Encoded, *, ood: str | None = None, keep: Tensor | None = None) -> None:
        """Score a batch.

        Args:
            encoded: the encoded batch.
            ood: the OOD set of all of its samples. If None, labels below zero are the set "unknown", the others are ID.
            keep: mask of shape (B,) of the samples that count; None for all.
        """
        if ood is not None:
            labels = torch.full((len(encoded),), -1)
        else:
            labels = torch.zeros(len(encoded), dtype=torch.long) if encoded.labels is None else encoded.labels.cpu()
        keep = torch.ones(len(encoded), dtype=torch.bool) if keep is None else keep.cpu()
        self._unknown_seen |= ood is None and bool((labels[keep] < 0).any())
        with isolated_rng(self._seed):
            for name, adapter in self._adapters.items():
                if name in self._errors:
                    continue
                try:
                    scores = self._score(adapter, encoded)
                    self._metrics[name].update(scores[keep.to(scores.device)], labels[keep], ood or UNKNOWN)
                except Exception as error:
                    self._errors[name] = error

    def _score(self, adapter: Adapter, encoded: Encoded) -> Tensor:
        if adapter.scored_on is not Representation.INPUTS:
            return adapter.score(encoded)
        with visiting(self._module, self._seed):  # the detector runs the network, which is afterwards as it was
            return adapter.score(encoded)

    def fail(self, name: str, reason: object) -> None:
        """Give up a detector, with the error or a sentence that says why; "" if it has been told already."""
        self._errors.setdefault(name, reason)

    def fail_set(self, ood: str, reason: object) -> None:
        """Give up an OOD set, say because it could not be read."""
        self._broken_sets.setdefault(ood, reason)

    def finish(self, agree: Callable[[list[bool]], list[bool]]) -> Results:
        """Compute the metrics. Every process has to call it, and gets the same values."""
        names = list(self._adapters)
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
                    id_scores, ood_scores = self._metrics[name].gather()
                results.scores[name] = id_scores, ood_scores
                for ood in (s for s in sets if s not in lost):
                    try:
                        found = compare_scores(id_scores, ood_scores.get(ood, id_scores[:0]))
                        values.update({f"{ood}/{metric}": float(value) for metric, value in found.items()})
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


def _reason(error: object) -> str:
    if error is None:
        return "see the error of another process."
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
