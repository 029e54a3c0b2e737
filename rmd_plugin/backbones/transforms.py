"""Raw items of a benchmark -> tensors that a backbone takes. Picklable, and their ``repr`` names every choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class ImageTransform:
    """Resize, crop, augment if asked, scale to [0, 1] and normalise.

    Takes a PIL image of any mode, or a float tensor (C, H, W) in [0, 1] with 1 or 3 channels, and returns a float
    tensor (3, size, size). The shorter side becomes ``size / crop_pct``, then the centre is cropped: small pictures
    whose object fills the frame, such as CIFAR, lose nothing with the default of 1.

    Args:
        size: height and width of the result.
        mean: per channel, of pixels in [0, 1].
        std: per channel.
        augment: random horizontal flips and crops from a border of size/8, for training.
        crop_pct: part of the resized picture that the crop keeps.
        interpolation: ``bilinear`` or ``bicubic``.

    Example:
        >>> import torch
        >>> transform = ImageTransform(size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> transform(torch.ones(1, 8, 8)).shape
        torch.Size([3, 16, 16])
    """

    size: int
    mean: Sequence[float]
    std: Sequence[float]
    augment: bool = False
    crop_pct: float = 1.0
    interpolation: str = "bicubic"

    def __post_init__(self) -> None:
        """Check the options."""
        if self.interpolation not in _INTERPOLATIONS:
            raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {self.interpolation!r}.")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must lie in (0, 1], got {self.crop_pct}.")
        # plain tuples: a Hydra list would put its own class into the repr and so into the fingerprint
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))

    @cached_property
    def _geometry(self) -> Callable[[Any], Any]:
        from torchvision import transforms as tv

        steps: list[Callable[[Any], Any]] = [
            tv.Resize(round(self.size / self.crop_pct), interpolation=tv.InterpolationMode(self.interpolation)),
            tv.CenterCrop(self.size),
        ]
        if self.augment:
            steps += [tv.RandomCrop(self.size, padding=max(1, self.size // 8)), tv.RandomHorizontalFlip()]
        return tv.Compose(steps)

    def __call__(self, image: Any) -> Tensor:
        """Transform one raw image."""
        from torchvision.transforms.functional import normalize, to_tensor

        if isinstance(image, Tensor) and image.is_floating_point() and image.dim() == 3 and image.shape[0] in (1, 3):
            pixels = self._geometry(image.expand(3, -1, -1))
        elif hasattr(image, "convert"):
            pixels = to_tensor(self._geometry(image.convert("RGB")))
        else:
            what = type(image).__name__
            if isinstance(image, Tensor):
                what = f"tensor {tuple(image.shape)} of {image.dtype}"
            raise TypeError(
                f"expected a PIL image or a float tensor (C, H, W) with 1 or 3 channels, got {what}. "
                "Does this backbone fit the benchmark?"
            )
        return normalize(pixels, self.mean, self.std)


class TransformPair(TypedDict):
    """Keyword arguments of a backbone: how its pictures are prepared for training and for testing."""

    train_transform: ImageTransform
    test_transform: ImageTransform


def image_transforms(
    size: int, mean: Sequence[float], std: Sequence[float], crop_pct: float = 1.0, interpolation: str = "bicubic"
) -> TransformPair:
    """Training transform (augmented) and test transform of an image backbone; other interpolations become bicubic."""
    known = interpolation if interpolation in _INTERPOLATIONS else "bicubic"
    test = ImageTransform(size, mean, std, crop_pct=crop_pct, interpolation=known)
    return {"train_transform": replace(test, augment=True), "test_transform": test}


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
