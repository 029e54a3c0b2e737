"""The head is what gives the network's logits, and the features are what it makes them from: patterns of networks."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.features import pool_features

B, T, D, K = 4, 7, 6, 3
LABELS = torch.arange(B) % K
LENGTHS = torch.tensor([7, 3, 5, 1])


def check(net, x, head=None, *, expected="fc", train=False):
    """The features of a batch, which give the network's logits through the weights of the expected head."""
    net.train(train)
    encode = BatchEncoder(net, head)
    if train:
        encode.start()
        output = net(x)
        encoded = encode.take((x, LABELS))
        assert encoded is not None, encode.problem
    else:
        encoded = encode((x, LABELS))
        with torch.no_grad():
            output = net(x)
    logits = getattr(output, "logits", output)
    layer = net.get_submodule(expected)
    assert encode.head == expected
    assert encoded.features.shape == (B, layer.weight.shape[1])
    made = F.linear(encoded.features, layer.weight.flatten(1), layer.bias)
    torch.testing.assert_close(made, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(encoded.logits, logits)
    return encoded.features, encode


class Body(nn.Module):
    """A body of linear layers, the head, and what the subclass makes of it."""

    def __init__(self, make, layer=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.fc = layer or nn.Linear(D, K)
        self.aux = nn.Linear(D, K)
        self.make = make

    def forward(self, x):
        return self.make(self, self.body(x))


def last_token(net, z):
    logits = net.fc(z)
    return logits[torch.arange(B), LENGTHS - 1]


# -- which of the positions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize("train", [False, True])
def test_of_tokens_the_one_that_is_classified_is_the_features(head, train):
    net, x = Body(last_token), torch.randn(B, T, D)
    features, encode = check(net, x, head, train=train)
    assert torch.equal(features, net.body(x)[torch.arange(B), LENGTHS - 1])
    assert encode.taken.endswith("the features are its input at the one of 7 positions that is classified")
    shorter = torch.randn(B, 1, D).expand(B, 9, D) + torch.arange(9)[:, None]  # the next batch has another length
    assert torch.equal(encode((shorter, LABELS)).features, net.body(shorter)[torch.arange(B), LENGTHS - 1])


@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize("shape", [(T, D), (2, 5, D)], ids=["tokens", "channels last"])
def test_where_the_logits_are_averaged_so_are_the_features(shape, head):
    net, x = Body(lambda net, z: net.fc(z).flatten(1, -2).mean(1)), torch.randn(B, *shape)
    features, _ = check(net, x, head)
    torch.testing.assert_close(features, net.body(x).flatten(1, -2).mean(1))


def test_channels_of_a_convolution_come_first():
    conv = nn.Conv2d(D, K, 1)
    net = nn.Sequential(nn.Conv2d(D, D, 3), conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(B, D, 2 + D, 2 + D)  # as wide as it has channels
    features, _ = check(net, x, "1", expected="1")
    torch.testing.assert_close(features, net[0](x).mean((2, 3)))


@pytest.mark.parametrize("head", [None, "2"])
def test_a_convolution_behind_the_pooling_is_a_head_like_any_other(head):
    net = nn.Sequential(nn.Conv2d(2, D, 1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(D, K, 1), nn.Flatten())
    features, _ = check(net, torch.randn(B, 2, 5, 5), head, expected="2")
    assert features.shape == (B, D)


@pytest.mark.parametrize("layer", [nn.Linear(D, K), nn.Conv1d(D, K, 1)], ids=["linear", "conv"])
def test_pooling_that_no_features_can_give_is_refused(layer):
    linear = isinstance(layer, nn.Linear)
    net = Body(lambda net, z: net.fc(z if linear else z.mT).amax(1 if linear else 2), layer)
    with pytest.raises(
        EncodingError, match=r"fc gets .*7 positions.*nor their mean gives the network's logits\. Name a"
    ):
        BatchEncoder(net, "fc")((torch.randn(B, T, D), LABELS))


def test_half_precision_and_logits_that_are_nan_find_the_token_too():
    net, x = Body(last_token).eval(), torch.randn(B, T, D)
    encode = BatchEncoder(net, "fc")
    with torch.autocast("cpu", torch.bfloat16):
        half = encode((x, LABELS)).features
        torch.testing.assert_close(half, net.body(x)[torch.arange(B), LENGTHS - 1].float(), atol=0, rtol=0)
    nn.init.constant_(net.body[0].weight, float("nan"))
    assert encode((x, LABELS)).features.isnan().all()


# -- which layer ------------------------------------------------------------------------------------------------------

Outputs = namedtuple("Outputs", ["logits", "aux_logits"])


@pytest.mark.parametrize(
    "make",
    [
        lambda net, z: Outputs(net.fc(z), net.aux(z)),
        lambda net, z: {"aux": net.aux(z), "logits": net.fc(z)},
        lambda net, z: (net.aux(z), net.fc(z))[1],
        lambda net, z: (net.fc(z), net.aux(z))[0],
        lambda net, z: (z, net.fc(z)),
    ],
    ids=["named tuple", "dict", "aux first", "aux last", "features and logits"],
)
def test_an_auxiliary_classifier_or_a_layer_of_the_body_is_not_the_head(make):
    net, x = Body(make).eval(), torch.randn(B, D)
    encode = BatchEncoder(net)
    encoded = encode((x, LABELS))
    assert encode.head == "fc"
    assert torch.equal(encoded.features, net.body(x))
    assert torch.equal(encoded.logits, net.fc(net.body(x)))


@pytest.mark.parametrize(
    "end",
    [nn.LogSoftmax(1), nn.Softmax(1), nn.Sigmoid(), lambda z: 0.5 * z],
    ids=["log", "softmax", "sigmoid", "scale"],
)
def test_what_is_made_of_the_logits_still_tells_the_head(end):
    square = nn.Sequential(nn.Linear(D, K), nn.ReLU())  # a layer of the body that is as wide
    square = nn.Sequential(square, nn.Linear(K, K)) if isinstance(end, nn.Module) else nn.Linear(D, K)
    net = Body(lambda net, z: end(net.fc(z)), square)
    encode = BatchEncoder(net)
    encode((torch.randn(B, D), LABELS))
    assert encode.head == ("fc.1" if isinstance(end, nn.Module) else "fc")


@pytest.mark.parametrize(
    "make",
    [lambda net, z: (net.fc(z) + net.aux(z)) / 2, lambda net, z: (net.fc(z), net.aux(z))],
    ids=["averaged", "tuple"],
)
def test_where_two_layers_could_be_the_head_both_are_named(make):
    with pytest.raises(EncodingError, match=r"each of fc, aux could be the classification layer\. Name .* head="):
        BatchEncoder(Body(make))((torch.randn(B, D), LABELS))


def test_logits_that_no_layer_gave_are_refused_with_the_candidates():
    net = Body(lambda net, z: -torch.cdist(z, torch.ones(9, D)))
    with pytest.raises(EncodingError, match=r"returned \(4, 9\), which no nn.Linear gave.*Candidates: aux, fc, body.2"):
        BatchEncoder(net)((torch.randn(B, D), LABELS))


def test_a_network_that_returns_something_else_is_not_taken_for_its_body():
    losses = BatchEncoder(Body(lambda net, z: net.fc(torch.relu(z)).square().sum()))
    with pytest.raises(EncodingError, match=r"each of body\.2, fc could be the classification layer"):
        losses((torch.randn(B, D), LABELS))
    inside = BatchEncoder(nn.Sequential(Body(lambda net, z: net.fc(z)), nn.CrossEntropyLoss()))
    inside.start()
    inside.module[1](inside.module[0](torch.randn(B, D)), LABELS)
    assert inside.take((torch.randn(B, D), LABELS)) is not None
    assert inside.head == "0.fc"


def test_a_step_that_calls_the_parts_one_by_one_tells_the_head_too():
    net, x = Body(None), torch.randn(B, D)
    encode = BatchEncoder(net)
    encode.start()
    logits = net.fc(net.body(x))
    encoded = encode.take((x, LABELS))
    assert encode.head == "fc"
    assert torch.equal(encoded.logits, logits)
    encode = BatchEncoder(net)
    encode.start()
    net.aux(net.body(x)), net.fc(net.body(x))
    assert encode.take((x, LABELS)) is None  # nobody can tell; a pass of our own might
    assert "each of aux, fc could be" in str(encode.problem)


class Pooling(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, z):
        return self.layers(z[:, 0])


def test_of_a_head_of_several_layers_the_input_is_taken_if_it_can_be_and_else_the_last_layer_suggested():
    x = torch.randn(B, T, D)
    one, two = Pooling(nn.Dropout(0.5), nn.Linear(D, K)), Pooling(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, K))
    _, encode = check(Body(lambda net, z: net.fc(z), one), x, "fc", expected="fc.layers.1")
    assert "the head is 'fc.layers.1'" in encode.taken
    net = Body(lambda net, z: net.fc(z), two)
    with pytest.raises(EncodingError, match=r"a Pooling with inputs of shape \(4, 7, 6\).*head='fc\.layers\.2'"):
        BatchEncoder(net, "fc")((x, LABELS))
    check(net, x, None, expected="fc.layers.2")
    encode = BatchEncoder(net, "fc.layers")  # its input is (B, D)
    assert torch.equal(encode((x, LABELS)).features, net.body(x)[:, 0])
    assert encode.taken == ""
    with pytest.raises(EncodingError, match=r"a Flatten with inputs of shape \(4, 7, 6\).*Name an nn\.Linear"):
        BatchEncoder(nn.Sequential(nn.Linear(D, D), nn.Flatten()), "1")((x, LABELS))


def test_a_head_that_lacks_an_output_for_a_class_is_refused():
    net = Body(lambda net, z: net.fc(z))
    x, labels = torch.randn(B, D), torch.tensor([0, 2, 5, -1])
    encode = BatchEncoder(net)
    encode.check_width(encode((x, LABELS)))
    with pytest.raises(
        EncodingError, match=r"fc gives 3 logits, but there is a sample of class 5.*Candidates: aux, fc"
    ):
        encode.check_width(encode((x, labels)))
    single = BatchEncoder(Body(lambda net, z: net.fc(z)[:, 0], nn.Linear(D, 1)))  # one output for two classes
    encoded = single((x, torch.tensor([0, 1, 1, 0])))
    assert single.head == "fc"
    single.check_width(encoded)


def test_maps_with_their_channels_last_are_not_averaged_over_them():
    maps = torch.randn(B, 5, 5, D)
    with pytest.raises(ValueError, match=r"\(4, 5, 5, 6\) look like maps \(B, H, W, C\).*permute"):
        pool_features(maps)
    assert pool_features(maps.permute(0, 3, 1, 2)).shape == (B, D)
    with pytest.raises(EncodingError, match=r"at body: features of shape .* look like maps"):
        BatchEncoder(Body(lambda net, z: net.fc(z.mean((1, 2)))), encoder="body")((maps, LABELS))
