"""Wide residual networks for small images: WRN-28-10, the paper's choice for CIFAR, and WRN-40-2."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from rmd_plugin.backbones.base import Backbone, SharedOptions
from rmd_plugin.backbones.resnet import init_convolutions
from rmd_plugin.backbones.transforms import CIFAR_MEAN, CIFAR_STD, image_transforms


class _Block(nn.Module):
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


class _Encoder(nn.Module):
    """Stem, three groups of blocks, normalisation, ReLU and global average pooling."""

    def __init__(self, depth: int, width: int, dropout: float, in_channels: int) -> None:
        super().__init__()
        repeats = (depth - 4) // 6
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        channels = 16
        for group, (planes, stride) in enumerate(((16, 1), (32, 2), (64, 2)), start=1):
            blocks = [
                _Block(channels if i == 0 else planes * width, planes * width, stride if i == 0 else 1, dropout)
                for i in range(repeats)
            ]
            self.add_module(f"block{group}", nn.Sequential(*blocks))
            channels = planes * width
        self.bn1 = nn.BatchNorm2d(channels)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for group in ("block1", "block2", "block3"):
            x = self.get_submodule(group)(x)
        return F.relu(self.bn1(x)).mean(dim=(2, 3))


class WideResNet(Backbone):
    """WRN-depth-width: pre-activation residual network with wide layers; D = 64 * width.

    Loads checkpoints of ``pytorch_ood.model.WideResNet`` as they are.

    Args:
        depth: number of convolutions plus one, 6n + 4.
        width: factor on the channels 16, 32, 64.
        dropout: probability inside the blocks.
        in_channels: channels of the input.
        image_size: pictures of other sizes are resized to it.
        mean: normalisation of pixels in [0, 1], per channel.
        std: normalisation, per channel.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`.

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
        image_size: int = 32,
        mean: Sequence[float] = CIFAR_MEAN,
        std: Sequence[float] = CIFAR_STD,
        **shared: Unpack[SharedOptions],
    ) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6n + 4 (10, 16, 22, 28, 40, ...), got {depth}.")
        super().__init__(
            _Encoder(depth, width, dropout, in_channels),
            64 * width,
            architecture={"depth": depth, "width": width, "in_channels": in_channels},
            **image_transforms(image_size, mean, std),
            **shared,
        )

    def rename_key(self, name: str) -> str:
        """Translate the names that pytorch-ood and Hendrycks' models use."""
        return name.replace(".layer.", ".").replace(".convShortcut.", ".shortcut.")
