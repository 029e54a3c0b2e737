"""``rmd-score``: words, exit codes, files, what the terminal says, Ctrl-C and kill -9."""

import os
import re
import signal
import subprocess
import sys
import time

import config_kit
import numpy as np
import pyarrow.parquet as pq
import pytest
import score_kit
from score_kit import colour_picture, photos, write_guard

from rmd_plugin.app.score import main


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "rmd_plugin.guard.guard", score_kit.fake_module())


@pytest.fixture
def guard(tmp_path):
    photos(tmp_path / "new")
    return write_guard(tmp_path / "guard", kind="images")


def error(capsys, *words):
    """What is wrong with the words, which must be one line."""
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith("rmd-score: ")
    assert said.count("\n") == 1
    return said


def start(folder, *words):
    return subprocess.Popen(
        [sys.executable, score_kit.__file__, *words],
        cwd=folder, env=config_kit.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_a_folder_of_pictures_becomes_a_table_and_a_page(guard, capsys):
    assert main([guard, "new", "out=scores", "device=cpu"]) == 0
    assert sorted(os.listdir("scores")) == [".lock", "report.html", "score.json", "scores.csv", "scores.parquet"]
    found = {row["path"]: row for row in pq.read_table("scores/scores.parquet").to_pylist()}
    assert len(found) == 8
    assert [name for name, row in found.items() if row["is_ood"]] == ["new/white.png"]
    said, notes = capsys.readouterr()
    assert re.search(r"scored\s+7", said)
    assert re.search(r"flagged as OOD\s+1\s+14 %; at most 5 % of ID samples would be", said)
    assert re.search(r"not readable\s+1", said)
    assert re.search(r"Most unknown.*\n.*\n\s*new/white.png\s+1.414\s+0.01", said)
    assert said.rstrip().endswith("Written to scores: scores.parquet, scores.csv, report.html")
    assert notes == "new: 1 files are no pictures by their ending: notes.txt\n"


def test_without_a_folder_the_results_go_where_those_of_other_commands_go(guard, capsys):
    assert main([guard, "new/red", "device=cpu"]) == 0
    (folder,) = os.listdir("outputs/score")
    assert f"Written to outputs/score/{folder}" in capsys.readouterr().out


def test_only_fail_on_ood_makes_a_flagged_sample_an_exit_code(guard):
    assert main([guard, "new", "--fail-on-ood", "out=a"]) == 3
    assert main(["--fail-on-ood", guard, "new/red", "new/blue", "out=b"]) == 0
    assert main([guard, "new", "out=c"]) == 0


def test_texts_and_features_are_scored_with_columns_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("key,question\na,red\nb,nothing of it\n")
    text_guard = write_guard(tmp_path / "texts", kind="texts")
    assert main([text_guard, "a.csv", "text=question", "id=key", "out=t"]) == 0
    assert pq.read_table("t/scores.parquet")["id"].to_pylist() == ["a", "b"]
    assert "nothing of it" in (tmp_path / "t/report.html").read_text()
    np.save("a.npy", np.eye(3, dtype=np.float32))
    feature_guard = write_guard(tmp_path / "features", kind="features")
    assert main([feature_guard, "a.npy", "out=f", "alpha=0.5"]) == 0
    assert "a.npy:2" in (tmp_path / "f/report.html").read_text()


def test_wrong_words_are_one_sentence(guard, capsys):
    assert "there is no option batchsize. Did you mean batch_size?" in error(capsys, guard, "new", "batchsize=3")
    assert "There are: out, resume, alpha" in error(capsys, guard, "new", "zzz=3")
    assert "batch_size must be a whole number of at least 1, got 0" in error(capsys, guard, "new", "batch_size=0")
    assert "num_workers must be a whole number" in error(capsys, guard, "new", "num_workers=two")
    for alpha in ("0", "1", "nan", "5%"):
        assert "alpha must be a number between 0 and 1" in error(capsys, guard, "new", f"alpha={alpha}")
    assert "resume must be true or false" in error(capsys, guard, "new", "resume=yes", "out=a")
    assert "resume=true needs out=FOLDER" in error(capsys, guard, "new", "resume=true")
    assert "out= is given twice" in error(capsys, guard, "new", "out=a", "out=b")
    assert "alpha= has no value" in error(capsys, guard, "new", "alpha=")
    assert "nothing to score is given" in error(capsys, guard, "out=a")
    assert "there is no gone" in error(capsys, guard, "gone")
    assert "text=q is for a guard of texts" in error(capsys, guard, "new", "text=q")
    assert "device=abacus cannot be used here" in error(capsys, guard, "new", "device=abacus")
    assert not os.path.exists("outputs")


def test_a_file_whose_name_looks_like_an_option_is_scored(guard, tmp_path):
    colour_picture(tmp_path / "day=1" / "a.png", (255, 0, 0))
    assert main([guard, "day=1", "out=a"]) == 0
    assert pq.read_table("a/scores.parquet")["path"].to_pylist() == ["day=1/a.png"]


def test_no_input_is_said_by_the_usage(guard, capsys):
    with pytest.raises(SystemExit) as stop:
        main([guard])
    assert stop.value.code == 2
    assert "usage: rmd-score GUARD INPUT" in capsys.readouterr().err


def test_the_help_has_examples_options_outputs_and_exit_codes_and_imports_no_torch(tmp_path):
    code = "import sys; from rmd_plugin.app.score import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    done = config_kit.python("-c", f"{code}sys.exit('torch' in sys.modules)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("rmd-score guard photos_new/", "resume=", "scores.parquet", "report.html", "exit codes: 0 done"):
        assert word in done.stdout


@pytest.mark.slow
def test_a_table_goes_on_after_ctrl_c_in_this_process(tmp_path, monkeypatch, capsys):
    np.save("a.npy", np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32))
    guard = write_guard(tmp_path / "guard", kind="features")
    assert main([guard, "a.npy", "out=whole"]) == 0
    real, calls = score_kit.FakeGuard.judge, []

    def judge(self, batch):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(score_kit.FakeGuard, "judge", judge)
        assert main([guard, "a.npy", "out=out"]) == 130
    said = capsys.readouterr().out
    assert "Interrupted after 256 of 500: resume=true out=out goes on." in said
    assert len(pq.read_table("out/scores.parquet")) == 256
    assert "This run was interrupted" in (tmp_path / "out/report.html").read_text()
    assert main([guard, "a.npy", "out=out", "resume=true"]) == 0
    assert "256 of 500 were scored before." in capsys.readouterr().err
    assert pq.read_table("out/scores.parquet").equals(pq.read_table("whole/scores.parquet"))
    assert "This run was interrupted" not in (tmp_path / "out/report.html").read_text()


@pytest.fixture
def long_run(tmp_path):
    """Words of a run of some seconds, and the table that it ends with."""
    np.save("a.npy", np.random.default_rng(0).normal(size=(20_000, 3)).astype(np.float32))
    guard = write_guard(tmp_path / "guard", kind="features", delay=0.01)
    assert main([write_guard(tmp_path / "quick", kind="features"), "a.npy", "out=whole"]) == 0
    return [guard, "a.npy", "out=out"], pq.read_table("whole/scores.parquet")


def wait_for_parts(tmp_path, process, number):
    while len(list(tmp_path.glob("out/parts/*.parquet"))) < number and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_kill_9_and_resume_end_with_the_rows_of_a_run_that_was_never_stopped(tmp_path, long_run, workers):
    words, whole = long_run
    process = start(tmp_path, *words, f"num_workers={workers}")
    wait_for_parts(tmp_path, process, 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out/scores.parquet").exists()
    done = start(tmp_path, *words, "resume=true")
    output = done.communicate(timeout=300)
    assert done.returncode == 0, output
    before = int(re.search(r"(\d+) of 20000 were scored before", output[1])[1])
    assert 3000 <= before < 20_000
    assert pq.read_table(tmp_path / "out/scores.parquet").equals(whole)
    assert not (tmp_path / "out/parts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_leaves_what_was_scored_without_a_traceback(tmp_path, long_run, workers):
    words, whole = long_run
    process = start(tmp_path, *words, f"num_workers={workers}")
    wait_for_parts(tmp_path, process, 2)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    found = pq.read_table(tmp_path / "out/scores.parquet")
    assert 2000 <= len(found) < 20_000
    assert found.equals(whole.slice(0, len(found)))
    assert f"Interrupted after {len(found):,} of 20,000" in output
