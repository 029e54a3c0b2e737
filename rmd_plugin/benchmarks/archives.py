"""Unpacking archives without leaving the target folder."""

import functools
import gzip
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from .errors import DataFormatError, DownloadError

_CHUNK = 1 << 20
_MAX_UNPACKED = 1 << 34
# what tarfile, zipfile and the decompressors raise on garbage; gzip's own error and bad offsets are OSErrors
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
    OSError,
)


@dataclass(frozen=True)
class _Member:
    """One regular file of an archive: checked name, announced size, a way to open it."""

    name: PurePosixPath
    size: int
    open: Callable[[], IO[bytes] | None]


def extract(archive: str | Path, into: str | Path, *, max_bytes: int = _MAX_UNPACKED) -> None:
    """Unpack a tar (also compressed) or zip archive, every member inside ``into``.

    All members are checked before the first is written. They are unpacked aside, and each file or folder at the top is
    then moved to its place in one step; a folder that is there already, from a job that was faster, is kept.

    Args:
        archive: the archive.
        into: target folder; made if absent.
        max_bytes: largest total size to unpack.

    Raises:
        DataFormatError: the archive is damaged, too large, or has a member that is a link or a device, or whose
            name is absolute or leads out of the folder.
        DownloadError: the files could not be written, as on a full disk. Nothing is left behind.
    """
    archive, into = Path(archive), Path(into)
    aside: Path | None = None
    try:
        into.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=into, prefix=f".{archive.name}."))
        _extract_checked(archive, aside, max_bytes)
        for item in sorted(aside.iterdir()):
            if not (into / item.name).is_dir():
                os.replace(item, into / item.name)
    except OSError as error:
        raise DownloadError(f"could not unpack {archive} into {into}: {error}. Is there enough free space?") from error
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


def _extract_checked(archive: Path, aside: Path, max_bytes: int) -> None:
    with _open(archive) as opened:
        try:
            if isinstance(opened, zipfile.ZipFile):
                members = list(_zip_members(archive, opened))
            else:
                members = list(_tar_members(archive, opened))
        except DataFormatError:
            raise
        except _DAMAGED as error:
            raise _damaged(archive, error) from None
        total = sum(member.size for member in members)
        if total > max_bytes:
            raise DataFormatError(archive, f"unpacks to {total} bytes, more than the {max_bytes} allowed")
        for member in members:
            target = aside / member.name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch(exist_ok=False)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise DataFormatError(archive, f"member {str(member.name)!r} clashes with another one") from None
            with open(target, "wb") as out:
                for chunk in _chunks(archive, member):
                    out.write(chunk)


def _open(archive: Path) -> zipfile.ZipFile | tarfile.TarFile:
    try:
        return zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive)
    except _DAMAGED as error:
        raise _damaged(archive, error) from None


def _damaged(archive: Path, error: Exception) -> DataFormatError:
    return DataFormatError(archive, f"is not a readable tar or zip archive: {str(error) or type(error).__name__}")


def _chunks(archive: Path, member: _Member) -> Iterator[bytes]:
    """Content of a member, exactly as long as it announces; every fault in reading it is the archive's."""
    done = 0
    try:
        source = member.open()
        if source is None:
            raise EOFError(f"member {str(member.name)!r} has no content")
        with source:
            while chunk := source.read(_CHUNK):
                done += len(chunk)
                if done > member.size:
                    break
                yield chunk
    except _DAMAGED as error:
        raise _damaged(archive, error) from None
    if done != member.size:
        raise DataFormatError(archive, f"member {str(member.name)!r} is not the {member.size} bytes that it announces")


def _tar_members(archive: Path, opened: tarfile.TarFile) -> Iterator[_Member]:
    for info in opened:
        name = _inside(archive, info.name, info.offset)
        if info.isreg():
            yield _Member(name, info.size, functools.partial(opened.extractfile, info))
        elif not info.isdir():
            raise DataFormatError(archive, f"member {info.name!r} is a link or a device: refused", info.offset)
    # the checksum of a compressed stream is compared at its very end, which tarfile leaves unread
    while opened.fileobj is not None and opened.fileobj.read(_CHUNK):
        pass


def _zip_members(archive: Path, opened: zipfile.ZipFile) -> Iterator[_Member]:
    for info in opened.infolist():
        name = _inside(archive, info.filename, info.header_offset)
        mode = info.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise DataFormatError(archive, f"member {info.filename!r} is a link: refused", info.header_offset)
        if not info.is_dir():
            yield _Member(name, info.file_size, functools.partial(opened.open, info))


def _inside(archive: Path, name: str, offset: int) -> PurePosixPath:
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or any(mark in name for mark in ("\\", ":", "\0")):
        raise DataFormatError(archive, f"member {name!r} leads out of the target folder: refused", offset)
    return pure
