"""Streaming class moments: one pass, constant memory, over any number of processes.

:class:`ClassMoments` is the accumulator, :class:`rmd_plugin.Moments` its immutable result. It knows no detectors and no
encoders; labels below zero are skipped because the framework marks OOD samples with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from rmd_plugin.detectors.functional import unit_length
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.encoding.features import check_features, check_labels, pool_features

#: rows that are widened to float64 at a time: the copy stays in the cache and memory does not grow with the batch
_CHUNK_ROWS = 1024

#: columns of the second moment that are computed at a time, from the diagonal on: the rest follows by symmetry
_BLOCK_COLUMNS = 160

#: largest number of classes that is inferred from labels; a larger label is more likely an identifier than a class
_MAX_INFERRED_CLASSES = 1_000_000

_STATES = ("counts", "shift", "sums", "second")


class ClassMoments(Metric):
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
    is_differentiable: bool = False
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
        for name, value in (("num_classes", num_classes), ("num_features", num_features)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be a positive integer, or None to infer it, got {value}.")
        self.num_classes = num_classes
        self.num_features = num_features
        self.diagonal = diagonal
        self.normalize = normalize
        classes, width = num_classes or 0, num_features or 0
        # float64: with feature mean 100 a float32 covariance is off in the third digit
        for name, shape in (
            ("counts", (classes,)),
            ("sums", (classes, width)),
            ("second", (width,) if diagonal else (width, width)),
        ):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        # _sync_dist makes the shift equal on all ranks before the states are gathered
        self.add_state("shift", torch.zeros(width, dtype=torch.float64), dist_reduce_fx=_first)

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add a batch. A batch that raises leaves the moments as they were.

        Args:
            features: shape (B, D), or (B, C, H, W), which are averaged over space.
            labels: class labels of shape (B,); samples with a label below zero are skipped.

        Raises:
            TypeError: if features or labels have the wrong dtype.
            ValueError: if shapes do not fit, a label is not below ``num_classes``, or features are NaN or infinite.
        """
        check_features(features, self.shift.numel() or None)
        check_labels(labels, len(features))
        # states made inside Lightning's inference mode could not be updated outside of it
        with torch.inference_mode(False), torch.no_grad():
            self._accumulate(features, labels)

    def _accumulate(self, features: Tensor, labels: Tensor) -> None:
        if not self._started() and features.device.type != "mps":  # MPS has no float64: stay on the CPU
            self.to(features.device)
        features, labels = (
            pool_features(features.detach().to(self.device), torch.float64),
            labels.to(self.device).long(),
        )
        is_id = labels >= 0
        if not bool(is_id.all()):
            features, labels = features[is_id], labels[is_id]
        if len(labels) == 0:
            return
        self._check_finite(features)
        self._add(features, labels)

    def _add(self, features: Tensor, labels: Tensor) -> None:
        """Add features (B, D) of ID samples, all finite."""
        classes = self._check_classes(int(labels.max()))
        # any point near the data will do as the shift
        moments = self._state() if self._started() else self._empty(self._widened(features[:_CHUNK_ROWS]).mean(0))
        self._set_state(moments.with_classes(classes))
        for rows, targets in zip(features.split(_CHUNK_ROWS), labels.split(_CHUNK_ROWS), strict=True):
            wide = self._widened(rows)
            centred = wide - self.shift if wide is rows else wide.sub_(self.shift)
            self.sums.index_add_(0, targets, centred)
            if self.diagonal:
                self.second += centred.square().sum(0)
            else:
                for start in range(0, centred.shape[1], _BLOCK_COLUMNS):
                    stop = start + _BLOCK_COLUMNS
                    self.second[start:stop, start:].addmm_(centred[:, start:stop].T, centred[:, start:])
        self.counts += torch.bincount(labels, minlength=classes)

    def compute(self) -> Moments:
        """The moments of everything seen so far, on all processes together.

        Raises:
            ValueError: if no sample with a label >= 0 was seen.
        """
        moments = self._state()
        if moments.num_samples == 0:
            raise ValueError(
                "no in-distribution sample (label >= 0) was seen. Check that the loader is not empty and that its "
                "labels are class indices; labels below zero mark OOD samples and are skipped."
            )
        # only the upper triangle of the second moment is kept up to date
        second = moments.second.clone() if self.diagonal else moments.second.triu() + moments.second.triu(1).T
        copies = {name: getattr(moments, name).clone() for name in ("counts", "shift", "sums")}
        return replace(moments, **copies, second=second)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add what another :class:`ClassMoments` has seen.

        Args:
            incoming_state: the other one, or its ``metric_state``: a dict of ``counts``, ``shift``, ``sums`` and
                ``second``, which does not say whether the features were normalized as these are.

        Raises:
            ValueError: if the other was collected with other options, or the dict is no such state.
        """
        if isinstance(incoming_state, ClassMoments):
            other, updates = incoming_state._state(), incoming_state._update_count
        elif isinstance(incoming_state, dict):
            other, updates = _read_state(incoming_state, normalized=self.normalize), 1
        else:
            raise ValueError(
                f"expected another ClassMoments or its state to merge, got {type(incoming_state).__name__}."
            )
        if self.num_classes is not None and other.num_classes > self.num_classes:
            raise ValueError(
                f"moments with num_classes={self.num_classes} and num_classes={other.num_classes} do not add up. "
                "Give both the same num_classes, or leave it out."
            )
        if other.num_features:
            other = other.to(self.device)
            own = self._state() if self.shift.numel() else self._empty(other.shift)
            self._set_state(own + other)
            self._update_count += updates
            self._computed = None

    def _widened(self, rows: Tensor) -> Tensor:
        """Features in float64, of unit length if they are normalized: in float32 a mean of 1e4 drowns their spread."""
        return unit_length(rows.double()) if self.normalize else rows.double()

    def _started(self) -> bool:
        return bool(self.counts.any())

    def _state(self) -> Moments:
        return Moments(self.counts, self.shift, self.sums, self.second, normalized=self.normalize)

    def _empty(self, shift: Tensor) -> Moments:
        """The state without a sample, around a point of shape (D,)."""
        width = len(shift)
        second = shift.new_zeros((width,) if self.diagonal else (width, width))
        return replace(self._state(), shift=shift, sums=shift.new_zeros(len(self.counts), width), second=second)

    def _set_state(self, moments: Moments) -> None:
        for name in _STATES:
            setattr(self, name, getattr(moments, name))

    def _check_finite(self, features: Tensor) -> None:
        # aminmax propagates NaN and costs one pass without a temporary
        low, high = torch.aminmax(features)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            nan, bad = int(features.isnan().sum()), ~features.isfinite()
            raise ValueError(
                f"batch {self._update_count - 1} has {nan} NaN and {int(bad.sum()) - nan} infinite feature values in "
                f"{int(bad.any(1).sum())} of {len(features)} samples. Nothing of this batch was added."
            )

    def _check_classes(self, largest: int) -> int:
        if self.num_classes is not None:
            if largest >= self.num_classes:
                raise ValueError(
                    f"labels must be below num_classes={self.num_classes}, got {largest}. "
                    "Pass a larger num_classes, or map the labels to 0..K-1."
                )
            return self.num_classes
        if largest >= _MAX_INFERRED_CLASSES:
            raise ValueError(
                f"label {largest} would mean {largest + 1} classes. Map the labels to 0..K-1, "
                "or pass num_classes if there really are so many."
            )
        return max(largest + 1, len(self.counts))

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        # Ranks may differ in inferred sizes and in their shift, or have seen nothing: agree on these first, so that
        # torchmetrics can gather and sum states of one shape that are taken around one point.
        group = process_group or self.process_group
        sizes = dist_sync_fn(torch.tensor([len(self.counts), len(self.shift)], device=self.device), group=group)
        classes, width = (int(size) for size in torch.stack(sizes).amax(0))
        if any(int(size[1]) not in (0, width) for size in sizes):
            raise ValueError(f"the ranks saw features of different widths: {[int(size[1]) for size in sizes]}.")
        moments = self._state() if len(self.shift) == width else self._empty(self.shift.new_zeros(width))
        moments = moments.with_classes(classes)
        started = dist_sync_fn(self.counts.sum() if len(self.counts) else self.counts.new_zeros(()), group=group)
        shifts = dist_sync_fn(moments.shift, group=group)
        shift = next((s for s, count in zip(shifts, started, strict=True) if bool(count > 0)), moments.shift)
        self._set_state(moments.with_shift(shift))
        super()._sync_dist(dist_sync_fn, process_group=process_group)

    def _wrap_compute(self, compute: Callable[[], Moments]) -> Callable[[], Moments]:
        # torchmetrics squeezes every tensor inside a result, and refuses frozen dataclasses: show it a closed box
        wrapped = super()._wrap_compute(lambda: _Box(compute()))

        @wraps(compute)
        def unpacked() -> Moments:
            with warnings.catch_warnings():
                # a rank without data is nothing to warn about, and without any data compute() has its own error
                warnings.filterwarnings("ignore", message=r"The ``compute`` method of metric \w*ClassMoments")
                box: _Box = wrapped()
            return box.content

        return unpacked

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        self._computed = self._forward_cache = None
        # follow a parent module to another device, but stay float64 when it is cast to half precision
        return super()._apply(lambda t: t.to(fn(t.new_empty(0)).device), exclude_state)


def _read_state(state: dict[str, Any], *, normalized: bool) -> Moments:
    """The moments in a metric's state, whose shapes are checked first."""
    tensors = {name: torch.as_tensor(state[name]).double() for name in _STATES if name in state}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sums = shapes.get("sums", ())
    classes, width = sums[:1], sums[1:]
    expected = {"counts": classes, "shift": width, "sums": sums, "second": shapes.get("second", ())}
    if len(sums) != 2 or shapes != expected or expected["second"] not in (width, width * 2):
        raise ValueError(
            "expected the state of a ClassMoments: counts (K,), shift (D,), sums (K, D), and second (D, D) or (D,), "
            f"got {shapes or list(state)}. Pass the other metric, or its metric_state."
        )
    return Moments(**tensors, normalized=normalized)


class _Box:
    def __init__(self, content: Moments) -> None:
        self.content = content


def _first(stacked: Tensor) -> Tensor:
    return stacked[0]
