"""What every benchmark shares: sources of raw items, splits, limits, the framework's contract, a fingerprint."""

import hashlib
import io
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

import numpy as np
import torch
from PIL import Image
from pytorch_ood.benchmark import Benchmark
from torch import Tensor
from torch.utils.data import Dataset

from rmd_plugin.files import read_picture

OOD_LABEL = -1
Transform = Callable[..., object]
#: of an OOD set from the training data, empty where it is unknown; ``shift`` is no OOD: known classes seen differently
Distance = Literal["near", "far", "shift", ""]

_FINGERPRINT_VERSION = "rmd-benchmark-1"
_HASH_ROWS = 4096
Items = TypeVar("Items")


# -- sources of raw items ---------------------------------------------------------------------------------------------


class Source(ABC, Generic[Items]):
    """Indexable raw items that can feed their content to a hash."""

    #: tensors of this source have passed a transform already, so no other one is put in front of them
    transformed: ClassVar[bool] = False

    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    @abstractmethod
    def __getitem__(self, index: int) -> object: ...

    @abstractmethod
    def chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        """The content of the items at ``indices``, shape (N,): the same whatever the files are that hold them."""


class ArrayRows(Source[np.ndarray]):
    """Rows of one array, shape (N, ...)."""

    kind: ClassVar[str]

    def chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        """Type and shape of a row, then the rows."""
        yield f"{self.kind} {self.items.dtype.str} {self.items.shape[1:]} {len(indices)}\n".encode()
        for start in range(0, len(indices), _HASH_ROWS):
            yield self.items[indices[start : start + _HASH_ROWS]].tobytes()


class ImageRows(ArrayRows):
    """Images as PIL pictures, from a uint8 array of shape (N, H, W, 3).

    Example:
        >>> import numpy as np
        >>> ImageRows(np.zeros((5, 32, 32, 3), np.uint8))[0].size
        (32, 32)
    """

    kind = "image"

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.items[index])


class TensorRows(ArrayRows):
    """Float tensors, from an array of shape (N, ...); converted to ``dtype`` on access.

    Example:
        >>> import numpy as np
        >>> TensorRows(np.eye(3, dtype=np.float32))[1]
        tensor([0., 1., 0.])
    """

    kind = "tensor"

    def __init__(self, rows: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(rows)
        self.dtype = dtype

    def __getitem__(self, index: int) -> Tensor:
        # a copy: rows may be a read-only memory map
        return torch.from_numpy(np.array(self.items[index])).to(self.dtype)

    def chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        """The type of the items, then the rows."""
        yield f"{self.dtype} ".encode()
        yield from super().chunks(indices)


class Texts(Source[Sequence[str]]):
    """Strings.

    Example:
        >>> Texts(["no light", "page is slow"])[1]
        'page is slow'
    """

    def __getitem__(self, index: int) -> str:
        return self.items[index]

    def chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        """The texts in UTF-8, each behind its length."""
        return with_lengths(f"text {len(indices)}", (self.items[index].encode() for index in indices))


class ImageFiles(Source[Any]):
    """Pictures in files, read as :func:`rmd_plugin.files.read_picture` does."""

    def name(self, index: int) -> str:
        """What errors call a picture."""
        return str(self.items[index])

    def content(self, index: int) -> bytes:
        """The file of a picture."""
        return Path(self.items[index]).read_bytes()

    def __getitem__(self, index: int) -> Image.Image:
        return read_picture(io.BytesIO(self.content(index)), self.name(index))

    def chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        """The files, each behind its length."""
        return with_lengths(f"files None {len(indices)}", (self.content(int(index)) for index in indices))


def with_lengths(header: str, contents: Iterable[bytes]) -> Iterator[bytes]:
    """Contents of different lengths for a hash, behind a line on what they are."""
    yield f"{header}\n".encode()
    for content in contents:
        yield f"{len(content)}\n".encode() + content


# -- splits -----------------------------------------------------------------------------------------------------------


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
        numbers = np.asarray(labels).astype(np.int64)
        if (numbers != np.asarray(labels)).any():
            raise ValueError("labels must be whole numbers")
        self.labels = torch.from_numpy(numbers)
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
        indices: list[list[np.ndarray]] = [[np.empty(0, dtype=np.intp)] for _ in range(len(fractions) + 1)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.rint(np.cumsum(fractions) * len(members)).astype(int)
            for part, piece in zip(indices, np.split(members, cuts), strict=True):
                part.append(piece)
        return [self.subset(np.sort(np.concatenate(part))) for part in indices]

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
        content = hashlib.sha256(_FINGERPRINT_VERSION.encode())
        for chunk in self.source.chunks(self.indices):
            content.update(chunk)
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
    distance: Distance  #: how far it is from the training data; empty where that is unknown
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
    oods: list[OODSet]  #: near ones first; ID sets under a covariate shift among them
    val: Split | None = None  #: ID validation samples, if the data has any
    val_fraction: float = 0.0  #: share of ``train`` to hold out where ``val`` is None


def stream(seed: int, *purpose: str) -> np.random.Generator:
    """Random generator of its own for the draw that the words name, so that one draw never shifts another."""
    return np.random.default_rng([seed, *(zlib.crc32(word.encode()) for word in purpose)])


# -- benchmarks -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class OODBenchmark(Benchmark):
    """Base class of the benchmarks of this package, and of your own (see also :func:`as_benchmark`).

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
    distance: dict[str, Distance] = field(init=False)  #: of each OOD set; empty where it is unknown
    test_in: Split = field(init=False)  #: the ID test set
    test_oods: list[Split] = field(init=False)  #: the OOD test sets, in the order of ``ood_names``
    #: ID test sets under a covariate shift, with their labels; they are no OOD and in no list of OOD sets
    shifts: dict[str, Split] = field(init=False)

    def __post_init__(self) -> None:
        for option in fields(self):
            choices = get_args(option.type) if get_origin(option.type) is Literal else ()
            if choices and (value := getattr(self, option.name)) not in choices:
                raise ValueError(f"{option.name} must be one of {', '.join(choices)}; got {value!r}")
        default = self.default_transform()
        self.train_transform = default if self.train_transform is None else self.train_transform
        self.test_transform = default if self.test_transform is None else self.test_transform

        parts = self.load()
        train, val = parts.train, parts.val
        if val is None:
            val, train = train.stratified([parts.val_fraction], stream(self.seed, "validation"))
        if len(train) == 0 or len(parts.test) == 0:
            raise self._error("has no in-distribution samples left to train or test on: too few for the fractions")
        self.class_names = None if parts.class_names is None else list(parts.class_names)
        self.num_classes = int(train.labels.max()) + 1 if self.class_names is None else len(self.class_names)
        classes = set(range(self.num_classes))
        for purpose, split in (("training", train), ("validation", val), ("test", parts.test)):
            labels = set(split.labels.tolist())
            if labels - classes or (split is train and classes - labels):
                raise self._error(
                    f"the {purpose} labels must be 0..{self.num_classes - 1}, each of them in training; unexpected are "
                    f"{sorted(labels - classes)[:10]}, missing are {sorted(classes - labels)[:10]}. Renumber them."
                )
        if self.limit_train is not None and self.limit_train < self.num_classes:
            raise self._error(f"limit_train={self.limit_train} cannot cover the {self.num_classes} classes")
        self._train = self._limited(train, self.limit_train, "train")
        self._val = self._limited(val, self.limit_test, "val")
        self.test_in = self._limited(parts.test, self.limit_test, "test")
        self.distance, self.test_oods, self.shifts = {}, [], {}
        for ood in parts.oods:
            split = self._limited(ood.split, self.limit_test, ood.name)
            if ood.name in (*self.distance, *self.shifts, "train", "val", "test"):
                raise self._error(f"an OOD set cannot be named {ood.name!r}: another split has this name")
            if ood.distance == "shift":
                self.shifts[ood.name] = split
            else:
                self.distance[ood.name] = ood.distance
                split.labels.fill_(OOD_LABEL)
                self.test_oods.append(split)
        self.ood_names = list(self.distance)

    @abstractmethod
    def load(self) -> Parts:
        """The data, read or made. Called once, when the benchmark is constructed."""

    def default_transform(self) -> Transform | None:
        """Transform that takes a raw item to a model input when none is given; None is the identity."""
        return None

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"{self.name}: {reason}")

    def _limited(self, split: Split, limit: int | None, purpose: str) -> Split:
        if limit is not None and limit < 1:
            raise ValueError(f"limit_test must be at least 1, or None for no limit; got {limit}")
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
            raise self._error("holds out no validation data; set val_fraction > 0, and so that a class can spare one")
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
        if not (known or unknown):
            raise ValueError("test_sets needs known=True or unknown=True, both are False")
        if not unknown:
            return [self.test_in]
        return [self.test_in + ood if known else ood for ood in self.test_oods]

    def _splits(self) -> dict[str, Split]:
        """All splits by name: ``train``, ``val``, ``test``, those of ``ood_names`` and of ``shifts``."""
        splits = {"train": self._train, "val": self._val, "test": self.test_in}
        return splits | dict(zip(self.ood_names, self.test_oods, strict=True)) | self.shifts

    def fingerprint(self, split: str | None = None) -> str:
        """Hash of the data itself, for cache keys: raw items and labels, after splits and limits.

        It depends on nothing else: not on transforms, file formats, folders or library versions.

        Args:
            split: ``train``, ``val``, ``test`` or a name of ``ood_names`` or ``shifts``; None covers all of them.
        """
        splits = self._splits()
        if split is not None:
            if split not in splits:
                raise ValueError(f"{self.name} has no split {split!r}; it has {', '.join(splits)}")
            return splits[split].digest()
        kinds = dict.fromkeys(self.ood_names, "ood:") | dict.fromkeys(self.shifts, "shift:")
        digests = [f"{kinds.get(name, '')}{name} {part.digest()}" for name, part in splits.items()]
        return hashlib.sha256("\n".join([_FINGERPRINT_VERSION, self.name, *digests]).encode()).hexdigest()

    def __repr__(self) -> str:
        sizes = [f"{name}={len(split)}" for name, split in self._splits().items()]
        return f"{type(self).__name__}({', '.join(sizes)})"
