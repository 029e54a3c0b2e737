"""From a wheel, in a fresh environment: the commands, and a Hydra app of somebody else."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(*command, cwd):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    # a copy of what git knows: building leaves files behind
    run("git", "clone", "-q", ROOT, source / "clone", cwd=folder)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source / "clone", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """A fresh environment that borrows the installed torch, so that it takes seconds."""
    place = tmp_path_factory.mktemp("env")
    venv.create(place, with_pip=True)
    executable = place / "bin" / "python"
    site = Path(run(executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    run(executable, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", wheel, cwd=place)
    return executable


def test_the_wheel_holds_configs_and_the_plugin_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "rmd_plugin/conf/train.yaml" in names
    assert "rmd_plugin/conf/benchmark/digits.yaml" in names
    assert "rmd_plugin/conf/shared/callbacks/ood_monitor.yaml" in names
    assert "hydra_plugins/rmd_plugin/search_path.py" in names
    assert "rmd_plugin/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]


def test_a_foreign_hydra_app_has_the_monitor_by_name(python, tmp_path):
    app = ROOT / "examples/hydra_app/main.py"
    plain = run(python, app, f"hydra.run.dir={tmp_path}/plain", cwd=tmp_path)
    assert "ood/" not in plain
    watched = run(python, app, "callbacks=[default,ood_monitor]", f"hydra.run.dir={tmp_path}/watched", cwd=tmp_path)
    assert "ood/rmd/digits_6_9/AUROC: " in watched
    help_text = run(python, app, "--help", cwd=tmp_path)
    assert "wrn28_10" not in help_text  # our own configs stay ours


def test_commands_work_from_the_wheel(python, tmp_path):
    out = run(python.parent / "rmd-train", "trainer.max_epochs=1", "detector=[rmd,mahalanobis]", cwd=tmp_path)
    assert "RMD" in out
    assert run(python.parent / "rmd-compare", "--help", cwd=tmp_path)
    assert run(python.parent / "rmd-report", "--help", cwd=tmp_path)
