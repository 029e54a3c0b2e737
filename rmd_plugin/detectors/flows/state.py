"""Trained flows inside a detector's state: under which names their tensors stand, and what they tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from rmd_plugin.detectors.flows.fitting import FlowFit
from rmd_plugin.detectors.flows.spec import Parameters

Role = Literal["class", "background"]


def flow_tensors(role: Role, fit: FlowFit) -> dict[str, Tensor]:
    """Tensors of trained flows under the names that a detector's state gives them."""
    return {f"{role}_flow.{name}": value for name, value in fit.params.items()} | {
        f"{role}_epochs": fit.epochs,
        f"{role}_start_loss": fit.start_loss,
        f"{role}_loss": fit.loss,
    }


def flow_parameters(state: dict[str, Tensor], role: Role) -> Parameters:
    """Stacked parameters of the flows, under the names of nflows."""
    prefix = f"{role}_flow."
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


def report_rows(state: dict[str, Tensor], role: Role, names: Sequence[int | str]) -> list[dict[str, int | float | str]]:
    """How the training of each flow went: see ``FlowDetector.training_report``."""
    columns = (state[f"{role}_{column}"].tolist() for column in ("epochs", "start_loss", "loss"))
    keys = ("flow", "epoch", "gaussian", "trained")
    return [dict(zip(keys, row, strict=True)) for row in zip(names, *columns, strict=True)]
