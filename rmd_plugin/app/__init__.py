"""Hydra configs -> objects -> runs: what the commands execute, and the callbacks that the configs name."""

from rmd_plugin.lazy import lazy_names

_EXPORTS = {"RandomStates": "train", "ReportCallback": "commands"}

__all__ = [*_EXPORTS]

__getattr__, __dir__ = lazy_names(__name__, _EXPORTS)
