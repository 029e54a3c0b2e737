"""Fetching public files by checksum.

A file appears under its name only when it is complete and its checksum is right: everything is written aside
and renamed, so parallel jobs and killed ones leave nothing that breaks the next.
"""

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from tqdm import tqdm

from .errors import ChecksumError, DownloadError
from .files import check_hash

_CHUNK = 1 << 20


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
