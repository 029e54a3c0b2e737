"""Raw items of a benchmark -> tensors that a backbone takes. Picklable, and their ``repr`` names every choice."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_INTERPOLATIONS = ("bilinear", "bicubic")
# output pixels that are made by one matrix product: beyond their own few input pixels the filters are zero
_BLOCK = 32
# rows of a picture that are made floats at a time: they stay in the processor's cache
_ROWS = 64


@dataclass(frozen=True)
class ImageTransform:
    """Resize, crop, augment if asked, scale to [0, 1] and normalise.

    Takes a PIL image of any mode, a uint8 tensor, or a float tensor in [0, 1], each (C, H, W) with 1 or 3 channels, and
    returns a float tensor (3, size, size). The shorter side becomes ``size / crop_pct``, then the centre is cropped:
    small pictures whose object fills the frame, such as CIFAR, lose nothing with the default of 1.

    The antialiased resize is that of Pillow without its rounding to 8 bits, as two matrix products: the same numbers
    here and in the exported :meth:`to_module`. A picture of the right size is not touched by it.

    Args:
        size: height and width of the result; None leaves them as they are.
        mean: per channel, of pixels in [0, 1].
        std: per channel.
        augment: random horizontal flips and crops from a border of size/8, for training.
        crop_pct: part of the resized picture that the crop keeps.
        interpolation: ``bilinear`` or ``bicubic``.
        squash: resize both sides to ``size / crop_pct``, whatever the shape of the picture.
        floor_crop: round the place of an uneven crop down, as Hugging Face does; torchvision rounds it to even.

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
    floor_crop: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.interpolation not in _INTERPOLATIONS:
            raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {self.interpolation!r}.")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must lie in (0, 1], got {self.crop_pct}.")
        if self.size is None and (self.augment or self.squash or self.crop_pct != 1):
            raise ValueError("size=None leaves pictures as they are, without crop_pct, squash or augment. Give a size.")
        # plain tuples: a Hydra list would put its own class into the repr and so into the fingerprint
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3 or (name == "std" and min(values) <= 0):
                wanted = "numbers above 0" if name == "std" else "numbers"
                raise ValueError(f"{name} must be three {wanted}, one for each of red, green, blue; got {values}.")
            object.__setattr__(self, name, values)

    @property
    def _edge(self) -> int:
        """Length of the shorter side, before the crop."""
        return round((self.size or 0) / self.crop_pct)

    def __call__(self, image: Any) -> Tensor:
        """Transform one raw image."""
        if hasattr(image, "convert"):
            pixels = torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB"))).permute(2, 0, 1)
        elif isinstance(image, Tensor) and image.dim() == 3 and image.shape[0] in (1, 3):
            pixels = image.expand(3, -1, -1)
        else:
            pixels = None
        if pixels is None or not (pixels.dtype == torch.uint8 or pixels.is_floating_point()):
            what = type(image).__name__
            if isinstance(image, Tensor):
                what = f"tensor {tuple(image.shape)} of {image.dtype}"
            raise TypeError(
                "expected a PIL image, or a float or uint8 tensor (C, H, W) with 1 or 3 channels, "
                f"got {what}. Does this backbone fit the benchmark?"
            )
        peak = 255.0 if pixels.dtype == torch.uint8 else 1.0
        pixels = self._geometry(pixels, peak).div(peak)
        if self.augment and self.size is not None:
            from torchvision import transforms as tv

            steps = tv.RandomCrop(self.size, padding=max(1, self.size // 8)), tv.RandomHorizontalFlip()
            pixels = tv.Compose(steps)(pixels)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return pixels.sub(mean).div(std)

    def __str__(self) -> str:
        """What is done, in words."""
        steps = [f"mean {_numbers(self.mean)}", f"std {_numbers(self.std)}"]
        if self.size is not None:
            sides = "both sides" if self.squash else "the shorter side"
            steps.insert(0, f"resize {sides} to {self._edge} ({self.interpolation})")
            if not self.squash or self._edge != self.size:
                steps.insert(1, f"crop {self.size} x {self.size}")
        return ", ".join(steps)

    def _geometry(self, pixels: Tensor, peak: float) -> Tensor:
        """Resize and crop a picture (3, H, W) with values in [0, peak], as float32."""
        height, width = pixels.shape[1:]
        if self.size is None:
            return _as_float(pixels)
        if (height == width or not self.squash) and min(height, width) == self._edge:
            place = math.floor if self.floor_crop else round
            top, left = place((height - self.size) / 2), place((width - self.size) / 2)
            return _as_float(pixels[:, top : top + self.size, left : left + self.size])
        down, across = _cached_filters(height, width, replace(self, augment=False))
        # the width first and a clamp after each step, as Pillow does for 8 bits
        halves = []
        for rows in pixels.split(_ROWS, dim=1):
            rows = _as_float(rows)
            halves.append(torch.cat([rows[:, :, part] @ block.T for part, block in across], dim=2))
        half = torch.cat(halves, dim=1).clamp(0, peak)
        return torch.cat([block @ half[:, part] for part, block in down], dim=1).clamp(0, peak)

    def filters(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Matrices (size, H) and (size, W) that resize and crop: ``out = down @ picture @ across.T``.

        Lengths are tensors all along, so that an exported graph takes pictures of any size.

        Args:
            rows: 0, 1, ..., H - 1 in float64.
            columns: 0, 1, ..., W - 1 in float64.
        """
        height, width = rows.amax(dim=0) + 1, columns.amax(dim=0) + 1
        shorter = torch.minimum(height, width)
        made = []
        for places, length in ((rows, height), (columns, width)):
            resized = torch.floor(self._edge * length / (length if self.squash else shorter))
            offset = (resized - (self.size or 0)) / 2
            offset = torch.floor(offset) if self.floor_crop else torch.round(offset)
            made.append(_filter(places, length, resized, offset, self.size or 0, self.interpolation))
        return made[0], made[1]

    def to_module(self) -> nn.Module:
        """The same as a module: uint8 (B, 3, H, W) of any height and width -> float32 (B, 3, size, size).

        ``torch.export`` and ONNX take it with batch, height and width left open.
        """
        if self.augment:
            raise ValueError("augmentation is random and cannot be exported: take the test transform.")
        return _Preprocessing(self)


def _numbers(values: Sequence[float]) -> str:
    return f"({', '.join(f'{value:.4g}' for value in values)})"


def _as_float(pixels: Tensor) -> Tensor:
    return pixels.to(torch.float32, memory_format=torch.contiguous_format)


def _filter(places: Tensor, length: Tensor, resized: Tensor, offset: Tensor, size: int, interpolation: str) -> Tensor:
    """Weights (size, n) of the n input pixels for each output pixel that a centre crop of a resized axis keeps.

    The filter of Pillow and of ``torch.nn.functional.interpolate(antialias=True)``: a triangle, or Keys' cubic with
    a = -1/2, stretched where the axis is made shorter, and cut at the border.
    """
    scale = length / resized
    # float64: centres at 4,000 pixels would be off by 2e-4 of a pixel
    centre = (torch.arange(size, dtype=torch.float64, device=places.device) + offset + 0.5) * scale
    distance = ((places + 0.5 - centre.unsqueeze(1)) / scale.clamp(min=1.0)).abs()
    if interpolation == "bilinear":
        weight = (1 - distance).clamp(min=0.0)
    else:
        near = (1.5 * distance - 2.5) * distance * distance + 1
        far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
        weight = torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
    return (weight / weight.sum(dim=1, keepdim=True)).to(torch.float32)


_Blocks = list[tuple[slice, Tensor]]


@lru_cache(maxsize=8)  # pictures of a benchmark often have one size
def _cached_filters(height: int, width: int, transform: ImageTransform) -> tuple[_Blocks, _Blocks]:
    """The matrices of a transform in blocks of rows, each with the input pixels that it reads."""
    both = transform.filters(*(torch.arange(length, dtype=torch.float64) for length in (height, width)))
    return _blocks(both[0]), _blocks(both[1])


def _blocks(matrix: Tensor) -> _Blocks:
    made = []
    for block in matrix.split(_BLOCK):
        used = block.any(dim=0).nonzero()
        part = slice(int(used.min()), int(used.max()) + 1)
        made.append((part, block[:, part].contiguous()))
    return made


class _Preprocessing(nn.Module):
    """An :class:`ImageTransform` for a batch of raw pictures."""

    mean: Tensor
    std: Tensor

    def __init__(self, transform: ImageTransform) -> None:
        super().__init__()
        self.transform = transform
        for name in ("mean", "std"):
            values = torch.tensor(getattr(transform, name)).view(3, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        """Prepared pictures (B, 3, size, size) of raw ones, uint8 of shape (B, 3, H, W)."""
        pixels = pictures.to(torch.float32)
        if self.transform.size is not None:
            places = (torch.arange(n, dtype=torch.float64, device=pixels.device) for n in pixels.shape[2:])
            down, across = self.transform.filters(*places)
            pixels = (down @ (pixels @ across.T).clamp(0, 255)).clamp(0, 255)
        return (pixels.div(255) - self.mean).div(self.std)


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


def exportable(transform: Any) -> ImageTransform | Tokenise:
    """The same preprocessing as one of ours, which an exported graph can hold.

    Args:
        transform: one of ours, or a ``Compose`` of torchvision (of v2 too) of ``Resize``, ``CenterCrop``, ``ToTensor``
            or what v2 has in its place, and ``Normalize``; also the ``transforms()`` of torchvision's weights.

    Raises:
        ValueError: names the step that cannot be exported, and what could be put in its place.

    Example:
        >>> from torchvision import transforms as tv
        >>> str(exportable(tv.Compose([tv.Resize(36), tv.CenterCrop(32), tv.ToTensor()])))
        'resize the shorter side to 36 (bilinear), crop 32 x 32, mean (0, 0, 0), std (1, 1, 1)'
    """
    if isinstance(transform, Tokenise) or (isinstance(transform, ImageTransform) and not transform.augment):
        return transform
    from torchvision import transforms as tv
    from torchvision.transforms import v2

    found: dict[str, Any] = {}  # kind of step -> the step
    for step in _steps(transform):
        kind = next((name for name in _KINDS if isinstance(step, (getattr(tv, name, ()), getattr(v2, name)))), None)
        slot = _KINDS.get(kind or "")
        if slot is None:
            if kind is None:
                raise _not_exportable(step, "it is none of the steps that are known")
            continue
        if slot in found or any(later in found for later in _AFTER[slot]):
            raise _not_exportable(step, "it comes twice, or after a step that must follow it")
        scaled = (
            slot != "floats" or kind == "ToTensor" or (step.dtype == torch.float32 and getattr(step, "scale", True))
        )
        if not scaled:
            raise _not_exportable(step, "it does not give 32-bit floats in [0, 1] (ToDtype with scale=True does)")
        found[slot] = step
    if "floats" not in found:
        raise _not_exportable(transform, "no step makes floats in [0, 1]: add ToTensor()")
    normalise = found.get("normalise")
    mean, std = ((0.0,) * 3, (1.0,) * 3) if normalise is None else (normalise.mean, normalise.std)
    return ImageTransform(mean=mean, std=std, **_exportable_geometry(found.get("resize"), found.get("crop")))


#: steps of torchvision -> what they do; None: nothing that ours would not do by itself
_KINDS = {
    "Resize": "resize", "CenterCrop": "crop", "ToTensor": "floats", "ConvertImageDtype": "floats", "ToDtype": "floats",
    "Normalize": "normalise", "PILToTensor": None, "ToImage": None, "RGB": None, "ToPureTensor": None, "Identity": None,
}  # fmt: skip
#: what may not stand before a step
_AFTER = {"resize": ("crop", "normalise"), "crop": ("normalise",), "floats": ("normalise",), "normalise": ()}


def _steps(transform: Any) -> Iterator[Any]:
    from torchvision import transforms as tv
    from torchvision.transforms import v2
    from torchvision.transforms._presets import ImageClassification

    if isinstance(transform, ImageClassification):
        yield tv.Resize(transform.resize_size, transform.interpolation, antialias=transform.antialias)
        yield from (tv.CenterCrop(transform.crop_size), tv.ToTensor(), tv.Normalize(transform.mean, transform.std))
    elif isinstance(transform, (tv.Compose, v2.Compose)):
        for step in transform.transforms:
            yield from _steps(step)
    else:
        yield transform


def _exportable_geometry(resize: Any, crop: Any) -> dict[str, Any]:
    """Size, crop_pct, interpolation and squash of a ``Resize`` and a ``CenterCrop`` of torchvision, or of neither."""
    if resize is None:
        if crop is not None:
            raise _not_exportable(crop, "it stands without a Resize before it")
        return {"size": None}
    sides = {resize.size} if isinstance(resize.size, int) else set(resize.size)
    squash = not isinstance(resize.size, int) and len(resize.size) == 2
    interpolation = str(getattr(resize.interpolation, "value", resize.interpolation))
    known = len(sides) == 1 and None not in sides and resize.max_size is None and resize.antialias is not False
    if not known or interpolation not in _INTERPOLATIONS:
        raise _not_exportable(resize, "only bilinear and bicubic ones to one size, antialiased, can be")
    (edge,) = sides
    if crop is None:
        if not squash:
            shape = f"Resize([{edge}, {edge}])"
            raise _not_exportable(
                resize, f"the shape of its result is the picture's: add CenterCrop({edge}), or {shape}"
            )
        return {"size": edge, "interpolation": interpolation, "squash": True}
    size = crop.size[0]
    if size != crop.size[1] or size > edge:
        raise _not_exportable(crop, f"only a square of at most {edge} pixels, the size of the picture, can be")
    return {"size": size, "crop_pct": size / edge, "interpolation": interpolation, "squash": squash}


def _not_exportable(step: Any, reason: str) -> ValueError:
    name = " ".join(repr(step).split())
    return ValueError(
        f"the preprocessing step {name} cannot be exported: {reason}. What can be: torchvision's Resize, CenterCrop, "
        "ToTensor and Normalize in this order, or rmd_plugin.backbones.transforms.ImageTransform."
    )
