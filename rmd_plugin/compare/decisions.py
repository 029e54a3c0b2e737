"""What a user gets of a calibrated detector at a level alpha: its threshold, false alarms, and detections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import betabinom, binomtest

from rmd_plugin.compare.rows import DETECTED, FALSE_ALARMS, SHIFT_ALARMS, THRESHOLD, at_level
from rmd_plugin.detectors.conformal import Calibration, allowed_alarms

#: probability, if test and calibration data are alike, below which so many false alarms are remarked on
_SURPRISING = 1e-3


class Decided(NamedTuple):
    """A number about the decisions of a detector; the 95 % interval is Clopper and Pearson's."""

    metric: str
    ood: str  #: the OOD set, or empty
    value: float
    low: float
    high: float
    remark: str = ""


def decide(
    calibration: Calibration,
    scores: Mapping[str, np.ndarray],
    alpha: float,
    *,
    test: str,
    shifts: Collection[str] = (),
) -> list[Decided]:
    """Threshold, share of the ID test set that is flagged (false alarms), and share of each OOD set (detections).

    Args:
        calibration: of held-out ID scores.
        scores: set -> scores of shape (N,); sets without samples are left out.
        alpha: share of ID samples that may be flagged.
        test: name of the ID test set among them.
        shifts: names of ID sets under a covariate shift among them; what is flagged there are false alarms too.

    Raises:
        ValueError: if there are too few calibration samples for alpha.
    """
    threshold = float(calibration.threshold(alpha))
    found = [Decided(at_level(THRESHOLD, alpha), "", threshold, np.nan, np.nan)]
    for name, values in scores.items():
        if len(values):
            flagged = int(calibration.is_ood(torch.from_numpy(values), alpha=alpha).sum())
            interval = binomtest(flagged, len(values)).proportion_ci(0.95)
            metric, ood = (FALSE_ALARMS, "") if name == test else (SHIFT_ALARMS if name in shifts else DETECTED, name)
            remark = _too_many(flagged, len(values), len(calibration), alpha) if name == test else ""
            share = flagged / len(values)
            found.append(Decided(at_level(metric, alpha), ood, share, interval.low, interval.high, remark))
    return found


def _too_many(flagged: int, tested: int, calibrated: int, alpha: float) -> str:
    """Says so if more ID test samples are flagged than data like the calibration samples would give."""
    alarms = allowed_alarms(calibrated, alpha)
    # the law of their number if all samples are exchangeable; ties only make it smaller
    if betabinom.sf(flagged - 1, tested, alarms, calibrated + 1 - alarms) >= _SURPRISING:
        return ""
    return (
        "more false alarms than promised: the validation data are unlike the test data. Was the network trained on "
        "them? Calibrate on ID data that it has not seen"
    )
