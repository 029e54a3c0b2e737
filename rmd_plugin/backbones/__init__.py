"""Backbones: one file per family of networks, each giving ``encoder``, ``head`` and the matching transforms.

The names are resolved on first use, so that a choice imports only what it needs.
"""

# ruff: noqa: F401  (the imports at the end are for type checkers)

from typing import TYPE_CHECKING

from rmd_plugin.lazy import lazy_names

# public name -> module that defines it
_EXPORTS = {
    "BERT": "text",
    "MLP": "small",
    "Backbone": "base",
    "CheckpointError": "checkpoint",
    "EfficientNetLite0": "efficientnet",
    "GenomicsBERT": "genomics",
    "GenomicsCNN": "genomics",
    "HF": "hf",
    "Identity": "small",
    "MaskedTokenPretraining": "stages",
    "OpenCLIP": "vision",
    "ResNet": "resnet",
    "SmallCNN": "small",
    "Timm": "vision",
    "TorchVision": "vision",
    "WeightsNotFoundError": "fetch",
    "WideResNet": "resnet",
}

__all__ = [*_EXPORTS]

if TYPE_CHECKING:
    from rmd_plugin.backbones.base import Backbone
    from rmd_plugin.backbones.checkpoint import CheckpointError
    from rmd_plugin.backbones.efficientnet import EfficientNetLite0
    from rmd_plugin.backbones.fetch import WeightsNotFoundError
    from rmd_plugin.backbones.genomics import GenomicsBERT, GenomicsCNN
    from rmd_plugin.backbones.hf import HF
    from rmd_plugin.backbones.resnet import ResNet, WideResNet
    from rmd_plugin.backbones.small import MLP, Identity, SmallCNN
    from rmd_plugin.backbones.stages import MaskedTokenPretraining
    from rmd_plugin.backbones.text import BERT
    from rmd_plugin.backbones.vision import OpenCLIP, Timm, TorchVision

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
