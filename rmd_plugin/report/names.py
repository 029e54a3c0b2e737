"""How detectors are called and coloured in tables and figures. Names in rows and configs stay as they are typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

#: Okabe and Ito's colours, which people with any kind of colour vision tell apart
PALETTE: Mapping[str, str] = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
}
#: for lines on white, strongest first; yellow is too faint there
CYCLE = tuple(PALETTE[name] for name in ("vermilion", "blue", "green", "orange", "purple", "sky", "black"))

DASHES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, ()), (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 2)),
    (0, (9, 1.5, 3, 1.5)),
)  # fmt: skip


#: detectors of this package; the others come from pytorch-ood or from the user
OURS = ("rmd", "mahalanobis", "fused", "marginal", "partial", "multi_layer", "flow_likelihood", "relative_flow")

#: detector -> name for readers, colour, number of its dash: the same everywhere, and no two share colour and dash.
#: Those often shown together differ in colour; blue and vermilion otherwise stand for detectors seldom shown.
_TABLE = {
    "rmd": ("RMD", "blue", 0),
    "fused": ("FusedRMD", "black", 0),
    "mahalanobis": ("MD", "vermilion", 0),
    "marginal": ("MMD", "purple", 0),
    "partial": ("PMD", "orange", 0),
    "multi_layer": ("RMD (all layers)", "orange", 6),
    "flow_likelihood": ("Flow", "orange", 1),
    "relative_flow": ("Relative flow", "sky", 1),
    "framework_rmd": ("RMD (pytorch-ood)", "blue", 1),
    "framework_mahalanobis": ("MD (pytorch-ood)", "vermilion", 1),
    "msp": ("MSP", "green", 0),
    "temperature_scaling": ("Temperature scaling", "blue", 5),
    "max_logit": ("MaxLogit", "black", 2),
    "energy": ("Energy", "black", 1),
    "entropy": ("Entropy", "purple", 1),
    "gen": ("GEN", "sky", 2),
    "kl_matching": ("KL matching", "purple", 2),
    "openmax": ("OpenMax", "orange", 2),
    "weighted_energy": ("Weighted energy", "green", 2),
    "knn": ("KNN", "green", 1),
    "vim": ("ViM", "sky", 0),
    "she": ("SHE", "black", 3),
    "fdbd": ("fDBD", "sky", 3),
    "nnguide": ("NNGuide", "purple", 3),
    "nci": ("NCI", "orange", 3),
    "gmm": ("GMM", "green", 3),
    "pnml": ("pNML", "black", 4),
    "dice": ("DICE", "sky", 4),
    "lts": ("LTS", "purple", 4),
    "react": ("ReAct", "orange", 4),
    "ash": ("ASH", "green", 4),
    "scale": ("SCALE", "black", 5),
    "vra": ("VRA", "sky", 5),
    "rankfeat": ("RankFeat", "purple", 5),
    "gradnorm": ("GradNorm", "orange", 5),
    "grad_uncertainty": ("GradUncertainty", "green", 5),
    "nac": ("NAC", "vermilion", 2),
    "odin": ("ODIN", "blue", 2),
    "mahalanobis_odin": ("MD + ODIN", "vermilion", 3),
    "mcd": ("MC dropout", "blue", 3),
    "mcm": ("MCM", "vermilion", 4),
    "gram": ("Gram", "blue", 4),
    "multi_mahalanobis": ("MD (all layers)", "vermilion", 5),
}
LABELS = {detector: name for detector, (name, _, _) in _TABLE.items()}

#: what the short names stand for, said once where they are used
LONG_NAMES = {
    "rmd": "relative Mahalanobis distance: to the nearest class, less that to all of the training data",
    "fused": "RMD, the energy of the classifier and a guard against far samples in one score",
    "mahalanobis": "Mahalanobis distance to the nearest class",
    "marginal": "marginal Mahalanobis distance: to all of the training data as one class",
    "partial": "partial Mahalanobis distance: along a part of the directions",
    "msp": "maximum softmax probability, the usual baseline",
    "knn": "distance to the k-th nearest training sample",
    "vim": "virtual-logit matching: logits, and what lies outside their principal space",
    "energy": "log-sum-exp of the logits",
    "max_logit": "the largest logit",
    "gen": "generalised entropy of the softmax",
    "she": "simplified Hopfield energy: the pattern of the predicted class",
    "fdbd": "fast decision boundary: distance to the other classes",
    "nnguide": "nearest-neighbour guidance of the energy",
    "nci": "neural collapse inspired: closeness to the weights of the head",
    "gmm": "Gaussian mixture of the features",
    "pnml": "predictive normalised maximum likelihood",
    "dice": "directed sparsification of the head",
    "lts": "logit scaling by the strongest features",
    "react": "rectified activations",
    "ash": "activation shaping",
    "vra": "variational rectified activation",
    "nac": "neuron activation coverage",
    "odin": "temperature and a small step on the input",
    "mcm": "maximum concept matching",
}


def label(detector: str) -> str:
    """Name of a detector for readers; one that is not in the table keeps its own."""
    return LABELS.get(detector, detector)


def detector_style(detector: str) -> dict[str, Any]:
    """How the line of a detector is drawn in every figure: ``color`` and ``linestyle`` for ``axes.plot``.

    One that is not in the table gets those that its name picks, always the same.
    """
    if detector in _TABLE:
        _, tint, dash = _TABLE[detector]
        return {"color": PALETTE[tint], "linestyle": DASHES[dash]}
    number = crc32(detector.encode())
    # the first three colours belong to RMD, MD and MSP
    return {"color": CYCLE[3 + number % 4], "linestyle": DASHES[2 + number // 4 % 4]}


def colour(detector: str) -> str:
    """Colour of a detector in every figure."""
    return str(detector_style(detector)["color"])
