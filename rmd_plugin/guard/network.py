"""The network of a guard: prepared inputs -> logits, class, score, p-value and decision in one pass."""

from __future__ import annotations

from typing import NamedTuple

from pytorch_ood.api import LogitsDetector
from torch import Tensor, nn

from rmd_plugin.detectors.base import StatefulDetector
from rmd_plugin.detectors.calibrated import Calibrated
from rmd_plugin.encoding.features import pool_features, widened


class Verdicts(NamedTuple):
    """What a guard says of a batch; each of shape (B,) but the logits."""

    logits: Tensor  #: shape (B, K)
    label: Tensor  #: the predicted class, of the largest logit
    nearest: Tensor  #: the class that the detector finds nearest; the predicted one for detectors without classes
    score: Tensor  #: higher is more OOD
    p_value: Tensor  #: float64
    is_ood: Tensor  #: bool: whether the score lies above the threshold


class GuardNetwork(nn.Module):
    """Encoder, head and calibrated detector in one module.

    Args:
        encoder: maps prepared inputs to features.
        head: maps features to logits.
        detector: fitted on such features, or on such logits, and calibrated.
    """

    def __init__(self, encoder: nn.Module, head: nn.Linear, detector: Calibrated) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.on_logits = isinstance(detector.detector, LogitsDetector)
        exports = self.on_logits or isinstance(detector.detector, StatefulDetector)
        self.decision = detector.to_module() if exports else _InPython(detector)
        self.eval()

    def forward(self, batch: Tensor) -> Verdicts:
        """Verdicts on a batch of prepared inputs."""
        features = widened(pool_features(self.encoder(batch)))
        logits = self.head(features.to(self.head.weight.dtype))
        label = logits.argmax(1)
        score, nearest, p_value, is_ood = self.decision.judge(logits if self.on_logits else features)  # type: ignore[operator]
        return Verdicts(logits, label, label if nearest is None else nearest, score, p_value, is_ood)


class _InPython(nn.Module):
    """A detector of the framework whose scores are no graph: it works here, but cannot be exported."""

    def __init__(self, detector: Calibrated) -> None:
        super().__init__()
        detector.threshold()  # refuses one that is not calibrated
        self.judge = detector.judge
