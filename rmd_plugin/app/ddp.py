"""DDP inside a multirun: Lightning starts its other processes with the command line of the whole sweep.

Every one of them would then run the sweep again or, in a worker process of a launcher, the launcher's own program.
Inside :func:`single_job` the command is that of the job at hand, and its output folder is the one that the sweep gave
it. Afterwards nothing is left of the process group, so that the next job of the sweep, in the same process, can make
its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import read_write
from pytorch_lightning.utilities import rank_zero_only

from rmd_plugin.report.provenance import job_arguments

#: where Lightning notes the group it has made
_GROUP = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
#: what the other processes run if this one is a worker of a launcher, whose own program is none of ours
_PROGRAM = "rmd_plugin.app.train"


def helps_to_train() -> bool:
    """Whether this is a further process of DDP, which only trains: the first one compares and writes."""
    return rank() > 0


def rank() -> int:
    """The number of this process, also before a trainer has made the group."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


@contextmanager
def single_job() -> Iterator[None]:
    """Make ``sys.argv`` and Hydra's run folder those of this job; both are restored afterwards."""
    if not HydraConfig.initialized():
        yield
        return
    settings, main = HydraConfig.get(), sys.modules["__main__"]
    program = main.__spec__
    arguments, folder, group = sys.argv, settings.run.dir, {name: os.environ.get(name) for name in _GROUP}
    try:
        sys.argv = [arguments[0], *job_arguments()]
        _set_run_folder(settings.runtime.output_dir)
        if settings.mode == RunMode.MULTIRUN and not str(settings.launcher._target_).endswith(".BasicLauncher"):
            main.__spec__ = find_spec(_PROGRAM)
        yield
    finally:
        sys.argv, main.__spec__ = arguments, program
        _set_run_folder(folder)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in group.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _set_run_folder(folder: str) -> None:
    config: Any = HydraConfig.instance().cfg  # a DictConfig, whatever its annotation says
    if config is not None:
        with read_write(config.hydra):
            config.hydra.run.dir = folder
