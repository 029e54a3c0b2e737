"""A good guest: training with the monitor gives the bits of training without it."""

import math
import random
from collections import Counter, OrderedDict
from functools import partial

import callback_kit as kit
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from callback_kit import OOD, TRAIN, VAL, Augmented, Classifier, fit, loader, values
from pytorch_ood.detector import KNN, MCD, ODIN, GradNorm, MahalanobisODIN, MaxSoftmax, ViM
from torch import nn
from torch.utils.data import DataLoader

from rmd_plugin import RMD, MultiLayer
from rmd_plugin.encoding.isolation import isolated_rng, visiting
from rmd_plugin.monitor.callback import OODMonitor

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]


class Drawing(nn.Module):
    """A detector's network or dataset that draws from every generator."""

    @staticmethod
    def draw():
        return random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002


class Noisy(MaxSoftmax):
    """Draws while it scores."""

    def predict_logits(self, logits):
        return super().predict_logits(logits) + 1e-3 * Drawing.draw()


def bits(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    return [bits(v) for v in value] if isinstance(value, (list, tuple)) else value


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


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


def gradient_detectors():
    return {
        "odin": lambda m: ODIN(m.model),
        "gradnorm": lambda m: GradNorm(m.model, param_filter=lambda name: "fc" in name),
        "mcd": lambda m: MCD(m.model, samples=2, mode="mean"),
        "inputs": lambda m: MahalanobisODIN(m.model.features),
    }


def classes():
    return {"rmd": RMD, "vim": ViM, "odin": ODIN, "gradnorm": GradNorm, "mcd": MCD}


def layers():
    return {
        "auto": MultiLayer(RMD(shrinkage=0.1)),
        "named": partial(MultiLayer, detector=RMD(shrinkage=0.1), layers="model.*"),
    }


def shuffled():
    return DataLoader(Augmented(), 16, shuffle=True)


def validation():
    return loader(VAL)


CASES = {
    "pass": (detectors, {}, shuffled, {}),
    "stream": (detectors, {"refit": "stream"}, shuffled, {}),
    "sanity check": (detectors, {}, shuffled, {"num_sanity_val_steps": 2}),
    "detectors that differentiate or switch modes": (gradient_detectors, {}, shuffled, {}),
    "classes": (classes, {"head": None}, shuffled, {}),
    "validation amid gradient accumulation": (
        gradient_detectors,
        {},
        shuffled,
        {"accumulate_grad_batches": 4, "val_check_interval": 3},
    ),
    "bf16": (detectors, {}, shuffled, {"precision": "bf16-mixed"}),
    "no validation": (detectors, {}, shuffled, {"limit_val_batches": 0}),
    "layers": (layers, {}, shuffled, {"num_sanity_val_steps": 2}),
    "layers of a stream": (layers, {"refit": "stream"}, shuffled, {}),
    "layers in bf16": (layers, {"refit": "stream"}, shuffled, {"precision": "bf16-mixed"}),
    "figures": (detectors, {"figures_dir": "figures"}, shuffled, {}),
}


@pytest.mark.filterwarnings("ignore:.*there is no validation.*", "ignore:.*Bfloat16.*", "ignore:.*Dropout mode.*")
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
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_are_not_disturbed(persistent):
    def workers():
        return DataLoader(Augmented(), 16, shuffle=True, num_workers=2, persistent_workers=persistent)

    def val():
        return loader(VAL, num_workers=1, persistent_workers=persistent)

    alone = train(None, workers, val)
    monitor = OODMonitor(detectors(), head="model.fc", ood={"svhn": loader(OOD, num_workers=1)})
    watched = train(monitor, workers, val)
    assert same(alone, watched)
    assert len(values(monitor, epoch=1)) == 2 * len(detectors())


def test_a_module_that_augments_only_in_training_is_fitted_on_clean_batches():
    class OnDevice(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return (batch[0] + 1, batch[1]) if self.trainer.training else batch

    for limit in (1.0, 0):
        monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)})
        module = OnDevice()
        if limit:
            fit(monitor, module=module)
        else:
            with pytest.warns(UserWarning, match="no validation"):
                fit(monitor, module=module, limit_val_batches=0)
        clean = RMD().fit_features(kit.features_of(module, TRAIN[0]), TRAIN[1])
        z = kit.features_of(module, OOD[0])
        torch.testing.assert_close(monitor.detectors["rmd"].predict_features(z), clean.predict_features(z))


def test_two_fits_at_different_times_draw_the_same():
    first, second = (OODMonitor({"noisy": Noisy(None)}, head="model.fc", ood={"svhn": loader(OOD)}) for _ in range(2))
    fit(first)
    Drawing.draw()
    fit(second)
    assert values(first) == values(second)


def test_a_visit_leaves_no_trace_in_the_module():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    net[0].weight.grad = torch.ones(4, 3)
    net[0].bias.requires_grad_(False)
    net[2].eval()
    before = bits(net.state_dict())
    gradient, mean = net[0].weight.grad, net[1].running_mean
    state = torch.get_rng_state()

    def misbehave():
        with visiting(net, 0):
            assert not any(m.training for m in net.modules())
            net.train()(torch.randn(5, 3)).sum().backward()
            net.zero_grad()
            net.requires_grad_(True)
            net[1].running_mean = torch.zeros(4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        misbehave()
    assert same(before, bits(net.state_dict()))
    assert net[0].weight.grad is gradient
    assert net[1].running_mean is mean
    assert [p.requires_grad for p in net.parameters()] == [True, False, True, True]
    assert [m.training for m in net.modules()] == [True, True, True, False]
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_drawn_inside_depends_only_on_the_seed():
    with isolated_rng(3):
        first = Drawing.draw()
    Drawing.draw()
    with isolated_rng(3):
        assert Drawing.draw() == first
    with isolated_rng(2**40):
        assert Drawing.draw() != first


# -- data and modules that remember ------------------------------------------------------------------------------------

GLOBAL_DRAWS = np.random.default_rng(3)


class Remembering(Augmented):
    """Adds noise that a function draws."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def __getitem__(self, index):
        return self.x[index] + 0.1 * float(self.draw()), self.y[index]


class FromGlobal(Augmented):
    def __getitem__(self, index):
        return self.x[index] + 0.1 * float(GLOBAL_DRAWS.random()), self.y[index]


class Counting(Augmented):
    """The sixteenth, then the thirty-second sample, and so on are shifted; keeps a list and lazy attributes too."""

    def __init__(self):
        super().__init__()
        self.calls, self.log, self.counts = 0, [], {"calls": 0}

    def __getitem__(self, index):
        self.calls += 1
        self.counts["calls"] += 1
        self.log.append(index)
        if not hasattr(self, "lazy"):
            self.lazy = len(self.log)
        shift = (
            (self.calls % 16 == 0) + 0.01 * self.lazy + 0.01 * (len(self.log) % 7) + 0.01 * (self.counts["calls"] % 5)
        )
        return self.x[index] + shift, self.y[index]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Everywhere(Augmented):
    """Counts where attributes of plain objects do not show it: slots, classes, closures, arrays, kinds of dicts."""

    calls, draws = 0, np.random.default_rng(8)

    def __init__(self):
        super().__init__()
        type(self).calls, type(self).draws = 0, np.random.default_rng(8)
        self.slotted, self.array, self.tensor = Slotted(), np.zeros(1), torch.zeros(1)
        self.counter, self.ordered, self.step = Counter(), OrderedDict(), counting()

    def __getitem__(self, index):
        type(self).calls += 1
        self.slotted.calls += 1
        self.array += 1
        self.tensor += 1
        self.counter[index] += 1
        self.ordered[index] = self.ordered.pop(index, 0) + 1
        counts = self.calls, self.slotted.calls, self.array.item(), self.tensor.item(), self.step()
        counts += self.counter[index], next(iter(self.ordered)), float(self.draws.random()), draw_globally()
        return self.x[index] + 0.01 * math.sin(math.fsum(counts)), self.y[index]


def counting():
    calls = 0

    def step():
        nonlocal calls
        calls += 1
        return calls

    return step


def draw_globally():
    return float(GLOBAL_DRAWS.random())


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self):
        self.options = {"parts": [torch.Generator().manual_seed(5)]}

    def __call__(self, pair):
        return pair[0] + 0.1 * torch.rand((), generator=self.options["parts"][0]), pair[1]


class Transformed(torch.utils.data.Dataset):
    def __init__(self, data, transform):
        self.data, self.transform = data, transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(self.data[index])


def nested():
    part = torch.utils.data.Subset(Transformed(Augmented(), Jitter()), range(45))
    other = torch.utils.data.Subset(Remembering(np.random.RandomState(1).rand), range(45, 90))
    return torch.utils.data.ConcatDataset([part, other])


def closure():
    rng = random.Random(2)
    return Remembering(lambda: rng.random())


def collated():
    rng = np.random.default_rng(4)

    def collate(items):
        x, y = torch.utils.data.default_collate(items)
        return x + 0.1 * float(rng.random()), y

    return DataLoader(Augmented(), 16, shuffle=True, collate_fn=collate)


def from_global():
    global GLOBAL_DRAWS
    GLOBAL_DRAWS = np.random.default_rng(3)
    return FromGlobal()


def everywhere():
    from_global()
    return Everywhere()


def over(make):
    return lambda: DataLoader(make(), 16, shuffle=True, generator=torch.Generator().manual_seed(6))


STATEFUL_DATA = {
    "numpy generator": over(lambda: Remembering(np.random.default_rng(0).random)),
    "numpy random state": over(lambda: Remembering(np.random.RandomState(0).rand)),
    "torch generator": over(lambda: Transformed(Augmented(), Jitter())),
    "python random": over(lambda: Remembering(random.Random(0).random)),
    "closure": over(closure),
    "subsets and transforms": over(nested),
    "global name": over(from_global),
    "counters and lists": over(Counting),
    "everywhere": over(everywhere),
    "collation": collated,
}


@pytest.mark.parametrize(
    ("case", "refit"), [*((case, "pass") for case in STATEFUL_DATA), ("counters and lists", "stream")]
)
def test_data_that_remember_give_the_same_training(case, refit):
    def make():
        return (
            {"rmd": RMD(), "inputs": lambda m: MahalanobisODIN(m.model.features)} if refit == "pass" else {"rmd": RMD()}
        )

    alone = train(None, STATEFUL_DATA[case], validation)
    monitor = OODMonitor(make(), head="model.fc", ood={"svhn": loader(OOD)}, refit=refit)
    assert same(alone, train(monitor, STATEFUL_DATA[case], validation))
    assert len(values(monitor, epoch=1)) == 2 * len(make())


class Moody(nn.Module):
    """Remembers its forwards in every way that a module can, and lets all of it count."""

    def __init__(self):
        super().__init__()
        self.calls, self.means, self.bank = 0, [], {}
        self.register_buffer("hidden", torch.zeros(()), persistent=False)
        self.queue, self.draws = torch.zeros(4), np.random.default_rng(1)
        self.steps, self.array = nn.Parameter(torch.zeros(()), requires_grad=False), np.zeros(1)
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.hidden += 1
        self.steps.data += 1
        self.array += 1
        self.queue[self.calls % 4] = self.calls
        self.means.append(self.calls)
        self.bank[self.calls % 7] = self.calls
        seen = self.calls + len(self.means) + sum(self.bank.values()) + (0 if self.last is None else self.last)
        self.last = self.calls
        return x * (
            1
            + 0.01 * torch.sin(seen + self.steps + self.array.item() + self.hidden + self.queue.sum())
            + 0.01 * self.draws.random()
        )


def stateful_module(kind):
    module = Classifier()
    if kind == "moody":
        module.model.body.append(Moody())
    elif kind == "lightning module":
        module.calls = 0
        plain = module.model.features

        def features(x):
            module.calls += 1
            return plain(x) * (1 + 0.1 * (module.calls % 3))

        module.model.features = features
    elif kind == "spectral norm":
        nn.utils.spectral_norm(module.model.body[0])
    else:
        nn.utils.parametrizations.spectral_norm(module.model.body[0])
    return module


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("kind", "refit"),
    [
        *(("moody", "pass"), ("moody", "stream"), ("lightning module", "pass")),
        *(("spectral norm", "pass"), ("spectral norm, parametrized", "pass")),
    ],
)
def test_modules_that_remember_give_the_same_training(kind, refit):
    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)}, refit=refit)
    alone, watched = (train(m, shuffled, validation, lambda: stateful_module(kind)) for m in (None, monitor))
    assert same(alone, watched)


def test_data_that_cannot_be_put_back_are_named_once():
    draws = iter(np.random.default_rng(0).random(10_000))
    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)})
    with pytest.warns(UserWarning, match=r"may have changed Remembering\.draw") as caught:
        fit(monitor, train=DataLoader(Remembering(draws.__next__), 16), max_epochs=2)
    assert len(kit.told(caught)) == 1


def test_data_in_worker_processes_are_not_searched():
    draws = iter(np.random.default_rng(0).random(10_000))
    monitor = OODMonitor({"rmd": RMD()}, head="model.fc", ood={"svhn": loader(OOD)})
    fit(monitor, train=DataLoader(Remembering(draws.__next__), 16, num_workers=1), max_epochs=1)
