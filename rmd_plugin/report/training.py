"""Figures of a training run: AUROC over the epochs, and histograms of the outlier scores.

Drawn with matplotlib's object interface, which needs no display and leaves the state of pyplot alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

#: colours that stay apart for colour-blind readers (Okabe and Ito)
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
_INLIER = "#0072B2"
_OUTLIERS = ("#D55E00", "#E69F00", "#CC79A7", "#009E73", "#000000")
_MARKERS = "osD^vPX"


def draw_curves(rows: Sequence[Mapping[str, Any]], metric: str = "AUROC") -> Figure:
    """A metric over the epochs, one panel for each OOD set and one line for each detector.

    Args:
        rows: history of a monitor; each row has epoch, step, detector, ood, metric and value.
        metric: which of its metrics.

    Returns:
        The figure. A missing value (NaN) is a gap in its line.
    """
    rows = [row for row in rows if row["metric"] == metric]
    sets = list(dict.fromkeys(row["ood"] for row in rows))
    if len(sets) == 2:  # one set: its mean is the same curve
        sets = [name for name in sets if name != "mean"]
    detectors = list(dict.fromkeys(row["detector"] for row in rows))
    # several validations within an epoch need a finer scale
    points = {(row["epoch"], row["step"]) for row in rows}
    by_epoch = len({epoch for epoch, _ in points}) == len(points)
    figure, axes = _panels(len(sets))
    for axis, name in zip(axes, sets, strict=False):
        for number, detector in enumerate(detectors):
            line = [row for row in rows if row["ood"] == name and row["detector"] == detector]
            axis.plot(
                [row["epoch"] + 1 if by_epoch else row["step"] for row in line],
                [100 * row["value"] for row in line],
                color=_COLOURS[number % len(_COLOURS)],
                marker=_MARKERS[number % len(_MARKERS)],
                markersize=4,
                linewidth=1.6,
                label=detector,
            )
        axis.set_title("mean over the sets" if name == "mean" else name, fontsize=10)
        axis.set_xlabel("epoch" if by_epoch else "step")
        axis.grid(alpha=0.25)
        if by_epoch:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes:
        axes[0].set_ylabel(f"{metric} in %")
        _legend(figure, axes[0])
    return figure


def draw_histograms(scores: Mapping[str, tuple[np.ndarray, Mapping[str, np.ndarray]]]) -> Figure:
    """Densities of the outlier scores, one panel for each detector: ID samples against each OOD set.

    Args:
        scores: for each detector the scores of the ID samples, and those of each OOD set, each of shape (N,).

    Returns:
        The figure. Scores beyond the central 99 % are counted in the outermost bins.
    """
    figure, axes = _panels(len(scores))
    for axis, (detector, (inliers, outliers)) in zip(axes, scores.items(), strict=False):
        everything = np.concatenate([inliers, *outliers.values()])
        everything = everything[np.isfinite(everything)]
        low, high = np.quantile(everything, [0.005, 0.995]) if len(everything) else (0.0, 1.0)
        if high <= low:
            low, high = low - 0.5, low + 0.5
        smallest = min((len(found) for found in (inliers, *outliers.values()) if len(found)), default=1)
        bins = np.linspace(low, high, min(40, max(8, int(2 * smallest**0.5))) + 1)
        inlier: dict[str, Any] = {"histtype": "stepfilled", "alpha": 0.35, "color": _INLIER, "label": "ID"}
        kinds = [(inliers, inlier)]
        for number, (name, found) in enumerate(outliers.items()):
            colour = _OUTLIERS[number % len(_OUTLIERS)]
            kinds.append((found, {"histtype": "step", "linewidth": 1.6, "color": colour, "label": name}))
        for found, look in kinds:
            found = np.clip(found[np.isfinite(found)], low, high)
            if len(found):
                axis.hist(found, bins.tolist(), density=True, **look)
        axis.set_title(detector, fontsize=10)
        axis.set_xlabel("outlier score")
        axis.set_yticks([])
    if axes:
        axes[0].set_ylabel("density")
        _legend(figure, axes[0])
    return figure


def publish(
    figures: Mapping[str, Figure], folder: Path | None, loggers: Sequence[Any], *, prefix: str, step: int
) -> None:
    """Write figures to a folder and hand them to loggers.

    Args:
        figures: by name.
        folder: where ``<name>.png`` is written, None for nowhere.
        loggers: Lightning loggers with ``log_image`` (Weights & Biases), or whose experiment has ``add_figure``
            (TensorBoard).
        prefix: before the name in the loggers.
        step: of the training.
    """
    for name, figure in figures.items():
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"{name}.png", dpi=120)
        for logger in loggers:
            key = f"{prefix}/{name}"
            if hasattr(logger, "log_image"):
                canvas = FigureCanvasAgg(figure)
                canvas.draw()
                logger.log_image(key, [np.asarray(canvas.buffer_rgba())], step=step)
            else:
                logger.experiment.add_figure(key, figure, global_step=step, close=False)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = max(1, min(count, 3))
    lines = max(1, -(-count // columns))
    figure = Figure(figsize=(max(5.2, 1.0 + 3.4 * columns), 0.9 + 2.6 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(lines, columns, number + 1) for number in range(count)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    room = int(figure.get_figwidth() / (0.7 + 0.1 * max(map(len, labels), default=1)))  # inches of one entry
    figure.legend(handles, labels, loc="outside upper center", ncols=max(1, min(len(labels), room)), frameon=False)
