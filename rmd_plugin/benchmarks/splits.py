"""Splits of labelled raw items, and how they are drawn: seeded, stratified, balanced."""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .sources import Source

Transform = Callable[..., object]
#: of an OOD set from the training data, empty where nobody says; ``shift`` is no OOD: known classes seen differently
Distance = Literal["near", "far", "shift", ""]

FINGERPRINT_VERSION = "rmd-benchmark-1"


class Split(Dataset[tuple[object, int]]):
    """Labelled raw items behind a transform.

    Args:
        source: store of raw items.
        labels: label of each item of this split, shape (N,); negative for OOD.
        indices: which items of the source belong to this split, shape (N,); None means all.
        transform: applied to the raw item; None leaves it as it is.

    Example:
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import Split, Texts
        >>> split = Split(Texts(["a", "b", "c", "d"]), np.array([0, 1, 0, 1]), transform=str.upper)
        >>> split[1]
        ('B', 1)
        >>> [len(part) for part in split.stratified([0.5], np.random.default_rng(0))]
        [2, 2]
    """

    def __init__(
        self,
        source: Source[Any],
        labels: np.ndarray | Tensor,
        indices: np.ndarray | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.source = source
        self.indices = np.arange(len(source)) if indices is None else indices
        if len(labels) != len(self.indices):
            raise ValueError(f"{len(labels)} labels for {len(self.indices)} items")
        plain = labels.numpy() if isinstance(labels, Tensor) else labels
        self.labels: Tensor = torch.from_numpy(np.array(plain, dtype=np.int64))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[object, int]:
        item, label = self.raw(index), int(self.labels[index])
        if self.transform is None or (self.source.transformed and isinstance(item, Tensor)):
            return item, label
        return self.transform(item), label

    def raw(self, index: int) -> object:
        """Item as the source holds it, before the transform."""
        return self.source[int(self.indices[index])]

    def with_transform(self, transform: Transform | None) -> "Split":
        """The same items and labels behind another transform."""
        return Split(self.source, self.labels, self.indices, transform)

    def subset(self, chosen: np.ndarray) -> "Split":
        """The samples at positions ``chosen``, shape (M,)."""
        return Split(self.source, self.labels[chosen], self.indices[chosen], self.transform)

    def stratified(self, fractions: Sequence[float], rng: np.random.Generator) -> list["Split"]:
        """Disjoint parts, each with the classes in the proportions of the whole.

        Args:
            fractions: share of each part but the last, which takes the rest; their sum is below 1.
            rng: source of randomness.
        """
        if any(not 0 <= fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
            raise ValueError(f"fractions must be in [0, 1) with a sum below 1, got {list(fractions)}")
        labels = self.labels.numpy()
        parts: list[list[np.ndarray]] = [[np.empty(0, dtype=np.intp)] for _ in range(len(fractions) + 1)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.rint(np.cumsum(fractions) * len(members)).astype(int)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
        return [self.subset(np.sort(np.concatenate(part))) for part in parts]

    def balanced(self, limit: int | None, rng: np.random.Generator) -> "Split":
        """At most ``limit`` samples (None: all), classes as even as the data allows: sizes differ by one at most."""
        if limit is None or limit >= len(self):
            return self
        order = rng.permutation(len(self))
        _, shuffled = np.unique(self.labels.numpy()[order], return_inverse=True)
        by_class = np.argsort(shuffled, kind="stable")
        counts = np.bincount(shuffled)
        # rank of each sample within its class: keep all of rank 0, then rank 1, ... until the limit
        rank = np.empty(len(self), dtype=np.intp)
        rank[by_class] = np.concatenate([np.arange(count) for count in counts])
        turn = rng.permutation(len(counts))[shuffled]
        return self.subset(np.sort(order[np.lexsort((turn, rank))[:limit]]))

    def digest(self) -> str:
        """Hexadecimal hash of the raw items and the labels, in order. The transform does not count."""
        content = hashlib.sha256(FINGERPRINT_VERSION.encode())
        self.source.feed(self.indices, content.update)
        content.update(self.labels.numpy().astype("<i8").tobytes())
        return content.hexdigest()


@dataclass
class OODSet:
    """An OOD test set. Labels of its split only serve to draw a balanced subset; the benchmark labels it ``-1``.

    With the distance ``shift`` it is a set of ID samples under a covariate shift, whose labels are kept.

    Example:
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import OODSet, Split, Texts
        >>> OODSet("jokes", "near", Split(Texts(["a joke"]), np.zeros(1)))
        OODSet(name='jokes', distance='near')
    """

    name: str  #: as it stands in results
    distance: Distance  #: how far it is from the training data; empty where nobody says
    split: Split = field(repr=False)


@dataclass
class Parts:
    """What a benchmark loads, before limits are applied: ID samples for training and testing, and OOD test sets.

    Example:
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import OODSet, Parts, Split, TensorRows
        >>> part = lambda count: Split(TensorRows(np.zeros((count, 4), np.float32)), np.arange(count) % 2)
        >>> parts = Parts(["even", "odd"], part(80), part(20), [OODSet("other", "near", part(10))])
        >>> len(parts.train), parts.oods
        (80, [OODSet(name='other', distance='near')])
    """

    class_names: Sequence[str] | None  #: in the order of the labels; None where the classes have no names
    train: Split
    test: Split
    oods: Sequence[OODSet]  #: near ones first; ID sets under a covariate shift among them
    val: Split | None = None  #: ID validation samples, if the data has any
    val_fraction: float = 0.0  #: share of ``train`` to hold out where ``val`` is None


def stream(seed: int, *purpose: str) -> np.random.Generator:
    """Random generator of its own for the draw that the words name, so that one draw never shifts another."""
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    return np.random.default_rng([seed, *(zlib.crc32(word.encode()) for word in purpose)])
