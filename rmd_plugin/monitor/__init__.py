"""OODMonitor: features (hooks), fitting (one pass for many detectors, over all processes), callback (Lightning)."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import lightning_utilities.core.rank_zero as rank_zero

#: where a root of Lightning that the user has imported sends its log; the import of the other one would change it
_log = rank_zero.log if {"pytorch_lightning", "lightning"} & sys.modules.keys() else None

from pytorch_lightning import Callback as Callback  # noqa: E402

if not TYPE_CHECKING:
    # two roots with classes of their own: a trainer of one takes no callback of the other, so ours derives from both
    with suppress(ImportError):  # the second one is not a dependency
        Callback = type("Callback", (Callback, import_module("lightning.pytorch").Callback), {})
if _log is not None:
    rank_zero.log = _log
