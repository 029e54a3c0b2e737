"""Detector files: safetensors with a checksum, written aside and renamed. Files of ``torch.save`` are read too.

A file holds the tensors of a state and, in its metadata, the rest of it as JSON and a checksum over both. Nothing in a
file is ever run, and what is refused is refused with one sentence that names the file, the fault and the remedy.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import methodcaller
from os import PathLike
from typing import IO, Any, NamedTuple

import torch
import xxhash
from safetensors.torch import load, save
from torch import Tensor

from rmd_plugin.atomic import replacing

File = str | PathLike[str] | IO[bytes]

#: of what ``state_dict`` gives
STATE_FORMAT = 1
_ABOUT, _CHECKSUM, _TENSOR = "rmd_plugin", "xxh3_128", "__tensor__"
#: the longest header that safetensors reads; the first bytes of a pickle promise a longer one
_LONGEST_HEADER = 100_000_000
_REMEDY = "Take a whole copy, or fit and save again."


class DetectorFileError(ValueError):
    """A file does not hold what was saved; the message names the file, the fault and the remedy."""


class TensorSpec(NamedTuple):
    """What a tensor of a state must be."""

    sizes: str  #: of its dimensions: numbers, and letters that stand for the same number wherever they occur
    dtype: torch.dtype = torch.float64
    finite: bool = True  #: whether NaN and infinity mean damage
    labels: bool = False  #: whether it must ascend within 0, ..., K - 1


def check_tensors(tensors: Mapping[str, Any], specs: Mapping[str, TensorSpec], sizes: dict[str, int]) -> None:
    """Refuse tensors that are missing, or of another type or shape, or not finite.

    Args:
        tensors: by name; further ones are not looked at.
        specs: by name.
        sizes: what letters stand for, for example ``{"D": 640}``; those that are met for the first time are added.

    Raises:
        ValueError: with the first tensor that does not fit.
    """
    for name, (letters, dtype, finite, labels) in specs.items():
        tensor = tensors.get(name)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"the tensor {name!r} is missing. {_REMEDY}")
        dims = letters.split()
        if len(dims) == tensor.ndim:
            for letter, size in zip(dims, tensor.shape, strict=True):
                sizes.setdefault(letter, int(letter) if letter.isdigit() else size)
        expected = tuple(sizes.get(letter, letter) for letter in dims)
        if tuple(tensor.shape) != expected or tensor.dtype != dtype:
            raise ValueError(
                f"the tensor {name!r} has shape {tuple(tensor.shape)} and type {tensor.dtype}, "
                f"expected {expected} and {dtype}. {_REMEDY}"
            )
        if finite and dtype.is_floating_point and not tensor.is_meta and not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise ValueError(f"the tensor {name!r} has {count} NaN or infinite values. {_REMEDY}")
        if labels and not tensor.is_meta and not (len(tensor) and _ascends(tensor, sizes["K"])):
            raise ValueError(f"the tensor {name!r} has other labels than 0 to {sizes['K'] - 1} in order. {_REMEDY}")


def _ascends(labels: Tensor, limit: int) -> bool:
    return bool((labels.diff() > 0).all() and labels[0] >= 0 and labels[-1] < limit)


def check_state(state: Any) -> dict[str, Any]:
    """The state of a detector, if it is one."""
    kinds = {"format": int, "detector": str, "options": dict, "tensors": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(
            "this is not the state of a detector of rmd_plugin. Expected what state_dict() or save() gave."
        )
    if state["format"] != STATE_FORMAT:
        raise ValueError(
            f"the state has format {state['format']}, expected {STATE_FORMAT}. Was it written by a newer version?"
        )
    return state


def write_state(file: File, state: Mapping[str, Any]) -> None:
    """Write a state, tensors and plain data in dicts and lists, to a path or a stream.

    Raises:
        OSError: if it cannot be written; a file that was there is as it was.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state["tensors"].items()}
    rest = {name: value for name, value in state.items() if name != "tensors"}
    about = json.dumps(_lifted(rest, "", tensors), default=methodcaller("item"))  # numpy's numbers
    content = save(tensors, {_ABOUT: about, _CHECKSUM: _checksum(about, tensors)})
    if not isinstance(file, (str, PathLike)):
        file.write(content)
        return
    try:
        with replacing(file, "wb") as stream:
            stream.write(content)
    except OSError as error:
        remedy = "what was there is as it was. Free space or permit writing there, or save to another folder"
        raise OSError(error.errno, f"{error.strerror}; {remedy}", os.fspath(file)) from None


def content_digest(content: bytes) -> str:
    """Hash of what :func:`write_state` wrote, the same for every writing of one state.

    safetensors writes the entries of its metadata in an order that differs from one writing to the next.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]), sort_keys=True)
    return xxhash.xxh3_128_hexdigest(header.encode() + content[end:])


def read_state(file: File, map_location: str | torch.device = "cpu") -> Any:
    """Read what :func:`write_state` or, before, ``torch.save`` wrote, and check that it is whole.

    Raises:
        DetectorFileError: if the file is damaged or holds something else.
        OSError: if it cannot be read.
    """
    with naming(file), open(file, "rb") if isinstance(file, (str, PathLike)) else nullcontext(file) as stream:
        start = stream.read(8)
        stream.seek(-len(start), os.SEEK_CUR)
        read = _read_zip if start[:4] == b"PK\x03\x04" else _read_safetensors
        return read(stream, map_location)


@contextmanager
def naming(file: File) -> Iterator[None]:
    """Turn a ValueError into one that names the file."""
    try:
        yield
    except DetectorFileError:
        raise
    except ValueError as error:
        name = os.fspath(file) if isinstance(file, (str, PathLike)) else getattr(file, "name", "the stream")
        # from None: torch's own texts would follow, and they advise to run what is in the file
        raise DetectorFileError(f"{name} cannot be loaded: {error}") from None


def check_zip(stream: IO[bytes]) -> None:
    """Verify the checksums inside a file of ``torch.save``, which ``torch.load`` does not look at.

    Raises:
        ValueError: if they do not fit, or it is not such a file.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            # torch compresses nothing, and a part marked as a folder would be read as empty memory
            odd = [part.filename for part in archive.infolist() if part.compress_type or part.external_attr]
            bad = odd[0] if odd else archive.testzip()
    except Exception as error:  # every damage ends in another exception of zipfile
        bad = str(error)
    if bad is not None:
        raise _refusal(f"checksums of the zip: {bad}")


def _read_zip(stream: IO[bytes], map_location: str | torch.device) -> Any:
    start = stream.tell()
    check_zip(stream)
    stream.seek(start)
    try:
        return torch.load(stream, map_location=map_location, weights_only=True)
    except Exception:  # many kinds, whose texts advise to run what is in the file
        raise _refusal("it holds more than tensors, numbers and texts") from None


def _read_safetensors(stream: IO[bytes], map_location: str | torch.device) -> dict[str, Any]:
    start = stream.read(8)
    length = int.from_bytes(start, "little")
    if length > _LONGEST_HEADER:
        raise _refusal("it is neither safetensors nor a zip")
    header = stream.read(length)
    try:
        metadata = json.loads(header)["__metadata__"]
        about = metadata[_ABOUT]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _refusal("its header describes no detector") from None
    try:
        tensors = load(start + header + stream.read())
        whole = _checksum(about, tensors) == metadata[_CHECKSUM]
    except Exception as error:  # of safetensors, or of a header with other types
        raise _refusal(str(error)) from None
    if not whole:
        raise _refusal("its checksum does not fit its content")
    tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    try:
        # those that no place inside names are the tensors of the state itself
        return {**_lowered(json.loads(about), tensors), "tensors": tensors}
    except (ValueError, LookupError, TypeError, RecursionError):  # somebody has made a checksum of other content
        raise _refusal("its header describes no detector") from None


def _lifted(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The same with a name in place of each tensor."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {key: _lifted(item, f"{path}.{key}".lstrip("."), tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lifted(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]
    return value


def _lowered(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The same with each tensor in the place of its name; it is taken away from ``tensors``."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors.pop(value[_TENSOR])
        return {key: _lowered(item, tensors) for key, item in value.items()}
    return [_lowered(item, tensors) for item in value] if isinstance(value, list) else value


def _refusal(reason: str) -> ValueError:
    return ValueError(f"it is damaged or of another kind ({reason}); nothing in it was run. {_REMEDY}")


def _checksum(about: str, tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
