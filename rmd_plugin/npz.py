"""Arrays of npz files that somebody else wrote, and headers of npy files. Nothing here unpickles a Python object."""

from __future__ import annotations

import math
import os
import warnings
import zipfile
from collections.abc import Iterable
from typing import IO, Any

import numpy as np

from rmd_plugin.untrusted import DataFormatError, check_regular, check_zip

# features of 32 GiB do not belong into one npz
_MAX_BYTES = 1 << 35


def check_header(
    stream: IO[bytes], size: int, path: str | os.PathLike[str], what: str, start: int = 0
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Refuse an npy stream of ``size`` bytes that announces another array, before numpy takes memory for it.

    Returns:
        Its shape, whether columns come first (Fortran's order), and its type; the stream stands behind the header.
    """
    try:
        # numpy warns on headers that Python 2 wrote and on invalid escapes in garbage; neither is a good file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"npy format {version[0]}.{version[1]} is not read here; 1.0 and 2.0 are")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, by_columns, dtype = read(stream)
            found = size - stream.tell()
    except Exception as error:  # the parser of headers raises nearly every kind on garbage
        raise DataFormatError(path, f"{what} has no valid npy header: {brief(error)}", start) from None
    if dtype.hasobject:
        raise DataFormatError(path, f"{what} holds Python objects, which would have to be unpickled: refused", start)
    if any(length < 0 for length in shape):
        raise DataFormatError(path, f"{what} has a negative size in its shape {shape}", start)
    needed = math.prod(shape) * dtype.itemsize
    if needed != found:
        raise DataFormatError(path, f"{what}: {dtype} of shape {shape} needs {needed} bytes, it has {found}", start)
    return shape, by_columns, dtype


def brief(error: BaseException) -> str:
    """The first line of an error, of limited length."""
    return str(error).split("\n")[0][:200] or type(error).__name__


def read_npz(
    path: str | os.PathLike[str], keys: Iterable[str] | None = None, *, max_bytes: int = _MAX_BYTES
) -> dict[str, np.ndarray]:
    """Arrays of an npz file, all or those of ``keys``, of ``max_bytes`` together at most (``RMD_MAX_GIB``: more)."""
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            wanted = list(members if keys is None else keys)
            missing = [key for key in wanted if key not in members]
            if missing:
                raise DataFormatError(
                    path, f"has no array {missing[0]!r}; it has {', '.join(sorted(members)) or 'nothing'}"
                )
            check_zip(path, max_bytes, [members[key] for key in wanted])
            return {key: _read_member(archive, members[key], path, key) for key in wanted}
    except DataFormatError:
        raise
    except Exception as error:
        size = os.path.getsize(path)
        # a zip archive has its index at the end, so a truncated one cannot be opened at all
        hint = f"; it ends at byte {size}, truncated or damaged before" if isinstance(error, zipfile.BadZipFile) else ""
        raise DataFormatError(path, f"is not a readable npz file: {brief(error)}{hint}", size) from None


def _read_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str | os.PathLike[str], key: str
) -> np.ndarray:
    what, start = f"array {key!r}", member.header_offset
    if member.compress_type not in (
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    ):  # the other ways take memory as they like
        raise DataFormatError(path, f"{what} is packed in a way that numpy does not write", start)
    with archive.open(member) as stream:
        check_header(stream, member.file_size, path, what, start)
    try:
        with archive.open(member) as stream:  # anew, because zipfile checks no CRC after a seek
            array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
            # it checks the CRC at the end of the member only
            if stream.read(1):
                raise ValueError("data after the end of the array")
    except Exception as error:
        raise DataFormatError(path, f"{what} is damaged: {brief(error)}", start) from None
    return array
