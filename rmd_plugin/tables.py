"""Detectors on tables of features in many files: one state or one file of scores per file, on processes or on Ray.

Parquet, Arrow and CSV are read by pyarrow, from a disk or from any store that fsspec knows. Workers hold one batch.
"""

from __future__ import annotations

import copy
import errno
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import joblib  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.dataset as ds  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from pytorch_ood.api import Detector, RequiresFittingException
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rmd_plugin.detectors.conformal import Calibrated, bare
from rmd_plugin.detectors.detectors import StatefulDetector, load_detector
from rmd_plugin.detectors.moments import ClassMoments, Moments
from rmd_plugin.files import replacing, require

log = logging.getLogger(__name__)

Folder = str | os.PathLike[str]
Paths = Folder | Sequence[Folder]
Columns = str | Sequence[str]
Accumulator = tuple[ClassMoments, type[Moments]]
OnBad = Literal["raise", "skip"]
Fitted = TypeVar("Fitted", bound=Detector)
Result = TypeVar("Result")

FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc", ".csv": "csv"}
_BATCH_ROWS = 4096
#: key in the metadata of a file of scores: the hash of what it was computed from
_SOURCE = b"rmd_plugin.scores_of"


def fit_table(
    detector: Fitted,
    paths: Paths,
    features: Columns = "embedding",
    labels: str = "label",
    engine: str = "local",
    *,
    workers: int | None = None,
    on_bad: OnBad = "raise",
    state_dir: Folder | None = None,
) -> Fitted:
    """Fit a detector on Parquet, Arrow or CSV files, in constant memory per worker.

    The result is the same, to rounding in float64, for every engine, number of workers and split into files. With
    ``state_dir`` an interrupted run continues with the files that it has not finished.

    Args:
        detector: one that is fitted on moments: RMD, Mahalanobis and its variants, or FusedRMD.
        paths: a file, a folder (with all below it), a glob (``"embeddings/*.parquet"``), or several; local, or of any
            store that fsspec knows (``s3://bucket/folder``).
        features: name of the column of features, lists of D numbers; or the names of D columns of numbers.
        labels: name of the column of labels, integers; rows with a label below zero are skipped.
        engine: ``"local"``, processes on this machine, or ``"ray"``, tasks of the Ray cluster that is connected.
        workers: processes of the local engine; by default one per processor. With 1 all is done in this process.
        on_bad: what to do with a file that cannot be read or holds NaN: ``"raise"``, or ``"skip"`` it with a warning in
            the log. No row of a skipped file counts.
        state_dir: folder on a disk for the states of finished files, which all workers must see; kept for the next run.

    Raises:
        ValueError: with the file, if it is bad; if the detector is not fitted on moments, or there is no row with a
            label >= 0. The columns of all files are checked before the work starts.

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
    moments = table_moments(detector, paths, features, labels, engine, workers, on_bad, state_dir)
    detector.fit_moments(moments)  # type: ignore[attr-defined]  # a Calibrated forwards it
    return detector


def table_moments(
    detector: Detector, paths: Paths, features: Columns, labels: str, engine: str = "local",
    workers: int | None = None, on_bad: OnBad = "raise", state_dir: Folder | None = None,
) -> Moments:  # fmt: skip
    """The moments of all files, on which a detector is fitted; options and errors are those of :func:`fit_table`."""
    work = partial(_state_of, _accumulator(detector), features, labels, state_dir)
    files = _check_files(paths, features, labels, on_bad)
    total = None
    for file, moments in _run(work, files, on_bad, engine, workers):
        if moments is not None and total is not None and moments.num_features != total.num_features:
            raise ValueError(f"{file.path}: has {moments.num_features} features, the others {total.num_features}.")
        if moments is not None:
            total = moments if total is None else total + moments
    if total is None:
        raise ValueError(f"no row of {len(files)} files has a label >= 0 in column {labels!r}: nothing to fit on.")
    return total


def table_state(
    detector: Detector, path: str, features: Columns = "embedding", labels: str = "label"
) -> Moments | None:
    """The moments of one file, on which a detector is fitted; None if it has no row with a label >= 0.

    States of several files add up: ``detector.fit_moments(state_a + state_b)``. An engine of your own maps this
    function over the files, see docs/scale.md.

    Raises:
        ValueError: if the file is bad.

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
    (file,) = _check_files(path, features, labels, "raise")
    return _state_of(_accumulator(detector), features, labels, None, file)


def score_table(
    detector: Detector,
    paths: Paths,
    out: Folder,
    features: Columns = "embedding",
    engine: str = "local",
    *,
    workers: int | None = None,
    on_bad: OnBad = "raise",
) -> list[str]:
    """Score Parquet, Arrow or CSV files into Parquet files of the same names, row by row in the same order.

    The columns are ``score`` and, of a :class:`rmd_plugin.Calibrated` detector, ``p_value`` and ``is_ood``. Files that
    were finished in a run before, by the same detector and of the same table, are not scored again.

    Args:
        detector: fitted, one of ours, with a calibration or without.
        paths: a file, a folder (with all below it), a glob, or several, as :func:`rmd_plugin.fit_table` takes them.
        out: folder of the scores, local or of a store, which all workers must see.
        features: name of the column of features, lists of D numbers; or the names of D columns of numbers.
        engine: ``"local"``, processes on this machine, or ``"ray"``, tasks of the Ray cluster that is connected.
        workers: processes of the local engine; by default one per processor. With 1 all is done in this process.
        on_bad: what to do with a file that cannot be read: ``"raise"``, or ``"skip"`` it with a warning in the log. A
            row with NaN or infinite features has the score NaN.

    Returns:
        Paths of the files of scores, without those of skipped files.

    Raises:
        ValueError: with the file, if it is bad. The columns of all files are checked before the work starts.
        FileExistsError: if ``out`` has a file of such a name that ``score_table`` did not write.

    Example:
        >>> import tempfile, torch, pyarrow as pa, pyarrow.parquet as pq
        >>> from rmd_plugin import RMD, score_table
        >>> detector = RMD().fit_features(torch.randn(100, 4), torch.arange(100) % 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pq.write_table(pa.table({"embedding": torch.randn(50, 4).tolist()}), f"{folder}/new.parquet")
        ...     (scores,) = score_table(detector, f"{folder}/new.parquet", f"{folder}/scores", workers=1)
        ...     pq.read_table(scores).schema.names
        ['score']
    """
    inner = bare(detector)
    if not isinstance(inner, StatefulDetector):
        raise ValueError(f"{type(inner).__name__} is no detector of rmd_plugin, which worker processes could load.")
    if not inner.fitted or (isinstance(detector, Calibrated) and detector.calibration is None):
        raise RequiresFittingException(f"{detector!r} is not fitted or not calibrated, so it cannot score a table.")
    files = _check_files(paths, features, None, on_bad)
    state = detector.state_dict()  # type: ignore[attr-defined]
    digest = joblib.hash(tree_map_only(Tensor, Tensor.numpy, state))  # of tensors it would hash addresses, too
    work = partial(_score_file, state, digest, inner.num_features, features, os.fspath(out).rstrip("/"))
    return [target for _, target in _run(work, files, on_bad, engine, workers)]


def check_on_moments(kind: type) -> None:
    """Refuse a class of detectors that is not fitted on moments."""
    if not getattr(kind, "from_moments", False):
        raise ValueError(
            f"{kind.__name__} is not fitted on moments, which add up over files. Take RMD, Mahalanobis, "
            "MarginalMahalanobis, PartialMahalanobis or FusedRMD, or fit on the rows that fit into memory."
        )


# -- what a worker does with a file -----------------------------------------------------------------------------------


def _accumulator(detector: Detector) -> Accumulator:
    """An empty accumulator for a detector, and the class of the moments that it computes."""
    inner: Any = bare(detector)
    check_on_moments(type(inner))
    return inner.new_moments(sync_on_compute=False), inner._kind


def _state_of(
    accumulator: Accumulator, features: Columns, labels: str, folder: Folder | None, file: TableFile
) -> Moments | None:
    """The moments of a file, or those that a run before has kept in a folder."""
    metric, kind = copy.deepcopy(accumulator)
    options = [getattr(metric, name, None) for name in ("normalize", "diagonal", "seed")]
    source = joblib.hash((file, features, labels, kind.__name__, options))
    path = None if folder is None else os.path.join(folder, f"{source}.safetensors")
    if path is not None and os.path.exists(path):
        try:
            return kind.load(path)
        except ValueError as error:
            log.warning("a state is computed again: %s", error)
    for z, y in _read(file, features, labels):
        metric.update(z, y)
    moments = metric.compute() if bool(metric.counts.any()) else None
    if path is not None and moments is not None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        moments.save(path)
    return moments


def _score_file(state: dict[str, Any], digest: str, width: int, features: Columns, out: str, file: TableFile) -> str:
    """Write the scores of a file, unless that was done before; returns where they are."""
    target = f"{out}/{file.name.removesuffix('.parquet')}.parquet"
    source = joblib.hash((file, features, digest)).encode()
    if _scored_from(target) == source:
        return target
    detector: Any = load_detector(state)
    fields = [("score", pa.float32())]
    if isinstance(detector, Calibrated):
        fields += [("p_value", pa.float32()), ("is_ood", pa.bool_())]
    schema = pa.schema(fields, metadata={_SOURCE: source})
    options = {"write_page_checksum": True, "use_dictionary": False}
    with _writing(target) as stream, pq.ParquetWriter(stream, schema, **options) as writer:
        for z, _ in _read(file, features, None, width):
            if isinstance(detector, Calibrated):
                scores, _, p_values, decisions = detector.judge(z)
                arrays = [scores.float(), p_values.float(), decisions]
            else:
                arrays = [detector.predict_features(z).float()]
            writer.write_batch(pa.record_batch([pa.array(array.numpy()) for array in arrays], schema), 1 << 20)
    return target


def _scored_from(target: str) -> bytes | None:
    """Hash of what a file of scores was computed from; None if there is no such file or its content is damaged."""
    system, path = url_to_fs(target)
    if not system.exists(path):
        return None
    source = None
    with suppress(pa.ArrowException, OSError), system.open(path) as stream:
        file = pq.ParquetFile(stream, page_checksum_verification=True)
        source = (file.schema_arrow.metadata or {}).get(_SOURCE)
        if source is not None:
            for _ in file.iter_batches():
                pass
            return bytes(source)
    if source is None:
        raise FileExistsError(errno.EEXIST, "is damaged or not of score_table: remove it or change out", target)
    return None


def _run(
    work: Callable[[TableFile], Result], files: Sequence[TableFile], on_bad: OnBad, engine: str, workers: int | None
) -> Iterator[tuple[TableFile, Result]]:
    """Files and what a function gives for each, in their order; a bad file is raised or skipped."""
    if engine == "ray":
        ray = require("ray", "ray", needed_by="engine=ray")
        if not ray.is_initialized():
            ray.init()  # the cluster that RAY_ADDRESS names, or one on this machine
        shared = ray.put(work)  # once for all tasks: it may hold a detector
        # not actors, whose processes would start and import anew at every call
        tasks = [ray.remote(_attempt).remote(shared, file) for file in files]
        results: Any = (ray.get(tasks.pop(0)) for _ in files)
    elif engine in ("local", "threads"):
        count = min(workers or os.cpu_count() or 1, len(files))
        # no more than a few results wait in memory for the one before them
        options: dict[str, Any] = {"return_as": "generator", "pre_dispatch": "2*n_jobs", "batch_size": 1}
        pool = joblib.Parallel(count, prefer="threads" if engine == "threads" else None, max_nbytes=None, **options)
        results = pool(joblib.delayed(_attempt)(work, file) for file in files)
    else:
        raise ValueError(f"engine must be 'local' or 'ray', got {engine!r}. docs/scale.md has recipes for others.")
    try:
        for file, result in zip(files, results, strict=True):
            if not isinstance(result, Exception):
                yield file, result
            elif on_bad == "skip":
                log.warning("skipped %s", result)
            else:
                raise result
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of joblib, of tasks whose results are no longer needed
            results.close()


def _attempt(work: Callable[[TableFile], Result], file: TableFile) -> Result | Exception:
    """The result for a file, or what is wrong with its content."""
    try:
        return work(file)
    except (ValueError, TypeError, pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, such as a full disk
            raise
        return ValueError(f"{file.path}: {error}")


# -- files ------------------------------------------------------------------------------------------------------------


class TableFile(NamedTuple):
    """One file of a table, as it was when the work began."""

    path: str  #: with its scheme, if it is not local
    name: str  #: below the folder that all files share
    version: str  #: of its content, by size, time or tag


def list_files(paths: Paths) -> list[TableFile]:
    """All files of a table; hidden ones and those that begin with ``_`` belong to other programs.

    Raises:
        FileNotFoundError: if there is none.
    """
    files: dict[str, tuple[str, str]] = {}
    folders = []
    for pattern in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        system, path = url_to_fs(os.fspath(pattern))
        folder = os.path.dirname(re.split(r"[*?[]", path)[0])
        if system.isdir(path):
            folder, inside = path, system.find(path)
        else:
            inside = [path] if system.exists(path) else system.glob(path)
        for name in inside:
            hidden = any(part.startswith((".", "_")) for part in name[len(folder) :].split("/"))
            if name == path or (os.path.splitext(name)[1].lower() in FORMATS and not hidden):
                full = name if isinstance(system, LocalFileSystem) else system.unstrip_protocol(name)
                files[full] = name, system.ukey(name)
        folders.append(folder)
    if not files:
        raise FileNotFoundError(f"there is no {', '.join(FORMATS)} file in {paths}.")
    shared = len(os.path.commonpath(folders))
    return sorted(TableFile(full, name[shared:].lstrip("/"), version) for full, (name, version) in files.items())


@contextmanager
def _writing(path: str) -> Iterator[Any]:
    """A stream whose content becomes the file at ``path`` when the block ends without an error."""
    system, inner = url_to_fs(path)
    folder, name = os.path.split(inner)
    system.makedirs(folder, exist_ok=True)
    if isinstance(system, LocalFileSystem):
        with replacing(inner, "wb") as stream:
            yield stream
    else:
        aside = f"{folder}/.{name}.part"  # the next run writes over what a kill has left
        with system.open(aside, "wb") as stream:
            yield stream
        system.mv(aside, inner)


# -- reading ----------------------------------------------------------------------------------------------------------


def _check_files(paths: Paths, features: Columns, labels: str | None, on_bad: OnBad) -> list[TableFile]:
    """The files that can be opened, all of them with the columns."""
    files = list_files(paths)
    schemas = list(_run(lambda file: _fragment(file).physical_schema, files, on_bad, "threads", 16))
    for file, schema in schemas:
        if missing := [name for name in _columns(features, labels) if name not in schema.names]:
            option = "labels" if missing[0] == labels else "features"
            have = ", ".join(schema.names)
            raise ValueError(f"{file.path}: there is no column {missing[0]!r} in {have}. Name it by {option}=.")
        kind = schema.field(_columns(features, labels)[0]).type
        if isinstance(features, str) and not hasattr(getattr(kind, "storage_type", kind), "value_field"):
            raise ValueError(f"{file.path}: column {features!r} is {kind}; lists of numbers are expected.")
        if labels is not None and not pa.types.is_integer(kind := schema.field(labels).type):
            raise ValueError(f"{file.path}: column {labels!r} is {kind}; labels are integers, 0 to K - 1.")
    if not schemas:
        raise ValueError(f"none of the {len(files)} files can be read.")
    return [file for file, _ in schemas]


def _columns(features: Columns, labels: str | None) -> list[str]:
    return [*([features] if isinstance(features, str) else features), *([] if labels is None else [labels])]


def _fragment(file: TableFile) -> ds.Fragment:
    system, path = url_to_fs(file.path)
    kind = FORMATS.get(os.path.splitext(path)[1].lower(), "parquet")
    return next(ds.dataset(path, filesystem=system, format=kind).get_fragments())


def _batches(file: TableFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of a file in batches; a scanner of pyarrow.dataset would hold more than twice the memory."""
    fragment = _fragment(file)
    with fragment.open() as stream:
        if fragment.format.default_extname == "csv":
            yield from (batch.select(columns) for batch in pa.csv.open_csv(stream))
        elif fragment.format.default_extname == "parquet":
            # by pages: a row group may be as large as the file
            options = {"pre_buffer": False, "buffer_size": 4 << 20, "page_checksum_verification": True}
            with pq.ParquetFile(stream, **options) as table:
                yield from table.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)
        else:
            reader = pa.ipc.open_file(stream)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number).select(columns)
                yield from (batch.slice(start, _BATCH_ROWS) for start in range(0, len(batch), _BATCH_ROWS))


def _read(
    file: TableFile, features: Columns, labels: str | None, width: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features (B, D) in the type of the file, and labels (B,) if there are any; the tensors must not be written to."""
    start = 0
    for batch in _batches(file, _columns(features, labels)):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if column.null_count:
                row = start + column.is_null().index(True).as_py()
                raise ValueError(f"row {row} of column {name!r} is missing. Mark rows to leave out by label -1.")
        if isinstance(features, str):
            lists = getattr(batch.column(0), "storage", batch.column(0))  # of tensors, an extension type
            lengths, numbers = pc.list_value_length(lists), lists.flatten()
            width = width or lengths[0].as_py()
            if (row := pc.equal(lengths, width).index(False).as_py()) >= 0 or numbers.null_count:
                raise ValueError(f"row {start + row} of column {features!r} is not a list of {width} numbers.")
            z = torch.from_dlpack(numbers).view(len(batch), width)
        else:
            columns = [column.cast(pa.float64()) for column in batch.columns[: len(features)]]
            z = torch.stack([torch.from_dlpack(column) for column in columns], 1)
        y = torch.empty(0) if labels is None else torch.from_dlpack(batch.column(labels).cast(pa.int64()))
        yield z if z.is_floating_point() else z.float(), y
        start += len(batch)
