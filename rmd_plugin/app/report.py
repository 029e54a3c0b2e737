"""``rmd-report DIR...``: every run below some folders in one table. Imports what it needs when it needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rmd_plugin.app.console import protect_console
from rmd_plugin.untrusted import one_line

if TYPE_CHECKING:
    from rmd_plugin.report.aggregate import Summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return 0 if a run was found, even one that failed; 1 if there was none."""
    protect_console()
    options = _parser().parse_args(arguments)
    folders = [Path(folder) for folder in options.folders]
    output = Path(options.output) if options.output else folders[0] if len(folders) == 1 else Path.cwd()
    try:
        summary, files = report_runs(folders, output, metric=options.metric, reference=options.reference)
    except (OSError, ValueError) as error:
        from rmd_plugin.app.errors import explain  # with Hydra, which takes a moment

        print(one_line(f"rmd-report: {explain(error)}"), file=sys.stderr)
        return 1
    if not files:
        for run in summary.runs:
            print(one_line(f"rmd-report: {run.path}: {run.reason}."), file=sys.stderr)
        print(f"rmd-report: no runs below {', '.join(map(str, folders))}.", file=sys.stderr)
    return 0 if files else 1


def report_runs(folders: Sequence[Path], output: Path, *, metric: str, reference: str) -> tuple[Summary, list[Path]]:
    """Gather the runs below the folders, and write and show their summary; there are no files if there is no run."""
    from rich.console import Console

    from rmd_plugin.report.aggregate import summarise
    from rmd_plugin.report.gather import gather_runs
    from rmd_plugin.report.summary import overall_tables, write_summary
    from rmd_plugin.report.table import to_terminal

    runs = gather_runs(folders)
    summary = summarise(runs, metric=metric, reference=reference)
    # folders that could not be read are not runs
    if not any(run.rows or run.outcome != "unreadable" or run.path.is_dir() for run in runs):
        return summary, []
    files = write_summary(summary, output)
    console = Console()
    for table in overall_tables(summary):
        console.print(to_terminal(table))
    for run in (run for run in summary.runs if run.outcome != "done"):
        what = f"{run.path} ({run.name})" if run.name else str(run.path)
        print(one_line(f"{run.outcome}: {what}: {run.reason}"))
    print(one_line(f"Report: {files[0]}"))
    return summary, files


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rmd-report",
        description="Gather every run below the folders into one table: mean and standard deviation over seeds, "
        "ranks over benchmarks, paired difference to RMD with its interval.",
        epilog="Writes summary.html, summary.md, summary.tex, summary.csv, runs.csv, and summary_cost.png: quality "
        "against time.",
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folder of a run, of a sweep, or of many")
    parser.add_argument("-o", "--output", metavar="DIR", help="where to write; default: DIR if there is one, else here")
    parser.add_argument("-m", "--metric", default="AUROC", help="metric to summarise (default: %(default)s)")
    parser.add_argument(
        "-r", "--reference", default="rmd", help="detector to compare the others with (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
