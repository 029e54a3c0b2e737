import json

import numpy as np
import pytest
import torch
from PIL import Image

from rmd_plugin.compare.rows import Row
from rmd_plugin.report.cards import preview
from rmd_plugin.report.page import render_report
from rmd_plugin.report.run_folder import RunFolder, RunFolderError
from rmd_plugin.report.samples import collect_samples, parse_samples, sample_cards

RNG = np.random.default_rng(0)
SCORES = {"rmd": {"test": RNG.standard_normal(30), "cats": RNG.standard_normal(20) + 2}}
ROWS = [
    Row("b", "cats", "net", "rmd", 0, "AUROC", 0.9, distance="near"),
    Row("b", "", "net", "rmd", 0, "false_alarms@0.05", 0.1),
    Row("b", "", "net", "rmd", 0, "threshold@0.05", 1.5),
]


def picture_of(name, position):
    return np.full((8, 8), position, dtype=np.uint8), "even" if name == "test" and position % 2 == 0 else ""


def test_the_outermost_samples_of_each_end_are_kept_in_order():
    found = collect_samples(ROWS, SCORES, picture_of)
    assert [(group.ood, group.end) for group in found.groups] == [
        ("test", "highest"), ("cats", "highest"), ("cats", "lowest"),
    ]  # fmt: skip
    for group in found.groups:
        values = SCORES["rmd"][group.ood]
        expected = sorted(values, reverse=group.end == "highest")[:8]
        assert [sample.score for sample in group.samples] == expected
        assert all(values[sample.position] == sample.score for sample in group.samples)
    cards = sample_cards(found, ROWS)
    assert [card.flagged for card in cards[0][1]] == [s.score > 1.5 for s in found.groups[0].samples]


def test_data_without_a_look_keep_nothing():
    assert collect_samples(ROWS, SCORES, lambda name, position: (torch.zeros(16), "")) is None
    assert collect_samples([], {}, picture_of) is None


def test_samples_survive_the_file_and_the_page_shows_pictures_and_texts(tmp_path):
    for name, raw in (("pictures", picture_of), ("texts", lambda _, position: (f"<b>query {position}</b>", ""))):
        folder = RunFolder(tmp_path / name)
        folder.write_rows(ROWS)
        samples = collect_samples(ROWS, SCORES, raw)
        folder.write_samples(samples)
        assert folder.read_samples().to_plain() == samples.to_plain()
        page = render_report(folder)
        assert "<h2>Samples</h2>" in page
        first = samples.groups[0].samples[0]
        assert (first.picture.source if first.picture else f"&lt;b&gt;query {first.position}&lt;/b&gt;") in page
    assert RunFolder(tmp_path / "none").read_samples() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.pop("groups"), "groups"),
        (lambda plain: plain["groups"][0].update(end="middle"), "middle"),
        (lambda plain: plain["groups"][0]["samples"][0]["picture"].update(source="https://x.org/a.png"), "PNG or JPEG"),
        (lambda plain: plain["groups"][0]["samples"][0].update(score="x"), "could not convert"),
    ],
)
def test_what_somebody_else_wrote_is_checked(tmp_path, change, message):
    plain = json.loads(json.dumps(collect_samples(ROWS, SCORES, picture_of).to_plain()))
    parse_samples(plain)
    change(plain)
    folder = RunFolder(tmp_path)
    folder.file("samples.json").write_text(json.dumps(plain))
    with pytest.raises(RunFolderError, match=message):
        folder.read_samples()
    folder.write_rows(ROWS)
    assert "samples.json" in render_report(folder)  # named on the page, which stands


def test_items_are_shown_as_what_they_are():
    grey = torch.linspace(0, 1, 12).reshape(1, 3, 4)
    assert (preview(grey, "a").width, preview(grey, "a").height) == (4, 3)
    assert preview(np.zeros((5, 6, 3), np.uint8), "a").source.startswith("data:image/png")
    assert preview(Image.new("RGB", (640, 320)), "a").source.startswith("data:image/jpeg")
    assert preview("a text", "a") == "a text"
    for item in (grey - 1, torch.zeros(7), np.zeros((2, 3, 4, 5)), np.zeros((4, 4, 2)), 3, {"a": 1}, torch.zeros(0, 3)):
        assert preview(item, "a") is None
