"""AUROC by ranks, what each sample adds to it, and its bootstrap intervals: the same resamples for every detector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: resamples that are handled at once
_CHUNK = 50
#: resamples are kept in memory up to so many bytes, else drawn again for every detector
_KEEP_BYTES = 2**28


def auroc(id_scores: np.ndarray, ood_scores: np.ndarray) -> float:
    """Probability that an OOD sample (of M) scores higher than an ID sample (of N); ties count half.

    Raises:
        ValueError: if one of the sets is empty, or a score is NaN.

    Example:
        >>> auroc(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
        0.875
    """
    ranked, below, reached = _ranks(np.asarray(id_scores), np.asarray(ood_scores))
    if not len(ranked) or not len(below):
        raise ValueError(f"AUROC needs ID and OOD scores, got {len(ranked)} and {len(below)}.")
    return float((below + reached).sum() / (2 * len(ranked) * len(below)))


def placements(id_scores: np.ndarray, ood_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of the OOD scores above each ID score, shape (N,), and of the ID scores below each OOD score, (M,).

    Ties count half. The mean of either is the AUROC; its variance is that of the first divided by N plus that of the
    second divided by M, and of a difference of two detectors the same of their differences (DeLong et al., 1988).
    """
    _, below, reached = _ranks(id_scores, ood_scores)
    _, under, up_to = _ranks(ood_scores, id_scores)
    return 1 - (under + up_to) / (2 * len(ood_scores)), (below + reached) / (2 * len(id_scores))


def _ranks(id_scores: np.ndarray, ood_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order of the ID samples, and how many of them lie below, and not above, each OOD sample."""
    if np.isnan(id_scores).any() or np.isnan(ood_scores).any():
        raise ValueError("scores contain NaN.")
    order = np.argsort(id_scores, kind="stable")
    ranked = id_scores[order]
    return order, np.searchsorted(ranked, ood_scores, "left"), np.searchsorted(ranked, ood_scores, "right")


class Bootstrap:
    """Resamples (R) of one ID set (N samples) and one OOD set (M).

    ID and OOD samples are drawn separately, with replacement, as many as there are. All detectors see the
    same resamples, so their differences can be judged too.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> id_scores, ood_scores = rng.normal(size=500), rng.normal(1.0, size=300)
        >>> low, high = Bootstrap(500, 300).interval(id_scores, ood_scores)
        >>> low < 0.76 < high  # the truth, Phi(1 / sqrt(2))
        True
    """

    def __init__(self, n_id: int, n_ood: int, *, resamples: int = 1000, seed: int = 0) -> None:
        if min(n_id, n_ood, resamples) < 1:
            raise ValueError(f"n_id, n_ood and resamples must be at least 1, got {n_id}, {n_ood}, {resamples}.")
        self.n_id, self.n_ood, self.resamples, self.seed = n_id, n_ood, resamples, seed
        self._kept: list[tuple[np.ndarray, np.ndarray]] | None = None
        if (n_id + n_ood) * resamples * 2 <= _KEEP_BYTES:
            self._kept = list(self._draw())

    def distribution(self, id_scores: np.ndarray, ood_scores: np.ndarray) -> np.ndarray:
        """AUROC of every resample, shape (R,), from ID scores (N,) and OOD scores (M,); ties count half."""
        if id_scores.shape != (self.n_id,) or ood_scores.shape != (self.n_ood,):
            raise ValueError(
                f"scores must have shapes ({self.n_id},) and ({self.n_ood},), "
                f"got {id_scores.shape} and {ood_scores.shape}."
            )
        order, below, reached = _ranks(id_scores, ood_scores)
        ties = not np.array_equal(below, reached)
        areas = []
        for id_times, ood_times in self._draw() if self._kept is None else self._kept:
            # how many resampled ID scores lie below the i-th smallest
            smaller = np.zeros((len(id_times), self.n_id + 1), dtype=np.int32)
            np.cumsum(id_times[:, order], axis=1, dtype=np.int32, out=smaller[:, 1:])
            beaten = smaller[:, below].astype(np.float64)
            if ties:
                beaten = (beaten + smaller[:, reached]) / 2
            areas.append(np.einsum("rm,rm->r", beaten, ood_times))
        return np.concatenate(areas) / (self.n_id * self.n_ood)

    def interval(self, id_scores: np.ndarray, ood_scores: np.ndarray, level: float = 0.95) -> tuple[float, float]:
        """Percentile interval of AUROC, which holds the part ``level`` of the resamples: lower and upper end."""
        tail = (1 - level) / 2
        low, high = np.quantile(self.distribution(id_scores, ood_scores), [tail, 1 - tail])
        return float(low), float(high)

    def _draw(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """How often each sample is in each resample, a chunk of resamples at a time."""
        rng = np.random.default_rng(self.seed)
        for start in range(0, self.resamples, _CHUNK):
            rows = min(_CHUNK, self.resamples - start)
            yield _times(rng, rows, self.n_id), _times(rng, rows, self.n_ood)


def _times(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    chosen = rng.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
    times = np.bincount(chosen.ravel(), minlength=rows * count)
    # uint16 holds every count that can occur in practice; clip instead of wrapping for tiny sets drawn absurdly often
    return times.clip(max=65535).astype(np.uint16).reshape(rows, count)
