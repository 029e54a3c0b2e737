"""Detectors from their classes, built from what a network offers.

The framework names the parameters of its detectors by a convention (``encoder``, ``head``, ``model``, ``w``, ``b``), so
the names tell what to give.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from pytorch_ood import detector as framework
from pytorch_ood.api import Detector, GradientDetector
from torch import Tensor, nn

from rmd_plugin.compare.adapters import Adapter, Representation, fed_with, fitted_on
from rmd_plugin.detectors.calibrated import bare
from rmd_plugin.detectors.multi_layer import MultiLayer
from rmd_plugin.encoding.batches import EncodingError
from rmd_plugin.encoding.isolation import evaluating
from rmd_plugin.encoding.layer_encoder import LayerEncoder
from rmd_plugin.encoding.layers import LayerChain, LayerNames, find_layers

#: a detector class, or a partial of one with its options
Factory = Callable[..., Detector]

_MOMENTS, _FEATURES, _MAPS, _LOGITS, _HEAD, _INPUTS, _LAYERS, _POOLED = Representation

#: fitted on held-out data, as the framework's own benchmark script does
_CALIBRATED = (framework.TemperatureScaling, framework.KLMatching)


class NotSupported(Exception):
    """A detector needs what there is not. The message says what."""


@dataclass(frozen=True, eq=False)
class NetworkParts:
    """What there is to build detectors from; None for what there is not."""

    feature_dim: int | None = None  #: D
    num_classes: int | None = None  #: K
    encoder: nn.Module | None = None  #: maps inputs to features
    head: nn.Linear | None = None  #: the classifier on the features
    has_logits: bool = False  #: whether there are logits though no such classifier is at hand
    model: nn.Module | None = None  #: maps inputs to logits; by default the encoder and the head
    differentiable: bool = True  #: whether the inputs are real numbers, so that gradients reach them
    listens: bool = False  #: whether somebody hears inner layers while the network is run
    sample: Any = field(default=None, repr=False)  #: a small batch of inputs, to see what the layers give
    norm_std: list[float] | None = None  #: standard deviations that the inputs were normalised by, per channel
    #: embeddings of the class names of shape (K, D), from a vision-language backbone
    text_embeddings: Tensor | None = field(default=None, repr=False)
    seed: int = 0  #: for detectors that have one
    progress: bool = False  #: whether detectors that train show a bar


def give_head(detector: Detector, parts: NetworkParts) -> None:
    """Give such a detector the head that there is."""
    if parts.head is not None:
        bare(detector).head = _head(parts).requires_grad_(False)  # type: ignore[attr-defined]


def detector_class(factory: object) -> type[Detector] | None:
    """The detector class that a factory is, or is a partial of; None if it is something else."""
    kind = factory.func if isinstance(factory, functools.partial) else factory
    return kind if isinstance(kind, type) and issubclass(kind, Detector) else None


def wanted_layers(factory: Factory, network: nn.Module) -> LayerEncoder | None:
    """The inner layers of the network whose pooled features a detector would be fed; None for other detectors."""
    if not issubclass(detector_class(factory) or object, MultiLayer):
        return None
    options = getattr(factory, "keywords", {})
    given = {name: options[name] for name in ("layers", "pooling") if options.get(name) is not None}
    return LayerEncoder(network, **given)


def build(factory: Factory, parts: NetworkParts) -> Adapter:
    """Build a detector.

    Args:
        factory: a detector class, or a ``functools.partial`` of one with its options.
        parts: what there is to build it from.

    Raises:
        NotSupported: if it needs something else.
        TypeError: if the factory is something else.

    Example:
        >>> from rmd_plugin import RMD
        >>> build(RMD, NetworkParts(feature_dim=8, num_classes=2)).scored_on
        <Representation.FEATURES: 'features'>
    """
    kind = detector_class(factory)
    if kind is None:
        raise TypeError(f"expected a detector class, or a partial of one, got {factory}.")
    options = factory.keywords if isinstance(factory, functools.partial) else {}
    if getattr(factory, "args", ()):
        raise TypeError(f"give the options of {kind.__name__} by name, got {factory}.")
    fed = fed_with(kind)
    if fed is _INPUTS and not parts.differentiable and issubclass(kind, GradientDetector):
        raise NotSupported("needs gradients with respect to the inputs, which are no real numbers here")
    detector = kind(**_arguments(kind, options, parts, fed))
    if isinstance(detector, framework.MCD) and not _has_dropout(detector.model):
        raise NotSupported("the network has no dropout")
    # its encoder is the one that the features come from
    on_features = fed is _INPUTS and hasattr(detector, "fit_features")
    fitted = fitted_on(detector, _FEATURES if on_features else fed)
    layers = None
    if isinstance(detector, MultiLayer) and detector.encoder is not None:
        layers = LayerEncoder(detector.encoder, detector.layers, pooling=detector.pooling)
    return Adapter(detector, fitted, fed, "val" if isinstance(detector, _CALIBRATED) else "train", layers)


def _layer_by_layer(kind: type[Detector], parts: NetworkParts, names: LayerNames) -> dict[str, Any]:
    """The network in the parts that a detector on inner layers calls one after the other."""
    if issubclass(kind, MultiLayer) and parts.listens:
        return {"layers": names}
    if parts.sample is None:
        raise NotSupported("needs feature maps of inner layers, which nobody keeps here")
    encoder = _need(parts, "encoder")
    try:
        layers = find_layers(encoder, names, parts.sample)
    except EncodingError as error:
        raise NotSupported(f"needs inner layers: {error}".rstrip(".")) from error
    if issubclass(kind, MultiLayer):
        return {"encoder": encoder, "layers": list(layers)}
    multi = issubclass(kind, framework.MultiMahalanobis)  # has no use for a classifier
    network = encoder if multi else cast(nn.Module, _model(parts, _INPUTS))
    if issubclass(kind, framework.RankFeat):  # as in its paper: from the last of them
        layers = dict(list(layers.items())[-1:])
    chain = LayerChain(network, layers)
    if multi:
        return {"model": chain.links}
    if issubclass(kind, framework.Gram):
        return {"head": chain.head, "feature_layers": chain.links}
    with evaluating(network):
        maps = chain.links[0](parts.sample)
    if maps[0, 0].numel() == 1:  # nothing would be left without the only component
        raise NotSupported(f"needs feature maps, and {next(iter(layers))} gives vectors")
    return {"backbone": chain.links[0], "head": chain.head}


def _has_dropout(model: nn.Module) -> bool:
    return any(getattr(module, "p", 0) > 0 for module in model.modules() if "Dropout" in type(module).__name__)


def _arguments(
    kind: type[Detector], options: Mapping[str, Any], parts: NetworkParts, fed: Representation
) -> dict[str, Any]:
    """Arguments of a detector: its options, and whatever else it asks for and there is.

    Raises:
        NotSupported: if it needs something else.
    """
    # null in a config: as the backbone has it
    found = {name: value for name, value in options.items() if value is not None or name not in _PROVIDERS}
    parameters = inspect.signature(kind).parameters
    left = {*_HYPERPARAMETERS}
    if {"head", "w"} <= parameters.keys():  # two ways to give a head: one will do
        left |= {"head", "b"} if "w" in found else {"w", "b"}
    for name, parameter in parameters.items():
        if name in found or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        if not required and name in left:
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
        # as NAC wants it: on the penultimate layer, from features
        watch = _Watch()
        found.update(model=nn.Sequential(watch, _head(parts)).eval(), layers=[watch])
    if fed in (_LAYERS, _POOLED):
        found |= _layer_by_layer(kind, parts, found.pop("layers", None) or "auto")
    if issubclass(kind, framework.GradNorm):
        # as in its paper: the weight of the last layer, which is the model it gets
        found.setdefault("param_filter", lambda name: name.endswith("weight"))
    if fed is _LOGITS and not parts.has_logits:
        _head(parts)
    return found


# -- what detectors can be given, by parameter name -----------------------------------------------------------------


#: part -> why a detector that needs it is not supported without it
_MISSING = {
    "encoder": "needs the inputs and the network, only features are there",
    "head": "needs a classifier, and there is no linear head: head=linear_probe fits one",
    "feature_dim": "needs the number of features, which nobody tells here",
    "num_classes": "needs the number of classes, which nobody tells here",
    "text_embeddings": "needs text embeddings of the class names, from a vision-language backbone",
    "class_weights": "needs class weights, which come from training with the VOS loss",
}


def _need(parts: NetworkParts, name: str) -> Any:
    value = getattr(parts, name, None)
    if value is None:
        raise NotSupported(_MISSING[name])
    return value


def _head(parts: NetworkParts) -> nn.Linear:
    # a copy: detectors move, and some change, what they are given
    return deepcopy(_need(parts, "head"))


def _head_on(parts: NetworkParts, fed: Representation) -> nn.Module:
    return nn.Sequential(nn.Flatten(1), _head(parts)) if fed is _MAPS else _head(parts)


def _bias(parts: NetworkParts, _fed: Representation) -> Tensor:
    head = _head(parts)
    return torch.zeros(head.out_features) if head.bias is None else head.bias.detach()


def _model(parts: NetworkParts, fed: Representation) -> nn.Module | None:
    if fed is _LOGITS:
        return None  # logits are handed over as they are
    if fed is _HEAD:
        return _head(parts)
    if fed is _LAYERS:
        return None  # _arguments() puts it in, in parts
    return nn.Sequential(_need(parts, "encoder"), _head(parts)).eval() if parts.model is None else parts.model


_PROVIDERS: Mapping[str, Callable[[NetworkParts, Representation], Any]] = {
    "encoder": lambda parts, fed: _need(parts, "encoder") if fed is _INPUTS else None,
    "backbone": lambda parts, _: None,
    "model": _model,
    "head": lambda parts, fed: None if fed is _LAYERS else _head_on(parts, fed),
    "feature_layers": lambda parts, _: None,  # _arguments() puts them in, and the head
    "w": lambda parts, _: _head(parts).weight.detach(),
    "b": _bias,
    # the framework's documentation has 64 for D = 128; a smaller D keeps the half
    "d": lambda parts, _: max(1, min(64, _need(parts, "feature_dim") // 2)),
    # as many directions as classes can differ in; the paper's best, found on test data, was 76 for 100 classes
    "components": lambda parts, _: max(1, min(_need(parts, "num_classes") - 1, _need(parts, "feature_dim"))),
    "layers": lambda parts, _: None,  # _arguments() puts them in, together with the model
    "num_classes": lambda parts, _: _need(parts, "num_classes"),
    "norm_std": lambda parts, _: parts.norm_std,
    "seed": lambda parts, _: parts.seed,
    "progress": lambda parts, _: parts.progress,
    "text_embeddings": lambda parts, _: _need(parts, "text_embeddings"),
    "weights": lambda parts, _: _need(parts, "class_weights"),
}

#: what a detector knows better itself, if it has a default
_HYPERPARAMETERS = ("d", "components")


class _Watch(nn.Module):
    """Passes features on as the start of a graph, so that gradients with respect to them exist."""

    def forward(self, z: Tensor) -> Tensor:
        return z.detach().requires_grad_()
