"""Each split once: from the network, or from one file that is there whole or not at all."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import config_kit
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from tiny_benchmark import Tiny, TinyNet
from torch import nn

from rmd_plugin import NumericalWarning
from rmd_plugin.compare.features import Extractor, FeatureCache, fingerprint, fit_linear_probe


def make(cache=None, benchmark=None, backbone=None, **options):
    return Extractor(
        benchmark or Tiny(), backbone or TinyNet(), cache=cache, progress=False, **{"batch_size": 32, **options}
    )


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path / "cache")


def files(cache):
    return [path for path in cache.root.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_features_are_those_of_the_encoder_in_evaluation_mode_and_a_split_passes_once():
    extractor = make()
    extractor.backbone.train()
    state = torch.random.get_rng_state()
    for _ in range(2):
        near = extractor.features("near")
    assert extractor.backbone.seen == 50
    assert torch.equal(torch.random.get_rng_state(), state)
    assert extractor.backbone.encoder[3].training
    expected = extractor.backbone.eval().encoder(extractor.benchmark.items("near")).detach()
    assert torch.allclose(near.features, expected, atol=1e-6)
    assert near.labels.tolist() == [-1] * 50


def test_from_the_cache_only_a_few_samples_pass_the_network(cache):
    first = make(cache).features("train")
    again = make(cache, backbone=TinyNet(head=False), batch_size=7)  # neither head nor batch size matter
    assert again.features("train").cached
    assert again.backbone.seen <= 4
    assert torch.equal(again.features("train").features, first.features)
    assert torch.equal(again.features("train").labels, first.labels)
    (path,) = files(cache)
    assert np.array_equal(np.load(path), first.features)  # plain numpy
    again.features("train").features[:] = 0  # mapped, but the file never changes
    assert np.array_equal(np.load(path), first.features)


@pytest.mark.parametrize("change", ["weights", "data", "labels", "transform", "structure"])
def test_any_change_misses_the_cache(change, cache):
    make(cache).features("test")
    benchmark, backbone = Tiny(), TinyNet()
    if change == "weights":
        with torch.no_grad():
            backbone.encoder[1].running_mean[0] += 1e-6
    elif change == "data":
        benchmark.test_in.source.items[0, 0] += 1e-6
    elif change == "labels":
        benchmark.test_in.labels[0] = 2
    elif change == "transform":
        backbone.test_transform = torch.clone
    else:
        backbone.encoder[1].eps = 1e-4
    assert not make(cache, benchmark, backbone).features("test").cached


class Sneaky(nn.Module):
    """Its output depends on what no hash can see."""

    factor = 1.0

    def forward(self, x):
        return x * Sneaky.factor


def test_a_network_whose_code_changed_and_a_damaged_file_are_computed_again(cache, monkeypatch, caplog):
    backbone = TinyNet()
    backbone.encoder = Sneaky()
    make(cache, backbone=backbone).features("test")
    monkeypatch.setattr(Sneaky, "factor", 2.0)
    features = make(cache, backbone=backbone).features("test")
    assert not features.cached
    assert torch.equal(features.features, 2 * Tiny().items("test"))
    assert "not what the network gives today" in caplog.text
    (path,) = files(cache)
    path.write_bytes(path.read_bytes()[:-20])
    assert not make(cache, backbone=backbone).features("test").cached
    assert "damaged" in caplog.text
    assert make(cache, backbone=backbone).features("test").cached


def test_a_transform_that_cannot_be_hashed_is_not_cached_and_says_so(cache, caplog):
    backbone = TinyNet()
    backbone.test_transform = lambda x: x
    assert not make(cache, backbone=backbone).features("test").cached
    assert not cache.root.exists()
    assert "not cached" in caplog.text


def test_half_precision_is_widened_double_is_kept_and_maps_are_averaged(cache):
    backbone = TinyNet()
    backbone.encoder, backbone.test_transform = nn.Linear(6, 4).to(torch.bfloat16), torch.Tensor.bfloat16
    assert make(cache, backbone=backbone).features("test").features.dtype == torch.float32
    backbone.encoder, backbone.test_transform = nn.Linear(6, 4).double(), torch.Tensor.double
    assert make(cache, backbone=backbone).features("test").features.dtype == torch.float64
    backbone.encoder, backbone.test_transform = nn.Unflatten(1, (2, 3, 1)), None
    features = make(backbone=backbone).features("test").features
    assert torch.allclose(features, Tiny().items("test").view(-1, 2, 3).mean(2))


def test_a_split_without_samples_is_refused_by_its_name():
    benchmark = Tiny()
    benchmark.test_oods[0] = benchmark.test_oods[0].subset(np.arange(0))
    with pytest.raises(ValueError, match="near"):
        make(benchmark=benchmark).features("near")


@pytest.mark.slow
def test_hashes_are_equal_in_processes_with_other_hash_seeds():
    code = (
        "import torch; from torch import nn; from torchvision.transforms import Compose, Normalize, Resize;"
        "from rmd_plugin.compare.features import fingerprint; torch.manual_seed(0);"
        "net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16();"
        "print(fingerprint(net.state_dict(), {'b': {1, 'x', 2.5}, 'a': torch.arange(3)[1:]},"
        "Compose([Resize(8), Normalize((0.5,), (0.5,))])))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=config_kit.environment(PYTHONHASHSEED=seed),
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
    assert hashes != {b""}
    assert fingerprint(torch.zeros(2)) != fingerprint(torch.zeros(2, dtype=torch.float64)) != fingerprint([0, 0])
    with pytest.raises((pickle.PicklingError, AttributeError)):
        fingerprint(lambda: 0)


# -- several processes ------------------------------------------------------------------------------------------------


class Slow(TinyNet):
    """Takes its time, and notes that it was run."""

    def __init__(self, log, event=None):
        super().__init__()
        self.log, self.event, self.architecture = log, event, {}
        self.encoder.register_forward_hook(self._wait)

    def _wait(self, _module, inputs, _output):
        if len(inputs[0]) > 1:  # not the samples that are looked at again
            with open(self.log, "a") as file:
                file.write("batch\n")
            if self.event is not None:
                self.event.set()
                time.sleep(60)
            time.sleep(0.05)


def encode(root, log, start, results):
    start.wait()
    results.put(float(make(FeatureCache(root), backbone=Slow(log)).features("train").features.sum()))


def test_jobs_that_start_together_compute_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    jobs = [context.Process(target=encode, args=(tmp_path, tmp_path / "log", barrier, results)) for _ in range(3)]
    for job in jobs:
        job.start()
    assert len({results.get(timeout=60) for _ in jobs}) == 1
    for job in jobs:
        job.join()
    assert (tmp_path / "log").read_text().splitlines() == ["batch"] * 8


def hang(root, log, started):
    make(FeatureCache(root), backbone=Slow(log, started)).features("train")


def test_a_killed_job_leaves_nothing_that_breaks_the_next(tmp_path):
    context = multiprocessing.get_context("fork")
    started, log = context.Event(), tmp_path / "log"
    victim = context.Process(target=hang, args=(tmp_path / "cache", log, started))
    victim.start()
    assert started.wait(60)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    extractor = make(FeatureCache(tmp_path / "cache"), backbone=Slow(log))
    assert not extractor.features("train").cached
    assert torch.equal(extractor.features("train").features, make().features("train").features)


# -- linear heads -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    y = torch.arange(150) % 3
    z = torch.randn(150, 6)
    z[:, 0] += 2.0 * y
    z[:, 1] *= 50
    return z + 7, y


def test_the_logits_of_a_probe_are_those_of_scikit_learn_up_to_a_shift(data):
    z, y = data
    probe = fit_linear_probe(z, y, 3)
    assert not probe.weight.requires_grad
    x = ((z - z.mean(0)) / z.std(0, correction=0)).double().numpy()
    expected = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(x, y.numpy()).decision_function(x)
    logits = probe(z).double().numpy()
    # softmax does not see a number that is added to all logits
    assert np.allclose(logits - logits.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), atol=2e-3)


def test_dead_features_get_no_weight_and_classes_without_samples_their_logits(data):
    z, y = data
    dead = torch.cat([z, torch.full((150, 1), 3.0), 1e-32 * torch.randn(150, 1)], dim=1)
    probe = fit_linear_probe(dead, y, num_classes=5)
    assert probe.weight.shape == (5, 8)
    assert probe.weight[:, 6:].abs().max() == 0


def test_a_probe_that_stops_early_or_has_bad_data_says_so(data):
    z, y = data
    with pytest.warns(NumericalWarning, match="converged"):
        fit_linear_probe(z, y, 3, max_iter=1)
    with pytest.raises(ValueError, match="NaN"):
        fit_linear_probe(torch.full_like(z, torch.nan), y, 3)
