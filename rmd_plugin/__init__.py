"""Near-OOD detection for PyTorch: relative Mahalanobis and relative flow detectors for pytorch-ood.

The public names are resolved on first use, so ``import rmd_plugin`` stays cheap and does not import torch.
"""

from typing import TYPE_CHECKING

from rmd_plugin.lazy import lazy_names

__version__ = "0.1.0"

# public name -> module that defines it
_EXPORTS = {
    "RMD": "detectors.mahalanobis",
    "Calibrated": "detectors.calibrated",
    "CalibrationScores": "detectors.calibration_scores",
    "ClassMoments": "detectors.class_moments",
    "FlowLikelihood": "detectors.flows.detectors",
    "FusedRMD": "detectors.fused",
    "Guard": "guard.guard",
    "Mahalanobis": "detectors.mahalanobis",
    "MarginalMahalanobis": "detectors.mahalanobis",
    "Moments": "detectors.moments",
    "MultiLayer": "detectors.multi_layer",
    "NumericalWarning": "detectors.functional",
    "OODMonitor": "monitor.callback",
    "OODScores": "compare.metrics",
    "PartialMahalanobis": "detectors.mahalanobis",
    "RelativeFlow": "detectors.flows.detectors",
    "fit_table": "table.fit",
    "load_detector": "detectors.base",
    "score_table": "table.score",
    "table_state": "table.fit",
}

__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from rmd_plugin.compare.metrics import OODScores
    from rmd_plugin.detectors.base import load_detector
    from rmd_plugin.detectors.calibrated import Calibrated
    from rmd_plugin.detectors.calibration_scores import CalibrationScores
    from rmd_plugin.detectors.class_moments import ClassMoments
    from rmd_plugin.detectors.flows.detectors import FlowLikelihood, RelativeFlow
    from rmd_plugin.detectors.functional import NumericalWarning
    from rmd_plugin.detectors.fused import FusedRMD
    from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis
    from rmd_plugin.detectors.moments import Moments
    from rmd_plugin.detectors.multi_layer import MultiLayer
    from rmd_plugin.guard.guard import Guard
    from rmd_plugin.monitor.callback import OODMonitor
    from rmd_plugin.table.fit import fit_table, table_state
    from rmd_plugin.table.score import score_table

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
