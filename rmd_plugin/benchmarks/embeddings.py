"""The user's own embeddings: tables and arrays of any size, mapped into memory and never loaded whole."""

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm.auto import tqdm

from rmd_plugin.detectors.moments import Moments
from rmd_plugin.tables import ENDINGS, Batch, Layout, Piece, Table

from .errors import DataFormatError
from .own import OOD, TRAIN, OwnData, Rows, find_path, rows_by_split, split_files
from .sources import MappedRows, TensorRows


@dataclass(kw_only=True, eq=False, repr=False)
class Embeddings(OwnData):
    """Feature vectors that the user brings in Parquet, Arrow, npy, npz or safetensors; items are tensors of shape (D,).

    ``path`` is one of

    1. a file, or a folder of Parquet files, that is one table: a column of it may name the split of each row (train,
       val, test, ood or ood:NAME); else the ID rows are split by seed, and rows of a label < 0 are the OOD set ``ood``;
    2. a folder with one table for each split: ``train.*``, if there are any ``val.*``, ``test.*``, and ``ood/NAME.*``.

    :mod:`rmd_plugin.tables` says what a table of each format looks like. Every number is looked at once. Plain numbers
    (npy, npz and safetensors as they are usually saved, unpacked Arrow) are mapped into memory where they lie; others
    are decoded, batch by batch, into a file in ``TMPDIR`` that is removed at the end.

    Args:
        features: column or array of the features; None takes the only column of lists, or else all columns of floats.
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

    def read(self) -> Mapping[str, Rows]:
        """Look at all rows, and find or write what can be mapped."""
        self.path, files = find_tables(self.path, self.data_dir, self.labels, self.split)
        path, found = self.path, {}
        if self.moments is not None:
            means, self.feature_dim = self.moments.means.float().numpy(), self.moments.num_features
            found[TRAIN] = Rows(TensorRows(means), np.arange(len(means)), files.pop(TRAIN))
        if files:
            return found | {key: self._rows(key, *self._scan(file, None)[:2], file) for key, file in files.items()}
        source, labels, splits = self._scan(path, self.split)
        if splits is None and self.split not in (None, "split"):
            raise DataFormatError(path, f"has no column or array {self.split!r} for the splits; split=null needs none")
        places = {TRAIN: np.arange(len(source))} if splits is None else rows_by_split(splits, path)
        return {
            key: self._rows(key, source, None if labels is None else labels[chosen], path, chosen)
            for key, chosen in places.items()
        }

    def _rows(
        self, key: str, source: MappedRows, labels: np.ndarray | None, path: Path, places: np.ndarray | None = None
    ) -> Rows:
        if key.startswith(OOD):
            return Rows(source, np.zeros(len(source) if places is None else len(places)), path, places)
        if labels is None:
            raise DataFormatError(path, f"has no labels: there is no {self.labels!r}. Name their column with labels=")
        if labels.dtype == object:
            missing = np.flatnonzero([label is None for label in labels])
            if len(missing):
                row = missing[0] if places is None else places[missing[0]]
                raise DataFormatError(path, f"row {row} of {key} has no label; only OOD rows can do without")
        return Rows(source, labels, path, places)

    def _scan(self, path: Path, split: str | None) -> tuple[MappedRows, np.ndarray | None, np.ndarray | None]:
        """Items, labels and splits of a table."""
        table = Table(path, self.features, self.labels, split)
        layout = table.layout()
        labels, splits, count = [], [], 0
        with _decoded(None if layout is not None else path) as file:
            for batch in self._batches(table):
                count += len(batch.features)
                labels.append(batch.labels)
                splits.append(batch.splits)
                if file is not None:
                    file.write(batch.features.astype("<f4", copy=False).data)
            if count == 0:
                raise DataFormatError(path, "has no rows")
        if file is None:
            source = MappedRows(layout)  # type: ignore[arg-type]
        else:
            source = MappedRows(Layout("<f4", self.feature_dim, [Piece(file.name, 0, count)]))
            weakref.finalize(source, _remove, file.name, os.getpid())
        return source, _joined(labels), _joined(splits)

    def _batches(self, table: Table) -> Iterator[Batch]:
        with tqdm(desc=f"read {table.path.name}", unit=" rows", leave=False, disable=None) as bar:
            for batch in table.batches():
                if self.feature_dim not in (0, batch.features.shape[1]):
                    raise DataFormatError(
                        batch.path, f"has {batch.features.shape[1]} features, the other tables have {self.feature_dim}"
                    )
                self.feature_dim = batch.features.shape[1]
                bar.update(len(batch.features))
                yield batch


def find_tables(
    path: str | Path, data_dir: str | Path | None, labels: str | None, split: str | None
) -> tuple[Path, dict[str, Path]]:
    """Where embeddings lie, and the table of each split if these have tables of their own."""
    path = find_path(path, data_dir, "file or folder of embeddings")
    files = split_files(path, ENDINGS, folders=True) if path.is_dir() else {}
    beside = tuple(f".{name}" for name in (labels, split) if name)
    return path, {key: file for key, file in files.items() if not (file.suffix == ".npy" and key.endswith(beside))}


@contextmanager
def _decoded(path: Path | None) -> Iterator[IO[bytes] | None]:
    """A file for decoded rows, removed if something goes wrong; None where there is nothing to decode."""
    if path is None:
        yield None
        return
    file = tempfile.NamedTemporaryFile(prefix="rmd-embeddings-", suffix=".f32", delete=False)  # noqa: SIM115
    try:
        with file:
            yield file
    except BaseException:
        os.unlink(file.name)
        raise


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner and os.path.exists(path):  # a worker process that ends leaves it to its parent
        os.unlink(path)


def _joined(parts: list[Any]) -> np.ndarray | None:
    return None if not parts or parts[0] is None else np.concatenate(parts)
