"""Pages as self-contained HTML without script: ``report.html`` of a run, and of what ``rmd-score`` has scored."""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from matplotlib.figure import Figure

from rmd_plugin.compare.rows import ACCURACY, make_rows, select
from rmd_plugin.files import replacing
from rmd_plugin.report import figures, tables
from rmd_plugin.report.figures import DASHES, PALETTE
from rmd_plugin.report.run import CONFIG, ID, REPORT, RunFolder, Scores, describe_error
from rmd_plugin.report.tables import interval, label, near_first, ood_sets, percent, ranking, set_title

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")

#: OOD sets that have samples; samples of one kind
_SETS, _COUNT = 3, 8
#: longer side of a thumbnail in pixels, the one up to which nothing may be lost, letters of a text
_SIDE, _TINY, _LETTERS = 160, 64, 280
#: of a table of scores: the highest and lowest, lines of other tables that are shown; bins of the p-values
EXTREMES, SHOWN, _P_BINS = 24, 50, 20


class Picture(NamedTuple):
    """A picture inside a page: itself as a data address, and what it shows in words."""

    source: str
    alt: str


def picture(figure: Figure, alt: str) -> Picture:
    """A figure as an SVG; ``alt`` says what it shows."""
    # an address, not the SVG itself: several in one document would share their ids
    with figures.house_style():
        return _picture("svg+xml", alt, lambda file: figure.savefig(file, format="svg", metadata={"Date": None}))


def thumbnail(image: Image.Image, alt: str) -> Picture:
    """A small copy of a picture for a page: a JPEG, or every pixel of one that is tiny."""
    small = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    kind = "png" if max(small.size) <= _TINY else "jpeg"
    return _picture(kind, alt, lambda file: small.save(file, kind))


def _picture(kind: str, alt: str, write: Callable[[io.BytesIO], None]) -> Picture:
    buffer = io.BytesIO()
    write(buffer)
    return Picture(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}", alt)


def preview(item: Any, alt: str) -> Picture | str | None:
    """What a raw item of a data set looks like: a thumbnail, a text, or None for what neither is.

    Pictures are those of Pillow, arrays (H, W), (H, W, 3) and tensors (1 or 3, H, W) of uint8 or of numbers in [0, 1].
    """
    from PIL import Image

    if isinstance(item, str):
        return item
    if isinstance(item, Image.Image):
        return thumbnail(item, alt)
    if hasattr(item, "detach"):  # a tensor; torch takes seconds to import
        item = item.detach().cpu().numpy()
        item = np.moveaxis(item, 0, -1) if item.ndim == 3 else item
    if not isinstance(item, np.ndarray) or not item.size:
        return None
    # normalised numbers are left out: what is black is unknown
    if item.dtype.kind == "f" and item.min() >= 0 and item.max() <= 1:
        item = np.rint(255 * item).astype(np.uint8)
    item = np.squeeze(item, 2) if item.shape[2:] == (1,) else item
    shows = item.dtype == np.uint8 and item.ndim > 1 and item.shape[2:] in ((), (3,))
    return thumbnail(Image.fromarray(item), alt) if shows else None


def make_card(name: str, details: Sequence[str], flagged: bool, preview: Picture | str | None) -> dict[str, Any]:
    """One sample on a page as plain data: its name, some lines about it, and how it looks or what it says, if known."""
    text = " ".join(preview.split()) if isinstance(preview, str) else ""
    text = text[:_LETTERS] + "…" * (len(text) > _LETTERS)
    image = preview._asdict() if isinstance(preview, Picture) else None
    return {"name": name, "details": list(details), "flagged": flagged, "picture": image, "text": text}


# -- of a run ---------------------------------------------------------------------------------------------------------


def collect_samples(
    rows: pd.DataFrame, scores: Scores, raw: Callable[[str, int], tuple[object, str]]
) -> dict[str, Any] | None:
    """Samples by the detector that leads the table: ID ones with the highest scores, OOD ones with both ends.

    Args:
        rows: of one comparison.
        scores: of its detectors, in the order of the data.
        raw: set and position -> the item before any transform, and its class or nothing.

    Returns:
        The detector, and groups of cards with a title, as plain data for :meth:`RunFolder.write_samples`; None if
        nothing can be shown: features, for example.
    """
    leader = next((name for name in ranking(rows) if name in scores), None)
    if leader is None:
        return None
    _, threshold = tables.decision_of(rows, leader)
    distances = ood_sets(rows)
    ends = {"the most unknown": -1, "the most ordinary, detected last": 1}
    wanted = [(ID, "in-distribution test set", "the most unknown")]
    wanted += [(name, set_title(name, distances), end) for name in near_first(distances)[:_SETS] for end in ends]
    groups: list[dict[str, Any]] = []
    for name, title, end in wanted:
        values = scores[leader].get(name, np.empty(0))
        cards = []
        for index in np.argsort(ends[end] * values, kind="stable")[:_COUNT]:
            item, of_class = raw(name, int(index))
            score, shown = float(values[index]), preview(item, f"Sample {index} of {name}")
            cards.append(make_card(of_class or f"no. {index}", [f"score {number(score)}"], score > threshold, shown))
        if cards:
            groups.append({"title": f"{title}: {end}", "cards": cards})
    visible = any(card["picture"] or card["text"] for group in groups for card in group["cards"])
    return {"detector": leader, "groups": groups} if visible else None


def write_report(run: RunFolder) -> Path:
    """Write the page about a run to ``report.html`` in its folder. See :func:`render_report`."""
    run.write_text(REPORT, render_report(run))
    return run.file(REPORT)


def render_report(run: RunFolder) -> str:
    """The page about a run as HTML: drawn from the files of its folder alone.

    Files that are missing leave their section out. One that cannot be read is named on the page, and so is a section
    that cannot be drawn: a report comes after hours of training, and the rest must stand. A new section is a function
    that draws pictures, an entry in ``pictures``, and its heading and text in ``templates/report.html``.
    """
    problems: list[str] = []

    def attempt(draw: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return draw(*arguments)
        except FileNotFoundError:
            return None
        except Exception as error:
            problems.append(f"A part of this page could not be drawn. {describe_error(error)}")
            return None

    rows, status = attempt(run.read_rows), attempt(run.read_status)
    rows = make_rows() if rows is None else rows
    about = rows[tables.COMPARISON].iloc[0].to_dict() if len(rows) else status.about if status is not None else {}
    scores = attempt(run.read_scores) or {}
    return tables.render(
        "report.html",
        about={"benchmark": "", "backbone": "", "seed": "", **about},
        status=status,
        choice=attempt(tables.choose, rows, scores),
        accuracies=list(select(rows, metric=ACCURACY, detector="", status="ok").itertuples()),
        distances=ood_sets(rows).values(),
        detectors=ranking(rows),
        tables=attempt(tables.comparison_tables, rows),
        decisions=attempt(tables.decision_tables, rows),
        joint=attempt(tables.joint_tables, rows),
        pictures={
            "calibration": attempt(_calibration, rows, scores),
            "over_training": attempt(_over_training, rows, attempt(run.read_history) or []),
            "scores": attempt(_histograms, rows, scores),
        },
        samples=attempt(run.read_samples),
        folder=str(run.path),
        versions=attempt(run.read_versions) or {},
        config=(attempt(lambda: run.file(CONFIG).read_text(encoding="utf-8")) or "").rstrip(),
        problems=problems,  # of all above, too
        **{show.__name__: show for show in (tables.advice, interval, label, percent, quote)},
    )


def _calibration(rows: pd.DataFrame, scores: Scores) -> list[Picture]:
    figure = figures.calibration_figure(scores, rows)
    return [] if figure is None else [picture(figure, "Requested and measured false alarms")]


def _over_training(rows: pd.DataFrame, history: figures.History) -> list[Picture]:
    fitted = [row for row in history if row["stage"] == "fit"]
    distances, detectors = ood_sets(rows), figures.choose_detectors(rows, figures.NAMED)
    drawn = []
    for name in figures.history_sets(fitted):
        figure = figures.epochs_figure([row for row in fitted if row["ood"] == name], detectors, distances)
        drawn.append(picture(figure, f"AUROC over the epochs: {set_title(name, distances)}"))
    return drawn


def _histograms(rows: pd.DataFrame, scores: Scores) -> list[Picture]:
    return [
        picture(figures.histogram_figure(scores, rows, detectors=[name]), f"Histogram of the scores of {label(name)}")
        for name in ranking(rows)
        if name in scores
    ]


# -- of a table of scores ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringRun:
    """What a page says beside the numbers of the table."""

    guard: str  #: its name
    inputs: Sequence[str]
    alpha: float
    threshold: float = math.nan  #: where there is one for all classes
    #: histogram of the scores of the guard's own validation data: ``edges`` (B + 1,) and ``counts`` (B,)
    validation: Mapping[str, Sequence[float]] | None = None
    drift: Picture | None = None  #: curve of a drift alarm
    interrupted: bool = False


class ScoreSummary:
    """What is known about all rows of ``scores.parquet`` together."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import pyarrow.dataset as ds  # type: ignore[import-untyped]

        table = ds.dataset(path, format="parquet")
        name = table.schema.names[0]
        numbers = table.to_table(columns=["score", "p_value", "is_ood", "class"]).to_pandas()
        numbers["is_ood"] = numbers["is_ood"].eq(True).astype(bool)
        numbers["Scored"], numbers["Flagged"] = numbers["score"].notna() | numbers["is_ood"], numbers["is_ood"]
        self.numbers = numbers  #: columns score, p_value and is_ood of every row
        self.scored = int(numbers["Scored"].sum())  #: rows with a score, one that is no number included
        self.broken = len(numbers) - self.scored  #: rows without a score
        self.flagged = int(numbers["is_ood"].sum())
        self.share = self.flagged / self.scored if self.scored else math.nan  #: of the scored that were flagged
        self.nan = int((numbers["score"].isna() & numbers["is_ood"]).sum())  #: scores that are no number; flagged
        classes = numbers.groupby("class")[["Scored", "Flagged"]].sum()
        #: columns Scored and Flagged by class, the most flagged first
        self.classes = classes.sort_values(["Flagged", "Scored"], ascending=False, kind="stable")
        ordered = numbers["score"].dropna().sort_values(kind="stable").index.to_numpy()
        #: rows of the table with a column name: the most unknown first, the most ordinary first
        self.highest, self.lowest = (
            table.take(places[:EXTREMES]).to_pandas().rename(columns={name: "name"})
            for places in (ordered[::-1], ordered)
        )
        reasons = table.to_table(columns=[name, "reason"], filter=ds.field("reason").is_valid())
        self.reasons = reasons.to_pandas().set_axis(["Sample", "Reason"], axis=1)  #: of rows without a score


#: names of samples -> what they look like: a thumbnail or the text, as far as there is one
Previews = Callable[[Collection[str]], Mapping[str, "Picture | str"]]


def write_scores_page(path: str | os.PathLike[str], summary: ScoreSummary, run: ScoringRun, previews: Previews) -> Path:
    """Write the page about scores: how many were flagged, the most unknown samples, the most ordinary, each class."""
    shown = previews({*summary.highest["name"], *summary.lowest["name"]})
    classes = summary.classes.reset_index(names="Predicted class")
    classes["Share (%)"] = 100 * classes["Flagged"] / classes["Scored"]
    page = tables.render(
        "scores.html",
        run=run,
        summary=summary,
        share=share,
        pictures=_score_pictures(summary, run),
        highest=_score_cards(summary.highest, shown),
        lowest=_score_cards(summary.lowest, shown),
        classes=_first_rows(classes),
        reasons=_first_rows(summary.reasons),
    )
    with replacing(path) as file:
        file.write(page)
    return Path(path)


def share(value: float) -> str:
    """A share for readers: ``23.4 %``."""
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"


def number(value: float) -> str:
    """A score for readers: four digits."""
    return f"{value:.4g}".replace("-", "−")


def _score_cards(rows: pd.DataFrame, previews: Mapping[str, Picture | str]) -> list[dict[str, Any]]:
    cards = []
    for row in rows.itertuples():
        details = [f"score {number(row.score)}", f"p-value {row.p_value:.2g}", f"nearest: {row.nearest_class or ''}"]
        cards.append(make_card(row.name, details, bool(row.is_ood), previews.get(row.name)))
    return cards


def _first_rows(frame: pd.DataFrame) -> tables.Table:
    more = [f"The first {SHOWN} of {len(frame):,}; the others are in scores.parquet."] if len(frame) > SHOWN else []
    return tables.frame_table(frame[:SHOWN], notes=more)


def _score_pictures(summary: ScoreSummary, run: ScoringRun) -> list[Picture]:
    """Histograms of the scores, those flagged on top of the others, and of the p-values; none without any score."""
    numbers = summary.numbers.dropna(subset="score")
    if numbers.empty:
        return []
    scores = numbers["score"].to_numpy(float)
    edges = figures.histogram_edges(scores, scores, run.threshold)
    by_decision = [np.clip(scores[numbers["is_ood"] == flagged], edges[0], edges[-1]) for flagged in (False, True)]
    with figures.house_style():
        (figure, (axes,)), (p_figure, (p_axes,)) = (figures.new_panels(1, (6.4, 4.2)) for _ in range(2))
        colours = [figures.ID_COLOUR, PALETTE["vermilion"]]
        axes.hist(by_decision, list(edges), stacked=True, color=colours, alpha=0.8, label=["not flagged", "flagged"])
        if run.validation is not None:
            # as many as would lie in a bin of ours, whatever the width of theirs
            widths, counts = np.diff(run.validation["edges"]), np.array(run.validation["counts"])
            heights = len(scores) * counts / counts.sum() * (edges[1] - edges[0]) / widths
            axes.stairs(heights, run.validation["edges"], color="black", label="the guard's validation data")
        p_edges = list(np.linspace(0, 1, _P_BINS + 1))
        p_axes.hist(numbers["p_value"], p_edges, color=PALETTE["sky"], label="scored samples")
        p_axes.axhline(len(scores) / _P_BINS, color="black", linewidth=1.4, label="if all were in-distribution")
        axes.set(xlim=(edges[0], edges[-1]), xlabel="score, higher = more OOD", ylabel="samples")
        p_axes.set(xlim=(0.0, 1.0), xlabel="p-value, lower = more OOD", ylabel="samples")
        for panel, value, name in ((axes, run.threshold, "threshold"), (p_axes, run.alpha, f"α = {run.alpha:g}")):
            if math.isfinite(value):
                panel.axvline(value, color="black", linewidth=1.2, linestyle=DASHES[1], label=name)
            panel.locator_params(axis="both", nbins=6)
            # above the panel, where no bar can be behind it
            panel.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)
    p_alt = f"Histogram of the p-values: {share(summary.share)} are at most {run.alpha:g}"
    alt = f"Histogram of {summary.scored} scores, of which {summary.flagged} are flagged"
    return [picture(figure, alt), picture(p_figure, p_alt)]
