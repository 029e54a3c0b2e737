"""Fetching public files by checksum, and unpacking archives without leaving the target folder.

A file appears under its name only when it is complete and its checksum is right: everything is written aside
and renamed, so parallel jobs and killed ones leave nothing that breaks the next.
"""

import hashlib
import http.client
import os
import shutil
import stat
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from tqdm import tqdm

from .errors import ChecksumError, DataFormatError, DownloadError
from .files import check_hash

_CHUNK = 1 << 20
_MAX_UNPACKED = 1 << 34


@dataclass(frozen=True)
class Remote:
    """A public file.

    Attributes:
        url: where it is, ``https`` or ``http``.
        hash: its published hash, hexadecimal.
        algorithm: name of the hash, ``sha256`` or ``md5``.
        size: largest number of bytes to accept; None for no bound but the disk.
    """

    url: str
    hash: str
    algorithm: str = "sha256"
    size: int | None = None


def fetch(remote: Remote, path: str | Path, *, timeout: float = 30.0, progress: bool = True) -> Path:
    """Download a file unless it is there already, and check its hash either way.

    Args:
        remote: what to download.
        path: where to put it; its folder is made.
        timeout: seconds without an answer before giving up.
        progress: show a progress bar.

    Returns:
        The path.

    Raises:
        ChecksumError: the content is not the published one; nothing is left under ``path`` by this call.
        DownloadError: the server could not be reached or stopped answering, or the disk is full.
    """
    path = Path(path)
    if path.exists():
        check_hash(path, remote.hash, remote.algorithm)
        return path
    if urllib.parse.urlsplit(remote.url).scheme not in ("https", "http"):
        raise DownloadError(f"refusing to download {remote.url}: only https and http are allowed.")
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        partial = Path(name)
        with os.fdopen(handle, "wb") as target:
            found = _stream(remote, target, timeout, progress)
        if found != remote.hash.lower():
            raise ChecksumError(
                path, f"{remote.url} gave {remote.algorithm} {found}, the published one is {remote.hash}. Not kept."
            )
        os.replace(partial, path)
    except (OSError, urllib.error.URLError, http.client.HTTPException) as error:
        raise DownloadError(
            f"could not download {remote.url} to {path}: {error}. "
            "Download it by hand and put it there, or try again with a connection and enough free disk space."
        ) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return path


def _stream(remote: Remote, target: IO[bytes], timeout: float, progress: bool) -> str:
    digest = hashlib.new(remote.algorithm, usedforsecurity=False)
    request = urllib.request.Request(remote.url, headers={"User-Agent": "rmd-plugin"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        announced = answer.headers.get("Content-Length")
        total = int(announced) if announced and announced.isdigit() else remote.size
        name = PurePosixPath(urllib.parse.urlsplit(remote.url).path).name
        received = 0
        with tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=not progress) as bar:
            while chunk := answer.read(_CHUNK):
                received += len(chunk)
                if remote.size is not None and received > remote.size:
                    raise OSError(f"more than the expected {remote.size} bytes came")
                target.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
        if total is not None and announced and received != total:
            raise OSError(f"{received} of {total} bytes came")
    return digest.hexdigest()


def extract(archive: str | Path, into: str | Path, *, max_bytes: int = _MAX_UNPACKED) -> None:
    """Unpack a tar (also compressed) or zip archive, every member inside ``into``.

    All members are checked before the first is written. They are unpacked aside and then moved to their places.

    Args:
        archive: the archive.
        into: target folder; made if absent. A file or folder of the same name at its top is replaced.
        max_bytes: largest total size to unpack.

    Raises:
        DataFormatError: the archive is damaged, too large, or has a member that is a link or a device, or whose
            name is absolute or leads out of the folder.
    """
    archive, into = Path(archive), Path(into)
    into.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=into, prefix=f".{archive.name}."))
    try:
        _extract_checked(archive, aside, max_bytes)
        for item in sorted(aside.iterdir()):
            target = into / item.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            os.replace(item, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _extract_checked(archive: Path, aside: Path, max_bytes: int) -> None:
    damaged = (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        NotImplementedError,
        ValueError,
    )
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                _write_members(list(_zip_members(archive, opened)), aside, archive, max_bytes)
        else:
            with tarfile.open(archive) as opened_tar:
                _write_members(list(_tar_members(archive, opened_tar)), aside, archive, max_bytes)
    except DataFormatError:
        raise
    except damaged as error:
        raise DataFormatError(archive, f"is not a readable tar or zip archive: {error}") from None


class _Member:
    """One regular file of an archive: checked name, announced size, a way to open it."""

    def __init__(
        self,
        name: PurePosixPath,
        size: int,
        tar: tuple[tarfile.TarFile, tarfile.TarInfo] | None = None,
        zipped: tuple[zipfile.ZipFile, zipfile.ZipInfo] | None = None,
    ) -> None:
        self.name, self.size, self._tar, self._zip = name, size, tar, zipped

    def open(self) -> IO[bytes]:
        if self._zip is not None:
            return self._zip[0].open(self._zip[1])
        stream = self._tar[0].extractfile(self._tar[1]) if self._tar is not None else None
        if stream is None:
            raise EOFError(f"member {self.name} cannot be read")
        return stream


def _tar_members(archive: Path, opened: tarfile.TarFile) -> Iterator[_Member]:
    for info in opened:
        name = _inside(archive, info.name, info.offset)
        if info.isreg():
            yield _Member(name, info.size, tar=(opened, info))
        elif not info.isdir():
            raise DataFormatError(archive, f"member {info.name!r} is a link or a device: refused", info.offset)


def _zip_members(archive: Path, opened: zipfile.ZipFile) -> Iterator[_Member]:
    for info in opened.infolist():
        name = _inside(archive, info.filename, info.header_offset)
        mode = info.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise DataFormatError(archive, f"member {info.filename!r} is a link: refused", info.header_offset)
        if not info.is_dir():
            yield _Member(name, info.file_size, zipped=(opened, info))


def _inside(archive: Path, name: str, offset: int) -> PurePosixPath:
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or any(mark in name for mark in ("\\", ":", "\0")):
        raise DataFormatError(archive, f"member {name!r} leads out of the target folder: refused", offset)
    return pure


def _write_members(members: list[_Member], aside: Path, archive: Path, max_bytes: int) -> None:
    total = sum(member.size for member in members)
    if total > max_bytes:
        raise DataFormatError(archive, f"unpacks to {total} bytes, more than the {max_bytes} allowed")
    for member in members:
        target = aside / member.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with member.open() as source, open(target, "xb") as out:
            written = 0
            while chunk := source.read(_CHUNK):
                written += len(chunk)
                if written > member.size:
                    raise DataFormatError(archive, f"member {str(member.name)!r} is longer than it announces")
                out.write(chunk)
            if written != member.size:
                raise DataFormatError(archive, f"member {str(member.name)!r} is truncated")
