import numpy as np
import pytest
import torch
from sklearn.covariance import OAS, shrunk_covariance

from rmd_plugin.detectors.functional import class_quadratics, nearest, oas_shrinkage, shrink, whiten
from rmd_plugin.encoding.features import pool_features


def covariance(width=6, samples=50, seed=0):
    z = torch.randn(samples, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z = z * torch.arange(1, width + 1)
    return z, z.T @ z / samples


def test_oas_intensity_equals_scikit_learn():
    z, sigma = covariance()
    assert oas_shrinkage(sigma, len(z)) == pytest.approx(OAS(assume_centered=True).fit(z.numpy()).shrinkage_, rel=1e-12)


def test_oas_of_a_multiple_of_the_identity_is_defined():
    assert 0.0 <= oas_shrinkage(3.0 * torch.eye(4, dtype=torch.float64), 10) <= 1.0


@pytest.mark.parametrize("intensity", [0.0, 0.3, 1.0])
def test_shrink_equals_scikit_learn(intensity):
    _, sigma = covariance()
    expected = shrunk_covariance(sigma.numpy(), shrinkage=intensity)
    np.testing.assert_allclose(shrink(sigma, intensity), expected, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(shrink(sigma.diagonal(), intensity), np.diag(expected), rtol=1e-13)


@pytest.mark.parametrize("eigenvectors", [False, True])
def test_whitening_makes_the_covariance_the_identity(eigenvectors):
    _, sigma = covariance()
    a = whiten(sigma, eigenvectors=eigenvectors).projection
    torch.testing.assert_close(a.T @ sigma @ a, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(a @ a.T, torch.linalg.inv(sigma))


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_whitening_of_a_singular_covariance_is_the_pseudo_inverse(scale):
    z, _ = covariance(width=3)
    z[:, 1] *= scale
    z = torch.cat([z, z[:, :1], torch.zeros(len(z), 1)], dim=1)  # a duplicate and a dead feature
    sigma = z.T @ z / len(z)
    a = whiten(sigma).projection
    assert a.shape == (5, 3)
    torch.testing.assert_close(a.T @ sigma @ a, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(a @ a.T, torch.linalg.pinv(sigma, hermitian=True))


def test_whitening_does_not_depend_on_units():
    z, sigma = covariance()
    scale = torch.logspace(-8, 8, 6, dtype=torch.float64)
    a, b = whiten(sigma).projection, whiten(scale[:, None] * sigma * scale).projection
    unscaled, rescaled = (torch.linalg.vector_norm(u, dim=1) for u in (z @ a, z * scale @ b))
    torch.testing.assert_close(unscaled, rescaled, rtol=1e-12, atol=0)


def test_maps_are_averaged_over_space_and_other_shapes_refused():
    maps = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(pool_features(maps), maps.flatten(2).mean(2))
    for shape in [(3,), (2, 3, 4), (2, 3, 4, 5, 6)]:
        with pytest.raises(ValueError, match="must have shape"):
            pool_features(torch.zeros(shape))


def test_quadratics_with_unit_weights_are_squared_distances():
    u, points = torch.randn(7, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    offsets, ones = points.square().sum(1), torch.ones(4, dtype=torch.float64)
    expected = torch.cdist(u, points).square()
    torch.testing.assert_close(class_quadratics(u, ones, points, offsets), expected)
    assert torch.equal(nearest(u, points, offsets), expected.argmin(1))
