"""Reads the plain part of anybody's checkpoint without running a line of what is pickled in it.

Checkpoints of other people hold networks, partials, paths and configs, whose classes may not be here, and which
``torch.load(..., weights_only=True)`` refuses. Here every class and function is replaced by an inert stand-in; a tensor
is remembered by its place in the file and read when it is asked for.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import zipfile
from collections.abc import Callable
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
#: storages that carry their type in their name
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


class CheckpointError(ValueError):
    """A file is no whole checkpoint, or what is asked for cannot be read without its code."""


class StandIn:
    """Stands for an object of any class, or for a function: takes whatever a pickle does to it, and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> StandIn:
        """What it would have made is inert, too."""
        return self

    def _ignore(self, *args: object) -> None:
        pass

    __setitem__ = append = extend = add = _ignore


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    key: str


class _SavedTensor:
    """A tensor that is still in the file: a storage, and where in it."""

    __slots__ = ("dtype", "layout", "storage")

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> None:
        self.storage, self.layout = storage, (size, stride, offset)
        # torch's second version ends with requires_grad, hooks and metadata, its third has the type before the last
        named = [value for value in rest if isinstance(value, torch.dtype)]
        self.dtype = named[0] if named else getattr(storage, "dtype", None)


class _InertUnpickler(pickle._Unpickler):  # the one in C looks registered extensions up by itself
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    # plain data have no state, and whatever else is on the stack must not be changed
    dispatch[pickle.BUILD[0]] = lambda self: self.stack.pop()

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _SavedTensor
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        return type(name, (StandIn,), {"__module__": module})  # a class of its own, so that an error can name it

    def get_extension(self, code: int) -> None:
        self.stack.append(StandIn)  # an object that somebody has registered

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, _ = pid
        if kind != "storage" or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it asks for {kind!r}, not for a storage")
        return _Storage(_STORAGES.get(storage_type.__name__), key)


class Checkpoint:
    """What ``torch.save`` wrote, by key; see :meth:`plain`.

    Args:
        path: of the file.

    Raises:
        CheckpointError: if it is no whole file of ``torch.save``.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = str(path)
        self.content: Any = self._guarded(_unpickle)

    def plain(self, value: Any, map_location: str | torch.device) -> Any:
        """A part of the content with its tensors, which are read from the file now.

        Raises:
            CheckpointError: if it holds anything but tensors, numbers, texts and containers of these.
        """
        done: dict[int, Any] = {}  # what stands in several places is read once
        storages: dict[str, bytearray] = {}  # by key; tensors may be views of the same one

        def read(value: Any, file: zipfile.ZipFile) -> Any:
            if id(value) not in done:
                if isinstance(value, _SavedTensor):
                    done[id(value)] = _read_tensor(file, value, storages).to(map_location)
                elif isinstance(value, dict):
                    done[id(value)] = {read(key, file): read(item, file) for key, item in value.items()}
                elif isinstance(value, (list, tuple)):
                    done[id(value)] = type(value)([read(item, file) for item in value])
                elif isinstance(value, (StandIn, type)):
                    kind = value if isinstance(value, type) else type(value)
                    name = f"{kind.__module__}.{kind.__name__}"
                    raise CheckpointError(f"{self._path!r} holds a {name} where plain data are expected.")
                else:
                    return value
            return done[id(value)]

        return self._guarded(lambda file: read(value, file))

    def _guarded(self, read: Callable[[zipfile.ZipFile], Any]) -> Any:
        try:
            with zipfile.ZipFile(self._path) as file:
                return read(file)
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # whatever nonsense a damaged or hostile file leads to
            raise CheckpointError(
                f"expected a checkpoint that torch.save wrote, but {self._path!r} is damaged, cut off or another kind "
                f"of file. {type(error).__name__}: {error}"
            ) from error


def _unpickle(file: zipfile.ZipFile) -> Any:
    marked = any(name.endswith("/byteorder") for name in file.namelist())
    order = _record(file, "byteorder").decode() if marked else "little"
    if order != sys.byteorder:
        raise zipfile.BadZipFile(f"it was written on a {order}-endian machine")
    return _InertUnpickler(io.BytesIO(_record(file, "data.pkl"))).load()


def _read_tensor(file: zipfile.ZipFile, saved: _SavedTensor, storages: dict[str, bytearray]) -> Tensor:
    storage, dtype, (size, stride, offset) = saved.storage, saved.dtype, saved.layout
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"a tensor is said to be of type {dtype} and stored in {storage}")
    if storage.key not in storages:
        storages[storage.key] = bytearray(_record(file, f"data/{storage.key}"))
    buffer = storages[storage.key]
    # what is not stored cannot be asked for, nor views that repeat it
    if math.prod(size) * dtype.itemsize > len(buffer):
        raise pickle.UnpicklingError(f"a {dtype} tensor of shape {size} is said to lie in {len(buffer)} bytes")
    whole = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
    return whole.as_strided(size, stride, offset)


def _record(file: zipfile.ZipFile, name: str) -> bytes:
    folder = file.namelist()[0].partition("/")[0]
    found = file.getinfo(f"{folder}/{name}")
    # torch compresses nothing: whatever is, may be of any size
    if found.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{found.filename} is compressed")
    return file.read(found)
