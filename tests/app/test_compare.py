"""``rmd-compare`` as a user runs it; most runs share this process, because torch takes seconds to import."""

import json
import os
import signal
import time

import config_kit
import numpy as np
import pandas as pd
import pytest
import torch
from config_kit import ROOT
from omegaconf import OmegaConf
from safetensors.torch import load_file
from sklearn import metrics

from rmd_plugin import Calibrated
from rmd_plugin.app.parts import make_benchmark
from rmd_plugin.compare.adapters import parameters_of
from rmd_plugin.compare.rows import read_rows, select
from rmd_plugin.report.run import RunFolder
from rmd_plugin.report.tables import LABELS, OURS

GROUPS = ("all", "baselines", "common", "flows", "gaussian", "ours", "paper")
TINY = ["benchmark=simulation", "benchmark.dim=8", "limit_train=200", "resamples=20", "figures=false"]


@pytest.fixture
def run(tmp_path, command):
    """Runs the command and gives back its folder and what it printed, with another code its error."""

    def call(*arguments, name="out", tiny=True, **options):
        words = [*(TINY if tiny else ()), f"hydra.run.dir={tmp_path / name}", *arguments]
        return RunFolder(tmp_path / name), command("compare", *words, **options)

    return call


def test_the_openood_format_has_the_numbers_of_openoods_definitions(run):
    folder, _ = run("benchmark.ood_means=[-1.5,1.5]", "detector=[rmd]", "format=openood")
    table = pd.read_csv(folder.file("openood/rmd.csv"), index_col=0)
    assert list(table.columns) == ["FPR@95", "AUROC", "AUPR_IN", "AUPR_OUT", "ACC"]
    assert list(table.index) == ["shifted", "nearood"]
    scores = folder.read_scores()["rmd"]
    score = np.concatenate([scores["test"], scores["shifted"]])
    is_ood = np.arange(len(score)) >= len(scores["test"])
    fpr, tpr, _ = metrics.roc_curve(is_ood, score)
    precision_in, recall_in, _ = metrics.precision_recall_curve(~is_ood, -score)
    precision_out, recall_out, _ = metrics.precision_recall_curve(is_ood, score)
    expected = [
        fpr[np.argmax(tpr >= 0.95)],
        metrics.auc(fpr, tpr),
        metrics.auc(recall_in, precision_in),
        metrics.auc(recall_out, precision_out),
        select(folder.read_rows(), metric="ACC")["value"].iloc[0],
    ]
    assert 0.1 < expected[0] < 0.9
    np.testing.assert_allclose(table.loc["nearood"], 100 * np.array(expected), atol=0.0051)
    _, error = run("format=csv", code=1)
    assert "format" in error


def members(choice):
    """Detectors that a choice stands for, read from the files: composing all of them takes a second."""
    config = OmegaConf.load(ROOT / "conf" / "detector" / f"{choice}.yaml")
    if "defaults" not in config:
        return dict(config)
    return {name: node for item in config.defaults for name, node in members(item).items()}


# -- choices ------------------------------------------------------------------------------------------------------


def test_all_is_every_detector_there_is_but_those_that_take_minutes():
    paper = {"mahalanobis", "rmd", "msp", "partial", "marginal", "flow_likelihood", "relative_flow"}
    assert set(members("paper")) == paper
    files = {path.stem for path in (ROOT / "conf" / "detector").glob("*.yaml")} - set(GROUPS)
    assert set(members("all")) == files - {"mcd", *members("flows")}
    assert set(members("ours")) == set(OURS) == {*members("gaussian"), *members("flows")}
    assert set(OURS) <= files
    assert files == set(LABELS)


def test_every_detector_config_has_one_key_of_its_own_name_and_a_class_with_those_options():
    import inspect

    from hydra.utils import get_class

    for path in (ROOT / "conf" / "detector").glob("*.yaml"):
        if path.stem in GROUPS:
            continue
        (name,) = node = OmegaConf.load(path)
        assert name == path.stem
        parameters = parameters_of(get_class(node[name]._target_))
        # of the framework's detectors on inner layers, the adapters know which layers
        known = set(parameters) | ({"layers"} if name in ("gram", "rankfeat", "multi_mahalanobis") else set())
        assert {key for key in node[name] if key != "_target_"} <= known, name
        assert path.read_text().startswith(f"# rmd-compare detector=[{name}]")
        for key in node[name].keys() & parameters.keys() if name in OURS else ():
            assert parameters[key].default in (node[name][key], inspect.Parameter.empty), key


def test_every_framework_detector_has_a_config():
    from pytorch_ood import detector as framework

    targets = {node._target_ for node in {**members("all"), **members("mcd")}.values()}
    classes = {name for name in framework.__all__ if name != "odin_preprocessing"} | {"MaxSoftmax"}
    assert {f"pytorch_ood.detector.{name}" for name in classes} <= targets


# -- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_writes_rows_tables_scores_and_pictures(run):
    folder, out = run("detector=[rmd,mahalanobis,msp]", "figures=true", "resamples=50", "+tracker.api_key=abc123")
    for name in ("report.html", "config.yaml", "versions.json"):
        assert "abc123" not in folder.file(name).read_text()  # nobody finds a secret in what is shared
    rows = folder.read_rows()
    assert {row.detector for row in rows.itertuples()} == {"", "rmd", "mahalanobis", "msp"}
    assert {(row.benchmark, row.backbone, row.seed) for row in rows.itertuples()} == {("simulation", "identity", 0)}
    assert select(rows, detector="rmd", metric="AUROC").iloc[0].value > 0.9
    for name in ("table.md", "table.tex", "table.html"):
        text = folder.file(name).read_text()
        assert "RMD" in text
        assert f"{100 * select(rows, detector='rmd', metric='AUROC').iloc[0].value:.2f}" in text
    assert set(folder.read_scores()["msp"]) == {"val", "test", "shifted"}
    pictures = {path.name for path in folder.file("figures").iterdir()}
    assert pictures == {f"{n}.{s}" for n in ("roc", "histograms", "calibration") for s in ("png", "pdf")}
    assert "RMD" in out
    assert "95 % bootstrap interval" in out
    assert out.rstrip().splitlines()[-2].startswith("RMD ranks OOD above ID samples best")  # which one to take
    assert str(folder.path) in out
    assert folder.read_status().state == "done"


@pytest.mark.slow
def test_every_detector_of_a_run_can_be_loaded_and_decides_as_the_run_did(run, caplog):
    with caplog.at_level("INFO"):
        folder, _ = run("detector=[rmd,msp,knn,react,openmax]", "alpha=0.1")
    kept = {path.stem: Calibrated.load(path) for path in folder.file("detectors").iterdir()}
    assert set(kept) == {"rmd", "msp", "knn"}  # of react and openmax more belongs to a fit than plain data
    assert "detectors/ does not hold: " in caplog.text
    assert "react" in caplog.text
    assert "openmax" in caplog.text
    rows, scores = folder.read_rows(), folder.read_scores()
    for name, detector in kept.items():
        assert detector.alpha == 0.1
        assert detector.threshold() == select(rows, detector=name, metric="threshold@0.1").iloc[0].value
        assert len(detector.calibration) == len(scores[name]["val"])
    [ood] = make_benchmark(OmegaConf.load(folder.file("config.yaml"))).test_sets(known=False)
    x = torch.stack([x for x, _ in ood])
    head = load_file(folder.file("head.safetensors"))  # the probe that MSP is of
    logits = torch.nn.functional.linear(x.to(head["weight"]), head["weight"], head["bias"])
    flagged = {"rmd": kept["rmd"].is_ood_features(x), "msp": kept["msp"].is_ood_logits(logits)}
    for name, found in flagged.items():
        assert float(found.double().mean()) == select(rows, detector=name, metric="detected@0.1").iloc[0].value


@pytest.mark.slow
def test_options_reach_the_detectors_the_data_and_the_cache(run, tmp_path):
    changes = ["detector.rmd.shrinkage=0.5", "detector.knn.k=300", "limit_test=50", "cache_dir=null"]
    folder, _ = run("detector=[rmd,knn]", *changes)
    assert not (tmp_path / "cache").exists()
    rows = folder.read_rows()
    assert "k=300 exceeds" in select(rows, detector="knn").iloc[0].reason
    assert len(folder.read_scores()["rmd"]["test"]) == 50
    other, _ = run("detector=[rmd]", "limit_test=50", name="other")
    assert not np.array_equal(folder.read_scores()["rmd"]["test"], other.read_scores()["rmd"]["test"])


@pytest.mark.slow
def test_an_untrained_network_is_named_as_such(run):
    small = ["backbone.widths=[4]", "limit_train=60", "limit_test=30", "figures=false"]
    folder, out = run("benchmark=digits", *small, "detector=[rmd,msp,odin,mahalanobis_odin]", tiny=False)
    (row,) = select(folder.read_rows(), metric="ACC").itertuples()
    assert row.reason.startswith("linear probe on the training features; the encoder is untrained")
    assert "the encoder is untrained" in " ".join(out.split())
    assert set(folder.read_scores()) == {"rmd", "msp", "odin", "mahalanobis_odin"}


def test_variants_and_models_are_part_of_the_names():
    from rmd_plugin.app.parts import run_names

    config = OmegaConf.create(
        {
            "names": {"benchmark": "clinc150", "backbone": "bert"},
            "benchmark": {"variant": "small"},
            "backbone": {"name": "/models/mini-lm"},
        }
    )
    assert run_names(config) == ("clinc150:small", "bert:mini-lm")
    config.names.backbone, config.benchmark.variant = "resnet", "full"
    assert run_names(config) == ("clinc150", "resnet")


# -- trouble ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["device=abacus"], "abacus"),
        (["head=own", "backbone.num_classes=7"], "linear_probe"),
        (["detector=[]"], "detector=all"),
        (["backbone=wrn40_2"], "wrn40_2"),
        (["benchmark.sigma=-1"], "sigma must be above 0"),
    ],
)
def test_a_mistake_is_one_clear_line_and_the_folder_says_failed(arguments, complaint, run):
    folder, err = run("detector=[rmd]", *arguments, code=1)
    line = err.strip().splitlines()[-1]  # before it Hydra says of which job
    assert "Traceback" not in err
    assert line.startswith("rmd-compare: ")
    assert complaint in line
    status = folder.read_status()
    assert status.state == "failed"
    assert complaint in status.reason


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["benchmark=features"], "benchmark.path=VALUE"),
        (["backbone=timm"], "backbone.name=VALUE"),
        (["benchmark=features", "benchmark.path=nothing.npz"], "nothing.npz"),
        (["benchmark=digitz"], "digits"),
        (["benchmark=simulation", "seed=abc"], "abc"),
    ],
)
def test_a_choice_that_cannot_be_is_one_line(arguments, complaint, run):
    _, err = run("detector=[rmd]", *arguments, tiny=False, code=1)
    assert complaint in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("when", [0, 3], ids=["between", "while flows are trained"])
def test_ctrl_c_leaves_what_was_done(tmp_path, when):
    endless = ["max_epochs", "patience"]
    slow = ["detector=[rmd,flow_likelihood]", *(f"detector.flow_likelihood.{name}=1000000" for name in endless)]
    words = [*TINY, *slow, "hydra.run.dir=out"]
    job = config_kit.start("rmd_plugin.app.compare", tmp_path, *words, RMD_CACHE_DIR=str(tmp_path / "cache"))
    rows = tmp_path / "out" / "rows.csv"
    deadline = time.monotonic() + 120
    while not rows.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(when)
    os.killpg(job.pid, signal.SIGINT)
    try:
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()  # it would go on for ever
    assert job.returncode == 130, err
    assert "Traceback" not in err
    assert len(select(read_rows(rows), detector="rmd", metric="AUROC"))
    assert (tmp_path / "out" / "table.md").exists()
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "interrupted"
    assert "RMD" in out
