"""What a run was made with: the command, the versions, the commit. Imports nothing heavy."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from rmd_plugin import __version__

#: further packages whose versions are worth keeping, where they are installed
PACKAGES = (
    "torch", "pytorch-ood", "pytorch-lightning", "lightning", "torchmetrics", "nflows", "hydra-core",
    "omegaconf", "numpy", "scipy", "scikit-learn", "matplotlib", "torchvision", "timm", "open-clip-torch",
    "transformers", "hydra-joblib-launcher", "hydra-submitit-launcher",
)  # fmt: skip


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
    """Commit of the checkout that tracks files in a folder, with ``+changes`` if files differ from it; None without."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # an environment that lies inside somebody's checkout is not part of it
        if not git("ls-files", "--", "."):
            return None
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
