"""Networks that nobody here wrote (timm, torchvision, transformers), small and random: the features give the logits."""

import pytest
import torch
from torch.nn import functional as F

from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.batches import EncodingError

pytestmark = pytest.mark.filterwarnings("ignore")
slow = pytest.mark.slow

B, K = 4, 5
LABELS = torch.arange(B) % K


def images(size):
    return torch.randn(B, 3, size, size), LABELS


def encoded_at(net, batch, head, expected, *, train=False):
    """Features of a batch, which make the network's logits through the weights of the expected head."""
    encode = BatchEncoder(net.train(train), head)
    encode.start()
    with torch.no_grad():
        output = encode.run(batch)
    heard = encode.take(batch)
    encoded = heard if train else BatchEncoder(net, head)(batch)
    assert encode.head == expected, encode.problem
    layer, logits = net.get_submodule(expected), getattr(output, "logits", output)
    made = F.linear(encoded.features, layer.weight.flatten(1), layer.bias)
    assert encoded.features.shape == (B, layer.weight.shape[1])
    torch.testing.assert_close(made, logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(heard.features, encoded.features, atol=1e-5, rtol=1e-5)
    return encoded.features


@pytest.fixture(scope="module")
def swin():
    timm = pytest.importorskip("timm")
    # img_size 32, patches of 4: maps of 8 x 8 and then 4 x 4 places, with their channels last
    return timm.models.swin_transformer.SwinTransformer(
        img_size=32, window_size=2, embed_dim=8, depths=(1, 1), num_heads=(1, 2), num_classes=K
    )


@pytest.mark.parametrize("head", [None, "head", "head.fc"])
def test_swin_gives_the_mean_over_places_and_not_over_channels(swin, head):
    x, y = images(32)
    features = encoded_at(swin, (x, y), head, "head.fc")
    with torch.no_grad():
        maps = swin.forward_features(x)
        assert maps.shape == (B, 4, 4, 16)
        torch.testing.assert_close(features, swin.forward_head(maps, pre_logits=True))
        torch.testing.assert_close(features, maps.mean((1, 2)))
    with pytest.raises(EncodingError, match=r"look like maps \(B, H, W, C\)"):
        BatchEncoder(swin, encoder="forward_features")((x, y))


@slow
@pytest.mark.parametrize("train", [False, True])
def test_timm_networks(train):
    timm = pytest.importorskip("timm").models
    convnext = timm.convnext.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=K)
    vit = timm.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=K
    )
    averaging = timm.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=K, global_pool="avg"
    )
    for net, head in ((convnext, "head.fc"), (vit, "head"), (averaging, "head")):
        encoded_at(net, images(32), None, head, train=train)
        encoded_at(net, images(32), "head", head, train=train)
    for name, head in (
        ("mobilenetv3_small_050", "classifier"),
        ("efficientnet_lite0", "classifier"),
        ("resnet18", "fc"),
    ):
        encoded_at(timm.create_model(name, num_classes=K), images(64), None, head, train=train)


@slow
def test_deit_has_two_heads_and_asks_which():
    timm = pytest.importorskip("timm").models
    net = timm.deit.VisionTransformerDistilled(
        img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=K
    )
    x, y = images(32)
    with pytest.raises(EncodingError, match="each of head, head_dist could be the classification layer"):
        BatchEncoder(net)((x, y))
    for head, place in (("head", 0), ("head_dist", 1)):
        encoded = BatchEncoder(net.eval(), head)((x, y))
        with torch.no_grad():
            torch.testing.assert_close(encoded.features, net.forward_features(x)[:, place])


@slow
def test_torchvision_networks_and_their_auxiliary_classifiers():
    models = pytest.importorskip("torchvision").models
    for make, size in ((models.inception_v3, 299), (models.googlenet, 224)):
        net = make(num_classes=K, aux_logits=True, init_weights=False)
        encoded_at(net, images(size), None, "fc")
        encoded_at(net, images(size), None, "fc", train=True)  # the auxiliary classifiers take part
    for make, head in (
        (models.mobilenet_v2, "classifier.1"),
        (models.mobilenet_v3_small, "classifier.3"),
        (models.efficientnet_b0, "classifier.1"),
        (models.convnext_tiny, "classifier.2"),
        (models.swin_t, "head"),
        (models.shufflenet_v2_x0_5, "fc"),
    ):
        encoded_at(make(num_classes=K), images(64), None, head)
    squeezenet = models.squeezenet1_1(num_classes=K)  # averages behind a ReLU behind its head
    with pytest.raises(EncodingError, match="did not take part"):
        BatchEncoder(squeezenet)(images(64))
    with pytest.raises(EncodingError, match="neither one of them nor their mean gives the network's logits"):
        BatchEncoder(squeezenet, "classifier.1")(images(64))


def text_batch(left=False):
    """Sentences of 7, 5, 3 and 1 tokens, padded with zeros."""
    ids, mask = torch.randint(3, 30, (B, 7)), torch.zeros(B, 7, dtype=torch.long)
    for row, length in enumerate((7, 5, 3, 1)):
        mask[row, slice(7 - length, None) if left else slice(length)] = 1
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": LABELS}


def text_network(transformers, name):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if name == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    if name == "DistilBert":
        sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}
    config = getattr(transformers, f"{name}Config")(vocab_size=30, num_labels=K, pad_token_id=0, **sizes)
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


@slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("Bert", "classifier"),
        ("DistilBert", "classifier"),
        ("Roberta", "classifier.out_proj"),
        ("Electra", "classifier.out_proj"),
        ("GPT2", "score"),
        ("Llama", "score"),
    ],
)
def test_transformers_for_sequences(name, head, train):
    transformers = pytest.importorskip("transformers")
    net = text_network(transformers, name)
    for given in (None, head):
        encoded_at(net, text_batch(), given, head, train=train)


@slow
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_the_features_of_a_causal_model_are_the_last_token_before_the_padding(name, left):
    net = text_network(pytest.importorskip("transformers"), name)
    batch = text_batch(left)
    features = encoded_at(net, batch, None, "score")
    last = [6] * B if left else [6, 4, 2, 0]
    with torch.no_grad():
        hidden = net.base_model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    torch.testing.assert_close(features, hidden[torch.arange(B), last])


@slow
@pytest.mark.parametrize("name", ["Roberta", "Electra"])
def test_a_head_of_two_layers_suggests_the_last(name):
    net = text_network(pytest.importorskip("transformers"), name)
    with pytest.raises(
        EncodingError, match=r"ClassificationHead with inputs of shape \(4, 7, 16\).*classifier\.out_proj'"
    ):
        BatchEncoder(net, "classifier")(text_batch())
