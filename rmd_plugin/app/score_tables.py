"""``rmd-score GUARD TABLE... engine=ray``: scores of tables of features, file by file, see docs/scale.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rmd_plugin.backbones import Identity
from rmd_plugin.guard.guard import Guard
from rmd_plugin.table.places import opened
from rmd_plugin.table.score import score_table
from rmd_plugin.untrusted import one_line

#: the options that mean the same here
_OPTIONS = ("out", "engine", "features", "num_workers", "alpha")


def score_tables(
    guard: Guard, places: Sequence[str], out: str, options: Mapping[str, str], *, alpha: float | None, workers: int
) -> int:
    """Score tables with the detector of a guard, print what was flagged, and return how many rows that is.

    Raises:
        ValueError: if the guard does not take features as they are, or an option is only for the usual way.
    """
    if wrong := [name for name in options if name not in _OPTIONS]:
        raise ValueError(f"{wrong[0]}= cannot be used with engine=, which takes {', '.join(_OPTIONS)}.")
    if guard.kind != "features" or not isinstance(guard.backbone, Identity):
        raise ValueError(
            f"engine= scores tables of features as they are, but this guard has a network for {guard.kind}. "
            "Leave engine= out."
        )
    if alpha is not None:
        guard.detector.alpha = alpha
    features, engine = options.get("features", "embedding"), options["engine"]
    written = score_table(guard.detector, list(places), out, features, engine, workers=workers or None)
    rows = flagged = 0
    for path in written:
        with opened(path) as stream, pq.ParquetFile(stream) as file:
            for batch in file.iter_batches(columns=["is_ood"]):
                rows, flagged = rows + len(batch), flagged + int(pc.sum(batch["is_ood"]).as_py() or 0)
    print(f"Scored {rows:,} rows of {len(written):,} files; flagged as OOD: {flagged:,}")
    print(one_line(f"Written to {out}"))
    return flagged
