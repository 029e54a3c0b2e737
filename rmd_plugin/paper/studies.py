"""The studies of ``rmd-reproduce``: what each is about and which experiments it uses. Imports nothing heavy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from rich.console import Console
from rich.table import Table

#: what a study leaves in its folder when it is finished
SUMMARY = "study.json"
SCALES = ("small", "medium", "paper")
SIMULATION = "simulation"


@dataclass(frozen=True)
class Study:
    """One part of the paper, and its experiments: ``simulation`` stands for its samples."""

    about: str
    small: tuple[str, ...] = ()  #: as below ``conf/experiment``; those of the medium scale too
    paper: tuple[str, ...] = ()  #: as below ``conf/experiment/paper``


#: in the order in which they are run: experiments that others use come first. A table uses all of its folder
STUDIES = {
    SIMULATION: Study("Appendix D, Figure 5: two Gaussian classes, one telling coordinate of 1,024"),
    "table1": Study("Table 1: models without pre-training"),
    "robustness": Study(
        "Figure 3: accuracy and AUROC over the training steps", *2 * [("table1/genomics", "robustness/digits")]
    ),
    "table2": Study("Table 2: pre-trained models without fine-tuning"),
    "table3": Study("Table 3: fine-tuned models"),
    "spectrum": Study(
        "Figure 1: MD and RMD along the eigen-directions",
        (
            SIMULATION,
            "table1/cifar100",
            "table2/cifar100_efficientnet",
            "table1/cifar10",
            "table2/clinc",
            "robustness/digits",
        ),
        (SIMULATION, "table1/cifar100", "table1/cifar10", "table2/clinc", "robustness/digits"),
    ),
    "partial": Study(
        "Appendix C: the partial Mahalanobis distance for every d",
        ("table1/cifar100", "table2/cifar100_efficientnet", "table1/cifar10", "table2/clinc"),
        ("table1/cifar100", "table1/cifar10", "table2/clinc"),
    ),
    "flows": Study(
        "Section 4.1: masked autoregressive flows instead of Gaussians",
        *2 * [("table1/cifar100", "table1/cifar10", "robustness/digits")],
    ),
}
#: in the order of the document
DOCUMENT = (SIMULATION, "spectrum", "table1", "flows", "table2", "table3", "robustness", "partial")


@dataclass
class SimulationOptions:
    """Options of the simulation, ``simulation.NAME=VALUE``; the values are the paper's where it gives them."""

    dim: int = 1024  #: D
    sigma: float = 0.25  #: standard deviation of every coordinate
    n_train: int = 10_000  #: training samples per class
    n_test: int = 100  #: test samples per class and per OOD mean
    seeds: int = 20  #: repetitions
    sweep_dims: list[int] = field(default_factory=lambda: [4, 16, 64, 256, 1024, 2048])
    sweep_sigmas: list[float] = field(default_factory=lambda: [0.1, 0.15, 0.25, 0.35, 0.5, 0.75])
    sweep_seeds: int = 5  #: repetitions of each value
    sweep_n_train: int = 10_000
    network_activations: list[str] = field(default_factory=lambda: ["tanh", "relu"])  #: the paper does not name its own
    network_width: int = 1024  #: hidden units of the one-layer network
    network_epochs: int = 1
    network_seeds: int = 3


# Hydra checks the kind of what is typed against it
ConfigStore.instance().store("simulation_options", SimulationOptions)


def experiments(study: str, scale: str) -> list[str]:
    """The experiments of a study as named below the scale's folder; Hydra must be initialised."""
    if not study.startswith("table"):
        return list(getattr(STUDIES[study], "paper" if scale == "paper" else "small"))
    return [f"{study}/{name}" for name in _shipped("paper/" if scale == "paper" else "", study)]


def config_name(experiment: str, scale: str) -> str:
    """What ``experiment=`` is for an experiment at a scale; the medium one has its own for some, else the small ones.

    Hydra must be initialised.
    """
    study, _, name = experiment.partition("/")
    own = scale == "paper" or (scale == "medium" and name in _shipped("medium/", study))
    return f"{scale}/{experiment}" if own else experiment


def _shipped(folder: str, study: str) -> list[str]:
    return GlobalHydra.instance().config_loader().get_group_options(f"experiment/{folder}{study}")


def cell_name(experiment: str) -> str:
    """What an experiment is called after ``cells=``."""
    return experiment.rpartition("/")[2]


def chosen_studies(study: Any) -> list[str]:
    """Names of the studies that a config asks for, in the order in which they are run; others are refused."""
    if study is None:
        return []
    wanted = [str(name) for name in ([study] if isinstance(study, str) else study)]
    if wanted == ["all"]:
        return list(STUDIES)
    wrong = [name for name in wanted if name not in STUDIES]
    if wrong:
        raise ValueError(f"there is no study {', '.join(wrong)}. There are: {', '.join(STUDIES)}, all.")
    return [name for name in STUDIES if name in wanted]


def check_cells(studies: Iterable[str], scale: str, cells: Iterable[object] | None) -> None:
    """Refuse names that no experiment of these studies has, with those that there are."""
    if cells is None:
        return
    there = {study: [cell_name(name) for name in experiments(study, scale)] for study in studies}
    wrong = [str(name) for name in cells if not any(name in names for names in there.values())]
    if wrong:
        have = "; ".join(f"{study} has {', '.join(names) or 'none'}" for study, names in there.items())
        raise ValueError(f"cells={list(map(str, cells))}: there is no cell {', '.join(wrong)}. Cells: {have}.")


def list_studies(root: Path) -> None:
    """Print what can be run, and what was."""
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.title = f"rmd-reproduce study=NAME scale={'|'.join(SCALES)}"
    for title in ("study", "of the paper", "cells (small)", "done"):
        table.add_column(title, justify="left")
    for name, study in STUDIES.items():
        cells = ", ".join(map(cell_name, experiments(name, "small")))
        done = ", ".join(scale for scale in SCALES if (root.parent / scale / name / SUMMARY).is_file())
        table.add_row(name, study.about, cells or "-", done or "-")
    Console().print(table)


def reproduce_command(
    study: str,
    scale: str,
    *,
    seed: int = 0,
    cells: Iterable[object] | None = None,
    extra: Iterable[object] = (),
    options: Iterable[str] = (),
) -> str:
    """The command line that runs a study, with all that differs from the defaults, quoted for a shell."""
    words = [f"study={study}", f"scale={scale}"]
    if seed:
        words.append(f"seed={seed}")
    if cells is not None:
        words.append(f"cells=[{','.join(map(str, cells))}]")
    if more := [_quoted(str(text)) for text in extra]:
        words.append(f"extra=[{','.join(more)}]")
    return shlex.join(["rmd-reproduce", *words, *options])


def _quoted(text: str) -> str:
    """A text as a quoted value of Hydra's grammar, where only quotes and the backslashes before them are escaped."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return '"' + escaped + "\\" * trailing + '"'
