import json

import numpy as np
import pytest
import torch
from tiny_benchmark import Tiny, TinyNet, Vectors
from torch import nn
from torch.utils.data import TensorDataset

from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.extraction import Extractor
from rmd_plugin.encoding.batches import EncodingError


def make(cache=None, benchmark=None, backbone=None, **options):
    return Extractor(
        benchmark or Tiny(), backbone or TinyNet(), cache=cache, progress=False, **{"batch_size": 32, **options}
    )


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path / "cache")


def test_features_are_those_of_the_encoder_in_evaluation_mode():
    extractor = make()
    extractor.backbone.train()
    found = extractor.features("near")
    assert extractor.backbone.encoder[3].training
    expected = extractor.backbone.eval().encoder(extractor.benchmark.parts["near"].x).detach()
    assert torch.allclose(found.features, expected, atol=1e-6)
    assert found.labels.tolist() == [-1] * 50


def test_a_split_passes_the_network_once():
    extractor = make()
    for _ in range(3):
        extractor.features("train")
    assert extractor.backbone.seen == 240


def test_from_the_cache_only_a_few_samples_pass_the_network(cache):
    first = make(cache)
    first.features("train")
    again = make(cache)
    found = again.features("train")
    assert found.cached
    assert again.backbone.seen <= 4
    assert torch.equal(found.features, first.features("train").features)


@pytest.mark.parametrize("change", ["weights", "data", "labels", "transform", "structure"])
def test_any_change_misses_the_cache(change, cache):
    make(cache).features("test")
    benchmark, backbone = Tiny(), TinyNet()
    if change == "weights":
        with torch.no_grad():
            backbone.encoder[1].running_mean[0] += 1e-6
    elif change == "data":
        benchmark.parts["test"].x[0, 0] += 1e-6
    elif change == "labels":
        benchmark.parts["test"].y[0] = 2
    elif change == "transform":
        backbone.test_transform = torch.clone
    else:
        backbone.encoder[1].eps = 1e-4
    extractor = make(cache, benchmark, backbone)
    assert not extractor.features("test").cached


def test_the_head_and_the_batch_size_do_not_matter_to_the_cache(cache):
    make(cache).features("test")
    other = TinyNet(head=False)
    assert make(cache, backbone=other, batch_size=7).features("test").cached


class Sneaky(nn.Module):
    """Its output depends on what no hash can see."""

    factor = 1.0

    def forward(self, x):
        return x * Sneaky.factor


def test_a_network_whose_code_changed_is_found_out(cache, monkeypatch, caplog):
    backbone = TinyNet()
    backbone.encoder = Sneaky()
    make(cache, backbone=backbone).features("test")
    monkeypatch.setattr(Sneaky, "factor", 2.0)
    found = make(cache, backbone=backbone).features("test")
    assert not found.cached
    assert torch.equal(found.features, 2 * Tiny().parts["test"].x)
    assert "not what the network gives today" in caplog.text


class Odd:
    """Holds what cannot be hashed."""

    def __init__(self):
        self.generator = torch.Generator()

    def __call__(self, x):
        return x


def test_a_transform_without_content_is_not_cached_and_says_so(cache, caplog):
    backbone = TinyNet()
    backbone.test_transform = Odd()
    assert not make(cache, backbone=backbone).features("test").cached
    assert not cache.root.exists()
    assert "not cached" in caplog.text


def test_data_sets_that_do_not_know_their_content_are_hashed_by_a_pass(cache):
    class Foreign(Tiny):
        def __init__(self, shift=0.0):
            super().__init__()
            for name, part in self.parts.items():
                self.parts[name] = TensorDataset(part.x + shift, part.y)

    make(cache, Foreign()).features("test")
    assert make(cache, Foreign()).features("test").cached
    assert not make(cache, Foreign(1e-6)).features("test").cached


def test_half_precision_is_widened_and_double_is_kept(cache):
    backbone = TinyNet()
    backbone.encoder = nn.Linear(6, 4).to(torch.bfloat16)
    backbone.test_transform = TO_BFLOAT16
    assert make(cache, backbone=backbone).features("test").features.dtype == torch.float32
    backbone.encoder, backbone.test_transform = nn.Linear(6, 4).double(), TO_DOUBLE
    assert make(cache, backbone=backbone).features("test").features.dtype == torch.float64


def TO_BFLOAT16(x):
    return x.to(torch.bfloat16)


def TO_DOUBLE(x):
    return x.double()


def test_feature_maps_are_averaged():
    backbone = TinyNet()
    backbone.encoder = nn.Unflatten(1, (2, 3, 1))
    features = make(backbone=backbone).features("test").features
    assert torch.allclose(features, Tiny().parts["test"].x.view(-1, 2, 3).mean(2))


def test_the_global_random_state_is_left_alone():
    before = torch.random.get_rng_state()
    make().features("test")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_splits_have_names_and_unknown_ones_are_refused():
    extractor = make()
    assert extractor.distance == {"near": "near", "far": "far"}
    assert len(extractor.features("val").labels) == 90
    with pytest.raises(KeyError, match="there are train, val, test and near, far"):
        extractor.features("middle")


def test_empty_splits_and_odd_batches_are_refused():
    benchmark = Tiny()
    benchmark.parts["test"] = Vectors(torch.zeros(0, 6), torch.zeros(0))
    with pytest.raises(ValueError, match="'test' holds no sample"):
        make(benchmark=benchmark).features("test")
    benchmark.parts["test"] = TensorDataset(torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"pairs \(x, y\)"):
        make(benchmark=benchmark).features("test")
    with pytest.raises(ValueError, match="batch_size must be >= 1"):
        make(batch_size=0)


def test_worker_processes_give_the_same_features(cache):
    one, other = make().features("test"), make(num_workers=1).features("test")
    assert np.array_equal(one.features, other.features)


def hidden(extractor, split):
    """Output of the first two layers of the network, by hand."""
    encoder, x = extractor.backbone.eval().encoder, extractor.benchmark.parts[split].x
    with torch.no_grad():
        first = encoder[0](x)
        return {"0": first, "2": encoder[2](encoder[1](first))}


@pytest.mark.parametrize("cached", [False, True])
def test_one_pass_gives_the_features_and_those_of_inner_layers(cached, cache):
    extractor = make(cache if cached else None, layers=["0", "2"])
    features = extractor.features("train").features
    found = extractor.layer_features("train")
    assert extractor.backbone.seen == 240 + 1  # one sample to see that the layers are there
    assert list(found) == ["0", "2"]
    for name, expected in hidden(extractor, "train").items():
        assert torch.allclose(found[name], expected, atol=1e-6)
    assert torch.equal(found["2"], features)  # what is behind it is idle in evaluation


def test_layers_come_from_the_cache_one_by_one_and_memory_mapped(cache):
    first = make(cache, layers=["0", "2"])
    expected = first.layer_features("test")
    again = make(cache, layers="2")
    found = again.layer_features("test")
    assert again.features("test").cached
    assert again.backbone.seen <= 1 + 4  # the sample and the probes
    assert torch.equal(found["2"], expected["2"])
    entries = [json.loads(path.read_text()) for path in cache.root.glob("??/*/entry.json")]
    assert sorted(entry.get("layer", "") for entry in entries) == ["", "0", "2"]
    for entry in cache.root.glob("??/*/features.npy"):  # readable by plain numpy, one file for each layer
        assert len(np.load(entry, mmap_mode="r")) == 60
    more = make(cache, layers=["0", "1", "2"])
    more.layer_features("test")
    assert more.backbone.seen <= 1 + 4 + 60  # only what is new is computed
    assert len(list(cache.root.glob("??/*/entry.json"))) == 4


class Sequences(nn.Module):
    """Vectors as three tokens of width 2."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Unflatten(1, (3, 2))

    def forward(self, x):
        return self.tokens(x).flatten(1)


def test_every_pooling_is_an_entry_of_its_own(cache):
    x = Tiny().parts["test"].x.view(-1, 3, 2)
    for pooling, expected in (("mean", x.mean(1)), ("cls", x[:, 0]), ("last", x[:, 2])):
        backbone = TinyNet()
        backbone.encoder = Sequences()
        extractor = make(cache, backbone=backbone, layers="tokens", pooling=pooling)
        assert torch.allclose(extractor.layer_features("test")["tokens"], expected)
    assert len(list(cache.root.glob("??/*/entry.json"))) == 4


def test_layers_of_a_network_whose_code_changed_are_computed_again(cache, monkeypatch):
    backbone = TinyNet()
    backbone.encoder = nn.Sequential(Sneaky(), nn.Flatten())
    make(cache, backbone=backbone, layers="0").layer_features("test")
    monkeypatch.setattr(Sneaky, "factor", 2.0)
    found = make(cache, backbone=backbone, layers="0").layer_features("test")
    assert torch.equal(found["0"], 2 * Tiny().parts["test"].x)


def test_layers_that_there_are_not_are_told():
    with pytest.raises(EncodingError, match="no layer 'layer1'"):
        make(layers="layer1").features("test")
    with pytest.raises(ValueError, match=r"no layers were asked for. Make the Extractor with layers="):
        make().layer_features("test")


def test_an_interrupted_pass_leaves_no_entry(cache):
    backbone = TinyNet()
    extractor = make(cache, backbone=backbone, layers=["0", "2"])
    backbone.encoder.register_forward_hook(lambda *_: stop() if backbone.seen > 100 else None)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extractor.features("train")
    assert not list(cache.root.glob("??/*"))
    assert not list(cache.root.glob("tmp/*"))
