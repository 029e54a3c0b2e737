"""Bootstrap intervals of AUROC: both sets resampled, the same resamples for every detector, thousands per second."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: resamples that are handled at once
_CHUNK = 50
#: resamples are kept in memory up to so many bytes, else drawn again for every detector
_KEEP_BYTES = 2**28


def auroc(id_scores: np.ndarray, ood_scores: np.ndarray) -> float:
    """Probability that an OOD score exceeds an in-distribution one; ties count half.

    Args:
        id_scores: scores of the in-distribution samples, shape (N,).
        ood_scores: scores of the OOD samples, shape (M,).

    Example:
        >>> auroc(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
        0.875
    """
    if min(len(id_scores), len(ood_scores)) == 0:
        raise ValueError(f"scores of both sets are needed, got {len(id_scores)} ID and {len(ood_scores)} OOD scores.")
    if np.isnan(id_scores).any() or np.isnan(ood_scores).any():
        raise ValueError("scores contain NaN.")
    ranked = np.sort(id_scores)
    below, reached = (np.searchsorted(ranked, ood_scores, side) for side in ("left", "right"))
    return float((below + reached).mean() / (2 * len(ranked)))


class Bootstrap:
    """Resamples of one in-distribution and one OOD set.

    In-distribution and OOD samples are drawn separately, with replacement, as many as there are. All detectors see the
    same resamples, so their differences can be judged too.

    Args:
        known: number N of in-distribution samples.
        unknown: number M of OOD samples.
        resamples: number R of resamples.
        seed: of the draws.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> known, unknown = rng.normal(size=500), rng.normal(1.0, size=300)
        >>> low, high = Bootstrap(500, 300).interval(known, unknown)
        >>> low < 0.76 < high  # the truth, Phi(1 / sqrt(2))
        True
    """

    def __init__(self, known: int, unknown: int, *, resamples: int = 1000, seed: int = 0) -> None:
        if min(known, unknown, resamples) < 1:
            raise ValueError(f"known, unknown and resamples must be at least 1, got {known}, {unknown}, {resamples}.")
        self.known, self.unknown, self.resamples, self.seed = known, unknown, resamples, seed
        self._kept: list[tuple[np.ndarray, np.ndarray]] | None = None
        if (known + unknown) * resamples * 2 <= _KEEP_BYTES:
            self._kept = list(self._draw())

    def distribution(self, known: np.ndarray, unknown: np.ndarray) -> np.ndarray:
        """AUROC of every resample; ties count half.

        Args:
            known: scores of the in-distribution samples, shape (N,).
            unknown: scores of the OOD samples, shape (M,).

        Returns:
            Shape (R,).
        """
        if known.shape != (self.known,) or unknown.shape != (self.unknown,):
            raise ValueError(
                f"scores must have shapes ({self.known},) and ({self.unknown},), got {known.shape} and {unknown.shape}."
            )
        if np.isnan(known).any() or np.isnan(unknown).any():
            raise ValueError("scores contain NaN.")
        order = np.argsort(known, kind="stable")
        ranked = known[order]
        below, reached = (np.searchsorted(ranked, unknown, side) for side in ("left", "right"))
        ties = not np.array_equal(below, reached)
        areas = []
        for times_known, times_unknown in self._draw() if self._kept is None else self._kept:
            # how many resampled in-distribution scores lie below the i-th smallest
            smaller = np.zeros((len(times_known), self.known + 1), dtype=np.int32)
            np.cumsum(times_known[:, order], axis=1, dtype=np.int32, out=smaller[:, 1:])
            beaten = smaller[:, below].astype(np.float64)
            if ties:
                beaten = (beaten + smaller[:, reached]) / 2
            areas.append(np.einsum("rm,rm->r", beaten, times_unknown))
        return np.concatenate(areas) / (self.known * self.unknown)

    def interval(self, known: np.ndarray, unknown: np.ndarray, level: float = 0.95) -> tuple[float, float]:
        """Percentile interval of AUROC.

        Args:
            known: scores of the in-distribution samples, shape (N,).
            unknown: scores of the OOD samples, shape (M,).
            level: part of the resamples inside the interval.

        Returns:
            Lower and upper end.
        """
        tail = (1 - level) / 2
        low, high = np.quantile(self.distribution(known, unknown), [tail, 1 - tail])
        return float(low), float(high)

    def _draw(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """How often each sample is in each resample, a chunk of resamples at a time."""
        rng = np.random.default_rng(self.seed)
        for start in range(0, self.resamples, _CHUNK):
            rows = min(_CHUNK, self.resamples - start)
            yield _times(rng, rows, self.known), _times(rng, rows, self.unknown)


def _times(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    chosen = rng.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
    times = np.bincount(chosen.ravel(), minlength=rows * count)
    # uint16 holds every count that can occur in practice; clip instead of wrapping for tiny sets drawn absurdly often
    return times.clip(max=65535).astype(np.uint16).reshape(rows, count)
