"""The page about one run: ``report.html``, drawn from the files of its folder alone."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import ACCURACY, AUROC, Row, select, unique
from rmd_plugin.report.cards import Card
from rmd_plugin.report.choice import Choice, advice, choose
from rmd_plugin.report.document import Picture, picture, render
from rmd_plugin.report.figures import calibration_figure, histogram_figure
from rmd_plugin.report.names import LONG_NAMES, OURS, label
from rmd_plugin.report.run_figures import (
    contributions_figure,
    epochs_figure,
    history_sets,
    history_title,
    partial_sums_figure,
)
from rmd_plugin.report.run_folder import CONFIG, REPORT, RunFolder, RunStatus, describe_error
from rmd_plugin.report.samples import Samples, sample_cards
from rmd_plugin.report.scores import ID, Directions, Scores
from rmd_plugin.report.tables import (
    WORDS,
    comparison_tables,
    decision_tables,
    interval,
    ood_sets,
    percent,
    ranking,
    seconds,
    set_title,
)

T = TypeVar("T")

#: what the directions of a detector are ordered by
_ORDER = {"rmd": "most discriminative first"}
#: options of a run that change its data, splits, classifier or threshold, and that rmd-fit has too
_OF_FIT = ("seed", "limit_train", "limit_test", "alpha", "head", "paths.data_dir")
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
    config, samples = read(lambda: run.read_text(CONFIG)) or "", read(run.read_samples)

    def names(attribute: str) -> str:
        about = status.about.get(attribute, "") if status is not None else ""
        return ", ".join(unique(rows, attribute)) or str(about)

    choice = part(choose, rows, scores) if _one_comparison(rows) else None
    return render(
        "report.html",
        title=", ".join(filter(None, (names("benchmark"), names("backbone")))) or "A run without results",
        seed=names("seed"),
        status=status,
        tiles=part(_key_figures, rows, choice, status),
        advice=part(advice, choice),
        commands=part(_commands, choice, run, status, str(versions.get("command", ""))),
        words=part(_words, rows),
        tables=part(lambda: [table for table in comparison_tables(rows) if table.rows or table.notes]),
        decisions=part(decision_tables, rows),
        calibration=part(_calibration, rows, scores or {}),
        epochs=part(_epochs, rows, history or []),
        histograms=part(_histograms, rows, scores or {}),
        samples=part(_samples, rows, samples),
        directions=part(_directions, rows, directions or {}),
        problems=problems,  # of the parts above, too
        versions=versions,
        config=config.rstrip(),
    )


def _key_figures(rows: Sequence[Row], choice: Choice | None, status: RunStatus | None) -> list[tuple[str, str, str]]:
    """Name, number and small print of each: the detector to take, what it finds and flags, then the rest."""
    items = []
    if choice is not None:
        where = "near-OOD AUROC" if choice.judged == "near" else "AUROC"
        items.append(("Take", label(choice.detector), f"highest {where}: {percent(choice.auroc)} %"))
        if choice.alarms is not None:
            which = "near-OOD" if choice.judged == "near" else "OOD"
            if not math.isnan(choice.detected):
                level = f"of {which} samples, at {100 * choice.alpha:g} % false alarms"
                items.append(("Finds", f"{100 * choice.detected:.1f} %", level))
            asked = f"of the ID test set; asked for {100 * choice.alpha:g} % {interval(choice.alarms)}"
            items.append(("False alarms", f"{100 * choice.alarms.value:.1f} %", asked.strip()))
    items += [
        ("Accuracy", f"{percent(row.value)} %", row.reason or "in-distribution test set")
        for row in select(rows, metric=ACCURACY, detector="", status="ok")
    ]
    if status is not None and not math.isnan(status.seconds):
        items.append(("Time", _duration(status.seconds), "the whole run"))
    return items


def _commands(choice: Choice | None, run: RunFolder, status: RunStatus | None, command: str) -> list[tuple[str, str]]:
    """What to do next: a sentence and a command each."""
    names = {key: status.about.get(key) for key in ("benchmark", "backbone")} if status is not None else {}
    if choice is None or not all(names.values()):
        return []
    program, *words = shlex.split(command) or [""]
    lines = []
    if guard := _guard_command(choice.detector, names, run, words):
        lines.append(("Make a guard of it, one folder that scores new data:", shlex.join(guard)))
        lines.append(("Then score data that nobody has labelled:", "rmd-score guard FOLDER"))
    if program == "rmd-train":
        again = [
            word for word in words if not word.startswith(("seed=", "hydra.run.", "hydra.sweep.", "-m", "--multi"))
        ]
        sweep = shlex.join([program, "-m", *again, "seed=0,1,2,3,4"])
        lines.append(("See whether the order holds over seeds:", f"{sweep} && rmd-report multirun/train"))
    return lines


def _guard_command(detector: str, names: Mapping[str, Any], run: RunFolder, words: Sequence[str]) -> list[str]:
    """``rmd-fit`` with the run's own data, splits, network and options of the detector; none if it cannot say them."""
    options, checkpoint, kind = [], "", "best"
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in ("experiment", "--config-name", "-cn"):
            return []  # rmd-fit has no such choice
        if key in ("checkpoint", "ckpt_path"):
            checkpoint = value
        elif key == "weights":
            kind = value
        elif key in _OF_FIT or key.startswith(("benchmark.", "backbone.", f"detector.{detector}.")):
            options.append(word)
    own = run.file("checkpoints") / f"{kind}.ckpt"
    checkpoint = str(own) if own.is_file() else checkpoint
    parts = ["rmd-fit", *_config_dir(words), *(f"{key}={name}" for key, name in names.items()), *options]
    return [*parts, *([f"checkpoint={checkpoint}"] if checkpoint else []), f"detector={detector}", "out=guard"]


def _config_dir(words: Sequence[str]) -> list[str]:
    """The folder of the user's own parts among the words of a command, as it was given."""
    for place, word in enumerate(words):
        if word in ("--config-dir", "-cd"):
            return list(words[place : place + 2])
        if word.startswith("--config-dir="):
            return [word]
    return []


def _words(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The words and the short names on the page, with what they mean."""
    found = [(word, meaning) for word, meaning in WORDS.items() if ood_sets(rows)]
    return found + [(label(name), LONG_NAMES[name]) for name in ranking(rows) if name in LONG_NAMES]


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
    shown = [name for name in ranking(rows) if name in scores] if _one_comparison(rows) else []
    return [
        picture(histogram_figure(scores, rows, detectors=[name]), f"Histogram of the scores of {label(name)}")
        for name in shown
    ]


def _samples(rows: Sequence[Row], samples: Samples | None) -> list[tuple[str, list[tuple[str, list[Card]]]]]:
    """Detector, and title and cards of each group."""
    if samples is None:
        return []
    distances = ood_sets(rows)
    titles = {"highest": "the most unknown", "lowest": "the most ordinary, found last"}
    groups = []
    for group, cards in sample_cards(samples, rows):
        name = "in-distribution test set" if group.ood == ID else set_title(group.ood, distances)
        groups.append((f"{name}: {titles[group.end]}", cards))
    return [(label(samples.detector), groups)]


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
