"""Folders -> runs: every run below some folders, how it ended, and in which settings runs differ."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rmd_plugin.compare.rows import Row
from rmd_plugin.report.run_folder import ROWS, STATUS, RunFolder, RunIdentity, RunStatus
from rmd_plugin.untrusted import read_text

Outcome = Literal["done", "failed", "unfinished", "unreadable"]

_HYDRA = ".hydra"
_IDENTITY = ("benchmark", "backbone", "seed")
#: parts of a config that say where and how a run works, not what it computes
_NOT_SETTINGS = {
    "hydra", "paths", "names", "logger", "monitor", "figures", "resamples", "num_workers", "resume", "verbose",
    "progress", "device", "devices", "enable_progress_bar", "enable_model_summary", "ood_monitor", "lr_monitor",
    "model_summary", "rich_progress", "dirpath",
}  # fmt: skip
_NOT_SETTINGS_ENDS = ("seed", "dir")
#: weights often differ from seed to seed: they are a setting only where runs would be the same without them
_WEIGHTS_ENDS = ("path", "checkpoint")
_UNSET = "unset"
_MAX_OVERRIDES = 1 << 20


@dataclass(frozen=True)
class Run:
    """One run, as found on disk; only the rows of ``done`` runs count."""

    path: Path
    outcome: Outcome
    #: why it is not done; for a done run a remark, if there is one
    reason: str = ""
    rows: Sequence[Row] = ()
    #: ``benchmark``, ``backbone`` and ``seed``, as far as they are known
    about: RunIdentity = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    #: in what its config differs from the other runs of its benchmark and backbone
    setting: str = ""
    #: to tell the newer of two equal runs
    ended: float = 0.0

    @property
    def name(self) -> str:
        """What the run is, for people: benchmark, backbone, setting, seed."""
        about = dict(self.about)
        benchmark, backbone, seed = (about.pop(key, "") for key in _IDENTITY)
        parts = [benchmark, backbone, self.setting, f"seed {seed}" if seed != "" else ""]
        parts += [f"{key}={value}" for key, value in about.items()]
        return ", ".join(str(part) for part in parts if part)


def gather_runs(folders: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """Every run in and below the folders, each folder once, in the order of their paths.

    A folder is a run if it holds ``status.json`` or ``rows.csv``, or if Hydra started a job in it. What cannot be read
    is a run too, with the outcome ``unreadable`` and the reason.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        for run in _below(Path(folder)):
            found.setdefault(run.path.resolve(), run)
    return _with_settings(list(found.values()))


def _below(top: Path) -> Iterator[Run]:
    if not top.is_dir():
        yield Run(top, "unreadable", "there is no such folder" if not top.exists() else "it is not a folder")
        return
    runs: list[Path] = []
    jobs: list[Path] = []  # Hydra started something here, and it wrote nothing
    problems: list[Run] = []

    def complain(error: OSError) -> None:
        problems.append(Run(Path(error.filename or top), "unreadable", error.strerror or str(error)))

    for folder, names, files in os.walk(top, onerror=complain):
        here = Path(folder)
        if STATUS in files or ROWS in files:
            runs.append(here)
            names.clear()
            continue
        if _HYDRA in names:
            jobs.append(here)
        names[:] = [name for name in names if not name.startswith(".")]
    runs += [job for job in jobs if not any(job in run.parents for run in runs)]
    yield from (read_run(path) for path in sorted(runs, key=_natural))
    yield from problems


def read_run(path: str | os.PathLike[str]) -> Run:
    """One run from its folder; never raises for what the folder holds."""
    folder = RunFolder(path)
    about = _job_identity(folder.path)
    try:
        status = folder.read_status() if folder.file(STATUS).exists() else None
        rows = folder.read_rows()
        # a copied folder keeps its status, but not always the times of its files
        ended = folder.file(ROWS).stat().st_mtime if rows else 0.0
        with suppress(ValueError, OverflowError):
            ended = datetime.fromisoformat(status.ended if status is not None else "").timestamp()
    except (OSError, ValueError) as error:
        return Run(folder.path, "unreadable", " ".join(str(error).split()), about=about)
    if rows:
        about = {key: getattr(rows[0], key) for key in _IDENTITY}
    elif status is not None and status.about:
        about = dict(status.about)
    outcome, reason = _outcome(status, rows)
    run = Run(folder.path, outcome, reason, rows if outcome == "done" else (), about, ended=ended)
    try:
        return replace(run, config=folder.read_config())
    except (OSError, ValueError) as error:
        # its numbers stand; only its settings are unknown
        return replace(run, reason=run.reason or " ".join(str(error).split()))


def _outcome(status: RunStatus | None, rows: Sequence[Row]) -> tuple[Outcome, str]:
    if status is None:
        # rows without a status: put there by hand or by an older version; the file appears only when it is whole
        return ("done", "") if rows else ("unfinished", f"Hydra started it, but it wrote no {STATUS}")
    if status.state == "done":
        return ("done", "") if rows else ("unreadable", f"it says that it is done, but has no rows in {ROWS}")
    if status.state == "failed":
        return "failed", status.reason or "no reason was written"
    if status.state == "interrupted":
        return "unfinished", status.reason or "interrupted"
    if status.gone:
        return "unfinished", "its process ended without a word; was it killed?"
    return "unfinished", f"still running: process {status.pid} on {status.host}, since {status.started}"


def _job_identity(folder: Path) -> dict[str, str | int]:
    """Hydra's overrides of a job: one that failed early left nothing else."""
    try:
        text = read_text(folder / _HYDRA / "overrides.yaml", _MAX_OVERRIDES)
    except (OSError, ValueError):
        return {}
    pairs = (line.lstrip("- ").strip("'\"").partition("=") for line in text.splitlines() if "=" in line)
    return {key.lstrip("+"): value for key, _, value in pairs}


# -- settings ---------------------------------------------------------------------------------------------------------


def _with_settings(runs: list[Run]) -> list[Run]:
    """Name what tells runs of one benchmark and backbone apart, the seed aside."""
    together: dict[tuple[object, object], dict[int, dict[tuple[str, ...], str]]] = {}
    for number, run in enumerate(runs):
        if run.config:
            key = run.about.get("benchmark"), run.about.get("backbone")
            together.setdefault(key, {})[number] = dict(_flatten(run.config))
    named = list(runs)
    for flat in together.values():
        keys = dict.fromkeys(key for values in flat.values() for key in values)
        varying = [key for key in keys if _varies(key, list(flat.values()))]
        rest = [key for key in varying if not key[-1].endswith(_WEIGHTS_ENDS)]
        told = {(runs[n].about.get("seed"), *map(values.get, rest)) for n, values in flat.items()}
        varying = rest if len(told) == len(flat) else varying
        for number, values in flat.items():
            text = ", ".join(f"{_short_name(key, varying)}={values.get(key, _UNSET)}" for key in varying)
            named[number] = replace(runs[number], setting=text)
    return named


def _varies(key: tuple[str, ...], runs: Sequence[Mapping[tuple[str, ...], str]]) -> bool:
    if key[0] in ("detector", "detectors"):
        # which detectors were run is no setting, and the options of one tell only those runs apart that have it
        runs = [values for values in runs if len(key) > 1 and any(other[:2] == key[:2] for other in values)]
    return len({values.get(key, _UNSET) for values in runs}) > 1


def _flatten(config: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The settings of a config: the names that lead to each, and its value as text."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name not in _NOT_SETTINGS and not str(name).endswith(_NOT_SETTINGS_ENDS):
                yield from _flatten(value, (*prefix, str(name)))
    else:
        yield prefix, f"{config:.12g}" if isinstance(config, float) else str(config)


def _short_name(key: tuple[str, ...], keys: Sequence[tuple[str, ...]]) -> str:
    """As few of the last parts of a key as tell it from the others."""
    length = 1
    while length < len(key) and sum(other[-length:] == key[-length:] for other in keys) > 1:
        length += 1
    return ".".join(key[-length:])


def _natural(path: Path) -> str:
    """Order in which job 10 follows job 9."""
    return re.sub(r"\d+", lambda found: found[0].zfill(20), str(path))
