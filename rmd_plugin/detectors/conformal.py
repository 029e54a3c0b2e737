"""Decisions with a guarantee, from the scores of held-out ID samples alone: conformal p-values and thresholds.

If a new ID sample is exchangeable with the n calibration samples, its p-value (1 + #{calibration >= score}) / (n + 1)
is at most alpha with a probability of at most alpha, whatever the detector and the distribution (Vovk et al. 2005).
With a ``confidence``, the false alarms of *this* calibration set are at most alpha with that probability over its draw:
its false-alarm rate is a Beta variable, whose quantile is exact. Selections at a false discovery rate are those of
Benjamini and Hochberg, valid for these p-values (Bates et al. 2023).

Without held-out samples, each training sample is scored by a detector that was fitted without its fold, and a new
sample is compared with it by the score of that same detector (CV+, Barber et al. 2021): false alarms are at most
2 alpha, and about alpha in practice.

:class:`Calibration` knows scores and no detectors, :class:`Calibrated` puts it around a detector, and
:class:`CalibratedScore` is both as one graph, for export.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Any, Literal, Self

import torch
from pytorch_ood.api import Detector, FeaturesDetector, GradientDetector, LogitsDetector, RequiresFittingException
from scipy.stats import binom
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from rmd_plugin.detectors.detectors import STATE_FORMAT, StatefulDetector, as_pair, check_state, evaluating, to_device
from rmd_plugin.detectors.drift import DriftAlarm, check_level
from rmd_plugin.detectors.moments import (
    DeviceMetric,
    Gather,
    Path,
    check_features,
    check_labels,
    read_state,
    warn,
    write_state,
)
from rmd_plugin.detectors.snapshot import NETWORKS, build_detector, give_encoder, restore_snapshot, take_snapshot

Network = Callable[[Any], Tensor]
_Kind = Literal["inputs", "features", "logits"]
#: what changes a fit as a whole or not at all
_CHANGES = ("update", "forget", "add_class")
#: attributes of the wrapper; all others are those of the wrapped detector
_OWN = ("detector", "requires_fit", "alpha", "per_class", "calibration", "fold_detectors")
_PREDICT = {"inputs": "predict", "features": "predict_features", "logits": "predict_logits"}


# -- levels -----------------------------------------------------------------------------------------------------------


def required_samples(alpha: float, confidence: float | None = None) -> int:
    """Smallest number of calibration samples with which anything can be flagged at ``alpha``.

    Example:
        >>> required_samples(0.05), required_samples(0.05, confidence=0.95)
        (19, 59)
    """
    allowed_alarms(0, alpha, confidence)  # checks both
    n = 1 / alpha - 1 if confidence is None else math.log1p(-confidence) / math.log1p(-alpha)
    # the quotients are rounded
    return next(k for k in count(max(0, int(n) - 2)) if allowed_alarms(k, alpha, confidence))


@lru_cache(maxsize=1024)  # one for each batch and class
def allowed_alarms(n: int, alpha: float, confidence: float | None = None) -> int:
    """The m for which the m-th largest of n calibration scores is the threshold at ``alpha``; 0 if n is too small.

    A sample is flagged where it scores above it. That is where its p-value is at most alpha; with a ``confidence``, the
    false alarms then are Beta(m, n + 1 - m), and m is the largest whose quantile at the confidence is at most alpha.

    Example:
        >>> allowed_alarms(99, 0.05), allowed_alarms(99, 0.05, confidence=0.95)
        (5, 2)
    """
    check_level("alpha", alpha)
    if confidence is None:
        m = math.floor(alpha * (n + 1)) + 1  # alpha * (n + 1) may be rounded down: 0.29 * 100 is 28.999...
        return m if m / (n + 1) <= alpha else m - 1
    check_level("confidence", confidence, 0.95)
    if n == 0:
        return 0
    # P(Beta(m, n + 1 - m) <= alpha) = P(Binomial(n, alpha) >= m), which falls as m grows
    m = int(binom.isf(confidence, n, alpha))
    return max(k for k in range(max(0, m - 1), m + 3) if k == 0 or binom.sf(k - 1, n, alpha) >= confidence)


def benjamini_hochberg(p_values: Tensor, fdr: float) -> Tensor:
    """Samples that are selected so that at most a share ``fdr`` of them, in expectation, is ID.

    Args:
        p_values: shape (B,), of the samples that are judged together.
        fdr: the false discovery rate.

    Returns:
        Mask of shape (B,).

    Example:
        >>> benjamini_hochberg(torch.tensor([0.001, 0.8, 0.03, 0.04]), 0.1).tolist()
        [True, False, True, True]
    """
    check_level("fdr", fdr)
    ordered = p_values.double().sort().values
    ranks = torch.arange(1, len(ordered) + 1, device=ordered.device)
    passed = ordered[ordered * len(ordered) <= fdr * ranks]
    return p_values.double() <= (passed[-1] if len(passed) else -1.0)


# -- calibration scores -----------------------------------------------------------------------------------------------


class Calibration(nn.Module):
    """Scores of ID calibration samples, ready for p-values and thresholds, see :class:`rmd_plugin.CalibrationScores`.

    Args:
        scores: shape (n,), at least one.
        classes: shape (n,), the class that each belongs to; None for one calibration of all together.
        num_classes: K, with classes.
        smallest_class: classes with fewer calibration samples use the scores of all classes together.
        folds: shape (n,), in place of classes: the fold whose detector gave each score. Scores that are compared with
            them have shape (B, F), one for each of these detectors.

    Attributes:
        table: the ascending scores of all samples, then those of each class or fold: what a sample is compared with is
            a slice.
        starts: where the slice of each class or fold starts, shape (K,) or (F,), or (1,) without them.
        sizes: its length.
        classes: of the scores in ascending order, shape (n,), or None.
        folds: likewise.

    Example:
        >>> calibration = Calibration(torch.arange(99.0))
        >>> calibration.p_value(torch.tensor([50.0, 98.5, torch.nan]))
        tensor([0.5000, 0.0100, 0.0100], dtype=torch.float64)
        >>> calibration.threshold(0.05)
        94.0
    """

    def __init__(
        self,
        scores: Tensor,
        classes: Tensor | None = None,
        num_classes: int = 0,
        *,
        smallest_class: int = 1,
        folds: Tensor | None = None,
    ) -> None:
        super().__init__()
        if not len(scores):
            raise ValueError("there is no ID sample (label >= 0) to calibrate on.")
        self.size = len(scores)
        ordered, order = scores.double().sort()
        self.classes = None if classes is None else nn.Buffer(classes[order])
        self.folds = None if folds is None else nn.Buffer(folds[order])
        groups: Tensor | None = self.classes if self.folds is None else self.folds
        if groups is None:
            groups, num_classes, smallest_class = torch.zeros_like(order), 1, self.size + 1
        own = torch.bincount(groups, minlength=num_classes)
        self.pooled = nn.Buffer((own < smallest_class) & (folds is None))
        apart = ordered[groups.argsort(stable=True)]
        self.table = nn.Buffer(ordered if bool(self.pooled.all()) else torch.cat([ordered, apart]))
        self.starts = nn.Buffer(torch.where(self.pooled, 0, self.size + own.cumsum(0) - own))
        self.sizes = nn.Buffer(torch.where(self.pooled, self.size, own))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, smallest_class: int = 1) -> Self:
        """Make one from :attr:`tensors`."""
        classes, sizes = tensors.get("classes"), tensors.get("class_sizes", ())
        return cls(tensors["scores"], classes, len(sizes), smallest_class=smallest_class, folds=tensors.get("folds"))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What there is to be saved."""
        sizes = None if self.classes is None else torch.bincount(self.classes, minlength=len(self.sizes))
        tensors = {"scores": self.scores, "classes": self.classes, "class_sizes": sizes, "folds": self.folds}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def scores(self) -> Tensor:
        """The scores of all samples in ascending order, shape (n,)."""
        return self.table[: self.size]

    def to(self, device: torch.device | str) -> Self:  # type: ignore[override]
        """Move it; on the CPU in place of a device without float64."""
        return super().to("cpu" if torch.device(device).type == "mps" else device)

    def __len__(self) -> int:
        """Number of calibration samples."""
        return self.size

    def __repr__(self) -> str:
        kind = "classes" if self.folds is None else "folds"
        return f"<Calibration: {self.size} samples{f' of {len(self.sizes)} {kind}' if len(self.sizes) > 1 else ''}>"

    def p_value(
        self, scores: Tensor, classes: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Conformal p-values in (0, 1], shape (B,), float64: small where the scores are unlike those of ID samples.

        Args:
            scores: shape (B,), or (B, F) with folds. A NaN gets the smallest p-value: it is never in-distribution.
            classes: shape (B,), of each sample; only for a calibration per class.
            generator: draws where a sample stands among calibration samples of the same score, and makes the p-values
                of ID samples exactly uniform. By default ties count in full.
        """
        wide, groups = self._wide(scores), self._groups(scores, classes)
        reached, size = self.count(wide, groups)
        if generator is None:
            return ((1 + reached).double() / (size + 1)).to(scores.device)
        above, _ = self.count(wide, groups, right=True)
        share = 1 - torch.rand(len(wide), generator=generator, dtype=torch.float64, device=generator.device)
        return ((above + share.to(wide.device) * (1 + reached - above)) / (size + 1)).to(scores.device)

    def threshold(self, alpha: float, confidence: float | None = None) -> float | Tensor:
        """The score above which a sample is OOD: at most a share alpha of ID samples scores higher.

        Args:
            alpha: share of false alarms, on average over calibration sets.
            confidence: if given, at most ``alpha`` with this probability over the draw of the calibration set.

        Returns:
            The threshold; of a calibration per class those of all classes, shape (K,).

        Raises:
            ValueError: if there are too few calibration samples; the message says how many are needed. With folds.
        """
        if self.folds is not None:
            raise ValueError("each fold of a cross-calibration votes: there are p-values and decisions, no threshold.")
        thresholds = self.table[self.starts + self.sizes - self.alarms(alpha, confidence)]
        return float(thresholds) if self.classes is None else thresholds

    def alarms(self, alpha: float, confidence: float | None = None) -> Tensor:
        """A sample is OOD if fewer calibration samples than this reach its score: shape (K,), or (1,) without classes.

        Raises:
            ValueError: as for :meth:`threshold`. With folds and a confidence.
        """
        if self.folds is not None and confidence is not None:
            raise ValueError("a confidence needs held-out calibration samples: folds promise an average.")
        sizes = [self.size] if self.folds is not None else self.sizes.tolist()
        alarms = [allowed_alarms(size, alpha, confidence) for size in sizes]
        if 0 in alarms:
            short = alarms.index(0)
            of_class = "" if len(alarms) == 1 else f" of class {short}"
            needed = f"{required_samples(alpha, confidence)} calibration samples{of_class}, there are {sizes[short]}"
            sure = "" if confidence is None else f" with confidence={confidence:g}"
            raise ValueError(f"alpha={alpha:g}{sure} needs {needed}.")
        return torch.tensor(alarms).to(self.starts)

    def is_ood(
        self, scores: Tensor, classes: Tensor | None = None, *, alpha: float, confidence: float | None = None
    ) -> Tensor:
        """Which samples are OOD, shape (B,): those above the threshold, and NaN."""
        return self.judge(scores, classes, self.alarms(alpha, confidence))[1].to(scores.device)

    def judge(self, scores: Tensor, classes: Tensor | None, alarms: Tensor) -> tuple[Tensor, Tensor]:
        """P-values (B,) and decisions (B,), where :meth:`alarms` are given; also a part of exported graphs."""
        groups = self._groups(scores, classes)
        reached, size = self.count(self._wide(scores), groups)
        return (1 + reached).double() / (size + 1), reached < (alarms if groups is None else alarms[groups])

    def count(self, scores: Tensor, groups: Tensor | None = None, *, right: bool = False) -> tuple[Tensor, Tensor]:
        """Calibration samples at or above (``right``: above) each score, and how many it was compared with.

        By bisection, because ONNX has no searchsorted. With folds, their counts are added up.
        """
        first, size = (x if groups is None else x[groups] for x in (self.starts, self.sizes))
        last = len(self.table) - 1
        below = torch.zeros_like(scores, dtype=torch.long)
        step = 2 ** self.size.bit_length() // 2
        while step:
            place = below + (step - 1)
            entry = self.table[(first + place).clamp(max=last)]
            # negated: a NaN is above everything
            passed = ~(entry > scores) if right else ~(entry >= scores)
            below = below + step * (passed & (place < size)).long()
            step //= 2
        return (size - below, size) if self.folds is None else ((size - below).sum(1), size.sum())

    def _wide(self, scores: Tensor) -> Tensor:
        return scores.detach().to(self.table.device).double()  # in this order: MPS has no float64

    def _groups(self, scores: Tensor, classes: Tensor | None) -> Tensor | None:
        if self.classes is None:
            return None
        if classes is None or classes.shape != scores.shape:
            raise ValueError(f"a calibration per class needs classes of shape {tuple(scores.shape)}.")
        return classes.to(self.table.device)


class ScoreMetric(DeviceMetric):
    """Base class of metrics whose states are lists of tensors of shape (B,), gathered over the processes.

    Args:
        dtypes: name of each list and the type of its tensors, which no parent's ``.to(dtype)`` changes.
        kwargs: options of :class:`torchmetrics.Metric`.
    """

    full_state_update: bool = False

    def __init__(self, dtypes: Mapping[str, torch.dtype], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dtypes = dict(dtypes)
        for name in dtypes:
            self.add_state(name, [], dist_reduce_fx="cat")

    def append(self, **batch: Tensor) -> None:
        """Add tensors of shape (B,) to the lists of their names."""
        # states made inside Lightning's inference mode could not be used outside of it
        with torch.inference_mode(False):
            for name, dtype in self._dtypes.items():
                values = batch[name].detach()
                # MPS has no float64; float64 keeps the order and the ties of scores of any precision
                values = (values.cpu() if values.device.type == "mps" else values).to(dtype, copy=True)
                getattr(self, name).append(values.to(self.device))

    def collected(self) -> list[Tensor]:
        """All that was added, one tensor for each list."""
        empty = {name: torch.zeros(0, dtype=dtype, device=self.device) for name, dtype in self._dtypes.items()}
        return [dim_zero_cat(getattr(self, name)) if len(getattr(self, name)) else empty[name] for name in empty]

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add what another metric of this kind has seen."""
        if not isinstance(incoming_state, type(self)):
            raise ValueError(f"expected another {type(self).__name__}, got {type(incoming_state).__name__}.")
        # torchmetrics' own leaves the count and a computed value as they were
        self.append(**dict(zip(self._dtypes, incoming_state.collected(), strict=True)))
        self._update_count += incoming_state.update_count
        self._computed = None

    def _sync_dist(self, dist_sync_fn: Gather = gather_all_tensors, process_group: Any | None = None) -> None:
        # torchmetrics would gather a float32 tensor from a rank without data, and int64 or float64 from the others
        for name, tensor in zip(self._dtypes, self.collected(), strict=True):
            setattr(self, name, [tensor])
        super()._sync_dist(dist_sync_fn, process_group=process_group)


class CalibrationScores(ScoreMetric):
    """Collects the scores of ID samples, over batches and processes, and makes a :class:`Calibration` of them.

    Scores are kept as they are, 8 bytes each.

    Args:
        num_classes: K, to calibrate each class by itself; None for all together.
        kwargs: options of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = CalibrationScores()
        >>> for part in torch.arange(5000.0).split(100):
        ...     metric.update(part)
        >>> metric.compute()
        <Calibration: 5000 samples>
    """

    scores: list[Tensor]
    classes: list[Tensor]

    def __init__(self, num_classes: int | None = None, **kwargs: Any) -> None:
        super().__init__({"scores": torch.float64, "classes": torch.long}, **kwargs)
        self.num_classes = num_classes

    def update(self, scores: Tensor, classes: Tensor | None = None) -> None:
        """Add the scores (B,) of ID samples, and for a calibration per class the classes (B,) that they fall into.

        Raises:
            ValueError: if scores are NaN or shapes do not fit. The batch was not added.
        """
        if scores.ndim != 1:
            raise ValueError(f"scores must have shape (B,), one per sample, got {tuple(scores.shape)}.")
        if bad := int(scores.isnan().sum()):
            raise ValueError(f"{bad} of {len(scores)} calibration scores are NaN. The batch was not added.")
        if (classes is None) != (self.num_classes is None) or (classes is not None and classes.shape != scores.shape):
            raise ValueError("classes of shape (B,) belong to scores of shape (B,) and to num_classes.")
        self.append(scores=scores, classes=torch.zeros_like(scores) if classes is None else classes)

    def compute(self) -> Calibration:
        """The calibration of all scores, of all processes together.

        Raises:
            ValueError: if there is none.
        """
        scores, classes = self.collected()
        return Calibration(scores, None if self.num_classes is None else classes, self.num_classes or 0)


# -- one graph --------------------------------------------------------------------------------------------------------


class LogitsScore(nn.Module):
    """A detector on logits, whose classes are the predicted ones."""

    def __init__(self, detector: LogitsDetector) -> None:
        super().__init__()
        self._detector = detector
        # without the framework's move to the detector's device, which torch 2.6 cannot export
        predict: Callable[..., Tensor] = type(detector).predict_logits
        self._predict = getattr(predict, "__wrapped__", predict)

    def forward(self, logits: Tensor) -> Tensor:
        """Scores of shape (B,)."""
        scores: Tensor = self._predict(self._detector, logits)
        return scores

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the predicted classes, both of shape (B,)."""
        return self(logits), logits.argmax(1)


class CalibratedScore(nn.Module):
    """Score, p-value and decision of features or logits as one graph, without what only runs in Python.

    Args:
        score: maps features or logits to scores (B,); for a calibration per class it has ``scored``.
        calibration: of those scores.
        alpha: share of ID samples that may be flagged.
        known: label of each place that ``scored`` gives; None for a detector on logits, or without classes.
        folds: like ``score``, of the detectors of the folds.
    """

    def __init__(
        self, score: nn.Module, calibration: Calibration, alpha: float, known: Tensor | None, folds: Sequence[nn.Module]
    ) -> None:
        super().__init__()
        self.score, self.calibration, self.folds = score, calibration, nn.ModuleList(folds)
        self.has_classes = known is not None or isinstance(score, LogitsScore)
        self.known = None if known is None else nn.Buffer(known)
        self.alarms = nn.Buffer(calibration.alarms(alpha))

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, p-values (float64) and decisions (bool), each of shape (B,)."""
        scores, _, p_values, decisions = self.judge(values)
        return scores, p_values, decisions

    def judge(self, values: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The same with the labels of the nearest classes in the second place; None for a detector without classes."""
        classes = None
        if self.has_classes:
            scores, classes = self.score.scored(values)  # type: ignore[operator]
            classes = classes if self.known is None else self.known[classes]
        else:
            scores = self.score(values)
        compared = torch.stack([fold(values) for fold in self.folds], 1) if len(self.folds) else scores
        return scores, classes, *self.calibration.judge(compared, classes, self.alarms)


# -- the detector -----------------------------------------------------------------------------------------------------


class Calibrated(Detector):
    """A detector that also decides: conformal p-values, thresholds with a guarantee, selections.

    Wraps any pytorch-ood detector and is one: whatever else the wrapped one has (``fit_features``, ``class_scores``) is
    there too. After the fit, call one of the ``calibrate`` methods with ID data that the detector and the network have
    not seen, or, where there are none to spare, :meth:`fit_calibrate` in place of both: a new fit, ``update``,
    ``forget`` and ``add_class`` forget the calibration. Decisions about inputs run the network in evaluation mode,
    ``predict`` runs it in the mode that it has. A sample with NaN or infinite features is OOD. What is promised, and
    what is not: docs/decisions.md.

    Args:
        detector: the detector, fitted or not.
        alpha: share of ID samples that may be flagged, unless a method is given another one.
        per_class: compare a sample with the calibration samples of its own class, the nearest one of our detectors, the
            predicted one of detectors on logits: false alarms are at most alpha among the samples of each such class.
            Classes with too few calibration samples for ``alpha`` are compared with all samples, with a warning and
            without that promise.

    Attributes:
        calibration: :class:`rmd_plugin.detectors.conformal.Calibration`, None before it is calibrated.
        fold_detectors: fitted without one fold each, by :meth:`fit_calibrate`.

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
            raise TypeError(f"expected an instance of a detector that is not calibrated yet, got {detector!r}.")
        check_level("alpha", alpha)
        self.detector, self.requires_fit = detector, detector.requires_fit
        self.alpha, self.per_class = float(alpha), per_class
        self.calibration: Calibration | None = None
        self.fold_detectors: Sequence[Detector] = []

    @property
    def device(self) -> torch.device | None:
        """Device of the wrapped detector."""
        device: torch.device | None = self.detector.device
        return device

    def to(self, device: torch.device | str) -> Self:
        """Move the detector and its calibration."""
        for detector in (self.detector, *self.fold_detectors):
            detector.to(device)
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
            if name not in _CHANGES:  # a fit that fails may leave anything; a change that fails leaves all as it was
                self._forget_calibration()
            result = value(*args, **kwargs)
            self._forget_calibration()
            return result if name == "add_class" else self

        return fit

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:  # an encoder of the wrapper's own would hide the one that scores
            setattr(self.detector, name, value)

    # -- the wrapped detector -----------------------------------------------------------------------------------------

    def fit(self, data_loader: Iterable[Any], **options: Any) -> Self:
        """Fit the wrapped detector; a calibration that there was is forgotten."""
        self._forget_calibration()  # before: a fit that fails may leave anything
        self.detector.fit(data_loader, **options)  # type: ignore[arg-type]
        return self

    def predict(self, x: Any) -> Tensor:
        """Scores of the wrapped detector, shape (B,)."""
        return self.detector.predict(x)

    def _forget_calibration(self) -> None:
        self.calibration, self.fold_detectors = None, []

    def fit_calibrate(self, data_loader: Iterable[Any], *, folds: int = 10, seed: int = 0) -> Self:
        """Fit and calibrate on the same data: a loader of pairs (x, y). See :meth:`fit_calibrate_features`."""
        batches = [(self._encode(x)[1], torch.as_tensor(y)) for x, y in map(as_pair, data_loader)]
        if not batches:
            raise ValueError("the loader is empty: there is nothing to fit.")
        z, y = (torch.cat(column) for column in zip(*batches, strict=True))
        return self.fit_calibrate_features(z, y, folds=folds, seed=seed)

    def fit_calibrate_features(self, z: Tensor, y: Tensor, *, folds: int = 10, seed: int = 0) -> Self:
        """Fit and calibrate on the same features (N, D) and labels (N,), without held-out data.

        The detector is fitted on all samples, and once more without each fold. These fold detectors stay: a p-value is
        (1 + number of training samples whose score by the detector without their fold is at least the score of the new
        sample by that detector) / (N + 1), so that a decision costs ``folds`` scores. At most 2 alpha of new ID samples
        are flagged on average, and about alpha in practice, *if the encoder has not seen these samples with their
        labels*: a network that was trained on them flags two to three times as many.

        Raises:
            TypeError: if the detector is not fitted on features.
            ValueError: if there are fewer samples than folds, or with ``per_class``.
        """
        if not isinstance(self.detector, FeaturesDetector) or not self.detector.requires_fit:
            name = type(self.detector).__name__
            raise TypeError(f"{name} is not fitted on features: calibrate(loader) on held-out data instead.")
        z, y = check_features(z), check_labels(y, len(z))
        z, y = z[y >= 0], y[y >= 0]
        if not isinstance(folds, int) or not 2 <= folds <= len(z):
            raise ValueError(f"folds must be an integer from 2 to {len(z)}, the number of ID samples, got {folds!r}.")
        if self.per_class:
            raise ValueError("per_class=True needs held-out data: calibrate_features(z).")
        # without the networks, which may be large, and before the fit, which may be
        networks = {id(getattr(self.detector, name, None)): None for name in NETWORKS}
        fold_detectors = [copy.deepcopy(self.detector, dict(networks)) for _ in range(folds)]
        self._forget_calibration()
        self.detector.fit_features(z, y)
        fold_of = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed)).to(z.device) % folds
        left_out = z.new_zeros(len(z), dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit on all samples has warned
            for fold, detector in enumerate(fold_detectors):
                held_out = fold_of == fold
                detector.fit_features(z[~held_out], y[~held_out])
                left_out[held_out] = self._scored("features", z[held_out], detector)[0].to(left_out)
        if bad := int(left_out.isnan().sum()):
            raise ValueError(f"{bad} of {len(left_out)} calibration scores are NaN.")
        self.calibration, self.fold_detectors = Calibration(left_out, folds=fold_of), fold_detectors
        return self

    # -- calibration --------------------------------------------------------------------------------------------------

    def calibrate(self, data_loader: Iterable[Any]) -> Self:
        """Calibrate on held-out ID data: a loader of pairs (x, y), in one pass, with the network in evaluation mode.

        Samples with y < 0 are left out. Under ``torch.distributed`` every process calibrates on its own loader: to
        calibrate on all of them, pass a :class:`rmd_plugin.CalibrationScores` to :meth:`calibrate_scores`.

        Raises:
            ValueError: if there is no ID sample, or a score is NaN.
        """
        return self._collect((*self._represent(x), torch.as_tensor(y)) for x, y in map(as_pair, data_loader))

    def calibrate_features(self, z: Tensor, y: Tensor | None = None) -> Self:
        """Calibrate on features of held-out ID samples; with labels ``y``, those below zero are left out."""
        return self._collect([("features", z, y)])

    def calibrate_logits(self, logits: Tensor, y: Tensor | None = None) -> Self:
        """Calibrate on logits of held-out ID samples; with labels ``y``, those below zero are left out."""
        return self._collect([("logits", logits, y)])

    def calibrate_scores(self, scores: Tensor | Sequence[float] | CalibrationScores, y: Tensor | None = None) -> Self:
        """Calibrate on scores (B,) of held-out ID samples, or on a metric that collected them."""
        if isinstance(scores, CalibrationScores):
            return self._set_calibration(scores.compute())
        metric = CalibrationScores(sync_on_compute=False)
        scores = scores if isinstance(scores, Tensor) else torch.as_tensor(scores, dtype=torch.float64)
        metric.update(scores if y is None else scores[check_labels(y, len(scores)) >= 0])
        return self._set_calibration(metric.compute())

    def _collect(self, batches: Iterable[tuple[_Kind, Any, Tensor | None]]) -> Self:
        metric = CalibrationScores(0 if self.per_class else None, sync_on_compute=False)
        for kind, values, y in batches:
            scores, classes = self._scored(kind, values)
            if self.per_class:
                metric.num_classes = values.shape[1] if kind == "logits" else self.detector.n_classes  # type: ignore[attr-defined]
            if y is not None:
                keep = (check_labels(y, len(scores)) >= 0).to(scores.device)
                scores, classes = scores[keep], None if classes is None else classes[keep]
            metric.update(scores, classes)
        return self._set_calibration(metric.compute())

    def _set_calibration(self, calibration: Calibration) -> Self:
        if self.per_class != (calibration.classes is not None):
            raise ValueError(f"per_class={self.per_class} does not fit {calibration!r}. Collect a CalibrationScores.")
        # an object of its own: a metric gives the same one to everybody who asks
        smallest = required_samples(self.alpha)
        self.calibration = Calibration.from_tensors(calibration.tensors, smallest_class=smallest)
        self.fold_detectors = []
        few = self.calibration.pooled.nonzero().flatten().tolist()
        if self.per_class and few:
            enough = f"the {smallest} samples that alpha={self.alpha:g} needs"
            warn(f"{len(few)} classes have fewer than {enough}, and are compared with all samples: {few[:8]}.")
        return self

    # -- decisions ----------------------------------------------------------------------------------------------------

    def p_value(self, x: Any, *, generator: torch.Generator | None = None) -> Tensor:
        """Conformal p-values in (0, 1] of inputs, shape (B,), float64. Small means unlike the ID data.

        Args:
            x: inputs of the wrapped detector.
            generator: breaks ties at random, which makes the p-values of ID samples exactly uniform.
        """
        return self._p_value(*self._represent(x), generator)

    def p_value_features(self, z: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The same of features."""
        return self._p_value("features", z, generator)

    def p_value_logits(self, logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """The same of logits."""
        return self._p_value("logits", logits, generator)

    def is_ood(self, x: Any, alpha: float | None = None, *, confidence: float | None = None) -> Tensor:
        """Which inputs are OOD, shape (B,), of type bool: those that score above :meth:`threshold`, and NaN.

        Args:
            x: inputs of the wrapped detector.
            alpha: share of ID samples that may be flagged; by default the detector's.
            confidence: see :meth:`threshold`.
        """
        return self._is_ood(*self._represent(x), alpha, confidence)

    def is_ood_features(self, z: Tensor, alpha: float | None = None, *, confidence: float | None = None) -> Tensor:
        """The same of features."""
        return self._is_ood("features", z, alpha, confidence)

    def is_ood_logits(self, logits: Tensor, alpha: float | None = None, *, confidence: float | None = None) -> Tensor:
        """The same of logits."""
        return self._is_ood("logits", logits, alpha, confidence)

    def select(self, x: Any, fdr: float = 0.1) -> Tensor:
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
        calibration = self._require_calibration()
        kind: _Kind = "logits" if isinstance(self.detector, LogitsDetector) else "features"
        scores, classes = self._scored(kind, values)
        compared = self._compared(kind, values)[0] if self.fold_detectors else scores
        return scores, classes, *calibration.judge(compared, classes, calibration.alarms(self.alpha))

    def drift_alarm(self, level: float = 0.01, every: int | None = None, seed: int = 0) -> DriftAlarm:
        """An alarm for a stream of scores that are no longer like the calibration's: :class:`rmd_plugin.DriftAlarm`."""
        if self.fold_detectors:
            raise ValueError("a drift alarm needs the scores of held-out data: calibrate(loader), not fit_calibrate.")
        return DriftAlarm(self._require_calibration().scores, level, every, seed)

    def _p_value(self, kind: _Kind, values: Any, generator: torch.Generator | None) -> Tensor:
        return self._require_calibration().p_value(*self._compared(kind, values), generator=generator)

    def _is_ood(self, kind: _Kind, values: Any, alpha: float | None, confidence: float | None) -> Tensor:
        calibration, level = self._require_calibration(), self.alpha if alpha is None else alpha
        return calibration.is_ood(*self._compared(kind, values), alpha=level, confidence=confidence)

    def _require_calibration(self) -> Calibration:
        if self.calibration is None:
            raise RequiresFittingException("not calibrated. After the last fit, call calibrate(held_out_loader).")
        return self.calibration

    # -- scores and classes -------------------------------------------------------------------------------------------

    def _represent(self, x: Any) -> tuple[_Kind, Any]:
        """What is scored in place of inputs: features or logits, if the detector is on these and has the network."""
        on_parts = isinstance(self.detector, (FeaturesDetector, LogitsDetector)) and self._network()[1] is not None
        encoded = on_parts or self.per_class or self.fold_detectors
        return self._encode(x) if encoded else ("inputs", to_device(x, self.device))

    def _network(self) -> tuple[_Kind, Network | None]:
        """What the detector is fed with, and the network that gives it."""
        on_logits = isinstance(self.detector, LogitsDetector)
        network = getattr(self.detector, "model" if on_logits else "encoder", None)
        return "logits" if on_logits else "features", network

    def _encode(self, x: Any) -> tuple[_Kind, Tensor]:
        """Features or logits of inputs, from the network in evaluation mode."""
        kind, network = self._network()
        if network is None:
            raise ValueError(f"{self.detector!r} lacks the network to {kind} that classes or folds are found with.")
        with torch.no_grad(), evaluating(network):
            return kind, network(to_device(x, self.device))

    def _compared(self, kind: _Kind, values: Any) -> tuple[Tensor, Tensor | None]:
        """Scores that the calibration compares, shape (B,), or (B, F) with folds, and the classes if it needs them."""
        if not self.fold_detectors:
            return self._scored(kind, values)
        return torch.stack([self._scored(kind, values, fold)[0] for fold in self.fold_detectors], 1), None

    def _scored(self, kind: _Kind, values: Any, fold: Detector | None = None) -> tuple[Tensor, Tensor | None]:
        """Scores of shape (B,), of a fold's detector if one is given, and the classes if they are needed."""
        predict = getattr(fold or self.detector, _PREDICT[kind], None)
        if predict is None:
            raise TypeError(f"{type(self.detector).__name__} does not score {kind}.")
        if self.per_class and kind == "features" and isinstance(self.detector, StatefulDetector):
            with suppress(NotImplementedError), torch.inference_mode(False):  # raised by a detector without classes
                return self.detector.scored_classes(values)
        differentiates, parts = isinstance(self.detector, GradientDetector), vars(self.detector).values()
        with evaluating(*parts), torch.inference_mode(False), torch.set_grad_enabled(differentiates):
            scores = score_finite(predict, values)
        if scores.ndim != 1 or (isinstance(values, Tensor) and len(scores) != len(values)):
            raise ValueError(f"a decision needs one score for each sample, got shape {tuple(scores.shape)}.")
        if not self.per_class:
            return scores.detach(), None
        if kind != "logits":
            name = type(self.detector).__name__
            raise ValueError(f"per_class=True needs nearest_class() or logits, which {name} on {kind} has not.")
        return scores.detach(), values.argmax(1)

    # -- saving and export --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The fitted detector and its calibration, as plain tensors and numbers, without networks."""
        return {
            "format": STATE_FORMAT,
            "detector": type(self).__name__,
            "options": {"alpha": self.alpha, "per_class": self.per_class},
            "inner": take_snapshot(self.detector),
            **({"folds": [take_snapshot(fold) for fold in self.fold_detectors]} if self.fold_detectors else {}),
            "tensors": {} if self.calibration is None else dict(self.calibration.tensors),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave; the networks of the wrapped detector stay."""
        restore_snapshot(self.detector, check_state(state, type(self))["inner"])
        self.alpha, self.per_class = state["options"]["alpha"], state["options"]["per_class"]
        self._forget_calibration()
        self.fold_detectors = [build_detector(fold) for fold in state.get("folds", ())]
        if "scores" in state["tensors"]:
            smallest = required_samples(self.alpha)
            self.calibration = Calibration.from_tensors(state["tensors"], smallest_class=smallest)
        return self

    @classmethod
    def from_state(cls, state: dict[str, Any], encoder: Network | None = None) -> Self:
        """Make a calibrated detector from the result of :meth:`state_dict`.

        ``encoder`` becomes the network of the wrapped one: to features, to logits for detectors on logits, or whatever
        it was made with.
        """
        calibrated = cls(build_detector(check_state(state, cls)["inner"])).load_state_dict(state)
        if encoder is not None:
            give_encoder(calibrated.detector, encoder)
        return calibrated

    def save(self, path: Path) -> None:
        """Write the fitted detector and its calibration to a safetensors file, without networks."""
        write_state(path, self.state_dict())

    @classmethod
    def load(cls, path: Path, encoder: Network | None = None, *, map_location: str | torch.device = "cpu") -> Self:
        """Read what :meth:`save` wrote; nothing in the file is executed."""
        return cls.from_state(read_state(path, map_location), encoder)

    def to_module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """One graph for score, p-value and decision at ``alpha``, for ``torch.export``, ONNX or a model of your own.

        Its ``forward`` maps features, or logits for a detector on logits, to three tensors of shape (B,).

        Raises:
            TypeError: if the wrapped detector is neither on logits nor has a ``to_module``.
        """
        calibration, known = self._require_calibration(), None
        if isinstance(self.detector, LogitsDetector):
            score: nn.Module = LogitsScore(self.detector)
        elif isinstance(self.detector, StatefulDetector):
            score, known = self.detector.to_module(dtype), self.detector._state.get("classes")
        else:
            raise TypeError(f"{type(self.detector).__name__} has no to_module(), so it cannot be exported.")
        folds = [fold.to_module(dtype) for fold in self.fold_detectors]  # type: ignore[attr-defined]
        return CalibratedScore(score, calibration, self.alpha, known, folds).eval()


def score_finite(predict: Callable[[Any], Tensor], values: Any) -> Tensor:
    """Scores of a batch; NaN for samples with NaN or infinite values, which some detectors refuse."""
    if not isinstance(values, Tensor):
        return predict(values)
    values = values.clone() if values.is_inference() else values
    finite = values.isfinite().unsqueeze(-1).flatten(1).all(1)
    if len(values) and bool(finite.all()):
        return predict(values)
    scores = torch.full((len(values),), torch.nan, device=values.device)
    if bool(finite.any()):
        scores[finite] = predict(values[finite]).detach().to(scores)
    return scores


def bare(detector: Detector) -> Detector:
    """The detector itself, without the calibration around it."""
    return detector.detector if isinstance(detector, Calibrated) else detector
