"""The shape every benchmark here shares: splits of raw items, near and far OOD sets, a fingerprint of the data."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pytorch_ood.benchmark import Benchmark
from torch import Tensor
from torch.utils.data import Dataset

from .sources import Source
from .splits import balanced_subset, stratified_split, stream

Transform = Callable[..., object]
Distance = Literal["near", "far"]
Modality = Literal["image", "text", "genomics", "features"]

OOD_LABEL = -1
_FINGERPRINT_VERSION = "rmd-benchmark-1"


class Split(Dataset[tuple[object, int]]):
    """Labelled raw items behind a transform.

    Args:
        source: store of raw items.
        labels: label of each item of this split, shape (N,); negative for OOD.
        indices: which items of the source belong to this split, shape (N,).
        transform: applied to the raw item; None leaves it as it is.

    Attributes:
        labels: labels of shape (N,), int64.
    """

    def __init__(
        self, source: Source, labels: np.ndarray, indices: np.ndarray | None = None, transform: Transform | None = None
    ) -> None:
        self.source = source
        self.indices = np.arange(len(source)) if indices is None else indices
        if len(labels) != len(self.indices):
            raise ValueError(f"{len(labels)} labels for {len(self.indices)} items")
        self.labels: Tensor = torch.from_numpy(np.array(labels, dtype=np.int64))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[object, int]:
        item = self.raw(index)
        return (item if self.transform is None else self.transform(item)), int(self.labels[index])

    def raw(self, index: int) -> object:
        """Item as the source holds it, before the transform."""
        return self.source[int(self.indices[index])]

    def with_transform(self, transform: Transform | None) -> "Split":
        """The same items and labels behind another transform."""
        return Split(self.source, self.labels.numpy(), self.indices, transform)

    def digest(self) -> str:
        """Hexadecimal hash of the raw items and the labels, in order. The transform does not count."""
        content = hashlib.sha256(_FINGERPRINT_VERSION.encode())
        self.source.feed(self.indices, content)
        content.update(self.labels.numpy().astype("<i8").tobytes())
        return content.hexdigest()


@dataclass
class Pool:
    """All samples that a split is drawn from.

    Attributes:
        source: raw items.
        labels: class of each, shape (N,). For OOD data these are the classes of their own source, used only to
            draw balanced subsets.
        indices: which items of the source; None means all.
    """

    source: Source
    labels: np.ndarray
    indices: np.ndarray | None = None

    def subset(self, chosen: np.ndarray) -> "Pool":
        """The samples at positions ``chosen``, shape (M,)."""
        indices = np.arange(len(self.source)) if self.indices is None else self.indices
        return Pool(self.source, self.labels[chosen], indices[chosen])


@dataclass
class OODPool:
    """An OOD test set: its name, how far it is from the training data, and its samples."""

    name: str
    distance: Distance
    pool: Pool = field(repr=False)


class OODBenchmark(Benchmark):
    """Base of this package's benchmarks.

    Data items are ``(x, label)``: labels ``0..K-1`` in-distribution, ``-1`` out-of-distribution. Subclasses load
    their data in ``__init__`` and hand it to :meth:`_assemble`.

    Args:
        data_dir: folder of the data sets; None reads the environment variable ``RMD_DATA_DIR``. Benchmarks that
            need no files ignore it.
        train_transform: applied to raw items of :meth:`train_set`; None is the benchmark's default.
        test_transform: applied to raw items everywhere else; None is the benchmark's default.
        limit_train: keep at most so many training samples, classes balanced.
        limit_test: keep at most so many samples of the validation set, of the ID test set and of each OOD set.
        seed: seed of splits, subsets and generated data.

    Attributes:
        name: name of the benchmark, as in ``benchmark=NAME``.
        modality: kind of raw item: PIL image or tensor (image), str (text), LongTensor (genomics), float tensor
            (features).
        class_names: names of the K classes.
        ood_names: names of the OOD sets, in the order of :meth:`test_sets`.
        distance: OOD set -> ``"near"`` or ``"far"``.
    """

    name: str
    modality: ClassVar[Modality]

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        limit_train: int | None = None,
        limit_test: int | None = None,
        seed: int = 0,
    ) -> None:
        for option, limit in (("limit_train", limit_train), ("limit_test", limit_test)):
            if limit is not None and limit < 1:
                raise ValueError(f"{option} must be at least 1, or None for no limit; got {limit}")
        self.data_dir = data_dir
        self.limit_train = limit_train
        self.limit_test = limit_test
        self.seed = seed
        self.train_transform = train_transform if train_transform is not None else self.default_transform()
        self.test_transform = test_transform if test_transform is not None else self.default_transform()
        self.class_names: list[str] = []
        self.ood_names: list[str] = []
        self.distance: dict[str, Distance] = {}
        self._digests: dict[str, str] = {}

    def default_transform(self) -> Transform | None:
        """Transform that takes a raw item to a model input when none is given; None is the identity."""
        return None

    @property
    def num_classes(self) -> int:
        """Number K of in-distribution classes."""
        return len(self.class_names)

    def _assemble(
        self,
        *,
        class_names: Sequence[str],
        train: Pool,
        test: Pool,
        oods: Iterable[OODPool],
        val: Pool | None = None,
        val_fraction: float = 0.0,
    ) -> None:
        """Make the splits: hold out validation data if there is none, then apply the limits.

        Args:
            class_names: names of the classes, in the order of their labels.
            train: in-distribution training samples.
            test: in-distribution test samples.
            oods: OOD test sets, near ones first.
            val: validation samples of the source, if it has any.
            val_fraction: share of ``train`` to hold out where ``val`` is None.
        """
        self.class_names = list(class_names)
        if val is None:
            held_out, rest = stratified_split(train.labels, [val_fraction], stream(self.seed, "validation"))
            train, val = train.subset(rest), train.subset(held_out)
        self._check_classes(train)
        self._train = self._split(train, self.limit_train, "train")
        self._val = self._split(val, self.limit_test, "val")
        self.test_in = self._split(test, self.limit_test, "test")
        self.test_oods: list[Split] = []
        for ood in oods:
            if ood.name in self.distance:
                raise ValueError(f"two OOD sets are named {ood.name!r}")
            self.ood_names.append(ood.name)
            self.distance[ood.name] = ood.distance
            self.test_oods.append(self._split(ood.pool, self.limit_test, ood.name, ood=True))

    def _check_classes(self, train: Pool) -> None:
        found = np.unique(train.labels)
        expected = np.arange(self.num_classes)
        if not np.array_equal(found, expected):
            missing = np.setdiff1d(expected, found)[:10].tolist()
            extra = np.setdiff1d(found, expected)[:10].tolist()
            raise ValueError(
                f"{self.name}: training labels must cover 0..{self.num_classes - 1}; missing are {missing}, "
                f"unexpected are {extra}"
            )
        if self.limit_train is not None and self.limit_train < self.num_classes:
            raise ValueError(
                f"limit_train={self.limit_train} cannot cover the {self.num_classes} classes of {self.name}; "
                f"use at least {self.num_classes}"
            )

    def _split(self, pool: Pool, limit: int | None, purpose: str, *, ood: bool = False) -> Split:
        chosen = pool.subset(balanced_subset(pool.labels, limit, stream(self.seed, "limit", purpose)))
        labels = np.full(len(chosen.labels), OOD_LABEL) if ood else chosen.labels
        return Split(chosen.source, labels, chosen.indices, self.test_transform)

    def train_set(self) -> Split:
        """In-distribution training samples behind ``train_transform``."""
        return self._train.with_transform(self.train_transform)

    def fit_set(self) -> Split:
        """The samples of :meth:`train_set`, in the same order, behind the clean ``test_transform``."""
        return self._train

    def val_set(self) -> Split:
        """Held-out in-distribution samples, none of them in :meth:`train_set`, behind ``test_transform``.

        Raises:
            ValueError: nothing was held out.
        """
        if len(self._val) == 0:
            raise ValueError(f"{self.name} holds out no validation data; construct it with val_fraction > 0")
        return self._val

    def test_sets(self, known: bool = True, unknown: bool = True) -> list[Dataset]:
        """Test sets by the framework's contract.

        Args:
            known: include in-distribution samples.
            unknown: include OOD samples, labelled ``-1``.

        Returns:
            With both, one data set per entry of ``ood_names``: the ID test set followed by that OOD set. With
            ``unknown`` only, the OOD sets; with ``known`` only, the ID test set, once.

        Raises:
            ValueError: neither is asked for.
        """
        if known and unknown:
            return [self.test_in + ood for ood in self.test_oods]
        if known:
            return [self.test_in]
        if unknown:
            return list(self.test_oods)
        raise ValueError("test_sets needs known=True or unknown=True, both are False")

    def fingerprint(self, split: str | None = None) -> str:
        """Hash of the data itself, for cache keys: raw items and labels, after splits and limits.

        It depends on nothing else: not on transforms, file formats, folders or library versions.

        Args:
            split: ``"train"``, ``"val"``, ``"test"`` or a name of ``ood_names``; None covers all of them.

        Returns:
            64 hexadecimal digits.
        """
        splits = {"train": self._train, "val": self._val, "test": self.test_in}
        splits.update({f"ood:{name}": ood for name, ood in zip(self.ood_names, self.test_oods, strict=True)})
        if split is not None:
            key = split if split in splits else f"ood:{split}"
            if key not in splits:
                raise ValueError(f"{self.name} has no split {split!r}; it has train, val, test, {self.ood_names}")
            return self._digest(key, splits[key])
        parts = [f"{key} {self._digest(key, part)}" for key, part in splits.items()]
        return hashlib.sha256("\n".join([_FINGERPRINT_VERSION, self.name, *parts]).encode()).hexdigest()

    def _digest(self, key: str, split: Split) -> str:
        # the data never changes after construction, and hashing a gigabyte takes a second
        if key not in self._digests:
            self._digests[key] = split.digest()
        return self._digests[key]

    def __repr__(self) -> str:
        sizes = {"train": len(self._train), "val": len(self._val), "test": len(self.test_in)}
        sizes.update({name: len(ood) for name, ood in zip(self.ood_names, self.test_oods, strict=True)})
        return f"{type(self).__name__}({', '.join(f'{name}={size}' for name, size in sizes.items())})"


def as_benchmark(benchmark, *, seed=0, val_fraction=0.1):  # TEMPORARY
    return benchmark
