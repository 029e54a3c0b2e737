import functools
import html
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import make_blobs
from markupsafe import escape
from pytorch_ood.metrics import functional as metrics

from rmd_plugin import RMD, Mahalanobis
from rmd_plugin.compare.rows import Row
from rmd_plugin.report.page import render_report, write_report
from rmd_plugin.report.run_figures import contributions_figure, epochs_figure, partial_sums_figure
from rmd_plugin.report.run_folder import RunFolder
from rmd_plugin.report.scores import read_directions, summarise_directions, write_directions
from rmd_plugin.report.style import colour

SETS = {"blobs": "near", "noise": "far"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@functools.cache
def fitted():
    """Contributions and scores of real detectors, and the AUROC of the framework."""
    z, y, mixed = make_blobs()
    sets = {"test": mixed[:40], "blobs": mixed[40:], "noise": 3 * mixed[40:] + 5, "val": mixed[:40] + 0.01}
    detectors = {"rmd": RMD().fit_features(z, y), "mahalanobis": Mahalanobis().fit_features(z, y)}
    scores = {n: {s: d.predict_features(x).numpy() for s, x in sets.items()} for n, d in detectors.items()}
    sets.pop("val")
    terms = {n: {s: d.contributions(x).numpy() for s, x in sets.items()} for n, d in detectors.items()}
    return scores, terms


def auroc(known, found):
    labels = torch.cat([torch.zeros(len(known)), -torch.ones(len(found))])
    return float(metrics.auroc(torch.from_numpy(np.concatenate([known, found])), labels))


def seen(detector, ood, epoch, value):
    where = {"stage": "fit", "epoch": epoch, "step": 10 * epoch}
    return {**where, "detector": detector, "ood": ood, "metric": "AUROC", "value": value}


def make_run(path, name="digits"):
    scores, terms = fitted()
    folder = RunFolder(path)
    about = {"benchmark": name, "backbone": "mlp", "seed": 0}
    config = {"seed": 0, "benchmark": {"name": name}, "long": "x" * 400}
    with folder.running(config=config, about=about, command="rmd-train benchmark=digits " + "a" * 300):
        rows = [Row(name, "", "mlp", "", 0, "ACC", 0.9731)]
        history = []
        for detector, mine in scores.items():
            for ood, distance in SETS.items():
                value = auroc(mine["test"], mine[ood])
                rows.append(Row(name, ood, "mlp", detector, 0, "AUROC", value, distance=distance, low=0.5, high=1.0))
                rows.append(Row(name, ood, "mlp", detector, 0, "detected@0.05", 0.5, distance=distance))
                history += [seen(detector, ood, epoch, value - 0.1 / (epoch + 1)) for epoch in range(3)]
            rows.append(Row(name, "", "mlp", detector, 0, "false_alarms@0.05", 0.0321, low=0.01, high=0.06))
            rows.append(Row(name, "", "mlp", detector, 0, "threshold@0.05", 1.0))
        folder.write_rows(rows)
        folder.write_history(history)
        folder.write_scores(scores)
        folder.write_directions(terms)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("run"))
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(run):
    return run.file("report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_shows_every_part_of_the_run(page):
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S))
    assert "digits, mlp" in text
    assert "97.31 %" in text
    for heading in (
        "Detectors",
        "Decisions",
        "Over training",
        "Scores",
        "Where the difference lies",
        "How it was made",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert "rmd-train benchmark=digits aaa" in text
    assert torch.__version__.split("+")[0] in text
    assert re.search(r"<details><summary>The whole config</summary><pre>.*seed: 0", page, re.S)
    assert "3.21" in text
    # calibration, 2 sets over training, 2 histograms, 2 contributions, 2 partial sums
    assert page.count("<img ") == 9
    assert page.count('alt="') == 9


def what_next(path, command, *, detector="rmd", benchmark="image_folder", backbone="small_cnn"):
    folder, about = RunFolder(path), {"benchmark": benchmark, "backbone": backbone}
    with folder.running(config=None, about=about, command=command):
        folder.write_rows([Row(benchmark, "other", backbone, detector, 3, "AUROC", 0.9, distance="near")])
    return html.unescape(render_report(folder))


def test_what_to_do_next_repeats_the_run(tmp_path):
    command = "rmd-train benchmark=image_folder benchmark.path='my photos' backbone.widths=[8] seed=3 hydra.run.dir=out"
    told = what_next(tmp_path, command)
    assert (
        "rmd-fit benchmark=image_folder backbone=small_cnn 'benchmark.path=my photos' 'backbone.widths=[8]' seed=3 "
        "detector=rmd out=guard"
    ) in told  # the splits are drawn by the seed: with another one the network has seen the calibration data
    assert (
        "rmd-train -m benchmark=image_folder 'benchmark.path=my photos' 'backbone.widths=[8]' seed=0,1,2,3,4 "
        "&& rmd-report multirun/train"
    ) in told


def test_the_guard_has_the_weights_the_options_and_the_own_parts_of_the_run(tmp_path):
    words = "checkpoint=s0/best.ckpt detector.rmd.shrinkage=oas detector.msp.t=2 +backbone.transform._target_=a.B"
    told = what_next(tmp_path / "a", f"rmd-compare --config-dir mine {words}", detector="mine")
    assert (
        "rmd-fit --config-dir mine benchmark=image_folder backbone=small_cnn +backbone.transform._target_=a.B "
        "checkpoint=s0/best.ckpt detector=mine out=guard"
    ) in told
    told = what_next(tmp_path / "b", f"rmd-compare {words}")
    assert (
        "detector.rmd.shrinkage=oas +backbone.transform._target_=a.B checkpoint=s0/best.ckpt detector=rmd out=guard"
        in told
    )
    assert (
        "-m" not in told.partition("What next")[2].partition("How it was made")[0].split()
    )  # seeds may change nothing
    for kind in ("best", "last"):
        (tmp_path / "c" / "checkpoints").mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / "checkpoints" / f"{kind}.ckpt").touch()
    assert "checkpoints/last.ckpt detector=rmd" in what_next(tmp_path / "c", "rmd-train weights=last")
    assert "rmd-fit" not in what_next(tmp_path / "d", "rmd-train experiment=table1/cifar100")


@pytest.mark.slow
def test_the_best_detector_of_each_column_is_bold(page):
    scores, _ = fitted()
    for ood in SETS:
        values = {name: 100 * auroc(mine["test"], mine[ood]) for name, mine in scores.items()}
        assert f"<strong>{max(values.values()):.2f}</strong>" in page


def test_the_page_needs_nothing_from_anywhere(page):
    sources = re.findall(r'\b(?:src|href|srcset|data|action)\s*=\s*"([^"]{0,40})', page)
    assert sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not re.search(r"<script|<link|<iframe|@import|url\(|javascript:|\son\w+=", page)


def test_the_same_history_gives_the_same_page(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_history([seen(name, "a", epoch, 0.9) for name in ("rmd", "knn") for epoch in range(2)])
    assert render_report(folder) == render_report(folder)


def test_names_cannot_break_the_page(tmp_path):
    evil = '<script>alert("x")</script>'
    rows = [Row(evil, evil, evil, name, 0, "AUROC", 0.5, distance="near") for name in (evil, "rmd")]
    rows += [Row(evil, evil, evil, "other", 0, "AUROC", math.nan, status="failed", reason=evil)]
    folder = RunFolder(tmp_path)
    folder.start(config=evil, command=evil)
    folder.write_rows(rows)
    folder.write_history([seen(evil, evil, 0, 0.5)])
    np.savez(folder.file("scores.npz"), **{evil: np.zeros(1)})  # named in the notice that there are no scores
    folder.finish("failed", evil)
    page = render_report(folder)
    assert "<script" not in page
    assert f"This run failed. {escape(evil)}" in page
    assert f"<code>{escape(evil)}</code>" in page
    assert page.count(str(escape(evil))) > 10


def test_a_failed_run_says_why(tmp_path):
    folder = RunFolder(tmp_path)
    about = {"benchmark": "digits", "backbone": "mlp", "seed": 4}
    with pytest.raises(RuntimeError), folder.running(about=about):
        raise RuntimeError("loss is NaN in epoch 3")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "loss is NaN in epoch 3" in page
    assert "digits, mlp" in page
    assert "No detector was compared" in page


def test_an_interrupted_run_shows_what_was_done(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start(about={"benchmark": "digits"})
    folder.write_history([seen("rmd", "a", 0, 0.9)])
    folder.finish("interrupted")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "was interrupted" in page
    assert "<h2>Over training</h2>" in page


def test_damaged_files_are_named_and_the_rest_stands(run, tmp_path):
    copy = shutil.copytree(run.path, tmp_path / "copy")
    (copy / "scores.npz").write_bytes(b"\x00garbage")
    (copy / "directions.npz").unlink()
    page = write_report(copy).read_text(encoding="utf-8")
    assert re.search(r'<p class="notice mild">[^<]*scores\.npz does not hold scores', page)
    assert page.count("<img ") == 2
    names = ("rows.csv", "history.csv", "directions.npz", "versions.json", "status.json")
    for name in names:
        (copy / name).write_bytes(b"\x00garbage")
    page = write_report(copy).read_text(encoding="utf-8")
    for name in names:
        assert re.search(rf'<p class="notice mild">[^<]*{re.escape(name)}', page), name
    assert "The whole config" in page


def test_a_part_that_cannot_be_drawn_does_not_take_the_page(run, tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_rows(run.read_rows())
    folder.write_scores({"rmd": {"wrong": np.zeros(3)}})
    page = render_report(folder)
    assert "could not be drawn" in page
    assert "<h2>Detectors</h2>" in page


def test_a_report_needs_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        write_report(tmp_path / "nowhere")


def test_the_directions_add_up_to_the_score_and_to_its_auroc(tmp_path):
    scores, terms = fitted()
    write_directions(terms, tmp_path / "directions.npz")
    for detector, sets in read_directions(tmp_path / "directions.npz").items():
        known = scores[detector]["test"]
        for name, profile in sets.items():
            found = scores[detector][name]
            assert profile.mean.sum() == pytest.approx(found.mean(), rel=1e-5)
            assert (profile.low <= profile.high).all()
            if name == "test":
                assert np.isnan(profile.auroc).all()
            else:
                assert profile.auroc[-1] == pytest.approx(auroc(known, found), abs=1e-6)
    assert len(read_directions(tmp_path / "directions.npz")["rmd"]["test"].mean) == 4  # K - 1


def test_ties_count_half():
    profiles = summarise_directions({"test": np.zeros((4, 1)), "same": np.zeros((3, 1)), "half": [[-1.0], [1.0]]})
    assert (profiles["same"].auroc[0], profiles["half"].auroc[0]) == (0.5, 0.5)


@pytest.mark.parametrize(
    "terms",
    [
        {"ood": np.zeros((2, 3))},
        {"test": np.zeros((2, 3)), "ood": np.zeros((2, 4))},
        {"test": np.zeros(3)},
        {"test": np.zeros((0, 3))},
    ],
)
def test_contributions_of_the_wrong_shape_are_refused(terms):
    with pytest.raises(ValueError, match="contributions must"):
        summarise_directions(terms)


def test_curves_stand_at_their_values_and_are_named():
    values = {"rmd": [0.8, math.nan, 0.9], "knn": [0.7, 0.75, 0.72]}
    history = [seen(name, "a", epoch, value) for name, found in values.items() for epoch, value in enumerate(found)]
    axes = epochs_figure(history, ["a"], detectors=["rmd", "msp", "knn"]).axes[0]
    lines = {line.get_color(): line for line in axes.lines}
    assert np.allclose(lines[colour("rmd")].get_ydata(), [80, math.nan, 90], equal_nan=True)
    assert list(lines[colour("knn")].get_xdata()) == [1, 2, 3]
    assert [text.get_text() for text in axes.texts] == ["KNN", "RMD"]
    within = [{**row, "epoch": 0} for row in history]
    assert epochs_figure(within, ["a"]).axes[0].get_xlabel() == "step"


def test_without_a_choice_every_ood_set_has_a_panel_and_their_mean_the_first():
    history = [seen("rmd", ood, epoch, 0.9) for ood in ("a", "b", "mean") for epoch in range(2)]
    assert [axes.get_title(loc="left") for axes in epochs_figure(history).axes] == ["mean over the OOD sets", "a", "b"]
    one = [row for row in history if row["ood"] != "b"]
    assert [axes.get_title(loc="left") for axes in epochs_figure(one).axes] == ["a"]  # its mean is the same curve


def test_near_sets_are_not_flattened_by_far_ones():
    _, terms = fitted()
    profiles = summarise_directions(terms["mahalanobis"])
    names = {text.get_text() for text in contributions_figure(profiles, SETS).axes[0].texts}
    assert names == {"in-distribution", "blobs"}
    names = {text.get_text() for text in contributions_figure(profiles, {"noise": "far"}).axes[0].texts}
    assert names == {"in-distribution", "blobs", "noise"}
    both = {name: summarise_directions(found) for name, found in terms.items()}
    axes = partial_sums_figure(both, "blobs").axes[0]
    assert {text.get_text() for text in axes.texts} == {"RMD", "MD"}


# -- in a browser -----------------------------------------------------------------------------------------------------


def browse(tmp_path, *options):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
    flags += ["--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([BROWSER, *flags, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_fits_every_screen_in_a_real_browser(run, tmp_path):
    widths = (1280, 768, 390, 320)
    frames = "".join(
        f'<iframe src="{run.file("report.html").as_uri()}" width="{w}" height="900"></iframe>' for w in widths
    )
    script = """
    onload = () => { document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
      const page = frame.contentDocument, images = [...page.images];
      return {inner: page.documentElement.clientWidth, content: page.documentElement.scrollWidth,
        images: images.length, drawn: images.filter(image => image.complete && image.naturalWidth > 0).length,
        widest: Math.max(...images.map(image => image.getBoundingClientRect().right))}; })); };
    """
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<!DOCTYPE html><title>none</title><style>iframe{{border:0}}</style><script>{script}</script>{frames}"
    )
    dom = browse(tmp_path, "--allow-file-access-from-files", "--dump-dom", outer.as_uri())
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom)[1]))
    for width, frame in zip(widths, found, strict=True):
        assert frame["inner"] == width
        assert frame["content"] <= width, f"the page is {frame['content']} wide on a screen of {width}"
        assert frame["widest"] <= width
        assert frame["drawn"] == frame["images"] == 9


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_picture_of_the_page_is_not_blank(run, tmp_path):
    from PIL import Image

    shot = tmp_path / "page.png"
    browse(tmp_path, f"--screenshot={shot}", "--window-size=1280,3000", run.file("report.html").as_uri())
    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape[1] == 1280
    inked = (pixels.min(axis=2) < 200).mean()
    assert 0.005 < inked < 0.5
    # the lines of RMD and MD are really there
    for detector in ("rmd", "mahalanobis"):
        wanted = [int(colour(detector)[place : place + 2], 16) for place in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(axis=2) < 12).sum() > 200
    # each of five bands of the page has something in it
    assert all((band.min(axis=2) < 200).any() for band in np.array_split(pixels[:2400], 5))
