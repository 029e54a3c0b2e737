"""Residual networks for small images: ResNet-18 with a 3x3 stem, the thin ResNet-56 of the CIFAR experiments, WRN.

WRN-28-10 is the paper's choice for CIFAR.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, Unpack

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.transforms import CIFAR_MEAN, CIFAR_STD, ImageTransform, VisionOptions, with_transforms

_USUAL = ImageTransform(32, CIFAR_MEAN, CIFAR_STD)


def _encoder(**layers: nn.Module) -> nn.Sequential:
    """The layers by their names, then global average pooling; convolutions start by He's fan-out rule."""
    encoder = nn.Sequential(OrderedDict(layers, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()))
    for layer in encoder.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return encoder


def _groups(
    block: Callable[[int, int, int], nn.Module], channels: int, repeats: Sequence[int], widths: Sequence[int]
) -> Iterator[nn.Sequential]:
    """One group of blocks per width, made by ``block(channels_in, channels_out, stride)``; all but the first halve."""
    for index, (count, width) in enumerate(zip(repeats, widths, strict=True)):
        first = block(channels, width, 2 if index else 1)
        yield nn.Sequential(first, *(block(width, width, 1) for _ in range(count - 1)))
        channels = width


class _PadShortcut(nn.Module):
    """Shortcut without weights: every second pixel, new channels filled with zeros on both sides."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        before = self.extra // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before))


def _block(channels_in: int, channels_out: int, stride: int, *, shortcut: str) -> BasicBlock:
    """Two 3x3 convolutions with batch normalisation beside a shortcut, ReLU after the sum."""
    downsample: nn.Module | None = None
    if stride != 1 or channels_in != channels_out:
        if shortcut == "pad":
            downsample = _PadShortcut(stride, channels_out - channels_in)
        else:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            downsample = nn.Sequential(projection, nn.BatchNorm2d(channels_out))
    return BasicBlock(channels_in, channels_out, stride, downsample)


class ResNet(Backbone):
    """Residual network of basic blocks for small images; D = the last width.

    Names in the checkpoint may be torchvision's (``downsample``, ``fc``) or those common for CIFAR
    (``shortcut``, ``linear``); OpenOOD's ResNet-18 has ``shortcut`` and ``fc``.

    Args:
        blocks: basic blocks per group: (2, 2, 2, 2) is ResNet-18, (9, 9, 9) ResNet-56.
        widths: channels per group.
        shortcut: where the size changes, ``conv`` learns a 1x1 convolution, ``pad`` fills with zeros.
        in_channels: channels of the input.
        image_size: pictures of other sizes are resized to it; 32 unless given.
        interpolation: ``bicubic`` or ``bilinear``, of the resizing.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. mean, std, transform; see
            :class:`VisionOptions`; without them pictures are normalised as is usual for CIFAR.

    Example:
        >>> import torch
        >>> backbone = ResNet(blocks=(1, 1), widths=(8, 16), num_classes=10)
        >>> backbone.encoder(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        blocks: Sequence[int] = (2, 2, 2, 2),
        widths: Sequence[int] = (64, 128, 256, 512),
        *,
        shortcut: Literal["conv", "pad"] = "conv",
        in_channels: int = 3,
        interpolation: Literal["bicubic", "bilinear"] = "bicubic",
        **shared: Unpack[VisionOptions],
    ) -> None:
        if len(blocks) != len(widths):
            raise ValueError(f"blocks and widths must name the same groups, got {blocks} and {widths}.")
        if shortcut not in ("conv", "pad"):
            raise ValueError(f"shortcut must be 'conv' or 'pad', got {shortcut!r}.")
        sizes = {"blocks": list(blocks), "widths": list(widths), "shortcut": shortcut, "in_channels": in_channels}
        origin = "the default of ResNet"
        prepared = with_transforms(shared, _USUAL, origin, interpolation=interpolation)
        stem = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        groups = _groups(partial(_block, shortcut=shortcut), widths[0], blocks, widths)
        named = {f"layer{number}": group for number, group in enumerate(groups, 1)}
        encoder = _encoder(conv1=stem, bn1=nn.BatchNorm2d(widths[0]), relu=nn.ReLU(), **named)
        super().__init__(encoder, widths[-1], architecture=sizes, **prepared)

    def rename_key(self, name: str) -> str:
        """Translate the name that CIFAR projects give to the projecting shortcut."""
        return name.replace(".shortcut.", ".downsample.")


class _WideBlock(nn.Module):
    """Two 3x3 convolutions, each after normalisation and ReLU, beside a shortcut."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if channels_in != channels_out or stride != 1:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        # a projecting shortcut starts from the activated input, an identity from the raw one
        skip = x if self.shortcut is None else self.shortcut(active)
        hidden = self.dropout(F.relu(self.bn2(self.conv1(active))))
        total: Tensor = skip + self.conv2(hidden)
        return total


class WideResNet(Backbone):
    """WRN-depth-width: pre-activation residual network with wide layers; D = 64 * width.

    Loads checkpoints of ``pytorch_ood.model.WideResNet`` as they are.

    Args:
        depth: number of convolutions plus one, 6n + 4.
        width: factor on the channels 16, 32, 64.
        dropout: probability inside the blocks.
        in_channels: channels of the input.
        image_size: pictures of other sizes are resized to it; 32 unless given.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. mean, std, transform; see
            :class:`VisionOptions`; without them pictures are normalised as is usual for CIFAR.

    Example:
        >>> import torch
        >>> backbone = WideResNet(depth=10, width=1, num_classes=10)
        >>> backbone.encoder(torch.rand(2, 3, 32, 32)).shape, backbone(torch.rand(2, 3, 32, 32)).shape
        (torch.Size([2, 64]), torch.Size([2, 10]))
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        *,
        dropout: float = 0.0,
        in_channels: int = 3,
        **shared: Unpack[VisionOptions],
    ) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, 40, ...), got {depth}.")
        prepared = with_transforms(shared, _USUAL, "the default of WideResNet")
        sizes = {"depth": depth, "width": width, "in_channels": in_channels}
        stem = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        widths = [16 * width, 32 * width, 64 * width]
        groups = _groups(partial(_WideBlock, dropout=dropout), 16, [(depth - 4) // 6] * 3, widths)
        named = {f"block{number}": group for number, group in enumerate(groups, 1)}
        encoder = _encoder(conv1=stem, **named, bn1=nn.BatchNorm2d(64 * width), relu=nn.ReLU())
        super().__init__(encoder, 64 * width, architecture=sizes, **prepared)

    def rename_key(self, name: str) -> str:
        """Translate the names that pytorch-ood and Hendrycks' models use."""
        return name.replace(".layer.", ".").replace(".convShortcut.", ".shortcut.")
