"""What Hydra does around our jobs: look at the output folder first, report on a sweep when it ends.

Named in ``conf/command/*.yaml`` under ``hydra.callbacks``.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rmd_plugin.report.run_folder import RunFolder, RunFolderError, describe_error

log = logging.getLogger(__name__)

#: written when a sweep begins: other sweeps may have left their jobs in the same folder
_STARTED = ".started"
#: written by Hydra when a job begins
_NOTE = ".hydra/overrides.yaml"


class OutputFolderCallback(Callback):
    """Ends the command with one sentence where its folder cannot be written to: Hydra ends with a traceback."""

    def __init__(self, command: str, option: str = "hydra.run.dir") -> None:
        self.command, self.option = command, option

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the folder of a single job."""
        self._check(str(config.hydra.run.dir), self.option)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look at the folder of a sweep."""
        self._check(str(config.hydra.sweep.dir), "hydra.sweep.dir")

    def _check(self, folder: str, option: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
            # permissions alone do not tell: disks are full or read-only
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(4096))
                file.flush()
        except OSError as error:
            full = "the disk is full: " if error.errno == errno.ENOSPC else ""
            reason = full + (error.strerror or str(error))
            print(f"{self.command}: cannot write to {folder}: {reason}. Give another {option}=FOLDER.", file=sys.stderr)
            sys.exit(1)


class ReportCallback(Callback):
    """Summarises a sweep when it ends, however it ends, and notes the reason of a job that failed early.

    Neither ever makes a job or a sweep fail: a problem is one warning. ``metric`` is what the summary is of, and
    ``reference`` the detector that the others are compared with.
    """

    def __init__(self, metric: str = "AUROC", reference: str = "rmd") -> None:
        self.metric, self.reference = metric, reference
        self._folder, self._started = Path(), 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember folder and time, and report at exit: Hydra calls no end if a job failed or the sweep was stopped."""
        self._folder = Path(os.path.abspath(config.hydra.sweep.dir))
        self._folder.mkdir(parents=True, exist_ok=True)
        # the clock of the folder's file system: jobs may run on other machines
        stamp = self._folder / _STARTED
        stamp.write_text(f"{os.getpid()}\n", encoding="utf-8")
        self._started = stamp.stat().st_mtime_ns
        atexit.register(self._report)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Report on all jobs."""
        atexit.unregister(self._report)
        self._report()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write why a job failed, if it failed before it could do so itself."""
        if job_return.status is not JobStatus.FAILED:
            return
        folder = RunFolder(config.hydra.runtime.output_dir)
        try:
            try:
                ended = folder.read_status().state != "running"
            except (FileNotFoundError, RunFolderError):
                ended = False
            if not ended:
                # the property of this name raises the job's error instead of returning it
                error = job_return._return_value
                reason = describe_error(error) if isinstance(error, BaseException) else "it raised an error"
                folder.finish("failed", reason)
        except Exception as problem:
            log.warning("The reason of the failed job could not be written: %s", describe_error(problem))

    def _jobs(self) -> list[Path]:
        """Folders of this sweep's jobs, those that were finished before too: Hydra notes its overrides in every one."""
        begun = {note.parents[1]: note.stat().st_mtime_ns for note in self._folder.rglob(_NOTE)}
        if not begun:  # hydra.output_subdir=null
            return [self._folder]
        return sorted((job for job, when in begun.items() if when >= self._started), key=begun.__getitem__)

    def _report(self) -> None:
        if not self._folder.is_dir():
            return
        try:
            from rmd_plugin.app.report import report_runs

            report_runs(self._jobs(), self._folder, metric=self.metric, reference=self.reference)
        except Exception as problem:
            log.warning("The sweep could not be summarised: %s", describe_error(problem))
