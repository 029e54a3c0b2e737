import functools
import math

import numpy as np
import pytest
import torch
from pytorch_ood import detector as framework
from pytorch_ood.api import FeaturesDetector, LogitsDetector
from pytorch_ood.metrics import OODMetrics
from scipy.stats import binom
from tiny_benchmark import CLASSES, Tiny, TinyNet
from torch import nn

from rmd_plugin import RMD, Calibrated, Mahalanobis, MultiLayer, NumericalWarning
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.comparison import compare
from rmd_plugin.compare.extraction import Extractor
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
    layers = functools.partial(MultiLayer, detector=RMD(), layers=["0", "2"])
    return run({"rmd": RMD, "layers": layers, "dice": functools.partial(framework.DICE, p=0.65), **ALL})


def test_every_detector_of_the_framework_has_numbers_or_a_reason(everything):
    reasons = {row.detector: row.reason for row in everything.rows if not row.ok and row.metric == "AUROC"}
    assert set(reasons) == {"RankFeat", "MCM", "WeightedEBO"}
    assert reasons["RankFeat"] == "needs feature maps, and 1 gives vectors"
    assert all(row.status == "skipped" for row in everything.rows if not row.ok)
    assert set(everything.scores) == {"rmd", "layers", "dice", *ALL} - set(reasons)


def test_rows_are_complete_and_name_what_they_belong_to(everything):
    mine = select(everything.rows, detector="rmd")
    assert {(row.ood, row.metric) for row in mine} == {
        *((ood, metric) for ood in ("near", "far") for metric in ("AUROC", "AUPR-IN", "AUPR-OUT", "FPR95TPR")),
        ("", "threshold@0.05"),
        ("", "false_alarms@0.05"),
        ("near", "detected@0.05"),
        ("far", "detected@0.05"),
        ("", "fit_seconds"),
        ("", "score_seconds"),
    }
    assert {(row.ood, row.distance) for row in mine} == {("near", "near"), ("far", "far"), ("", "")}
    assert all((row.benchmark, row.backbone, row.seed) == ("tiny", "net", 0) for row in mine)


def test_numbers_are_those_of_the_framework_on_the_same_scores(everything):
    for detector in ("rmd", "MaxSoftmax", "KNN"):
        scores = everything.scores[detector]
        metrics = OODMetrics()
        labels = torch.cat([torch.zeros(60), -torch.ones(50)])
        metrics.update(torch.from_numpy(np.concatenate([scores["test"], scores["near"]])), labels)
        expected = metrics.compute()
        for row in select(everything.rows, detector=detector, ood="near"):
            if row.metric in expected:
                assert row.value == pytest.approx(expected[row.metric])


def test_decisions_are_counts_of_the_samples_above_the_threshold(everything):
    for detector in ("rmd", "MaxSoftmax", "KNN"):
        scores = everything.scores[detector]
        # at most 5 % of 91 exchangeable samples reach the fourth largest of 90
        threshold = np.sort(scores["val"])[-4]
        [row] = select(everything.rows, detector=detector, metric="threshold@0.05")
        assert row.value == threshold
        [row] = select(everything.rows, detector=detector, metric="false_alarms@0.05")
        count = int((scores["test"] > threshold).sum())
        assert (row.value, row.ood) == (count / 60, "")
        # Clopper and Pearson: the ends are the rates at which the count is at one end of its 95 %
        assert binom.sf(count - 1, 60, row.low) == pytest.approx(0.025 if count else 1.0)
        assert binom.cdf(count, 60, row.high) == pytest.approx(0.025)
        [row] = select(everything.rows, detector=detector, metric="detected@0.05", ood="near")
        assert row.value == np.mean(scores["near"] > threshold)


def test_a_detector_without_decisions_keeps_its_numbers(everything):
    # a sample whose features are all zero has no score there
    [row] = select(everything.rows, detector="SCALE", metric="false_alarms@0.05")
    assert row.status == "skipped"
    assert "1 of 90 calibration scores are NaN" in row.reason
    assert select(everything.rows, detector="SCALE", metric="AUROC", ood="near")[0].ok
    assert everything.detectors["SCALE"].calibration is None


def test_a_fit_that_has_seen_the_calibration_data_is_remarked(everything):
    remarks = {row.detector: row.reason for row in select(everything.rows, metric="false_alarms@0.05", status="ok")}
    told = {name for name, reason in remarks.items() if "has seen the validation data" in reason}
    assert told == {"TemperatureScaling", "KLMatching"}


def test_too_few_validation_samples_and_none_leave_the_comparison_standing(everything):
    found = run({"rmd": RMD}, alpha=0.01)
    assert "needs 99" in select(found.rows, metric="false_alarms@0.01")[0].reason
    assert select(found.rows, metric="AUROC", ood="far")[0].ok
    with pytest.raises(ValueError, match="alpha must be a number between 0 and 1"):
        run({"rmd": RMD}, alpha=5)


@pytest.mark.parametrize("name", ["rmd", "dice", "MaxSoftmax", "KNN", "ViM", "ReAct", "NNGuide", "GMM", "KLMatching"])
def test_a_compared_detector_can_be_saved_and_decides_the_same(everything, name, tmp_path):
    detector = everything.detectors[name]
    detector.save(tmp_path / "file")
    loaded = Calibrated.load(tmp_path / "file")
    data = Extractor(Tiny(), TinyNet(), progress=False, batch_size=64).features("near").features
    kind = "logits" if isinstance(detector.detector, LogitsDetector) else "features"
    values = torch.randn(8, 3) if kind == "logits" else data[:8]
    if name == "ReAct":
        kind, values = "feature_maps", data[:8, :, None, None]
    scores = [getattr(found.detector, f"predict_{kind}")(values) for found in (detector, loaded)]
    assert torch.equal(*scores)
    assert loaded.threshold() == detector.threshold()


def test_the_frameworks_own_evaluation_gives_the_same_auroc(everything):
    backbone = TinyNet().eval()
    detector = framework.KNN(backbone.encoder)
    benchmark = Tiny()
    detector.fit(torch.utils.data.DataLoader(benchmark.train_set(), 64))
    found = benchmark.evaluate(detector, loader_kwargs={"batch_size": 64})
    rows = select(everything.rows, detector="KNN", metric="AUROC")
    assert [row.value for row in rows] == pytest.approx([result["AUROC"] for result in found], abs=1e-6)


def test_intervals_hold_the_number_and_can_be_left_out(everything):
    rows = select(everything.rows, metric="AUROC", status="ok")
    assert all(row.low - 1e-12 <= row.value <= row.high + 1e-12 for row in rows)  # AUROC rounds 1 down
    without = select(run({"rmd": RMD}, resamples=0).rows, metric="AUROC")
    assert without
    assert all(math.isnan(row.low) for row in without)


class Broken(FeaturesDetector):
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

    def predict(self, x):
        return self.predict_features(x)


def test_a_detector_that_fails_is_a_row_with_its_reason_and_the_rest_stand():
    steps = ("init", "fit", "score", "shape", "nan")
    result = run({**{step: functools.partial(Broken, where=step) for step in steps}, "rmd": RMD})
    failed = {row.detector: row.reason for row in result.rows if row.status == "failed"}
    assert failed["init"] == "ValueError: bad option"
    assert failed["fit"] == "MemoryError"
    assert failed["score"] == "RuntimeError: no score"
    assert failed["shape"] == "ValueError: scores must have shape (60,), got (60, 2)"
    assert "NaN" in failed["nan"]
    assert len(select(result.rows, detector="rmd", metric="AUROC", status="ok")) == 2


class Dice(FeaturesDetector):
    """Scores with the global random numbers of torch and numpy."""

    def predict_features(self, z):
        return torch.rand(len(z)) + torch.from_numpy(np.random.rand(len(z)))  # noqa: NPY002

    def predict(self, x):
        return self.predict_features(x)


def test_random_detectors_follow_the_seed_and_nobody_else():
    alone = run({"dice": Dice}).scores["dice"]["near"]
    together = run({"knn": framework.KNN, "more": Dice, "dice": Dice}).scores["dice"]["near"]
    assert np.array_equal(alone, together)
    assert not np.array_equal(alone, run({"dice": Dice}, seed=1).scores["dice"]["near"])


def test_the_callers_random_state_comes_back():
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run({"dice": Dice})
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


class Warns(FeaturesDetector):
    """Warns as our numerics do."""

    def predict_features(self, z):
        import warnings

        warnings.warn("three directions were left out", NumericalWarning, stacklevel=2)
        warnings.warn("something of the framework", UserWarning, stacklevel=2)
        return z[:, 0]

    def predict(self, x):
        return self.predict_features(x)


def test_numerical_warnings_become_remarks_of_the_rows():
    rows = select(run({"warns": Warns}).rows, detector="warns", metric="AUROC")
    assert {row.reason for row in rows} == {"three directions were left out"}


# -- the head -----------------------------------------------------------------------------------------------------


def accuracy_row(result):
    (row,) = select(result.rows, metric="ACC")
    return row


def test_an_untrained_head_gives_way_to_a_linear_probe():
    row = accuracy_row(run({"msp": framework.MaxSoftmax}))
    assert row.reason == "linear probe on the training features"
    assert row.value > 0.9


def test_a_loaded_head_is_used():
    backbone = TinyNet()
    backbone.head_loaded = True
    result = run({"msp": framework.MaxSoftmax}, backbone)
    assert accuracy_row(result).reason == "the backbone's own head"
    with torch.no_grad():
        logits = backbone.eval().head(backbone.encoder(Tiny().parts["near"].x))
    expected = -logits.softmax(1).max(1).values
    assert np.allclose(result.scores["msp"]["near"], expected.numpy(), atol=1e-6)


def test_a_head_for_other_classes_gives_way_to_a_probe():
    backbone = TinyNet()
    backbone.head, backbone.head_loaded = nn.Linear(8, CLASSES + 1), True
    assert "linear probe" in accuracy_row(run({}, backbone)).reason
    with pytest.raises(ValueError, match="head for 4 classes and tiny has 3 classes"):
        run({}, backbone, head="own")


def test_an_own_head_that_is_untrained_is_used_on_demand_and_says_so():
    row = accuracy_row(run({"msp": framework.MaxSoftmax}, head="own", remark="the encoder is untrained"))
    assert row.reason == "the backbone's own head, untrained; the encoder is untrained"


def test_without_a_head_detectors_of_logits_are_not_served_and_the_others_are():
    result = run({"msp": framework.MaxSoftmax, "md": Mahalanobis}, head=None)
    assert accuracy_row(result).status == "skipped"
    assert select(result.rows, detector="msp")[0].reason.startswith("needs a classifier")
    assert "md" in result.scores


def test_an_unknown_head_is_refused():
    with pytest.raises(ValueError, match=r"head must be auto, own, .*, got 'mlp'"):
        run({}, head="mlp")


# -- stopping -----------------------------------------------------------------------------------------------------


class Stops(FeaturesDetector):
    """The user loses patience."""

    def predict_features(self, z):
        raise KeyboardInterrupt

    def predict(self, x):
        return self.predict_features(x)


def test_after_ctrl_c_there_is_what_was_done():
    seen = []
    result = run(
        {"md": Mahalanobis, "stops": Stops, "rmd": RMD}, after_each=lambda so_far: seen.append(len(so_far.rows))
    )
    assert result.interrupted
    assert list(result.scores) == ["md"]
    assert len(seen) == 1


class EndsEarly(RMD):
    """Takes Ctrl-C as a wish to end its training, as flows do."""

    def fit_features(self, z, y):
        self.interrupted = True
        return super().fit_features(z, y)


def test_ctrl_c_in_a_fit_that_takes_it_as_its_own_stops_the_comparison_too():
    result = run({"md": Mahalanobis, "ends": EndsEarly, "rmd": RMD})
    assert result.interrupted
    assert list(result.scores) == ["md"]


def test_without_validation_data_the_training_data_fit_and_nothing_is_decided():
    class Without(Tiny):
        def val_set(self):
            raise ValueError("there is none")

    found = run({"ts": framework.TemperatureScaling}, benchmark=Without())
    assert "ts" in found.scores
    assert "val" not in found.scores["ts"]
    assert found.detectors["ts"].calibration is None
    [row] = [row for row in found.rows if "@" in row.metric]
    assert (row.status, row.reason) == ("skipped", "the benchmark has no ID validation data")


LAYERED = {
    "sum": functools.partial(MultiLayer, detector=RMD(), layers=["0", "2"]),
    "p-values": functools.partial(MultiLayer, layers=["0", "2"], fusion="p-values"),
    "one": functools.partial(MultiLayer, detector=Mahalanobis(), layers="1", pooling="cls"),
}


def test_detectors_on_pooled_layers_cost_no_pass_of_their_own_and_score_as_through_the_network():
    backbone, alone = TinyNet(), TinyNet()
    found = run({"rmd": RMD, **LAYERED}, backbone)
    run({"rmd": RMD}, alone)
    # besides: a sample for every set of layers that is new, and one when a detector is built
    assert backbone.seen <= alone.seen + 6
    data = Tiny().parts
    for name, factory in LAYERED.items():
        by_hand = factory(encoder=backbone.eval().encoder).fit([(data["train"].x, data["train"].y)])
        for split in ("test", "near", "far"):
            expected = by_hand.predict(data[split].x).numpy()
            assert found.scores[name][split] == pytest.approx(expected, rel=1e-3, abs=1e-3)
        saved = Calibrated.from_state(found.detectors[name].state_dict(), backbone.encoder)
        assert saved.predict(data["near"].x).numpy() == pytest.approx(found.scores[name]["near"], rel=1e-4, abs=1e-4)


def test_a_second_comparison_does_not_run_the_network_for_pooled_layers(tmp_path):
    def once():
        backbone = TinyNet()
        extractor = Extractor(Tiny(), backbone, cache=FeatureCache(tmp_path), progress=False, batch_size=64)
        result = compare(extractor, LAYERED, benchmark="tiny", backbone="net", resamples=0)
        return result, backbone.seen

    (first, all_samples), (second, few) = once(), once()
    assert all_samples > 240 + 90 + 60 + 50 + 40
    assert few < 40  # the probes of five splits, and samples that show that there are such layers
    for name in LAYERED:
        assert np.array_equal(first.scores[name]["near"], second.scores[name]["near"])


def test_layers_that_cannot_be_had_are_a_reason_and_the_others_stand():
    backbone = TinyNet()
    backbone.encoder.spare = nn.Linear(1, 1)
    backbone.encoder.forward = lambda x: backbone.encoder[2](backbone.encoder[1](backbone.encoder[0](x)))
    result = run(
        {
            "rmd": RMD,
            "no such": functools.partial(MultiLayer, layers="layer9"),
            "silent": functools.partial(MultiLayer, layers=["0", "spare"]),
            "layers": LAYERED["sum"],
        },
        backbone,
    )
    reasons = {row.detector: row.reason for row in result.rows if not row.ok}
    assert "has no layer 'layer9'" in reasons["no such"]
    assert "spare did not take part" in reasons["silent"]
    assert set(result.scores) == {"rmd", "layers"}
