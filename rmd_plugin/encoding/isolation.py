"""A good guest in somebody else's training: what a visit could disturb is afterwards as it was, bit for bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rmd_plugin.encoding.memory import put_back, read_attributes

#: how far, and over how many objects, modules are looked for behind a callable
_MAX_STEPS, _MAX_OBJECTS = 8, 10_000
#: numbers of a frozen parameter that is looked after as a buffer is
_MAX_COUNTER = 1000


@contextmanager
def evaluating(encoder: object) -> Iterator[None]:
    """Put the modules behind an encoder into evaluation mode; every submodule gets its own mode back.

    The encoder is a module, or a callable that has modules: a bound method, a partial, a lambda, an object with
    ``__call__``. What it hides from :func:`_modules_behind` is left to :func:`evaluating_calls`.
    """
    with _restored_modes() as evaluate:
        for module in _modules_behind(encoder):
            evaluate(module)
        yield


class Evaluated(nn.Module):
    """A network that always runs in evaluation mode, whatever mode it is in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        """What the network gives."""
        with evaluating(self.module):
            return self.module(*inputs)


@contextmanager
def evaluating_calls(encoder: object) -> Iterator[None]:
    """The same around a call of the encoder: if no module is found, those that this thread calls are evaluated."""
    with evaluating(encoder), _restored_modes() as evaluate:
        thread = threading.get_ident()
        hidden = not _modules_behind(encoder)

        def enter(module: nn.Module, _: object) -> None:
            if threading.get_ident() == thread:
                evaluate(module)

        hook = register_module_forward_pre_hook(enter) if hidden else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()


@contextmanager
def _restored_modes() -> Iterator[Callable[[nn.Module], None]]:
    """A function that puts a module into evaluation mode until the block ends."""
    modes: dict[nn.Module, bool] = {}

    def evaluate(module: nn.Module) -> None:
        for part in module.modules():
            modes.setdefault(part, part.training)
            part.training = False

    try:
        yield evaluate
    finally:
        for module, training in modes.items():
            module.training = training


def _modules_behind(encoder: object) -> list[nn.Module]:
    """The outermost modules that a callable can reach within a few steps."""
    found: list[nn.Module] = []
    seen, near = set[int](), [encoder]
    for _ in range(_MAX_STEPS):
        far: list[object] = []
        for value in near:
            if id(value) in seen or len(seen) > _MAX_OBJECTS:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                found.append(value)
            else:
                far.extend(_parts(value))
        near = far
    return found


def _parts(value: object) -> list[object]:
    """What an object holds: items, attributes, what it is bound to; of a function its closure and its globals too."""
    if isinstance(value, (type, ModuleType, torch.Tensor, np.ndarray, str, bytes)):
        return []
    if isinstance(value, (dict, list, tuple, set)):
        return list(islice(value.values() if isinstance(value, dict) else value, 100))
    parts = list(read_attributes(value).values())
    # of a bound method, and of a partial
    parts += [getattr(value, name, None) for name in ("__self__", "__func__", "func", "args", "keywords")]
    if isinstance(value, FunctionType):
        parts += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        parts += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        parts += [value.__defaults__, value.__kwdefaults__]
    return parts


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators, as plain data that a checkpoint can hold.

    The accelerators' generators take part only if they are in use: asking for their state would start them.
    """
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state())  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Give the global generators the states back that :func:`random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch for the time of the block, then give them their states back.

    What is drawn inside depends on nothing else, so a refit gives the same after a resume and on every rank.
    """
    # the global generators are the ones that other people's training draws from
    states = random_states()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        # not torch.manual_seed: it would also seed accelerators that are not started yet, later
        torch.default_generator.manual_seed(seed)
        if states["cuda"]:
            torch.cuda.manual_seed_all(seed)
        yield
    finally:
        restore_random_states(states)


@contextmanager
def visiting(module: nn.Module, seed: int) -> Iterator[None]:
    """Use a module that is in the middle of its training: in evaluation mode, and without leaving a trace.

    Random states, the mode of every submodule, buffers (such as running statistics), small frozen parameters,
    gradients, ``requires_grad`` and what :func:`put_back` finds are restored.
    """
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in module.parameters()]
    buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (kept, name, tensor, tensor.clone())
        for owner in module.modules()
        for kept in (owner._buffers, owner._parameters)
        for name, tensor in kept.items()
        if tensor is not None and (kept is owner._buffers or _is_counter(tensor))
    ]
    with isolated_rng(seed), evaluating(module), put_back(module):
        try:
            for parameter, _, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient, requires_grad in gradients:
                parameter.grad = gradient
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            with torch.no_grad():
                for kept, name, buffer, before in buffers:
                    kept[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)


def _is_counter(parameter: torch.Tensor) -> bool:
    """Whether a parameter is none that is trained: a number or two that the module itself may change."""
    return type(parameter) is nn.Parameter and not parameter.requires_grad and parameter.numel() <= _MAX_COUNTER
