import math
import pickle
from copy import deepcopy

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.figure import Figure
from sklearn.metrics import auc, precision_recall_curve, roc_auc_score
from torchmetrics import MetricCollection

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


def two_halves():
    """Metrics that have seen one half of the scores each, and one that has seen both."""
    scores, labels = make_scores()
    first, second, whole = OODScores(), OODScores(), OODScores()
    for metric, part in ((first, slice(0, 70)), (second, slice(70, None)), (whole, slice(None))):
        metric.update(scores[part], labels[part])
    return first, second, whole


@pytest.mark.parametrize("kind", ["metric", "lists", "tensors"])
@pytest.mark.parametrize("options", [{}, {"dist_sync_on_step": True}])
def test_what_another_metric_has_seen_can_be_merged(kind, options):
    first, second, whole = two_halves()
    merged = OODScores(**options)
    for part in (first, second):
        merged.merge_state(
            {
                "metric": part,
                "lists": part.metric_state,
                "tensors": {name: torch.cat(state).to(torch.float32) for name, state in part.metric_state.items()},
            }[kind]
        )
        computed = merged.compute() if part is second else None  # a value of the first half must not stay
    assert merged.update_count == 2
    assert computed == whole.compute()
    assert [state.dtype for state in (merged.scores[0], merged.groups[0])] == [torch.float64, torch.long]
    first.compute()
    first.merge_state(second)
    assert first.compute() == whole.compute()
    first.merge_state(OODScores())
    assert first.compute() == whole.compute()
    second.reset()
    assert first.compute() == whole.compute()


def test_what_does_not_fit_is_not_merged():
    metric = OODScores(["near"])
    with pytest.raises(ValueError, match="sets near, but those to merge are of far, near"):
        metric.merge_state(OODScores(["far", "near"]))
    with pytest.raises(ValueError, match="expected another OODScores, or a dict with its states, got FeatureRows"):
        metric.merge_state(FeatureRows())
    with pytest.raises(ValueError, match="expected the states scores, groups of OODScores, got scores"):
        metric.merge_state({"scores": []})


def test_a_forward_pass_gives_the_value_of_its_batch_and_keeps_all():
    scores, labels = make_scores()
    order = torch.randperm(len(scores))
    metric = OODScores()
    for part in order.split(50):
        batch = OODScores()
        batch.update(scores[part], labels[part])
        assert metric(scores[part], labels[part]) == batch.compute()
    whole = OODScores()
    whole.update(scores, labels)
    assert metric.compute() == whole.compute()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_change_of_dtype_loses_no_digit_of_the_scores(dtype):
    _, _, whole = two_halves()
    moved = whole.clone().set_dtype(dtype)
    torch.nn.ModuleList([moved]).to(dtype)
    assert torch.equal(moved.scores[0], whole.scores[0])
    assert [state.dtype for state in (moved.scores[0], moved.groups[0])] == [torch.float64, torch.long]


@pytest.mark.parametrize("copy", [OODScores.clone, deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_a_copy_goes_its_own_way(copy):
    first, _, whole = two_halves()
    twin, value = copy(whole), whole.compute()
    assert twin.ood == whole.ood
    assert twin.compute() == value
    twin.merge_state(first)
    assert twin.compute() != value
    assert whole.compute() == value
    assert hash(whole) != hash(twin)


def test_states_are_saved_only_if_they_are_made_persistent():
    _, _, whole = two_halves()
    assert whole.state_dict() == {}
    whole.persistent(True)
    loaded = OODScores()
    loaded.persistent(True)
    loaded.load_state_dict(whole.state_dict())
    with pytest.warns(UserWarning, match="before the ``update`` method"):  # torchmetrics does not save the count
        assert loaded.compute() == whole.compute()


def test_a_metric_without_data_warns_and_says_what_is_missing():
    metric = OODScores()
    with pytest.warns(UserWarning, match="before the ``update`` method"), pytest.raises(ValueError, match="0 OOD"):
        metric.compute()


def test_a_collection_names_the_values_of_each_detector():
    scores, labels = make_scores()
    collection = MetricCollection({"rmd": OODScores(["svhn"]), "md": OODScores(["svhn"])}, prefix="val/")
    collection.update(scores, labels)
    values = collection.compute()
    assert len(values) == 16
    assert float(values["val/rmd_svhn/AUROC"]) == float(values["val/md_svhn/AUROC"])
    collection.reset()
    assert collection(scores, labels) == values


def test_a_plot_shows_the_values_and_a_sequence_of_them_over_steps():
    first, _, whole = two_halves()
    figure, axes = whole.plot()
    assert axes.get_figure() is figure
    assert axes.get_title()
    names = {text.get_text() for text in axes.get_legend().get_texts()}
    assert names == set(whole.compute())
    drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert {name: float(drawn[name][0]) for name in names} == {k: float(v) for k, v in whole.compute().items()}
    assert axes.get_ylim()[0] < 0
    assert axes.get_ylim()[1] > 1
    values = [first.compute(), whole.compute()]
    own = Figure().subplots()
    assert whole.plot(values, ax=own) == (None, own)
    assert own.get_xlabel() == "Step"
    line = next(line for line in own.lines if line.get_label() == "ood/AUROC")
    assert line.get_ydata().tolist() == [float(value["ood/AUROC"]) for value in values]
    assert len({(line.get_color(), line.get_marker()) for line in own.lines}) == len(whole.compute())
    pyplot.close(figure)


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
