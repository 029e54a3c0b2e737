"""Figure 3: accuracy, and the AUROC of MD, RMD and MSP, while a network trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rmd_plugin.compare.rows import ACCURACY, AUROC, Row
from rmd_plugin.paper.result import FinishedRun, PaperNumber, StudyResult
from rmd_plugin.report.names import label

#: detector -> steps and AUROC, shape (2, C)
Curves = dict[str, np.ndarray]


def auroc_curves(training: FinishedRun) -> Curves:
    """Steps and AUROC of every detector at every check while fitting, each of shape (2, C)."""
    points: dict[str, dict[int, float]] = {}
    for row in training.history:
        if row["ood"] == training.features.ood_name and row["metric"] == AUROC and row.get("stage", "fit") == "fit":
            points.setdefault(str(row["detector"]), {})[int(row["step"])] = float(row["value"])
    return {name: np.array([list(found), list(found.values())], dtype=float) for name, found in points.items()}


def run(trainings: Sequence[FinishedRun]) -> StudyResult:
    """Figure 3 from training histories: one row for each check and detector, with the step in its remark."""
    result = StudyResult("robustness")
    for training in trainings:
        curves, item = auroc_curves(training), training.features
        arrays = dict(curves)
        rows = [
            item.row(detector, value, reason=f"step {step:.0f}")
            for detector, curve in curves.items()
            for step, value in curve.T
        ]
        if training.accuracies:
            arrays["accuracy"] = np.array(training.accuracies, dtype=float).T
            rows += [
                Row(item.benchmark, "", item.backbone, "", item.seed, ACCURACY, held_out, reason=f"step {step}")
                for step, _, held_out in training.accuracies
            ]
        result.add(item, rows, arrays)
        result.comparisons += _compare(training, curves)
    return result


def _compare(training: FinishedRun, curves: Curves) -> list[PaperNumber]:
    """The best and the last AUROC of every detector, and the accuracies at the best of MD and at the end."""
    item = training.features
    found = []

    def add(metric: str, ours: float, published: str = "") -> None:
        in_paper = item.benchmark.startswith("genomics")
        found.append(item.beside(metric, 100 * ours, f"robustness/{published}" if in_paper else ""))

    for detector, (_, values) in curves.items():
        md = detector == "mahalanobis"
        add(f"best AUROC of {label(detector)} while training", np.nanmax(values), "md_early" if md else "")
        add(f"AUROC of {label(detector)} at the end", values[-1], "md_end" if md else "")
    if training.accuracies and "mahalanobis" in curves:
        steps, values = curves["mahalanobis"]
        accuracy = {step: (train, held_out) for step, train, held_out in training.accuracies}
        best = int(steps[np.nanargmax(values)])
        for when, step, key in (("at the best AUROC of MD", best, "early"), ("at the end", max(accuracy), "end")):
            if step in accuracy:
                add(f"training accuracy {when}", accuracy[step][0], f"train_accuracy_{key}")
                add(f"held-out accuracy {when}", accuracy[step][1], f"test_accuracy_{key}")
    return found
