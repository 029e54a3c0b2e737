"""What every direction adds to the scores of MD and RMD: the picture of why they differ."""

from __future__ import annotations

import numpy as np

from rmd_plugin.compare.extraction import TEST, TRAIN, Extractor
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis


def direction_terms(extractor: Extractor) -> dict[str, dict[str, np.ndarray]]:
    """Terms of both scores along their directions, on every test set.

    Args:
        extractor: the benchmark behind the backbone.

    Returns:
        Detector -> ``test`` or OOD set -> terms of shape (N, r).
    """
    fit = extractor.features(TRAIN)
    found = {}
    for name, detector in (("mahalanobis", Mahalanobis()), ("rmd", RMD())):
        detector.fit_features(fit.features, fit.labels)
        splits = (TEST, *extractor.distance)
        found[name] = {split: detector.contributions(extractor.features(split).features).numpy() for split in splits}
    return found
