"""Pictures, names and tables that a stranger made, through ``rmd-score``: each has a defined result, none does harm."""

import csv
import os
import struct
import sys
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import score_kit
from PIL import Image
from score_kit import colour_picture, write_guard

from rmd_plugin.app.score import _reference, main
from rmd_plugin.untrusted import from_csv_cell

EVIL = "=HYPERLINK(1)<script>alert(1)</script>\x1b[2J\u202e.png".replace("/", "_")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "rmd_plugin.guard.guard", score_kit.fake_module())


def bomb(path):
    """A PNG of 40,000 x 40,000 pixels in a few bytes."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"0" * 1000)) + chunk(b"IEND", b""))


def test_pictures_of_a_stranger(tmp_path, capsys):
    new = tmp_path / "new"
    colour_picture(new / EVIL, (255, 255, 255))
    colour_picture(new / "two\nlines.png", (255, 0, 0))
    bomb(new / "bomb.png")
    whole = colour_picture(tmp_path / "whole.jpg", (255, 0, 0), (64, 64)).read_bytes()
    (new / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (new / "empty.png").touch()
    (new / "text.png").write_text("<svg onload=alert(1)>")
    os.mkfifo(new / "pipe.png")
    (new / "zero.png").symlink_to("/dev/zero")
    (new / "huge.png").touch()
    os.truncate(new / "huge.png", 1 << 40)
    Image.new("I;16", (4, 4), 65535).save(new / "grey16.png")
    guard = write_guard(tmp_path / "guard", kind="images")
    assert main([guard, "new", "out=out"]) == 0
    output, notes = capsys.readouterr()
    found = {row["path"]: row for row in pq.read_table("out/scores.parquet").to_pylist()}
    reasons = {name.removeprefix("new/"): row["reason"] for name, row in found.items()}
    scored = sorted(name for name, reason in reasons.items() if reason is None)
    assert scored == sorted([EVIL, "two\nlines.png", "grey16.png"])
    assert "(1600000000 pixels) exceeds limit" in reasons["bomb.png"]
    assert "RMD_MAX_GIB" in reasons["huge.png"]
    for name in ("cut.jpg", "empty.png", "text.png"):
        assert reasons[name].startswith("is not a readable picture"), name
    assert reasons["pipe.png"] == "is not a regular file, and is not opened"
    assert "zero.png" not in reasons
    assert "1 links lead out of the folder and are not followed: zero.png" in notes
    assert "\x1b" not in output + notes
    assert "\u202e" not in output + notes
    text = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<svg" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    with open("out/scores.csv", newline="", encoding="utf-8") as file:
        cells = [row["path"] for row in csv.DictReader(file)]
    assert len(cells) == len(found)
    assert not any("\n" in cell or "\x1b" in cell for cell in cells)


def test_formulas_stay_texts_in_the_csv(tmp_path):
    guard = write_guard(tmp_path / "guard", kind="texts")
    ids = ["=1+1", "+cmd", "-2", "@sum", "'=x", "plain"]
    with open("a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([name, "red"] for name in ids)])
    assert main([guard, "a.csv", "id=id", "out=out"]) == 0
    assert pq.read_table("out/scores.parquet")["id"].to_pylist() == ids
    with open("out/scores.csv", newline="") as file:
        cells = [row["id"] for row in csv.DictReader(file)]
    assert not any(cell[0] in "=+-@" for cell in cells)
    assert [from_csv_cell(cell) for cell in cells] == ids


def test_class_names_of_a_guard_are_texts_too(tmp_path, monkeypatch):
    monkeypatch.setattr(score_kit.FakeGuard, "class_names", ["<script>x</script>", "=2+2", "\x1b[2J"])
    np.save("a.npy", np.eye(3, dtype=np.float32))
    assert main([write_guard(tmp_path / "guard", kind="features"), "a.npy", "out=out"]) == 0
    assert "<script" not in (tmp_path / "out/report.html").read_text()
    with open("out/scores.csv", newline="") as file:
        assert [row["class"] for row in csv.DictReader(file)] == ["<script>x</script>", "'=2+2", "\\x1b[2J"]


def test_a_histogram_of_a_guard_that_is_none_is_left_out():
    right = {"edges": [0, 1, 3], "counts": [4, 0]}
    assert _reference({"validation_scores": right}).counts.tolist() == [4, 0]
    wrong = [
        7, "text", [], {"edges": [0, 1]}, {"edges": [0, 1], "counts": [1, 2]}, {"edges": [1, 0], "counts": [1]},
        {"edges": [0, "x"], "counts": [1]}, {"edges": [0, float("nan")], "counts": [1]},
        {"edges": [0, 1], "counts": [0]}, {"edges": [[0, 1]], "counts": [1]}, {"edges": 3, "counts": 4},
        {"edges": [0, 1, 2], "counts": [3, -2]},
    ]  # fmt: skip
    assert [_reference({"validation_scores": about}) for about in wrong] == [None] * len(wrong)
    assert _reference({}) is None


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", bytes(range(256))])
@pytest.mark.parametrize("ending", ["parquet", "npy"])
def test_a_table_that_is_garbage_is_one_sentence(tmp_path, capsys, ending, content):
    (tmp_path / f"a.{ending}").write_bytes(content)
    assert main([write_guard(tmp_path / "guard", kind="features"), f"a.{ending}", "out=out"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"rmd-score: a.{ending}")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_special_files_in_the_place_of_a_table_are_not_opened(tmp_path, capsys):
    for kind, name in (("texts", "a.csv"), ("texts", "a.jsonl"), ("features", "a.parquet"), ("images", "a.txt")):
        if not os.path.lexists(name):
            os.mkfifo(name)
        assert main([write_guard(tmp_path / kind, kind=kind), name, "out=out"]) == 1
        assert "is not a regular file, and is not opened" in capsys.readouterr().err


def test_a_list_that_leaves_its_folder_ends_before_anything_is_scored(tmp_path, capsys):
    colour_picture(tmp_path / "lists" / "a.png", (255, 0, 0))
    (tmp_path / "lists" / "list.txt").write_text("a.png\n" * 3 + "../../etc/passwd.png\n")
    assert main([write_guard(tmp_path / "guard", kind="images"), "lists/list.txt", "out=out"]) == 1
    assert "lists/list.txt: line 4: '../../etc/passwd.png' is refused" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_page_that_is_damaged_in_a_table_spoils_the_rest_of_its_file_alone(tmp_path):
    (tmp_path / "t").mkdir()
    rows = pa.table({"embedding": np.random.default_rng(0).normal(size=(3000, 3)).tolist()})
    for name in "ab":
        pq.write_table(rows, tmp_path / "t" / f"{name}.parquet", row_group_size=1000, compression="snappy")
    file = tmp_path / "t" / "a.parquet"
    chunk = pq.read_metadata(file).row_group(1).column(0)
    with open(file, "r+b") as stream:
        stream.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        stream.write(b"\xff" * 50)  # the header of a page
    assert main([write_guard(tmp_path / "guard", kind="features"), "t", "out=out"]) == 0
    found = pq.read_table("out/scores.parquet").to_pylist()
    bad = [row for row in found if row["reason"]]
    assert [row["id"] for row in bad] == ["t/a.parquet"]
    assert "cannot be read as Parquet" in bad[0]["reason"]
    assert sum(row["id"].startswith("t/a.parquet:") for row in found) < 3000
    assert sum(row["id"].startswith("t/b.parquet") for row in found) == 3000
