"""Every ``conf/backbone`` file: its command, its class, and the network it names."""

import inspect
import re
from typing import get_args

import pytest
from config_kit import CONF, choices, chosen
from hydra.utils import get_class, instantiate

from rmd_plugin import backbones
from rmd_plugin.backbones import HF, OpenCLIP, Timm, TorchVision

CONFIGS = choices("backbone")
PLANNED = {
    *("wrn28_10", "wrn40_2", "resnet18_cifar", "resnet56_cifar", "small_cnn", "mlp", "identity", "genomics_cnn"),
    *("genomics_bert", "vit_b16", "bit_r50x1", "clip_vit_b32", "timm", "open_clip", "torchvision"),
    *("efficientnet_lite0", "bert", "hf"),
}


def test_each_config_starts_with_its_command_and_names_a_public_class_and_its_options():
    assert set(CONFIGS) >= PLANNED
    for choice in CONFIGS:
        first = (CONF / "backbone" / f"{choice}.yaml").read_text().splitlines()[0]
        assert re.match(rf"# rmd-(compare|train) backbone={choice}\b", first)
        config = chosen("backbone", choice)
        package, _, name = config._target_.rpartition(".")
        assert package == "rmd_plugin.backbones"
        assert name in backbones.__all__
        parameters = inspect.signature(get_class(config._target_).__init__).parameters
        (options,) = get_args(parameters["shared"].annotation)
        written = {str(key) for key in config if not str(key).startswith("_")}
        assert written <= set(parameters) | set(options.__annotations__)
        assert {"num_classes", "checkpoint", "load_head", "frozen"} <= written
        if issubclass(get_class(config._target_), (HF, Timm, OpenCLIP, TorchVision)) and choice != "bert":
            assert {"image_size", "mean", "std", "transform"} <= written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "dim", "parameters", "overrides"),
    [
        # parameters of encoder and head as published: WRN-28-10 36.5 M, WRN-40-2 2.2 M, ResNet-18 11.2 M,
        # ResNet-56 0.85 M, EfficientNet-Lite0 4.65 M with 1000 classes instead of ten
        ("wrn28_10", 640, 36.5e6, []),
        ("wrn40_2", 128, 2.24e6, []),
        ("resnet18_cifar", 512, 11.17e6, []),
        ("resnet56_cifar", 64, 0.853e6, ["backbone.checkpoint=null"]),
        ("small_cnn", 128, None, []),
        ("mlp", 256, None, ["backbone.in_features=64"]),
        ("identity", 12, None, ["backbone.in_features=12"]),
        # 4 * 20 * 2000 + 2000 motifs, 2000 * 2000 + 2000 dense, 2000 * 10 + 10 head
        ("genomics_cnn", 2000, 4_184_010, []),
        ("genomics_bert", 128, None, []),
        ("efficientnet_lite0", 1280, 4.65e6 - 990 * 1281, ["backbone.pretrained=false"]),
    ],
)
def test_each_config_builds_the_network_it_names(choice, dim, parameters, overrides):
    backbone = instantiate(chosen("backbone", choice, *overrides), num_classes=10)
    assert backbone.feature_dim == dim
    assert backbone.num_classes == 10
    if parameters is not None:
        assert sum(p.numel() for p in backbone.parameters()) == pytest.approx(parameters, rel=0.005)


MY_NET = """
from torch import nn
from rmd_plugin.backbones import Backbone

class MyNet(Backbone):
    def __init__(self, width=32, **options):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        super().__init__(encoder, width, architecture={"width": width}, **options)
"""
MY_YAML = """
_target_: my_own_package.MyNet
width: 16
num_classes: null
checkpoint: null
load_head: true
frozen: false
"""
