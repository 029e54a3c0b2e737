"""Features on disk: computed once, memory-mapped, shared by many jobs, never stale and never half-written.

Layout, all of it readable by plain numpy::

    CACHE_DIR/
      ab/abcdef.../features.npy   (N, D)
      ab/abcdef.../labels.npy     (N,)
      ab/abcdef.../entry.json     what it is, and a checksum of each of the two
      locks/abcdef....lock        held while that entry is being written
      tmp/                        entries in the making

An entry is written aside, flushed to the disk and renamed in one step, so it is there whole or not at all. Both arrays
are read once when an entry is opened, to verify their checksums; a bad entry is made anew. The lock is the operating
system's: it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from filelock import FileLock, Timeout

from rmd_plugin.atomic import replacing
from rmd_plugin.untrusted import check_regular, one_line, read_mapping

log = logging.getLogger(__name__)

_FORMAT = 2
_ENTRY, _FEATURES, _LABELS = "entry.json", "features.npy", "labels.npy"
_ARRAYS = (_FEATURES, _LABELS)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: a lock that the file system does not support
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

#: features (B, D) and labels (B,) of one batch after the other
Batches = Iterable[tuple[np.ndarray, np.ndarray]]
#: the same of several entries: name -> features (B, D), and labels (B,)
SharedBatches = Iterable[tuple[Mapping[str, np.ndarray], np.ndarray]]
StillTrue = Callable[[np.ndarray], bool]


class CacheError(OSError):
    """The cache cannot be used; the message says where, why, and what to do."""


class _Unusable(CacheError):
    """An entry is there, but it is not what this version writes."""


class _CallersError(Exception):
    """Carries an error of the caller's own function past the handling of the cache's errors."""


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """Features and labels of one split."""

    features: np.ndarray  #: shape (N, D), memory-mapped; copy-on-write, so the file never changes
    labels: np.ndarray  #: shape (N,), int64
    hit: bool  #: whether they were found, rather than computed now
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

        Raises:
            CacheError: if the disk is full, or the folder or a file in it cannot be read or written.
            ValueError: if the batches do not hold ``count`` samples of one width.
        """
        found = self.fetch_together(
            {"": key},
            lambda _: (({"": features}, labels) for features, labels in compute()),
            count,
            about=about,
            still_true=None if still_true is None else lambda _, features: still_true(features),
        )
        return found[""]

    def fetch_together(
        self,
        keys: Mapping[str, str],
        compute: Callable[[Sequence[str]], SharedBatches],
        count: int,
        *,
        about: dict[str, Any] | None = None,
        still_true: Callable[[str, np.ndarray], bool] | None = None,
    ) -> dict[str, CachedFeatures]:
        """Several entries of the same samples, as :meth:`fetch` gives one; what is missing is computed in one pass.

        Args:
            keys: name of an entry -> its key.
            compute: gives the batches of the entries of these names, in order.
            count: N.
            about: what they are; ``entry.json`` says the name of the entry besides.
            still_true: the same as of :meth:`fetch`, of the entry of this name.

        Raises:
            CacheError: as :meth:`fetch`.
            ValueError: the same.
        """
        found: dict[str, CachedFeatures] = {}

        def find(level: int) -> dict[str, str]:
            for name, key in keys.items():
                check = None if still_true is None else functools.partial(still_true, name)
                if name not in found and (entry := self._find(self.folder(key), count, check, level)):
                    found[name] = entry
            return {name: key for name, key in keys.items() if name not in found}

        if missing := find(logging.WARNING):
            with ExitStack() as locks:
                for key in sorted(missing.values()):  # all jobs in one order, or two could wait for each other
                    locks.enter_context(self._locked(key))
                # another job may have written them while this one waited
                if missing := find(logging.DEBUG):
                    with self._explained(self.root):
                        self._write(missing, compute, count, about or {})
                        for name, key in missing.items():
                            folder = self.folder(key)
                            found[name] = CachedFeatures(*_open(folder, count), hit=False, folder=folder)
        return {name: found[name] for name in keys}

    def _find(self, folder: Path, count: int, still_true: StillTrue | None, level: int) -> CachedFeatures | None:
        """The entry, if it is there, whole and true; why it is not is logged at ``level``."""
        if not folder.is_dir():
            return None
        try:
            with self._explained(folder):
                features, labels = _open(folder, count)
        except _Unusable as error:
            fault = str(error)
        else:
            if still_true is None or still_true(features):
                return CachedFeatures(features, labels, hit=True, folder=folder)
            fault = (
                "they are not what the network gives today, although weights, data and transform are the same: its "
                "code or a library has changed, or it is random"
            )
        log.log(level, "The cached features in %s cannot be used: %s. They are computed again.", folder, fault)
        return None

    def _write(
        self,
        keys: Mapping[str, str],
        compute: Callable[[Sequence[str]], SharedBatches],
        count: int,
        about: dict[str, Any],
    ) -> None:
        asides = {name: self.root / "tmp" / f"{key}-{uuid.uuid4().hex}" for name, key in keys.items()}
        try:
            for name, key in keys.items():
                if self.folder(key).exists():
                    shutil.rmtree(self.folder(key))  # not ignoring errors: what stayed would pass for the new entry
                asides[name].mkdir(parents=True)
            _write_arrays(asides, _callers(compute, list(keys)), count)
            for name, key in keys.items():
                self._finish(key, asides[name], {**about, **({"layer": name} if name else {})})
        finally:
            for aside in asides.values():
                shutil.rmtree(aside, ignore_errors=True)

    def _finish(self, key: str, aside: Path, about: dict[str, Any]) -> None:
        """Move arrays that are written to their place."""
        folder = self.folder(key)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        checksums = {name: _checksum(aside / name) for name in _ARRAYS}
        entry = {**about, "format": _FORMAT, "key": key, "written": now, "checksums": checksums}
        with replacing(aside / _ENTRY) as file:
            json.dump(entry, file, indent=2, default=str)
        folder.parent.mkdir(exist_ok=True)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # without working locks another job may have been faster: its entry is as good
                raise

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, if it can be had at all: some network drives have none."""
        path = self.root / "locks" / f"{key}.lock"
        lock = FileLock(path)
        with self._explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with suppress(Timeout):
                    lock.acquire(timeout=0)
                if not lock.is_locked:
                    log.info("Another job is computing the features %s...; waiting for it.", key[:12])
                    lock.acquire(poll_interval=0.2)
                for remains in (self.root / "tmp").glob(f"{key}-*"):  # of jobs that were killed
                    shutil.rmtree(remains, ignore_errors=True)
            except (NotImplementedError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                    raise
                log.warning("%s has no file locks; jobs may compute the same features twice.", self.root)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """Turn errors of the operating system into one clear sentence."""
        try:
            yield
        except _CallersError as carrier:
            error = carrier.args[0]
            raise error from error.__cause__
        except CacheError:
            raise
        except OSError as error:
            if error.errno in _NO_SPACE:
                reason, remedy = f"the disk of the feature cache is full ({self.root})", "Free space there"
            else:
                reason = f"the feature cache cannot be used: {error.strerror or error} ({error.filename or path})"
                remedy = "Fix the permissions or delete that file"
            raise CacheError(
                f"{reason}. {remedy}, give another folder with cache_dir=..., or go without: cache_dir=null."
            ) from error


def _callers(compute: Callable[[Sequence[str]], SharedBatches], names: Sequence[str]) -> SharedBatches:
    try:
        yield from compute(names)
    except OSError as error:
        raise _CallersError(error) from error


def _open(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of an entry, whose files are verified before they are parsed; or raises _Unusable."""
    try:
        entry = read_mapping(folder / _ENTRY)
        if entry["format"] != _FORMAT:
            raise _Unusable(f"they have format {entry['format']}, expected {_FORMAT}")
        if entry["key"] != folder.name:
            raise _Unusable(f"they belong to another key, {one_line(entry['key'])}")
        for name in _ARRAYS:
            if entry["checksums"][name] != _checksum(folder / name):
                raise _Unusable(f"the checksum of {name} does not fit")
        # mode c: torch wants writable memory, and writing to it must not change the file
        features = np.load(folder / _FEATURES, mmap_mode="c", allow_pickle=False)
        labels = np.load(folder / _LABELS, allow_pickle=False)
        if not len(features) == len(labels) == count:
            raise _Unusable(f"they have {len(features)} samples, expected {count}")
    except FileNotFoundError as error:
        raise _Unusable(f"{Path(error.filename).name} is missing") from error
    except (ValueError, LookupError, TypeError) as error:
        raise _Unusable(f"they are damaged ({type(error).__name__}: {error})") from error
    return features, labels


def _checksum(path: Path) -> str:
    check_regular(path)
    # mapped: read once, at 10 GB/s where the file is in memory, without a copy
    return xxhash.xxh3_128_hexdigest(np.memmap(path, mode="r").data)


def _write_arrays(folders: Mapping[str, Path], batches: SharedBatches, count: int) -> None:
    """Stream batches into the two files of each entry.

    By plain writes: on a full disk, writing to mapped memory kills the process instead of raising an error.
    """
    labels: list[np.ndarray] = []
    kinds: dict[str, tuple[int, np.dtype[Any]]] = {}
    with ExitStack() as stack:
        files = {name: stack.enter_context(replacing(path / _FEATURES, "wb")) for name, path in folders.items()}
        for parts, part_labels in batches:
            labels.append(part_labels)
            for name, file in files.items():
                part = parts[name]
                if name not in kinds:
                    width, dtype = kinds[name] = part.shape[-1], part.dtype
                    header = {"descr": dtype.str, "fortran_order": False, "shape": (count, width)}
                    np.lib.format.write_array_header_1_0(file, header)
                width, dtype = kinds[name]
                if part.shape != (len(part_labels), width) or part.dtype != dtype:
                    raise ValueError(
                        f"expected features of shape ({len(part_labels)}, {width}) and type {dtype}, one row per "
                        f"label, got {part.shape} and {part.dtype}."
                    )
                file.write(np.ascontiguousarray(part).data)
    came = sum(map(len, labels))
    if not came or came != count:
        raise ValueError(f"{came} samples came, {count} were promised.")
    for path in folders.values():
        with replacing(path / _LABELS, "wb") as file:
            np.save(file, np.concatenate(labels).astype(np.int64))
