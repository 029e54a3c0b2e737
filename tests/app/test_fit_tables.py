"""``rmd-fit benchmark=embeddings engine=``: the guard of the rows in memory, from files that workers read."""

import json
import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import make_blobs
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from table_kit import write_parts

from rmd_plugin import Guard
from rmd_plugin.app import score

DATA = ["benchmark=embeddings", "benchmark.path=tables"]


@pytest.fixture
def tables(tmp_path):
    """Tables of 3 classes, train in three files, and one OOD set."""
    z, y, _ = (part.float() if part.is_floating_point() else part for part in make_blobs(3, 6, per_class=400))
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
    z, y = z[order], y[order]
    folder = tmp_path / "tables"
    write_parts(folder / "train", z[:700], y[:700], cuts=(150, 151))
    write_parts(folder, z[700:900], y[700:900], names=["val"])
    write_parts(folder, z[900:], y[900:], names=["test"])
    write_parts(folder / "ood", z[:50] + 20.0, names=["far"])
    return folder


@pytest.fixture
def run(command):
    """Runs the command, and gives back what it printed or its error."""

    def call(*words, code=0):
        return command("fit", "onnx=false", *words, code=code)

    return call


def about(name):
    with open(f"{name}/guard.json") as file:
        return json.load(file)


def assert_same_guard(first, second):
    ours, other = Guard.load(first), Guard.load(second)
    states = [guard.detector.detector.state_dict() for guard in (ours, other)]
    assert states[0]["options"] == states[1]["options"]
    z = torch.randn(200, 6, dtype=torch.float64)
    scores = [guard.detector.predict_features(z) for guard in (ours, other)]
    torch.testing.assert_close(*scores, rtol=1e-10, atol=1e-10)
    thresholds = [torch.as_tensor(guard.threshold, dtype=torch.float64) for guard in (ours, other)]
    torch.testing.assert_close(*thresholds, rtol=1e-6, atol=1e-6)  # scores of float32 features
    torch.testing.assert_close(ours.backbone.head.weight, other.backbone.head.weight, rtol=1e-5, atol=1e-6)
    known = [{key: about(name)[key] for key in ("head", "data", "metrics", "classes")} for name in (first, second)]
    assert known[0] == known[1]


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["rmd", "fused"])
def test_files_give_the_guard_of_the_rows_in_memory(tables, run, detector):
    run(*DATA, "out=whole", f"detector={detector}", "head=linear_discriminant")
    printed = run(*DATA, "out=files", f"detector={detector}", "engine=local", "num_workers=1")
    assert "Guard: files" in printed
    assert_same_guard("whole", "files")
    assert about("files")["data"] == {"train samples": 700, "val samples": 200, "test samples": 300}
    assert about("files")["head"] == "linear discriminant of the training moments"


@pytest.mark.slow
def test_the_classifier_is_the_linear_discriminant_of_sklearn(tables, run):
    run(*DATA, "out=guard", "detector=rmd", "engine=local", "num_workers=1")
    parts = {name: pq.read_table(tables / name) for name in ("train", "test.parquet")}
    (z, y), (x, _) = (
        (np.stack(part["embedding"].to_numpy()), part["label"].to_numpy()) for part in parts.values()
    )  # fmt: skip
    expected = LinearDiscriminantAnalysis(solver="lsqr").fit(z, y).predict(x)
    assert Guard.load("guard")(x).class_name == [str(label) for label in expected]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of Ray's own modules
def test_both_commands_run_on_ray(tables, run, monkeypatch, capsys):
    ray = pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    try:
        run(*DATA, "out=local", "detector=fused", "engine=local", "num_workers=1")
        run(*DATA, "out=ray", "detector=fused", "engine=ray")
        assert_same_guard("local", "ray")
        assert score.main(["local", "tables/train", "engine=local", "num_workers=1", "out=scores"]) == 0
        assert score.main(["ray", "tables/train", "engine=ray", "num_workers=2", "out=rays"]) == 0
    finally:
        ray.shutdown()
    assert capsys.readouterr().out.count("Scored 700 rows of 3 files") == 2
    ours, rays = (pq.read_table(folder) for folder in ("scores", "rays"))
    np.testing.assert_allclose(ours["score"].to_numpy(), rays["score"].to_numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours["p_value"].to_numpy(), rays["p_value"].to_numpy())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("engine=spark", "spark"),
        ("backbone=mlp", "backbone=identity"),
        ("detector=msp", "moments"),
        ("detector.rmd.normalize=true", "normalize"),
        ("head=linear_probe", "linear_probe"),
        ("limit_train=10", "limit_train"),
        ("benchmark.features=null", "benchmark.features"),
        ("benchmark.path=tables/train", "split"),
        ("benchmark.labels=y", "'y'"),
    ],
)
def test_what_does_not_go_with_an_engine_is_one_sentence(tables, run, tmp_path, words, message):
    usual = {"engine": "local", "detector": "rmd", "benchmark": "embeddings", "benchmark.path": "tables"}
    name, _, value = words.partition("=")
    error = run("out=guard", *(f"{key}={word}" for key, word in (usual | {name: value}).items()), code=1)
    assert message in error
    assert not (tmp_path / "guard").exists()


def test_without_ray_the_extra_is_named(tables, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert "rmd-plugin[ray]" in run(*DATA, "out=guard", "detector=rmd", "engine=ray", code=1)


def test_a_class_without_rows_is_refused(tables, run):
    table = pq.read_table(tables / "train" / "c.parquet")
    gap = table.set_column(1, "label", [np.where(table["label"].to_numpy() == 2, 4, table["label"].to_numpy())])
    shutil.rmtree(tables / "train")
    pq.write_table(gap, tables / "train.parquet")
    error = run(*DATA, "out=guard", "detector=rmd", "engine=local", "num_workers=1", code=1)
    assert "class 2" in error
