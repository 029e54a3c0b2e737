"""The user's own features and labels, from a file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.utils import skip_init

from rmd_plugin.npz import read_npz

from .base import OODBenchmark
from .errors import DataFormatError
from .own import find_path
from .readers.arrays import read_npy, read_pt
from .sources import Source, TensorRows
from .splits import OODSet, Parts, Split, stream

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHECK_ROWS = 65_536


@dataclass(kw_only=True, eq=False, repr=False)
class Features(OODBenchmark):
    """Feature vectors and labels that the user brings.

    Raw items are float tensors of shape (D,). Two layouts are understood, in an ``.npz`` file, in a ``.pt`` file
    (a dict of tensors), or, for the second, in a pair of ``.npy`` files:

    1. Ready splits: ``train_features`` (N, D), ``train_labels`` (N,), ``test_features``, ``test_labels``; if there
       are any, ``val_features`` and ``val_labels``; and OOD sets of shape (M, D) under ``near_NAME`` or
       ``far_NAME``. Rows of the test set with a label < 0 form an OOD set named ``ood``.
    2. One set: ``features`` (N, D) and ``labels`` (N,), a label < 0 meaning OOD. The ID rows are split into train,
       validation and test by seed, stratified by class. ``near_NAME`` and ``far_NAME`` may be added as above.

    OOD data are optional. So is the classifier, by which detectors on logits are judged instead of by a probe: either
    its weights, ``head_weight`` (K, D) and ``head_bias`` (K,), or what it gave, for every array of features the logits
    (N, K) under ``train_logits``, ``val_logits``, ``test_logits`` and ``near_NAME_logits``, or ``logits`` in layout 2.

    Features are real numbers without NaN or infinity; ID labels are the integers ``0..K-1``, each with training
    samples. A file is never unpickled.

    Args:
        path: the ``.npz`` or ``.pt`` file, or the ``.npy`` file of the features; relative to the working folder,
            or else to ``data_dir``.
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

    path: str | Path = field(kw_only=False)
    labels_path: str | Path | None = None
    val_fraction: float = 0.1
    test_fraction: float = 0.2
    ood_distance: Literal["near", "far"] = "near"
    class_names: Sequence[str] | None = None  # type: ignore[assignment]
    dtype: Literal["float32", "float64"] = "float32"
    feature_dim: int = field(init=False, default=0)
    head: nn.Linear | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._given: dict[Source[Any], np.ndarray] = {}
        super().__post_init__()
        self.class_names = self.class_names or [str(label) for label in range(self.num_classes)]
        wrong = [logits.shape[1] for logits in self._given.values() if logits.shape[1] != self.num_classes]
        if wrong:
            raise self._error(f"there are logits of {wrong[0]} classes, the labels have {self.num_classes}")
        self.head = self._head()

    def logits(self, split: str) -> torch.Tensor | None:
        """Logits of a split of shape (N, K), if the file has them; the splits are those of :meth:`fingerprint`."""
        splits = self._splits()
        part = splits[split if split in splits else f"ood:{split}"]
        given = self._given.get(part.source)
        return None if given is None else torch.from_numpy(given[part.indices].astype(np.float32))

    def load(self) -> Parts:
        """Read the file and check every array."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype!r}")
        if self.ood_distance not in ("near", "far"):
            raise ValueError(f"ood_distance must be 'near' or 'far', got {self.ood_distance!r}")
        if not self.test_fraction > 0:
            raise ValueError(f"test_fraction must be above 0, got {self.test_fraction}")
        self.path = find_path(self.path, self.data_dir, "file of features", ".npz, .pt or .npy")
        labels_path = self.labels_path
        if labels_path is not None:
            labels_path = find_path(labels_path, self.data_dir, "file of labels", ".npy")
        self._arrays = _load(self.path, labels_path)

        val: Split | None = None
        if "features" in self._arrays:
            mixed = self._split("features", "labels")
            inside = mixed.subset(np.flatnonzero(mixed.labels >= 0))
            fractions = [self.test_fraction, self.val_fraction]
            test, val, train = inside.stratified(fractions, stream(self.seed, "features"))
        else:
            train, mixed = self._split("train_features", "train_labels"), self._split("test_features", "test_labels")
            if (train.labels < 0).any():
                raise self._error("train_labels has labels < 0; OOD samples must not be trained on")
            test = mixed.subset(np.flatnonzero(mixed.labels >= 0))
            if "val_features" in self._arrays:
                val = self._split("val_features", "val_labels")

        oods = self._ood_sets(mixed.subset(np.flatnonzero(mixed.labels < 0)))
        if self.class_names is not None and len(train):
            count = int(train.labels.max()) + 1
            if len(self.class_names) != count:
                raise ValueError(f"{len(self.class_names)} class_names for the {count} classes of {self.path}")
        return Parts(self.class_names, train, test, oods, val=val, val_fraction=self.val_fraction)

    def _error(self, reason: str) -> DataFormatError:
        return DataFormatError(self.path, reason)

    def _array(self, key: str) -> np.ndarray:
        if key not in self._arrays:
            raise self._error(
                f"has no array {key!r}; it has {', '.join(sorted(self._arrays)) or 'nothing'}. Expected are "
                "train_features, train_labels, test_features, test_labels, or features and labels."
            )
        return self._arrays[key]

    def _split(self, features: str, labels: str) -> Split:
        source, classes = self._rows(features), self._array(labels)
        if classes.ndim != 1 or classes.dtype.kind not in "iu":
            raise self._error(
                f"{labels!r} must be integers of shape (N,), got {classes.dtype} of shape {classes.shape}"
            )
        if len(classes) != len(source):
            raise self._error(f"{len(source)} rows of {features!r} but {len(classes)} of {labels!r}")
        if len(classes) and int(classes.max()) > np.iinfo(np.int64).max:
            raise self._error(f"{labels!r} holds {classes.max()}, which is no class number")
        return Split(source, classes)

    def _rows(self, key: str) -> TensorRows:
        rows = self._array(key)
        if rows.ndim != 2 or rows.dtype.kind not in "fiu" or rows.shape[1] == 0:
            raise self._error(f"{key!r} must be real numbers of shape (N, D), got {rows.dtype} of shape {rows.shape}")
        if self.feature_dim not in (0, rows.shape[1]):
            raise self._error(f"{key!r} has {rows.shape[1]} columns, the other arrays have {self.feature_dim}")
        self.feature_dim = rows.shape[1]
        self._check_finite(key, rows)
        source = TensorRows(rows, _DTYPES[self.dtype])
        if self._logits:
            # train_features has train_logits, features has logits, near_a has near_a_logits
            name = f"{key.removesuffix('features')}_logits".replace("__", "_").removeprefix("_")
            logits = self._array(name)
            if logits.ndim != 2 or logits.dtype.kind not in "fiu" or len(logits) != len(rows):
                raise self._error(
                    f"{name!r} must be real numbers of shape ({len(rows)}, K), got {logits.dtype} of shape "
                    f"{logits.shape}"
                )
            self._check_finite(name, logits)
            self._given[source] = logits
        return source

    def _check_finite(self, key: str, rows: np.ndarray) -> None:
        for start in range(0, len(rows), _CHECK_ROWS):
            # in the target type: a float64 beyond float32's range would become infinite later
            with np.errstate(over="ignore"):
                part = rows[start : start + _CHECK_ROWS].astype(self.dtype)
            bad = np.argwhere(~np.isfinite(part))
            if len(bad):
                row, column = start + int(bad[0, 0]), int(bad[0, 1])
                raise self._error(
                    f"{key!r}, row {row}, column {column} is {rows[row, column]}; finite numbers are expected"
                )

    @property
    def _logits(self) -> list[str]:
        return [key for key in self._arrays if key == "logits" or key.endswith("_logits")]

    def _head(self) -> nn.Linear | None:
        if not {"head_weight", "head_bias"} & set(self._arrays):
            return None
        if self._logits:
            raise self._error(f"has both {self._logits[0]!r} and the head that logits are made by; keep one of them")
        weight, bias = self._array("head_weight"), self._array("head_bias")
        expected = (self.num_classes, self.feature_dim)
        if weight.shape != expected or bias.shape != expected[:1] or {weight.dtype.kind, bias.dtype.kind} - set("fiu"):
            raise self._error(
                f"'head_weight' and 'head_bias' must be real numbers of shapes {expected} and ({self.num_classes},), "
                f"got {weight.dtype} of shape {weight.shape} and {bias.dtype} of shape {bias.shape}"
            )
        self._check_finite("head_weight", weight)
        self._check_finite("head_bias", bias[:, None])
        head = skip_init(nn.Linear, *reversed(expected), dtype=_DTYPES[self.dtype])  # draws no random numbers
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(np.array(weight)))
            head.bias.copy_(torch.from_numpy(np.array(bias)))
        return head

    def _ood_sets(self, negative: Split) -> list[OODSet]:
        oods = [OODSet("ood", self.ood_distance, negative)] if len(negative) else []
        for distance in ("near", "far"):
            for key in sorted(self._arrays):
                name = key.removeprefix(f"{distance}_")
                if name in (key, "") or key in self._logits:
                    continue
                rows = self._rows(key)
                if len(rows) == 0:
                    raise self._error(f"the OOD set {key!r} is empty")
                oods.append(OODSet(name, distance, Split(rows, np.zeros(len(rows)))))
        return oods


def _load(path: Path, labels_path: Path | None) -> dict[str, np.ndarray]:
    suffix = path.suffix.lower()
    if (suffix == ".npy") != (labels_path is not None):
        raise ValueError(f"labels_path belongs to an .npy file of features and only there; path is {path}")
    if labels_path is not None:
        return {"features": read_npy(path), "labels": read_npy(labels_path)}
    if suffix == ".npz":
        return read_npz(path)
    if suffix in (".pt", ".pth"):
        # numpy has no bfloat16
        return {
            key: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
            for key, tensor in read_pt(path).items()
        }
    raise ValueError(f"features are read from .npz, .npy or .pt files, got {path}")
