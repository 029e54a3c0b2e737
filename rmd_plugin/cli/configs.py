"""Where the configs are, and what they may ask for. Imports nothing heavy: commands need it before they parse."""

from __future__ import annotations

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
