"""Our detectors inside pytorch-ood: a drop-in for its own, in its benchmark and in its grid search."""

import inspect
import pickle

import numpy as np
import oracle
import pytest
import pytorch_ood.detector
import torch
from conftest import make_blobs
from pytorch_ood.benchmark import Benchmark
from pytorch_ood.detector import MahalanobisODIN
from pytorch_ood.utils import GridSearch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import rmd_plugin
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


NAMES = ("mu", "cov", "precision", "background_mu", "background_cov", "background_precision")


def test_the_gaussians_are_found_under_the_names_of_the_framework():
    z, y, _ = make_blobs()
    ours, theirs = (library.RMD(None) for library in (rmd_plugin, pytorch_ood.detector))
    assert [getattr(ours, name) for name in NAMES] == [getattr(theirs, name) for name in NAMES] == [None] * 6
    ours.fit_features(z.float(), y)
    theirs.fit_features(z.float(), y)
    scales = {"mu": 1, "cov": 300, "precision": 1 / 300}
    for name in NAMES:
        mine, their = getattr(ours, name), getattr(theirs, name)
        assert (mine.shape, mine.dtype, mine.device) == (their.shape, their.dtype, their.device)
        torch.testing.assert_close(scales[name.removeprefix("background_")] * mine, their, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"shrinkage": 0.3}, {"covariance": "diagonal"}])
def test_the_scores_are_those_of_the_gaussians_that_can_be_read(options):
    z, y, x = make_blobs()
    detector = RMD(**options).fit_features(z, y)

    def distance(mu, precision):
        matrix = precision.double() if precision.ndim == 2 else precision.double().diag()
        return ((x - mu) @ matrix * (x - mu)).sum(1)

    nearest = torch.stack([distance(mu, detector.precision) for mu in detector.mu]).amin(0)
    md = Mahalanobis(**options).fit_features(z, y)
    torch.testing.assert_close(nearest, md.predict_features(x), rtol=1e-4, atol=1e-3)
    relative = nearest - distance(detector.background_mu, detector.background_precision)
    torch.testing.assert_close(relative, detector.predict_features(x), rtol=1e-4, atol=1e-3)


def test_what_is_read_belongs_to_the_last_fit():
    z, y, _ = make_blobs()
    detector = RMD().fit_features(z, y)
    first = detector.cov
    assert detector.cov is first  # inverting a wide covariance for every batch would take long
    torch.testing.assert_close(detector.fit_features(3 * z, y).cov, 9 * first)
    detector.shrinkage = 0.9  # an option for the next fit
    torch.testing.assert_close(detector.cov, 9 * first)
    torch.testing.assert_close(pickle.loads(pickle.dumps(detector)).cov, 9 * first)
    loaded = RMD().fit_features(z, y).load_state_dict(detector.state_dict())
    for name in NAMES:
        with pytest.raises(AttributeError, match=rf"RMD\.{name} is not in a saved state.*Moments\.save"):
            getattr(loaded, name)


@pytest.mark.filterwarnings("ignore::rmd_plugin.NumericalWarning")
def test_directions_without_variance_have_a_pseudo_inverse():
    z, y, _ = make_blobs()
    z = torch.cat([z, z[:, :1], torch.full((len(z), 1), 7.0)], 1)
    detector = Mahalanobis().fit_features(z, y)
    sigma = oracle.moments(z, y)[1]
    expected = np.linalg.pinv(sigma, rcond=1e-10, hermitian=True)
    np.testing.assert_allclose(detector.precision, expected, rtol=1e-3, atol=1e-5)
    diagonal = Mahalanobis(covariance="diagonal").fit_features(z, y)
    np.testing.assert_allclose(diagonal.precision[:-1], 1 / sigma.diagonal()[:-1], rtol=1e-5)
    assert diagonal.precision[-1] == 0


def test_the_frameworks_input_preprocessing_works_with_our_distance():
    z, y, x = make_blobs(dtype=torch.float32)
    encoder = nn.Sequential(nn.Linear(12, 8), nn.Tanh())
    theirs = MahalanobisODIN(encoder, eps=0.01).fit_features(encoder(z).detach(), y)
    ours = MahalanobisODIN(encoder, eps=0.01)
    ours._base = Mahalanobis(encoder)
    ours.fit_features(encoder(z).detach(), y)
    torch.testing.assert_close(ours.predict(x), 2 * len(z) * theirs.predict(x), rtol=2e-2, atol=1e-2)


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
