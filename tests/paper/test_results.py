"""Tables, training curves and flows as studies; figures and the document that come of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_feature_studies import make_features

from rmd_plugin.compare.rows import Row
from rmd_plugin.paper import flows, partial, robustness, simulation, spectrum, tables
from rmd_plugin.paper.document import StudySummary, comparison_table, reproduction_document, write_document
from rmd_plugin.paper.figures import make_figures, paired_figure, robustness_figure, spectrum_figure
from rmd_plugin.paper.published import CIFAR10, CIFAR100, GENOMICS, TABLES, TEXT
from rmd_plugin.paper.result import FeatureSet, FinishedRun, PaperNumber
from rmd_plugin.paper.studies import SimulationOptions
from rmd_plugin.report.style import save_figure
from rmd_plugin.report.table import to_markdown


def rows_of(md: float, rmd: float, msp: float = 0.7) -> list[Row]:
    values = {"mahalanobis": md, "rmd": rmd, "msp": msp}
    rows = [Row("b", "near set", "n", name, 0, "AUROC", value, distance="near") for name, value in values.items()]
    # a far set and another metric must not be taken for the near AUROC
    rows.insert(0, Row("b", "far set", "n", "rmd", 0, "AUROC", 0.01, distance="far"))
    return [*rows, Row("b", "", "n", "", 0, "ACC", 0.9)]


def finished(line: tuple[str, str], rows: list[Row], setting: str = "x", reason: str = "") -> FinishedRun:
    return FinishedRun(line, rows, replace(make_features(), setting=setting, reason=reason))


# -- tables -----------------------------------------------------------------------------------------------------------


def test_every_line_of_a_table_appears_with_a_number_or_a_reason():
    runs = [finished((CIFAR100, "WRN-28-10"), rows_of(0.75, 0.8), "a small net", "less data")]
    result = tables.run("table1", runs, {(CIFAR10, "WRN-28-10"): "no GPU"})
    assert {item.what for item in result.comparisons} == {f"{r.benchmark}, {r.backbone}" for r in TABLES["table1"]}
    found = {(item.what, item.metric): item for item in result.comparisons}
    ours = found[f"{CIFAR100}, WRN-28-10", "AUROC of RMD"]
    assert (ours.paper, ours.ours) == (81.01, pytest.approx(80.0))
    assert (ours.setting, ours.reason) == ("a small net", "less data")
    assert ours.difference == pytest.approx(-1.01)
    assert found[f"{CIFAR100}, WRN-28-10", "accuracy"].ours == pytest.approx(90)
    assert found[f"{CIFAR10}, WRN-28-10", "AUROC of MD"].reason == "no GPU"
    assert not found[f"{GENOMICS}, 1-D CNN", "AUROC of MD"].run


def test_a_line_that_the_table_does_not_have_is_refused():
    with pytest.raises(ValueError, match="table1 has no line CIFAR-100 vs CIFAR-10, CLIP"):
        tables.run("table1", [finished((CIFAR100, "CLIP"), [])], {})


def test_a_detector_without_a_number_is_not_run():
    result = tables.run("table1", [finished((GENOMICS, "1-D CNN"), rows_of(0.5, 0.6)[:3])], {})
    missing = [item for item in result.comparisons if item.what.startswith(GENOMICS) and item.metric == "AUROC of MSP"]
    assert len(missing) == 1
    assert not missing[0].run


# -- robustness -------------------------------------------------------------------------------------------------------


def make_curves(benchmark: str = "genomics") -> FinishedRun:
    areas = {"mahalanobis": [0.6, 0.66, 0.53], "rmd": [0.61, 0.68, 0.69], "msp": [0.6, 0.65, 0.66]}
    history = [
        {"stage": "fit", "epoch": 0, "step": 10 * (i + 1), "detector": d, "ood": o, "metric": m, "value": v}
        for d, values in areas.items()
        for i, value in enumerate(values)
        for o, m, v in (("near", "AUROC", value), ("near", "FPR95TPR", 0.3), ("mean", "AUROC", 0.1))
    ]
    accuracies = [(10, 0.7, 0.65), (20, 0.88, 0.82), (30, 0.99, 0.85)]
    features = replace(make_features(), benchmark=benchmark, backbone="cnn", ood_name="near")
    return FinishedRun(("", ""), [], features, history, accuracies)


def test_curves_are_the_auroc_of_one_set_over_the_steps():
    steps, values = robustness.auroc_curves(make_curves())["mahalanobis"]
    np.testing.assert_array_equal(steps, [10, 20, 30])
    np.testing.assert_array_equal(values, [0.6, 0.66, 0.53])


def test_robustness_compares_the_best_and_the_last_of_md_with_the_paper():
    found = {item.metric: item for item in robustness.run([make_curves()]).comparisons}
    assert found["best AUROC of MD while training"].ours == pytest.approx(66)
    assert found["best AUROC of MD while training"].paper == TEXT["robustness/md_early"]
    assert found["AUROC of MD at the end"].ours == pytest.approx(53)
    assert found["AUROC of RMD at the end"].ours == pytest.approx(69)
    assert math.isnan(found["AUROC of RMD at the end"].paper)
    # the accuracies belong to the step of MD's best
    assert found["held-out accuracy at the best AUROC of MD"].ours == pytest.approx(82)
    assert found["training accuracy at the end"].ours == pytest.approx(99)


def test_robustness_on_another_benchmark_claims_no_number_of_the_paper():
    assert all(math.isnan(item.paper) for item in robustness.run([make_curves("digits")]).comparisons)


# -- flows ------------------------------------------------------------------------------------------------------------


def test_untrained_flows_give_the_gaussian_ranking():
    """With no epoch the flows are the Gaussians they start from, so the AUROC are equal."""
    result = flows.run([make_features()], {"max_epochs": 0})
    found = {row.detector: row.value for row in result.rows}
    assert found["flow_likelihood"] == pytest.approx(found["mahalanobis"], abs=2e-3)
    assert found["relative_flow"] == pytest.approx(found["rmd"], abs=2e-3)


def test_the_flows_are_those_of_the_paper_whatever_the_defaults(monkeypatch):
    """A flow for each class, one for the background, in all 12 directions."""
    reports, rate = {}, FeatureSet.rate

    def watch(features, detector):
        if hasattr(detector, "training_report"):
            report = [row["flow"] for row in detector.training_report()]
            reports[type(detector).__name__] = report, detector.coordinates(features.test).shape[1]
        return rate(features, detector)

    monkeypatch.setattr(FeatureSet, "rate", watch)
    flows.run([make_features()], {"max_epochs": 0})
    assert reports == {"FlowLikelihood": ([0, 1, 2, 3], 12), "RelativeFlow": ([0, 1, 2, 3, "background"], 12)}


# -- figures ----------------------------------------------------------------------------------------------------------


def toy_results():
    features = make_features()
    toy = SimulationOptions(
        dim=16, n_train=100, n_test=40, seeds=1, sweep_dims=[4, 16], sweep_sigmas=[0.2, 0.6], sweep_seeds=2,
        sweep_n_train=100, network_width=16, network_seeds=1,
    )  # fmt: skip
    runs = [finished((CIFAR100, "WRN-28-10"), rows_of(0.75, 0.8), "a small net")]
    return {
        "simulation": simulation.run(toy),
        "spectrum": spectrum.run([features]),
        "partial": partial.run([features]),
        "flows": flows.run([features], {"max_epochs": 0}),
        "robustness": robustness.run([make_curves()]),
        "table1": tables.run("table1", runs, {}),
    }


@pytest.fixture(scope="module")
def results():
    return toy_results()


@pytest.mark.slow
@pytest.mark.parametrize("study", ["simulation", "spectrum", "partial", "flows", "robustness", "table1"])
def test_every_study_gives_rows_a_table_and_pictures(results, study, tmp_path):
    result = results[study]
    assert result.rows
    assert "| paper | ours | difference |" in to_markdown(comparison_table(result.comparisons)).replace("---:", "")
    figures = make_figures(result)
    assert figures
    for stem, (figure, caption) in figures.items():
        assert caption
        for path in save_figure(figure, tmp_path / stem, formats=("png",)):
            assert path.stat().st_size > 5_000
        # every panel says what its horizontal axis is, itself or through the one below
        for axes in figure.axes:
            shared = [other.get_xlabel() for other in axes.get_shared_x_axes().get_siblings(axes)]
            assert any(shared) or study == "spectrum"


def test_a_number_outside_the_picture_does_not_happen(results):
    """The scale of the table's figure holds every number of the paper and of ours."""
    figure = make_figures(results["table1"])["table1"][0]
    low, high = figure.axes[0].get_xlim()
    numbers = [n for item in results["table1"].comparisons if "AUROC" in item.metric for n in (item.paper, item.ours)]
    assert all(low <= number <= high for number in numbers if not math.isnan(number))


def boxes(texts):
    return [text.get_window_extent() for text in texts if text.get_text()]


def test_names_of_lines_stay_beside_their_panel_and_apart_from_each_other():
    """All lines end at the top, where the names have the least room."""
    run = make_curves()
    high = [{**row, "value": 0.99 + row["value"] / 100} for row in run.history]
    curves = robustness.auroc_curves(replace(run, history=high))
    accuracy = {"accuracy": np.array([[1, 2], [0.1, 1.0], [0.1, 1.0]])}
    figure = robustness_figure({name: {**accuracy, **curves} for name in ("a", "b")})
    figure.draw_without_rendering()
    assert [len(axes.texts) for axes in figure.axes] == [2, 2, 3, 3]
    every = [box for axes in figure.axes for box in boxes(axes.texts)]
    assert not any(one.overlaps(other) for k, one in enumerate(every) for other in every[:k])
    for axes in figure.axes:
        panel = axes.get_window_extent()
        for box in boxes(axes.texts):
            assert panel.y0 - 1 <= box.y0 < box.y1 <= panel.y1 + 1
            assert panel.x1 < box.x0 < box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("threshold", [1, 60, 190])
def test_the_names_of_the_colours_never_stand_on_the_line_of_the_threshold(threshold):
    """Wherever it is: for EfficientNet it is at the right, where a legend would be."""
    curve = np.linspace(1, 2, 200)
    kinds = [f"{name}/{kind}" for name in ("mahalanobis", "rmd") for kind in ("id", "ood")]
    arrays = {f"{key}/{part}": curve for key in kinds for part in ("mean", "low", "high", "scores")}
    areas = {"mahalanobis": 0.5, "rmd": 0.6}
    figure = spectrum_figure({**arrays, "threshold": np.array(threshold)}, "a title", areas, order="variance")
    figure.draw_without_rendering()
    upper, _, lower, _ = figure.axes
    legend, title = upper.get_legend().get_window_extent(), upper._left_title.get_window_extent()
    assert legend.y0 >= upper.get_window_extent().y1 - 1
    assert not legend.overlaps(title)
    (note,) = boxes(lower.texts)
    panel = lower.get_window_extent()
    assert panel.x0 <= note.x0 < note.x1 <= panel.x1


def test_lines_cross_in_the_figure_of_a_table_exactly_if_the_order_changes(results):
    comparisons = [item for item in results["table1"].comparisons if item.run and "AUROC" in item.metric]
    names = {"AUROC of MD": "mahalanobis", "AUROC of RMD": "rmd", "AUROC of MSP": "msp"}
    for change, words in ((0, "= same order"), (30, "≠ other order")):
        moved = [replace(item, ours=item.paper - change * (item.metric == "AUROC of RMD")) for item in comparisons]
        figure = paired_figure(moved, names, "title")
        figure.draw_without_rendering()
        (axes,) = figure.axes
        ends = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2 and line.get_alpha()]
        crossing = any((a[0] - b[0]) * (a[1] - b[1]) < 0 for a in ends for b in ends)
        assert crossing == (change > 0)
        assert [text.get_text() for text in axes.texts][1] == words
        every = boxes(axes.texts)
        assert not any(one.overlaps(other) for k, one in enumerate(every) for other in every[:k])
        assert all(box.x1 <= figure.bbox.x1 for box in every)


# -- the document -----------------------------------------------------------------------------------------------------


def make_summary(**changes) -> StudySummary:
    comparisons = [
        PaperNumber("A", "AUROC of RMD", 81.0, 80.5, 0.2, "a small net", "less data"),
        PaperNumber("A", "AUROC of MD", 75.0, 76.0, setting="a small net", reason="less data"),
        PaperNumber("B", "AUROC of RMD", 90.0, reason="no weights"),
        PaperNumber("A", "leading directions (of 12)", 120, 3, setting="a small net", reason="less data"),
    ]
    values = {
        "study": "table1",
        "about": "Table 1",
        "scale": "small",
        "comparisons": comparisons,
        "figures": {"picture": "A picture"},
        "commands": {"B": "rmd-train benchmark=b"},
        "command": "rmd-reproduce study=table1",
        "seconds": 61.0,
    }
    return StudySummary(**{**values, **changes})


def test_the_table_shows_paper_ours_and_difference():
    text = to_markdown(comparison_table(make_summary().comparisons))
    assert "| A | AUROC of RMD | 81.00 | 80.50 ± 0.20 | -0.50 | a small net. less data |" in text
    assert "| A | AUROC of MD | 75.00 | 76.00 | +1.00 |  |" in text  # the remark is not said twice
    assert "| B | AUROC of RMD | 90.00 | not run |  | not run: no weights |" in text
    assert "| 120 | 3 | -117 |" in text  # a count is no percentage


def test_a_summary_reads_back_as_it_was_written(tmp_path):
    summary = make_summary()
    summary.write(tmp_path)
    back = StudySummary.read(tmp_path)
    assert [c.metric for c in back.comparisons] == [c.metric for c in summary.comparisons]
    assert math.isnan(back.comparisons[2].ours)
    assert back.comparisons[0] == summary.comparisons[0]
    assert back.figures == summary.figures


def test_a_damaged_summary_is_named(tmp_path):
    (tmp_path / "study.json").write_text('{"study": 1}')
    with pytest.raises(ValueError, match=r"study\.json does not hold"):
        StudySummary.read(tmp_path)


def test_the_document_claims_only_what_was_run():
    text = reproduction_document([make_summary()], {"picture": "docs/picture.png"})
    assert "3 published numbers have one of ours beside them; 1 were not run here" in text
    assert "Ready, not run here:\n\n- B: `rmd-train benchmark=b`" in text
    assert "![A picture](docs/picture.png)" in text
    assert "`rmd-train" not in text.replace("- B: `rmd-train", "")


def test_the_document_brings_its_pictures(tmp_path):
    folder = tmp_path / "run" / "table1"
    folder.mkdir(parents=True)
    make_summary().write(folder)
    (folder / "picture.png").write_bytes(b"png")
    path = write_document(tmp_path / "R.md", [folder, tmp_path / "absent"])
    assert "](reproduction/picture.png)" in path.read_text()
    assert (tmp_path / "reproduction" / "picture.png").read_bytes() == b"png"


def test_a_document_about_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no study was run yet"):
        write_document(tmp_path / "R.md", [tmp_path])
