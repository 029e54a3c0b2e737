"""Several layers in one pass: their features are what a user would pool by hand."""

import copy
import pickle

import pytest
import torch
from torch import nn

from rmd_plugin import RMD
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.layer_encoder import LayerEncoder, LayerMean
from rmd_plugin.encoding.loop import PairEncoder, encode_batches

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


class Padded(nn.Module):
    """A BERT on token ids whose padding is 0, as a text backbone hands them over."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        self.model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()

    def forward(self, ids):
        return self.model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state[:, 0]


IDS = torch.tensor([[5, 6, 7, 8, 0], [9, 4, 0, 0, 0]])
LENGTHS = (4, 2)


def hidden_states(network):
    """Output of each layer, as transformers itself gives it."""
    with torch.no_grad():
        found = network.model(input_ids=IDS, attention_mask=(IDS != 0).long(), output_hidden_states=True)
    return found.hidden_states[1:]


@pytest.mark.parametrize(
    ("pooling", "by_hand"),
    [
        ("cls", lambda z: torch.stack([row[0] for row in z])),
        ("mean", lambda z: torch.stack([row[:n].mean(0) for row, n in zip(z, LENGTHS, strict=True)])),
        ("last", lambda z: torch.stack([row[n - 1] for row, n in zip(z, LENGTHS, strict=True)])),
    ],
)
def test_tokens_are_pooled_without_their_padding(pooling, by_hand):
    network = Padded()
    found = LayerEncoder(network, pooling=pooling)(IDS)
    assert list(found) == [f"model.encoder.layer.{number}" for number in range(3)]
    for z, expected in zip(found.values(), hidden_states(network), strict=True):
        assert torch.allclose(z, by_hand(expected), atol=1e-6)
    mean = LayerMean(network, "auto", pooling=pooling)(IDS)
    assert torch.allclose(mean, torch.stack([by_hand(z) for z in hidden_states(network)]).mean(0), atol=1e-6)


def test_dicts_are_given_to_the_network_by_name():
    network = Padded()
    batch = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
    found = LayerEncoder(network.model, pooling="last")(batch)
    assert list(found) == [f"encoder.layer.{number}" for number in range(3)]
    assert torch.allclose(found["encoder.layer.2"], hidden_states(network)[2][[0, 1], [3, 1]], atol=1e-6)


def test_each_layer_may_be_pooled_in_its_own_way():
    network = Padded()
    found = LayerEncoder(network, "model.encoder.layer.*", pooling={"*.layer.0": "cls", "*.layer.2": "last"})(IDS)
    first, _, last = hidden_states(network)
    assert torch.allclose(found["model.encoder.layer.0"], first[:, 0], atol=1e-6)
    assert torch.allclose(found["model.encoder.layer.2"], last[[0, 1], [3, 1]], atol=1e-6)


def test_the_padding_mask_of_torchs_own_transformer_counts():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x):
            return self.blocks(x, src_key_padding_mask=torch.tensor([[False, False, True]]))

    network, x = Net().eval(), torch.randn(1, 3, 8)
    with torch.no_grad():
        expected = network(x)[:, :2].mean(1)
    assert torch.allclose(LayerEncoder(network, "blocks.layers.*")(x)["blocks.layers.1"], expected, atol=1e-5)


def test_maps_and_sequences_are_averaged_and_vectors_stay():
    network = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    x = torch.randn(3, 2, 6)
    found = LayerEncoder(network, ["0", "2"])(x)
    with torch.no_grad():
        assert torch.allclose(found["0"], network[0](x).mean(2))
        assert torch.equal(found["2"], network(x))
    assert not found["0"].requires_grad


def test_the_loop_gives_the_layers_of_the_id_samples():
    network = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 5))
    batch = (torch.randn(3, 4), torch.tensor([0, -1, 1]))
    [found] = encode_batches(PairEncoder(LayerEncoder(network, ["0", "2"])), [batch], id_only=True)
    assert {name: tuple(z.shape) for name, z in found.layers.items()} == {"0": (2, 6), "2": (2, 5)}
    with torch.no_grad():
        expected = network.eval()(batch[0])[[0, 2]]
    assert torch.allclose(found.features, expected)
    assert torch.equal(found.layers["2"], found.features)


def test_a_mean_over_layers_is_an_encoder_for_any_detector():
    torch.manual_seed(0)
    network, x, y = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6)), torch.randn(90, 4), torch.arange(90) % 3
    with torch.no_grad():
        first = network[0](x)
        z = (first + network[1](first)) / 2
    detector = RMD(LayerMean(network, ["0", "1"]), shrinkage=0.1).fit([(x, y)])
    expected = RMD(shrinkage=0.1).fit_features(z, y).predict_features(z)
    assert torch.allclose(detector.predict(x), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_told():
    network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    with pytest.raises(EncodingError, match="one width, got 0: 6, 1: 5"):
        LayerMean(network, ["0", "1"])(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"pooling must be one of mean, cls, last.*got 'max'"):
        LayerEncoder(network, pooling={"0": "max"})
    network.spare = nn.Linear(1, 1)
    network.forward = lambda x: network[0](x)
    with pytest.raises(EncodingError, match="spare did not take part"):
        LayerEncoder(network, "spare")(torch.zeros(1, 4))


@pytest.mark.parametrize("size", [(64, 96), (384, 384)])  # of the larger one, the first maps are 96 x 96 x 96
def test_maps_with_channels_last_are_averaged_over_space(size):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    swin = models.SwinTransformer([4, 4], 96, [1, 1], [2, 2], [2, 2]).eval()
    x = torch.rand(1, 3, *size)
    found = LayerEncoder(swin, "auto")(x)
    names = ["features.1", "features.3"]
    assert list(found) == names
    with torch.no_grad():
        first = swin.features[1](swin.features[0](x))
        second = swin.features[3](swin.features[2](first))
    assert torch.allclose(found["features.1"], first.mean(dim=(1, 2)), atol=1e-5)
    assert torch.allclose(found["features.3"], second.mean(dim=(1, 2)), atol=1e-5)


@pytest.mark.parametrize("size", [(64, 96), (384, 384)])
def test_maps_of_convnext_have_their_channels_first_though_it_is_linear_inside(size):
    convnext = pytest.importorskip("torchvision.models.convnext")
    network = convnext.ConvNeXt([convnext.CNBlockConfig(96, 192, 1), convnext.CNBlockConfig(192, None, 1)]).eval()
    x = torch.rand(1, 3, *size)
    found = LayerEncoder(network, ["features.1", "features.3"])(x)
    with torch.no_grad():
        assert torch.allclose(found["features.1"], network.features[:2](x).mean(dim=(2, 3)), atol=1e-5)
        assert torch.allclose(found["features.3"], network.features(x).mean(dim=(2, 3)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "convnext_atto", "test_convnext"])
def test_stages_of_timm_are_averaged_as_timm_says_where_their_channels_are(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    network = timm.create_model(name).eval()
    x = torch.rand(1, *network.default_cfg["input_size"])
    found = LayerEncoder(network, [info["module"] for info in network.feature_info])(x)
    with torch.no_grad():
        maps = network.forward_intermediates(x, intermediates_only=True, output_fmt="NCHW")
    for z, expected in zip(found.values(), maps[-len(found) :], strict=True):
        assert torch.allclose(z, expected.mean(dim=(2, 3)), atol=1e-4)


def test_maps_whose_channels_nobody_can_tell_are_refused():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 8, 1), nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(self.conv(x))

    network = nn.Sequential(Both(), nn.Identity())
    with pytest.raises(EncodingError, match=r"Both of shape \(1, 8, 8, 8\) may have .* fits both. Name a layer around"):
        LayerEncoder(network, "0")(torch.rand(1, 3, 8, 8))
    with pytest.raises(EncodingError, match=r"Identity of shape \(1, 4, 4, 8\) may have .* looks like \(B, H, W, C\)"):
        LayerEncoder(nn.Sequential(nn.Linear(3, 8), nn.Identity()), "1")(torch.rand(1, 4, 4, 3))


def test_a_copy_of_an_encoder_listens_too_and_a_network_that_is_copied_while_it_listens_carries_idle_hooks():
    network, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)), torch.rand(3, 4)
    encoder = LayerEncoder(network, ["0", "1"])
    found = encoder(x)
    assert all(torch.equal(z, found[name]) for name, z in copy.deepcopy(encoder)(x).items())
    with encoder.listening(x) as heard:
        network(x)
        pickle.loads(pickle.dumps(network))(x + 1)
        copy.deepcopy(network)(x + 1)
    assert torch.equal(heard["1"], found["1"])
