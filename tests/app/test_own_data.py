"""The commands on data of one's own: no OOD set at all, and the classifier that came with the features."""

import config_kit
import numpy as np
import pytest
from scipy.special import logsumexp, softmax
from scipy.stats import mannwhitneyu

from rmd_plugin.compare.rows import select
from rmd_plugin.report.page import render_report
from rmd_plugin.report.run import RunFolder


@pytest.fixture
def run(tmp_path, command):
    """Runs a command and gives back its folder and what it printed."""

    def call(name, *arguments):
        printed = command(name, "resamples=20", f"hydra.run.dir={tmp_path / 'out'}", *arguments)
        return RunFolder(tmp_path / "out"), printed

    return call


def arrays(seed=0, width=4):
    """Two classes, and OOD rows between them; the classifier looks at the second coordinate, which tells nothing."""
    rng = np.random.default_rng(seed)
    content = {}
    for key, count in (("train", 200), ("val", 100), ("test", 80)):
        labels = np.arange(count) % 2
        features = rng.normal(size=(count, width))
        features[:, 0] += 6 * labels
        content |= {f"{key}_features": features.astype(np.float32), f"{key}_labels": labels}
    ood = rng.normal(size=(60, width))
    ood[:, 0] += 3
    return content | {"near_middle": ood.astype(np.float32)}


WEIGHT, BIAS = np.array([[0, -1.0, 0, 0], [0, 2.0, 0, 0]], np.float32), np.array([0.25, -0.5], np.float32)


def logits(content):
    names = {"train_features": "train", "val_features": "val", "test_features": "test", "near_middle": "near_middle"}
    return {f"{name}_logits": content[key] @ WEIGHT.T + BIAS for key, name in names.items()}


def areas(folder, metric="AUROC"):
    return {row.detector: row for row in select(folder.read_rows(), metric=metric).itertuples()}


@pytest.mark.slow
@pytest.mark.parametrize("brought", ["weights", "logits"])
def test_detectors_on_logits_are_judged_by_the_classifier_of_the_file(run, tmp_path, brought):
    content = arrays()
    made = {"head_weight": WEIGHT, "head_bias": BIAS} if brought == "weights" else logits(content)
    np.savez(tmp_path / "a.npz", **content, **made)
    folder, out = run(
        "compare", "benchmark=features", "benchmark.path=a.npz", "detector=[msp,energy,rmd,react]", "figures=false"
    )
    outputs = {key.removesuffix("_logits"): value for key, value in logits(content).items()}
    rows = areas(folder)
    expected = {"msp": lambda x: -softmax(x, axis=1).max(1), "energy": lambda x: -logsumexp(x, axis=1)}
    for name, score in expected.items():
        statistic = mannwhitneyu(score(outputs["near_middle"]), score(outputs["test"])).statistic
        assert rows[name].value == pytest.approx(statistic / (60 * 80), abs=1e-6)
    (accuracy,) = select(folder.read_rows(), metric="ACC").itertuples()
    assert accuracy.value == pytest.approx((outputs["test"].argmax(1) == content["test_labels"]).mean())
    assert accuracy.value < 0.7  # a probe would find the classes
    assert rows["rmd"].value > 0.9
    if brought == "weights":
        assert "the backbone's own head" in out
        assert rows["react"].status == "ok"
    else:
        assert "logits of the data" in out
        assert "head=linear_probe fits one" in rows["react"].reason


def test_a_probe_can_still_be_asked_for(run, tmp_path):
    content = arrays()
    np.savez(tmp_path / "a.npz", **content, **logits(content))
    words = ["benchmark=features", "benchmark.path=a.npz", "head=linear_probe", "detector=[msp,react]", "figures=false"]
    folder, out = run("compare", *words)
    assert "linear probe" in out
    assert areas(folder)["react"].status == "ok"
    assert select(folder.read_rows(), metric="ACC").iloc[0].value > 0.95
    assert not any("untrained" in row.reason for row in folder.read_rows().itertuples())  # the features are the user's


@pytest.mark.slow
@pytest.mark.parametrize(("program", "name"), [("compare", "embeddings"), ("train", "image_folder")])
def test_the_help_explains_the_options_of_the_chosen_benchmark(command, program, name):
    out = command(program, f"benchmark={name}", flags=["--help"])
    text = (config_kit.CONF / "benchmark" / f"{name}.yaml").read_text()
    shown = out.partition("== Options of this benchmark (benchmark.name=value) ==")[2].partition("\n==")[0]
    assert shown.strip() == text[text.index("_target_") :].strip()


def without_ood(tmp_path):
    content = {key: value for key, value in arrays().items() if not key.startswith("near")}
    np.savez(tmp_path / "a.npz", **content)
    return ["benchmark=features", "benchmark.path=a.npz", "detector=[rmd,msp]"]


def check_run_without_ood(folder, out):
    rows = folder.read_rows()
    assert select(rows, metric="AUROC").empty
    assert {row.ood for row in rows.itertuples()} == {""}
    alarms = areas(folder, "false_alarms@0.05")
    assert alarms["rmd"].value < 0.2
    assert out.count("There is no OOD data, so there is no AUROC") == 1
    assert "False alarms" in out
    figures = {path.stem for path in folder.file("figures").iterdir()}
    assert figures == {"histograms", "calibration"}
    page = render_report(folder)
    assert "There is no OOD data" in page
    assert "could not be drawn" not in page
    assert "nan" not in page.lower().split("<h2>how it was made")[0].split("base64")[0]


@pytest.mark.slow
def test_a_comparison_without_any_ood_set_gives_accuracy_and_false_alarms(run, tmp_path):
    folder, out = run("compare", *without_ood(tmp_path))
    check_run_without_ood(folder, out)
    assert {path.stem for path in folder.file("detectors").iterdir()} == {"rmd", "msp"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_training_without_any_ood_set_ends_with_a_report(run, tmp_path):
    words = [*without_ood(tmp_path), "trainer.max_epochs=1", "logger=none", "callbacks.progress=null"]
    folder, out = run("train", *words, "backbone=mlp")
    check_run_without_ood(folder, out)
    assert folder.file("report.html").is_file()
