import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import auc, precision_recall_curve, roc_auc_score

from rmd_plugin.compare.metrics import METRICS, FeatureRows, OODScores, compare_sets, ood_metrics


def make_scores(inliers=60, outliers=40, scale=1.0):
    scores = scale * torch.cat([torch.randn(inliers), torch.randn(outliers) + 1.2])
    return scores, torch.cat([torch.arange(inliers) % 5, -1 - torch.arange(outliers) % 3])


def test_the_metrics_are_those_of_the_textbook():
    scores, labels = make_scores()
    values = ood_metrics(scores, labels)
    assert tuple(values) == METRICS
    outlier = (labels < 0).numpy()
    assert float(values["AUROC"]) == pytest.approx(oracle.auroc(scores[labels >= 0], scores[labels < 0]), abs=1e-12)
    assert float(values["AUROC"]) == pytest.approx(roc_auc_score(outlier, scores), abs=1e-12)
    for name, positive, sign in (("AUPR-OUT", outlier, 1), ("AUPR-IN", ~outlier, -1)):
        precision, recall, _ = precision_recall_curve(positive, sign * scores.numpy())
        assert float(values[name]) == pytest.approx(auc(recall, precision), abs=1e-12)
    # the largest threshold that 95 % of the outliers reach
    threshold = np.sort(scores[labels < 0].numpy())[::-1][math.ceil(0.95 * outlier.sum()) - 1]
    assert float(values["FPR95TPR"]) == pytest.approx((scores[labels >= 0].numpy() >= threshold).mean())


def test_scores_of_the_size_of_distances_are_not_squashed_by_a_sigmoid():
    scores, labels = make_scores(scale=500.0)
    metric = OODScores()
    metric.update(scores + 2000.0, labels)
    expected = oracle.auroc(scores[labels >= 0], scores[labels < 0])
    assert 0.7 < expected < 0.95
    assert float(metric.compute()["ood/AUROC"]) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 100), max_size=5), seed=st.integers(0, 2**16))
def test_batches_in_any_split_and_order_give_the_same_bits(cuts, seed):
    torch.manual_seed(seed)
    scores, labels = make_scores()
    scores = scores.round(decimals=1)  # ties
    whole, parts = OODScores(), OODScores()
    whole.update(scores, labels)
    order = torch.randperm(len(scores))
    for index in order.tensor_split(sorted(cuts)):
        parts.update(scores[index], labels[index])
    assert whole.compute() == parts.compute()


def test_every_set_is_compared_with_the_same_inliers_and_the_mean_is_over_the_sets():
    scores, labels = make_scores()
    far = torch.randn(7) + 5
    metric = OODScores(["near", "far"])
    metric.update(scores, labels, "near")
    metric.update(far, torch.full((7,), -1), "far")
    values = metric.compute()
    assert values.keys() == {f"{s}/{m}" for s in ("near", "far", "mean") for m in METRICS}
    for name, outliers in (("near", scores[labels < 0]), ("far", far)):
        expected = oracle.auroc(scores[labels >= 0], outliers)
        assert float(values[f"{name}/AUROC"]) == pytest.approx(expected, abs=1e-12)
    for m in METRICS:
        assert float(values[f"mean/{m}"]) == pytest.approx(float(values[f"near/{m}"] + values[f"far/{m}"]) / 2)


def test_sets_without_samples_are_left_out():
    scores, labels = make_scores()
    metric = OODScores(["seen", "never"])
    metric.update(scores, labels, "seen")
    assert not any(key.startswith("never") for key in metric.compute())
    inliers, outliers = metric.gather()
    assert (len(inliers), {k: len(v) for k, v in outliers.items()}) == (60, {"seen": 40})


def test_float32_scores_keep_their_order_next_to_float64_scores():
    metric = OODScores()
    metric.update(torch.tensor([0.1, 0.2], dtype=torch.float32), torch.tensor([0, -1]))
    metric.update(torch.tensor([0.1, 0.3], dtype=torch.float64), torch.tensor([0, -1]))
    assert float(metric.compute()["ood/AUROC"]) == 1.0


def test_updates_in_inference_mode_can_be_continued_outside():
    metric = OODScores()
    scores, labels = make_scores()
    with torch.inference_mode():
        metric.update(scores[:50] * 1.0, labels[:50])
    metric.update(scores[50:], labels[50:])
    assert float(metric.compute()["ood/AUROC"]) == float(ood_metrics(scores.double(), labels)["AUROC"])
    metric.reset()
    assert metric.gather()[1] == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.update(torch.zeros(3, 1), torch.zeros(3).long()), r"scores must have shape \(B,\)"),
        (lambda m: m.update(torch.zeros(3), torch.zeros(2).long()), "one per sample"),
        (lambda m: m.update(torch.zeros(3), torch.zeros(3).long(), "svhm"), "no OOD set 'svhm'.*svhn"),
        (lambda m: (m.update(torch.zeros(3), torch.zeros(3).long()), m.compute()), "3 ID samples and 0 OOD"),
        (lambda m: (m.update(torch.full((2,), torch.nan), torch.tensor([0, -1])), m.compute()), "NaN"),
    ],
)
def test_bad_scores_are_refused_with_a_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call(OODScores(["svhn"]))


@pytest.mark.parametrize("names", [(), ("a", "a"), ("mean",), ("a/b",), ("",)])
def test_names_that_a_metric_could_not_carry_are_refused(names):
    with pytest.raises(ValueError, match="names of OOD sets"):
        OODScores(names)


def test_no_outliers_give_no_values():
    assert compare_sets(torch.zeros(3), {}) == {}


def test_rows_come_back_in_the_order_of_their_index():
    metric = FeatureRows()
    z, y = torch.randn(9, 3), torch.tensor([0, 1, -1, 2, 0, 1, -5, 2, 0])
    order = torch.randperm(9)
    for index in order.split(4):
        metric.update(z[index], y[index], index)
    rows, labels = metric.compute()
    known = y >= 0
    assert torch.equal(rows, z[known])
    assert torch.equal(labels, y[known])


def test_rows_that_are_not_finite_are_refused_and_not_kept():
    metric = FeatureRows()
    z, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    metric.update(z, y, torch.arange(4))
    z[2, 1] = torch.inf
    with pytest.raises(ValueError, match="1 of 4 samples have NaN or infinite"):
        metric.update(z, y, torch.arange(4))
    assert len(metric.compute()[0]) == 4


def test_rows_without_an_inlier_are_refused():
    metric = FeatureRows()
    metric.update(torch.randn(2, 3), torch.tensor([-1, -1]), torch.arange(2))
    with pytest.raises(ValueError, match="nothing to fit"):
        metric.compute()
