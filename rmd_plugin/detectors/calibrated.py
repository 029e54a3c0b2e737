"""Yes or no for any detector: p-values, thresholds and selections with a guarantee, see :mod:`.conformal`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from pytorch_ood.api import Detector, GradientDetector, LogitsDetector, RequiresFittingException
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.detectors import files
from rmd_plugin.detectors.base import Encoder, StatefulDetector
from rmd_plugin.detectors.calibrated_module import CalibratedScore, LogitsScore
from rmd_plugin.detectors.calibration_scores import CalibrationScores
from rmd_plugin.detectors.conformal import (
    Calibration,
    benjamini_hochberg,
    check_level,
    required_samples,
)
from rmd_plugin.detectors.files import File
from rmd_plugin.detectors.functional import listed, warn_numerical
from rmd_plugin.detectors.snapshot import build_detector, give_encoder, restore_snapshot, take_snapshot
from rmd_plugin.encoding.features import check_labels
from rmd_plugin.encoding.isolation import evaluating_calls
from rmd_plugin.encoding.loop import as_pair

_Kind = Literal["inputs", "features", "logits"]
#: what changes a fit as a whole or not at all
_CHANGES = ("update", "forget", "add_class")
_PREDICT = {"inputs": "predict", "features": "predict_features", "logits": "predict_logits"}


class Calibrated(Detector):
    """A detector that also decides: conformal p-values, thresholds with a guarantee, selections.

    Wraps any pytorch-ood detector and is one: whatever else the wrapped one has (``fit_features``, ``class_scores``) is
    there too. After the fit, call one of the ``calibrate`` methods with ID data that the detector and the network have
    not seen: a new fit, ``update``, ``forget`` and ``add_class`` forget the calibration. Decisions about inputs run the
    network in evaluation mode, ``predict`` runs it in the mode that it has. What is promised, and what is not:
    docs/decisions.md.

    Args:
        detector: the detector, fitted or not.
        alpha: share of ID samples that may be flagged, unless a method is given another one.
        per_class: compare a sample with the calibration samples of its own class, the nearest one of our detectors, the
            predicted one of detectors on logits: false alarms are at most alpha among the samples of each such class.
            Classes with too few calibration samples for ``alpha`` are compared with all samples, with a warning and
            without that promise.

    Attributes:
        calibration: :class:`rmd_plugin.detectors.conformal.Calibration`, None before it is calibrated.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD, Calibrated
        >>> _ = torch.manual_seed(0)
        >>> z, y = torch.randn(1000, 4), torch.arange(1000) % 2
        >>> z[:, 0] += 6.0 * y
        >>> detector = Calibrated(RMD()).fit_features(z[:500], y[:500]).calibrate_features(z[500:])
        >>> detector.is_ood_features(torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]]))
        tensor([False,  True])
    """

    def __init__(self, detector: Detector, alpha: float = 0.05, *, per_class: bool = False) -> None:
        if not isinstance(detector, Detector) or isinstance(detector, Calibrated):
            made = f" Make one: {detector.__name__}(...)." if isinstance(detector, type) else ""
            raise TypeError(f"expected a pytorch_ood detector that is not calibrated yet, got {detector!r}.{made}")
        check_level("alpha", alpha)
        self.detector = detector
        self.alpha, self.per_class = float(alpha), per_class
        self.calibration: Calibration | None = None

    @property
    def requires_fit(self) -> bool:  # type: ignore[override]
        """Whether the wrapped detector has to be fitted."""
        return self.detector.requires_fit

    @property
    def device(self) -> torch.device | None:
        """Device of the wrapped detector."""
        found: torch.device | None = self.detector.device
        return found

    def to(self, device: torch.device | str) -> Self:
        """Move the detector and its calibration."""
        self.detector.to(device)
        if self.calibration is not None:
            self.calibration = self.calibration.to(device)
        return self

    def __repr__(self) -> str:
        options = f", alpha={self.alpha:g}" + (", per_class=True" if self.per_class else "")
        return f"Calibrated({self.detector!r}{options}, {self.calibration or 'not calibrated'})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "detector":  # of copies that are still empty
            raise AttributeError(name)
        value = getattr(self.detector, name)
        if not name.startswith("fit_") and name not in _CHANGES:
            return value

        def fit(*args: Any, **kwargs: Any) -> Any:
            if name not in _CHANGES:  # a fit that fails may leave anything
                self.calibration = None
            found = value(*args, **kwargs)
            self.calibration = None
            return found if name == "add_class" else self

        return fit

    # -- the wrapped detector -----------------------------------------------------------------------------------------

    def fit(self, data_loader: Iterable[Any], **options: Any) -> Self:
        """Fit the wrapped detector; a calibration that there was is forgotten."""
        self.calibration = None
        self.detector.fit(data_loader, **options)  # type: ignore[arg-type]
        return self

    def predict(self, x: Tensor) -> Tensor:
        """Scores of the wrapped detector, shape (B,)."""
        return self.detector.predict(x)

    # -- calibration --------------------------------------------------------------------------------------------------

    def calibrate(self, data_loader: Iterable[Any]) -> Self:
        """Calibrate on held-out ID data: a loader of pairs (x, y), in one pass, with the network in evaluation mode.

        Samples with y < 0 are left out. Under ``torch.distributed`` every process calibrates on its own loader: to
        calibrate on all of them, pass a :class:`rmd_plugin.CalibrationScores` to :meth:`calibrate_scores`.

        Raises:
            ValueError: if there is no ID sample, or a score is NaN.
        """
        metric: CalibrationScores | None = None
        for x, y in map(as_pair, data_loader):
            with evaluating_calls(self.detector.predict):
                kind, values = self._represent(x)
                metric = self._add(metric, kind, values, torch.as_tensor(y))
        return self._take(metric)

    def calibrate_features(self, z: Tensor, y: Tensor | None = None) -> Self:
        """Calibrate on features of held-out ID samples; with labels ``y``, those below zero are left out."""
        return self._take(self._add(None, "features", z, y))

    def calibrate_logits(self, logits: Tensor, y: Tensor | None = None) -> Self:
        """Calibrate on logits of held-out ID samples; with labels ``y``, those below zero are left out."""
        return self._take(self._add(None, "logits", logits, y))

    def calibrate_scores(self, scores: Tensor | Sequence[float] | CalibrationScores, y: Tensor | None = None) -> Self:
        """Calibrate on scores (B,) of held-out ID samples, or on a metric that collected them."""
        if isinstance(scores, CalibrationScores):
            return self._take(scores)
        if self.per_class:
            raise ValueError("per_class=True needs the class of each score: collect them in a CalibrationScores.")
        metric = CalibrationScores(sync_on_compute=False)
        scores = scores if isinstance(scores, Tensor) else torch.as_tensor(scores, dtype=torch.float64)
        metric.update(scores if y is None else scores[check_labels(y, len(scores)) >= 0])
        return self._take(metric)

    def _add(
        self, metric: CalibrationScores | None, kind: _Kind, values: Tensor, y: Tensor | None
    ) -> CalibrationScores:
        scores, classes = self._scored(kind, values)
        if metric is None:
            width = values.shape[1] if kind == "logits" else getattr(self.detector, "n_classes", None)
            metric = CalibrationScores(width if self.per_class else None, sync_on_compute=False)
        if y is not None:
            keep = (check_labels(y, len(scores)) >= 0).to(scores.device)
            scores, classes = scores[keep], None if classes is None else classes[keep]
        metric.update(scores, classes)
        return metric

    def _take(self, metric: CalibrationScores | None) -> Self:
        found = Calibration(torch.zeros(0)) if metric is None else metric.compute()
        if self.per_class != (found.classes is not None):
            given = "of each class" if found.classes is not None else "without classes"
            raise ValueError(f"the detector has per_class={self.per_class}, but the scores are {given}.")
        # an object of its own: the metric gives the same one to everybody who asks
        found = Calibration(**found.tensors, smallest_class=required_samples(self.alpha))
        if self.per_class and bool(found.pooled_classes.any()):
            few = found.pooled_classes.nonzero().flatten().tolist()
            warn_numerical(
                f"{len(few)} of {len(found.pooled_classes)} classes have fewer than the {found.smallest_class} "
                f"calibration samples that alpha={self.alpha:g} needs: {listed(few)}. "
                "They are compared with all samples.",
                kind="classes with few calibration samples",
            )
        self.calibration = found
        return self

    # -- decisions ----------------------------------------------------------------------------------------------------

    def p_value(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Conformal p-values in (0, 1] of inputs, shape (B,), float64. Small means unlike the ID data.

        Args:
            x: inputs of the wrapped detector.
            generator: breaks ties at random, which makes the p-values of ID samples exactly uniform.
        """
        return self._p_value(*self._scored_inputs(x), generator)

    def p_value_features(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The same of features."""
        return self._p_value(*self._scored("features", z), generator)

    def p_value_logits(self, logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The same of logits."""
        return self._p_value(*self._scored("logits", logits), generator)

    def is_ood(self, x: Tensor, alpha: float | None = None, *, confidence: float | None = None) -> Tensor:
        """Which inputs are OOD, shape (B,), of type bool: those that score above :meth:`threshold`, and NaN.

        Args:
            x: inputs of the wrapped detector.
            alpha: share of ID samples that may be flagged; by default the detector's.
            confidence: see :meth:`threshold`.
        """
        return self._is_ood(*self._scored_inputs(x), alpha, confidence)

    def is_ood_features(self, z: Tensor, alpha: float | None = None, *, confidence: float | None = None) -> Tensor:
        """The same of features."""
        return self._is_ood(*self._scored("features", z), alpha, confidence)

    def is_ood_logits(self, logits: Tensor, alpha: float | None = None, *, confidence: float | None = None) -> Tensor:
        """The same of logits."""
        return self._is_ood(*self._scored("logits", logits), alpha, confidence)

    def select(self, x: Tensor, fdr: float = 0.1) -> Tensor:
        """Which of these inputs are OOD if they are judged together, shape (B,), of type bool (Benjamini-Hochberg).

        Of those that are selected, a share of at most ``fdr`` is ID, in expectation. Pass all of them at once.
        A NaN has the smallest p-value that there is, but is selected only if that is small enough.
        """
        return benjamini_hochberg(self.p_value(x), fdr)

    def select_features(self, z: Tensor, fdr: float = 0.1) -> Tensor:
        """The same of features."""
        return benjamini_hochberg(self.p_value_features(z), fdr)

    def select_logits(self, logits: Tensor, fdr: float = 0.1) -> Tensor:
        """The same of logits."""
        return benjamini_hochberg(self.p_value_logits(logits), fdr)

    def threshold(self, alpha: float | None = None, confidence: float | None = None) -> float | Tensor:
        """The score above which a sample is OOD; with ``per_class`` one for each class, shape (K,).

        Args:
            alpha: share of ID samples that may be flagged, on average over calibration sets; by default the detector's.
            confidence: if given, at most that share with this probability over the draw of the calibration set.

        Raises:
            ValueError: if there are too few calibration samples; the message says how many are needed.
        """
        return self._require_calibration().threshold(self.alpha if alpha is None else alpha, confidence)

    def judge(self, values: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Scores, classes (if ``per_class``), p-values and decisions of features, or of logits; each of shape (B,)."""
        scores, classes = self._scored("logits" if isinstance(self.detector, LogitsDetector) else "features", values)
        p_values = self._p_value(scores, classes, None)
        return scores, classes, p_values, self._is_ood(scores, classes, None, None)

    def _p_value(self, scores: Tensor, classes: Tensor | None, generator: torch.Generator | None) -> Tensor:
        return self._require_calibration().p_value(scores, classes, generator=generator)

    def _is_ood(self, scores: Tensor, classes: Tensor | None, alpha: float | None, confidence: float | None) -> Tensor:
        alpha = self.alpha if alpha is None else alpha
        return self._require_calibration().is_ood(scores, classes, alpha=alpha, confidence=confidence)

    def _require_calibration(self) -> Calibration:
        if self.calibration is None:
            raise RequiresFittingException(
                "the detector is not calibrated. Call calibrate(loader), calibrate_features(z), calibrate_logits(l) or "
                "calibrate_scores(s) with held-out ID data, after its last fit or update."
            )
        return self.calibration

    # -- scores and classes -------------------------------------------------------------------------------------------

    def _represent(self, x: Tensor) -> tuple[_Kind, Tensor]:
        """What is scored in place of inputs, if their class is needed too."""
        device = self.device
        x = x if device is None else x.to(device)
        if not self.per_class:
            return "inputs", x
        network = "model" if isinstance(self.detector, LogitsDetector) else "encoder"
        run: Callable[[Tensor], Tensor] | None = getattr(self.detector, network, None)
        if run is None:
            raise ValueError(f"per_class=True finds the classes by the {network}, which {self.detector!r} lacks.")
        with torch.no_grad():
            return "logits" if network == "model" else "features", run(x)

    def _scored_inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        with evaluating_calls(self.detector.predict):  # as calibrate() has scored them
            return self._scored(*self._represent(x))

    def _scored(self, kind: _Kind, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of shape (B,), and the classes if they are needed."""
        if self.per_class and kind == "features" and isinstance(self.detector, StatefulDetector):
            with suppress(NotImplementedError), torch.inference_mode(False):  # raised by a detector without classes
                return self.detector.scored_classes(values)
        predict = getattr(self.detector, _PREDICT[kind], None)
        if predict is None:
            raise TypeError(f"{type(self.detector).__name__} does not score {kind}.")
        differentiates = isinstance(self.detector, GradientDetector)
        with torch.inference_mode(False), torch.set_grad_enabled(differentiates):
            scores = predict(values.clone() if values.is_inference() else values)
        if not isinstance(scores, Tensor) or scores.shape != (len(values),):
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"a decision needs one score for each of the {len(values)} samples, got {found}.")
        return scores.detach(), self._classes(kind, values) if self.per_class else None

    def _classes(self, kind: _Kind, values: Tensor) -> Tensor:
        if kind == "logits":
            return values.argmax(1)
        raise ValueError(
            f"per_class=True needs a detector with nearest_class() or one on logits, which "
            f"{type(self.detector).__name__} on {kind} is not. Use per_class=False."
        )

    # -- saving and export --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The fitted detector and its calibration, as plain tensors and numbers, without networks."""
        return {
            "format": files.STATE_FORMAT,
            "detector": type(self).__name__,
            "options": {"alpha": self.alpha, "per_class": self.per_class},
            "inner": take_snapshot(self.detector),
            "tensors": {} if self.calibration is None else dict(self.calibration.tensors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave; the networks of the wrapped detector stay."""
        options = files.check_state(state)["options"]
        calibration = _read_calibration(state)
        restore_snapshot(self.detector, state["inner"])
        self.alpha, self.per_class, self.calibration = options["alpha"], options["per_class"], calibration
        return self

    @classmethod
    def from_state(cls, state: dict[str, Any], encoder: Encoder | None = None) -> Self:
        """Make a calibrated detector from the result of :meth:`state_dict`.

        ``encoder`` becomes the network of the wrapped one: to features, to logits for detectors on logits, or whatever
        it was made with.
        """
        options = files.check_state(state)["options"]
        if not isinstance(state.get("inner"), dict) or options.keys() != {"alpha", "per_class"}:
            raise ValueError("this is not the state of a calibrated detector. Expected what state_dict() gave.")
        inner = build_detector(state["inner"])
        if encoder is not None:
            give_encoder(inner, encoder)
        found = cls(inner, **options)
        found.calibration = _read_calibration(state)
        return found

    def save(self, path: File) -> None:
        """Write the fitted detector and its calibration to a file, without networks: safetensors with a checksum."""
        files.write_state(path, self.state_dict())

    @classmethod
    def load(cls, path: File, encoder: Encoder | None = None, *, map_location: str | torch.device = "cpu") -> Self:
        """Read what :meth:`save` wrote; nothing in the file is executed."""
        with files.naming(path):
            return cls.from_state(files.read_state(path, map_location), encoder)

    def to_module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """One graph for score, p-value and decision at ``alpha``, for ``torch.export``, ONNX or a model of your own.

        Its ``forward`` maps features (layer -> features for MultiLayer), or logits for a detector on logits, to three
        tensors of shape (B,).

        Raises:
            TypeError: if the wrapped detector is neither on logits nor has a ``to_module``.
        """
        calibration, known = self._require_calibration(), None
        if isinstance(self.detector, LogitsDetector):
            score: nn.Module = LogitsScore(self.detector)
        elif hasattr(self.detector, "to_module"):
            score, known = self.detector.to_module(dtype), getattr(self.detector, "_state", {}).get("classes")
        else:
            raise TypeError(f"{type(self.detector).__name__} has no to_module(), so it cannot be exported.")
        return CalibratedScore(score, calibration, self.threshold(), known).eval()


def bare(detector: Detector) -> Detector:
    """The detector itself, without the calibration around it."""
    return detector.detector if isinstance(detector, Calibrated) else detector


def _read_calibration(state: dict[str, Any]) -> Calibration | None:
    options = state["options"]
    check_level("alpha", options["alpha"])
    if not state["tensors"]:
        return None
    return Calibration.from_tensors(state["tensors"], smallest_class=required_samples(options["alpha"]))
