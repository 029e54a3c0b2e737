"""The folder of one run: names of its files, how each is written and read, and how the run ended.

Every report is drawn from these files alone. Nothing here imports torch, so that ``rmd-report`` starts at once.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  a sweep is summarised at exit, when pandas can no longer import this
import csv
import io
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import SECONDS, Row, read_rows, write_rows
from rmd_plugin.report.provenance import collect_versions, current_command
from rmd_plugin.report.samples import Samples, parse_samples
from rmd_plugin.report.scores import Profile, read_directions, read_scores, write_directions, write_scores
from rmd_plugin.untrusted import DataFormatError, from_csv_cell, one_line, read_mapping, read_text, to_csv_cell

CONFIG = "config.yaml"  # resolved: a run can be repeated from it
ROWS = "rows.csv"  # the results, one number per line: a run that is repeated gives the same bytes
TIMINGS = "timings.csv"  # how long everything took, as rows too, but never the same twice
VERSIONS = "versions.json"  # command, versions of python and of the packages, commit, platform, preprocessing
STATUS = "status.json"  # how the run ended
HISTORY = "history.csv"  # what OODMonitor saw in every epoch
SCORES = "scores.npz"  # of every detector on every set
DIRECTIONS = "directions.npz"  # contributions along the directions of a detector, summarised
DETECTORS = "detectors"  # of the comparison, fitted and calibrated, a file each
HEAD = "head.safetensors"  # the linear layer from features to logits that they were compared with
SAMPLES = "samples.json"  # those with the highest and lowest scores, as thumbnails or texts
REPORT = "report.html"  # the page about the run

#: of a config or of versions, in bytes, and of a table
_MAX_TEXT, _MAX_TABLE = 1 << 20, 1 << 28

State = Literal["running", "done", "failed", "interrupted"]
RunIdentity = Mapping[str, str | int]

#: columns of the history, and how each is read
_HISTORY_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "stage": from_csv_cell, "epoch": int, "step": int, "detector": from_csv_cell, "ood": from_csv_cell,
    "metric": from_csv_cell,
    "value": lambda text: float(text or "nan"),
}  # fmt: skip


class RunFolderError(ValueError):
    """A file of a run folder does not hold what it should. The message names the file and what is wrong."""


@dataclass(frozen=True)
class RunStatus:
    """How a run stands; times in ISO format with time zone, empty where they are not known."""

    state: State
    #: why it failed, on one line
    reason: str = ""
    #: what the run is, known before it has rows: ``benchmark``, ``backbone``, ``seed``
    about: RunIdentity = field(default_factory=dict)
    started: str = ""
    ended: str = ""
    host: str = ""
    #: process that writes the folder
    pid: int = 0

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far if this process is the run; NaN if that is not known."""
        ended = _now() if self.state == "running" and self.pid == os.getpid() else self.ended
        try:
            return (datetime.fromisoformat(ended) - datetime.fromisoformat(self.started)).total_seconds()
        except (ValueError, TypeError):
            return math.nan

    @property
    def gone(self) -> bool:
        """Whether it says ``running`` but its process, which ran on this machine, is no longer there."""
        if self.state != "running" or self.host != socket.gethostname() or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)  # signal 0 asks only whether the process exists
        except (OSError, OverflowError) as error:
            return isinstance(error, ProcessLookupError)
        return False


class RunFolder:
    """A run's folder: writes and reads its files, each of which appears whole or not at all.

    With several processes only one of them (rank 0) may write.

    Args:
        path: the folder; it is made when the first file is written.

    Example:
        >>> import tempfile
        >>> from rmd_plugin.compare.rows import Row
        >>> folder = RunFolder(tempfile.mkdtemp())
        >>> with folder.running(config={"seed": 0}, about={"benchmark": "digits", "backbone": "mlp", "seed": 0}):
        ...     folder.write_rows([Row("digits", "noise", "mlp", "rmd", 0, "AUROC", 0.99)])
        >>> folder.read_status().state, folder.read_config()
        ('done', {'seed': 0})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def file(self, name: str) -> Path:
        """Path of one of the files."""
        return self.path / name

    @property
    def done(self) -> bool:
        """Whether the run ended well and its rows are there, so that it need not run again."""
        try:
            return self.file(ROWS).is_file() and self.read_status().state == "done"
        except (OSError, RunFolderError):
            return False

    @contextmanager
    def running(
        self, *, config: Any = None, about: RunIdentity | None = None, command: str | None = None
    ) -> Iterator[RunFolder]:
        """Keep config, versions and status while a block runs: ``running``, then ``done`` or why not.

        An error is written to the status and raised again; Ctrl-C leaves the status ``interrupted``.

        Args:
            config: see :meth:`write_config`; None writes none.
            about: ``benchmark``, ``backbone`` and ``seed``, by which a run that gave no rows is known in a report.
            command: the command, by default :func:`current_command`.
        """
        self.start(config=config, about=about, command=command)
        try:
            yield self
        except (KeyboardInterrupt, GeneratorExit):
            with suppress(OSError):  # what ended the run counts; a run that has gone is known by its process
                self.finish("interrupted", "stopped by the user")
            raise
        except BaseException as error:
            with suppress(OSError):
                self.finish("failed", describe_error(error))
            raise
        self.finish()

    def start(self, *, config: Any = None, about: RunIdentity | None = None, command: str | None = None) -> None:
        """Write config, command and versions, and the status ``running``. See :meth:`running`."""
        if config is not None:
            self.write_config(config)
        self._write_json(VERSIONS, {"command": command or current_command(), **collect_versions()})
        self._write_status(
            RunStatus("running", about=about or {}, started=_now(), host=socket.gethostname(), pid=os.getpid())
        )

    def note(self, **more: str) -> None:
        """Add to what the run was made with, which :meth:`read_versions` gives."""
        self._write_json(VERSIONS, {**self.read_versions(), **more})

    def finish(self, state: State = "done", reason: str = "") -> None:
        """Write how the run ended, and why; what the status knew before stays."""
        try:
            before = self.read_status()
        except (OSError, RunFolderError):
            before = RunStatus("running")
        host = before.host or socket.gethostname()
        self._write_status(
            replace(before, state=state, reason=one_line(" ".join(reason.split())), ended=_now(), host=host)
        )

    def _write_status(self, status: RunStatus) -> None:
        content = vars(status) | {"about": dict(status.about)}
        try:
            self._write_json(STATUS, content)
        except OSError:
            # a full disk has no room for a new file, but the old one keeps its own
            with open(self.file(STATUS), "r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                file.write(json.dumps(content).encode().ljust(size))

    def read_status(self) -> RunStatus:
        """How the run stands. FileNotFoundError if it has not written it, RunFolderError if the file is damaged."""
        found = self._read_mapping(STATUS)
        state = found.get("state")
        if state not in get_args(State):
            raise RunFolderError(
                f"{self.file(STATUS)}: state must be one of {', '.join(get_args(State))}, got {state!r}."
            )
        about, pid = found.get("about"), found.get("pid")
        about = about if isinstance(about, dict) else {}
        return RunStatus(
            cast(State, state),
            # a name or a number; whatever else a file may hold is not what a run is called
            about={key: value for key, value in about.items() if isinstance(value, (str, int))},
            pid=pid if isinstance(pid, int) else 0,
            **{name: str(found.get(name, "")) for name in ("reason", "started", "ended", "host")},
        )

    def write_config(self, config: Any) -> None:
        """Write the config: of OmegaConf (its interpolations are resolved), a plain mapping, or YAML text."""
        if not isinstance(config, str):
            from omegaconf import OmegaConf

            # sorted by nothing: the order of the config is the order in which people wrote it
            config = OmegaConf.to_yaml(OmegaConf.create(config), resolve=True)
        self._write_text(CONFIG, config)

    def read_config(self) -> dict[str, Any]:
        """The config as plain data; empty if there is none. Nothing in it is resolved or executed."""
        return self._read_mapping(CONFIG) if self.file(CONFIG).exists() else {}

    def read_versions(self) -> dict[str, Any]:
        """The command and the versions of everything that took part; empty if there are none."""
        return self._read_mapping(VERSIONS) if self.file(VERSIONS).exists() else {}

    def read_text(self, name: str) -> str:
        """Text of a file. FileNotFoundError if it is not there, RunFolderError if it is no text."""
        try:
            return read_text(self.file(name), _MAX_TEXT)
        except DataFormatError as error:
            raise RunFolderError(str(error)) from error

    def write_rows(self, rows: Iterable[Row]) -> None:
        """Write the results, and apart from them the rows that are times."""
        rows = list(rows)
        write_rows((row for row in rows if row.metric not in SECONDS), self._target(ROWS))
        write_rows((row for row in rows if row.metric in SECONDS), self._target(TIMINGS))

    def read_rows(self) -> list[Row]:
        """The results and the times; empty if there are none yet, RowsError if a file is damaged."""
        found = []
        for name in (ROWS, TIMINGS):
            with suppress(FileNotFoundError):
                found += read_rows(self.file(name))
        return found

    def write_history(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Write ``OODMonitor.history``: rows with stage, epoch, step, detector, ood, metric and value, and no more."""
        with replacing(self._target(HISTORY), newline="") as file:
            writer = csv.DictWriter(file, list(_HISTORY_COLUMNS), extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            # csv writes a float as the shortest text that reads back to the same bits
            for row in history:
                texts = {name: to_csv_cell(one_line(text)) for name, text in row.items() if isinstance(text, str)}
                writer.writerow({**row, **texts, "value": "" if math.isnan(row["value"]) else float(row["value"])})

    def read_history(self) -> list[dict[str, Any]]:
        """What :meth:`write_history` wrote; empty if there is none."""
        path = self.file(HISTORY)
        try:
            reader = csv.DictReader(io.StringIO(read_text(path, _MAX_TABLE), newline=""), strict=True)
            missing = [name for name in _HISTORY_COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"it lacks the columns {', '.join(missing)}")
            records = list(reader)
            if any(record[name] is None for record in records for name in _HISTORY_COLUMNS):
                raise ValueError("a line ends early. Was the file cut off?")
            return [{name: parse(record[name]) for name, parse in _HISTORY_COLUMNS.items()} for record in records]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise RunFolderError(f"{path} does not hold a history: {describe_error(error)}") from error

    def write_scores(self, scores: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Write scores: detector -> set -> array of shape (N,)."""
        write_scores(scores, self._target(SCORES))

    def read_scores(self) -> dict[str, dict[str, np.ndarray]]:
        """What :meth:`write_scores` wrote; empty if there is none."""
        return read_scores(self.file(SCORES)) if self.file(SCORES).exists() else {}

    def write_samples(self, samples: Samples) -> None:
        """Write the samples with the outermost scores."""
        self._write_json(SAMPLES, samples.to_plain())

    def read_samples(self) -> Samples | None:
        """What :meth:`write_samples` wrote; None if there is nothing."""
        if not self.file(SAMPLES).exists():
            return None
        try:
            return parse_samples(json.loads(read_text(self.file(SAMPLES), _MAX_TABLE)))
        except ValueError as error:
            raise RunFolderError(f"{self.file(SAMPLES)}: {error}") from error

    def write_directions(self, contributions: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Summarise and write contributions: detector -> set -> terms (N, r) as ``detector.contributions(z)`` gives."""
        write_directions(contributions, self._target(DIRECTIONS))

    def read_directions(self) -> dict[str, dict[str, Profile]]:
        """What :meth:`write_directions` wrote; empty if there is none."""
        return read_directions(self.file(DIRECTIONS)) if self.file(DIRECTIONS).exists() else {}

    def _target(self, name: str) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.file(name)

    def _write_text(self, name: str, text: str) -> None:
        with replacing(self._target(name)) as file:
            file.write(text)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self._write_text(name, json.dumps(content, indent=2) + "\n")

    def _read_mapping(self, name: str) -> dict[str, Any]:
        try:
            return read_mapping(self.file(name), _MAX_TEXT)
        except DataFormatError as error:
            raise RunFolderError(str(error)) from error


def describe_error(error: BaseException) -> str:
    """An error as one line: its type and what it says, without the pages that some libraries add."""
    lines = [line.strip() for line in str(error).splitlines()]
    # OmegaConf adds where it was in its own structure
    lines = [line for line in lines if line and not line.startswith(("full_key:", "object_type="))]
    text = " ".join(lines[:3])
    text = one_line(text if len(text) <= 400 else text[:397] + "...")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _now() -> str:
    return datetime.now(timezone.utc).astimezone().isoformat(timespec="seconds")
