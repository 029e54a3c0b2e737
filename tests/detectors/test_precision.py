"""No digits are lost on the way: half precision, large means, autocast, numbers at the end of the range."""

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs

from rmd_plugin import RMD, FlowLikelihood, FusedRMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis, RelativeFlow
from rmd_plugin.detectors.mahalanobis import GaussianDetector

ORACLES = {RMD: oracle.rmd, Mahalanobis: oracle.mahalanobis, MarginalMahalanobis: oracle.marginal}
GAUSSIAN = {
    "rmd": RMD,
    "rmd diagonal": lambda: RMD(covariance="diagonal"),
    "rmd normalized": lambda: RMD(normalize=True, shrinkage=0.1),
    "mahalanobis": Mahalanobis,
    "marginal": MarginalMahalanobis,
    "partial": lambda: PartialMahalanobis(components=3),
    "fused": FusedRMD,
    "fused with a head": lambda: FusedRMD(w=torch.linspace(-1, 1, 60).view(5, 12)),
}
FLOWS = {
    "flow": lambda: FlowLikelihood(max_epochs=2, progress=False),
    "relative flow": lambda: RelativeFlow(max_epochs=2, progress=False),
}
every_detector = pytest.mark.parametrize("make", [*GAUSSIAN.values(), *FLOWS.values()], ids=[*GAUSSIAN, *FLOWS])


def error(scores, expected):
    """Largest error relative to the spread of the scores."""
    return np.abs(np.asarray(scores, dtype=np.float64) - expected).max() / np.std(expected)


def maps(features, generator):
    noise = torch.randn(*features.shape, 5, 5, generator=generator, dtype=features.dtype)
    return features[:, :, None, None] + noise


@pytest.mark.parametrize("detector", ORACLES)
@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        (torch.bfloat16, 100.0),
        (torch.float16, 100.0),
        *((dtype, mean) for dtype in (torch.float32, torch.float64) for mean in (0.0, 100.0, 1e4)),
    ],
)
def test_maps_are_scored_as_the_textbook_scores_their_means(detector, dtype, mean):
    generator = torch.Generator().manual_seed(0)
    z, y, x = make_blobs()
    z, x = ((maps(a, generator) + mean).to(dtype) for a in (z, x))
    pooled_z, pooled_x = (a.double().mean((2, 3)) for a in (z, x))
    scores = detector().fit_features(z, y).predict_features(x)
    assert error(scores, ORACLES[detector](pooled_z, y, pooled_x)) < 5e-5


@pytest.mark.parametrize("detector", ORACLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [0.0, 10.0, 1e3, 1e4])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30, 3e32])
def test_normalized_features_of_any_mean_keep_their_digits(detector, dtype, mean, size):
    z, y, x = make_blobs()
    z, x = ((size * (a + mean)).to(dtype) for a in (z, x))
    unit_z, unit_x = (a.double() / a.double().norm(dim=1, keepdim=True) for a in (z, x))
    scores = detector(normalize=True).fit_features(z, y).predict_features(x)
    assert error(scores, ORACLES[detector](unit_z, y, unit_x)) < (5e-5 if dtype == torch.float32 else 1e-6)


@pytest.mark.slow
@every_detector
def test_autocast_does_not_touch_the_module_nor_its_export(make):
    z, y, x = make_blobs(dtype=torch.float32)
    module = make().fit_features(z, y).to_module()
    expected = module(x)
    program = torch.export.export(module, (x,)).module()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x), expected)
        torch.testing.assert_close(program(x), expected, rtol=1e-5, atol=1e-4)
        inside = module.class_scores(x)
    assert torch.equal(inside, module.class_scores(x))


@every_detector
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_features_have_finite_scores_and_others_have_none(make, dtype):
    z, y, x = make_blobs(dtype=dtype)
    detector = make().fit_features(z, y)
    largest = torch.finfo(dtype).max
    usual, module = detector.predict_features(x), detector.to_module(dtype)
    for size in (1e18, 1e25, 3e38 if dtype == torch.float32 else 1e300, largest):
        huge = torch.randn(6, 12, dtype=torch.float64).clamp(-1, 1).mul(size).to(dtype)
        huge[0] = size
        huge[1, 3] = -size
        for scores in (detector.predict_features(huge), module(huge)):
            assert scores.isfinite().all(), size
        if isinstance(detector, GaussianDetector):
            assert detector.contributions(huge).isfinite().all()
            assert detector.normalize or (detector.predict_features(huge) > usual.max()).all()
        for bad in (torch.nan, torch.inf, -torch.inf):
            broken = huge.clone()
            broken[2, 5] = bad
            for scores in (detector.predict_features(broken), module(broken)):
                assert scores.isnan().tolist() == [False, False, True, False, False, False]
    spatial = torch.full((2, 12, 4, 4), 3e38, dtype=dtype)
    assert detector.predict_features(spatial).isfinite().all()
    assert module(spatial).isfinite().all()


@pytest.mark.parametrize("size", [1e-37, 1e-20, 1e20, 1e37])
def test_features_of_any_size_that_float32_holds_are_fitted_and_scored(size):
    z, y, x = make_blobs()
    z, x = (z * size / 100).float(), (x * size / 100).float()
    for detector, expected in ORACLES.items():
        exact = expected(z.double() / size, y, x.double() / size)
        assert error(detector().fit_features(z, y).predict_features(x), exact) < 5e-5


def test_normalized_features_of_any_size_that_float64_holds_are_scored():
    z, y, x = make_blobs()
    detector = RMD(normalize=True).fit_features(z * 1e-250, y)
    expected = RMD(normalize=True).fit_features(z, y).predict_features(x)
    torch.testing.assert_close(detector.predict_features(x * 1e300), expected)


def test_features_whose_squares_overflow_are_refused():
    z, y, _ = make_blobs()
    with pytest.raises(ValueError, match="overflow float64"):
        RMD().fit_features(z * 1e200, y)


@pytest.mark.parametrize("detector", [RMD, Mahalanobis])
def test_classes_that_lie_far_apart_are_scored_in_float32(detector):
    """As in collapsed networks: the between-class variance is a thousand times that within."""
    generator = torch.Generator().manual_seed(0)
    # nine directions share the variance of forty features
    centres = (1000 * 9 / 40) ** 0.5 * torch.randn(10, 40, generator=generator, dtype=torch.float64)
    y = torch.arange(2000) % 10
    z = torch.randn(2000, 40, generator=generator, dtype=torch.float64) + centres[y]
    x = torch.randn(500, 40, generator=generator, dtype=torch.float64) + centres[torch.arange(500) % 10]
    fitted = detector().fit_features(z.float(), y)
    assert fitted.to_module().shift.dtype == torch.float32
    x = x.float()
    exact = oracle.rmd if detector is RMD else oracle.mahalanobis
    expected = torch.as_tensor(exact(z.float(), y, x))
    error = (fitted.predict_features(x).double() - expected).abs().max()
    assert error < 5e-5 * expected.std()
    # the scores of all classes have no such form: they are computed in float64
    classes = fitted.class_scores(x)
    assert (classes.amin(1).double() - expected).abs().max() < 5e-5 * expected.std()
    assert torch.equal(classes.argmin(1), torch.arange(500) % 10)
    terms = fitted.contributions(x).double().sum(1)
    assert (terms - expected).abs().max() < 5e-5 * expected.std()
