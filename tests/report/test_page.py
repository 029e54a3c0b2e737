import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from markupsafe import escape
from PIL import Image
from report_kit import SETS, auroc_row, compared, fitted, make_run, observed, random_pictures

from rmd_plugin.compare.rows import make_rows
from rmd_plugin.guard.score import score_schema
from rmd_plugin.report.page import (
    EXTREMES,
    ScoreSummary,
    ScoringRun,
    collect_samples,
    preview,
    render_report,
    thumbnail,
    write_report,
    write_scores_page,
)
from rmd_plugin.report.run import RunFolder

EVIL = '<script>alert("x")</script>'
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Checked(HTMLParser):
    """Every element is closed in order, nothing runs or is fetched, every picture has a text."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        assert tag != "script"
        assert not any(name.startswith("on") or name in ("href", "srcset", "action") for name in found)
        if tag == "img":
            assert found["src"].startswith("data:image/")
            assert found["alt"]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(page):
    reader = Checked()
    reader.feed(page)
    assert reader.open == []
    assert 'http-equiv="Content-Security-Policy"' in page
    return page


def plain(page):
    return " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"))
    folder.write_samples(collect_samples(compared(), fitted(), random_pictures))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(run):
    return run.file("report.html").read_text(encoding="utf-8")


def test_the_page_shows_every_part_of_the_run(page):
    text = plain(checked(page))
    assert "<title>OOD detection on digits with mlp</title>" in page
    for heading in ("Detectors", "Decisions", "Over training", "Scores", "Samples", "Reproducing this run"):
        assert f"<h2>{heading}</h2>" in page
    for words in ("97.31 %", "3.21", "rmd-train benchmark=digits aaa", torch.__version__.split("+")[0], "seed: 0"):
        assert words in text
    # calibration, 2 sets over training, 2 histograms
    assert page.count('src="data:image/svg+xml') == 5


def test_the_page_says_what_to_do_next_and_the_command_names_the_run(run, page, tmp_path):
    assert f"rmd-fit run={run.path} detector=mahalanobis out=guard" in plain(page)
    assert "rmd-score guard FOLDER" in plain(page)
    assert "-m seed=0,1,2,3,4" in plain(page)
    other = plain(render_report(make_run(tmp_path / "a b", command="rmd-compare")))
    assert f"rmd-fit run='{tmp_path}/a b' detector=mahalanobis out=guard" in other
    assert "-m seed=" not in other


def test_names_cannot_break_the_page(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start(config={EVIL: EVIL}, command=EVIL, about={"benchmark": EVIL})
    failed = {**auroc_row("other", EVIL), "status": "failed", "reason": EVIL}
    rows = make_rows([auroc_row(EVIL, EVIL, 0.5), auroc_row("rmd", EVIL, 0.4), failed])
    folder.write_rows(rows.assign(benchmark=EVIL, backbone=EVIL))
    folder.write_history([observed(EVIL, EVIL, 0, 0.5)])
    folder.write_scores({EVIL: {"test": np.arange(9.0), EVIL: np.arange(9.0)}})
    folder.write_samples(collect_samples(folder.read_rows(), folder.read_scores(), lambda name, place: (EVIL, EVIL)))
    folder.finish("failed", EVIL)
    page = checked(render_report(folder))
    assert f"This run failed. {escape(EVIL)}" in page
    assert page.count(str(escape(EVIL))) > 20


def test_a_run_that_failed_or_was_interrupted_says_so_and_shows_what_was_done(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(RuntimeError), folder.running(about={"benchmark": "digits", "backbone": "mlp", "seed": 4}):
        raise RuntimeError("loss is NaN in epoch 3")
    text = plain(render_report(folder))
    for words in ("loss is NaN in epoch 3", "OOD detection on digits with mlp", "No detector was compared"):
        assert words in text
    folder.write_history([observed("rmd", "a", 0, 0.9)])
    folder.finish("interrupted")
    text = render_report(folder)
    assert "was interrupted" in text
    assert "<h2>Over training</h2>" in text
    assert "monitor=" in plain(text)  # a detector that was not watched may be the best


def test_damaged_files_are_named_and_the_rest_stands(run, tmp_path):
    copy = shutil.copytree(run.path, tmp_path / "copy")
    names = ("scores.npz", "history.csv", "versions.json", "status.json", "samples.json")
    for name in names:
        (copy / name).write_bytes(b"\x00garbage")
    page = checked(render_report(RunFolder(copy)))
    for name in names:
        assert re.search(rf'<p class="notice mild">[^<]*{re.escape(name)}', page), name
    assert "<h2>Decisions</h2>" in page


# -- samples ----------------------------------------------------------------------------------------------------------


def test_the_outermost_samples_are_kept_in_order_and_flagged_above_the_threshold():
    scores = fitted()
    found = collect_samples(compared(), scores, random_pictures)
    assert found["detector"] == "mahalanobis"
    titles = [group["title"].partition(":")[0] for group in found["groups"]]
    assert titles == ["in-distribution test set"] + 2 * ["blobs (near)"] + 2 * ["noise (far)"]
    highest = found["groups"][1]["cards"]
    assert highest[0]["name"] == f"no. {int(np.argmax(scores['mahalanobis']['blobs']))}"
    assert [card["flagged"] for card in highest] == sorted((card["flagged"] for card in highest), reverse=True)
    assert highest[0]["flagged"] == bool(scores["mahalanobis"]["blobs"].max() > 1.0)
    assert json.loads(json.dumps(found)) == found
    assert collect_samples(compared(), scores, lambda name, place: (torch.zeros(16), "")) is None


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        ("a text", "a text"),
        (Image.new("L", (300, 200)), "image/jpeg"),
        (torch.rand(1, 8, 8), "image/png"),
        (torch.randn(3, 8, 8) - 5, "None"),  # normalised: nobody says what is black
    ],
)
def test_what_has_a_look_is_shown(item, kind):
    shown = preview(item, "alt")
    assert getattr(shown, "source", str(shown)).partition(";")[0].removeprefix("data:") == kind


# -- scores -----------------------------------------------------------------------------------------------------------


def write_table(path, count=400, broken=0.1):
    draw = np.random.default_rng(0)
    records = []
    for number, score in enumerate(draw.normal(size=count).round(2)):
        record = {"path": f"p{number}.png", "reason": f"cut at {number}"}
        if draw.random() >= broken:
            record |= {"score": score, "p_value": float(draw.random()), "is_ood": bool(score > 1.5), "reason": None}
            record |= dict.fromkeys(("class", "nearest_class"), f"class {number % 3}")
        records.append(record)
    pq.write_table(pa.Table.from_pylist(records, schema=score_schema("path")), path, row_group_size=33)
    return pd.DataFrame(records)


def scores_page(path, summary, previews=(), **options):
    run = ScoringRun("my guard", ["new"], 0.05, threshold=1.5, **options)
    return checked(
        write_scores_page(path / "report.html", summary, run, lambda names: dict(previews)).read_text(encoding="utf-8")
    )


def test_the_summary_of_scores_is_that_of_pandas(tmp_path):
    frame = write_table(tmp_path / "s.parquet")
    summary = ScoreSummary(tmp_path / "s.parquet")
    scored, broken = frame[frame["score"].notna()], frame[frame["reason"].notna()]
    flagged = int((scored["score"] > 1.5).sum())
    assert (len(summary.numbers), summary.scored, summary.flagged, summary.nan) == (400, len(scored), flagged, 0)
    assert summary.broken == len(broken)
    ordered = scored.sort_values("score", kind="stable")["path"].tolist()
    assert summary.lowest["name"].tolist() == ordered[:EXTREMES]
    assert summary.highest["score"].tolist() == sorted(scored["score"], reverse=True)[:EXTREMES]
    for name, part in scored.groupby("class"):
        line = summary.classes.loc[name]
        assert (line["Scored"], line["Flagged"]) == (len(part), (part["score"] > 1.5).sum())
    assert summary.reasons.to_numpy().tolist() == broken[["path", "reason"]].to_numpy().tolist()
    samples = {ordered[0]: EVIL * 30, summary.highest["name"][0]: thumbnail(Image.new("RGB", (400, 300)), EVIL)}
    page = scores_page(tmp_path, summary, samples, validation={"edges": [-3.0, 0.0, 3.0], "counts": [5, 5]})
    assert 'src="data:image/jpeg;base64,' in page
    text = plain(page)
    for words in (f"{len(scored)} of 400", "class 0", "cut at", "Most unknown", ordered[-1]):
        assert words in text


@pytest.mark.parametrize("scores", [[], [1.0] * 50, [1e308, -1e308, 0.0], [float("nan"), float("inf"), 0.0]])
def test_any_scores_have_a_page(tmp_path, scores):
    records = [
        {"path": str(n), "score": s, "p_value": 0.5, "is_ood": s != s, "class": "a", "nearest_class": "a"}
        for n, s in enumerate(scores)
    ]
    table = pa.Table.from_pylist([*records, {"path": "x", "reason": "cut"}], schema=score_schema("path"))
    pq.write_table(table, tmp_path / "s.parquet")
    summary = ScoreSummary(tmp_path / "s.parquet")
    assert (summary.scored, summary.broken) == (len(scores), 1)
    text = plain(scores_page(tmp_path, summary, interrupted=True))
    assert ("score that is not a number" in text) == any(score != score for score in scores)


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_fits_every_screen_in_a_real_browser(run, tmp_path):
    widths = (1280, 390, 320)
    address = run.file("report.html").as_uri()
    frames = "".join(f'<iframe src="{address}" width="{width}" height="900"></iframe>' for width in widths)
    script = """
    onload = () => { document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
      const page = frame.contentDocument, images = [...page.images];
      const heads = [...page.querySelectorAll("th")].filter(head => /^(blobs|noise|False alarms)/.test(head.innerText));
      return {inner: page.documentElement.clientWidth, content: page.documentElement.scrollWidth,
        images: images.length, drawn: images.filter(image => image.complete && image.naturalWidth > 0).length,
        widest: Math.max(...images.map(image => image.getBoundingClientRect().right)),
        heads: Math.max(...heads.map(head => head.getBoundingClientRect().right))}; })); };
    """
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<!DOCTYPE html><title>none</title><style>iframe{{border:0}}</style><script>{script}</script>{frames}"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
    flags += ["--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--allow-file-access-from-files", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, outer.as_uri()], capture_output=True, text=True, timeout=120)
    frames = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1]))
    for width, frame in zip(widths, frames, strict=True):
        assert frame["inner"] == width
        assert frame["content"] <= width, f"the page is {frame['content']} wide on a screen of {width}"
        assert frame["widest"] <= width
        assert frame["drawn"] == frame["images"] >= 5
        if width >= 390:
            assert frame["heads"] <= width  # what is found and the false alarms need no scrolling
    assert len(SETS) == 2
