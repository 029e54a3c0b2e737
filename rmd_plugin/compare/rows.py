"""Results as rows: a data frame with one number per row. Every table and figure is a function of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin.files import replacing

Distance = Literal["", "near", "far", "shift"]
Status = Literal["ok", "failed", "skipped"]

#: names of the metrics, as :class:`pytorch_ood.metrics.OODMetrics` calls them
AUROC, FPR95, ACCURACY = "AUROC", "FPR95TPR", "ACC"
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
_NUMBERS = ("value", "low", "high")
_TYPES = {**dict.fromkeys(COLUMNS, object), "seed": int, **dict.fromkeys(_NUMBERS, float)}


def make_row(
    benchmark: str,
    ood: str,
    backbone: str,
    detector: str,
    seed: int,
    metric: str,
    value: float = math.nan,
    *,
    distance: Distance = "",
    low: float = math.nan,
    high: float = math.nan,
    status: Status = "ok",
    reason: str = "",
) -> dict[str, Any]:
    """One row, for :func:`make_rows`: one number, and what it belongs to."""
    return {**locals(), "reason": " ".join(reason.split())}


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
        # as texts, of which float() makes the same bits again; a detector may be called NA
        rows = pd.read_csv(path, usecols=COLUMNS, dtype=str, keep_default_na=False)
        return rows[COLUMNS].replace({name: {"": "nan"} for name in _NUMBERS}).astype(_TYPES)
    except ValueError as error:
        raise ValueError(f"{path} does not hold rows of a comparison: {error}") from error


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
