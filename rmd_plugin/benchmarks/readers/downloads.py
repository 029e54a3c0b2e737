"""The data folder, and fetching public files into it by checksum.

A file or folder appears under its name only when it is complete and its checksum is right, so parallel jobs and killed
ones leave nothing that breaks the next.
"""

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rmd_plugin import downloads
from rmd_plugin.untrusted import check_zip

from ..errors import ChecksumError, DataFormatError, DataNotFoundError, DownloadError

DATA_DIR_VARIABLE = "RMD_DATA_DIR"
# of an archive; the largest that is downloaded has 0.25 GB
_MAX_BYTES = 1 << 34


def resolve_data_dir(data_dir: str | Path | None, wanted: str) -> Path:
    """Folder that holds the data sets: ``data_dir``, or else the environment variable ``RMD_DATA_DIR``.

    Args:
        data_dir: the folder, or None for the environment variable.
        wanted: what will be looked for in it, for the error.

    Raises:
        DataNotFoundError: neither the argument nor the variable is given. The folder itself need not exist.
    """
    chosen = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not chosen:
        raise DataNotFoundError(
            f"{wanted} is looked for in a data folder, but data_dir is not given and the environment variable "
            f"{DATA_DIR_VARIABLE} is not set. "
            f"Pass data_dir=FOLDER (paths.data_dir=FOLDER on the command line) or export {DATA_DIR_VARIABLE}=FOLDER."
        )
    return Path(chosen).expanduser()


@contextmanager
def downloading(url: str, into: Path) -> Iterator[None]:
    """As ``rmd_plugin.downloads.downloading``, but a content that is not the published one is a ChecksumError."""
    try:
        with downloads.downloading(url, into):
            yield
    except downloads.WrongHashError as error:
        raise ChecksumError(into, str(error)) from error


def fetch(url: str, sha256: str, path: Path) -> Path:
    """Download a file unless it is there already, and check its hash either way.

    Raises:
        ChecksumError: the content is not the published one; a download is not kept.
        DownloadError: the server could not be reached or stopped answering, or the disk is full.
    """
    if not path.exists():
        try:
            downloads.download(url, path, sha256)
        except downloads.WrongHashError as error:
            raise ChecksumError(path, str(error)) from error
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            found.update(chunk)
    if found.hexdigest() != sha256:
        raise ChecksumError(
            path, f"its sha256 is {found.hexdigest()}, the published one is {sha256}. Fetch the file again."
        )
    return path


def unzip(archive: Path, into: Path) -> None:
    """Unpack a zip archive into a folder: aside first, then item by item; what is there already is kept.

    Raises:
        DataFormatError: the archive is damaged. Members never leave the folder, whatever they are named.
        DownloadError: the files could not be written, as on a full disk. Nothing is left behind.
    """
    try:
        into.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into, prefix=".unzip-", ignore_cleanup_errors=True) as aside:
            with zipfile.ZipFile(archive) as opened:
                check_zip(archive, _MAX_BYTES, opened.infolist())
                opened.extractall(aside)
            for item in sorted(Path(aside).iterdir()):
                if not (into / item.name).exists():
                    os.replace(item, into / item.name)
    except DataFormatError:
        raise
    except OSError as error:
        raise DownloadError(f"could not unpack {archive} into {into}: {error}. Is there enough free space?") from error
    except Exception as error:  # zipfile raises nearly every kind on garbage
        raise DataFormatError(archive, f"is not a readable zip archive: {error}") from None
