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
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from rmd_plugin.atomic import replacing

log = logging.getLogger(__name__)

_FORMAT = 1
_ENTRY, _FEATURES, _LABELS = "entry.json", "features.npy", "labels.npy"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: a lock that the file system does not support
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

#: features (B, D) and labels (B,) of one batch after the other
Batches = Iterable[tuple[np.ndarray, np.ndarray]]


_T = TypeVar("_T")


class CacheError(OSError):
    """The cache cannot be used; the message says where, why, and what to do."""


class _Damaged(Exception):
    """An entry is there, but it is not what was written."""


class _Foreign(Exception):
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
        still_true: Callable[[np.ndarray], bool] | None = None,
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
            found = self._usable(folder, count, still_true, warn=True)
            if found is not None:
                return found
            with self._locked(key) as alone:
                # another job may have written it while this one waited
                found = self._usable(folder, count, still_true, warn=False)
                if found is not None:
                    return found
                if alone:
                    self._sweep(key)
                self._discard(folder)
                self._write(key, folder, _shielded_call(compute), count, about or {})
            features, labels = _open(folder, count)
        return CachedFeatures(features, labels, hit=False, folder=folder)

    # -- reading --------------------------------------------------------------------------------------------------

    def _usable(
        self, folder: Path, count: int, still_true: Callable[[np.ndarray], bool] | None, *, warn: bool
    ) -> CachedFeatures | None:
        level = logging.WARNING if warn else logging.DEBUG
        try:
            features, labels = _open(folder, count)
        except FileNotFoundError:
            return None
        except _Damaged as damage:
            log.log(level, "The cached features in %s are damaged (%s) and are computed again.", folder, damage)
            return None
        if still_true is not None and not _shielded_call(still_true, features):
            log.log(
                level,
                "The cached features in %s are not what the network gives today, although weights, data and transform "
                "are the same: its code or a library has changed, or it is random. They are computed again.",
                folder,
            )
            return None
        return CachedFeatures(features, labels, hit=True, folder=folder)

    # -- writing --------------------------------------------------------------------------------------------------

    def _write(self, key: str, folder: Path, batches: Batches, count: int, about: dict[str, Any]) -> None:
        aside = self.root / "tmp" / f"{key}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        aside.mkdir(parents=True)
        try:
            shape, dtype = _write_arrays(aside, batches, count)
            entry = {"format": _FORMAT, "key": key, "shape": shape, "dtype": dtype, "written": _now(), **about}
            with replacing(aside / _ENTRY) as file:
                json.dump(entry, file, indent=2, default=str)
                _flush(file)
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(aside, folder)
            except OSError as error:
                # without working locks another job may have been faster: its entry is as good
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                shutil.rmtree(aside, ignore_errors=True)
            _flush_folder(folder.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def _discard(self, folder: Path) -> None:
        """Take a bad entry away: out of sight in one step, then file by file."""
        if folder.exists():
            aside = self.root / "tmp" / f"{folder.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder, aside)
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
    def _locked(self, key: str) -> Iterator[bool]:
        """Hold the lock of a key; says whether it could be had at all (some network drives have none)."""
        path = self._lock_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            _acquire(lock, key)
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            log.warning("%s has no file locks; jobs may compute the same features twice.", self.root)
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    @contextmanager
    def _explained(self, folder: Path) -> Iterator[None]:
        """Turn errors of the operating system into one clear sentence."""
        try:
            yield
        except _Foreign as carrier:
            raise carrier.error from carrier.error.__cause__
        except _Damaged as damage:
            # it was written a moment ago: something else writes to this folder
            raise CacheError(
                f"the features just written to {folder} are damaged: {damage}. Is the disk all right?"
            ) from damage
        except OSError as error:
            if error.errno in _NO_SPACE:
                reason = f"the disk of the feature cache is full ({self.root}, {_free(self.root)} free)"
                remedy = "Free space there, give another folder with cache_dir=..."
            else:
                reason = f"the feature cache cannot be used: {error.strerror or error} ({error.filename or folder})"
                remedy = "Mend the permissions or delete that file, give another folder with cache_dir=..."
            raise CacheError(f"{reason}. {remedy}, or go without: cache_dir=null.") from error


def _shielded(batches: Batches) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    try:
        yield from batches
    except OSError as error:
        raise _Foreign(error) from error


def _shielded_call(function: Callable[..., _T], *arguments: object) -> _T:
    try:
        return function(*arguments)
    except OSError as error:
        raise _Foreign(error) from error


def _acquire(lock: FileLock, key: str) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("Another job is computing the features %s...; waiting for it.", key[:12])
        # the operating system frees the lock even if that job is killed
        lock.acquire(poll_interval=0.2)


def _open(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of an entry, checked against its description.

    Raises:
        FileNotFoundError: if there is no entry.
        _Damaged: if it is not what was written.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no entry", str(folder))
    try:
        entry = json.loads((folder / _ENTRY).read_bytes())
        if entry["format"] != _FORMAT:
            raise _Damaged(f"format {entry['format']}, expected {_FORMAT}")
        features = _map(folder / _FEATURES)
        labels = np.array(_map(folder / _LABELS))
        expected = (tuple(entry["shape"]), entry["dtype"])
    except FileNotFoundError as error:
        raise _Damaged(f"{Path(error.filename).name} is missing") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise _Damaged(str(error) or type(error).__name__) from error
    if (features.shape, features.dtype.str) != expected or labels.shape != (count,) or len(features) != count:
        raise _Damaged(
            f"features {features.shape} {features.dtype.str} and labels {labels.shape}, expected {expected[0]} "
            f"{expected[1]} and ({count},)"
        )
    return features, labels


def _map(path: Path) -> np.ndarray:
    # mode c: torch wants writable memory, and writing to it must not change the file
    return np.load(path, mmap_mode="c", allow_pickle=False)


def _write_arrays(folder: Path, batches: Batches, count: int) -> tuple[list[int], str]:
    """Stream batches into the two files.

    By plain writes: on a full disk, writing to mapped memory kills the process instead of raising an error.
    """
    labels = np.empty(count, dtype=np.int64)
    done, width, dtype = 0, 0, np.dtype(np.float32)
    with open(folder / _FEATURES, "wb") as file:
        for part, part_labels in _shielded(batches):
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
        _flush(file)
    with open(folder / _LABELS, "wb") as file:
        _write_header(file, labels.shape, labels.dtype)
        file.write(labels.data)
        _flush(file)
    return [count, width], dtype.str


def _write_header(file: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    # makes the rename itself survive a power cut, where folders can be opened (not on Windows)
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _free(folder: Path) -> str:
    with suppress(OSError):
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB"
    return "an unknown amount"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
