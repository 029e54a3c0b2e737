"""The Hydra callback that looks at the output folder first: Hydra ends with a traceback if it cannot make it.

Config: ``hydra.callbacks.output: {_target_: rmd_plugin.app.output_folder.OutputFolderCallback}``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class OutputFolderCallback(Callback):
    """Ends the command with one sentence where its folder cannot be written to.

    Args:
        command: name of the command, for the sentence.
        option: the option that names the folder.
    """

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
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reason = error.strerror or str(error)
            print(f"{self.command}: cannot write to {folder}: {reason}. Give another {option}=FOLDER.", file=sys.stderr)
            sys.exit(1)
