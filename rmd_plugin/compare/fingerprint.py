"""Content hashes of encoders, transforms and data sets, equal in every process and never built on ``id()``."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class FingerprintError(TypeError):
    """An object cannot be told apart from others by its content."""


def fingerprint(thing: object) -> str:
    """Hash of what an object is made of: its class, options, tensors and, for functions, code.

    An object's own ``fingerprint()`` wins, if it has one. Two objects with the same hash behave alike as far as their
    content decides; code of classes is not looked at.

    Raises:
        FingerprintError: if a part of it has no content that could be hashed (an open file, a generator).

    Example:
        >>> fingerprint(functools.partial(max, 1)) == fingerprint(functools.partial(max, 1))
        True
    """
    description = json.dumps(_describe(thing, {}), sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()


def encoder_fingerprint(backbone: nn.Module) -> str:
    """Hash of all that decides a backbone's features: the weights, structure and options of its encoder.

    The head does not count: logits are made from features again, so one set of features serves any head.
    """
    encoder = getattr(backbone, "encoder", backbone)
    digest = hashlib.sha256()
    identity = {
        "backbone": _name(type(backbone)),
        "encoder": _name(type(encoder)),
        "architecture": _describe(getattr(backbone, "architecture", {}), {}),
        # strides, paddings and rates are in no tensor, but in the text of the modules
        "structure": _ADDRESS.sub("", repr(encoder)),
    }
    digest.update(json.dumps(identity, sort_keys=True).encode())
    if isinstance(encoder, nn.Module):
        # named_buffers: a buffer that is not persistent is in no state_dict, but may enter the forward pass
        tensors = {**dict(encoder.named_parameters()), **dict(encoder.named_buffers()), **encoder.state_dict()}
        for name in sorted(tensors):
            digest.update(f"\n{name} {fingerprint(tensors[name])}".encode())
    return digest.hexdigest()


def dataset_fingerprint(dataset: Dataset[Any]) -> str | None:
    """Hash of a data set's raw items and labels, where that is cheap; else None, see :func:`hash_items`.

    Cheap is what has a ``digest()``, as our benchmarks' splits have, and parts of such, concatenated or selected.
    """
    if hasattr(dataset, "digest"):
        return str(dataset.digest())
    if isinstance(dataset, ConcatDataset):
        parts = [dataset_fingerprint(part) for part in dataset.datasets]
        return None if None in parts else fingerprint(["concatenated", *parts])
    if isinstance(dataset, Subset):
        part = dataset_fingerprint(dataset.dataset)
        return None if part is None else fingerprint(["subset", part, list(map(int, dataset.indices))])
    return None


def hash_items(loader: DataLoader[Any] | Iterable[Any]) -> str:
    """Hash of everything a loader yields: for data sets without a digest, at the price of a pass over the data.

    The transform is part of it, since it has been applied. A random transform gives another hash every time.
    """
    digest = hashlib.sha256()
    for batch in loader:
        digest.update(json.dumps(_describe(batch, {}), sort_keys=True).encode())
    return digest.hexdigest()


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _describe(thing: Any, seen: dict[int, int]) -> Any:
    """The object as plain lists and texts for JSON; ``seen`` stops circles."""
    if thing is None or isinstance(thing, (bool, int, str)):
        return [type(thing).__name__, str(thing)]
    if isinstance(thing, float):
        return ["float", thing.hex()]
    if isinstance(thing, (bytes, bytearray, memoryview)):
        return ["bytes", hashlib.sha256(thing).hexdigest()]
    if isinstance(thing, (torch.dtype, torch.device, torch.Size, complex, range, slice, PurePath)):
        return [type(thing).__name__, str(thing)]
    if isinstance(thing, enum.Enum):
        return ["enum", _name(type(thing)), thing.name]
    if isinstance(thing, (type, types.BuiltinFunctionType, np.ufunc)):
        return ["name", getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", thing.__name__)]
    if isinstance(thing, types.ModuleType):
        return ["module", thing.__name__]
    if isinstance(thing, Tensor):
        plain = thing.detach().cpu().contiguous()
        # bytes, not values: bfloat16 has no numpy type
        content = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
        return ["tensor", str(plain.dtype), list(plain.shape), hashlib.sha256(content).hexdigest()]
    if isinstance(thing, (np.ndarray, np.generic)):
        if thing.dtype.hasobject:
            return ["array", list(thing.shape), _describe(thing.tolist(), seen)]
        return ["array", thing.dtype.str, list(thing.shape), hashlib.sha256(thing.tobytes()).hexdigest()]

    # from here on things may hold themselves; ids are only compared within this one walk, never hashed
    if id(thing) in seen:
        return ["again", seen[id(thing)]]
    seen[id(thing)] = len(seen)
    return _describe_compound(thing, seen)


def _describe_compound(thing: Any, seen: dict[int, int]) -> Any:
    own = getattr(thing, "fingerprint", None)
    if callable(own) and not isinstance(thing, type):
        return ["own", _name(type(thing)), str(own())]
    if isinstance(thing, Mapping):
        pairs = [[_describe(key, seen), _describe(value, seen)] for key, value in thing.items()]
        return ["mapping", _name(type(thing)), pairs]
    if isinstance(thing, AbstractSet):
        return ["set", sorted(json.dumps(_describe(item, seen), sort_keys=True) for item in thing)]
    if isinstance(thing, Sequence):
        return ["sequence", _name(type(thing)), [_describe(item, seen) for item in thing]]
    if isinstance(thing, functools.partial):
        return ["partial", *(_describe(part, seen) for part in (thing.func, thing.args, thing.keywords))]
    if isinstance(thing, types.MethodType):
        return ["method", thing.__func__.__qualname__, _describe(thing.__self__, seen)]
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        parts = (thing.__defaults__, thing.__kwdefaults__, cells)
        return ["function", _name(thing), _code(thing.__code__), *(_describe(part, seen) for part in parts)]
    return _describe_object(thing, seen)


def _code(code: types.CodeType) -> list[Any]:
    constants = [_code(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return [hashlib.sha256(code.co_code).hexdigest(), constants, list(code.co_names), list(code.co_varnames)]


def _describe_object(thing: Any, seen: dict[int, int]) -> Any:
    """Any other object: by what pickle would write, without writing it."""
    try:
        if isinstance(thing, torch.Generator):
            raise TypeError("it changes with every draw")
        reduced = thing.__reduce_ex__(2)
    except Exception as error:  # the many ways in which classes refuse to be pickled
        raise FingerprintError(
            f"a {_name(type(thing))} cannot be told apart by its content ({error}). Give it a method fingerprint()."
        ) from error
    if isinstance(reduced, str):
        return ["name", type(thing).__module__, reduced]
    # (callable, arguments, state, list items, dict items), the items as iterators
    parts = (list(part) if hasattr(part, "__next__") else part for part in reduced[1:5])
    return ["object", _name(type(thing)), *(_describe(part, seen) for part in parts)]
