"""A good guest: training with the monitor gives the bits of training without it."""

import random

import callback_kit as kit
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from callback_kit import OOD, TRAIN, VAL, Augmented, Classifier, fit, loader, values
from pytorch_ood.detector import KNN, MCD, ODIN, GradNorm, MaxSoftmax, ViM
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from rmd_plugin import RMD, FusedRMD, OODMonitor
from rmd_plugin.monitor.features import visiting

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


def draw():
    """Draw from every global generator."""
    return random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002


class Noisy(MaxSoftmax):
    """Draws while it scores."""

    def predict_logits(self, logits):
        return super().predict_logits(logits) + 1e-3 * draw()


def bits(value):
    return tree_map(lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, value)


def same(first, second):
    items, others = tree_leaves(first), tree_leaves(second)
    pairs = zip(items, others, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


class Trace(pl.Callback):
    """Everything that training is made of, after each batch and at the end."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        state = {
            "weights": module.state_dict(),  # with the running statistics of BatchNorm
            "gradients": [p.grad for p in module.parameters()],
            "optimizer": trainer.optimizers[0].state_dict(),
            "batch": batch,
            "modes": [m.training for m in module.modules()],
            "requires_grad": [p.requires_grad for p in module.parameters()],
            "torch": torch.get_rng_state(),
            "numpy": [str(part) for part in np.random.get_state()],  # noqa: NPY002
            "python": random.getstate(),
        }
        self.steps.append(bits(state))


def train(monitor, train_loader, val_loader, make=Classifier, **kwargs):
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    torch.manual_seed(7)
    trace, module = Trace(), make()
    torch.manual_seed(8)
    fit(monitor, trace, module=module, train=train_loader(), val=val_loader(), max_epochs=2, **kwargs)
    return trace.steps


def detectors():
    return {"rmd": RMD(), "knn": KNN(None, k=3), "noisy": Noisy(None)}


def classes():
    """Detectors that differentiate, or switch modes, among them."""
    return {"fused": FusedRMD, "vim": ViM, "odin": ODIN, "gradnorm": GradNorm, "mcd": MCD}


def shuffled():
    return DataLoader(Augmented(), 16, shuffle=True)


def validation():
    return loader(VAL)


CASES = {
    "pass": (detectors, {}, shuffled, {}),
    "stream": (detectors, {"refit": "stream"}, shuffled, {}),
    "classes": (classes, {"head": None}, shuffled, {"num_sanity_val_steps": 2}),
    "validation amid gradient accumulation": (
        classes,
        {},
        shuffled,
        {"accumulate_grad_batches": 4, "val_check_interval": 3},
    ),
    "bf16": (detectors, {}, shuffled, {"precision": "bf16-mixed"}),
    "no validation": (detectors, {}, shuffled, {"limit_val_batches": 0}),
    "figures": (detectors, {"figures_dir": "figures"}, shuffled, {}),
}


@pytest.mark.filterwarnings("ignore:.*no validation.*", "ignore:.*Bfloat16.*", "ignore:.*Dropout mode.*")
@pytest.mark.parametrize("case", CASES)
def test_training_with_the_monitor_gives_the_same_bits(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, options, loaders, kwargs = CASES[case]
    alone = train(None, loaders, validation, **kwargs)
    monitor = OODMonitor(make(), **{"head": "model.fc", "ood": {"svhn": loader(OOD, shuffle=True)}, **options})
    watched = train(monitor, loaders, validation, **kwargs)
    assert len(alone) == len(watched) == 12
    for step, (a, b) in enumerate(zip(alone, watched, strict=True)):
        different = [key for key in a if not same(a[key], b[key])]
        assert not different, f"{different} differ at step {step}"
    if case != "no validation":
        assert all(0 <= value <= 1 for value in values(monitor).values())


@pytest.mark.slow
def test_worker_processes_are_not_disturbed():
    def workers():
        return DataLoader(Augmented(), 16, shuffle=True, num_workers=2, persistent_workers=True)

    def val():
        return loader(VAL, num_workers=1, persistent_workers=True)

    alone = train(None, workers, val)
    monitor = OODMonitor(detectors(), head="model.fc", ood={"svhn": loader(OOD, num_workers=1)})
    watched = train(monitor, workers, val)
    assert same(alone, watched)
    assert len(values(monitor, epoch=1)) == 2 * len(detectors())


def test_a_module_that_augments_only_in_training_is_fitted_on_clean_batches():
    class OnDevice(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return (batch[0] + 1, batch[1]) if self.trainer.training else batch

    monitor, module = kit.monitored(), OnDevice()
    with pytest.warns(UserWarning, match="no validation"):
        fit(monitor, module=module, limit_val_batches=0)
    clean = RMD().fit_features(kit.features_of(module, TRAIN[0]), TRAIN[1])
    z = kit.features_of(module, OOD[0])
    torch.testing.assert_close(monitor.detectors["rmd"].predict_features(z), clean.predict_features(z))


def test_a_visit_leaves_no_trace_in_the_module():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    net[0].weight.grad = torch.ones(4, 3)
    net[0].bias.requires_grad_(False)
    net[2].eval()
    before = bits(net.state_dict())
    gradient = net[0].weight.grad
    state = torch.get_rng_state()

    def misbehave():
        with visiting(net, 0):
            assert not any(m.training for m in net.modules())
            net.train()(torch.randn(5, 3)).sum().backward()
            net.zero_grad()
            net.requires_grad_(True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        misbehave()
    assert same(before, bits(net.state_dict()))
    assert net[0].weight.grad is gradient
    assert [p.requires_grad for p in net.parameters()] == [True, False, True, True]
    assert [m.training for m in net.modules()] == [True, True, True, False]
    assert torch.equal(state, torch.get_rng_state())


class Remembering(Augmented):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * float(self.rng.random()), self.y[index]


@pytest.mark.parametrize(("refit", "workers"), [("stream", 0), ("pass", 1)])
def test_data_with_a_generator_of_their_own_train_the_same_where_no_pass_is_made_in_the_main_process(refit, workers):
    def data():
        return DataLoader(Remembering(), 16, num_workers=workers)

    alone = train(None, data, validation)
    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)}, refit=refit)
    assert same(alone, train(monitor, data, validation))
