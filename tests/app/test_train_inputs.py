"""Which backbones ``rmd-train`` takes for which samples, and what it says where they do not fit."""

import pytest
import torch
from config_kit import CONF, choices, composed
from omegaconf import OmegaConf

from rmd_plugin.app.parts import check_backbone_takes, make_backbone, make_benchmark
from rmd_plugin.backbones.small import SmallCNN

VECTORS = ["benchmark=simulation", "benchmark.dim=10", "benchmark.n_train=20"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("benchmark", [name for name in choices("benchmark") if name != "intents"])
def test_the_default_backbone_stands_in_the_benchmarks_own_config(command, benchmark):
    chosen = composed(command, f"benchmark={benchmark}", "detector=[rmd]").names.backbone
    own = list(OmegaConf.load(CONF / "benchmark" / f"{benchmark}.yaml").defaults)
    if "framework" in own:  # those of the framework stand on its config
        own += OmegaConf.load(CONF / "benchmark" / "framework.yaml").defaults
    assert {"override /backbone@_global_.backbone": chosen} in own
    assert composed(command, f"benchmark={benchmark}", "backbone=mlp", "detector=[rmd]").names.backbone == "mlp"


@pytest.mark.parametrize(("command", "backbone"), [("train", "mlp"), ("compare", "identity"), ("fit", "identity")])
def test_the_packaged_embeddings_are_trained_on_or_compared_as_they_are(command, backbone):
    names = composed(command, *(["out=guard"] if command == "fit" else [])).names
    assert (names.benchmark, names.backbone) == ("intents", backbone)


@pytest.mark.parametrize("backbone", ["small_cnn", "mlp"])
@pytest.mark.parametrize("benchmark", [["benchmark=digits"], VECTORS], ids=["pictures", "vectors"])
def test_small_backbones_take_pictures_and_vectors(benchmark, backbone):
    config = composed("train", *benchmark, f"backbone={backbone}")
    data = make_benchmark(config)
    network = make_backbone(config, data, num_classes=data.num_classes)
    sample = data.train_set()[0][0]
    check_backbone_takes(config, network, data)
    assert network(torch.stack([sample, sample])).shape == (2, data.num_classes)
    assert network.training, "the look at a sample left the network in evaluation mode"


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1024])
def test_the_convolution_along_vectors_takes_every_length(length):
    network = SmallCNN(dims=1, widths=(4, 8, 8), num_classes=3).eval()
    x = torch.rand(2, length)
    assert network(x).shape == (2, 3)
    # a vector is a sequence of one channel
    assert torch.equal(network(x), network(x.unsqueeze(1)))


def test_a_backbone_for_other_data_is_refused_with_both_names_and_a_remedy():
    config = composed("train", *VECTORS, "backbone=wrn40_2")
    data = make_benchmark(config)
    network = make_backbone(config, data, num_classes=2)
    with pytest.raises(ValueError, match=r"backbone=wrn40_2 .*benchmark=simulation.*\(10,\).*Choose backbone=mlp"):
        check_backbone_takes(config, network, data)


@pytest.mark.parametrize("backbone", ["small_cnn", "mlp"])
def test_texts_are_refused_by_networks_for_numbers(backbone):
    config = composed("train", "benchmark=clinc150", f"backbone={backbone}")

    class Texts:
        num_classes = 2

        def train_set(self):
            return [("how late is it", 0)]

    with pytest.raises(ValueError, match=rf"backbone={backbone} .*clinc150, which are str. Choose backbone=bert"):
        make_backbone(config, Texts(), num_classes=2)
