"""What a run was made with: the command, the versions, the commit. Imports nothing heavy."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from rmd_plugin import __version__
from rmd_plugin.untrusted import read_text

#: further packages whose versions are worth keeping, where they are installed
PACKAGES = (
    "torch", "pytorch-ood", "pytorch-lightning", "lightning", "torchmetrics", "nflows", "hydra-core",
    "omegaconf", "numpy", "scipy", "scikit-learn", "matplotlib", "torchvision", "timm", "open-clip-torch",
    "transformers", "hydra-joblib-launcher", "hydra-submitit-launcher",
)  # fmt: skip
#: of the files HEAD and packed-refs in a checkout
_NOTE_BYTES, _REFS_BYTES = 1 << 12, 1 << 26


def current_command(program: str | None = None) -> str:
    """The command that repeats this run, as one would type it.

    A launcher's worker process does not know the name of the program, so a command that can be swept gives it.
    """
    return shlex.join([program or os.path.basename(sys.argv[0]), *job_arguments()])


def job_arguments() -> list[str]:
    """The words after the command's name; inside a Hydra sweep those of this job alone."""
    # not imported here: without Hydra in memory there is no Hydra job
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized():
        config = hydra.HydraConfig.get()
        if config.mode is not None and config.mode.name == "MULTIRUN":
            folders = [source.path for source in config.runtime.config_sources if source.provider == "command-line"]
            options = ["--config-dir", folders[0], "--config-name", config.job.config_name] if folders else []
            return [*options, *map(str, config.overrides.task)]
    return sys.argv[1:]


def collect_versions() -> dict[str, Any]:
    """Versions of python, of the packages and of the code, and the platform."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    found["packages"] = dict(_packages())
    commit, project = git_commit(Path(__file__).parent), git_commit(Path.cwd())
    if commit:
        found["commit"] = commit
    if project and project != commit:
        found["project_commit"] = project
    return found


# asked once: what a process runs is what it began with, whatever is installed or committed meanwhile
@functools.cache
def _packages() -> dict[str, str]:
    packages = {"rmd-plugin": __version__}  # known in a checkout that is not installed, too
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return packages


@functools.cache
def git_commit(folder: Path) -> str | None:
    """Commit of the checkout that tracks files in a folder, with ``+changes`` if files differ from it; None without.

    Nothing that the checkout names is run: no hook, filter, file system monitor or transport. The commit is read from
    its files; what has changed is told by a git that sees its index and objects, but not its settings.
    """
    top = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)
    if top is None:
        return None
    try:
        inside = _git_folder(top)
        shared = inside / _first_line(inside / "commondir", ".")
        commit = _find_commit(inside, shared)
    except (OSError, ValueError):
        return None
    try:
        with tempfile.TemporaryDirectory() as settings:
            return _with_changes(commit, folder, top, inside, shared, Path(settings))
    except (OSError, subprocess.SubprocessError):  # no git here, or what it needs is missing
        return commit


def _git_folder(top: Path) -> Path:
    """The folder ``.git``, or where the file of that name says it is: in a worktree or submodule."""
    place = top / ".git"
    return place if place.is_dir() else top / _first_line(place).removeprefix("gitdir: ")


def _first_line(path: Path, default: str | None = None) -> str:
    if default is not None and not path.exists():
        return default
    return (read_text(path, _NOTE_BYTES).splitlines() or [""])[0].strip()


def _find_commit(inside: Path, shared: Path) -> str:
    """What HEAD says; ValueError if that is no commit."""
    found = _first_line(inside / "HEAD")
    if found.startswith("ref: "):
        name = found.removeprefix("ref: ")
        loose = next((place / name for place in (inside, shared) if (place / name).is_file()), None)
        if loose is not None:
            found = _first_line(loose)
        else:
            packed = read_text(shared / "packed-refs", _REFS_BYTES).splitlines()
            found = next((line.partition(" ")[0] for line in packed if line.endswith(f" {name}")), "")
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", found):
        raise ValueError("HEAD is no commit")
    return found


def _with_changes(commit: str, folder: Path, top: Path, inside: Path, shared: Path, settings: Path) -> str | None:
    (settings / "HEAD").write_text(commit, encoding="ascii")
    for name in ("refs", "objects"):
        (settings / name).mkdir()
    places = {"GIT_DIR": settings, "GIT_WORK_TREE": top, "GIT_INDEX_FILE": inside / "index"}
    places["GIT_OBJECT_DIRECTORY"] = shared / "objects"
    environment = {**os.environ, **{name: os.path.abspath(place) for name, place in places.items()}}

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", *words]
        options: dict[str, Any] = {"cwd": folder, "env": environment, "timeout": 10, "check": True}
        return subprocess.run(command, capture_output=True, text=True, **options).stdout

    # an environment that lies inside somebody's checkout is not part of it
    if not git("ls-files", "--", "."):
        return None
    # a submodule has settings of its own
    changed = git("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return f"{commit}+changes" if changed else commit
