"""The page about one run: ``report.html``, drawn from the files of its folder alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import ACCURACY, AUROC, Row, select, unique
from rmd_plugin.report import document as doc
from rmd_plugin.report.directions import Directions, read_directions
from rmd_plugin.report.figures import choose_detectors, histogram_figure
from rmd_plugin.report.names import OURS, label
from rmd_plugin.report.run_figures import MEAN, contributions_figure, epochs_figure, partial_sums_figure
from rmd_plugin.report.run_folder import CONFIG, DIRECTIONS, REPORT, RunFolder, RunStatus, describe_error
from rmd_plugin.report.scores import ID, Scores
from rmd_plugin.report.tables import comparison_tables, near_far_means, percent, ranking, seconds

T = TypeVar("T")

#: what the directions of a detector are ordered by
_ORDER = {"rmd": "most discriminative first"}
#: OOD sets that have a picture of partial sums
_PANELS = 4


def write_report(folder: str | os.PathLike[str] | RunFolder, *, output: str | os.PathLike[str] | None = None) -> Path:
    """Draw the page about a run from the files of its folder; those that are missing leave their part out.

    A file that cannot be read is named on the page, and the rest stands.

    Args:
        folder: folder of the run.
        output: file to write, by default ``report.html`` in the folder.

    Returns:
        The file.
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
        directions=read(lambda: read_directions(run.file(DIRECTIONS))),
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

    Returns:
        The document.
    """
    versions = versions or {}
    problems = list(problems)

    def part(draw: Callable[[], list[str]]) -> list[str]:
        # a report comes after hours of training: a part that cannot be drawn must not take the others with it
        try:
            return draw()
        except Exception as error:
            problems.append(f"A part of this page could not be drawn. {describe_error(error)}")
            return []

    title, lead = _title(rows, status)
    sections = [
        *part(lambda: _key_figures(rows, status)),
        *part(lambda: _tables(rows)),
        *part(lambda: _training(rows, history)),
        *part(lambda: _histograms(rows, scores or {})),
        *part(lambda: _directions(rows, directions or {})),
        *part(lambda: _made_with(config, versions)),
    ]
    head = [doc.heading(title, level=1), doc.paragraph(lead, kind="lead"), *_notices(status, problems)]
    return doc.document(f"{title}: near-OOD detection", [*head, *sections])


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


def _notices(status: RunStatus | None, problems: Sequence[str]) -> list[str]:
    notices = []
    if status is not None and status.state == "failed":
        notices.append(doc.paragraph(f"This run failed. {status.reason}", kind="notice"))
    elif status is not None and status.state == "interrupted":
        text = "This run was interrupted: the page shows what was done until then."
        notices.append(doc.paragraph(text, kind="notice mild"))
    return notices + [doc.paragraph(problem, kind="notice mild") for problem in dict.fromkeys(problems)]


def _key_figures(rows: Sequence[Row], status: RunStatus | None) -> list[str]:
    items = []
    for row in select(rows, metric=ACCURACY, detector=""):
        if row.ok:
            items.append(("Accuracy", f"{percent(row.value)} %", row.reason or "in-distribution test set"))
    if len(_comparisons(rows)) == 1:
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
    return [doc.tiles(items)] if items else []


def _tables(rows: Sequence[Row]) -> list[str]:
    tables = [table for table in comparison_tables(rows) if table.rows or table.notes]
    if not tables:
        return [doc.heading("Detectors"), doc.paragraph("No detector was compared in this run.", kind="quiet")]
    text = "Ordered by the mean over the near-OOD sets where there are any. The best number of a column is bold."
    return [doc.heading("Detectors"), doc.paragraph(text), *map(doc.table_block, tables)]


def _training(rows: Sequence[Row], history: Sequence[Mapping[str, Any]]) -> list[str]:
    seen = [row for row in history if row["metric"] == AUROC and row["ood"] and row["stage"] == "fit"]
    if not seen:
        return []
    sets = list(dict.fromkeys(str(row["ood"]) for row in seen))
    if len(sets) == 2:  # one set: its mean is the same curve
        sets = [name for name in sets if name != MEAN]
    distances = _distances(rows)
    detectors = _coloured(rows, [str(row["detector"]) for row in seen])
    pictures = []
    for name in sorted(sets, key=lambda name: name != MEAN):
        title = "mean over the OOD sets" if name == MEAN else _with_distance(name, distances)
        figure = epochs_figure(seen, name, detectors=detectors, title=title)
        pictures.append(doc.picture(figure, f"AUROC over the epochs: {title}"))
    text = "AUROC on the validation set after each epoch, every detector fitted anew to the features of that epoch."
    return [doc.heading("Over training"), doc.paragraph(text), doc.panels(pictures, wide=True)]


def _histograms(rows: Sequence[Row], scores: Scores) -> list[str]:
    if len(_comparisons(rows)) != 1:
        return []  # scores belong to one comparison
    pictures = [
        doc.picture(histogram_figure(scores, rows, detectors=[name]), f"Histogram of the scores of {label(name)}")
        for name in choose_detectors(rows)
        if name in scores
    ]
    if not pictures:
        return []
    text = "Scores of the test sets. The less the coloured lines overlap the filled area, the better."
    return [doc.heading("Scores"), doc.paragraph(text), doc.panels(pictures)]


def _directions(rows: Sequence[Row], directions: Directions) -> list[str]:
    if not directions:
        return []
    distances = _distances(rows)
    pictures = []
    for detector, profiles in directions.items():
        order = _ORDER.get(detector, "largest variance first")
        title = f"{label(detector)}: {len(profiles[ID].mean)} directions"
        figure = contributions_figure(profiles, distances, order=order, title=title)
        pictures.append(doc.picture(figure, f"Contribution of each direction to the score of {label(detector)}"))
    sets = list(dict.fromkeys(name for profiles in directions.values() for name in profiles if name != ID))
    sets.sort(key=lambda name: distances.get(name) == "far")
    detectors = _coloured(rows, list(directions))
    for name in sets[:_PANELS]:
        title = f"{_with_distance(name, distances)}: the first directions"
        figure = partial_sums_figure(directions, name, detectors=detectors, title=title)
        pictures.append(doc.picture(figure, f"AUROC on {name} from the first directions only"))
    text = (
        "A Gaussian score is a sum over directions in feature space. First: the mean that each direction adds, with "
        "the band from the 10 % to the 90 % quantile; a direction tells OOD samples apart where their line leaves the "
        "in-distribution band. Then: the AUROC when only the first directions count."
    )
    return [doc.heading("Where the difference lies"), doc.paragraph(text), doc.panels(pictures, wide=True)]


def _made_with(config: str, versions: Mapping[str, Any]) -> list[str]:
    parts = []
    if versions.get("command"):
        parts += [doc.paragraph("The command:"), doc.preformatted(str(versions["command"]))]
    about = {
        name: str(versions[name]) for name in ("python", "platform", "commit", "project_commit") if name in versions
    }
    packages = versions.get("packages")
    if isinstance(packages, Mapping):
        about |= {str(name): str(version) for name, version in packages.items()}
    if about:
        parts.append(doc.definitions({name.replace("_", " "): value for name, value in about.items()}))
    if config.strip():
        parts.append(doc.folded("The whole config", doc.preformatted(config.rstrip())))
    return [doc.heading("How it was made"), *parts] if parts else []


def _comparisons(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    return list(dict.fromkeys((row.benchmark, row.backbone, row.seed) for row in rows))


def _distances(rows: Sequence[Row]) -> dict[str, str]:
    return {name: next(row.distance for row in rows if row.ood == name) for name in unique(rows, "ood")}


def _with_distance(name: str, distances: Mapping[str, str]) -> str:
    return f"{name} ({distances[name]})" if distances.get(name) else name


def _coloured(rows: Sequence[Row], found: Sequence[str]) -> list[str]:
    """Detectors in the order of their colours, the same in every picture: RMD, MD, then as in the table."""
    return list(dict.fromkeys([*OURS[:2], *ranking(rows), *found]))


def _duration(value: float) -> str:
    if value < 100:
        return f"{seconds(value)} s" if value >= 10 else f"{value:.0f} s"
    minutes, hours = round(value / 60), round(value / 3600, 1)
    return f"{minutes} min" if value < 7200 else f"{hours:g} h"
