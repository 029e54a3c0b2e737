"""Pooled features of several layers of a network in one forward pass, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.features import pool_features, widened
from rmd_plugin.encoding.layers import LayerNames, LayerRecorder, as_maps, channels_first, find_layers, run
from rmd_plugin.encoding.recorder import eagerly

Pooling = Literal["mean", "cls", "last"]


class LayerEncoder(nn.Module):
    """A network as a map from inputs to the pooled features of several of its layers, in one pass without gradients.

    Maps (B, C, H, W) or (B, H, W, C) and sequences (B, C, L) are averaged, vectors stay, and tokens (B, T, D) are
    pooled as asked for; where the network hands on a mask of its tokens, padding does not count.

    Args:
        network: any module.
        layers: names, patterns (``"blocks.*"``) or ``"auto"``, see :func:`rmd_plugin.encoding.layers.find_layers`. They
            are looked up in the first batch.
        pooling: of tokens: ``"mean"``, the first one, ``"cls"``, or the ``"last"`` one; or layer (or pattern) -> which.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Flatten())
        >>> encode = LayerEncoder(network, ["0", "1"])
        >>> {name: tuple(z.shape) for name, z in encode(torch.rand(5, 3, 8, 8)).items()}
        {'0': (5, 8), '1': (5, 16)}
    """

    def __init__(
        self, network: nn.Module, layers: LayerNames = "auto", *, pooling: Pooling | Mapping[str, Pooling] = "mean"
    ) -> None:
        super().__init__()
        check_pooling(pooling)
        self.network, self.layers, self.pooling = network, layers, pooling
        self.found: dict[str, str] = {}  #: layer -> pooling, once the layers are found
        self._recorder = LayerRecorder()

    def forward(self, x: Any) -> Any:
        """Name of the layer -> its features of shape (B, D), in order."""
        return self.encode(x)

    def encode(self, x: Any) -> dict[str, Tensor]:
        """The same."""
        with torch.no_grad(), eagerly(), self.listening(x) as heard:
            run(self.network, x)
        return heard

    def find(self, x: Any, forward: Callable[[Any], Any] | None = None) -> None:
        """Look the layers up, once; for ``"auto"`` in one pass, see :func:`rmd_plugin.encoding.layers.find_layers`."""
        if not self.found:
            names = find_layers(self.network, self.layers, x, forward)
            self.found = {name: pooling_of(name, self.pooling) for name in names}

    @contextmanager
    def listening(self, x: Any) -> Iterator[dict[str, Tensor]]:
        """Fill a dict, layer -> features (B, D), from a pass on ``x`` that somebody else runs inside of the block.

        Raises:
            EncodingError: if a layer took no part.
        """
        self.find(x)
        heard: dict[str, Tensor] = {}
        self.start()
        try:
            yield heard
            heard.update(self.take())
        finally:
            self.stop()

    def start(self) -> None:
        """Listen from now on to layers that have been found, until :meth:`take` or :meth:`stop`."""
        layers = {name: self.network.get_submodule(name) for name in self.found}
        self._recorder.start(self.network, layers, self._pooled)

    def take(self) -> dict[str, Tensor]:
        """What the pass since :meth:`start` gave: layer -> features (B, D). Refuses a layer that took no part."""
        heard = self.stop()
        if silent := [name for name in self.found if name not in heard]:
            raise EncodingError(f"{', '.join(silent)} did not take part in the forward pass. Name other layers.")
        return {name: heard[name] for name in self.found}

    def stop(self) -> dict[str, Tensor]:
        """Take the hooks away."""
        return self._recorder.stop()

    def keys(self) -> dict[str, str]:
        """Layer -> what its features are called where those of other encoders stand beside them."""
        return {name: name if way == "mean" else f"{name}:{way}" for name, way in self.found.items()}

    def _pooled(self, name: str, layer: nn.Module, output: Tensor, mask: Tensor | None) -> Tensor:
        return pool_tokens(layer, output, mask, self.found[name])


class LayersBeside(nn.Module):
    """An encoder, and what several :class:`LayerEncoder` of parts of it hear in the same pass.

    Args:
        encoder: maps inputs to features.
        layers: of the encoder or of parts of it.
    """

    def __init__(self, encoder: nn.Module, layers: Sequence[LayerEncoder]) -> None:
        super().__init__()
        self.encoder, self.layers = encoder, nn.ModuleList(layers)

    def forward(self, x: Any) -> dict[str, Tensor]:
        """The features of the layers by :meth:`LayerEncoder.keys`, and last, under an empty name, the encoder's."""
        listeners = cast(Sequence[LayerEncoder], self.layers)
        for listener in listeners:
            listener.find(x, self.encoder)
        with ExitStack() as stack, eagerly():
            heard = [(listener, stack.enter_context(listener.listening(x))) for listener in listeners]
            features = self.encoder(x)
        parts = {key: found[layer] for listener, found in heard for layer, key in listener.keys().items()}
        return {**parts, "": features}


class LayerMean(LayerEncoder):
    """The mean over the layers of what :class:`LayerEncoder` gives, for layers of one width: features of shape (B, D).

    An encoder for any detector: ``RMD(LayerMean(bert, "auto", pooling="cls"))``.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        >>> LayerMean(network, ["0", "1"])(torch.rand(5, 4)).shape
        torch.Size([5, 8])
    """

    def forward(self, x: Any) -> Any:
        """Features of shape (B, D)."""
        found = self.encode(x)
        if len({z.shape[1] for z in found.values()}) > 1:
            widths = ", ".join(f"{name}: {z.shape[1]}" for name, z in found.items())
            raise EncodingError(f"a mean needs layers of one width, got {widths}. Name layers that have it.")
        return torch.stack(list(found.values())).mean(0)


def pooling_of(name: str, pooling: Pooling | Mapping[str, Pooling]) -> Pooling:
    """How the tokens of a layer are pooled."""
    if isinstance(pooling, Mapping):
        return next((way for pattern, way in pooling.items() if fnmatchcase(name, pattern)), "mean")
    return pooling


def check_pooling(pooling: object) -> None:
    """Refuse what is no pooling of tokens."""
    for way in pooling.values() if isinstance(pooling, Mapping) else [pooling]:
        if way not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, or layer -> one, got {way!r}.")


def pool_tokens(layer: nn.Module, output: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Features (B, D), at least float32, of a layer's output.

    Args:
        layer: tells whether three dimensions are tokens (B, T, D) or, with 1-D convolutions, (B, C, L).
        output: of shape (B, D), (B, T, D), (B, C, L), (B, C, H, W) or (B, H, W, C).
        mask: true for tokens that are no padding, shape (B, T); None for all. It is used where it fits the tokens.
        pooling: of tokens, see :class:`LayerEncoder`.
    """
    z = widened(output)
    if z.ndim == 4:
        return as_maps(layer, z).mean(dim=(2, 3))
    if z.ndim != 3:
        return pool_features(z).clone()
    if channels_first(layer):
        return z.mean(2)
    if pooling == "cls":
        return z[:, 0].clone()
    if mask is None or mask.shape != z.shape[:2]:
        mask = torch.ones(z.shape[:2], dtype=torch.bool, device=z.device)
    if pooling == "last":
        places = torch.arange(z.shape[1], device=z.device) * mask
        return z[torch.arange(len(z), device=z.device), places.amax(1)]
    kept = mask.unsqueeze(2).to(z.dtype)
    return (z * kept).sum(1) / kept.sum(1).clamp(min=1)
