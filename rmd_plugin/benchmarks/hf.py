"""Data sets of Hugging Face's ``datasets``: by name, or from a folder that it saved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin.files import DataFormatError, require

from .base import ImageFiles, Source, TensorRows, Texts
from .dataset_files import OOD, TEST, TRAIN, VAL, DataNotFoundError, check_matrix, check_texts, make_rows, naming
from .own import OnBad, OwnData, without_bad


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

    def read(self) -> tuple[Source[Any], pd.DataFrame]:
        """Load the splits, and look at every item once."""
        splits = _load(str(self.path), self.config)
        chosen = {TRAIN: self.train, VAL: self.val, TEST: self.test}
        for name, usual in zip(chosen.values(), (None, "validation", "test"), strict=True):
            if name not in (None, usual, *splits):
                raise self._error(f"has no split {name!r}; it has {', '.join(splits)}")
        chosen |= {OOD + str(name): str(name) for name in self.ood}
        keys = {key: name for key, name in chosen.items() if name in splits}
        features = splits[self.train].features
        column, kind = self._input(features)
        self._names = getattr(features.get(self.label), "names", None)
        rows = pd.concat([self._rows(key, splits[name]) for key, name in keys.items()], ignore_index=True)
        datasets = require("datasets", "hf")
        with naming(self.path):
            data = datasets.concatenate_datasets([splits[name].select_columns([column]) for name in keys.values()])
            source: Source[Any]
            if kind == "pictures":
                source = _Pictures(data.cast_column(column, datasets.Image(decode=False)), self.path)
                rows = without_bad(source, rows, self.on_bad, self.path)
            elif kind == "texts":
                source = Texts(list(data[column]))
                check_texts(self.path, column, source.items)
            else:
                numbers = np.asarray(data.with_format("numpy")[column][:])
                source = TensorRows(check_matrix(self.path, column, numbers).astype(np.float32))
        return source, self._ood_classes(rows, [str(name) for name in self.ood if str(name) not in splits])

    def class_order(self, labels: Iterable[str]) -> list[str]:
        """Named classes keep the order of the data set."""
        return super().class_order(labels) if self._names is None else sorted(labels, key=self._names.index)

    def _input(self, features: Any) -> tuple[str, str]:
        """The column of the inputs, and what it holds."""
        kinds = {name: _kind(item) for name, item in features.items() if name != self.label or name == self.input}
        shown = ", ".join(f"{name} ({type(item).__name__})" for name, item in features.items())
        for kind in ("pictures", "texts", "features"):
            columns = [name for name in kinds if kinds[name] == kind and self.input in (None, name)]
            if len(columns) > 1:
                raise self._error(f"has several columns of {kind}: {', '.join(columns)}. Set benchmark.input=NAME")
            if columns:
                return columns[0], kind
        wanted = "" if self.input is None else f" {self.input!r}"
        raise self._error(f"has no column{wanted} of pictures, texts or lists of numbers; it has {shown}")

    def _rows(self, key: str, data: Any) -> pd.DataFrame:
        """Labels and split of the rows of a split."""
        if key.startswith(OOD):
            return pd.DataFrame({"label": None, "split": [key] * len(data)})
        if self.label not in data.features or getattr(data.features[self.label], "names", None) != self._names:
            raise self._error(f"{key} has no column {self.label!r} of labels, or other classes than {self._names}")
        values = list(data[self.label])
        if self._names is not None:  # -1 stands for a label that is kept secret
            values = [self._names[value] if value is not None and value >= 0 else None for value in values]
        return make_rows(self.path, {"label": values}, len(values), "label", None, key)

    def _ood_classes(self, rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
        """Make rows of some classes OOD sets of their own: those of the test split, or of all where there is none."""
        holder = TEST if (rows["split"] == TEST).any() else TRAIN
        for name in names:
            is_class = (rows["label"] == name) & ~rows["split"].str.startswith(OOD)
            if not is_class.any():
                known = sorted(rows["label"].dropna().unique())
                raise self._error(f"benchmark.ood={name} is neither a split nor a class; classes are {known}")
            rows.loc[is_class & (rows["split"] == holder), "split"] = OOD + name
            rows = rows[~(is_class & (rows["split"] != OOD + name))]
        return rows


class _Pictures(ImageFiles):
    """A column of encoded pictures."""

    def __init__(self, data: Any, path: str | Path) -> None:
        super().__init__(data)
        (self.column,), self.path = data.column_names, path

    def name(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def content(self, index: int) -> bytes:
        value = self.items[int(index)][self.column]
        if not value or not (value["bytes"] or value["path"]):
            raise DataFormatError(self.name(index), "holds no picture")
        return value["bytes"] or Path(value["path"]).read_bytes()


def _kind(feature: Any) -> str | None:
    """What a column of this type holds, in words; None if it cannot be an input."""
    datasets = require("datasets", "hf")
    if isinstance(feature, datasets.Image):
        return "pictures"
    if getattr(feature, "dtype", None) in ("string", "large_string"):
        return "texts"
    inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) else None)
    return "features" if getattr(inner, "dtype", "").startswith(("float", "int", "uint")) else None


def _load(name: str, config: str | None) -> dict[str, Any]:
    """The splits of a data set: of a saved folder, of the cache, or of the hub."""
    datasets = require("datasets", "hf", needed_by="benchmark=hf_dataset")
    folder = Path(name).expanduser()
    if folder.is_dir():
        with naming(folder):
            saved = datasets.load_from_disk(str(folder))
        return dict(saved) if isinstance(saved, datasets.DatasetDict) else {TRAIN: saved}
    try:
        # before version 4 it could run code of the data set
        never = {"trust_remote_code": False} if int(datasets.__version__.split(".")[0]) < 4 else {}
        return dict(datasets.load_dataset(name, config, **never))
    except Exception as error:  # of the client, in many kinds
        raise DataNotFoundError(
            f"no data set {name!r}: looked for the folder {folder.absolute()}, in the cache of datasets and on the hub "
            f"({' '.join(str(error).split())[:300]}). Give the path of a folder that datasets has saved."
        ) from error
