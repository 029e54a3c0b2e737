"""The studies on features of finished runs: tables 1 to 3, figures 1 and 3, appendix C, the flows of section 4.1.

Each takes runs and gives rows, numbers beside the paper's, and the arrays that its figures draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from pytorch_ood.api import FeaturesDetector
from torch import Tensor

from rmd_plugin import RMD, FlowLikelihood, Mahalanobis, MarginalMahalanobis, Moments, RelativeFlow
from rmd_plugin.compare.rows import ACCURACY, AUROC, auroc, make_row, make_rows, select
from rmd_plugin.paper.published import NOT_RUN, TABLES, TEXT
from rmd_plugin.report.tables import label

#: one array for each thing that a figure draws, by name
Arrays = dict[str, np.ndarray]
Record = dict[str, Any]

_GAUSSIANS: dict[str, Any] = {"mahalanobis": Mahalanobis, "rmd": RMD, "marginal": MarginalMahalanobis}
#: float64 numbers that are handled at once: what fits a cache
_BLOCK = 2**20


def paper_number(
    line: str, metric: str, paper: float = math.nan, ours: float = math.nan, detector: str = "", **about: Any
) -> Record:
    """One number of the paper beside ours. Percentages, unless the metric is a count; NaN where there is none.

    Args:
        line: what the paper measured, for example ``"CIFAR-100 vs CIFAR-10, WRN-28-10"``.
        metric: for example ``"AUROC of RMD"``.
        paper: the published number.
        ours: our number.
        detector: of an AUROC that is compared with those of other detectors of this line.
        about: ``setting``, what we ran; ``reason``, why that differs from the paper or was not run; ``spread``, the
            standard deviation over seeds.
    """
    known = {"line": line, "metric": metric, "paper": paper, "ours": float(ours), "detector": detector}
    return {**known, "setting": "", "reason": "", "spread": math.nan, **about}


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A finished run: features of one benchmark, backbone and near-OOD set, and what else the run left behind."""

    benchmark: str
    backbone: str
    ood_name: str
    train: Tensor  #: shape (N, D)
    train_labels: Tensor  #: shape (N,)
    test: Tensor  #: in-distribution, shape (M, D)
    ood: Tensor  #: shape (L, D)
    seed: int = 0  #: of data and training
    setting: str = ""  #: what was run, in a few words
    reason: str = ""  #: why that differs from the paper's setting
    line: str = ""  #: of the paper's table that it stands beside
    rows: pd.DataFrame = field(default_factory=make_rows)  #: of MD, RMD and MSP on every OOD set, and the accuracy
    history: Sequence[Mapping[str, Any]] = ()  #: ``OODMonitor.history``; empty if not trained
    accuracies: Sequence[tuple[int, float, float]] = ()  #: step, training and held-out accuracy at each check

    @property
    def label(self) -> str:
        """Benchmark and backbone in one text, unique among the runs of a study."""
        return f"{self.benchmark}, {self.backbone}"

    def row(self, detector: str, value: float, metric: str = AUROC, **extra: Any) -> Record:
        """A row about this setting."""
        about = (self.benchmark, self.ood_name, self.backbone, detector, self.seed, metric, float(value))
        return make_row(*about, distance="near", **extra)

    @cached_property
    def moments(self) -> Moments:
        """Moments of the training features, which all Gaussian detectors are fitted on."""
        metric = Mahalanobis().new_moments(sync_on_compute=False)
        metric.update(self.train, self.train_labels)
        return metric.compute()

    def rate(self, detector: FeaturesDetector) -> tuple[float, Arrays]:
        """AUROC of a fitted detector, and its scores: ``id`` (M,) and ``ood`` (L,)."""
        scores = [detector.predict_features(part).cpu().numpy() for part in (self.test, self.ood)]
        return auroc(*scores), {"id": scores[0].astype(np.float32), "ood": scores[1].astype(np.float32)}

    def rate_gaussians(self, *names: str) -> dict[str, tuple[float, Arrays]]:
        """AUROC and scores of ``mahalanobis``, ``rmd`` or ``marginal``, fitted on one pass of moments."""
        return {name: self.rate(_GAUSSIANS[name]().fit_moments(self.moments)) for name in names}


@dataclass
class StudyResult:
    """Result of one study."""

    study: str
    records: list[Record] = field(default_factory=list)  #: rows, see :func:`rmd_plugin.compare.rows.make_row`
    numbers: list[Record] = field(default_factory=list)  #: see :func:`paper_number`
    arrays: Arrays = field(default_factory=dict)  #: what the figures draw; those of a run as ``LABEL//NAME``
    notes: list[str] = field(default_factory=list)  #: remarks for the reader, one sentence each

    def add_number(self, run: Run, metric: str, ours: float, detector: str = "", **about: Any) -> None:
        """Add a number of a run beside that of :data:`rmd_plugin.paper.published.TEXT`, if there is one."""
        benchmark = run.benchmark.partition(":")[0]  # genomics has sources
        paper = TEXT.get(self.study, {}).get(benchmark, {}).get(metric, math.nan)
        about = {"paper": paper, "setting": run.setting or run.label, "reason": run.reason, **about}
        self.numbers.append(paper_number(run.label, metric, ours=ours, detector=detector, **about))

    def add_auroc(self, run: Run, detector: str, area: float, metric: str = "") -> None:
        """Add an AUROC, as a row and as a number."""
        self.records.append(run.row(detector, area))
        self.add_number(run, metric or f"AUROC of {label(detector)}", 100 * area, detector)

    def add_arrays(self, name: str, arrays: Arrays) -> None:
        """Add arrays as ``NAME/...``."""
        self.arrays |= {f"{name}/{key}": value for key, value in arrays.items()}


# -- tables and trainings ---------------------------------------------------------------------------------------------


def table_study(table: str, runs: Sequence[Run], absent: Mapping[str, str]) -> StudyResult:
    """Tables 1 to 3: every published line with our numbers, or with the reason (``absent``) why there are none."""
    result = StudyResult(table, records=[record for run in runs for record in run.rows.to_dict("records")])
    for line, published in TABLES[table].items():
        settings = [(run.rows, run.setting, run.reason) for run in runs if run.line == line]
        for rows, setting, reason in settings or [(make_rows(), "", absent.get(line, NOT_RUN))]:
            about: Any = {"setting": setting, "reason": reason}
            for name, paper in published.items():
                ours = 100 * _first(select(rows, detector=name, metric=AUROC, distance="near"))
                result.numbers.append(paper_number(line, f"AUROC of {label(name)}", paper, ours, name, **about))
            accuracy = 100 * _first(select(rows, metric=ACCURACY, status="ok"))
            if "msp" in published and not math.isnan(accuracy):
                result.numbers.append(paper_number(line, "accuracy", ours=accuracy, **about))
    return result


def _first(rows: pd.DataFrame) -> float:
    return float(rows["value"].iloc[0]) if len(rows) else math.nan


def robustness_study(runs: Sequence[Run]) -> StudyResult:
    """Figure 3: accuracy, and the AUROC of MD, RMD and MSP, while a network trains; steps stand in the remarks."""
    result = StudyResult("robustness")
    for run in runs:
        history = select(pd.DataFrame(run.history), ood=run.ood_name, metric=AUROC, stage="fit")
        groups = history.drop_duplicates(["detector", "step"], keep="last").groupby("detector", sort=False)
        curves = {str(name): group[["step", "value"]].to_numpy(float).T for name, group in groups}
        for name, curve in curves.items():
            result.records += [run.row(name, value, reason=f"step {step:.0f}") for step, value in curve.T]
            result.add_number(run, f"best AUROC of {label(name)} while training", 100 * np.nanmax(curve[1]))
            result.add_number(run, f"AUROC of {label(name)} at the end", 100 * curve[1, -1])
        result.add_arrays(f"{run.label}/", curves)
        if run.accuracies:
            accuracy = np.array(run.accuracies, dtype=float).T
            about = (run.benchmark, "", run.backbone, "", run.seed, ACCURACY)
            result.records += [make_row(*about, value, reason=f"step {step:.0f}") for step, _, value in accuracy.T]
            steps, values = curves["mahalanobis"]
            moments = {"at the best AUROC of MD": steps[np.nanargmax(values)], "at the end": accuracy[0, -1]}
            for when, step in moments.items():
                for _, train, held_out in accuracy.T[accuracy[0] == step]:
                    result.add_number(run, f"training accuracy {when}", 100 * train)
                    result.add_number(run, f"held-out accuracy {when}", 100 * held_out)
            result.arrays[f"{run.label}//accuracy"] = accuracy
    return result


# -- directions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Directions:
    """Directions of unit variance within the classes, of which a Mahalanobis distance is the sum."""

    mean: Tensor  #: of all samples, shape (D,)
    projection: Tensor  #: (D, q); coordinates are u = (z - mean) @ projection
    points: Tensor  #: class means in these coordinates, shape (K, q)
    background: Tensor  #: variance of all training samples along each direction, shape (q,)

    def project(self, z: Tensor) -> Tensor:
        """Coordinates (B, q) of features (B, D), in float64."""
        return (z.double() - self.mean) @ self.projection


def fit_directions(moments: Moments, *, discriminative: bool = False) -> Directions:
    """Eigenvectors of Sigma by falling variance, scaled to unit variance; those without variance are left out.

    They are the paper's choice, with one background Gaussian per direction: the terms of MD add up to MD, those of RMD
    leave out the background's correlations. In the discriminative directions Sigma and Sigma_0 are diagonal together,
    by falling variance of the class means: there the terms of both add up exactly. Where Sigma is a multiple of the
    identity its eigenvectors are arbitrary, and this is the only choice that says anything.
    """
    present = moments.counts > 0
    shares, mean = moments.counts[present] / moments.counts.sum(), moments.background_mean
    variances, vectors = torch.linalg.eigh(moments.covariance)
    varying = variances > variances[-1] * len(variances) * torch.finfo(torch.float64).eps
    projection = (vectors[:, varying] * variances[varying].rsqrt()).flip(1)
    points = (moments.means[present] - mean) @ projection
    if discriminative:
        rotation = torch.linalg.svd(shares.sqrt()[:, None] * points, full_matrices=True)[2].T
        projection, points = projection @ rotation, points @ rotation
    # within-class variance is one along every direction, so the total is one more than that of the class means
    return Directions(mean, projection, points, 1 + (shares[:, None] * points.square()).sum(0))


def direction_terms(directions: Directions, z: Tensor) -> tuple[Tensor, Tensor]:
    """Terms of MD and of RMD for z (B, D) along each direction, for the nearest class: (B, q) each, in float32."""
    distance, relative = [], []
    for rows in z.split(2048):
        u = directions.project(rows)
        # the background does not depend on the class, so the nearest class is the same for MD and RMD
        nearest = torch.cdist(u, directions.points).argmin(1)
        terms = (u - directions.points[nearest]).square()
        distance.append(terms.float())
        relative.append((terms - u.square() / directions.background).float())
    return torch.cat(distance), torch.cat(relative)


def change_point(gap: np.ndarray) -> int:
    """How many leading directions stand apart: the split of a curve into two levels with the least squared error.

    ``gap`` (q,) is the mean distance of OOD minus that of ID along each direction.

    Example:
        >>> change_point(np.array([3.0, 2.8, 3.1, 0.1, 0.0, 0.2]))
        3
    """
    count = len(gap)
    if count < 2:
        return count
    # the largest terms are far above the rest; ranks of size, not size, should decide
    total = np.cumsum(np.sign(gap) * np.log1p(np.abs(gap)))
    left = np.arange(1, count)
    right = count - left
    # maximal between-group sum of squares = minimal squared error
    between = (total[:-1] / left - (total[-1] - total[:-1]) / right) ** 2 * left * right
    return int(left[between.argmax()])


def spectrum_study(runs: Sequence[Run]) -> StudyResult:
    """Figure 1: MD and RMD, direction by direction, for ID and OOD samples.

    The simulation is taken apart along its discriminative directions (its eigenvectors are arbitrary), the others along
    the eigenvectors of Sigma as in the paper.
    """
    result = StudyResult("spectrum")
    result.notes.append(
        "The threshold is the split of the gap (OOD mean minus ID mean of the distance) into two levels with the least "
        "squared error on a logarithmic scale; the paper does not say how its 120 was found."
    )
    for run in runs:
        directions = fit_directions(run.moments, discriminative=run.benchmark == "simulation")
        arrays: Arrays = {}
        sums = []
        for kind, z in (("id", run.test), ("ood", run.ood)):
            both = direction_terms(directions, z)
            sums.append(both[1].sum(1).numpy())
            for name, terms in zip(("mahalanobis", "rmd"), both, strict=True):
                arrays[f"{name}/{kind}/mean"] = terms.double().mean(0).numpy()
                arrays[f"{name}/{kind}/low"], arrays[f"{name}/{kind}/high"] = np.quantile(terms, (0.1, 0.9), axis=0)
        for name, (area, scores) in run.rate_gaussians("mahalanobis", "rmd").items():
            result.add_auroc(run, name, area)
            arrays |= {f"{name}/{kind}/scores": values for kind, values in scores.items()}
        gap = arrays["mahalanobis/ood/mean"] - arrays["mahalanobis/id/mean"]
        threshold = change_point(gap)
        result.records += [
            run.row("rmd_by_direction", auroc(*sums)),
            run.row("", threshold, metric="leading_directions"),
            # what share of the total gap between ID and OOD the leading directions hold
            run.row("", gap[:threshold].sum() / gap.sum(), metric="gap_share"),
        ]
        result.add_number(run, "leading directions", threshold)
        result.add_arrays(f"{run.label}/", {**arrays, "threshold": np.array(threshold)})
    return result


def cumulative_scores(directions: Directions, z: Tensor) -> tuple[Tensor, Tensor]:
    """PMD of every sample of z (B, D) for every d, by cumulative sums instead of D fits.

    Returns:
        ``largest`` (B, q), whose column d - 1 sums over the d directions of largest variance, and ``smallest`` (B, q),
        whose column d sums over the q - d others.
    """
    largest, smallest = [], []
    for rows in z.split(max(1, _BLOCK // directions.points.numel())):
        terms = (directions.project(rows)[:, None] - directions.points).square_()  # (rows, K, q)
        largest.append(terms.cumsum(2).amin(1))
        # summed from the other end: the difference of two long sums would lose digits
        smallest.append(terms.flip(2).cumsum_(2).amin(1).flip(1))
    return torch.cat(largest), torch.cat(smallest)


def partial_study(runs: Sequence[Run]) -> StudyResult:
    """Appendix C: AUROC of PMD for every d, of the largest and of the smallest directions, beside MD, RMD and MMD."""
    result = StudyResult("partial")
    result.notes.append("The best d is found with the OOD test samples, which a user does not have; RMD needs no d.")
    for run in runs:
        directions = fit_directions(run.moments)
        arrays: Arrays = {}
        id_scores, ood_scores = (cumulative_scores(directions, z) for z in (run.test, run.ood))
        for name, inside, outside in zip(("largest", "smallest"), id_scores, ood_scores, strict=True):
            # contiguous columns: sorting a strided one is several times slower
            columns = zip(inside.T.contiguous().numpy(), outside.T.contiguous().numpy(), strict=True)
            arrays[name] = np.array([auroc(*pair) for pair in columns])
        for name, (area, _) in run.rate_gaussians("mahalanobis", "rmd", "marginal").items():
            result.add_auroc(run, name, area)
            arrays[name] = np.array(area)
        best = int(arrays["largest"].argmax())
        peak = arrays["largest"][best]
        result.records.append(run.row("partial", peak, reason=f"best d={best + 1}, largest"))
        result.records.append(run.row("partial", best + 1, metric="best_components"))
        result.add_number(run, "best AUROC of PMD", 100 * peak)
        result.add_number(run, "d at the best AUROC", best + 1)
        result.add_arrays(f"{run.label}/", arrays)
    return result


# -- flows ------------------------------------------------------------------------------------------------------------


def flow_study(runs: Sequence[Run], options: Mapping[str, Any]) -> StudyResult:
    """Section 4.1: flows, made with these options, in the place of the Gaussians; log p_k, and its ratio to log p_0."""
    result = StudyResult("flows")
    for run in runs:
        # the paper's own: a flow for each class and one for the background, in all directions
        setting = {"space": "features", "sharing": "per_class", "seed": run.seed, "progress": False, **options}
        detectors: dict[str, tuple[str, FeaturesDetector]] = {
            "mahalanobis": ("AUROC of MD", Mahalanobis()),
            "rmd": ("AUROC of RMD", RMD()),
            "flow_likelihood": ("AUROC of the flow, log p_k", FlowLikelihood(**setting)),
            "relative_flow": ("AUROC of the ratio, log p_k - log p_0", RelativeFlow(background="flow", **setting)),
        }
        for name, (metric, detector) in detectors.items():
            detector.fit_features(run.train, run.train_labels)
            area, scores = run.rate(detector)
            result.add_auroc(run, name, area, metric)
            result.add_arrays(f"{run.label}//{name}", scores)
    return result
