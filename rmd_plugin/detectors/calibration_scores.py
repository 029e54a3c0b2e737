"""Scores of ID samples, collected in bounded memory over any number of batches and processes, for a calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import Self

from rmd_plugin.detectors.conformal import Calibration
from rmd_plugin.detectors.score_metric import ScoreMetric

#: scores that are kept one by one
EXACT_SCORES = 2**17


class CalibrationScores(ScoreMetric):
    """Collects the scores of ID samples, over batches and processes, and makes a :class:`Calibration` of them.

    Up to ``limit`` scores are kept one by one. Beyond, the smaller of two neighbouring scores is counted as the
    larger one, level by level: p-values grow by at most :attr:`Calibration.rank_error` (about log2(n / limit) / limit)
    and never shrink, so that every guarantee holds, and memory grows with log(n) only.

    Args:
        num_classes: K, to calibrate each class by itself; None for all together.
        limit: how many scores (at each level) are kept as they are.
        kwargs: options of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = CalibrationScores(limit=1000)
        >>> for part in torch.arange(50_000.0).split(100):
        ...     metric.update(part)
        >>> metric.compute()
        <Calibration: 50000 samples, ranks off by at most 0.0047>
    """

    overcount: Tensor
    scores: list[Tensor]
    levels: list[Tensor]
    classes: list[Tensor]

    def __init__(self, num_classes: int | None = None, *, limit: int = EXACT_SCORES, **kwargs: Any) -> None:
        super().__init__({"scores": torch.float64, "levels": torch.long, "classes": torch.long}, **kwargs)
        if limit < 2:
            raise ValueError(f"limit must be at least 2, got {limit}.")
        self.num_classes, self.limit = num_classes, limit
        self.add_state("overcount", torch.zeros(num_classes or 1, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, scores: Tensor, classes: Tensor | None = None) -> None:
        """Add the scores (B,) of ID samples, and for a calibration per class the classes (B,) that they fall into.

        Raises:
            ValueError: if scores are NaN or shapes do not fit. The batch was not added.
        """
        if scores.ndim != 1:
            raise ValueError(f"scores must have shape (B,), one per sample, got {tuple(scores.shape)}.")
        bad = int(scores.isnan().sum())
        if bad:
            raise ValueError(f"{bad} of {len(scores)} calibration scores are NaN. The batch was not added.")
        if (classes is None) != (self.num_classes is None) or (classes is not None and classes.shape != scores.shape):
            expected = "no classes" if self.num_classes is None else f"classes of shape {tuple(scores.shape)}"
            found = "none" if classes is None else f"shape {tuple(classes.shape)}"
            raise ValueError(f"expected {expected} with num_classes={self.num_classes}, got {found}.")
        none = torch.zeros(scores.shape, dtype=torch.long)
        self.append(scores=scores, levels=none, classes=none if classes is None else classes)
        if sum(map(len, self.scores[1:])) > self.limit:
            self._compact()

    def compute(self) -> Calibration:
        """The calibration of all scores, of all processes together.

        Raises:
            ValueError: if there is none.
        """
        scores, levels, classes = self.kept()
        own = None if self.num_classes is None else classes
        return Calibration(scores, 2**levels, own, self.overcount)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the scores that another one has seen: the metric, or a dict with its states."""
        super().merge_state(incoming_state)
        state: dict[str, Any] = incoming_state if isinstance(incoming_state, dict) else incoming_state.metric_state
        self.overcount = self.overcount + state["overcount"].to(self.overcount)
        self._compact()

    def _check_alike(self, other: Self) -> None:
        if other.num_classes != self.num_classes:
            found = f"num_classes={self.num_classes}, those to merge of num_classes={other.num_classes}"
            raise ValueError(f"the scores are of {found}.")

    def _compact(self) -> None:
        scores, levels, classes = self.kept()
        level = 0
        while bool((levels >= level).any()):
            here = levels == level
            if int(here.sum()) > self.limit:
                # classes with few scores keep them: what is left of all of them is half the limit at most
                sizes = torch.bincount(classes[here], minlength=self.overcount.numel())
                here &= sizes[classes] * 2 * len(sizes) > self.limit
                kept, left, counts = _halve(scores[here], classes[here], self.overcount.numel())
                self.overcount = self.overcount + (counts > 1) * 2**level
                above, rest = torch.full_like(kept[1], level + 1), torch.full_like(left[1], level)
                levels = torch.cat([levels[~here], above, rest])
                scores = torch.cat([scores[~here], kept[0], left[0]])
                classes = torch.cat([classes[~here], kept[1], left[1]])
            level += 1
        self.scores, self.levels, self.classes = [scores], [levels], [classes]


Part = tuple[Tensor, Tensor]


def _halve(scores: Tensor, classes: Tensor, num_classes: int) -> tuple[Part, Part, Tensor]:
    """Pair neighbouring scores within each class: the larger of each pair, what is left over, and the class sizes."""
    order = scores.argsort(descending=True, stable=True)
    order = order[classes[order].argsort(stable=True)]
    scores, classes = scores[order], classes[order]
    counts = torch.bincount(classes, minlength=num_classes)
    position = torch.arange(len(scores), device=scores.device) - (counts.cumsum(0) - counts)[classes]
    paired = position < counts[classes] // 2 * 2
    larger = paired & (position % 2 == 0)
    return (scores[larger], classes[larger]), (scores[~paired], classes[~paired]), counts
