"""Success does not depend on the console: results, status and exit code are those of a run that could print."""

import os
import subprocess
import sys

import config_kit
import pytest

from rmd_plugin.compare.rows import Row
from rmd_plugin.report.run_folder import RunFolder

#: how a shell leads the output of a command somewhere where it cannot be written
CONSOLES = {
    "latin-1": ("", {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}),
    "ascii, strict": ("", {"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}),
    "closed output": (">&-", {}),
    "nothing open": ("<&- >&- 2>&-", {}),
    "full output": (">/dev/full", {}),
    "full output and errors": (">/dev/full 2>&1", {}),
    "broken pipe": ("2>&1 | true", {}),
}
SIZES = [
    *("simulation.dim=8", "simulation.n_train=60", "simulation.n_test=30", "simulation.seeds=1"),
    *("simulation.sweep_dims=[4]", "simulation.sweep_sigmas=[0.5]", "simulation.sweep_seeds=1"),
    *("simulation.sweep_n_train=60", "simulation.network_width=8", "simulation.network_seeds=1"),
]
TINY = ["limit_train=120", "limit_test=30", "resamples=20", "figures=false"]
COMMANDS = {
    "rmd_plugin.app.compare": ["benchmark=digits", "detector=[rmd]", "cache_dir=null", *TINY, "hydra.run.dir=out"],
    "rmd_plugin.app.train": [
        "benchmark=digits", "backbone=mlp", "detector=[rmd,msp]", "trainer.max_epochs=1", *TINY, "hydra.run.dir=out",
    ],
}  # fmt: skip

full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
pytestmark = [full, pytest.mark.skipif(os.name != "posix", reason="a POSIX shell leads the output away")]


def shell(folder, module, words, console, *, code=None):
    """Run a command behind a console, and return its exit code; of a pipe the code of the command itself."""
    redirect, variables = CONSOLES[console]
    program = ["-c", code] if code else ["-m", module]
    script = f'set -o pipefail; "$@" {redirect}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, *program, *words],
        cwd=folder, env=config_kit.environment(**variables), capture_output=True, text=True, errors="replace",
        timeout=600, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)  # shown if the test fails
    assert "Traceback" not in done.stderr
    return done.returncode


@pytest.fixture
def runs(tmp_path):
    """A folder with one finished run whose name no narrow console can show."""
    folder = RunFolder(tmp_path / "runs" / "grüße → 猫")
    with folder.running(about={"benchmark": "猫", "backbone": "mlp", "seed": 0}):
        folder.write_rows([Row("猫", "noise", "mlp", "rmd", 0, "AUROC", 0.9)])
    return tmp_path


@pytest.mark.parametrize("console", CONSOLES)
def test_output_that_cannot_be_written_is_dropped_without_an_error(console, tmp_path):
    code = (
        "import sys, logging; from rmd_plugin.app.console import protect_console; protect_console();"
        "protect_console(); logging.basicConfig(stream=sys.stderr);"
        "print('\\u732b \\udcff' * 9999, flush=True); print('x' * 9999); logging.warning('\\u2192');"
        "print('y', file=sys.stderr); sys.stdout.isatty();"
        "file = open('result.txt', 'w'); file.fileno() > 2 or 1 / 0;"
        "file.write('whole'); file.close()"
    )
    assert shell(tmp_path, None, [], console, code=code) == 0
    assert (tmp_path / "result.txt").read_text() == "whole"


def test_a_console_that_can_show_everything_gets_everything(tmp_path):
    code = "from rmd_plugin.app.console import protect_console; protect_console(); print('→ 猫 \\udcff')"
    done = config_kit.python("-c", code, cwd=tmp_path, PYTHONIOENCODING="utf-8")
    assert (done.stdout, done.returncode) == ("→ 猫 \\udcff\n", 0)


def test_a_stream_that_somebody_put_in_place_stays(capsys):
    from rmd_plugin.app.console import protect_console

    before = sys.stdout
    protect_console()
    assert sys.stdout is before


@pytest.mark.slow
@pytest.mark.parametrize("console", CONSOLES)
def test_a_report_is_written_whatever_the_console(console, runs):
    assert shell(runs, "rmd_plugin.app.report", ["runs", "-o", "summary"], console) == 0
    assert "猫" in (runs / "summary" / "summary.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("console", ["latin-1", "nothing open", "full output and errors"])
@pytest.mark.parametrize("module", COMMANDS)
def test_a_run_ends_well_whatever_the_console(module, console, tmp_path):
    assert shell(tmp_path, module, COMMANDS[module], console) == 0
    folder = RunFolder(tmp_path / "out")
    assert folder.read_status().state == "done"
    assert folder.read_rows()
    assert folder.file("table.md").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("console", CONSOLES)
def test_the_studies_are_listed_whatever_the_console(console, tmp_path):
    assert shell(tmp_path, "rmd_plugin.paper.reproduce", [], console) == 0


@pytest.mark.slow
def test_a_study_is_written_whatever_the_console(tmp_path):
    words = ["study=simulation", *SIZES, "output=out"]
    assert shell(tmp_path, "rmd_plugin.paper.reproduce", words, "full output and errors") == 0
    assert (tmp_path / "out" / "simulation" / "comparison.md").stat().st_size > 0


@pytest.mark.slow
def test_a_sweep_ends_well_whatever_the_console(tmp_path):
    words = ["-m", "seed=0,1", "benchmark=digits", "detector=[rmd]", "cache_dir=null", *TINY, "hydra.sweep.dir=out"]
    assert shell(tmp_path, "rmd_plugin.app.compare", words, "full output and errors") == 0
    assert [RunFolder(tmp_path / "out" / name).read_status().state for name in "01"] == ["done", "done"]
    assert (tmp_path / "out" / "summary.html").is_file()
