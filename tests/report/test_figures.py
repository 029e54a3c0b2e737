import math

import numpy as np
import pytest
import torch
from pytorch_ood.metrics import functional as metrics
from report_kit import auroc_row, compared, fitted, observed
from sklearn.metrics import auc

from rmd_plugin.compare.rows import make_row, make_rows
from rmd_plugin.report.figures import (
    PALETTE,
    calibration_figure,
    choose_detectors,
    colour,
    detector_style,
    epochs_figure,
    histogram_figure,
    roc_figure,
    roc_points,
    save_figure,
    set_colours,
)
from rmd_plugin.report.tables import LABELS, OURS


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_curve_is_that_of_the_framework():
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(size=300).round(1), rng.normal(1, size=200).round(1)  # with ties
    fpr, tpr = roc_points(known, unknown, points=10_000)
    labels = torch.cat([torch.zeros(300), -torch.ones(200)])
    expected = metrics.roc_curve(torch.from_numpy(np.concatenate([known, unknown])), labels)
    assert np.allclose(np.interp(expected[0], fpr, tpr), np.interp(expected[0], expected[0], expected[1]))
    thin = roc_points(known, unknown, points=20)
    assert len(thin[0]) <= 21
    assert auc(thin[0], thin[1]) == pytest.approx(auc(fpr, tpr), abs=0.02)


def test_roc_curves_are_named_with_their_auroc_and_the_rest_is_grey():
    figure = roc_figure(fitted(), compared(), detectors=["rmd"], title="t")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["blobs (near)", "noise (far)"]
    (name,) = legend(figure.axes[0])
    assert name.startswith("RMD  ")
    assert "#DADADA" in {line.get_color() for line in figure.axes[0].lines}
    values = {"knn": 0.9, "msp": 0.8, "rmd": 0.7, "mahalanobis": 0.6}  # the leader, RMD and MD are shown always
    rows = make_rows([auroc_row(name, "a", value) for name, value in values.items()])
    assert choose_detectors(rows, 3) == ["knn", "rmd", "mahalanobis"]


def test_histograms_count_every_score_name_every_set_and_mark_the_threshold():
    (axes,) = histogram_figure(fitted(), compared(), detectors=["rmd"]).axes
    assert legend(axes) == ["in-distribution", "blobs", "noise"]
    for patch in axes.patches:
        assert patch.get_data().values.sum() == pytest.approx(1.0)
    assert "dashed: 5 % false alarms" in axes.get_xlabel()
    assert "near AUROC" in axes.get_title(loc="left")


@pytest.mark.parametrize("ood", [1.0, 1e4, -1e4], ids=["near", "far above", "far below"])
def test_ood_scores_that_reach_far_do_not_squeeze_the_id_scores(ood):
    rng = np.random.default_rng(0)
    scores = {"rmd": {"test": rng.normal(700, 20, 500), "far": rng.normal(700 + ood, 20 + abs(ood) / 10, 500)}}
    (axes,) = histogram_figure(scores, detectors=["rmd"]).axes
    left, right = axes.transAxes.inverted().transform(axes.transData.transform([(660, 0), (740, 0)]))[:, 0]
    assert right - left > 0.2
    assert axes.patches[-1].get_data().values.sum() == pytest.approx(1.0)  # the far ones are in the outermost bin


@pytest.mark.parametrize(
    "values", [np.full(20, 3.0), np.array([0.0, 1e-300] * 10), np.array([1.0, np.inf, np.nan, 2.0])]
)
def test_odd_scores_are_drawn_too(values):
    scores = {"mine": {"test": values, "x": values, "none": np.array([np.nan])}}
    (axes,) = histogram_figure(scores, detectors=["mine"]).axes
    assert legend(axes) == ["in-distribution", "x"]


def test_calibration_shows_the_share_of_the_test_set_that_is_flagged():
    rng = np.random.default_rng(0)
    scores = {"rmd": {"val": rng.normal(size=999), "test": rng.normal(size=2000)}}
    (axes,) = calibration_figure(scores, compared(), detectors=["rmd"]).axes
    line = next(line for line in axes.lines if line.get_color() == colour("rmd"))
    at = int(np.flatnonzero(np.isclose(line.get_xdata(), 10.0))[0])
    threshold = np.sort(scores["rmd"]["val"])[-100]
    assert line.get_ydata()[at] == pytest.approx(100 * np.mean(scores["rmd"]["test"] > threshold))
    assert legend(axes) == ["RMD"]
    assert calibration_figure({"rmd": {"test": np.zeros(3)}}, compared(), detectors=["rmd"]) is None


def test_curves_over_epochs_stand_at_their_values_and_are_named_by_where_they_end():
    values = {"rmd": [0.8, math.nan, 0.9], "knn": [0.7, 0.75, 0.72], "mine": [0.5, 0.5, 0.5]}
    history = [observed(name, "a", epoch, value) for name, curve in values.items() for epoch, value in enumerate(curve)]
    (axes,) = epochs_figure(history, detectors=["knn", "rmd", "msp"], distances={"a": "near"}).axes
    lines = {line.get_color(): line for line in axes.lines}
    assert np.allclose(lines[colour("rmd")].get_ydata(), [80, math.nan, 90], equal_nan=True)
    assert list(lines[colour("knn")].get_xdata()) == [1, 2, 3]
    assert legend(axes) == ["RMD", "KNN"]
    assert axes.get_title(loc="left") == "a (near)"
    within = [{**row, "epoch": 0} for row in history]
    assert epochs_figure(within).axes[0].get_xlabel() == "step"


def test_every_ood_set_has_a_panel_and_their_mean_the_first():
    history = [observed("rmd", ood, epoch, 0.9) for ood in ("a", "b", "mean") for epoch in range(2)]
    assert [axes.get_title(loc="left") for axes in epochs_figure(history).axes] == ["mean over the OOD sets", "a", "b"]
    one = [row for row in history if row["ood"] != "b"]
    assert [axes.get_title(loc="left") for axes in epochs_figure(one).axes] == ["a"]  # its mean is the same curve


def test_colours_tell_ood_sets_and_detectors_apart():
    sets = set_colours({"a": "near", "b": "far", "c": "near", "d": ""})
    assert len({sets["a"], sets["b"], sets["c"]}) == 3
    styles = [str(detector_style(name)) for name in LABELS]
    assert len(set(styles)) == len(styles)
    assert len({colour(name) for name in ("rmd", "fused", "mahalanobis", "msp", "energy", "vim", "marginal")}) == 7
    assert set(OURS) <= set(LABELS)
    assert detector_style("mine") == detector_style("mine")
    assert str(detector_style("mine")) not in styles
    assert {*sets.values(), colour("mine")} <= set(PALETTE.values())


def test_equal_figures_give_equal_files_and_a_name_with_a_dollar_sign_is_a_name(tmp_path):
    rows = make_rows([make_row("b", "$x_", "n", "$y^", 0, "AUROC", 0.5)])
    for name in ("one", "two"):
        figure = roc_figure({"$y^": {"test": np.arange(9.0), "$x_": np.arange(9.0)}}, rows, title="$z$")
        save_figure(figure, tmp_path / name, formats=("png", "pdf", "svg"))
    for suffix in ("png", "pdf", "svg"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
