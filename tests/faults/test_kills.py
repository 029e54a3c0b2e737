"""kill -9 at any moment, then ``resume=true``: the same to the last bit as a run that was never stopped."""

import os
import random
import re
import signal
import time

import config_kit
import fault_kit
import pytest
from fault_kit import left_behind

KILLS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped: what it left behind, how long it took, how often it touched its files."""
    folder = tmp_path_factory.mktemp("whole")
    fault_kit.run(folder / "warm", "trainer.max_epochs=1")  # the fork server starts
    began = time.monotonic()
    assert fault_kit.run(folder / "run") == 0, (folder / "run/output.txt").read_text()
    seconds = time.monotonic() - began
    events = int(re.findall(r"events: (\d+)", (folder / "run/output.txt").read_text())[-1])
    return left_behind(folder / "run"), seconds, events


@pytest.mark.slow
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_run_ends_as_if_it_had_never_been_stopped(tmp_path, whole, kill):
    expected, seconds, events = whole
    moment = (kill // 2 + random.Random(kill).random()) / (KILLS // 2)  # spread over the whole life
    if kill % 2:
        code = fault_kit.run(tmp_path / "run", event=1 + int(moment * events))
        assert code == -signal.SIGKILL
    else:
        fault_kit.run(tmp_path / "run", seconds=moment * seconds)
    code = fault_kit.run(tmp_path / "run", "resume=true")
    assert code == 0, (tmp_path / "run/output.txt").read_text()
    found = left_behind(tmp_path / "run")
    assert [name for name in expected if found.get(name) != expected[name]] == []
    assert found.keys() == expected.keys()


@pytest.mark.ddp
def test_two_processes_go_on_as_if_they_had_never_been_stopped(tmp_path):
    options = [*fault_kit.OPTIONS, "trainer=ddp", "trainer.accelerator=cpu"]

    def start(folder, *more):
        return config_kit.start("rmd_plugin.app.train", tmp_path, *options, f"hydra.run.dir={folder}", *more)

    def finish(process):
        output = "".join(process.communicate(timeout=600))
        assert process.returncode == 0, output[-3000:]

    finish(start("whole"))
    process, last = start("killed"), tmp_path / "killed/checkpoints/last.ckpt"
    while not last.is_file() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)  # both
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finish(start("killed", "resume=true"))
    assert left_behind(tmp_path / "killed") == left_behind(tmp_path / "whole")
