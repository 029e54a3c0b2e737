"""Section 4.1: masked autoregressive flows in the place of the Gaussians, log p_k and the ratio to the background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rmd_plugin.detectors.base import raise_if_interrupted
from rmd_plugin.detectors.flows.detectors import FlowLikelihood, RelativeFlow
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis
from rmd_plugin.paper.result import FeatureSet, StudyResult, under

_TEXTS = {
    "mahalanobis": "AUROC of MD",
    "rmd": "AUROC of RMD",
    "flow_likelihood": "AUROC of the flow, log p_k",
    "relative_flow": "AUROC of the ratio, log p_k - log p_0",
}
#: the paper's own: a flow for each class and one for the background, in all directions
_SETTING = {"space": "features", "sharing": "per_class"}


def run(feature_sets: Sequence[FeatureSet], options: Mapping[str, Any]) -> StudyResult:
    """AUROC of both flow detectors, made with these options, beside the Gaussian ones; the scores of each as arrays."""
    result = StudyResult("flows")
    for features in feature_sets:
        flow = {**_SETTING, "seed": features.seed, "progress": False, **options}
        detectors = {
            "mahalanobis": Mahalanobis(),
            "rmd": RMD(),
            "flow_likelihood": FlowLikelihood(**flow),
            "relative_flow": RelativeFlow(background="flow", **flow),
        }
        for name, detector in detectors.items():
            detector.fit_features(features.train, features.train_labels)
            raise_if_interrupted(detector)
            area, scores = features.rate(detector)
            result.add(features, [features.row(name, area)], under(name, scores))
            where = "spectrum" if name in ("mahalanobis", "rmd") else "flows"
            published = f"{where}/{name}" if features.benchmark == "cifar100_vs_cifar10" else ""
            result.comparisons.append(features.beside(_TEXTS[name], 100 * area, published))
    return result
