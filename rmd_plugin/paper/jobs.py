"""One call of ``rmd-reproduce``: experiments, studies, figures, the document.

An experiment is a run folder: run once by the job of ``rmd-train``, and read. A finished one is not run again; an
unfinished one resumes from its last checkpoint. Studies share runs, and features lie in a cache.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rmd_plugin.app.commands import compose_train, one_clear_error
from rmd_plugin.app.train import load_run, train
from rmd_plugin.compare.features import TEST, TRAIN
from rmd_plugin.compare.rows import ACCURACY, make_rows, select, write_rows
from rmd_plugin.files import one_line, replacing
from rmd_plugin.paper import reproduce, studies
from rmd_plugin.paper.accuracy import ACCURACIES
from rmd_plugin.paper.document import comparison_table, write_document, write_study
from rmd_plugin.paper.figures import make_figures
from rmd_plugin.paper.published import TABLES
from rmd_plugin.paper.reproduce import SIMULATION, cell_name, experiments, study_command
from rmd_plugin.paper.simulation import simulated_run, simulation_study
from rmd_plugin.paper.studies import Run, StudyResult
from rmd_plugin.report.figures import save_figure
from rmd_plugin.report.run import RunFolder, collect_versions, describe_error
from rmd_plugin.report.tables import print_tables, to_latex, to_markdown

log = logging.getLogger(__name__)

#: parts of a config that change where a run lies or how it is told, but not what it does
_IRRELEVANT = ("paths", "names", "paper", "resume", "cache_dir", "num_workers", "figures")


def run(config: DictConfig) -> None:
    """Run the studies of a config, the composed ``conf/reproduce.yaml``, and write the document."""
    with one_clear_error("rmd-reproduce"):
        names = reproduce.chosen_studies(config.study)
        reproduce.check_cells(names, config.scale, config.cells or ())
        reproduction = Reproduction(config, names)
        failed = {}
        for study in names:
            try:
                reproduction.run(study)
            except Exception as error:  # whatever is wrong with one study, the others stand
                if len(names) == 1:
                    raise
                failed[study] = describe_error(error)
                log.warning("study %s failed", study, exc_info=True)
        if config.document is not None:
            write_document(Path(str(config.document)), [reproduction.root / study for study in reproduce.DOCUMENT])
            print(f"Document: {config.document}")
        if failed:
            reasons = "; ".join(f"{study} ({reason})" for study, reason in failed.items())
            raise ValueError(f"{len(failed)} of {len(names)} studies failed: {reasons}")


def compose_experiment(experiment: str, config: DictConfig) -> DictConfig:
    """The config of ``rmd-train`` for an experiment, with a folder that changes whenever the config does.

    Raises:
        ValueError: if the overrides of ``extra`` do not fit.
    """
    chosen = f"experiment={reproduce.config_name(experiment, config.scale)}"
    try:
        cfg = compose_train([chosen, "resume=true", f"seed={config.seed}", *map(str, config.extra)])
        content: Any = OmegaConf.to_container(cfg, resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"cell {cell_name(experiment)}: {one_line(error)}") from error
    key = joblib.hash({name: value for name, value in content.items() if name not in _IRRELEVANT})[:10]
    root = Path(str(config.output))
    with open_dict(cfg):
        cfg.paths.output_dir = str(root / "cells" / f"{experiment.replace('/', '-')}-{key}")
        cfg.cache_dir = str(root / "features") if config.cache_dir is None else config.cache_dir
        if config.paths.data_dir is not None:
            cfg.paths.data_dir = config.paths.data_dir
    return cfg


def finish(experiment: str, cfg: DictConfig, scale: str) -> Run:
    """Run a composed experiment unless it was run before, and read what it left behind."""
    folder = RunFolder(cfg.paths.output_dir)
    log.info("%s: %s", experiment, "already finished" if folder.done else "running")
    train(cfg, command=study_command(experiment.partition("/")[0], scale, [cell_name(experiment)]))
    extractor = load_run(cfg)
    rows = folder.read_rows()
    ood = next(name for name, distance in extractor.distance.items() if distance == "near")
    fit = extractor.features(TRAIN)
    accuracies = folder.path / ACCURACIES
    return Run(
        benchmark=str(cfg.names.benchmark),
        backbone=str(cfg.names.backbone),
        ood_name=ood,
        train=fit.features,
        train_labels=fit.labels,
        test=extractor.features(TEST).features,
        ood=extractor.features(ood).features,
        seed=int(cfg.seed),
        setting=describe(cfg, tuple(fit.features.shape), rows),
        reason=str(cfg.paper.reason),
        line=paper_line(cfg),
        rows=rows,
        history=folder.read_history(),
        accuracies=json.loads(accuracies.read_text()) if accuracies.is_file() else (),
    )


def paper_line(cfg: DictConfig) -> str:
    """The line of the paper's table that an experiment stands beside."""
    return f"{cfg.paper.benchmark}, {cfg.paper.backbone}"


def describe(cfg: DictConfig, shape: tuple[int, ...], rows: pd.DataFrame) -> str:
    """What was run, in a few words: backbone, data (training features of shape (N, D)), training, accuracy."""
    model = f" ({cfg.backbone.name})" if cfg.backbone.get("name") else ""
    descriptions = [f"{cfg.names.backbone}{model}, D={shape[1]}", f"{shape[0]:,} training samples"]
    if cfg.pretrain:
        descriptions.append(f"{cfg.pretrain.max_epochs} epochs of masked tokens")
    if cfg.train:
        steps, epochs = cfg.trainer.get("max_steps") or -1, cfg.trainer.max_epochs
        descriptions.append(f"{steps:,} steps" if steps > 0 else "1 epoch" if epochs == 1 else f"{epochs} epochs")
    descriptions += [f"accuracy {100 * value:.1f} %" for value in select(rows, metric=ACCURACY, status="ok")["value"]]
    return ", ".join(descriptions)


class Reproduction:
    """Runs studies of one scale and writes what they give.

    All experiments are composed first: a mistake in what was typed must not replace a finished study.
    """

    def __init__(self, config: DictConfig, names: Sequence[str]) -> None:
        self.config, self.root = config, Path(str(config.output))
        used = dict.fromkeys(name for study in names for name in experiments(study, config.scale))
        self.composed = {name: compose_experiment(name, config) for name in used if name != SIMULATION}
        self._finished: dict[str, Run] = {}

    def run(self, study: str) -> None:
        """Run one study and write rows, arrays, figures, tables and its summary."""
        started = time.perf_counter()
        result = self._analyse(study, *self._runs(study))
        about, folder, numbers = reproduce.STUDIES[study].about, self.root / study, pd.DataFrame(result.numbers)
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(make_rows(result.records), folder / "rows.csv")
        with replacing(folder / "arrays.npz", "wb") as file:
            # keys hold slashes, which are folders inside the archive: numpy reads them back as they are
            np.savez_compressed(file, **result.arrays)  # type: ignore[arg-type]
        figures = make_figures(result)
        for name, (figure, _) in figures.items():
            save_figure(figure, folder / name)
        table = comparison_table(numbers, about)
        for suffix, text in (("md", to_markdown(table)), ("tex", to_latex(table, label=f"tab:{study}"))):
            with replacing(folder / f"comparison.{suffix}") as file:
                file.write(text)
        seconds = time.perf_counter() - started
        write_study(
            folder,
            numbers,
            study=study,
            about=about,
            notes=result.notes,
            figures={name: caption for name, (_, caption) in figures.items()},
            seconds=seconds,  # runs that were found ready not counted
            command=study_command(study, self.config.scale, self.config.cells),
            versions=collect_versions(),
            machine=describe_machine(),
        )
        print_tables([table])
        print(f"{study}: {folder} ({seconds:.0f} s)")

    def _runs(self, study: str) -> tuple[list[Run], dict[str, str]]:
        """The experiments of a study after they were run, and those that could not be, with the reason."""
        runs, missing = [], {}
        for name in experiments(study, self.config.scale):
            if name == SIMULATION:
                sizes = {key: self.config.simulation[key] for key in ("dim", "sigma", "n_train", "n_test")}
                runs.append(simulated_run(**sizes, seed=self.config.seed))
                continue
            cfg, cells = self.composed[name], self.config.cells
            # a finished experiment counts: those that are run one by one come together in their study
            if cells is not None and cell_name(name) not in cells and not RunFolder(cfg.paths.output_dir).done:
                missing[name] = f"left out of this run (cells={list(cells)})"
                continue
            try:
                if name not in self._finished:
                    self._finished[name] = finish(name, cfg, self.config.scale)
                runs.append(self._finished[name])
            except Exception as error:  # whatever is wrong with one experiment, the others stand
                missing[name] = describe_error(error)
                log.warning("cell %s was not run: %s", cell_name(name), missing[name], exc_info=True)
        return runs, missing

    def _analyse(self, study: str, runs: Sequence[Run], missing: Mapping[str, str]) -> StudyResult:
        if study == SIMULATION:
            return simulation_study(self.config.simulation, seed=self.config.seed)
        if study in TABLES:
            absent = {paper_line(self.composed[name]): reason for name, reason in missing.items()}
            return studies.table_study(study, runs, absent)
        reasons = [f"{cell_name(name)} ({reason})" for name, reason in missing.items()]
        if not runs:
            raise ValueError(f"study {study}: none of its cells could be run: {'; '.join(reasons)}")
        if study == "robustness":
            result = studies.robustness_study([item for item in runs if item.history])
        elif study == "flows":
            result = studies.flow_study(runs, {str(key): value for key, value in self.config.flows.items()})
        else:
            result = {"spectrum": studies.spectrum_study, "partial": studies.partial_study}[study](runs)
        result.notes += [f"Not run: {reason}." for reason in reasons]
        return result


def describe_machine() -> str:
    """Processor, number of cores and accelerator, without the machine's name."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {joblib.cpu_count()} CPU cores, {device}"
