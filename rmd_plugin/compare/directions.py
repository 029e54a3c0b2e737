"""What every direction adds to the scores of MD and RMD on a benchmark, for the figures that explain them."""

from __future__ import annotations

import warnings

import numpy as np

from rmd_plugin.compare.extraction import TEST, TRAIN, Extractor
from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis


def direction_terms(extractor: Extractor) -> dict[str, dict[str, np.ndarray]]:
    """Terms of the scores of MD and RMD: detector -> test or OOD set -> shape (N, r)."""
    fit = extractor.features(TRAIN)
    splits = (TEST, *extractor.distance)
    found = {}
    for name, detector in (("mahalanobis", Mahalanobis()), ("rmd", RMD())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # the comparison has told what there is to tell
            detector.fit_features(fit.features, fit.labels)
        found[name] = {split: detector.contributions(extractor.features(split).features).numpy() for split in splits}
    return found
