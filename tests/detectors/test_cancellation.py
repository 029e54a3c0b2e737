"""What a subtraction leaves: few digits are told, none are refused, and rounding never passes for variance."""

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs

from rmd_plugin import ClassMoments, Mahalanobis, NumericalWarning


def collect(z, y, **options):
    metric = ClassMoments(**options)
    metric.update(z, y)
    return metric.compute()


def outliers(scale):
    """Samples of the classes, far out in all directions."""
    z, y, _ = make_blobs(seed=1, per_class=10)
    return scale * z, y


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("scale", "digits"), [(1e4, 6), (1e6, 1)])
def test_lost_digits_are_told_and_no_more_are_lost(diagonal, scale, digits):
    z, y, _ = make_blobs()
    far = collect(*outliers(scale), diagonal=diagonal)
    whole = collect(z, y, diagonal=diagonal) + far
    with pytest.warns(
        NumericalWarning, match=r"nearly cancelled: the smallest keeps about \d digits.*Fit again"
    ) as told:
        left = whole - far
    said = int(str(told[0].message).split(" about ")[1].split()[0])
    assert said <= digits
    sigma = oracle.moments(z, y)[1]
    # the ratio of both along every direction, or of every feature
    errors = np.linalg.eigvals(np.linalg.solve(sigma, left.covariance)).real - 1 if not diagonal else None
    errors = left.covariance.numpy() / sigma.diagonal() - 1 if diagonal else errors
    assert 1e-12 < np.abs(errors).max() < 10.0**-said


def test_nothing_is_said_while_there_are_enough_digits():
    z, y, _ = make_blobs()
    far = collect(*outliers(30.0))
    left = collect(z, y) + far - far
    np.testing.assert_allclose(left.covariance, oracle.moments(z, y)[1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_difference_without_digits_is_refused(diagonal):
    z, y, _ = make_blobs()
    far = collect(*outliers(1e10), diagonal=diagonal)
    with pytest.raises(ValueError, match=r"nothing is left of the variance.*which is rounding. Fit again"):
        collect(z, y, diagonal=diagonal) + far - far


@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
def test_a_feature_that_has_become_constant_is_left_out_as_in_a_new_fit(covariance):
    z, y, x = make_blobs()
    z[:100, 4] = 1.5
    detector = Mahalanobis(covariance=covariance).fit_features(z, y)
    with pytest.warns(NumericalWarning) as told:
        detector.forget(z[100:], y[100:])
    assert "1 of 12 directions have lost all variance but rounding" in str(told[0].message)
    assert "has rank 11 of 12" in str(told[1].message)
    with pytest.warns(NumericalWarning, match="has rank 11 of 12"):
        fresh = Mahalanobis(covariance=covariance).fit_features(z[:100], y[:100])
    torch.testing.assert_close(detector.predict_features(x), fresh.predict_features(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("left", [8, 300 - 1])
@pytest.mark.filterwarnings("ignore:.*has rank")
def test_directions_that_few_samples_leave_empty_hold_no_rounding(left):
    z, y, x = make_blobs(width=400)
    z, x = z @ torch.randn(400, 400, dtype=torch.float64), x @ torch.randn(400, 400, dtype=torch.float64)
    detector = Mahalanobis().fit_features(z, y).forget(z[left:], y[left:])
    fresh = Mahalanobis().fit_features(z[:left], y[:left])
    assert detector.state_dict()["tensors"]["projection"].shape == (400, left - 5)
    torch.testing.assert_close(detector.predict_features(x), fresh.predict_features(x), rtol=1e-6, atol=1e-6)


def test_features_that_never_vary_are_nothing_to_tell():
    z, y, _ = make_blobs()
    z[:, 2], z[:, 5] = 1.2345e4, 0.0
    z[:, 7] = z[:, 8]
    left = collect(z, y) - collect(z[50:], y[50:])
    np.testing.assert_allclose(left.covariance, oracle.moments(z[:50], y[:50])[1], rtol=1e-9, atol=1e-9)


def test_badly_scaled_features_lose_nothing_when_little_is_taken_away():
    z, y, _ = make_blobs()
    z = z * torch.logspace(0, -9, 12, dtype=torch.float64)
    left = collect(z, y) - collect(z[290:], y[290:])
    np.testing.assert_allclose(left.covariance, oracle.moments(z[:290], y[:290])[1], rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:.*has rank")
def test_features_that_were_computed_anew_are_taken_away_with_a_word_about_it():
    z, y, x = make_blobs(width=40, per_class=6)
    again = z * (1 + 1e-7 * torch.randn_like(z))
    detector = Mahalanobis().fit_features(z, y)
    with pytest.warns(NumericalWarning, match=r"differ from those added by about \de-0\d of their variance"):
        detector.forget(again[:3], y[:3])
    fresh = Mahalanobis().fit_features(z[3:], y[3:])
    torch.testing.assert_close(detector.predict_features(x), fresh.predict_features(x), rtol=1e-3, atol=1e-3)
