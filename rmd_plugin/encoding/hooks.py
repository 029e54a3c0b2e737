"""Forward hooks that record what passes the head, the encoder and the whole of a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from rmd_plugin.encoding.features import widened


class HeadCall(NamedTuple):
    """One call of the head: its input is the features, its output the logits."""

    name: str
    features: Tensor
    logits: Tensor | None


@dataclass
class Calls:
    """What was heard, in the order of the calls."""

    head: list[HeadCall]
    encoder: list[Tensor]
    root: list[Tensor]


class Recorder:
    """The hooks. A copied or pickled module carries an idle recorder of its own."""

    def __init__(self) -> None:
        self.armed = False
        self.calls = Calls([], [], [])

    def start(self) -> None:
        """Record from now on."""
        self.armed = True
        self.calls = Calls([], [], [])

    def stop(self) -> Calls:
        """Record no more, and give what was heard."""
        calls, self.calls = self.calls, Calls([], [], [])
        self.armed = False
        return calls

    def head(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Hook of a classification layer."""
        if self.armed:
            features = next((z for z in (*args, *kwargs.values()) if isinstance(z, Tensor)), None)
            if features is not None:
                logits = copied(output).flatten(1) if isinstance(output, Tensor) and output.ndim > 1 else None
                self.calls.head.append(HeadCall(name, copied(features), logits))

    def encoder(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Hook of a layer whose output is the features."""
        if self.armed and isinstance(output, Tensor):
            self.calls.encoder.append(copied(output))

    def root(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Hook of the whole module, whose output is the logits."""
        logits = getattr(output, "logits", output)
        if self.armed and isinstance(logits, Tensor) and logits.ndim > 1:
            self.calls.root.append(copied(logits).flatten(1))

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return Recorder()

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        return Recorder, ()


def copied(tensor: Tensor) -> Tensor:
    """A copy without gradients, at least float32: the module may work in place on what the hook saw."""
    tensor = tensor.detach()
    wide = widened(tensor)
    return tensor.clone() if wide is tensor else wide
