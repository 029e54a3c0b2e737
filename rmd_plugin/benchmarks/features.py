"""The user's own features and labels, from a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from .base import Distance, Modality, OODBenchmark, OODPool, Pool, Transform
from .errors import DataFormatError, DataNotFoundError
from .files import DATA_DIR_VARIABLE, read_npy, read_npz, read_pt, resolve_data_dir
from .sources import TensorRows
from .splits import stratified_split, stream

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHECK_ROWS = 65_536
Arrays = dict[str, np.ndarray]


class Features(OODBenchmark):
    """Feature vectors and labels that the user brings.

    Raw items are float tensors of shape (D,). Two layouts are understood, in an ``.npz`` file, in a ``.pt`` file
    (a dict of tensors), or, for the second, in a pair of ``.npy`` files:

    1. Ready splits: ``train_features`` (N, D), ``train_labels`` (N,), ``test_features``, ``test_labels``; if there
       are any, ``val_features`` and ``val_labels``; and OOD sets of shape (M, D) under ``near_NAME`` or
       ``far_NAME``. Rows of the test set with a label < 0 form an OOD set named ``ood``.
    2. One set: ``features`` (N, D) and ``labels`` (N,), a label < 0 meaning OOD. The in-distribution rows are
       split into train, validation and test by seed, stratified by class. ``near_NAME`` and ``far_NAME`` may be
       added as above.

    Features are real numbers without NaN or infinity; in-distribution labels are the integers ``0..K-1``, each
    with training samples. A file is never unpickled.

    Args:
        path: the ``.npz`` or ``.pt`` file, or the ``.npy`` file of the features; relative to the working folder,
            or else to ``data_dir``.
        labels_path: the ``.npy`` file of the labels, if ``path`` is an ``.npy`` file.
        data_dir: where a relative path is looked for if it is not in the working folder; None reads
            ``RMD_DATA_DIR``.
        train_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        test_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_train: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_test: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        seed: seed of the split of layout 2 and of the subsets.
        val_fraction: share of the training rows (layout 1 without validation data) or of all in-distribution rows
            (layout 2) that is held out for validation.
        test_fraction: share of the in-distribution rows held out for testing, in layout 2.
        ood_distance: tag of the set ``ood`` made of rows with a label < 0.
        class_names: names of the classes; None numbers them.
        dtype: ``float32`` or ``float64``, type of the items.
    """

    name = "features"
    modality: ClassVar[Modality] = "features"

    def __init__(
        self,
        path: str | Path,
        *,
        labels_path: str | Path | None = None,
        data_dir: str | Path | None = None,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        limit_train: int | None = None,
        limit_test: int | None = None,
        seed: int = 0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        ood_distance: Distance = "near",
        class_names: Sequence[str] | None = None,
        dtype: Literal["float32", "float64"] = "float32",
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            train_transform=train_transform,
            test_transform=test_transform,
            limit_train=limit_train,
            limit_test=limit_test,
            seed=seed,
        )
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be float32 or float64, got {dtype!r}")
        if ood_distance not in ("near", "far"):
            raise ValueError(f"ood_distance must be 'near' or 'far', got {ood_distance!r}")
        self.path = _find(path, data_dir)
        arrays = _load(self.path, None if labels_path is None else _find(labels_path, data_dir))
        checked = _Checked(self.path, arrays, _DTYPES[dtype])

        held_out: Pool | None
        if "features" in arrays:
            everything = checked.pool("features", "labels")
            known = np.flatnonzero(everything.labels >= 0)
            if not test_fraction > 0:
                raise ValueError(f"test_fraction must be above 0, got {test_fraction}")
            parts = stratified_split(everything.labels[known], [test_fraction, val_fraction], stream(seed, "features"))
            test, val, train = (everything.subset(known[part]) for part in parts)
            mixed, held_out = everything, val
        else:
            train, mixed = checked.pool("train_features", "train_labels"), checked.pool("test_features", "test_labels")
            if len(train.labels) and train.labels.min() < 0:
                raise DataFormatError(self.path, "train_labels has labels < 0; OOD samples must not be trained on")
            test = mixed.subset(np.flatnonzero(mixed.labels >= 0))
            held_out = checked.pool("val_features", "val_labels") if "val_features" in arrays else None

        negative = np.flatnonzero(mixed.labels < 0)
        oods = [OODPool("ood", ood_distance, mixed.subset(negative))] if len(negative) else []
        oods += checked.ood_sets()
        names = [ood.name for ood in oods]
        if len(set(names)) < len(names):
            raise DataFormatError(self.path, f"two OOD sets have the same name: {sorted(names)}")
        if not oods:
            raise DataFormatError(
                self.path, "has no OOD samples: neither labels < 0 nor arrays named near_NAME or far_NAME"
            )
        if len(train.labels) == 0 or len(test.labels) == 0:
            raise DataFormatError(self.path, "has no in-distribution samples (labels >= 0) left to train or test on")
        count = int(train.labels.max()) + 1
        checked.check_labels(train, count, "train")
        for part, pool in (("test", test), ("val", held_out)):
            if pool is not None:
                checked.check_labels(pool, count, part)
        if class_names is not None and len(class_names) != count:
            raise ValueError(f"{len(class_names)} class_names for the {count} classes of {self.path}")
        self._assemble(
            class_names=list(class_names) if class_names is not None else [str(label) for label in range(count)],
            train=train,
            val=held_out,
            test=test,
            oods=oods,
            val_fraction=val_fraction,
        )
        self.feature_dim = checked.dim


def _find(path: str | Path, data_dir: str | Path | None) -> Path:
    path = Path(path).expanduser()
    if path.is_file():
        return path
    looked = [str(path)]
    if not path.is_absolute():
        try:
            inside = resolve_data_dir(data_dir, str(path)) / path
        except DataNotFoundError:
            looked.append(f"no data folder, {DATA_DIR_VARIABLE} is not set")
        else:
            if inside.is_file():
                return inside
            looked.append(str(inside))
    raise DataNotFoundError(f"no file of features: looked for {'; '.join(looked)}. Pass path=FILE (.npz, .pt or .npy).")


def _load(path: Path, labels_path: Path | None) -> Arrays:
    suffix = path.suffix.lower()
    if (suffix == ".npy") != (labels_path is not None):
        raise ValueError(f"labels_path belongs to an .npy file of features and only there; path is {path}")
    if labels_path is not None:
        return {"features": read_npy(path, mmap=True), "labels": read_npy(labels_path)}
    if suffix == ".npz":
        return read_npz(path)
    if suffix in (".pt", ".pth"):
        arrays = {}
        for key, tensor in read_pt(path).items():
            tensor = tensor.detach()
            # numpy has no bfloat16
            arrays[key] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return arrays
    raise ValueError(f"features are read from .npz, .npy or .pt files, got {path}")


class _Checked:
    """Arrays of one file, each checked when it is taken: type, shape, length, finite values."""

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray], dtype: torch.dtype) -> None:
        self.path, self.arrays, self.dtype = path, arrays, dtype
        self.dim = 0

    def pool(self, features: str, labels: str) -> Pool:
        rows, classes = self.features(features), self._array(labels)
        if classes.ndim != 1 or classes.dtype.kind not in "iu":
            raise DataFormatError(
                self.path, f"{labels!r} must be integers of shape (N,), got {classes.dtype} of shape {classes.shape}"
            )
        if len(classes) != len(rows):
            raise DataFormatError(self.path, f"{len(rows)} rows of {features!r} but {len(classes)} of {labels!r}")
        if len(classes) and int(classes.max()) > np.iinfo(np.int64).max:
            raise DataFormatError(self.path, f"{labels!r} holds {classes.max()}, which is no class number")
        return Pool(TensorRows(rows, self.dtype), classes.astype(np.int64))

    def features(self, key: str) -> np.ndarray:
        rows = self._array(key)
        if rows.ndim != 2 or rows.dtype.kind not in "fiu" or rows.shape[1] == 0:
            raise DataFormatError(
                self.path, f"{key!r} must be real numbers of shape (N, D), got {rows.dtype} of shape {rows.shape}"
            )
        if self.dim not in (0, rows.shape[1]):
            raise DataFormatError(self.path, f"{key!r} has {rows.shape[1]} columns, the other arrays have {self.dim}")
        self.dim = rows.shape[1]
        for start in range(0, len(rows), _CHECK_ROWS):
            # in the target type: a float64 beyond float32's range would become infinite later
            with np.errstate(over="ignore"):
                part = rows[start : start + _CHECK_ROWS].astype(str(self.dtype).removeprefix("torch."))
            bad = np.argwhere(~np.isfinite(part))
            if len(bad):
                row, column = start + int(bad[0, 0]), int(bad[0, 1])
                raise DataFormatError(
                    self.path,
                    f"{key!r}, row {row}, column {column} is {rows[row, column]}; finite numbers are expected",
                )
        return rows

    def ood_sets(self) -> list[OODPool]:
        oods = []
        for distance in ("near", "far"):
            for key in sorted(self.arrays):
                if key.startswith(f"{distance}_") and len(key) > len(distance) + 1:
                    rows = self.features(key)
                    if len(rows) == 0:
                        raise DataFormatError(self.path, f"the OOD set {key!r} is empty")
                    pool = Pool(TensorRows(rows, self.dtype), np.zeros(len(rows), dtype=np.int64))
                    oods.append(OODPool(key[len(distance) + 1 :], distance, pool))
        return oods

    def check_labels(self, pool: Pool, count: int, part: str) -> None:
        found = np.unique(pool.labels)
        if part == "train" and len(found) < count:
            missing = int(np.argmax(found != np.arange(len(found))))
            raise DataFormatError(
                self.path, f"training labels must be 0..{count - 1} without gaps; {missing} is missing. Renumber them."
            )
        if len(found) and (found[0] < 0 or found[-1] >= count):
            raise DataFormatError(
                self.path, f"the {part} labels must lie in 0..{count - 1} as in training, got {found[0]}..{found[-1]}"
            )

    def _array(self, key: str) -> np.ndarray:
        if key not in self.arrays:
            raise DataFormatError(
                self.path,
                f"has no array {key!r}; it has {', '.join(sorted(self.arrays)) or 'nothing'}. Expected are "
                "train_features, train_labels, test_features, test_labels, or features and labels.",
            )
        return self.arrays[key]
