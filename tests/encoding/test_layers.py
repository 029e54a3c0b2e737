"""Inner layers are found by name, by pattern and as stages, and heard in one pass."""

import pytest
import torch
from torch import nn

from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.layers import LayerChain, as_maps, find_layers, from_maps, hearing

PICTURE = torch.rand(1, 3, 64, 64)
TOKENS = torch.ones(1, 5, dtype=torch.long)
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


def stages(network, x):
    return list(find_layers(network, "auto", x))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", ["layer1", "layer2", "layer3", "layer4"]),
        # where the maps shrink: as timm's feature_info has it
        ("efficientnet_b0", ["features.1", "features.2", "features.3", "features.5", "features.8"]),
        ("densenet121", [f"features.denseblock{number}" for number in range(1, 5)]),
    ],
)
def test_the_stages_of_networks_of_torchvision(name, expected):
    models = pytest.importorskip("torchvision.models")
    network = models.get_model(name)
    assert stages(network, PICTURE) == expected
    assert stages(nn.Sequential(nn.Identity(), network), PICTURE) == [f"1.{layer}" for layer in expected]
    assert network.training


@pytest.mark.parametrize("name", ["test_resnet", "test_convnext", "test_vit"])
def test_the_stages_of_networks_of_timm_are_those_of_its_feature_info(name):
    timm = pytest.importorskip("timm")
    network = timm.create_model(name)
    x = torch.rand(1, *network.default_cfg["input_size"])
    assert stages(network, x) == [info["module"] for info in network.feature_info if info["module"] != "act1"]


def test_the_stages_of_transformers_are_their_layers():
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertModel(transformers.BertConfig(**SMALL))
    assert stages(bert, TOKENS) == [f"encoder.layer.{number}" for number in range(3)]
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2))
    assert stages(gpt, TOKENS) == ["h.0", "h.1", "h.2"]


def network_of_blocks():
    network = nn.Module()
    network.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12)])
    network.fc = nn.Linear(4, 2)
    return network


def test_names_and_patterns_are_layers_in_the_order_in_which_they_are_asked_for():
    network = network_of_blocks()
    assert list(find_layers(network, ["fc", "blocks.1"], None)) == ["fc", "blocks.1"]
    assert list(find_layers(network, "blocks.*", None)) == [f"blocks.{number}" for number in range(12)]
    assert list(find_layers(network, ["blocks.1?", "*"], None)) == ["blocks.10", "blocks.11", "blocks", "fc"]
    assert find_layers(network, "fc", None)["fc"] is network.fc


def test_layers_that_there_are_not_are_named_with_what_there_is():
    with pytest.raises(EncodingError, match=r"no layer 'block.1'.*patterns such as 'layer\*'.*Candidates: blocks.1"):
        find_layers(network_of_blocks(), ["block.1"], None)
    with pytest.raises(EncodingError, match="layers is empty"):
        find_layers(network_of_blocks(), [], None)
    with pytest.raises(EncodingError, match=r"no stages that can be told.*Name the layers: 0"):
        find_layers(nn.Sequential(nn.Linear(2, 2)), "auto", torch.ones(1, 2))


def test_what_a_layer_gave_is_kept_before_the_network_works_on_it_in_place():
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = torch.randn(5, 2)
    with hearing(network, {"0": network[0]}, lambda name, layer, output, mask: output.clone()) as found:
        network(x)
    assert torch.equal(found["0"], nn.functional.linear(x, network[0].weight, network[0].bias))
    assert not network[0]._forward_hooks
    assert not network._forward_pre_hooks


@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.Conv1d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.LayerNorm(3)])
def test_maps_have_the_channels_first_and_become_what_they_were(layer):
    shapes = {nn.Linear: (2, 5, 3), nn.Conv1d: (2, 3, 5), nn.Conv2d: (2, 3, 5, 1), nn.LayerNorm: (2, 5, 1, 3)}
    shape = shapes[type(layer)]
    output = layer(torch.rand(shape))
    maps = as_maps(layer, output)
    assert maps.shape == (2, 3, 5, 1)
    assert torch.equal(from_maps(layer, maps, output), output)


def test_a_chain_runs_the_network_once_for_all_layers_and_again_for_other_inputs():
    calls = []
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    network.register_forward_hook(lambda *_: calls.append(1))
    chain, x = LayerChain(network, find_layers(network, ["0", "1"], None)), torch.randn(3, 4)
    first = chain.links[0](x)
    second = nn.Sequential(*chain.links)(x)
    assert torch.equal(chain.head(second), network[2](second[:, :, 0, 0]))
    assert torch.equal(first[:, :, 0, 0], network[0](x))
    assert len(calls) == 1
    x += 1
    assert torch.equal(chain.links[0](x)[:, :, 0, 0], network[0](x))
    assert torch.allclose(chain.head(torch.zeros(3, 4, 1, 1)), network[2].bias.expand(3, 2))


def test_a_layer_that_takes_no_part_is_named():
    network = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(EncodingError, match="fc did not take part"):
        LayerChain(network, {"fc": nn.Linear(4, 4)}).run(torch.zeros(1, 4))
