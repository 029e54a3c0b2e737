"""Data sets of Hugging Face's ``datasets``: by name, or from a folder that it saved."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rmd_plugin.arrow_columns import Columns, as_objects, is_list, read_matrix
from rmd_plugin.downloads import hub_unavailable
from rmd_plugin.extras import require
from rmd_plugin.pictures import decode_picture, read_content
from rmd_plugin.tables import check_finite, naming
from rmd_plugin.untrusted import one_line

from .errors import DataFormatError, DataNotFoundError
from .own import OOD, TEST, TRAIN, VAL, OnBad, OwnData, Rows, without_bad
from .sources import Source

_BATCH = 1000


@dataclass(kw_only=True, eq=False, repr=False)
class HFDataset(OwnData):
    """Pictures, texts or feature vectors of a data set of ``datasets`` (extra ``hf``).

    What the column of the inputs holds decides what an item is: a PIL image in RGB, a string, or a float tensor of
    shape (D,). No code of a data set is run.

    Args:
        path: name of a data set on the hub, or a folder that ``save_to_disk`` wrote.
        config: which configuration of the data set, if it has several.
        input: column of the inputs; None takes the only one of pictures, else of texts, else of lists of numbers.
        label: column of the classes.
        train: split to train on.
        val: split for validation; without it a part of the training data is held out.
        test: ID test split; without it another part is held out.
        ood: names of splits, or of classes, that are OOD sets. Rows of such a class are neither trained on nor held
            out: the set is those of the test split, or of all rows where there is none.
        on_bad: what to do with pictures that cannot be read: ``refuse`` the data and list them, or list and ``skip``
            them.

    The other options are those of :class:`~rmd_plugin.benchmarks.own.OwnData` and
    :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import tempfile
        >>> import datasets
        >>> from rmd_plugin.benchmarks import HFDataset
        >>> rows = {"text": ["no light", "page is slow", "a joke"] * 10, "label": ["power", "network", "fun"] * 10}
        >>> folder = tempfile.mkdtemp() + "/tickets"
        >>> datasets.DatasetDict(train=datasets.Dataset.from_dict(rows)).save_to_disk(folder)
        >>> HFDataset(path=folder, ood=["fun"])
        HFDataset(train=14, val=2, test=4, fun=10)
    """

    name = "hf_dataset"

    config: str | None = None
    input: str | None = None
    label: str = "label"
    train: str = "train"
    val: str | None = "validation"
    test: str | None = "test"
    ood: Sequence[str] = ()
    on_bad: OnBad = "refuse"

    def read(self) -> Mapping[str, Rows]:
        """Load the splits, and look at every item once."""
        found = _load(str(self.path), self.config)
        usual = {"val": ("validation",), "test": ("test",)}
        chosen = {TRAIN: self.train, VAL: self.val, TEST: self.test}
        wanted = {key: split for key, split in chosen.items() if split is not None}
        for key, split in list(wanted.items()):
            if split not in found:
                if split not in usual.get(key, ()):
                    raise DataFormatError(self.path, f"has no split {split!r}; it has {', '.join(found)}")
                del wanted[key]
        ood_splits = {f"{OOD}{name}": str(name) for name in self.ood if str(name) in found}
        features = found[self.train].features
        column, self._names = self._input(features), getattr(features.get(self.label), "names", None)
        rows = {}
        for key, split in {**wanted, **ood_splits}.items():
            data, where = found[split], Path(str(self.path)) / split
            if column not in data.features:
                raise DataFormatError(where, f"has no column {column!r}; it has {', '.join(data.features)}")
            with naming(where):
                labels = np.zeros(len(data)) if key.startswith(OOD) else self._labels(data, where)
                rows[key] = Rows(_source(data, column, where), labels, where)
        rows = self._without_classes(rows, [str(name) for name in self.ood if str(name) not in found])
        return without_bad(rows, self.on_bad, self.path) if isinstance(rows[TRAIN].source, _Pictures) else rows

    def are_numbers(self, labels: Any) -> bool:
        """Named classes keep the order of the data set."""
        return self._names is not None or super().are_numbers(labels)

    def class_name(self, label: Any) -> str:
        """The name that the data set gives a class, or its label."""
        return str(label) if self._names is None else self._names[label]

    def _input(self, features: Mapping[str, Any]) -> str:
        have = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in features.items())
        if self.input is not None:
            if _kind(features.get(self.input)) is None:
                raise DataFormatError(
                    self.path, f"input={self.input} is no column of pictures, texts or lists of numbers; it has {have}"
                )
            return self.input
        for kind in ("pictures", "texts", "features"):
            columns = [name for name, item in features.items() if _kind(item) == kind and name != self.label]
            if len(columns) == 1:
                return columns[0]
            if columns:
                raise DataFormatError(
                    self.path, f"has several columns of {kind}: {', '.join(columns)}. Give input=NAME"
                )
        raise DataFormatError(self.path, f"has no column of pictures, texts or lists of numbers; it has {have}")

    def _labels(self, data: Any, where: Path) -> np.ndarray:
        if self.label not in data.features:
            raise DataFormatError(where, f"has no column {self.label!r} of labels; it has {', '.join(data.features)}")
        names = getattr(data.features[self.label], "names", None)
        if names != self._names:
            raise DataFormatError(where, f"has the classes {names}, the training data have {self._names}")
        table = data.select_columns([self.label]).with_format("arrow")[:]
        table.validate(full=True)
        values = table[self.label].to_pylist()
        for row, value in enumerate(values):
            unlabelled = value is None or (names is not None and value < 0)
            if unlabelled or isinstance(value, bool) or not isinstance(value, str | int):
                raise DataFormatError(
                    where,
                    f"row {row}: {self.label!r} is {'missing' if unlabelled else repr(value)}; a class is expected. "
                    "Splits without labels can be left out (test=null) or be OOD sets (ood=[...])",
                )
        return as_objects(values)

    def _without_classes(self, rows: dict[str, Rows], names: Sequence[str]) -> dict[str, Rows]:
        """Rows of some classes as OOD sets of their own."""
        known = {self.class_name(label) for label in set(rows[TRAIN].labels)}
        for name in names:
            holder = rows.get(TEST, rows[TRAIN])
            if name not in known | {self.class_name(label) for label in set(holder.labels)}:
                raise DataFormatError(
                    self.path, f"ood={name} is neither a split nor a class; classes are {sorted(known)}"
                )
            places = np.flatnonzero([self.class_name(label) == name for label in holder.labels])
            rows[f"{OOD}{name}"] = Rows(holder.source, np.zeros(len(places)), holder.where, places)
        for key in {TRAIN, VAL, TEST} & set(rows) if names else ():
            kept = np.flatnonzero([self.class_name(label) not in names for label in rows[key].labels])
            rows[key] = Rows(rows[key].source, rows[key].labels[kept], rows[key].where, kept)
        return rows


class _Column(Source[Any]):
    """A column of a data set; pickled, as this is, by the paths of its files."""

    def __init__(self, data: Any, column: str) -> None:
        super().__init__(data.select_columns([column]))
        self.column = column

    def value(self, index: int) -> Any:
        return self.items[int(index)][self.column]


class _Strings(_Column):
    def __getitem__(self, index: int) -> str:
        return str(self.value(index))

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        yield f"text {len(indices)}\n".encode()
        for index in indices:
            content = self[index].encode()
            yield f"{len(content)}\n".encode() + content


class _Vectors(_Column):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.value(index), dtype=torch.float32)

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        width = len(self[indices[0]]) if len(indices) else 0
        yield f"torch.float32 tensor <f4 {(width,)} {len(indices)}\n".encode()
        for index in indices:
            yield self[index].numpy().astype("<f4").tobytes()


class _Pictures(_Column):
    """Encoded pictures; where a row has a path instead, the file must lie in the folder of the data."""

    def __init__(self, data: Any, column: str, where: Path) -> None:
        datasets = _datasets()
        super().__init__(data.cast_column(column, datasets.Image(decode=False)), column)
        self.where = where
        self.roots = [where.absolute().parent, Path(datasets.config.HF_CACHE_HOME)]

    def content(self, index: int) -> tuple[bytes, str]:
        value = self.value(index) or {}
        name = f"{self.where} row {index}"
        if value.get("bytes") is not None:
            return value["bytes"], name
        if not value.get("path"):
            raise DataFormatError(name, "holds no picture")
        path = Path(os.path.normpath(value["path"]))
        if not any(path.is_relative_to(root) for root in self.roots):
            raise DataFormatError(name, f"the picture is {str(path)!r}, outside of the data; others are not read")
        return read_content(path), name

    def __getitem__(self, index: int) -> Image.Image:
        return decode_picture(*self.content(int(index)))

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        yield f"files None {len(indices)}\n".encode()
        for index in indices:
            content, _ = self.content(int(index))
            yield f"{len(content)}\n".encode() + content


def _datasets() -> Any:
    return require("datasets", "hf", needed_by="benchmark=hf_dataset")


def _kind(feature: Any) -> str | None:
    """What a column of this type holds, in words; None if it cannot be an input."""
    if isinstance(feature, _datasets().Image):
        return "pictures"
    with suppress(TypeError, ValueError, AttributeError):
        kind = _datasets().Features({"x": feature}).arrow_schema.field("x").type
        if str(kind) in ("string", "large_string", "string_view") and getattr(feature, "names", None) is None:
            return "texts"
        if is_list(kind):
            return "features"
    return None


def _source(data: Any, column: str, where: Path) -> Source[Any]:
    """The items of a column, texts and numbers looked at once."""
    kind = _kind(data.features[column])
    if kind == "pictures":
        return _Pictures(data, column, where)
    start, width = 0, None
    for table in data.select_columns([column]).with_format("arrow").iter(_BATCH):
        for batch in table.to_batches():
            batch.validate(full=True)  # offsets that lead out of the file would be followed
            if kind == "features":
                matrix = read_matrix(where, start, batch, Columns(table.schema, [column], None, None), width)
                width = check_finite(where, start, matrix).shape[1]
            else:
                texts = batch.column(column).to_pylist()
                empty = [row for row, text in enumerate(texts) if text is None or not text.strip()]
                if empty:
                    raise DataFormatError(where, f"row {start + empty[0]}: {column!r} is missing or empty")
            start += len(batch)
    return _Vectors(data, column) if kind == "features" else _Strings(data, column)


def _load(name: str, config: str | None) -> dict[str, Any]:
    """The splits of a data set: of a saved folder, of the cache, or of the hub if it answers."""
    datasets = _datasets()
    folder = Path(name).expanduser()
    if folder.is_dir():
        try:
            found = datasets.load_from_disk(str(folder))
        except Exception as error:  # whatever the files of somebody else do to it
            raise DataFormatError(folder, f"is no folder that datasets has saved: {one_line(error)[:300]}") from None
        return dict(found) if isinstance(found, datasets.DatasetDict) else {TRAIN: found}
    reason = hub_unavailable()
    try:
        with _offline(datasets) if reason is not None else nullcontext():
            # before version 4 it could run code of the data set
            never = {"trust_remote_code": False} if int(datasets.__version__.split(".")[0]) < 4 else {}
            return dict(datasets.load_dataset(name, config, **never))
    except Exception as error:  # of the client, in many kinds
        cache = datasets.config.HF_DATASETS_CACHE
        raise DataNotFoundError(
            f"no data set {name!r}; looked in: folder {folder.absolute()} (not there); cache {cache} (not there); the "
            f"hub ({reason or one_line(error)[:300]}). Give the path of a folder that datasets has saved."
        ) from None


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Let the client look into its cache only, instead of asking a hub that does not answer again and again."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
