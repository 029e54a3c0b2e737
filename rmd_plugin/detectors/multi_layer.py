"""MultiLayer: a detector for each of several layers, and one score of all of them, from ID data alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import torch
from pytorch_ood.api import Detector, DetectorInfo, ModelNotSetException, RequiresFittingException, Task
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.detectors import files
from rmd_plugin.detectors.base import load_detector
from rmd_plugin.detectors.calibrated_module import CalibratedScore
from rmd_plugin.detectors.conformal import Calibration
from rmd_plugin.detectors.files import File, TensorSpec
from rmd_plugin.detectors.functional import NumericalWarning, listed, unit_length
from rmd_plugin.detectors.mahalanobis import RMD, GaussianDetector
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.detectors.reservoir import SampledClassMoments, SampledMoments
from rmd_plugin.encoding.layer_encoder import LayerEncoder, Pooling, check_pooling
from rmd_plugin.encoding.layers import LayerNames
from rmd_plugin.encoding.loop import PairEncoder, encode_batches

#: parts of the sample that are left out of a fit in turn
_FOLDS = 5


class LayerMoments(SampledClassMoments):
    """Moments and a sample of one layer, of features that are scaled to unit length first if ``unit`` is true."""

    def __init__(self, *, unit: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unit = unit

    def _add(self, features: Tensor, labels: Tensor) -> None:
        super()._add(unit_length(features) if self.unit else features, labels)


class MultiLayer(Detector):
    """A Gaussian detector for each layer of a network, whose scores are added on a common scale.

    The score is sum_l (s_l - mean_l) / std_l, with mean and standard deviation over training samples that were left out
    of the fit: a fifth of a sample of at most 10,000 at a time, whose moments are subtracted. Or, with
    ``fusion="p-values"``, Fisher's -2 sum_l log p_l of the conformal p-values of the layers among those samples. Layers
    depend on each other, so this is a score and no chi-square: :class:`rmd_plugin.Calibrated` gives p-values.

    A fit streams over the data once, in constant memory: moments and a sample for each layer.

    Args:
        detector: what each layer gets a copy of: RMD (the default), Mahalanobis, or another that is fitted on moments.
        encoder: the network that has the layers. May be None where only the ``_layers`` methods are used.
        layers: names, patterns (``"blocks.*"``) or ``"auto"`` for the stages of the network.
        pooling: of tokens: ``"mean"``, ``"cls"`` or ``"last"``; or layer (or pattern) -> which.
        fusion: ``"sum"`` or ``"p-values"``.

    Attributes:
        detectors: layer -> its fitted detector.

    Example:
        >>> from torch import nn
        >>> from rmd_plugin import RMD, MultiLayer
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        >>> y = torch.arange(400) % 2
        >>> x = torch.randn(400, 4) + 4.0 * y[:, None]
        >>> detector = MultiLayer(RMD(), network, layers=["0", "2"]).fit([(x, y)])
        >>> detector.predict(x[:5]).shape, list(detector.detectors)
        (torch.Size([5]), ['0', '2'])
    """

    info = DetectorInfo(tasks=frozenset({Task.CLASSIFICATION}), ai_coded=True)
    requires_fit = True

    def __init__(
        self,
        detector: GaussianDetector | None = None,
        encoder: nn.Module | None = None,
        *,
        layers: LayerNames = "auto",
        pooling: Pooling | Mapping[str, Pooling] = "mean",
        fusion: Literal["sum", "p-values"] = "sum",
    ) -> None:
        super().__init__()
        if not isinstance(detector, GaussianDetector | None):
            raise TypeError(f"expected RMD() or another detector that is fitted on moments, got {detector!r}.")
        if fusion not in ("sum", "p-values"):
            raise ValueError(f"fusion must be 'sum' or 'p-values', got {fusion!r}.")
        check_pooling(pooling)
        self.detector = RMD() if detector is None else detector
        self.encoder, self.layers, self.pooling, self.fusion = encoder, layers, pooling, fusion
        self.detectors: dict[str, GaussianDetector] = {}
        self._left_out: dict[str, Tensor] = {}  # layer -> scores of left-out samples, sorted

    def __repr__(self) -> str:
        fitted = f" fitted: {', '.join(self.detectors)}" if self.detectors else ""
        return f"MultiLayer({self.detector!r}, layers={self.layers!r}, fusion={self.fusion!r}){fitted}"

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, data_loader: Iterable[Any], *, progress: bool = False) -> Self:
        """Fit on a loader of pairs (x, y) in one pass, in evaluation mode. Samples with y < 0 are skipped.

        Raises:
            ModelNotSetException: if there is no network.
            ValueError: if there is no such layer, no ID sample, or a feature is NaN or infinite.
        """
        encode = PairEncoder(self._encoder())
        title = "fit MultiLayer" if progress else None
        batches = encode_batches(encode, data_loader, device=self.device, id_only=True, title=title)
        return self._fit_batches((batch.layers, cast(Tensor, batch.labels)) for batch in batches)

    def fit_layers(self, layers: Mapping[str, Tensor], y: Tensor) -> Self:
        """Fit on features: layer -> (N, D_l), or maps (N, C, H, W), which are averaged; labels y of shape (N,)."""
        return self._fit_batches([(layers, y)])

    def _fit_batches(self, batches: Iterable[tuple[Mapping[str, Tensor], Tensor]]) -> Self:
        metrics: dict[str, LayerMoments] = {}
        for layers, y in batches:
            for name, z in layers.items():
                metrics.setdefault(name, self.new_layer_moments(sync_on_compute=False)).update(z, y)
        if not metrics:
            raise ValueError("there is no in-distribution sample (label >= 0) in any layer: there is nothing to fit.")
        return self.fit_layer_moments({name: metric.compute() for name, metric in metrics.items()})

    def new_layer_moments(self, **kwargs: Any) -> LayerMoments:
        """An accumulator of one layer's features, for :meth:`fit_layer_moments`; options of torchmetrics' Metric."""
        return LayerMoments(unit=self.detector.normalize, **kwargs)

    def fit_layer_moments(self, moments: Mapping[str, SampledMoments]) -> Self:
        """Fit on layer -> what :meth:`new_layer_moments` has collected, of any number of processes."""
        found = {name: self._fit_layer(name, found) for name, found in moments.items()}
        self.detectors = {name: detector for name, (detector, _) in found.items()}
        self._left_out = {name: scores for name, (_, scores) in found.items()}
        return self

    def _fit_layer(self, name: str, moments: SampledMoments) -> tuple[GaussianDetector, Tensor]:
        fitted = copy.deepcopy(self.detector).fit_moments(self._plain(moments))
        scores = self._left_out_scores(moments)
        if len(scores) < 2 or not bool(scores[-1] > scores[0]):
            raise ValueError(
                f"the left-out samples of layer {name} have no two different scores, so there is no scale to add "
                "layers on. Each class needs at least two samples; leave out layers that are constant."
            )
        return fitted, scores

    def _left_out_scores(self, moments: SampledMoments) -> Tensor:
        """Sorted scores of the samples of the reservoir, each by a fit without its fold."""
        sample, whole = moments.sample, self._plain(moments)
        fold = torch.zeros_like(sample.labels)
        for label in sample.labels.unique():  # each class in every fold, as far as it goes
            mine = sample.labels == label
            fold[mine] = torch.arange(int(mine.sum()), device=fold.device) % _FOLDS
        found = []
        for number in range(_FOLDS):
            chosen = fold == number
            times = sample.copies[chosen]
            rows, labels = (part[chosen].repeat_interleave(times, 0) for part in (sample.rows, sample.labels))
            if not len(rows):
                continue
            metric = SampledClassMoments(moments.num_classes, moments.num_features, sync_on_compute=False)
            metric.update(rows, labels)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # the fit on all samples has told
                left = whole - self._plain(metric.compute())
                known = left.counts[labels] > 0  # of other classes nothing is known without these samples
                if bool(known.any()) and left.num_samples > int((left.counts > 0).sum()):
                    part = copy.deepcopy(self.detector).fit_moments(left)
                    found.append(part.predict_features(rows[known].double()))
        return torch.cat(found).double().sort().values if found else torch.zeros(0, dtype=torch.float64)

    def _plain(self, moments: Moments) -> Moments:
        plain = moments.plain()
        return Moments(plain.counts, plain.shift, plain.sums, plain.second, normalized=self.detector.normalize)

    @property
    def fitted(self) -> bool:
        """Whether the detector can score."""
        return bool(self.detectors)

    @property
    def options(self) -> dict[str, Any]:
        """What a fit depends on, besides the layers."""
        pooling = self.pooling if isinstance(self.pooling, str) else dict(self.pooling)
        return {"pooling": pooling, "fusion": self.fusion, "detector": type(self.detector).__name__} | {
            f"detector.{name}": value for name, value in self.detector.options.items()
        }

    # -- scoring ------------------------------------------------------------------------------------------------------

    def predict(self, x: Any) -> Tensor:
        """OOD scores of shape (B,) of a batch of inputs, which pass through the network in the mode that it has."""
        self._require_fit()
        encoder = LayerEncoder(self._encoder().network, list(self.detectors), pooling=self.pooling)
        device = self.device
        return self.predict_layers(encoder.encode(x.to(device) if isinstance(x, Tensor) and device is not None else x))

    def predict_layers(self, layers: Mapping[str, Tensor]) -> Tensor:
        """OOD scores of features, layer -> (B, D_l): shape (B,), higher means more likely OOD.

        Raises:
            RequiresFittingException: if the detector was not fitted.
            ValueError: if a layer is missing, or its width is another one.
        """
        return self.layer_scores(layers).sum(1)

    def layer_scores(self, layers: Mapping[str, Tensor]) -> Tensor:
        """What each layer adds to the score, shape (B, L), in the order of :attr:`detectors`."""
        self._require_fit()
        if missing := [name for name in self.detectors if name not in layers]:
            raise ValueError(
                f"features of the layers {listed(self.detectors)} are needed, {listed(missing)} are missing."
            )
        columns = []
        for name, detector in self.detectors.items():
            scores = detector.predict_features(layers[name]).double()
            known = self._left_out[name].to(scores.device)
            if self.fusion == "sum":
                columns.append((scores - known.mean()) / known.std())
            else:
                columns.append(-2 * Calibration(known).p_value(scores).log())
        return torch.stack(columns, 1).float()

    def _encoder(self) -> LayerEncoder:
        if self.encoder is None:
            raise ModelNotSetException("MultiLayer has no network. Pass encoder=, or use fit_layers, predict_layers.")
        return LayerEncoder(self.encoder, self.layers, pooling=self.pooling)

    def _require_fit(self) -> None:
        if not self.detectors:
            raise RequiresFittingException("MultiLayer is not fitted. Call fit(loader) or fit_layers(layers, y).")

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was fitted, as plain tensors and numbers. The network is not part of it."""
        self._require_fit()
        return {
            "format": files.STATE_FORMAT,
            "detector": "MultiLayer",
            "options": self.options,
            "names": list(self.detectors),
            "detectors": [detector.state_dict() for detector in self.detectors.values()],
            "tensors": {f"left_out.{number}": scores for number, scores in enumerate(self._left_out.values())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave, which scores the layers that it was fitted on.

        Raises:
            ValueError: if the state belongs to another detector or format, or no such fit can have left it.
        """
        content = files.check_state(state)
        if content["detector"] != "MultiLayer":
            raise ValueError(
                f"the state belongs to {content['detector']}, expected MultiLayer. Load it with that class."
            )
        names, states = content.get("names"), content.get("detectors")
        if not isinstance(names, list) or not isinstance(states, list) or len(names) != len(states) or not names:
            raise ValueError("the state names no layers, or not one detector for each. Fit and save again.")
        specs = {f"left_out.{number}": TensorSpec(f"n{number}") for number in range(len(names))}
        files.check_tensors(content["tensors"], specs, {})
        detectors = [load_detector(part) for part in states]
        kinds = {type(detector) for detector in detectors}
        if len(kinds) > 1 or not issubclass(kinds.pop(), GaussianDetector):
            raise ValueError("the layers have detectors that MultiLayer cannot have. Fit and save again.")
        fitted = cast(list[GaussianDetector], detectors)
        given = {name: content["options"][name] for name in ("pooling", "fusion") if name in content["options"]}
        other = type(self)(type(fitted[0])(**fitted[0].options), **given)
        self.detector, self.pooling, self.fusion = other.detector, other.pooling, other.fusion
        self.detectors = dict(zip(map(str, names), fitted, strict=True))
        self._left_out = {str(name): content["tensors"][f"left_out.{number}"] for number, name in enumerate(names)}
        return self

    def to_module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The scoring as an ``nn.Module`` with buffers only, for ``torch.export``, ONNX or a model of your own.

        Its ``forward`` maps features, layer -> (B, D_l), to scores of shape (B,).
        """
        self._require_fit()
        scores = [detector.to_module(dtype) for detector in self.detectors.values()]
        return _LayersScore(list(self.detectors), scores, list(self._left_out.values()), self.fusion).eval()

    def save(self, path: File) -> None:
        """Write the fitted detector to a file, without its network: safetensors with a checksum, under any name."""
        files.write_state(path, self.state_dict())

    @classmethod
    def load(cls, path: File, encoder: nn.Module | None = None) -> Self:
        """Read a fitted detector; nothing in the file is executed.

        Raises:
            DetectorFileError: a ValueError; if the file is damaged or holds something else.
        """
        with files.naming(path):
            return cls.from_state(files.read_state(path), encoder)

    @classmethod
    def from_state(cls, state: dict[str, Any], encoder: Any = None) -> Self:
        """Make a fitted detector from the result of :meth:`state_dict`."""
        found = cls(encoder=encoder).load_state_dict(state)
        found.layers = list(found.detectors)
        return found


class _LayersScore(nn.Module):
    """What :meth:`MultiLayer.to_module` gives."""

    scale: Tensor

    def __init__(self, names: list[str], scores: list[nn.Module], left_out: list[Tensor], fusion: str) -> None:
        super().__init__()
        self.names, self.fusion = names, fusion
        judged = [CalibratedScore(s, Calibration(known), 0.0) for s, known in zip(scores, left_out, strict=True)]
        self.parts = nn.ModuleList(scores if fusion == "sum" else judged)
        self.register_buffer("scale", torch.stack([torch.stack([k.mean(), k.std()]) for k in left_out]))

    def forward(self, layers: dict[str, Tensor]) -> Tensor:
        """Scores of shape (B,)."""
        columns = []
        for name, part, (mean, std) in zip(self.names, self.parts, self.scale, strict=True):
            if self.fusion == "sum":
                columns.append((part(layers[name]).double() - mean) / std)
            else:
                columns.append(-2 * part(layers[name])[1].log())
        return torch.stack(columns, 1).float().sum(1)
