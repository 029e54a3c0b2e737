"""The published numbers, as data: Ren et al., "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection".

All values are percentages as printed. A test compares every one of them with the source document.
"""

from __future__ import annotations

from dataclasses import dataclass

TITLE = "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection"
ADDRESS = "https://arxiv.org/abs/2106.09022"

CIFAR100, CIFAR10 = "CIFAR-100 vs CIFAR-10", "CIFAR-10 vs CIFAR-100"
GENOMICS, CLINC = "Genomics OOD", "CLINC Intent OOD"

#: benchmark and backbone of a table, as the paper calls them
Line = tuple[str, str]


@dataclass(frozen=True)
class TableRow:
    """One line of a table, with the names of the paper."""

    benchmark: str
    backbone: str
    auroc: dict[str, float]  #: detector, by its name in our rows, -> AUROC in percent


def _row(benchmark: str, backbone: str, *values: float) -> TableRow:
    return TableRow(benchmark, backbone, dict(zip(("mahalanobis", "rmd", "msp"), values, strict=False)))


#: table -> its lines; table 1 without pre-training, 2 pre-trained, 3 fine-tuned
TABLES: dict[str, tuple[TableRow, ...]] = {
    "table1": (
        _row(CIFAR100, "WRN-28-10", 74.91, 81.01, 80.14),
        _row(CIFAR10, "WRN-28-10", 88.49, 89.71, 89.27),
        _row(GENOMICS, "1-D CNN", 53.10, 68.98, 66.53),
    ),
    "table2": (
        _row(CIFAR100, "ViT-B/16", 67.19, 79.91),
        _row(CIFAR10, "ViT-B/16", 84.88, 89.73),
        _row(CIFAR100, "BiT R50x1", 81.37, 84.60),
        _row(CIFAR10, "BiT R50x1", 86.70, 89.87),
        _row(CIFAR100, "CLIP", 71.40, 81.83),
        _row(CIFAR10, "CLIP", 83.57, 91.19),
        _row(GENOMICS, "BERT", 48.46, 60.36),
        _row(CLINC, "BERT", 75.48, 91.98),
    ),
    "table3": (
        _row(CIFAR100, "ViT-B/16", 94.42, 93.09, 92.30),
        _row(CIFAR10, "ViT-B/16", 99.87, 98.82, 99.50),
        # printed the same as before fine-tuning (table 2)
        _row(CIFAR100, "BiT R50x1", 81.37, 84.60, 81.04),
        _row(CIFAR10, "BiT R50x1", 94.57, 94.94, 85.65),
        _row(GENOMICS, "BERT", 55.87, 72.04, 72.02),
        _row(CLINC, "BERT", 97.92, 97.62, 96.99),
    ),
}

#: numbers that stand in the text: name -> value. AUROC and accuracies in percent
TEXT: dict[str, float] = {
    # section 3 and figure 1: CIFAR-100 vs CIFAR-10, WRN-28-10
    "spectrum/mahalanobis": 74.98,
    "spectrum/rmd": 81.08,
    "spectrum/threshold": 120,  # leading eigen-directions in which ID and OOD differ
    # section 3 and appendix D
    "simulation/mahalanobis": 83.13,
    "simulation/rmd": 100,
    "simulation/dim": 1024,
    "simulation/sigma": 0.25,
    "simulation/n_train": 10_000,
    "simulation/n_test": 100,
    # section 4.1: one masked autoregressive layer, CIFAR-100 vs CIFAR-10
    "flows/flow_likelihood": 76.10,
    "flows/relative_flow": 78.34,
    # appendix C: CIFAR-100 vs CIFAR-10, and the reverse for the last
    "partial/peak": 79.72,
    "partial/peak_components": 76,
    "partial/marginal": 52.88,
    "partial/marginal_cifar10": 83.81,
    # section 4.3 and figure 3: genomics, 1-D CNN, then the BERT-style model
    "robustness/md_early": 66.19,
    "robustness/md_end": 53.10,
    "robustness/train_accuracy_early": 88.59,
    "robustness/test_accuracy_early": 82.20,
    "robustness/train_accuracy_end": 99.96,
    "robustness/test_accuracy_end": 85.71,
    "robustness/bert_md_peak": 77.49,
    "robustness/bert_train_accuracy_peak": 82.62,
    "robustness/bert_test_accuracy_peak": 83.97,
    # appendix B: accuracies on the in-distribution test set
    "accuracy/vit_cifar100": 89.91,
    "accuracy/vit_cifar10": 97.48,
    "accuracy/bit_cifar100": 86.89,
    "accuracy/bit_cifar10": 97.66,
    "accuracy/genomics_masked_token": 48.35,
    "accuracy/genomics_bert": 89.84,
    "accuracy/clinc_bert": 96.53,
}

_NO_WEIGHTS = "the weights of {} cannot be fetched offline{}; ready under scale=paper"
_NO_GPU = ", and fine-tuning them needs a GPU"

#: lines that the small and the medium scale do not run: table -> line -> why
NOT_RUN: dict[str, dict[Line, str]] = {
    "table1": {},
    "table2": {
        (benchmark, backbone): _NO_WEIGHTS.format(weights, "")
        for benchmark in (CIFAR100, CIFAR10)
        for backbone, weights in (("ViT-B/16", "ViT-B/16 of ImageNet-21k"), ("CLIP", "CLIP"))
    },
    "table3": {
        (benchmark, backbone): _NO_WEIGHTS.format(backbone, _NO_GPU)
        for benchmark in (CIFAR100, CIFAR10)
        for backbone in ("ViT-B/16", "BiT R50x1")
    },
}
