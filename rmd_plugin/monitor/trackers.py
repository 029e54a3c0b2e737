"""Figures and tables for the trackers that Lightning logs to: TensorBoard, W&B, MLflow, Comet, Neptune, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from matplotlib.figure import Figure
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from rmd_plugin.report.figures import epochs_figure, histogram_figure, house_style, save_figure
from rmd_plugin.report.run import ID


def publish(
    history: list[dict[str, Any]],
    scores: Mapping[str, tuple[Tensor, Mapping[str, Tensor]]],
    stage: str,
    loggers: Sequence[Any],
    folder: str | PathLike[str] | None,
    prefix: str,
    step: int,
) -> None:
    """Draw histograms of the scores and, in a fit, the curves of AUROC; hand them to the loggers and the folder.

    W&B and MLflow also get the last values of each detector and OOD set as a table.

    Args:
        history: the rows of the monitor.
        scores: by detector, the scores of the ID samples and those of each OOD set.
        stage: ``"fit"``, ``"validate"`` or ``"test"``.
        loggers: of the trainer. One that takes no pictures gets files in its own folder.
        folder: for the figures as files; None for none.
        prefix: of their names.
        step: of the training.
    """
    arrays = {
        name: {ood: values.cpu().numpy() for ood, values in {ID: on_id, **on_ood}.items()}
        for name, (on_id, on_ood) in scores.items()
    }
    figures = {f"histograms-{stage}": histogram_figure(arrays, detectors=list(arrays))}
    if stage == "fit":
        figures["auroc"] = epochs_figure([row for row in history if row["stage"] == "fit"])
    rows = [row for row in history if row["stage"] == stage and row["ood"] and row["step"] == step]
    table = pd.DataFrame(rows)
    if rows:
        table = table.pivot_table("value", ["detector", "ood"], "metric", aggfunc="last", sort=False).reset_index()
    places: list[Any] = [folder]
    for logger in loggers:
        try:
            with house_style():
                taken = [_log_figure(logger, f"{prefix}/{name}", figure, step) for name, figure in figures.items()]
            places += [] if all(taken) else [getattr(logger, "log_dir", None)]
            if rows:
                _log_table(logger, f"{prefix}/{stage}", table)
        except Exception as error:  # a lost connection, for example
            rank_zero_warn(f"OODMonitor: {type(logger).__name__} got no figures. {type(error).__name__}: {error}")
    for place in filter(None, places):
        Path(place).mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            save_figure(figure, Path(place) / name, formats=("png",))


def _log_table(logger: Any, key: str, table: pd.DataFrame) -> None:
    """Hand a table to a logger that takes tables; it replaces the one before."""
    if hasattr(logger, "log_table"):  # W&B
        logger.log_table(key, dataframe=table)
    elif type(logger).__name__ == "MLFlowLogger":
        client, file = logger.experiment, f"{key}.json"
        if file not in {artifact.path for artifact in client.list_artifacts(logger.run_id, str(Path(key).parent))}:
            client.log_table(logger.run_id, data=table, artifact_file=file)  # later ones would be appended
        client.log_text(logger.run_id, table.to_json(orient="split", index=False), file)


def _log_figure(logger: Any, key: str, figure: Figure, step: int) -> bool:
    """Hand a figure to a logger; False if it takes none."""
    kind, experiment = type(logger).__name__, getattr(logger, "experiment", None)
    if kind == "MLFlowLogger":
        experiment.log_figure(logger.run_id, figure, f"{key}/{step}.png")  # type: ignore[union-attr]
    elif kind == "CometLogger":
        experiment.log_figure(figure_name=key, figure=figure, step=step)  # type: ignore[union-attr]
    elif kind == "NeptuneLogger":
        experiment[key].append(figure, step=step)  # type: ignore[index]
    elif hasattr(logger, "log_image"):  # W&B
        logger.log_image(key, [figure], step=step)
    elif hasattr(experiment, "add_figure"):  # TensorBoard
        experiment.add_figure(key, figure, global_step=step, close=False)  # type: ignore[union-attr]
    else:
        return False
    return True
