"""Seeded, stratified splits and balanced subsets of labelled data."""

import zlib
from collections.abc import Sequence

import numpy as np


def stream(seed: int, *purpose: str) -> np.random.Generator:
    """Random generator of its own for one purpose, so that one draw never shifts another.

    Args:
        seed: the benchmark's seed, >= 0.
        purpose: words that name the draw, such as ``"split"`` or ``"noise", "test"``.

    Returns:
        A generator that depends on the seed and the words only.
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    return np.random.default_rng([seed, *(zlib.crc32(word.encode()) for word in purpose)])


def stratified_split(labels: np.ndarray, fractions: Sequence[float], rng: np.random.Generator) -> list[np.ndarray]:
    """Disjoint parts of a labelled set, each with the classes in the proportions of the whole.

    Args:
        labels: class of each sample, shape (N,).
        fractions: share of each part but the last, which takes the rest; their sum is below 1.
        rng: source of randomness.

    Returns:
        ``len(fractions) + 1`` sorted index arrays.

    Example:
        >>> import numpy as np
        >>> held_out, rest = stratified_split(np.repeat([0, 1], 10), [0.2], np.random.default_rng(0))
        >>> len(held_out), len(rest)
        (4, 16)
    """
    if any(not 0 <= fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
        raise ValueError(f"fractions must be in [0, 1) with a sum below 1, got {list(fractions)}")
    parts: list[list[np.ndarray]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(fractions) * len(members)).astype(int)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) if part else np.empty(0, dtype=np.intp) for part in parts]


def balanced_subset(labels: np.ndarray, limit: int | None, rng: np.random.Generator) -> np.ndarray:
    """At most ``limit`` samples with the classes as even as the data allows.

    Class sizes differ by at most one unless a class runs out of samples.

    Args:
        labels: class of each sample, shape (N,).
        limit: number of samples to keep; None keeps all.
        rng: source of randomness.

    Returns:
        Sorted indices, shape (min(limit, N),).
    """
    if limit is None or limit >= len(labels):
        return np.arange(len(labels))
    order = rng.permutation(len(labels))
    _, shuffled = np.unique(labels[order], return_inverse=True)
    by_class = np.argsort(shuffled, kind="stable")
    counts = np.bincount(shuffled)
    # rank of each sample within its class: keep all of rank 0, then rank 1, ... until the limit
    rank = np.empty(len(labels), dtype=np.intp)
    rank[by_class] = np.concatenate([np.arange(count) for count in counts])
    turn = rng.permutation(len(counts))[shuffled]
    return np.sort(order[np.lexsort((turn, rank))[:limit]])
