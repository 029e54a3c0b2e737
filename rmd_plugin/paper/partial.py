"""Appendix C: the partial Mahalanobis distance for every number of eigen-directions, in one pass over the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rmd_plugin.detectors.gaussian import QuadraticScore, fit_mahalanobis
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis, MarginalMahalanobis
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.paper.published import TEXT
from rmd_plugin.paper.result import Comparison, FeatureSet, StudyResult, area_under_roc, percent

#: float64 numbers that are handled at once: what fits a cache
_BLOCK = 2**20


def cumulative_scores(moments: Moments, z: Tensor, *, shrinkage: float | str = 0.0) -> tuple[Tensor, Tensor]:
    """PMD of every sample for every d, by cumulative sums instead of D fits.

    Args:
        moments: moments of the training features.
        z: features of shape (B, D).
        shrinkage: see :func:`rmd_plugin.detectors.gaussian.regularised_covariance`.

    Returns:
        ``largest`` (B, q), whose column d - 1 sums over the d directions of largest variance, and ``smallest`` (B, q),
        whose column d sums over the q - d others. q is the number of eigen-directions with variance.
    """
    module = QuadraticScore(fit_mahalanobis(moments, shrinkage=shrinkage), torch.float64)
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


def analyse(features: FeatureSet, *, shrinkage: float | str = 0.0) -> StudyResult:
    """AUROC of PMD for every d, largest and smallest first, beside MD, RMD and MMD.

    Args:
        features: features with one OOD set.
        shrinkage: see :func:`rmd_plugin.detectors.gaussian.regularised_covariance`.

    Returns:
        Rows for MD, RMD, MMD and the best d of each kind; arrays ``largest`` (q,), for d = 1..q, and ``smallest`` (q,),
        for d = 0..q-1 excluded directions.
    """
    metric = Mahalanobis().new_moments(sync_on_compute=False)
    metric.update(features.train, features.train_labels)
    moments = metric.compute()
    result = StudyResult("partial")
    known = cumulative_scores(moments, features.test, shrinkage=shrinkage)
    unknown = cumulative_scores(moments, features.unknown, shrinkage=shrinkage)
    for name, inside, outside in zip(("largest", "smallest"), known, unknown, strict=True):
        # contiguous columns: sorting a strided one is several times slower
        columns = zip(inside.T.contiguous().numpy(), outside.T.contiguous().numpy(), strict=True)
        result.arrays[name] = np.array([area_under_roc(a, b) for a, b in columns])
    for name, kind in (("mahalanobis", Mahalanobis), ("rmd", RMD), ("marginal", MarginalMahalanobis)):
        detector = kind(shrinkage=shrinkage).fit_moments(moments)  # type: ignore[arg-type]
        scores = detector.predict_features(features.test), detector.predict_features(features.unknown)
        result.rows.append(features.row(name, area_under_roc(*scores)))
    peak = int(result.arrays["largest"].argmax()) + 1
    result.rows.append(features.row("partial", float(result.arrays["largest"].max()), reason=f"best d={peak}, largest"))
    result.rows.append(features.row("partial", peak, metric="best_components"))
    return result


def run(
    feature_sets: Sequence[FeatureSet], *, settings: Sequence[str] = (), reasons: Sequence[str] = ()
) -> StudyResult:
    """Appendix C on several feature sets.

    Args:
        feature_sets: what to analyse.
        settings: what was run, one text for each.
        reasons: why that differs from the paper's setting, one text for each.
    """
    result = StudyResult("partial")
    for place, features in enumerate(feature_sets):
        part = analyse(features)
        result.rows += part.rows
        found = {(row.detector, row.metric): row.value for row in part.rows}
        result.arrays |= {f"{features.label}//{name}": value for name, value in part.arrays.items()}
        for name in ("mahalanobis", "rmd", "marginal"):
            result.arrays[f"{features.label}//{name}"] = np.array(found[name, "AUROC"])
        published = _published(features.benchmark)
        texts = {
            "partial": "best AUROC of PMD",
            "components": "d at the best AUROC",
            "rmd": "AUROC of RMD",
            "mahalanobis": "AUROC of MD",
            "marginal": "AUROC of MMD",
        }
        for name, text in texts.items():
            value = found["partial", "best_components"] if name == "components" else percent(found[name, "AUROC"])
            result.comparisons.append(
                Comparison(
                    features.label,
                    text,
                    published.get(name, float("nan")),
                    value,
                    setting=settings[place] if settings else features.label,
                    reason=reasons[place] if reasons else "",
                )
            )
    result.notes.append("The best d is found with the OOD test samples, which a user does not have; RMD needs no d.")
    return result


def _published(benchmark: str) -> dict[str, float]:
    if benchmark == "cifar100_vs_cifar10":
        return {
            "partial": TEXT["partial/peak"],
            "components": TEXT["partial/peak_components"],
            "rmd": TEXT["spectrum/rmd"],
            "mahalanobis": TEXT["spectrum/mahalanobis"],
            "marginal": TEXT["partial/marginal"],
        }
    return {"marginal": TEXT["partial/marginal_cifar10"]} if benchmark == "cifar10_vs_cifar100" else {}
