"""One evaluation of several detectors: encoded batches -> scores -> metrics for each detector and OOD set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytorch_lightning as pl
import torch
from torch import Tensor

from rmd_plugin.compare.adapters import Adapter, Representation
from rmd_plugin.compare.metrics import (
    ACCEPTED,
    MEAN,
    METRICS,
    OODScores,
    check_set_names,
    compare_scores,
    quiet_compute,
)
from rmd_plugin.encoding.batches import Encoded
from rmd_plugin.encoding.isolation import isolated_rng, visiting

#: the OOD set of samples that only their label below zero marks
UNKNOWN = "unknown"


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse names of OOD sets that cannot be told apart, or that mean something else."""
    if UNKNOWN in names:
        raise ValueError(f"an OOD set must not be named {UNKNOWN!r}: samples with labels below zero are.")
    return check_set_names(names) if names else ()


@dataclass
class Results:
    """What an evaluation found, by detector."""

    #: values under ``"<set>/<metric>"`` and ``"mean/<metric>"``; NaN where the detector failed
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    #: where it did not fail, the scores of the ID samples and those of each OOD set
    scores: dict[str, tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)
    #: above which score a sample is OOD, for detectors that are calibrated
    thresholds: dict[str, float] = field(default_factory=dict)
    #: sentences about what went wrong
    problems: list[str] = field(default_factory=list)


class Evaluation:
    """Scores batches with all detectors and keeps the scores. Errors are kept too: a detector that failed is NaN."""

    def __init__(
        self, adapters: Mapping[str, Adapter], sets: Sequence[str], *, module: pl.LightningModule, seed: int
    ) -> None:
        self.sets = tuple(sets)
        #: why OOD sets were given up, say because they could not be read
        self.broken_sets: dict[str, Exception] = {}
        self._adapters, self._module, self._seed = dict(adapters), module, seed
        self._errors: dict[str, object] = {}
        self._unknown_seen = False
        device = torch.device("cpu") if module.device.type == "mps" else module.device
        self._metrics = {name: OODScores((*self.sets, UNKNOWN)).to(device) for name in adapters}

    def add(self, encoded: Encoded, *, ood: str | None = None, keep: Tensor | None = None) -> None:
        """Score a batch.

        All of its samples belong to the set ``ood``; without it, labels below zero are the set "unknown" and the others
        are ID. Only the samples in ``keep``, a mask of shape (B,), count.
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

    def finish(self, trainer: pl.Trainer, decide: Callable[[str, Tensor], float] | None = None) -> Results:
        """Compute the metrics. Every process has to call it, and gets the same values.

        With ``decide``, which gives the threshold of a detector from its scores of ID samples (NaN if there is none),
        the share of each OOD set that it accepts is one of them.
        """
        anywhere = partial(trainer.strategy.reduce_boolean_decision, all=False)
        results = Results()
        sets = (*self.sets, UNKNOWN) if anywhere(self._unknown_seen) else self.sets
        lost = [ood for ood in self.sets if anywhere(ood in self.broken_sets)]
        results.problems += [f"the OOD set {ood!r} failed: {_reason(self.broken_sets.get(ood))}" for ood in lost]
        for name in self._adapters:
            metrics = METRICS if decide is None else (*METRICS, ACCEPTED)
            values = {f"{ood}/{metric}": math.nan for ood in sets for metric in metrics}
            if anywhere(name in self._errors):
                if self._errors.get(name) != "":
                    results.problems.append(f"{name!r} failed to score: {_reason(self._errors.get(name))}")
            else:
                with quiet_compute():
                    id_scores, ood_scores = self._metrics[name].gather()
                results.scores[name] = id_scores, ood_scores
                threshold = math.nan if decide is None else decide(name, id_scores)
                if not math.isnan(threshold):
                    results.thresholds[name] = threshold
                for ood in (ood for ood in sets if ood not in lost):
                    try:
                        found = compare_scores(id_scores, ood_scores.get(ood, id_scores[:0]))
                        if name in results.thresholds:
                            found[ACCEPTED] = (ood_scores[ood] <= threshold).double().mean()
                        values.update({f"{ood}/{metric}": float(value) for metric, value in found.items()})
                    except ValueError as error:
                        results.problems.append(f"{name!r} has no result on {ood!r}: {error}")
            for metric in metrics if sets else ():
                values[f"{MEAN}/{metric}"] = sum(values[f"{ood}/{metric}"] for ood in sets) / len(sets)
            results.values[name] = values
        if not sets:
            results.problems.append(
                "there are no OOD samples to score, so there is no AUROC. Pass ood={name: loader} or "
                "ood_dataloaders={index: name}, or validate on samples with labels below zero."
            )
        return results


def _reason(error: object) -> str:
    if error is None:
        return "see the error of another process."
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
