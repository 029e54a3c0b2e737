"""Figure 1: the Mahalanobis distance and the relative one, direction by direction, for ID and OOD samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.compare.rows import Row
from rmd_plugin.detectors.functional import class_quadratics
from rmd_plugin.detectors.gaussian import QuadraticScore, fit_mahalanobis
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.paper.published import TEXT
from rmd_plugin.paper.result import Arrays, FeatureSet, StudyResult, under

Basis = Literal["eigen", "discriminative"]

_ROWS = 2048
_QUANTILES = (0.1, 0.9)


class Directions(NamedTuple):
    """Directions along which the distances are taken apart, see :func:`fit_directions`."""

    module: QuadraticScore  #: coordinates u = (z - mu_0) A, with unit variance within the classes, and class points
    background: Tensor  #: variance of all training samples along each direction, shape (q,)


def fit_directions(moments: Moments, *, basis: Basis = "eigen") -> Directions:
    """Directions of unit within-class variance, and the class-independent variance along each.

    ``eigen`` is the paper's choice: the eigenvectors of Sigma by descending eigenvalue, with one background Gaussian
    per direction. The terms of MD add up to MD; those of RMD leave out the background's correlations.
    ``discriminative`` takes the directions in which Sigma and Sigma_0 are diagonal together, by descending variance of
    the class means: there the terms of both add up exactly. Where Sigma is a multiple of the identity its eigenvectors
    are arbitrary, and this is the only choice that says anything.

    Args:
        moments: moments of the training features.
        basis: which directions.
    """
    parameters = fit_mahalanobis(moments)
    shares = moments.counts[moments.counts > 0] / moments.counts.sum()
    points = parameters["points"]
    if basis == "discriminative":
        rotation = torch.linalg.svd(shares.sqrt()[:, None] * points, full_matrices=True)[2].T
        points = points @ rotation
        parameters |= {"projection": parameters["projection"] @ rotation, "points": points}
    elif basis != "eigen":
        raise ValueError(f"basis must be 'eigen' or 'discriminative', got {basis!r}.")
    # within-class variance is one along every direction, so the total is one more than that of the class means
    background = 1 + (shares[:, None] * points.square()).sum(0)
    return Directions(QuadraticScore(parameters, torch.float64), background)


def contributions(directions: Directions, z: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of MD and of RMD along each direction, for the nearest class.

    Args:
        directions: result of :func:`fit_directions`.
        z: features of shape (B, D).

    Returns:
        Two tensors of shape (B, q), in float32.
    """
    module = directions.module
    distance, relative = [], []
    for rows in z.split(_ROWS):
        u = module.project(rows)
        # the background does not depend on the class, so the nearest class is the same for MD and RMD
        nearest = class_quadratics(u, module.weights, module.points, module.offsets).argmin(1)
        term = (u - module.points[nearest]).square()
        distance.append(term.float())
        relative.append((term - u.square() / directions.background).float())
    return torch.cat(distance), torch.cat(relative)


def change_point(gap: np.ndarray) -> int:
    """How many leading directions stand apart: the split of a curve into two levels with the least squared error.

    Args:
        gap: mean distance of OOD minus that of ID along each direction, shape (q,).

    Returns:
        The number of directions before the split, at least 1.

    Example:
        >>> change_point(np.array([3.0, 2.8, 3.1, 0.1, 0.0, 0.2]))
        3
    """
    count = len(gap)
    if count < 2:
        return count
    # the largest terms are far above the rest; ranks of size, not size, should decide
    level = np.sign(gap) * np.log1p(np.abs(gap))
    total = np.cumsum(level)
    left = np.arange(1, count)
    right = count - left
    # maximal between-group sum of squares = minimal squared error
    between = (total[:-1] / left - (total[-1] - total[:-1]) / right) ** 2 * left * right
    return int(left[between.argmax()])


def analyse(features: FeatureSet, *, basis: Basis = "eigen") -> tuple[list[Row], Arrays]:
    """The spectrum of one feature set.

    Args:
        features: features with one OOD set.
        basis: see :func:`fit_directions`.

    Returns:
        Rows, and arrays for each of MD and RMD: mean and quantiles along the directions for ID and OOD, shape (q,), and
        the scores; and ``threshold``, the number of leading directions that stand apart.
    """
    moments = features.moments()
    directions = fit_directions(moments, basis=basis)
    arrays: Arrays = {}
    rows, sums = [], []
    for kind, z in (("id", features.test), ("ood", features.ood)):
        terms = contributions(directions, z)
        sums.append(terms[1].sum(1).numpy())
        for name, part in zip(("mahalanobis", "rmd"), terms, strict=True):
            arrays |= under(f"{name}/{kind}", _summary(part))
    for name, detector in (("mahalanobis", Mahalanobis), ("rmd", RMD)):
        area, scores = features.rate(detector().fit_moments(moments))
        rows.append(features.row(name, area))
        arrays |= {f"{name}/{kind}/scores": values for kind, values in scores.items()}
    rows.append(features.row("rmd_by_direction", auroc(*sums)))
    gap = arrays["mahalanobis/ood/mean"] - arrays["mahalanobis/id/mean"]
    threshold = change_point(gap)
    rows.append(features.row("", threshold, metric="leading_directions"))
    # what share of the total gap between ID and OOD the leading directions hold
    rows.append(features.row("", float(gap[:threshold].sum() / gap.sum()), metric="gap_share"))
    return rows, arrays | {"threshold": np.array(threshold)}


def run(feature_sets: Sequence[FeatureSet]) -> StudyResult:
    """Figure 1 on several feature sets.

    The simulation is taken apart along its discriminative directions (its eigenvectors are arbitrary), the others along
    the eigenvectors of Sigma as in the paper.
    """
    result = StudyResult("spectrum")
    for features in feature_sets:
        simulated = features.benchmark == "simulation"
        rows, arrays = analyse(features, basis="discriminative" if simulated else "eigen")
        result.add(features, rows, arrays)
        # the paper's numbers of these two benchmarks
        source = {"simulation": "simulation", "cifar100_vs_cifar10": "spectrum"}.get(features.benchmark, "")
        for row, text in zip(rows, ("AUROC of MD", "AUROC of RMD"), strict=False):
            paper = TEXT.get(f"{source}/{row.detector}", math.nan)
            result.comparisons.append(features.beside(text, 100 * row.value, paper))
        paper = TEXT.get(f"{source}/threshold", math.nan)
        text = f"leading directions (of {features.train.shape[1]})"
        result.comparisons.append(features.beside(text, float(arrays["threshold"]), paper))
    result.notes.append(
        "The threshold is the split of the gap (OOD mean minus ID mean of the distance) into two levels with the least "
        "squared error on a logarithmic scale; the paper does not say how its 120 was found."
    )
    return result


def _summary(terms: Tensor) -> Arrays:
    """Mean and quantiles of the terms over the samples."""
    low, high = np.quantile(terms.numpy(), _QUANTILES, axis=0)
    return {"mean": terms.double().mean(0).numpy(), "low": low, "high": high}
