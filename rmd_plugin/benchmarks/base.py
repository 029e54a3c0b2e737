"""What every benchmark shares: ID and OOD splits, limits, the framework's contract, a fingerprint of the data."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pytorch_ood.benchmark import Benchmark
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from .sources import DatasetItems, Source
from .splits import FINGERPRINT_VERSION, Distance, OODSet, Parts, Split, Transform, stream

OOD_LABEL = -1


@dataclass(kw_only=True, eq=False, repr=False)
class OODBenchmark(Benchmark):
    """Base of this package's benchmarks, and of one's own (see :func:`as_benchmark`).

    Items are ``(x, label)``: labels ``0..K-1`` in-distribution, ``-1`` out-of-distribution. A subclass is a data
    class: its fields are its options, ``name`` is its name, and :meth:`load` returns its data.

    Args:
        data_dir: folder of the data sets; None reads the environment variable ``RMD_DATA_DIR``. Benchmarks that
            need no files ignore it.
        train_transform: applied to raw items of :meth:`train_set`; None is the benchmark's default.
        test_transform: applied to raw items everywhere else; None is the benchmark's default.
        limit_train: keep at most so many training samples, classes balanced.
        limit_test: keep at most so many samples of the validation set, of the ID test set and of each OOD set.
        seed: seed of splits, subsets and generated data.

    Example:
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import OODBenchmark, OODSet, Parts, Split, TensorRows
        >>> class Mine(OODBenchmark):
        ...     name = "mine"
        ...
        ...     def load(self) -> Parts:
        ...         part = lambda count: Split(TensorRows(np.zeros((count, 4), np.float32)), np.arange(count) % 2)
        ...         return Parts(["even", "odd"], part(80), part(20), [OODSet("other", "near", part(10))], val=part(8))
        >>> Mine(limit_train=50)
        Mine(train=50, val=8, test=20, other=10)
    """

    name: ClassVar[str]  #: as in ``benchmark=NAME``

    data_dir: str | Path | None = None
    train_transform: Transform | None = None
    test_transform: Transform | None = None
    limit_train: int | None = None
    limit_test: int | None = None
    seed: int = 0

    num_classes: int = field(init=False)
    class_names: list[str] | None = field(init=False)
    ood_names: list[str] = field(init=False)  #: in the order of :meth:`test_sets`
    distance: dict[str, Distance] = field(init=False)  #: of each OOD set; an empty text where nobody says
    test_in: Split = field(init=False)  #: the ID test set
    test_oods: list[Split] = field(init=False)  #: the OOD test sets, in the order of ``ood_names``
    #: ID test sets under a covariate shift, with their labels; they are no OOD and in no list of OOD sets
    shifts: dict[str, Split] = field(init=False)

    def __post_init__(self) -> None:
        for option, limit in (("limit_train", self.limit_train), ("limit_test", self.limit_test)):
            if limit is not None and limit < 1:
                raise ValueError(f"{option} must be at least 1, or None for no limit; got {limit}")
        if self.train_transform is None:
            self.train_transform = self.default_transform()
        if self.test_transform is None:
            self.test_transform = self.default_transform()

        parts = self.load()
        train, val = parts.train, parts.val
        if val is None:
            val, train = train.stratified([parts.val_fraction], stream(self.seed, "validation"))
        if len(train) == 0 or len(parts.test) == 0:
            raise self._error("has no in-distribution samples left to train or test on")
        self.class_names = None if parts.class_names is None else list(parts.class_names)
        self.num_classes = int(train.labels.max()) + 1 if self.class_names is None else len(self.class_names)
        self._check_labels(train, val, parts.test)
        self._train = self._limited(train, self.limit_train, "train")
        self._val = self._limited(val, self.limit_test, "val")
        self.test_in = self._limited(parts.test, self.limit_test, "test")
        names = [ood.name for ood in parts.oods]
        if len(set(names)) < len(names):
            raise self._error(f"two OOD sets have the same name: {sorted(names)}")
        oods = [ood for ood in parts.oods if ood.distance != "shift"]
        self.ood_names = [ood.name for ood in oods]
        self.distance = {ood.name: ood.distance for ood in oods}
        self.shifts = {
            ood.name: self._limited(ood.split, self.limit_test, ood.name)
            for ood in parts.oods
            if ood.distance == "shift"
        }
        self.test_oods = []
        for ood in oods:
            chosen = self._limited(ood.split, self.limit_test, ood.name)
            labels = np.full(len(chosen), OOD_LABEL)
            self.test_oods.append(Split(chosen.source, labels, chosen.indices, self.test_transform))

    @abstractmethod
    def load(self) -> Parts:
        """The data, read or made. Called once, when the benchmark is constructed."""

    def default_transform(self) -> Transform | None:
        """Transform that takes a raw item to a model input when none is given; None is the identity."""
        return None

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"{self.name}: {reason}")

    def _check_labels(self, train: Split, val: Split, test: Split) -> None:
        last = self.num_classes - 1
        found = np.unique(train.labels)
        # the first gaps lie among the first numbers, and labels may be large
        missing = np.setdiff1d(np.arange(min(self.num_classes, len(found) + 10)), found)[:10].tolist()
        extra = found[(found < 0) | (found > last)][:10].tolist()
        if missing or extra:
            raise self._error(
                f"training labels must cover 0..{last}; missing are {missing}, unexpected are {extra}. Renumber them."
            )
        for part, labels in (("validation", val.labels), ("test", test.labels)):
            if len(labels) and not 0 <= labels.min() <= labels.max() <= last:
                got = f"{labels.min()}..{labels.max()}"
                raise self._error(f"the {part} labels must lie in 0..{last} as in training, got {got}")
        if self.limit_train is not None and self.limit_train < self.num_classes:
            raise ValueError(
                f"limit_train={self.limit_train} cannot cover the {self.num_classes} classes of {self.name}; "
                f"use at least {self.num_classes}"
            )

    def _limited(self, split: Split, limit: int | None, purpose: str) -> Split:
        return split.balanced(limit, stream(self.seed, "limit", purpose)).with_transform(self.test_transform)

    def train_set(self) -> Split:
        """ID training samples behind ``train_transform``."""
        return self._train.with_transform(self.train_transform)

    def fit_set(self) -> Split:
        """The samples of :meth:`train_set`, in the same order, behind the clean ``test_transform``."""
        return self._train

    def val_set(self) -> Split:
        """Held-out ID samples behind ``test_transform``, none of them in :meth:`train_set`; ValueError without any."""
        if len(self._val) == 0:
            raise ValueError(
                f"{self.name} holds out no validation data; construct it with val_fraction > 0, and so large that a "
                "class has a sample to spare"
            )
        return self._val

    def test_sets(self, known: bool = True, unknown: bool = True) -> list[Dataset]:
        """Test sets by the framework's contract.

        Args:
            known: include ID samples.
            unknown: include OOD samples, labelled ``-1``.

        Returns:
            With both, one data set per entry of ``ood_names``: the ID test set followed by that OOD set. With
            ``unknown`` only, the OOD sets; with ``known`` only, the ID test set, once.
        """
        if known and unknown:
            return [self.test_in + ood for ood in self.test_oods]
        if known:
            return [self.test_in]
        if unknown:
            return list(self.test_oods)
        raise ValueError("test_sets needs known=True or unknown=True, both are False")

    def _splits(self) -> dict[str, Split]:
        found = {"train": self._train, "val": self._val, "test": self.test_in}
        found |= {f"ood:{name}": split for name, split in zip(self.ood_names, self.test_oods, strict=True)}
        return found | {f"shift:{name}": split for name, split in self.shifts.items()}

    def fingerprint(self, split: str | None = None) -> str:
        """Hash of the data itself, for cache keys: raw items and labels, after splits and limits.

        It depends on nothing else: not on transforms, file formats, folders or library versions.

        Args:
            split: ``"train"``, ``"val"``, ``"test"`` or a name of ``ood_names`` or ``shifts``; None covers all of them.
        """
        splits = self._splits()
        if split is not None:
            for key in (split, f"ood:{split}", f"shift:{split}"):
                if key in splits:
                    return splits[key].digest()
            others = [*self.ood_names, *self.shifts]
            raise ValueError(f"{self.name} has no split {split!r}; it has train, val, test, {others}")
        parts = [f"{key} {part.digest()}" for key, part in splits.items()]
        return hashlib.sha256("\n".join([FINGERPRINT_VERSION, self.name, *parts]).encode()).hexdigest()

    def __repr__(self) -> str:
        sizes = [f"{name.partition(':')[2] or name}={len(split)}" for name, split in self._splits().items()]
        return f"{type(self).__name__}({', '.join(sizes)})"


def as_benchmark(benchmark: Benchmark, *, seed: int = 0, val_fraction: float = 0.1) -> OODBenchmark:
    """Any benchmark of the framework, with the interface of :class:`OODBenchmark`.

    These are the two ways to bring data of one's own: a subclass of :class:`OODBenchmark` (below), which has
    everything, or any ``pytorch_ood.benchmark.Benchmark``, which is wrapped. Of the latter, ``val_set()``,
    ``class_names`` and ``distance`` (OOD set -> ``near``, ``far`` or ``shift``) are used where they exist, and what the
    framework's own benchmarks say of near, far and covariate-shifted sets. Without a ``val_set`` a part of the training
    set is held out, stratified by class. A backbone's transform is put in front of items that are no tensors, such as
    PIL images; tensors come from a transform of the data set's own and stay as they are.

    Args:
        benchmark: the benchmark; an :class:`OODBenchmark` is returned as it is.
        seed: seed of the held-out part.
        val_fraction: share of the training set to hold out.

    Raises:
        TypeError: it is no benchmark.
        ValueError: the training labels are not ``0..K-1``, or the OOD sets do not match ``ood_names``.

    Example:
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import OODBenchmark, OODSet, Parts, Split, TensorRows
        >>> class Shifted(OODBenchmark):
        ...     name = "shifted"
        ...
        ...     def load(self) -> Parts:
        ...         draw = lambda n, mean: np.random.default_rng(self.seed).normal(mean, size=(n, 4))
        ...         train, test = (Split(TensorRows(draw(n, 0)), np.arange(n) % 2) for n in (80, 20))
        ...         ood = Split(TensorRows(draw(20, 5)), np.zeros(20))
        ...         return Parts(["even", "odd"], train, test, [OODSet("moved", "far", ood)], val_fraction=0.1)
        >>> benchmark = Shifted(seed=1)
        >>> benchmark
        Shifted(train=72, val=8, test=20, moved=20)
        >>> as_benchmark(benchmark) is benchmark
        True
    """
    if isinstance(benchmark, OODBenchmark):
        return benchmark
    missing = [name for name in ("train_set", "test_sets", "ood_names") if not hasattr(benchmark, name)]
    if missing:
        raise TypeError(
            f"a {type(benchmark).__name__} is no benchmark, it lacks {', '.join(missing)}. Subclass "
            "rmd_plugin.benchmarks.OODBenchmark or pytorch_ood.benchmark.Benchmark."
        )
    return _Wrapped(benchmark=benchmark, seed=seed, val_fraction=val_fraction)


@dataclass(kw_only=True, eq=False, repr=False)
class _Wrapped(OODBenchmark):
    """A benchmark of the framework behind the interface of ours."""

    benchmark: Benchmark
    val_fraction: float = 0.1

    def load(self) -> Parts:
        self.name = str(getattr(self.benchmark, "name", type(self.benchmark).__name__))  # type: ignore[misc]
        return framework_parts(self.benchmark, val_fraction=self.val_fraction)


def framework_parts(
    benchmark: Benchmark,
    *,
    val_fraction: float,
    source: Callable[[Dataset[Any]], Source[Any]] = DatasetItems,
) -> Parts:
    """The sets of a benchmark of the framework.

    Args:
        benchmark: the benchmark.
        val_fraction: share of the training set to hold out where the benchmark has no ID validation data.
        source: how raw items are taken from its data sets.
    """
    kind = type(benchmark).__name__
    data: Any = benchmark  # the framework declares neither ood_names nor what we may find besides
    (test,) = data.test_sets(known=True, unknown=False)
    oods = data.test_sets(known=False, unknown=True)
    if len(data.ood_names) != len(oods):
        raise ValueError(f"{kind} has {len(oods)} OOD sets but {len(data.ood_names)} ood_names: {data.ood_names}")
    tags = _distances(data)
    train = _labelled(data.train_set(), source)
    classes = getattr(data, "class_names", getattr(data.train_set(), "classes", None))
    if classes is not None and len(classes) != int(train.labels.max()) + 1:
        classes = None
    # of OpenOOD's, whose validation_set() has OOD samples too
    val = data.val_set() if hasattr(data, "val_set") else getattr(data, "val_in", None)
    return Parts(
        class_names=classes,
        train=train,
        test=_labelled(test, source),
        val=None if val is None else _labelled(val, source),
        # OOD sets need no labels of their own, which saves a pass over them
        oods=[
            OODSet(name, tags.get(name, ""), Split(source(ood), _shift_labels(ood, tags.get(name, ""))))
            for name, ood in zip(data.ood_names, oods, strict=True)
        ],
        val_fraction=val_fraction,
    )


def _distances(benchmark: Any) -> dict[str, Distance]:
    """What a benchmark says about its sets; the framework's own say it in three ways."""
    if hasattr(benchmark, "distance"):
        return dict(benchmark.distance)
    found: dict[str, Distance] = {}
    if hasattr(benchmark, "_test_easy"):  # of the Semantic Shift Benchmark, Easy the least like the ID classes
        found |= {"Hard": "near", "Easy": "far"}
    kinds: tuple[tuple[Distance, str], ...] = (
        ("near", "_near_ood"), ("far", "_far_ood"), ("near", "near_ood_names"), ("far", "far_ood_names"),
        ("shift", "cs_id_names"),
    )  # fmt: skip
    return found | {name: distance for distance, attribute in kinds for name in getattr(benchmark, attribute, ())}


def _shift_labels(dataset: Any, distance: Distance) -> np.ndarray | Tensor:
    """Labels of an ID set under a covariate shift, which the framework's benchmarks hide behind -1; else zeros."""
    if distance != "shift":
        return np.zeros(len(dataset))
    kept = getattr(dataset, "labels", None)
    return _labelled(dataset).labels if kept is None else np.asarray(kept)


def _labelled(dataset: Dataset[Any], source: Callable[[Dataset[Any]], Source[Any]] = DatasetItems) -> Split:
    labels = _stored_labels(dataset)
    if labels is None:
        try:
            labels = np.array([int(dataset[index][1]) for index in range(len(dataset))])  # type: ignore[arg-type]
        except (TypeError, ValueError, LookupError) as error:
            kind = type(dataset).__name__
            raise ValueError(f"items of a {kind} must be (x, label) with a whole number as label: {error}") from error
    return Split(source(dataset), labels)


def _stored_labels(dataset: Any) -> np.ndarray | None:
    """Labels that a data set keeps besides its items, which saves loading them all; None if there are none."""
    if isinstance(dataset, Subset):
        labels = _stored_labels(dataset.dataset)
        return None if labels is None else labels[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [_stored_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    kept = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else getattr(dataset, "targets", None)
    pairs = getattr(dataset, "data", None)
    try:
        if kept is None and isinstance(pairs, list):  # of files and labels, as the Semantic Shift Benchmark has them
            kept = [label for _, label in pairs]
        labels = np.asarray(getattr(dataset, "labels", None) if kept is None else kept)
        # a target_transform, say, makes them differ from what the data set gives
        some = {0, len(dataset) // 2, len(dataset) - 1}
        same = labels.shape == (len(dataset),) and all(int(dataset[i][1]) == labels[i] for i in some)
    except (TypeError, ValueError, LookupError):
        return None
    return labels.astype(np.int64) if same else None
