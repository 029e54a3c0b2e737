"""The Gaussian detectors against the textbook, against the framework and against what the maths promises."""

import io
import sys

import numpy as np
import oracle
import pytest
import pytorch_ood.detector
import torch
from conftest import make_blobs
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_ood.api import FeaturesDetector, Task
from scipy.stats import norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, Mahalanobis, MarginalMahalanobis, NumericalWarning, PartialMahalanobis, load_detector
from rmd_plugin.detectors.gaussian import MAX_FLOAT32_AMPLIFICATION

ORACLES = {RMD: oracle.rmd, Mahalanobis: oracle.mahalanobis, MarginalMahalanobis: oracle.marginal}
DETECTORS = {
    "rmd": RMD,
    "mahalanobis": Mahalanobis,
    "marginal": MarginalMahalanobis,
    "partial": lambda *a, **k: PartialMahalanobis(*a, components=4, **k),
    "partial smallest": lambda *a, **k: PartialMahalanobis(*a, components=4, largest=False, **k),
}
every_detector = pytest.mark.parametrize("make", DETECTORS.values(), ids=DETECTORS)


def relative_error(scores, expected):
    return np.abs(np.asarray(scores, dtype=np.float64) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("detector", ORACLES)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_classes": 2, "width": 3},
        {"num_classes": 30, "width": 6, "per_class": 20},
        {"separation": 20.0},
        {"num_classes": 1},
    ],
    ids=["K<D", "two classes", "K>D", "far classes", "one class"],
)
@pytest.mark.filterwarnings("ignore:RMD of a single class")
def test_scores_equal_the_textbook(detector, shape):
    z, y, x = make_blobs(**shape)
    expected = ORACLES[detector](z, y, x)
    scores = detector().fit_features(z, y).predict_features(x)
    np.testing.assert_allclose(scores, expected, rtol=1e-8, atol=1e-8)
    single = detector().fit_features(z.float(), y).predict_features(x.float())
    assert single.dtype == torch.float32
    expected = ORACLES[detector](z.float(), y, x.float())
    np.testing.assert_allclose(single, expected, rtol=5e-5, atol=5e-5 * max(1.0, expected.std()))


@pytest.mark.parametrize("components", [1, 4, 11, 12])
@pytest.mark.parametrize("largest", [True, False])
def test_partial_distance_equals_the_textbook(blobs, components, largest):
    if components == 12 and not largest:
        components = 0
    z, y, x = blobs
    detector = PartialMahalanobis(components=components, largest=largest).fit_features(z, y)
    np.testing.assert_allclose(detector.predict_features(x), oracle.partial(z, y, x, components, largest), rtol=1e-8)


def test_partial_distance_over_all_directions_is_the_mahalanobis_distance(blobs):
    z, y, x = blobs
    whole = Mahalanobis().fit_features(z, y).predict_features(x)
    torch.testing.assert_close(PartialMahalanobis(components=12).fit_features(z, y).predict_features(x), whole)
    with pytest.warns(NumericalWarning, match="components=99 exceeds the 12 eigen-directions"):
        more = PartialMahalanobis(components=99).fit_features(z, y)
    torch.testing.assert_close(more.predict_features(x), whole)


@pytest.mark.parametrize(("detector", "factor"), [(RMD, 1), (Mahalanobis, 2)])
@pytest.mark.parametrize("per_class", [60, 300])
def test_scores_are_those_of_the_framework_times_n_or_two_n(detector, factor, per_class):
    z, y, x = make_blobs(dtype=torch.float32, per_class=per_class)
    scores = detector().fit_features(z, y).predict_features(x)
    theirs = getattr(pytorch_ood.detector, detector.__name__)(None).fit_features(z, y).predict_features(x)
    torch.testing.assert_close(scores, factor * len(z) * theirs, rtol=1e-3, atol=1e-2)
    # the documented conversion of a threshold: half-way between two scores, so that rounding decides nothing
    threshold = theirs.sort().values[39:41].mean()
    assert torch.equal(scores > factor * len(z) * threshold, theirs > threshold)


def test_openood_confidence_is_our_score_with_the_opposite_sign(blobs):
    # OpenOOD reports max_k (background - class) of -1/2-scaled log-densities: a confidence, so lower means more OOD
    z, y, x = blobs
    confidence = -(oracle.class_distances(z, y, x) - oracle.marginal(z, y, x)[:, None]).min(1)
    np.testing.assert_allclose(RMD().fit_features(z, y).predict_features(x), -confidence, rtol=1e-8, atol=1e-8)


def test_rmd_is_mahalanobis_minus_marginal_for_every_option(blobs):
    z, y, x = blobs
    for options in ({}, {"shrinkage": 0.3}, {"shrinkage": "oas"}, {"normalize": True}, {"covariance": "diagonal"}):
        relative, classes, background = (
            d(**options).fit_features(z, y) for d in (RMD, Mahalanobis, MarginalMahalanobis)
        )
        expected = classes.class_scores(x) - background.predict_features(x)[:, None]
        torch.testing.assert_close(relative.class_scores(x), expected, rtol=1e-9, atol=1e-9)


def test_diagonal_covariance_is_the_textbook_on_each_feature_alone(blobs):
    z, y, x = blobs
    _, sigma, _, sigma_0, _ = oracle.moments(z, y)
    means = np.stack([np.asarray(z[y == k]).mean(0) for k in range(5)])
    md = (((np.asarray(x)[:, None] - means) ** 2) / np.diag(sigma)).sum(2)
    md_0 = ((np.asarray(x) - np.asarray(z).mean(0)) ** 2 / np.diag(sigma_0)).sum(1)
    np.testing.assert_allclose(Mahalanobis(covariance="diagonal").fit_features(z, y).predict_features(x), md.min(1))
    rmd = RMD(covariance="diagonal").fit_features(z, y).predict_features(x)
    np.testing.assert_allclose(rmd, md.min(1) - md_0, rtol=1e-9, atol=1e-9)


def test_full_shrinkage_gives_scaled_euclidean_distances(blobs):
    z, y, x = blobs
    _, sigma, *_ = oracle.moments(z, y)
    means = torch.stack([z[y == k].mean(0) for k in range(5)])
    scores = Mahalanobis(shrinkage=1.0).fit_features(z, y).predict_features(x)
    torch.testing.assert_close(scores, torch.cdist(x, means).square().amin(1) / (np.trace(sigma) / 12))


def test_normalized_features_make_the_score_blind_to_length(blobs):
    z, y, x = blobs
    detector = RMD(normalize=True).fit_features(z, y)
    lengths = torch.rand(len(x), 1, dtype=x.dtype) + 0.5
    torch.testing.assert_close(detector.predict_features(x), detector.predict_features(x * lengths))
    plain = RMD().fit_features(nn.functional.normalize(z, dim=1), y)
    torch.testing.assert_close(detector.predict_features(x), plain.predict_features(nn.functional.normalize(x, dim=1)))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(1e-2, 1e2), shift=st.floats(-1e3, 1e3))
def test_scores_do_not_change_under_rotation_scaling_and_translation(seed, scale, shift):
    z, y, x = make_blobs(seed=seed)
    q = torch.linalg.qr(torch.randn(12, 12, dtype=z.dtype, generator=torch.Generator().manual_seed(seed)))[0]

    def move(features):
        return scale * features @ q + shift

    for detector in ORACLES:
        here = detector().fit_features(z, y).predict_features(x)
        there = detector().fit_features(move(z), y).predict_features(move(x))
        torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6)


def test_rmd_does_not_change_under_any_invertible_linear_map(blobs):
    z, y, x = blobs
    mix = torch.randn(12, 12, dtype=z.dtype) * torch.logspace(-3, 3, 12, dtype=z.dtype)
    here = RMD().fit_features(z, y).predict_features(x)
    torch.testing.assert_close(RMD().fit_features(z @ mix, y).predict_features(x @ mix), here, rtol=1e-6, atol=1e-6)


def test_rmd_ignores_features_that_all_classes_share(blobs):
    z, y, x = blobs
    torch.manual_seed(1)
    noise = torch.randn(len(z), 3, dtype=z.dtype)
    for k in range(5):  # equal means and no sample correlation with the rest within any class
        rows = y == k
        basis = torch.cat([z[rows], torch.ones(int(rows.sum()), 1, dtype=z.dtype)], dim=1)
        noise[rows] -= basis @ torch.linalg.lstsq(basis, noise[rows]).solution
    wide, probe = torch.cat([z, noise], 1), torch.cat([x, 100 * torch.randn(len(x), 3, dtype=z.dtype)], 1)
    detector = RMD().fit_features(wide, y)
    torch.testing.assert_close(
        detector.predict_features(probe), RMD().fit_features(z, y).predict_features(x), rtol=1e-8, atol=1e-8
    )


def test_a_fitted_rmd_has_no_square_matrix():
    z, y, _ = make_blobs(num_classes=4, width=40)
    tensors = RMD().fit_features(z, y).state_dict()["tensors"]
    assert tensors["projection"].shape == (40, 3)
    assert tensors["points"].shape == (4, 3)
    assert sum(t.numel() for t in tensors.values()) < 40 * 5


@every_detector
def test_contributions_sum_to_the_score(make, blobs):
    z, y, x = blobs
    detector = make().fit_features(z, y)
    torch.testing.assert_close(detector.contributions(x).sum(1), detector.predict_features(x))


def test_mahalanobis_contributions_are_the_terms_of_the_eigen_directions(blobs):
    z, y, x = blobs
    detector = Mahalanobis().fit_features(z, y)
    means, sigma, *_ = oracle.moments(z, y)
    values, vectors = np.linalg.eigh(sigma)
    nearest = detector.nearest_class(x).tolist()
    centred = np.asarray(x) - np.stack([means[k] for k in nearest])
    expected = ((centred @ vectors) ** 2 / values)[:, ::-1]
    np.testing.assert_allclose(detector.contributions(x), expected, rtol=1e-6, atol=1e-9)


def test_class_scores_hold_the_score_and_the_nearest_class(blobs):
    z, y, x = blobs
    for detector in (RMD(), Mahalanobis()):
        detector.fit_features(z, y)
        scores = detector.class_scores(x)
        torch.testing.assert_close(scores.amin(1), detector.predict_features(x))
        assert torch.equal(scores.argmin(1), detector.nearest_class(x))
    np.testing.assert_allclose(Mahalanobis().fit_features(z, y).class_scores(x), oracle.class_distances(z, y, x))


def test_one_batch_equals_many_and_maps_equal_their_means(blobs):
    z, y, x = blobs
    detector = RMD().fit_features(z, y)
    torch.testing.assert_close(
        torch.cat([detector.predict_features(p) for p in x.split(7)]), detector.predict_features(x)
    )
    maps = x[:, :, None, None] + torch.tensor([[-1.0, 1.0], [2.0, -2.0]], dtype=x.dtype)
    torch.testing.assert_close(detector.predict_features(maps), detector.predict_features(x))
    fitted = RMD().fit_features(z[:, :, None, None].expand(-1, -1, 2, 3), y)
    torch.testing.assert_close(fitted.predict_features(x), detector.predict_features(x))


def test_large_batches_are_scored_in_chunks_with_the_same_result():
    z, y, _ = make_blobs(num_classes=3, width=2, per_class=30)
    x = torch.randn(600_000, 2)
    detector = RMD().fit_features(z, y)
    torch.testing.assert_close(detector.predict_features(x)[-5:], detector.predict_features(x[-5:]))
    assert detector.class_scores(x).shape == (600_000, 3)


@every_detector
@pytest.mark.parametrize("options", [{}, {"shrinkage": 0.1, "normalize": True}, {"shrinkage": "oas"}], ids=str)
def test_a_saved_detector_gives_bitwise_the_same_scores(make, options, blobs, tmp_path):
    z, y, x = blobs
    detector = make(**options).fit_features(z, y)
    detector.save(tmp_path / "detector.pt")
    for loaded in (
        type(detector).load(tmp_path / "detector.pt"),
        load_detector(tmp_path / "detector.pt"),
        make().load_state_dict(detector.state_dict()),
    ):
        assert type(loaded) is type(detector)
        assert loaded.options == detector.options
        assert torch.equal(loaded.predict_features(x), detector.predict_features(x))
        assert torch.equal(loaded.predict_features(x.float()), detector.predict_features(x.float()))
        assert (loaded.n_classes, loaded.num_features) == (detector.n_classes, detector.num_features)


def test_state_of_another_detector_is_refused(blobs, tmp_path):
    z, y, _ = blobs
    Mahalanobis().fit_features(z, y).save(tmp_path / "md.pt")
    with pytest.raises(ValueError, match="belongs to Mahalanobis, expected RMD"):
        RMD.load(tmp_path / "md.pt")
    with pytest.raises(ValueError, match="not the state of a detector"):
        RMD().load_state_dict({"weights": torch.zeros(1)})
    future = RMD().fit_features(z, y).state_dict() | {"format": 99}
    with pytest.raises(ValueError, match="format 99"):
        load_detector(future)


def test_fitting_again_replaces_the_fit_and_its_cached_module(blobs):
    z, y, x = blobs
    detector = RMD().fit_features(z, y)
    before = detector.predict_features(x)
    after = detector.fit_features(z * 1.5 + torch.randn_like(z), y).predict_features(x)
    assert not torch.allclose(before, after)


def test_options_changed_after_the_fit_take_effect_with_the_next_fit(blobs):
    z, y, x = blobs
    detector = RMD().fit_features(z, y)
    before = detector.predict_features(x)
    detector.normalize = True
    assert torch.equal(detector.predict_features(x.clone()), before)
    assert detector.state_dict()["options"]["normalize"] is False
    assert not torch.allclose(detector.fit_features(z, y).predict_features(x), before)


def test_ill_conditioned_float32_features_are_scored_in_float64():
    z, y, x = make_blobs(width=30, per_class=200, dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(30, 30, dtype=z.dtype))[0]
    stretch = (q * torch.logspace(0, -4, 30, dtype=z.dtype)) @ q.T
    z, x = torch.linalg.solve(z.T @ z, z.T).T @ stretch, x @ torch.linalg.inv(z.T @ z) @ stretch
    z, x = (z * 1e3).float(), (x * 1e3).float()
    detector = RMD().fit_features(z, y)
    assert float(detector.state_dict()["tensors"]["amplification"]) > MAX_FLOAT32_AMPLIFICATION
    # no linear map changes the score; without the stretch the textbook is exact
    narrow = torch.linalg.inv(stretch)
    expected = oracle.rmd(z.double() @ narrow, y, x.double() @ narrow)
    assert relative_error(detector.predict_features(x), expected) < 5e-5


@pytest.mark.parametrize("detector", ORACLES)
def test_condition_number_1e8_and_1e12(detector):
    for condition, exact, single in ((1e8, 1e-8, 5e-5), (1e12, 1e-3, 1e-2)):
        generator = torch.Generator().manual_seed(0)
        q = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))[0]
        mix = (q * torch.logspace(0, -0.5 * np.log10(condition), 64, dtype=torch.float64)) @ q.T
        y = torch.arange(2000) % 10
        centres = torch.randn(10, 64, generator=generator, dtype=torch.float64)
        z = (torch.randn(2000, 64, generator=generator, dtype=torch.float64) + centres[y]) @ mix
        x = 1.5 * torch.randn(200, 64, generator=generator, dtype=torch.float64) @ mix
        assert relative_error(detector().fit_features(z, y).predict_features(x), ORACLES[detector](z, y, x)) < exact
        z, x = z.float(), x.float()
        assert relative_error(detector().fit_features(z, y).predict_features(x), ORACLES[detector](z, y, x)) < single


def test_features_of_mean_1e4_lose_no_digits_in_float32():
    z, y, x = make_blobs(dtype=torch.float32)
    z, x = z + 1e4, x + 1e4
    for detector, expected in ORACLES.items():
        assert relative_error(detector().fit_features(z, y).predict_features(x), expected(z, y, x)) < 5e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_features_are_scored_like_their_float32_copies(dtype):
    z, y, x = make_blobs(dtype=dtype)
    detector = RMD().fit_features(z, y)
    assert detector.predict_features(x).dtype == torch.float32
    assert torch.equal(detector.predict_features(x), detector.predict_features(x.float()))


def test_autocast_does_not_touch_the_scores():
    z, y, x = make_blobs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = RMD().fit_features(z, y).predict_features(x)
    assert torch.equal(inside, RMD().fit_features(z, y).predict_features(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_fit_inside_lightning_hooks_stays_usable_outside(mode, blobs):
    z, y, x = blobs
    with mode():
        detector = RMD().fit_features(z + 0.0, y)
    probe = x.clone().requires_grad_()
    detector.to_module(torch.float64)(probe).sum().backward()
    assert probe.grad.isfinite().all()


def test_fit_streams_over_a_loader_and_gives_every_module_its_mode_back():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.frozen = nn.Dropout(0.5), nn.BatchNorm1d(12)
            self.seen = []

        def forward(self, x):
            self.seen.append(self.drop.training)
            return self.drop(x)

    z, y, x = make_blobs(dtype=torch.float32)
    encoder = Encoder().train()
    encoder.frozen.eval()
    labels = y.clone()
    labels[::10] = -1
    loader = DataLoader(TensorDataset(z, labels), batch_size=32)
    detector = RMD(encoder).fit(loader)
    assert encoder.training
    assert encoder.drop.training
    assert not encoder.frozen.training
    assert not any(encoder.seen)
    keep = labels >= 0
    expected = RMD().fit_features(z[keep], labels[keep])
    torch.testing.assert_close(detector.predict_features(x), expected.predict_features(x), rtol=1e-4, atol=1e-4)
    encoder.eval()
    torch.testing.assert_close(detector(x), detector.predict_features(x))
    bound = RMD(encoder.forward).fit(loader)
    assert torch.equal(bound.predict_features(x), detector.predict_features(x))


def test_the_mode_is_given_back_when_the_fit_fails():
    encoder = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).train()
    loader = [(torch.full((2, 3), torch.nan), torch.tensor([0, 1]))]
    with pytest.raises(ValueError, match="batch 0 has"):
        RMD(encoder).fit(loader)
    assert encoder.training


def test_progress_bar_is_an_option_on_a_terminal(capsys, monkeypatch):
    z, y, _ = make_blobs(dtype=torch.float32)
    loader = DataLoader(TensorDataset(z, y), batch_size=64)
    RMD(nn.Identity()).fit(loader)
    assert capsys.readouterr().err == ""
    RMD(nn.Identity()).fit(loader, progress=True)
    assert capsys.readouterr().err == ""  # a log would be filled with bars
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    RMD(nn.Identity()).fit(loader, progress=True)
    assert "fit RMD" in capsys.readouterr().err


@every_detector
def test_detectors_carry_what_the_framework_expects(make):
    detector = make()
    assert isinstance(detector, FeaturesDetector)
    assert detector.requires_fit
    assert Task.CLASSIFICATION in detector.info.tasks
    assert detector.info.paper.year in (2018, 2020, 2021)
    assert set(detector.get_hyperparameters()) == set(detector.hyperparameter_space)
    assert not detector.fitted


@pytest.mark.slow
def test_the_papers_simulation():
    # Appendix D. The expected AUROC of MD follows from two chi-squared sums that are nearly normal:
    # in-distribution D +- sqrt(2D), out-of-distribution D + delta +- sqrt(2D + 4 delta), delta = (2 / sigma)^2.
    width, sigma = 1024, 0.25
    generator = torch.Generator().manual_seed(0)

    def draw(first, count):
        z = sigma * torch.randn(count, width, generator=generator)
        z[:, 0] += first
        return z

    z, y = torch.cat([draw(-1, 10_000), draw(1, 10_000)]), torch.arange(2).repeat_interleave(10_000)
    test_id, test_ood = (torch.cat([draw(-a, 1000), draw(a, 1000)]) for a in (1, 3))
    delta = (2 / sigma) ** 2
    expected = norm.cdf(delta / np.sqrt(4 * width + 4 * delta))
    assert expected == pytest.approx(0.8313, abs=0.01)  # the paper's figure

    def auroc(detector):
        detector.fit_features(z, y)
        return oracle.auroc(detector.predict_features(test_id), detector.predict_features(test_ood))

    assert auroc(Mahalanobis()) == pytest.approx(expected, abs=0.025)
    assert auroc(RMD()) > 0.9999


def test_the_state_moves_with_the_detector(blobs):
    z, y, _ = blobs
    detector = RMD(nn.Linear(12, 12)).fit_features(z, y)
    assert detector.to("meta") is detector
    assert detector.device.type == "meta"
    assert all(t.device.type == "meta" for t in detector.state_dict()["tensors"].values())
    buffer = io.BytesIO()
    RMD().fit_features(z, y).save(buffer)
    buffer.seek(0)
    assert RMD.load(buffer, map_location="meta").device.type == "meta"


def test_repr_shows_the_options_that_differ_and_what_was_fitted(blobs):
    z, y, _ = blobs
    detector = RMD(nn.Identity(), shrinkage="oas", normalize=False)
    assert repr(detector) == "RMD(shrinkage='oas')"
    assert repr(detector.fit_features(z, y)) == "<RMD(shrinkage='oas') fitted: 5 classes, 12 features>"
    assert repr(PartialMahalanobis(components=3, largest=False)) == "PartialMahalanobis(components=3, largest=False)"
    assert repr(Mahalanobis()) == "Mahalanobis()"


def test_options_of_a_subclass_go_up_with_its_kwargs(blobs):
    z, y, x = blobs

    class Doubled(RMD):
        def __init__(self, encoder=None, *, factor=2.0, **options):
            super().__init__(encoder, **options)
            self.factor = factor

    detector = Doubled(shrinkage=0.1, factor=3.0).fit_features(z, y)
    others = {"normalize": False, "covariance": "tied", "keep_moments": False}
    assert detector.options == {"factor": 3.0, "shrinkage": 0.1, **others}
    assert torch.equal(Doubled.from_state(detector.state_dict()).predict_features(x), detector.predict_features(x))


def test_one_gaussian_for_all_classes_has_no_class_scores(blobs):
    z, y, x = blobs
    detector = MarginalMahalanobis().fit_features(z, y)
    for use in (detector.class_scores, detector.nearest_class):
        with pytest.raises(NotImplementedError, match="MarginalMahalanobis has one Gaussian for all classes"):
            use(x)
