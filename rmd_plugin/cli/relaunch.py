"""DDP inside a multirun: Lightning starts its other processes with the command line of the whole sweep.

Every one of them would then run the sweep again. Inside :func:`single_job` the command line is that of the job at hand,
and its output folder is the one that the sweep gave it. Afterwards nothing is left of the process group, so that the
next job of the sweep, in the same process, can make its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import read_write

from rmd_plugin.provenance import job_arguments

#: where Lightning notes the group it has made
_GROUP = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


@contextmanager
def single_job() -> Iterator[None]:
    """Make ``sys.argv`` and Hydra's run folder those of this job; both are restored afterwards."""
    if not HydraConfig.initialized():
        yield
        return
    settings = HydraConfig.get()
    arguments, folder, group = sys.argv, settings.run.dir, {name: os.environ.get(name) for name in _GROUP}
    try:
        sys.argv = [arguments[0], *job_arguments()]
        _set_run_folder(settings.runtime.output_dir)
        yield
    finally:
        sys.argv = arguments
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
