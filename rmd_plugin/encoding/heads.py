"""The classification layer of a network: which one it is, and which of its inputs are the features of a sample.

Answered by facts: the head is the layer whose output the network returns, and the features are what it makes the logits
from. Shapes alone do not tell channels from positions, or an auxiliary classifier from the real one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.features import widened
from rmd_plugin.encoding.recorder import Call


class Located(NamedTuple):
    """What belongs to each sample of a call."""

    features: Tensor  #: shape (B, D)
    logits: Tensor | None  #: shape (B, K); None if the layer gave none
    where: str  #: which part of the layer's input the features are
    alone: bool = False  #: whether the layer's call told it, without what is around it


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is affine in each position of its input: ``nn.Linear``, or a convolution with a kernel of 1."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return layer.groups == 1 and set(layer.kernel_size) == {1}
    return isinstance(layer, nn.Linear)


def locate(layer: nn.Module, call: Call, targets: Sequence[Tensor]) -> Located:
    """Features and logits of each sample in a call of the head.

    Args:
        layer: the head.
        call: what it got and gave.
        targets: outputs of shape (B, K) of the modules around it, the outermost last.

    Raises:
        EncodingError: if the head got several positions of each sample (tokens, places of a map), and neither one of
            them nor their mean gives the network's logits.
    """
    features, output = call.features, next(iter(call.outputs), None)
    if features is None or (features.ndim != 2 and (output is None or not is_linear(layer))):
        got = "nothing" if features is None else f"inputs of shape {tuple(features.shape)}"
        raise EncodingError(
            f"{call.name} gets {got}, and it is no nn.Linear or convolution with a kernel of 1, which would tell where "
            "the features are in it. Name such a layer with head=, or pass encoder=, which gives features (B, D)."
        )
    if features.ndim == 2:
        logits = output.flatten(1) if output is not None and output.ndim > 1 else None
        return Located(widened(features), None if logits is None else widened(logits), "its input", alone=True)
    places, outputs = _places(layer, features), _places(layer, output)  # type: ignore[arg-type]  # not None: see above
    count = places.shape[1]
    if count == 1:
        return Located(places[:, 0], outputs[:, 0], "its input")
    for target in (t for t in reversed(targets) if t.shape == (len(outputs), outputs.shape[2])):
        close, target = _tolerance(target), widened(target)
        # a network that has diverged gives NaN everywhere, which is equal here
        distance = (outputs.nan_to_num() - target.nan_to_num()[:, None]).abs().amax(2)
        best, index = distance.min(1)
        rows = torch.arange(len(index), device=index.device)
        if bool((best <= close).all()):
            return Located(places[rows, index], target, f"its input at the one of {count} positions that is classified")
        if bool(((outputs.mean(1) - target).nan_to_num().abs() <= close).all()):
            return Located(places.mean(1), target, f"the mean of its input over {count} positions")
    if not isinstance(layer, nn.Linear) and not targets:
        return Located(places.mean(1), outputs.mean(1), f"the mean of its input over {count} positions")
    raise EncodingError(
        f"{call.name} gets inputs of shape {tuple(features.shape)}, so {count} positions of each sample, and neither "
        "one of them nor their mean gives the network's logits. Name a layer behind the pooling with head=, or pass "
        "encoder=, which gives features (B, D)."
    )


def choose_head(calls: Sequence[Call], size: int, layers: Mapping[str, nn.Module]) -> str:
    """Name of the layer whose output the network returned, as it is, for one position, averaged, or as probabilities.

    Where no layer's output is what the network returned, the last layer of that width, if no other has it.

    Args:
        calls: the calls of the layers that could be the head and of the modules around them, in order.
        size: samples in the batch.
        layers: all layers of the network by name.

    Raises:
        EncodingError: if there is none, or several; the message lists the candidates.
    """
    last = {call.name: (number, call) for number, call in enumerate(calls)}
    last = dict(sorted(last.items(), key=lambda item: item[1][0]))
    heads = {name: call for name, (_, call) in last.items() if call.features is not None}
    targets = _returned(last, size)
    found = [name for name, call in heads.items() if any(_gives(layers[name], call, target) for target in targets)]
    # a layer whose output another one gets belongs to the body
    found = [name for name in found if not any(_feeds(heads[name], heads[other]) for other in found if other != name)]
    if not found:
        flat = [name for name, call in heads.items() if call.features is not None and call.features.ndim == 2]
        widths = {target.shape[1] for target in targets} or {_width(layers[name]) for name in flat[-1:]}
        found = [name for name in flat if _width(layers[name]) in widths]
    if len(found) == 1:
        return found[0]
    if found:
        raise EncodingError(
            f"each of {', '.join(found)} could be the classification layer. Name the right one with head=."
        )
    shapes = " and ".join(str(tuple(target.shape)) for target in targets) or "nothing of shape (B, K)"
    raise EncodingError(
        f"the network returned {shapes}, which no nn.Linear gave. Name the classification layer with head=, or pass "
        f"encoder=. {candidates(layers)}"
    )


def inner_head(name: str, layer: nn.Module, calls: Sequence[Call]) -> str:
    """Name of the only linear layer inside of the head ``name``, whose last call got more than one position.

    Raises:
        EncodingError: if there are several; the message suggests the one whose output is that of the head.
    """
    inside = [f"{name}.{found}" for found, part in layer.named_modules() if is_linear(part)]
    last = {call.name: call for call in calls}
    outer = last[name]
    giving = [
        found
        for found in inside
        if found in last
        and any(_gives(layer.get_submodule(found[len(name) + 1 :]), last[found], z) for z in outer.outputs)
    ]
    if len(inside) == len(giving) == 1:
        return giving[0]
    shape = None if outer.features is None else tuple(outer.features.shape)
    suggested = giving or inside
    remedy = f"Take head={suggested[-1]!r}." if suggested else "Name an nn.Linear with head=, or pass encoder=."
    raise EncodingError(
        f"{name} is a {type(layer).__name__} with inputs of shape {shape}, which are not the features (B, D). {remedy}"
    )


def candidates(layers: Mapping[str, nn.Module], name: str = "") -> str:
    """A sentence that lists the layers that may have been meant by ``name``."""
    names = [found for found in layers if found]
    linear = [found for found in names if isinstance(layers[found], nn.Linear)]
    close = [found for found in difflib.get_close_matches(name, names, n=3) if found not in linear] if name else []
    listed = (close + linear[::-1]) or names[::-1]  # the head is usually among the last
    return f"Candidates: {', '.join(listed[:12])}{', ...' if len(listed) > 12 else ''}."


def parents(name: str) -> list[str]:
    """Names of the modules that a layer is inside of, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) if name else 0)]


def _returned(last: Mapping[str, tuple[int, Call]], size: int) -> list[Tensor]:
    """What the outermost of the modules that gave anything of shape (B, K) gave."""
    levels: dict[int, list[Tensor]] = {}
    for name, (number, call) in last.items():
        # what is around a layer ends later
        level = sum(1 for parent in parents(name) if parent in last and last[parent][0] > number)
        levels.setdefault(level, []).extend(z for z in call.outputs if z.ndim == 2 and len(z) == size)
    return next((levels[level] for level in sorted(levels) if levels[level]), [])


def _gives(layer: nn.Module, call: Call, target: Tensor) -> bool:
    if (
        target.ndim != 2
        or _width(layer) != target.shape[1]
        or call.features is None
        or len(call.features) != len(target)
    ):
        return False
    try:
        logits = locate(layer, call, [target]).logits
    except EncodingError:
        return False
    if logits is None:
        return False
    close, target = _tolerance(target), widened(target)
    forms = (logits, logits.log_softmax(1), logits.softmax(1), logits.sigmoid())
    return any(bool(((form - target).nan_to_num().abs() <= close).all()) for form in forms)


def _feeds(body: Call, head: Call) -> bool:
    return any(
        head.features is not None and z.shape == head.features.shape and torch.equal(z, head.features)
        for z in body.outputs
    )


def _width(layer: nn.Module) -> int:
    return int(getattr(layer, "out_features", 0) or getattr(layer, "out_channels", 0))


def _places(layer: nn.Module, z: Tensor) -> Tensor:
    """(B, positions, channels); where the channels are, the layer says."""
    return widened(z.flatten(1, -2) if isinstance(layer, nn.Linear) else z.flatten(2).transpose(1, 2))


def _tolerance(target: Tensor) -> float:
    """How far the same logits may be apart after other roundings."""
    scale = float(target.abs().nan_to_num().amax()) if target.numel() else 0.0
    return max(1e-5, 4 * torch.finfo(target.dtype).eps) * scale
