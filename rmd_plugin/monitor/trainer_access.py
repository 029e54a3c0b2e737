"""What the monitor needs to know and do of a Lightning ``Trainer``: its loaders, and batches as it runs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from rmd_plugin.encoding.batch_encoder import BatchEncoder
from rmd_plugin.encoding.batches import Encoded, EncodingError, batch_inputs
from rmd_plugin.encoding.isolation import visiting
from rmd_plugin.encoding.loop import encode_batches
from rmd_plugin.encoding.memory import put_back
from rmd_plugin.monitor.lockstep import ending_all, in_lockstep, left_sharded, same_number
from rmd_plugin.monitor.sharding import Shard, shard


@dataclass
class DataSource:
    """A loader and its way through the module; without one, what detectors are fitted on by default."""

    trainer: pl.Trainer
    encoder: BatchEncoder
    loader: Iterable[Any] | None  #: by default ``fit_dataloader()`` of the datamodule or module, or the training set
    limit: int | float | None  #: that of :func:`shard`
    seed: int
    tell: Callable[[str], None] = lambda problem: None  #: hears of a pass that cannot be undone

    @property
    def chosen(self) -> bool:
        """Whether there is another choice than the training set."""
        return self.loader is not None or self._owner() is not None

    def find_head(self) -> None:
        """Encode one batch, from which the encoder learns where the head is. Data that cannot be read tell nothing."""
        with closing(replace(self, limit=1).batches()) as batches:
            try:
                for _ in batches:
                    pass  # to its end, which all processes may have to reach together
            except EncodingError:
                raise
            except Exception:
                return

    def find_layers(self) -> None:
        """Run one batch, the same on every process, from which the encoder learns which inner layers there are."""
        trainer, module, source = self.trainer, self.trainer.lightning_module, self._source()
        with (
            visiting(module, self.seed),
            left_sharded(module),
            torch.no_grad(),
            self._untouched(source),
            trainer.precision_plugin.forward_context(),
        ):
            for batch in shard(source, limit=1, seed=self.seed).batches:
                self.encoder.find_layers(transfer(trainer, batch))

    def batches(self) -> Generator[tuple[Encoded, Tensor], None, None]:
        """This process's share, encoded in evaluation mode and the trainer's precision, and its positions in the set.

        The module and all random states are afterwards as they were. Close the iterator if you leave it early.
        """
        trainer, module, seen, together = self.trainer, self.trainer.lightning_module, 0, in_lockstep(self.trainer)
        share: Shard

        def read() -> Generator[Any, None, None]:
            nonlocal share
            rank, world, source = trainer.global_rank, trainer.world_size, self._source()
            share = shard(source, rank=rank, world=world, limit=self.limit, seed=self.seed)
            with self._untouched(source):
                for batch in share.batches:
                    yield transfer(trainer, batch)

        def encode(given: tuple[Any, bool]) -> Encoded:
            batch, own = given
            with trainer.precision_plugin.forward_context(), ending_all(trainer) if together else nullcontext():
                encoded = self.encoder(batch)
            return encoded if own else encoded.select(slice(0))

        with (
            visiting(module, self.seed),
            left_sharded(module),
            torch.inference_mode(False),
            torch.no_grad(),
            closing(read()) as batches,
        ):
            pairs = same_number(batches, trainer) if together else ((batch, True) for batch in batches)
            for number, encoded in enumerate(encode_batches(encode, pairs)):
                if len(encoded):
                    yield encoded, share.positions(number, seen, len(encoded))
                seen += len(encoded)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """All of the data as pairs (x, y), the same on every process, for detectors that are fitted on inputs."""
        # limits count the batches of one process
        limit = self.limit * self.trainer.world_size if isinstance(self.limit, int) else self.limit
        source = self._source()
        with self._untouched(source):
            for batch in shard(source, limit=limit, seed=self.seed).batches:
                batch = transfer(self.trainer, batch)
                labels = self.encoder.labels_of(batch)
                if labels is None:
                    raise EncodingError(
                        "the batches to fit on have no labels. Pass labels=, which takes them from a batch."
                    )
                yield batch_inputs(batch), labels

    @contextmanager
    def _untouched(self, source: Iterable[Any]) -> Iterator[None]:
        """Leave data that are made in this process as they were; worker processes have copies."""
        here = isinstance(source, DataLoader) and source.num_workers == 0
        data = (source.dataset, source.collate_fn) if here else ()  # type: ignore[attr-defined]
        with put_back(data=data) as lost:
            yield
        if lost:
            self.tell(
                f"a pass over the data may have changed {', '.join(lost)}, which cannot be put back: training may "
                "differ from that without the monitor. Use refit='stream', num_workers=1, or another fit_loader=."
            )

    def _source(self) -> Iterable[Any]:
        if self.loader is not None:
            return self.loader
        owner = self._owner()
        return training_set(self.trainer) if owner is None else owner.fit_dataloader()

    def _owner(self) -> Any:
        owners = (getattr(self.trainer, "datamodule", None), self.trainer.lightning_module)
        return next((owner for owner in owners if hasattr(owner, "fit_dataloader")), None)


def transfer(trainer: pl.Trainer, batch: Any) -> Any:
    """Bring a batch to the module's device and precision as the trainer does, with all of the user's hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def running_loaders(trainer: pl.Trainer) -> list[Any]:
    """The dataloaders of the evaluation that is running, in the order of ``dataloader_idx``."""
    if trainer.state.fn == TrainerFn.FITTING:
        loop = trainer.fit_loop.epoch_loop.val_loop
    else:
        loop = trainer.test_loop if trainer.state.fn == TrainerFn.TESTING else trainer.validate_loop
    return _flat(loop._combined_loader)


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """The training dataloaders."""
    return _flat(trainer.fit_loop._combined_loader)


def training_set(trainer: pl.Trainer) -> DataLoader[Any]:
    """The training dataloader, if a second pass over it can be made without disturbing the first."""
    loaders = training_loaders(trainer)
    if len(loaders) == 1 and isinstance(loaders[0], DataLoader) and not isinstance(loaders[0].dataset, IterableDataset):
        return loaders[0]
    found = ", ".join(
        f"{type(x).__name__} over {type(x.dataset).__name__}" if isinstance(x, DataLoader) else type(x).__name__
        for x in loaders
    )
    way_out = ", or use refit='stream'" if len(loaders) == 1 else ""
    raise EncodingError(
        f"expected one training DataLoader over a map-style dataset, got {found or 'none'}. Pass fit_loader=, or give "
        f"the datamodule a fit_dataloader(){way_out}."
    )


def has_validation(trainer: pl.Trainer) -> bool:
    """Whether training is interrupted by validation."""
    # before the first validation its loaders are not there yet
    ready = trainer.fit_loop.epoch_loop.val_loop._combined_loader is not None
    return trainer.enable_validation and (not ready or sum(trainer.num_val_batches) > 0)


def ends_now(trainer: pl.Trainer) -> bool:
    """Whether the epoch that ends is the last one by ``max_steps`` or ``max_epochs``, the same on every process."""
    reached = ((trainer.global_step, trainer.max_steps), (trainer.current_epoch + 1, trainer.max_epochs))
    return any(limit is not None and 0 <= limit <= count for count, limit in reached)


@contextmanager
def as_validation(trainer: pl.Trainer) -> Iterator[None]:
    """Let the trainer say that it validates, so that the user's hooks do not augment the batches."""
    trainer.validating = True
    try:
        yield
    finally:
        trainer.training = True


def _flat(loader: Any) -> list[Any]:
    return [] if loader is None else list(loader.flattened)


def pack_metrics(trainer: pl.Trainer) -> None:
    """Give the metrics one storage where Lightning sends them from a spawned process to its parent.

    It saves them and puts the bytes into a pipe that nobody empties until the process has ended: beyond 64 KiB both
    wait for ever. Each storage takes 200 bytes, so 230 metrics, those of a few detectors and OOD sets, are enough.
    """
    if not hasattr(trainer.strategy.launcher, "get_extra_results"):
        return
    metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items() if value.ndim == 0}
    for kind in {value.dtype for value in metrics.values()}:
        names = [name for name, value in metrics.items() if value.dtype == kind]
        packed = torch.stack([metrics[name] for name in names])
        trainer.callback_metrics.update(zip(names, packed.unbind(), strict=True))
