"""The page about one run: ``report.html``, drawn from the files of its folder alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import ACCURACY, AUROC, Row, select
from rmd_plugin.report.directions import Directions
from rmd_plugin.report.document import Section, picture, render
from rmd_plugin.report.figures import choose_detectors, histogram_figure
from rmd_plugin.report.names import OURS, label
from rmd_plugin.report.run_figures import MEAN, contributions_figure, epochs_figure, history_sets, partial_sums_figure
from rmd_plugin.report.run_folder import CONFIG, REPORT, RunFolder, RunStatus, describe_error
from rmd_plugin.report.scores import ID, Scores
from rmd_plugin.report.tables import comparison_tables, near_far_means, ood_sets, percent, ranking, seconds, set_title

T = TypeVar("T")

#: what the directions of a detector are ordered by
_ORDER = {"rmd": "most discriminative first"}
#: OOD sets that have a picture of partial sums
_PANELS = 4


def write_report(folder: str | os.PathLike[str] | RunFolder, *, output: str | os.PathLike[str] | None = None) -> Path:
    """Draw the page about a run from the files of its folder; those that are missing leave their part out.

    A file that cannot be read is named on the page, and the rest stands. Without ``output`` it is the folder's
    ``report.html``.
    """
    run = folder if isinstance(folder, RunFolder) else RunFolder(folder)
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

    page = render_report(
        read(run.read_rows) or [],
        scores=read(run.read_scores),
        history=read(run.read_history) or [],
        directions=read(run.read_directions),
        config=read(lambda: run.read_text(CONFIG)) or "",
        versions=read(run.read_versions),
        status=read(run.read_status),
        problems=problems,
    )
    path = Path(output) if output is not None else run.file(REPORT)
    with replacing(path) as file:
        file.write(page)
    return path


def render_report(
    rows: Sequence[Row],
    *,
    scores: Scores | None = None,
    history: Sequence[Mapping[str, Any]] = (),
    directions: Directions | None = None,
    config: str = "",
    versions: Mapping[str, Any] | None = None,
    status: RunStatus | None = None,
    problems: Sequence[str] = (),
) -> str:
    """The page about one run as HTML: self-contained, without script.

    Args:
        rows: results of one benchmark, backbone and seed.
        scores: detector -> set -> scores of shape (N,).
        history: rows of ``OODMonitor.history``.
        directions: detector -> set -> profile of its directions.
        config: the resolved config as YAML.
        versions: what :meth:`RunFolder.write_versions` keeps.
        status: how the run ended.
        problems: what could not be read, one sentence each.
    """
    problems = list(problems)

    def part(draw: Callable[[], T]) -> T | None:
        # a report comes after hours of training: a part that cannot be drawn must not take the others with it
        try:
            return draw()
        except Exception as error:
            problems.append(f"A part of this page could not be drawn. {describe_error(error)}")
            return None

    title, lead = _title(rows, status)
    tiles = part(lambda: _key_figures(rows, status)) or []
    sections = [
        part(lambda: _tables(rows)),
        part(lambda: _over_training(rows, history)),
        part(lambda: _histograms(rows, scores or {})),
        part(lambda: _directions(rows, directions or {})),
    ]
    state, notices = status.state if status is not None else "", list(dict.fromkeys(problems))
    if state == "interrupted":
        notices.insert(0, "This run was interrupted: the page shows what was done until then.")
    return render(
        "report.html",
        tab=f"{title}: near-OOD detection",
        title=title,
        lead=lead,
        errors=[f"This run failed. {status.reason}"] if status is not None and state == "failed" else [],
        notices=notices,
        tiles=tiles,
        sections=[section for section in sections if section is not None],
        command=(versions or {}).get("command", ""),
        versions=_versions(versions or {}),
        config=config.rstrip(),
    )


def _title(rows: Sequence[Row], status: RunStatus | None) -> tuple[str, str]:
    about = dict(status.about) if status is not None else {}

    def names(attribute: str) -> str:
        found = ", ".join(map(str, dict.fromkeys(getattr(row, attribute) for row in rows)))
        return found or str(about.get(attribute, ""))

    title = ", ".join(filter(None, (names("benchmark"), names("backbone")))) or "A run without results"
    parts = ["Out-of-distribution detection"]
    if names("seed"):
        parts.append(f"seed {names('seed')}")
    if status is not None and status.started:
        parts.append(f"started {status.started[:16].replace('T', ' ')}")
    return title, " · ".join(parts)


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


def _tables(rows: Sequence[Row]) -> Section:
    tables = [table for table in comparison_tables(rows) if table.rows or table.notes]
    if not tables:
        return Section("Detectors", "No detector was compared in this run.")
    text = "Ordered by the mean over the near-OOD sets where there are any. The best number of a column is bold."
    return Section("Detectors", text, tables)


def _over_training(rows: Sequence[Row], history: Sequence[Mapping[str, Any]]) -> Section | None:
    seen = [row for row in history if row["metric"] == AUROC and row["ood"] and row["stage"] == "fit"]
    if not seen:
        return None
    sets, distances = history_sets(seen), ood_sets(rows)
    titles = {name: "mean over the OOD sets" if name == MEAN else set_title(name, distances) for name in sets}
    # RMD and MD have a colour in every picture, then the best of the table
    detectors = list(dict.fromkeys([*OURS[:2], *ranking(rows), *(str(row["detector"]) for row in seen)]))
    pictures = [
        picture(epochs_figure(seen, [name], detectors=detectors, titles=titles), f"AUROC over the epochs: {title}")
        for name, title in titles.items()
    ]
    text = "AUROC on the validation set after each epoch, every detector fitted anew to the features of that epoch."
    return Section("Over training", text, pictures=pictures, wide=True)


def _histograms(rows: Sequence[Row], scores: Scores) -> Section | None:
    # scores belong to one comparison
    shown = [name for name in choose_detectors(rows) if name in scores] if _one_comparison(rows) else []
    pictures = [
        picture(histogram_figure(scores, rows, detectors=[name]), f"Histogram of the scores of {label(name)}")
        for name in shown
    ]
    text = "Scores of the test sets. The less the coloured lines overlap the filled area, the better."
    return Section("Scores", text, pictures=pictures) if pictures else None


def _directions(rows: Sequence[Row], directions: Directions) -> Section | None:
    if not directions:
        return None
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
    text = (
        "A Gaussian score is a sum over directions in feature space. First: the mean that each direction adds, with "
        "the band from the 10 % to the 90 % quantile; a direction tells OOD samples apart where their line leaves the "
        "in-distribution band. Then: the AUROC when only the first directions count."
    )
    return Section("Where the difference lies", text, pictures=pictures, wide=True)


def _versions(versions: Mapping[str, Any]) -> dict[str, str]:
    found = {name: versions[name] for name in ("python", "platform", "commit", "project_commit") if name in versions}
    packages = versions.get("packages")
    found |= packages if isinstance(packages, dict) else {}
    return {str(name).replace("_", " "): str(value) for name, value in found.items()}


def _one_comparison(rows: Sequence[Row]) -> bool:
    return len({(row.benchmark, row.backbone, row.seed) for row in rows}) == 1


def _duration(value: float) -> str:
    if value < 100:
        return f"{seconds(value)} s" if value >= 10 else f"{value:.0f} s"
    return f"{round(value / 60)} min" if value < 7200 else f"{round(value / 3600, 1):g} h"
