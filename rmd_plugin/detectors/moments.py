"""Class moments: counts, means and covariances of labelled features, streamed in float64.

:class:`ClassMoments` accumulates them over batches and processes; :class:`Moments` is its immutable result. Moments of
disjoint sets of samples add up, and those of samples that were added before can be subtracted. Features and labels are
checked here, once: behind :meth:`ClassMoments.update` and :func:`check_features` nothing looks at them again.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from rmd_plugin.files import replacing

Path = str | os.PathLike[str]
Gather = Callable[..., Any]  #: of torchmetrics, over processes

#: rows that are widened to float64 at a time: the copy stays in the cache and memory does not grow with the batch
CHUNK_ROWS = 1024
#: columns of the second moment that are computed at a time, from the diagonal on: the rest follows by symmetry
_BLOCK_COLUMNS = 160
#: a larger label is more likely an identifier than a class
_MAX_INFERRED_CLASSES = 1_000_000
_STATES = ("counts", "shift", "sums", "second")
_METADATA, _TENSOR = "rmd_plugin", "__tensor__"


class NumericalWarning(UserWarning):
    """A numerical fallback was used; the message says which one and how large it is."""


def warn(message: str) -> None:
    """Warn of a numerical fallback."""
    warnings.warn(message, NumericalWarning, stacklevel=5)


# -- features and labels --------------------------------------------------------------------------------------------


def widened(z: Tensor) -> Tensor:
    """Half precision as float32: numpy has no bfloat16, and covariances would be lost. Other types stay."""
    return z.float() if z.is_floating_point() and torch.finfo(z.dtype).bits < 32 else z


def pool_features(z: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Features of shape (B, D); maps of shape (B, C, H, W) are averaged, in at least float32 or in ``dtype``."""
    return z if z.ndim == 2 else z.mean(dim=(2, 3), dtype=dtype or widened(z[:0]).dtype)


def check_features(z: Tensor, num_features: int | None = None) -> Tensor:
    """Features as a plain tensor, without a subclass such as MONAI's; refuses other shapes, types and widths."""
    if not isinstance(z, Tensor) or not z.is_floating_point():
        raise TypeError(f"features must be a floating-point tensor, got {getattr(z, 'dtype', '')} {type(z).__name__}.")
    shape = tuple(z.shape)
    if z.ndim not in (2, 4) or (z.ndim == 4 and shape[1] == shape[2] < shape[3]):  # the latter are (B, H, W, C)
        raise ValueError(f"features must have shape (B, D) or (B, C, H, W), got {shape}. Pool tokens, permute maps.")
    if num_features is not None and shape[1] != num_features:
        raise ValueError(f"features must have shape (B, {num_features}), got {shape}. Are they of another layer?")
    return z.as_subclass(Tensor)


def check_labels(y: Tensor, num_samples: int) -> Tensor:
    """Labels of shape (N,) as int64; integral floating-point labels are accepted, as pytorch-ood accepts them."""
    if not isinstance(y, Tensor) or y.is_complex() or (y.is_floating_point() and bool((y != y.floor()).any())):
        raise TypeError(f"labels must be a tensor of integers, got {getattr(y, 'dtype', '')} {type(y).__name__}.")
    if y.shape != (num_samples,):
        raise ValueError(f"labels must have shape ({num_samples},), one per sample, got {tuple(y.shape)}.")
    return y.as_subclass(Tensor).long()


def unit_length(z: Tensor) -> Tensor:
    """Features of shape (B, D) scaled to unit length; zeros stay zeros."""
    return F.normalize(z, eps=torch.finfo(z.dtype).tiny)


# -- files ----------------------------------------------------------------------------------------------------------


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain data, in dicts and lists, as a safetensors file that appears whole or not at all."""
    tensors: dict[str, Tensor] = {}

    def lift(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value.detach().cpu().contiguous()
            return {_TENSOR: name}
        if isinstance(value, Mapping):
            return {key: lift(item, f"{name}.{key}" if name else key) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [lift(item, f"{name}.{number}") for number, item in enumerate(value)]
        return value

    about = json.dumps(lift(state, ""), default=float)  # numpy's numbers
    content = save(tensors, {_METADATA: about})
    with replacing(path, "wb") as file:
        file.write(content)


def read_state(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read what :func:`write_state` wrote. Nothing in the file is executed.

    Raises:
        ValueError: if the file is damaged or holds something else.
    """
    try:
        with safe_open(os.fspath(path), "pt") as file:
            about = (file.metadata() or {})[_METADATA]
            tensors = {name: file.get_tensor(name).to(map_location) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold what save() wrote ({error}). Fit and save again.") from error

    def place(value: dict[str, Any]) -> Any:
        return tensors[value[_TENSOR]] if value.keys() == {_TENSOR} else value

    # files of version 0.1 do not name the tensors of the state itself
    return {"tensors": tensors, **json.loads(about, object_hook=place)}


# -- moments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of labelled features, in float64.

    Moments of disjoint sets of samples add up: ``a + b`` is what one pass over both would have given. ``a - b`` takes
    samples away that were added before, and refuses those that cannot have been: counts would be negative.

    Attributes:
        counts: samples per class, shape (K,).
        shift: point that was subtracted from every feature before summing, shape (D,).
        sums: sum of the shifted features of each class, shape (K, D).
        second: sum of the outer products of the shifted features over all classes, shape (D, D), or only its
            diagonal, shape (D,).
        normalized: whether the features were scaled to unit length before.

    Example:
        >>> import torch
        >>> from rmd_plugin import ClassMoments
        >>> metric = ClassMoments()
        >>> metric.update(torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0]]), torch.tensor([0, 0, 1]))
        >>> moments = metric.compute()
        >>> moments.means
        tensor([[1., 1.],
                [5., 5.]], dtype=torch.float64)
        >>> (moments + moments).num_samples
        6
        >>> (moments + moments - moments).num_samples
        3
    """

    counts: Tensor
    shift: Tensor
    sums: Tensor
    second: Tensor
    normalized: bool = False

    @property
    def num_classes(self) -> int:
        """K, including classes that never occurred."""
        return self.counts.numel()

    @property
    def num_features(self) -> int:
        """Width D of the features."""
        return self.shift.numel()

    @property
    def num_samples(self) -> int:
        """N, the number of in-distribution samples."""
        return int(self.counts.sum())

    @property
    def diagonal(self) -> bool:
        """Whether only the diagonal of the second moment was kept; covariances then have shape (D,)."""
        return self.second.ndim == 1

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.counts.device

    @property
    def means(self) -> Tensor:
        """Class means mu_k, shape (K, D); NaN for classes that never occurred."""
        return self.shift + self.sums / self.counts[:, None]

    @property
    def background_mean(self) -> Tensor:
        """Mean mu_0 of all samples, shape (D,)."""
        return self.shift + self.sums.sum(0) / self.counts.sum()

    @property
    def covariance(self) -> Tensor:
        """Covariance Sigma around the class means, divided by N, shape (D, D) or (D,)."""
        # rows r_k with sum_k r_k r_k^T = sum_k S_k S_k^T / n_k
        roots = self.sums * self.counts.clamp(min=1).rsqrt()[:, None]
        return self._per_sample(self.second - self._square(roots))

    @property
    def background_covariance(self) -> Tensor:
        """Covariance Sigma_0 around the background mean, divided by N, shape (D, D) or (D,)."""
        return self.covariance + self.between_covariance

    @property
    def between_covariance(self) -> Tensor:
        """Covariance Sigma_B of the class means, weighted by class size, shape (D, D) or (D,)."""
        offsets = self.sums / self.counts.clamp(min=1)[:, None] - self.sums.sum(0) / self.counts.sum()
        return self._square((self.counts / self.counts.sum()).sqrt()[:, None] * offsets)

    def __add__(self, other: Moments) -> Moments:
        return self._combine(other, 1)

    def __radd__(self, other: object) -> Moments:
        # sum(parts) starts from the integer 0
        return self if other == 0 else NotImplemented

    def __sub__(self, other: Moments) -> Moments:
        left = self._combine(other, -1)
        if missing := (left.counts < 0).nonzero().flatten().tolist():
            raise ValueError(f"more samples of class {missing[0]} would be taken away than were added.")
        left.sums[left.counts == 0] = 0.0
        freedom = left.num_samples - int((left.counts > 0).sum())
        if freedom < left.num_features and left.num_samples < self.num_samples / 10:
            warn(f"{left.num_samples} of {self.num_samples} samples are left, too few for a covariance. Fit again.")
        # around their own mean, so that a stream that moves away from the first samples loses no digits
        return left.with_shift(left.background_mean) if left.num_samples else left

    def _combine(self, other: Moments, sign: int) -> Moments:
        for name in ("num_features", "normalized", "diagonal"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"moments of different {name} do not add up. Collect both alike.")
        classes = max(self.num_classes, other.num_classes)
        # empty moments have no shift of their own: take the other's
        shift = self.shift if self.num_samples else other.shift
        mine, theirs = (part.with_classes(classes).with_shift(shift) for part in (self, other.to(self.device)))
        totals = {name: getattr(mine, name) + sign * getattr(theirs, name) for name in ("counts", "sums", "second")}
        return replace(mine, **totals)

    def to(self, device: torch.device | str) -> Self:
        """Copy on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def with_classes(self, num_classes: int) -> Self:
        """The same moments with room for more classes."""
        missing = num_classes - self.num_classes
        return replace(self, counts=F.pad(self.counts, (0, missing)), sums=F.pad(self.sums, (0, 0, 0, missing)))

    def with_shift(self, shift: Tensor) -> Self:
        """The same moments, with the sums taken around another point of shape (D,)."""
        if torch.equal(shift, self.shift):
            return self
        delta, total, count = shift - self.shift, self.sums.sum(0), self.counts.sum()
        if self.diagonal:
            second = self.second - 2 * delta * total + count * delta.square()
        else:
            cross = torch.outer(delta, total)
            second = self.second - cross - cross.T + count * torch.outer(delta, delta)
        return replace(self, shift=shift, sums=self.sums - self.counts[:, None] * delta, second=second)

    def to_diagonal(self) -> Self:
        """The same moments with only the diagonal of the second moment."""
        return self if self.diagonal else replace(self, second=self.second.diagonal().clone())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if name != "normalized"}

    def save(self, path: Path) -> None:
        """Write the moments to a safetensors file that :meth:`load` reads."""
        write_state(path, {"moments": {"normalized": self.normalized}, "tensors": self.tensors()})

    @classmethod
    def load(cls, path: Path, map_location: str | torch.device = "cpu") -> Self:
        """Read moments that :meth:`save` wrote; nothing in the file is executed.

        Raises:
            ValueError: if the file is damaged or holds something else.
        """
        state = read_state(path, map_location)
        if "moments" not in state:
            raise ValueError(f"{os.fspath(path)} holds no moments. Expected what Moments.save wrote.")
        return cls(**state["tensors"], **state["moments"])

    def _square(self, rows: Tensor) -> Tensor:
        return rows.square().sum(0) if self.diagonal else rows.T @ rows

    def _per_sample(self, scatter: Tensor) -> Tensor:
        scatter /= self.counts.sum()
        if self.diagonal:
            return scatter.clamp_(min=0)
        scatter.diagonal().clamp_(min=0)  # rounding can leave -1e-17 for a constant feature
        return (scatter + scatter.T) / 2


class DeviceMetric(Metric):
    """Base class of metrics that follow a parent module to another device, but not to another dtype."""

    is_differentiable: bool = False
    higher_is_better: bool | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        self._computed = self._forward_cache = None  # on the old device
        return super()._apply(lambda t: t.to(fn(t.new_empty(0)).device), exclude_state)


class ClassMoments(DeviceMetric):
    """Accumulates :class:`Moments` from batches of features and labels.

    One float64 matrix product per batch, constant memory, and the same result for any split into batches or processes
    up to float64 rounding. Features of any floating type are widened to float64 first. Labels below zero are ignored.

    Args:
        num_classes: K. If None, it grows with the largest label seen.
        num_features: D. If None, it is the width of the first batch.
        diagonal: keep only the diagonal of the second moment: O(D) memory and no matrix product.
        normalize: scale the features to unit length first.
        kwargs: options of :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from rmd_plugin import ClassMoments
        >>> metric = ClassMoments(num_classes=3)
        >>> for _ in range(4):
        ...     metric.update(torch.randn(8, 5), torch.randint(-1, 3, (8,)))
        >>> metric.compute().covariance.shape
        torch.Size([5, 5])
    """

    full_state_update: bool = True
    counts: Tensor
    shift: Tensor
    sums: Tensor
    second: Tensor

    def __init__(
        self,
        num_classes: int | None = None,
        num_features: int | None = None,
        *,
        diagonal: bool = False,
        normalize: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.num_features = num_features
        self.diagonal = diagonal
        self.normalize = normalize
        # float64: with feature mean 100 a float32 covariance is off in the third digit
        nowhere = torch.zeros(num_features or 0, dtype=torch.float64)
        for name, tensor in self._empty(nowhere, num_classes or 0).tensors().items():
            self.add_state(name, tensor)

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch. A batch that raises leaves the moments as they were.

        Args:
            features: shape (B, D), or (B, C, H, W), which are averaged over space.
            labels: class labels of shape (B,); samples with a label below zero are skipped.

        Raises:
            TypeError: if features or labels have the wrong dtype.
            ValueError: if shapes do not fit, a label is not below ``num_classes``, or features are NaN or infinite.
        """
        features = check_features(features, self.shift.numel() or None)
        labels = check_labels(labels, len(features))
        # states made inside Lightning's inference mode could not be updated outside of it
        with torch.inference_mode(False), torch.no_grad():
            if not bool(self.counts.any()) and features.device.type not in (self.device.type, "mps"):
                self.to(features.device)  # MPS has no float64: stay on the CPU
            z, y = features.detach().to(self.device), labels.to(self.device)
            z = pool_features(z, torch.float64) if z.ndim == 4 else z
            if not bool((y >= 0).all()):
                z, y = z[y >= 0], y[y >= 0]
            if len(y):
                # aminmax propagates NaN and costs one pass without a temporary
                if not bool(torch.stack(torch.aminmax(z)).isfinite().all()):
                    bad = f"{int((~z.isfinite()).any(1).sum())} of {len(z)} samples of batch {self._update_count - 1}"
                    raise ValueError(f"{bad} have NaN or infinite features. The batch was not added.")
                self._add(z, y)

    def _add(self, z: Tensor, y: Tensor) -> None:
        """Add finite features (B, D) of ID samples."""
        largest = int(y.max())
        limit = _MAX_INFERRED_CLASSES if self.num_classes is None else self.num_classes
        if largest >= limit:
            raise ValueError(f"labels must be below {limit}, got {largest}. Map them to 0..K-1, or pass num_classes.")
        classes = self.num_classes or max(largest + 1, len(self.counts))
        # any point near the data will do as the shift
        first = z[:CHUNK_ROWS].double()
        first = unit_length(first) if self.normalize else first
        started = bool(self.counts.any())
        self._set(self._moments().with_classes(classes) if started else self._empty(first.mean(0), classes))
        for rows, targets in zip(z.split(CHUNK_ROWS), y.split(CHUNK_ROWS), strict=True):
            centred = (unit_length(rows.double()) if self.normalize else rows.double()) - self.shift
            self.sums.index_add_(0, targets, centred)
            if self.diagonal:
                self.second += centred.square().sum(0)
            else:
                for start in range(0, centred.shape[1], _BLOCK_COLUMNS):
                    stop = start + _BLOCK_COLUMNS
                    self.second[start:stop, start:].addmm_(centred[:, start:stop].T, centred[:, start:])
        self.counts += torch.bincount(y, minlength=classes)

    def compute(self) -> Moments:
        """The moments of everything seen so far, on all processes together.

        Raises:
            ValueError: if no sample with a label >= 0 was seen.
        """
        if not bool(self.counts.any()):
            raise ValueError("no in-distribution sample (label >= 0) was seen; labels below zero mark OOD samples.")
        # only the upper triangle of the second moment is kept up to date
        second = self.second.clone() if self.diagonal else self.second.triu() + self.second.triu(1).T
        return Moments(self.counts.clone(), self.shift.clone(), self.sums.clone(), second, self.normalize)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add what another :class:`ClassMoments` of the same options has seen.

        Raises:
            ValueError: if the other one was collected with other options.
        """
        if not isinstance(incoming_state, ClassMoments):
            raise ValueError(f"expected another ClassMoments to merge, got {type(incoming_state).__name__}.")
        other = incoming_state._moments().to(self.device)
        if self.num_classes is not None and other.num_classes > self.num_classes:
            raise ValueError(f"moments of {other.num_classes} classes do not fit num_classes={self.num_classes}.")
        if other.num_features:
            self._set((self._moments() if self.shift.numel() else self._empty(other.shift, len(self.counts))) + other)
            self._update_count += incoming_state._update_count
            self._computed = None

    def _moments(self) -> Moments:
        return Moments(self.counts, self.shift, self.sums, self.second, normalized=self.normalize)

    def _empty(self, shift: Tensor, num_classes: int) -> Moments:
        """The moments of no sample, around a point of shape (D,)."""
        sums = shift.new_zeros(num_classes, len(shift))
        second = torch.zeros_like(shift) if self.diagonal else shift.new_zeros(len(shift), len(shift))
        return Moments(sums.new_zeros(num_classes), shift, sums, second, self.normalize)

    def _set(self, moments: Moments) -> None:
        for name in _STATES:
            setattr(self, name, getattr(moments, name))

    def _sync_dist(self, dist_sync_fn: Gather = gather_all_tensors, process_group: Any | None = None) -> None:
        # not torchmetrics' sum: ranks may differ in inferred sizes and in their shift, or have seen nothing
        group = process_group or self.process_group
        states = [dist_sync_fn(getattr(self, name), group=group) for name in _STATES]
        ranks = [Moments(*rank) for rank in zip(*states, strict=True)]
        if seen := [moments for moments in ranks if moments.num_samples]:
            self._set(sum(seen[1:], seen[0]))

    def _wrap_compute(self, compute: Callable[[], Moments]) -> Callable[[], Moments]:
        # torchmetrics' own would squeeze every tensor inside the result, and warn of a rank without data
        @wraps(compute)
        def synced() -> Moments:
            moments: Moments | None = self._computed
            if moments is None:
                with self.sync_context(self.dist_sync_fn, should_sync=self._to_sync, should_unsync=self._should_unsync):
                    moments = compute()
                self._computed = moments if self.compute_with_cache else None  # type: ignore[assignment]
            return moments

        return synced
