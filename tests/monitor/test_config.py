"""The config that other people's Hydra apps see."""

import inspect

import callback_kit as kit
import pytest
from callback_kit import OOD, VAL, fit, loader, values
from config_kit import CONF, chosen
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rmd_plugin import RMD, Mahalanobis, OODMonitor

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def composed(*overrides):
    return chosen("callbacks", "ood_monitor", *overrides, folder=CONF / "shared")


def test_the_config_lists_the_monitors_options_with_their_defaults():
    config = composed().ood_monitor
    parameters = inspect.signature(OODMonitor).parameters
    named = {key for key in config if not key.startswith("_")}
    assert named == parameters.keys() - {"forward", "labels"}  # callables of the user's
    for key in named - {"detectors"}:
        assert config[key] == parameters[key].default


def test_a_foreign_app_chooses_detectors_and_dataloaders_and_trains():
    callbacks = composed(
        "callbacks.ood_monitor.head=model.fc",
        "callbacks.ood_monitor.ood_dataloaders={1: svhn}",
        "+callbacks.ood_monitor.detectors.md._target_=rmd_plugin.Mahalanobis",
        "+callbacks.ood_monitor.detectors.md.shrinkage=0.1",
        "+callbacks.ood_monitor.detectors.odin={_target_: pytorch_ood.detector.ODIN, _partial_: true, eps: 0.01}",
    )
    monitor = instantiate(callbacks.ood_monitor)  # as lightning-hydra-template does
    fit(monitor, val=[loader(VAL), loader(OOD)])
    assert values(monitor).keys() == {(d, s) for d in ("rmd", "md", "odin") for s in ("svhn", "mean")}
    assert monitor.detectors["md"].shrinkage == 0.1
    assert monitor.detectors["odin"].eps == 0.01


def test_hydras_own_mappings_are_taken():
    config = OmegaConf.create(
        {
            "_target_": "rmd_plugin.OODMonitor",
            "detectors": {"rmd": {"_target_": "rmd_plugin.RMD"}, "md": {"_target_": "rmd_plugin.Mahalanobis"}},
            "ood_dataloaders": {1: "svhn"},
        }
    )
    monitor = instantiate(config)  # without _convert_ the detectors arrive in a DictConfig
    assert type(monitor.detectors) is dict
    assert [type(detector) for detector in monitor.detectors.values()] == [RMD, Mahalanobis]
    assert monitor.ood_dataloaders == {1: "svhn"}
