"""What every direction adds to the scores of MD and RMD on a benchmark, for the figures that explain them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pytorch_ood.api import Detector

from rmd_plugin.compare.extraction import TEST, Extractor
from rmd_plugin.detectors.calibrated import bare
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis

#: the detectors that are explained, and their classes
_EXPLAINED = {"mahalanobis": Mahalanobis, "rmd": RMD}


def direction_terms(extractor: Extractor, fitted: Mapping[str, Detector]) -> dict[str, dict[str, np.ndarray]]:
    """Terms of the scores of MD and RMD, as far as they are among the fitted: detector -> test or OOD set -> (N, r)."""
    splits = (TEST, *extractor.distance)
    found = {}
    for name, kind in _EXPLAINED.items():
        detector = bare(fitted[name]) if name in fitted else None
        if isinstance(detector, kind):
            found[name] = {
                split: detector.contributions(extractor.features(split).features).numpy() for split in splits
            }
    return found
