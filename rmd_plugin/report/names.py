"""How detectors are called and coloured in tables and figures. Names in rows and configs stay as they are typed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
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

Dash = tuple[int, tuple[float, ...]]
DASHES: tuple[Dash, ...] = (
    (0, ()), (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 2)),
)  # fmt: skip

#: what a study of ``rmd-reproduce`` leaves in its folder when it is finished
SUMMARY = "study.json"

#: detectors of this package; the others come from pytorch-ood or from the user
OURS = ("rmd", "mahalanobis", "marginal", "partial", "flow_likelihood", "relative_flow")

LABELS = {
    "rmd": "RMD",
    "mahalanobis": "MD",
    "marginal": "MMD",
    "partial": "PMD",
    "flow_likelihood": "Flow",
    "relative_flow": "Relative flow",
    "framework_rmd": "RMD (pytorch-ood)",
    "framework_mahalanobis": "MD (pytorch-ood)",
    "msp": "MSP",
    "temperature_scaling": "Temperature scaling",
    "max_logit": "MaxLogit",
    "energy": "Energy",
    "entropy": "Entropy",
    "gen": "GEN",
    "kl_matching": "KL matching",
    "openmax": "OpenMax",
    "weighted_energy": "Weighted energy",
    "knn": "KNN",
    "vim": "ViM",
    "she": "SHE",
    "fdbd": "fDBD",
    "nnguide": "NNGuide",
    "nci": "NCI",
    "gmm": "GMM",
    "pnml": "pNML",
    "dice": "DICE",
    "lts": "LTS",
    "react": "ReAct",
    "ash": "ASH",
    "scale": "SCALE",
    "vra": "VRA",
    "rankfeat": "RankFeat",
    "gradnorm": "GradNorm",
    "grad_uncertainty": "GradUncertainty",
    "nac": "NAC",
    "odin": "ODIN",
    "mahalanobis_odin": "MD + ODIN",
    "mcd": "MC dropout",
    "mcm": "MCM",
    "gram": "Gram",
    "multi_mahalanobis": "MD (all layers)",
}


def label(detector: str) -> str:
    """Name of a detector for readers; one that is not known keeps its own."""
    return LABELS.get(detector, detector)


#: detectors that are often shown together, so that their colours differ; the number is that of the dash
_FIXED = {
    "rmd": ("blue", 0),
    "mahalanobis": ("vermilion", 0),
    "msp": ("green", 0),
    "marginal": ("purple", 0),
    "partial": ("orange", 0),
    "relative_flow": ("sky", 0),
    "knn": ("black", 0),
    "flow_likelihood": ("orange", 1),
    "framework_rmd": ("blue", 1),
    "framework_mahalanobis": ("vermilion", 1),
    "vim": ("purple", 1),
    "energy": ("sky", 1),
    "max_logit": ("black", 1),
    "entropy": ("green", 1),
}


def _styles() -> dict[str, tuple[str, Dash]]:
    fixed = {name: (PALETTE[colour], DASHES[dash]) for name, (colour, dash) in _FIXED.items()}
    # the colours of MD and RMD come last: a line of another detector is seldom taken for theirs
    pairs = [(colour, dash) for some in (CYCLE[:1:-1], CYCLE[:2]) for dash, colour in product(DASHES, some)]
    left = [pair for pair in pairs if pair not in fixed.values()]
    return fixed | dict(zip((name for name in LABELS if name not in fixed), left, strict=False))


#: detector -> colour and dash, the same in every figure; no two detectors of this table share both
STYLES = _styles()


def line_style(detector: str) -> tuple[str, Dash]:
    """Colour and dash of a detector; one that is not in the table gets those that its name picks, always the same."""
    if detector not in STYLES:
        # the first three colours belong to RMD, MD and MSP
        return CYCLE[3 + crc32(detector.encode()) % (len(CYCLE) - 3)], DASHES[2 + crc32(detector.encode()[::-1]) % 4]
    return STYLES[detector]


def colour(detector: str) -> str:
    """Colour of a detector in every figure."""
    return line_style(detector)[0]
