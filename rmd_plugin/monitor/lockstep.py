"""Strategies that share one network between the processes: all of them run each forward pass, or it never ends."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities import move_data_to_device
from torch import nn

from rmd_plugin.encoding.batches import EncodingError

#: strategies under which every process has the whole network; by name, for there are two roots of Lightning
_REPLICATED = ("SingleDeviceStrategy", "SingleDeviceXLAStrategy", "DDPStrategy")
_SHARDED = "ModelParallelStrategy"
#: their network works only inside of a wrapper or an engine of theirs, which our own passes would go around
_REFUSED = ("FSDPStrategy", "DeepSpeedStrategy")


def check_strategy(trainer: pl.Trainer) -> str | None:
    """Refuse a strategy that cannot work, and return a sentence about one that nobody has tried."""
    strategy: Any = trainer.strategy
    name = type(strategy).__name__
    if any(base.__name__ in _REFUSED for base in type(strategy).__mro__):
        raise ValueError(
            f"OODMonitor does not work with {name}, under which only the trainer can run the network. Use DDPStrategy, "
            "or ModelParallelStrategy with fully_shard (FSDP2)."
        )
    size = strategy.device_mesh["tensor_parallel"].size() if name == _SHARDED else 1
    if size > 1:
        raise ValueError(
            f"OODMonitor does not work with {name}(tensor_parallel_size={size}), under which several processes run the "
            f"same samples. Use data_parallel_size={trainer.world_size} and tensor_parallel_size=1."
        )
    tested = name in (*_REPLICATED, _SHARDED)
    return None if tested else f"it has not been tested with {name}. Compare a short run with one under DDPStrategy."


def in_lockstep(trainer: pl.Trainer) -> bool:
    """Whether all processes have to run the same number of forward passes."""
    return trainer.world_size > 1 and type(trainer.strategy).__name__ not in _REPLICATED


def same_number(batches: Iterator[Any], trainer: pl.Trainer) -> Iterator[tuple[Any, bool]]:
    """As many batches on every process, each with whether it is one of its own.

    A process that has no more gives its last one again; if it never had one, that of another process. An error in
    ``batches`` is raised when all have come to their end.
    """
    strategy, error, batch, first = trainer.strategy, None, None, True
    while True:
        own = False
        if error is None:
            try:
                batch, own = next(batches), True
            except StopIteration:
                pass
            except Exception as problem:
                error = problem
        have = strategy.all_gather(torch.tensor([int(own)], device=strategy.root_device)).flatten()
        if not have.any():
            break
        if first and not have.all():
            lent = _lend(batch, int(have.argmax()), trainer)
            batch = batch if own else lent
        first = False
        yield batch, own
    if error is not None:
        raise error


def _lend(batch: Any, owner: int, trainer: pl.Trainer) -> Any:
    """The batch of the process ``owner``, on every process."""
    message = None
    if trainer.global_rank == owner:
        try:
            message = pickle.dumps(move_data_to_device(batch, torch.device("cpu")))
        except Exception:
            message = None  # the others wait for it
    message = trainer.strategy.broadcast(message, owner)
    if message is None:
        raise EncodingError(
            f"a process has no batch, and that of process {owner} cannot be pickled: {type(batch).__name__}. Under "
            f"{type(trainer.strategy).__name__} all run every pass. Give each process a batch."
        )
    return move_data_to_device(pickle.loads(message), trainer.strategy.root_device)


@contextmanager
def ending_all(trainer: pl.Trainer) -> Iterator[None]:
    """Around a forward pass of all processes: one that cannot finish it must end, or the others wait for ever."""
    try:
        yield
    except EncodingError:
        raise
    except Exception as error:
        raise EncodingError(
            f"a forward pass failed on process {trainer.global_rank}, and under {type(trainer.strategy).__name__} the "
            f"others cannot go on without it. {type(error).__name__}: {error}"
        ) from error


@contextmanager
def left_sharded(module: nn.Module) -> Iterator[None]:
    """Free what forward passes have gathered of the network: FSDP2 keeps the outermost layers for a backward pass."""
    sharded: list[Any] = [
        part for part in module.modules() if hasattr(part, "reshard") and all(map(is_sharded, part.parameters()))
    ]
    try:
        yield
    finally:
        for part in sharded:
            part.reshard()


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other processes hold parts of a tensor."""
    return hasattr(tensor, "full_tensor")


def whole(layer: nn.Linear) -> nn.Linear:
    """The layer, or a plain copy of one that is sharded. Every process has to call it."""
    if not hasattr(layer, "reshard") and not any(map(is_sharded, layer.parameters())):
        return layer
    weights: dict[str, Any] = {name: value.detach() for name, value in layer.named_parameters()}
    weights = {name: value.full_tensor() if is_sharded(value) else value for name, value in weights.items()}
    like = {"device": weights["weight"].device, "dtype": weights["weight"].dtype}
    copy = nn.utils.skip_init(nn.Linear, layer.in_features, layer.out_features, bias="bias" in weights, **like)
    copy.load_state_dict(weights)
    return copy
