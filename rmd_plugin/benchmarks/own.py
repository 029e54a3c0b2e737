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

from . import dataset_files as files
from .base import Distance, ImageFiles, OODBenchmark, OODSet, Parts, Source, Split, TensorRows, Texts, stream
from .dataset_files import OOD, TEST, TRAIN, VAL

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
        return sorted(labels, key=int if self._numeric else None)

    def load(self) -> Parts:
        """Read the files, number the classes, split what comes unsplit."""
        source, rows = self.read()
        labels, is_train = rows["label"], rows["split"] == TRAIN
        if not is_train.any():
            raise self._error(f"has no training data; it has {', '.join(rows['split'].unique()) or 'nothing'}")
        self._numeric = all(map(_WHOLE_NUMBER.fullmatch, labels[is_train].unique()))
        # rows of a label < 0 are an OOD set, where they can neither be trained on nor decide anything
        mixed = TEST if TEST in set(rows["split"]) else TRAIN
        if self._numeric:
            negative = labels.str.fullmatch("-[0-9]+", na=False)
            if mixed != TRAIN and (negative & is_train).any():
                raise self._error("train has labels < 0; OOD rows belong to test or ood")
            rows = rows.assign(split=rows["split"].mask(negative & (rows["split"] == mixed), f"{OOD}ood"))
        inside = ~rows["split"].str.startswith(OOD)
        names = self.class_order(labels[inside & is_train].unique())
        numbers = labels.map({name: number for number, name in enumerate(names)}).where(inside, 0)
        if (unknown := rows[numbers.isna()]).size:
            raise self._error(
                f"{unknown['split'].iloc[0]} has labels that are no class of the training data: "
                f"{unknown['label'].unique()[:5].tolist()}. What the network does not know belongs to an OOD set (ood)"
            )
        splits = {
            str(key): Split(source, numbers[group.index], group.index.to_numpy())
            for key, group in rows.groupby("split")
        }
        oods = self._ood_sets({key.removeprefix(OOD): splits[key] for key in splits if key.startswith(OOD)})
        if TEST in splits:
            return Parts(names, splits[TRAIN], splits[TEST], oods, val=splits.get(VAL), val_fraction=self.val_fraction)
        fractions = [self.test_fraction, 0.0 if VAL in splits else self.val_fraction]
        test, val, train = splits[TRAIN].stratified(fractions, stream(self.seed, self.purpose))
        return Parts(names, train, test, oods, val=splits.get(VAL, val))

    def _error(self, reason: str) -> DataFormatError:
        return DataFormatError(self.path, reason)

    def _ood_sets(self, oods: dict[str, Split]) -> list[OODSet]:
        near, far = set(map(str, self.near)), set(map(str, self.far))
        for name in oods:
            if name in _RESERVED or "/" in name:
                raise self._error(f"an OOD set cannot be named {name[:60]!r}: rename it")
        if wrong := near & far or (near | far) - set(oods):
            raise ValueError(
                f"near and far name OOD sets, each once, but {', '.join(sorted(wrong))} is none of them or stands in "
                f"both. There are: {', '.join(oods) or 'none'}."
            )
        tags: dict[str, Distance] = {name: "near" if name in near else "far" for name in near | far}
        sets = [OODSet(name, tags.get(name, ""), split) for name, split in sorted(oods.items())]
        return sorted(sets, key=lambda item: ("near", "", "far").index(item.distance))


def without_bad(pictures: ImageFiles, rows: pd.DataFrame, on_bad: str, path: str | Path) -> pd.DataFrame:
    """The rows of pictures that can be read; all are decoded once.

    Raises:
        DataFormatError: with the first bad ones, if these may not be skipped or a class or OOD set has no other.
    """

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
       folders of any depth. Names that begin with a dot are ignored.
    2. A CSV, TSV, JSONL or Parquet file with the columns ``path`` (relative to the folder of the file) and ``label``,
       and optionally ``split``: train, val, test, ood or ood:NAME.

    All pictures are decoded once when the benchmark is made, so that a damaged one cannot stop the training later;
    afterwards each is read when it is used. :func:`rmd_plugin.files.upright_rgb` says how.

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
        self.path = files.find_path(self.path, self.data_dir, "folder or table of pictures")
        rows = files.list_pictures(self.path)
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
        self.path = files.find_path(self.path, self.data_dir, "file or folder of texts")
        rows = files.read_texts(self.path, self.text, self.label, self.split)
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
        self.path = files.find_path(self.path, self.data_dir, "file or folder of embeddings")
        by_split = files.vector_files(self.path, self.labels, self.split)
        tables = []
        if self.moments is not None:
            means = self.moments.means.float().numpy()
            del by_split[TRAIN]
            tables.append((means, pd.DataFrame({"label": [str(k) for k in range(len(means))], "split": TRAIN})))
        tables += [files.read_vectors(file, self.features, self.labels, None, key) for key, file in by_split.items()]
        if not tables:
            tables = [files.read_vectors(self.path, self.features, self.labels, self.split)]
        matrix, rows = _joined(self.path, tables)
        self.feature_dim = matrix.shape[1]
        return TensorRows(matrix), rows


def _joined(path: Path, tables: Sequence[tuple[np.ndarray, pd.DataFrame]]) -> tuple[np.ndarray, pd.DataFrame]:
    """Feature vectors of shape (N, D) and their rows, of several tables one."""
    with files.naming(path):  # which may be of different widths
        matrix = tables[0][0] if len(tables) == 1 else np.concatenate([matrix for matrix, _ in tables])
    return matrix, pd.concat([rows for _, rows in tables], ignore_index=True)


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

    def load(self) -> Parts:
        """Read the file, with the names of the classes and the classifier."""
        names = self.class_names
        parts = super().load()
        numbers: Any = parts.class_names
        if numbers != [str(number) for number in range(len(numbers))]:
            raise self._error(f"training labels must cover 0..K-1, got {numbers[:10]}. Renumber them")
        if self._logits is not None and self._logits.shape[1] != len(numbers):
            raise self._error(f"logits must be of the {len(numbers)} classes of the labels")
        if "head_weight" in self._arrays or "head_bias" in self._arrays:
            if self._logits is not None:
                raise self._error("has both logits and the head that logits are computed by; keep one of them")
            weights = {name: self._array(f"head_{name}") for name in ("weight", "bias")}
            self.head = skip_init(nn.Linear, self.feature_dim, len(numbers))  # draws no random numbers
            with files.naming(self.path):
                files.check_matrix(self.path, "head", np.column_stack([*weights.values()]))
                self.head.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
            self.head.to(_DTYPES[self.dtype])
        parts.class_names = numbers if names is None else names
        return parts

    def logits(self, split: str) -> torch.Tensor | None:
        """Logits of a split of shape (N, K), if the file has them; the splits are those of :meth:`fingerprint`."""
        indices = self._splits()[split].indices
        return None if self._logits is None else torch.from_numpy(self._logits[indices].astype(np.float32))

    def read(self) -> tuple[Source[Any], pd.DataFrame]:
        """Read the file and check every array."""
        self.path = files.find_path(self.path, self.data_dir, "file of features (.npz, .safetensors, .parquet or .npy)")
        self._arrays = files.read_columns(self.path)
        if self.labels_path is not None:
            labels = files.find_path(self.labels_path, self.data_dir, "file of labels (.npy)")
            self._arrays |= files.read_columns(labels, ["labels"])
        splits = files.feature_arrays(self.path, list(self._arrays))
        oods: dict[str, list[str]] = {"near": [], "far": []}
        tables = []
        for key, features, labels_name, _ in splits:
            matrix = files.check_matrix(self.path, features, self._array(features), self.dtype)
            tables.append((matrix, files.make_rows(self.path, self._arrays, len(matrix), labels_name, None, key)))
            if key.startswith(OOD):
                distance, _, name = features.partition("_")
                oods[distance].append(name)
        matrix, rows = _joined(self.path, tables)
        if rows["label"].str.startswith("-", na=False).any():
            oods[self.ood_distance].append("ood")
        self.near, self.far = oods["near"], oods["far"]
        self._logits = None
        if any(split.logits in self._arrays for split in splits):
            arrays = [self._array(split.logits) for split in splits]
            if [len(array) for array in arrays] != [len(part) for part, _ in tables]:
                raise self._error("every array of logits must have the rows of its features")
            with files.naming(self.path):
                self._logits = files.check_matrix(self.path, "logits", np.concatenate(arrays), self.dtype)
        self.feature_dim = matrix.shape[1]
        return TensorRows(matrix, _DTYPES[self.dtype]), rows

    def _array(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            raise self._error(f"has no array {name!r}; it has {', '.join(sorted(self._arrays))}")
        return self._arrays[name]
