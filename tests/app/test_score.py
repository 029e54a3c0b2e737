"""``rmd-score``: words, exit codes, files, what cannot be read, Ctrl-C and kill -9."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import config_kit
import fsspec
import guard_kit
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from filelock import FileLock
from PIL import Image
from table_kit import flip, write_parts

from rmd_plugin import Guard
from rmd_plugin.app.score import main

RESULTS = [".lock", "report.html", "score.json", "scores.csv", "scores.parquet"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def guards(tmp_path_factory):
    """Folders of a guard of pictures and of one of features."""
    folder = tmp_path_factory.mktemp("guards")
    guard_kit.picture_guard().save(folder / "pictures", onnx=False)
    guard_kit.feature_guard().save(folder / "features", onnx=False)
    return folder


@pytest.fixture
def pictures(guards):
    return str(guards / "pictures")


@pytest.fixture
def features(guards):
    return str(guards / "features")


@pytest.fixture
def rows():
    """500 vectors, of which one in ten is far off, in a file."""
    values = np.random.default_rng(0).normal(size=(500, 6)).astype(np.float32)
    values[::10] *= 20
    np.save("rows.npy", values)
    return values


def photos(folder="new"):
    """Eight pictures of the guard's classes and two of others, one that is broken, and a file that is no picture."""
    for number, array in enumerate(guard_kit.pictures(8, seed=5) + guard_kit.pictures(2, seed=5, ood=True)):
        path = Path(folder, "known" if number < 8 else "other", f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path)
    Path(folder, "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut")
    Path(folder, "notes.txt").write_text("no picture")


def table(out="out"):
    return pq.read_table(f"{out}/scores.parquet")


def error(capsys, *words):
    """What is wrong with the words, which must be one line."""
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("rmd-score: ")
    assert said.count("\n") == 1
    return said


def test_a_folder_of_pictures_becomes_tables_and_a_page_with_what_the_guard_says(pictures, capsys):
    photos()
    assert main([pictures, "new", "out=out", "device=cpu"]) == 0
    assert sorted(os.listdir("out")) == RESULTS
    rows = table().to_pylist()
    assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    by_path = {row["path"]: row for row in rows}
    broken = by_path.pop("new/cut.jpg")
    assert broken["score"] is broken["is_ood"] is None
    assert "picture" in broken["reason"]
    guard = Guard.load(pictures)
    for path, row in by_path.items():
        verdict = guard(path)
        assert row["score"] == pytest.approx(verdict.score, rel=1e-4)
        assert (row["is_ood"], row["class"]) == (verdict.is_ood, verdict.class_name)
        assert row["p_value"] == pytest.approx(verdict.p_value)
    assert {row["is_ood"] for row in rows} == {True, False, None}
    with open("out/scores.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    assert [row["path"] for row in cells] == [row["path"] for row in rows]
    assert [row["score"] for row in cells] == ["" if row["score"] is None else str(row["score"]) for row in rows]
    said, notes = capsys.readouterr()
    assert re.search(r"scored\s+10\n", said)
    assert re.search(r"not readable\s+1\n", said)
    assert said.rstrip().endswith("Written to out: scores.parquet, scores.csv, report.html")
    assert "notes.txt" in notes


def test_workers_lists_and_single_pictures_give_the_same_rows(pictures):
    photos()
    names = [str(path.relative_to("new")) for path in sorted(Path("new").rglob("*.png"))]
    Path("new/list.txt").write_text("\n".join(names))
    Path("new/list.csv").write_text("\n".join(["label,path", *(f"x,{name}" for name in names)]))
    assert main([pictures, *(f"new/{name}" for name in names), "out=single"]) == 0
    for words in (["new/list.txt"], ["new/list.csv"], ["new/known", "new/other", "num_workers=2", "batch_size=3"]):
        out = f"out{len(words)}{words[0][-3:]}"
        assert main([pictures, *words, f"out={out}"]) == 0
        assert table(out).drop(["score"]).equals(table("single").drop(["score"]))
        np.testing.assert_allclose(table(out)["score"], table("single")["score"], rtol=1e-4)


def test_features_of_every_kind_of_table_give_the_same_rows(features, rows):
    write_parts(Path("parts"), rows, cuts=(200,))
    pq.write_table(pa.table({"v": list(rows), "key": [f"k{n}" for n in range(500)]}), "named.parquet")
    assert main([features, "rows.npy", "out=npy"]) == 0
    assert main([features, "parts", "out=parts_out"]) == 0
    assert main([features, "named.parquet", "features=v", "id=key", "out=named"]) == 0
    expected = table("npy")
    assert expected["id"].to_pylist()[::499] == ["rows.npy:0", "rows.npy:499"]
    assert table("named")["id"].to_pylist()[::499] == ["k0", "k499"]
    assert table("parts_out")["id"].to_pylist()[::499] == ["parts/a.parquet:0", "parts/b.parquet:299"]
    for other in ("parts_out", "named"):
        assert table(other).drop(["id"]).equals(expected.drop(["id"]))


def test_rows_that_cannot_be_scored_have_their_reason(features):
    values = [[1.0] * 6, [1.0], None, [float("nan")] * 6, [0.0] * 6]
    pq.write_table(pa.table({"embedding": values}), "a.parquet")
    assert main([features, "a.parquet", "out=out"]) == 0
    reasons = table()["reason"].to_pylist()
    assert reasons[0] is reasons[4] is None
    assert "shape" in reasons[1]
    assert "embedding" in reasons[2]
    assert "not a number" in reasons[3]
    assert table()["is_ood"].to_pylist()[1:4] == [None, None, True]


def test_a_damaged_page_spoils_the_rest_of_its_file_alone(features, rows):
    for name in "ab":
        write_parts(Path("t"), rows, names=name, row_group_size=100, write_page_checksum=True, compression="none")
    flip(Path("t/a.parquet"), at=6000)
    assert main([features, "t", "out=out"]) == 0
    bad = [row["id"] for row in table().to_pylist() if row["reason"]]
    assert bad == ["t/a.parquet"]
    assert sum(name.startswith("t/b") for name in table()["id"].to_pylist()) == 500


def test_texts_are_read_from_csv_and_jsonl_and_parquet():
    from rmd_plugin.guard.score import Inputs

    texts = ["one, two", 'with "quotes"\nand lines', "grüße 猫"]
    Path("a.csv").write_text('key,text\na,"one, two"\nb,"with ""quotes""\nand lines"\n,grüße 猫\n', encoding="utf-8")
    Path("a.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in texts) + '\n{"text": 3}\n')
    pq.write_table(pa.table({"text": [*texts, None]}), "a.parquet")
    for ending in ("csv", "jsonl", "parquet"):
        items = list(Inputs([f"a.{ending}"], "texts"))
        assert [item.raw for item in items[:3]] == texts
        assert all(item.reason for item in items[3:])
        assert [item.name for item in items] == [f"a.{ending}:{row}" for row in range(len(items))]
    assert [item.name for item in Inputs(["a.csv"], "texts", id="key")] == ["a", "b", "a.csv:2"]
    Path("a.jsonl").write_text("[")
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        Inputs(["a.jsonl"], "texts")


def test_names_of_strangers_do_no_harm(pictures):
    photos()
    os.rename("new/known/0.png", evil := "new/<script>alert(1)<x>\nx.png")
    os.rename(b"new/known/1.png", b"new/caf\xe9.png")
    assert main([pictures, "new", "out=out"]) == 0
    assert evil in table()["path"].to_pylist()
    assert "<script" not in Path("out/report.html").read_text()
    with open("out/scores.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 11


def test_another_alpha_decides_by_the_p_values_and_only_fail_on_ood_is_an_exit_code(features, rows):
    assert main([features, "rows.npy", "out=usual", "--fail-on-ood"]) == 3
    assert main([features, "rows.npy", "out=strict", "alpha=0.01"]) == 0
    usual, strict = table("usual").to_pydict(), table("strict").to_pydict()
    assert usual["is_ood"] == [p_value <= 0.05 for p_value in usual["p_value"]]
    assert strict["is_ood"] == [p_value <= 0.01 for p_value in usual["p_value"]]
    assert sum(strict["is_ood"]) < sum(usual["is_ood"])


def test_a_stream_is_watched_from_day_to_day(features, capsys):
    generator = np.random.default_rng(0)
    days = generator.normal(size=(3, 200, 6)).astype(np.float32)
    days[..., 0] += 8.0 * (np.arange(200) % 2)
    days[2, :100] *= 3
    for number, day in enumerate(days):
        np.save(f"day{number}.npy", day)
    watch = ["watch=alarm.safetensors", "level=0.05"]
    assert main([features, "day0.npy", "out=0", *watch]) == 0
    assert main([features, "day1.npy", "out=1", *watch]) == 0
    assert "No sign of a change in 400 items" in capsys.readouterr().out
    before = Path("alarm.safetensors").read_bytes()
    assert main([features, "day1.npy", "out=1", "resume=true", *watch]) == 0  # its rows are counted once
    assert Path("alarm.safetensors").read_bytes() == before
    assert main([features, "day2.npy", "out=2", *watch]) == 3
    assert re.search(r"changed since about item (39|4\d)\d of 600", capsys.readouterr().out)
    assert "Has the stream changed?" in Path("2/report.html").read_text()
    assert main([features, "day2.npy", "out=3", "watch=alarm.safetensors"]) == 1
    assert "another level" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["batchsize=3"], "batchsize"),
        (["batch_size=0"], "batch_size"),
        (["num_workers=two"], "num_workers"),
        (["alpha=nan"], "alpha"),
        (["alpha=0.001"], "alpha"),
        (["resume=true"], "out=FOLDER"),
        (["gone"], "gone"),
        (["text=q"], "texts"),
        (["a.zip"], "a.zip"),
        (["named.parquet"], "embedding"),
        (["named.parquet", "features=key"], "features"),
        (["garbage.parquet"], "garbage.parquet"),
        (["objects.npy"], "objects.npy"),
        (["device=abacus"], "abacus"),
        (["engine=local", "id=url"], "id="),
    ],
)
def test_wrong_words_and_files_are_one_sentence(features, rows, capsys, words, reason):
    Path("a.zip").touch()
    pq.write_table(pa.table({"v": list(rows), "key": ["x"] * 500}), "named.parquet")
    Path("garbage.parquet").write_bytes(bytes(range(256)))
    np.save("objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert reason in error(capsys, features, "rows.npy", *words)
    assert not os.path.exists("outputs")


def test_a_mistake_in_paths_or_columns_is_said_before_torch_is_imported(features, rows):
    pq.write_table(pa.table({"v": list(rows)}), "named.parquet")
    code = "import sys; from rmd_plugin.app.score import main\n"
    code += "try: code = main(sys.argv[1:])\nexcept SystemExit: code = 1\n"
    for words in (["--help"], [features, "gone"], [features, "named.parquet"], ["nowhere", "rows.npy"]):
        done = config_kit.python("-c", f"{code}assert code == 1; sys.exit('torch' in sys.modules)", *words, cwd=".")
        assert done.returncode == 0, done.stderr
    assert "exit codes: 0 done" in config_kit.python("-m", "rmd_plugin.app.score", "--help", cwd=".").stdout


# -- stop and go on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [RuntimeError("killed"), KeyboardInterrupt()], ids=["killed", "ctrl-c"])
def test_a_stopped_run_goes_on_and_ends_with_the_same_rows(features, rows, monkeypatch, stop):
    pq.write_table(pa.table({"embedding": list(rows), "key": [f"k{n}\nof two lines" for n in range(500)]}), "a.parquet")
    words = [features, "a.parquet", "id=key", "batch_size=16"]
    assert main([*words, "out=whole"]) == 0
    judge, counts = Guard.judge, []

    def judging(self, batch):
        counts.append(len(batch))
        if len(counts) == 12:
            raise stop
        return judge(self, batch)

    monkeypatch.setattr(Guard, "judge", judging)
    if isinstance(stop, KeyboardInterrupt):
        assert main([*words, "out=out"]) == 130
        assert len(table()) == 11 * 16
        assert "interrupted" in Path("out/report.html").read_text()
    else:
        with pytest.raises(RuntimeError, match="killed"):
            main([*words, "out=out"])
        assert not os.path.exists("out/scores.parquet")
        with open("out/scores.csv.part", "a") as file:
            file.write('"k176\n')  # of a row that was cut
    assert main([*words, "out=out", "resume=true"]) == 0
    assert sum(counts[12:]) == 500 - 11 * 16
    assert table().equals(table("whole"))
    assert sorted(os.listdir("out")) == RESULTS
    assert Path("out/scores.csv").read_text() == Path("whole/scores.csv").read_text()


def test_a_folder_of_another_run_is_refused(features, rows, capsys):
    words = [features, "rows.npy"]
    assert main([*words, "out=out"]) == 0
    capsys.readouterr()
    assert "not empty" in error(capsys, *words, "out=out")
    assert "alpha" in error(capsys, *words, "out=out", "resume=true", "alpha=0.1")
    assert "inputs" in error(capsys, *words, "rows.npy", "out=out", "resume=true")
    Path("mine").mkdir()
    Path("mine/thesis.doc").touch()
    assert "score.json" in error(capsys, *words, "out=mine", "resume=true")


def test_two_processes_do_not_write_to_one_folder(features, rows, capsys):
    Path("out").mkdir()
    with FileLock("out/.lock"):
        assert "another process" in error(capsys, features, "rows.npy", "out=out")


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "workers"), [(signal.SIGKILL, 2), (signal.SIGINT, 2), (signal.SIGINT, 0)])
def test_a_command_that_is_stopped_goes_on(features, stop, workers):
    np.save("a.npy", np.random.default_rng(0).normal(size=(20_000, 6)).astype(np.float32))
    assert main([features, "a.npy", "out=whole", "batch_size=8"]) == 0
    command = [sys.executable, "-m", "rmd_plugin.app.score", features, "a.npy", "out=out", "batch_size=8"]

    def start(*words):
        return subprocess.Popen(
            [*command, *words], env=config_kit.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    process = start(f"num_workers={workers}")
    part = Path("out/scores.csv.part")
    while not (part.exists() and part.stat().st_size > 100_000) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, stop)
    output, errors = process.communicate(timeout=300)
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in errors
        assert f"Interrupted after {len(table()):,}" in output
        assert table().equals(table("whole").slice(0, len(table())))
    done = start("resume=true")
    assert done.communicate(timeout=300)[1].count("Traceback") == 0
    assert done.returncode == 0
    assert table().equals(table("whole"))


# -- tables of any size -----------------------------------------------------------------------------------------------


def test_engine_scores_tables_file_by_file_wherever_they_are(features, capsys):
    x = torch.cat([torch.randn(30, 6), 20.0 * torch.randn(10, 6)])
    write_parts(Path("new"), x, cuts=(25,))
    words = [features, "new", "engine=local", "num_workers=1", "out=scores"]
    assert main(words) == 0
    expected = Guard.load(features)(x)
    tables = [pq.read_table(f"scores/{name}.parquet") for name in "ab"]
    np.testing.assert_allclose(np.concatenate([t["score"] for t in tables]), expected.score, rtol=1e-4, atol=1e-4)
    assert np.concatenate([t["is_ood"] for t in tables]).tolist() == expected.is_ood.tolist()
    assert f"Scored 40 rows of 2 files; flagged as OOD: {int(expected.is_ood.sum())}" in capsys.readouterr().out
    assert main([*words, "--fail-on-ood"]) == 3
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/new/a.parquet", Path("new/a.parquet").read_bytes())
    assert main([features, "memory://bucket/new", *words[2:4], "out=memory://bucket/scores"]) == 0
    with store.open("/bucket/scores/a.parquet") as file:
        assert pq.read_table(file).num_rows == 25
    store.rm("/bucket", recursive=True)


def test_a_guard_of_pictures_takes_no_engine(pictures, capsys):
    assert "engine=" in error(capsys, pictures, "new", "engine=local")
