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

:func:`build` makes a detector from its class, with what :mod:`rmd_plugin.compare.parts` gives. :func:`adopt` takes one
that somebody else has made. A new detector is a line in ``_FED``, if its base class does not say what it is fed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_ood import detector as framework
from pytorch_ood.api import Detector, FeatureMapsDetector, FeaturesDetector, GradientDetector, LogitsDetector
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin.compare.parts import NotSupported, Parts, Representation, arguments_for
from rmd_plugin.detectors.base import raise_if_interrupted
from rmd_plugin.encoding.batches import Encoded

#: a detector class, or a partial of one with its options
Factory = Callable[..., Detector]


_MOMENTS, _FEATURES, _MAPS, _LOGITS, _HEAD, _INPUTS, _LAYERS = Representation

#: detector class -> what it is fed; the first line that fits counts
_FED: Mapping[type, Representation] = {
    framework.GradNorm: _HEAD,
    framework.GradUncertainty: _HEAD,
    framework.NACUE: _HEAD,
    framework.ODIN: _INPUTS,
    framework.MahalanobisODIN: _INPUTS,
    framework.MCD: _INPUTS,
    framework.Gram: _LAYERS,
    framework.MultiMahalanobis: _LAYERS,
    framework.RankFeat: _LAYERS,
    LogitsDetector: _LOGITS,
    FeaturesDetector: _FEATURES,
    FeatureMapsDetector: _MAPS,
    Detector: _INPUTS,
}

#: methods that fit and score
_METHODS: Mapping[Representation, tuple[str, str]] = {
    _MOMENTS: ("fit_features", "predict_features"),
    _FEATURES: ("fit_features", "predict_features"),
    _MAPS: ("fit_feature_maps", "predict_feature_maps"),
    _LOGITS: ("fit_logits", "predict_logits"),
    _HEAD: ("fit", "predict"),
    _INPUTS: ("fit", "predict"),
}

#: fitted on held-out data, as the framework's own benchmark script does
_CALIBRATED = (framework.TemperatureScaling, framework.KLMatching)

#: features per batch for detectors that are fitted on a loader of them
_HEAD_BATCH = 256


@dataclass(frozen=True, eq=False)
class Adapter:
    """A detector, and how it is fitted and scored.

    Attributes:
        detector: the detector.
        fitted_on: what it is fitted on; None if it needs no fit.
        scored_on: what it scores.
        fit_split: the split that it is fitted on, ``train`` or, for calibration, ``val``.
    """

    detector: Detector
    fitted_on: Representation | None
    scored_on: Representation
    fit_split: str = "train"

    def fit(self, data: Any) -> None:
        """Fit the detector.

        Args:
            data: for detectors on inputs a loader of pairs (x, y); for those on moments the moments; for these and all
                others the encoded training set, with labels.

        Raises:
            KeyboardInterrupt: if the detector took Ctrl-C as a wish to end its fit early.
        """
        detector: Any = self.detector
        if self.fitted_on is None:
            return
        if not isinstance(data, Encoded):
            (detector.fit_moments if self.fitted_on is _MOMENTS else detector.fit)(data)
        else:
            values, labels = take(self.fitted_on, data), cast(Tensor, data.labels)
            if not hasattr(detector, "state_dict"):
                values, labels = values.cpu(), labels.cpu()  # the framework fits on the CPU, partly with numpy
            if self.fitted_on is _HEAD:
                pairs = TensorDataset(values, labels)
                detector.fit(DataLoader(pairs, _HEAD_BATCH, generator=torch.Generator()))
            else:
                getattr(detector, _METHODS[self.fitted_on][0])(values, labels)
        raise_if_interrupted(detector)

    def score(self, encoded: Encoded) -> Tensor:
        """Outlier scores of an encoded batch, shape (B,); higher means more likely OOD."""
        return self.score_values(take(self.scored_on, encoded))

    def score_values(self, values: Any) -> Tensor:
        """Outlier scores of what :func:`take` gives."""
        predict = getattr(self.detector, _METHODS[self.scored_on][1])
        if self.scored_on not in (_HEAD, _INPUTS):
            with torch.no_grad():
                return predict(values)
        # such detectors may differentiate: copies made outside of inference mode can take part in autograd
        with torch.inference_mode(False), torch.enable_grad():
            scores = predict(apply_to_collection(values, Tensor, torch.clone))
        return scores.detach() if isinstance(scores, Tensor) else scores


def take(representation: Representation, encoded: Encoded) -> Any:
    """What a detector is fed, from an encoded batch."""
    if representation is _LOGITS:
        if encoded.logits is None:
            raise ValueError("there are no logits: the head's output is not a tensor of shape (B, C).")
        return encoded.logits
    if representation is _INPUTS:
        return encoded.inputs
    if representation is _MAPS:
        return encoded.features.float()[:, :, None, None]  # as the framework documents it for pooled features
    return encoded.features.float() if representation is _HEAD else encoded.features


def adopt(detector: Detector) -> Adapter:
    """A detector that somebody else has made: what it is fed follows from what it offers.

    One that is neither on features nor on logits has a network of its own, so it gets inputs.
    """
    fed = _fed(type(detector))
    scored_on = fed if fed in (_FEATURES, _LOGITS) else _INPUTS
    return Adapter(detector, _fitted_on(detector, scored_on), scored_on)


def _fed(kind: type[Detector]) -> Representation:
    return next(fed for base, fed in _FED.items() if issubclass(kind, base))


def _fitted_on(detector: Detector, otherwise: Representation) -> Representation | None:
    if hasattr(detector, "new_moments") and hasattr(detector, "fit_moments"):
        return _MOMENTS
    return otherwise if detector.requires_fit else None


def detector_class(factory: object) -> type[Detector] | None:
    """The detector class that a factory is, or is a partial of; None if it is something else."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory if isinstance(factory, type) and issubclass(factory, Detector) else None


def build(factory: Factory, parts: Parts) -> Adapter:
    """Build a detector.

    Args:
        factory: a detector class, or a ``functools.partial`` of one with its options.
        parts: what there is to build it from.

    Returns:
        The detector and how to use it.

    Raises:
        NotSupported: if it needs something else.
        TypeError: if the factory makes no detector.
        ValueError: if the detector refuses its options.

    Example:
        >>> from rmd_plugin import RMD
        >>> build(RMD, Parts(feature_dim=8, num_classes=2)).scored_on
        <Representation.FEATURES: 'features'>
    """
    target, options = _unwrap(factory)
    kind = _kind(target)
    fed = _fed(kind)
    if fed is _LAYERS:
        raise NotSupported("needs feature maps of inner layers, one pass to pooled features does not keep them")
    if fed is _INPUTS and not parts.differentiable and issubclass(kind, GradientDetector):
        raise NotSupported("needs gradients with respect to the inputs, which are no real numbers here")
    detector = target(**arguments_for(target, kind, options, parts, fed))
    if not isinstance(detector, Detector):
        raise TypeError(f"{target} gave a {type(detector).__name__}, expected a pytorch_ood Detector.")
    if isinstance(detector, framework.MCD) and not _has_dropout(detector.model):
        raise NotSupported("the network has no dropout")
    # its encoder is the one that the features come from
    on_features = fed is _INPUTS and hasattr(detector, "fit_features")
    fitted_on = _fitted_on(detector, _FEATURES if on_features else fed)
    return Adapter(detector, fitted_on, fed, "val" if isinstance(detector, _CALIBRATED) else "train")


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


def _has_dropout(model: nn.Module) -> bool:
    return any(getattr(module, "p", 0) > 0 for module in model.modules() if "Dropout" in type(module).__name__)
