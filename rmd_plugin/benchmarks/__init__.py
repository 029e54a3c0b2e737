"""Benchmarks: each a ``pytorch_ood.benchmark.Benchmark`` with clean fit sets, near and far OOD sets and a fingerprint.

The names are resolved on first use, so importing this package does not import torch.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from rmd_plugin.lazy import lazy_names

# module -> public names that it defines
_MODULES = {
    "base": "ImageRows OODBenchmark OODSet Parts Split TensorRows Texts",
    "dataset_files": "ChecksumError DataFormatError DataNotFoundError DownloadError check_data",
    "framework": "Framework as_benchmark",
    "genomics": "Genomics",
    "hf": "HFDataset",
    "own": "Embeddings Features ImageFolder TextFile",
    "public": "CIFAR100vsCIFAR10 CIFAR10vsCIFAR100 CLINC150 Digits Intents Simulation",
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_EXPORTS]

if TYPE_CHECKING:
    from .base import ImageRows, OODBenchmark, OODSet, Parts, Split, TensorRows, Texts
    from .dataset_files import ChecksumError, DataFormatError, DataNotFoundError, DownloadError, check_data
    from .framework import Framework, as_benchmark
    from .genomics import Genomics
    from .hf import HFDataset
    from .own import Embeddings, Features, ImageFolder, TextFile
    from .public import CLINC150, CIFAR10vsCIFAR100, CIFAR100vsCIFAR10, Digits, Intents, Simulation

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
