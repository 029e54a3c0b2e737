"""Decisions with a guarantee, from the scores of held-out ID samples alone: conformal p-values and thresholds.

If a new ID sample is exchangeable with the n calibration samples, its p-value (1 + #{calibration >= score}) / (n + 1)
is at most alpha with a probability of at most alpha, whatever the detector and the distribution (Vovk et al. 2005).
With a ``confidence``, the false alarms of *this* calibration set are at most alpha with that probability over its draw:
its false-alarm rate is a Beta variable, whose quantile is exact. Selections at a false discovery rate are those of
Benjamini and Hochberg, valid for these p-values (Bates et al. 2023). Knows scores, no detectors.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from numbers import Real

import torch
from scipy.stats import binom
from torch import Tensor
from typing_extensions import Self

from rmd_plugin.detectors.files import TensorSpec, check_tensors


def check_level(name: str, value: float, example: float = 0.05) -> None:
    """Refuse what is no probability strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be a number between 0 and 1, for example {example}, got {value!r}.")


def required_samples(alpha: float, confidence: float | None = None) -> int:
    """Smallest number of calibration samples with which anything can be flagged at ``alpha``.

    Example:
        >>> required_samples(0.05), required_samples(0.05, confidence=0.95)
        (19, 59)
    """
    check_level("alpha", alpha)
    if confidence is None:
        n = math.ceil(1 / alpha) - 1
    else:
        check_level("confidence", confidence, 0.95)
        n = math.ceil(math.log1p(-confidence) / math.log1p(-alpha))
    # the quotients are rounded
    return next(k for k in range(max(0, n - 2), n + 3) if allowed_alarms(k, alpha, confidence) > 0)


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
    return _confident_alarms(n, alpha, confidence)


@lru_cache(maxsize=1024)  # one for each batch and class
def _confident_alarms(n: int, alpha: float, confidence: float) -> int:
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


class Calibration:
    """Scores of ID calibration samples, ready for p-values and thresholds, see :class:`rmd_plugin.CalibrationScores`.

    Args:
        scores: shape (m,), at least one.
        weights: shape (m,), how many calibration samples a score stands for; by default one each.
        classes: shape (m,), the class that each belongs to; None for one calibration of all together.
        overcount: shape (K,), or (1,) without classes, by how much the weights may overstate the number of samples
            at or above any score. They never understate it.
        smallest_class: classes with fewer calibration samples use the scores of all classes together.

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
        weights: Tensor | None = None,
        classes: Tensor | None = None,
        overcount: Tensor | None = None,
        *,
        smallest_class: int = 1,
    ) -> None:
        if not len(scores):
            raise ValueError("there is no ID sample (label >= 0) to calibrate on.")
        self.scores, order = scores.double().sort()
        self.weights = torch.ones_like(order) if weights is None else weights[order]
        self.classes = None if classes is None else classes[order]
        self.overcount = torch.zeros(1, dtype=torch.long) if overcount is None else overcount
        self.smallest_class = smallest_class

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], *, smallest_class: int) -> Self:
        """Make one from :attr:`tensors`, which are checked."""
        specs = {"scores": TensorSpec("m", finite=False), "weights": TensorSpec("m", torch.long)}
        specs["overcount"] = TensorSpec("K", torch.long)
        if "classes" in tensors:
            specs["classes"] = TensorSpec("m", torch.long)
        check_tensors(tensors, specs, {})
        tensors = {name: tensors[name] for name in specs}
        classes = tensors.get("classes")
        wrong = [bool(tensors["scores"].isnan().any()), bool((tensors["weights"] < 1).any())]
        wrong.append(classes is not None and not bool(((classes >= 0) & (classes < len(tensors["overcount"]))).all()))
        if any(wrong):
            raise ValueError("the calibration holds NaN scores, weights below one or wrong classes. Calibrate again.")
        return cls(**tensors, smallest_class=smallest_class)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What there is to be saved."""
        found = {"scores": self.scores, "weights": self.weights, "overcount": self.overcount}
        return found if self.classes is None else {**found, "classes": self.classes}

    def to(self, device: torch.device | str) -> Calibration:
        """The same on another device; on the CPU in place of one without float64."""
        device = "cpu" if torch.device(device).type == "mps" else device
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Calibration(**moved, smallest_class=self.smallest_class)

    def __len__(self) -> int:
        """Number of calibration samples."""
        return self._size

    def __repr__(self) -> str:
        per_class = "" if self.classes is None else f" of {len(self.overcount)} classes"
        error = f", ranks off by at most {self.rank_error:.2g}" if self.rank_error else ""
        return f"<Calibration: {len(self)} samples{per_class}{error}>"

    @cached_property
    def _size(self) -> int:
        return int(self.weights.sum())

    @property
    def rank_error(self) -> float:
        """By how much, at most, p-values are larger than those of all scores kept; never smaller. 0 up to the limit.

        With classes, the largest over them, and that of all classes together where some use it.
        """
        pooled = int(self.overcount.sum()) / (len(self) + 1)
        if self.classes is None:
            return pooled
        few, own = self.pooled_classes, self.overcount.to(self.scores.device) / (self.class_sizes + 1)
        return max(float(own[~few].amax()) if not bool(few.all()) else 0.0, pooled if bool(few.any()) else 0.0)

    # -- tables, also those of an exported graph ----------------------------------------------------------------------

    @cached_property
    def at_least(self) -> Tensor:
        """Number of calibration samples from the i-th smallest score on, shape (m + 1,)."""
        return _suffix_sums(self.weights)

    @cached_property
    def class_sizes(self) -> Tensor:
        """Calibration samples of each class, shape (K,)."""
        sizes = torch.zeros(len(self.overcount), dtype=torch.long, device=self.scores.device)
        return sizes.index_add_(0, self._require_classes(), self.weights)

    @cached_property
    def pooled_classes(self) -> Tensor:
        """Which classes have too few samples and use those of all classes together, shape (K,)."""
        return self.class_sizes < self.smallest_class

    @cached_property
    def class_keys(self) -> tuple[Tensor, Tensor]:
        """Class and pooled rank of each score as one number, ascending, shape (m,), and their suffix sums (m + 1,)."""
        ranks = torch.searchsorted(self.scores, self.scores)
        keys, order = (self._require_classes() * (len(self.scores) + 1) + ranks).sort()
        return keys, _suffix_sums(self.weights[order])

    @cached_property
    def class_past(self) -> Tensor:
        """Number of samples of the classes after each class, shape (K,): where its suffix sums end."""
        return _suffix_sums(self.class_sizes)[1:]

    def _require_classes(self) -> Tensor:
        if self.classes is None:
            raise ValueError("the calibration is of all classes together: there is none of each class.")
        return self.classes

    # -- questions ----------------------------------------------------------------------------------------------------

    def p_value(
        self, scores: Tensor, classes: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Conformal p-values in (0, 1], shape (B,), float64: small where the scores are unlike those of ID samples.

        Args:
            scores: shape (B,). A NaN gets the smallest p-value: it is never in-distribution.
            classes: shape (B,), of each sample; only for a calibration per class.
            generator: draws where a sample stands among calibration samples of the same score, and makes the p-values
                of ID samples exactly uniform. By default ties count in full.
        """
        found = self._wide(scores)
        reached, size = self._count(found, classes, right=False)
        if generator is None:
            return ((1 + reached).double() / (size + 1)).to(scores.device)
        above, _ = self._count(found, classes, right=True)
        share = 1 - torch.rand(found.shape, generator=generator, dtype=torch.float64, device=generator.device)
        return ((above + share.to(found.device) * (1 + reached - above)) / (size + 1)).to(scores.device)

    def threshold(self, alpha: float, confidence: float | None = None) -> float | Tensor:
        """The score above which a sample is OOD: at most a share alpha of ID samples scores higher.

        Args:
            alpha: share of false alarms, on average over calibration sets.
            confidence: if given, at most ``alpha`` with this probability over the draw of the calibration set.

        Returns:
            The threshold; of a calibration per class those of all classes, shape (K,).

        Raises:
            ValueError: if there are too few calibration samples; the message says how many are needed.
        """
        if self.classes is None:
            return self._pooled_threshold(alpha, confidence)
        few = self.pooled_classes
        alarms = [
            1 if pooled else _alarms(size, alpha, confidence, f"class {number} has")
            for number, (size, pooled) in enumerate(zip(self.class_sizes.tolist(), few.tolist(), strict=True))
        ]
        keys, at_least = self.class_keys
        # the largest score that so many samples of the class reach
        reached = self.class_past + torch.tensor(alarms, device=few.device)
        own = self.scores[keys[torch.searchsorted(-at_least, -reached, right=True) - 1] % (len(self.scores) + 1)]
        return own.masked_fill(few, self._pooled_threshold(alpha, confidence)) if bool(few.any()) else own

    def _pooled_threshold(self, alpha: float, confidence: float | None) -> float:
        # the largest score that so many samples reach
        alarms = _alarms(len(self), alpha, confidence, "there are")
        return float(self.scores[int((self.at_least[:-1] >= alarms).sum()) - 1])

    def is_ood(
        self, scores: Tensor, classes: Tensor | None = None, *, alpha: float, confidence: float | None = None
    ) -> Tensor:
        """Which samples are OOD, shape (B,): those above the threshold, and NaN."""
        threshold = self.threshold(alpha, confidence)
        if isinstance(threshold, Tensor):
            threshold = threshold[self._class_of(classes, scores)]
        return (~(self._wide(scores) <= threshold)).to(scores.device)

    def _wide(self, scores: Tensor) -> Tensor:
        return scores.detach().to(self.scores.device).double()  # in this order: MPS has no float64

    def _count(self, scores: Tensor, classes: Tensor | None, *, right: bool) -> tuple[Tensor, Tensor | int]:
        """Calibration samples at or above (``right``: above) each score, and how many there are in all."""
        ranks = torch.searchsorted(self.scores, scores, right=right).masked_fill_(scores.isnan(), len(self.scores))
        pooled = self.at_least[ranks]
        if self.classes is None:
            return pooled, len(self)
        classes = self._class_of(classes, scores)
        keys, at_least = self.class_keys
        stride = len(self.scores) + 1
        own = at_least[torch.searchsorted(keys, classes * stride + ranks)] - self.class_past[classes]
        few = self.pooled_classes[classes]
        return torch.where(few, pooled, own), torch.where(few, len(self), self.class_sizes[classes])

    def _class_of(self, classes: Tensor | None, scores: Tensor) -> Tensor:
        if classes is None or classes.shape != scores.shape:
            found = "none" if classes is None else f"shape {tuple(classes.shape)}"
            raise ValueError(f"a calibration per class needs classes of shape {tuple(scores.shape)}, got {found}.")
        return classes.to(self.scores.device)


def _suffix_sums(weights: Tensor) -> Tensor:
    return torch.cat([weights.flip(0).cumsum(0).flip(0), weights.new_zeros(1)])


def _alarms(n: int, alpha: float, confidence: float | None, who: str) -> int:
    found = allowed_alarms(n, alpha, confidence)
    if not found:
        asked = f"alpha={alpha:g}" + ("" if confidence is None else f" with confidence={confidence:g}")
        raise ValueError(
            f"{who} {n} calibration samples, but {asked} needs {required_samples(alpha, confidence)}. Calibrate on "
            "more ID samples, or ask for a larger alpha."
        )
    return found
