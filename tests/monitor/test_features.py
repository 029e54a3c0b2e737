"""Features are what the head makes the network's logits from, recorded in the network's own forward pass."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rmd_plugin.compare.adapters import EncodingError
from rmd_plugin.monitor.features import BatchEncoder

B, T, D, K = 5, 7, 6, 3
LABELS = torch.tensor([0, 1, 2, 1, 0])
LENGTHS = torch.tensor([7, 3, 5, 1, 2])


class Net(nn.Module):
    """A body with a mode, a layer beside the head, and what ``make`` returns of it."""

    def __init__(self, make=lambda net, z: net.fc(z), fc=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Dropout(0.5), nn.Linear(D, D))
        self.aux, self.fc = nn.Linear(D, K), fc or nn.Linear(D, K)
        self.make = make

    def embed(self, x):
        return self.body(x)

    def forward(self, x):
        z = self.body(x)
        self.aux(z)
        return self.make(self, z)


def images(*shape):
    return torch.randn(B, *shape), LABELS


def check(net, batch, head=None, expected="fc"):
    """Features of a batch, which give the network's logits through the weights of the expected head."""
    encode = BatchEncoder(net, head)
    encoded = encode(batch)
    assert encode.head == expected
    net.eval()
    with torch.no_grad():
        output = net(**{k: v for k, v in batch.items() if k != "labels"}) if isinstance(batch, dict) else net(batch[0])
    logits, layer = getattr(output, "logits", output), net.get_submodule(expected)
    assert encoded.features.shape == (len(logits), layer.weight.shape[1])
    made = F.linear(encoded.features, layer.weight.flatten(1), layer.bias)
    torch.testing.assert_close(made, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(encoded.logits, logits, atol=1e-5, rtol=1e-5)
    return encoded.features


# -- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["fc", None])
def test_the_heads_input_is_the_features_and_its_output_the_logits(head):
    net, batch = Net().train(), images(D)
    modes = [layer.training for layer in net.modules()]
    features = BatchEncoder(net, head)(batch).features
    assert [layer.training for layer in net.modules()] == modes
    assert not any(layer._forward_hooks for layer in net.modules())
    assert torch.equal(check(net, batch, head), features)  # without dropout
    assert torch.equal(features, net.body(batch[0]))


def test_a_forward_pass_of_somebody_else_is_recorded_from_the_start_on():
    net, (x, y) = Net().eval(), images(D)
    encode = BatchEncoder(net, "fc")
    net(x)
    encode.start()
    for part in (x[:2], x + 1, x, x[:3]):  # the last one of the batch's size counts
        logits = net(part)
        logits.zero_()  # what was recorded is a copy
    encoded = encode.take((x, y))
    assert torch.equal(encoded.features, net.body(x))
    assert torch.equal(encoded.logits, net(x))


Outputs = namedtuple("Outputs", ["logits", "aux_logits"])


@pytest.mark.parametrize(
    "make",
    [
        lambda net, z: Outputs(net.fc(z), net.aux(z)),
        lambda net, z: {"aux": net.aux(z), "logits": net.fc(z)},
        lambda net, z: (z, net.fc(z)),
        lambda net, z: net.fc(z).softmax(1),
    ],
    ids=["named tuple", "dict", "features and logits", "probabilities"],
)
def test_the_head_is_the_layer_whose_output_is_returned_and_no_auxiliary_one(make):
    net, (x, y) = Net(make).eval(), images(D)
    encode = BatchEncoder(net)
    encoded = encode((x, y))
    assert encode.head == "fc"
    assert torch.equal(encoded.features, net.body(x))
    assert torch.equal(encoded.logits, net.fc(net.body(x)))


@pytest.mark.parametrize(
    ("make", "head", "shape"),
    [
        (lambda net, z: -torch.cdist(z, torch.ones(9, D)), None, (D,)),
        (lambda net, z: net.fc(z).amax(1), "fc", (T, D)),
        (lambda net, z: z, "fc", (D,)),
    ],
    ids=["returned by no layer", "pooled", "did not run"],
)
def test_where_nobody_can_tell_the_features_a_name_is_asked_for(make, head, shape):
    with pytest.raises(EncodingError, match=r"head=.*encoder=.*Candidates: fc, aux"):
        BatchEncoder(Net(make), head)(images(*shape))


@pytest.mark.parametrize("head", [None, "fc"])
def test_of_tokens_the_one_that_is_classified_is_the_features_or_their_mean(head):
    net, batch = Net(lambda net, z: net.fc(z)[torch.arange(B), LENGTHS - 1]), images(T, D)
    features = check(net, batch, head)
    assert torch.equal(features, net.body(batch[0])[torch.arange(B), LENGTHS - 1])
    net, batch = Net(lambda net, z: net.fc(z).flatten(1, -2).mean(1)), images(2, 5, D)
    torch.testing.assert_close(check(net, batch, head), net.body(batch[0]).flatten(1, -2).mean(1))


def test_of_a_head_of_several_layers_the_linear_one_is_taken():
    class Pooling(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(D, K)

        def forward(self, z):
            return self.out(self.drop(z[:, 0]))

    check(Net(fc=Pooling()), images(T, D), "fc", expected="fc.out")


def test_half_precision_is_widened_and_a_network_that_has_diverged_is_nan():
    net, (x, y) = Net(lambda net, z: net.fc(z)[torch.arange(B), LENGTHS - 1]).eval(), images(T, D)
    with torch.autocast("cpu", torch.bfloat16):
        encoded = BatchEncoder(net, "fc")((x, y))
        assert torch.equal(encoded.features, net.body(x)[torch.arange(B), LENGTHS - 1].float())
    nn.init.constant_(net.body[0].weight, float("nan"))
    assert BatchEncoder(net, "fc")((x, y)).features.isnan().all()


# -- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    img: torch.Tensor
    target: torch.Tensor


BATCHES = {
    "torchgeo": lambda x, y: {"image": x, "label": y, "bbox": [None] * B},
    "img, target": lambda x, y: {"img": x, "target": y},
    "pixel_values": lambda x, y: UserDict(pixel_values=x, labels=y),
    "nested tuple": lambda x, y: ((x,), (y, torch.arange(B))),
    "dataclass": Pair,
    "named tuple": namedtuple("Batch", ["x", "y"]),
    "column of labels": lambda x, y: (x, y[:, None]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_the_inputs_and_labels_of_a_batch_are_found_under_the_usual_names(kind):
    net, (x, y) = Net().eval(), images(D)
    encoded = BatchEncoder(net)(BATCHES[kind](x, y))
    assert torch.equal(encoded.features, net.body(x))
    assert torch.equal(encoded.labels, y)


def test_what_forward_takes_by_name_is_taken_from_a_dict():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.classifier = nn.Embedding(20, D), nn.Linear(D, K)

        def forward(self, input_ids, attention_mask=None):
            z = self.embedding(input_ids) * attention_mask[..., None]
            return SimpleNamespace(logits=self.classifier(z.mean(1)))

    ids, mask = torch.randint(0, 20, (B, T)), torch.ones(B, T)
    batch = {"input_ids": ids, "attention_mask": mask, "idx": torch.arange(B), "labels": LABELS}
    net = Text()
    encoded = BatchEncoder(net)(batch)
    assert torch.equal(encoded.features, net.embedding(ids).mean(1))
    assert torch.equal(encoded.labels, LABELS)


def test_the_modules_own_predict_step_says_how_a_batch_is_run():
    class Odd(Net):
        def predict_step(self, batch, batch_idx):
            return self(batch["far"]["away"])

    net, (x, y) = Odd().eval(), images(D)
    assert torch.equal(BatchEncoder(net)({"far": {"away": x}, "label": y}).features, net.body(x))
    assert torch.equal(BatchEncoder(net)(x).features, net.body(x))  # a plain tensor goes to forward


def test_any_batch_will_do_with_functions_of_the_users():
    net, batch = Net().eval(), SimpleNamespace(image=torch.randn(4, D), target=[0, 1, 2, 0])
    encoded = BatchEncoder(net, forward=lambda m, b: m(b.image), labels=lambda b: b.target)(batch)
    assert torch.equal(encoded.features, net.body(batch.image))
    assert encoded.labels.tolist() == [0, 1, 2, 0]


def test_batches_without_labels_are_encoded_too():
    x = torch.randn(4, D)
    for batch in (x, (x,), [x]):
        encoded = BatchEncoder(Net())(batch)
        assert encoded.labels is None
        assert len(encoded) == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2, D), torch.zeros(2, D), torch.zeros(2).long()), "length 3.*forward=.*labels=.*fit_loader="),
        ((torch.zeros(2, D), torch.full((2,), 0.5)), "integers.*labels="),
        ({"strange": torch.zeros(2, 9), "label": torch.zeros(2).long()}, "could not be run.*forward=.*labels="),
    ],
)
def test_batches_of_an_unknown_kind_are_refused_with_a_remedy(batch, message):
    with pytest.raises(EncodingError, match=message):
        BatchEncoder(Net(), "fc")(batch)


def test_a_module_without_forward_is_run_through_the_network_that_holds_the_head():
    module = nn.Module()
    module.model = Net().eval()
    x, y = images(D)
    assert torch.equal(BatchEncoder(module, "model.fc")((x, y)).features, module.model.body(x))
    with pytest.raises(EncodingError, match="forward="):
        BatchEncoder(module)((x, y))


# -- networks that nobody here wrote, small and random ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_networks_of_timm_and_torchvision():
    timm, models = pytest.importorskip("timm"), pytest.importorskip("torchvision").models
    swin = timm.models.swin_transformer.SwinTransformer(
        img_size=32, window_size=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2), num_classes=K
    )
    for head in (None, "head", "head.fc"):
        check(swin, images(3, 32, 32), head, expected="head.fc")
    resnet = timm.create_model("resnetv2_50", num_classes=K)  # its head is a convolution
    for net, head in (
        (resnet, "head.fc"),
        (models.mobilenet_v3_small(num_classes=K), "classifier.3"),
        (models.swin_t(num_classes=K), "head"),
        (models.inception_v3(num_classes=K, aux_logits=True, init_weights=False), "fc"),
    ):
        check(net, images(3, *((299, 299) if head == "fc" else (64, 64))), None, expected=head)
