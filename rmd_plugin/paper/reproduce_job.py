"""One call of ``rmd-reproduce``: cells, studies, figures, the document."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rmd_plugin.app.assembly import one_clear_error
from rmd_plugin.app.options import check_options, whole_number
from rmd_plugin.app.training_job import brief_warnings
from rmd_plugin.atomic import replacing
from rmd_plugin.compare.rows import AUROC, mean, write_rows
from rmd_plugin.paper import figures as draw
from rmd_plugin.paper import flows, partial, robustness, simulation, spectrum, tables
from rmd_plugin.paper.cells import Cell, CellConfigError, CellResult, CellRunner
from rmd_plugin.paper.document import StudySummary, comparison_table, write_document
from rmd_plugin.paper.experiments import (
    DOCUMENT,
    SCALES,
    check_cells,
    chosen_studies,
    load_experiment,
    reproduce_command,
)
from rmd_plugin.paper.published import ADDRESS, TITLE
from rmd_plugin.paper.result import StudyResult
from rmd_plugin.report.provenance import collect_versions
from rmd_plugin.report.run_folder import describe_error
from rmd_plugin.report.style import save_figure
from rmd_plugin.report.table import to_latex, to_markdown, to_terminal

log = logging.getLogger(__name__)

_SIMULATION = "simulation"
#: what says enough in one line; any other error is a fault of a program, and its traceback goes to the log
_EXPECTED = (OSError, ValueError, ImportError)

#: figure name -> figure and caption
Figures = dict[str, tuple[Figure, str]]


def run(config: DictConfig) -> None:
    """Run the studies of a config, and write the document.

    Args:
        config: the composed ``conf/reproduce.yaml``.
    """
    with one_clear_error("rmd-reproduce"), brief_warnings():
        if config.scale not in SCALES:
            raise ValueError(f"scale must be small or paper, got {config.scale!r}.")
        names = chosen_studies(config.study)
        whole_number(config.seed, "seed")
        check_cells(names, str(config.scale), config.cells)
        check_options(simulation.run, toy_options(config), "simulation.")
        root = Path(str(config.output))
        runner = CellRunner(
            root, data_dir=config.paths.data_dir, cache_dir=config.cache_dir, resamples=config.resamples
        )
        reproduction = Reproduction(config, root, runner)
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
            paper = f"Ren et al., [{TITLE}]({ADDRESS})"
            path = write_document(str(config.document), [root / name for name in DOCUMENT], paper=paper)
            print(f"Document: {path}")
        if failed:
            reasons = "; ".join(f"{name} ({reason})" for name, reason in failed.items())
            raise ValueError(f"{len(failed)} of {len(names)} studies failed: {reasons}")


@dataclass(frozen=True)
class _Ready:
    """Cells of a study after they were run; those that could not be, with the reason."""

    results: list[CellResult]
    missing: list[tuple[Cell, str]]


class Reproduction:
    """Runs studies of one scale and writes what they give.

    Args:
        config: the composed config.
        root: folder of this scale.
        runner: runs the cells.
    """

    def __init__(self, config: DictConfig, root: Path, runner: CellRunner) -> None:
        self.config, self.root, self.runner = config, root, runner

    def run(self, name: str) -> StudyResult:
        """Run one study and write rows, arrays, figures, tables and its summary."""
        started = time.perf_counter()
        node = load_experiment(name)
        part = node[self.config.scale]
        options: dict[str, Any] = OmegaConf.to_container(part.get("options") or OmegaConf.create({}))  # type: ignore[assignment]
        if name == _SIMULATION:
            result = simulation.run(**(options | {"seed": int(self.config.seed)} | toy_options(self.config)))
            ready = _Ready([], [])
        else:
            ready = self._cells(name, part.get("cells") or [])
            result = self._study(name, ready, options, part.get("absent") or [])
        figures = make_figures(result)
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(result.rows, folder / "rows.csv")
        with replacing(folder / "arrays.npz", "wb") as file:
            # keys hold slashes, which are folders inside the archive: numpy reads them back as they are
            np.savez_compressed(file, allow_pickle=False, **result.arrays)
        for stem, (figure, _) in figures.items():
            save_figure(figure, folder / stem)
        table = comparison_table(result.comparisons, str(node.about))
        with replacing(folder / "comparison.md") as file:
            file.write(to_markdown(table))
        with replacing(folder / "comparison.tex") as file:
            file.write(to_latex(table, label=f"tab:{name}"))
        StudySummary(
            study=name,
            about=str(node.about),
            scale=str(self.config.scale),
            comparisons=result.comparisons,
            notes=result.notes,
            figures={stem: caption for stem, (_, caption) in figures.items()},
            seconds=time.perf_counter() - started,
            commands=self._commands(name),
            command=self._command(name),
            versions=collect_versions(),
            machine=describe_machine(),
        ).write(folder)
        console = Console(width=max(Console().width, 110))  # narrower, the numbers would be cut off
        console.print(to_terminal(comparison_table(result.comparisons, str(node.about), remarks_below=True), width=110))
        print(f"{name}: {folder} ({time.perf_counter() - started:.0f} s)")
        return result

    def _command(self, name: str) -> str:
        """The command that gives this study, with all that differs from the defaults."""
        config = self.config
        return reproduce_command(name, config.scale, seed=config.seed, cells=config.cells, extra=config.extra)

    def _cells(self, study: str, nodes: Sequence[Any]) -> _Ready:
        ready = _Ready([], [])
        for node in nodes:
            if node == _SIMULATION:
                features = simulation.simulated_features(**self._simulated())
                setting = f"{len(features.train):,} training samples, D={features.train.shape[1]}"
                cell = Cell(_SIMULATION, ("benchmark=simulation", "backbone=identity"))
                ready.results.append(CellResult(cell, features, [], None, setting))
                continue
            cell = self.cell(node, study)
            chosen = self.config.cells is None or cell.name in self.config.cells
            # a finished cell counts: cells that are run one by one come together in their study
            if not chosen and not self.runner.finished(cell):
                ready.missing.append((cell, f"left out of this run (cells={list(self.config.cells)})"))
                continue
            try:
                ready.results.append(self.runner.run(cell))
            except CellConfigError:
                raise  # what was typed is wrong, and would replace a finished study by one without numbers
            except Exception as error:  # whatever is wrong with one cell, the others stand
                reason = _reason(error)
                expected = isinstance(error, _EXPECTED)
                log.warning("cell %s was not run: %s", cell.name, reason, exc_info=not expected)
                ready.missing.append((cell, reason))
        return ready

    def cell(self, node: Any, study: str, scale: str | None = None) -> Cell:
        """The cell of a study's config node, or the one that a text such as ``table1/cifar10`` refers to."""
        scale = scale or str(self.config.scale)
        if isinstance(node, str):
            study, _, name = node.partition("/")  # the study that describes it also runs it alone
            nodes = [item for item in load_experiment(study)[scale].cells if not isinstance(item, str)]
            found = [item for item in nodes if item.name == name]
            if not found:
                raise ValueError(f"{node}: experiment {study} has no cell {name!r} of scale {scale}.")
            node = found[0]
        extra = [text for text in self.config.extra if not str(text).startswith("simulation.")]
        return Cell.from_config(node, study=study, scale=scale, seed=int(self.config.seed), extra=extra)

    def _simulated(self) -> dict[str, Any]:
        options = {"seed": int(self.config.seed)} | toy_options(self.config)
        return {name: options[name] for name in ("dim", "sigma", "n_train", "n_test", "seed") if name in options}

    def _study(self, name: str, ready: _Ready, options: dict[str, Any], absent: Sequence[Any]) -> StudyResult:
        if name in ("table1", "table2", "table3"):
            measured = [
                tables.Measured(item.cell.benchmark, item.cell.backbone, item.rows, item.setting, item.cell.reason)
                for item in ready.results
            ]
            left = [tables.Absent(str(node.line[0]), str(node.line[1]), str(node.reason)) for node in absent]
            left += [tables.Absent(cell.benchmark, cell.backbone, reason) for cell, reason in ready.missing]
            return tables.run(name, measured, left)
        results = ready.results
        if not results:
            reasons = "; ".join(f"{cell.name}: {reason}" for cell, reason in ready.missing)
            raise ValueError(f"study {name}: none of its cells could be run. {reasons}")
        about = {"settings": [item.setting for item in results], "reasons": [item.cell.reason for item in results]}
        if name == "robustness":
            trained = [item for item in results if item.curves is not None]
            about = {"settings": [r.setting for r in trained], "reasons": [r.cell.reason for r in trained]}
            result = robustness.run([item.curves for item in trained if item.curves is not None], **about)
        else:
            sets = [item.features for item in results]
            if name == "flows":
                result = flows.run(sets, options=options, **about)
            else:
                result = {"spectrum": spectrum.run, "partial": partial.run}[name](sets, **about)
        result.notes += [f"Not run: {cell.name} ({reason})." for cell, reason in ready.missing]
        return result

    def _commands(self, name: str) -> dict[str, str]:
        """How each line of a table is run at the paper's own scale."""
        nodes = [node for node in load_experiment(name)["paper"].get("cells") or [] if not isinstance(node, str)]
        cells = [Cell.from_config(node, study=name, scale="paper") for node in nodes]
        return {f"{cell.benchmark}, {cell.backbone}": cell.command for cell in cells if cell.benchmark}


def toy_options(config: DictConfig) -> dict[str, Any]:
    """Options of the simulation that ``extra`` names as ``simulation.NAME=VALUE``."""
    found = [str(text).removeprefix("simulation.") for text in config.extra if str(text).startswith("simulation.")]
    return dict(OmegaConf.to_container(OmegaConf.from_dotlist(found)))  # type: ignore[arg-type]


def make_figures(result: StudyResult) -> Figures:
    """The figures of a study by file name, each with a caption."""
    name, arrays = result.study, result.arrays
    if name == _SIMULATION:
        areas = {
            detector: mean(
                [
                    row.value
                    for row in result.rows
                    if (row.detector, row.backbone, row.reason) == (detector, "identity", "")
                ]
            )
            for detector in ("mahalanobis", "rmd")
        }
        activations = list(dict.fromkeys(key.split("/")[0] for key in arrays if key.count("/") == 2))
        found: Figures = {
            "simulation": (
                draw.simulation_figure(arrays, areas),
                "Histograms of one draw; AUROC is the mean over seeds",
            ),
            "simulation_sweep": (
                draw.sweep_figure(arrays),
                "Where MD breaks: mean over seeds, band from least to largest",
            ),
        }
        if activations:
            caption = "Scores on the hidden units of a trained one-layer network"
            found["simulation_network"] = (draw.network_figure(arrays, activations), caption)
        return found
    if name in ("spectrum", "partial"):
        return {f"{name}_{_stem(label)}": _one_set(result, label, part) for label, part in _by_label(arrays).items()}
    if name == "robustness":
        labels = list(_by_label(arrays))
        return {name: (draw.robustness_figure(arrays, labels), "Accuracy and AUROC over the training steps")}
    if name == "flows":
        metrics = {item.metric: row.detector for item, row in zip(result.comparisons, result.rows, strict=True)}
        return {name: (draw.paired_figure(result.comparisons, metrics, "Gaussians and flows"), "Gaussians and flows")}
    metrics = {f"AUROC of {text}": detector for detector, text in tables.NAMES.items()}
    title = f"Table {name[-1]}: paper and ours"
    return {name: (draw.paired_figure(result.comparisons, metrics, title), title)}


def _one_set(result: StudyResult, label: str, arrays: Mapping[str, np.ndarray]) -> tuple[Figure, str]:
    if result.study == "partial":
        return draw.partial_figure(arrays, label), f"PMD for every d: {label}"
    rows = [row for row in result.rows if f"{row.benchmark}, {row.backbone}" == label and row.metric == AUROC]
    areas = {row.detector: row.value for row in rows}
    order = "falling variance of the class means" if label.startswith(_SIMULATION) else "falling variance"
    return draw.spectrum_figure(arrays, label, areas, order=order), f"MD and RMD along the directions: {label}"


def _by_label(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Arrays named ``LABEL//NAME`` by label."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        label, _, name = key.partition("//")
        found.setdefault(label, {})[name] = value
    return found


def _stem(label: str) -> str:
    return "_".join("".join(letter if letter.isalnum() else " " for letter in label).split())


def _reason(error: Exception) -> str:
    """An error in one line; what is expected to happen says enough without the name of its class."""
    return " ".join(str(error).split()) if isinstance(error, _EXPECTED) else describe_error(error)


def describe_machine() -> str:
    """Processor, number of cores and accelerator, without the machine's name."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {cores} CPU cores, {device}"
