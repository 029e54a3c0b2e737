"""A table of scores, ``scores.parquet``: its columns, and what a page and a terminal say about it.

The table may have any number of rows: it is read in batches, twice, and what is kept of it does not grow with it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

#: rows in memory at a time
_BATCH = 1 << 14
#: scores that stand for all when the bins are chosen
_SAMPLE = 100_000
#: rows that are shown: the highest and the lowest scores, and those with a reason
EXTREMES, REASONS = 24, 50
_BINS, P_BINS = 40, 20


def score_schema(name: str) -> pa.Schema:
    """Columns of a table of scores; the first one, ``path`` or ``id``, names the sample.

    ``is_ood`` and the numbers are null where there is no score, ``reason`` says why and is null where all is well.
    """
    texts = {column: pa.string() for column in (name, "class", "nearest_class", "reason")}
    numbers = {"score": pa.float64(), "p_value": pa.float64(), "is_ood": pa.bool_()}
    order = (name, "score", "p_value", "is_ood", "class", "nearest_class", "reason")
    return pa.schema([(column, (texts | numbers)[column]) for column in order])


class ScoreRow(NamedTuple):
    """One row of the table."""

    name: str
    score: float
    p_value: float
    nearest: str
    is_ood: bool


@dataclass
class ScoreSummary:
    """What is known about all rows together."""

    rows: int = 0
    scored: int = 0
    flagged: int = 0
    nan: int = 0  #: scores that are no number; they are flagged
    #: class that was predicted -> how many were scored, and flagged
    classes: dict[str, tuple[int, int]] = field(default_factory=dict)
    highest: list[ScoreRow] = field(default_factory=list)  #: the most unknown first
    lowest: list[ScoreRow] = field(default_factory=list)  #: the most ordinary first
    with_reason: int = 0
    reasons: list[tuple[str, str]] = field(default_factory=list)  #: name and reason, the first of them
    #: bins of the scores, shape (B + 1,), and how many that were not flagged and were flagged lie in each, (2, B)
    edges: np.ndarray = field(default_factory=lambda: np.zeros(0))
    counts: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    p_counts: np.ndarray = field(default_factory=lambda: np.zeros(P_BINS, dtype=np.int64))  #: equal bins from 0 to 1

    @property
    def broken(self) -> int:
        """Rows without a score."""
        return self.rows - self.scored

    @property
    def share(self) -> float:
        """Share of the scored that were flagged; NaN if nothing was scored."""
        return self.flagged / self.scored if self.scored else math.nan


def summarise_scores(path: str | os.PathLike[str], *, threshold: float | None = None) -> ScoreSummary:
    """Read a table of scores; the bins of the histogram reach beyond the threshold, if there is one."""
    summary = ScoreSummary()
    classes: Counter[str] = Counter()
    flagged_classes: Counter[str] = Counter()
    keys, sample = np.zeros(0), np.zeros(0)
    draw = np.random.default_rng(0)
    for batch in _batches(path):
        scores, flagged = _numbers(batch)
        there = ~np.isnan(scores)
        summary.rows += len(batch)
        summary.scored += len(batch) - batch.column("score").null_count
        summary.flagged += int(flagged.sum())
        summary.p_counts += np.histogram(_column(batch, "p_value")[there], P_BINS, (0.0, 1.0))[0]
        for name, is_ood in zip(batch.column("class").to_pylist(), flagged, strict=True):
            if name is not None:
                classes[name] += 1
                flagged_classes[name] += bool(is_ood)
        summary.highest = _extremes(summary.highest, batch, scores, sign=-1)
        summary.lowest = _extremes(summary.lowest, batch, scores, sign=1)
        _add_reasons(summary, batch)
        finite = scores[np.isfinite(scores)]
        # those of the smallest random keys are a fair sample of all
        keys, sample = np.append(keys, draw.random(len(finite))), np.append(sample, finite)
        if len(keys) > _SAMPLE:
            keep = np.argpartition(keys, _SAMPLE)[:_SAMPLE]
            keys, sample = keys[keep], sample[keep]
        summary.nan += int((np.isnan(scores) & flagged).sum())
    summary.classes = {name: (number, flagged_classes[name]) for name, number in classes.items()}
    summary.edges = _choose_edges(sample, threshold)
    summary.counts = np.zeros((2, len(summary.edges) - 1), dtype=np.int64)
    for batch in _batches(path):
        scores, flagged = _numbers(batch)
        there = ~np.isnan(scores)
        clipped = np.clip(scores, summary.edges[0], summary.edges[-1])
        for place, chosen in enumerate((there & ~flagged, there & flagged)):
            summary.counts[place] += np.histogram(clipped[chosen], summary.edges)[0]
    return summary


def _batches(path: str | os.PathLike[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(_BATCH)


def _column(batch: pa.RecordBatch, name: str) -> np.ndarray:
    found: np.ndarray = batch.column(name).to_numpy(zero_copy_only=False)
    return found


def _numbers(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Scores, NaN where there is none, and which were flagged, both of shape (B,)."""
    return _column(batch, "score"), batch.column("is_ood").fill_null(False).to_numpy(zero_copy_only=False)


def _extremes(before: list[ScoreRow], batch: pa.RecordBatch, scores: np.ndarray, *, sign: int) -> list[ScoreRow]:
    """The lowest (sign 1) or highest (-1) of those before and of a batch, without NaN; equal ones keep their order."""
    places = np.argsort(sign * scores, kind="stable")[:EXTREMES]  # NaN last
    places = places[~np.isnan(scores[places])]
    first = batch.schema.names[0]
    found = [
        ScoreRow(str(row[first]), row["score"], row["p_value"], row["nearest_class"] or "", bool(row["is_ood"]))
        for row in batch.take(pa.array(places)).to_pylist()
    ]
    return sorted([*before, *found], key=lambda row: sign * row.score)[:EXTREMES]


def _add_reasons(summary: ScoreSummary, batch: pa.RecordBatch) -> None:
    given = batch.filter(batch.column("reason").is_valid())
    summary.with_reason += len(given)
    room = given.slice(0, REASONS - len(summary.reasons))
    summary.reasons += zip(room.column(0).to_pylist(), room.column("reason").to_pylist(), strict=True)


def _choose_edges(sample: np.ndarray, threshold: float | None) -> np.ndarray:
    """Equal bins over nearly all scores, shape (B + 1,): what lies far beyond the bulk is counted in the outer ones."""
    if not len(sample):
        return np.linspace(0.0, 1.0, 2)
    sample = np.clip(sample, -1e300, 1e300)  # differences stay finite
    low, lower, middle, upper, high = np.quantile(sample, (0.005, 0.25, 0.5, 0.75, 0.995))
    spread = 8 * (upper - lower)
    if spread > 0:  # a few wild scores would squeeze the rest into one bar
        low, high = max(low, middle - spread), min(high, middle + spread)
    if threshold is not None and math.isfinite(threshold):
        # the bulk on one side of the threshold says nothing without it
        low, high = min(low, threshold), max(high, threshold + 0.05 * (threshold - low))
    if not high > low:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, min(_BINS, max(8, int(2 * len(sample) ** 0.5))) + 1)
