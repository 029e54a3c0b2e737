"""What a user gets of a calibrated detector at a level alpha: its threshold, false alarms, and detections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import binomtest

from rmd_plugin.compare.rows import DETECTED, FALSE_ALARMS, THRESHOLD, at_level
from rmd_plugin.detectors.conformal import Calibration


class Decided(NamedTuple):
    """A number about the decisions of a detector; the 95 % interval is Clopper and Pearson's."""

    metric: str
    ood: str  #: the OOD set, or empty
    value: float
    low: float
    high: float


def decide(calibration: Calibration, scores: Mapping[str, np.ndarray], alpha: float, *, test: str) -> list[Decided]:
    """Threshold, share of the ID test set that is flagged (false alarms), and share of each OOD set (detections).

    Args:
        calibration: of held-out ID scores.
        scores: set -> scores of shape (N,); sets without samples are left out.
        alpha: share of ID samples that may be flagged.
        test: name of the ID test set among them.

    Raises:
        ValueError: if there are too few calibration samples for alpha.
    """
    threshold = float(calibration.threshold(alpha))
    found = [Decided(at_level(THRESHOLD, alpha), "", threshold, np.nan, np.nan)]
    for name, values in scores.items():
        if len(values):
            flagged = int(calibration.is_ood(torch.from_numpy(values), alpha=alpha).sum())
            interval = binomtest(flagged, len(values)).proportion_ci(0.95)
            metric, ood = (FALSE_ALARMS, "") if name == test else (DETECTED, name)
            found.append(Decided(at_level(metric, alpha), ood, flagged / len(values), interval.low, interval.high))
    return found
