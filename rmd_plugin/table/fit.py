"""Fit a detector on a table of any number of files: one state per file, and a tree of sums."""

from __future__ import annotations

import copy
import io
import logging
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import xxhash
from pytorch_ood.api import Detector
from torch import Tensor

from rmd_plugin.detectors.calibrated import bare
from rmd_plugin.detectors.class_moments import ClassMoments
from rmd_plugin.detectors.files import DetectorFileError
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.detectors.updating import UpdatingDetector
from rmd_plugin.table.engines import check_engine, reduce_files
from rmd_plugin.table.places import Paths, TableFile, exists, join, list_files, opened, replacing
from rmd_plugin.table.reading import Columns, check_files, read_features
from rmd_plugin.untrusted import DataFormatError

log = logging.getLogger(__name__)

OnBad = Literal["raise", "skip"]
Fitted = TypeVar("Fitted", bound=Detector)


def fit_table(
    detector: Fitted,
    paths: Paths,
    features: str = "embedding",
    labels: str = "label",
    engine: str = "local",
    *,
    workers: int | None = None,
    on_bad: OnBad = "raise",
    state_dir: str | None = None,
) -> Fitted:
    """Fit a detector on Parquet or Arrow files, in constant memory per worker.

    The result is the same, to rounding in float64, for every engine, number of workers and split into files. A worker
    that is killed changes nothing, and with ``state_dir`` a run that was stopped goes on behind the files that it had
    finished.

    Args:
        detector: one that is fitted on moments: RMD, Mahalanobis and their kin, or FusedRMD.
        paths: a file, a folder (with all below it), or several; local, or of any object store that pyarrow or fsspec
            know (``s3://bucket/folder``).
        features: name of the column of features, lists of D floats.
        labels: name of the column of labels, integers; rows with a label below zero are skipped.
        engine: ``"local"``, processes on this machine, or ``"ray"``, tasks of the Ray cluster that is connected.
        workers: processes of the local engine; by default one per processor. With 1 all is done in this process.
        on_bad: what to do with a file that cannot be read or holds NaN: ``"raise"``, or ``"skip"`` it with a warning in
            the log. No row of a skipped file counts.
        state_dir: folder for the states of finished files, which all workers must see; kept for the next run.

    Raises:
        DataFormatError: a ValueError with the file: if it is bad, or its columns differ from those of the others. The
            columns of all files are looked at before the work starts.
        ValueError: if the detector is not fitted on moments, or there is no row with a label >= 0.

    Example:
        >>> import tempfile, torch, pyarrow as pa, pyarrow.parquet as pq
        >>> from rmd_plugin import RMD, fit_table
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for part in range(2):
        ...         rows = {"embedding": torch.randn(50, 4).tolist(), "label": (torch.arange(50) % 2).tolist()}
        ...         pq.write_table(pa.table(rows), f"{folder}/{part}.parquet")
        ...     fit_table(RMD(), folder, workers=1)
        <RMD() fitted: 2 classes, 4 features>
    """
    moments = table_moments(
        detector, paths, features, labels, engine, workers=workers, on_bad=on_bad, state_dir=state_dir
    )
    detector.fit_moments(moments)  # type: ignore[attr-defined]  # a Calibrated forwards it
    return detector


def table_moments(
    detector: Detector,
    paths: Paths,
    features: str,
    labels: str,
    engine: str,
    *,
    workers: int | None = None,
    on_bad: OnBad = "raise",
    state_dir: str | None = None,
) -> Moments:
    """What a detector is fitted on, of all files; the options and errors are those of :func:`fit_table`."""
    check_engine(engine, workers)
    check_on_bad(on_bad)
    inner, columns = _on_moments(detector), Columns(features, labels)
    files, width = check_files(list_files(paths), columns, None, refuse if on_bad == "raise" else note)
    if not files:
        raise ValueError("none of the files can be read: there is nothing to fit on.")
    work = _StateOf(_empty(inner), inner._kind, columns, width, on_bad, state_dir)
    found = reduce_files(engine, work, _add, files, workers)
    for sentence in found.bad:
        log.warning("skipped %s", sentence)
    if found.moments is None:
        raise ValueError(
            f"no row of the {len(files)} files has a label >= 0 in column {labels!r}: there is nothing to fit on."
        )
    return found.moments


def table_state(detector: Detector, path: str, features: str = "embedding", labels: str = "label") -> Moments | None:
    """What a detector is fitted on, of one file; None of a file without a row of a label >= 0.

    States of several files add up: ``detector.fit_moments(state_a + state_b)``. This is what an engine of your own maps
    over the files, see docs/scale.md.

    Raises:
        DataFormatError: if the file is bad.

    Example:
        >>> import os, tempfile
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> from rmd_plugin import RMD
        >>> rows = {"embedding": [[0.0, 1.0], [1.0, 0.0], [4.0, 5.0], [5.0, 4.0]], "label": [0, 0, 1, 1]}
        >>> path = os.path.join(tempfile.mkdtemp(), "rows.parquet")
        >>> pq.write_table(pa.table(rows), path)
        >>> RMD(shrinkage=0.1).fit_moments(table_state(RMD(), path) + table_state(RMD(), path)).n_classes
        2
    """
    columns, metric = Columns(features, labels), _empty(_on_moments(detector))
    (file,), width = check_files(list_files(path), columns, None, refuse)
    return _collect(metric, file, columns, width)


def refuse(error: DataFormatError) -> None:
    """What ``on_bad="raise"`` does."""
    raise error


def note(error: DataFormatError) -> None:
    """What ``on_bad="skip"`` does."""
    log.warning("skipped %s", error)


def check_on_bad(on_bad: str) -> None:
    """Refuse another word."""
    if on_bad not in ("raise", "skip"):
        raise ValueError(f"on_bad must be 'raise' or 'skip', got {on_bad!r}.")


def check_on_moments(kind: type) -> None:
    """Refuse a class of detectors that is not fitted on moments."""
    if not issubclass(kind, UpdatingDetector):
        raise ValueError(
            f"{kind.__name__} is not fitted on moments, which add up over files. Take RMD, Mahalanobis, "
            "MarginalMahalanobis, PartialMahalanobis or FusedRMD, or fit on the rows that fit into memory."
        )


def _on_moments(detector: Detector) -> UpdatingDetector:
    inner = bare(detector)
    check_on_moments(type(inner))
    return cast(UpdatingDetector, inner)


def _empty(detector: UpdatingDetector) -> ClassMoments:
    return detector.new_moments(sync_on_compute=False)


@dataclass(frozen=True)
class _Part:
    """Moments of some files, and sentences about those of them that were skipped."""

    moments: Moments | None
    bad: tuple[str, ...] = ()


def _add(first: _Part, second: _Part) -> _Part:
    both = [part.moments for part in (first, second) if part.moments is not None]
    return _Part(sum(both[1:], both[0]) if both else None, first.bad + second.bad)


@dataclass(frozen=True)
class _StateOf:
    """From a file to its state, which is kept if there is a folder for it."""

    metric: ClassMoments
    kind: type[Moments]
    columns: Columns
    width: int | None
    on_bad: OnBad
    state_dir: str | None

    def __call__(self, file: TableFile) -> _Part:
        kept = None if self.state_dir is None else join(self.state_dir, f"{self._key(file)}.safetensors")
        try:
            if kept is not None and exists(kept):
                with opened(kept) as stream:
                    return _Part(self.kind.load(io.BytesIO(stream.readall())))
        except DetectorFileError as error:
            log.warning("a kept state is read again from its table: %s", error)
        try:
            moments = _collect(self.metric, file, self.columns, self.width)
        except DataFormatError as error:
            if self.on_bad == "raise":
                raise
            return _Part(None, (str(error),))
        if kept is not None and moments is not None:
            content = io.BytesIO()
            moments.save(content)
            with replacing(kept) as stream:
                stream.write(content.getvalue())
        return _Part(moments)

    def _key(self, file: TableFile) -> str:
        metric = self.metric
        options = (type(metric).__name__, metric.normalize, metric.diagonal, getattr(metric, "seed", None))
        return xxhash.xxh3_128_hexdigest(repr((file.path, file.version, self.columns, options)).encode())


def _collect(metric: ClassMoments, file: TableFile, columns: Columns, width: int | None) -> Moments | None:
    metric = copy.deepcopy(metric)  # the empty one serves the next file
    start = 0
    for features, labels in read_features(file, columns, width):
        try:
            metric.update(features, cast(Tensor, labels))
        except (TypeError, ValueError) as error:
            raise DataFormatError(file.path, f"rows {start} to {start + len(features) - 1}: {error}") from None
        start += len(features)
    return metric.compute() if bool(metric.counts.any()) else None
