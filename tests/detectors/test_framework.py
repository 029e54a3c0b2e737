"""Our detectors inside pytorch-ood: a drop-in for its own, in its benchmark and in its grid search."""

import inspect

import pytest
import pytorch_ood.detector
import torch
from conftest import make_blobs
from pytorch_ood.benchmark import Benchmark
from pytorch_ood.utils import GridSearch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from rmd_plugin import RMD, FlowLikelihood, Mahalanobis, MarginalMahalanobis, PartialMahalanobis


class Blobs(Benchmark):
    ood_names = ("noise", "centre")

    def __init__(self):
        z, self.y, _ = make_blobs(dtype=torch.float32)
        self.z = z
        self.noise = 3 * torch.randn(50, 12, generator=torch.Generator().manual_seed(1))
        self.centre = z.mean(0).expand(50, -1) + 0.1 * self.noise

    def train_set(self):
        return TensorDataset(self.z, self.y)

    def test_sets(self, known=True, unknown=True):
        test_id = TensorDataset(self.z[:100] + 0.01, self.y[:100])
        ood_sets = [TensorDataset(x, torch.full((len(x),), -1)) for x in (self.noise, self.centre)]
        if known and unknown:
            return [ConcatDataset([test_id, ood]) for ood in ood_sets]
        return [test_id] if known else ood_sets


def test_only_the_import_changes_in_a_users_script():
    def script(library):
        benchmark = Blobs()
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh())
        loader = DataLoader(benchmark.train_set(), batch_size=64)
        detector = library.RMD(model)
        detector.to("cpu").fit(loader)
        return benchmark.evaluate(detector, loader_kwargs={"batch_size": 32}), detector.predict(benchmark.noise)

    import rmd_plugin

    torch.manual_seed(0)
    ours, our_scores = script(rmd_plugin)
    torch.manual_seed(0)
    theirs, their_scores = script(pytorch_ood.detector)
    torch.testing.assert_close(our_scores, 300 * their_scores, rtol=2e-2, atol=0.5)
    for mine, their in zip(ours, theirs, strict=True):
        assert mine["Dataset"] == their["Dataset"]
        assert mine["AUROC"] == pytest.approx(their["AUROC"], abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool])
def test_labels_of_any_type_that_holds_integers_give_the_same_fit(dtype):
    z, y, x = make_blobs(num_classes=2)
    for make in (RMD, Mahalanobis, lambda: FlowLikelihood(max_epochs=1, progress=False)):
        expected = make().fit_features(z, y).predict_features(x)
        assert torch.equal(make().fit_features(z, y.to(dtype)).predict_features(x), expected)
        if not dtype.is_floating_point:
            continue
        marked = y.to(dtype).index_fill(0, torch.arange(5), -1.0)  # OOD
        expected = make().fit_features(z[5:], y[5:]).predict_features(x)
        torch.testing.assert_close(make().fit_features(z, marked).predict_features(x), expected)


def test_first_positional_argument_is_the_encoder():
    for detector in (RMD, Mahalanobis, MarginalMahalanobis):
        assert next(iter(inspect.signature(detector).parameters)) == "encoder"
        assert detector(None).encoder is None


def test_benchmark_evaluates_all_our_detectors_together():
    benchmark, encoder = Blobs(), nn.Identity()
    detectors = [
        RMD(encoder),
        Mahalanobis(encoder),
        MarginalMahalanobis(encoder),
        PartialMahalanobis(encoder, components=6),
    ]
    loader = DataLoader(benchmark.train_set(), batch_size=50)
    for detector in detectors:
        detector.fit(loader)
    rows = benchmark.evaluate(detectors, loader_kwargs={"batch_size": 64}, cache=True)
    assert len(rows) == 8
    assert {row["Detector"] for row in rows} == {"RMD", "Mahalanobis", "MarginalMahalanobis", "PartialMahalanobis"}
    by_name = {(row["Detector"], row["Dataset"]): row["AUROC"] for row in rows}
    # half-way between the classes: near every class on average, so the background explains it better than any class
    assert by_name["RMD", "centre"] > by_name["MarginalMahalanobis", "centre"]


@pytest.mark.parametrize("encoder", [nn.Identity(), None])
def test_grid_search_selects_a_shrinkage(encoder):
    benchmark = Blobs()
    fit = DataLoader(benchmark.train_set(), batch_size=100)
    val = DataLoader(benchmark.test_sets()[0], batch_size=100)
    detector = RMD(encoder if encoder is not None else (lambda x: x))
    search = GridSearch(detector, fit, val)
    best = search.run()
    assert set(best) == {"shrinkage", "normalize"}
    assert len(search.results_) == 8
    assert detector.fitted
    assert detector.state_dict()["options"]["shrinkage"] == best["shrinkage"]


@pytest.mark.filterwarnings("ignore:components=")
def test_grid_search_selects_components():
    benchmark = Blobs()
    fit = DataLoader(benchmark.train_set(), batch_size=100)
    val = DataLoader(benchmark.test_sets()[0], batch_size=100)
    best = GridSearch(PartialMahalanobis(nn.Identity(), components=3), fit, val).run()
    assert best["components"] in PartialMahalanobis.hyperparameter_space["components"]
