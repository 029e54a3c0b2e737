"""The studies of ``rmd-reproduce``: their names, order and configs. Imports nothing heavy, so that listing is quick."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rmd_plugin.app.configs import config_path
from rmd_plugin.report.names import SUMMARY

#: in the order in which they are run: cells that others use come first
STUDIES = ("simulation", "table1", "robustness", "table2", "table3", "spectrum", "partial", "flows")
#: in the order of the document
DOCUMENT = ("simulation", "spectrum", "table1", "flows", "table2", "table3", "robustness", "partial")
SCALES = ("small", "paper")


def chosen_studies(study: Any) -> list[str]:
    """Names of the studies that a config asks for, in the order in which they are run.

    Args:
        study: None, a name, ``all`` or several names.

    Raises:
        ValueError: for a name that is none.
    """
    if study is None:
        return []
    wanted = [str(name) for name in ([study] if isinstance(study, str) else study)]
    if wanted == ["all"]:
        return list(STUDIES)
    unknown = [name for name in wanted if name not in STUDIES]
    if unknown:
        raise ValueError(f"there is no study {', '.join(unknown)}. There are: {', '.join(STUDIES)}, all.")
    return [name for name in STUDIES if name in wanted]


def list_studies(root: Path) -> None:
    """Print what can be run, and what was."""
    table = Table(box=None, pad_edge=False, title="rmd-reproduce study=NAME scale=small|paper", title_justify="left")
    for title in ("study", "of the paper", "cells (small / paper)", "done"):
        table.add_column(title, justify="left")
    for name in STUDIES:
        node = load_experiment(name)
        cells = " / ".join(str(len(node[scale].get("cells") or [])) for scale in SCALES)
        done = ", ".join(scale for scale in SCALES if (root.parent / scale / name / SUMMARY).is_file())
        table.add_row(name, str(node.about), cells, done or "-")
    Console().print(table)


def load_experiment(name: str) -> Any:
    """The config of a study, ``conf/experiment/NAME.yaml``."""
    # read as it is: composing takes a third of a second, and nothing here is to be overridden
    place = config_path()
    root = files(place.removeprefix("pkg://")) if place.startswith("pkg://") else Path(place)
    return OmegaConf.create((root / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))


def check_cells(studies: Iterable[str], scale: str, cells: Iterable[object] | None) -> None:
    """Refuse names that no cell of these studies has.

    Args:
        studies: the studies.
        scale: ``small`` or ``paper``.
        cells: names of cells, or None for all.

    Raises:
        ValueError: with the names of the cells that there are.
    """
    if cells is None:
        return
    there: dict[str, list[str]] = {}
    for study in studies:
        nodes = load_experiment(study)[scale].get("cells") or []
        there[study] = [node.rpartition("/")[2] if isinstance(node, str) else str(node.name) for node in nodes]
    unknown = [str(name) for name in cells if not any(name in names for names in there.values())]
    if unknown:
        known = "; ".join(f"{study} has {', '.join(names) or 'none'}" for study, names in there.items())
        raise ValueError(f"cells={list(map(str, cells))}: there is no cell {', '.join(unknown)}. Cells: {known}.")


def reproduce_command(
    study: str,
    scale: str,
    *,
    seed: int = 0,
    cells: Iterable[object] | None = None,
    extra: Iterable[object] = (),
) -> str:
    """The command line that runs a study, with all that differs from the defaults, quoted for a shell.

    Args:
        study: name of the study.
        scale: ``small`` or ``paper``.
        seed: seed of data and training.
        cells: names of the cells to run; None runs all.
        extra: further overrides for every cell.
    """
    words = [f"study={study}", f"scale={scale}"]
    if seed:
        words.append(f"seed={seed}")
    if cells is not None:
        words.append(f"cells=[{','.join(map(str, cells))}]")
    if more := [_quoted(str(text)) for text in extra]:
        words.append(f"extra=[{','.join(more)}]")
    return shlex.join(["rmd-reproduce", *words])


def _quoted(text: str) -> str:
    """A text as a quoted value of Hydra's grammar, where only quotes and the backslashes before them are escaped."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return '"' + escaped + "\\" * trailing + '"'
