"""In fresh environments, from wheel and editable install: the commands, and somebody else's Hydra app."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: the build tool comes with the extra dev
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")


def run(*command, cwd):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what git knows: building leaves files behind."""
    folder = tmp_path_factory.mktemp("source")
    run("git", "clone", "-q", ROOT, folder / "clone", cwd=folder)
    return folder / "clone"


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", *OFFLINE, "-w", folder, clone, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=clone)
    (built,) = folder.glob("*.tar.gz")
    return built


def environment(place, *install):
    """The python of a fresh environment that borrows the installed torch, so that it takes seconds."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    said = run(python, "-m", "pip", "install", *OFFLINE, "--ignore-installed", *install, cwd=place)
    assert not [line for line in said.splitlines() if "warning" in line.lower() and "Location" not in line], said
    return python


@pytest.fixture(scope="module")
def from_wheel(wheel, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("env"), wheel)


@pytest.fixture(scope="module")
def from_checkout(clone, tmp_path_factory):
    return environment(tmp_path_factory.mktemp("env"), "-e", clone)


def test_the_wheel_holds_all_of_the_package_and_the_configs_and_the_plugin_and_nothing_else(wheel):
    tracked = run("git", "ls-files", "rmd_plugin", "conf", cwd=ROOT).split()
    moved = {"conf": "rmd_plugin/conf", "rmd_plugin/hydra_plugin": "hydra_plugins/rmd_plugin"}
    expected = set()
    for name in tracked:
        source = next((folder for folder in moved if name.startswith(folder + "/")), "")
        expected.add(moved[source] + name.removeprefix(source) if source else name)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {"rmd_plugin/conf/train.yaml", "rmd_plugin/py.typed", "hydra_plugins/rmd_plugin/search_path.py"} <= names


def test_the_source_distribution_builds_the_same_wheel(sdist, wheel, tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "-q", *OFFLINE, "-w", tmp_path, sdist, cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    assert built.read_bytes() == wheel.read_bytes()


@pytest.mark.parametrize("installed", ["from_wheel", "from_checkout"])
def test_a_foreign_hydra_app_has_the_monitor_by_name(request, installed, tmp_path):
    python, app = request.getfixturevalue(installed), ROOT / "examples/hydra_app/main.py"
    plugin = run(
        python, "-c", "import hydra_plugins.rmd_plugin.search_path as found; print(found.__file__)", cwd=tmp_path
    )
    assert plugin.startswith(str(python.parents[1]))  # not that of the environment whose torch is borrowed
    plain = run(python, app, f"hydra.run.dir={tmp_path}/plain", cwd=tmp_path)
    assert "ood/" not in plain
    assert "rmd-plugin" not in plain  # Hydra warns of a search path that is not there
    watched = run(python, app, "callbacks=[default,ood_monitor]", f"hydra.run.dir={tmp_path}/watched", cwd=tmp_path)
    assert "ood/rmd/digits_6_9/AUROC: " in watched
    help_text = run(python, app, "--help", cwd=tmp_path)
    assert "wrn28_10" not in help_text  # our own configs stay ours


@pytest.mark.parametrize("installed", ["from_wheel", "from_checkout"])
def test_the_commands_work(request, installed, tmp_path):
    python = request.getfixturevalue(installed)
    out = run(python.parent / "rmd-train", "trainer.max_epochs=1", "detector=[rmd,mahalanobis]", cwd=tmp_path)
    assert "RMD" in out
    assert run(python.parent / "rmd-compare", "--help", cwd=tmp_path)
    assert run(python.parent / "rmd-report", "--help", cwd=tmp_path)
