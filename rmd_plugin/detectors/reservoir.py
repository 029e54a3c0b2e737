"""Moments with a sample: a fit on both streams over the data once, in constant memory, on any number of processes.

The sample is the same for every order, every split into batches and every number of processes: a sample of the data is
ranked by a hash of its content, its features and its label, and those of the smallest hashes are kept.

Samples of the data that are taken away are found by their hashes. What is left is a fair draw from what remains: all of
it up to the hash that was the largest kept one. Later additions are cut there too, or they would outnumber the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import Self

from rmd_plugin.detectors.cancellation import never_added
from rmd_plugin.detectors.class_moments import ClassMoments
from rmd_plugin.detectors.files import TensorSpec, check_tensors
from rmd_plugin.detectors.functional import warn_numerical
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.encoding.features import widened

#: samples that are kept
RESERVOIR_SIZE = 10_000
#: samples whose hashes are computed at a time
_CHUNK_ROWS = 1024
#: the largest hash
_NO_LIMIT = 2**63 - 1
#: of the hash: odd numbers without pattern (those of the generator splitmix64)
_STEP, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Reservoir(NamedTuple):
    """Samples with the smallest keys, in their order. Equal samples share a key and stand here once."""

    keys: Tensor  #: shape (S,), int64
    rows: Tensor  #: features, shape (S, D), float32, or float64 where the features are
    labels: Tensor  #: shape (S,)
    copies: Tensor  #: how often each was seen, shape (S,)

    @classmethod
    def of(cls, rows: Tensor, labels: Tensor, seed: int) -> Self:
        """The samples of a batch of features (B, D), each as if it stood there once."""
        keys = content_keys(rows, labels, seed)
        return cls(keys, rows, labels, torch.ones_like(keys))

    def smallest(self) -> Self:
        """Those of the smallest keys, a copy. As equal samples are counted, nothing is lost if parts are cut before."""
        keys, order = self.keys.sort(stable=True)
        first = torch.ones_like(keys, dtype=torch.bool)
        first[1:] = keys[1:] != keys[:-1]
        copies = self.copies.new_zeros(int(first.sum())).index_add_(0, first.cumsum(0) - 1, self.copies[order])
        chosen = order[first][:RESERVOIR_SIZE]
        return type(self)(self.keys[chosen], self.rows[chosen], self.labels[chosen], copies[:RESERVOIR_SIZE])

    def select(self, mask: Tensor) -> Reservoir:
        """Those of a mask of shape (S,)."""
        return Reservoir(*(tensor[mask] for tensor in self))

    def join(self, other: Reservoir) -> Reservoir:
        """What both together would have kept."""
        pairs = zip(self, (tensor.to(self.keys.device) for tensor in other), strict=True)
        return Reservoir(*(torch.cat(pair) for pair in pairs)).smallest()

    def drop(self, other: Reservoir) -> Reservoir:
        """What is left without the samples of another one, all of which must be here.

        Raises:
            ValueError: if they are not.
        """
        keys, less = other.keys.to(self.keys.device), other.copies.to(self.keys.device)
        found = torch.isin(keys, self.keys)
        place = torch.searchsorted(self.keys, keys[found])
        copies = self.copies.index_add(0, place, -less[found])
        missing = int(less[~found].sum() - copies.clamp(max=0).sum())
        if missing:
            raise never_added(
                f"{missing} of the {int(less.sum())} samples that can be looked up are not in the sample, which knows "
                "them by every bit of their features"
            )
        return self._replace(copies=copies).select(copies > 0)


def content_keys(rows: Tensor, labels: Tensor, seed: int) -> Tensor:
    """Hashes of features (B, D), float32 or float64, and labels (B,): int64 of shape (B,), the same on every device."""
    words = rows.contiguous().view(torch.int32).long()
    start = (seed * _STEP + _FACTORS[0]) % 2**64
    places = torch.arange(words.shape[1] + 1, device=rows.device) * _signed(_STEP) + _signed(start)
    factors = _scrambled(places) | 1
    # int64 wraps around: sums modulo 2^64
    return _scrambled((words * factors[1:]).sum(1) + labels * factors[0])


def _scrambled(x: Tensor) -> Tensor:
    """A bijection of int64 in which every bit depends on every other."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * _signed(factor)
    return x ^ (x >> 31 & 2**33 - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


@dataclass(frozen=True, eq=False)
class SampledMoments(Moments):
    """Moments, and a sample of what they are the moments of. They add up as moments do.

    Attributes:
        sample: at most :data:`RESERVOIR_SIZE` different samples.
        seed: decides which.
        limit: none of a larger key is kept; it is lowered when samples are taken away.
    """

    sample: Reservoir = field(kw_only=True)
    seed: int = field(default=0, kw_only=True)
    limit: int = field(default=_NO_LIMIT, kw_only=True)

    def __add__(self, other: Moments) -> Moments:
        if not isinstance(other, SampledMoments):
            return super().__add__(other).plain() if isinstance(other, Moments) else NotImplemented
        limit, mine, theirs = self._comparable(other)
        return self._with_moments(super().__add__(other), mine.join(theirs), limit)

    def __sub__(self, other: Moments) -> Moments:
        if not isinstance(other, SampledMoments):
            return super().__sub__(other).plain() if isinstance(other, Moments) else NotImplemented
        limit, mine, theirs = self._comparable(other)
        left = self._with_moments(super().__sub__(other), mine.drop(theirs), limit)
        few, most = int(left.sample.copies.sum()), min(left.num_samples, RESERVOIR_SIZE)
        if few < most / 2:
            warn_numerical(
                f"the sample beside the moments has shrunk to {few} of the {left.num_samples} samples that remain; a "
                f"new fit would draw {most}. Fit again if scores should not depend on so few.",
                kind="the sample has shrunk",
            )
        return left

    def without(self, classes: Iterable[int]) -> Moments:
        """The same without some classes, see :meth:`rmd_plugin.Moments.without`, in the sample too."""
        chosen = list(classes)
        keep = ~torch.isin(self.sample.labels, torch.tensor(chosen, dtype=torch.long, device=self.device))
        return self._with_moments(super().without(chosen), self.sample.select(keep), self._limit())

    def _comparable(self, other: SampledMoments) -> tuple[int, Reservoir, Reservoir]:
        """The key up to which both samples are complete, and their parts up to it."""
        if other.seed != self.seed:
            raise ValueError(f"samples of seed={self.seed} and seed={other.seed} do not add up. Give both the same.")
        limit = min(self._limit(), other._limit())
        mine, theirs = (part.sample.select(part.sample.keys <= limit) for part in (self, other))
        return limit, mine, theirs

    def _limit(self) -> int:
        full = len(self.sample.keys) >= RESERVOIR_SIZE
        return min(self.limit, int(self.sample.keys[-1])) if full else self.limit

    def _with_moments(self, moments: Moments, sample: Reservoir, limit: int) -> SampledMoments:
        return SampledMoments(**vars(moments.plain()), sample=sample, seed=self.seed, limit=limit)

    def to(self, device: torch.device | str) -> Moments:
        """Copy on another device."""
        sample = Reservoir(*(tensor.to(device) for tensor in self.sample))
        return self._with_moments(super().to(device), sample, self.limit)

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        plain, tensors = super()._parts()
        sample = {f"sample.{name}": tensor for name, tensor in self.sample._asdict().items()}
        limit = {"sample.limit": torch.tensor(self.limit)}
        return {**plain, "seed": self.seed}, {**tensors, **sample, **limit}

    @classmethod
    def _from_parts(cls, plain: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        names = [f"sample.{name}" for name in Reservoir._fields]
        if not all(isinstance(tensors.get(name), Tensor) for name in names):
            raise ValueError("it holds moments without a sample. Collect them with detector.new_moments().")
        moments = Moments._from_parts(plain, tensors)
        limit = tensors.get("sample.limit", torch.tensor(_NO_LIMIT))  # files from before hold none
        check_tensors({"sample.limit": limit}, {"sample.limit": TensorSpec("", torch.int64)}, {})
        sample = Reservoir(*(tensors[name] for name in names))
        return cls(**vars(moments), sample=sample, seed=plain["seed"], limit=int(limit))

    def _specs(self) -> dict[str, TensorSpec]:
        kinds = {"keys": "S", "labels": "S", "copies": "S"}
        specs = {f"sample.{name}": TensorSpec(size, torch.int64) for name, size in kinds.items()}
        rows = TensorSpec("S D", torch.float64 if self.sample.rows.dtype == torch.float64 else torch.float32)
        return {**super()._specs(), **specs, "sample.rows": rows}

    def check_content(self, sizes: dict[str, int]) -> None:
        """Refuse tensors that cannot be moments and a sample."""
        super().check_content(sizes)
        keys, _, labels, copies = self.sample
        known = (labels >= 0) & (labels < self.num_classes) & (copies > 0)
        if bool((keys[1:] <= keys[:-1]).any()) or not bool(known.all()):
            raise ValueError("the sample has keys out of order, unknown labels or empty places. Collect it again.")


class SampledClassMoments(ClassMoments):
    """Accumulates :class:`SampledMoments`: the moments of all samples, and a seeded sample of them.

    Args:
        num_classes: K. If None, it grows with the largest label seen.
        num_features: D. If None, it is the width of the first batch.
        seed: decides which samples are kept.
        kwargs: options of :class:`torchmetrics.Metric`.
    """

    sample_keys: list[Tensor]
    sample_rows: list[Tensor]
    sample_labels: list[Tensor]
    sample_copies: list[Tensor]

    def __init__(
        self, num_classes: int | None = None, num_features: int | None = None, *, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(num_classes, num_features, diagonal=False, normalize=False, **kwargs)
        self.seed = seed
        for name in Reservoir._fields:
            self.add_state(f"sample_{name}", [], dist_reduce_fx="cat")

    def _add(self, features: Tensor, labels: Tensor) -> None:
        super()._add(features, labels)
        for rows, targets in zip(features.split(_CHUNK_ROWS), labels.split(_CHUNK_ROWS), strict=True):
            found = Reservoir.of(widened(rows), targets, self.seed)
            if self.sample_keys and len(self.sample_keys[0]) == RESERVOIR_SIZE:  # later parts are not full
                near = found.keys <= self.sample_keys[0][-1]
                found = Reservoir(*(tensor[near] for tensor in found))
            if len(found.keys):
                self._append(found.smallest())
            if sum(map(len, self.sample_keys)) > 2 * RESERVOIR_SIZE:
                self._keep(self._sample())

    def compute(self) -> SampledMoments:
        """The moments of everything seen so far and the sample of it, on all processes together.

        Raises:
            ValueError: if no sample with a label >= 0 was seen.
        """
        return SampledMoments(**vars(super().compute()), sample=self._sample(), seed=self.seed)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add what another :class:`SampledClassMoments` of the same seed has seen: the metric, or its state."""
        if isinstance(incoming_state, SampledClassMoments) and incoming_state.seed != self.seed:
            raise ValueError(f"the sample has seed={self.seed}, the one to merge {incoming_state.seed}.")
        state: Any = incoming_state.metric_state if isinstance(incoming_state, Metric) else incoming_state
        if not isinstance(state, dict) or not self._defaults.keys() <= state.keys():
            raise ValueError(f"expected the states {', '.join(self._defaults)} of a SampledClassMoments.")
        super().merge_state(incoming_state)
        if len(state["sample_keys"]):
            self._append(
                Reservoir(*(dim_zero_cat(state[f"sample_{name}"]).to(self.device) for name in Reservoir._fields))
            )
            self._keep(self._sample())

    def _append(self, part: Reservoir) -> None:
        for name, tensor in part._asdict().items():
            getattr(self, f"sample_{name}").append(tensor)

    def _keep(self, sample: Reservoir) -> None:
        for name, tensor in sample._asdict().items():
            setattr(self, f"sample_{name}", [tensor])

    def _sample(self) -> Reservoir:
        if not len(self.sample_keys):
            none = torch.zeros(0, dtype=torch.long, device=self.device)
            return Reservoir(none, torch.zeros(0, len(self.shift), device=self.device), none, none)
        return Reservoir(*(dim_zero_cat(getattr(self, f"sample_{name}")) for name in Reservoir._fields)).smallest()

    def _sync_dist(self, dist_sync_fn: Any = gather_all_tensors, process_group: Any | None = None) -> None:
        # a rank without data has to gather empty tensors of the shape and type of the others
        keys, rows, *rest = self._sample()
        mine = torch.tensor([rows.shape[1], rows.dtype == torch.float64], device=self.device)
        found = torch.stack(dist_sync_fn(mine, group=process_group or self.process_group)).amax(0)
        rows = rows if len(keys) else rows.new_zeros(0, int(found[0]))
        self._keep(Reservoir(keys, rows.to(torch.float64 if found[1] else torch.float32), *rest))
        super()._sync_dist(dist_sync_fn, process_group=process_group)
