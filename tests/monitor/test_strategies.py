"""Strategies that the monitor cannot work with are refused by name."""

from types import SimpleNamespace

import pytest
import pytorch_lightning.strategies as strategies
from callback_kit import Classifier, monitored
from pytorch_ood.detector import ODIN


def trainer_of(kind, size=1):
    strategy = kind.__new__(kind)  # some cannot be made without packages that are not installed
    vars(strategy).update(_device_mesh={"tensor_parallel": SimpleNamespace(size=lambda: size)})
    return SimpleNamespace(strategy=strategy, world_size=2)


@pytest.mark.parametrize(("kind", "size"), [("FSDPStrategy", 1), ("ModelParallelStrategy", 2)])
def test_a_strategy_under_which_samples_or_weights_are_not_where_they_should_be_is_refused_at_setup(kind, size):
    with pytest.raises(ValueError, match=kind):
        monitored().setup(trainer_of(getattr(strategies, kind), size), None, "fit")


def test_detectors_that_run_the_network_are_refused_where_all_processes_run_it():
    with pytest.raises(ValueError, match="would run the network"):
        monitored({"odin": ODIN}).on_fit_start(trainer_of(strategies.ModelParallelStrategy), Classifier())
