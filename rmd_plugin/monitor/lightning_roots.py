"""Both roots of Lightning: ``pytorch_lightning`` and ``lightning.pytorch`` are the same code with classes of their own.

A trainer of one takes no callback of the other, so ours derives from the ``Callback`` of each root that is installed.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import lightning_utilities.core.rank_zero as rank_zero
from torch import nn

#: the second one is not a dependency; whoever has installed it beside the first probably uses it
ROOTS = ("pytorch_lightning", "lightning.pytorch")
_LOGGERS = ("pytorch_lightning", "lightning_fabric", "lightning", "lightning.pytorch", "lightning.fabric")


@contextmanager
def _logging_as_it_was() -> Iterator[None]:
    """Undo what an import of a root does to levels that the user has set, and to where a root in use sends its log."""
    in_use = any(root in sys.modules for root in ROOTS)
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    shared = {name: getattr(rank_zero, name) for name in ("log", "rank_zero_deprecation_category")}
    yield
    for name, level in levels.items():
        if level != logging.NOTSET:
            logging.getLogger(name).setLevel(level)
    if in_use:
        for name, value in shared.items():
            setattr(rank_zero, name, value)


def _is_installed(root: str) -> bool:
    package, *inner = root.split(".")
    if root in sys.modules or not inner:
        return True
    found = find_spec(package)  # a user's own lightning.py is not to be run
    return found is not None and any(Path(place, *inner).is_dir() for place in found.submodule_search_locations or ())


def import_roots() -> list[ModuleType]:
    """The roots that are installed."""
    roots = []
    with _logging_as_it_was():
        for root in filter(_is_installed, ROOTS):
            try:
                roots.append(importlib.import_module(root))
            except Exception:
                # a root that nobody can import is nobody's; the first one is a dependency
                if root == ROOTS[0]:
                    raise
    return roots


def builds_itself(module: nn.Module) -> bool:
    """Whether a LightningModule has a ``setup`` or ``configure_model`` of its own, which may add layers."""
    inherited = [f"{root}.core.hooks" for root in ROOTS]
    return any(getattr(module, hook).__module__ not in inherited for hook in ("setup", "configure_model"))


if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    Callback = type("Callback", tuple(root.Callback for root in import_roots()), {})
