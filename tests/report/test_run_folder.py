import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from omegaconf import MissingMandatoryValue, OmegaConf

from rmd_plugin.compare.rows import Row
from rmd_plugin.report.provenance import collect_versions, current_command, git_commit
from rmd_plugin.report.run_folder import CONFIG, ROWS, STATUS, TIMINGS, VERSIONS, RunFolder, describe_error

ROW = Row("digits", "noise", "mlp", "rmd", 3, "AUROC", 1 / 3, distance="far")


def test_a_run_that_ends_well_is_done_and_has_its_files(tmp_path):
    folder = RunFolder(tmp_path / "new" / "run")
    about = {"benchmark": "digits", "backbone": "mlp", "seed": 3}
    with folder.running(config={"seed": 3}, about=about, command="rmd-train seed=3"):
        status = folder.read_status()
        assert (status.state, status.pid, status.gone) == ("running", os.getpid(), False)
        assert 0 <= status.seconds < 60
        assert not folder.done
        folder.write_rows([ROW])
    status = folder.read_status()
    assert (status.state, status.reason, dict(status.about)) == ("done", "", about)
    assert 0 <= status.seconds < 60
    assert folder.done
    assert repr(folder.read_rows()) == repr([ROW])  # NaN is not equal to itself
    assert folder.read_versions()["command"] == "rmd-train seed=3"
    assert sorted(os.listdir(folder.path)) == sorted([CONFIG, ROWS, STATUS, TIMINGS, VERSIONS])


def test_an_error_is_kept_with_its_reason_and_raised(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(RuntimeError), folder.running(about={"seed": 1}):
        raise RuntimeError("no\n  memory\n")
    status = folder.read_status()
    assert (status.state, status.reason, dict(status.about)) == ("failed", "RuntimeError: no memory", {"seed": 1})
    assert not folder.done


def test_ctrl_c_leaves_the_run_interrupted(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt), folder.running():
        raise KeyboardInterrupt
    assert folder.read_status().state == "interrupted"


def test_a_run_whose_process_was_killed_is_known_to_be_gone(tmp_path):
    code = "import sys, os, rmd_plugin.report.run_folder as r; r.RunFolder(sys.argv[1]).start(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    status = RunFolder(tmp_path).read_status()
    assert status.state == "running"
    assert status.gone


def test_the_config_is_written_resolved_and_in_its_order(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config(OmegaConf.create({"zeta": "${alpha.seed}", "alpha": {"seed": 7, "text": "ä: b"}}))
    assert folder.read_config() == {"zeta": 7, "alpha": {"seed": 7, "text": "ä: b"}}
    assert list(folder.read_config()) == ["zeta", "alpha"]
    assert OmegaConf.load(folder.file(CONFIG)) == folder.read_config()


def test_the_history_reads_back_to_the_last_bit(tmp_path):
    values = [1 / 3, math.nan, 1e-300]
    row = {"stage": "fit", "epoch": 0, "step": 5, "detector": "rmd", "ood": "a,b", "metric": "AUROC"}
    history = [{**row, "value": value} for value in values]
    folder = RunFolder(tmp_path)
    folder.write_history(history)
    found = folder.read_history()
    assert [{**item, "value": 0} for item in found] == [{**row, "value": 0}] * 3
    assert np.array_equal([item["value"] for item in found], values, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        (STATUS, "{", "read_status"),
        (STATUS, "[]", "read_status"),
        (STATUS, '{"state": "perhaps"}', "read_status"),
        (VERSIONS, "nothing", "read_versions"),
        (CONFIG, "a: [", "read_config"),
        (CONFIG, "- a", "read_config"),
        ("history.csv", "stage,epoch\nfit,0\n", "read_history"),
        ("scores.npz", "no archive", "read_scores"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, read):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        getattr(RunFolder(tmp_path), read)()


def test_what_is_missing_is_empty(tmp_path):
    folder = RunFolder(tmp_path)
    assert (folder.read_rows(), folder.read_history(), folder.read_scores()) == ([], [], {})
    assert (folder.read_config(), folder.read_versions()) == ({}, {})
    with pytest.raises(FileNotFoundError):
        folder.read_status()


def test_a_long_error_becomes_one_short_line():
    text = describe_error(ValueError("first\n\nsecond\nthird\nfourth" + "x" * 1000))
    assert text == "ValueError: first second third"
    assert len(describe_error(ValueError("y" * 1000))) < 450
    with pytest.raises(MissingMandatoryValue) as caught:
        _ = OmegaConf.create({"a": "???"}).a
    assert describe_error(caught.value) == "MissingMandatoryValue: Missing mandatory value: a"
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_versions_name_the_packages_that_take_part():
    import torch

    found = collect_versions()
    assert found["packages"]["torch"] == torch.__version__.split("+")[0] or torch.__version__ in str(found)
    assert found["packages"]["rmd-plugin"]
    assert json.loads(json.dumps(found)) == found


def test_the_command_is_what_one_would_type(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rmd-train", "benchmark=digits", "detector=[rmd,knn]"])
    assert current_command() == "rmd-train benchmark=digits 'detector=[rmd,knn]'"
    assert current_command("other").startswith("other ")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_which_tracks_the_folder(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert git_commit.__wrapped__(tmp_path) is None
    git("init", "-q")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "file").write_text("1")
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "file").write_text("1")
    git("add", "inside")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit.__wrapped__(tmp_path / "inside") == head
    assert git_commit.__wrapped__(tmp_path / "environment") is None
    (tmp_path / "inside" / "file").write_text("2")
    assert git_commit.__wrapped__(tmp_path / "inside") == head + "+changes"


def test_a_run_folder_and_a_table_import_nothing_heavy():
    code = (
        "import sys, rmd_plugin.report.run_folder, rmd_plugin.report.gather, rmd_plugin.report.tables;"
        "sys.exit(' '.join({'torch', 'pandas', 'matplotlib', 'jinja2', 'scipy'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_status_that_cannot_be_read_is_replaced_at_the_end(tmp_path):
    (tmp_path / STATUS).write_text("{")
    RunFolder(tmp_path).finish("failed", "why")
    assert RunFolder(tmp_path).read_status().reason == "why"
