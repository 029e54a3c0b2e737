"""``rmd-score GUARD INPUT...``: what a guard says about pictures, texts or features. Imports what it needs late."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmd_plugin.app.console import protect_console
from rmd_plugin.untrusted import one_line

if TYPE_CHECKING:
    from rmd_plugin.guard.inputs import Inputs
    from rmd_plugin.guard.scoring import Progress
    from rmd_plugin.report.document import Picture
    from rmd_plugin.report.score_page import Histogram
    from rmd_plugin.report.score_summary import ScoreSummary

#: name -> what it does, for the help
_OPTIONS = {
    "out": "folder of the results; must be empty (default: outputs/score/TIME)",
    "resume": "true: go on in out=FOLDER behind what was scored before",
    "alpha": "share of false alarms (default: the guard's)",
    "batch_size": "items judged together (default: 64)",
    "num_workers": "processes that read and prepare items (default: 0, none)",
    "device": "cpu, cuda, ... (default: auto)",
    "text": "column of the texts in CSV, JSONL, Parquet (default: text)",
    "features": "column of the features in Parquet (default: embedding)",
    "id": "column that names the rows (default: FILE:ROW, from 0 on)",
    "engine": "local or ray: Parquet features of any size, a file of scores for each; goes on in out=FOLDER",
}
_NAMES_SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    protect_console()
    words = _parser().parse_intermixed_args(arguments)
    try:
        places, options = _split_words(words.words)
        return _score(words.guard, places, options, fail_on_ood=words.fail_on_ood)
    except (OSError, ValueError, ImportError) as error:
        from rmd_plugin.app.errors import explain  # with Hydra, which takes a moment

        print(one_line(f"rmd-score: {explain(error)}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _score(guard_path: str, places: Sequence[str], options: Mapping[str, str], *, fail_on_ood: bool) -> int:
    settings = _read_options(options)
    place = options.get("out") or time.strftime("outputs/score/%Y-%m-%d_%H-%M-%S")
    out = Path(place)

    from rmd_plugin.app.device import choose_device
    from rmd_plugin.guard.guard import Guard
    from rmd_plugin.guard.inputs import Inputs
    from rmd_plugin.guard.score_folder import REPORT, SCORES
    from rmd_plugin.guard.scoring import score_items
    from rmd_plugin.report.score_page import ScoringRun, write_scores_page
    from rmd_plugin.report.score_summary import summarise_scores

    if "engine" in options:
        from rmd_plugin.app.score_tables import score_tables

        flagged = score_tables(
            Guard.load(guard_path),
            places,
            place,
            options,
            alpha=settings["alpha"],
            workers=settings.get("num_workers", 0),
        )
        return 3 if fail_on_ood and flagged else 0
    guard = Guard.load(guard_path, device=choose_device(options.get("device", "auto")))
    alpha = guard.alpha if settings["alpha"] is None else settings["alpha"]
    threshold = guard.threshold_at(alpha)  # refuses one that is too small for the calibration samples
    columns = {name: options[name] for name in ("text", "features", "id") if name in options}
    inputs = Inputs(places, guard.kind, **columns)
    progress = score_items(guard, inputs, out, **settings, say=lambda text: print(one_line(text), file=sys.stderr))
    drawn = threshold if isinstance(threshold, float) else None  # not one for each class
    summary = summarise_scores(out / SCORES, threshold=drawn)
    run = ScoringRun(
        guard=os.path.basename(os.path.normpath(guard_path)),
        inputs=places,
        alpha=alpha,
        threshold=drawn,
        reference=_reference(guard.about),
        total=progress.total,
        interrupted=progress.interrupted,
    )
    write_scores_page(out / REPORT, summary, run, lambda names: _previews(inputs, names))
    _show(summary, progress, alpha, out)
    if progress.interrupted:
        return 130
    return 3 if fail_on_ood and summary.flagged else 0


# -- words ------------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rmd-score",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rmd-score GUARD INPUT [INPUT ...] [option=value ...] [--fail-on-ood]",
        description="Score pictures, texts or features with a guard that rmd-fit has written: which of them does it "
        "not know?\n\n"
        "  rmd-score guard photos_new/\n"
        "  rmd-score guard photos_new/ out=scores resume=true num_workers=4\n"
        "  rmd-score guard new.csv text=question alpha=0.01 --fail-on-ood\n"
        "  rmd-score guard embeddings/ features=vector id=url\n"
        "  rmd-score guard embeddings/ features=vector engine=ray out=scores\n\n"
        "INPUT: a folder of pictures, pictures, a .txt list or a CSV (column path) of paths relative to it; for texts\n"
        "CSV, JSONL or Parquet; for features Parquet or .npy. A folder of Parquet files is one table.",
        epilog="options:\n"
        + "\n".join(f"  {name + '=':<13} {text}" for name, text in _OPTIONS.items())
        + "\n\nwrites to out: scores.parquet and scores.csv (path or id, score, p_value, is_ood, class,\n"
        "nearest_class, reason) and report.html. A file that cannot be read is a row with its reason. Ctrl-C leaves\n"
        "what was scored.\n\n"
        "exit codes: 0 done; 1 an error; 2 words that are not understood; 3 with --fail-on-ood, if anything was\n"
        "flagged; 130 after Ctrl-C",
    )
    parser.add_argument("guard", metavar="GUARD", help="folder that rmd-fit has written")
    parser.add_argument("words", nargs="+", metavar="INPUT", help="what to score, and options")
    parser.add_argument("--fail-on-ood", action="store_true", help="end with exit code 3 if anything was flagged")
    return parser


def _split_words(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Inputs and options; a file whose name looks like an option that there is not is an input."""
    places: list[str] = []
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in _OPTIONS:
            if name in options:
                raise ValueError(f"{name}= is given twice.")
            if not value:
                raise ValueError(f"{name}= has no value. Give {name}=VALUE or leave it out.")
            options[name] = value
        elif equals and re.fullmatch(r"[A-Za-z_]+", name) and not os.path.lexists(word):
            from rmd_plugin.app.errors import closest

            hint = closest(name, _OPTIONS) or f" There are: {', '.join(_OPTIONS)}."
            raise ValueError(f"there is no option {name}.{hint}")
        else:
            places.append(word)
    if not places:
        raise ValueError("nothing to score is given: rmd-score GUARD INPUT [INPUT ...].")
    return places, options


def _read_options(options: Mapping[str, str]) -> dict[str, Any]:
    """The options of :func:`rmd_plugin.guard.scoring.score_items`, as what they are."""
    found: dict[str, Any] = {"alpha": None, "resume": False}
    if "alpha" in options:
        try:
            found["alpha"] = float(options["alpha"])
        except ValueError:
            found["alpha"] = math.nan
        if not 0 < found["alpha"] < 1:
            raise ValueError(f"alpha must be a number between 0 and 1, got {options['alpha']}.")
    for name, least in (("batch_size", 1), ("num_workers", 0)):
        if name in options:
            if not re.fullmatch(r"[0-9]{1,9}", options[name]) or int(options[name]) < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {options[name]}.")
            found[name] = int(options[name])
    if "resume" in options:
        if options["resume"].lower() not in ("true", "false"):
            raise ValueError(f"resume must be true or false, got {options['resume']}.")
        found["resume"] = options["resume"].lower() == "true"
    if found["resume"] and "out" not in options:
        raise ValueError("resume=true needs out=FOLDER, the folder to go on in.")
    return found


# -- what is shown ----------------------------------------------------------------------------------------------------


def _reference(about: Mapping[str, Any]) -> Histogram | None:
    """The guard's own validation scores, ``validation_scores: {edges: [...], counts: [...]}``, if it tells of them."""
    import numpy as np

    from rmd_plugin.report.score_page import Histogram

    found: Any = about.get("validation_scores")
    try:
        edges, counts = (np.asarray(found[name], dtype=np.float64) for name in ("edges", "counts"))
    except (TypeError, KeyError, ValueError):
        return None
    shapes = edges.ndim == counts.ndim == 1 and len(edges) == len(counts) + 1
    numbers = shapes and np.isfinite([*edges, *counts]).all() and (np.diff(edges) > 0).all()
    numbers = numbers and (counts >= 0).all() and counts.sum() > 0
    return Histogram(edges, counts) if numbers else None


def _previews(inputs: Inputs, names: Collection[str]) -> dict[str, Picture | str]:
    """Thumbnails or texts of some samples, as far as they can still be read."""
    from rmd_plugin.pictures import read_picture
    from rmd_plugin.report.cards import thumbnail

    if inputs.kind == "features":
        return {}
    found = inputs.find(names)
    if inputs.kind == "texts":
        return found
    seen: dict[str, Picture | str] = {}
    for name, path in found.items():
        try:
            seen[name] = thumbnail(read_picture(path), one_line(f"Thumbnail of {name}"))
        except (OSError, ValueError):
            continue  # it could be read when it was scored; its row stands without a picture
    return seen


def _show(summary: ScoreSummary, progress: Progress, alpha: float, out: Path) -> None:
    from rich.console import Console

    from rmd_plugin.guard.score_folder import REPORT, SCORES, TABLE
    from rmd_plugin.report.score_page import number, percent
    from rmd_plugin.report.table import Cell, Column, Table, to_terminal

    share = f"{percent(summary.share)}; at most {100 * alpha:g} % of ID samples would be"
    counts = [
        ("scored", f"{summary.scored:,}", f"{progress.before:,} of the rows before" if progress.before else ""),
        ("flagged as OOD", f"{summary.flagged:,}", share if summary.scored else ""),
        ("not readable", f"{summary.broken:,}", ""),
    ]
    console = Console(width=None if sys.stdout.isatty() else 200)  # into a file or pipe at full width
    rows = [[Cell(name), Cell(value), Cell(detail)] for name, value, detail in counts]
    console.print(
        to_terminal(Table([Column("Samples", "left"), Column("number"), Column("", "left")], rows), width=console.width)
    )
    if summary.highest:
        columns = [Column("Most unknown", "left"), Column("score"), Column("p-value"), Column("nearest class", "left")]
        rows = [
            [Cell(row.name), Cell(number(row.score)), Cell(f"{row.p_value:.2g}"), Cell(row.nearest)]
            for row in summary.highest[:_NAMES_SHOWN]
        ]
        console.print(to_terminal(Table(columns, rows), width=console.width))
    if progress.interrupted:
        again = f"resume=true out={out} goes on."
        print(one_line(f"Interrupted after {summary.rows:,} of {progress.total:,}: {again}"))
    print(one_line(f"Written to {out}: {SCORES}, {TABLE}, {REPORT}"))


if __name__ == "__main__":
    sys.exit(main())
