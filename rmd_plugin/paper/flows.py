"""Section 4.1: masked autoregressive flows in the place of the Gaussians, log p_k and the ratio to the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rmd_plugin.detectors.base import raise_if_interrupted
from rmd_plugin.detectors.flows.detectors import FlowLikelihood, RelativeFlow
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis
from rmd_plugin.paper.published import TEXT
from rmd_plugin.paper.result import Comparison, FeatureSet, StudyResult, area_under_roc, as_array, percent

_TEXTS = {
    "mahalanobis": "AUROC of MD",
    "rmd": "AUROC of RMD",
    "flow_likelihood": "AUROC of the flow, log p_k",
    "relative_flow": "AUROC of the ratio, log p_k - log p_0",
}


def analyse(features: FeatureSet, **options: Any) -> StudyResult:
    """AUROC of both flow detectors beside the Gaussian ones.

    Args:
        features: features with one OOD set.
        options: of the flow detectors, see :class:`rmd_plugin.detectors.flows.detectors.FlowDetector`.

    Returns:
        Rows, and the scores of each detector as arrays.
    """
    result = StudyResult("flows")
    flow = {"seed": features.seed, "progress": False, **options}
    detectors = {
        "mahalanobis": Mahalanobis(),
        "rmd": RMD(),
        "flow_likelihood": FlowLikelihood(**flow),
        "relative_flow": RelativeFlow(**flow),
    }
    for name, detector in detectors.items():
        detector.fit_features(features.train, features.train_labels)
        raise_if_interrupted(detector)
        known, unknown = (detector.predict_features(part) for part in (features.test, features.unknown))
        result.rows.append(features.row(name, area_under_roc(known, unknown)))
        result.arrays[f"{name}/known"], result.arrays[f"{name}/unknown"] = as_array(known), as_array(unknown)
    return result


def run(
    feature_sets: Sequence[FeatureSet],
    *,
    settings: Sequence[str] = (),
    reasons: Sequence[str] = (),
    options: dict[str, Any] | None = None,
) -> StudyResult:
    """Section 4.1 on several feature sets.

    Args:
        feature_sets: what to analyse.
        settings: what was run, one text for each.
        reasons: why that differs from the paper's setting, one text for each.
        options: of the flow detectors.
    """
    result = StudyResult("flows")
    for place, features in enumerate(feature_sets):
        part = analyse(features, **(options or {}))
        result.rows += part.rows
        result.arrays |= {f"{features.label}//{name}": value for name, value in part.arrays.items()}
        paper = features.benchmark == "cifar100_vs_cifar10"
        for row in part.rows:
            where = "spectrum" if row.detector in ("mahalanobis", "rmd") else "flows"
            result.comparisons.append(
                Comparison(
                    features.label,
                    _TEXTS[row.detector],
                    TEXT[f"{where}/{row.detector}"] if paper else float("nan"),
                    percent(row.value),
                    setting=settings[place] if settings else features.label,
                    reason=reasons[place] if reasons else "",
                )
            )
    return result
