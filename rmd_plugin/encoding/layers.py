"""Inner layers of a network: find them by name, by pattern or as its stages, and hear what they give in one pass."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.isolation import evaluating
from rmd_plugin.encoding.recorder import eagerly

#: names of layers, patterns of names (``layer*``), or ``auto``
LayerNames = str | Sequence[str]
#: what is kept of a layer's output: of its name, the layer, the output, and the mask of tokens (B, T) or None
Keep = Callable[[str, nn.Module, Tensor, "Tensor | None"], Tensor]

#: a module with a larger share of the parameters is the network itself, in a wrapper, rather than one of its stages
_NEARLY_ALL = 0.95


def find_layers(
    network: nn.Module, names: LayerNames, x: Any, forward: Callable[[Any], Any] | None = None
) -> dict[str, nn.Module]:
    """Layers of a network by name, in the order in which they are asked for.

    Args:
        network: the network.
        names: names of layers; patterns, in which ``*`` stands for any text between two dots; or ``"auto"`` for the
            stages: the siblings whose names differ in a number only (``layer1`` to ``layer4``, ``blocks.0`` to
            ``blocks.11``) that hold most parameters. Where the size of their maps changes, the last one of each size.
        x: inputs for one pass, to see what the layers give. Only ``"auto"`` needs them.
        forward: ``forward(x)`` runs the network. By default that is a call of it.

    Raises:
        EncodingError: if there is no such layer; the message lists what there is.

    Example:
        >>> stage = lambda a, b: nn.Conv2d(a, b, 3, stride=2)
        >>> network = nn.Sequential(stage(3, 8), stage(8, 16), nn.Flatten(), nn.LazyLinear(5))
        >>> list(find_layers(network, "auto", torch.rand(1, 3, 16, 16)))
        ['0', '1']
    """
    if names == "auto":
        return _stages(network, x, forward or partial(run, network))
    layers = {name: layer for name, layer in network.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in [names] if isinstance(names, str) else names:
        fitting = {name: layer for name, layer in layers.items() if _matches(name, pattern)}
        if not fitting:
            close = difflib.get_close_matches(pattern, layers, n=4) or [name for name, _ in network.named_children()]
            raise EncodingError(
                f"{type(network).__name__} has no layer {pattern!r}. Give names, patterns such as 'layer*', or 'auto'. "
                f"Candidates: {', '.join(close[:12])}."
            )
        found |= fitting
    if not found:
        raise EncodingError("layers is empty. Give names of layers, patterns such as 'layer*', or 'auto'.")
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _stages(network: nn.Module, x: Any, forward: Callable[[Any], Any]) -> dict[str, nn.Module]:
    layers = {name: layer for name, layer in network.named_modules() if name}
    with evaluating(network), torch.no_grad(), eagerly(), hearing(network, layers, _first_sample) as outputs:
        forward(x)
    families: dict[str, list[str]] = {}
    for name in (name for name, output in outputs.items() if output.ndim > 1):
        if re.search(r"\d+$", name):
            families.setdefault(re.sub(r"\d+$", "", name), []).append(name)
    best: list[str] = []
    most = 0
    for dims in (3, 2):  # maps and tokens before vectors
        for members in families.values():
            chosen = sorted((name for name in members if outputs[name].ndim >= dims), key=_number)
            sizes = [_parameters(layers[name]) for name in chosen]
            # the first of equal ones is the outermost
            if len(chosen) > 1 and sum(sizes) > most and max(sizes) < _NEARLY_ALL * sum(sizes):
                best, most = chosen, sum(sizes)
        if best:
            break
    if not best:
        raise EncodingError(
            f"{type(network).__name__} has no stages that can be told by their names (siblings that differ in a number "
            f"only, such as layer1, layer2). Name the layers: {', '.join(list(layers)[:12]) or 'it has none'}."
        )
    areas = [tuple(as_maps(layers[name], outputs[name]).shape[2:]) if outputs[name].ndim == 4 else () for name in best]
    if len(set(areas)) == 1:  # one size: of those without parameters nothing new comes
        return {name: layers[name] for name in best if _parameters(layers[name])}
    last = dict(zip(areas, best, strict=True))
    return {name: layers[name] for name in best if name in last.values()}


def _number(name: str) -> int:
    return int(re.search(r"\d+$", name)[0])  # type: ignore[index]


def _parameters(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def _first_sample(name: str, layer: nn.Module, output: Tensor, mask: Tensor | None) -> Tensor:
    return output[:1]


# -- hearing --------------------------------------------------------------------------------------------------------


class LayerRecorder:
    """Forward hooks that note what layers give, and masks of tokens that are handed on.

    A copied or pickled module carries an idle one of its own. The same one can be started again and again: compiled
    code has it inside.
    """

    def __init__(self) -> None:
        self._keep: Keep | None = None  # None: idle
        self.found: dict[str, Tensor] = {}  #: layer -> what was kept of its last call
        self._mask: Tensor | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def start(self, network: nn.Module, layers: Mapping[str, nn.Module], keep: Keep) -> None:
        """Listen to the layers from now on; masks may be handed to any part of the network.

        What is kept of an output is found at once, before the network can work on the output in place.
        """
        self.stop()
        self._keep = keep
        for module in network.modules():
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
        for name, layer in layers.items():
            self._handles.append(layer.register_forward_hook(partial(self._after, name)))

    def stop(self) -> dict[str, Tensor]:
        """Take the hooks away and give what was heard."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        found, self.found, self._keep, self._mask = self.found, {}, None, None
        return found

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._keep is None:
            return
        mask, padding = kwargs.get("attention_mask"), kwargs.get("src_key_padding_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self._mask = mask > 0
        elif isinstance(padding, Tensor) and padding.ndim == 2:
            self._mask = ~padding if padding.dtype == torch.bool else padding == 0

    def _after(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tensor = None if self._keep is None else _first_tensor(output)
        if tensor is not None and self._keep is not None:
            self.found[name] = self._keep(name, module, tensor.detach(), self._mask)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerRecorder:
        return LayerRecorder()

    def __reduce__(self) -> tuple[type[LayerRecorder], tuple[()]]:
        return LayerRecorder, ()


@contextmanager
def hearing(network: nn.Module, layers: Mapping[str, nn.Module], keep: Keep) -> Iterator[dict[str, Tensor]]:
    """Note what layers give in the passes inside of the block; of several calls of a layer the last one counts.

    Args:
        network: what is run; masks of tokens that it hands on (``attention_mask``, ``src_key_padding_mask``) are noted.
        layers: by name; parts of the network.
        keep: what is kept of an output. It is called at once, before the network can work on the output in place.

    Yields:
        Name -> what was kept, in the order of the layers once they have been called.
    """
    recorder = LayerRecorder()
    recorder.start(network, layers, keep)
    try:
        yield recorder.found
    finally:
        recorder.stop()


def run(network: nn.Module, x: Any) -> Any:
    """The network's output for inputs: a tensor, or a dict of them by the names that the network has for them."""
    return network(**x) if isinstance(x, Mapping) else network(x)


def _first_tensor(output: Any) -> Tensor | None:
    """What a layer gives: a tensor, or the first one of what transformers' layers give."""
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    return next((z for z in parts if isinstance(z, Tensor) and z.is_floating_point()), None)


def as_maps(layer: nn.Module, output: Tensor) -> Tensor:
    """A layer's output as maps (B, C, H, W): tokens (B, T, D) become (B, D, T, 1), vectors (B, D) become (B, D, 1, 1).

    Outputs (B, C, L) of layers with 1-D convolutions have their channels first, as maps have; maps (B, H, W, C), as
    those of Swin, are told by :func:`channels_last`.
    """
    if output.ndim == 3:
        return (output if channels_first(layer) else output.transpose(1, 2)).unsqueeze(3)
    if output.ndim == 4 and channels_last(layer, output):
        return output.permute(0, 3, 1, 2)
    return output[:, :, None, None] if output.ndim == 2 else output


def from_maps(layer: nn.Module, maps: Tensor, like: Tensor) -> Tensor:
    """What :func:`as_maps` was given, in the shape of ``like``."""
    if like.ndim == 3:
        return maps.squeeze(3) if channels_first(layer) else maps.squeeze(3).transpose(1, 2)
    if like.ndim == 4 and channels_last(layer, like):
        return maps.permute(0, 2, 3, 1)
    return maps.reshape(like.shape)


def channels_first(layer: nn.Module) -> bool:
    """Whether outputs of three dimensions are (B, C, L) rather than tokens (B, T, D): 1-D convolutions are inside."""
    return any(isinstance(part, nn.Conv1d) for part in layer.modules())


#: parts of class names that tell whether maps have their channels last, where their shapes do not
_CHANNELS_LAST = {"Swin": True, "PatchMerging": True, "ConvNeXt": False, "CNBlock": False}


def channels_last(layer: nn.Module, output: Tensor) -> bool:
    """Whether maps of four dimensions are (B, H, W, C) rather than (B, C, H, W).

    What is inside of the layer tells: ``nn.Linear`` and ``nn.LayerNorm`` work on the last dimension, all that is called
    ``...2d`` on the second one. Of a layer that has both, as ConvNeXt's, the channels are where their number is.

    Raises:
        EncodingError: if both dimensions have it, or neither one.
    """
    first: set[int] = set()
    last: set[int] = set()
    spatial = False
    for part in layer.modules():
        if type(part).__name__.endswith("2d"):  # convolutions, norms, pooling; LayerNorm2d of torchvision and timm
            spatial = True
            first |= {getattr(part, name, 0) for name in ("out_channels", "num_features", "num_channels")}
        elif isinstance(part, nn.Linear | nn.LayerNorm):
            last.add(part.out_features if isinstance(part, nn.Linear) else part.normalized_shape[-1])
    if not last:
        height, width = output.shape[1:3]
        if not spatial and height == width != output.shape[3]:
            raise _unclear(layer, output, "its shape looks like (B, H, W, C), but nothing in it says so")
        return False
    if not spatial and output.shape[3] in last:
        return True
    at_second, at_last = (output.shape[place] in first | last for place in (1, 3))
    if at_second != at_last:
        return at_last
    if isinstance(layer, nn.Sequential):
        return channels_last(layer[-1], output)
    kinds = [type(part).__name__ for part in layer.modules()]
    for kind, answer in _CHANNELS_LAST.items():
        if any(kind in name for name in kinds):
            return answer
    raise _unclear(layer, output, "what is inside of it fits both")


def _unclear(layer: nn.Module, output: Tensor, why: str) -> EncodingError:
    return EncodingError(
        f"the output of {type(layer).__name__} of shape {tuple(output.shape)} may have its channels first or last: "
        f"{why}. Name a layer around or inside of it, or average its maps in the network and name that layer."
    )


# -- a network layer by layer -----------------------------------------------------------------------------------------


class LayerChain:
    """A network as a chain of modules that are called one after the other, as the framework's detectors want them.

    Any network can be taken apart like this, whatever it does between its layers: the first link runs it and hears all
    layers, the others hand out what was heard, and the head gives the logits of that pass. Maps that were changed on
    the way to the head are put in the place of the last layer's output, in a second pass on the same inputs. No
    gradients are kept.

    Args:
        network: maps inputs to logits.
        layers: parts of it by name, in order.

    Attributes:
        links: one module for each layer, which gives its output as maps, see :func:`as_maps`.
        head: from the last layer's maps to logits.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LazyLinear(5))
        >>> chain, x = LayerChain(network, {"0": network[0], "1": network[1]}), torch.rand(1, 1, 6, 6)
        >>> maps = nn.Sequential(*chain.links)(x)
        >>> bool(torch.equal(chain.head(maps), network(x))), bool(torch.equal(chain.head(2 * maps), network(x)))
        (True, False)
    """

    def __init__(self, network: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self.network, self.layers = network, dict(layers)
        names = list(self.layers)
        self.links: list[nn.Module] = [_Link(self, name, first=name == names[0]) for name in names]
        self.head: nn.Module = _ChainHead(self)
        self._inputs: Any = None
        self._version: int | None = None
        self._maps: dict[str, Tensor] = {}
        self._logits: Tensor | None = None

    def run(self, x: Any) -> None:
        """One pass, unless the last one was on the same inputs."""
        version = x._version if isinstance(x, Tensor) and not x.is_inference() else None
        if x is self._inputs and version is not None and version == self._version:
            return
        with torch.no_grad(), eagerly(), hearing(self.network, self.layers, _copied_maps) as found:
            self._logits = run(self.network, x).detach()
        if silent := [name for name in self.layers if name not in found]:
            raise EncodingError(f"{', '.join(silent)} did not take part in the forward pass. Name other layers.")
        self._inputs, self._version, self._maps = x, version, found

    def maps(self, name: str) -> Tensor:
        """What a layer gave in the last pass."""
        return self._maps[name]

    def logits(self, maps: Tensor) -> Tensor:
        """Logits for maps of the last layer: those of the last pass, or of a second one with changed maps."""
        name, layer = list(self.layers.items())[-1]
        if maps is self._maps[name] and self._logits is not None:
            return self._logits
        handle = layer.register_forward_hook(lambda module, _, output: _replaced(module, output, maps))
        try:
            with torch.no_grad(), eagerly():
                logits: Tensor = run(self.network, self._inputs)
                return logits
        finally:
            handle.remove()


class _Link(nn.Module):
    def __init__(self, chain: LayerChain, name: str, *, first: bool) -> None:
        super().__init__()
        self._chain, self._name, self._first = chain, name, first
        self.network = chain.network  # moves with the link

    def forward(self, x: Any) -> Tensor:
        if self._first:
            self._chain.run(x)
        return self._chain.maps(self._name)


class _ChainHead(nn.Module):
    def __init__(self, chain: LayerChain) -> None:
        super().__init__()
        self._chain, self.network = chain, chain.network

    def forward(self, maps: Tensor) -> Tensor:
        return self._chain.logits(maps)


def _copied_maps(name: str, layer: nn.Module, output: Tensor, mask: Tensor | None) -> Tensor:
    return as_maps(layer, output).clone(memory_format=torch.contiguous_format)


def _replaced(layer: nn.Module, output: Any, maps: Tensor) -> Any:
    """The layer's output with other maps in the place of its tensor."""
    if isinstance(output, Tensor):
        return from_maps(layer, maps, output)
    if isinstance(output, (tuple, list)):
        place = next(number for number, part in enumerate(output) if part is _first_tensor(output))
        parts = [from_maps(layer, maps, part) if number == place else part for number, part in enumerate(output)]
        return type(output)(parts)
    raise EncodingError(f"the layer gives a {type(output).__name__}; only tensors and tuples of them can be replaced.")
