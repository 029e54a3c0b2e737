"""Strategies that the monitor cannot work with are refused by name, and those that nobody has tried are announced."""

from types import SimpleNamespace

import pytest
import pytorch_lightning.strategies as strategies
from callback_kit import Classifier
from pytorch_lightning.trainer.states import TrainerFn, TrainerState
from pytorch_ood.detector import ODIN

from rmd_plugin import RMD
from rmd_plugin.monitor.callback import OODMonitor, OODMonitorWarning
from rmd_plugin.monitor.lockstep import check_strategy, in_lockstep


def trainer_of(kind, **attributes):
    strategy = kind.__new__(kind)  # some cannot be made without packages that are not installed
    vars(strategy).update(attributes)
    return SimpleNamespace(strategy=strategy, world_size=2, state=TrainerState(fn=TrainerFn.FITTING))


def mesh(size):
    return {"tensor_parallel": SimpleNamespace(size=lambda: size)}


@pytest.mark.parametrize("kind", [strategies.FSDPStrategy, strategies.DeepSpeedStrategy])
def test_a_network_that_only_the_trainer_can_run_is_refused_at_setup(kind):
    with pytest.raises(ValueError, match=f"does not work with {kind.__name__}"):
        OODMonitor({"rmd": RMD()}).setup(trainer_of(kind), None, "fit")


def test_processes_that_run_the_same_samples_are_refused():
    trainer = trainer_of(strategies.ModelParallelStrategy, _device_mesh=mesh(2))
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2.*data_parallel_size=2 and tensor_parallel_size=1"):
        check_strategy(trainer)


def test_strategies_that_are_tested_pass_in_silence():
    for kind in (strategies.SingleDeviceStrategy, strategies.DDPStrategy):
        assert check_strategy(trainer_of(kind)) is None
        assert not in_lockstep(trainer_of(kind))
    sharded = trainer_of(strategies.ModelParallelStrategy, _device_mesh=mesh(1))
    assert check_strategy(sharded) is None
    assert in_lockstep(sharded)
    sharded.world_size = 1
    assert not in_lockstep(sharded)


@pytest.mark.parametrize("name", ["XLAStrategy", "HPUParallelStrategy", "BaguaStrategy"])
def test_others_are_announced_and_run_in_step(name):
    trainer = trainer_of(getattr(strategies, name, type(name, (strategies.DDPStrategy,), {})))
    with pytest.warns(OODMonitorWarning, match=f"not been tested with {name}"):
        OODMonitor({"rmd": RMD()}).setup(trainer, Classifier(), "fit")
    assert in_lockstep(trainer)


def test_detectors_that_run_the_network_are_refused_where_all_processes_run_it():
    monitor = OODMonitor({"rmd": RMD(), "odin": ODIN}, head="model.fc")
    with pytest.raises(ValueError, match="odin would run the network, which under ModelParallelStrategy"):
        monitor.on_fit_start(trainer_of(strategies.ModelParallelStrategy), Classifier())
