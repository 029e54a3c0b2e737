"""Scores -> AUROC, AUPR-IN, AUPR-OUT, FPR95TPR, over any number of processes.

The definitions are the framework's (``pytorch_ood.metrics.functional``), the distribution is torchmetrics': states of
kind "cat". Scores are taken as they are, without the sigmoid that torchmetrics' own binary metrics apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_ood.metrics import functional
from torch import Tensor
from torchmetrics import Metric

from rmd_plugin.compare.rows import AURC_OOD, AUROC, AUTC, FPR95, MEAN, OSCR, RISK90
from rmd_plugin.detectors.conformal import ScoreMetric
from rmd_plugin.detectors.moments import check_labels

#: the metrics, named as the framework names them
METRICS = (AUROC, "AUPR-IN", "AUPR-OUT", FPR95)


def compare_scores(id_scores: Tensor, ood_scores: Tensor) -> dict[str, Tensor]:
    """The four metrics of one detector on one OOD set, as float64 scalars.

    Args:
        id_scores: shape (N,), higher means more likely OOD.
        ood_scores: shape (M,).

    Raises:
        ValueError: if scores are NaN, or there is no ID or no OOD sample.
    """
    if not len(id_scores) or not len(ood_scores):
        raise ValueError(f"there are {len(id_scores)} ID samples and {len(ood_scores)} OOD samples.")
    scores = torch.cat([id_scores, ood_scores])
    labels = -(torch.arange(len(scores), device=scores.device) >= len(id_scores)).long()
    return {
        AUROC: functional.auroc(scores, labels),
        "AUPR-IN": functional.aupr(scores, labels, positive="id"),
        "AUPR-OUT": functional.aupr(scores, labels, positive="ood"),
        FPR95: functional.fpr_at_tpr(scores, labels, tpr=0.95),
    }


def risk_coverage(scores: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """The risk-coverage curve of accepting samples, those with the lowest scores first (El-Yaniv and Wiener 2010).

    Args:
        scores: shape (N,), higher means less sure.
        errors: shape (N,), whether it is an error to accept a sample.

    Returns:
        Coverage, the share that is accepted, and risk, the share of errors among the accepted, both of shape (N,),
        float64. Samples of one score share their errors, as in the mean over their orders.
    """
    _, group = scores.unique(return_inverse=True)
    sizes = torch.bincount(group)
    shared = torch.bincount(group, errors.double()) / sizes
    accepted = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    return accepted / len(scores), shared.repeat_interleave(sizes).cumsum(0) / accepted


def aurc(scores: Tensor, errors: Tensor) -> Tensor:
    """Area under the risk-coverage curve, by trapezoids over the coverages from 1/N to 1 and divided by 1 - 1/N."""
    coverage, risk = risk_coverage(scores, errors)
    return torch.trapezoid(risk, coverage) / (coverage[-1] - coverage[0])


def joint_metrics(id_scores: Tensor, ood_scores: Tensor, right: Tensor | None) -> dict[str, float]:
    """Metrics of one detector on one OOD set that ask whether a sample is unknown or the classifier wrong.

    Args:
        id_scores: shape (N,), higher means more likely OOD.
        ood_scores: shape (M,).
        right: shape (N,), whether the classifier is right about each ID sample; None without a classifier.

    Returns:
        AUTC where the scores are finite and differ; with a classifier OSCR, AURC-OOD, for which it is an error to
        accept an OOD sample or a wrong one, and risk90, the share of such errors among what is accepted if 90 % of the
        ID samples are. They depend on N and M, as these tell how frequent OOD samples are.
    """
    scores = torch.cat([id_scores, ood_scores])
    labels = torch.cat([torch.zeros(len(id_scores)), -torch.ones(len(ood_scores))]).long()
    values = {}
    if bool(scores.isfinite().all()) and bool(scores.min() < scores.max()):
        values[AUTC] = float(functional.autc(scores, labels))
    if right is not None:
        errors = torch.cat([~right, torch.ones(len(ood_scores), dtype=torch.bool)])
        accepted = scores <= id_scores.sort().values[math.ceil(0.9 * len(id_scores)) - 1]
        values[OSCR] = float(functional.oscr_score(scores, torch.where(errors, 1, 0), labels))
        values[AURC_OOD], values[RISK90] = float(aurc(scores, errors)), float(errors[accepted].double().mean())
    return values


class OODScores(ScoreMetric):
    """Collects the scores of one detector and compares ID samples with one or more OOD sets.

    Args:
        ood: names of the OOD sets.
        kwargs: options of :class:`torchmetrics.Metric`.

    Example:
        >>> import torch
        >>> from rmd_plugin.compare.metrics import OODScores
        >>> metric = OODScores(["svhn"])
        >>> metric.update(torch.tensor([0.1, 700.0, 0.3]), torch.tensor([2, -1, 0]))
        >>> float(metric.compute()["svhn/AUROC"])
        1.0
    """

    higher_is_better: bool = True  # AUROC and AUPR; FPR95TPR beside them is better the lower
    plot_lower_bound: float = 0.0
    plot_upper_bound: float = 1.0
    scores: list[Tensor]
    groups: list[Tensor]

    def __init__(self, ood: Sequence[str] = ("ood",), **kwargs: Any) -> None:
        super().__init__({"scores": torch.float64, "groups": torch.long}, **kwargs)
        self.ood = check_set_names(ood)

    def update(self, scores: Tensor, labels: Tensor, ood: str | None = None) -> None:
        """Add a batch.

        Args:
            scores: shape (B,), higher means more likely OOD.
            labels: shape (B,); samples with a label below zero belong to the OOD set, the others are ID.
            ood: name of the OOD set; by default the first one.
        """
        if scores.ndim != 1:
            raise ValueError(f"scores must have shape (B,), one per sample, got {tuple(scores.shape)}.")
        labels = check_labels(labels, len(scores))
        name = self.ood[0] if ood is None else ood
        if name not in self.ood:
            raise ValueError(f"there is no OOD set {name!r}. Expected one of: {', '.join(self.ood)}.")
        group = torch.full_like(labels, self.ood.index(name) + 1).masked_fill_(labels >= 0, 0)
        self.append(scores=scores, groups=group)

    def compute(self) -> dict[str, Tensor]:
        """The metrics of each OOD set that has samples, and their mean, over all processes together.

        Returns:
            Values under ``"<set>/<metric>"`` and ``"mean/<metric>"``, ready for ``LightningModule.log_dict``.

        Raises:
            ValueError: if scores are NaN, or there is no ID or no OOD sample at all.
        """
        id_scores, ood_scores = self._split()
        if not ood_scores:
            raise ValueError(f"there are {len(id_scores)} ID samples and 0 OOD samples.")
        results = {name: compare_scores(id_scores, scores) for name, scores in ood_scores.items()}
        results[MEAN] = {
            metric: torch.stack([values[metric] for values in results.values()]).mean() for metric in METRICS
        }
        return {f"{name}/{metric}": value for name, values in results.items() for metric, value in values.items()}

    def gather(self) -> tuple[Tensor, dict[str, Tensor]]:
        """All scores, of all processes together: those of the ID samples, and those of each OOD set with samples.

        Every process has to call it. The order of the scores is not defined.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._split()

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add what another metric of the same OOD sets has seen."""
        if isinstance(incoming_state, OODScores) and incoming_state.ood != self.ood:
            own, other = ", ".join(self.ood), ", ".join(incoming_state.ood)
            raise ValueError(f"the scores are of the OOD sets {own}, but those to merge are of {other}.")
        super().merge_state(incoming_state)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot what :meth:`compute` gave, or a sequence of it over steps, as torchmetrics plots; figure and axes."""
        return self._plot(val, ax)

    def _split(self) -> tuple[Tensor, dict[str, Tensor]]:
        scores, groups = self.collected()
        sets = {name: scores[groups == number] for number, name in enumerate(self.ood, start=1)}
        return scores[groups == 0], {name: values for name, values in sets.items() if len(values)}


def check_set_names(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse names of OOD sets that could not be told apart in a metric's name."""
    names = tuple(names)
    bad = [name for name in names if not isinstance(name, str) or not name or "/" in name or name == MEAN]
    if bad or not names or len(set(names)) < len(names):
        raise ValueError(
            f"expected names of OOD sets, each once, without '/' and not {MEAN!r}, got {', '.join(map(repr, names))}."
        )
    return names
