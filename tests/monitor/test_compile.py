"""Networks that torch.compile has compiled: they are monitored, and neither changed nor compiled again."""

import callback_kit as kit
import oracle
import pytest
import torch
from callback_kit import OOD, TRAIN, VAL, Classifier, features_of, fit, loader, values

from rmd_plugin import RMD
from rmd_plugin.monitor.callback import OODMonitor

pytestmark = [pytest.mark.filterwarnings(w) for w in (*kit.QUIET, "ignore::DeprecationWarning", "ignore::UserWarning")]

slow = pytest.mark.slow
WAYS = ["network", "in place", "body", "module"]


class Compiler:
    """A backend that runs the graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def compiled(way, backend):
    """A classifier with a compiled part, or compiled as a whole."""
    torch._dynamo.reset()
    module = Classifier()
    if way == "network":
        module.model = torch.compile(module.model, backend=backend)
    elif way == "in place":
        module.model.compile(backend=backend)
    elif way == "body":
        module.model.body = torch.compile(module.model.body, backend=backend)
    return torch.compile(module, backend=backend) if way == "module" else module


def batches():
    return loader(TRAIN, 15)  # of equal size: another one would be compiled again


def trained(way, *, monitor=None, before=True, backend=None):
    """A classifier after an epoch without and one with a monitor, and the number of graphs of the second."""
    backend = backend or Compiler()
    module = compiled(way, backend)
    if before:
        kit.trainer().fit(module, batches(), loader(VAL))
    graphs = getattr(backend, "graphs", 0)
    kit.trainer(None, *(() if monitor is None else (monitor,))).fit(module, batches(), loader(VAL))
    return module, getattr(backend, "graphs", 0) - graphs


def weights(module):
    return {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items()}


def check(way, options, tolerance=1e-12, **others):
    monitor = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, **options)
    module, graphs = trained(way, monitor=monitor, **others)
    twin, expected = trained(way, **others)
    same = {name: torch.equal(value, weights(twin)[name]) for name, value in weights(module).items()}
    assert all(same.values()), same
    if options.get("refit") != "stream":
        assert graphs == expected
        with torch.compiler.set_stance("force_eager"):
            z, z_id, z_ood = (features_of(module, data[0]) for data in (TRAIN, VAL, OOD))
        auroc = oracle.auroc(oracle.rmd(z, TRAIN[1], z_id), oracle.rmd(z, TRAIN[1], z_ood))
        assert values(monitor)["rmd", "svhn"] == pytest.approx(auroc, abs=tolerance)
    return monitor


@slow
@pytest.mark.parametrize("way", WAYS)
def test_a_network_that_was_compiled_and_trained_before_is_monitored_like_any_other(way):
    monitor = check(way, {"head": "model.fc"})
    assert values(monitor)["rmd", "svhn"] > 0.5


@slow
@pytest.mark.parametrize("way", WAYS)
def test_a_stream_records_a_network_that_is_compiled_meanwhile_and_its_head_is_found(way):
    monitor = check(way, {"refit": "stream"}, before=False)
    assert monitor.head == ("model._orig_mod.fc" if way == "network" else "model.fc")
    eager = OODMonitor({"rmd": RMD()}, ood={"svhn": loader(OOD)}, refit="stream")
    fit(eager, train=batches())
    assert values(monitor)["rmd", "svhn"] == pytest.approx(values(eager)["rmd", "svhn"], abs=1e-12)


@slow
@pytest.mark.parametrize(("way", "refit"), [("network", "pass"), ("module", "stream")])
def test_with_the_real_compiler_too_the_weights_are_the_same(way, refit):
    # compiled code rounds differently in the last digits, which may swap two of the 37 x 23 pairs
    options = {"head": "model.fc", "refit": refit}
    monitor = check(way, options, tolerance=3e-3, before=refit == "pass", backend="inductor")
    assert values(monitor)["rmd", "svhn"] > 0.5
