"""The one table of what each pytorch-ood detector is fed: how it is fitted and scored.

===============  =========================================================  ========================================
fed with         fitted by                                                  scored by
===============  =========================================================  ========================================
moments          ``fit_moments`` on streamed moments, constant memory       ``predict_features``
features         ``fit_features``                                           ``predict_features``
feature maps     ``fit_feature_maps`` on features as 1 x 1 maps             ``predict_feature_maps``
logits           ``fit_logits``                                             ``predict_logits``
head             ``fit`` on a loader of features, the head as the model     ``predict`` on features, with gradients
inputs           ``fit`` on a loader of inputs, the network as the model    ``predict`` on inputs, with gradients
layers           ``fit`` on a loader of inputs, the network layer by layer  ``predict`` on inputs
pooled           ``fit_layers`` on pooled features of inner layers          ``predict_layers``
===============  =========================================================  ========================================

:func:`rmd_plugin.compare.building.build` makes a detector from its class, :func:`adopt` takes one that somebody else
has made. A new detector is a line in ``_FED``, if its base class does not say what it is fed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_ood import detector as framework
from pytorch_ood.api import Detector, FeatureMapsDetector, FeaturesDetector, LogitsDetector
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin.detectors.base import StatefulDetector, raise_if_interrupted
from rmd_plugin.detectors.calibrated import bare
from rmd_plugin.detectors.multi_layer import MultiLayer
from rmd_plugin.encoding.batches import Encoded
from rmd_plugin.encoding.layer_encoder import LayerEncoder


class Representation(Enum):
    """What a detector is fitted on or scores."""

    MOMENTS = "moments of the features"
    FEATURES = "features"
    MAPS = "features as 1 x 1 maps"
    LOGITS = "logits"
    HEAD = "features, through the head with gradients"
    INPUTS = "inputs, through the whole network"
    LAYERS = "inputs, through the network layer by layer"
    POOLED = "pooled features of inner layers"


_MOMENTS, _FEATURES, _MAPS, _LOGITS, _HEAD, _INPUTS, _LAYERS, _POOLED = Representation

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
    MultiLayer: _POOLED,
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
    _LAYERS: ("fit", "predict"),
    _POOLED: ("fit_layers", "predict_layers"),
}

#: what runs the network itself, so it is fed inputs
ON_INPUTS = (_INPUTS, _LAYERS)

#: features per batch for detectors that are fitted on a loader of them
_HEAD_BATCH = 256


@dataclass(frozen=True, eq=False)
class Adapter:
    """A detector, and how it is fitted and scored."""

    detector: Detector
    fitted_on: Representation | None  #: None if it needs no fit
    scored_on: Representation
    fit_split: str = "train"  #: the split that it is fitted on, ``train`` or, for calibration, ``val``
    layers: LayerEncoder | None = None  #: hears the layers of a detector that is fed pooled ones

    def fit(self, data: Any) -> None:
        """Fit the detector; Ctrl-C stays one, even if the detector takes it as a wish to end its fit early.

        Args:
            data: for detectors on inputs a loader of pairs (x, y); for those on moments the moments, for those on
                pooled layers layer -> moments; for these and all others the encoded training set, with labels.
        """
        detector: Any = self.detector
        if self.fitted_on is None:
            return
        if not isinstance(data, Encoded):
            whole = {_MOMENTS: "fit_moments", _POOLED: "fit_layer_moments"}
            getattr(detector, whole.get(self.fitted_on, "fit"))(data)
        else:
            values, labels = self.take(self.fitted_on, data), cast(Tensor, data.labels)
            if not isinstance(bare(detector), StatefulDetector | MultiLayer):
                values, labels = values.cpu(), labels.cpu()  # the framework fits on the CPU, partly with numpy
            if self.fitted_on is _HEAD:
                pairs = TensorDataset(values, labels)
                detector.fit(DataLoader(pairs, _HEAD_BATCH, generator=torch.Generator()))
            else:
                getattr(detector, _METHODS[self.fitted_on][0])(values, labels)
        raise_if_interrupted(detector)

    def score(self, encoded: Encoded) -> Tensor:
        """OOD scores of an encoded batch, shape (B,); higher means more likely OOD."""
        return self.score_values(self.take(self.scored_on, encoded))

    def take(self, representation: Representation, encoded: Encoded) -> Any:
        """What :func:`take` gives; of pooled layers those that the detector has, under their own names."""
        values = take(representation, encoded)
        return values if self.layers is None else {name: values[key] for name, key in self.layers.keys().items()}

    def score_values(self, values: Any) -> Tensor:
        """OOD scores of what :func:`take` gives."""
        predict = getattr(self.detector, _METHODS[self.scored_on][1])
        if self.scored_on not in (_HEAD, *ON_INPUTS):
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
    if representation in ON_INPUTS:
        return encoded.inputs
    if representation is _POOLED:
        return encoded.layers
    if representation is _MAPS:
        return encoded.features.float()[:, :, None, None]  # as the framework documents it for pooled features
    return encoded.features.float() if representation is _HEAD else encoded.features


def adopt(detector: Detector) -> Adapter:
    """A detector that somebody else has made: what it is fed follows from what it offers.

    One that is neither on features, of one layer or of several, nor on logits has a network of its own, so it gets
    inputs.
    """
    fed = fed_with(type(bare(detector)))
    scored_on = fed if fed in (_FEATURES, _LOGITS, _POOLED) else _INPUTS
    return Adapter(detector, fitted_on(detector, scored_on), scored_on)


def hearing_layers(adapter: Adapter, module: nn.Module, *, fitting: bool) -> Adapter:
    """The adapter of a detector on pooled layers, which are heard while a module is run; other adapters stay.

    The layers are those of the module or, where the detector has a network, of that part of the module. With a network
    that is no part of it the detector runs that, on inputs. Layers are looked up here, but for ``"auto"``.

    Args:
        adapter: any.
        module: the module.
        fitting: whether the detector is to be fitted; else the layers are those of its fit.

    Raises:
        EncodingError: if the module has no such layers.
    """
    detector = bare(adapter.detector)
    if not isinstance(detector, MultiLayer):
        return adapter
    network = module if detector.encoder is None else detector.encoder
    if all(part is not network for part in module.modules()):
        return Adapter(adapter.detector, _INPUTS, _INPUTS)
    names = detector.layers if fitting or not detector.fitted else list(detector.detectors)
    layers = LayerEncoder(network, names, pooling=detector.pooling)
    if names != "auto":
        layers.find(None)
    return Adapter(adapter.detector, _POOLED, _POOLED, layers=layers)


def takes_head(detector: Detector) -> bool:
    """Whether a detector of ours has a use for the head of the network, but works without one as well."""
    return isinstance(bare(detector), StatefulDetector) and hasattr(bare(detector), "head")


def has_head(detector: Detector) -> bool:
    """Whether it has one."""
    return getattr(bare(detector), "head", None) is not None


def fed_with(kind: type[Detector]) -> Representation:
    """What detectors of a class are fed, as the table says."""
    return next(fed for base, fed in _FED.items() if issubclass(kind, base))


def fitted_on(detector: Detector, otherwise: Representation) -> Representation | None:
    """What a detector is fitted on: moments if it can be, else ``otherwise``; None if it needs no fit."""
    if hasattr(detector, "new_moments") and hasattr(detector, "fit_moments"):
        return _MOMENTS
    return otherwise if detector.requires_fit else None
