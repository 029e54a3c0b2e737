"""Figure 1: the Mahalanobis distance and the relative one, direction by direction, for ID and OOD samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.compare.rows import Row
from rmd_plugin.detectors.functional import class_quadratics
from rmd_plugin.detectors.gaussian import QuadraticScore, fit_mahalanobis
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.paper.result import Arrays, FeatureSet, StudyResult, under

_ROWS = 2048
_QUANTILES = (0.1, 0.9)


class SpectrumDirections(NamedTuple):
    """SpectrumDirections along which the distances are taken apart, see :func:`fit_directions`."""

    module: QuadraticScore  #: coordinates u = (z - mu_0) A, with unit variance within the classes, and class points
    background: Tensor  #: variance of all training samples along each direction, shape (q,)


def fit_directions(moments: Moments, *, discriminative: bool = False) -> SpectrumDirections:
    """SpectrumDirections of unit within-class variance, and the class-independent variance along each.

    The paper's choice are the eigenvectors of Sigma by descending eigenvalue, with one background Gaussian per
    direction. The terms of MD add up to MD; those of RMD leave out the background's correlations.
    In the discriminative directions Sigma and Sigma_0 are diagonal together, by descending variance of the class means:
    there the terms of both add up exactly. Where Sigma is a multiple of the identity its eigenvectors are arbitrary,
    and this is the only choice that says anything.
    """
    parameters = fit_mahalanobis(moments, eigenvectors=True)
    shares = moments.counts[moments.counts > 0] / moments.counts.sum()
    points = parameters["points"]
    if discriminative:
        rotation = torch.linalg.svd(shares.sqrt()[:, None] * points, full_matrices=True)[2].T
        points = points @ rotation
        parameters |= {"projection": parameters["projection"] @ rotation, "points": points}
    # within-class variance is one along every direction, so the total is one more than that of the class means
    background = 1 + (shares[:, None] * points.square()).sum(0)
    return SpectrumDirections(QuadraticScore(parameters, torch.float64), background)


def contributions(directions: SpectrumDirections, z: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of MD and of RMD for z (B, D) along each direction, for the nearest class: (B, q) each, in float32."""
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

    ``gap`` (q,) is the mean distance of OOD minus that of ID along each direction.

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


def analyse(features: FeatureSet, *, discriminative: bool = False) -> tuple[list[Row], Arrays]:
    """The spectrum of one feature set.

    Returns:
        Rows, and arrays for each of MD and RMD: mean and quantiles along the directions for ID and OOD, shape (q,), and
        the scores; and ``threshold``, the number of leading directions that stand apart.
    """
    directions = fit_directions(features.moments, discriminative=discriminative)
    arrays: Arrays = {}
    rows, sums = [], []
    for kind, z in (("id", features.test), ("ood", features.ood)):
        terms = contributions(directions, z)
        sums.append(terms[1].sum(1).numpy())
        for name, part in zip(("mahalanobis", "rmd"), terms, strict=True):
            low, high = np.quantile(part.numpy(), _QUANTILES, axis=0)
            arrays |= under(f"{name}/{kind}", {"mean": part.double().mean(0).numpy(), "low": low, "high": high})
    for name, (area, scores) in features.rate_gaussians("mahalanobis", "rmd").items():
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
        rows, arrays = analyse(features, discriminative=features.benchmark == "simulation")
        result.add(features, rows, arrays)
        # the paper's numbers of these two benchmarks
        source = {"simulation": "simulation", "cifar100_vs_cifar10": "spectrum"}.get(features.benchmark, "")
        for row, text in zip(rows, ("AUROC of MD", "AUROC of RMD"), strict=False):
            result.comparisons.append(features.beside(text, 100 * row.value, f"{source}/{row.detector}"))
        text = f"leading directions (of {features.train.shape[1]})"
        result.comparisons.append(features.beside(text, float(arrays["threshold"]), f"{source}/threshold"))
    result.notes.append(
        "The threshold is the split of the gap (OOD mean minus ID mean of the distance) into two levels with the least "
        "squared error on a logarithmic scale; the paper does not say how its 120 was found."
    )
    return result
