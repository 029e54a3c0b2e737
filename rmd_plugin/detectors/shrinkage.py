"""What the detectors with the option ``shrinkage`` share: its check, what it came to, a warning where it is missing."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rmd_plugin.detectors.base import StatefulDetector
from rmd_plugin.detectors.files import TensorSpec, check_tensors
from rmd_plugin.detectors.gaussian import shrinkage_intensity, warn_few_samples
from rmd_plugin.detectors.moments import Moments

Shrinkage = float | Literal["oas", "auto"]


class ShrinkingDetector(StatefulDetector):
    """Base class of the detectors that shrink the within-class covariance by their option ``shrinkage``."""

    shrinkage: Shrinkage

    def __repr__(self) -> str:
        text = super().__repr__()
        if self.fitted and self._fitted_options.get("shrinkage") == "auto" and self.intensity is not None:
            return f"{text[:-1]}, intensity {self.intensity:.3g}>"
        return text

    @property
    def intensity(self) -> float | None:
        """What ``shrinkage`` came to in the fit, a number in [0, 1]; None where an older file does not say."""
        self._require_fit()
        found = self._state.get("intensity")
        return None if found is None or found.is_meta else float(found)

    def _needs_many_samples(self) -> bool:
        """Whether shrinkage helps where N < 5 D: if directions of small variance, which few samples get wrong, decide.

        On MiniLM features it does not help the background's distance, leading eigen-directions and trained flows.
        """
        return False

    def _intensity(self, moments: Moments) -> dict[str, Tensor]:
        """What ``shrinkage`` comes to, for the state; warns where the scores suffer from none."""
        intensity = shrinkage_intensity(moments, self.shrinkage)
        if not intensity and self._needs_many_samples():
            warn_few_samples(moments)
        return {"intensity": moments.shift.new_tensor(intensity)}

    def _check_options(self) -> None:
        super()._check_options()
        if self.shrinkage in ("oas", "auto"):
            return
        if not hasattr(self.shrinkage, "__float__") or not 0.0 <= float(self.shrinkage) <= 1.0:
            raise ValueError(f"shrinkage must be a number in [0, 1], 'oas' or 'auto', got {self.shrinkage!r}.")

    def _check_tensors(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        super()._check_tensors(tensors, sizes)
        if "intensity" in tensors:
            check_tensors(tensors, {"intensity": TensorSpec("")}, {})
