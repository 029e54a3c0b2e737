import copy
import pickle
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.loop import encode_batches


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.projection = nn.Linear(8, 2)
        self.fc = nn.Linear(8, 3)

    def embed(self, x):
        return self.body(x)

    def forward(self, x):
        z = self.embed(x)
        self.projection(z)
        return self.fc(z)


class Text(nn.Module):
    """Called with keywords, gives an object with logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None):
        z = self.embedding(input_ids) * attention_mask[..., None]
        return SimpleNamespace(logits=self.classifier(z.mean(1)))


class Wrapper(nn.Module):
    """No forward of its own, like a LightningModule that calls self.model in its steps."""

    def __init__(self):
        super().__init__()
        self.model = Net()


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def batch():
    return torch.randn(5, 6), torch.tensor([0, 1, 2, -1, 0])


def expected(net, x):
    net.eval()
    with torch.no_grad():
        return net.embed(x), net(x)


def test_the_heads_input_is_the_features_and_its_output_the_logits(net, batch):
    encoded = BatchEncoder(net, "fc")(batch)
    z, logits = expected(net, batch[0])
    assert torch.equal(encoded.features, z)
    assert torch.equal(encoded.logits, logits)
    assert torch.equal(encoded.labels, batch[1])


def test_without_a_name_the_head_is_the_layer_whose_output_is_returned(net, batch):
    with BatchEncoder(net) as encode:
        encoded = encode(batch)
        assert not any(layer._forward_hooks for layer in net.modules())
        encode.start()
        assert sum(len(layer._forward_hooks) for layer in net.modules()) == 1  # more are not needed from now on
    assert encode.head == "fc"
    assert encode.taken.startswith(
        "the head is 'fc', Linear(in_features=8, out_features=3, bias=True); the features are"
    )
    assert torch.equal(encoded.features, expected(net, batch[0])[0])
    assert not any(layer._forward_hooks for layer in net.modules())


@pytest.mark.parametrize("encoder", ["body", "embed", "callable"])
def test_an_encoder_gives_the_features_of_the_head(net, batch, encoder):
    encode = BatchEncoder(net, encoder=(lambda x: net.body(x)) if encoder == "callable" else encoder)
    z, logits = expected(net, batch[0])
    net.train()
    encoded = encode(batch) if encoder != "callable" else BatchEncoder(net.eval(), encoder=lambda x: net.body(x))(batch)
    assert torch.equal(encoded.features, z)
    assert torch.equal(encoded.logits, logits)
    assert encode.passive == (encoder == "body")


def test_listening_to_a_forward_pass_of_somebody_else_takes_no_second_one(net, batch):
    calls = []
    net.fc.register_forward_hook(lambda *_: calls.append(1))
    net.eval()
    with BatchEncoder(net, "fc") as encode:
        net(batch[0])  # before start: not heard
        encode.start()
        logits = net(batch[0])
        encoded = encode.take(batch)
        assert encode.take(batch) is None
    assert len(calls) == 2
    assert torch.equal(encoded.logits, logits)


def test_of_several_passes_the_last_one_of_the_batchs_size_counts(net, batch):
    net.eval()
    with BatchEncoder(net, "fc") as encode:
        encode.start()
        for part in (batch[0][:2], batch[0] + 1, batch[0], batch[0][:3]):
            net(part)
        assert torch.equal(encode.take(batch).features, net.embed(batch[0]))
        encode.start()
        net(batch[0][:2])
        with pytest.raises(EncodingError, match="fc saw 2 samples, but the batch has 5 labels"):
            encode.take(batch)


def test_the_module_is_run_in_evaluation_mode_and_gets_its_modes_back(net, batch):
    net.train()
    net.body[1].eval()  # a frozen layer
    before = {name: layer.training for name, layer in net.named_modules()}
    mean = net.body[1].running_mean.clone()
    first, second = (BatchEncoder(net, "fc")(batch) for _ in range(2))
    assert torch.equal(first.features, second.features)  # no dropout
    assert before == {name: layer.training for name, layer in net.named_modules()}
    assert torch.equal(mean, net.body[1].running_mean)
    assert not first.features.requires_grad


def test_what_was_heard_is_a_copy(net, batch):
    net.eval()
    with BatchEncoder(net, "fc") as encode, torch.no_grad():
        encode.start()
        logits = net(batch[0])
        kept = logits.clone()
        logits.zero_()
        assert torch.equal(encode.take(batch).logits, kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "fcc"}, "no layer named 'fcc'. Candidates: fc, .*projection, body.0"),
        ({"head": "body.7"}, "no layer named 'body.7'"),
        ({"head": ""}, "no layer named ''"),
        ({"encoder": "embedd"}, "no layer or method 'embedd'"),
        ({"head": "fc", "encoder": "body"}, "not both"),
    ],
)
def test_a_wrong_name_is_refused_and_the_candidates_are_listed(net, options, message):
    with pytest.raises(EncodingError, match=message):
        BatchEncoder(net, **options)


def test_a_layer_that_takes_no_part_is_named(net, batch):
    net.unused = nn.Linear(3, 3)
    with pytest.raises(EncodingError, match="unused did not take part in the forward pass of Net"):
        BatchEncoder(net, "unused")(batch)


@pytest.mark.parametrize("mapping", [dict, UserDict])
@pytest.mark.parametrize("key", ["labels", "label"])
def test_dicts_are_called_with_keywords_and_without_their_labels(mapping, key):
    net = Text().eval()
    ids, mask = torch.randint(0, 20, (4, 7)), torch.ones(4, 7)
    batch = mapping({"input_ids": ids, "attention_mask": mask, "idx": torch.arange(4), key: torch.arange(4) % 3})
    for options in ({"head": "classifier"}, {}, {"encoder": lambda x: net.embedding(x["input_ids"]).mean(1)}):
        encoded = BatchEncoder(net, **options)(batch)
        assert torch.equal(encoded.logits, net(ids, mask).logits)
        assert torch.equal(encoded.features, net.embedding(ids).mean(1))
        assert torch.equal(encoded.labels, batch[key])


def test_a_module_that_takes_the_whole_dict_gets_it():
    class Whole(Text):
        def forward(self, batch):
            return super().forward(batch["input_ids"], torch.ones_like(batch["input_ids"]))

    batch = {"input_ids": torch.randint(0, 20, (4, 7)), "labels": torch.arange(4)}
    assert BatchEncoder(Whole(), "classifier")(batch).features.shape == (4, 8)


def test_any_batch_will_do_with_callables_of_the_users(net):
    batch = SimpleNamespace(image=torch.randn(4, 6), target=[0, 1, 2, 0])
    options = {"forward": lambda module, b: module(b.image), "labels": lambda b: b.target}
    encoded = BatchEncoder(net, "fc", **options)(batch)
    assert torch.equal(encoded.features, expected(net, batch.image)[0])
    assert encoded.labels.tolist() == [0, 1, 2, 0]


def test_batches_without_labels_are_encoded_too(net):
    x = torch.randn(4, 6)
    for batch in (x, (x,), [x]):
        encoded = BatchEncoder(net, "fc")(batch)
        assert encoded.labels is None
        assert len(encoded) == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2, 6), torch.zeros(2).long(), 0), "tuple of length 3.*forward=.*labels="),
        ((torch.zeros(2, 6), torch.full((2,), 0.5)), "labels must be integers.*Pass labels="),
        ((torch.zeros(2, 6), torch.zeros(2, 3).long()), "one per sample.*Pass labels="),
    ],
)
def test_batches_of_an_unknown_kind_are_refused_with_a_remedy(net, batch, message):
    with pytest.raises(EncodingError, match=message):
        BatchEncoder(net, "fc")(batch)


def test_a_module_without_forward_is_run_through_the_network_that_holds_the_head(batch):
    module = Wrapper()
    assert torch.equal(BatchEncoder(module, "model.fc")(batch).features, expected(module.model, batch[0])[0])
    with pytest.raises(EncodingError, match=r"Wrapper does not define forward.*forward=lambda"):
        BatchEncoder(module)(batch)


def test_half_precision_is_widened_and_maps_are_averaged():
    net = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Conv2d(5, 4, 1)).to(torch.bfloat16)
    x = torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    encoded = BatchEncoder(net, "1")((x, torch.tensor([0, 1])))
    assert encoded.features.dtype == encoded.logits.dtype == torch.float32
    assert torch.equal(encoded.features, net[0](x).float().mean((2, 3)))


def test_tokens_have_to_be_pooled_first():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(EncodingError, match=r"1 gets inputs of shape \(2, 7, 4\), so 7 positions.*behind the pooling"):
        BatchEncoder(net, "1")((torch.randn(2, 7, 3), torch.tensor([0, 1])))


def test_copies_of_a_module_do_not_report_to_the_encoder_of_the_original(net, batch):
    with BatchEncoder(net, "fc") as encode:
        encode.start()
        net.train()(batch[0])
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            twin(batch[0] + 1)
        assert [call.name for call in encode._recorder.calls] == ["fc", ""]


def test_a_loader_is_encoded_batch_by_batch(net, batch):
    x, y = batch
    encoded = list(encode_batches(BatchEncoder(net, "fc"), [(x[:2], y[:2]), (x[2:], y[2:])]))
    assert torch.allclose(torch.cat([e.features for e in encoded]), expected(net, x)[0])
    assert torch.equal(torch.cat([e.labels for e in encoded]), y)


def test_samples_can_be_selected(net, batch):
    encoded = BatchEncoder(net, "fc")(batch)
    part = encoded.select(torch.tensor([True, False, True, False, False]))
    assert torch.equal(part.features, encoded.features[[0, 2]])
    assert torch.equal(part.logits, encoded.logits[[0, 2]])
    assert part.labels.tolist() == [0, 2]
    assert encoded.select(torch.ones(5, dtype=torch.bool)) is encoded


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_hooks_that_are_there_before_compilation_fire_in_a_compiled_module(net, batch):
    z, logits = expected(net, batch[0])
    with BatchEncoder(net, "fc") as encode:
        compiled = torch.compile(net, backend="eager")
        for _ in range(2):
            encode.start()
            with torch.no_grad():
                compiled(batch[0])
            encoded = encode.take(batch)
            assert torch.allclose(encoded.features, z, atol=1e-6)
            assert torch.allclose(encoded.logits, logits, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_transformers_model_is_encoded_at_its_classifier():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    net = transformers.BertForSequenceClassification(config).eval()
    batch = transformers.BatchEncoding(
        {
            "input_ids": torch.randint(0, 30, (4, 6)),
            "attention_mask": torch.ones(4, 6).long(),
            "labels": torch.arange(4),
        }
    )
    encode = BatchEncoder(net)
    encoded = encode(batch)
    assert encode.head == "classifier"
    with torch.no_grad():
        output = net.bert(batch["input_ids"], batch["attention_mask"])
    assert torch.allclose(encoded.features, output.pooler_output, atol=1e-6)
    assert encoded.logits.shape == (4, 3)
