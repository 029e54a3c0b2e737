"""Gather every run below some folders into one table.

Mean and standard deviation over seeds, ranks over benchmarks, paired difference to RMD with its interval. Writes
summary.html, summary.md, summary.tex, summary.csv, runs.csv, and summary_cost.png: quality against time.
"""

# what is needed is imported late, so that --help does not wait for it

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return 0 if a run was found, even one that failed; 1 if there was none."""
    parser = argparse.ArgumentParser("rmd-report", description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folder of a run, of a sweep, or of many")
    parser.add_argument("-o", "--output", metavar="DIR", help="where to write; default: DIR if there is one, else here")
    parser.add_argument("-m", "--metric", default="AUROC", help="metric to summarise (default: %(default)s)")
    parser.add_argument("-r", "--reference", default="rmd", help="detector to compare the others with (default: rmd)")
    options = parser.parse_args(arguments)
    folders = [Path(folder) for folder in options.folders]
    output = Path(options.output) if options.output else folders[0] if len(folders) == 1 else Path.cwd()
    try:
        report_runs(folders, output, metric=options.metric, reference=options.reference)
    except (OSError, ValueError) as error:
        print(f"rmd-report: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def report_runs(folders: Sequence[Path], output: Path, *, metric: str, reference: str) -> None:
    """Gather the runs below the folders, and write and show their summary.

    Raises:
        ValueError: if there is no run, with what there is instead; or no such metric.
    """
    from rmd_plugin.report.summary import Summary, gather_runs, overall_tables, write_summary
    from rmd_plugin.report.tables import print_tables

    runs = gather_runs(folders)
    summary = Summary(runs, metric=metric, reference=reference)
    # folders that could not be read are not runs
    if not any(len(run.rows) or run.outcome != "unreadable" or run.path.is_dir() for run in runs):
        reasons = "; ".join(f"{run.path}: {run.reason}" for run in runs)
        raise ValueError(f"no runs below {', '.join(map(str, folders))}. {reasons}")
    files = write_summary(summary, output)
    print_tables(overall_tables(summary))
    for run in (run for run in summary.runs if run.outcome != "done"):
        print(f"{run.outcome}: {run.path}{f' ({run.name})' if run.name else ''}: {run.reason}")
    print(f"Report: {files[0]}")


if __name__ == "__main__":
    sys.exit(main())
