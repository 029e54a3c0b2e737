"""Arrays and tensors of npy, npz and pt files. Nothing here unpickles a Python object."""

import math
import os
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from ..errors import DataFormatError

# a decompression bomb must not take the machine down; features of 32 GiB do not belong into one npz
_MAX_ARRAY_BYTES = 1 << 35


def _check_header(stream: IO[bytes], size: int, path: str | Path, what: str, start: int = 0) -> int:
    """Bytes of the array that an npy stream of ``size`` bytes announces, before numpy takes memory for them."""
    try:
        # numpy warns on headers that Python 2 wrote and on invalid escapes in garbage; neither is a good file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"npy format {version[0]}.{version[1]} is not read here; 1.0 and 2.0 are")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
            found = size - stream.tell()
    except Exception as error:  # the parser of headers raises nearly every kind on garbage
        raise DataFormatError(path, f"{what} has no valid npy header: {_brief(error)}", start) from None
    if dtype.hasobject:
        raise DataFormatError(path, f"{what} holds Python objects, which would have to be unpickled: refused", start)
    if any(length < 0 for length in shape):
        raise DataFormatError(path, f"{what} has a negative size in its shape {shape}", start)
    needed = math.prod(shape) * dtype.itemsize
    if needed != found:
        raise DataFormatError(path, f"{what}: {dtype} of shape {shape} needs {needed} bytes, it has {found}", start)
    return needed


def _brief(error: BaseException) -> str:
    return str(error).split("\n")[0][:200] or type(error).__name__


def read_npy(path: str | Path) -> np.ndarray:
    """Array of an npy file, mapped into memory read-only."""
    with open(path, "rb") as stream:
        _check_header(stream, os.path.getsize(path), path, "the file")
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise DataFormatError(path, f"cannot be read: {_brief(error)}") from None
    return array


def read_npz(
    path: str | Path, keys: Iterable[str] | None = None, *, max_bytes: int = _MAX_ARRAY_BYTES
) -> dict[str, np.ndarray]:
    """Arrays of an npz file, all or those of ``keys``, of at most ``max_bytes`` each."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            wanted = members if keys is None else keys
            missing = [key for key in wanted if key not in members]
            if missing:
                raise DataFormatError(
                    path, f"has no array {missing[0]!r}; it has {', '.join(sorted(members)) or 'nothing'}"
                )
            return {key: _read_member(archive, members[key], path, key, max_bytes) for key in wanted}
    except (DataFormatError, FileNotFoundError):
        raise
    except Exception as error:
        size = os.path.getsize(path)
        # a zip archive has its index at the end, so a truncated one cannot be opened at all
        hint = f"; it ends at byte {size}, truncated or damaged before" if isinstance(error, zipfile.BadZipFile) else ""
        raise DataFormatError(path, f"is not a readable npz file: {_brief(error)}{hint}", size) from None


def _read_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str | Path, key: str, max_bytes: int
) -> np.ndarray:
    what, start = f"array {key!r}", member.header_offset
    with archive.open(member) as stream:
        size = _check_header(stream, member.file_size, path, what, start)
    if size > max_bytes:
        raise DataFormatError(path, f"{what} unpacks to {size} bytes, more than the {max_bytes} allowed", start)
    try:
        with archive.open(member) as stream:  # anew, because zipfile checks no CRC after a seek
            array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
            # it checks the CRC at the end of the member only
            if stream.read(1):
                raise ValueError("data after the end of the array")
    except Exception as error:
        raise DataFormatError(path, f"{what} is damaged: {_brief(error)}", start) from None
    return array


def read_pt(path: str | Path) -> dict[str, Tensor]:
    """Dictionary of tensors of a ``torch.save`` file, loaded with ``weights_only=True``."""
    if not Path(path).is_file():
        raise FileNotFoundError(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch's legacy reader raises nearly every kind on garbage
        raise DataFormatError(
            path, "is damaged, or holds more than tensors, and torch.load(weights_only=True) refuses it"
        ) from None
    if not isinstance(loaded, dict):
        raise DataFormatError(path, f"holds a {type(loaded).__name__}; a dict of tensors is expected")
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise DataFormatError(path, f"entry {key!r} is a {type(value).__name__}; a tensor is expected")
    return dict(loaded)
