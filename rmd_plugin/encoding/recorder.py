"""Forward hooks that note what layers get and give, and passes in which every hook is heard."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Call(NamedTuple):
    """One call of a layer."""

    name: str
    features: Tensor | None  #: the first tensor that it got, or that an encoder gave; None for what is around them
    outputs: tuple[Tensor, ...] = ()  #: the tensors that it gave, or the one that is named ``logits``


class Recorder:
    """The forward hooks. A copied or pickled module carries an idle recorder of its own."""

    def __init__(self) -> None:
        self.armed = self.copies = False
        self.calls: list[Call] = []

    def start(self, *, copies: bool) -> None:
        """Listen from now on.

        Copy all that is heard, so that the module cannot work in place on it, or only what has the shape (B, D) or
        (B, K): the tokens of all layers would fill the memory.
        """
        self.armed, self.copies, self.calls = True, copies, []

    def stop(self) -> list[Call]:
        """What was heard since the start, in the order in which the calls ended."""
        calls, self.armed, self.calls = self.calls, False, []
        return calls

    def layer(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the input and the output of a layer."""
        if self.armed:
            features = next((z for z in (*args, *kwargs.values()) if isinstance(z, Tensor)), None)
            # among many layers, the convolutions of the body are not of interest
            if features is not None and (
                self.copies or isinstance(module, nn.Linear) or features.shape[2:].numel() == 1
            ):
                self.calls.append(Call(name, self._kept(features), tuple(map(self._kept, _tensors(output)))))

    def around(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note the output of a module, as far as it may be logits."""
        if self.armed:
            # a single output of each sample may be without its dimension
            found = (z.reshape(len(z), -1) for z in _tensors(output) if z.ndim and z.shape[2:].numel() == 1)
            self.calls.append(Call(name, None, tuple(map(self._kept, found))))

    def encoder(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note the output of an encoder."""
        if self.armed and isinstance(output, Tensor):
            self.calls.append(Call("encoder", self._kept(output)))

    def _kept(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.clone() if self.copies or tensor.ndim == 2 else tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder()

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        return Recorder, ()


def eagerly() -> AbstractContextManager[Any]:
    """Run compiled modules as they were written: hooks that came after the compilation are not heard in them."""
    # nobody has compiled anything before this is imported, which takes seconds
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _tensors(output: Any) -> Iterable[Tensor]:
    mapping = isinstance(output, Mapping)
    logits = output.get("logits") if mapping else getattr(output, "logits", None)
    parts = output.values() if mapping else output if isinstance(output, (tuple, list)) else [output]
    found = [logits] if isinstance(logits, Tensor) else parts
    return [z for z in found if isinstance(z, Tensor) and z.is_floating_point()]
