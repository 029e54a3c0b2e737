"""The published numbers, as data: Ren et al., "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection".

All values are percentages as printed. A test compares every one of them with the source document.
"""

from __future__ import annotations

TITLE = "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection"
ADDRESS = "https://arxiv.org/abs/2106.09022"

CIFAR100, CIFAR10 = "CIFAR-100 vs CIFAR-10", "CIFAR-10 vs CIFAR-100"
GENOMICS, CLINC = "Genomics OOD", "CLINC Intent OOD"

_DETECTORS = ("mahalanobis", "rmd", "msp")


def _line(benchmark: str, backbone: str, *percent: float) -> dict[str, dict[str, float]]:
    return {f"{benchmark}, {backbone}": dict(zip(_DETECTORS, percent, strict=False))}


#: table -> "benchmark, backbone" as the paper calls them -> detector, by its name in our rows -> AUROC
TABLES: dict[str, dict[str, dict[str, float]]] = {
    "table1": {  # without pre-training
        **_line(CIFAR100, "WRN-28-10", 74.91, 81.01, 80.14),
        **_line(CIFAR10, "WRN-28-10", 88.49, 89.71, 89.27),
        **_line(GENOMICS, "1-D CNN", 53.10, 68.98, 66.53),
    },
    "table2": {  # pre-trained
        **_line(CIFAR100, "ViT-B/16", 67.19, 79.91),
        **_line(CIFAR10, "ViT-B/16", 84.88, 89.73),
        **_line(CIFAR100, "BiT R50x1", 81.37, 84.60),
        **_line(CIFAR10, "BiT R50x1", 86.70, 89.87),
        **_line(CIFAR100, "CLIP", 71.40, 81.83),
        **_line(CIFAR10, "CLIP", 83.57, 91.19),
        **_line(GENOMICS, "BERT", 48.46, 60.36),
        **_line(CLINC, "BERT", 75.48, 91.98),
    },
    "table3": {  # fine-tuned
        **_line(CIFAR100, "ViT-B/16", 94.42, 93.09, 92.30),
        **_line(CIFAR10, "ViT-B/16", 99.87, 98.82, 99.50),
        # printed the same as before fine-tuning (table 2)
        **_line(CIFAR100, "BiT R50x1", 81.37, 84.60, 81.04),
        **_line(CIFAR10, "BiT R50x1", 94.57, 94.94, 85.65),
        **_line(GENOMICS, "BERT", 55.87, 72.04, 72.02),
        **_line(CLINC, "BERT", 97.92, 97.62, 96.99),
    },
}

#: numbers of the text that a study has one of ours for: study and benchmark -> metric -> value
TEXT: dict[tuple[str, str], dict[str, float]] = {
    # section 3 and figure 1; the directions are those in which ID and OOD differ
    ("spectrum", "cifar100_vs_cifar10"): {"AUROC of MD": 74.98, "AUROC of RMD": 81.08, "leading directions": 120},
    # section 3 and appendix D
    ("spectrum", "simulation"): {"AUROC of MD": 83.13, "AUROC of RMD": 100},
    ("simulation", "simulation"): {"AUROC of MD": 83.13, "AUROC of RMD": 100},
    # section 4.1: one masked autoregressive layer
    ("flows", "cifar100_vs_cifar10"): {
        "AUROC of MD": 74.98,
        "AUROC of RMD": 81.08,
        "AUROC of the flow, log p_k": 76.10,
        "AUROC of the ratio, log p_k - log p_0": 78.34,
    },
    # appendix C
    ("partial", "cifar100_vs_cifar10"): {
        "AUROC of MD": 74.98,
        "AUROC of RMD": 81.08,
        "AUROC of MMD": 52.88,
        "best AUROC of PMD": 79.72,
        "d at the best AUROC": 76,
    },
    ("partial", "cifar10_vs_cifar100"): {"AUROC of MMD": 83.81},
    # section 4.3 and figure 3: 1-D CNN
    ("robustness", "genomics"): {
        "best AUROC of MD while training": 66.19,
        "training accuracy at the best AUROC of MD": 88.59,
        "held-out accuracy at the best AUROC of MD": 82.20,
        "AUROC of MD at the end": 53.10,
        "training accuracy at the end": 99.96,
        "held-out accuracy at the end": 85.71,
    },
}
#: of the simulation; training and test samples are per class
SIMULATION_SIZES = {"dim": 1024, "sigma": 0.25, "n_train": 10_000, "n_test": 100}

#: of the lines that the small and the medium scale do not run
NOT_RUN = "needs weights that must be fetched, or a GPU to fine-tune them; ready under scale=paper"
