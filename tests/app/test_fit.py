"""``rmd-fit`` as a user runs it: one command from data to a folder that guards."""

import json
import os
import sys

import config_kit
import numpy as np
import pytest
import torch
from torch import nn

from rmd_plugin import Guard
from rmd_plugin.app.commands import fit as main
from rmd_plugin.benchmarks import Digits, Simulation

QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
TINY = ["benchmark=simulation", "benchmark.dim=8", "limit_train=200", "onnx=false"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in this process and gives back what it printed, with another code its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RMD_CACHE_DIR", str(tmp_path / "cache"))

    def call(*arguments, tiny=True, code=0):
        words = [*(TINY if tiny else ()), *QUIET, *arguments]
        found = config_kit.call(main, monkeypatch, "rmd-fit", *words)
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed.err if code else printed.out

    return call


def test_a_guard_is_written_that_knows_its_data(run, tmp_path):
    out = run("out=guard")
    assert "Guard: guard" in out
    assert "False alarms" in out
    assert sorted(os.listdir("guard")) == ["README.md", "detector.safetensors", "guard.json", "weights.safetensors"]
    guard, data = Guard.load("guard"), Simulation(dim=8, limit_train=200)
    test = torch.stack([item for item, _ in data.test_in])
    ood = torch.stack([item for item, _ in data.test_oods[0]])
    assert guard(ood).is_ood.float().mean() > 0.9
    assert guard(test).is_ood.float().mean() < 0.2
    about = json.loads((tmp_path / "guard" / "guard.json").read_text())
    assert about["metrics"]["flagged of the test data"] == pytest.approx(float(guard(test).is_ood.float().mean()))
    name = data.ood_names[0]
    assert about["metrics"][f"flagged of the OOD set {name}"] == pytest.approx(float(guard(ood).is_ood.float().mean()))
    right = [
        guard.class_names[label] == found
        for label, found in zip(data.test_in.labels, guard(test).class_name, strict=True)
    ]
    assert about["metrics"]["accuracy on the test data"] == pytest.approx(np.mean(right))
    assert about["command"].startswith("rmd-fit benchmark=simulation")
    assert about["data"] == {"train samples": 200, "val samples": 200, "test samples": 200}
    # nothing but the guard and the cache is left in the folder
    assert sorted(os.listdir(tmp_path)) == ["cache", "guard"]


def test_the_same_command_gives_the_same_guard(run):
    run("out=a", "cache_dir=null")
    run("out=b", "cache_dir=null")
    z = torch.randn(50, 8)
    assert torch.equal(Guard.load("a")(z).score, Guard.load("b")(z).score)


@pytest.mark.parametrize("detector", ["rmd", "mahalanobis", "marginal", "msp", "energy", "knn"])
def test_detectors_of_every_kind_become_guards(run, detector):
    run("out=guard", f"detector={detector}", "alpha=0.1")
    guard = Guard.load("guard")
    assert guard.alpha == 0.1
    assert guard(torch.randn(20, 8)).score.shape == (20,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers")
def test_a_trained_checkpoint_becomes_a_guard_with_its_own_head(run, tmp_path):
    torch.manual_seed(0)
    from rmd_plugin.backbones import MLP

    network = MLP(64, (16,), num_classes=6)
    nn.init.normal_(network.head.bias)
    torch.save(network.state_dict(), tmp_path / "mine.pt")
    run(
        "out=guard",
        "benchmark=digits",
        "backbone=mlp",
        "backbone.hidden=[16]",
        "checkpoint=mine.pt",
        "onnx=false",
        tiny=False,
    )
    guard = Guard.load("guard")
    assert torch.equal(guard.backbone.head.bias, network.head.bias)
    about = json.loads((tmp_path / "guard" / "guard.json").read_text())
    assert about["head"] == "the backbone's own head"
    assert about["input_shape"] == [1, 8, 8]
    items = torch.stack([Digits().test_in[k][0] for k in range(10)])
    with torch.no_grad():
        expected = network.eval()(items).argmax(1)
    assert guard(items).class_name == [str(int(k)) for k in expected]


def test_an_untrained_network_is_warned_of(run, tmp_path, caplog):
    run("out=guard", "benchmark=digits", "limit_train=200", "onnx=false", tiny=False)
    assert (
        "The encoder is untrained: checkpoint=FILE loads a trained one: a guard of it is of little use." in caplog.text
    )


@pytest.mark.parametrize("detector", ["rmd", "mahalanobis", "marginal", "fused"])
def test_the_detector_of_a_guard_can_be_updated_if_its_config_keeps_the_moments(run, detector):
    run("out=plain", f"detector={detector}")
    with pytest.raises(ValueError, match="keep_moments=True"):
        Guard.load("plain").detector.update(torch.randn(5, 8), torch.zeros(5).long())
    run("out=guard", f"detector={detector}", f"detector.{detector}.keep_moments=true")
    found, data = Guard.load("guard").detector.detector, Simulation(dim=8, limit_train=200)
    z, y = torch.stack([item for item, _ in data.fit_set()]), torch.as_tensor(data.fit_set().labels)
    more, x = torch.randn(40, 8), torch.randn(20, 8, dtype=torch.float64)
    found.update(more, y[:40])
    again = type(found)(**found.options, **({"head": found.head} if detector == "fused" else {}))
    again.fit_features(torch.cat([z, more]), torch.cat([y, y[:40]]))
    torch.testing.assert_close(found.predict_features(x), again.predict_features(x), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_with_onnx_the_file_is_there_and_the_card_says_so(run, tmp_path):
    run("out=guard", "onnx=true")
    assert (tmp_path / "guard" / "model.onnx").is_file()
    assert "`features`: of shape (batch, 8)" in (tmp_path / "guard" / "README.md").read_text()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "out must be given: add out=VALUE"),
        (["out=guard", "detector=[rmd,msp]"], "a guard has one detector, got rmd, msp"),
        (["out=guard", "detector=odin"], "detectors on features or logits, which ODIN is not"),
        (["out=guard", "head=null"], "a guard needs a classifier"),
        (["out=guard", "alpha=0.001"], "needs 999"),
        (["out=guard", "alpha=2"], "alpha"),
        (["out=photos"], "photos is not empty and no guard"),
        (["out=guard", "benchmark=features"], "there is no option benchmark.dim"),
        (["out=guard", "detector=fussed"], "Did you mean fused?"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_and_nothing_is_written(run, tmp_path, words, message):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dear.jpg").write_text("")
    error = run(*words, code=1)
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "guard").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.slow
def test_without_the_extra_the_guard_is_written_without_onnx_and_that_is_said(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if it were not installed
    run("out=guard", "onnx=auto")
    assert "model.onnx is left out" in caplog.text
    assert "[export]" in caplog.text
    assert not (tmp_path / "guard" / "model.onnx").exists()
    assert "rmd-plugin[export]" in run("out=other", "onnx=true", code=1)
    assert "onnx must be true, false or auto, got 'maybe'" in run("out=other", "onnx=maybe", code=1)


def test_a_detector_that_cannot_be_exported_is_refused_before_anything_is_written(run, tmp_path):
    pytest.importorskip("onnxruntime")
    assert "KNN cannot be exported" in run("out=guard", "detector=knn", "onnx=true", code=1)
    assert not (tmp_path / "guard").exists()


def test_a_benchmark_that_needs_a_path_asks_for_it(run):
    assert "benchmark=features needs benchmark.path: give benchmark.path=VALUE" in run(
        "out=guard", "benchmark=features", tiny=False, code=1
    )


@pytest.mark.slow
def test_help_names_the_options_and_comes_without_torch(tmp_path):
    done = config_kit.python("-c", "from rmd_plugin.app.commands import fit; fit()", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "rmd-fit benchmark=image_folder",
        "out: ???  # folder of the guard",
        "alpha: 0.05",
        "onnx: auto",
        "rmd-score OUT",
    ):
        assert text in done.stdout
