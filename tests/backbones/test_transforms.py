"""The image transform: against Pillow, torch and torchvision, and the same numbers once it is exported."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as tv
from torchvision.transforms.functional import normalize, to_tensor

from rmd_plugin.backbones import ImageTransform

NONE = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# enlarged, reduced, odd, one pixel high
SHAPES = [(32, 32), (375, 500), (1, 500), (33, 57)]


def noise(height, width, low=0, high=256):
    """Pixels (3, H, W) that share nothing with their neighbours: the hardest case of a resize."""
    rng = np.random.default_rng(height * 1000 + width)
    return torch.from_numpy(rng.integers(low, high, (3, height, width), dtype=np.uint8))


def as_pil(pixels):
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_resize_is_pillows_but_for_its_rounding(interpolation):
    filters = Image.Resampling[interpolation.upper()]
    for shape in SHAPES:
        transform = ImageTransform(56, **NONE, crop_pct=0.875, interpolation=interpolation, squash=True)
        image = as_pil(noise(*shape))
        # one axis at a time: releases of Pillow differ in which they take first, and cut off at 0 and 255 after each
        expected = tv.CenterCrop(56)(image.resize((64, shape[0]), filters).resize((64, 64), filters))
        difference = transform(image) * 255 - torch.from_numpy(np.array(expected)).permute(2, 0, 1)
        # half a grey level from each of two roundings; the cubic stretches the first by at most 1.25
        assert difference.abs().max() <= 1.13


@pytest.mark.parametrize("crop_pct", [1.0, 0.9])
def test_lengths_and_crops_are_those_of_torchvision(crop_pct):
    transform = ImageTransform(56, **NONE, crop_pct=crop_pct, interpolation="bilinear")
    steps = tv.Resize(round(56 / crop_pct)), tv.CenterCrop(56), tv.ToTensor()
    for shape in [*SHAPES, (57, 62), (62, 59), (500, 1)]:
        image = as_pil(noise(*shape))
        assert (transform(image) - tv.Compose(steps)(image)).abs().max() * 255 <= 1.13


def test_a_picture_of_the_right_size_is_normalised_to_the_last_bit_as_torchvision_does():
    for shape, crop_pct, squash in (((32, 32), 1.0, False), ((36, 36), 32 / 36, True)):
        image = as_pil(noise(*shape))
        expected = normalize(to_tensor(tv.CenterCrop(32)(image)), MEAN, STD)
        transform = ImageTransform(32, MEAN, STD, crop_pct=crop_pct, squash=squash)
        assert torch.equal(transform(image), expected)
        assert torch.equal(transform(to_tensor(image)), expected)
        assert torch.equal(transform.to_module()(noise(*shape)[None])[0], expected)
    image = as_pil(noise(30, 41))
    assert torch.equal(ImageTransform(None, MEAN, STD)(image), normalize(to_tensor(image), MEAN, STD))


def test_pixels_as_bytes_as_floats_and_as_a_picture_of_any_mode_come_out_alike():
    transform = ImageTransform(24, (0.4,) * 3, (0.2,) * 3)
    pixels = noise(50, 31)
    torch.testing.assert_close(transform(pixels.float() / 255), transform(pixels), rtol=0, atol=1e-5)
    assert torch.equal(transform(as_pil(pixels)), transform(pixels))
    assert torch.equal(transform(as_pil(pixels).convert("RGBA")), transform(pixels))
    grey = as_pil(pixels).convert("L")
    assert torch.equal(transform(grey), transform(torch.from_numpy(np.array(grey))[None]))


def test_augmentation_crops_from_a_black_border_and_flips():
    image = as_pil(noise(32, 32))
    torch.manual_seed(3)
    ours = [ImageTransform(32, MEAN, STD, augment=True)(image) for _ in range(5)]
    torch.manual_seed(3)
    steps = tv.RandomCrop(32, padding=4), tv.RandomHorizontalFlip(), tv.ToTensor(), tv.Normalize(MEAN, STD)
    assert all(torch.equal(own, tv.Compose(steps)(image)) for own in ours)
    assert len({own.numpy().tobytes() for own in ours}) > 1
    with pytest.raises(ValueError, match="random"):
        ImageTransform(16, **NONE, augment=True).to_module()


@pytest.mark.slow
@pytest.mark.parametrize(("interpolation", "crop_pct", "squash"), [("bicubic", 0.875, False), ("bilinear", 1.0, True)])
@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own parts
def test_the_exported_module_gives_pythons_numbers_for_pictures_of_every_size(
    interpolation, crop_pct, squash, tmp_path
):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra export)")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (extra export)")
    transform = ImageTransform(24, MEAN, STD, crop_pct=crop_pct, interpolation=interpolation, squash=squash)
    axes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")}
    example = noise(67, 91).expand(2, -1, -1, -1)
    program = torch.export.export(transform.to_module(), (example,), dynamic_shapes=(axes,), strict=False)
    torch.onnx.export(program, dynamo=True, verbose=False).save(str(tmp_path / "prepare.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "prepare.onnx"), providers=["CPUExecutionProvider"])
    # the right size, enlarged, reduced, one pixel high or wide or both
    for batch, height, width in [(1, 24, 24), (5, 10, 13), (2, 100, 77), (3, 1, 99), (1, 99, 1), (1, 1, 1)]:
        pictures = torch.stack([noise(height, width).roll(i, dims=0) for i in range(batch)])
        expected = torch.stack([transform(picture) for picture in pictures])
        (onnx,) = session.run(None, {session.get_inputs()[0].name: pictures.numpy()})
        torch.testing.assert_close(program.module()(pictures), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(onnx), expected, rtol=0, atol=1e-4)  # 0.006 grey levels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "mean"),
        ({"std": (1, 0, 1)}, "above 0"),
        ({"size": None, "crop_pct": 0.5}, "size"),
        ({"crop_pct": 0.0}, "crop_pct"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ImageTransform(**({"size": 16, **NONE} | options))


def test_items_that_are_no_pictures_are_refused():
    for item in ("text", torch.ones(2, 8, 8), torch.ones(3, 8, 8, dtype=torch.long), torch.ones(8)):
        with pytest.raises(TypeError, match="PIL image"):
            ImageTransform(16, **NONE)(item)


def test_a_transform_pickles_and_says_in_words_what_it_does():
    transform = ImageTransform(224, list(MEAN), [1] * 3, crop_pct=0.875)
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert "size=224" in repr(transform)
    words = "resize the shorter side to 256 (bicubic), crop 224 x 224, mean (0.485, 0.456, 0.406), std (1, 1, 1)"
    assert str(transform) == words
    assert str(ImageTransform(9, **NONE, squash=True)).startswith("resize both sides to 9 (bicubic), mean")
    assert str(ImageTransform(None, **NONE)) == "mean (0, 0, 0), std (1, 1, 1)"
