"""``rmd-fit`` as a user runs it: one command from data to a folder that guards."""

import json
import os
import sys
from importlib.util import find_spec

import config_kit
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from rmd_plugin import Guard
from rmd_plugin.backbones import MLP
from rmd_plugin.benchmarks import Digits, Simulation

NEEDS_ONNX = pytest.mark.skipif(find_spec("onnxscript") is None, reason="onnxscript is not installed (extra export)")
TINY = ["benchmark=simulation", "benchmark.dim=8", "limit_train=200", "onnx=false"]


@pytest.fixture
def run(command):
    """Runs the command and gives back what it printed, with another code its error."""

    def call(*arguments, tiny=True, code=0):
        return command("fit", *(TINY if tiny else ()), *arguments, code=code)

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
    right = np.array(guard(test).class_name) == np.array(guard.class_names)[data.test_in.labels]
    assert about["metrics"]["accuracy on the test data"] == pytest.approx(np.mean(right))
    assert about["command"].startswith("rmd-fit benchmark=simulation")
    assert about["data"] == {"train samples": 200, "val samples": 200, "test samples": 200}
    # nothing but the guard and the cache is left in the folder
    assert sorted(os.listdir(tmp_path)) == ["cache", "guard"]


@pytest.mark.parametrize("detector", ["mahalanobis", "msp", "knn"])
def test_detectors_of_every_kind_become_guards_the_same_every_time(run, detector):
    z = torch.randn(20, 8)
    for out in "ab":
        run(f"out={out}", f"detector={detector}", "alpha=0.1", "cache_dir=null")
    assert Guard.load("a").alpha == 0.1
    assert torch.equal(Guard.load("a")(z).score, Guard.load("b")(z).score)


MLP_RUN = """
benchmark: {_target_: rmd_plugin.benchmarks.Digits}
backbone: {_target_: rmd_plugin.backbones.MLP, _convert_: all, in_features: 64, hidden: [16], num_classes: 6}
names: {benchmark: digits, backbone: mlp}
seed: 0
weights: last
"""


@pytest.mark.parametrize("way", ["checkpoint", "run"])
def test_a_trained_network_becomes_a_guard_with_its_own_head(run, tmp_path, way):
    torch.manual_seed(0)
    network = MLP(64, (16,), num_classes=6)
    nn.init.normal_(network.head.bias)
    (tmp_path / "trained" / "checkpoints").mkdir(parents=True)
    torch.save(network.state_dict(), weights := tmp_path / "trained" / "checkpoints" / "last.ckpt")
    (tmp_path / "trained" / "config.yaml").write_text(MLP_RUN)
    mine = ["benchmark=digits", "backbone=mlp", "backbone.hidden=[16]", f"checkpoint={weights}"]
    run("out=guard", "onnx=false", *(mine if way == "checkpoint" else ["run=trained"]), tiny=False)
    guard = Guard.load("guard")
    assert torch.equal(guard.backbone.head.bias, network.head.bias)
    about = json.loads((tmp_path / "guard" / "guard.json").read_text())
    assert about["head"] == "the backbone's own head"
    assert about["input_shape"] == [1, 8, 8]
    items = torch.stack([Digits().test_in[k][0] for k in range(10)])
    with torch.no_grad():
        expected = network.eval()(items).argmax(1)
    assert guard(items).class_name == [str(int(k)) for k in expected]


def test_a_mistake_in_run_or_data_is_said_before_torch_is_imported(tmp_path):
    code = """if True:
        import sys
        from rmd_plugin.app.commands import fit
        try: fit()
        except SystemExit as stop: sys.exit(3 if stop.code != 1 or "torch" in sys.modules else 0)"""
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.yaml").write_text(MLP_RUN.replace("Digits", "Embeddings, path: gone"))
    (tmp_path / "texts.csv").write_text("question,label\na,b\n")
    for words, message in (
        (["run=nowhere"], "config.yaml"),
        (["run=trained"], "gone"),
        (["benchmark=text_file", "benchmark.path=texts.csv"], "'text'"),
    ):
        done = config_kit.python("-c", code, "out=guard", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert message in done.stderr


def test_so_much_is_held_out_that_alpha_can_be_met_or_the_missing_samples_are_counted(run, tmp_path, caplog):
    rng = np.random.default_rng(0)
    for number in range(180):
        path = tmp_path / "photos" / "train" / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 80, (8, 8, 3), dtype=np.uint8) + np.uint8(80 * (number % 3))).save(path)
    words = ["benchmark=image_folder", "benchmark.path=photos", "backbone=small_cnn", "detector=rmd", "onnx=false"]
    run("out=guard", *words, tiny=False)
    about = json.loads((tmp_path / "guard" / "guard.json").read_text())
    assert 19 <= about["calibration_samples"] <= 24
    assert "val_fraction" in caplog.text
    assert "has seen" not in caplog.text
    torch.save({"state_dict": {}}, tmp_path / "trained.ckpt")
    run("out=trained", *words, "checkpoint=trained.ckpt", tiny=False, code=1)
    assert "has seen 3 of these 21 samples" in caplog.text
    error = run("out=strict", *words, "alpha=0.001", tiny=False, code=1)
    assert "needs 999" in error
    assert "855 are missing" in error


@pytest.mark.parametrize("detector", ["rmd", "fused"])
def test_few_samples_of_an_encoder_that_has_not_seen_them_are_calibrated_by_folds(run, tmp_path, caplog, detector):
    words = ["benchmark.means=[-1,0,1]", "benchmark.n_train=12", "benchmark.n_val=3", "limit_train=null"]
    out = run("out=guard", f"detector={detector}", *words)
    assert "CV+" in caplog.text
    assert "False alarms" in out
    guard, data = Guard.load("guard"), Simulation(dim=8, means=(-1, 0, 1))
    assert guard.threshold is None
    assert "10.0 % false alarms" in (tmp_path / "guard" / "README.md").read_text()
    assert len(guard.detector.fold_detectors) == 10
    assert len(guard.detector.calibration) == 45
    test = torch.stack([item for item, _ in data.test_in])
    assert guard(test).is_ood.float().mean() < 0.15
    assert guard(test + 5).is_ood.all()
    error = run("out=msp", "detector=msp", *words, code=1)
    assert "cannot do without" in error


def test_a_network_that_was_trained_on_the_data_is_not_calibrated_by_folds(run, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "trained.ckpt")
    words = [
        "benchmark=digits",
        "backbone=mlp",
        "limit_train=30",
        "limit_test=10",
        "alpha=0.001",
        "checkpoint=trained.ckpt",
    ]
    error = run("out=guard", *words, tiny=False, code=1)
    assert "trained on the data" in error
    assert "missing" in error


def test_an_untrained_network_is_warned_of(run, tmp_path, caplog):
    run("out=guard", "benchmark=digits", "limit_train=200", "onnx=false", tiny=False)
    assert "untrained" in caplog.text


@pytest.mark.parametrize("detector", ["rmd", "fused"])
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
        ([], "out"),
        (["out=guard", "detector=[rmd,msp]"], "rmd, msp"),
        (["out=guard", "detector=odin"], "ODIN"),
        pytest.param(["out=guard", "detector=knn", "onnx=true"], "KNN", marks=NEEDS_ONNX),
        (["out=guard", "head=null"], "classifier"),
        (["out=guard", "alpha=0.001"], "needs 999"),
        (["out=guard", "alpha=2"], "alpha"),
        (["out=guard", "onnx=no"], "onnx"),
        (["out=photos"], "not empty"),
        (["out=guard", "benchmark=features"], "benchmark.dim"),
        (["out=guard", "detector=fussed"], "fussed"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_and_nothing_is_written(run, tmp_path, words, message):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dear.jpg").write_text("")
    error = run(*words, code=1)
    assert message in error
    assert "Traceback" not in error
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
