"""What every study takes and gives: a finished run in; rows, arrays and numbers beside the paper's out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.compare.rows import AUROC, Distance, Row
from rmd_plugin.detectors.base import StatefulDetector
from rmd_plugin.detectors.mahalanobis import Mahalanobis
from rmd_plugin.detectors.moments import Moments

#: one array for each thing that a figure draws, by name
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class PaperNumber:
    """One number of the paper beside ours. Percentages, unless the metric is a count.

    Attributes:
        what: what was measured, for example ``"CIFAR-100 vs CIFAR-10, WRN-28-10"``.
        metric: for example ``"AUROC of RMD"``.
        paper: the published number; NaN if there is none.
        ours: our number; NaN if it was not run.
        spread: standard deviation over seeds; NaN for one run.
        setting: what we ran; empty if nothing was run.
        reason: why our setting differs, or why nothing was run; empty if it is the paper's own.
    """

    what: str
    metric: str
    paper: float = math.nan
    ours: float = math.nan
    spread: float = math.nan
    setting: str = ""
    reason: str = ""

    @property
    def run(self) -> bool:
        """Whether there is a number of ours."""
        return not math.isnan(self.ours)

    @property
    def difference(self) -> float:
        """Ours minus the paper's; NaN if one is missing."""
        return self.ours - self.paper


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSet:
    """Features of one benchmark, backbone and OOD set, and what was run to get them.

    Attributes:
        benchmark: name of the benchmark.
        backbone: name of the backbone.
        ood_name: name of the OOD set.
        train: training features, shape (N, D).
        train_labels: their classes, shape (N,).
        test: features of the in-distribution test set, shape (M, D).
        ood: features of the OOD set, shape (L, D).
        distance: ``near``, ``far`` or empty.
        seed: seed of data and training.
        setting: what was run, in a few words.
        reason: why that differs from the paper's setting.
    """

    benchmark: str
    backbone: str
    ood_name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    ood: Tensor
    distance: Distance = "near"
    seed: int = 0
    setting: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in ("train", "test", "ood")}
        if any(len(shape) != 2 for shape in shapes.values()) or len({shape[1] for shape in shapes.values()}) != 1:
            raise ValueError(f"train, test and ood must have shape (N, D) with one D, got {shapes}.")
        if self.train_labels.shape != (len(self.train),):
            raise ValueError(
                f"train_labels must have shape ({len(self.train)},), one per row of train, "
                f"got {tuple(self.train_labels.shape)}."
            )

    @property
    def label(self) -> str:
        """Benchmark and backbone in one text, unique among the runs of a study."""
        return f"{self.benchmark}, {self.backbone}"

    def row(self, detector: str, value: float, metric: str = AUROC, **extra: Any) -> Row:
        """A row about this setting."""
        about = (self.benchmark, self.ood_name, self.backbone, detector, self.seed, metric, float(value))
        return Row(*about, distance=self.distance, **extra)

    def beside(self, metric: str, ours: float, paper: float = math.nan) -> PaperNumber:
        """A number of this setting beside the paper's."""
        return PaperNumber(self.label, metric, paper, ours, setting=self.setting or self.label, reason=self.reason)

    def moments(self) -> Moments:
        """Moments of the training features, which all Gaussian detectors are fitted on."""
        metric = Mahalanobis().new_moments(sync_on_compute=False)
        metric.update(self.train, self.train_labels)
        return metric.compute()

    def rate(self, detector: StatefulDetector) -> tuple[float, Arrays]:
        """AUROC of a fitted detector, and its scores: ``id`` (M,) and ``ood`` (L,)."""
        scores = [detector.predict_features(part).cpu().numpy() for part in (self.test, self.ood)]
        return auroc(*scores), {"id": scores[0].astype(np.float32), "ood": scores[1].astype(np.float32)}


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run of an experiment, as the studies need it.

    Attributes:
        line: benchmark and backbone of the paper's table that it stands beside; empty texts if none.
        rows: MD, RMD and, where there is a classifier, MSP on every OOD set, and the accuracy.
        features: features with the first near-OOD set.
        history: ``OODMonitor.history``: one row for each check, detector, OOD set and metric; empty if not trained.
        accuracies: step, training accuracy and held-out accuracy at each check.
    """

    line: tuple[str, str]
    rows: Sequence[Row]
    features: FeatureSet
    history: Sequence[Mapping[str, Any]] = ()
    accuracies: Sequence[tuple[int, float, float]] = ()


@dataclass
class StudyResult:
    """Result of one study.

    Attributes:
        study: name of the study.
        rows: every number.
        comparisons: the paper's numbers beside ours.
        arrays: what the figures draw.
        notes: remarks for the reader, one sentence each.
    """

    study: str
    rows: list[Row] = field(default_factory=list)
    comparisons: list[PaperNumber] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, features: FeatureSet, rows: Sequence[Row], arrays: Arrays) -> None:
        """Take over what was found about one setting, its arrays as ``LABEL//NAME``."""
        self.rows += rows
        self.arrays |= under(f"{features.label}/", arrays)


def under(name: str, arrays: Arrays) -> Arrays:
    """Arrays under a common name, ``NAME/...``."""
    return {f"{name}/{key}": value for key, value in arrays.items()}
