"""Benchmarks of other people: a subclass of ours, or any of the framework behind ``as_benchmark``."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_ood.benchmark import Benchmark
from pytorch_ood.detector import KNN
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.transforms import ToTensor

from rmd_plugin.benchmarks import Digits, OODBenchmark, OODSet, Parts, Split, TensorRows, as_benchmark


class Pictures(Dataset):
    """PIL images, each of one grey; it counts how many were loaded."""

    def __init__(self, labels, shift=0, keep=None):
        self.items, self.shift, self.loaded = list(labels), shift, 0
        if keep:
            setattr(self, keep, self.items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.loaded += 1
        grey = 20 * max(self.items[index], 0) + index % 7 + self.shift
        return Image.fromarray(np.full((4, 4, 3), grey, np.uint8)), self.items[index]


class Own(Benchmark):
    """The least that the framework asks of a benchmark."""

    ood_names = ("near", "bright")

    def __init__(self, train, test, oods):
        self.train, self.test, self.oods = train, test, oods

    def train_set(self):
        return self.train

    def test_sets(self, known=True, unknown=True):
        if known and unknown:
            return [self.test + ood for ood in self.oods]
        return [self.test] if known else self.oods


def pictures(train=60, keep=None):
    oods = [Pictures([-1] * 8, shift=60), Pictures([-2] * 9, shift=200)]
    return Own(Pictures(np.arange(train) % 3, keep=keep), Pictures(np.arange(12) % 3), oods)


def vectors():
    def normal(labels, seed):
        x = torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(seed)) + 9.0 * labels[:, None]
        return TensorDataset(x, labels)

    oods = [normal(torch.full((7,), -1), 2), normal(torch.full((9,), -1), 3)]
    return Own(normal(torch.arange(40) % 2, 0), normal(torch.arange(10) % 2, 1), oods)


def test_a_framework_benchmark_of_images_gets_splits_classes_and_the_backbone_s_transform():
    benchmark = as_benchmark(pictures(), seed=1)
    assert isinstance(benchmark, OODBenchmark)
    assert (benchmark.name, benchmark.num_classes, benchmark.class_names) == ("Own", 3, None)
    assert (benchmark.ood_names, benchmark.distance) == (["near", "bright"], {"near": "", "bright": ""})
    train, val = benchmark.train_set(), benchmark.val_set()
    assert sorted([*train.indices, *val.indices]) == list(range(60))
    assert np.bincount(train.labels).tolist() == [18] * 3
    assert np.bincount(val.labels).tolist() == [2] * 3
    assert np.array_equal(benchmark.fit_set().indices, train.indices)
    assert isinstance(train[0][0], Image.Image)
    for split in (train, val, benchmark.test_in, *benchmark.test_oods):
        x, labels = next(iter(DataLoader(split.with_transform(ToTensor()), batch_size=len(split))))
        assert x.shape == (len(split), 3, 4, 4)
        assert torch.equal(labels, split.labels)
        torch.testing.assert_close(x[0], ToTensor()(split.raw(0)))
    assert [set(ood.labels.tolist()) for ood in benchmark.test_oods] == [{-1}, {-1}]
    assert [len(data) for data in benchmark.test_sets()] == [20, 21]


def test_the_held_out_part_follows_the_seed_and_the_fingerprint_the_content():
    one, again, other = (as_benchmark(pictures(), seed=seed) for seed in (1, 1, 2))
    assert one.fingerprint() == again.fingerprint() != other.fingerprint()
    assert one.fingerprint("test") == other.fingerprint("test")
    changed = pictures()
    changed.test.shift = 1
    assert as_benchmark(changed, seed=1).fingerprint("test") != one.fingerprint("test")
    assert len(as_benchmark(pictures(), val_fraction=0.5).val_set()) == 30


def test_tensors_of_the_data_set_s_own_transform_are_left_alone():
    benchmark = as_benchmark(vectors())
    wrapped = benchmark.test_in.with_transform(lambda x: x * 0)
    torch.testing.assert_close(torch.stack([x for x, _ in wrapped]), vectors().test.tensors[0])
    assert benchmark.num_classes == 2
    detector = KNN(torch.nn.Identity(), k=3).fit(DataLoader(benchmark.fit_set(), batch_size=8))
    rows = benchmark.evaluate(detector, loader_kwargs={"batch_size": 8})
    assert [row["Dataset"] for row in rows] == ["near", "bright"]


def test_what_a_framework_benchmark_says_besides_is_used():
    own = pictures()
    own.class_names, own.distance = ["a", "b", "c"], {"near": "near"}
    own.val_set = lambda: Pictures([0, 1, 2, 0])
    benchmark = as_benchmark(own)
    assert (benchmark.class_names, benchmark.distance) == (["a", "b", "c"], {"near": "near", "bright": ""})
    assert [len(benchmark.train_set()), len(benchmark.val_set())] == [60, 4]


@pytest.mark.parametrize("keep", ["targets", "labels"])
def test_stored_labels_save_loading_every_item(keep):
    own = pictures(keep=keep)
    own.train = Subset(own.train, range(0, 60, 2))
    benchmark = as_benchmark(own)
    assert own.train.dataset.loaded <= 3
    assert np.bincount(benchmark.train_set().labels).tolist() == [9] * 3
    # stored labels that are not those of the items are not believed
    own.train = Pictures(np.arange(60) % 3, keep=keep)
    setattr(own.train, keep, [5] * 60)
    assert as_benchmark(own).num_classes == 3
    assert own.train.loaded >= 60


def test_what_cannot_be_a_benchmark_is_refused_with_what_was_expected(monkeypatch):
    with pytest.raises(TypeError, match="OODBenchmark"):
        as_benchmark([1, 2])
    own = pictures()
    with monkeypatch.context() as patch:
        patch.delattr(Own, "ood_names")
        with pytest.raises(TypeError, match="ood_names"):
            as_benchmark(own)
    own.oods = own.oods[:1]
    with pytest.raises(ValueError, match="1 OOD sets but 2 ood_names"):
        as_benchmark(own)
    own = pictures()
    own.train = Pictures([0, 2] * 20)
    with pytest.raises(ValueError, match=r"items of a TensorDataset must be \(x, label\)"):
        as_benchmark(Own(TensorDataset(torch.zeros(4, 2)), own.test, own.oods))
    with pytest.raises(ValueError, match=r"missing are \[1\]"):
        as_benchmark(own)


@dataclass(kw_only=True, eq=False, repr=False)
class Moved(OODBenchmark):
    name = "moved"

    by: float = 5.0

    def load(self):
        rng = np.random.default_rng(self.seed)
        train, test = (Split(TensorRows(rng.normal(size=(n, 3))), np.arange(n) % 2) for n in (80, 20))
        far = Split(TensorRows(rng.normal(self.by, size=(30, 3))), np.zeros(30))
        return Parts(["even", "odd"], train, test, [OODSet("far", "far", far)], val_fraction=0.1)


def test_a_subclass_states_its_options_as_fields_and_its_data_in_load():
    benchmark = Moved(by=7.0, seed=3, limit_test=10)
    assert repr(benchmark) == "Moved(train=72, val=8, test=10, far=10)"
    assert as_benchmark(benchmark) is benchmark
    assert torch.stack([x for x, _ in benchmark.test_oods[0]]).mean() == pytest.approx(7, abs=0.5)
    assert as_benchmark(digits := Digits(), seed=4) is digits
    with pytest.raises(TypeError, match="load"):
        OODBenchmark()
