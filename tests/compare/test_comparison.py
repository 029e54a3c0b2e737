import dataclasses
import functools
import warnings

import numpy as np
import pytest
import torch
from pytorch_ood import detector as framework
from pytorch_ood.api import FeaturesDetector
from scipy.stats import binom
from tiny_benchmark import CLASSES, Tiny, TinyNet
from torch import nn

from rmd_plugin import RMD, Mahalanobis, NumericalWarning
from rmd_plugin.compare.comparison import compare, too_many_alarms
from rmd_plugin.compare.features import Extractor
from rmd_plugin.compare.rows import select

ALL = {
    name: getattr(framework, name)
    for name in framework.__all__
    if name not in ("odin_preprocessing", "DICE") and isinstance(getattr(framework, name), type)
}


def run(detectors, backbone=None, benchmark=None, **options):
    extractor = Extractor(benchmark or Tiny(), backbone or TinyNet(), progress=False, batch_size=64)
    return compare(extractor, detectors, benchmark="tiny", backbone="net", **{"resamples": 50, **options})


@pytest.fixture(scope="module")
def everything():
    return run({"rmd": RMD, "dice": functools.partial(framework.DICE, p=0.65), **ALL})


def test_every_detector_of_the_framework_has_numbers_or_a_reason(everything):
    reasons = {
        row.detector: row.reason for row in everything.rows.itertuples() if row.status != "ok" and row.metric == "AUROC"
    }
    assert set(reasons) == {"RankFeat", "MCM", "WeightedEBO"}
    assert reasons["RankFeat"] == "needs feature maps, and 1 gives vectors"
    assert all(row.status == "skipped" for row in everything.rows.itertuples() if row.status != "ok")
    assert set(everything.scores) == {"rmd", "dice", *ALL} - set(reasons)


def test_rows_are_complete_and_name_what_they_belong_to(everything):
    mine = select(everything.rows, detector="rmd")
    assert {(row.ood, row.metric) for row in mine.itertuples()} == {
        *((ood, metric) for ood in ("near", "far") for metric in ("AUROC", "AUPR-IN", "AUPR-OUT", "FPR95TPR")),
        *((ood, metric) for ood in ("near", "far") for metric in ("OSCR", "AUTC", "AURC-OOD", "risk90")),
        ("", "AURC"),
        ("", "threshold@0.05"),
        ("", "false_alarms@0.05"),
        ("near", "detected@0.05"),
        ("far", "detected@0.05"),
        ("", "fit_seconds"),
        ("", "score_seconds"),
    }
    assert {(row.ood, row.distance) for row in mine.itertuples()} == {("near", "near"), ("far", "far"), ("", "")}
    assert all((row.benchmark, row.backbone, row.seed) == ("tiny", "net", 0) for row in mine.itertuples())


def test_decisions_are_counts_of_the_samples_above_the_threshold(everything):
    for detector in ("rmd", "MaxSoftmax", "KNN"):
        scores = everything.scores[detector]
        # at most 5 % of 91 exchangeable samples reach the fourth largest of 90
        threshold = np.sort(scores["val"])[-4]
        [row] = select(everything.rows, detector=detector, metric="threshold@0.05").itertuples()
        assert row.value == threshold
        [row] = select(everything.rows, detector=detector, metric="false_alarms@0.05").itertuples()
        count = int((scores["test"] > threshold).sum())
        assert (row.value, row.ood) == (count / 60, "")
        # Clopper and Pearson: the ends are the rates at which the count is at one end of its 95 %
        assert binom.sf(count - 1, 60, row.low) == pytest.approx(0.025 if count else 1.0)
        assert binom.cdf(count, 60, row.high) == pytest.approx(0.025)
        [row] = select(everything.rows, detector=detector, metric="detected@0.05", ood="near").itertuples()
        assert row.value == np.mean(scores["near"] > threshold)


def test_a_detector_without_decisions_keeps_its_numbers(everything):
    # a sample whose features are all zero has no score there
    [row] = select(everything.rows, detector="SCALE", metric="false_alarms@0.05").itertuples()
    assert row.status == "skipped"
    assert "1 of 90 calibration scores are NaN" in row.reason
    assert select(everything.rows, detector="SCALE", metric="AUROC", ood="near").iloc[0].status == "ok"
    assert everything.detectors["SCALE"].calibration is None


def test_a_fit_that_has_seen_the_calibration_data_is_remarked(everything):
    remarks = {
        row.detector: row.reason
        for row in select(everything.rows, metric="false_alarms@0.05", status="ok").itertuples()
    }
    told = {name for name, reason in remarks.items() if "has seen the validation data" in reason}
    assert told == {"TemperatureScaling", "KLMatching"}


def test_too_few_validation_samples_and_none_leave_the_comparison_standing(everything):
    found = run({"rmd": RMD}, alpha=0.01)
    assert "needs 99" in select(found.rows, metric="false_alarms@0.01").iloc[0].reason
    assert select(found.rows, metric="AUROC", ood="far").iloc[0].status == "ok"
    with pytest.raises(ValueError, match="alpha must be a number between 0 and 1"):
        run({"rmd": RMD}, alpha=5)


def test_intervals_hold_the_number_and_can_be_left_out(everything):
    rows = select(everything.rows, metric="AUROC", status="ok")
    assert all(row.low - 1e-12 <= row.value <= row.high + 1e-12 for row in rows.itertuples())  # AUROC rounds 1 down
    without = select(run({"rmd": RMD}, resamples=0).rows, metric="AUROC")
    assert len(without) == without["low"].isna().sum() > 0


class Own(FeaturesDetector):
    """A detector that is scored on features alone."""

    def predict(self, x):
        raise NotImplementedError


class Broken(Own):
    """Fails where it is told to."""

    requires_fit = True

    def __init__(self, where):
        self.where = where
        if where == "init":
            raise ValueError("bad option\nand a second line")

    def fit_features(self, z, y):
        if self.where == "fit":
            raise MemoryError
        return self

    def predict_features(self, z):
        if self.where == "score":
            raise RuntimeError("no score")
        if self.where == "shape":
            return torch.zeros(len(z), 2)
        return torch.full((len(z),), torch.nan)


def test_a_detector_that_fails_is_a_row_with_its_reason_and_the_rest_stand():
    steps = ("init", "fit", "score", "shape", "nan")
    result = run({**{step: functools.partial(Broken, where=step) for step in steps}, "rmd": RMD})
    failed = {row.detector: row.reason for row in result.rows.itertuples() if row.status == "failed"}
    words = {"init": "bad option", "fit": "MemoryError", "score": "no score", "shape": "(60, 2)", "nan": "NaN"}
    assert all(word in failed[step] for step, word in words.items())
    assert "\n" not in "".join(failed.values())
    assert len(select(result.rows, detector="rmd", metric="AUROC", status="ok")) == 2


class Dice(Own):
    """Scores with the global random numbers of torch and numpy."""

    def predict_features(self, z):
        return torch.rand(len(z)) + torch.from_numpy(np.random.rand(len(z)))  # noqa: NPY002


def test_random_detectors_follow_the_seed_and_nobody_else():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    alone = run({"dice": Dice}).scores["dice"]["near"]
    together = run({"knn": framework.KNN, "more": Dice, "dice": Dice}).scores["dice"]["near"]
    assert np.array_equal(alone, together)
    assert not np.array_equal(alone, run({"dice": Dice}, seed=1).scores["dice"]["near"])
    assert torch.equal(torch.random.get_rng_state(), before[0])  # the caller's comes back
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


class Warns(Own):
    """Warns as our numerics do."""

    def predict_features(self, z):
        warnings.warn("three directions were left out", NumericalWarning, stacklevel=2)
        warnings.warn("something of the framework", UserWarning, stacklevel=2)
        return z[:, 0]


def test_numerical_warnings_become_remarks_of_the_rows():
    rows = select(run({"warns": Warns}).rows, detector="warns", metric="AUROC")
    assert {row.reason for row in rows.itertuples()} == {"three directions were left out"}


# -- the head -----------------------------------------------------------------------------------------------------


def accuracy_row(result):
    (row,) = select(result.rows, metric="ACC").itertuples()
    return row


def test_a_loaded_head_is_used():
    backbone = TinyNet()
    backbone.head_loaded = True
    result = run({"msp": framework.MaxSoftmax}, backbone)
    assert accuracy_row(result).reason == "the backbone's own head"
    with torch.no_grad():
        logits = backbone.eval().head(backbone.encoder(Tiny().items("near")))
    expected = -logits.softmax(1).max(1).values
    assert np.allclose(result.scores["msp"]["near"], expected.numpy(), atol=1e-6)


def test_a_head_for_other_classes_gives_way_to_a_probe():
    backbone = TinyNet()
    backbone.head, backbone.head_loaded = nn.Linear(8, CLASSES + 1), True
    assert "linear probe" in accuracy_row(run({}, backbone)).reason
    with pytest.raises(ValueError, match="3 classes"):
        run({}, backbone, head="own")
    with pytest.raises(ValueError, match="mlp"):
        run({}, head="mlp")


def test_an_untrained_head_gives_way_to_a_linear_probe_unless_it_is_asked_for():
    row = accuracy_row(run({"msp": framework.MaxSoftmax}))
    assert row.reason == "linear probe on the training features"
    assert row.value > 0.9
    row = accuracy_row(run({"msp": framework.MaxSoftmax}, head="own", remark="the encoder is untrained"))
    assert row.reason == "the backbone's own head, untrained; the encoder is untrained"


def test_without_a_head_detectors_of_logits_are_not_served_and_the_others_are():
    result = run({"msp": framework.MaxSoftmax, "md": Mahalanobis}, head=None)
    assert accuracy_row(result).status == "skipped"
    assert select(result.rows, detector="msp").iloc[0].reason.startswith("needs a classifier")
    assert "md" in result.scores


# -- stopping -----------------------------------------------------------------------------------------------------


class Stops(Own):
    """The user loses patience."""

    def predict_features(self, z):
        raise KeyboardInterrupt


def test_after_ctrl_c_there_is_what_was_done():
    seen = []
    result = run(
        {"md": Mahalanobis, "stops": Stops, "rmd": RMD}, after_each=lambda so_far: seen.append(len(so_far.rows))
    )
    assert result.interrupted
    assert list(result.scores) == ["md"]
    assert len(seen) == 1


def test_without_validation_data_the_training_data_fit_and_nothing_is_decided():
    class Without(Tiny):
        def load(self):
            return dataclasses.replace(super().load(), val=None)

    found = run({"ts": framework.TemperatureScaling}, benchmark=Without())
    assert "ts" in found.scores
    assert "val" not in found.scores["ts"]
    assert found.detectors["ts"].calibration is None
    [row] = [row for row in found.rows.itertuples() if "@" in row.metric]
    assert (row.status, row.reason) == ("skipped", "the benchmark has no ID validation data")


@pytest.mark.parametrize(("calibrated", "tested"), [(19, 5000), (500, 10_000)])
def test_false_alarms_of_data_of_one_kind_are_hardly_ever_remarked_on(calibrated, tested):
    rng = np.random.default_rng(0)
    remarks = []
    for _ in range(100):
        held_out, test = np.sort(rng.normal(size=calibrated)), rng.normal(size=tested)
        threshold = held_out[-int(0.05 * (calibrated + 1))]
        remarks.append(too_many_alarms(int((test > threshold).sum()), tested, calibrated, 0.05))
    # expected: at most one in a thousand; three or more of 100 have a probability of 2e-4
    assert sum(map(bool, remarks)) < 3
    assert "validation data are unlike" in too_many_alarms(tested // 2, tested, calibrated, 0.05)


def test_a_network_at_chance_is_remarked_on_without_blaming_anything():
    backbone = TinyNet()
    backbone.head.weight.data.zero_()
    assert "hardly above chance" in accuracy_row(run({}, backbone, head="own")).reason
    assert "chance" not in accuracy_row(run({})).reason
