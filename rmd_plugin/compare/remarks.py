"""Warnings while a detector works, as remarks for its row."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rmd_plugin.detectors.functional import NumericalWarning

log = logging.getLogger(__name__)


@contextmanager
def collected(remarks: list[str]) -> Iterator[None]:
    """Warnings of our numerics become remarks in the table; those of the framework go to the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = " ".join(str(warning.message).split())
        if not issubclass(warning.category, NumericalWarning):
            log.debug("%s: %s", warning.category.__name__, text)
        elif text not in remarks:
            remarks.append(text)
