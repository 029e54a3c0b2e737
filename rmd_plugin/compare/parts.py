"""What detectors are built from, and which of it each of them asks for by the names of its parameters.

The framework names the parameters of its detectors by a convention (``encoder``, ``head``, ``model``, ``w``, ``b``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from pytorch_ood import detector as framework
from pytorch_ood.api import Detector
from torch import Tensor, nn


class Representation(Enum):
    """What a detector is fitted on or scores."""

    MOMENTS = "moments of the features"
    FEATURES = "features"
    MAPS = "features as 1 x 1 maps"
    LOGITS = "logits"
    HEAD = "features, through the head with gradients"
    INPUTS = "inputs, through the whole network"
    LAYERS = "feature maps of inner layers"


_MAPS, _LOGITS, _HEAD, _INPUTS = (Representation[name] for name in ("MAPS", "LOGITS", "HEAD", "INPUTS"))


class NotSupported(Exception):
    """A detector needs what there is not. The message says what."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What there is to build detectors from.

    Attributes:
        feature_dim: D, if it is known.
        num_classes: K, if it is known.
        encoder: maps inputs to features; None if only features are there.
        head: the classifier on the features, or None.
        model: maps inputs to logits; by default the encoder and the head.
        differentiable: whether the inputs are real numbers, so that gradients reach them.
        norm_std: standard deviations that the inputs were normalised by, per channel, if known.
        text_embeddings: embeddings of the class names of shape (K, D), from a vision-language backbone.
        seed: for detectors that have one.
        progress: whether detectors that train show a bar.
    """

    feature_dim: int | None = None
    num_classes: int | None = None
    encoder: nn.Module | None = None
    head: nn.Linear | None = None
    model: nn.Module | None = None
    differentiable: bool = True
    norm_std: list[float] | None = None
    text_embeddings: Tensor | None = field(default=None, repr=False)
    seed: int = 0
    progress: bool = False


def arguments_for(
    target: Callable[..., Any], kind: type[Detector], options: Mapping[str, Any], parts: Parts, fed: Representation
) -> dict[str, Any]:
    """Arguments of a detector: its options, and whatever else it asks for and there is.

    Args:
        target: the class, or a function that makes the detector.
        kind: the class.
        options: what the caller has set; None stands for what there is.
        parts: what there is.
        fed: what the detector is fed.

    Raises:
        NotSupported: if it needs something else.
    """
    # null in a config: as the backbone has it
    found = {name: value for name, value in options.items() if value is not None or name not in _PROVIDERS}
    for name, parameter in inspect.signature(target).parameters.items():
        if name in found or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        if not required and name in _HYPERPARAMETERS:
            continue
        if name in _PROVIDERS:
            try:
                value = _PROVIDERS[name](parts, fed)
            except NotSupported:
                if required:
                    raise
                continue
            if value is not None or required:
                found[name] = value
        elif required:
            raise NotSupported(f"needs {name}, which no backbone gives: set it in the detector's config")
    if issubclass(kind, framework.NACUE):
        found.update(zip(("model", "layers"), _watched(parts), strict=True))
    if issubclass(kind, framework.GradNorm):
        # as in its paper: the weight of the last layer, which is the model it gets
        found.setdefault("param_filter", _is_weight)
    if fed is _LOGITS:
        _head(parts)
    return found


# -- what detectors can be given, by parameter name -----------------------------------------------------------------


def _head(parts: Parts) -> nn.Linear:
    if parts.head is None:
        raise NotSupported("needs a classifier, and there is no linear head: head=linear_probe fits one")
    # a copy: detectors move, and some change, what they are given
    return deepcopy(parts.head)


def _any_head(parts: Parts, fed: Representation) -> nn.Module:
    head = _head(parts)
    return nn.Sequential(nn.Flatten(1), head) if fed is _MAPS else head


def _bias(parts: Parts, _fed: Representation) -> Tensor:
    head = _head(parts)
    return torch.zeros(head.out_features) if head.bias is None else head.bias.detach()


def _model(parts: Parts, fed: Representation) -> nn.Module | None:
    if fed is _LOGITS:
        return None  # logits are handed over as they are
    if fed is _HEAD:
        return _head(parts)
    return nn.Sequential(_network(parts), _head(parts)).eval() if parts.model is None else parts.model


def _encoder(parts: Parts, fed: Representation) -> nn.Module | None:
    return _network(parts) if fed is _INPUTS else None


def _network(parts: Parts) -> nn.Module:
    if parts.encoder is None:
        raise NotSupported("needs the inputs and the network, only features are there")
    return parts.encoder


def _is_weight(name: str) -> bool:
    return name.endswith("weight")


def _text_embeddings(parts: Parts, _fed: Representation) -> Tensor:
    if parts.text_embeddings is None:
        raise NotSupported("needs text embeddings of the class names, from a vision-language backbone")
    return parts.text_embeddings


def _class_weights(_parts: Parts, _fed: Representation) -> Tensor:
    raise NotSupported("needs class weights, which come from training with the VOS loss")


def _feature_dim(parts: Parts) -> int:
    if parts.feature_dim is None:
        raise NotSupported("needs the number of features, which is not known here")
    return parts.feature_dim


def _num_classes(parts: Parts) -> int:
    if parts.num_classes is None:
        raise NotSupported("needs the number of classes, which is not known here")
    return parts.num_classes


def _nothing(_parts: Parts, _fed: Representation) -> None:
    return None


_PROVIDERS: Mapping[str, Callable[[Parts, Representation], Any]] = {
    "encoder": _encoder,
    "backbone": _nothing,
    "model": _model,
    "head": _any_head,
    "w": lambda parts, _: _head(parts).weight.detach(),
    "b": _bias,
    # the framework's documentation has 64 for D = 128; a smaller D keeps the half
    "d": lambda parts, _: max(1, min(64, _feature_dim(parts) // 2)),
    # as many directions as classes can differ in; the paper's best, found on test data, was 76 for 100 classes
    "components": lambda parts, _: max(1, min(_num_classes(parts) - 1, _feature_dim(parts))),
    "layers": _nothing,  # arguments_for() puts them in, together with the model
    "num_classes": lambda parts, _: _num_classes(parts),
    "norm_std": lambda parts, _: parts.norm_std,
    "seed": lambda parts, _: parts.seed,
    "progress": lambda parts, _: parts.progress,
    "text_embeddings": _text_embeddings,
    "weights": _class_weights,
}


#: what a detector knows better itself, if it has a default
_HYPERPARAMETERS = ("d", "components")


class _Watch(nn.Module):
    """Passes features on as the start of a graph, so that gradients with respect to them exist."""

    def forward(self, z: Tensor) -> Tensor:
        return z.detach().requires_grad_()


def _watched(parts: Parts) -> tuple[nn.Module, list[nn.Module]]:
    """The head behind its input layer, as NAC wants it: on the penultimate layer, from features."""
    watch = _Watch()
    return nn.Sequential(watch, _head(parts)).eval(), [watch]
