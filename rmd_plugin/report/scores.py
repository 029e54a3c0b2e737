"""Scores of a comparison, and what each direction of a detector adds to them: on disk, readable by numpy.

A Gaussian detector's score is a sum over directions (``detector.contributions(z)``). Of these terms a summary is kept,
whose size does not depend on the number of samples: what a picture needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rmd_plugin.atomic import replacing
from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.npz import read_npz
from rmd_plugin.untrusted import DataFormatError, one_line

#: name of the in-distribution test set among the score arrays
ID = "test"
#: name of the held-out in-distribution set that detectors were calibrated on
CALIBRATION = "val"

#: detector -> :data:`ID`, :data:`CALIBRATION` or name of an OOD set -> scores of shape (N,)
Scores = Mapping[str, Mapping[str, np.ndarray]]

_SEPARATOR = "//"
#: of all scores of a comparison
_MAX_BYTES = 1 << 32
#: samples of a set that enter the AUROC of partial sums, evenly taken: enough for a curve
_SAMPLES = 2000


class Profile(NamedTuple):
    """Contributions of r directions to the scores of one set, every array of shape (r,)."""

    mean: np.ndarray
    #: 10 % quantile over the samples
    low: np.ndarray
    #: 90 % quantile
    high: np.ndarray
    #: AUROC of the sum over the first 1, 2, ..., r directions; NaN for the in-distribution set itself
    auroc: np.ndarray


#: detector -> :data:`ID` or name of an OOD set -> profile
Directions = Mapping[str, Mapping[str, Profile]]


def write_scores(scores: Scores, path: str | os.PathLike[str]) -> None:
    """Write scores as a compressed ``.npz`` with arrays named ``detector//set``, in float32."""
    arrays = {}
    for detector, sets in scores.items():
        for name, values in sets.items():
            if _SEPARATOR in detector or _SEPARATOR in name:
                raise ValueError(f"names must not hold {_SEPARATOR!r}, got {detector!r} and {name!r}.")
            arrays[f"{detector}{_SEPARATOR}{name}"] = np.asarray(values, dtype=np.float32)
    with replacing(path, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_scores(path: str | os.PathLike[str]) -> dict[str, dict[str, np.ndarray]]:
    """Read what :func:`write_scores` wrote; nothing in the file is executed. ValueError if it holds no scores."""
    scores: dict[str, dict[str, np.ndarray]] = {}
    try:
        for key, array in read_npz(path, max_bytes=_MAX_BYTES).items():
            detector, separator, name = key.partition(_SEPARATOR)
            if not separator or array.dtype.kind != "f":
                raise DataFormatError(path, f"it holds an array {key!r} of {array.dtype}")
            scores.setdefault(one_line(detector), {})[one_line(name)] = array
    except DataFormatError as error:
        raise ValueError(f"{path} does not hold scores of a comparison: {error.reason}") from error
    return scores


def summarise_directions(contributions: Mapping[str, np.ndarray]) -> dict[str, Profile]:
    """Profiles of one detector's terms of shape (N, r), ordered by direction: one for each set, ``test`` being ID."""
    if ID not in contributions:
        raise ValueError(f"contributions must hold the in-distribution set {ID!r}, got {', '.join(contributions)}.")
    arrays = {name: np.asarray(terms, dtype=np.float64) for name, terms in contributions.items()}
    widths = {terms.shape[1] if terms.ndim == 2 else -1 for terms in arrays.values()}
    if len(widths) != 1 or -1 in widths or min(len(terms) for terms in arrays.values()) == 0:
        shapes = ", ".join(f"{name}: {terms.shape}" for name, terms in arrays.items())
        raise ValueError(f"contributions must have shape (N, r) with N > 0 and one r for all sets, got {shapes}.")
    sums = {}
    for name, terms in arrays.items():
        taken = np.linspace(0, len(terms) - 1, min(len(terms), _SAMPLES)).astype(int)
        sums[name] = np.cumsum(terms[taken], axis=1)
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
    write_scores({name: {ood: np.stack(p) for ood, p in sets.items()} for name, sets in profiles.items()}, path)


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
