"""The paper, reproduced: a leaf that nothing imports but its command."""

from rmd_plugin.lazy import lazy_names

__all__ = ["AccuracyRecorder"]  # named by conf/experiment

__getattr__, __dir__ = lazy_names(__name__, {"AccuracyRecorder": "accuracy"})
