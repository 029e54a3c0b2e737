"""OOD metrics over any number of processes: scores and labels -> AUROC, AUPR-IN, AUPR-OUT, FPR95TPR.

The definitions are the framework's (``pytorch_ood.metrics.functional``), the distribution is torchmetrics': states of
kind "cat". Scores are taken as they are, without the sigmoid that torchmetrics' own binary metrics apply.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from pytorch_ood.metrics.functional import aupr, auroc, fpr_at_tpr
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import Self

from rmd_plugin.compare.rows import AUROC, FPR95
from rmd_plugin.detectors.score_metric import ScoreMetric
from rmd_plugin.encoding.features import check_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: the metrics, named as the framework names them
METRICS = (AUROC, "AUPR-IN", "AUPR-OUT", FPR95)

#: share of an OOD set that a calibrated detector accepts at its level alpha of false alarms
ACCEPTED = "FPR@alpha"

_MARKERS = "osD^vP*X<>"

#: name under which the average over the OOD sets is reported
MEAN = "mean"


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
    labels = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    labels[len(id_scores) :] = -1
    values = (
        auroc(scores, labels),
        aupr(scores, labels, positive="id"),
        aupr(scores, labels, positive="ood"),
        fpr_at_tpr(scores, labels, tpr=0.95),
    )
    return dict(zip(METRICS, values, strict=True))


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
            metric: torch.stack([found[metric] for found in results.values()]).mean() for metric in METRICS
        }
        return {f"{name}/{metric}": value for name, found in results.items() for metric, value in found.items()}

    def gather(self) -> tuple[Tensor, dict[str, Tensor]]:
        """All scores, of all processes together: those of the ID samples, and those of each OOD set with samples.

        Every process has to call it. The order of the scores is not defined.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._split()

    def _check_alike(self, other: Self) -> None:
        if other.ood != self.ood:
            mine, theirs = ", ".join(self.ood), ", ".join(other.ood)
            raise ValueError(f"the scores are of the OOD sets {mine}, but those to merge are of {theirs}.")

    def plot(
        self, val: dict[str, Tensor] | Sequence[dict[str, Tensor]] | None = None, ax: Axes | None = None
    ) -> tuple[Figure | None, Axes]:
        """Plot the metrics of each OOD set.

        Args:
            val: what :meth:`compute` or a forward pass gave, or a sequence of it, whose steps become the horizontal
                axis. By default what has been collected.
            ax: axes to draw in; by default those of a new figure.

        Returns:
            The figure (None if axes were given) and the axes.
        """
        already = len(ax.lines) if ax is not None else 0
        figure: Figure | None
        figure, axes = cast("tuple[Figure, Axes]", self._plot(val, ax))
        # torchmetrics' colours come again after ten lines: a colour for each metric, a marker for each set
        names = [str(line.get_label()).rpartition("/") for line in axes.lines[already:]]
        metrics, sets = (list(dict.fromkeys(name[part] for name in names)) for part in (2, 0))
        for line, name in zip(axes.lines[already:], names, strict=True):
            line.set(color=f"C{metrics.index(name[2])}", marker=_MARKERS[sets.index(name[0]) % len(_MARKERS)])
        axes.set_title("ID samples against each OOD set")
        axes.set_ylabel("value")
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))  # beside: four names for each set
        if figure is not None:
            figure.set_layout_engine("constrained")
        return figure, axes

    def _split(self) -> tuple[Tensor, dict[str, Tensor]]:
        scores, groups = self.kept()
        sets = {name: scores[groups == number] for number, name in enumerate(self.ood, start=1)}
        return scores[groups == 0], {name: found for name, found in sets.items() if len(found)}


class FeatureRows(Metric):
    """Collects rows of features (or logits) with their labels, in an order that does not depend on the processes.

    For detectors that need all features at once. Memory grows with the number of samples; it is kept on the CPU.
    """

    full_state_update: bool = False
    is_differentiable: bool = False
    rows: list[Tensor]
    labels: list[Tensor]
    index: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("rows", "labels", "index"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, rows: Tensor, labels: Tensor, index: Tensor) -> None:
        """Add rows (B, D) with labels (B,) and positions in the whole set (B,); labels below zero are skipped.

        Raises:
            ValueError: if rows are NaN or infinite, or the shapes do not fit.
        """
        labels = check_labels(labels, len(rows))
        is_id = labels >= 0
        with torch.inference_mode(False):
            rows, labels = rows.detach()[is_id].cpu().clone(), labels[is_id].cpu().clone()
            bad = int((~rows.isfinite()).any(1).sum())
            if bad:
                raise ValueError(f"{bad} of {len(rows)} samples have NaN or infinite values. The batch was not added.")
            self.rows.append(rows)
            self.labels.append(labels)
            self.index.append(index.to(is_id.device)[is_id].cpu().clone())

    def compute(self) -> tuple[Tensor, Tensor]:
        """Rows (N, D) and labels (N,) of all processes, ordered by index.

        Raises:
            ValueError: if no sample with a label >= 0 was seen.
        """
        index = dim_zero_cat(self.index) if len(self.index) else torch.zeros(0)
        if not len(index):
            raise ValueError("no ID sample (label >= 0) was seen: there is nothing to fit.")
        order = index.argsort(stable=True)
        return dim_zero_cat(self.rows)[order], dim_zero_cat(self.labels)[order]

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        # a rank without data has to gather empty tensors of the shape and type of the others
        mine = [self.rows[0].shape[1], self.rows[0].dtype == torch.float64] if self.rows else [0, 0]
        group = process_group or self.process_group
        shapes = dist_sync_fn(torch.tensor(mine, dtype=torch.long, device=self.device), group=group)
        width, precise = (int(size) for size in torch.stack(shapes).amax(0))
        if not self.rows:
            self.rows = [torch.zeros(0, width)]
            self.labels, self.index = ([torch.zeros(0, dtype=torch.long)] for _ in range(2))
        dtype = torch.float64 if precise else torch.float32
        self.rows = [dim_zero_cat(self.rows).to(self.device, dtype)]
        self.labels = [dim_zero_cat(self.labels).to(self.device, torch.long)]
        self.index = [dim_zero_cat(self.index).to(self.device, torch.long)]
        super()._sync_dist(dist_sync_fn, process_group=process_group)


def check_set_names(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse names of OOD sets that could not be told apart in a metric's name."""
    names = tuple(names)
    bad = [name for name in names if not isinstance(name, str) or not name or "/" in name or name == MEAN]
    if bad or not names or len(set(names)) < len(names):
        raise ValueError(
            f"expected names of OOD sets, each once, without '/' and not {MEAN!r}, got {', '.join(map(repr, names))}."
        )
    return names


@contextmanager
def quiet_compute() -> Iterator[None]:
    """Silence torchmetrics where a process has no data of its own, which is no mistake here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
        yield
