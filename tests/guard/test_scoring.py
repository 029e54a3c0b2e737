"""Scores of many items: rows that are right, complete and in order, whatever breaks, stops or comes back."""

import csv
import gc
import json
import os
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from score_kit import CALIBRATION, CLASSES, THRESHOLD, FakeGuard, colour_picture, photos

from rmd_plugin.guard import score_folder
from rmd_plugin.guard.inputs import Inputs, Item
from rmd_plugin.guard.score_folder import ScoreFolder
from rmd_plugin.guard.scoring import NOT_A_NUMBER, score_items
from rmd_plugin.report.score_summary import score_schema


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rows(tmp_path):
    """300 vectors, in a file; parts of a few rows."""
    found = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    np.save("rows.npy", found)
    return found


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(score_folder, "_PART_ROWS", 20)


def score(guard=None, places=("rows.npy",), out="out", **options):
    guard = guard or FakeGuard()
    return score_items(guard, Inputs(places, guard.kind), out, batch_size=options.pop("batch_size", 16), **options)


def table(out="out"):
    return pq.read_table(f"{out}/scores.parquet")


class Stopping(FakeGuard):
    """Stops at a batch, as a kill (a fault of the program) or as Ctrl-C."""

    def __init__(self, at, error, **about):
        super().__init__(**about)
        self.at, self.error = at, error

    def judge(self, batch):
        if len(self.sizes) == self.at:
            raise self.error
        return super().judge(batch)


def test_the_rows_are_those_of_numpy(rows):
    progress = score()
    assert (progress.total, progress.before, progress.scored, progress.interrupted) == (300, 0, 300, False)
    found = table().to_pydict()
    distances = np.linalg.norm(rows[:, None].astype(np.float64) - np.eye(3), axis=2)
    expected = distances.min(axis=1)
    np.testing.assert_allclose(found["score"], expected, atol=1e-6)
    p_values = (1 + (CALIBRATION.numpy()[None] >= expected[:, None]).sum(axis=1)) / 100
    np.testing.assert_allclose(found["p_value"], p_values)
    assert found["is_ood"] == (expected > THRESHOLD).tolist()
    assert found["nearest_class"] == found["class"] == [CLASSES[k] for k in distances.argmin(axis=1)]
    assert found["id"] == [f"rows.npy:{row}" for row in range(300)]
    assert found["reason"] == [None] * 300


def test_another_alpha_decides_by_the_p_values(rows):
    score(out="usual")
    score(out="stricter", alpha=0.01)
    usual, stricter = table("usual").to_pydict(), table("stricter").to_pydict()
    assert stricter["is_ood"] == [p_value <= 0.01 for p_value in usual["p_value"]]
    assert usual["is_ood"] == [p_value <= 0.05 for p_value in usual["p_value"]]
    assert stricter["score"] == usual["score"]


def test_nothing_is_left_but_the_results(rows, small_parts):
    score()
    assert sorted(os.listdir("out")) == [".lock", "score.json", "scores.csv", "scores.parquet"]


def test_the_csv_holds_what_the_table_holds(rows):
    score()
    with open("out/scores.csv", newline="") as file:
        read = list(csv.DictReader(file))
    found = table().to_pydict()
    assert [float(row["score"]) for row in read] == found["score"]
    assert [row["is_ood"] == "True" for row in read] == found["is_ood"]
    assert [row["id"] for row in read] == found["id"]
    assert {row["reason"] for row in read} == {""}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_is_a_row_with_its_reason_and_the_others_stand(tmp_path, workers):
    photos(tmp_path / "new")
    (tmp_path / "new" / "gone.png").symlink_to("nowhere.png")
    (tmp_path / "new" / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "new" / "pipe.png")
    said = []
    score(FakeGuard("images"), ["new"], batch_size=3, num_workers=workers, say=said.append)
    found = {row["path"]: row for row in table().to_pylist()}
    assert list(found) == sorted(found)
    reasons = {name: row["reason"] for name, row in found.items() if row["reason"]}
    assert reasons.pop("new/cut.jpg").startswith("is not a readable picture: ")
    assert reasons == {
        "new/gone.png": "No such file or directory",
        "new/loop.png": "Too many levels of symbolic links",
        "new/pipe.png": "is not a regular file, and is not opened",
    }
    assert found["new/cut.jpg"]["score"] is found["new/cut.jpg"]["is_ood"] is None
    assert found["new/white.png"]["is_ood"]
    assert found["new/red/1.png"]["class"] == "red"
    assert not found["new/red/1.png"]["is_ood"]
    assert said == ["new: 1 files are no pictures by their ending: notes.txt"]


def test_vectors_of_another_width_are_rows_with_their_reason(tmp_path):
    pq.write_table(pa.table({"embedding": [[1.0, 0.0, 0.0], [1.0], None, [0.0, 0.0, 1.0]]}), "a.parquet")
    score(places=["a.parquet"])
    assert table()["reason"].to_pylist() == [
        None, "a vector of 3 numbers is expected, got 1.", "holds null in place of numbers", None,
    ]  # fmt: skip
    assert table()["class"].to_pylist() == ["red", None, None, "blue"]


def test_what_the_guard_refuses_as_a_batch_has_its_reason(rows):
    score(Stopping(1, ValueError("features must have 4 columns.")), batch_size=100)
    reasons = table()["reason"].to_pylist()
    # refused by the guard once it had judged one batch, and from then on
    assert reasons == [None] * 100 + ["features must have 4 columns."] * 200


def test_prepared_items_of_several_shapes_are_judged_apart(rows):
    class Shapes(FakeGuard):
        def prepare(self, item):
            vector = super().prepare(item)
            return vector.repeat(2) if item[0] > 0 else vector

        def judge(self, batch):
            return super().judge(batch[:, :3])

    score(out="plain")
    score(Shapes(), out="mixed")
    np.testing.assert_allclose(table("mixed")["score"].to_pylist(), table("plain")["score"].to_pylist())


def test_a_score_that_is_not_a_number_is_flagged_and_said(tmp_path):
    np.save("rows.npy", np.array([[1, 0, 0], [np.nan, 0, 0], [np.inf, 0, 0]], dtype=np.float32))
    for alpha in (None, 1e-9):
        score(out=f"out{alpha}", alpha=alpha)
        found = table(f"out{alpha}").to_pylist()
        assert np.isnan(found[1]["score"])
        assert found[1]["is_ood"]
        assert found[1]["reason"] == NOT_A_NUMBER
        assert found[0]["reason"] is found[2]["reason"] is None


def test_a_class_without_a_name_has_its_number(rows):
    guard = FakeGuard()
    guard.class_names = ["only \x1b[2J red"]
    score(guard)
    assert set(table()["class"].to_pylist()) == {"only \\x1b[2J red", "1", "2"}


# -- stop and go on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 1, 2, 7, 18])
@pytest.mark.parametrize("stop", [RuntimeError("killed"), KeyboardInterrupt()], ids=["killed", "ctrl-c"])
def test_a_stopped_run_goes_on_and_ends_with_the_same_rows(rows, small_parts, batch, stop):
    score(out="whole")
    guard = Stopping(batch, stop)
    if isinstance(stop, KeyboardInterrupt):
        assert score(guard).interrupted
        # all that was judged is there
        assert table()["id"].to_pylist() == [f"rows.npy:{row}" for row in range(16 * batch)]
    else:
        with pytest.raises(RuntimeError, match="killed"):
            score(guard)
        assert not os.path.exists("out/scores.parquet")
    said = []
    progress = score(resume=True, say=said.append)
    assert progress.before % 16 == 0
    assert progress.before + progress.scored == 300
    assert said == [f"{progress.before} of 300 were scored before."]
    if batch > 3:
        assert progress.before > 0
    assert table().equals(table("whole"))
    assert not os.path.exists("out/parts")


@pytest.mark.parametrize("moment", ["flush", "gather", "trash"])
def test_a_kill_while_files_are_written_loses_nothing(rows, small_parts, monkeypatch, moment):
    score(out="whole")

    class Killed(BaseException):
        pass

    def kill(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "flush":
            patch.setattr(score_folder.pq, "write_table", kill)
        elif moment == "gather":
            patch.setattr(score_folder.pq, "ParquetWriter", kill)
        else:
            patch.setattr(score_folder.shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or kill())
        with pytest.raises(Killed):
            score()
    score(resume=True)
    assert table().equals(table("whole"))
    assert sorted(os.listdir("out")) == [".lock", "score.json", "scores.csv", "scores.parquet"]


def test_a_second_ctrl_c_while_a_part_is_written_writes_no_row_twice(rows, small_parts, monkeypatch):
    score(out="whole")
    real, calls = os.replace, []

    def replace(source, target):
        real(source, target)
        calls.append(target)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        assert score().interrupted
    names = table()["id"].to_pylist()
    assert len(names) == len(set(names)) > 0
    score(resume=True)
    assert table().equals(table("whole"))


def test_files_that_appeared_or_went_in_between(tmp_path):
    photos(tmp_path / "new")
    score(FakeGuard("images"), ["new"], batch_size=2)
    before = {row["path"]: row for row in table().to_pylist()}
    colour_picture(tmp_path / "new" / "aaa.png", (0, 0, 0))
    colour_picture(tmp_path / "new" / "zzz.png", (0, 0, 0))
    (tmp_path / "new" / "white.png").unlink()
    guard = FakeGuard("images")
    progress = score(guard, ["new"], resume=True)
    assert (progress.before, progress.scored) == (8, 2)
    assert sum(guard.sizes) == 2
    found = {row["path"]: row for row in table().to_pylist()}
    assert list(found) == [*before, "new/aaa.png", "new/zzz.png"]
    assert {name: found[name] for name in before} == before


def test_a_list_that_names_a_file_twice_has_two_rows_also_if_resumed(tmp_path):
    photos(tmp_path / "new")
    (tmp_path / "new" / "list.txt").write_text("white.png\nred/0.png\nwhite.png\nwhite.png\n")
    guard = Stopping(1, KeyboardInterrupt(), kind="images")
    assert score(guard, ["new/list.txt"], batch_size=2).interrupted
    (tmp_path / "new" / "list.txt").write_text("blue/0.png\nwhite.png\nred/0.png\nwhite.png\nwhite.png\n")
    score(FakeGuard("images"), ["new/list.txt"], batch_size=2, resume=True)
    names = ["white.png", "red/0.png", "blue/0.png", "white.png", "white.png"]
    assert table()["path"].to_pylist() == [f"new/{name}" for name in names]


def test_a_finished_run_may_be_resumed_and_stays(rows):
    score()
    before = table()
    guard = FakeGuard()
    progress = score(guard, resume=True)
    assert (progress.before, progress.scored, guard.sizes) == (300, 0, [])
    assert table().equals(before)


def test_resume_in_an_empty_folder_starts(rows):
    assert score(resume=True).scored == 300


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"guard": FakeGuard(digest="other")}, "another guard: out was made with abc, now it is other"),
        ({"alpha": 0.1}, r"another alpha: out was made with 0\.05, now it is 0\.1"),
        ({"places": ["rows.npy", "rows.npy"]}, "another inputs"),
    ],
)
def test_resume_with_something_else_is_refused_by_name(rows, change, words):
    score()
    before = sorted(os.listdir("out"))
    with pytest.raises(ValueError, match=words):
        score(resume=True, **change)
    assert sorted(os.listdir("out")) == before


def test_resume_from_another_folder_or_column_is_refused_by_name(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"embedding": [[1.0, 0, 0]], "v": [[1.0, 0, 0]]}), tmp_path / name / "a.parquet")
    monkeypatch.chdir("one")
    out, guard = tmp_path / "out", FakeGuard()
    score_items(guard, Inputs(["a.parquet"], "features"), out)
    with pytest.raises(ValueError, match=r"another column: .* made with embedding, now it is v"):
        score_items(guard, Inputs(["a.parquet"], "features", features="v"), out, resume=True)
    monkeypatch.chdir("../two")
    with pytest.raises(ValueError, match="another current folder"):
        score_items(guard, Inputs(["a.parquet"], "features"), out, resume=True)


def test_a_folder_that_is_not_empty_is_refused(rows, tmp_path):
    score()
    with pytest.raises(ValueError, match=r"out is not empty\. Give another out=FOLDER, or resume=true"):
        score()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.doc").touch()
    with pytest.raises(ValueError, match=r"mine holds no score\.json: it is not a folder of rmd-score"):
        score(out="mine", resume=True)


def test_two_processes_do_not_write_to_one_folder(rows):
    folder = ScoreFolder("out", score_schema("id"))
    other = ScoreFolder("out", score_schema("id")).opened({}, resume=True)
    with folder.opened({}, resume=False), pytest.raises(ValueError, match="another process writes to out"), other:
        pass


def test_parts_that_somebody_damaged_are_named(rows, small_parts):
    assert score(Stopping(5, KeyboardInterrupt())).interrupted
    with open("out/parts/000001.parquet", "r+b") as file:
        file.truncate(30)
    with pytest.raises(ValueError, match=r"000001\.parquet: cannot be read"):
        score(resume=True)
    pq.write_table(pa.table({"other": [1]}), "out/parts/000001.parquet")
    with pytest.raises(ValueError, match=r"000001\.parquet: is not a part of these scores"):
        score(resume=True)


def test_nothing_to_score_is_an_error_and_leaves_no_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is nothing to score in empty"):
        score(FakeGuard("images"), ["empty"])
    assert not os.path.exists("out")


def test_settings_are_kept_as_readable_json(rows):
    score()
    with open("out/score.json") as file:
        kept = json.load(file)
    assert kept["guard"] == "abc"
    assert kept["inputs"] == ["rows.npy"]


# -- memory -----------------------------------------------------------------------------------------------------------


class Counted:
    """An item that knows how many of its kind are alive."""

    alive = most = 0

    def __init__(self):
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self):
        Counted.alive -= 1


class Endless:
    """Inputs that are made as they are asked for."""

    kind = "features"

    def __init__(self, number):
        self.number, self.settings = number, {"inputs": ["made"]}

    def __iter__(self):
        return (Item(f"row {number}", Counted()) for number in range(self.number))

    def count(self):
        return self.number

    def left_out(self):
        return []


class Constant(FakeGuard):
    def prepare(self, item):
        return torch.ones(3)


def peak(number, out):
    gc.collect()
    Counted.alive = Counted.most = 0
    tracemalloc.start()
    arrow = pa.total_allocated_bytes()
    score_items(Constant(), Endless(number), out, batch_size=64)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert pa.total_allocated_bytes() <= arrow + (1 << 20)
    return used


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_items():
    peak(2_000, "warm")
    small, most = peak(5_000, "small"), Counted.most
    large = peak(100_000, "large")
    assert most <= Counted.most <= 3 * 64
    # of 95,000 rows more the names alone would be 6 MB
    assert large < small + (4 << 20)
    assert len(pq.read_table("large/scores.parquet")) == 100_000


def test_items_are_drawn_as_they_are_needed():
    Counted.alive = Counted.most = 0
    score_items(Constant(), Endless(2_000), "out", batch_size=10)
    assert Counted.most <= 30
