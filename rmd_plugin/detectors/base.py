"""What all our detectors share: an encoder, streaming fits, chunked scoring, saving and export.

A :class:`StatefulDetector` keeps what it has fitted as a dict of plain tensors. The framework's own ``.to(device)``
moves it, ``state_dict`` writes it, and the scoring is an ``nn.Module`` built from it, which is also what is exported.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
from pytorch_ood.api import Detector, FeaturesDetector, ModelNotSetException, RequiresFittingException
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.detectors import files
from rmd_plugin.detectors.files import File, TensorSpec
from rmd_plugin.detectors.functional import listed, warn_numerical
from rmd_plugin.encoding.features import check_features
from rmd_plugin.encoding.loop import PairEncoder, encode_batches

Encoder = Callable[[Tensor], Tensor]


class StatefulDetector(FeaturesDetector):
    """Base class of our detectors.

    Subclasses keep their keyword-only arguments as attributes of the same name, fill :attr:`_state` in their fit and
    build the scoring module in :meth:`_build_module`.

    Args:
        encoder: maps inputs to features of shape (B, D) or maps of shape (B, C, H, W). May be None where only
            ``fit_features``, ``fit_moments`` and ``predict_features`` are used.

    Attributes:
        interrupted: whether Ctrl-C cut the last fit short. The detector has what was found until then.
    """

    requires_fit = True
    interrupted = False
    progress = False
    _before: ClassVar[dict[str, Any]] = {}  #: newer options, as states that do not name them mean them

    def __init__(self, encoder: Encoder | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self._state: dict[str, Tensor] = {}
        self._fitted_options: dict[str, Any] = {}
        self._modules: dict[torch.dtype, nn.Module] = {}

    def __repr__(self) -> str:
        defaults = self._defaults()
        options = ", ".join(f"{k}={v!r}" for k, v in self.options.items() if v != defaults[k])
        name = f"{type(self).__name__}({options})"
        if not self.fitted:
            return name
        return f"<{name} fitted: {self.n_classes} classes, {self.num_features} features>"

    @abstractmethod
    def _build_module(self, dtype: torch.dtype) -> nn.Module:
        """Scoring module with ``forward`` -> (B,), ``class_scores`` -> (B, K') and ``scored`` -> (B,), (B,)."""

    @abstractmethod
    def _score_dtype(self, dtype: torch.dtype, *, classes: bool = False) -> torch.dtype:
        """Precision in which features of ``dtype`` are scored; with ``classes``, for each class."""

    # -- fitting --------------------------------------------------------------------------------------------------

    def _encoded_batches(self, loader: Iterable[Any], *, progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and labels of the in-distribution samples of a loader, batch by batch, in evaluation mode."""
        if self.encoder is None:
            raise ModelNotSetException("fit(loader) needs an encoder. Pass one, or use fit_features(z, y).")
        title = f"fit {type(self).__name__}" if progress else None
        encode = PairEncoder(self.encoder)
        for batch in encode_batches(encode, loader, device=self.device, id_only=True, title=title):
            yield batch.features, cast(Tensor, batch.labels)

    def _set_fitted(self, state: dict[str, Tensor], num_classes: int, num_features: int) -> Self:
        """Take over fitted tensors, on the detector's device if it has one."""
        device = self.device
        self._modules.clear()
        self._state = {name: tensor if device is None else tensor.to(device) for name, tensor in state.items()}
        self._fitted_options = self.options | {"num_classes": num_classes, "num_features": num_features}
        return self

    @staticmethod
    def _warn_missing_classes(counts: Tensor) -> None:
        """Warn about classes without a sample. They are never nearest."""
        missing = (counts == 0).nonzero().flatten().tolist()
        if missing:
            message = (
                f"{len(missing)} of {len(counts)} classes have no sample and are never nearest: {listed(missing)}."
            )
            warn_numerical(message, kind=f"some of {len(counts)} classes have no sample")

    def fit(self, data_loader: Iterable[Any], *, progress: bool | None = None) -> Self:
        """Fit on a loader in one pass: batches are encoded in evaluation mode.

        Gaussian detectors keep only the moments of the features, FusedRMD a sample beside, flows all on the CPU. Under
        ``torch.distributed`` every process fits on its own loader. To fit a Gaussian detector on all of them, collect
        :class:`rmd_plugin.ClassMoments` yourself, whose ``compute`` adds them up, and call ``fit_moments``.

        Args:
            data_loader: yields pairs (x, y). Samples with y < 0 are skipped.
            progress: show progress bars; None for the detector's own option, or else none.

        Raises:
            ModelNotSetException: if the detector has no encoder.
            ValueError: if there is no in-distribution sample, or features are NaN or infinite.
        """
        shown = self.progress if progress is None else progress
        return self._fit_batches(self._encoded_batches(data_loader, progress=shown), progress=shown)

    def fit_features(self, z: Tensor, y: Tensor) -> Self:
        """Fit on features; works inside ``no_grad`` and ``inference_mode``.

        Args:
            z: features of shape (N, D), or maps of shape (N, C, H, W), which are averaged over space.
            y: class labels of shape (N,), integers of any type. Samples with y < 0 are skipped.

        Raises:
            TypeError: if features or labels have the wrong dtype.
            ValueError: if shapes do not fit, features are NaN or infinite, or none varies within the classes.
        """
        return self._fit_batches([(z, y)], progress=self.progress)

    @abstractmethod
    def _fit_batches(self, batches: Iterable[tuple[Tensor, Tensor]], *, progress: bool) -> Self:
        """Fit on batches of features and labels."""

    # -- scoring --------------------------------------------------------------------------------------------------

    def predict(self, x: Tensor) -> Tensor:
        """OOD scores of shape (B,) of a batch of inputs, which pass through the encoder in the mode that it has."""
        self._require_fit()
        if self.encoder is None:
            raise ModelNotSetException("predict(x) needs an encoder. Pass one, or use predict_features(z).")
        device = self.device
        with torch.no_grad():
            return self.predict_features(self.encoder(x if device is None else x.to(device)))

    def predict_features(self, z: Tensor) -> Tensor:
        """OOD scores of features.

        A sample with NaN or infinite features scores NaN, and no other: a score that overflows, as that of features of
        size 3e38, is the largest number of its dtype. An empty batch gives an empty tensor.

        Args:
            z: features of shape (B, D), or maps of shape (B, C, H, W), which are averaged over space.

        Returns:
            Scores of shape (B,); higher means more likely out-of-distribution.

        Raises:
            RequiresFittingException: if the detector was not fitted.
            ValueError: if the shape of the features does not fit.
        """
        return self._map_chunks(z, lambda module, rows: module(rows))

    def class_scores(self, z: Tensor) -> Tensor:
        """Score of every class, whose minimum over the classes is the OOD score, of features (B, D) or (B, C, H, W).

        Returns:
            Scores of shape (B, K), where column k belongs to label k; infinite for classes without a training sample.
        """
        classes, total = self._require_classes(), self.n_classes

        def score(module: nn.Module, rows: Tensor) -> Tensor:
            scores: Tensor = module.class_scores(rows)  # type: ignore[operator]
            if len(classes) == total:
                return scores
            return scores.new_full((len(rows), total), torch.inf).index_copy_(1, classes, scores)

        return self._map_chunks(z, score, classes=True)

    def nearest_class(self, z: Tensor) -> Tensor:
        """Label of the class with the smallest score, shape (B,), of features of shape (B, D) or (B, C, H, W)."""
        return self.scored_classes(z)[1]

    def scored_classes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`predict_features` and :meth:`nearest_class` give, in one pass."""
        labels, places = self._require_classes(), []

        def score(module: nn.Module, rows: Tensor) -> Tensor:
            scores, place = module.scored(rows)  # type: ignore[operator]
            places.append(place)
            return cast(Tensor, scores)

        return self._map_chunks(z, score), labels[torch.cat(places)]

    def _map_chunks(self, z: Tensor, score: Callable[[nn.Module, Tensor], Tensor], *, classes: bool = False) -> Tensor:
        """Apply the scoring module to row chunks that fit the cache (or, on a GPU, its memory)."""
        self._require_fit()
        check_features(z, self.num_features)
        device = self.device
        if device is not None:
            z = z.to(device)
        module = self._module(self._score_dtype(z.dtype, classes=classes))
        result = torch.float64 if z.dtype == torch.float64 else torch.float32
        # maps are averaged inside, and widened before
        rows = max(64, self._chunk_rows(z.device) // math.prod(z.shape[2:]))
        with torch.no_grad():
            scores = torch.cat([score(module, part) for part in z.split(rows)])
            if scores.dtype == torch.float64 and result == torch.float32:
                limit = torch.finfo(result).max  # a finite score stays finite
                scores = torch.where(scores.isinf(), scores, scores.clamp(-limit, limit))
            return scores.to(result) if scores.is_floating_point() else scores

    def _chunk_rows(self, device: torch.device) -> int:
        """Samples that are scored at a time."""
        budget = 2**20 if device.type == "cpu" else 2**26
        return max(64, budget // max(self.num_features, self.n_classes, 1))

    def _module(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self._modules:
            with torch.inference_mode(False):
                self._modules[dtype] = self._build_module(dtype).requires_grad_(False).eval()
        return self._modules[dtype]

    def _require_fit(self) -> None:
        if not self._state:
            raise RequiresFittingException(
                f"{type(self).__name__} is not fitted. Call fit(loader), fit_features(z, y) or load a fitted one."
            )

    def _require_classes(self) -> Tensor:
        self._require_fit()
        if "classes" not in self._state:
            raise NotImplementedError(f"{type(self).__name__} has one Gaussian for all classes, so no class scores.")
        return self._state["classes"]

    @property
    def n_classes(self) -> int:
        """K, including classes without a training sample."""
        self._require_fit()
        return int(self._fitted_options["num_classes"])

    @property
    def num_features(self) -> int:
        """Width D of the features that the detector was fitted on."""
        self._require_fit()
        return int(self._fitted_options["num_features"])

    @property
    def fitted(self) -> bool:
        """Whether the detector can score."""
        return bool(self._state)

    # -- saving and export ----------------------------------------------------------------------------------------

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """Options and their defaults: the keyword-only arguments, without the device, which is no part of a fit."""
        found: dict[str, Any] = {}
        for owner in cls.__mro__:
            parameters = inspect.signature(owner).parameters.values()
            found |= {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in found}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):  # else the rest goes to the next class
                break
        found.pop("device", None)
        return found

    @property
    def options(self) -> dict[str, Any]:
        """The options that the detector was made with, as keyword arguments."""
        return {name: getattr(self, name) for name in self._defaults()}

    def state_dict(self) -> dict[str, Any]:
        """What was fitted, as plain tensors and numbers. The encoder is not part of it."""
        self._require_fit()
        return {
            "format": files.STATE_FORMAT,
            "detector": type(self).__name__,
            "options": dict(self._fitted_options),
            "tensors": {name: tensor.detach().clone() for name, tensor in self._state.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave, including the options it was fitted with.

        Raises:
            ValueError: if the state belongs to another detector or format, or no such fit can have left it.
        """
        options, sizes = _read_options(state, type(self))
        tensors, other = state["tensors"], copy.copy(self)  # this one stays as it is if they do not fit
        for name, value in options.items():
            setattr(other, name, value)
        other._check_options()
        other._check_tensors(tensors, {"K": sizes["num_classes"], "D": sizes["num_features"]})
        for name, value in options.items():
            setattr(self, name, value)
        return self._set_fitted({name: tensor.clone() for name, tensor in tensors.items()}, **sizes)

    def _check_options(self) -> None:
        """Refuse options that do not fit."""

    def _layout(self) -> dict[str, TensorSpec]:
        """What each tensor of the state must be; K and D are the numbers of classes and of features."""
        return {}

    def _check_tensors(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        """Refuse tensors that a fit with these options cannot have left."""
        files.check_tensors(tensors, self._layout(), sizes)

    def save(self, path: File) -> None:
        """Write the fitted detector to a file, without its encoder: safetensors with a checksum, under any name.

        An error, a full disk say, leaves an earlier file as it was.
        """
        files.write_state(path, self.state_dict())

    @classmethod
    def load(cls, path: File, encoder: Encoder | None = None, *, map_location: str | torch.device = "cpu") -> Self:
        """Read a fitted detector, whose scores are bitwise those of the saved one; nothing in the file is executed.

        Args:
            path: file that :meth:`save` wrote, or ``torch.save(detector.state_dict(), path)``.
            encoder: encoder for ``predict``; not needed for ``predict_features``.
            map_location: device for the tensors.

        Raises:
            DetectorFileError: a ValueError; if the file is damaged or holds something else.
        """
        with files.naming(path):
            return cls.from_state(files.read_state(path, map_location), encoder)

    @classmethod
    def from_state(cls, state: dict[str, Any], encoder: Encoder | None = None) -> Self:
        """Make a fitted detector from the result of :meth:`state_dict`."""
        return cls(encoder, **_read_options(state, cls)[0]).load_state_dict(state)

    def to_module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The scoring as an ``nn.Module`` with buffers only, for ``torch.export``, ONNX or a model of your own.

        Its ``forward`` maps features to scores of shape (B,). It is differentiable, unlike ``predict_features``, and
        independent of the detector. By default it computes in the precision that float32 features are scored in.
        """
        self._require_fit()
        with torch.inference_mode(False):
            return self._build_module(dtype or self._score_dtype(torch.float32)).requires_grad_(False).eval()


def raise_if_interrupted(detector: object) -> None:
    """Raise the ``KeyboardInterrupt`` that a fit took as a wish to end early, for callers that end with it."""
    if getattr(detector, "interrupted", False):
        raise KeyboardInterrupt


def load_detector(state: dict[str, Any] | File, encoder: Encoder | None = None) -> Detector:
    """Make a fitted detector from a saved file or a ``state_dict``, whichever of ours it belongs to.

    Args:
        state: path of a file that ``save`` wrote, or the result of ``state_dict``.
        encoder: encoder for ``predict``.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD, load_detector
        >>> z, y = torch.randn(100, 4), torch.arange(100) % 2
        >>> load_detector(RMD(shrinkage=0.1).fit_features(z, y).state_dict())
        <RMD(shrinkage=0.1) fitted: 2 classes, 4 features>
    """
    import rmd_plugin  # the package resolves public names lazily, so this import has to wait

    if not isinstance(state, dict):
        with files.naming(state):
            return load_detector(files.check_state(files.read_state(state)), encoder)
    name = files.check_state(state)["detector"]
    kind = getattr(rmd_plugin, name) if name in rmd_plugin.__all__ else None
    if not isinstance(kind, type) or not issubclass(kind, Detector):
        raise ValueError(f"{name} is no detector of rmd_plugin. Load it with the class that it belongs to.")
    found: Detector = kind.from_state(state, encoder)  # type: ignore[attr-defined]
    return found


def check_integer(name: str, value: object, lowest: int) -> None:
    """Refuse an option that is no integer of at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"{name} must be an integer of at least {lowest}, got {value!r}.")


def _read_options(state: object, kind: type[StatefulDetector]) -> tuple[dict[str, Any], dict[str, int]]:
    """Options and sizes in the state of a detector, all of which are checked first."""
    content, expected = files.check_state(state), kind.__name__
    if content["detector"] != expected:
        raise ValueError(f"the state belongs to {content['detector']}, expected {expected}. Load it with that class.")
    options, defaults = kind._before | content["options"], kind._defaults()
    sizes = {size: options.pop(size, None) for size in ("num_classes", "num_features")}
    for size, value in sizes.items():
        check_integer(size, value, 1)
    required = {name for name, default in defaults.items() if default is inspect.Parameter.empty}
    if not required <= options.keys() <= defaults.keys():
        found = f"the state has the options {sorted(options)}"
        raise ValueError(f"{found}, expected {sorted(defaults)}. Was it written by a newer version?")
    return options, sizes
