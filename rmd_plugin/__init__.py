"""Near-OOD detection for PyTorch: relative Mahalanobis and relative flow detectors for pytorch-ood.

The public names are resolved on first use, so ``import rmd_plugin`` stays cheap and does not import torch.
"""

from typing import TYPE_CHECKING

from rmd_plugin.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
