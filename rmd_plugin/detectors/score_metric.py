"""What metrics that collect scores share: lists of tensors that keep their types, also on processes without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import Self


class ScoreMetric(Metric):
    """Base class of metrics whose states are lists of tensors of shape (B,), gathered over the processes.

    Args:
        dtypes: name of each list and the type of its tensors, which no parent's ``.to(dtype)`` changes.
        kwargs: options of :class:`torchmetrics.Metric`.
    """

    full_state_update: bool = False
    is_differentiable: bool = False

    def __init__(self, dtypes: Mapping[str, torch.dtype], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dtypes = dict(dtypes)
        for name in dtypes:
            self.add_state(name, [], dist_reduce_fx="cat")

    def append(self, **batch: Tensor) -> None:
        """Add tensors of shape (B,) to the lists of their names."""
        # states made inside Lightning's inference mode could not be used outside of it
        with torch.inference_mode(False):
            for name, dtype in self._dtypes.items():
                found = batch[name].detach()
                # MPS has no float64; float64 keeps the order and the ties of scores of any precision
                found = (found.cpu() if found.device.type == "mps" else found).to(dtype, copy=True)
                getattr(self, name).append(found.to(self.device))

    def kept(self) -> list[Tensor]:
        """All that was added, one tensor for each list."""
        empty = {name: torch.zeros(0, dtype=dtype, device=self.device) for name, dtype in self._dtypes.items()}
        return [dim_zero_cat(getattr(self, name)) if len(getattr(self, name)) else empty[name] for name in empty]

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add what another metric of this kind and of the same options has seen.

        Args:
            incoming_state: the metric, or a dict with its states, as lists or tensors.
        """
        name = type(self).__name__
        if isinstance(incoming_state, type(self)):
            self._check_alike(incoming_state)
            count, incoming_state = incoming_state.update_count, incoming_state.metric_state
        elif isinstance(incoming_state, dict):
            count = 1
        else:
            found = type(incoming_state).__name__
            raise ValueError(f"expected another {name}, or a dict with its states, got {found}.")
        if not self._defaults.keys() <= incoming_state.keys():
            found = ", ".join(incoming_state) or "none"
            raise ValueError(f"expected the states {', '.join(self._defaults)} of {name}, got {found}.")
        # torchmetrics' own leaves the count and a computed value as they were
        lists = {name: incoming_state[name] for name in self._dtypes}
        if any(len(found) for found in lists.values()):
            self.append(**{name: dim_zero_cat(found) for name, found in lists.items()})
            self._update_count += count
            self._computed = None

    def _check_alike(self, other: Self) -> None:
        """Refuse a metric of other options."""

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        # torchmetrics would gather a float32 tensor from a rank without data, and int64 or float64 from the others
        for name, tensor in zip(self._dtypes, self.kept(), strict=True):
            setattr(self, name, [tensor])
        super()._sync_dist(dist_sync_fn, process_group=process_group)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        # another device, but never another dtype: ranks would be lost, and groups are integers
        return super()._apply(lambda t: t.to(fn(t.new_empty(0)).device), exclude_state)
