"""What every study takes and gives: features of one benchmark in, rows, arrays and a comparison with the paper out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rmd_plugin.compare.rows import AUROC, Distance, Row

#: one array for each thing that a figure draws, by name
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """Features of one benchmark with one OOD set, as a study needs them.

    Attributes:
        benchmark: name of the benchmark.
        ood: name of the OOD set.
        backbone: name of the backbone.
        train: training features, shape (N, D).
        train_labels: their classes, shape (N,).
        test: features of the in-distribution test set, shape (M, D).
        test_labels: their classes, shape (M,).
        unknown: features of the OOD set, shape (L, D).
        distance: ``near``, ``far`` or empty.
        seed: seed of data and training.
    """

    benchmark: str
    ood: str
    backbone: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    unknown: Tensor
    distance: Distance = "near"
    seed: int = 0

    def __post_init__(self) -> None:
        widths = {name: tuple(getattr(self, name).shape) for name in ("train", "test", "unknown")}
        if any(len(shape) != 2 for shape in widths.values()) or len({shape[1] for shape in widths.values()}) != 1:
            raise ValueError(f"train, test and unknown must have shape (N, D) with one D, got {widths}.")
        for name in ("train", "test"):
            if getattr(self, f"{name}_labels").shape != (len(getattr(self, name)),):
                raise ValueError(
                    f"{name}_labels must have shape ({len(getattr(self, name))},), one per row of {name}, "
                    f"got {tuple(getattr(self, f'{name}_labels').shape)}."
                )

    @property
    def label(self) -> str:
        """Benchmark and backbone in one text, unique among the feature sets of a study."""
        return f"{self.benchmark}, {self.backbone}"

    def row(self, detector: str, value: float, metric: str = AUROC, **extra: object) -> Row:
        """A row about these features."""
        about = (self.benchmark, self.ood, self.backbone, detector, self.seed, metric, float(value))
        return Row(*about, distance=self.distance, **extra)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Comparison:
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
    comparisons: list[Comparison] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def area_under_roc(known: Tensor | np.ndarray, unknown: Tensor | np.ndarray) -> float:
    """AUROC with OOD as the positive class; ties count half.

    By ranks, so that thousands of them (one for each d of PMD) take seconds.

    Args:
        known: scores of in-distribution samples, shape (N,).
        unknown: scores of OOD samples, shape (M,).

    Raises:
        ValueError: if a set is empty or a score is NaN.

    Example:
        >>> area_under_roc(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
        0.875
    """
    inside, outside = np.sort(np.asarray(known)), np.asarray(unknown)
    if not len(inside) or not len(outside):
        raise ValueError(f"AUROC needs samples of both kinds, got {len(inside)} ID and {len(outside)} OOD.")
    if np.isnan(inside).any() or np.isnan(outside).any():
        raise ValueError("scores contain NaN.")
    beaten = np.searchsorted(inside, outside, "left") + np.searchsorted(inside, outside, "right")
    return float(beaten.sum() / (2 * len(inside) * len(outside)))


def percent(value: float) -> float:
    """A fraction as a percentage."""
    return 100.0 * value


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; the spread of one value is NaN."""
    mean = float(np.mean(values))
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def as_array(values: Tensor) -> np.ndarray:
    """A tensor as float32 numpy array, for the figures."""
    return values.detach().to("cpu", torch.float32).numpy()
