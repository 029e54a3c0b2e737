"""Raw items of a benchmark -> tensors that a backbone takes. Picklable, and their ``repr`` names every choice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rmd_plugin.backbones.base import SharedOptions, Transform

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
#: where a part of the preprocessing came from
CONFIG, METADATA = "the config", "the weights' metadata"
NOT_LOADED = "the metadata of weights that were not loaded"
_PARTS = ("size", "mean", "std")


@dataclass(frozen=True)
class ImageTransform:
    """Resize, crop, augment if asked, scale to [0, 1] and normalise.

    Takes a PIL image of any mode, a uint8 tensor, or a float tensor in [0, 1], each (C, H, W) with 1 or 3 channels, and
    returns a float tensor (3, size, size). The shorter side becomes ``size / crop_pct``, then the centre is cropped:
    small pictures whose object fills the frame, such as CIFAR, lose nothing with the default of 1.

    The resize is torch's antialiased interpolation, one axis after the other: that of Pillow without its rounding to
    8 bits, and the same numbers here and in the exported :meth:`to_module`.

    Args:
        size: height and width of the result; None leaves them as they are.
        mean: per channel, of pixels in [0, 1].
        std: per channel.
        augment: random horizontal flips and crops from a border of size/8, for training.
        crop_pct: part of the resized picture that the crop keeps.
        interpolation: ``bilinear`` or ``bicubic``.
        squash: resize both sides to ``size / crop_pct``, whatever the shape of the picture.

    Example:
        >>> import torch
        >>> transform = ImageTransform(size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> transform(torch.ones(1, 8, 8)).shape
        torch.Size([3, 16, 16])
    """

    size: int | None
    mean: Sequence[float]
    std: Sequence[float]
    augment: bool = False
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    squash: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        # plain tuples: a Hydra list would put its own class into the repr and so into the fingerprint
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if not len(self.mean) == len(self.std) == 3 or min(self.std) <= 0 or not 0 < self.crop_pct <= 1:
            raise ValueError(f"mean and std must be three numbers, std above 0, crop_pct in (0, 1], got {self!r}.")
        if self.size is None and (self.augment or self.squash or self.crop_pct != 1):
            raise ValueError("size=None leaves pictures as they are, without crop_pct, squash or augment. Give a size.")

    @property
    def _edge(self) -> int:
        """Length of the shorter side, before the crop."""
        return round((self.size or 0) / self.crop_pct)

    def __call__(self, image: Any) -> Tensor:
        """Transform one raw image."""
        pixels = as_pixels(image)
        pixels = self._resize(pixels[None], 255.0 if pixels.dtype == torch.uint8 else 1.0)[0]
        return self._normalise(_augment(pixels) if self.augment else pixels)

    def _resize(self, pictures: Tensor, peak: float) -> Tensor:
        """Resized and cropped float pictures in [0, 1] of a batch (B, 3, H, W) in [0, peak]."""
        pixels = pictures.to(torch.float32, memory_format=torch.contiguous_format)
        if self.size is None:
            return pixels.div(peak)
        height, width = pixels.shape[2:]
        shorter: int = torch.sym_min(height, width)  # type: ignore[assignment]  # a graph leaves both open
        sides = [self._edge if self.squash else self._edge * side // shorter for side in (height, width)]
        # the width first, and cut off at black and white after each axis, as Pillow does
        for shape in ((height, sides[1]), sides):
            pixels = F.interpolate(pixels, shape, mode=self.interpolation, antialias=True).clamp(0.0, peak)
        for axis, side in zip((2, 3), sides, strict=True):
            margin = side - self.size
            start = margin // 2 + margin % 2 * (margin // 2 % 2)  # half, rounded to even as torchvision does
            # not a slice: whether it is the whole axis is a question that a graph answers once for all sizes
            pixels = pixels.index_select(axis, torch.arange(self.size, device=pixels.device) + start)
        return pixels.div(peak)

    def _normalise(self, pixels: Tensor) -> Tensor:
        mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in (self.mean, self.std))
        return pixels.sub(mean).div(std)

    def __str__(self) -> str:
        """What is done, in words."""
        mean, std = (f"({', '.join(f'{value:.4g}' for value in values)})" for values in (self.mean, self.std))
        steps = [f"mean {mean}", f"std {std}"]
        if self.size is not None:
            sides = "both sides" if self.squash else "the shorter side"
            steps.insert(0, f"resize {sides} to {self._edge} ({self.interpolation})")
            if not self.squash or self._edge != self.size:
                steps.insert(1, f"crop {self.size} x {self.size}")
        return ", ".join(steps)

    def to_module(self) -> nn.Module:
        """The same as a module: uint8 (B, 3, H, W) of any height and width -> float32 (B, 3, size, size).

        ``torch.export`` and ONNX take it with batch, height and width left open.
        """
        if self.augment:
            raise ValueError("augmentation is random and cannot be exported: take the test transform.")
        return _Preprocessing(self)


class _Preprocessing(nn.Module):
    """An :class:`ImageTransform` for a batch of raw pictures."""

    def __init__(self, transform: ImageTransform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, pictures: Tensor) -> Tensor:
        """Prepared pictures (B, 3, size, size) of raw ones, uint8 of shape (B, 3, H, W)."""
        return self.transform._normalise(self.transform._resize(pictures, 255.0))


def as_pixels(image: Any) -> Tensor:
    """A raw picture as a tensor (3, H, W), of uint8 or of floats in [0, 1]."""
    if hasattr(image, "convert"):
        image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    known = isinstance(image, Tensor) and (image.dtype == torch.uint8 or image.is_floating_point())
    if not known or image.dim() != 3 or image.shape[0] not in (1, 3):
        kind = f"tensor {tuple(image.shape)} of {image.dtype}" if isinstance(image, Tensor) else type(image).__name__
        raise TypeError(
            "expected a PIL image, or a float or uint8 tensor (C, H, W) with 1 or 3 channels, "
            f"got {kind}. Does this backbone fit the benchmark?"
        )
    return image.expand(3, -1, -1)


def _augment(pixels: Tensor) -> Tensor:
    from torchvision import transforms as tv

    size = pixels.shape[-1]
    pixels = tv.RandomCrop(size, padding=max(1, size // 8))(pixels)
    flipped: Tensor = tv.RandomHorizontalFlip()(pixels)
    return flipped


@dataclass(frozen=True, repr=False)
class ImageProcessor:
    """A picture as the image processor of a Hugging Face model prepares it. Runs in Python only: not exported."""

    processor: Any  #: of transformers
    name: str  #: of the model
    augment: bool = False  #: random horizontal flips and crops, for training

    def __call__(self, image: Any) -> Tensor:
        """Prepared pixels of one raw picture, float32 (3, H, W)."""
        pixels = as_pixels(image)
        if pixels.is_floating_point():
            pixels = pixels.mul(255).round().to(torch.uint8)
        prepared = self.processor(images=pixels, return_tensors="pt", input_data_format="channels_first")
        pixels = prepared["pixel_values"][0]
        return _augment(pixels) if self.augment else pixels

    def __repr__(self) -> str:
        return f"ImageProcessor({' '.join(repr(self.processor).split())}, augment={self.augment})"

    def __str__(self) -> str:
        """What is done, in words."""
        return f"the {type(self.processor).__name__} of {self.name}"


@dataclass(frozen=True, repr=False)
class Tokenise:
    """Text -> token ids of one fixed length, so that the default collate and ``x.to(device)`` work."""

    tokenizer: Any  #: of Hugging Face, with a padding token
    max_length: int  #: longer texts are cut, shorter ones padded
    name: str  #: what the tokenizer is called, for the ``repr``

    def __call__(self, text: Any) -> Tensor:
        """Ids of one text, a long tensor of shape (max_length,) filled up with the padding id."""
        if not isinstance(text, str):
            raise TypeError(f"expected a text, got {type(text).__name__}. Does this backbone fit the benchmark?")
        ids = self.tokenizer(text, padding="max_length", truncation=True, max_length=self.max_length)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    def __repr__(self) -> str:
        size = getattr(self.tokenizer, "vocab_size", None)
        return f"Tokenise(name={self.name!r}, vocab_size={size}, max_length={self.max_length})"

    def __str__(self) -> str:
        """What is done, in words."""
        return f"the tokens of {self.name}, at most {self.max_length}"


class VisionOptions(SharedOptions, total=False):
    """The options that every backbone for pictures takes.

    ``image_size`` is the side of the pictures; None is what the weights or the backbone were made for.
    ``mean`` and ``std`` are per channel, of pixels in [0, 1]; None is what the weights or the backbone were made with.
    ``transform`` replaces the whole preprocessing, in training too: raw item -> tensor.
    """

    image_size: int | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    transform: Transform | None


def with_transforms(options: VisionOptions, usual: ImageTransform, origin: str, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a Backbone with its transforms: the usual ones, changed as the user wants them.

    Args:
        options: of the backbone; those about pictures become transforms. Training augments.
        usual: what is done to images by default.
        origin: where that came from, :data:`METADATA` for example.
        **changes: further fields of the transform that the user set, ``crop_pct`` for example; None where not.

    Raises:
        ValueError: if ``transform`` is given beside what it replaces.
    """
    changes |= {"size": options.get("image_size"), "mean": options.get("mean"), "std": options.get("std")}
    # a value that is the usual one anyway may be from anywhere
    changes = {name: value for name, value in changes.items() if value is not None and value != getattr(usual, name)}
    if own := own_transform(options, sorted(changes.keys() - {"size"})):
        return own
    test = replace(usual, **changes)
    train = replace(test, augment=test.size is not None)
    return prepared(options, train, test, {part: CONFIG if part in changes else origin for part in _PARTS})


def own_transform(options: VisionOptions, changes: Sequence[str]) -> dict[str, Any] | None:
    """Keyword arguments of a Backbone whose preprocessing is the user's own, None if it is not."""
    transform = options.get("transform")
    if transform is not None and changes:
        raise ValueError(f"transform replaces the whole preprocessing: {' and '.join(changes)} would be ignored.")
    return None if transform is None else prepared(options, transform, transform, {"transform": CONFIG})


def prepared(options: VisionOptions, train: Transform, test: Transform, origins: dict[str, str]) -> dict[str, Any]:
    """Keyword arguments of a Backbone: the shared options, and transforms in place of the options about pictures."""
    transforms = {"train_transform": train, "test_transform": test, "origins": origins}
    return {**shared_options(options), **transforms}


def shared_options(options: VisionOptions) -> dict[str, Any]:
    """The options without those about pictures."""
    of_pictures = ("image_size", "mean", "std", "transform")
    return {name: value for name, value in options.items() if name not in of_pictures}
