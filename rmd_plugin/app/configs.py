"""Where the configs are, and what they may ask for. Imports nothing heavy: commands need it before they parse."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from omegaconf import OmegaConf

#: the backbone that a benchmark is run with if none is chosen
DEFAULT_BACKBONES = {
    "simulation": "identity",
    "features": "identity",
    "digits": "small_cnn",
    "clinc150": "bert",
    "cifar10_vs_cifar100": "resnet56_cifar",
    "cifar100_vs_cifar10": "efficientnet_lite0",
    "genomics": "genomics_cnn",
}
#: what is trained instead: the identity has nothing that learns but its head
TRAINED_BACKBONES = {**DEFAULT_BACKBONES, "simulation": "mlp", "features": "mlp"}


#: of a folder's name, in bytes: file systems allow 255, and the hash comes behind it
_LONGEST = 150
#: what is watched during training if the config does not say: of the first all that are chosen, else one of the second
_WATCHED = (("rmd", "mahalanobis"), ("msp", "energy", "max_logit", "knn", "marginal", "partial"))


def watched_by_default(detectors: Container[str]) -> list[str]:
    """Names of the chosen detectors that are watched during training."""
    usual, others = ([name for name in names if name in detectors] for names in _WATCHED)
    return usual or others[:1]


def job_folder(overrides: str) -> str:
    """Name of a job's folder in a sweep: its overrides, where they can be the name of one folder.

    Args:
        overrides: as Hydra joins them, for example ``backbone=mlp,seed=0``.

    Returns:
        The same text or, if it is long or has separators, its start and a hash of all of it.
    """
    name = re.sub(r"[^\w.,=+\[\]{}~@-]", "-", overrides)
    if name == overrides and 0 < len(name.encode()) <= _LONGEST and name.strip("."):
        return name
    start = name.encode()[:_LONGEST].decode(errors="ignore").strip(".") or "job"
    return f"{start}-{hashlib.sha256(overrides.encode()).hexdigest()[:10]}"


def choices(*groups: str) -> str:
    """The configs of some groups, a line each: Hydra's own list has those of the other commands too."""
    root = files("rmd_plugin.conf") if find_spec("rmd_plugin.conf") is not None else Path(config_path())
    lines = []
    for group in groups:
        names = sorted(file.name for file in root.joinpath(group).iterdir() if file.name.endswith(".yaml"))
        lines.append(f"{group}: {', '.join(name.removesuffix('.yaml') for name in names)}")
    return "\n".join(lines)


def config_path() -> str:
    """Search path of the configs: the package ``rmd_plugin.conf`` where installed, else the checkout's ``conf``."""
    if find_spec("rmd_plugin.conf") is not None:
        return "pkg://rmd_plugin.conf"
    checkout = Path(__file__).resolve().parents[2] / "conf"
    if not checkout.is_dir():
        raise FileNotFoundError(f"the configs of rmd-plugin are neither installed nor in {checkout}: install it again.")
    return str(checkout)


def register_resolvers() -> None:
    """Make the resolvers known that our configs use; doing it twice does no harm."""
    OmegaConf.register_new_resolver(
        "rmd_backbone_for", lambda benchmark: DEFAULT_BACKBONES.get(benchmark, "identity"), replace=True
    )
    OmegaConf.register_new_resolver(
        "rmd_trained_backbone_for", lambda benchmark: TRAINED_BACKBONES.get(benchmark, "small_cnn"), replace=True
    )
    for name, resolver in (("watched", watched_by_default), ("job_folder", job_folder), ("choices", choices)):
        OmegaConf.register_new_resolver(f"rmd_{name}", resolver, replace=True)
