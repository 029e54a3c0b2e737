"""What each direction of a detector contributes to its score: summarised over the samples, on disk, as a picture.

A Gaussian detector's score is a sum over directions (``detector.contributions(z)``). The summary keeps, per direction,
what a picture needs; its size does not depend on the number of samples.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.report.scores import ID, read_scores, write_scores

#: samples of a set that enter the AUROC of partial sums, evenly taken: enough for a curve
_SAMPLES = 2000


@dataclass(frozen=True)
class Profile:
    """Contributions of r directions to the scores of one set.

    Attributes:
        mean: mean over the samples, shape (r,).
        low: 10 % quantile, shape (r,).
        high: 90 % quantile, shape (r,).
        auroc: AUROC against the in-distribution set of the sum over the first 1, 2, ..., r directions, shape (r,);
            NaN for the in-distribution set itself.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    auroc: np.ndarray


#: detector -> :data:`~rmd_plugin.report.scores.ID` or name of an OOD set -> profile
Directions = Mapping[str, Mapping[str, Profile]]


def summarise_directions(contributions: Mapping[str, np.ndarray]) -> dict[str, Profile]:
    """Profiles of one detector's terms of shape (N, r), ordered by direction: one for each set, ``test`` being ID."""
    if ID not in contributions:
        raise ValueError(f"contributions must hold the in-distribution set {ID!r}, got {', '.join(contributions)}.")
    arrays = {name: np.asarray(terms, dtype=np.float64) for name, terms in contributions.items()}
    widths = {terms.shape[1] if terms.ndim == 2 else -1 for terms in arrays.values()}
    if len(widths) != 1 or -1 in widths or min(len(terms) for terms in arrays.values()) == 0:
        shapes = ", ".join(f"{name}: {terms.shape}" for name, terms in arrays.items())
        raise ValueError(f"contributions must have shape (N, r) with N > 0 and one r for all sets, got {shapes}.")
    sums = {name: np.cumsum(_thin(terms), axis=1) for name, terms in arrays.items()}
    profiles = {}
    for name, terms in arrays.items():
        low, high = np.quantile(terms, [0.1, 0.9], axis=0)
        areas = np.full(terms.shape[1], np.nan)
        if name != ID:
            areas = np.array([auroc(*pair) for pair in zip(sums[ID].T, sums[name].T, strict=True)])
        profiles[name] = Profile(terms.mean(axis=0), low, high, areas)
    return profiles


def write_directions(contributions: Mapping[str, Mapping[str, np.ndarray]], path: str | os.PathLike[str]) -> None:
    """Summarise terms (detector -> set -> (N, r)) and write them as ``.npz``: arrays (4, r) named ``detector//set``."""
    profiles = {detector: summarise_directions(sets) for detector, sets in contributions.items()}
    arrays = {
        detector: {name: np.stack([p.mean, p.low, p.high, p.auroc]) for name, p in sets.items()}
        for detector, sets in profiles.items()
    }
    write_scores(arrays, path)


def read_directions(path: str | os.PathLike[str]) -> dict[str, dict[str, Profile]]:
    """Read what :func:`write_directions` wrote; nothing in the file is executed. ValueError if there are none."""
    found: dict[str, dict[str, Profile]] = {}
    for detector, sets in read_scores(path).items():
        for name, array in sets.items():
            if array.ndim != 2 or len(array) != 4 or array.shape[1] == 0:
                raise ValueError(f"{path}: {detector}//{name} must have shape (4, r), got {array.shape}.")
            found.setdefault(detector, {})[name] = Profile(*array)
        if ID not in sets:
            raise ValueError(f"{path}: {detector} lacks the in-distribution set {ID!r}.")
    return found


def _thin(terms: np.ndarray) -> np.ndarray:
    if len(terms) <= _SAMPLES:
        return terms
    return terms[np.linspace(0, len(terms) - 1, _SAMPLES).astype(int)]
