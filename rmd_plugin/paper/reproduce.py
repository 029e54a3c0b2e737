"""``rmd-reproduce``: the paper's tables and figures, each one command, side by side with the published numbers.

Imports nothing heavy: ``--help`` and the list of studies take a second.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rmd_plugin.app.commands import CONF, run_command
from rmd_plugin.report.run import job_arguments

#: what a study leaves in its folder when it is finished
SUMMARY = "study.json"
SCALES = ("small", "medium", "paper")
SIMULATION = "simulation"
_FOLDERS = ("table1", "table2", "table3", "robustness")


@dataclass(frozen=True)
class Study:
    """One part of the paper."""

    about: str
    #: its experiments, where the scale has them; ``simulation`` stands for its samples. A table has those of its folder
    experiments: tuple[str, ...] = ()


_CIFAR = ("table1/cifar100", "table2/cifar100_efficientnet", "table1/cifar10", "table2/clinc")
#: in the order in which they are run: experiments that others use come first
STUDIES = {
    SIMULATION: Study("Appendix D, Figure 5: two Gaussian classes, one telling coordinate of 1,024"),
    "table1": Study("Table 1: models without pre-training"),
    "robustness": Study(
        "Figure 3: accuracy and AUROC over the training steps", ("table1/genomics", "robustness/digits")
    ),
    "table2": Study("Table 2: pre-trained models without fine-tuning"),
    "table3": Study("Table 3: fine-tuned models"),
    "spectrum": Study("Figure 1: MD and RMD along the eigen-directions", (SIMULATION, *_CIFAR, "robustness/digits")),
    "partial": Study("Appendix C: the partial Mahalanobis distance for every d", _CIFAR),
    "flows": Study(
        "Section 4.1: masked autoregressive flows instead of Gaussians",
        ("table1/cifar100", "table1/cifar10", "robustness/digits"),
    ),
}
#: in the order of the document
DOCUMENT = (SIMULATION, "spectrum", "table1", "flows", "table2", "table3", "robustness", "partial")


def _shipped_experiments(prefix: str) -> list[str]:
    loader = GlobalHydra.instance().config_loader()
    options = {folder: loader.get_group_options(f"experiment/{prefix}{folder}") for folder in _FOLDERS}
    return [f"{folder}/{name}" for folder, names in options.items() for name in names]


def experiments(study: str, scale: str) -> list[str]:
    """The experiments of a study as named below the scale's folder; Hydra must be initialised."""
    shipped = _shipped_experiments("paper/" if scale == "paper" else "")
    named = STUDIES[study].experiments
    if not named:
        return [name for name in shipped if name.startswith(f"{study}/")]
    return [name for name in named if name in (SIMULATION, *shipped)]


def config_name(experiment: str, scale: str) -> str:
    """What ``experiment=`` is at a scale: the medium one has its own for some, and the small ones for the others."""
    own = scale == "paper" or (scale == "medium" and experiment in _shipped_experiments("medium/"))
    return f"{scale}/{experiment}" if own else experiment


def cell_name(experiment: str) -> str:
    """What an experiment is called after ``cells=``."""
    return experiment.rpartition("/")[2]


def chosen_studies(study: str | Sequence[str] | None) -> list[str]:
    """The studies that a config asks for, in the order in which they are run."""
    names = [study] if isinstance(study, str) else list(study or ())
    if names == ["all"]:
        return list(STUDIES)
    if unknown := [name for name in names if name not in STUDIES]:
        raise ValueError(f"there is no study {', '.join(map(str, unknown))}. There are: {', '.join(STUDIES)}, all.")
    return [name for name in STUDIES if name in names]


def check_cells(studies: Iterable[str], scale: str, cells: Iterable[Any]) -> None:
    """Refuse names that no experiment of these studies has, with those that there are."""
    known = dict.fromkeys(cell_name(name) for study in studies for name in experiments(study, scale))
    if unknown := [str(cell) for cell in cells if cell not in known]:
        raise ValueError(f"there is no cell {', '.join(unknown)}. There are: {', '.join(known) or 'none'}.")


def study_command(study: str, scale: str, cells: Iterable[Any] | None = None) -> str:
    """What one types to run a study alone, with the options of this call that change its numbers."""
    words = [f"study={study}", f"scale={scale}"]
    words += [] if cells is None else [f"cells=[{','.join(map(str, cells))}]"]
    options = [word for word in job_arguments() if word.startswith(("seed=", "extra=", "simulation.", "flows."))]
    return shlex.join(["rmd-reproduce", *words, *options])


def list_studies(root: Path) -> None:
    """Print the studies, and the scales at which each was run."""
    table = Table(box=None, pad_edge=False, title=f"rmd-reproduce study=NAME scale={'|'.join(SCALES)}")
    for title in ("study", "of the paper", "cells (small)", "done"):
        table.add_column(title)
    for name, study in STUDIES.items():
        cells = ", ".join(map(cell_name, experiments(name, "small")))
        done = ", ".join(scale for scale in SCALES if (root.parent / scale / name / SUMMARY).is_file())
        table.add_row(name, study.about, cells or "-", done or "-")
    Console().print(table)


@hydra.main(version_base="1.3", config_path=CONF, config_name="reproduce")
def _reproduce(config: DictConfig) -> None:
    if config.study is None and config.document is None:
        list_studies(Path(str(config.output)))
        return
    from rmd_plugin.paper.jobs import run

    run(config)


def main() -> None:
    """List the studies, or run those that the config names."""
    run_command(_reproduce, "rmd-reproduce")


if __name__ == "__main__":
    main()
