"""Splits, subsets, fingerprints and the framework's contract, on the benchmarks that need no files."""

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_ood.benchmark import Benchmark
from scipy.stats import norm
from sklearn.datasets import load_digits

from rmd_plugin.benchmarks import (
    DataFormatError,
    DataNotFoundError,
    Digits,
    OODBenchmark,
    OODSet,
    Parts,
    Simulation,
    Split,
)
from rmd_plugin.benchmarks.base import ImageRows, TensorRows, Texts, stream
from rmd_plugin.benchmarks.genomics import Reads

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)
ROOT = Path(__file__).parents[2]


def tensors(split):
    return torch.stack([x for x, _ in split])


def small_simulation(**options):
    return Simulation(**{"dim": 16, "n_train": 60, "n_val": 20, "n_test": 30, **options})


@given(LABELS, st.floats(0, 0.45), st.floats(0, 0.45), st.integers(0, 99))
@settings(deadline=None)
def test_a_stratified_split_is_a_partition_with_the_proportions_of_the_whole(labels, first, second, seed):
    split = Split(TensorRows(labels), labels)
    parts = [part.indices for part in split.stratified([first, second], np.random.default_rng(seed))]
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    for label, count in Counter(labels.tolist()).items():
        for part, share in zip(parts[:2], (first, second), strict=True):
            assert abs((labels[part] == label).sum() - share * count) <= 1


@given(LABELS, st.integers(1, 100), st.integers(0, 99))
@settings(deadline=None)
def test_a_balanced_subset_is_as_even_as_the_classes_allow(labels, limit, seed):
    chosen = Split(TensorRows(labels), labels).balanced(limit, np.random.default_rng(seed)).indices
    assert len(chosen) == min(limit, len(labels))
    assert len(set(chosen.tolist())) == len(chosen)
    available, taken = Counter(labels.tolist()), Counter(labels[chosen].tolist())
    most = max(taken.values())
    for label, count in available.items():
        # a class has fewer than the largest one minus one only if it has run out
        assert taken[label] >= min(count, most - 1)


def test_streams_of_different_purposes_are_independent_and_repeatable():
    assert stream(1, "a").random() == stream(1, "a").random()
    draws = {stream(1, "a").random(), stream(1, "b").random(), stream(2, "a").random(), stream(1, "a", "b").random()}
    assert len(draws) == 4


def test_digits_have_the_published_counts_and_every_image_is_used_once():
    benchmark = Digits()
    assert [len(s) for s in (benchmark.train_set(), benchmark.val_set(), benchmark.test_in)] == [650, 217, 216]
    assert (benchmark.num_classes, benchmark.class_names) == (6, list("012345"))
    target = load_digits().target
    assert len(benchmark.test_oods[0]) == (target >= 6).sum() == 714
    parts = [benchmark.fit_set(), benchmark.val_set(), benchmark.test_in, benchmark.test_oods[0]]
    used = np.concatenate([part.indices for part in parts])
    assert sorted(used) == list(range(1797))
    for part in parts[:3]:
        np.testing.assert_array_equal(target[part.indices], part.labels)
    expected = np.bincount(target[target < 6]) * 0.2
    np.testing.assert_allclose(np.bincount(benchmark.test_in.labels), expected, atol=1)


def test_digits_far_sets_are_noise_and_the_negatives_of_the_test_images():
    benchmark = Digits(seed=3)
    assert benchmark.distance == {"digits_6_9": "near", "noise": "far", "inverted": "far"}
    _, noise, inverted = benchmark.test_oods
    torch.testing.assert_close(tensors(inverted), 1 - tensors(benchmark.test_in))
    pixels = tensors(noise)
    assert pixels.shape == (len(benchmark.test_in), 1, 8, 8)
    # uniform on [0, 1]: mean 1/2, standard deviation 1/sqrt(12)
    assert pixels.mean().item() == pytest.approx(0.5, abs=0.01)
    assert pixels.std().item() == pytest.approx(12**-0.5, abs=0.01)


def test_simulated_means_and_deviations_are_those_asked_for():
    benchmark = Simulation(dim=20, means=[-2, 0.5, 4], ood_means=[9], sigma=0.5, n_train=4000, n_val=7, n_test=11)
    x, y = tensors(benchmark.fit_set()), benchmark.fit_set().labels
    assert np.bincount(y).tolist() == [4000] * 3
    assert [len(benchmark.val_set()), len(benchmark.test_in), len(benchmark.test_oods[0])] == [21, 33, 11]
    for label, mean in enumerate([-2, 0.5, 4]):
        part = x[y == label]
        expected = torch.zeros(20)
        expected[0] = mean
        # five standard errors of the mean and of the deviation
        torch.testing.assert_close(part.mean(0), expected, atol=5 * 0.5 / 4000**0.5, rtol=0)
        torch.testing.assert_close(part.std(0), torch.full((20,), 0.5), atol=5 * 0.5 / 8000**0.5, rtol=0)
    assert torch.corrcoef(x[y == 0].T).fill_diagonal_(0).abs().max() < 5 / 4000**0.5


def test_the_paper_s_simulation_gives_the_auroc_that_theory_predicts_for_the_mahalanobis_distance():
    # the true parameters stand in for the fit, so few training samples do
    benchmark = Simulation(n_train=1, n_val=0, n_test=400, seed=1)
    assert (benchmark.dim, benchmark.means, benchmark.ood_means, benchmark.sigma) == (1024, [-1, 1], [-3, 3], 0.25)

    def distance(split):
        x = tensors(split).double()
        first = torch.minimum((x[:, 0] + 1).abs(), (x[:, 0] - 1).abs()) ** 2
        return (first + (x[:, 1:] ** 2).sum(1)) / 0.25**2

    inside, outside = distance(benchmark.test_in), distance(benchmark.test_oods[0])
    auroc = (outside[:, None] > inside[None]).double().mean().item()
    # chi-squared against non-central chi-squared with (2 / 0.25)^2, both nearly normal: the paper reports 83.13 %
    theory = norm.cdf(64 / np.sqrt(4 * 1024 + 4 * 64))
    assert theory == pytest.approx(0.8313, abs=0.01)
    assert auroc == pytest.approx(theory, abs=0.03)
    with pytest.raises(ValueError, match="holds out no validation"):
        benchmark.val_set()


def test_nothing_touches_the_global_random_state():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    list(Digits(limit_train=30, limit_test=20).train_set())
    small_simulation().fingerprint()
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def test_limits_are_balanced_subsets_of_the_same_splits():
    whole, part = Digits(), Digits(limit_train=60, limit_test=12)
    assert np.bincount(part.train_set().labels).tolist() == [10] * 6
    assert np.bincount(part.val_set().labels).tolist() == [2] * 6
    assert np.bincount(part.test_in.labels).tolist() == [2] * 6
    assert [len(ood) for ood in part.test_oods] == [12, 12, 12]
    for pick in (lambda b: b.fit_set(), lambda b: b.val_set(), lambda b: b.test_in):
        assert set(pick(part).indices) <= set(pick(whole).indices)
    assert Counter(load_digits().target[part.test_oods[0].indices].tolist()) == {6: 3, 7: 3, 8: 3, 9: 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_test": 0}, "limit_test"),
        ({"limit_train": 5}, "6 classes"),
        ({"num_classes": 10}, "num_classes"),
        ({"test_fraction": 0.0}, "left to train or test"),
        ({"seed": -1}, "non-negative"),
    ],
)
def test_wrong_options_are_refused_with_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        Digits(**options)


def test_train_and_fit_sets_hold_the_same_samples_behind_their_own_transforms():
    benchmark = Digits(train_transform=lambda x: x + 10, test_transform=lambda x: x - 10, limit_train=30)
    train, fit = benchmark.train_set(), benchmark.fit_set()
    torch.testing.assert_close(tensors(train) - 10, tensors(fit) + 10)
    assert torch.equal(train.labels, fit.labels)
    for other in (benchmark.val_set(), benchmark.test_in, *benchmark.test_oods):
        assert tensors(other).max() <= -9


@pytest.mark.parametrize("make", [lambda: Digits(limit_test=40), small_simulation])
def test_test_sets_follow_the_framework_s_contract(make):
    benchmark = make()
    assert isinstance(benchmark, Benchmark)
    assert isinstance(benchmark, OODBenchmark)
    both = benchmark.test_sets()
    assert len(both) == len(benchmark.ood_names) == len(benchmark.distance)
    (inside,) = benchmark.test_sets(unknown=False)
    for mixed, ood in zip(both, benchmark.test_sets(known=False), strict=True):
        labels = [label for _, label in mixed]
        assert labels == [label for _, label in inside] + [label for _, label in ood]
        assert all(type(label) is int for label in labels)
        assert max(label for _, label in ood) < 0 <= min(label for _, label in inside)
    with pytest.raises(ValueError, match="known=True or unknown=True"):
        benchmark.test_sets(known=False, unknown=False)


def test_the_fingerprint_follows_content_and_order_but_not_transforms():
    base = Digits()
    assert Digits(test_transform=lambda x: -x).fingerprint() == base.fingerprint()
    assert Digits(limit_test=10).fingerprint() != base.fingerprint()
    assert Digits(limit_test=10).fingerprint("train") == base.fingerprint("train")
    assert base.fingerprint("noise") != base.fingerprint("inverted")
    with pytest.raises(ValueError, match="has no split 'nonsense'"):
        base.fingerprint("nonsense")


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        (Texts(["ab", "c"]), Texts(["a", "bc"])),
        (TensorRows(np.zeros((2, 3), np.float32)), TensorRows(np.zeros((2, 4), np.float32))),
        (TensorRows(np.zeros((2, 3))), TensorRows(np.zeros((2, 3)), torch.float64)),
        (Reads(np.zeros((2, 4), np.uint8)), Reads(np.array([[0, 0, 0, 0], [0, 0, 0, 1]], np.uint8))),
        (ImageRows(np.zeros((2, 2, 2, 3), np.uint8)), ImageRows(np.ones((2, 2, 2, 3), np.uint8))),
    ],
)
def test_every_source_s_digest_sees_its_content(source, changed):
    labels = np.array([0, 1])
    digest = Split(source, labels).digest()
    assert digest == Split(source, labels).digest()
    assert digest != Split(source, labels[::-1].copy()).digest()
    assert digest != Split(source, labels[:1], np.array([0])).digest()
    assert digest != Split(changed, labels).digest()


def test_digests_are_the_same_in_every_process_and_version():
    # recorded once: if these change, every cache keyed by a fingerprint is void
    texts = Split(Texts(["ab", "c"]), np.array([0, 1]))
    assert texts.digest() == "c8b4bd3990f807e0f78e7d90078d082b5990ed4c47be17f34b887799a15f734e"
    rows = Split(TensorRows(np.arange(6, dtype=np.float32).reshape(2, 3)), np.array([0, -1]))
    assert rows.digest() == "3a9e9c29b783f6c92b41eb0f32f559db390de04935422a9d1a50b9cf7b632b5e"


def test_errors_survive_the_way_out_of_a_worker_process():
    error = pickle.loads(pickle.dumps(DataFormatError("a/b.json", "is not JSON")))
    assert (error.path, error.reason) == ("a/b.json", "is not JSON")
    assert str(error) == "a/b.json: is not JSON"
    assert isinstance(DataNotFoundError("gone"), FileNotFoundError)


@pytest.mark.parametrize("names", [("a", "a"), ("test",)])
@pytest.mark.parametrize("distance", ["shift", "near"])
def test_two_splits_of_one_name_are_refused(names, distance):
    class Twice(OODBenchmark):
        name = "twice"

        def load(self):
            train, test, *others = (Split(TensorRows(np.ones((6, 2))), np.arange(6) % 2) for _ in range(4))
            sets = [OODSet(name, kind, split) for name, kind, split in zip(names, (distance, "near"), others)]  # noqa: B905
            return Parts(["x", "y"], train, test, sets, val_fraction=0.5)

    with pytest.raises(ValueError, match=f"named '{names[0]}'"):
        Twice()
