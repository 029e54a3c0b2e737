"""Near-OOD detection for PyTorch: relative Mahalanobis and relative flow detectors for pytorch-ood.

The public names are resolved on first use, so ``import rmd_plugin`` stays cheap and does not import torch.
"""

from typing import TYPE_CHECKING

from rmd_plugin.lazy import lazy_names

__version__ = "0.2.0"

# module -> the public names that it defines
_MODULES = {
    "compare.metrics": "OODScores",
    "detectors.conformal": "Calibrated CalibrationScores",
    "detectors.detectors": "RMD Mahalanobis MarginalMahalanobis PartialMahalanobis load_detector",
    "detectors.drift": "DriftAlarm",
    "detectors.flows": "FlowLikelihood RelativeFlow",
    "detectors.fused": "FusedRMD",
    "detectors.moments": "ClassMoments Moments NumericalWarning",
    "guard.guard": "Guard",
    "monitor.callback": "OODMonitor",
    "tables": "fit_table score_table table_state",
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from rmd_plugin.compare.metrics import OODScores
    from rmd_plugin.detectors.conformal import Calibrated, CalibrationScores
    from rmd_plugin.detectors.detectors import RMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis, load_detector
    from rmd_plugin.detectors.drift import DriftAlarm
    from rmd_plugin.detectors.flows import FlowLikelihood, RelativeFlow
    from rmd_plugin.detectors.fused import FusedRMD
    from rmd_plugin.detectors.moments import ClassMoments, Moments, NumericalWarning
    from rmd_plugin.guard.guard import Guard
    from rmd_plugin.monitor.callback import OODMonitor
    from rmd_plugin.tables import fit_table, score_table, table_state

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
