"""Scores of a comparison on disk: what histograms and ROC curves are drawn from, readable by numpy."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping

import numpy as np

from rmd_plugin.atomic import replacing

#: name of the in-distribution test set among the score arrays
ID = "test"

#: detector -> :data:`ID` or name of an OOD set -> scores of shape (N,)
Scores = Mapping[str, Mapping[str, np.ndarray]]

_SEPARATOR = "//"


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
        # opened here: numpy leaves the file open if it is no archive
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            for key in file.files:
                detector, separator, name = key.partition(_SEPARATOR)
                if not separator:
                    raise ValueError(f"it holds an array {key!r}")
                scores.setdefault(detector, {})[name] = file[key]
    except (ValueError, EOFError, zipfile.BadZipFile, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not hold scores of a comparison: {error}") from error
    return scores
