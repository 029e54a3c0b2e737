"""RMD against OpenOOD's RMDS on the same features: its formula, with scikit-learn's covariance as it uses it."""

import numpy as np
import pytest
import torch
from conftest import make_blobs
from sklearn.covariance import EmpiricalCovariance

from rmd_plugin import RMD


def rmds(train, labels, features):
    """Confidence of OpenOOD's RMDS: the largest of MD_0 - MD_k over the classes, in the precision of the features."""
    means = np.stack([train[labels == label].mean(0) for label in range(labels.max() + 1)])

    def distance(difference, centred):
        precision = EmpiricalCovariance(assume_centered=False).fit(centred).precision_.astype(train.dtype)
        return np.einsum("nd,de,ne->n", difference, precision, difference)

    background = distance(features - train.mean(0), train - train.mean(0))
    classes = np.stack([distance(features - mean, train - means[labels]) for mean in means], axis=1)
    return (background[:, None] - classes).max(1)


def largest_difference(z, y, x):
    """Between our scores and the negative confidences, in parts of their spread."""
    expected = -rmds(z.numpy(), y.numpy(), x.numpy()).astype(np.float64)
    found = RMD().fit_features(z, y).predict_features(x).double().numpy()
    return np.abs(found - expected).max() / (expected.max() - expected.min())


@pytest.mark.parametrize("num_classes", [10, 100])
def test_rmd_is_openood_s_rmds_on_features_like_a_network_s(num_classes):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(50 * num_classes) % num_classes
    centres = 2 * torch.randn(num_classes, 96, generator=generator)

    def pooled(centre):  # after a ReLU, in single precision as OpenOOD has them
        return (torch.randn(len(centre), 96, generator=generator) + centre).relu()

    x = torch.cat([pooled(centres[y[:200]]), pooled(torch.zeros(200, 96)), pooled(3 + torch.zeros(200, 96))])
    assert largest_difference(pooled(centres[y]), y, x) <= 1e-4


@pytest.mark.parametrize(("num_classes", "width", "per_class"), [(10, 64, 300), (5, 12, 60), (2, 8, 500)])
def test_on_badly_conditioned_features_rmd_is_what_rmds_would_be_in_double_precision(num_classes, width, per_class):
    assert largest_difference(*make_blobs(num_classes, width, per_class)) <= 1e-6  # scores are in single precision
    z, y, x = make_blobs(num_classes, width, per_class, dtype=torch.float32)
    exact = -rmds(z.double().numpy(), y.numpy(), x.double().numpy())
    ours = RMD().fit_features(z, y).predict_features(x).double().numpy()
    assert np.abs(ours - exact).max() <= 1e-5 * (exact.max() - exact.min())
