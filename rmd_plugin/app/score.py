"""Score pictures, texts or features with a guard that rmd-fit has written: which of them does it not know?

  rmd-score guard photos_new/
  rmd-score guard photos_new/ out=scores resume=true num_workers=4
  rmd-score guard new.csv text=question alpha=0.01 --fail-on-ood
  rmd-score guard photos_today/ watch=alarm.safetensors
  rmd-score guard embeddings/ features=vector id=url
  rmd-score guard embeddings/ features=vector engine=ray out=scores

INPUT: a folder of pictures, pictures, a .txt list or a CSV (column path) of paths relative to it; for texts
CSV, JSONL or Parquet; for features Parquet or .npy. A folder of Parquet files is one table.

options:
  out=FOLDER     of the results; must be empty (default: outputs/score/TIME)
  resume=true    continue an interrupted run in out=FOLDER
  alpha=         share of false alarms (default: the guard's)
  batch_size=    items judged together (default: 64)
  num_workers=   processes that read and prepare items (default: 0, none)
  device=        cpu, cuda, ... (default: auto)
  text=          column of the texts in CSV, JSONL, Parquet (default: text)
  features=      column of the features in Parquet (default: embedding)
  id=            column that names the rows (default: FILE:ROW, from 0 on)
  watch=STATE    drift alarm over all runs with this file, which is made if it is not there; level= (default: 0.01) is
                 the chance of ever raising a false one, or every= the mean number of items between two
  engine=        local or ray: tables of features of any size, a file of scores for each; continues in out=FOLDER

writes to out: scores.parquet and scores.csv (path or id, score, p_value, is_ood, class, nearest_class, reason) and
report.html. A file that cannot be read is a row with its reason. Ctrl-C leaves what was scored.

exit codes: 0 done; 1 an error; 2 words that are not understood; 3 with --fail-on-ood, if anything was flagged,
or with watch=, if the stream has changed; 130 after Ctrl-C
"""

# what is needed is imported late, so that mistakes and --help do not wait for torch
from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

if TYPE_CHECKING:
    from rmd_plugin.detectors.conformal import Calibrated


@dataclass
class Options:
    """The options of the command, ``name=value``."""

    out: str | None = None
    resume: bool = False
    alpha: float | None = None
    batch_size: int = 64
    num_workers: int = 0
    device: str = "auto"
    text: str | None = None
    features: str | None = None
    id: str | None = None
    engine: str | None = None
    watch: str | None = None
    level: float = 0.01
    every: int | None = None


#: those that mean the same with engine=
_TABLE_OPTIONS = ("out", "engine", "features", "num_workers", "alpha")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser("rmd-score", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "rmd-score GUARD INPUT [INPUT ...] [option=value ...] [--fail-on-ood]"
    parser.add_argument("guard", metavar="GUARD", help="folder that rmd-fit has written")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="what to score, and options")
    parser.add_argument("--fail-on-ood", action="store_true", help="end with exit code 3 if anything was flagged")
    words = parser.parse_intermixed_args(arguments)
    chosen = [word for word in words.inputs if "=" in word and not os.path.lexists(word)]
    paths = [word for word in words.inputs if word not in chosen]
    try:
        options: Any = OmegaConf.to_object(OmegaConf.merge(Options, OmegaConf.from_dotlist(chosen)))
        if not paths or options.batch_size < 1 or options.num_workers < 0:
            raise ValueError("something to score, batch_size >= 1 and num_workers >= 0 are expected.")
        if options.resume and options.out is None:
            raise ValueError("resume=true needs out=FOLDER, the folder to continue in.")
        options.out = options.out or time.strftime("outputs/score/%Y-%m-%d_%H-%M-%S")
        return (_score if options.engine is None else _score_tables)(words.guard, paths, options, words.fail_on_ood)
    except (OSError, ValueError, ImportError, OmegaConfBaseException) as error:
        print(f"rmd-score: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _score(guard_path: str, paths: Sequence[str], options: Options, fail_on_ood: bool) -> int:
    from rmd_plugin.guard import read_about
    from rmd_plugin.guard.score import REPORT, SCORES, TABLE, Inputs, score_items

    # all that can be wrong with paths and columns is said before torch is imported
    kind, out = read_about(Path(guard_path))["kind"], Path(str(options.out))
    for name, of in (("text", "texts"), ("features", "features")):
        if getattr(options, name) is not None and kind != of:
            raise ValueError(f"{name}= is for a guard of {of}; this one judges {kind}.")
    inputs = Inputs(paths, kind, options.text or options.features, options.id)
    if skipped := inputs.left_out:
        print(f"{len(skipped)} files are left out: no {kind} by their ending, such as {skipped[0]}", file=sys.stderr)

    from rmd_plugin.app.parts import choose_device
    from rmd_plugin.guard.guard import Guard
    from rmd_plugin.report.page import ScoreSummary, ScoringRun, number, picture, share, write_scores_page

    guard = Guard.load(guard_path, device=choose_device(options.device))
    alpha = guard.alpha if options.alpha is None else options.alpha
    # refuses one that is too small for the calibration samples
    limit = None if guard.detector.fold_detectors else guard.detector.threshold(alpha)
    threshold = limit if isinstance(limit, float) else math.nan  # not one for each class, or none
    watch = None if options.watch is None else _Watch(guard.detector, options)
    names = ("alpha", "batch_size", "num_workers", "resume")
    progress = score_items(guard, inputs, out, **{name: getattr(options, name) for name in names})
    changed = watch is not None and watch.update(out / SCORES)
    summary = ScoreSummary(out / SCORES)
    drift = None if watch is None else picture(watch.alarm.plot()[0], watch.words)
    judged = {"alpha": alpha, "threshold": threshold, "validation": guard.about["validation_scores"]}
    name = os.path.basename(os.path.normpath(guard_path))
    run = ScoringRun(guard=name, inputs=paths, drift=drift, interrupted=progress.interrupted, **judged)
    write_scores_page(out / REPORT, summary, run, lambda names: _previews(inputs, names))
    flagged = f"   {share(summary.share)}; at most {100 * alpha:g} % of ID samples would be" if summary.scored else ""
    print(f"scored          {summary.scored:,}" + (f"   {progress.before:,} of them before" if progress.before else ""))
    print(f"flagged as OOD  {summary.flagged:,}{flagged}\nnot readable    {summary.broken:,}")
    for row in summary.highest[:5].itertuples():
        numbers = f"score {number(row.score)}   p-value {row.p_value:.2g}"
        print(f"  {row.name}   {numbers}   nearest class {row.nearest_class}")
    if watch is not None:
        print(f"watch           {watch.words}")
    if progress.interrupted:
        print(f"Interrupted after {len(summary.numbers):,} rows: resume=true out={out} continues.")
    print(f"Written to {out}: {SCORES}, {TABLE}, {REPORT}")
    return 130 if progress.interrupted else 3 if changed or (fail_on_ood and summary.flagged) else 0


class _Watch:
    """The drift alarm of ``watch=STATE``: it continues from run to run, and counts each row of a resumed run once."""

    def __init__(self, detector: Calibrated, options: Options) -> None:
        from rmd_plugin.detectors.moments import read_state

        self.path, self.folder = str(options.watch), os.path.abspath(str(options.out))
        self.alarm, self.rows = detector.drift_alarm(options.level, options.every), 0
        if os.path.exists(self.path):
            state = read_state(self.path)
            self.alarm.load_state_dict(state.get("alarm", {}))
            self.rows = state["rows"] if state["folder"] == self.folder else 0

    def update(self, table: Path) -> bool:
        """Go on with the scores of a table, write the state, and say whether there was an alarm by now."""
        import numpy as np
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        from rmd_plugin.detectors.moments import write_state

        scores = pq.read_table(table, columns=["score"])["score"].drop_null().to_numpy()
        self.alarm.update(np.where(np.isnan(scores), np.inf, scores)[self.rows :])
        write_state(self.path, {"alarm": self.alarm.state_dict(), "folder": self.folder, "rows": len(scores)})
        return self.alarm.alarm

    @property
    def words(self) -> str:
        """What the alarm says, in a sentence."""
        if self.alarm.alarm:
            return f"The scores have changed since about item {self.alarm.since:,} of {self.alarm.count:,}."
        return f"No sign of a change in {self.alarm.count:,} items."


def _previews(inputs: Any, names: Collection[str]) -> dict[str, Any]:
    """Thumbnails or texts of some samples, as far as they can still be read."""
    from rmd_plugin.files import read_picture
    from rmd_plugin.report.page import preview

    previews = {}
    for name, raw in ({} if inputs.kind == "features" else inputs.find(names)).items():
        with suppress(OSError, ValueError):  # it could be read when it was scored; its row stands without a picture
            item = read_picture(raw) if inputs.kind == "images" else raw
            previews[name] = preview(item, f"Thumbnail of {name}")
    return previews


def _score_tables(guard_path: str, paths: Sequence[str], options: Options, fail_on_ood: bool) -> int:
    """With engine=: a file of scores for each file of the tables, see docs/scale.md."""
    import fsspec  # type: ignore[import-untyped]
    import pyarrow.parquet as pq

    from rmd_plugin.backbones import Identity
    from rmd_plugin.guard.guard import Guard
    from rmd_plugin.tables import score_table

    for option in fields(options):
        if option.name not in _TABLE_OPTIONS and getattr(options, option.name) != option.default:
            raise ValueError(f"{option.name}= cannot be used with engine=, which takes {', '.join(_TABLE_OPTIONS)}.")
    guard = Guard.load(guard_path)
    if not isinstance(guard.backbone, Identity):
        raise ValueError(f"engine= is for tables of features, but this guard has a network for {guard.kind}.")
    guard.detector.alpha = guard.alpha if options.alpha is None else options.alpha
    column, workers, rows, flagged = options.features or "embedding", options.num_workers or None, 0, 0
    written = score_table(guard.detector, paths, str(options.out), column, str(options.engine), workers=workers)
    for path in written:
        with fsspec.open(path) as file:
            decisions = pq.read_table(file, columns=["is_ood"])["is_ood"].to_numpy()
        rows, flagged = rows + len(decisions), flagged + int(decisions.sum())
    print(f"Scored {rows:,} rows of {len(written):,} files; flagged as OOD: {flagged:,}\nWritten to {options.out}")
    return 3 if fail_on_ood and flagged else 0


if __name__ == "__main__":
    sys.exit(main())
