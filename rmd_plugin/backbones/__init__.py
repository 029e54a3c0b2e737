"""Backbones: one file per family of networks, each giving ``encoder``, ``head`` and the matching transforms.

The names are resolved on first use, so that a choice imports only what it needs.
"""

# ruff: noqa: F401  (the imports at the end are for type checkers)

from typing import TYPE_CHECKING

from rmd_plugin.lazy import lazy_names

# module -> public names that it defines
_MODULES = {
    "base": "Backbone CheckpointError WeightsNotFoundError",
    "genomics": "GenomicsBERT GenomicsCNN MaskedTokenPretraining",
    "hub": "BERT HF OpenCLIP Timm TorchVision",
    "resnet": "ResNet WideResNet",
    "small": "MLP Identity SmallCNN",
    "transforms": "ImageTransform",
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_EXPORTS]

if TYPE_CHECKING:
    from .base import Backbone, CheckpointError, WeightsNotFoundError
    from .genomics import GenomicsBERT, GenomicsCNN, MaskedTokenPretraining
    from .hub import BERT, HF, OpenCLIP, Timm, TorchVision
    from .resnet import ResNet, WideResNet
    from .small import MLP, Identity, SmallCNN
    from .transforms import ImageTransform

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
