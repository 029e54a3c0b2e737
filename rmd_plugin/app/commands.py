"""The entry points of ``rmd-train``, ``rmd-compare``, ``rmd-fit``. Imports nothing heavy: ``--help`` takes a second."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from rmd_plugin.app.configs import prepare_hydra
from rmd_plugin.app.console import protect_console
from rmd_plugin.app.errors import hydra_errors, one_clear_error
from rmd_plugin.app.trust import check_command_line
from rmd_plugin.untrusted import one_line

CONF = prepare_hydra()
_make_record = logging.getLogRecordFactory()


def _plain_record(*arguments: Any, **more: Any) -> logging.LogRecord:
    """A record whose text, if it is ours, steers no terminal: it may hold names that somebody else gave."""
    record = _make_record(*arguments, **more)
    if record.name.startswith("rmd_plugin"):
        record.msg, record.args = one_line(record.getMessage()), ()
    return record


@hydra.main(version_base="1.3", config_path=CONF, config_name="train")
def _train(cfg: DictConfig) -> float | None:
    logging.setLogRecordFactory(_plain_record)
    with one_clear_error("rmd-train"):
        from rmd_plugin.app.train import train

        return train(cfg)


@hydra.main(version_base="1.3", config_path=CONF, config_name="compare")
def _compare(cfg: DictConfig) -> None:
    logging.setLogRecordFactory(_plain_record)
    with one_clear_error("rmd-compare"):
        from rmd_plugin.app.compare import compare

        compare(cfg)


@hydra.main(version_base="1.3", config_path=CONF, config_name="fit")
def _fit(cfg: DictConfig) -> None:
    logging.setLogRecordFactory(_plain_record)
    with one_clear_error("rmd-fit"):
        from rmd_plugin.app.fit import fit

        fit(cfg)


def train() -> None:
    """Train a backbone on a benchmark, watch and compare its detectors, write a report.

    A job gives back its best validation accuracy, for sweepers that search. It does not depend on any OOD data.
    """
    run_command(_train, "rmd-train")


def compare() -> None:
    """Compare detectors on a benchmark, from a checkpoint, a frozen backbone or a file of features.

    Nothing is given back to sweepers that search: the numbers are of test data, and nobody should tune on those.
    """
    run_command(_compare, "rmd-compare")


def fit() -> None:
    """Fit and calibrate one detector behind a network, and write both as a guard: one folder that can be deployed."""
    run_command(_fit, "rmd-fit")


def run_command(main: Callable[[], object], name: str) -> None:
    """Run a Hydra command: what is wrong with its overrides is one sentence, and the current folder can be imported."""
    protect_console()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # benchmarks, backbones and callbacks of the user's own, as for python script.py
    with hydra_errors(name):
        check_command_line()
        main()
