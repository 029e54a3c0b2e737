import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib import rcParams
from matplotlib.colors import to_hex
from pytorch_ood.metrics import functional as metrics

from rmd_plugin.compare.rows import Row
from rmd_plugin.report.figures import (
    auroc_figure,
    calibration_figure,
    choose_detectors,
    histogram_figure,
    roc_figure,
    roc_points,
    set_colours,
)
from rmd_plugin.report.scores import read_scores, write_scores
from rmd_plugin.report.style import CYCLE, PALETTE, colour, new_figure, save_figure

SETS = {"six": "near", "noise": "far"}
DETECTORS = ("msp", "rmd", "mahalanobis", "knn")


@pytest.fixture(scope="module")
def scores():
    rng = np.random.default_rng(0)
    return {
        name: {"test": rng.normal(size=300), "six": rng.normal(1 + k, size=200), "noise": rng.normal(4, size=100)}
        for k, name in enumerate(DETECTORS)
    }


@pytest.fixture(scope="module")
def rows(scores):
    found = []
    for detector, sets in scores.items():
        for name, distance in SETS.items():
            value = area(*roc_points(sets["test"], sets[name]))
            found.append(Row("d", name, "b", detector, 0, "AUROC", value, distance=distance, low=value - 0.1, high=1.0))
    return found


def area(fpr, tpr):
    return float(torch.trapezoid(torch.as_tensor(tpr), torch.as_tensor(fpr)))


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_the_curve_is_that_of_the_framework(scores):
    known, unknown = scores["msp"]["test"], scores["msp"]["six"]
    fpr, tpr = roc_points(known, unknown, points=10_000)
    labels = torch.cat([torch.zeros(len(known)), -torch.ones(len(unknown))])
    expected = metrics.roc_curve(torch.from_numpy(np.concatenate([known, unknown])), labels)
    assert np.allclose(np.interp(expected[0], fpr, tpr), np.interp(expected[0], expected[0], expected[1]))
    assert area(fpr, tpr) == pytest.approx(
        float(metrics.auroc(torch.from_numpy(np.concatenate([known, unknown])), labels))
    )


def test_a_thinned_curve_keeps_its_area_and_its_ends():
    rng = np.random.default_rng(1)
    known, unknown = rng.normal(size=5000), rng.normal(2, size=5000)
    whole, thin = roc_points(known, unknown, points=10**6), roc_points(known, unknown)
    assert len(thin[0]) <= 400
    assert area(*thin) == pytest.approx(area(*whole), abs=1e-3)
    assert (thin[0][0], thin[1][0], thin[0][-1], thin[1][-1]) == (0, 0, 1, 1)


def test_tied_scores_make_one_straight_piece():
    fpr, tpr = roc_points(np.zeros(10), np.zeros(20))
    assert fpr.tolist() == [0, 1]
    assert tpr.tolist() == [0, 1]


def test_rmd_and_md_are_shown_even_if_others_are_better(rows):
    assert set(choose_detectors(rows, 2)) == {"rmd", "mahalanobis"}
    assert choose_detectors(rows, 3) == ["knn", "mahalanobis", "rmd"]


def test_curves_are_named_in_place_with_their_auroc_and_the_rest_is_grey(scores, rows):
    figure = roc_figure(scores, rows, detectors=["rmd", "knn"], title="t")
    near, far = figure.axes
    assert near.get_title(loc="left") == "six (near)"
    value = next(row.value for row in rows if row.detector == "rmd" and row.ood == "six")
    assert f"RMD  {100 * value:.1f}" in texts(near)
    colours = [to_hex(line.get_color()).upper() for line in far.lines]
    assert colours.count("#DADADA") == 2
    assert {colour("rmd"), colour("knn")} <= set(colours)


def test_histograms_count_every_score_and_name_every_set(scores, rows):
    figure = histogram_figure(scores, rows, detectors=["rmd"])
    (axes,) = figure.axes
    assert set(texts(axes)) == {"in-distribution", "six", "noise"}
    assert all(patch.get_data().values.sum() == pytest.approx(1) for patch in axes.patches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_names_in_a_histogram_lie_on_no_curve_and_on_no_other_name(seed):
    rng = np.random.default_rng(seed)
    shapes = {"test": rng.gamma(1.0, 1.0, 300), "six": rng.normal(3, 2, 300), "noise": rng.normal(1.5, 0.7, 300)}
    mixed = {name: {key: values * (-1) ** k for key, values in shapes.items()} for k, name in enumerate(DETECTORS)}
    mine = [Row("d", name, "b", d, 0, "AUROC", 0.5, distance=far) for d in DETECTORS for name, far in SETS.items()]
    figure = histogram_figure(mixed, mine, detectors=DETECTORS)
    figure.canvas.draw()
    for axes in figure.axes[: len(DETECTORS)]:
        boxes = [text.get_window_extent().transformed(axes.transData.inverted()) for text in axes.texts]
        assert len(boxes) == 3
        (left, right), (_, top) = axes.get_xlim(), axes.get_ylim()
        for place, box in enumerate(boxes):
            assert left <= box.x0 < box.x1 <= right
            assert box.y1 <= top
            assert not any(box.overlaps(other) for other in boxes[:place])
            for curve in axes.patches:
                heights, edges, _ = curve.get_data()
                below = (edges[1:] > box.x0) & (edges[:-1] < box.x1)
                assert heights[below].max() <= box.y0


def test_wild_scores_do_not_squeeze_the_histogram(scores, rows):
    wild = {"rmd": {**scores["rmd"], "six": np.append(scores["rmd"]["six"], [1e30, np.inf])}}
    (axes,) = histogram_figure(wild, rows, detectors=["rmd"]).axes
    assert axes.get_xlim()[1] < 100


def test_constant_scores_are_drawn_too(rows):
    constant = {"rmd": {"test": np.ones(5), "six": np.ones(5), "noise": np.ones(5)}}
    assert len(histogram_figure(constant, rows, detectors=["rmd"]).axes) == 1


def test_sets_without_a_number_are_left_out_and_rows_are_not_needed(scores):
    mine = {"test": scores["rmd"]["test"], "empty": np.empty(0), "six": scores["rmd"]["six"], "bad": np.full(3, np.nan)}
    (axes,) = histogram_figure({"mine": mine}, detectors=["mine"]).axes
    assert set(texts(axes)) == {"in-distribution", "six"}
    (axes,) = histogram_figure({"mine": {"test": np.full(2, np.nan)}}, detectors=["mine"]).axes
    assert texts(axes) == []


def test_names_of_sets_do_not_overlap(scores, rows):
    same = {"rmd": {"test": scores["rmd"]["test"], "six": scores["rmd"]["test"], "noise": scores["rmd"]["test"]}}
    figure = histogram_figure(same, rows, detectors=["rmd"])
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


def test_every_detector_has_a_line_with_its_interval(rows):
    figure = auroc_figure(rows, "title")
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["KNN", "MD", "RMD", "MSP"]
    assert axes.get_legend_handles_labels()[1] == ["six (near)", "noise (far)"]
    assert len(axes.collections) == 2


def test_a_row_without_interval_is_a_point_alone(rows):
    bare = [Row(r.benchmark, r.ood, r.backbone, r.detector, 0, r.metric, r.value, distance=r.distance) for r in rows]
    (axes,) = auroc_figure(bare).axes
    assert axes.get_xlabel() == "AUROC (%)"
    assert math.isnan(bare[0].low)


def test_a_colour_belongs_to_a_distance_and_comes_from_the_palette():
    colours = set_colours({"a": "near", "b": "far", "c": "near", "d": ""})
    assert len({colours["a"], colours["b"], colours["c"]}) == 3
    assert set(colours.values()) <= set(PALETTE.values())


def test_the_palette_stays_distinct_for_every_kind_of_colour_vision():
    # Machado et al. 2009, severity 1: how protan, deutan and tritan observers see linear RGB
    views = {
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    colours = np.array([[int(code[k : k + 2], 16) / 255 for k in (1, 3, 5)] for code in CYCLE])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    for matrix in views.values():
        seen = np.clip(linear @ np.array(matrix).T, 0, 1) ** (1 / 2.4)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=2) + 10 * np.eye(len(seen))
        assert apart.min() > 0.1


def test_files_are_equal_for_equal_figures_and_settings_are_left_alone(tmp_path):
    def draw(stem):
        figure = new_figure((2, 1))
        figure.text(0.1, 0.1, "text")
        return save_figure(figure, stem)

    before = dict(rcParams)
    first, second = draw(tmp_path / "one"), draw(tmp_path / "two")
    assert [path.name for path in first] == ["one.png", "one.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert dict(rcParams) == before


def test_figures_do_not_import_pyplot():
    code = "import sys, rmd_plugin.report.figures; sys.exit(bool({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_scores_come_back_from_disk(scores, tmp_path):
    write_scores(scores, tmp_path / "scores.npz")
    back = read_scores(tmp_path / "scores.npz")
    assert list(back) == list(scores)
    assert np.array_equal(back["rmd"]["six"], scores["rmd"]["six"].astype(np.float32))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04broken"])
def test_a_file_without_scores_is_refused(content, tmp_path):
    path = tmp_path / "scores.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not hold scores"):
        read_scores(path)


def test_an_archive_of_other_arrays_or_objects_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", features=np.ones(3))
    np.savez(tmp_path / "object.npz", **{"a//b": np.array([print], dtype=object)})
    for name, complaint in (("other", "array 'features'"), ("object", "unpickled")):
        with pytest.raises(ValueError, match=complaint):
            read_scores(tmp_path / f"{name}.npz")


def test_the_threshold_stands_in_the_histogram(scores, rows):
    level = [*rows, Row("d", "", "b", "rmd", 0, "false_alarms@0.05", 0.04)]
    marked = [*level, Row("d", "", "b", "rmd", 0, "threshold@0.05", 1.64)]
    axes = histogram_figure(scores, marked, detectors=["rmd"]).axes[0]
    assert any(list(line.get_xdata()) == [1.64, 1.64] for line in axes.lines)
    assert axes.get_xlabel().endswith("dashed: 5 % false alarms")
    beyond = [*level, Row("d", "", "b", "rmd", 0, "threshold@0.05", 1e9)]
    assert "dashed" not in histogram_figure(scores, beyond, detectors=["rmd"]).axes[0].get_xlabel()


def test_calibration_shows_the_share_of_the_test_set_that_is_flagged(scores, rows):
    held_out = {"val": np.random.default_rng(1).normal(size=99)}
    both = {name: {**sets, **held_out} for name, sets in scores.items()}
    axes = calibration_figure(both, rows, detectors=["rmd", "knn"]).axes[0]
    line = next(line for line in axes.lines if line.get_color() == colour("rmd"))
    asked, found = line.get_data()
    at = np.flatnonzero(np.isclose(asked, 10.0))[0]
    # p <= 10 % where at most 9 of the 99 reach the score, the test sample being the tenth of a hundred
    threshold = np.sort(held_out["val"])[-10]
    assert found[at] == pytest.approx(100 * np.mean(scores["rmd"]["test"] > threshold))
    assert calibration_figure(scores, rows) is None


@pytest.mark.slow
def test_the_band_holds_what_exchangeable_data_give():
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(40):
        drawn = {"rmd": {"test": rng.normal(size=200), "val": rng.normal(size=200)}}
        axes = calibration_figure(drawn, detectors=["rmd"]).axes[0]
        asked, found = next(line for line in axes.lines if line.get_color() == colour("rmd")).get_data()
        # the edge of the band, down one side and up the other
        corners = axes.collections[0].get_paths()[0].vertices
        edges = corners[np.isclose(corners[:, 0], 10.0), 1]
        inside.append(edges.min() <= found[np.isclose(asked, 10.0)][0] <= edges.max())
    assert sum(inside) >= 34  # of 40 at 95 %: fewer than one in 1,000 times
