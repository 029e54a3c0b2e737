"""Batches and what they become: :class:`Encoded`, and where a batch keeps its inputs and its labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_LABEL_KEYS = ("labels", "label")


class EncodingError(ValueError):
    """The settings do not fit the module or its batches: a wrong head, another kind of batch."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a batch became on its way through the module."""

    features: Tensor  #: shape (B, D), at least float32
    logits: Tensor | None = None  #: shape (B, C), at least float32; None where the module gave none
    labels: Tensor | None = None  #: shape (B,); None for a batch without labels
    batch: Any = field(default=None, repr=False)  #: itself, for detectors that work on inputs; None if not kept
    #: name of an inner layer -> its pooled features, shape (B, D_l); empty where nobody asked for them
    layers: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.features)

    @property
    def inputs(self) -> Any:
        """What the batch holds besides its labels."""
        return batch_inputs(self.batch)

    def select(self, keep: Tensor | slice) -> Encoded:
        """The samples where ``keep``, a mask of shape (B,) or a slice, is true. The batch is not kept with a part."""
        if isinstance(keep, Tensor):
            if bool(keep.all()):
                return self
            keep = keep.to(self.features.device)
        logits = None if self.logits is None else self.logits[keep]
        labels = None if self.labels is None else self.labels[keep]
        layers = {name: z[keep] for name, z in self.layers.items()}
        return Encoded(self.features[keep], logits, labels, layers=layers)


def batch_labels(batch: Any) -> Tensor | None:
    """Labels of a batch: the second of a pair, or the entry ``labels`` or ``label`` of a dict; None if it has none."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in _LABEL_KEYS if key in batch), None)
    if isinstance(batch, (tuple, list)):
        _check_pair(batch)
        return batch[1] if len(batch) == 2 else None
    return None


def batch_inputs(batch: Any) -> Any:
    """What a batch holds besides its labels: the first of a pair, the other entries of a dict, or the batch itself."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in _LABEL_KEYS}
    if isinstance(batch, (tuple, list)):
        _check_pair(batch)
        return batch[0]
    return batch


def _check_pair(batch: tuple[Any, ...] | list[Any]) -> None:
    if len(batch) not in (1, 2):
        raise EncodingError(
            f"expected a batch (x, y), a dict with labels, or a tensor, got a {type(batch).__name__} of length "
            f"{len(batch)}. Pass forward=lambda module, batch: ... and labels=lambda batch: ..."
        )
