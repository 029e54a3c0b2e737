"""Score, p-value and decision as one graph: what :meth:`rmd_plugin.Calibrated.to_module` gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pytorch_ood.api import LogitsDetector
from torch import Tensor, nn

from rmd_plugin.detectors.conformal import Calibration


class LogitsScore(nn.Module):
    """A detector on logits, whose classes are the predicted ones."""

    def __init__(self, detector: LogitsDetector) -> None:
        super().__init__()
        self._detector = detector
        # without the framework's move to the detector's device, which torch 2.6 cannot export
        predict: Callable[..., Tensor] = type(detector).predict_logits
        self._predict = getattr(predict, "__wrapped__", predict)

    def forward(self, logits: Tensor) -> Tensor:
        """Scores of shape (B,)."""
        scores: Tensor = self._predict(self._detector, logits)
        return scores

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the predicted classes, both of shape (B,)."""
        return self(logits), logits.argmax(1)


class CalibratedScore(nn.Module):
    """Score, p-value and decision of features or logits as one graph, without what only runs in Python.

    Args:
        score: maps features or logits to scores (B,); for a calibration per class it has ``scored``.
        calibration: of those scores.
        threshold: above which a sample is OOD; one for each class, shape (K,), if there are classes.
        known: label of each place that ``scored`` gives; None for a detector on logits, or without classes.
    """

    size: Tensor
    scores: Tensor
    at_least: Tensor
    threshold: Tensor
    #: those of each class
    keys: Tensor
    class_at_least: Tensor
    past: Tensor
    known: Tensor
    pooled: Tensor
    sizes: Tensor

    def __init__(
        self, score: nn.Module, calibration: Calibration, threshold: float | Tensor, known: Tensor | None = None
    ) -> None:
        super().__init__()
        self.score, self.per_class = score, calibration.classes is not None
        self.on_logits = isinstance(score, LogitsScore)
        if known is not None:
            self.register_buffer("known", known)
        self.register_buffer("size", torch.tensor(len(calibration)))
        self.register_buffer("scores", _padded(calibration.scores, torch.inf))
        self.register_buffer("at_least", _padded(calibration.at_least, 0))
        self.register_buffer("threshold", torch.as_tensor(threshold, dtype=torch.float64))
        if self.per_class:
            keys, at_least = calibration.class_keys
            self.stride = len(calibration.scores) + 1
            self.register_buffer("keys", _padded(keys, torch.iinfo(torch.long).max))
            self.register_buffer("class_at_least", _padded(at_least, 0))
            self.register_buffer("past", calibration.class_past)
            self.register_buffer("pooled", calibration.pooled_classes)
            self.register_buffer("sizes", calibration.class_sizes)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, p-values (float64) and decisions (bool), each of shape (B,)."""
        scores, _, p_values, decisions = self.judge(values)
        return scores, p_values, decisions

    def judge(self, values: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The same with the labels of the nearest classes in the second place; None for a detector without classes."""
        classes = None
        if self.on_logits:
            scores, classes = self.score.scored(values)  # type: ignore[operator]
        elif hasattr(self, "known"):
            scores, place = self.score.scored(values)  # type: ignore[operator]
            classes = self.known[place]
        else:
            scores = self.score(values)
        wide = scores.double()
        ranks = _search(self.scores, wide)
        above, size, threshold = self.at_least[ranks], self.size, self.threshold
        if classes is not None and self.per_class:
            # NaN ranks lie behind all others
            keys = classes * self.stride + ranks.clamp(max=self.stride - 1)
            own = self.class_at_least[_search(self.keys, keys)] - self.past[classes]
            few = self.pooled[classes]
            above, size = torch.where(few, above, own), torch.where(few, size, self.sizes[classes])
            threshold = threshold[classes]
        return scores, classes, (1 + above).double() / (size + 1), ~(wide <= threshold)


def _padded(table: Tensor, value: float) -> Tensor:
    """A table of 2^k - 1 (or, with an end, 2^k) entries."""
    length = 2 ** len(table).bit_length()
    return torch.cat([table, table.new_full((length - len(table),), value)])


def _search(table: Tensor, values: Tensor) -> Tensor:
    """Number of entries of an ascending table below each value, by bisection: ONNX has no searchsorted. NaN: all."""
    position = torch.zeros_like(values, dtype=torch.long)
    step = len(table) // 2
    while step:
        # ~(>=) instead of <: a NaN is above everything
        position = position + step * (~(table[position + step - 1] >= values)).long()
        step //= 2
    return position
