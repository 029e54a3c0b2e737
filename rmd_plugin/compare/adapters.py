"""The one table of what each pytorch-ood detector is fed: how it is built, fitted and scored.

===============  =========================================================  ========================================
fed with         fitted by                                                  scored by
===============  =========================================================  ========================================
moments          ``fit_moments`` on streamed moments, constant memory       ``predict_features``
features         ``fit_features``                                           ``predict_features``
feature maps     ``fit_feature_maps`` on features as 1 x 1 maps             ``predict_feature_maps``
logits           ``fit_logits``                                             ``predict_logits``
head             ``fit`` on a loader of features, the head as the model     ``predict`` on features, with gradients
inputs           ``fit`` on a loader of inputs, the network as the model    ``predict`` on inputs, with gradients
===============  =========================================================  ========================================

:func:`build` makes a detector from its class with what a network offers, :func:`adopt` takes one that other code
has made. A new detector is a line in ``_FED``, if its base class does not say what it is fed. The framework names the
parameters of its detectors by a convention (``encoder``, ``head``, ``model``, ``w``, ``b``), so the names tell what to
give.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_ood import detector as framework
from pytorch_ood.api import Detector, FeatureMapsDetector, FeaturesDetector, GradientDetector, LogitsDetector
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin.detectors.conformal import bare, score_finite
from rmd_plugin.detectors.detectors import StatefulDetector, evaluating

#: a detector class, or a partial of one with its options
Factory = Callable[..., Detector]


class EncodingError(ValueError):
    """The settings do not fit the network or its batches: a wrong head, another kind of batch."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a batch became on its way through the network."""

    features: Tensor  #: shape (B, D), at least float32
    logits: Tensor | None = None  #: shape (B, C), at least float32; None where the network gave none
    labels: Tensor | None = None  #: shape (B,); None for a batch without labels
    inputs: Any = field(default=None, repr=False)  #: for detectors that work on inputs; None if not kept

    def __len__(self) -> int:
        return len(self.features)

    def select(self, keep: Tensor | slice) -> Encoded:
        """The samples where ``keep``, a mask of shape (B,) or a slice, is true. Inputs are not kept with a part."""
        if isinstance(keep, Tensor):
            if bool(keep.all()):
                return self
            keep = keep.to(self.features.device)
        logits = None if self.logits is None else self.logits[keep]
        return Encoded(self.features[keep], logits, None if self.labels is None else self.labels[keep])

    def take(self, representation: Representation) -> Any:
        """What a detector is fed with."""
        if representation is _LOGITS:
            if self.logits is None:
                raise ValueError("there are no logits of shape (B, K), K >= 2, from the head.")
            return self.logits
        if representation is _INPUTS:
            return self.inputs
        if representation is _MAPS:
            return self.features[:, :, None, None]  # as the framework documents it for pooled features
        return self.features


class Representation(Enum):
    """What a detector is fitted on or scores."""

    MOMENTS = "moments of the features"
    FEATURES = "features"
    MAPS = "features as 1 x 1 maps"
    LOGITS = "logits"
    HEAD = "features, through the head with gradients"
    INPUTS = "inputs, through the whole network"


_MOMENTS, _FEATURES, _MAPS, _LOGITS, _HEAD, _INPUTS = Representation

#: run on the network in parts that are called one after the other
_ON_LAYERS = (framework.Gram, framework.MultiMahalanobis, framework.RankFeat)

#: detector class -> what it is fed; the first line that fits counts
_FED: Mapping[type | tuple[type, ...], Representation] = {
    (framework.GradNorm, framework.GradUncertainty, framework.NACUE): _HEAD,
    (framework.ODIN, framework.MahalanobisODIN, framework.MCD, *_ON_LAYERS): _INPUTS,
    LogitsDetector: _LOGITS,
    FeaturesDetector: _FEATURES,
    FeatureMapsDetector: _MAPS,
    Detector: _INPUTS,
}

#: what the names of the methods that fit and score end with
_ENDINGS = {_MOMENTS: "_features", _FEATURES: "_features", _MAPS: "_feature_maps", _LOGITS: "_logits"}

#: fitted on held-out data, as the framework's own benchmark script does
_CALIBRATED = (framework.TemperatureScaling, framework.KLMatching)

#: features per batch for detectors that are fitted on a loader of them
_HEAD_BATCH = 256


@dataclass(frozen=True, eq=False)
class Adapter:
    """A detector, and how it is fitted and scored."""

    detector: Detector
    fitted_on: Representation | None  #: None if it needs no fit
    scored_on: Representation
    fit_split: str = "train"  #: the split that it is fitted on, ``train`` or, for calibration, ``val``

    def fit(self, data: Any) -> None:
        """Fit the detector.

        Args:
            data: for detectors on inputs a loader of pairs (x, y); for those on moments the moments; for these and all
                others the encoded training set, with labels.
        """
        detector: Any = self.detector
        if self.fitted_on is None:
            return
        if not isinstance(data, Encoded):
            (detector.fit_moments if self.fitted_on is _MOMENTS else detector.fit)(data)
        else:
            values, labels = data.take(self.fitted_on), cast(Tensor, data.labels)
            if not isinstance(bare(detector), StatefulDetector):
                # the framework fits on the CPU, partly with numpy, and its weights are float32
                values, labels = values.cpu().float(), labels.cpu()
            if self.fitted_on is _HEAD:
                pairs = TensorDataset(values, labels)
                detector.fit(DataLoader(pairs, _HEAD_BATCH, generator=torch.Generator()))
            else:
                getattr(detector, f"fit{_ENDINGS[self.fitted_on]}")(values, labels)

    def score(self, values: Any) -> Tensor:
        """OOD scores, shape (B,), of what :meth:`Encoded.take` gives for :attr:`scored_on`; higher is more OOD."""
        predict = getattr(self.detector, f"predict{_ENDINGS.get(self.scored_on, '')}")
        if not isinstance(bare(self.detector), StatefulDetector):
            predict = functools.partial(score_finite, predict)
            values = values if self.scored_on is _INPUTS else values.float()
        if self.scored_on not in (_HEAD, _INPUTS):
            with torch.no_grad():
                return predict(values)
        # such detectors may differentiate: copies made outside of inference mode can take part in autograd
        with torch.inference_mode(False), torch.enable_grad():
            scores = predict(apply_to_collection(values, Tensor, torch.clone))
        return scores.detach() if isinstance(scores, Tensor) else scores


def adopt(detector: Detector) -> Adapter:
    """A detector that was made elsewhere: what it is fed follows from its methods.

    One that is neither on features nor on logits has a network of its own, so it gets inputs.
    """
    fed = fed_with(type(bare(detector)))
    scored_on = fed if fed in (_FEATURES, _LOGITS) else _INPUTS
    return Adapter(detector, fitted_on(detector, scored_on), scored_on)


def give_head(detector: Detector, parts: NetworkParts) -> None:
    """Give a detector of ours the head that there is."""
    if parts.head is not None:
        bare(detector).head = deepcopy(parts.head).requires_grad_(False)  # type: ignore[attr-defined]


def fed_with(kind: type[Detector]) -> Representation:
    """What detectors of a class are fed, as the table says."""
    return next(fed for bases, fed in _FED.items() if issubclass(kind, bases))


def fitted_on(detector: Detector, otherwise: Representation) -> Representation | None:
    """What a detector is fitted on: moments if it can be, else ``otherwise``; None if it needs no fit."""
    if getattr(detector, "from_moments", False):
        return _MOMENTS
    return otherwise if detector.requires_fit else None


# -- detectors from their classes -------------------------------------------------------------------------------------


class NotSupported(ValueError):
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
    sample: Any = field(default=None, repr=False)  #: a small batch of inputs, to see what the layers give
    norm_std: list[float] | None = None  #: standard deviations that the inputs were normalised by, per channel
    #: embeddings of the class names of shape (K, D), from a vision-language backbone
    text_embeddings: Tensor | None = field(default=None, repr=False)
    seed: int = 0  #: for detectors that have one
    progress: bool = False  #: whether detectors that train show a bar
    remedy: str = "head=linear_probe fits one"  #: what to do where there is no head


def detector_class(factory: object) -> type[Detector] | None:
    """The detector class that a factory is, or is a partial of; None if it is something else."""
    kind = factory.func if isinstance(factory, functools.partial) else factory
    return kind if isinstance(kind, type) and issubclass(kind, Detector) else None


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
    kind, options = detector_class(factory), getattr(factory, "keywords", {})
    if kind is None or getattr(factory, "args", None):
        raise TypeError(f"expected a detector class, or a partial of one with options by name, got {factory}.")
    fed = fed_with(kind)
    if fed is _INPUTS and not parts.differentiable and issubclass(kind, GradientDetector):
        raise NotSupported("needs gradients with respect to the inputs, which are no real numbers here")
    detector = kind(**_arguments(kind, options, parts, fed))
    if isinstance(detector, framework.MCD) and not _has_dropout(detector.model):
        raise NotSupported("the network has no dropout")
    # its encoder is the one that the features come from
    on_features = fed is _INPUTS and hasattr(detector, "fit_features")
    fitted = fitted_on(detector, _FEATURES if on_features else fed)
    return Adapter(detector, fitted, fed, "val" if isinstance(detector, _CALIBRATED) else "train")


def parameters_of(kind: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class by name, those that ``**options`` hands on to its base classes too."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        own = dict(inspect.signature(base).parameters) if "__init__" in vars(base) else {}
        parameters = {name: item for name, item in own.items() if "VAR" not in item.kind.name} | parameters
        if own and not any(item.kind is item.VAR_KEYWORD for item in own.values()):
            break
    return parameters


def _has_dropout(model: nn.Module) -> bool:
    return any(getattr(module, "p", 0) > 0 for module in model.modules() if "Dropout" in type(module).__name__)


def _arguments(
    kind: type[Detector], options: Mapping[str, Any], parts: NetworkParts, fed: Representation
) -> dict[str, Any]:
    """Arguments of a detector: its options, and whatever else it asks for and there is.

    Raises:
        NotSupported: if it needs something else.
    """
    if fed is _INPUTS and parts.encoder is None and parts.model is None:
        raise NotSupported(_MISSING["encoder"])
    if parts.head is None and (fed is _HEAD or (fed is _LOGITS and not parts.has_logits)):
        raise NotSupported(_NO_HEAD.format(remedy=parts.remedy))
    values = _values(parts, fed)
    # null in a config: as the backbone has it
    arguments = {name: value for name, value in options.items() if value is not None or name not in values}
    if issubclass(kind, framework.NACUE):
        # as NAC wants it: on the penultimate layer, from features
        watch = _Watch()
        arguments.update(model=nn.Sequential(watch, values["head"]).eval(), layers=[watch])
    elif issubclass(kind, framework.GradNorm):
        # as in its paper: the weight of the last layer, which is the model it gets
        arguments.setdefault("param_filter", lambda name: name.endswith("weight"))
    elif issubclass(kind, _ON_LAYERS):
        arguments |= _layer_by_layer(kind, parts, values["model"], arguments.pop("layers", None) or "auto")
    parameters = parameters_of(kind)
    optional = {"d", "components"}  # which a detector with a default knows better itself
    if {"head", "w"} <= parameters.keys():  # two ways to give a head: one will do
        optional |= {"head", "b"} if "w" in arguments else {"w", "b"}
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty
        if name in arguments or (name in optional and not required):
            continue
        if values.get(name) is not None:
            arguments[name] = values[name]
        elif required and fed is not _INPUTS and name in ("encoder", "backbone", "model"):
            arguments[name] = None  # it is handed what they would give
        elif required:
            needed = f"needs {name}, which no backbone gives: set it in the detector's config"
            raise NotSupported(_MISSING.get(name, needed).format(remedy=parts.remedy))
    return arguments


_NO_HEAD = "needs a classifier, and there is no linear head: {remedy}"
#: parameter -> why a detector that needs it is not supported without it
_MISSING = {
    "encoder": "needs the inputs and the network, only features are there",
    **dict.fromkeys(("head", "w", "b", "model", "d"), _NO_HEAD),
    "text_embeddings": "needs text embeddings of the class names, from a vision-language backbone",
    "weights": "needs class weights, which come from training with the VOS loss",
}


#: what is called the same in :class:`NetworkParts` and in a detector
_SAME_NAMES = ("num_classes", "norm_std", "seed", "progress", "text_embeddings")


def _values(parts: NetworkParts, fed: Representation) -> dict[str, Any]:
    """What there is for each parameter that detectors may have; None for what there is not."""
    head = deepcopy(parts.head)  # detectors move, and some change, what they are given
    network, width, classes = parts.model, parts.feature_dim, parts.num_classes
    values: dict[str, Any] = dict.fromkeys(("backbone", "w", "b", "d", "components", "weights"))
    values |= {name: getattr(parts, name) for name in _SAME_NAMES}
    if head is not None:
        bias = torch.zeros(head.out_features) if head.bias is None else head.bias.detach()
        values |= {"w": head.weight.detach(), "b": bias}
        if network is None and parts.encoder is not None:
            network = nn.Sequential(parts.encoder, head)
    if width is not None:
        # the framework's documentation has 64 for D = 128; a smaller D keeps the half
        values["d"] = max(1, min(64, width // 2))
        # as many directions as classes can differ in; the paper's best, found on test data, was 76 for 100 classes
        values["components"] = classes and max(1, min(classes - 1, width))
    return values | {
        "encoder": parts.encoder if fed is _INPUTS else None,
        "model": {_LOGITS: None, _HEAD: head}.get(fed, network),  # logits are handed over as they are
        "head": nn.Sequential(nn.Flatten(1), head) if head is not None and fed is _MAPS else head,
    }


class _Watch(nn.Module):
    """Passes features on as the start of a graph, so that gradients with respect to them exist."""

    def forward(self, z: Tensor) -> Tensor:
        return z.detach().requires_grad_()


# -- inner layers, for the framework's detectors on them --------------------------------------------------------------
#
# By hooks and not by torchvision's create_feature_extractor: torch.fx cannot trace the networks of transformers, nor
# ours for genomes, and RankFeat needs the way from changed maps to the logits, which an extractor does not give.

#: a module with a larger share of the parameters is the network itself, in a wrapper, rather than one of its stages
_NEARLY_ALL = 0.95


def _layer_by_layer(
    kind: type[Detector], parts: NetworkParts, network: nn.Module | None, names: str | Sequence[str]
) -> dict[str, Any]:
    """The network in the parts that a detector on inner layers calls one after the other."""
    if parts.encoder is None or parts.sample is None:
        raise NotSupported("needs feature maps of inner layers, which are not kept here")
    layers = find_layers(parts.encoder, names, parts.sample)
    if issubclass(kind, framework.MultiMahalanobis):  # has no use for a classifier
        return {"model": LayerChain(parts.encoder, layers).links}
    if network is None:
        raise NotSupported(_NO_HEAD.format(remedy=parts.remedy))
    if issubclass(kind, framework.Gram):
        chain = LayerChain(network, layers)
        return {"head": chain.head, "feature_layers": chain.links}
    last = list(layers)[-1]
    chain = LayerChain(network, {last: layers[last]})  # as in RankFeat's paper: from the last of them
    with evaluating(network):
        maps = chain.links[0](parts.sample)
    if maps[0, 0].numel() == 1:  # nothing would be left without the only component
        raise NotSupported(f"needs feature maps, and {last} gives vectors")
    return {"backbone": chain.links[0], "head": chain.head}


def find_layers(encoder: nn.Module, names: str | Sequence[str], x: Tensor) -> dict[str, nn.Module]:
    """Layers of an encoder that take part in its forward pass, by name, in order.

    Args:
        encoder: any network.
        names: names; patterns, in which ``*`` stands for any text between two dots; or ``"auto"`` for the stages: the
            siblings whose names differ in a number only (``layer1`` to ``layer4``) that hold most parameters. Where the
            size of their maps changes, the last one of each size.
        x: inputs for one pass, to see what the layers give.

    Raises:
        NotSupported: if there are no such layers.

    Example:
        >>> stage = lambda a, b: nn.Conv2d(a, b, 3, stride=2)
        >>> network = nn.Sequential(stage(3, 8), stage(8, 16), nn.Flatten(), nn.LazyLinear(5))
        >>> list(find_layers(network, "auto", torch.rand(1, 3, 16, 16)))
        ['0', '1']
    """
    modules = {name: module for name, module in encoder.named_modules() if name}
    with evaluating(encoder):
        _, outputs = _run_recording(encoder, modules, x)
    modules = {name: module for name, module in modules.items() if name in outputs}
    if names != "auto":
        patterns = [names] if isinstance(names, str) else names
        chosen = [name for pattern in patterns for name in modules if _matches(name, pattern)]
        if not chosen:
            raise NotSupported(f"needs inner layers, and {type(encoder).__name__} runs none named {names}")
        return {name: modules[name] for name in chosen}
    sizes = {name: sum(weight.numel() for weight in module.parameters()) for name, module in modules.items()}
    families: dict[str, list[str]] = {}
    for name in modules:
        if name[-1].isdigit():
            families.setdefault(name.rstrip("0123456789"), []).append(name)

    def total(family: list[str]) -> int:
        return sum(sizes[name] for name in family)

    for dims in (3, 2):  # maps and tokens before vectors
        members = [[name for name in family if outputs[name].ndim >= dims] for family in families.values()]
        several = [family for family in members if len(family) > 1]
        stages = [family for family in several if max(sizes[name] for name in family) < _NEARLY_ALL * total(family)]
        if stages:
            break
    else:
        raise NotSupported(f"needs inner layers: name those of {type(encoder).__name__}, whose stages nothing tells")
    largest = max(stages, key=total)  # the first of equal ones is the outermost
    areas = [outputs[name].shape[2:] if outputs[name].ndim == 4 else () for name in largest]
    if len(set(areas)) == 1:  # one size: of those without parameters nothing new comes
        return {name: modules[name] for name in largest if sizes[name]}
    return {name: modules[name] for name in dict(zip(areas, largest, strict=True)).values()}


def _matches(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and all(map(fnmatchcase, name.split("."), pattern.split(".")))


def _run_recording(network: nn.Module, layers: Mapping[str, nn.Module], x: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What a network gives, and what its layers give on the way, as far as they are called."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, _: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
            outputs[name] = tensor.detach().clone()  # the network may continue in place

    with torch.no_grad(), ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(functools.partial(record, name)))
        return network(x), outputs


class LayerChain:
    """A network as modules that are called one after the other, as the framework's detectors on layers want them.

    The first link runs the network and records all layers, the others give what was recorded, and the head gives the
    logits of that pass. Maps that were changed on the way to the head take the place of the last layer's output, in a
    second pass on the same inputs. No gradients are kept.

    Args:
        network: maps inputs to logits; without a use for the head, any network.
        layers: parts of it by name, in order.

    Attributes:
        links: a module for each layer, which gives its output as maps (B, C, H, W): tokens (B, T, D) become
            (B, D, T, 1), vectors (B, D) become (B, D, 1, 1).
        head: from the last layer's maps to logits.
    """

    def __init__(self, network: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self.network, self.layers = network, dict(layers)
        self.links = [_Call(network, functools.partial(self._link, name)) for name in layers]
        self.head = _Call(network, self._logits)
        self._maps: dict[str, Tensor] = {}

    def _link(self, name: str, x: Any) -> Tensor:
        if name == next(iter(self.layers)):
            self._inputs = x
            self._output, outputs = _run_recording(self.network, self.layers, x)
            self._maps = {name: _as_maps(layer, outputs[name]) for name, layer in self.layers.items()}
        return self._maps[name]

    def _logits(self, maps: Tensor) -> Tensor:
        name, layer = list(self.layers.items())[-1]
        if maps is self._maps[name]:
            return self._output
        replace = layer.register_forward_hook(lambda module, _, output: _as_output(module, maps, output))
        with torch.no_grad(), replace:
            return self.network(self._inputs)


def _has_channels_first(layer: nn.Module) -> bool:
    """Whether an output of three dimensions is (B, C, L) rather than tokens (B, T, D)."""
    return any(isinstance(module, nn.Conv1d) for module in layer.modules())


def _as_maps(layer: nn.Module, output: Tensor) -> Tensor:
    if output.ndim == 3:
        return (output if _has_channels_first(layer) else output.transpose(1, 2)).unsqueeze(3).contiguous()
    return output[:, :, None, None] if output.ndim == 2 else output.contiguous()


def _as_output(layer: nn.Module, maps: Tensor, output: Any) -> Any:
    """A layer's output with other maps in its place."""
    if isinstance(output, (tuple, list)):
        return type(output)([_as_output(layer, maps, output[0]), *output[1:]])
    if output.ndim == 3 and not _has_channels_first(layer):
        return maps.squeeze(3).transpose(1, 2)
    return maps.reshape(output.shape)


class _Call(nn.Module):
    """A function of a network as a module, which moves with the network."""

    def __init__(self, network: nn.Module, function: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.network, self._function = network, function

    def forward(self, x: Any) -> Tensor:
        return self._function(x)
