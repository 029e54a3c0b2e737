"""Names and colours of detectors in tables and figures. Rows and configs keep the names that were typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

#: Okabe and Ito's colours, which people with any kind of colour vision tell apart
PALETTE: Mapping[str, str] = {
    "blue": "#0072B2",
    "black": "#000000",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "purple": "#CC79A7",
}
DASHES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, ()), (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 2)),
    (0, (9, 1.5, 3, 1.5)),
)  # fmt: skip

#: detectors of this package; the others come from pytorch-ood or from the user
OURS = ("rmd", "mahalanobis", "fused", "marginal", "partial", "flow_likelihood", "relative_flow")

#: detector -> name for readers. Its position picks colour and dash, so no two look alike. The first seven, which are
#: shown together most often, differ in colour.
LABELS = {
    "rmd": "RMD", "fused": "FusedRMD", "mahalanobis": "MD", "msp": "MSP", "energy": "Energy", "vim": "ViM",
    "marginal": "MMD",
    "framework_rmd": "RMD (pytorch-ood)", "max_logit": "MaxLogit", "framework_mahalanobis": "MD (pytorch-ood)",
    "knn": "KNN", "partial": "PMD", "relative_flow": "Relative flow", "flow_likelihood": "Flow",
    "temperature_scaling": "Temperature scaling", "she": "SHE", "mahalanobis_odin": "MD + ODIN", "gmm": "GMM",
    "openmax": "OpenMax", "gen": "GEN", "entropy": "Entropy",
    "odin": "ODIN", "pnml": "pNML", "multi_mahalanobis": "MD (all layers)", "weighted_energy": "Weighted energy",
    "react": "ReAct", "fdbd": "fDBD", "kl_matching": "KL matching",
    "mcd": "MC dropout", "scale": "SCALE", "nac": "NAC", "ash": "ASH", "nci": "NCI", "dice": "DICE",
    "nnguide": "NNGuide",
    "gram": "Gram", "lts": "LTS", "mcm": "MCM", "grad_uncertainty": "GradUncertainty", "gradnorm": "GradNorm",
    "vra": "VRA", "rankfeat": "RankFeat",
}  # fmt: skip

#: what the short names of detector=common stand for
LONG_NAMES = {
    "rmd": "relative Mahalanobis distance: to the nearest class, minus that to all of the training data",
    "fused": "RMD, the energy of the classifier and a guard against far samples in one score",
    "mahalanobis": "Mahalanobis distance to the nearest class",
    "marginal": "marginal Mahalanobis distance: to all of the training data as one class",
    "partial": "partial Mahalanobis distance: along some of the directions",
    "msp": "maximum softmax probability, the usual baseline",
    "energy": "log-sum-exp of the logits",
    "knn": "distance to the k-th nearest training sample",
    "vim": "virtual-logit matching: logits, and what lies outside their principal space",
}


def label(detector: str) -> str:
    """Name of a detector for readers; one that is not in the table keeps its own."""
    return LABELS.get(detector, detector)


def detector_style(detector: str) -> dict[str, Any]:
    """How the line of a detector is drawn in every figure: ``color`` and ``linestyle`` for ``axes.plot``.

    A detector that is not in the table has the last dash, in a colour that depends on its name alone.
    """
    known, colours = list(LABELS), list(PALETTE.values())
    place = known.index(detector) if detector in LABELS else len(known) + crc32(detector.encode()) % len(colours)
    dash, number = divmod(place, len(colours))
    return {"color": colours[number], "linestyle": DASHES[dash]}


def colour(detector: str) -> str:
    """Colour of a detector in every figure."""
    return str(detector_style(detector)["color"])
