"""The folder of one run: names of its files, how each is written and read, and how the run ended.

Every report is drawn from these files alone. Nothing here imports torch, so that ``rmd-report`` starts at once.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  a sweep is summarised at exit, when pandas can no longer import this
import functools
import json
import math
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from rmd_plugin import __version__
from rmd_plugin.compare.rows import SECONDS, make_rows, read_csv, read_rows, write_rows
from rmd_plugin.files import one_line, parse_yaml, replacing

CONFIG = "config.yaml"  # resolved: a run can be repeated from it
ROWS = "rows.csv"  # the results, one number per line: a run that is repeated gives the same bytes
TIMINGS = "timings.csv"  # how long everything took, as rows too, but never the same twice
VERSIONS = "versions.json"  # command, versions of python and of the packages, commit, platform, preprocessing
STATUS = "status.json"  # how the run ended
HISTORY = "history.csv"  # what OODMonitor measured in every epoch
SCORES = "scores.npz"  # of every detector on every set
DETECTORS = "detectors"  # of the comparison, fitted and calibrated, a file each
HEAD = "head.safetensors"  # the linear layer from features to logits that they were compared with
SAMPLES = "samples.json"  # those with the highest and lowest scores, as thumbnails or texts
REPORT = "report.html"  # the page about the run

T = TypeVar("T")
State = Literal["running", "done", "failed", "interrupted"]
RunIdentity = Mapping[str, str | int]

#: names of the in-distribution test set, and of the held-out set that detectors were calibrated on, among the scores
ID, CALIBRATION = "test", "val"
#: detector -> :data:`ID`, :data:`CALIBRATION` or name of an OOD set -> scores of shape (N,)
Scores = Mapping[str, Mapping[str, np.ndarray]]

_HISTORY = {
    "stage": object, "epoch": int, "step": int, "detector": object, "ood": object, "metric": object, "value": float
}  # fmt: skip
_SEPARATOR = "//"

#: packages whose versions are kept, where they are installed
_PACKAGES = (
    "torch", "pytorch-ood", "pytorch-lightning", "lightning", "torchmetrics", "nflows", "hydra-core",
    "omegaconf", "numpy", "scipy", "scikit-learn", "matplotlib", "torchvision", "timm", "open-clip-torch",
    "transformers", "hydra-joblib-launcher", "hydra-submitit-launcher",
)  # fmt: skip
_SECRET = (
    r"(?:\w*_)?(?:api_?key|access_?key|private_?key|secret(?:_?key)?|password|passwd|passphrase|credentials?"
    r"|(?:api|auth|access|hf|bearer)_?token)|token"
)
_MASK = "***"


@dataclass(frozen=True)
class RunStatus:
    """How a run stands; times in ISO format with time zone, empty where they are not known."""

    state: State
    reason: str = ""  #: why it failed, on one line
    about: RunIdentity = field(default_factory=dict)  #: ``benchmark``, ``backbone`` and ``seed``, known before any row
    started: str = ""
    ended: str = ""
    host: str = ""
    pid: int = 0  #: process that writes the folder

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far; NaN if that is not known."""
        ended = _now() if self.state == "running" else self.ended
        if not ended or not self.started:
            return math.nan
        return (datetime.fromisoformat(ended) - datetime.fromisoformat(self.started)).total_seconds()


class RunFolder:
    """A run's folder: writes and reads its files, each of which appears whole or not at all.

    With several processes only one of them (rank 0) may write.

    Args:
        path: the folder; it is made when the first file is written.

    Example:
        >>> import tempfile
        >>> from rmd_plugin.compare.rows import make_row, make_rows
        >>> folder = RunFolder(tempfile.mkdtemp())
        >>> with folder.running(config={"seed": 0}, about={"benchmark": "digits", "backbone": "mlp", "seed": 0}):
        ...     folder.write_rows(make_rows([make_row("digits", "noise", "mlp", "rmd", 0, "AUROC", 0.99)]))
        >>> folder.read_status().state, folder.read_config()
        ('done', {'seed': 0})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def file(self, name: str) -> Path:
        """Path of one of the files."""
        return self.path / name

    # -- how it goes --------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the run ended well and its rows are there, so that it need not run again."""
        with suppress(OSError, ValueError):
            return self.file(ROWS).is_file() and self.read_status().state == "done"
        return False

    @contextmanager
    def running(
        self, *, config: Any = None, about: RunIdentity | None = None, command: str | None = None
    ) -> Iterator[RunFolder]:
        """Keep config, versions and status while a block runs: ``running``, then ``done`` or why not.

        An error is written to the status and raised again. Ctrl-C and SIGTERM leave the status ``interrupted``.

        Args:
            config: of OmegaConf (its interpolations are resolved), a plain mapping, or YAML text; None writes none.
            about: ``benchmark``, ``backbone`` and ``seed``, by which a run that gave no rows is known in a report.
            command: the command, by default :func:`current_command`.
        """
        self.start(config=config, about=about, command=command)
        try:
            with _exit_on_sigterm():
                yield self
        except BaseException as error:
            with suppress(OSError):  # what ended the run counts; a run that has gone is known by its process
                if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                    self.finish("interrupted", "terminated" if isinstance(error, SystemExit) else "stopped by the user")
                else:
                    self.finish("failed", describe_error(error))
            raise
        self.finish()

    def start(self, *, config: Any = None, about: RunIdentity | None = None, command: str | None = None) -> None:
        """Write config, command and versions, and the status ``running``. See :meth:`running`."""
        if config is not None:
            self.write_text(CONFIG, _config_text(config))
        self._write_json(VERSIONS, {"command": command or current_command(), **collect_versions()})
        status = RunStatus("running", about=about or {}, started=_now(), host=socket.gethostname(), pid=os.getpid())
        self._write_json(STATUS, asdict(status))

    def note(self, **more: str) -> None:
        """Add to what the run was made with, which :meth:`read_versions` gives."""
        self._write_json(VERSIONS, {**self.read_versions(), **more})

    def finish(self, state: State = "done", reason: str = "") -> None:
        """Write how the run ended, and why; what the status knew before stays."""
        try:
            before = self.read_status()
        except (OSError, ValueError):
            before = RunStatus("running", host=socket.gethostname())
        self._write_json(STATUS, asdict(replace(before, state=state, reason=" ".join(reason.split()), ended=_now())))

    def read_status(self) -> RunStatus:
        """How the run stands. FileNotFoundError if it has not written it, ValueError if the file is damaged."""
        return self._read(STATUS, lambda path: RunStatus(**_read_json(path)))

    # -- what it holds ------------------------------------------------------------------------------------------------

    def read_config(self) -> dict[str, Any]:
        """The config as plain data; empty if there is none. Nothing in it is resolved or executed."""
        return self._read(CONFIG, lambda path: dict(parse_yaml(path.read_text(encoding="utf-8"))), {})

    def read_versions(self) -> dict[str, Any]:
        """The command and the versions of everything that took part; empty if there are none."""
        return self._read(VERSIONS, _read_json, {})

    def write_rows(self, rows: pd.DataFrame) -> None:
        """Write the results, and apart from them the rows that are times."""
        times = rows["metric"].isin(SECONDS)
        write_rows(rows[~times], self._target(ROWS))
        write_rows(rows[times], self._target(TIMINGS))

    def read_rows(self) -> pd.DataFrame:
        """The results and the times; empty if there are none yet, ValueError if a file is damaged."""
        files = [self.file(name) for name in (ROWS, TIMINGS) if self.file(name).exists()]
        return pd.concat([make_rows(), *map(read_rows, files)], ignore_index=True)

    def write_history(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Write ``OODMonitor.history``: rows with stage, epoch, step, detector, ood, metric and value."""
        with replacing(self._target(HISTORY), newline="") as file:
            pd.DataFrame(list(history), columns=list(_HISTORY)).to_csv(file, index=False, lineterminator="\n")

    def read_history(self) -> list[dict[str, Any]]:
        """What :meth:`write_history` wrote; empty if there is none."""
        return self._read(HISTORY, lambda path: list(read_csv(path, _HISTORY).to_dict("records")), [])

    def write_scores(self, scores: Scores) -> None:
        """Write scores, detector -> set -> array of shape (N,), as float32 arrays named ``detector//set``."""
        flat = {
            f"{detector}{_SEPARATOR}{key}": np.asarray(values, dtype=np.float32)
            for detector, sets in scores.items()
            for key, values in sets.items()
        }
        with replacing(self._target(SCORES), "wb") as file:
            np.savez_compressed(file, **flat)  # type: ignore[arg-type]

    def read_scores(self) -> dict[str, dict[str, np.ndarray]]:
        """What :meth:`write_scores` wrote; empty if there is none."""

        def parse(path: Path) -> dict[str, dict[str, np.ndarray]]:
            scores: dict[str, dict[str, np.ndarray]] = {}
            with np.load(path, allow_pickle=False) as file:
                for key in file.files:
                    detector, _, split = key.partition(_SEPARATOR)
                    scores.setdefault(detector, {})[split] = file[key]
            return scores

        return self._read(SCORES, parse, {})

    def write_samples(self, samples: Mapping[str, Any]) -> None:
        """Write the samples with the outermost scores. See :func:`rmd_plugin.report.page.collect_samples`."""
        self._write_json(SAMPLES, samples)

    def read_samples(self) -> dict[str, Any]:
        """What :meth:`write_samples` wrote; empty if there is nothing."""
        return self._read(SAMPLES, _read_json, {})

    def _target(self, name: str) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.file(name)

    def write_text(self, name: str, text: str) -> None:
        """Write one of the files."""
        with replacing(self._target(name)) as file:
            file.write(text)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def _read(self, name: str, parse: Callable[[Path], T], empty: T | None = None) -> T:
        """A file as ``parse`` reads it; ``empty`` if there is none. Every error names the file."""
        path = self.file(name)
        if empty is not None and not path.exists():
            return empty
        try:
            return parse(path)
        except FileNotFoundError:
            raise
        except Exception as error:  # json, yaml, pandas, zipfile, zlib and numpy raise many kinds
            raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM, which ends a process without a word, into SystemExit; Lightning keeps handlers that it meets."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def describe_error(error: BaseException) -> str:
    """An error as one line: its type and what it says, without the pages that some libraries add."""
    text = one_line(error)
    text = text if len(text) <= 400 else text[:397] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# -- what a run was made with -----------------------------------------------------------------------------------------


def mask_secrets(content: Any) -> Any:
    """Plain data with ``***`` in place of the values of keys that look like secrets.

    Example:
        >>> mask_secrets({"logger": {"api_key": "abc", "name": "x"}, "num_tokens": 5})
        {'logger': {'api_key': '***', 'name': 'x'}, 'num_tokens': 5}
    """
    if isinstance(content, list):
        return [mask_secrets(item) for item in content]
    if not isinstance(content, Mapping):
        return content
    masked = {key: mask_secrets(value) for key, value in content.items()}
    secret = [key for key in masked if re.fullmatch(_SECRET, str(key), re.IGNORECASE)]
    return masked | {key: _MASK for key in secret if not isinstance(masked[key], (bool, type(None)))}


def _config_text(config: Any) -> str:
    from omegaconf import OmegaConf

    # a text keeps its references
    plain = parse_yaml(config) if isinstance(config, str) else OmegaConf.to_object(OmegaConf.create(config))
    return OmegaConf.to_yaml(mask_secrets(plain))


def current_command(program: str | None = None) -> str:
    """The command that repeats this run, as one would type it, with ``***`` in place of secrets.

    A launcher's worker process does not know the name of the program, so a command that can be swept gives it.
    """
    pattern = re.compile(rf"((?:^|\W)(?:{_SECRET})['\"]?\s*[=:]\s*)[^,}}\]]+", re.IGNORECASE)
    words = [pattern.sub(rf"\g<1>{_MASK}", word) for word in job_arguments()]
    return shlex.join([program or os.path.basename(sys.argv[0]), *words])


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


@functools.cache  # what a process runs is what it began with, whatever is installed or committed meanwhile
def collect_versions() -> dict[str, Any]:
    """Versions of python, of the packages and of the code, and the platform."""
    packages = {"rmd-plugin": __version__}  # known in a checkout that is not installed, too
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    checkout = Path(__file__).resolve().parents[2]
    commits = {"project_commit": git_commit(Path.cwd())}
    commits |= {"commit": git_commit(checkout)} if (checkout / ".git").exists() else {}
    known = {name: commit for name, commit in commits.items() if commit}
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": packages, **known}


def git_commit(folder: Path) -> str:
    """Commit of the checkout that a folder lies in, with ``+changes`` if tracked files differ; empty without one."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"]
    try:
        output = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no git here, or no commit
        return ""
    return output.strip()


def _now() -> str:
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")
