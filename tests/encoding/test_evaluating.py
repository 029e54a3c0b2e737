"""Evaluation mode for whatever an encoder is made of."""

import functools

import pytest
import torch
from torch import nn

from rmd_plugin import RMD
from rmd_plugin.encoding.isolation import evaluating_calls

NET = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


class Holder:
    def __init__(self, net):
        self.inner = {"nets": [net]}

    def encode(self, x):
        return self.inner["nets"][0](x)

    __call__ = encode


class Slots:
    __slots__ = ("net",)

    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


def apply(net, x, *, extra=None):
    return net(x)


def apply_both(first, last, x):
    return last(first.net(x))


def make(kind, net):
    hidden = iter([net])  # nothing can look into an iterator
    kept = []

    def found_when_called(x):
        kept.extend(hidden)
        return next(iter(kept))(x)

    def with_default(x, net=net):
        return net(x)

    return {
        "module": net,
        "method": net.forward,
        "closure": lambda x: net(x),
        "global": lambda x: NET(x),
        "part": lambda x: net[1](net[0](x)),
        "functional": lambda x: nn.functional.batch_norm(
            net[0](x), net[1].running_mean, net[1].running_var, training=net[1].training
        ),
        "partial": functools.partial(apply, net),
        "nested": functools.partial(apply, lambda x: net(x), extra=3),
        "default": with_default,
        "object": Holder(net),
        "object's method": Holder(net).encode,
        "compiled": torch.compile(lambda x: net(x), backend="eager"),
        "hidden": found_when_called,
        "partly hidden": functools.partial(apply_both, Slots(net), nn.Identity()),
    }[kind]


KINDS = [
    *("module", "method", "closure", "global", "part", "functional", "partial", "nested", "default", "object"),
    *("object's method", "compiled", "hidden", "partly hidden"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_leaves_batch_norm_and_modes_alone(kind):
    net = NET if kind == "global" else nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    net.train()
    net[2].eval()
    encoder = make(kind, net)
    if kind == "compiled":  # in the middle of its training
        encoder(torch.randn(8, 4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    RMD(encoder).fit([(torch.randn(50, 4), torch.arange(50) % 2) for _ in range(3)])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == [True, True, True, False]


def test_modes_come_back_after_an_error_and_no_hook_stays():
    net = nn.BatchNorm1d(3).train()

    def stop():
        with evaluating_calls(lambda x: next(iter(()))(x)):
            net(torch.zeros(1, 3))  # a training BatchNorm refuses a single sample
            assert not net.training
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()
    assert net.training
    with pytest.raises(ValueError, match="more than 1 value"):
        net(torch.zeros(1, 3))
