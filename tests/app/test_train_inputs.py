"""Which backbones ``rmd-train`` takes for which samples, and what it says where they do not fit."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import open_dict

from rmd_plugin.app.assembly import check_backbone_takes, make_backbone, make_benchmark
from rmd_plugin.app.configs import TRAINED_BACKBONES, register_resolvers
from rmd_plugin.backbones.small import SmallCNN

CONF = Path(__file__).resolve().parents[2] / "conf"
VECTORS = ["benchmark=simulation", "benchmark.dim=10", "benchmark.n_train=20"]


@pytest.fixture
def composed():
    register_resolvers()
    GlobalHydra.instance().clear()

    def make(*overrides):
        config = compose("train", overrides=list(overrides), return_hydra_config=True)
        with open_dict(config):  # outside a job Hydra does not answer questions about its choices
            config.names = {name: config.hydra.runtime.choices[name] for name in ("benchmark", "backbone")}
        return config

    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield make
    GlobalHydra.instance().clear()


@pytest.mark.parametrize("benchmark", sorted(TRAINED_BACKBONES))
def test_the_default_backbone_follows_the_benchmark_and_can_learn(composed, benchmark):
    chosen = composed(f"benchmark={benchmark}").names.backbone
    assert chosen == TRAINED_BACKBONES[benchmark]
    assert chosen != "identity"


@pytest.mark.parametrize("backbone", ["small_cnn", "mlp"])
@pytest.mark.parametrize("benchmark", [["benchmark=digits"], VECTORS], ids=["pictures", "vectors"])
def test_small_backbones_take_pictures_and_vectors(composed, benchmark, backbone):
    config = composed(*benchmark, f"backbone={backbone}")
    data = make_benchmark(config)
    network = make_backbone(config, data, num_classes=data.num_classes)
    sample = data.train_set()[0][0]
    check_backbone_takes(config, network, sample)
    assert network(torch.stack([sample, sample])).shape == (2, data.num_classes)
    assert network.training, "the look at a sample left the network in evaluation mode"


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1024])
def test_the_convolution_along_vectors_takes_every_length(length):
    network = SmallCNN(dims=1, widths=(4, 8, 8), num_classes=3).eval()
    x = torch.rand(2, length)
    assert network(x).shape == (2, 3)
    # a vector is a sequence of one channel
    assert torch.equal(network(x), network(x.unsqueeze(1)))


def test_a_backbone_for_other_data_is_refused_with_both_names_and_a_remedy(composed):
    config = composed(*VECTORS, "backbone=wrn40_2")
    data = make_benchmark(config)
    network = make_backbone(config, data, num_classes=2)
    with pytest.raises(ValueError, match=r"backbone=wrn40_2 .*benchmark=simulation.*\(10,\).*Choose backbone=mlp"):
        check_backbone_takes(config, network, data.train_set()[0][0])


@pytest.mark.parametrize("backbone", ["small_cnn", "mlp"])
def test_texts_are_refused_by_networks_for_numbers(composed, backbone):
    config = composed("benchmark=clinc150", f"backbone={backbone}")

    class Texts:
        num_classes = 2

        def train_set(self):
            return [("how late is it", 0)]

    with pytest.raises(ValueError, match=rf"backbone={backbone} .*clinc150, which are str. Choose backbone=bert"):
        make_backbone(config, Texts(), num_classes=2)
