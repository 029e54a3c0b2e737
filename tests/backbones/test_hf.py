"""Models of Hugging Face against transformers' own forward pass and processors, on tiny ones made here."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rmd_plugin.backbones import BERT, HF, CheckpointError, WeightsNotFoundError
from rmd_plugin.backbones.hf_processor import translate_processor
from rmd_plugin.backbones.transforms import ImageTransform

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra hf)")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "the", "weather", "in", "paris", "a", "b", "c"]
TEXTS = ["what is the weather in paris", "a b", "is"]
TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
VIT = {**TRANSFORMER, "image_size": 24, "patch_size": 8, "num_labels": 5}
SQUARE = {"size": {"height": 24, "width": 24}}
PHOTO = {"size": {"shortest_edge": 28}, "crop_size": {"height": 24, "width": 24}}


def vision(folder: Path, kind: str, options: dict[str, Any], processor: Any) -> str:
    """A model of a kind with random weights and its processor, as transformers saves them."""
    torch.manual_seed(0)
    family = kind.removesuffix("ForImageClassification").removesuffix("Model")
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**options)).eval()
    for buffer_name, buffer in model.named_buffers():  # batch statistics that are not their start
        if buffer_name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


CONV = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_labels": 5}
MODELS = {
    "vit": ("ViTForImageClassification", VIT, lambda: transformers.ViTImageProcessor(**SQUARE)),
    "convnext": (
        "ConvNextForImageClassification", {**CONV, "num_stages": 2},
        lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 24}),
    ),
    "resnet": (
        "ResNetForImageClassification", {**CONV, "embedding_size": 8, "layer_type": "basic"},
        lambda: transformers.CLIPImageProcessor(**PHOTO),
    ),
}  # fmt: skip


def pictures() -> list[Image.Image]:
    """Of little contrast, so that the processors cut nothing off at 0 and 255."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(100, 150, (*s, 3), dtype=np.uint8)) for s in ((24, 24), (37, 61), (50, 31))]


@pytest.fixture(params=MODELS)
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind, options, processor = MODELS[request.param]
    return vision(tmp_path / request.param, kind, options, processor())


def test_pictures_give_the_features_and_logits_of_transformers_itself(classifier: str) -> None:
    backbone = HF(classifier).eval()
    transform: Any = backbone.test_transform
    processor = transformers.AutoImageProcessor.from_pretrained(classifier)
    model = transformers.AutoModelForImageClassification.from_pretrained(classifier).eval()
    assert backbone.head_loaded
    assert backbone.num_classes == 5
    with torch.no_grad():
        for picture in pictures():
            theirs, ours = processor(images=picture, return_tensors="pt")["pixel_values"], transform(picture)[None]
            # a grey level and a little more: the processor rounds after each axis
            assert (theirs - ours).abs().max() < 1.3 / 255 / min(transform.std)
            torch.testing.assert_close(backbone(theirs), model(theirs).logits, rtol=1e-4, atol=1e-4)
            moved = (model(theirs).logits - backbone(ours)).abs().max()
            assert moved < 0.1 * model(theirs).logits.std() + 0.02
    assert set(backbone.origins.values()) == {"the model's own processor"}
    # one that never gets a gradient would stop DDP
    backbone.train()(torch.stack([transform(picture) for picture in pictures()])).sum().backward()
    assert [name for name, p in backbone.named_parameters() if p.grad is None] == []


def test_the_pooling_is_what_was_asked_for(tmp_path: Path) -> None:
    name = vision(tmp_path, "ViTForImageClassification", VIT, transformers.ViTImageProcessor(**SQUARE))
    x = torch.rand(3, 3, 24, 24)
    model = transformers.AutoModelForImageClassification.from_pretrained(name).eval()
    hidden = model.base_model(x).last_hidden_state
    assert hidden.shape == (3, 10, 16)
    for pooling, expected in (("cls", hidden[:, 0]), ("mean", hidden[:, 1:].mean(dim=1))):
        backbone = HF(name, pooling=pooling).eval()
        torch.testing.assert_close(backbone.encoder(x), expected, rtol=1e-4, atol=1e-5)
        # the classifier was trained on the class token
        assert backbone.head_loaded == (pooling == "cls")
    with pytest.raises(ValueError, match=r"has no pooling=pooler; it has cls, mean"):
        HF(name, pooling="pooler")
    with pytest.raises(ValueError, match=r"pooling must be one of cls, mean, pooler, or null, got 'max'"):
        HF(name, pooling="max")  # type: ignore[arg-type]


def test_a_pooler_is_used_if_the_file_has_one_and_never_a_random_one(tmp_path: Path) -> None:
    processor = transformers.ViTImageProcessor(**SQUARE)
    whole = vision(tmp_path / "whole", "ViTModel", VIT, processor)
    x = torch.rand(2, 3, 24, 24)
    expected = transformers.ViTModel.from_pretrained(whole).eval()(x).pooler_output
    torch.testing.assert_close(HF(whole, pooling="pooler").eval().encoder(x), expected, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    transformers.ViTModel(transformers.ViTConfig(**VIT), add_pooling_layer=False).save_pretrained(tmp_path / "less")
    processor.save_pretrained(tmp_path / "less")
    assert HF(str(tmp_path / "less")).architecture["pooling"] == "cls"
    with pytest.raises(ValueError, match="has no pooling=pooler"):
        HF(str(tmp_path / "less"), pooling="pooler")


def test_other_numbers_of_classes_get_a_new_head_and_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = vision(tmp_path, "ViTForImageClassification", VIT, transformers.ViTImageProcessor(**SQUARE))
    with caplog.at_level(logging.INFO):
        backbone = HF(name, num_classes=3)
    assert "its classifier is for 5 classes: not used" in caplog.text
    assert (backbone.num_classes, backbone.head_loaded) == (3, False)
    assert not HF(name, load_head=False).head_loaded
    untrained = HF(name, pretrained=False)
    assert (untrained.head_loaded, untrained.num_classes) == (False, None)
    assert untrained.fingerprint() != HF(name, load_head=False).fingerprint()


def test_a_folder_of_its_assets_makes_the_same_network_again(classifier: str, tmp_path: Path) -> None:
    backbone = HF(classifier)
    backbone.save_assets(tmp_path / "assets")
    again = HF(str(tmp_path / "assets"), pretrained=False, num_classes=5)
    again.load_state_dict(backbone.state_dict())
    assert again.test_transform == backbone.test_transform
    x = torch.rand(2, 3, 24, 24)
    assert torch.equal(again.eval()(x), backbone.eval()(x))


# -- processors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (lambda: transformers.ViTImageProcessor(**SQUARE, resample=3), {"squash": True, "interpolation": "bicubic"}),
        (lambda: transformers.CLIPImageProcessor(**PHOTO), {"crop_pct": 24 / 28, "floor_crop": True}),
        (lambda: transformers.ViTImageProcessor(**SQUARE, do_normalize=False), {"std": (1.0, 1.0, 1.0)}),
        # pixels in [-1, 1] by the factor alone, as some old configs have it
        (
            lambda: transformers.ViTImageProcessor(
                **SQUARE, rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[1.0] * 3
            ),
            {"mean": (0.5,) * 3, "std": (0.5,) * 3},
        ),
        (lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 384}), {"size": 384, "squash": True}),
        (lambda: transformers.ConvNextImageProcessor(size={"shortest_edge": 24}), {"size": 24, "squash": False}),
    ],
)
def test_a_processor_is_translated_into_a_transform_that_gives_its_numbers(processor: Any, expected: Any) -> None:
    made = processor()
    transform = translate_processor(made, "model")
    for name, value in expected.items():
        found = getattr(transform, name)
        assert found == (pytest.approx(value) if isinstance(value, (tuple, float)) else value)
    for picture in pictures():
        theirs = made(images=picture, return_tensors="pt")["pixel_values"][0]
        assert (transform(picture) - theirs).abs().max() < 1.3 / 255 / min(transform.std)


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({**SQUARE, "do_pad": True}, "do_pad=True"),
        ({**SQUARE, "do_flip_channel_order": True}, "do_flip_channel_order=True"),
        ({**SQUARE, "resample": 1}, "resample="),
        ({"size": {"height": 24, "width": 30}}, "size="),
        ({"size": {"shortest_edge": 24}}, "without a crop"),
        ({"do_resize": False, "do_center_crop": True, "crop_size": {"height": 9, "width": 9}}, "without a resize"),
        ({**SQUARE, "do_center_crop": True, "crop_size": {"height": 30, "width": 30}}, "crop_size="),
    ],
)
def test_a_step_of_a_processor_that_cannot_be_translated_is_named(settings: dict[str, Any], step: str) -> None:
    class Processor:
        def to_dict(self) -> dict[str, Any]:
            usual = {"do_resize": True, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255}
            return usual | settings

    with pytest.raises(ValueError, match=rf"the Processor of model does .*{step}.*\+backbone.transform") as caught:
        translate_processor(Processor(), "model")
    assert "\n" not in str(caught.value)


def test_a_processor_that_does_more_than_it_says_is_refused() -> None:
    # LeViT enlarges the shorter side by 256 / 224 without a word in its settings
    processor = transformers.LevitImageProcessor(**PHOTO)
    with pytest.raises(ValueError, match=r"the LevitImageProcessor.* of model does more than its settings say"):
        translate_processor(processor, "model")


def test_a_transform_of_the_user_comes_in_place_of_any_processor(tmp_path: Path) -> None:
    name = vision(tmp_path, "ViTForImageClassification", VIT, transformers.LevitImageProcessor(**PHOTO))
    with pytest.raises(ValueError, match="LevitImageProcessor"):
        HF(name)
    transform = ImageTransform(24, (0.5,) * 3, (0.5,) * 3)
    backbone = HF(name, transform=transform)
    assert backbone.test_transform is transform
    assert backbone.origins == {"transform": "the config"}


# -- texts ------------------------------------------------------------------------------------------------------------


def text(folder: Path, kind: str) -> str:
    torch.manual_seed(0)
    family = "DistilBert" if kind.startswith("Distil") else "Bert"
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32} if family == "DistilBert" else TRANSFORMER
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(WORDS), max_position_embeddings=32, num_labels=4, **sizes
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return str(folder)


def alone(model: Any, words: str) -> Any:
    return model(torch.tensor([[2, *(WORDS.index(word) for word in words.split()), 3]]))


@pytest.mark.parametrize("kind", ["BertModel", "DistilBertModel"])
def test_texts_give_the_features_of_transformers_itself(tmp_path: Path, kind: str) -> None:
    name = text(tmp_path, kind)
    backbone = HF(name, max_length=20).eval()
    transform: Any = backbone.test_transform
    model = transformers.AutoModel.from_pretrained(name).eval()
    with torch.no_grad():
        features = backbone.encoder(torch.stack([transform(words) for words in TEXTS]))
        expected = torch.cat([alone(model, words).last_hidden_state.mean(dim=1) for words in TEXTS])
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    # the same as the text backbone gives
    assert torch.equal(features, BERT(name, max_length=20).eval().encoder(torch.stack([transform(w) for w in TEXTS])))
    assert backbone.head is None


def test_the_classifier_of_a_text_model_becomes_the_head_where_it_is_linear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = text(tmp_path / "bert", "BertForSequenceClassification")
    backbone = HF(name, max_length=20).eval()
    assert (backbone.head_loaded, backbone.num_classes, backbone.architecture["pooling"]) == (True, 4, "pooler")
    model = transformers.BertForSequenceClassification.from_pretrained(name).eval()
    transform: Any = backbone.test_transform
    with torch.no_grad():
        logits = backbone(torch.stack([transform(words) for words in TEXTS]))
        expected = torch.cat([alone(model, words).logits for words in TEXTS])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    # DistilBERT's has a hidden layer
    with caplog.at_level(logging.INFO):
        other = HF(text(tmp_path / "distil", "DistilBertForSequenceClassification"), max_length=20)
    assert not other.head_loaded
    assert "its classifier is not linear in the features of pooling=mean: not used" in caplog.text


def test_options_for_pictures_are_refused_for_texts(tmp_path: Path) -> None:
    name = text(tmp_path, "BertModel")
    for options in ({"image_size": 24}, {"mean": [0, 0, 0]}, {"transform": str}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))} is an option for pictures"):
            HF(name, max_length=20, **options)  # type: ignore[arg-type]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_vision_model_given_to_the_text_backbone_is_sent_to_the_right_one(tmp_path: Path) -> None:
    name = vision(tmp_path, "ViTForImageClassification", VIT, transformers.ViTImageProcessor(**SQUARE))
    with pytest.raises(ValueError, match=r"is a model for pictures \(vit\): backbone=hf backbone.name="):
        BERT(name)


def test_models_of_several_kinds_at_once_are_refused(tmp_path: Path) -> None:
    transformers.CLIPConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a model of the kind clip, .*backbone=open_clip"):
        HF(str(tmp_path))


def test_weights_that_are_missing_or_nowhere_are_said_in_one_line(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = vision(tmp_path, "ViTForImageClassification", VIT, transformers.ViTImageProcessor(**SQUARE))
    state = load_file(tmp_path / "model.safetensors")
    lost = next(key for key in state if "layer" in key and "weight" in key)
    del state[lost]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights of ViTForImageClassification, for example") as caught:
        HF(name)
    assert "\n" not in str(caught.value)
    with pytest.raises(WeightsNotFoundError, match=r"some-org/some-vit.*local folder") as nowhere:
        HF("some-org/some-vit")
    assert "\n" not in str(nowhere.value)
