"""Fitting detectors over any number of processes: each one's share of a loader, and one pass for many detectors."""

from __future__ import annotations

import math
import time
from collections import ChainMap
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_ood.api import Detector
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from rmd_plugin.compare import adapters
from rmd_plugin.compare.adapters import Encoded, EncodingError, Representation
from rmd_plugin.detectors.conformal import Calibrated, bare
from rmd_plugin.detectors.detectors import StatefulDetector
from rmd_plugin.detectors.moments import check_labels
from rmd_plugin.detectors.snapshot import restore_snapshot
from rmd_plugin.monitor.features import BatchEncoder, visiting

Fail = Callable[[Exception], None]

#: strategies under which every process has the whole network; by name, for there are two roots of Lightning
_REPLICATED = "SingleDeviceStrategy", "SingleDeviceXLAStrategy", "DDPStrategy"


# -- shares of a loader ------------------------------------------------------------------------------------------------


class Share:
    """One process's share of a loader: batches in order, each with the slice of its samples that count.

    A ``DataLoader`` over a map-style dataset is rebuilt: same dataset, batch size, collation and workers, but
    unshuffled, with a generator of its own, and restricted to the indices of a ``SubsetRandomSampler`` if it has one.
    Every process gets as many batches as the others; a sample that is repeated for this does not count. With a limit,
    samples are drawn from all over the set, whatever the order of its labels, and the same for any number of processes.
    Of other iterables each process takes every world-th batch, with a limit the first ones; a loader over an
    ``IterableDataset`` shares itself out between the processes, as always in Lightning.

    Args:
        loader: yields batches.
        rank: of this process.
        world: number of processes.
        limit: batches per process (int), or the fraction of all batches (float); None for all.
        seed: of the draws, and of the loader's generator, which seeds its workers.
        rebuild: False uses a ``DataLoader`` as it is where one process runs all of it.
    """

    def __init__(
        self, loader: Any, rank: int = 0, world: int = 1, limit: Any = None, *, seed: int = 0, rebuild: bool = True
    ) -> None:
        self.source, self.rank, self.world, self.seed = loader, rank, world, seed
        limit = int(limit) if limit is not None and limit > 1 else limit  # LightningCLI may read 5 as 5.0
        self.limit: Any = None if isinstance(limit, float) and limit == 1 else limit
        self._own, self._size = math.inf, 1  # items of the dataset that count, and in each batch
        self._rebuilt: Any = None
        if not is_map_style(loader) or not (rebuild or world > 1 or self.limit is not None):
            return
        whole = loader.batch_sampler is None  # the dataset yields batches
        self._size = 1 if whole else loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 64
        sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        # Lightning wraps a sampler of the user's into a distributed one: dataset -> _sampler
        while isinstance(sampler, DistributedSampler) and hasattr(sampler.dataset, "_sampler"):
            sampler = sampler.dataset._sampler
        indices: Any = getattr(sampler, "indices", None)
        indices = range(len(loader.dataset)) if indices is None else list(indices)
        if self.limit is not None:
            total = math.ceil(len(indices) / self._size)
            batches = self.limit * world if isinstance(self.limit, int) else math.ceil(self.limit * total)
            indices = [indices[i] for i in _spread(len(indices), min(len(indices), batches * self._size), seed)]
        mine = indices[rank::world]
        self._own = len(mine)
        options = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
        self._rebuilt = DataLoader(
            loader.dataset,
            batch_size=None if whole else self._size,
            sampler=mine if len(mine) == len(indices[::world]) else [*mine, indices[0]],
            generator=torch.Generator(),
            **{name: getattr(loader, name) for name in (*options, "prefetch_factor", "persistent_workers")},
        )

    def __iter__(self) -> Iterator[tuple[Any, slice]]:
        batches = self._rebuilt
        if batches is not None:
            batches.generator.manual_seed(self.seed)
        else:
            start, step = (0, 1) if isinstance(self.source, DataLoader) else (self.rank, self.world)
            fraction = isinstance(self.limit, float)
            stop = math.ceil(self.limit * len(self.source)) if fraction else self.limit and self.limit * step
            batches = islice(self.source, start, stop, step)
        for number, batch in enumerate(batches):
            left = self._own - number * self._size
            yield batch, slice(None) if left >= self._size else slice(max(int(left), 0))


def is_map_style(loader: Any) -> bool:
    """Whether a loader reads the samples of a dataset by their index."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def dataset_positions(loader: Any, start: int, size: int, trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Positions in the dataset of a batch that Lightning runs, and a mask of the samples that count on this process.

    The batch holds ``size`` samples of the loader, after ``start`` others. Over all processes each sample counts once.
    """
    local = torch.arange(start, start + size)
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler) if is_map_style(loader) else None
    if isinstance(sampler, SequentialSampler):  # use_distributed_sampler=False: every process runs the whole set
        return local, local % trainer.world_size == trainer.global_rank
    # rank r holds positions r, r + world, ... of the set, which is padded at its end by its first samples
    positions = local * trainer.world_size + trainer.global_rank
    total = len(sampler.dataset) if isinstance(sampler, DistributedSampler) else math.inf  # type: ignore[arg-type]
    return positions, positions < total


def training_loader(trainer: Trainer, *, twice: bool) -> DataLoader[Any]:
    """The training dataloader; with ``twice`` only one that a second pass can be made over.

    Raises:
        EncodingError: if there are several, or a pass would use up an iterable dataset.
    """
    loader: Any = trainer.train_dataloader
    if is_map_style(loader) or (isinstance(loader, DataLoader) and not twice):
        return loader
    raise EncodingError(
        f"expected one training DataLoader over a map-style dataset, got {type(loader).__name__}. Pass fit_loader=, or "
        "give the datamodule a fit_dataloader(); one iterable dataset can do with refit='stream'."
    )


def _spread(total: int, count: int, seed: int) -> list[int]:
    """A random index from each of ``count`` equal strata of ``range(total)``."""
    # neither the first ones nor every n-th: labels may be sorted, and they may be interleaved
    edges = torch.arange(count + 1) * total // max(count, 1)
    draws = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (edges[:-1] + (draws * edges.diff()).long()).tolist()


# -- one pass over a share ---------------------------------------------------------------------------------------------


def runs_together(trainer: Trainer) -> bool:
    """Whether all processes take part in each forward pass (FSDP2)."""
    return trainer.world_size > 1 and type(trainer.strategy).__name__ not in _REPLICATED


def encode_share(
    trainer: Trainer, encoder: BatchEncoder, share: Share, *, labelled: bool = True, fail: Fail | None = None
) -> Generator[tuple[Encoded, Tensor, slice], None, None]:
    """The batches of a share, encoded as the trainer runs them, the positions of their samples, and those that count.

    The module and the random states are afterwards as they were. Close the iterator if you leave it early.

    Args:
        trainer: runs the module.
        encoder: of the module.
        share: this process's.
        labelled: whether the batches must have labels; without, they are not read.
        fail: is told of an error, which ends the batches, unless the other processes wait for this one.
    """
    if runs_together(trainer) and not is_map_style(share.source):
        raise EncodingError("under FSDP2 all processes need equally many batches: pass a map-style DataLoader.")
    seen, module, training = 0, trainer.lightning_module, trainer.training
    with visiting(module, share.seed), torch.inference_mode(False), torch.no_grad():
        try:
            trainer.validating = trainer.validating or training  # so that the user's hooks do not augment the batches
            for batch, keep in share:
                # to the module's device and precision, through the user's hooks
                batch = module._on_before_batch_transfer(
                    trainer.precision_plugin.convert_input(batch), dataloader_idx=0
                )
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                with trainer.precision_plugin.forward_context():
                    encoded = encoder(batch, labelled=labelled)
                if labelled and encoded.labels is None:
                    raise EncodingError("the batches to fit on have no labels. Pass labels=, or another fit_loader=.")
                yield encoded, torch.arange(seen, seen + len(encoded)) * share.world + share.rank, keep
                seen += len(encoded)
        except Exception as error:
            if fail is None or runs_together(trainer):
                raise
            fail(error)
        finally:
            trainer.training = training


def gathered(value: Any) -> list[Any]:
    """What each process has. Every process has to call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def reason_of(error: Exception) -> str:
    """An error in one sentence."""
    return f"{type(error).__name__}: {error}"


# -- detectors ----------------------------------------------------------------------------------------------------


class Watched:
    """A detector of a monitor.

    Args:
        spec: the detector, or the class or a partial of the class of one.
        alpha: share of ID samples that may be flagged, if it is not calibrated by itself.
    """

    adapter: Any = None  #: how it is fitted and scored, once it is built
    calibrated: Any = None  #: the same detector with its calibration

    def __init__(self, spec: Any, alpha: float = 0.05) -> None:
        self.spec, self.alpha = spec, alpha
        unfitted = "it is not fitted. Pass ckpt_path= of a checkpoint with its fit, or fit_loader=."
        self.problem = "" if getattr(spec, "fitted", False) else unfitted  #: why it cannot score
        if isinstance(spec, Detector):
            self.adapter = adapters.adopt(spec)
            self.calibrated = spec if isinstance(spec, Calibrated) else Calibrated(spec, alpha)
        # one of ours that has a use for the head of the network, and has none
        inner = bare(spec)
        self._headless = isinstance(inner, StatefulDetector) and getattr(inner, "head", inner) is None

    def build(self, parts: adapters.NetworkParts) -> None:
        """Build a detector that is given as a class; give the head to one without."""
        if self._headless:
            adapters.give_head(self.spec, parts)
        elif not isinstance(self.spec, Detector):
            self.adapter = adapters.build(self.spec, parts)
            self.calibrated = Calibrated(self.adapter.detector, self.alpha)
            self.problem = self.problem if self.adapter.detector.requires_fit else ""

    def restore(self, snapshot: dict[str, Any], *, resumes: bool) -> None:
        """Take over the fit of a checkpoint; if training goes on, only one with the same options."""
        options = snapshot["state"]["inner"].get("state", {}).get("options", {})
        changed = any(options.get(key) != value for key, value in getattr(self.calibrated, "options", {}).items())
        if resumes and changed:
            return
        alpha = self.calibrated.alpha
        try:
            restore_snapshot(self.calibrated, snapshot)
            self.problem = ""
        except ValueError as error:
            self.problem = str(error)
        self.calibrated.alpha = alpha


class FeatureRows:
    """Collects rows of features (or logits) with their labels, in an order that does not depend on the processes.

    For detectors that need all features at once. Memory grows with the number of samples; it is kept on the CPU.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor, Tensor]] = []

    def update(self, rows: Tensor, labels: Tensor, index: Tensor) -> None:
        """Add rows (B, D) with labels (B,) and positions in the whole set (B,); labels below zero are skipped.

        Raises:
            ValueError: if rows are NaN or infinite, or the shapes do not fit.
        """
        is_id = check_labels(labels, len(rows)) >= 0
        if bad := int((~rows[is_id].isfinite()).any(1).sum()):
            raise ValueError(f"{bad} of {len(rows)} samples have NaN or infinite values. The batch was not added.")
        with torch.inference_mode(False):
            batch = (rows.detach()[is_id], labels.long()[is_id], index.to(is_id.device)[is_id])
            self._batches.append(tuple(part.cpu().clone() for part in batch))  # type: ignore[arg-type]

    def compute(self) -> Encoded:
        """The rows and labels of all processes, ordered by index; the rows stand for features and for logits.

        Raises:
            ValueError: if no sample with a label >= 0 was seen.
        """
        batches = [batch for part in gathered(self._batches) for batch in part]
        if not sum(len(index) for _, _, index in batches):
            raise ValueError("no ID sample (label >= 0) was seen: there is nothing to fit.")
        rows, labels, index = map(torch.cat, zip(*batches, strict=True))
        order = index.argsort(stable=True)
        return Encoded(rows[order], rows[order], labels[order])


class Fit:
    """One fit of several detectors from the same batches; those with the same options share their moments.

    Call :meth:`update` with every batch, then :meth:`finish` on every process. Errors of detectors are kept, not
    raised: a process that left would let the others wait for ever.
    """

    def __init__(self, detectors: Mapping[str, Watched], device: torch.device) -> None:
        self.num_samples = 0  #: seen on this process
        self.classes: set[int] = set()  #: labels of the samples of all processes, after :meth:`finish`
        self.keys: dict[str, Any] = {}  #: what a detector is fitted on; those with the same key share a metric
        self.metrics: dict[Any, Any] = {}  #: ClassMoments or FeatureRows
        self._detectors, self._errors = detectors, dict[Any, str]()
        for name, adapter in ((name, watched.adapter) for name, watched in detectors.items()):
            if adapter.fitted_on is None:
                continue
            if adapter.fitted_on is Representation.MOMENTS:
                metric: Any = adapter.detector.new_moments()
                metric.to("cpu" if device.type == "mps" else device)  # float64 sums do not exist on MPS
                plain = (bool, int, float, str, type(None))  # its public settings
                options = {k: v for k, v in vars(metric).items() if not k.startswith("_") and isinstance(v, plain)}
                key: Any = (type(metric), *sorted(options.items()))
            else:  # all that is made from features shares their rows
                key = Representation.LOGITS if adapter.fitted_on is Representation.LOGITS else Representation.FEATURES
                metric = FeatureRows()
            self.keys[name] = key
            self.metrics.setdefault(key, metric)

    def update(self, encoded: Encoded, positions: Tensor, keep: Tensor | slice = slice(None)) -> None:
        """Add the samples to keep of a batch; ``positions`` is their order over all processes, shape (B,)."""
        encoded, positions = encoded.select(keep), positions[keep]
        for key, metric in self.metrics.items() if len(encoded) else ():
            if key not in self._errors:
                try:
                    if isinstance(key, Representation):
                        metric.update(encoded.take(key), encoded.labels, positions)
                    else:
                        metric.update(encoded.features, encoded.labels)
                except Exception as error:
                    self._errors[key] = reason_of(error)

    def fail(self, error: Exception) -> None:
        """Give up all detectors, because of an error in the data."""
        self._errors = dict.fromkeys(self.metrics, reason_of(error)) | self._errors

    def finish(self, module: nn.Module, seed: int) -> Iterator[tuple[str, float, str]]:
        """Fit the detectors: name, seconds, and why it failed on any process, or "".

        Every process has to call it, and gives all detectors the same fit. They may have been built anew meanwhile.
        """
        mine = {name: self._errors[key] for name, key in self.keys.items() if key in self._errors}
        errors = ChainMap(*gathered(mine))
        data: dict[Any, Any] = {}
        for name, key in self.keys.items():
            start, error = time.perf_counter(), errors.get(name, "")
            if not error:
                try:
                    if key not in data:
                        data[key] = fitted_on = self.metrics[key].compute()
                        labels: Any = fitted_on.labels if isinstance(fitted_on, Encoded) else fitted_on.counts.nonzero()
                        self.classes |= set(labels.flatten().tolist())
                    with visiting(module, seed), torch.inference_mode(False), torch.enable_grad():
                        self._detectors[name].adapter.fit(data[key])
                except Exception as problem:
                    error = reason_of(problem)
                error = next(filter(None, gathered(error)), "")
            yield name, time.perf_counter() - start, error
