"""The page about one run: ``report.html``, drawn from the files of its folder alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import ACCURACY, AUROC, Row, select, unique
from rmd_plugin.report.document import Picture, picture, render
from rmd_plugin.report.figures import calibration_figure, choose_detectors, histogram_figure
from rmd_plugin.report.names import OURS, label
from rmd_plugin.report.run_figures import (
    contributions_figure,
    epochs_figure,
    history_sets,
    history_title,
    partial_sums_figure,
)
from rmd_plugin.report.run_folder import CONFIG, REPORT, RunFolder, RunStatus, describe_error
from rmd_plugin.report.scores import ID, Directions, Scores
from rmd_plugin.report.tables import (
    comparison_tables,
    decision_tables,
    near_far_means,
    ood_sets,
    percent,
    ranking,
    seconds,
    set_title,
)

T = TypeVar("T")

#: what the directions of a detector are ordered by
_ORDER = {"rmd": "most discriminative first"}
#: OOD sets that have a picture of partial sums
_PANELS = 4


def write_report(folder: str | os.PathLike[str] | RunFolder) -> Path:
    """Write the page about a run to ``report.html`` in its folder. See :func:`render_report`."""
    run = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    page = render_report(run)
    with replacing(run.file(REPORT)) as file:
        file.write(page)
    return run.file(REPORT)


def render_report(run: RunFolder) -> str:
    """The page about a run as HTML, self-contained, without script: drawn from the files of its folder alone.

    Files that are missing leave their part out. One that cannot be read is named on the page, and so is a part that
    cannot be drawn: a report comes after hours of training, and the rest must stand.
    """
    if not run.path.is_dir():
        raise FileNotFoundError(f"{run.path} is not a folder. Give the output folder of a run.")
    problems: list[str] = []

    def read(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            problems.append(str(error))
            return None

    def part(draw: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return draw(*arguments)
        except Exception as error:
            problems.append(f"A part of this page could not be drawn. {describe_error(error)}")
            return None

    rows, status, versions = read(run.read_rows) or [], read(run.read_status), read(run.read_versions) or {}
    scores, directions, history = read(run.read_scores), read(run.read_directions), read(run.read_history)
    config = read(lambda: run.read_text(CONFIG)) or ""

    def names(attribute: str) -> str:
        about = status.about.get(attribute, "") if status is not None else ""
        return ", ".join(unique(rows, attribute)) or str(about)

    return render(
        "report.html",
        title=", ".join(filter(None, (names("benchmark"), names("backbone")))) or "A run without results",
        seed=names("seed"),
        status=status,
        tiles=part(_key_figures, rows, status),
        tables=part(lambda: [table for table in comparison_tables(rows) if table.rows or table.notes]),
        decisions=part(decision_tables, rows),
        calibration=part(_calibration, rows, scores or {}),
        epochs=part(_epochs, rows, history or []),
        histograms=part(_histograms, rows, scores or {}),
        directions=part(_directions, rows, directions or {}),
        problems=problems,  # of the parts above, too
        versions=versions,
        config=config.rstrip(),
    )


def _key_figures(rows: Sequence[Row], status: RunStatus | None) -> list[tuple[str, str, str]]:
    """Name, number and small print of each."""
    items = [
        ("Accuracy", f"{percent(row.value)} %", row.reason or "in-distribution test set")
        for row in select(rows, metric=ACCURACY, detector="", status="ok")
    ]
    if _one_comparison(rows):
        means = near_far_means(rows)
        for distance in ("near", "far"):
            values = {name: found[distance] for name, found in means.items() if not math.isnan(found[distance])}
            if values:
                best = max(values, key=lambda name: values[name])
                items.append((f"Best on {distance}-OOD", f"{percent(values[best])} %", f"AUROC of {label(best)}"))
        rmd, md = (means.get(name, {}) for name in ("rmd", "mahalanobis"))
        which = "near" if not math.isnan(rmd.get("near", math.nan)) else "all"
        gain = 100 * (rmd.get(which, math.nan) - md.get(which, math.nan))
        if not math.isnan(gain):
            where = "near-OOD AUROC" if which == "near" else "AUROC"
            items.append(("RMD against MD", f"{gain:+.2f}".replace("-", "−"), f"points of {where}"))
    if status is not None and not math.isnan(status.seconds):
        items.append(("Time", _duration(status.seconds), "the whole run"))
    return items


def _epochs(rows: Sequence[Row], history: Sequence[Mapping[str, Any]]) -> list[Picture]:
    seen = [row for row in history if row["metric"] == AUROC and row["ood"] and row["stage"] == "fit"]
    distances = ood_sets(rows)
    # RMD and MD have a colour in every picture, then the best of the table
    detectors = list(dict.fromkeys([*OURS[:2], *ranking(rows), *(str(row["detector"]) for row in seen)]))
    pictures = []
    for name in history_sets(seen):
        figure = epochs_figure(seen, [name], detectors=detectors, distances=distances)
        pictures.append(picture(figure, f"AUROC over the epochs: {history_title(name, distances)}"))
    return pictures


def _histograms(rows: Sequence[Row], scores: Scores) -> list[Picture]:
    # scores belong to one comparison
    shown = [name for name in choose_detectors(rows) if name in scores] if _one_comparison(rows) else []
    return [
        picture(histogram_figure(scores, rows, detectors=[name]), f"Histogram of the scores of {label(name)}")
        for name in shown
    ]


def _calibration(rows: Sequence[Row], scores: Scores) -> list[Picture]:
    figure = calibration_figure(scores, rows) if _one_comparison(rows) else None
    return [] if figure is None else [picture(figure, "False alarms asked for against those on the ID test set")]


def _directions(rows: Sequence[Row], directions: Directions) -> list[Picture]:
    distances = ood_sets(rows)
    pictures = []
    for detector, profiles in directions.items():
        order = _ORDER.get(detector, "largest variance first")
        title = f"{label(detector)}: {len(profiles[ID].mean)} directions"
        figure = contributions_figure(profiles, distances, order=order, title=title)
        pictures.append(picture(figure, f"Contribution of each direction to the score of {label(detector)}"))
    sets = list(dict.fromkeys(name for profiles in directions.values() for name in profiles if name != ID))
    sets.sort(key=lambda name: distances.get(name) == "far")
    for name in sets[:_PANELS]:
        figure = partial_sums_figure(directions, name, title=f"{set_title(name, distances)}: the first directions")
        pictures.append(picture(figure, f"AUROC on {name} from the first directions only"))
    return pictures


def _one_comparison(rows: Sequence[Row]) -> bool:
    return len({(row.benchmark, row.backbone, row.seed) for row in rows}) == 1


def _duration(value: float) -> str:
    if value < 100:
        return f"{seconds(value)} s" if value >= 10 else f"{value:.0f} s"
    return f"{round(value / 60)} min" if value < 7200 else f"{round(value / 3600, 1):g} h"
