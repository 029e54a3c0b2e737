"""The Gaussian detectors against the textbook, the framework, OpenOOD's formula, and what the maths promises."""

import numpy as np
import oracle
import pytest
import pytorch_ood.detector
import torch
from conftest import make_blobs
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import OAS, EmpiricalCovariance
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import (
    RMD,
    Calibrated,
    ClassMoments,
    FusedRMD,
    Mahalanobis,
    MarginalMahalanobis,
    NumericalWarning,
    PartialMahalanobis,
    load_detector,
)

ORACLES = {RMD: oracle.rmd, Mahalanobis: oracle.mahalanobis, MarginalMahalanobis: oracle.marginal}
every_distance = pytest.mark.parametrize("detector", ORACLES)
few_told = pytest.mark.filterwarnings("ignore::rmd_plugin.NumericalWarning")


def error(scores, expected):
    """Largest error relative to the spread of the scores."""
    scores, expected = (np.asarray(part, dtype=np.float64) for part in (scores, expected))
    return np.abs(scores - expected).max() / max(expected.std(), 1e-300)


def score(detector, z, y, x):
    return detector.fit_features(z, y).predict_features(x)


def collected(z, y, **options):
    metric = ClassMoments(**options)
    metric.update(z, y)
    return metric.compute()


# -- the textbook -----------------------------------------------------------------------------------------------------


@every_distance
@pytest.mark.parametrize(
    "shape", [{}, {"num_classes": 30, "width": 6, "per_class": 20}, {"separation": 20.0}], ids=["K<D", "K>D", "far"]
)
def test_scores_equal_the_textbook(detector, shape):
    z, y, x = make_blobs(**shape)
    np.testing.assert_allclose(score(detector(), z, y, x), ORACLES[detector](z, y, x), rtol=1e-8, atol=1e-8)
    z, x = z.float(), x.float()
    single = score(detector(), z, y, x)
    assert single.dtype == torch.float32
    assert error(single, ORACLES[detector](z, y, x)) < 5e-5


@pytest.mark.parametrize(("components", "largest"), [(1, True), (4, True), (4, False), (0, False)])
def test_a_partial_distance_equals_the_textbook(blobs, components, largest):
    z, y, x = blobs
    detector = PartialMahalanobis(components=components, largest=largest).fit_features(z, y)
    np.testing.assert_allclose(detector.predict_features(x), oracle.partial(z, y, x, components, largest), rtol=1e-8)


def test_a_partial_distance_follows_eigenvectors_in_the_features_own_units(blobs):
    z, y, x = blobs
    units = torch.logspace(0, -5, 12, dtype=z.dtype)  # so wide that a whole distance is fitted on rescaled features
    scores = score(PartialMahalanobis(components=3), z * units, y, x * units)
    np.testing.assert_allclose(scores, oracle.partial(z * units, y, x * units, 3), rtol=1e-6)


def test_a_partial_distance_takes_as_many_directions_as_there_are(blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match="12 eigen-directions"):
        scores = score(PartialMahalanobis(components=99), z, y, x)
    torch.testing.assert_close(scores, score(Mahalanobis(), z, y, x))
    with pytest.raises(ValueError, match="none"):
        PartialMahalanobis(components=12, largest=False).fit_features(z, y)
    for components in (0, 1.5):
        with pytest.raises(ValueError, match="components"):
            PartialMahalanobis(components=components)


@pytest.mark.parametrize(("detector", "factor"), [(RMD, 1), (Mahalanobis, 2)])
def test_scores_are_those_of_the_framework_times_n_or_two_n(detector, factor):
    z, y, x = make_blobs(dtype=torch.float32, per_class=300)
    scores = score(detector(), z, y, x)
    theirs = score(getattr(pytorch_ood.detector, detector.__name__)(None), z, y, x)
    torch.testing.assert_close(scores, factor * len(z) * theirs, rtol=1e-3, atol=1e-2)
    # the documented conversion of a threshold: half-way between two scores, so that rounding decides nothing
    threshold = theirs.sort().values[39:41].mean()
    assert torch.equal(scores > factor * len(z) * threshold, theirs > threshold)


@pytest.mark.parametrize("num_classes", [10, 50])
def test_rmd_is_openoods_rmds_on_features_like_a_networks(num_classes):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(50 * num_classes) % num_classes
    centres = 2 * torch.randn(num_classes, 96, generator=generator)

    def pooled(centre):  # after a ReLU, in single precision as OpenOOD has them
        return (torch.randn(len(centre), 96, generator=generator) + centre).relu()

    z, x = pooled(centres[y]), torch.cat([pooled(centres[y[:200]]), pooled(torch.zeros(200, 96))])
    means = np.stack([z[y == label].numpy().mean(0) for label in range(num_classes)])

    def distance(difference, centred):
        precision = EmpiricalCovariance(assume_centered=False).fit(centred).precision_.astype(np.float32)
        return np.einsum("nd,de,ne->n", difference, precision, difference)

    background = distance(x.numpy() - z.numpy().mean(0), z.numpy() - z.numpy().mean(0))
    classes = np.stack([distance(x.numpy() - mean, z.numpy() - means[y]) for mean in means], axis=1)
    confidence = (background[:, None] - classes).max(1)  # lower means more OOD
    assert error(score(RMD(), z, y, x), -confidence) < 5e-4


def test_rmd_is_mahalanobis_minus_marginal_for_every_option(blobs):
    z, y, x = blobs
    for options in ({}, {"shrinkage": 0.3}, {"shrinkage": "oas"}, {"normalize": True}, {"covariance": "diagonal"}):
        relative, classes, background = (make(**options).fit_features(z, y) for make in ORACLES)
        expected = classes.class_scores(x) - background.predict_features(x)[:, None]
        torch.testing.assert_close(relative.class_scores(x), expected, rtol=1e-9, atol=1e-9)


def test_a_diagonal_covariance_is_the_textbook_on_each_feature_alone(blobs):
    z, y, x = blobs
    _, sigma, mu_0, sigma_0, _ = oracle.moments(z, y)
    means = np.stack([np.asarray(z[y == k]).mean(0) for k in range(5)])
    md = (((np.asarray(x)[:, None] - means) ** 2) / np.diag(sigma)).sum(2).min(1)
    md_0 = ((np.asarray(x) - mu_0) ** 2 / np.diag(sigma_0)).sum(1)
    options = {"covariance": "diagonal"}
    np.testing.assert_allclose(score(Mahalanobis(**options), z, y, x), md)
    np.testing.assert_allclose(score(MarginalMahalanobis(**options), z, y, x), md_0)
    np.testing.assert_allclose(score(RMD(**options), z, y, x), md - md_0, rtol=1e-9, atol=1e-9)


def test_full_shrinkage_gives_scaled_euclidean_distances(blobs):
    z, y, x = blobs
    means = torch.stack([z[y == k].mean(0) for k in range(5)])
    expected = torch.cdist(x, means).square().amin(1) / (np.trace(oracle.moments(z, y)[1]) / 12)
    torch.testing.assert_close(score(Mahalanobis(shrinkage=1.0), z, y, x), expected)


def test_normalized_features_are_those_of_unit_length(blobs):
    z, y, x = blobs
    lengths = torch.rand(len(x), 1, dtype=x.dtype) + 0.5
    scores = score(RMD(normalize=True), z, y, x * lengths)
    expected = score(RMD(), nn.functional.normalize(z), y, nn.functional.normalize(x))
    torch.testing.assert_close(scores, expected)


def centred_oas(z, y):
    """OAS around the class means, by scikit-learn."""
    means = torch.stack([z[y == k].mean(0) for k in range(5)])
    return OAS(assume_centered=True).fit((z - means[y]).numpy())


@pytest.mark.parametrize("samples", [55, 60])  # of 12 features: 60 are the first that are enough
def test_auto_is_oas_below_five_samples_per_feature_and_nothing_from_there_on(samples, tmp_path):
    z, y, x = make_blobs()
    z, y = z[:samples], y[:samples]
    means, sigma, mu_0, _, between = oracle.moments(z, y)
    expected = centred_oas(z, y) if samples == 55 else None
    sigma = sigma if expected is None else expected.covariance_
    nearest = np.min([oracle.distance(x, mu, sigma) for mu in means.values()], axis=0)
    detector = RMD(shrinkage="auto").fit_features(z, y)
    intensity = 0.0 if expected is None else expected.shrinkage_
    assert detector.intensity == pytest.approx(intensity, rel=1e-9)
    assert f"intensity {intensity:.3g}" in repr(detector)
    relative = nearest - oracle.distance(x, mu_0, sigma + between)
    np.testing.assert_allclose(detector.predict_features(x), relative, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(detector.cov.double(), sigma, rtol=1e-5, atol=1e-5)


def test_the_intensity_of_oas_does_not_depend_on_the_unit_and_is_never_above_one(blobs):
    z, y, _ = blobs
    meters, kilometers = (RMD(shrinkage="oas").fit_features(unit * z, y).intensity for unit in (1.0, 1e-3))
    assert kilometers == pytest.approx(meters, rel=1e-9)
    isotropic = torch.cat([torch.eye(4), -torch.eye(4)]).double()  # its covariance is a multiple of the identity
    assert Mahalanobis(shrinkage="oas").fit_features(isotropic, torch.zeros(8).long()).intensity == 1.0


@pytest.mark.parametrize(
    ("samples", "key"), [(55, "55 samples are few"), (16, "rank 11 of 12 .16 samples are too few"), (300, None)]
)
def test_few_samples_are_told_once_unless_shrinkage_helps(samples, key):
    z, y, _ = make_blobs()
    z, y = z[:samples], y[:samples]
    if key is not None:
        for detector in (RMD(), Mahalanobis(), PartialMahalanobis(components=4, largest=False)):
            with pytest.warns(NumericalWarning, match=key) as caught:
                detector.fit_features(z, y)
            assert len(caught) == 1
    for detector in (RMD(shrinkage="auto"), RMD(shrinkage=0.1), RMD(covariance="diagonal"), FusedRMD()):
        detector.fit_features(z, y)  # warnings are errors


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"shrinkage": 1.5}, "shrinkage"),
        ({"shrinkage": "ledoit"}, "shrinkage"),
        ({"covariance": "full"}, "covariance"),
        ({"covariance": "diagonal", "shrinkage": "oas"}, "tied"),
    ],
)
def test_options_are_checked_when_they_are_given(options, key):
    with pytest.raises(ValueError, match=key):
        RMD(**options)


def test_moments_of_another_kind_are_refused(blobs):
    z, y, x = blobs
    with pytest.raises(ValueError, match="normalize"):
        RMD(normalize=True).fit_moments(collected(z, y))
    with pytest.raises(ValueError, match="diagonal"):
        RMD().fit_moments(collected(z, y, diagonal=True))
    full, diagonal = (RMD(covariance="diagonal").fit_moments(collected(z, y, diagonal=d)) for d in (False, True))
    torch.testing.assert_close(full.predict_features(x), diagonal.predict_features(x))


def test_options_changed_after_the_fit_take_effect_with_the_next_one(blobs):
    z, y, x = blobs
    detector = RMD().fit_features(z, y)
    before = detector.predict_features(x)
    detector.normalize = True
    assert torch.equal(detector.predict_features(x.clone()), before)
    assert detector.state_dict()["options"]["normalize"] is False
    with pytest.raises(ValueError, match="normalized"):
        detector.update(z, y)
    torch.testing.assert_close(score(detector, z, y, x), score(RMD(normalize=True), z, y, x))


def test_repr_shows_the_options_that_differ_and_what_was_fitted(blobs):
    detector = RMD(nn.Identity(), shrinkage="oas", normalize=False)
    assert repr(detector) == "RMD(shrinkage='oas')"
    assert repr(detector.fit_features(*blobs[:2])) == "<RMD(shrinkage='oas') fitted: 5 classes, 12 features>"
    assert repr(PartialMahalanobis(components=3, largest=False)) == "PartialMahalanobis(components=3, largest=False)"


# -- what the maths promises ------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(1e-2, 1e2), shift=st.floats(-1e3, 1e3))
def test_scores_do_not_change_under_rotation_scaling_and_translation(seed, scale, shift):
    z, y, x = make_blobs()  # one mixing matrix: a random one may be too ill-conditioned for six digits
    q = torch.linalg.qr(torch.randn(12, 12, dtype=z.dtype, generator=torch.Generator().manual_seed(seed)))[0]
    for detector in ORACLES:
        moved = score(detector(), scale * z @ q + shift, y, scale * x @ q + shift)
        torch.testing.assert_close(moved, score(detector(), z, y, x), rtol=1e-6, atol=1e-6)


def test_rmd_does_not_change_under_any_invertible_linear_map(blobs):
    z, y, x = blobs
    mix = torch.randn(12, 12, dtype=z.dtype) * torch.logspace(-3, 3, 12, dtype=z.dtype)
    torch.testing.assert_close(score(RMD(), z @ mix, y, x @ mix), score(RMD(), z, y, x), rtol=1e-6, atol=1e-6)


def test_rmd_ignores_features_that_all_classes_share(blobs):
    z, y, x = blobs
    noise = torch.randn(len(z), 3, dtype=z.dtype)
    for k in range(5):  # equal means and no sample correlation with the rest within any class
        rows = y == k
        basis = torch.cat([z[rows], torch.ones(60, 1, dtype=z.dtype)], dim=1)
        noise[rows] -= basis @ torch.linalg.lstsq(basis, noise[rows]).solution
    wide, probe = torch.cat([z, noise], 1), torch.cat([x, 100 * torch.randn(len(x), 3, dtype=z.dtype)], 1)
    torch.testing.assert_close(score(RMD(), wide, y, probe), score(RMD(), z, y, x), rtol=1e-8, atol=1e-8)


def test_a_fitted_rmd_has_no_square_matrix():
    z, y, _ = make_blobs(num_classes=4, width=40)
    tensors = RMD().fit_features(z, y).state_dict()["tensors"]
    assert tensors["projection"].shape == (40, 3)
    assert sum(tensor.numel() for tensor in tensors.values()) < 40 * 5


def test_contributions_are_the_terms_of_the_eigen_directions_and_sum_to_the_score(blobs):
    z, y, x = blobs
    for detector in (RMD(normalize=True), MarginalMahalanobis(), PartialMahalanobis(components=4)):
        detector.fit_features(z, y)
        torch.testing.assert_close(detector.contributions(x).sum(1), detector.predict_features(x))
    detector = Mahalanobis().fit_features(z, y)
    means, sigma, *_ = oracle.moments(z, y)
    values, vectors = np.linalg.eigh(sigma)
    centred = np.asarray(x) - np.stack([means[k] for k in detector.nearest_class(x).tolist()])
    expected = ((centred @ vectors) ** 2 / values)[:, ::-1]
    np.testing.assert_allclose(detector.contributions(x), expected, rtol=1e-6, atol=1e-9)


@every_distance
def test_an_exported_module_shares_no_memory_with_the_detector(detector, blobs):
    z, y, x = blobs
    fitted = detector().fit_features(z, y)
    expected = fitted.predict_features(x)
    for tensor in fitted.to_module(torch.float64).buffers():
        tensor.zero_()
    assert torch.equal(detector().load_state_dict(fitted.state_dict()).predict_features(x), expected)


def test_large_batches_are_scored_in_chunks_with_the_same_result():
    z, y, _ = make_blobs(num_classes=3, width=2, per_class=30)
    x = torch.randn(600_000, 2)
    detector = RMD().fit_features(z, y)
    torch.testing.assert_close(detector.predict_features(x)[-5:], detector.predict_features(x[-5:]))


def test_a_single_class_makes_rmd_zero_and_warns(blobs):
    z, _, x = blobs
    y = torch.zeros(len(z), dtype=torch.long)
    with pytest.warns(NumericalWarning, match="single class"):
        scores = score(RMD(), z, y, x)
    assert torch.equal(scores, torch.zeros_like(scores))
    np.testing.assert_allclose(score(Mahalanobis(), z, y, x), oracle.marginal(z, y, x), rtol=1e-8)
    with pytest.warns(NumericalWarning) as caught:
        RMD().fit_features(z, y + 3)  # numbers without a sample are no classes
    assert any("single class" in str(warning.message) for warning in caught)
    RMD().fit_features(z, (torch.arange(len(z)) == 0).long())  # a class of one sample is a class: no warning


def test_numbers_without_a_sample_cost_no_degree_of_freedom():
    z, y, _ = make_blobs()
    with pytest.warns(NumericalWarning) as caught:
        Mahalanobis().fit_features(z[:17], 9 * y[:17])
    assert any("few" in str(warning.message) for warning in caught)
    assert not any("too few" in str(warning.message) for warning in caught)


def test_the_state_moves_with_the_detector(blobs, tmp_path):
    detector = RMD(nn.Linear(12, 12)).fit_features(*blobs[:2])
    detector.save(tmp_path / "rmd")
    assert detector.to("meta") is detector
    assert all(tensor.device.type == "meta" for tensor in detector.state_dict()["tensors"].values())
    assert RMD.load(tmp_path / "rmd", map_location="meta").device.type == "meta"


# -- few samples, dead and dependent features -------------------------------------------------------------------------


def widened(columns):
    def make():
        z, y, x = make_blobs(num_classes=4)
        return torch.cat([z, columns(z, y)], 1), y, torch.cat([x, columns(x, torch.arange(80) % 4)], 1)

    return make


SINGULAR = {
    "N < D": lambda: make_blobs(num_classes=3, width=30, per_class=6),
    "K > D, N - K < D": lambda: make_blobs(num_classes=20, width=25, per_class=2),
    "sums of others": widened(lambda z, y: z[:, :6] @ torch.linspace(-1, 1, 18).view(6, 3).to(z)),
    "duplicates and constants": widened(lambda z, y: torch.cat([2 * z[:, :3] - 1, 0 * z[:, :2] + 0.3], 1)),
    "constant within classes": widened(lambda z, y: nn.functional.one_hot(y, 4)[:, :2].to(z)),
}


@few_told
@pytest.mark.parametrize("make", SINGULAR.values(), ids=SINGULAR)
def test_where_no_class_varies_distances_leave_out_the_direction(make):
    z, y, x = make()
    means, sigma, mu_0, sigma_0, _ = oracle.moments(z, y)
    probe = x.numpy()
    # an orthonormal basis of the range of Sigma: all distances are the ordinary ones in these coordinates
    variances, vectors = np.linalg.eigh(sigma)
    basis = vectors[:, variances > len(sigma) * 2.3e-16 * variances.max()]
    assert basis.shape[1] < z.shape[1]
    sigma, sigma_0 = (basis.T @ matrix @ basis for matrix in (sigma, sigma_0))
    md = np.min([oracle.distance(probe @ basis, mu @ basis, sigma) for mu in means.values()], axis=0)
    md_0 = oracle.distance(probe @ basis, mu_0 @ basis, sigma_0)
    for detector, expected in ((Mahalanobis, md), (MarginalMahalanobis, md_0), (RMD, md - md_0)):
        assert error(score(detector(), z, y, x), expected) < 1e-6
    relative, classes, background = (
        make(covariance="diagonal").fit_features(z, y).predict_features(x) for make in ORACLES
    )
    assert error(relative, classes - background) < 1e-7


@every_distance
@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
@pytest.mark.parametrize("base", [0, 3], ids=["zero", "constant"])
@pytest.mark.parametrize("size", [1, 9])
def test_dust_of_half_precision_is_no_feature(detector, covariance, base, size, blobs):
    """As column 319 of MiniLM's features in float16: zero, but for the smallest numbers of float16 in a few samples."""
    z, y, x = blobs

    def with_dust(features, samples):
        dust = torch.full((len(features), 1), base * 2.0**-24)
        dust[samples] += size * 2.0**-24 * torch.arange(1, len(samples) + 1)[:, None]
        assert torch.equal(dust.half().float(), dust)
        return torch.cat([features[:, :5], dust.to(features), features[:, 5:]], 1)

    with pytest.warns(NumericalWarning, match=r"rank 12 of 13\."):
        fitted = detector(covariance=covariance).fit_features(with_dust(z, [7, 100, 101]), y)
    expected = score(detector(covariance=covariance), z, y, x)
    torch.testing.assert_close(fitted.predict_features(with_dust(x, [3, 4])), expected, rtol=1e-9, atol=1e-9)


@every_distance
def test_a_small_feature_that_half_precision_resolves_counts(detector, blobs):
    z, y, x = blobs
    unit = 20 * 2.0**-24 / z[:, 3].std()
    small, probe = (torch.cat([a[:, :3], (a[:, 3:4] * unit).half().to(a) / unit, a[:, 4:]], 1) for a in (z, x))
    expected = score(detector(), small, y, probe)
    for features in (small, probe):
        features[:, 3] *= unit
    assert error(score(detector(), small, y, probe), expected) < 1e-6


@every_distance
@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
def test_an_honest_feature_of_small_units_counts_as_if_it_were_rescaled(detector, covariance, blobs):
    z, y, x = blobs
    units = torch.ones(12, dtype=z.dtype)
    units[3] = 1e-8 / z[:, 3].std()
    expected = score(detector(covariance=covariance), z, y, x)
    for dtype, mean, tolerance in ((torch.float64, 0, 1e-6), (torch.float64, 0.5, 1e-5), (torch.float32, 0, 5e-5)):
        small, probe = ((a * units + mean * (units < 1)).to(dtype) for a in (z, x))
        assert error(score(detector(covariance=covariance), small, y, probe), expected) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("unit", [1.0, 1e-18, 1e9], ids=["", "all small", "all large"])
def test_units_from_1e_minus_8_to_1e8_lose_no_digits(dtype, unit):
    z, y, x = make_blobs(num_classes=3, width=5, per_class=12)
    units = unit * torch.logspace(-8, 8, 5, dtype=torch.float64)
    small, probe = (z * units).to(dtype), (x * units).to(dtype)
    z, x = small.double() / units, probe.double() / units
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    for detector, expected in ORACLES.items():
        assert error(score(detector(), small, y, probe), expected(z, y, x)) < tolerance


def test_no_variance_at_all_is_an_error():
    z, y = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([0, 1])
    for detector in (RMD(), Mahalanobis(), MarginalMahalanobis(), FusedRMD(), PartialMahalanobis(components=1)):
        with pytest.raises(ValueError, match="varies"):
            detector.fit_features(z, y)


# -- digits -----------------------------------------------------------------------------------------------------------


@every_distance
@pytest.mark.parametrize(
    ("dtype", "mean"), [(torch.bfloat16, 100.0), (torch.float16, 100.0), (torch.float32, 1e4), (torch.float64, 1e4)]
)
def test_maps_of_any_mean_and_precision_are_scored_as_the_textbook_scores_their_means(detector, dtype, mean):
    z, y, x = make_blobs()
    z, x = ((a[..., None, None] + torch.randn(*a.shape, 5, 5).double() + mean).to(dtype) for a in (z, x))
    pooled_z, pooled_x = (a.double().mean((2, 3)) for a in (z, x))
    assert error(score(detector(), z, y, x), ORACLES[detector](pooled_z, y, pooled_x)) < 5e-5


@every_distance
@pytest.mark.parametrize("options", [{"covariance": "diagonal"}, {"normalize": True}], ids=str)
def test_float32_features_of_mean_1e4_keep_their_digits(detector, options, blobs):
    z, y, x = (part + 10_000.3 if part.is_floating_point() else part for part in blobs)
    z, x = z.float(), x.float()
    exact = score(detector(**options), z.double(), y, x.double())
    assert error(score(detector(**options), z, y, x), exact) < 5e-5


@every_distance
def test_condition_numbers_of_1e8_and_1e12(detector):
    for condition, exact, single in ((1e8, 1e-8, 5e-5), (1e12, 1e-3, 1e-2)):
        generator = torch.Generator().manual_seed(0)
        q = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))[0]
        mix = (q * torch.logspace(0, -0.5 * np.log10(condition), 64, dtype=torch.float64)) @ q.T
        y = torch.arange(2000) % 10
        centres = torch.randn(10, 64, generator=generator, dtype=torch.float64)
        z = (torch.randn(2000, 64, generator=generator, dtype=torch.float64) + centres[y]) @ mix
        x = 1.5 * torch.randn(200, 64, generator=generator, dtype=torch.float64) @ mix
        for dtype, tolerance in ((torch.float64, exact), (torch.float32, single)):
            z, x = z.to(dtype), x.to(dtype)
            expected = ORACLES[detector](z, y, x)
            scores = score(detector(), z, y, x).double().numpy()
            assert np.abs(scores - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize("detector", [RMD, Mahalanobis])
def test_classes_that_lie_far_apart_are_scored_in_float32(detector):
    """As in collapsed networks: the between-class variance is a thousand times that within."""
    generator = torch.Generator().manual_seed(0)
    # nine directions share the variance of forty features
    centres = (1000 * 9 / 40) ** 0.5 * torch.randn(10, 40, generator=generator)
    y = torch.arange(2000) % 10
    z = torch.randn(2000, 40, generator=generator) + centres[y]
    x = torch.randn(500, 40, generator=generator) + centres[y[:500]]
    fitted = detector().fit_features(z, y)
    assert fitted.to_module().shift.dtype == torch.float32
    expected = ORACLES[detector](z, y, x)
    classes = fitted.class_scores(x)
    for scores in (fitted.predict_features(x), classes.amin(1), fitted.contributions(x).double().sum(1)):
        assert error(scores, expected) < 5e-5
    assert torch.equal(classes.argmin(1), y[:500])


def test_half_precision_is_widened_and_autocast_has_no_influence():
    z, y, x = make_blobs(dtype=torch.bfloat16)
    detector = RMD().fit_features(z, y)
    scores = detector.predict_features(x)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, detector.predict_features(x.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(score(RMD(), z, y, x), scores)


# -- the background of another corpus ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus():
    torch.manual_seed(0)
    return 3 * torch.randn(500, 12, dtype=torch.float64) @ torch.randn(12, 12, dtype=torch.float64) + 7


@pytest.mark.parametrize(
    ("options", "covariance"),
    [
        ({}, lambda sigma: sigma),
        ({"shrinkage": 0.3}, lambda sigma: 0.7 * sigma + 0.3 * np.trace(sigma) / 12 * np.eye(12)),
        ({"covariance": "diagonal"}, lambda sigma: np.diag(np.diag(sigma))),
    ],
    ids=["tied", "shrunk", "diagonal"],
)
def test_with_another_background_rmd_is_the_textbooks_difference(options, covariance, corpus, blobs):
    z, y, x = blobs
    means, sigma, *_ = oracle.moments(z, y)
    sigma_0 = covariance(np.cov(corpus.numpy(), rowvar=False, bias=True))
    near = np.stack([oracle.distance(x, mu, covariance(sigma)) for mu in means.values()], axis=1)
    expected = near - oracle.distance(x, corpus.numpy().mean(0), sigma_0)[:, None]
    detector = RMD(**options).fit_features(z, y, background=corpus)
    scale = 1e-9 * np.abs(expected).max()
    np.testing.assert_allclose(detector.class_scores(x), expected, rtol=1e-9, atol=scale)
    np.testing.assert_allclose(detector.predict_features(x), expected.min(1), rtol=1e-9, atol=scale)
    np.testing.assert_allclose(detector.contributions(x).sum(1), expected.min(1), rtol=1e-9, atol=scale)
    assert error(detector.predict_features(x.float()), expected.min(1)) < 1e-4
    np.testing.assert_allclose(detector.background_mu, corpus.mean(0), rtol=1e-5)
    attribute = detector.background_cov if detector.background_cov.ndim == 2 else detector.background_cov.diag()
    np.testing.assert_allclose(attribute, sigma_0, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("apart", [1.0, 20.0, 1e4])
def test_a_background_that_lies_far_away_costs_no_digits_of_float32_features(apart):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(3000) % 20
    centres = 0.4 * torch.randn(20, 200, generator=generator)
    z, x = (torch.randn(len(rows), 200, generator=generator) + centres[rows] for rows in (y, y[:500]))
    corpus = 3 * torch.randn(1000, 200, generator=generator) + apart
    scores = RMD().fit_features(z, y, background=corpus).predict_features(x)
    wide = corpus.double().numpy()
    far = oracle.distance(x, wide.mean(0), np.cov(wide, rowvar=False, bias=True))
    # the far distance is nearly the same for all samples: what tells them apart is the near one
    near = oracle.mahalanobis(z, y, x)
    assert np.abs(scores.numpy() - (near - far)).max() < 1e-4 * near.std()


def test_the_training_samples_as_their_own_background_are_no_background(blobs):
    z, y, x = blobs
    own = RMD().fit_features(z, y, background=z).predict_features(x)
    torch.testing.assert_close(own, score(RMD(), z, y, x), rtol=1e-9, atol=1e-9)


def test_a_background_comes_as_features_loader_or_moments_and_stays(corpus, blobs, tmp_path):
    z, y, x = blobs
    expected = RMD(keep_moments=True).fit_features(z, y, background=corpus)
    loaders = [DataLoader(TensorDataset(*pair), 64) for pair in ((z, y), (corpus, torch.full((500,), -1)))]
    moments = collected(corpus, torch.arange(500) % 7)
    expected.save(tmp_path / "rmd")
    for detector in (
        RMD(nn.Identity()).fit(loaders[0], background=loaders[1]),
        RMD().fit_features(z, y, background=moments),
        RMD().fit_moments(collected(z, y), background=moments),
        Calibrated(RMD()).fit_features(z, y, background=corpus),
        load_detector(tmp_path / "rmd"),
        RMD(keep_moments=True).fit_features(z[:200], y[:200], background=corpus).update(z[200:], y[200:]),
    ):
        torch.testing.assert_close(detector.predict_features(x), expected.predict_features(x), rtol=1e-8, atol=1e-8)


def test_backgrounds_that_do_not_fit_are_refused(corpus, blobs):
    z, y, _ = blobs
    normalised = collected(corpus, torch.zeros(500, dtype=torch.long), normalize=True)
    for background, key in ((corpus[:4], "3 of 12"), (corpus[:, :5], "same layer"), (normalised, "normalize")):
        with pytest.raises(ValueError, match=key):
            RMD().fit_features(z, y, background=background)
