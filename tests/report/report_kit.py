"""A run with real detectors, as the tests of figures and of the page draw it."""

import functools
import math

import numpy as np
from conftest import make_blobs

from rmd_plugin import RMD, Mahalanobis
from rmd_plugin.compare.rows import auroc, make_row, make_rows
from rmd_plugin.report.run import RunFolder

SETS = {"blobs": "near", "noise": "far"}


def auroc_row(detector, ood, value=math.nan, distance="near", **more):
    return make_row("digits", ood, "mlp", detector, 0, "AUROC", value, distance=distance, **more)


def observed(detector, ood, epoch, value):
    """A row of a monitor's history."""
    when = {"stage": "fit", "epoch": epoch, "step": 10 * epoch}
    return {**when, "detector": detector, "ood": ood, "metric": "AUROC", "value": value}


@functools.cache
def fitted():
    """Scores of real detectors: detector -> set -> array."""
    z, y, mixed = make_blobs()
    sets = {"test": mixed[:40], "blobs": mixed[40:], "noise": 3 * mixed[40:] + 5, "val": mixed[:40] + 0.01}
    detectors = {"rmd": RMD().fit_features(z, y), "mahalanobis": Mahalanobis().fit_features(z, y)}
    return {name: {s: d.predict_features(x).numpy() for s, x in sets.items()} for name, d in detectors.items()}


@functools.cache
def compared():
    """The rows of a comparison of these detectors."""
    rows = [make_row("digits", "", "mlp", "", 0, "ACC", 0.9731)]
    for name, scores in fitted().items():
        for ood, distance in SETS.items():
            rows.append(auroc_row(name, ood, auroc(scores["test"], scores[ood]), distance, low=0.5, high=1.0))
            rows.append(make_row("digits", ood, "mlp", name, 0, "detected@0.05", 0.5, distance=distance))
        rows.append(make_row("digits", "", "mlp", name, 0, "false_alarms@0.05", 0.0321, low=0.01, high=0.06))
        rows.append(make_row("digits", "", "mlp", name, 0, "threshold@0.05", 1.0))
    return make_rows(rows)


def make_run(path, command="rmd-train benchmark=digits " + "a" * 300):
    scores = fitted()
    folder = RunFolder(path)
    about = {"benchmark": "digits", "backbone": "mlp", "seed": 0}
    with folder.running(config={"seed": 0, "long": "x" * 400}, about=about, command=command):
        folder.write_rows(compared())
        folder.write_history([observed(n, ood, epoch, 0.8) for n in scores for ood in SETS for epoch in range(3)])
        folder.write_scores(scores)
    return folder


def random_pictures(name, position):
    """What ``Extractor.raw`` gives for pictures."""
    pixels = np.random.default_rng(position).integers(0, 255, (8, 8), dtype=np.uint8)
    return pixels, "even" if name == "test" and position % 2 == 0 else ""
