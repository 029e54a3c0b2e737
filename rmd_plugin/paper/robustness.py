"""Figure 3: accuracy, and the AUROC of MD, RMD and MSP, while a network trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmd_plugin.compare.rows import ACCURACY, AUROC, Distance, Row
from rmd_plugin.paper.published import TEXT
from rmd_plugin.paper.result import Comparison, StudyResult, percent

#: accuracies over the training, as recorded beside ``OODMonitor``: step, accuracy on training and on held-out samples
Accuracies = Sequence[tuple[int, float, float]]


@dataclass(frozen=True)
class TrainingCurves:
    """What was seen while one network trained.

    Attributes:
        benchmark: name of the benchmark.
        ood: name of the OOD set.
        backbone: name of the backbone.
        history: ``OODMonitor.history``: one row for each check, detector, OOD set and metric.
        accuracies: step, training accuracy, held-out accuracy at each check.
        distance: ``near``, ``far`` or empty.
        seed: seed of the training.
    """

    benchmark: str
    ood: str
    backbone: str
    history: Sequence[Mapping[str, Any]]
    accuracies: Accuracies
    distance: Distance = "near"
    seed: int = 0

    @property
    def label(self) -> str:
        """Benchmark and backbone in one text."""
        return f"{self.benchmark}, {self.backbone}"

    def curve(self, detector: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps (C,) and AUROC (C,) of a detector at every check while fitting."""
        points = {
            int(row["step"]): float(row["value"])
            for row in self.history
            if row["detector"] == detector
            and row["ood"] == self.ood
            and row["metric"] == AUROC
            and row.get("stage", "fit") == "fit"
        }
        return np.array(list(points), dtype=float), np.array(list(points.values()))

    @property
    def detectors(self) -> list[str]:
        """Detectors with an AUROC, in the order of the history."""
        found = [row["detector"] for row in self.history if row["ood"] == self.ood and row["metric"] == AUROC]
        return list(dict.fromkeys(map(str, found)))


def run(curves: Sequence[TrainingCurves], *, settings: Sequence[str] = (), reasons: Sequence[str] = ()) -> StudyResult:
    """Figure 3 from training histories.

    Args:
        curves: histories of one or more trainings.
        settings: what was run, one text for each.
        reasons: why that differs from the paper's setting, one text for each.

    Returns:
        One row for each check and detector, with the step in its remark, and arrays for the figure.
    """
    result = StudyResult("robustness")
    for place, item in enumerate(curves):
        about = (item.benchmark, item.ood, item.backbone)
        for detector in item.detectors:
            steps, values = item.curve(detector)
            result.arrays[f"{item.label}//{detector}"] = np.stack([steps, values])
            result.rows += [
                Row(*about, detector, item.seed, AUROC, float(value), distance=item.distance, reason=f"step {step:.0f}")
                for step, value in zip(steps, values, strict=True)
            ]
        if item.accuracies:
            result.arrays[f"{item.label}//accuracy"] = np.array(item.accuracies, dtype=float).T
            result.rows += [
                Row(item.benchmark, "", item.backbone, "", item.seed, ACCURACY, held_out, reason=f"step {step}")
                for step, _, held_out in item.accuracies
            ]
        setting = settings[place] if settings else item.label
        reason = reasons[place] if reasons else ""
        result.comparisons += _compare(item, setting, reason)
    return result


def _compare(item: TrainingCurves, setting: str, reason: str) -> list[Comparison]:
    """The best and the last AUROC of every detector, and the accuracies at the best of MD and at the end."""
    paper = TEXT if item.benchmark.startswith("genomics") else {}
    found = []

    def add(metric: str, ours: float, published: str = "") -> None:
        number = paper.get(published, math.nan)
        found.append(Comparison(item.label, metric, number, percent(ours), setting=setting, reason=reason))

    names = {"mahalanobis": "MD", "rmd": "RMD", "msp": "MSP"}
    for detector in item.detectors:
        _, values = item.curve(detector)
        name, is_md = names.get(detector, detector), detector == "mahalanobis"
        add(f"best AUROC of {name} while training", float(np.nanmax(values)), "robustness/md_early" if is_md else "")
        add(f"AUROC of {name} at the end", float(values[-1]), "robustness/md_end" if is_md else "")
    if item.accuracies and "mahalanobis" in item.detectors:
        steps, values = item.curve("mahalanobis")
        accuracy = {step: (train, held_out) for step, train, held_out in item.accuracies}
        moments = (("best", int(steps[np.nanargmax(values)]), "early"), ("end", max(accuracy), "end"))
        for text, step, key in moments:
            if step in accuracy:
                when = "at the best AUROC of MD" if text == "best" else "at the end"
                add(f"training accuracy {when}", accuracy[step][0], f"robustness/train_accuracy_{key}")
                add(f"held-out accuracy {when}", accuracy[step][1], f"robustness/test_accuracy_{key}")
    return found
