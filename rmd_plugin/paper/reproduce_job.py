"""One call of ``rmd-reproduce``: experiments, studies, figures, the document."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rmd_plugin.app.errors import one_clear_error, whole_number
from rmd_plugin.app.fitting import logged_warnings
from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import write_rows
from rmd_plugin.paper import flows, partial, robustness, simulation, spectrum, tables
from rmd_plugin.paper.document import StudySummary, comparison_table, write_document
from rmd_plugin.paper.figures import make_figures
from rmd_plugin.paper.published import NOT_RUN, TABLES, Line
from rmd_plugin.paper.result import FinishedRun, StudyResult
from rmd_plugin.paper.runs import compose_experiment, finish
from rmd_plugin.paper.studies import (
    DOCUMENT,
    SIMULATION,
    STUDIES,
    cell_name,
    check_cells,
    chosen_studies,
    experiments,
    reproduce_command,
)
from rmd_plugin.report.provenance import collect_versions, job_arguments
from rmd_plugin.report.run_folder import RunFolder, describe_error
from rmd_plugin.report.style import save_figure
from rmd_plugin.report.table import to_latex, to_markdown, to_terminal

log = logging.getLogger(__name__)

#: what says enough in one line; any other error is a fault of a program, and its traceback goes to the log
_EXPECTED = (OSError, ValueError, ImportError)


def run(config: DictConfig) -> None:
    """Run the studies of a config, and write the document."""
    with one_clear_error("rmd-reproduce"), logged_warnings():
        names = chosen_studies(config.study)
        whole_number(config.seed, "seed")
        check_cells(names, config.scale, config.cells)
        reproduction = Reproduction(config, names)
        failed = {}
        for name in names:
            try:
                reproduction.run(name)
            except Exception as error:  # whatever is wrong with one study, the others stand
                if len(names) == 1:
                    raise
                failed[name] = _reason(error)
                log.warning("study %s failed: %s", name, failed[name], exc_info=not isinstance(error, _EXPECTED))
        if config.document is not None:
            path = write_document(str(config.document), [reproduction.root / name for name in DOCUMENT])
            print(f"Document: {path}")
        if failed:
            reasons = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
            raise ValueError(f"{len(failed)} of {len(names)} studies failed: {reasons}")


class Reproduction:
    """Runs studies of one scale and writes what they give.

    All experiments are composed first: a mistake in what was typed must not replace a finished study.
    """

    def __init__(self, config: DictConfig, studies: Sequence[str]) -> None:
        self.config, self.root = config, Path(str(config.output))
        names = dict.fromkeys(name for study in studies for name in experiments(study, config.scale))
        self.composed = {name: compose_experiment(name, config) for name in names if name != SIMULATION}
        self._finished: dict[str, FinishedRun] = {}

    def run(self, name: str) -> None:
        """Run one study and write rows, arrays, figures, tables and its summary."""
        started = time.perf_counter()
        runs, missing = self._runs(name)
        result = self._analyse(name, runs, missing)
        about, folder = STUDIES[name].about, self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(result.rows, folder / "rows.csv")
        with replacing(folder / "arrays.npz", "wb") as file:
            # keys hold slashes, which are folders inside the archive: numpy reads them back as they are
            np.savez_compressed(file, **result.arrays)  # type: ignore[arg-type]
        figures = make_figures(result)
        for stem, (figure, _) in figures.items():
            save_figure(figure, folder / stem)
        table = comparison_table(result.comparisons, about)
        for suffix, text in (("md", to_markdown(table)), ("tex", to_latex(table, label=f"tab:{name}"))):
            with replacing(folder / f"comparison.{suffix}") as file:
                file.write(text)
        config, seconds = self.config, time.perf_counter() - started
        StudySummary(
            study=name,
            about=about,
            scale=config.scale,
            comparisons=result.comparisons,
            notes=result.notes,
            figures={stem: caption for stem, (_, caption) in figures.items()},
            seconds=seconds,
            commands=self._commands(name),
            command=self._command(name),
            versions=collect_versions(),
            machine=describe_machine(),
        ).write(folder)
        console = Console(width=max(Console().width, 110))  # narrower, the numbers would be cut off
        console.print(to_terminal(comparison_table(result.comparisons, about, remarks_below=True), width=110))
        print(f"{name}: {folder} ({seconds:.0f} s)")

    def _runs(self, study: str) -> tuple[list[FinishedRun], dict[str, str]]:
        """The experiments of a study after they were run, and those that could not be, with the reason."""
        runs, missing = [], {}
        for name in experiments(study, self.config.scale):
            if name == SIMULATION:
                sizes = {key: self.config.simulation[key] for key in ("dim", "sigma", "n_train", "n_test")}
                runs.append(FinishedRun(("", ""), [], simulation.simulated_features(**sizes, seed=self.config.seed)))
                continue
            cfg, wanted = self.composed[name], self.config.cells
            # a finished experiment counts: those that are run one by one come together in their study
            if wanted is not None and cell_name(name) not in wanted and not RunFolder(cfg.paths.output_dir).done:
                missing[name] = f"left out of this run (cells={list(wanted)})"
                continue
            try:
                if name not in self._finished:
                    self._finished[name] = finish(name, cfg, self.config)
                runs.append(self._finished[name])
            except Exception as error:  # whatever is wrong with one experiment, the others stand
                missing[name] = _reason(error)
                expected = isinstance(error, _EXPECTED)
                log.warning("cell %s was not run: %s", cell_name(name), missing[name], exc_info=not expected)
        return runs, missing

    def _analyse(self, study: str, runs: Sequence[FinishedRun], missing: Mapping[str, str]) -> StudyResult:
        if study == SIMULATION:
            options: Any = OmegaConf.to_object(self.config.simulation)
            return simulation.run(options, seed=self.config.seed)
        if study in TABLES:
            absent = dict(NOT_RUN[study]) if self.config.scale != "paper" else {}
            return tables.run(study, runs, absent | {_line(self.composed[name]): missing[name] for name in missing})
        if not runs:
            reasons = "; ".join(f"{cell_name(name)}: {reason}" for name, reason in missing.items())
            raise ValueError(f"study {study}: none of its cells could be run. {reasons}")
        features = [item.features for item in runs]
        if study == "robustness":
            result = robustness.run([item for item in runs if item.history])
        elif study == "flows":
            result = flows.run(features, {str(key): value for key, value in self.config.flows.items()})
        else:
            result = {"spectrum": spectrum.run, "partial": partial.run}[study](features)
        result.notes += [f"Not run: {cell_name(name)} ({reason})." for name, reason in missing.items()]
        return result

    def _command(self, study: str) -> str:
        """The command that gives this study alone."""
        config, typed = self.config, [word for word in job_arguments() if word.lstrip("+~").startswith(f"{study}.")]
        some = {"cells": config.cells, "extra": config.extra, "options": typed}
        return reproduce_command(study, config.scale, seed=config.seed, **some)

    def _commands(self, study: str) -> dict[str, str]:
        """How each line of a table is run at the paper's own scale."""
        if study not in TABLES:
            return {}
        plain = OmegaConf.merge(self.config, {"scale": "paper", "extra": [], "seed": 0})
        found = {}
        for name in experiments(study, "paper"):
            line = ", ".join(_line(compose_experiment(name, plain)))  # type: ignore[arg-type]
            found[line] = reproduce_command(study, "paper", cells=[cell_name(name)])
        return found


def _line(cfg: DictConfig) -> Line:
    return str(cfg.paper.benchmark), str(cfg.paper.backbone)


def _reason(error: Exception) -> str:
    """An error in one line; what is expected to happen says enough without the name of its class."""
    return " ".join(str(error).split()) if isinstance(error, _EXPECTED) else describe_error(error)


def describe_machine() -> str:
    """Processor, number of cores and accelerator, without the machine's name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {cores} CPU cores, {device}"
