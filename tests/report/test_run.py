import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf
from report_kit import auroc_row, compared, fitted, observed

from rmd_plugin.compare.rows import make_rows
from rmd_plugin.report.run import (
    CONFIG,
    ROWS,
    STATUS,
    TIMINGS,
    VERSIONS,
    RunFolder,
    collect_versions,
    current_command,
    describe_error,
    git_commit,
)

TIME = {**auroc_row("rmd", "", 0.1), "metric": "fit_seconds"}


def test_a_run_that_ends_well_is_done_and_has_its_files(tmp_path):
    folder = RunFolder(tmp_path / "new" / "run")
    about = {"benchmark": "digits", "backbone": "mlp", "seed": 3}
    with folder.running(config={"lr": 0.1, "twice": "${lr}"}, about=about, command="rmd-train seed=3"):
        assert folder.read_status().state == "running"
        assert not folder.done
        folder.write_rows(pd.concat([compared(), make_rows([TIME])], ignore_index=True))
        folder.note(preprocessing="none")
    status = folder.read_status()
    assert (status.state, status.about) == ("done", about)
    assert 0 <= status.seconds < 60
    assert folder.done
    # times stand apart from what a repetition gives again
    assert "fit_seconds" not in folder.file(ROWS).read_text()
    assert folder.read_rows()["metric"].iloc[-1] == "fit_seconds"
    pd.testing.assert_frame_equal(folder.read_rows()[:-1], compared(), check_exact=True)
    assert folder.read_config() == {"lr": 0.1, "twice": 0.1}
    versions = folder.read_versions()
    assert (versions["command"], versions["preprocessing"]) == ("rmd-train seed=3", "none")
    assert sorted(os.listdir(folder.path)) == sorted([CONFIG, ROWS, STATUS, TIMINGS, VERSIONS])


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [(RuntimeError("out of\n memory"), "failed", "out of memory"), (KeyboardInterrupt(), "interrupted", "the user")],
)
def test_a_run_that_ends_badly_says_why(error, state, reason, tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(type(error)), folder.running():
        raise error
    assert folder.read_status().state == state
    assert reason in folder.read_status().reason
    assert not folder.done


CODE = """
import sys, time
from rmd_plugin.report.run import RunFolder
with RunFolder(sys.argv[1]).running():
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "state"), [(signal.SIGTERM, "interrupted"), (signal.SIGKILL, "running")])
def test_a_signal_is_not_taken_for_a_run_that_goes_on(number, state, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    status = RunFolder(tmp_path).read_status()
    assert status.state == state
    assert process.returncode == (143 if state == "interrupted" else -9)


def test_what_a_folder_does_not_hold_is_empty_and_what_is_damaged_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    readers = {
        "rows.csv": folder.read_rows, "history.csv": folder.read_history, "scores.npz": folder.read_scores,
        "samples.json": folder.read_samples,
        "config.yaml": folder.read_config, "versions.json": folder.read_versions,
    }  # fmt: skip
    assert all(len(read()) == 0 for read in readers.values())
    for name, read in {**readers, "status.json": folder.read_status}.items():
        (tmp_path / name).write_bytes(b"\x00{garbage")
        with pytest.raises(ValueError, match=name):
            read()
    np.savez(tmp_path / "scores.npz", a=np.array([print], dtype=object))  # no pickle is opened
    with pytest.raises(ValueError, match=r"scores\.npz"):
        folder.read_scores()
    folder.finish("failed", "why")  # a status that cannot be read is replaced at the end
    assert folder.read_status().reason == "why"


def test_scores_and_history_come_back(tmp_path):
    folder, scores = RunFolder(tmp_path), fitted()
    folder.write_scores(scores)
    for name, sets in folder.read_scores().items():
        for key, values in sets.items():
            np.testing.assert_array_equal(values, scores[name][key].astype(np.float32))
    history = [observed("=rmd", "NA", 0, 0.1 + 0.2), observed("knn", "", 1, float("nan"))]
    folder.write_history([{**history[0], "more": 1}, history[1]])
    np.testing.assert_equal(folder.read_history(), history)


def test_secrets_are_masked_wherever_they_would_be_kept(tmp_path, monkeypatch):
    words = ["+logger.x.api_key=abc1", "+a={hf_token: abc2, b: 1}", "WANDB_API_KEY=abc3", "k=num_tokens"]
    monkeypatch.setattr(sys, "argv", ["rmd-train", *words])
    config = {"logger": [{"x": {"api_key": "abc4", "token": None}}], "secret_key": "abc5", "pad_token": "[P]"}
    for number, content in enumerate((config, OmegaConf.to_yaml(config))):
        folder = RunFolder(tmp_path / str(number))
        with folder.running(config=content):
            pass
        kept = folder.file(CONFIG).read_text() + folder.file(VERSIONS).read_text()
        assert "abc" not in kept
        assert kept.count("***") == 5
        assert folder.read_config()["pad_token"] == "[P]"
        assert folder.read_config()["logger"][0]["x"]["token"] is None
    assert current_command().endswith("k=num_tokens")


def test_versions_name_the_commit_and_are_quiet_without_git(tmp_path, monkeypatch):
    def git(*words):
        user = ["-c", "user.name=x", "-c", "user.email=x"]
        return subprocess.run(["git", *user, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    assert git_commit(tmp_path) == ""
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}+changes"
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) == ""
    versions = collect_versions()
    assert {"python", "platform", "packages"} <= set(versions)
    assert {"torch", "rmd-plugin", "pytorch-ood"} <= set(versions["packages"])


def test_an_error_is_one_line():
    assert describe_error(ValueError("a\n  b\nfull_key: x\n")) == "ValueError: a b"
    assert len(describe_error(ValueError("x" * 1000))) < 450
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_report_imports_neither_torch_nor_pyplot_and_a_run_folder_nothing_heavy():
    code = "import sys, rmd_plugin.report.run, rmd_plugin.report.summary, rmd_plugin.report.tables;"
    code += "heavy = {'torch', 'matplotlib', 'scipy'} & set(sys.modules); import rmd_plugin.report.page;"
    code += "sys.exit(' '.join(heavy | {'torch', 'matplotlib.pyplot'} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
