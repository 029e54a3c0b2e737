"""An axis for scores that shows both where in-distribution scores crowd and how far OOD scores reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: a bin at either end takes what lies beyond these quantiles of all scores
_CLIP = (0.005, 0.995)
#: scores that reach further than so many widths of the crowd stand on a stretched axis
_REACH = 8.0
#: differences below this share of the scores are rounding
_TINY = 1e-9


@dataclass(frozen=True)
class ScoreAxis:
    """Places of scores on an axis: linear, or around the crowd linear and far from it logarithmic (asinh).

    Args:
        edges: of the bins, as scores, shape (B + 1,).
        centre: median of the crowd.
        width: half of its middle half; 0 for a linear axis.
    """

    edges: np.ndarray
    centre: float = 0.0
    width: float = 0.0

    def place(self, scores: np.ndarray | float) -> np.ndarray:
        """Where scores stand on the axis."""
        scores = np.asarray(scores, dtype=np.float64)
        return np.arcsinh((scores - self.centre) / self.width) if self.width else scores

    def ticks(self, count: int = 5) -> tuple[list[float], list[str]]:
        """Places of round scores, and the scores as texts; none for a linear axis, which has its own."""
        if not self.width:
            return [], []
        first, last = self.place(self.edges[[0, -1]])
        scores = self.centre + self.width * np.sinh(np.linspace(first, last, count))
        texts: dict[str, float] = {}
        for number, score in enumerate(scores):
            # as many digits as tell a tick from the next one
            gap = float(np.abs(np.delete(scores, number) - score).min())
            digits = -math.floor(math.log10(gap / 2))
            value = round(float(score), digits) + 0.0  # no minus before zero
            texts[f"{value:.{max(digits, 0)}f}".replace("-", "−")] = value
        return [float(self.place(value)) for value in texts.values()], list(texts)


def score_axis(arrays: Sequence[np.ndarray], crowd: np.ndarray) -> ScoreAxis:
    """The axis for some arrays of scores, with bins that the smallest can fill; the crowd, ID scores, is shown widest.

    Example:
        >>> crowd, far = np.linspace(0, 1, 100), np.linspace(10, 1000, 100)
        >>> score_axis([crowd], crowd).width, score_axis([crowd, far], crowd).width > 0
        (0.0, True)
    """
    finite = [array[np.isfinite(array)] for array in arrays]
    values = np.concatenate([*finite, np.empty(0)]).astype(np.float64)
    low, high = map(float, np.quantile(values, _CLIP)) if len(values) else (0.0, 1.0)
    size = max(abs(low), abs(high))
    if not high - low > _TINY * max(size, 1e-200):  # as good as equal: bins between them would have no width
        half = max(0.5, _TINY * size)
        low, high = low - half, high + half
    # a bin of a small set would hold one score or none
    bins = min(40, max(8, int(2 * min(map(len, finite), default=0) ** 0.5)))
    crowd = crowd[np.isfinite(crowd)].astype(np.float64)
    if len(crowd):
        centre = float(np.median(crowd))
        # of scores that are mostly equal the middle half has no width
        widths = [float(np.diff(np.quantile(crowd, [tail, 1 - tail]))[0]) / 2 for tail in (0.25, 0.1, 0.02)]
        width = next((width for width in widths if width > max(1e-6 * (high - low), _TINY * size)), 0.0)
        if width and high - low > 2 * _REACH * width:
            first, last = np.arcsinh((np.array([low, high]) - centre) / width)
            return ScoreAxis(centre + width * np.sinh(np.linspace(first, last, bins + 1)), centre, width)
    return ScoreAxis(np.linspace(low, high, bins + 1))
