"""Results as rows: one number per row, written to and read from CSV, and nothing else.

Every table and figure is a function of rows (histograms: of saved scores), so it can be redrawn without a model.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from rmd_plugin.atomic import replacing
from rmd_plugin.untrusted import DataFormatError, from_csv_cell, one_line, read_text, to_csv_cell

Distance = Literal["", "near", "far", "shift"]
Status = Literal["ok", "failed", "skipped"]

#: names of the metrics, as :class:`pytorch_ood.metrics.OODMetrics` calls them
AUROC, FPR95, ACCURACY = "AUROC", "FPR95TPR", "ACC"
SECONDS = FIT_SECONDS, SCORE_SECONDS = "fit_seconds", "score_seconds"

#: of a calibrated detector: the score above which it flags a sample, the share of ID samples that it flags, and of OOD
#: samples; in rows with the level, see :func:`at_level`
THRESHOLD, FALSE_ALARMS, DETECTED = "threshold", "false_alarms", "detected"
#: of an ID set under a covariate shift, which is no OOD: names of their own, so that no mean over OOD sets counts them
SHIFT_ACCURACY, SHIFT_ALARMS = "ACC_shift", "false_alarms_shift"


def at_level(metric: str, alpha: float) -> str:
    """Name of a metric at a level of false alarms, for example ``detected@0.05``."""
    return f"{metric}@{alpha:g}"


def levels(rows: Iterable[Row]) -> list[float]:
    """Levels of false alarms that the rows have decisions at."""
    found = set()
    for row in rows:
        metric, _, level = row.metric.partition("@")
        with suppress(ValueError):
            found |= {float(level)} if metric == FALSE_ALARMS else set()
    return sorted(found)


@dataclass(frozen=True)
class Row:
    """One number, and what it belongs to. Texts are kept on one line, without control characters.

    Example:
        >>> Row("digits", "noise", "small_cnn", "rmd", 0, "AUROC", 0.99, distance="far").ok
        True
    """

    benchmark: str
    ood: str  #: the OOD set; empty for what does not belong to one (fit time, accuracy)
    backbone: str
    detector: str  #: empty for what belongs to the backbone alone
    seed: int
    metric: str
    value: float  #: a fraction where it is one; NaN unless ``status`` is ok
    distance: Distance = field(default="", kw_only=True)  #: of the OOD set; empty if nobody says; shift: ID, shifted
    low: float = field(default=math.nan, kw_only=True)  #: lower end of the 95 % interval
    high: float = field(default=math.nan, kw_only=True)  #: upper end of the 95 % interval
    status: Status = field(default="ok", kw_only=True)  #: failed: it was tried; skipped: the backbone cannot serve it
    reason: str = field(default="", kw_only=True)  #: why it failed or was skipped; for ``ok`` a remark, if there is one

    def __post_init__(self) -> None:
        for name, allowed in (("distance", get_args(Distance)), ("status", get_args(Status))):
            if getattr(self, name) not in allowed:
                choices = ", ".join(repr(value) for value in allowed)
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")
        for name in _TEXTS:
            # a row is one line of the file, so that it can be searched and compared line by line
            object.__setattr__(self, name, one_line(getattr(self, name)))

    @property
    def ok(self) -> bool:
        """Whether there is a number."""
        return self.status == "ok"

    def failed(self, reason: str, status: Status = "failed") -> Row:
        """The same row without a number, with the reason why (on one line)."""
        return replace(
            self, value=math.nan, low=math.nan, high=math.nan, status=status, reason=" ".join(reason.split())
        )


#: of a file of rows
_MAX_BYTES = 1 << 28
COLUMNS: tuple[str, ...] = tuple(item.name for item in fields(Row))
_NUMBERS = ("value", "low", "high")
_TEXTS = tuple(name for name in COLUMNS if name not in (*_NUMBERS, "seed"))


class RowsError(ValueError):
    """A file does not hold rows. The message names file, line, what was expected and what came."""


def write_rows(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """Write rows as CSV, numbers to the last bit. The file appears whole or not at all; its folder must exist."""
    with replacing(path, newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([_write_cell(getattr(row, name)) for name in COLUMNS])


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Read what :func:`write_rows` wrote, in its order. Further columns are ignored; optional ones may be missing.

    Raises:
        RowsError: if the file does not hold rows.
    """
    try:
        text = io.StringIO(read_text(path, _MAX_BYTES), newline="")
        return list(_parse(csv.DictReader(text, strict=True), path))
    except DataFormatError as error:
        raise RowsError(f"{error}; expected rows as CSV.") from error
    except csv.Error as error:
        raise RowsError(f"{path} is not valid CSV: {error}") from error


def _parse(reader: csv.DictReader[str], path: str | os.PathLike[str]) -> Iterator[Row]:
    required = [item.name for item in fields(Row) if not item.kw_only]
    missing = [name for name in required if name not in (reader.fieldnames or ())]
    if missing:
        raise RowsError(
            f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(reader.fieldnames or ['none'])}."
        )
    for record in reader:
        given = {name: from_csv_cell(record[name]) for name in COLUMNS if record.get(name) is not None}
        if any(name not in given for name in required):
            raise RowsError(f"{path}, line {reader.line_num}: the line ends early. Was the file cut off?")
        try:
            numbers = {name: float(given[name] or "nan") for name in _NUMBERS if name in given}
            # the type checker cannot see which columns are which
            yield Row(**{**given, **numbers, "seed": int(given["seed"])})  # type: ignore[arg-type]
        except ValueError as error:
            raise RowsError(f"{path}, line {reader.line_num}: {error}") from error


def _write_cell(value: object) -> str:
    if isinstance(value, float):
        # repr is the shortest text that reads back to the same bits
        return "" if math.isnan(value) else repr(value)
    return to_csv_cell(str(value)) if isinstance(value, str) else str(value)


def select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Rows whose attributes have the given values, for example ``metric="AUROC"``."""
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def unique(rows: Iterable[Row], name: str) -> list[str]:
    """Values of a text attribute in the order of their first appearance, without empty ones."""
    return [value for value in dict.fromkeys(str(getattr(row, name)) for row in rows) if value]


def mean(values: Sequence[float]) -> float:
    """Mean of the numbers; NaN if there are none or one of them is NaN."""
    return math.fsum(values) / len(values) if values else math.nan
