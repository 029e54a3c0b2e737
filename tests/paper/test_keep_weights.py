"""Weights that are kept in the package: the same network comes out, and a note says how it was made."""

import hashlib
import json
from pathlib import Path

import config_kit
import pytest
import torch
from hydra import compose
from omegaconf import open_dict
from safetensors.torch import load_file

from rmd_plugin.app.train import load_run, train
from rmd_plugin.backbones import ResNet
from rmd_plugin.backbones.fetch import find_checkpoint
from rmd_plugin.paper.keep_weights import WEIGHTS, keep_weights
from rmd_plugin.report.run_folder import RunFolder

SHIPPED = sorted(WEIGHTS.glob("*.safetensors"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished training, of a minute network."""
    folder = tmp_path_factory.mktemp("run")
    with config_kit.hydra_initialised():
        cfg = compose(
            "train",
            overrides=["benchmark=digits", "backbone=small_cnn",
                       "limit_train=60", "limit_test=20", "trainer.max_epochs=1", "resamples=0", "figures=false",
                       "backbone.widths=[4,4]", "callbacks=checkpoint", "detector=msp", "weights=last",
                       "trainer.enable_progress_bar=false", "logger=none"],
            return_hydra_config=True,
        )  # fmt: skip
        with open_dict(cfg):
            cfg.names.update({"benchmark": "digits", "backbone": "small_cnn"})
            cfg.paths.output_dir = str(folder)
            del cfg.hydra
    train(cfg)
    return cfg, folder


@pytest.mark.slow
def test_kept_weights_give_the_network_that_was_trained(run, tmp_path):
    cfg, folder = run
    path = keep_weights(folder, "digits", tmp_path)
    about = json.loads((tmp_path / "digits.json").read_text())
    assert about["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (about["epochs"], about["backbone"]["widths"]) == (1, [4, 4])
    assert about["data"].startswith("Digits(train=60, val=20, test=20")
    accuracy = [row.value for row in RunFolder(folder).read_rows() if row.metric == "ACC"]
    assert [about["test_accuracy"]] == accuracy
    assert str(folder) not in json.dumps(about)  # no path of the machine that it was made on
    trained = load_run(cfg).backbone
    for name, value in load_file(path).items():
        torch.testing.assert_close(value.to(torch.float32), trained.state_dict()[name].float(), rtol=1e-3, atol=1e-6)
    assert set(load_file(path)) == set(trained.state_dict())


def test_weights_of_a_run_that_is_not_finished_are_not_kept(tmp_path):
    with pytest.raises(ValueError, match="is not a finished run"):
        keep_weights(tmp_path, "digits", tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_shipped_is_small_and_says_where_it_comes_from():
    assert SHIPPED
    assert sum(path.stat().st_size for path in SHIPPED) < 3_000_000
    for path in SHIPPED:
        about = json.loads(path.with_suffix(".json").read_text())
        assert {"command", "commit", "epochs", "test_accuracy", "benchmark", "licence"} <= about.keys()
        assert find_checkpoint(f"pkg://rmd_plugin.paper/weights/{path.name}") == path


def test_the_shipped_network_of_cifar_100_fits_the_small_experiment():
    with config_kit.hydra_initialised():
        cfg = compose("train", overrides=["experiment=table1/cifar100"])
    address, about = cfg.backbone.checkpoint, json.loads((WEIGHTS / "cifar100_resnet16.json").read_text())
    assert not cfg.train
    # the network, its data and its preprocessing are those that it was trained with
    assert {name: cfg.backbone[name] for name in ("blocks", "widths", "mean", "std", "shortcut")} == {
        name: about["backbone"][name] for name in ("blocks", "widths", "mean", "std", "shortcut")
    }
    assert cfg.benchmark.val_fraction == about["benchmark"]["val_fraction"]
    assert about["test_accuracy"] >= 0.45
    backbone = ResNet(about["backbone"]["blocks"], about["backbone"]["widths"], checkpoint=address)
    assert backbone.num_classes == 100
    assert backbone.head_loaded
    assert Path(str(find_checkpoint(address))).parent == WEIGHTS
