"""The summary of a table of scores against pandas, and the page that is drawn from it."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rmd_plugin.report import score_summary
from rmd_plugin.report.cards import thumbnail
from rmd_plugin.report.document import Picture
from rmd_plugin.report.score_page import (
    Histogram,
    ScoringRun,
    percent,
    render_scores,
    scores_figure,
    write_scores_page,
)
from rmd_plugin.report.score_summary import EXTREMES, REASONS, score_schema, summarise_scores

RUN = ScoringRun("my guard", ["new"], 0.05, threshold=1.5, total=400)


def make_rows(count=400, broken=0.1, seed=0):
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=count).round(2)
    rows = []
    for number, score in enumerate(scores):
        if draw.random() < broken:
            rows.append({"path": f"p{number}.png", "reason": f"cut at {number}"})
        else:
            row = {"path": f"p{number}.png", "score": score, "p_value": float(draw.random()), "is_ood": score > 1.5}
            rows.append(row | dict.fromkeys(("class", "nearest_class"), f"class {number % 3}"))
    return rows


def write(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema=score_schema("path")), path, **options)
    return path


def page(summary, run=RUN, previews=lambda names: {}):
    text = render_scores(summary, run, previews)
    Checked().feed(text)
    return text


class Checked(HTMLParser):
    """Every element is closed in order, nothing is fetched, every picture has a text."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        assert tag != "script"
        assert not any(name.startswith("on") for name in found)
        if tag == "img":
            assert found["src"].startswith("data:image/")
            assert found["alt"]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("batch", [7, 10_000])
def test_the_summary_is_that_of_pandas_however_it_is_read(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(score_summary, "_BATCH", batch)
    rows = make_rows()
    summary = summarise_scores(write(tmp_path / "s.parquet", rows, row_group_size=33))
    frame = pd.DataFrame(rows)
    scored = frame[frame["score"].notna()]
    assert summary.rows == 400
    assert summary.scored == len(scored)
    assert summary.broken == summary.with_reason == 400 - len(scored)
    assert summary.flagged == int((scored["score"] > 1.5).sum())
    ordered = scored.sort_values("score", ascending=False, kind="stable")
    assert [row.name for row in summary.highest] == ordered["path"].tolist()[:EXTREMES]
    ordered = scored.sort_values("score", kind="stable")
    assert [row.name for row in summary.lowest] == ordered["path"].tolist()[:EXTREMES]
    for name, group in scored.groupby("class"):
        assert summary.classes[name] == (len(group), int((group["score"] > 1.5).sum()))
    assert summary.counts.sum(axis=1).tolist() == [summary.scored - summary.flagged, summary.flagged]
    np.testing.assert_array_equal(summary.p_counts, np.histogram(scored["p_value"], np.linspace(0, 1, 21))[0])
    broken = frame[frame["reason"].notna()]
    assert summary.reasons == list(zip(broken["path"], broken["reason"], strict=True))[:REASONS]


def test_scores_that_are_no_numbers_are_counted_and_are_no_extremes(tmp_path):
    rows = make_rows(20, broken=0)
    rows[3] |= {"score": float("nan"), "is_ood": True, "reason": "the score is not a number"}
    rows[4] |= {"score": float("inf"), "is_ood": True}
    rows[5] |= {"score": float("-inf"), "is_ood": False}
    summary = summarise_scores(write(tmp_path / "s.parquet", rows))
    assert (summary.scored, summary.nan, summary.broken) == (20, 1, 0)
    assert summary.highest[0].name == "p4.png"
    assert summary.lowest[0].name == "p5.png"
    assert "p3.png" not in [row.name for row in summary.highest + summary.lowest]
    assert summary.counts.sum() == 19  # the infinite ones are in the outermost bars
    assert "1 of the flagged have a score that is not a number" in page(summary)


def test_a_few_wild_scores_do_not_squeeze_the_others(tmp_path):
    rows = make_rows(1000, broken=0)
    for row in rows[:40]:
        row["score"] = 1e9
    summary = summarise_scores(write(tmp_path / "s.parquet", rows), threshold=1.5)
    assert summary.edges[-1] < 20
    assert (summary.counts.sum(axis=0) > 0).sum() > 8


def test_the_axis_reaches_the_threshold(tmp_path):
    path = write(tmp_path / "s.parquet", make_rows(100, broken=0))
    for threshold in (50.0, -50.0):
        edges = summarise_scores(path, threshold=threshold).edges
        assert edges[0] <= threshold <= edges[-1]


@pytest.mark.parametrize("scores", [[], [1.0], [1.0] * 50, [1e308, -1e308, 0.0], [float("nan")] * 3])
def test_any_scores_have_a_page(tmp_path, scores):
    rows = [
        {"path": str(n), "score": s, "p_value": 0.5, "is_ood": s != s, "class": "a", "nearest_class": "a"}
        for n, s in enumerate(scores)
    ]
    summary = summarise_scores(write(tmp_path / "s.parquet", [*rows, {"path": "x", "reason": "cut"}]))
    assert "Not readable" in page(summary)


def test_memory_does_not_grow_with_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(score_summary, "_SAMPLE", 500)
    monkeypatch.setattr(score_summary, "_BATCH", 100)
    sizes = []
    real = score_summary._choose_edges
    monkeypatch.setattr(
        score_summary, "_choose_edges", lambda sample, at: sizes.append(len(sample)) or real(sample, at)
    )
    summarise_scores(write(tmp_path / "s.parquet", make_rows(5000)))
    assert sizes == [500]


# -- page -------------------------------------------------------------------------------------------------------------


def test_the_page_says_how_many_were_flagged_and_how_many_would_be(tmp_path):
    summary = summarise_scores(write(tmp_path / "s.parquet", make_rows()))
    text = page(summary)
    share = percent(summary.flagged / summary.scored)
    assert f"Of in-distribution samples at most 5 % would be flagged; here {share} are." in text
    assert f"<dd>{summary.scored}<small>of 400</small>" in text
    assert "Guard: my guard" in text
    assert "interrupted" not in text
    for name, (scored, flagged) in summary.classes.items():
        line = f'<td class="left">{name}</td><td>{scored}</td><td>{flagged}</td>'
        assert line in re.sub(r">\s+<", "><", text)


def test_pictures_stand_with_their_numbers_and_a_missing_one_is_said(tmp_path):
    summary = summarise_scores(write(tmp_path / "s.parquet", make_rows()))
    asked = []

    def previews(names):
        asked.extend(names)
        return {
            name: thumbnail(Image.new("RGB", (300, 90), "red"), f"Thumbnail of {name}") for name in sorted(names)[1:]
        }

    text = page(summary, previews=previews)
    assert len(asked) == 2 * EXTREMES
    assert text.count("data:image/jpeg") == 2 * EXTREMES - 1
    assert text.count("no preview") == 1
    top = summary.highest[0]
    card = text[text.index(f'<div class="name">{top.name}') :][:200]
    assert f"score {top.score:.4g}" in card
    assert f"nearest: {top.nearest}" in card
    assert "flagged" in card


def test_a_thumbnail_is_a_small_jpeg_of_the_same_shape():
    seen = thumbnail(Image.new("RGB", (640, 320), (200, 30, 30)), "a")
    assert (seen.width, seen.height) == (160, 80)
    with Image.open(io.BytesIO(base64.b64decode(seen.source.partition(",")[2]))) as image:
        assert (image.format, image.size) == ("JPEG", (160, 80))
    tiny = thumbnail(Image.new("RGB", (5000, 1)), "a")
    assert (tiny.width, tiny.height) == (160, 1)


def test_texts_are_shown_cut_and_escaped(tmp_path):
    summary = summarise_scores(write(tmp_path / "s.parquet", make_rows(5, broken=0)))
    text = page(summary, previews=lambda names: dict.fromkeys(names, "<script>alert(1)</script>\n" + "word " * 200))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; word" in text
    assert "…" in text
    assert "word " * 100 not in text


def test_names_classes_and_reasons_cannot_write_into_the_page(tmp_path):
    evil = "<img src=x onerror=alert(1)>\x1b[2J\u202e\"'"
    rows = make_rows(40)
    for row in rows:
        row["path"] += evil
        for column in ("class", "nearest_class", "reason"):
            row[column] = evil if row.get(column) else None
    summary = summarise_scores(write(tmp_path / "s.parquet", rows))
    run = ScoringRun(evil, [evil], 0.05)
    picture = Picture("data:image/jpeg;base64,", evil, 1, 1)
    text = page(summary, run, lambda names: dict.fromkeys(names, picture))
    assert "<img src=x" not in text
    assert "\u202e" not in re.sub(r'alt="[^"]*"', "", text)
    assert "\x1b" not in re.sub(r'alt="[^"]*"', "", text)


def test_an_interrupted_run_says_so_and_many_reasons_are_counted(tmp_path):
    summary = summarise_scores(write(tmp_path / "s.parquet", make_rows(300, broken=0.5)))
    assert summary.with_reason > REASONS
    text = page(summary, ScoringRun("g", ["new"], 0.01, total=1000, interrupted=True))
    assert "This run was interrupted" in text
    assert f"The first {REASONS} of {summary.with_reason}; the others are in scores.parquet." in text
    assert text.count("cut at") == REASONS


def test_many_classes_are_cut_with_a_word_about_it(tmp_path):
    rows = make_rows(400, broken=0)
    for number, row in enumerate(rows):
        row["class"] = f"kind {number % 70}"
    text = page(summarise_scores(write(tmp_path / "s.parquet", rows)))
    assert "20 further classes with fewer flagged ones are in scores.parquet." in text


def test_the_reference_is_drawn_as_the_same_share_whatever_its_bins(tmp_path):
    summary = summarise_scores(write(tmp_path / "s.parquet", make_rows(2000, broken=0)))
    heights = []
    for bins in (20, 40):
        counts, edges = np.histogram(np.linspace(-2, 2, 4000), bins, (-2, 2))
        run = ScoringRun("g", ["new"], 0.05, reference=Histogram(edges, counts))
        (axes,) = scores_figure(summary, run).axes
        line = next(patch for patch in axes.patches if patch.get_label() == "the guard's validation data")
        heights.append(line.get_data().values.mean())
    width = summary.edges[1] - summary.edges[0]
    np.testing.assert_allclose(heights, width / 4, rtol=1e-3)  # uniform over a range of 4


def test_the_page_appears_whole(tmp_path):
    summary = summarise_scores(write(tmp_path / "s.parquet", make_rows(30)))
    path = write_scores_page(tmp_path / "report.html", summary, RUN, lambda names: {})
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
