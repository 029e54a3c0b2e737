"""What every study takes and gives: a finished run in; rows, arrays and numbers beside the paper's out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.compare.rows import AUROC, Row
from rmd_plugin.detectors.base import StatefulDetector
from rmd_plugin.detectors.mahalanobis import RMD, GaussianDetector, Mahalanobis, MarginalMahalanobis
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.paper.published import TEXT

#: one array for each thing that a figure draws, by name
Arrays = dict[str, np.ndarray]
_GAUSSIANS: dict[str, Callable[[], GaussianDetector]] = {
    "mahalanobis": Mahalanobis,
    "rmd": RMD,
    "marginal": MarginalMahalanobis,
}


@dataclass(frozen=True)
class PaperNumber:
    """One number of the paper beside ours. Percentages, unless the metric is a count; NaN where there is none."""

    what: str  #: what was measured, for example ``"CIFAR-100 vs CIFAR-10, WRN-28-10"``
    metric: str  #: for example ``"AUROC of RMD"``
    paper: float = math.nan
    ours: float = math.nan
    spread: float = math.nan  #: standard deviation over seeds
    setting: str = ""  #: what we ran
    reason: str = ""  #: why our setting differs from the paper's, or why nothing was run

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
    """Features of one benchmark, backbone and near-OOD set, and what was run to get them."""

    benchmark: str
    backbone: str
    ood_name: str
    train: Tensor  #: shape (N, D)
    train_labels: Tensor  #: shape (N,)
    test: Tensor  #: in-distribution, shape (M, D)
    ood: Tensor  #: shape (L, D)
    seed: int = 0  #: of data and training
    setting: str = ""  #: what was run, in a few words
    reason: str = ""  #: why that differs from the paper's setting

    @property
    def label(self) -> str:
        """Benchmark and backbone in one text, unique among the runs of a study."""
        return f"{self.benchmark}, {self.backbone}"

    def row(self, detector: str, value: float, metric: str = AUROC, **extra: Any) -> Row:
        """A row about this setting."""
        about = (self.benchmark, self.ood_name, self.backbone, detector, self.seed, metric, float(value))
        return Row(*about, distance="near", **extra)

    def beside(self, metric: str, ours: float, published: str = "") -> PaperNumber:
        """A number of this setting beside that of :data:`rmd_plugin.paper.published.TEXT`, if there is one."""
        paper, setting = TEXT.get(published, math.nan), self.setting or self.label
        return PaperNumber(self.label, metric, paper, float(ours), setting=setting, reason=self.reason)

    @cached_property
    def moments(self) -> Moments:
        """Moments of the training features, which all Gaussian detectors are fitted on."""
        metric = Mahalanobis().new_moments(sync_on_compute=False)
        metric.update(self.train, self.train_labels)
        return metric.compute()

    def rate(self, detector: StatefulDetector) -> tuple[float, Arrays]:
        """AUROC of a fitted detector, and its scores: ``id`` (M,) and ``ood`` (L,)."""
        scores = [detector.predict_features(part).cpu().numpy() for part in (self.test, self.ood)]
        return auroc(*scores), {"id": scores[0].astype(np.float32), "ood": scores[1].astype(np.float32)}

    def rate_gaussians(self, *names: str) -> dict[str, tuple[float, Arrays]]:
        """AUROC and scores of ``mahalanobis``, ``rmd`` or ``marginal``, fitted on one pass of moments."""
        return {name: self.rate(_GAUSSIANS[name]().fit_moments(self.moments)) for name in names}


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run of an experiment, as the studies need it."""

    line: tuple[str, str]  #: benchmark and backbone of the paper's table that it stands beside; empty texts if none
    rows: Sequence[Row]  #: MD, RMD and, where there is a classifier, MSP on every OOD set, and the accuracy
    features: FeatureSet  #: with the first near-OOD set
    history: Sequence[Mapping[str, Any]] = ()  #: ``OODMonitor.history``; empty if not trained
    accuracies: Sequence[tuple[int, float, float]] = ()  #: step, training and held-out accuracy at each check


@dataclass
class StudyResult:
    """Result of one study."""

    study: str
    rows: list[Row] = field(default_factory=list)
    comparisons: list[PaperNumber] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)  #: what the figures draw
    notes: list[str] = field(default_factory=list)  #: remarks for the reader, one sentence each

    def add(self, features: FeatureSet, rows: Sequence[Row], arrays: Arrays) -> None:
        """Take over what was found about one setting, its arrays as ``LABEL//NAME``."""
        self.rows += rows
        self.arrays |= under(f"{features.label}/", arrays)


def under(name: str, arrays: Arrays) -> Arrays:
    """Arrays under a common name, ``NAME/...``."""
    return {f"{name}/{key}": value for key, value in arrays.items()}
