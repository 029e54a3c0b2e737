"""Whether the accuracy of a trained head can be right: a wrong preprocessing or order of classes shows here first."""

from __future__ import annotations

import math

_CHECK = "check the preprocessing (backbone.mean, backbone.std, backbone.image_size) and the order of the classes"


def doubt_accuracy(accuracy: float, samples: int, num_classes: int, noted: float | None = None) -> str:
    """What is strange about the accuracy of a trained head, in one sentence; an empty text if nothing is.

    Args:
        accuracy: measured, in [0, 1].
        samples: that it was measured on.
        num_classes: of the head.
        noted: accuracy that the checkpoint or the weights claim, if they do.

    Example:
        >>> doubt_accuracy(0.93, 10_000, 10, noted=0.94)
        ''
        >>> doubt_accuracy(0.10, 10_000, 10)[:38]
        '10.0 % is hardly above chance (10.0 %)'
    """
    chance = 1 / num_classes
    # twice the chance, or with few classes a tenth of the way to 1; and within three standard errors of few samples
    near = max(min(2 * chance, chance + 0.1 * (1 - chance)), chance + 3 * _error(chance, samples))
    if accuracy < near:
        fault = f"is hardly above chance ({100 * chance:.1f} %) although the head is trained"
    elif noted is not None and accuracy < 0.75 * noted - 3 * _error(noted, samples):
        fault = f"is far below the {100 * noted:.1f} % that the weights had by their own account"
    else:
        return ""
    return f"{100 * accuracy:.1f} % {fault}: {_CHECK}"


def _error(share: float, samples: int) -> float:
    return math.sqrt(share * (1 - share) / max(samples, 1))
