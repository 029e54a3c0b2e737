import math

import numpy as np
import oracle
import pytest
import torch
from matplotlib import pyplot
from pytorch_ood.metrics import functional
from sklearn.metrics import auc, precision_recall_curve, roc_auc_score
from torchmetrics import MetricTracker

from rmd_plugin.compare import metrics
from rmd_plugin.compare.metrics import METRICS, OODScores, aurc, compare_scores, joint_metrics


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


def test_batches_in_any_split_and_order_give_the_same_bits():
    scores, labels = make_scores()
    scores = scores.round(decimals=1)  # ties
    whole, parts = OODScores(), OODScores()
    whole.update(scores, labels)
    for index in torch.randperm(len(scores)).tensor_split([0, 3, 3, 70]):
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


def two_halves():
    """Metrics that have seen one half of the scores each, and one that has seen both."""
    scores, labels = make_scores()
    first, second, whole = OODScores(), OODScores(), OODScores()
    for metric, part in ((first, slice(0, 70)), (second, slice(70, None)), (whole, slice(None))):
        metric.update(scores[part], labels[part])
    return first, second, whole


def test_what_another_metric_has_seen_can_be_merged():
    first, second, whole = two_halves()
    first.compute()  # a value of the first half must not stay
    first.merge_state(second)
    assert first.compute() == whole.compute()
    second.reset()
    assert first.compute() == whole.compute()
    with pytest.raises(ValueError, match="far"):
        OODScores(["near"]).merge_state(OODScores(["far", "near"]))


def test_a_change_of_dtype_loses_no_digit_of_the_scores():
    _, _, whole = two_halves()
    moved = whole.clone().set_dtype(torch.float16)
    torch.nn.ModuleList([moved]).to(torch.float16)
    assert torch.equal(moved.scores[0], whole.scores[0])
    assert [state.dtype for state in (moved.scores[0], moved.groups[0])] == [torch.float64, torch.long]


def test_a_plot_shows_the_values_and_a_tracker_knows_that_higher_is_better():
    first, _, whole = two_halves()
    figure, axes = whole.plot([first.compute(), whole.compute()])
    line = next(line for line in axes.lines if line.get_label() == "ood/AUROC")
    assert line.get_ydata().tolist() == [float(metric.compute()["ood/AUROC"]) for metric in (first, whole)]
    pyplot.close(figure)
    assert MetricTracker(OODScores()).maximize


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


def test_the_area_under_the_risk_coverage_curve_is_that_of_torch_uncertainty():
    scores, errors = torch.rand(50, dtype=torch.float64), torch.rand(50) < 0.3
    # its definition: error rates of the k most confident samples over k / n, from 1 / n to 1, divided by 1 - 1 / n
    rates = [float(errors[scores.argsort()][:k].double().mean()) for k in range(1, 51)]
    area = sum((rates[k] + rates[k + 1]) / 2 / 50 for k in range(49)) / (1 - 1 / 50)
    assert float(aurc(scores, errors)) == pytest.approx(area, rel=1e-12)


def test_samples_of_one_score_count_as_in_the_mean_over_their_orders():
    coverage, risk = metrics.risk_coverage(torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([False, True, False, True]))
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == pytest.approx([0, 1 / 4, 1 / 3, 1 / 2])


def test_unknown_or_wrong_is_rated_as_the_framework_does_and_as_counted_by_hand():
    torch.manual_seed(0)
    labels, predictions = torch.randint(0, 3, (40,)), torch.randint(0, 3, (60,))
    id_scores, ood_scores = torch.randn(40), torch.randn(20) + 1
    everything, truth = torch.cat([id_scores, ood_scores]), torch.cat([labels, torch.full((20,), -1)])
    right = predictions[:40] == labels
    values = joint_metrics(id_scores, ood_scores, right)
    assert values["OSCR"] == pytest.approx(float(functional.oscr_score(everything, predictions, truth)))
    assert values["AUTC"] == pytest.approx(float(functional.autc(everything, truth)))
    errors = torch.cat([~right, torch.ones(20, dtype=torch.bool)])
    assert values["AURC-OOD"] == pytest.approx(float(aurc(everything, errors)))
    limit = id_scores.sort().values[35]  # the 36th of 40: 90 % are accepted
    wrong = int((~right & (id_scores <= limit)).sum()) + int((ood_scores <= limit).sum())
    assert values["risk90"] == pytest.approx(wrong / int((everything <= limit).sum()))
    assert joint_metrics(id_scores, ood_scores, None).keys() == {"AUTC"}
    assert "AUTC" not in joint_metrics(torch.zeros(9), torch.zeros(9), None)
