"""A good guest in somebody else's training: what a visit could disturb is afterwards as it was, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import nn


@contextmanager
def evaluating(encoder: object) -> Iterator[None]:
    """Put a module, or the owner of a bound method, into evaluation mode; every submodule gets its own mode back."""
    owner = encoder if isinstance(encoder, nn.Module) else getattr(encoder, "__self__", None)
    modes = [(module, module.training) for module in owner.modules()] if isinstance(owner, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


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

    Random states, the mode of every submodule, buffers (such as running statistics), gradients and ``requires_grad``
    are restored.
    """
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in module.parameters()]
    buffers = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    with isolated_rng(seed), evaluating(module):
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
                for owner, name, buffer, before in buffers:
                    owner._buffers[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
