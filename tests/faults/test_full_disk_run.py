"""A disk that is full: the run says so in one sentence, is marked as failed, and what was there before stays."""

import errno
import os
import resource
import subprocess
import sys

import config_kit
import pytest

from rmd_plugin.compare.rows import make_row, make_rows
from rmd_plugin.report.run import RunFolder
from rmd_plugin.report.summary import read_run

ROWS = make_rows([make_row("digits", "noise", "mlp", "rmd", 0, "AUROC", 0.9)])
WORDS = ["benchmark=digits", "limit_train=120", "limit_test=30", "resamples=20", "figures=false", "hydra.run.dir=out"]


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_nothing_can_be_written_the_error_of_the_run_is_the_one_that_is_raised(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)

    def job():
        with folder.running():
            monkeypatch.setattr(folder, "_write_json", full)
            raise ZeroDivisionError("of the run")

    with pytest.raises(ZeroDivisionError, match="of the run"):
        job()
    assert folder.read_status().state == "running"


def test_a_run_that_was_killed_says_that_it_may_have_been(tmp_path):
    code = "from rmd_plugin.report.run import RunFolder; import os; RunFolder('run').start(); os._exit(9)"
    assert config_kit.python("-c", code, cwd=tmp_path).returncode == 9
    run = read_run(tmp_path / "run")
    assert run.outcome == "running"
    assert "killed" in run.reason


def limited_run(folder, module, words, size):
    """Run a command none of whose files may grow over a size in bytes."""
    return subprocess.run(
        [sys.executable, "-m", module, *words], cwd=folder, env=config_kit.environment(GIT_OPTIONAL_LOCKS="0"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "more", "size"),
    [
        # the first figure, the first checkpoint
        ("rmd_plugin.app.compare", ["detector=[rmd]", "cache_dir=null", "figures=true"], 20_000),
        ("rmd_plugin.app.train", ["backbone=mlp", "detector=[rmd]", "trainer.max_epochs=1"], 20_000),
    ],
)
def test_a_file_that_may_not_grow_ends_a_command_with_one_sentence(module, more, size, tmp_path):
    done = limited_run(tmp_path, module, [*WORDS, *more], size)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (sentence,) = (line for line in done.stderr.splitlines() if line.startswith("rmd-"))
    assert "File too large" in sentence
    assert str(tmp_path / "out") in sentence
    status = RunFolder(tmp_path / "out").read_status()
    assert status.state == "failed"
    assert str(tmp_path / "out") in status.reason


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_one_sentence_and_leaves_the_old_one(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.running(about={"benchmark": "digits", "backbone": "mlp", "seed": 0}):
        folder.write_rows(ROWS)
    assert config_kit.run("rmd_plugin.app.report", tmp_path, "run").returncode == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    done = limited_run(tmp_path, "rmd_plugin.app.report", ["run"], 2000)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert "file too large" in sentence.lower()
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
