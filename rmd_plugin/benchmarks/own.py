"""The user's own data: pictures, texts, embeddings, and features with their classifier."""

import logging
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.nn.utils import skip_init
from tqdm.auto import tqdm

from rmd_plugin import Moments
from rmd_plugin.files import DataFormatError

from .base import Distance, ImageFiles, OODBenchmark, OODSet, Parts, Source, Split, TensorRows, Texts, stream
from .dataset_files import (
    OOD,
    TEST,
    TRAIN,
    VAL,
    check_matrix,
    check_names,
    find_path,
    list_pictures,
    read_columns,
    read_texts,
    read_vectors,
    vector_files,
)

log = logging.getLogger(__name__)

OnBad = Literal["refuse", "skip"]
#: names of an OOD set that mean something else in results
_RESERVED = (TRAIN, VAL, TEST, "mean", "unknown")
# without leading zeros: 7 and 007 are two classes
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(kw_only=True, eq=False, repr=False)
class OwnData(OODBenchmark):
    """Base of the benchmarks that read the user's own files: a subclass gives the items and a table of their rows.

    The classes are those of the training data: in numeric order where all labels are whole numbers, else sorted as
    text. Without test data a part of the training data is held out, stratified by class, and without validation data
    another one. OOD data are optional: a detector is fitted without them.

    Args:
        path: file or folder, relative to the working folder or else to ``data_dir``.
        val_fraction: share of the ID rows held out for validation, if there are no validation data.
        test_fraction: share of the ID rows held out for testing, if there are no test data.
        near: names of OOD sets that count as near-OOD.
        far: names of OOD sets that count as far-OOD; those in neither list have no distance.
    """

    path: str | Path = field(kw_only=False)
    val_fraction: float = 0.1
    test_fraction: float = 0.2
    near: Sequence[str] = ()
    far: Sequence[str] = ()

    #: of the random numbers that split rows
    purpose: ClassVar[str] = "own"

    @abstractmethod
    def read(self) -> tuple[Source[Any], pd.DataFrame]:
        """The items, and a frame of ``label`` (a text) and ``split`` whose index says which item a row is about."""

    def class_order(self, labels: Iterable[str]) -> list[str]:
        """The distinct training labels in the order of the classes."""
        if self._numeric:
            return sorted((label for label in labels if not label.startswith("-")), key=int)
        return sorted(labels)

    def load(self) -> Parts:
        """Read the files, number the classes, split what comes unsplit."""
        source, rows = self.read()
        training = set(rows["label"][rows["split"] == TRAIN])
        if not training:
            raise self._error(f"has no training data; it has {', '.join(rows['split'].unique()) or 'nothing'}")
        self._numeric = all(_WHOLE_NUMBER.fullmatch(label) for label in training)
        names = self.class_order(training)
        splits = {key: self._numbered(source, rows[rows["split"] == key], names) for key in (TRAIN, VAL, TEST)}
        splits = {key: split for key, split in splits.items() if len(split)}

        # rows of a label < 0 are an OOD set, where they can neither be trained on nor decide anything
        mixed = TEST if TEST in splits else TRAIN
        for key, split in splits.items():
            if key != mixed and (split.labels < 0).any():
                raise self._error(f"{key} has labels < 0; OOD rows belong to test or ood")
        oods = {
            str(key).removeprefix(OOD): Split(source, np.zeros(len(group)), group.index.to_numpy())
            for key, group in rows[rows["split"].str.startswith(OOD)].groupby("split")
        }
        outside = splits[mixed].subset(np.flatnonzero(splits[mixed].labels < 0))
        inside = splits[mixed].subset(np.flatnonzero(splits[mixed].labels >= 0))
        if len(outside):
            if "ood" in oods:
                raise self._error("the OOD set 'ood' is given by its split and by labels < 0; keep one of them")
            oods["ood"] = outside
        sets = self._ood_sets(oods)
        if TEST in splits:
            return Parts(names, splits[TRAIN], inside, sets, val=splits.get(VAL), val_fraction=self.val_fraction)
        fractions = [self.test_fraction, 0.0 if VAL in splits else self.val_fraction]
        test, val, train = inside.stratified(fractions, stream(self.seed, self.purpose))
        if len(test) == 0:
            raise self._error(
                f"has too few rows to hold out test_fraction={self.test_fraction} of each class. Add more, or test data"
            )
        return Parts(names, train, test, sets, val=splits.get(VAL, val))

    def _error(self, reason: str) -> DataFormatError:
        return DataFormatError(self.path, reason)

    def _numbered(self, source: Source[Any], rows: pd.DataFrame, names: Sequence[str]) -> Split:
        codes, values = pd.factorize(rows["label"])
        numbers = {name: number for number, name in enumerate(names)}
        if self._numeric:
            numbers |= {value: -1 for value in values if value.startswith("-") and _WHOLE_NUMBER.fullmatch(value)}
        unknown = [value[:60] for value in values if value not in numbers]
        if unknown:
            raise self._error(
                f"{rows['split'].iloc[0]} has {len(unknown)} classes that are not in train: {unknown[:5]}. The classes "
                "are those of the training data; what the network does not know belongs to an OOD set (ood)"
            )
        labels = np.array([numbers[value] for value in values], dtype=np.int64)
        return Split(source, labels[codes], rows.index.to_numpy())

    def _ood_sets(self, oods: dict[str, Split]) -> list[OODSet]:
        tags: dict[str, Distance] = {str(name): "far" for name in self.far}
        tags |= {str(name): "near" for name in self.near}
        for name in oods:
            if name in _RESERVED or "/" in name:
                raise self._error(f"an OOD set cannot be named {name[:60]!r}: rename it")
        wrong = (set(map(str, self.near)) & set(map(str, self.far))) or set(tags) - set(oods)
        if wrong:
            raise ValueError(
                f"near and far name OOD sets, each once, but {', '.join(sorted(wrong))} is none of them or stands in "
                f"both. There are: {', '.join(oods) or 'none'}."
            )
        sets = [OODSet(name, tags.get(name, ""), split) for name, split in sorted(oods.items())]
        return sorted(sets, key=lambda item: ("near", "", "far").index(item.distance))


def without_bad(pictures: ImageFiles, rows: pd.DataFrame, on_bad: str, path: str | Path) -> pd.DataFrame:
    """The rows of pictures that can be read; all are decoded once.

    Raises:
        DataFormatError: with the first bad ones, if these may not be skipped or a class or OOD set has no other.
    """
    if on_bad not in ("refuse", "skip"):
        raise ValueError(f"on_bad must be refuse or skip, got {on_bad!r}")

    def reason(index: int) -> str:
        try:
            pictures[index]
        except (DataFormatError, OSError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        checks = tqdm(pool.map(reason, rows.index), "check pictures", len(rows), leave=False, disable=None)
        reasons = pd.Series(list(checks), index=rows.index)
    bad = reasons[reasons != ""]
    if bad.empty:
        return rows
    summary = (
        f"{len(bad)} of {len(rows)} pictures cannot be read: {'; '.join(bad[:5])}{'; ...' if len(bad) > 5 else ''}"
    )
    if on_bad == "refuse":
        raise DataFormatError(path, f"{summary}. benchmark.on_bad=skip leaves them out")
    good = rows.drop(bad.index)
    for column in ("label", "split"):
        if lost := set(rows[column].dropna()) - set(good[column].dropna()):
            raise DataFormatError(path, f"no picture of {min(lost)!r} can be read. {summary}")
    log.warning("They are left out: %s", summary)
    return good


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(OwnData):
    """Pictures that the user brings, as PIL images in RGB of any size; the backbone's transform makes tensors of them.

    Two layouts are understood:

    1. A folder with ``train/CLASS/**`` and, if there are any, ``val/CLASS/**``, ``test/CLASS/**`` and OOD sets
       ``ood/NAME/**``, read as torchvision's ``ImageFolder`` does: classes sorted by name, files by their ending, in
       folders of any depth. What begins with a dot is passed over.
    2. A CSV, TSV, JSONL or Parquet file with the columns ``path`` (relative to the folder of the file) and ``label``,
       and if you like ``split``: train, val, test, ood or ood:NAME.

    All pictures are decoded once when the benchmark is made, so that none stops a training in the middle; after that a
    picture is read whenever it is used. :func:`rmd_plugin.files.upright_rgb` says how.

    Args:
        on_bad: what to do with pictures that cannot be read: ``refuse`` the data and list them, or list and ``skip``
            them.

    The other options are those of :class:`~rmd_plugin.benchmarks.own.OwnData` and
    :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from rmd_plugin.benchmarks import ImageFolder
        >>> folder = Path(tempfile.mkdtemp())
        >>> for place, colour in (("train/red", "red"), ("train/blue", "blue"), ("ood/green", "green")):
        ...     (folder / place).mkdir(parents=True)
        ...     for number in range(10):
        ...         Image.new("RGB", (16, 16), colour).save(folder / place / f"{number}.png")
        >>> benchmark = ImageFolder(path=folder)
        >>> benchmark, benchmark.class_names
        (ImageFolder(train=14, val=2, test=4, green=10), ['blue', 'red'])
    """

    name = "image_folder"

    on_bad: OnBad = "refuse"

    def read(self) -> tuple[Source[Any], pd.DataFrame]:
        """Find the pictures and check that each can be read."""
        self.path = find_path(self.path, self.data_dir, "folder or table of pictures")
        rows = list_pictures(self.path)
        pictures = ImageFiles(rows["item"].tolist())
        return pictures, without_bad(pictures, rows, self.on_bad, self.path)

    def class_order(self, labels: Iterable[str]) -> list[str]:
        """Names of folders stay texts: torchvision puts 10 before 2, and so do checkpoints trained with it."""
        return sorted(labels) if Path(self.path).is_dir() else super().class_order(labels)


@dataclass(kw_only=True, eq=False, repr=False)
class TextFile(OwnData):
    r"""Texts that the user brings; items are strings, and the backbone's tokenizer makes tensors of them.

    ``path`` is a CSV or TSV file with a line of column names, a JSONL file with an object on each line, or a Parquet
    file; texts in UTF-8. It is one of

    1. one file, in which a column may name the split of each row (train, val, test, ood or ood:NAME); else the ID rows
       are split by seed, and rows of a label < 0 are the OOD set ``ood``;
    2. a folder with a file for each split: ``train.csv``, if there are any ``val.csv``, ``test.csv``, ``ood/NAME.csv``.

    Args:
        text: column or key of the text.
        label: column or key of the class, a text or a whole number; OOD rows need none.
        split: column or key of the split.

    The other options are those of :class:`~rmd_plugin.benchmarks.own.OwnData` and
    :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from rmd_plugin.benchmarks import TextFile
        >>> path = Path(tempfile.mkdtemp(), "tickets.csv")
        >>> lines = ["no light,power,train", "page is slow,network,train", "a joke,,ood:fun"] * 10
        >>> _ = path.write_text("\n".join(["text,label,split", *lines]))
        >>> benchmark = TextFile(path=path)
        >>> benchmark, benchmark.class_names
        (TextFile(train=14, val=2, test=4, fun=10), ['network', 'power'])
    """

    name = "text_file"

    text: str = "text"
    label: str = "label"
    split: str | None = "split"

    def read(self) -> tuple[Source[Any], pd.DataFrame]:
        """Read all texts."""
        self.path = find_path(self.path, self.data_dir, "file or folder of texts")
        rows = read_texts(self.path, self.text, self.label, self.split)
        return Texts(rows["item"].tolist()), rows


@dataclass(kw_only=True, eq=False, repr=False)
class Embeddings(OwnData):
    """Feature vectors that the user brings; items are tensors of shape (D,).

    ``path`` is one of

    1. a file, or a folder of Parquet files, that is one table: a column of it may name the split of each row (train,
       val, test, ood or ood:NAME); else the ID rows are split by seed, and rows of a label < 0 are the OOD set ``ood``;
    2. a folder with one table for each split: ``train.*``, if there are any ``val.*``, ``test.*``, and ``ood/NAME.*``.

    A table is a Parquet or Arrow (IPC) file with these columns, an npz or safetensors file with arrays of these
    names, or an npy file of the features: ``a.npy`` has its labels in ``a.label.npy``.

    Args:
        features: column of lists, or array of shape (N, D); None takes the only one, or else all columns of floats.
        labels: column or array of the labels, whole numbers or texts; OOD rows need none.
        split: column or array of the splits.
        moments: those of the rows of ``train``, if they were read elsewhere (see :func:`rmd_plugin.fit_table`): of the
            tables for each split (2.) that of ``train`` is not read, and the training set are the class means.

    The other options are those of :class:`~rmd_plugin.benchmarks.own.OwnData` and
    :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import tempfile
        >>> import pandas
        >>> from rmd_plugin.benchmarks import Embeddings
        >>> table = pandas.DataFrame({"embedding": [[0.1, 0.2], [0.8, 0.7], [5.0, 5.0]] * 10})
        >>> table["label"] = ["a", "b", None] * 10
        >>> table["split"] = ["train", "train", "ood:odd"] * 8 + ["test", "test", "ood:odd"] * 2
        >>> table.to_parquet(path := tempfile.mkdtemp() + "/table.parquet")
        >>> benchmark = Embeddings(path=path)
        >>> benchmark, benchmark.class_names, benchmark.feature_dim
        (Embeddings(train=14, val=2, test=4, odd=10), ['a', 'b'], 2)

    Attributes:
        feature_dim: number D of features.
    """

    name = "embeddings"

    features: str | None = "embedding"
    labels: str | None = "label"
    split: str | None = "split"
    moments: Moments | None = None
    feature_dim: int = field(init=False, default=0)

    def read(self) -> tuple[Source[Any], pd.DataFrame]:
        """Read all tables."""
        self.path = find_path(self.path, self.data_dir, "file or folder of embeddings")
        files = vector_files(self.path, self.labels, self.split)
        tables = []
        if self.moments is not None:
            means = self.moments.means.float().numpy()
            del files[TRAIN]
            tables.append((means, pd.DataFrame({"label": [str(k) for k in range(len(means))], "split": TRAIN})))
        tables += [read_vectors(file, self.features, self.labels, None, key) for key, file in files.items()]
        if not tables:
            tables = [read_vectors(self.path, self.features, self.labels, self.split)]
        widths = {matrix.shape[1] for matrix, _ in tables}
        if len(widths) > 1:
            raise self._error(f"its tables have different numbers of features: {sorted(widths)}")
        (self.feature_dim,) = widths
        matrix = tables[0][0] if len(tables) == 1 else np.concatenate([matrix for matrix, _ in tables])
        return TensorRows(matrix), pd.concat([rows for _, rows in tables], ignore_index=True)


@dataclass(kw_only=True, eq=False, repr=False)
class Features(OwnData):
    """Feature vectors and labels that the user brings.

    Raw items are float tensors of shape (D,). Two layouts are understood, as arrays of an ``.npz`` or ``.safetensors``
    file, or, for the second, as columns of a ``.parquet`` file or a pair of ``.npy`` files:

    1. Ready splits: ``train_features`` (N, D), ``train_labels`` (N,), ``test_features``, ``test_labels``; if there
       are any, ``val_features`` and ``val_labels``; and OOD sets of shape (M, D) under ``near_NAME`` or
       ``far_NAME``. Rows of the test set with a label < 0 form an OOD set named ``ood``.
    2. One set: ``features`` (N, D) and ``labels`` (N,), a label < 0 meaning OOD. The ID rows are split into train,
       validation and test by seed, stratified by class. ``near_NAME`` and ``far_NAME`` may be added as above.

    OOD data are optional. So is the classifier, by which detectors on logits are judged instead of by a probe: either
    its weights, ``head_weight`` (K, D) and ``head_bias`` (K,), or what it gave, for every array of features the logits
    (N, K) under ``train_logits``, ``val_logits``, ``test_logits`` and ``near_NAME_logits``, or ``logits`` in layout 2.

    Features are real numbers without NaN or infinity; ID labels are the integers ``0..K-1``, each with training
    samples. Arrays of other names are an error. A file is never unpickled.

    Args:
        path: the file, or the ``.npy`` file of the features; relative to the working folder, or else to ``data_dir``.
        labels_path: the ``.npy`` file of the labels, if ``path`` is an ``.npy`` file.
        val_fraction: share of the training rows (layout 1 without validation data) or of all ID rows (layout 2) that
            is held out for validation.
        test_fraction: share of the ID rows held out for testing, in layout 2.
        ood_distance: tag of the set ``ood`` made of rows with a label < 0.
        class_names: names of the classes; None numbers them.
        dtype: ``float32`` or ``float64``, type of the items.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import Features
        >>> rng, path = np.random.default_rng(0), tempfile.mkdtemp() + "/features.npz"
        >>> np.savez(path, features=rng.normal(size=(100, 8)), labels=np.arange(100) % 3 - 1)
        >>> Features(path)
        Features(train=46, val=6, test=14, ood=34)

    Attributes:
        feature_dim: number D of features.
        head: the classifier of the file, or None.
    """

    name = "features"
    purpose = "features"

    labels_path: str | Path | None = None
    ood_distance: Literal["near", "far"] = "near"
    class_names: Sequence[str] | None = None  # type: ignore[assignment]
    dtype: Literal["float32", "float64"] = "float32"
    near: Sequence[str] = field(init=False, default=())
    far: Sequence[str] = field(init=False, default=())
    feature_dim: int = field(init=False, default=0)
    head: nn.Linear | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        names = self.class_names
        super().__post_init__()
        if names is not None:
            if len(names) != self.num_classes:
                raise ValueError(f"{len(names)} class_names for the {self.num_classes} classes")
            self.class_names = list(names)
        shapes = {"head_weight": (self.num_classes, self.feature_dim), "head_bias": (self.num_classes,)}
        if self._logits is not None and self._logits.shape[1] != self.num_classes:
            raise self._error(f"logits and labels must have the same classes; the labels have {self.num_classes}")
        if not shapes.keys() & self._arrays.keys():
            return
        if self._logits is not None:
            raise self._error("has both logits and the head that logits are computed by; keep one of them")
        parts = {name: self._array(name) for name in shapes}
        if any(parts[name].shape != shapes[name] or not np.isfinite(parts[name]).all() for name in shapes):
            raise self._error(f"head_weight and head_bias must be finite and have the shapes {[*shapes.values()]}")
        self.head = skip_init(nn.Linear, self.feature_dim, self.num_classes)  # draws no random numbers
        self.head.load_state_dict({name.removeprefix("head_"): torch.tensor(parts[name]) for name in shapes})
        self.head.to(_DTYPES[self.dtype])

    def logits(self, split: str) -> torch.Tensor | None:
        """Logits of a split of shape (N, K), if the file has them; the splits are those of :meth:`fingerprint`."""
        splits = self._splits()
        indices = splits[split if split in splits else f"ood:{split}"].indices
        return None if self._logits is None else torch.from_numpy(self._logits[indices].astype(np.float32))

    def read(self) -> tuple[Source[Any], pd.DataFrame]:
        """Read the file and check every array."""
        if self.dtype not in _DTYPES or self.ood_distance not in ("near", "far"):
            raise ValueError(f"dtype={self.dtype} is not float32 or float64, or ood_distance={self.ood_distance} wrong")
        self.path = find_path(self.path, self.data_dir, "file of features (.npz, .safetensors, .parquet or .npy)")
        if (self.path.suffix.lower() == ".npy") != (self.labels_path is not None):
            raise ValueError(f"labels_path belongs to an .npy file of features and only there; path is {self.path}")
        self._arrays = read_columns(self.path)
        if self.labels_path is not None:
            labels = find_path(self.labels_path, self.data_dir, "file of labels (.npy)")
            self._arrays |= read_columns(labels, ["labels"])
        check_names(self.path, list(self._arrays))

        # array of features -> array of labels, of logits, and the split
        parts = {"features": ("labels", "logits", TRAIN)}
        if "features" not in self._arrays:
            keys = [key for key in (TRAIN, VAL, TEST) if key != VAL or "val_features" in self._arrays]
            parts = {f"{key}_features": (f"{key}_labels", f"{key}_logits", key) for key in keys}
        tags: dict[str, list[str]] = {"near": [], "far": []}
        for key in self._arrays:
            distance, _, name = key.partition("_")
            if distance in tags and not key.endswith("_logits"):
                parts[key] = "", f"{key}_logits", OOD + name
                tags[distance].append(name)
        matrices, rows = [], []
        for features, (labels_name, _, split) in parts.items():
            matrices.append(check_matrix(self.path, features, self._array(features), self.dtype))
            part = pd.DataFrame({"label": None, "split": [split] * len(matrices[-1])}, dtype=object)
            if labels_name:
                numbers = self._array(labels_name)
                if numbers.shape != (len(part),) or numbers.dtype.kind not in "iu":
                    raise self._error(f"{labels_name!r} must be {len(part)} integers, got {numbers.dtype}")
                part["label"] = numbers.astype(str).astype(object)
                if (numbers < 0).any():
                    tags[self.ood_distance].append("ood")
            rows.append(part)
        if len({matrix.shape[1] for matrix in matrices}) > 1 or not all(map(len, matrices)):
            raise self._error(f"an array is empty or not as wide as the others: {[m.shape for m in matrices]}")
        self.near, self.far, self.feature_dim = tags["near"], tags["far"], matrices[0].shape[1]
        self._logits = None
        if any(name == "logits" or name.endswith("_logits") for name in self._arrays):
            logits = [self._array(name) for _, name, _ in parts.values()]
            if [len(part) for part in logits] != [len(matrix) for matrix in matrices]:
                raise self._error("every array of logits must have the rows of its features")
            self._logits = check_matrix(self.path, "logits", np.concatenate(logits), self.dtype)
        source = TensorRows(matrices[0] if len(matrices) == 1 else np.concatenate(matrices), _DTYPES[self.dtype])
        return source, pd.concat(rows, ignore_index=True)

    def class_order(self, labels: Iterable[str]) -> list[str]:
        """The integers from 0 on, none of them missing: heads and logits have them as columns."""
        names = super().class_order(labels)
        if names != [str(number) for number in range(len(names))]:
            raise self._error(f"training labels must cover 0..K-1, got {names[:10]}. Renumber them")
        return names

    def _array(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            raise self._error(f"has no array {name!r}; it has {', '.join(sorted(self._arrays))}")
        return self._arrays[name]
