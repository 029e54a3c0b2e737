"""False alarms beyond what exchangeable data give are remarked on, and only those."""

import numpy as np
import pytest
import torch

from rmd_plugin.compare.decisions import decide
from rmd_plugin.detectors.conformal import Calibration


def remark(val, test):
    found = decide(Calibration(torch.from_numpy(val)), {"test": test, "ood": test}, 0.05, test="test")
    assert all(not item.remark for item in found if item.metric != "false_alarms@0.05")
    return next(item.remark for item in found if item.metric == "false_alarms@0.05")


@pytest.mark.parametrize(("calibrated", "tested"), [(19, 5000), (99, 60), (500, 10_000)])
def test_data_of_one_kind_are_hardly_ever_remarked_on(calibrated, tested):
    rng = np.random.default_rng(0)
    draws = (rng.normal(size=calibrated + tested) for _ in range(100))
    # expected: at most one in a thousand; three or more of 100 have a probability of 2e-4
    assert sum(bool(remark(x[:calibrated], x[calibrated:])) for x in draws) < 3


def test_training_data_as_calibration_data_are_remarked_on():
    rng = np.random.default_rng(0)
    text = remark(rng.normal(size=500), rng.normal(0.6, 1.0, size=10_000))
    assert "more false alarms than promised" in text
    assert "Calibrate on ID data that it has not seen" in text


def test_fewer_false_alarms_than_promised_are_no_surprise():
    rng = np.random.default_rng(0)
    assert remark(rng.normal(size=500), rng.normal(-3.0, 1.0, size=10_000)) == ""
    # most samples share the threshold's score: none of them is above it
    assert remark(np.zeros(500), np.zeros(10_000)) == ""
