"""Configs that come from a run folder: what they may name unless the user trusts them. Imports nothing heavy.

A ``_target_`` is called with what the config says, so a config is a program. One that lies in a run folder may come
from anybody: :func:`check_config` lets it make classes of the packages below, and nothing else. ``trust_config=true``
on the command line, or ``load_run(cfg, trust_config=True)``, lifts this; the config itself cannot.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rmd_plugin.untrusted import DataFormatError, read_mapping, read_text

#: packages whose classes a kept config may make; other parts of pytorch-ood and torch unpickle files or run programs
_CLASSES = (
    "rmd_plugin.benchmarks", "rmd_plugin.backbones", "rmd_plugin.detectors", "rmd_plugin.monitor", "rmd_plugin.paper",
    "rmd_plugin.app.last_checkpoint",
    "pytorch_ood.detector", "torch.nn", "torch.optim", "torchvision.models", "torchvision.transforms",
    "pytorch_lightning.callbacks", "pytorch_lightning.loggers", "pytorch_lightning.trainer",
    "lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.trainer",
)  # fmt: skip
#: and where they may be named: the public places of the same
_SPELLED = (*_CLASSES, "rmd_plugin", "pytorch_lightning", "lightning.pytorch")
#: packages whose functions it may call
_FUNCTIONS = ("torchvision.models",)
#: what may follow ``${``: a reference inside the config, our resolvers, and of the environment our own variables; a
#: further brace would be a mapping, and so a target that is written as text
_INTERPOLATION = re.compile(
    r"(?:[^{}:$]*\}|(?:hydra|now|oc\.select|rmd_\w+):|oc\.env:(?:RMD_DATA_DIR|RMD_CACHE_DIR)\s*[,}])[^{]*",
    flags=re.ASCII,
)
#: how a kept config begins
_DEFAULTS = [[{"command@hydra": command}, "_self_"] for command in ("train", "compare")]
_FLAG = "trust_config=true"
_MAX_BYTES = 1 << 20


class UntrustedConfigError(HydraException, ValueError):
    """A config of a run folder names what it must not, and nobody said that it can be trusted."""


def check_config(config: Mapping[str, Any] | DictConfig, source: str, remedy: str = _FLAG) -> None:
    """Refuse a config that makes anything but classes of known packages, or reads the environment.

    Raises:
        UntrustedConfigError: with the target, its place, and how to say that the config can be trusted.
    """
    plain = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else config
    for place, value in _leaves(plain):
        target = place[-1:] == ("_target_",)
        if target and not _may_make(value):
            raise _refused(
                source, f"{'.'.join(place)}={value}, which is not among the classes that it may make", remedy
            )
        if isinstance(value, str):
            pieces = value.split("${")[1:]
            if pieces and (target or not all(map(_INTERPOLATION.fullmatch, pieces))):
                raise _refused(source, f"{'.'.join(place)}={value}, which asks for more than the config itself", remedy)


def check_command_line() -> None:
    """Check the config that a command is told to begin with: ``--config-dir RUN --config-name config``.

    Before Hydra reads it, because a config can tell Hydra itself what to run. Configs that are chosen by name from a
    ``--config-dir`` of the user's own (``benchmark=mine``) are his program, as his modules are.
    """
    for number, word in enumerate(sys.argv):
        if word.lstrip("+").lower() == _FLAG:
            sys.argv[number] = f"++{_FLAG}"  # configs that are kept do not hold it
            return
    given, _ = get_args_parser().parse_known_args(sys.argv[1:])
    for option in ("config_path", "experimental_rerun"):
        if getattr(given, option):
            raise _refused(f"--{option.replace('_', '-')}", "files that can run any program", _FLAG)
    if given.config_dir is None or given.config_name is None:
        return
    path = Path(given.config_dir, f"{given.config_name.removesuffix('.yaml')}.yaml")
    if not path.is_file():
        return  # one of ours, or none: Hydra says so
    try:
        text, config = read_text(path, _MAX_BYTES), read_mapping(path, _MAX_BYTES)
    except DataFormatError as error:
        raise UntrustedConfigError(str(error)) from error
    if (
        config.pop("defaults", None) not in _DEFAULTS
        or "hydra" in config
        or re.search(r"^\s*#\s*@", text, flags=re.MULTILINE)
    ):
        raise _refused(str(path), "settings of Hydra, which can run any program", _FLAG)
    check_config(config, str(path))


def _refused(source: str, what: str, remedy: str) -> UntrustedConfigError:
    return UntrustedConfigError(f"{source} names {what}. Nothing was run. If you trust it, or wrote it: {remedy}.")


def _leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            # a target is looked at as a whole, whatever it is
            yield from [((*place, str(key)), item)] if key == "_target_" else _leaves(item, (*place, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for number, item in enumerate(value):
            yield from _leaves(item, (*place, str(number)))
    else:
        yield place, value


def _may_make(target: object) -> bool:
    if not isinstance(target, str) or not _inside(target, _SPELLED):
        return False
    try:
        found = pkgutil.resolve_name(target)
    except Exception:  # whatever keeps it from being found
        return False
    # where it is defined counts: rmd_plugin.x.os.system is spelled as one of ours
    where = str(getattr(found, "__module__", ""))
    return (
        _inside(where, _CLASSES)
        if isinstance(found, type)
        else inspect.isfunction(found) and _inside(where, _FUNCTIONS)
    )


def _inside(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
