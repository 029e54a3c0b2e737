"""Near-OOD detection for PyTorch: relative Mahalanobis and relative flow detectors for pytorch-ood.

The public names are resolved on first use, so ``import rmd_plugin`` stays cheap and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS = {
    "RMD": "detectors",
    "ClassMoments": "moments",
    "FlowLikelihood": "flow_detectors",
    "Mahalanobis": "detectors",
    "MarginalMahalanobis": "detectors",
    "Moments": "moments",
    "NumericalWarning": "functional",
    "OODMonitor": "callback",
    "OODScores": "metrics",
    "PartialMahalanobis": "detectors",
    "RelativeFlow": "flow_detectors",
    "load_detector": "base",
}

__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from rmd_plugin.base import load_detector
    from rmd_plugin.callback import OODMonitor
    from rmd_plugin.detectors import RMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis
    from rmd_plugin.flow_detectors import FlowLikelihood, RelativeFlow
    from rmd_plugin.functional import NumericalWarning
    from rmd_plugin.metrics import OODScores
    from rmd_plugin.moments import ClassMoments, Moments


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Public names: {', '.join(__all__)}.")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
