"""Raw items of a benchmark -> tensors that a backbone takes. Picklable, and their ``repr`` names every choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
    _geometry: Callable[[Any], Any] = field(init=False, repr=False, compare=False)
    _normalise: Callable[[Tensor], Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options and build the pipeline once."""
        from torchvision import transforms as tv

        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"interpolation must be 'bilinear' or 'bicubic', got {self.interpolation!r}.")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must lie in (0, 1], got {self.crop_pct}.")
        # plain tuples: a Hydra list would put its own class into the repr and so into the fingerprint
        object.__setattr__(self, "mean", tuple(float(v) for v in self.mean))
        object.__setattr__(self, "std", tuple(float(v) for v in self.std))
        steps: list[Callable[[Any], Any]] = [
            tv.Resize(round(self.size / self.crop_pct), interpolation=tv.InterpolationMode(self.interpolation)),
            tv.CenterCrop(self.size),
        ]
        if self.augment:
            steps += [tv.RandomCrop(self.size, padding=max(1, self.size // 8)), tv.RandomHorizontalFlip()]
        object.__setattr__(self, "_geometry", tv.Compose(steps))
        object.__setattr__(self, "_normalise", tv.Normalize(self.mean, self.std))

    def __call__(self, image: Any) -> Tensor:
        """Transform one raw image."""
        from torchvision.transforms.functional import to_tensor

        if isinstance(image, Tensor):
            if image.dim() != 3 or image.shape[0] not in (1, 3) or not image.is_floating_point():
                raise TypeError(
                    f"expected a PIL image or a float tensor (C, H, W) with 1 or 3 channels, got a tensor "
                    f"{tuple(image.shape)} of {image.dtype}. Does this backbone fit the benchmark?"
                )
            return self._normalise(self._geometry(image.expand(3, -1, -1)))
        if not hasattr(image, "convert"):
            raise TypeError(
                f"expected a PIL image or a float tensor (C, H, W), got {type(image).__name__}. "
                "Does this backbone fit the benchmark?"
            )
        return self._normalise(to_tensor(self._geometry(image.convert("RGB"))))


class TransformPair(TypedDict):
    """Keyword arguments of a backbone: how its pictures are prepared for training and for testing."""

    train_transform: ImageTransform
    test_transform: ImageTransform


def image_transforms(
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
) -> TransformPair:
    """Training transform (augmented) and test transform of an image backbone."""
    return {
        "train_transform": ImageTransform(size, mean, std, True, crop_pct, interpolation),
        "test_transform": ImageTransform(size, mean, std, False, crop_pct, interpolation),
    }


class Tokenise:
    """Text -> token ids of one fixed length, so that the default collate and ``x.to(device)`` work.

    Args:
        tokenizer: a Hugging Face tokenizer with a padding token.
        max_length: length of the result; longer texts are cut, shorter ones padded.
        name: what the tokenizer is called, for the ``repr``.
    """

    def __init__(self, tokenizer: Any, max_length: int, name: str) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.name = name

    def __call__(self, text: Any) -> Tensor:
        """Tokenise one text.

        Returns:
            Long tensor of shape (max_length,), filled up with the padding id.
        """
        if not isinstance(text, str):
            raise TypeError(f"expected a text, got {type(text).__name__}. Does this backbone fit the benchmark?")
        ids = self.tokenizer(text, padding="max_length", truncation=True, max_length=self.max_length)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    def __repr__(self) -> str:
        size = getattr(self.tokenizer, "vocab_size", None)
        return f"Tokenise(name={self.name!r}, vocab_size={size}, max_length={self.max_length})"
