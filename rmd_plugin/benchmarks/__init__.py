"""Benchmarks: each a ``pytorch_ood.benchmark.Benchmark`` with clean fit sets, near and far OOD sets and a fingerprint.

The names are resolved on first use, so importing this package does not import torch.
"""

# ruff: noqa: F401
from typing import TYPE_CHECKING

from rmd_plugin.lazy import lazy_names

# public name -> module that defines it
_EXPORTS = {
    "CIFAR100vsCIFAR10": "cifar",
    "CIFAR10vsCIFAR100": "cifar",
    "CLINC150": "clinc",
    "ChecksumError": "errors",
    "DataFormatError": "errors",
    "DataNotFoundError": "errors",
    "Digits": "digits",
    "DownloadError": "errors",
    "Embeddings": "embeddings",
    "Features": "features",
    "Framework": "framework",
    "Genomics": "genomics",
    "HFDataset": "hf_dataset",
    "ImageFolder": "image_folder",
    "ImageRows": "sources",
    "Intents": "intents",
    "OODBenchmark": "base",
    "OODSet": "splits",
    "Parts": "splits",
    "Simulation": "simulation",
    "Split": "splits",
    "TensorRows": "sources",
    "TextFile": "text_file",
    "Texts": "sources",
    "as_benchmark": "base",
}

__all__ = [*_EXPORTS]

if TYPE_CHECKING:
    from .base import OODBenchmark, as_benchmark
    from .cifar import CIFAR10vsCIFAR100, CIFAR100vsCIFAR10
    from .clinc import CLINC150
    from .digits import Digits
    from .embeddings import Embeddings
    from .errors import ChecksumError, DataFormatError, DataNotFoundError, DownloadError
    from .features import Features
    from .framework import Framework
    from .genomics import Genomics
    from .hf_dataset import HFDataset
    from .image_folder import ImageFolder
    from .intents import Intents
    from .simulation import Simulation
    from .sources import ImageRows, TensorRows, Texts
    from .splits import OODSet, Parts, Split
    from .text_file import TextFile

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
