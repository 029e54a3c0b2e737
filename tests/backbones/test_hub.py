"""Backbones of other libraries, offline, on tiny models made here: timm, open_clip, torchvision, transformers."""

import json
import logging
import pickle
import sys

import hub_cache
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from rmd_plugin.backbones import BERT, HF, CheckpointError, ImageTransform, OpenCLIP, Timm, TorchVision
from rmd_plugin.files import MissingExtraError


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """Empty caches and no network, on any machine."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "torch" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    for kind, name, module, extra in ((Timm, "resnet18", "timm", "vision"), (BERT, "any", "transformers", "text")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=rf"{module}.*\[{extra}\]"):
            kind(name, pretrained=False)


# -- timm -------------------------------------------------------------------------------------------------------------


def test_timm_gives_timms_own_features_and_head_from_the_cache(tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    name = "test_resnet.r160_in1k"
    reference = timm.create_model(name, pretrained=False).eval()
    cached = hub_cache.snapshot(tmp_path, f"timm/{name}", "0" * 40)
    cached.mkdir()
    save_file(reference.state_dict(), cached / "model.safetensors")
    x = torch.rand(2, 3, 64, 64)
    plain = Timm(name, frozen=True)
    assert plain.head is None
    assert set(plain.origins.values()) == {"the weights' metadata"}
    expected = reference.forward_head(reference.forward_features(x), pre_logits=True)
    torch.testing.assert_close(plain.encoder(x), expected)
    full = Timm(name, pretrained_head=True).eval()
    assert full.head_loaded
    torch.testing.assert_close(full(x), reference(x))
    with pytest.raises(CheckpointError, match=r"backbone\.pretrained_head=false"):
        Timm(name, pretrained_head=True, num_classes=7)
    with pytest.raises(ValueError, match="no weights"):
        Timm("resnet20ts")


@pytest.mark.parametrize("name", ["test_vit", "test_convnext"])
def test_a_timm_checkpoint_loads_with_its_classifier(name, tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    reference = timm.create_model(name, num_classes=7).eval()
    torch.save({"state_dict": {f"net.{k}": v for k, v in reference.state_dict().items()}}, tmp_path / "model.pt")
    ours = Timm(name, checkpoint=tmp_path / "model.pt").eval()
    assert ours.num_classes == 7
    x = torch.rand(2, 3, ours.test_transform.size, ours.test_transform.size)
    torch.testing.assert_close(ours(x), reference(x))


def test_the_original_numpy_weights_of_a_vision_transformer_load_as_timm_loads_them(tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    name, options = "vit_base_patch16_224.orig_in21k", {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32}
    block = "Transformer/encoderblock_0"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    shapes = {"embedding/kernel": (16, 16, 3, 32), "embedding/bias": 32, "cls": (1, 1, 32)}
    shapes |= {"Transformer/posembed_input/pos_embedding": (1, 5, 32)}
    for norm in ("Transformer/encoder_norm", f"{block}/LayerNorm_0", f"{block}/LayerNorm_2"):
        shapes |= {f"{norm}/scale": 32, f"{norm}/bias": 32}
    for part in ("query", "key", "value"):
        shapes |= {f"{attention}/{part}/kernel": (32, 2, 16), f"{attention}/{part}/bias": (2, 16)}
    shapes |= {f"{attention}/out/kernel": (2, 16, 32), f"{attention}/out/bias": 32}
    for layer, (wide, narrow) in {"Dense_0": (32, 128), "Dense_1": (128, 32)}.items():
        shapes |= {f"{block}/MlpBlock_3/{layer}/kernel": (wide, narrow), f"{block}/MlpBlock_3/{layer}/bias": narrow}
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "ViT.npz", **{key: rng.normal(size=shape) for key, shape in shapes.items()})
    reference = timm.create_model(name, num_classes=0, **options).eval()
    reference.load_pretrained(str(tmp_path / "ViT.npz"))
    ours = Timm(name, options=options, image_size=32, checkpoint=tmp_path / "ViT.npz").eval()
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(ours.encoder(x), reference(x))


# -- open_clip, torchvision -------------------------------------------------------------------------------------------


def test_clip_gives_the_image_embedding_of_a_whole_clip_checkpoint(tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed (extra vision)")
    tower = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16}
    words = {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    (tmp_path / "rmd-tiny-clip.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": tower, "text_cfg": words}))
    open_clip.add_model_config(tmp_path / "rmd-tiny-clip.json")
    reference = open_clip.create_model("rmd-tiny-clip").eval()
    torch.save(reference.state_dict(), tmp_path / "clip.pt")
    x = torch.rand(2, 3, 32, 32)
    ours = OpenCLIP("rmd-tiny-clip", checkpoint=tmp_path / "clip.pt", frozen=True)
    assert (ours.feature_dim, ours.head) == (16, None)
    torch.testing.assert_close(ours.encoder(x), reference.encode_image(x))


def test_torchvision_gives_torchvisions_own_logits_from_the_cache(tmp_path):
    from torchvision.models import mobilenet_v3_small

    reference = mobilenet_v3_small().eval()
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(reference.state_dict(), folder / "mobilenet_v3_small-047dcff4.pth")
    x = torch.rand(2, 3, 64, 64)
    full = TorchVision("mobilenet_v3_small", pretrained_head=True).eval()
    torch.testing.assert_close(full(x), reference(x))
    assert set(full.origins.values()) == {"the weights' metadata"}
    assert TorchVision("mobilenet_v3_small").head is None
    torch.save(reference.state_dict(), tmp_path / "mine.pt")
    loaded = TorchVision("mobilenet_v3_small", checkpoint=tmp_path / "mine.pt").eval()
    torch.testing.assert_close(loaded(x), reference(x))
    for name in ("squeezenet1_1", "fcn_resnet50"):
        with pytest.raises(ValueError, match="classifier"):
            TorchVision(name, pretrained=False)
    with pytest.raises(ValueError, match="IMAGENET1K_V1"):
        TorchVision("resnet18", weights="BEST")


# -- transformers: pictures -------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "the", "weather", "in", "paris", "a", "b", "c"]
TEXTS = ["what is the weather in paris", "a b", "is", "the weather in paris is a b c"]
TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VIT = {**TRANSFORMER, "image_size": 24, "patch_size": 8, "num_labels": 5}
SQUARE = {"size": {"height": 24, "width": 24}}
PHOTO = {"size": {"shortest_edge": 28}, "crop_size": {"height": 24, "width": 24}}
CONV = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_labels": 5, "embedding_size": 8, "layer_type": "basic"}
# the model, its options, its processor and the options of that
MODELS = {
    "vit": ("ViTForImageClassification", VIT, "ViTImageProcessor", SQUARE),
    "resnet": ("ResNetForImageClassification", CONV, "CLIPImageProcessor", PHOTO),
}


def vision(folder, choice="vit"):
    """A model with random weights and its processor, as transformers saves them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra hf)")
    kind, options, processor, settings = MODELS[choice]
    family = kind.removesuffix("ForImageClassification")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**options)).eval()
    for name, buffer in model.named_buffers():  # batch statistics that are not their start
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    getattr(transformers, processor)(**settings).save_pretrained(folder)
    return str(folder)


def pictures():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in ((24, 24), (37, 61), (50, 31))]


@pytest.mark.parametrize("choice", MODELS)
def test_pictures_give_the_features_and_logits_of_transformers_itself(choice, tmp_path):
    name = vision(tmp_path / "model", choice)
    import transformers

    backbone = HF(name).eval()
    transform = backbone.test_transform
    processor = transformers.AutoImageProcessor.from_pretrained(name)
    model = transformers.AutoModelForImageClassification.from_pretrained(name).eval()
    assert (backbone.head_loaded, backbone.num_classes) == (True, 5)
    with torch.no_grad():
        for picture in pictures():
            pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
            assert torch.equal(transform(picture)[None], pixels)
            torch.testing.assert_close(backbone(pixels), model(pixels).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(transform(torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255.0), transform(picture))
    assert set(backbone.origins.values()) == {"the model's own processor"}
    assert str(transform).endswith(f" of {name}")
    # one that never gets a gradient would stop DDP
    train = backbone.train_transform
    backbone.train()(torch.stack([train(picture) for picture in pictures()])).sum().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []

    backbone.save_assets(tmp_path / "assets")
    again = HF(str(tmp_path / "assets"), pretrained=False, num_classes=5)
    again.load_state_dict(backbone.state_dict())
    assert torch.equal(again.eval()(pixels), backbone.eval()(pixels))
    assert torch.equal(pickle.loads(pickle.dumps(again.test_transform))(picture), pixels[0])


def test_the_processor_is_changed_or_replaced_as_the_user_says(tmp_path):
    name = vision(tmp_path, "resnet")
    usual, changed = HF(name), HF(name, image_size=48, mean=[0.5] * 3, std=[0.25] * 3)
    picture = Image.new("RGB", (70, 60), (255, 255, 255))
    prepared = changed.test_transform
    assert prepared(picture).shape == (3, 48, 48)
    torch.testing.assert_close(prepared(picture), torch.full((3, 48, 48), 2.0))
    assert set(changed.origins.values()) == {"the config"}
    assert changed.fingerprint() != usual.fingerprint()
    own = ImageTransform(24, (0.5,) * 3, (0.5,) * 3)
    assert HF(name, transform=own).test_transform is own
    with pytest.raises(ValueError, match="ignored"):
        HF(name, transform=own, mean=[0, 0, 0])


def test_the_pooling_is_what_was_asked_for_and_never_a_random_one(tmp_path):
    name = vision(tmp_path)
    import transformers

    x = torch.rand(3, 3, 24, 24)
    hidden = transformers.AutoModelForImageClassification.from_pretrained(name).eval().base_model(x).last_hidden_state
    for pooling, expected in (("cls", hidden[:, 0]), ("mean", hidden[:, 1:].mean(dim=1))):
        backbone = HF(name, pooling=pooling).eval()
        torch.testing.assert_close(backbone.encoder(x), expected, rtol=1e-4, atol=1e-5)
        assert not backbone.head_loaded
    convolutions = vision(tmp_path / "resnet", "resnet")
    mean, pooler = (HF(convolutions, pooling=pooling).eval().encoder(x) for pooling in ("mean", "pooler"))
    torch.testing.assert_close(mean, pooler)
    for wrong in ("pooler", "max"):
        with pytest.raises(ValueError, match="cls, mean"):
            HF(name, pooling=wrong)


def test_other_numbers_of_classes_get_a_new_head_and_are_said(tmp_path, caplog):
    name = vision(tmp_path)
    with caplog.at_level(logging.INFO):
        backbone = HF(name, num_classes=3)
    assert "5 classes" in caplog.text
    assert (backbone.num_classes, backbone.head_loaded) == (3, False)
    untrained = HF(name, pretrained=False)
    assert (untrained.head_loaded, untrained.num_classes) == (False, None)
    assert untrained.fingerprint() != HF(name, load_head=False).fingerprint()


# -- transformers: texts ----------------------------------------------------------------------------------------------


def text(folder, kind="BertModel"):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra text)")
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, num_labels=4, **TRANSFORMER)
    getattr(transformers, kind)(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return str(folder)


def ids(words):
    return [2, *(WORDS.index(word) for word in words.split()), 3]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_text_features_are_those_of_each_text_alone(pooling, tmp_path):
    name = text(tmp_path)
    import transformers

    backbone = BERT(name, pooling=pooling, max_length=20, num_classes=3).eval()
    transform = backbone.test_transform
    assert transform(TEXTS[1]).tolist() == ids(TEXTS[1]) + [0] * 16
    assert len(transform("what " * 50)) == 20
    batch = torch.stack([transform(words) for words in TEXTS])
    model = transformers.AutoModel.from_pretrained(name).eval()
    alone = [model(torch.tensor([ids(words)])).last_hidden_state[0] for words in TEXTS]
    expected = torch.stack([hidden.mean(dim=0) if pooling == "mean" else hidden[0] for hidden in alone])
    torch.testing.assert_close(backbone.encoder(batch), expected, rtol=1e-4, atol=1e-5)
    # padding further changes nothing
    torch.testing.assert_close(backbone.encoder(F.pad(batch, (0, 5))), backbone.encoder(batch))
    assert torch.equal(backbone.encoder(batch), HF(name, pooling=pooling, max_length=20).eval().encoder(batch))
    # transformers hands it over in evaluation mode; one that never gets a gradient would stop DDP
    trained = BERT(name, pooling=pooling, max_length=20, num_classes=3)
    assert all(module.training for module in trained.modules())
    trained(batch).sum().backward()
    assert [name for name, p in trained.named_parameters() if p.grad is None] == []
    assert torch.equal(pickle.loads(pickle.dumps(transform))(TEXTS[0]), transform(TEXTS[0]))


def test_the_last_layer_of_a_text_classifier_becomes_the_head(tmp_path):
    name = text(tmp_path, "BertForSequenceClassification")
    import transformers

    backbone = HF(name, max_length=20).eval()
    assert (backbone.head_loaded, backbone.num_classes) == (True, 4)
    model = transformers.BertForSequenceClassification.from_pretrained(name).eval()
    transform = backbone.test_transform
    with torch.no_grad():
        logits = backbone(torch.stack([transform(words) for words in TEXTS]))
        expected = torch.cat([model(torch.tensor([ids(words)])).logits for words in TEXTS])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_text_checkpoint_comes_back_and_needs_no_pretrained_weights(tmp_path, monkeypatch):
    name = text(tmp_path)
    import transformers

    source = BERT(name, max_length=20, num_classes=3)
    torch.save({"state_dict": {f"model.{k}": v for k, v in source.state_dict().items()}}, tmp_path / "text.ckpt")
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded in vain"))
    loaded = BERT(name, max_length=20, checkpoint=tmp_path / "text.ckpt")
    assert loaded.fingerprint() == source.fingerprint()


def test_models_and_options_that_do_not_fit_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra hf)")
    name = vision(tmp_path / "vit")
    transformers.CLIPConfig().save_pretrained(tmp_path / "clip")
    with pytest.raises(ValueError, match="open_clip"):
        HF(str(tmp_path / "clip"))
    bert = text(tmp_path / "bert")
    with pytest.raises(ValueError, match="max_length"):
        BERT(bert, max_length=64)
    transform = BERT(bert, max_length=20).test_transform
    with pytest.raises(TypeError, match="text"):
        transform(torch.zeros(3))
    state = load_file(tmp_path / "vit" / "model.safetensors")
    del state[next(key for key in state if "layer" in key and "weight" in key)]
    save_file(state, tmp_path / "vit" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        HF(name)
