"""What modules and data sets remember besides their tensors: generators, counters, lists. Found, kept and put back."""

from __future__ import annotations

import functools
import io
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: bounds of the search
_OBJECTS, _ITEMS = 5000, 1000
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_CONTAINERS = (OrderedDict, dict, list, deque, set)
#: arrays and tensors of data up to so many bytes are copied
_SMALL = 1 << 16
#: torch keeps these of a module itself, and evaluation mode is somebody else's
_INTERNAL = frozenset(vars(nn.Module()))
#: objects of these packages work at other times too: nothing of them is put back
_FOREIGN = {"torch", "pytorch_lightning", "lightning", "lightning_fabric"}


@contextmanager
def put_back(module: nn.Module | None = None, data: Iterable[object] = ()) -> Iterator[list[str]]:
    """Put back, after the block, what it has changed in the memory of a module and of things that make its data.

    These are generators of random numbers, wherever they are within reach; and attributes, those of classes and the
    variables of closures too, with lists, dicts, sets and small arrays among them, of the module's parts and of the
    data's objects. The search is bounded, and big arrays are not copied.

    Args:
        module: its tensors are not looked at, but those in plain attributes.
        data: data sets, transforms and functions.

    Yields:
        Names of what cannot be put back. Tensors that the data changed in place are added after the block.
    """
    memory = _Memory()
    if module is not None:
        memory.search(module, type(module).__name__, everything=False)
    for thing in data:
        memory.search(thing, getattr(thing, "__name__", type(thing).__name__), everything=True)
    try:
        yield memory.lost
    finally:
        for undo in memory.undo:
            undo()


class _Memory:
    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []
        self.lost: list[str] = []
        self._seen: dict[int, object] = {}  # with the objects: an id is one object's only while that lives

    def search(self, root: object, name: str, *, everything: bool) -> None:
        """Breadth first; not ``everything``: of objects that are neither modules nor theirs only the generators."""
        queue = deque([(root, name, True)])
        while queue and len(self._seen) < _OBJECTS:
            thing, where, own = queue.popleft()
            if id(thing) in self._seen:
                continue
            self._seen[id(thing)] = thing
            for child, label, container in self._look(thing, where, own):
                named = f"{where}{label}"
                queue.append((child, named, own if container else everything or isinstance(child, nn.Module)))

    def _look(self, thing: Any, where: str, own: bool) -> Iterator[tuple[Any, str, bool]]:
        """Keep one object, and give the objects in it: each with its name, and whether it is its owner's own."""
        if isinstance(thing, _GENERATORS):
            self._keep_generator(thing, where)
        elif isinstance(thing, (*_CONTAINERS, tuple)):
            if own and not isinstance(thing, tuple):
                self.undo.append(_restore_items(thing))
            if len(thing) <= _ITEMS:
                values = thing.items() if isinstance(thing, dict) else enumerate(thing)
                yield from ((value, f"[{key!r}]", True) for key, value in list(values))
            yield from self._look_at_attributes(thing, where, own)
        elif isinstance(thing, functools.partial):
            yield from ((part, "", False) for part in (thing.func, thing.args, thing.keywords))
        elif callable(thing) and not isinstance(getattr(thing, "__self__", None), (type(None), types.ModuleType)):
            yield from ((part, "", False) for part in (thing.__self__, getattr(thing, "__func__", None)))
        elif isinstance(thing, types.FunctionType):
            if own:
                self.undo.extend(_restore_cell(cell) for cell in thing.__closure__ or ())
            yield from _of_function(thing)
        elif isinstance(thing, Iterator) and not isinstance(thing, io.IOBase):
            self.lost.append(where)
        elif isinstance(thing, np.ndarray):
            if own and thing.nbytes <= _SMALL and not thing.dtype.hasobject:
                self.undo.append(_restore_array(thing))
        elif not isinstance(thing, (type, types.ModuleType, Tensor)):
            yield from self._look_at_attributes(thing, where, own)

    def _look_at_attributes(self, thing: Any, where: str, own: bool) -> Iterator[tuple[Any, str, bool]]:
        # FSDP2 makes a class of its own from that of each module
        kinds = [kind for kind in type(thing).__mro__ if not kind.__module__.startswith("torch.distributed.")]
        package = _package(kinds[0])
        if package in sys.stdlib_module_names or package in _FOREIGN - {"torch"}:
            return
        users = [kind for kind in kinds if _package(kind) not in sys.stdlib_module_names | _FOREIGN]
        hidden = _INTERNAL if isinstance(thing, nn.Module) else frozenset()
        values = {name: value for name, value in read_attributes(thing).items() if name not in hidden}
        shared = {name: value for kind in users for name, value in _class_attributes(kind).items()}
        if own and package not in _FOREIGN:
            self.undo.append(_restore_attributes(thing, functools.partial(read_attributes, thing), hidden))
            self.undo += [_restore_attributes(kind, functools.partial(_class_attributes, kind)) for kind in users]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    copied = isinstance(thing, nn.Module) or value.numel() * value.element_size() <= _SMALL
                    self._keep_tensor(value, f"{where}.{name}", copied=copied)
        if isinstance(thing, nn.Module):
            yield from ((child, f".{name}", False) for name, child in thing.named_children())
        for method in [value for kind in users for value in vars(kind).values()]:
            yield from _of_function(method)
        for name, value in (shared | values).items():
            yield value, f".{name}", isinstance(value, (*_CONTAINERS, np.ndarray))

    def _keep_generator(self, generator: Any, where: str) -> None:
        if isinstance(generator, np.random.Generator):
            bits, state = generator.bit_generator, generator.bit_generator.state
            self.undo.append(lambda: setattr(bits, "state", state))
            return
        get, put = ("getstate", "setstate") if isinstance(generator, random.Random) else ("get_state", "set_state")
        try:
            before = getattr(generator, get)()
        except NotImplementedError:  # random.SystemRandom
            self.lost.append(where)
        else:
            self.undo.append(lambda: getattr(generator, put)(before))

    def _keep_tensor(self, tensor: Tensor, where: str, *, copied: bool) -> None:
        if tensor.requires_grad or tensor.is_inference():
            return  # part of a graph, or without a count of its changes
        version, before = tensor._version, tensor.clone() if copied else None

        def undo() -> None:
            if tensor._version != version and before is None:
                self.lost.append(where)
            elif tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)  # type: ignore[arg-type]

        self.undo.append(undo)


def _of_function(function: object) -> Iterator[tuple[Any, str, bool]]:
    """What a function holds: closure, defaults, and generators among the global names that it uses."""
    if not isinstance(function, types.FunctionType):
        return
    cells = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells.append((name, cell.cell_contents))
        except ValueError:  # not filled yet
            continue
    used = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    # and what the functions of the same package use
    cells += [(name, value) for name, value in used if isinstance(value, _GENERATORS) or _beside(value, function)]
    yield from ((value, f"<{name}>", False) for name, value in cells)
    yield from ((value, "", False) for value in (function.__defaults__, function.__kwdefaults__) if value)


def _beside(value: object, function: types.FunctionType) -> bool:
    return isinstance(value, types.FunctionType) and _package(value) == _package(function)


def _package(thing: type | types.FunctionType) -> str:
    return str(thing.__module__).partition(".")[0]


def read_attributes(thing: object) -> dict[str, Any]:
    """The attributes of an object by name: those of its dictionary, and those in slots."""
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(thing).__mro__)
    names = [name for slot in slots for name in ([slot] if isinstance(slot, str) else slot)]
    found = {
        name: getattr(thing, name) for name in names if name not in ("__dict__", "__weakref__") and hasattr(thing, name)
    }
    return found | getattr(thing, "__dict__", {})


def _class_attributes(kind: type) -> dict[str, Any]:
    """What a class keeps for all of its objects: no methods, nothing of Python's own."""
    described = (types.FunctionType, types.MemberDescriptorType, classmethod, staticmethod, property)
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_")) and not isinstance(value, described)
    }


def _restore_items(container: Any) -> Callable[[], None]:
    # of the plain kind: a subclass may give its methods another meaning, as Counter does
    kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    pairs = issubclass(kind, dict)
    before = list(kind.items(container) if pairs else kind.__iter__(container))

    def undo() -> None:
        now = kind.items(container) if pairs else container
        if len(now) == len(before) and all(_is(a, b, pairs) for a, b in zip(now, before, strict=True)):
            return
        kind.clear(container)
        if pairs:
            for key, value in before:
                kind.__setitem__(container, key, value)
        else:
            (kind.update if kind is set else kind.extend)(container, before)

    return undo


def _is(first: Any, second: Any, pairs: bool) -> bool:
    # by identity: tensors and arrays do not compare to a truth value
    return first[0] is second[0] and first[1] is second[1] if pairs else first is second


def _restore_array(array: np.ndarray) -> Callable[[], None]:
    before = array.copy()

    def undo() -> None:
        if array.flags.writeable:
            array[...] = before

    return undo


def _restore_cell(cell: types.CellType) -> Callable[[], None]:
    try:
        before = cell.cell_contents
    except ValueError:  # not filled yet
        return lambda: None

    def undo() -> None:
        cell.cell_contents = before

    return undo


def _restore_attributes(
    owner: object, read: Callable[[], dict[str, Any]], hidden: frozenset[str] = frozenset()
) -> Callable[[], None]:
    """By the plain ways of Python: what an owner does itself when it is given an attribute was done before."""
    before = {name: value for name, value in read().items() if name not in hidden}
    kind: Any = type if isinstance(owner, type) else object

    def undo() -> None:
        now = {name: value for name, value in read().items() if name not in hidden}
        for name in now.keys() - before.keys():
            kind.__delattr__(owner, name)
        for name, value in before.items():
            if now.get(name, before) is not value:
                kind.__setattr__(owner, name, value)

    return undo
