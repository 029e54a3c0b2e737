"""The published numbers of ``published.yaml``: Ren et al., "A Simple Fix to Mahalanobis Distance"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rmd_plugin.files import parse_yaml

_PAPER: dict[str, Any] = parse_yaml(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
TITLE, ADDRESS = _PAPER["title"], _PAPER["address"]
#: table -> "benchmark, backbone" as the paper calls them -> detector, by its name in our rows -> AUROC
TABLES: dict[str, dict[str, dict[str, float]]] = _PAPER["tables"]
#: numbers of the text that a study has one of ours for: study -> benchmark -> metric -> value
TEXT: dict[str, dict[str, dict[str, float]]] = _PAPER["text"]
#: of the simulation; training and test samples are per class
SIMULATION_SIZES: dict[str, float] = _PAPER["simulation_sizes"]

#: of the lines that the small and the medium scale do not run
NOT_RUN = "needs weights that must be fetched, or a GPU to fine-tune them; ready under scale=paper"
