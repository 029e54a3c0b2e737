"""Small backbones: a CNN for thumbnails or vectors, an MLP, and the identity for features computed elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from torch import Tensor, nn

from rmd_plugin.backbones.base import Backbone, SharedOptions
from rmd_plugin.backbones.transforms import ImageTransform, VisionOptions, shared_options, with_transforms

_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU}
# convolution, normalisation and global pooling along one or two axes
_LAYERS: dict[int, tuple[Callable[..., nn.Module], ...]] = {
    1: (nn.Conv1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d),
    2: (nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d),
}


def _with_pictures(options: VisionOptions, name: str) -> dict[str, Any]:
    """With transforms if any option about pictures is given: else tensors come as the benchmark has them."""
    shared = shared_options(options)
    if all(options.get(option) is None for option in options.keys() - shared.keys()):
        return shared
    usual = ImageTransform(None, (0.0,) * 3, (1.0,) * 3)
    return with_transforms(options, usual, f"the default of {name}")


class _AsSequence(nn.Module):
    """Gives vectors (B, L) a channel, so that a 1-D convolution can run along them; (B, C, L) stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 2 else x


class SmallCNN(Backbone):
    """Pairs of convolutions of width 3 with batch normalisation, pooled between them; D = the last width.

    Pictures are (C, H, W) with at least 2 pixels per halving, such as the digits (1, 8, 8); vectors (L,) and sequences
    (C, L) may have any length. Between two pairs a quarter of the positions is left in both.

    Args:
        in_channels: channels of the input; None is 1, as vectors have, or 3, as pictures that are prepared here.
        widths: channels of each pair.
        dims: 2 for pictures, 1 for vectors and sequences; None is 2. The commands take both from the samples.
        dropout: probability, on the pooled features.
        image_size: side of the pictures; None leaves it to the benchmark, whose pictures must then be of one size.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. mean, std, transform; see
            :class:`VisionOptions`; without them and ``image_size`` the benchmark prepares its items.

    Example:
        >>> import torch
        >>> SmallCNN(num_classes=6)(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 6])
        >>> SmallCNN(dims=1, num_classes=6)(torch.rand(5, 100)).shape
        torch.Size([5, 6])
    """

    def __init__(
        self,
        in_channels: int | None = None,
        widths: Sequence[int] = (32, 64, 128),
        *,
        dims: int | None = None,
        dropout: float = 0.0,
        **shared: Unpack[VisionOptions],
    ) -> None:
        options = _with_pictures(shared, "SmallCNN")
        in_channels = in_channels if in_channels is not None else 3 if "test_transform" in options else 1
        dims = 2 if dims is None else dims
        flat = dims == 1
        convolution, normalisation, pooling = _LAYERS[dims]
        layers: list[nn.Module] = [_AsSequence()] if flat else []
        channels = in_channels
        for index, width in enumerate(widths):
            if index:
                # ceil_mode: short vectors keep at least one place
                layers.append(nn.MaxPool1d(4, ceil_mode=True) if flat else nn.MaxPool2d(2))
            for source in (channels, width):
                layers += [convolution(source, width, 3, padding=1, bias=False), normalisation(width), nn.ReLU()]
            channels = width
        layers += [pooling(1), nn.Flatten(1), nn.Dropout(dropout)]
        architecture = {"in_channels": in_channels, "widths": list(widths), "dims": dims}
        super().__init__(nn.Sequential(*layers), channels, architecture=architecture, **options)


class MLP(Backbone):
    """Fully connected layers; D = the last hidden size. Inputs of any shape are flattened.

    Args:
        in_features: numbers per input, 64 for the digits.
        hidden: sizes of the hidden layers.
        activation: ``relu``, ``gelu``, ``tanh`` or ``silu``.
        dropout: probability after each activation.
        image_size: side of pictures, of which each input then is one; None leaves it to the benchmark.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. mean, std, transform; see
            :class:`VisionOptions`; without them and ``image_size`` the benchmark prepares its items.

    Example:
        >>> import torch
        >>> MLP(64, num_classes=6).encoder(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 256])
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int] = (256, 256),
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        **shared: Unpack[VisionOptions],
    ) -> None:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}.")
        layers: list[nn.Module] = [nn.Flatten(1)]
        size = in_features
        for width in hidden:
            layers += [nn.Linear(size, width), _ACTIVATIONS[activation](), nn.Dropout(dropout)]
            size = width
        architecture = {"in_features": in_features, "hidden": list(hidden), "activation": activation}
        options = _with_pictures(shared, "MLP")
        super().__init__(nn.Sequential(*layers), size, architecture=architecture, **options)


class _Features(nn.Module):
    """Passes features through, after a look at their shape."""

    def __init__(self, feature_dim: int | None) -> None:
        super().__init__()
        self.feature_dim = feature_dim

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or (self.feature_dim is not None and x.shape[1] != self.feature_dim):
            wanted = "D" if self.feature_dim is None else self.feature_dim
            raise ValueError(
                f"the identity backbone takes features of shape (B, {wanted}), got {tuple(x.shape)}. "
                "Raw images, texts or reads need a backbone that encodes them."
            )
        self.feature_dim = x.shape[1]
        return x


class Identity(Backbone):
    """The input is the features: for the simulation and for features computed elsewhere.

    Args:
        in_features: number of features. ``None``: whatever the first batch has; a head needs it given.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`.

    Example:
        >>> import torch
        >>> Identity().encoder(torch.ones(2, 3))
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """

    def __init__(self, in_features: int | None = None, **shared: Unpack[SharedOptions]) -> None:
        super().__init__(_Features(in_features), -1 if in_features is None else in_features, **shared)

    @property
    def feature_dim(self) -> int:
        """Number of features D, known from the start or since the first batch."""
        known = self.encoder.feature_dim
        if not isinstance(known, int):
            # a RuntimeError: nn.Module turns an AttributeError of a property into a misleading one
            raise RuntimeError("the number of features is not known yet: pass in_features, or encode one batch first.")
        return known
