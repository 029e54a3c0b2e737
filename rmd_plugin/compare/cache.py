"""Features on disk: computed once, memory-mapped, shared by many jobs, never stale and never half-written.

Layout, all of it readable by plain numpy::

    CACHE_DIR/
      ab/abcdef.../features.npy   (N, D)
      ab/abcdef.../labels.npy     (N,)
      ab/abcdef.../entry.json     what it is
      locks/abcdef....lock        held while that entry is being written
      tmp/                        entries in the making

An entry is written aside, flushed to the disk and renamed in one step, so it is there whole or not at all. The lock is
the operating system's: it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

_FORMAT = 1
_ENTRY, _FEATURES, _LABELS = "entry.json", "features.npy", "labels.npy"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: a lock that the file system does not support
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

#: features (B, D) and labels (B,) of one batch after the other
Batches = Iterable[tuple[np.ndarray, np.ndarray]]
StillTrue = Callable[[np.ndarray], bool]


class CacheError(OSError):
    """The cache cannot be used; the message says where, why, and what to do."""


class _Damaged(Exception):
    """An entry is there, but it is not what was written."""


class _CallersError(Exception):
    """Carries an error of the caller's own functions past the handling of the cache's errors."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Features and labels of one split.

    Attributes:
        features: shape (N, D), memory-mapped; copy-on-write, so the file never changes.
        labels: shape (N,), int64.
        hit: whether they were found, rather than computed now.
        folder: where they lie.
    """

    features: np.ndarray
    labels: np.ndarray
    hit: bool
    folder: Path


class FeatureCache:
    """A folder of features, keyed by what they were computed from.

    Any number of processes may use the same folder: the first one that needs an entry computes it, the others wait and
    read it.

    Args:
        root: the folder; it is made when the first entry is written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser()

    def folder(self, key: str) -> Path:
        """Where the entry of a key lies, whether it is there or not."""
        if not key or not all(letter in "0123456789abcdef" for letter in key):
            raise ValueError(f"a key is made of hexadecimal digits, got {key!r}.")
        return self.root / key[:2] / key

    def fetch(
        self,
        key: str,
        compute: Callable[[], Batches],
        count: int,
        *,
        about: dict[str, Any] | None = None,
        still_true: StillTrue | None = None,
    ) -> CachedFeatures:
        """Features of a key: from disk if they are there, else computed and kept.

        Args:
            key: hash of all that decides the features, in hexadecimal digits.
            compute: gives the batches, in order.
            count: N, the number of samples that the batches hold together.
            about: what it is, for people who look into ``entry.json``.
            still_true: looks at cached features (N, D) and says whether they are what would be computed today. If not,
                they are computed anew.

        Returns:
            The features and labels.

        Raises:
            CacheError: if the disk is full, or the folder or a file in it cannot be read or written.
            ValueError: if the batches do not hold ``count`` samples of one width.
        """
        folder = self.folder(key)
        with self._explained(folder):
            if (found := _usable(folder, count, still_true, logging.WARNING)) is not None:
                return found
            with self._locked(key):
                # another job may have written it while this one waited
                if (found := _usable(folder, count, still_true, logging.DEBUG)) is not None:
                    return found
                if folder.exists():
                    shutil.rmtree(folder)
                self._write(key, folder, _guarded(compute), count, about or {})
            return CachedFeatures(*_open(folder, count), hit=False, folder=folder)

    def _write(self, key: str, folder: Path, batches: Batches, count: int, about: dict[str, Any]) -> None:
        aside = self.root / "tmp" / f"{key}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        aside.mkdir(parents=True)
        try:
            shape, dtype = _write_arrays(aside, batches, count)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = {"format": _FORMAT, "key": key, "shape": shape, "dtype": dtype, "written": now, **about}
            with _flushed(aside / _ENTRY) as file:
                file.write(json.dumps(entry, indent=2, default=str).encode())
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.rename(aside, folder)
        except OSError as error:
            # without working locks another job may have been faster: its entry is as good
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _sweep(self, key: str) -> None:
        """Remove what killed jobs have left: of this entry, whose lock is ours, and of any whose lock is free."""
        for remains in (self.root / "tmp").glob("*-*-*"):
            owner = remains.name.partition("-")[0]
            if owner == key:
                shutil.rmtree(remains, ignore_errors=True)
                continue
            with suppress(Timeout, OSError, NotImplementedError), FileLock(self._lock_file(owner), timeout=0):
                shutil.rmtree(remains, ignore_errors=True)

    def _lock_file(self, key: str) -> Path:
        return self.root / "locks" / f"{key}.lock"

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, if it can be had at all: some network drives have none."""
        path = self._lock_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                log.info("Another job is computing the features %s...; waiting for it.", key[:12])
                lock.acquire(poll_interval=0.2)
            self._sweep(key)
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            log.warning("%s has no file locks; jobs may compute the same features twice.", self.root)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _explained(self, folder: Path) -> Iterator[None]:
        """Turn errors of the operating system into one clear sentence."""
        try:
            yield
        except _CallersError as carrier:
            raise carrier.error from carrier.error.__cause__
        except _Damaged as damage:  # it was written a moment ago: something else writes to this folder
            message = f"the features just written to {folder} are damaged: {damage}. Is the disk all right?"
            raise CacheError(message) from damage
        except OSError as error:
            if error.errno in _NO_SPACE:
                reason, remedy = f"the disk of the feature cache is full ({self.root})", "Free space there"
            else:
                reason = f"the feature cache cannot be used: {error.strerror or error} ({error.filename or folder})"
                remedy = "Fix the permissions or delete that file"
            raise CacheError(
                f"{reason}. {remedy}, give another folder with cache_dir=..., or go without: cache_dir=null."
            ) from error


@contextmanager
def _callers_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _CallersError(error) from error


def _guarded(compute: Callable[[], Batches]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with _callers_errors():
        yield from compute()


def _usable(folder: Path, count: int, still_true: StillTrue | None, level: int) -> CachedFeatures | None:
    """The entry, if it is there, whole and true; why it is not is logged at ``level``."""
    if not folder.is_dir():
        return None
    try:
        features, labels = _open(folder, count)
    except _Damaged as damage:
        log.log(level, "The cached features in %s are damaged (%s) and are computed again.", folder, damage)
        return None
    with _callers_errors():
        if still_true is None or still_true(features):
            return CachedFeatures(features, labels, hit=True, folder=folder)
    log.log(
        level,
        "The cached features in %s are not what the network gives today, although weights, data and transform are the "
        "same: its code or a library has changed, or it is random. They are computed again.",
        folder,
    )
    return None


def _open(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of an entry, checked against its description.

    Raises:
        _Damaged: if they are not what was written.
    """
    try:
        entry = json.loads((folder / _ENTRY).read_bytes())
        if entry["format"] != _FORMAT:
            raise _Damaged(f"format {entry['format']}, expected {_FORMAT}")
        # mode c: torch wants writable memory, and writing to it must not change the file
        features = np.load(folder / _FEATURES, mmap_mode="c", allow_pickle=False)
        labels = np.load(folder / _LABELS, allow_pickle=False)
        expected = (tuple(entry["shape"]), entry["dtype"], (count,))
    except FileNotFoundError as error:
        raise _Damaged(f"{Path(error.filename).name} is missing") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise _Damaged(str(error) or type(error).__name__) from error
    found = (features.shape, features.dtype.str, labels.shape)
    if found != expected or len(features) != count:
        raise _Damaged(f"features and labels are {found}, expected {expected}")
    return features, labels


def _write_arrays(folder: Path, batches: Batches, count: int) -> tuple[list[int], str]:
    """Stream batches into the two files.

    By plain writes: on a full disk, writing to mapped memory kills the process instead of raising an error.
    """
    labels = np.empty(count, dtype=np.int64)
    done, width, dtype = 0, 0, np.dtype(np.float32)
    with _flushed(folder / _FEATURES) as file:
        for part, part_labels in batches:
            if part.ndim != 2 or part_labels.shape != part.shape[:1]:
                raise ValueError(
                    f"a batch is features (B, D) and labels (B,), got {part.shape} and {part_labels.shape}."
                )
            if done == 0:
                width, dtype = part.shape[1], part.dtype
                _write_header(file, (count, width), dtype)
            if part.shape[1] != width or part.dtype != dtype:
                raise ValueError(f"all features must be {dtype} of width {width}, got {part.dtype} of {part.shape[1]}.")
            if done + len(part) > count:
                raise ValueError(f"more than the {count} samples came that were promised.")
            labels[done : done + len(part)] = part_labels
            done += len(part)
            file.write(np.ascontiguousarray(part).data)
        if done != count:
            raise ValueError(f"{done} samples came, {count} were promised.")
        if count == 0:
            _write_header(file, (0, 0), dtype)
    with _flushed(folder / _LABELS) as file:
        np.save(file, labels)
    return [count, width], dtype.str


def _write_header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


@contextmanager
def _flushed(path: Path) -> Iterator[Any]:
    """A file for writing, which is on the disk when the block ends."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
