import math

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import auc, precision_recall_curve, roc_auc_score

from rmd_plugin.compare.metrics import METRICS, FeatureRows, OODScores, compare_scores


def make_scores(n_id=60, n_ood=40, scale=1.0):
    scores = scale * torch.cat([torch.randn(n_id), torch.randn(n_ood) + 1.2])
    return scores, torch.cat([torch.arange(n_id) % 5, -1 - torch.arange(n_ood) % 3])


def test_the_metrics_are_those_of_the_textbook():
    scores, labels = make_scores()
    values = compare_scores(scores[labels >= 0], scores[labels < 0])
    assert tuple(values) == METRICS
    is_ood = (labels < 0).numpy()
    assert float(values["AUROC"]) == pytest.approx(oracle.auroc(scores[labels >= 0], scores[labels < 0]), abs=1e-12)
    assert float(values["AUROC"]) == pytest.approx(roc_auc_score(is_ood, scores), abs=1e-12)
    for name, positive, sign in (("AUPR-OUT", is_ood, 1), ("AUPR-IN", ~is_ood, -1)):
        precision, recall, _ = precision_recall_curve(positive, sign * scores.numpy())
        assert float(values[name]) == pytest.approx(auc(recall, precision), abs=1e-12)
    # the largest threshold that 95 % of the OOD samples reach
    threshold = np.sort(scores[labels < 0].numpy())[::-1][math.ceil(0.95 * is_ood.sum()) - 1]
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


def test_every_set_is_compared_with_the_same_id_samples_and_the_mean_is_over_the_sets():
    scores, labels = make_scores()
    far = torch.randn(7) + 5
    metric = OODScores(["near", "far"])
    metric.update(scores, labels, "near")
    metric.update(far, torch.full((7,), -1), "far")
    values = metric.compute()
    assert values.keys() == {f"{s}/{m}" for s in ("near", "far", "mean") for m in METRICS}
    for name, ood_scores in (("near", scores[labels < 0]), ("far", far)):
        expected = oracle.auroc(scores[labels >= 0], ood_scores)
        assert float(values[f"{name}/AUROC"]) == pytest.approx(expected, abs=1e-12)
    for m in METRICS:
        assert float(values[f"mean/{m}"]) == pytest.approx(float(values[f"near/{m}"] + values[f"far/{m}"]) / 2)


def test_sets_without_samples_are_left_out():
    scores, labels = make_scores()
    metric = OODScores(["seen", "never"])
    metric.update(scores, labels, "seen")
    assert not any(key.startswith("never") for key in metric.compute())
    id_scores, ood_scores = metric.gather()
    assert (len(id_scores), {k: len(v) for k, v in ood_scores.items()}) == (60, {"seen": 40})


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
    expected = compare_scores(scores[labels >= 0].double(), scores[labels < 0].double())
    assert float(metric.compute()["ood/AUROC"]) == float(expected["AUROC"])
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


def test_a_side_without_samples_is_refused():
    with pytest.raises(ValueError, match="0 ID samples and 3 OOD samples"):
        compare_scores(torch.zeros(0), torch.zeros(3))


def test_rows_come_back_in_the_order_of_their_index():
    metric = FeatureRows()
    z, y = torch.randn(9, 3), torch.tensor([0, 1, -1, 2, 0, 1, -5, 2, 0])
    order = torch.randperm(9)
    for index in order.split(4):
        metric.update(z[index], y[index], index)
    rows, labels = metric.compute()
    is_id = y >= 0
    assert torch.equal(rows, z[is_id])
    assert torch.equal(labels, y[is_id])


def test_rows_that_are_not_finite_are_refused_and_not_kept():
    metric = FeatureRows()
    z, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    metric.update(z, y, torch.arange(4))
    z[2, 1] = torch.inf
    with pytest.raises(ValueError, match="1 of 4 samples have NaN or infinite"):
        metric.update(z, y, torch.arange(4))
    assert len(metric.compute()[0]) == 4


def test_rows_without_an_id_sample_are_refused():
    metric = FeatureRows()
    metric.update(torch.randn(2, 3), torch.tensor([-1, -1]), torch.arange(2))
    with pytest.raises(ValueError, match="nothing to fit"):
        metric.compute()
