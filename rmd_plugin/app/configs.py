"""Where the configs are, and what they may ask for. Imports nothing heavy: commands need it before they parse."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Container, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from rmd_plugin.shipped import config_path, config_root

#: of a folder's name, in bytes: file systems allow 255, and the hash comes behind it
_LONGEST = 150
#: what is watched during training if the config does not say: of the first all that are chosen, else one of the second
_WATCHED = (("rmd", "mahalanobis"), ("fused", "msp", "energy", "max_logit", "knn", "marginal", "partial"))


def prepare_hydra() -> str:
    """Make our resolvers and shared configs known to Hydra; the search path of the configs, for ``hydra.main``."""
    register_resolvers()
    if not _importable("hydra_plugins.rmd_plugin"):  # a checkout that is not installed: Hydra does not find it itself
        from hydra.core.plugins import Plugins

        from rmd_plugin.hydra_plugin.search_path import RmdSearchPath

        Plugins.instance().register(RmdSearchPath)
    return config_path()


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _user_folder() -> list[Path]:
    """The ``--config-dir`` of this command, if it has one."""
    words = [part for word in sys.argv for part in word.split("=", 1)]
    return [Path(folder) for flag, folder in pairwise(words) if flag in ("--config-dir", "-cd")]


def group_choices(group: str) -> list[str]:
    """Names of the configs of a group, those of folders below it as ``folder/name``; hidden ones start with ``_``."""
    found: list[str] = []
    for root in (config_root(), config_root().joinpath("shared"), *_user_folder()):
        place = root.joinpath(*group.split("/"))
        for item in sorted(place.iterdir(), key=lambda item: item.name) if place.is_dir() else ():
            if item.name.endswith(".yaml") and not item.name.startswith("_"):
                found.append(item.name.removesuffix(".yaml"))
            elif item.is_dir() and not item.name.startswith("_"):
                found += [f"{item.name}/{name}" for name in group_choices(f"{group}/{item.name}")]
    return sorted(dict.fromkeys(found))


def choices(*groups: str) -> str:
    """The configs of some groups, a line each: Hydra's own list has those of the other commands too."""
    return "\n".join(f"{group}: {', '.join(group_choices(group))}" for group in groups)


def options(name: str) -> str:
    """The options of a command or choice as they stand in its YAML, with the comments, which Hydra's own help drops."""
    places = [root.joinpath(f"{name}.yaml") for root in (config_root(), *_user_folder())]
    text = next((place.read_text(encoding="utf-8") for place in places if place.is_file()), "")
    after_defaults = re.split(r"^defaults:\n(?:  .*\n)+", text, maxsplit=1, flags=re.MULTILINE)[-1]
    shown = re.sub(r"^names:.*\Z", "", after_defaults, flags=re.MULTILINE | re.DOTALL).strip()
    return shown.replace("$", "$$")  # Hydra fills in $CONFIG afterwards, and takes any other dollar for a mistake


def watched_by_default(detectors: Container[str]) -> list[str]:
    """Names of the chosen detectors that are watched during training."""
    usual, others = ([name for name in names if name in detectors] for names in _WATCHED)
    return usual or others[:1]


def monitored(detectors: DictConfig, names: Sequence[str] | None) -> DictConfig:
    """The nodes of ``detector=`` that ``monitor=`` names, for OODMonitor to complete with what the network has.

    Raises:
        ValueError: if a name is not among the chosen detectors.
    """
    missing = [str(name) for name in names or () if name not in detectors]
    if missing:
        raise ValueError(
            f"monitor names {', '.join(missing)}, which detector= does not choose. "
            f"Chosen are {', '.join(map(str, detectors))}."
        )
    return OmegaConf.create({name: {**detectors[name], "_partial_": True} for name in names or ()})


def job_folder(overrides: str) -> str:
    """Name of a job's folder in a sweep: its overrides as Hydra joins them, for example ``backbone=mlp,seed=0``.

    Where they cannot be the name of one folder, being long or with separators: their start and a hash of all.
    """
    name = re.sub(r"[^\w.,=+\[\]{}~@-]", "-", overrides)
    if name == overrides and 0 < len(name.encode()) <= _LONGEST and name.strip("."):
        return name
    start = name.encode()[:_LONGEST].decode(errors="ignore").strip(".") or "job"
    return f"{start}-{hashlib.sha256(overrides.encode()).hexdigest()[:10]}"


def register_resolvers() -> None:
    """Make the resolvers known that our configs use; doing it twice does no harm."""
    resolvers: dict[str, Callable[..., Any]] = {
        "watched": watched_by_default,
        "monitored": monitored,
        "job_folder": job_folder,
        "choices": choices,
        "options": options,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(f"rmd_{name}", resolver, replace=True)


def compose_train(overrides: Sequence[str]) -> DictConfig:
    """Compose the config of one run of ``rmd-train``, as typed after it, inside of another Hydra command."""
    from hydra import compose

    cfg = compose("train", overrides=list(overrides), return_hydra_config=True)
    with open_dict(cfg):  # outside of its own job Hydra does not answer questions about its choices
        cfg.names.update({name: cfg.hydra.runtime.choices[name] for name in ("benchmark", "backbone")})
        del cfg.hydra
    return cfg


def repeatable(cfg: DictConfig, command: str) -> str:
    """The config as text from which the run can be repeated: ``rmd-train --config-dir OUT --config-name config``.

    References to the output folder stay references, so that the repetition writes to a folder of its own.
    """
    plain: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
    plain.pop("trust_config", None)  # said by whoever repeats it, never by the file
    plain.names = OmegaConf.to_container(cfg.names, resolve=True)  # known to Hydra only while it composes
    return f"defaults:\n  - command@hydra: {command}\n  - _self_\n{OmegaConf.to_yaml(plain)}"
