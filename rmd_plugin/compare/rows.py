"""Results as rows: a data frame with one number per row, of which every table and figure is a function.

And AUROC by ranks with its intervals. Imports no torch: reports start at once.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin.files import replacing

Status = Literal["ok", "failed", "skipped"]

#: names of the metrics, as :class:`pytorch_ood.metrics.OODMetrics` calls them
AUROC, FPR95, ACCURACY = "AUROC", "FPR95TPR", "ACC"
#: name under which the average over the OOD sets is reported
MEAN = "mean"
SECONDS = FIT_SECONDS, SCORE_SECONDS = "fit_seconds", "score_seconds"

#: of a detector and the classifier together, see :func:`rmd_plugin.compare.metrics.joint_metrics`
JOINT = OSCR, AUTC, AURC, AURC_OOD, RISK90 = "OSCR", "AUTC", "AURC", "AURC-OOD", "risk90"

#: of a calibrated detector: the score above which it flags a sample, the share of ID samples that it flags, and of OOD
#: samples; in rows with the level, see :func:`at_level`
THRESHOLD, FALSE_ALARMS, DETECTED = "threshold", "false_alarms", "detected"
#: of an ID set under a covariate shift, which is no OOD: names of their own, so that no mean over OOD sets counts them
SHIFT_ACCURACY, SHIFT_ALARMS = "ACC_shift", "false_alarms_shift"

#: columns of rows. ``ood`` is empty for what belongs to no OOD set (fit time, accuracy), ``detector`` for what belongs
#: to the network alone; ``value`` is NaN unless ``status`` is ok; ``distance`` is near, far, shift (ID, shifted) or
#: empty; ``low`` and ``high`` are the 95 % interval; ``reason`` says why there is no number, or is a remark.
COLUMNS = [
    "benchmark", "ood", "backbone", "detector", "seed", "metric", "value", "distance", "low", "high", "status", "reason"
]  # fmt: skip
#: of what a row need not say
_DEFAULTS = {"distance": "", "low": math.nan, "high": math.nan, "status": "ok", "reason": ""}
_TYPES = dict.fromkeys(COLUMNS, object) | {"seed": int, "value": float, "low": float, "high": float}

#: of the standard normal, for intervals of 95 %
_QUANTILE = 1.96
#: below so many samples on a side percentiles of the bootstrap cover too little
_SMALL = 200
#: resamples that are handled at once
_CHUNK = 50
#: how often samples are drawn is kept up to so many bytes, else drawn again for every detector
_KEEP_BYTES = 2**28


def make_row(
    benchmark: str, ood: str, backbone: str, detector: str, seed: int, metric: str, value: float = math.nan, **more: Any
) -> dict[str, Any]:
    """One row, for :func:`make_rows`: one number, and what it belongs to; ``more`` are other columns."""
    row: dict[str, Any] = _DEFAULTS | locals() | more
    return {name: " ".join(row[name].split()) if name == "reason" else row[name] for name in COLUMNS}


def make_rows(records: Iterable[Mapping[str, Any]] = ()) -> pd.DataFrame:
    """A data frame of rows with the columns :data:`COLUMNS`.

    Example:
        >>> rows = make_rows([make_row("digits", "noise", "small_cnn", "rmd", 0, "AUROC", 0.99, distance="far")])
        >>> select(rows, metric="AUROC", status="ok")["value"].tolist()
        [0.99]
    """
    return pd.DataFrame(list(records), columns=COLUMNS).astype(_TYPES)


def write_rows(rows: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write rows as CSV, numbers to the last bit."""
    with replacing(path, newline="") as file:
        rows.to_csv(file, index=False, columns=COLUMNS, lineterminator="\n")


def read_rows(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read what :func:`write_rows` wrote.

    Raises:
        ValueError: if the file does not hold rows.
    """
    try:
        return read_csv(path, _TYPES)
    except ValueError as error:
        raise ValueError(f"{path} does not hold rows of a comparison: {error}") from error


def read_csv(path: str | os.PathLike[str], types: Mapping[str, type]) -> pd.DataFrame:
    """Columns of a CSV file with their types, numbers to the last bit; an empty number is NaN."""
    # as texts, of which float() makes the same bits again; a detector may be called NA
    texts = pd.read_csv(path, usecols=list(types), dtype=str, keep_default_na=False)[list(types)]
    return texts.replace({name: {"": "nan"} for name, kind in types.items() if kind is float}).astype(types)


def select(rows: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """Rows whose columns have the given values, for example ``metric="AUROC"``."""
    for name, value in wanted.items():
        rows = rows[rows[name] == value]
    return rows


def unique(rows: pd.DataFrame, column: str) -> list[str]:
    """Values of a text column in the order of their first appearance, without empty ones."""
    return [value for value in rows[column].unique() if value]


def at_level(metric: str, alpha: float) -> str:
    """Name of a metric at a level of false alarms, for example ``detected@0.05``."""
    return f"{metric}@{alpha:g}"


def levels(rows: pd.DataFrame) -> list[float]:
    """Levels of false alarms that the rows have decisions at."""
    names = [metric.partition("@") for metric in rows["metric"].unique()]
    return sorted(float(level) for metric, _, level in names if metric == FALSE_ALARMS)


# -- AUROC and its intervals -------------------------------------------------------------------------------------------


def auroc(id_scores: np.ndarray, ood_scores: np.ndarray) -> float:
    """Probability that an OOD sample (of M) scores higher than an ID sample (of N); ties count half.

    Raises:
        ValueError: if one of the sets is empty, or a score is NaN.

    Example:
        >>> auroc(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
        0.875
    """
    order, below, reached = _ranks(np.asarray(id_scores), np.asarray(ood_scores))
    if not len(order) or not len(below):
        raise ValueError(f"AUROC needs ID and OOD scores, got {len(order)} and {len(below)}.")
    return float((below + reached).sum() / (2 * len(order) * len(below)))


def placements(id_scores: np.ndarray, ood_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of the OOD scores above each ID score, shape (N,), and of the ID scores below each OOD score, (M,).

    Ties count half. The mean of either is the AUROC; its variance is that of the first divided by N plus that of the
    second divided by M, and of a difference of two detectors the same of their differences (DeLong et al., 1988).
    """
    _, below, reached = _ranks(id_scores, ood_scores)
    _, under, up_to = _ranks(ood_scores, id_scores)
    return 1 - (under + up_to) / (2 * len(ood_scores)), (below + reached) / (2 * len(id_scores))


def _ranks(id_scores: np.ndarray, ood_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order of the ID samples, and how many of them lie below, and not above, each OOD sample."""
    if np.isnan(id_scores).any() or np.isnan(ood_scores).any():
        raise ValueError("scores contain NaN.")
    order = np.argsort(id_scores, kind="stable")
    ranked = id_scores[order]
    return order, np.searchsorted(ranked, ood_scores, "left"), np.searchsorted(ranked, ood_scores, "right")


def auroc_interval(
    id_scores: np.ndarray, ood_scores: np.ndarray, *, resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Lower and upper end of the 95 % interval of AUROC.

    With 200 samples or more on each side the percentiles of a bootstrap that draws ID and OOD samples separately, the
    same for every detector of these sizes. With fewer, where such percentiles cover too little, the wider one of
    DeLong's interval on the logit scale and of Newcombe's score interval (2006, method 5).

    Args:
        id_scores: shape (N,).
        ood_scores: shape (M,).
        resamples: R of the bootstrap.
        seed: of the bootstrap.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> low, high = auroc_interval(rng.normal(size=500), rng.normal(1.0, size=300))
        >>> low < 0.76 < high  # the truth, Phi(1 / sqrt(2))
        True
    """
    if min(len(id_scores), len(ood_scores)) >= _SMALL:
        low, high = np.quantile(bootstrap(id_scores, ood_scores, resamples, seed), [0.025, 0.975])
        return float(low), float(high)
    value, sizes = auroc(id_scores, ood_scores), (len(id_scores), len(ood_scores))
    low, high = _score_interval(value, *sizes)
    variance = sum(part.var(ddof=1) / len(part) for part in placements(id_scores, ood_scores) if len(part) > 1)
    if variance > 0:  # else the sets are apart, and the logit is infinite
        width, odds = _QUANTILE * math.sqrt(variance) / (value * (1 - value)), value / (1 - value)
        low, high = min(low, 1 / (1 + math.exp(width) / odds)), max(high, 1 / (1 + math.exp(-width) / odds))
    return low, high


def _score_interval(value: float, n_id: int, n_ood: int) -> tuple[float, float]:
    """Values that a test with Hanley and McNeil's variance does not reject."""
    from scipy.optimize import brentq  # a quarter of a second, and only few samples need it

    extra = (n_id + n_ood) / 2 - 1

    def excess(truth: float) -> float:
        variance = truth * (1 - truth) * (1 + extra * ((1 - truth) / (2 - truth) + truth / (1 + truth)))
        return (value - truth) ** 2 - _QUANTILE**2 * variance / (n_id * n_ood)

    tiny = 1e-9  # at 0 and 1 the variance vanishes
    inside = min(max(value, tiny), 1 - tiny)
    low = brentq(excess, tiny, inside) if value > 0 and excess(tiny) > 0 else 0.0
    high = brentq(excess, inside, 1 - tiny) if value < 1 and excess(1 - tiny) > 0 else 1.0
    return float(low), float(high)


def bootstrap(id_scores: np.ndarray, ood_scores: np.ndarray, resamples: int, seed: int = 0) -> np.ndarray:
    """AUROC of every resample, shape (R,); ID and OOD samples are drawn separately, as many as there are."""
    order, below, reached = _ranks(id_scores, ood_scores)
    sizes = len(id_scores), len(ood_scores)
    draws = _keep_draws if sum(sizes) * resamples * 2 <= _KEEP_BYTES else _draw
    areas = []
    for id_times, ood_times in draws(*sizes, resamples, seed):
        # how many resampled ID scores lie below the i-th smallest
        smaller = np.zeros((len(id_times), sizes[0] + 1), dtype=np.int32)
        np.cumsum(id_times[:, order], axis=1, dtype=np.int32, out=smaller[:, 1:])
        beaten = smaller[:, below].astype(np.float64)
        if not np.array_equal(below, reached):
            beaten = (beaten + smaller[:, reached]) / 2
        areas.append(np.einsum("rm,rm->r", beaten, ood_times))
    return np.concatenate(areas) / (sizes[0] * sizes[1])


def _draw(n_id: int, n_ood: int, resamples: int, seed: int) -> Iterator[tuple[np.ndarray, ...]]:
    """How often each ID and each OOD sample is in each resample, a chunk of resamples at a time."""
    rng = np.random.default_rng(seed)
    for start in range(0, resamples, _CHUNK):
        rows = np.arange(min(_CHUNK, resamples - start))[:, None]
        drawn = [rng.integers(n, size=(len(rows), n)) + n * rows for n in (n_id, n_ood)]
        yield tuple(
            np.bincount(chosen.ravel(), minlength=chosen.size).astype(np.uint16).reshape(chosen.shape)
            for chosen in drawn
        )


@functools.lru_cache(maxsize=8)
def _keep_draws(*options: int) -> list[tuple[np.ndarray, ...]]:
    """The same for every detector, kept while a benchmark is compared."""
    return list(_draw(*options))
