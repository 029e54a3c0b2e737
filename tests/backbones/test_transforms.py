"""The image transform: against Pillow, torch and torchvision, and the same numbers once it is exported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision import transforms as tv
from torchvision.models import ResNet18_Weights
from torchvision.transforms import v2
from torchvision.transforms.functional import normalize, to_tensor

from rmd_plugin.backbones.transforms import ImageTransform, exportable

NONE = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
# enlarged, reduced, odd, one pixel high or wide, and one of both
SHAPES = [(32, 32), (375, 500), (1, 500), (500, 1), (33, 57), (1001, 37), (56, 90)]
INTERPOLATIONS = ["bilinear", "bicubic"]


def noise(height: int, width: int, low: int = 0, high: int = 256) -> Tensor:
    """Pixels (3, H, W) that share nothing with their neighbours: the hardest case of a resize."""
    rng = np.random.default_rng(height * 1000 + width)
    return torch.from_numpy(rng.integers(low, high, (3, height, width), dtype=np.uint8))


def as_pil(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_resize_is_pillows_but_for_its_rounding(shape: tuple[int, int], interpolation: str) -> None:
    filters = Image.Resampling[interpolation.upper()]
    for crop_pct in (1.0, 0.875):
        transform = ImageTransform(56, **NONE, crop_pct=crop_pct, interpolation=interpolation, squash=True)
        image, edge = as_pil(noise(*shape)), round(56 / crop_pct)
        # one axis at a time: releases of Pillow differ in which they take first, and cut off at 0 and 255 after each
        expected = image.resize((edge, shape[0]), filters).resize((edge, edge), filters)
        difference = transform(image) * 255 - torch.from_numpy(np.array(tv.CenterCrop(56)(expected))).permute(2, 0, 1)
        # half a grey level from each of two roundings; the cubic stretches the first by at most 1.25
        assert difference.abs().max() <= 1.13


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("crop_pct", [1.0, 0.875, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_and_crops_are_those_of_torchvision(
    shape: tuple[int, int], crop_pct: float, interpolation: str
) -> None:
    transform = ImageTransform(56, **NONE, crop_pct=crop_pct, interpolation=interpolation)
    # of little contrast, so that the cubic leaves [0, 255] nowhere and the order of the axes does not matter
    image = as_pil(noise(*shape, 100, 150))
    steps = tv.Resize(round(56 / crop_pct), tv.InterpolationMode(interpolation)), tv.CenterCrop(56), tv.ToTensor()
    assert (transform(image) - tv.Compose(steps)(image)).abs().max() * 255 <= 1.13


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_resize_is_torchs_antialiased_interpolation(shape: tuple[int, int], interpolation: str) -> None:
    pixels = noise(*shape, 100, 150)
    ours = ImageTransform(56, **NONE, interpolation=interpolation, squash=True)(pixels)
    theirs = F.interpolate(pixels[None].double(), (56, 56), mode=interpolation, antialias=True, align_corners=False)
    torch.testing.assert_close(ours, (theirs[0] / 255).float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("squash", [False, True])
def test_a_picture_of_the_right_size_is_normalised_to_the_last_bit_as_torchvision_does(squash: bool) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for shape, crop_pct in (((32, 32), 1.0), ((36, 36), 32 / 36)):
        image = as_pil(noise(*shape))
        expected = normalize(to_tensor(tv.CenterCrop(32)(image)), mean, std)
        transform = ImageTransform(32, mean, std, crop_pct=crop_pct, squash=squash)
        assert torch.equal(transform(image), expected)
        assert torch.equal(transform(noise(*shape)), expected)
        assert torch.equal(transform(to_tensor(image)), expected)
        assert torch.equal(transform.to_module()(noise(*shape)[None])[0], expected)
    image = as_pil(noise(30, 41))
    assert torch.equal(ImageTransform(None, mean, std)(image), normalize(to_tensor(image), mean, std))


def test_pixels_as_bytes_as_floats_and_as_a_picture_come_out_alike() -> None:
    transform = ImageTransform(24, (0.4,) * 3, (0.2,) * 3)
    pixels = noise(50, 31)
    torch.testing.assert_close(transform(pixels.float() / 255), transform(pixels), rtol=0, atol=1e-5)
    assert torch.equal(transform(as_pil(pixels)), transform(pixels))
    assert torch.equal(transform(pixels[:1]), transform(pixels[:1].expand(3, -1, -1)))


def test_augmentation_crops_from_a_black_border_and_flips() -> None:
    image = as_pil(noise(32, 32))
    mean, std = (0.5,) * 3, (0.25,) * 3
    torch.manual_seed(3)
    ours = [ImageTransform(32, mean, std, augment=True)(image) for _ in range(5)]
    torch.manual_seed(3)
    steps = tv.RandomCrop(32, padding=4), tv.RandomHorizontalFlip(), tv.ToTensor(), tv.Normalize(mean, std)
    assert all(torch.equal(mine, tv.Compose(steps)(image)) for mine in ours)
    assert len({mine.numpy().tobytes() for mine in ours}) > 1


EXPORTED = [
    ("bicubic", 0.875, False),
    pytest.param("bilinear", 1.0, False, marks=pytest.mark.slow),
    pytest.param("bicubic", 0.9, True, marks=pytest.mark.slow),
]
# batch, height, width: the right size, enlarged, reduced, one pixel high or wide or both
BATCHES = [(1, 24, 24), (5, 10, 13), (2, 100, 77), (3, 1, 500), (1, 500, 1), (1, 1, 1), (2, 24, 30)]


@pytest.mark.slow
@pytest.mark.parametrize(("interpolation", "crop_pct", "squash"), EXPORTED)
@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own parts
def test_the_exported_module_gives_pythons_numbers_for_pictures_of_every_size(
    interpolation: str, crop_pct: float, squash: bool, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra export)")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (extra export)")
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    transform = ImageTransform(24, mean, std, crop_pct=crop_pct, interpolation=interpolation, squash=squash)
    open_ones = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height"), 3: torch.export.Dim("width")}
    program = torch.export.export(
        transform.to_module(), (noise(40, 33).expand(2, -1, -1, -1),), dynamic_shapes=(open_ones,)
    )
    torch.onnx.export(program, dynamo=True, verbose=False).save(str(tmp_path / "prepare.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "prepare.onnx"), providers=["CPUExecutionProvider"])
    for batch, height, width in BATCHES:
        pictures = torch.stack([noise(height, width).roll(i, dims=0) for i in range(batch)])
        expected = torch.stack([transform(picture) for picture in pictures])
        exported = program.module()(pictures)
        (onnx,) = session.run(None, {session.get_inputs()[0].name: pictures.numpy()})
        torch.testing.assert_close(exported, expected, rtol=0, atol=5e-6)
        torch.testing.assert_close(torch.from_numpy(onnx), expected, rtol=0, atol=5e-6)


def test_a_batch_of_one_is_prepared_as_in_a_batch_of_many() -> None:
    module = ImageTransform(24, (0.5,) * 3, (0.5,) * 3).to_module()
    pictures = torch.stack([noise(40, 50).roll(i, dims=0) for i in range(7)])
    alone = torch.cat([module(picture[None]) for picture in pictures])
    torch.testing.assert_close(module(pictures), alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, r"mean must be three numbers.*got \(0.5,\)"),
        ({"std": (1, 0, 1)}, "std must be three numbers above 0"),
        ({"size": None, "crop_pct": 0.5}, "Give a size"),
        ({"interpolation": "nearest"}, "'bilinear' or 'bicubic', got 'nearest'"),
        ({"crop_pct": 0.0}, r"crop_pct must lie in \(0, 1\], got 0.0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageTransform(**({"size": 16, **NONE} | options))  # type: ignore[arg-type]


def test_random_steps_are_not_exported() -> None:
    with pytest.raises(ValueError, match="augmentation is random and cannot be exported"):
        ImageTransform(16, **NONE, augment=True).to_module()


@pytest.mark.parametrize("item", ["text", torch.ones(2, 8, 8), torch.ones(3, 8, 8, dtype=torch.long), torch.ones(8)])
def test_items_that_are_no_pictures_are_refused(item: object) -> None:
    with pytest.raises(TypeError, match=r"expected a PIL image.*Does this backbone fit the benchmark"):
        ImageTransform(16, **NONE)(item)


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BICUBIC = tv.InterpolationMode.BICUBIC
SAME = {
    "v1": tv.Compose([tv.Resize(28, BICUBIC), tv.CenterCrop(24), tv.ToTensor(), tv.Normalize(MEAN, STD)]),
    "nested": tv.Compose([tv.Compose([tv.Resize(24), tv.CenterCrop(24)]), tv.ToTensor()]),
    "squashed": tv.Compose([tv.Resize([24, 24]), tv.PILToTensor(), tv.ConvertImageDtype(torch.float32)]),
    "squashed and cropped": tv.Compose([tv.Resize((30, 30)), tv.CenterCrop(24), tv.ToTensor()]),
    "v2": v2.Compose(
        [v2.RGB(), v2.ToImage(), v2.Resize(28), v2.CenterCrop(24), v2.ToDtype(torch.float32, scale=True),
         v2.Normalize(MEAN, STD), v2.ToPureTensor()]
    ),
    "not resized": tv.Compose([tv.ToTensor(), tv.Normalize(MEAN, STD)]),
    "one step": tv.ToTensor(),
    "of weights": ResNet18_Weights.IMAGENET1K_V1.transforms(crop_size=24, resize_size=28),
}  # fmt: skip


@pytest.mark.parametrize("transform", SAME.values(), ids=SAME)
@pytest.mark.parametrize("shape", [(24, 24), (40, 57), (61, 30), (9, 12)])
def test_a_torchvision_transform_is_translated_into_the_same(transform: Any, shape: tuple[int, int]) -> None:
    ours = exportable(transform)
    assert isinstance(ours, ImageTransform)
    image = as_pil(noise(*shape, 100, 150))
    expected = transform(image)
    # 1.13 grey levels of 255, divided by the smallest std
    torch.testing.assert_close(ours(image), expected, rtol=0, atol=1.13 / 255 / 0.224)
    if shape == (24, 24) and "Resize(" not in repr(transform) and not hasattr(transform, "crop_size"):
        assert torch.equal(ours(image), expected)


def test_timms_own_transforms_are_translated() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    theirs = timm.data.create_transform(24, interpolation="bicubic", crop_pct=0.875)
    image = as_pil(noise(50, 40, 100, 150))
    torch.testing.assert_close(exportable(theirs)(image), theirs(image), rtol=0, atol=1.13 / 255 / 0.224)


def test_our_own_transforms_are_exportable_as_they_are() -> None:
    ours = ImageTransform(16, **NONE)
    assert exportable(ours) is ours


def twice(image: Image.Image) -> Image.Image:
    return image


@pytest.mark.parametrize(
    ("steps", "step"),
    [
        ([tv.Grayscale(3), tv.ToTensor()], r"Grayscale\(num_output_channels=3\)"),
        ([tv.Lambda(twice), tv.ToTensor()], r"Lambda\(\)"),
        ([tv.RandomHorizontalFlip(), tv.ToTensor()], "RandomHorizontalFlip"),
        ([tv.Resize(24), tv.ToTensor()], r"Resize\(size=24.* add CenterCrop\(24\), or Resize\(\[24, 24\]\)"),
        ([tv.Resize((24, 30)), tv.ToTensor()], r"Resize\(size=\(24, 30\)"),
        ([tv.Resize(24, tv.InterpolationMode.NEAREST), tv.CenterCrop(24), tv.ToTensor()], "nearest.* only bilinear"),
        ([tv.Resize(24, antialias=False), tv.CenterCrop(24), tv.ToTensor()], "antialias=False"),
        ([tv.CenterCrop(24), tv.ToTensor()], r"CenterCrop\(size=\(24, 24\)\).* without a Resize"),
        ([tv.Resize(24), tv.CenterCrop(30), tv.ToTensor()], r"CenterCrop\(size=\(30, 30\)\).*at most 24"),
        ([tv.Resize(24), tv.CenterCrop(24), tv.Resize(30), tv.ToTensor()], r"Resize\(size=30.*twice"),
        ([tv.ToTensor(), tv.Normalize(MEAN, STD), tv.Resize([9, 9])], r"Resize\(size=\[9, 9\].*after a step"),
        ([tv.PILToTensor(), v2.ToDtype(torch.float32)], r"ToDtype\(scale=False\).*scale=True"),
        ([tv.Resize([9, 9])], r"Compose\(.*add ToTensor\(\)"),
    ],
)
def test_a_step_that_cannot_be_exported_is_named_with_a_remedy(steps: list[Any], step: str) -> None:
    with pytest.raises(ValueError, match=rf"the preprocessing step .*{step}.*What can be") as caught:
        exportable(tv.Compose(steps))
    assert "\n" not in str(caught.value)


def test_what_is_no_transform_of_anybodys_is_named_too() -> None:
    for thing in (twice, ImageTransform(16, **NONE, augment=True), None):
        with pytest.raises(ValueError, match="cannot be exported"):
            exportable(thing)


def test_a_transform_says_in_words_what_it_does() -> None:
    words = "resize the shorter side to 256 (bicubic), crop 224 x 224, mean (0.485, 0.456, 0.406), std (1, 1, 1)"
    assert str(ImageTransform(224, MEAN, (1,) * 3, crop_pct=0.875)) == words
    assert str(ImageTransform(9, **NONE, squash=True)).startswith("resize both sides to 9 (bicubic), mean")
    assert str(ImageTransform(None, **NONE)) == "mean (0, 0, 0), std (1, 1, 1)"
