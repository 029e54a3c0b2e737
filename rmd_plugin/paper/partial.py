"""Appendix C: the partial Mahalanobis distance for every number of eigen-directions, in one pass over the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.compare.rows import Row
from rmd_plugin.detectors.gaussian import QuadraticScore, fit_mahalanobis
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.paper.result import Arrays, FeatureSet, StudyResult

#: benchmark -> which numbers of the text belong to it
_PUBLISHED = {
    "cifar100_vs_cifar10": {
        "best AUROC of PMD": "partial/peak",
        "d at the best AUROC": "partial/peak_components",
        "AUROC of RMD": "spectrum/rmd",
        "AUROC of MD": "spectrum/mahalanobis",
        "AUROC of MMD": "partial/marginal",
    },
    "cifar10_vs_cifar100": {"AUROC of MMD": "partial/marginal_cifar10"},
}
#: float64 numbers that are handled at once: what fits a cache
_BLOCK = 2**20


def cumulative_scores(moments: Moments, z: Tensor) -> tuple[Tensor, Tensor]:
    """PMD of every sample of z (B, D) for every d, by cumulative sums instead of D fits.

    Returns:
        ``largest`` (B, q), whose column d - 1 sums over the d directions of largest variance, and ``smallest`` (B, q),
        whose column d sums over the q - d others. q is the number of eigen-directions with variance.
    """
    module = QuadraticScore(fit_mahalanobis(moments, eigenvectors=True), torch.float64)
    classes, width = module.points.shape
    largest = torch.empty(len(z), width, dtype=torch.float64)
    smallest = torch.empty_like(largest)
    rows = max(1, _BLOCK // (classes * width))
    for start in range(0, len(z), rows):
        u = module.project(z[start : start + rows])
        terms = (u[:, None] - module.points).square_()  # (rows, K, q)
        largest[start : start + rows] = terms.cumsum(2).amin(1)
        # summed from the other end: the difference of two long sums would lose digits
        smallest[start : start + rows] = terms.flip(2).cumsum_(2).amin(1).flip(1)
    return largest, smallest


def analyse(features: FeatureSet) -> tuple[list[Row], Arrays]:
    """AUROC of PMD for every d, largest and smallest first, beside MD, RMD and MMD.

    Returns:
        Rows for MD, RMD, MMD and the best d; arrays ``largest`` (q,), for d = 1..q, ``smallest`` (q,), for d = 0..q-1
        excluded directions, and the AUROC of the three others, shape ().
    """
    arrays: Arrays = {}
    id_scores, ood_scores = (cumulative_scores(features.moments, z) for z in (features.test, features.ood))
    for name, inside, outside in zip(("largest", "smallest"), id_scores, ood_scores, strict=True):
        # contiguous columns: sorting a strided one is several times slower
        columns = zip(inside.T.contiguous().numpy(), outside.T.contiguous().numpy(), strict=True)
        arrays[name] = np.array([auroc(a, b) for a, b in columns])
    rows = []
    for name, (area, _) in features.rate_gaussians("mahalanobis", "rmd", "marginal").items():
        rows.append(features.row(name, area))
        arrays[name] = np.array(area)
    peak = int(arrays["largest"].argmax())
    rows.append(features.row("partial", arrays["largest"][peak], reason=f"best d={peak + 1}, largest"))
    rows.append(features.row("partial", peak + 1, metric="best_components"))
    return rows, arrays


def run(feature_sets: Sequence[FeatureSet]) -> StudyResult:
    """Appendix C on several feature sets."""
    result = StudyResult("partial")
    for features in feature_sets:
        rows, arrays = analyse(features)
        result.add(features, rows, arrays)
        published = _PUBLISHED.get(features.benchmark, {})
        for metric, ours in {
            "best AUROC of PMD": 100 * arrays["largest"].max(),
            "d at the best AUROC": arrays["largest"].argmax() + 1,
            "AUROC of RMD": 100 * arrays["rmd"],
            "AUROC of MD": 100 * arrays["mahalanobis"],
            "AUROC of MMD": 100 * arrays["marginal"],
        }.items():
            result.comparisons.append(features.beside(metric, ours, published.get(metric, "")))
    result.notes.append("The best d is found with the OOD test samples, which a user does not have; RMD needs no d.")
    return result
