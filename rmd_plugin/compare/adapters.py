"""Any pytorch-ood detector, served from features: what it needs is put in by the names of its parameters.

The framework names the parameters of its detectors by a convention (``encoder``, ``head``, ``model``, ``w``, ``b``).
:func:`prepare` fills in those that the caller has not set, finds out which representation the detector works on, and
says in one sentence why a detector cannot be served.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from pytorch_ood import detector as framework
from pytorch_ood.api import Detector, FeatureMapsDetector, FeaturesDetector, GradientDetector, LogitsDetector
from torch import Tensor, nn

#: a detector class, or a partial of one with its options
Factory = Callable[..., Detector]


class Route(Enum):
    """The representation that a detector is fitted on and scores."""

    LOGITS = "logits"
    FEATURES = "features"
    MAPS = "features as 1 x 1 maps"
    HEAD = "features, through the head with gradients"
    INPUTS = "inputs, through the whole network"


class Unserved(Exception):
    """A detector needs what the backbone does not give. The message says what."""


@dataclass(frozen=True, eq=False)
class Sources:
    """What there is to build detectors from.

    Attributes:
        feature_dim: D.
        num_classes: K.
        encoder: maps inputs to features; None if only features are there.
        head: the classifier on the features, or None.
        differentiable: whether the inputs are real numbers, so that gradients reach them.
        norm_std: standard deviations that the inputs were normalised by, per channel, if known.
        text_embeddings: embeddings of the class names of shape (K, D), from a vision-language backbone.
        seed: for detectors that have one.
        progress: whether detectors that train show a bar.
    """

    feature_dim: int
    num_classes: int
    encoder: nn.Module | None = None
    head: nn.Linear | None = None
    differentiable: bool = True
    norm_std: list[float] | None = None
    text_embeddings: Tensor | None = field(default=None, repr=False)
    seed: int = 0
    progress: bool = False


@dataclass(frozen=True, eq=False)
class Prepared:
    """A detector that is ready to be fitted.

    Attributes:
        detector: the detector.
        route: what it works on.
        fit_split: the split that it is fitted on, ``train`` or, for calibration, ``val``.
    """

    detector: Detector
    route: Route
    fit_split: str


_HEAD = (framework.GradNorm, framework.GradUncertainty, framework.NACUE)
_INPUTS = (framework.ODIN, framework.MahalanobisODIN, framework.MCD)
_LAYERS = (framework.Gram, framework.MultiMahalanobis, framework.RankFeat)
#: fitted on held-out data, as the framework's own benchmark script does
_CALIBRATED = (framework.TemperatureScaling, framework.KLMatching)


def prepare(factory: Factory, sources: Sources) -> Prepared:
    """Build a detector for a backbone.

    Args:
        factory: a detector class, or a ``functools.partial`` of one with its options.
        sources: what the backbone gives.

    Returns:
        The detector and how to use it.

    Raises:
        Unserved: if the backbone cannot serve it.
        TypeError: if the factory makes no detector.
        ValueError: if the detector refuses its options.

    Example:
        >>> from rmd_plugin import RMD
        >>> prepare(RMD, Sources(feature_dim=8, num_classes=2)).route
        <Route.FEATURES: 'features'>
    """
    target, options = _unwrap(factory)
    if issubclass(_kind(target), _LAYERS):
        raise Unserved("needs feature maps of inner layers, one pass to pooled features does not keep them")
    route = _route(target)
    if route is Route.INPUTS and not sources.differentiable and issubclass(_kind(target), GradientDetector):
        raise Unserved("needs gradients with respect to the inputs, which are no real numbers here")
    # null in a config: as the backbone has it
    options = {name: value for name, value in options.items() if value is not None or name not in _PROVIDERS}
    for name, parameter in inspect.signature(target).parameters.items():
        if name in options or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        if not required and name in _HYPERPARAMETERS:
            continue
        if name in _PROVIDERS:
            try:
                value = _PROVIDERS[name](sources, route)
            except Unserved:
                if required:
                    raise
                continue
            if value is not None or required:
                options[name] = value
        elif required:
            raise Unserved(f"needs {name}, which no backbone gives: set it in the detector's config")
    if issubclass(_kind(target), framework.NACUE):
        options.update(zip(("model", "layers"), _watched(sources), strict=True))
    if issubclass(_kind(target), framework.GradNorm):
        # as in its paper: the weight of the last layer, which is the model it gets
        options.setdefault("param_filter", _is_weight)
    if route is Route.LOGITS:
        _head(sources)
    detector = target(**options)
    if not isinstance(detector, Detector):
        raise TypeError(f"{target} gave a {type(detector).__name__}, expected a pytorch_ood Detector.")
    if isinstance(detector, framework.MCD) and not _has_dropout(detector.model):
        raise Unserved("the network has no dropout")
    return Prepared(detector, route, "val" if isinstance(detector, _CALIBRATED) else "train")


def _unwrap(factory: Factory) -> tuple[Callable[..., Any], dict[str, Any]]:
    options: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        if factory.args:
            raise TypeError(f"give the options of {factory.func} by name, got {factory.args}.")
        options = {**factory.keywords, **options}
        factory = factory.func
    return factory, options


def _kind(target: Callable[..., Any]) -> type[Detector]:
    kind = target if isinstance(target, type) else inspect.signature(target, eval_str=True).return_annotation
    if not isinstance(kind, type) or not issubclass(kind, Detector):
        raise TypeError(f"expected a detector class, or a function whose annotation says it returns one, got {target}.")
    return kind


def _route(target: Callable[..., Any]) -> Route:
    kind = _kind(target)
    for classes, route in ((_HEAD, Route.HEAD), (_INPUTS, Route.INPUTS)):
        if issubclass(kind, classes):
            return route
    for base, route in (
        (LogitsDetector, Route.LOGITS),
        (FeaturesDetector, Route.FEATURES),
        (FeatureMapsDetector, Route.MAPS),
    ):
        if issubclass(kind, base):
            return route
    return Route.INPUTS


# -- what detectors can be given, by parameter name -----------------------------------------------------------------


def _head(sources: Sources) -> nn.Linear:
    if sources.head is None:
        raise Unserved("needs a classifier, and the backbone has none: head=linear_probe fits one")
    # a copy: detectors move, and some change, what they are given
    return deepcopy(sources.head)


def _any_head(sources: Sources, route: Route) -> nn.Module:
    head = _head(sources)
    return nn.Sequential(nn.Flatten(1), head) if route is Route.MAPS else head


def _bias(sources: Sources, _route: Route) -> Tensor:
    head = _head(sources)
    return torch.zeros(head.out_features) if head.bias is None else head.bias.detach()


def _model(sources: Sources, route: Route) -> nn.Module | None:
    if route is Route.LOGITS:
        return None  # logits are handed over as they are
    if route is Route.HEAD:
        return _head(sources)
    return nn.Sequential(_network(sources), _head(sources)).eval()


def _encoder(sources: Sources, route: Route) -> nn.Module | None:
    return _network(sources) if route is Route.INPUTS else None


def _network(sources: Sources) -> nn.Module:
    if sources.encoder is None:
        raise Unserved("needs the inputs and the network, only features are there")
    return sources.encoder


def _is_weight(name: str) -> bool:
    return name.endswith("weight")


def _text_embeddings(sources: Sources, _route: Route) -> Tensor:
    if sources.text_embeddings is None:
        raise Unserved("needs text embeddings of the class names, from a vision-language backbone")
    return sources.text_embeddings


def _class_weights(_sources: Sources, _route: Route) -> Tensor:
    raise Unserved("needs class weights, which come from training with the VOS loss")


def _nothing(_sources: Sources, _route: Route) -> None:
    return None


_PROVIDERS: Mapping[str, Callable[[Sources, Route], Any]] = {
    "encoder": _encoder,
    "backbone": _nothing,
    "model": _model,
    "head": _any_head,
    "w": lambda sources, _: _head(sources).weight.detach(),
    "b": _bias,
    # the framework's documentation has 64 for D = 128; a smaller D keeps the half
    "d": lambda sources, _: max(1, min(64, sources.feature_dim // 2)),
    # as many directions as classes can differ in; the paper's best, found on test data, was 76 for 100 classes
    "components": lambda sources, _: max(1, min(sources.num_classes - 1, sources.feature_dim)),
    "layers": _nothing,  # prepare() puts them in, together with the model
    "num_classes": lambda sources, _: sources.num_classes,
    "norm_std": lambda sources, _: sources.norm_std,
    "seed": lambda sources, _: sources.seed,
    "progress": lambda sources, _: sources.progress,
    "text_embeddings": _text_embeddings,
    "weights": _class_weights,
}


#: what a detector knows better itself, if it has a default
_HYPERPARAMETERS = ("d", "components")


class _Watch(nn.Module):
    """Passes features on as the start of a graph, so that gradients with respect to them exist."""

    def forward(self, z: Tensor) -> Tensor:
        return z.detach().requires_grad_()


def _watched(sources: Sources) -> tuple[nn.Module, list[nn.Module]]:
    """The head behind its input layer, as NAC wants it: on the penultimate layer, from features."""
    watch = _Watch()
    return nn.Sequential(watch, _head(sources)).eval(), [watch]


def _has_dropout(model: nn.Module) -> bool:
    return any(getattr(module, "p", 0) > 0 for module in model.modules() if "Dropout" in type(module).__name__)
