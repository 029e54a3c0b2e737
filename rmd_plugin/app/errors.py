"""What a user can fix is one sentence, in the words of the command line. Imports nothing heavy."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from rmd_plugin.app.configs import group_choices
from rmd_plugin.app.console import protect_console
from rmd_plugin.extras import missing_extra
from rmd_plugin.untrusted import one_line

log = logging.getLogger(__name__)

_FULL = "HYDRA_FULL_ERROR"
#: whether the user asked for whole tracebacks, before :func:`hydra_errors` asks for them itself
_asked = os.environ.get(_FULL, "0")


#: plugins of Hydra and the extras that bring them
_PLUGIN_EXTRAS = {"joblib": "sweep", "submitit": "sweep", "optuna": "optuna"}


class JobError(CompactHydraException):
    """What stops one job of a sweep, in one sentence: Hydra shows no traceback for its kind."""


@contextmanager
def hydra_errors(command: str) -> Iterator[None]:
    """Say in one sentence what is wrong with the overrides of a command, with the choices that there are."""
    global _asked
    _asked = os.environ.get(_FULL, "0")
    os.environ[_FULL] = "1"  # Hydra would print its own five lines and end the program
    try:
        yield
    except (HydraException, OmegaConfBaseException, RuntimeError, OSError) as error:
        # a plugin of Hydra's that is not installed is a RuntimeError; others are faults of the program
        if _asked == "1" or (type(error) is RuntimeError and "plugin" not in str(error)):
            raise
        print(f"{command}: {explain(error)}", file=sys.stderr)
        sys.exit(1)
    finally:
        os.environ[_FULL] = _asked


@contextmanager
def one_clear_error(command: str) -> Iterator[None]:
    """End a job with one sentence where data, weights, disk or options are at fault.

    Errors of other kinds are faults of the program and keep their traceback, as does everything under
    ``HYDRA_FULL_ERROR=1``. In a multirun the sentence is logged and goes to Hydra, which runs the other jobs first.
    """
    protect_console()  # here too: worker processes of a launcher begin with the job
    os.environ[_FULL] = _asked  # the config is composed: from here on Hydra behaves as the user wants
    try:
        yield
    except Exception as error:
        kinds = (OSError, ValueError, ImportError, MissingMandatoryValue, InterpolationResolutionError)
        # by name: the other commands do not import Lightning
        of_the_user = isinstance(error, kinds) or type(error).__name__ == "MisconfigurationException"
        if not of_the_user or _asked == "1":
            raise
        sentence = f"{command}: {explain(error)}"
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            log.error("%s", sentence)
            raise JobError(sentence) from None
        print(sentence, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        # what a shell expects of a program that was stopped, instead of a traceback
        sys.exit(130)


def explain(error: BaseException) -> str:
    """An error in one sentence on one line, with what could be meant instead."""
    return one_line(_explain(error))


def _explain(error: BaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        name = error.full_key or str(error).splitlines()[0].rpartition(" ")[2]
        return f"{name} must be given: add {name}=VALUE."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if group.startswith("experiment/"):
            group, _, above = group.partition("/")
            choice = f"{above}/{choice}"
        plugin = choice.partition("_")[0]
        if group in ("hydra/launcher", "hydra/sweeper") and plugin in _PLUGIN_EXTRAS:
            return f"{missing_extra(f'hydra-{plugin}', _PLUGIN_EXTRAS[plugin], needed_by=f'{group}={choice}')}."
        known = {*group_choices(group), *(error.options or ())}  # Hydra's own and the user's are not among ours
        choices = sorted(name for name in known if not name.startswith("_"))
        return f"there is no {group or 'config'}={choice}.{closest(choice, choices)} There are: {', '.join(choices)}."
    causes = [item for item in (error, error.__cause__) if isinstance(item, OmegaConfBaseException)]
    for cause in causes:
        if isinstance(cause, (AttributeError, KeyError)) and OmegaConf.is_dict(cause.parent_node):
            name, keys = str(cause.full_key), [str(key) for key in cause.parent_node]
            where, _, key = name.rpartition(".")
            keys = [item for item in keys if not item.startswith("_") and item != "hydra"]
            hint = closest(key, keys, prefix=f"{where}." if where else "") or _elsewhere(cause.parent_node, where, key)
            hint = hint or f" There are: {', '.join(keys)}."
            return f"there is no option {name}.{hint} To add a new one: +{name}=VALUE."
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full: {text}. Free some space and run the command again."
    if isinstance(error, InterpolationResolutionError) and "resolving interpolation: " in text:
        return text.partition("resolving interpolation: ")[2].partition(" full_key:")[0]  # a sentence of our resolvers
    if missing := re.search(r"hydra_plugins\.hydra_(joblib|submitit|optuna)\w*", text):
        return f"{missing_extra(missing[0], _PLUGIN_EXTRAS[missing[1]], needed_by=missing[1])}."
    if not causes:
        return text
    # "Error merging override X", and only the cause says that X must be a number
    return f"{text}: {str(causes[-1]).splitlines()[0]}." if error not in causes else str(error).splitlines()[0]


def _elsewhere(node: Any, where: str, key: str) -> str:
    """Where an option of that name is, or the choice that brings it."""
    if key in group_choices(where):
        return f' Choose it first: "{where}=[default,{key}]".'
    nodes = {name: node[name] for name in node if not OmegaConf.is_missing(node, name)}
    found = [f"{where}.{name}.{key}" for name, part in nodes.items() if OmegaConf.is_dict(part) and key in part]
    return f" Did you mean {found[0].lstrip('.')}?" if found else ""


def closest(word: str, choices: Iterable[str], *, prefix: str = "") -> str:
    """`` Did you mean X?``, or nothing if no choice is like the word."""
    found = difflib.get_close_matches(word, list(choices), n=1)
    return f" Did you mean {prefix}{found[0]}?" if found else ""


def whole_number(value: object, name: str) -> int:
    """An option that must be a whole number, refused by its name if it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return value
