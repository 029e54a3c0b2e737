"""Reading other people's files without trusting them: JSON, npy, npz and pt.

Nothing here unpickles a Python object. Whatever is wrong with a file ends in one
:class:`~rmd_plugin.benchmarks.errors.DataFormatError` that names the file, the place and the reason.
"""

import hashlib
import json
import lzma
import math
import os
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from .errors import ChecksumError, DataFormatError, DataNotFoundError

DATA_DIR_VARIABLE = "RMD_DATA_DIR"
_CHUNK = 1 << 20
# a decompression bomb must not take the machine down; features of 32 GiB do not belong into one npz
_MAX_ARRAY_BYTES = 1 << 35

# a member of a zip archive begins so: signature, 5 short fields, 3 long ones (CRC, packed and unpacked size), 2 lengths
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")

# what zipfile, zlib and numpy's header parser raise on garbage
_PARSE_ERRORS = (
    ValueError,
    SyntaxError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OSError,
    RuntimeError,
    MemoryError,
    OverflowError,
    UserWarning,
    DeprecationWarning,
    tokenize.TokenError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


def resolve_data_dir(data_dir: str | Path | None, wanted: str) -> Path:
    """Folder that holds the data sets.

    Args:
        data_dir: the folder, or None for the environment variable ``RMD_DATA_DIR``.
        wanted: what will be looked for in it, for the error.

    Returns:
        The folder as a path; it need not exist.

    Raises:
        DataNotFoundError: neither the argument nor the variable is given.
    """
    chosen = data_dir if data_dir is not None else os.environ.get(DATA_DIR_VARIABLE)
    if not chosen:
        raise DataNotFoundError(
            f"{wanted} is looked for in a data folder, but data_dir is not given and the environment variable "
            f"{DATA_DIR_VARIABLE} is not set. "
            f"Pass data_dir=FOLDER (paths.data_dir=FOLDER on the command line) or export {DATA_DIR_VARIABLE}=FOLDER."
        )
    return Path(chosen).expanduser()


def file_hash(path: str | Path, algorithm: str = "sha256") -> str:
    """Hexadecimal hash of a file's content, read in pieces."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_hash(path: str | Path, expected: str, algorithm: str = "sha256") -> None:
    """Refuse a file whose hash is not ``expected``.

    Raises:
        ChecksumError: the hashes differ.
    """
    found = file_hash(path, algorithm)
    if found != expected.lower():
        raise ChecksumError(path, f"its {algorithm} is {found}, the published one is {expected}. Fetch the file again.")


def safe_name(name: str, listed_in: str | Path) -> str:
    """Check that a file name read from a list stays inside its folder.

    Args:
        name: the name as listed.
        listed_in: the file that lists it, for the error.

    Returns:
        The same name.

    Raises:
        DataFormatError: the name is empty, absolute, or has a folder part.
    """
    if not name or name in (".", "..") or any(mark in name for mark in ("/", "\\", ":", "\0")):
        raise DataFormatError(listed_in, f"lists {name!r} as a file; a plain name inside the same folder is expected")
    return name


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Content of a file of bounded size; a larger one is refused."""
    with open(path, "rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DataFormatError(path, f"is larger than the {max_bytes} bytes expected of such a file", max_bytes)
    return content


def read_text(path: str | Path, max_bytes: int = 1 << 28) -> str:
    """UTF-8 text of a file of bounded size."""
    content = read_bytes(path, max_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFormatError(path, f"is not UTF-8 text: {error.reason}", error.start) from None


def read_json(path: str | Path, max_bytes: int = 1 << 28) -> object:
    """Value of a JSON file, read strictly: no NaN, no doubled keys, bounded size and depth.

    Raises:
        DataFormatError: the file is not such JSON; the offset says where.
    """

    def no_constant(name: str) -> object:
        raise ValueError(f"the constant {name} is not JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("an object holds the same key twice")
        return found

    text = read_text(path, max_bytes)
    try:
        value: object = json.loads(text, parse_constant=no_constant, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode("utf-8", "surrogatepass"))
        raise DataFormatError(path, f"is not JSON: {error.msg}", offset) from None
    except RecursionError:
        raise DataFormatError(path, "is not JSON of this benchmark: nested too deeply") from None
    except ValueError as error:
        raise DataFormatError(path, f"is not JSON: {error}") from None
    return value


def _read_header(stream: IO[bytes], path: str | Path, what: str, start: int) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and data offset of an npy stream, before any data is read."""
    try:
        # numpy warns on headers that Python 2 wrote and on invalid escapes in garbage; neither is a good file
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            elif version == (2, 0):
                shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"npy format {version[0]}.{version[1]} is not read here; 1.0 and 2.0 are")
            data_start = stream.tell()
    except _PARSE_ERRORS as error:
        raise DataFormatError(path, f"{what} has no valid npy header: {_brief(error)}", start) from None
    if dtype.hasobject:
        raise DataFormatError(path, f"{what} holds Python objects, which would have to be unpickled: refused", start)
    if any(size < 0 for size in shape):
        raise DataFormatError(path, f"{what} has a negative size in its shape {shape}", start)
    return tuple(int(size) for size in shape), dtype, data_start


def _brief(error: BaseException) -> str:
    return str(error).split("\n")[0][:200] or type(error).__name__


def read_npy(path: str | Path, *, mmap: bool = False) -> np.ndarray:
    """Array of an npy file, never unpickled.

    Args:
        path: the file.
        mmap: map the file into memory (read-only) instead of reading it.

    Raises:
        DataFormatError: the file is no npy file, is truncated, or holds Python objects.
    """
    with open(path, "rb") as stream:
        shape, dtype, start = _read_header(stream, path, "the file", 0)
    expected, found = start + math.prod(shape) * dtype.itemsize, os.path.getsize(path)
    if found != expected:
        raise DataFormatError(
            path, f"{dtype} of shape {shape} needs {expected} bytes, the file has {found}", min(found, expected)
        )
    try:
        array: np.ndarray = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except _PARSE_ERRORS as error:
        raise DataFormatError(path, f"cannot be read: {_brief(error)}") from None
    return array


def read_npz(
    path: str | Path, keys: Iterable[str] | None = None, *, max_bytes: int = _MAX_ARRAY_BYTES
) -> dict[str, np.ndarray]:
    """Arrays of an npz file, never unpickled.

    The header of each array is compared with the size of its archive member before anything is allocated.

    Args:
        path: the file.
        keys: names of the arrays to read; None reads all.
        max_bytes: largest array to unpack.

    Raises:
        DataFormatError: the file is no npz file, is truncated, lacks a key, or holds Python objects.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            if keys is None:
                keys = [name.removesuffix(".npy") for name in members]
            for key in keys:
                member = members.get(f"{key}.npy", members.get(key))
                if member is None:
                    have = ", ".join(sorted(name.removesuffix(".npy") for name in members)) or "nothing"
                    raise DataFormatError(path, f"has no array {key!r}; it has {have}")
                arrays[key] = _read_member(archive, member, path, key, max_bytes)
    except DataFormatError:
        raise
    except FileNotFoundError:
        raise
    except _PARSE_ERRORS as error:
        # where the file system has the last word (no permission, a folder) there is nothing to look at
        reason, offset = _where_cut(path) if os.path.isfile(path) and os.access(path, os.R_OK) else ("", None)
        raise DataFormatError(path, f"is not a readable npz file: {reason or _brief(error)}", offset) from None
    return arrays


def _where_cut(path: str | Path) -> tuple[str, int | None]:
    """Where an archive without a readable index ends, found by going from member to member.

    Returns:
        What is wrong, and at which byte; an empty text and None if the members do not tell.
    """
    size, start = os.path.getsize(path), 0
    with open(path, "rb") as stream:
        while True:
            stream.seek(start)
            header = stream.read(_LOCAL_HEADER.size)
            if len(header) < 4 or header[:4] != b"PK\x03\x04":
                break
            if len(header) < _LOCAL_HEADER.size:
                return f"it ends inside the member that starts at byte {start}", size
            fields = _LOCAL_HEADER.unpack(header)
            packed, name_size, extra_size = fields[7], fields[9], fields[10]
            name = stream.read(name_size).decode("utf-8", "replace").removesuffix(".npy")
            extra = stream.read(extra_size)
            if packed == 0xFFFFFFFF and len(extra) >= 20:
                packed = int.from_bytes(extra[12:20], "little")  # numpy writes sizes as 64 bits, after the unpacked one
            end = start + _LOCAL_HEADER.size + name_size + extra_size + packed
            if end > size:
                return f"it ends inside array {name!r}, which starts at byte {start}", size
            start = end
    if start == 0:
        return "", 0
    return "the index after its arrays is damaged or cut off", start


def _read_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str | Path, key: str, max_bytes: int
) -> np.ndarray:
    what, start = f"array {key!r}", member.header_offset
    with archive.open(member) as stream:
        shape, dtype, header = _read_header(stream, path, what, start)
        size = math.prod(shape) * dtype.itemsize
        if header + size != member.file_size:
            raise DataFormatError(
                path, f"{what}: {dtype} of shape {shape} needs {size} bytes, it has {member.file_size - header}", start
            )
        if size > max_bytes:
            raise DataFormatError(path, f"{what} unpacks to {size} bytes, more than the {max_bytes} allowed", start)
    try:
        with archive.open(member) as stream:
            array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
            # zipfile checks the CRC at the end of the member only
            if stream.read(1):
                raise ValueError("data after the end of the array")
    except _PARSE_ERRORS as error:
        raise DataFormatError(path, f"{what} is damaged: {_brief(error)}", start) from None
    return array


def read_pt(path: str | Path) -> dict[str, Tensor]:
    """Dictionary of tensors of a ``torch.save`` file, loaded with ``weights_only=True``.

    Raises:
        DataFormatError: the file is no such file, is damaged, or holds anything but tensors.
    """
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
