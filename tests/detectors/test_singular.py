"""One definition of the distances where covariances are singular or badly scaled: RMD = MD - MMD = the textbook."""

import mpmath
import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs

from rmd_plugin import RMD, Mahalanobis, MarginalMahalanobis

pytestmark = pytest.mark.filterwarnings("ignore::rmd_plugin.NumericalWarning")


def with_columns(z, x, make):
    return torch.cat([z, make(z)], 1), torch.cat([x, make(x)], 1)


def few_samples(width, per_class, classes=3):
    return make_blobs(num_classes=classes, width=width, per_class=per_class)


def single_samples():
    z, _, x = make_blobs(num_classes=10, width=8, per_class=1)
    return z, torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 6, 7]), x


def duplicated():
    z, y, x = make_blobs()
    z, x = with_columns(z, x, lambda a: 2 * a[:, :3] - 1)
    return z, y, x


def constant():
    z, y, x = make_blobs()
    z, x = with_columns(z, x, lambda a: torch.full((len(a), 2), 0.3, dtype=a.dtype))
    return z, y, x


def constant_within_classes():
    z, y, x = make_blobs(num_classes=4)
    z = torch.cat([z, torch.nn.functional.one_hot(y, 4)[:, :2].to(z.dtype)], 1)
    return z, y, torch.cat([x, torch.rand(len(x), 2, dtype=x.dtype)], 1)


def in_units(make, low, high):
    z, y, x = make()
    scale = torch.logspace(low, high, z.shape[1], dtype=z.dtype)
    return z * scale, y, x * scale


SINGULAR = {
    "N < D": lambda: few_samples(30, 6),
    "N - K < D < N": lambda: few_samples(17, 6),
    "N = D": lambda: few_samples(18, 6),
    "K > D, N > D": lambda: few_samples(6, 5, classes=20),
    "two classes, N < D": lambda: few_samples(40, 5, classes=2),
    "one sample in most classes": single_samples,
    "one class": lambda: few_samples(30, 12, classes=1),
    "duplicates": duplicated,
    "constant": constant,
    "constant within classes": constant_within_classes,
    "N < D, units 1e-2..1e2": lambda: in_units(lambda: few_samples(30, 6), -2, 2),
}
every_singular_case = pytest.mark.parametrize("make", SINGULAR.values(), ids=SINGULAR)


def fitted(z, y, **options):
    return [detector(**options).fit_features(z, y) for detector in (RMD, Mahalanobis, MarginalMahalanobis)]


def assert_close(found, expected, tolerance):
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    spread = max(expected.std(), 1.0)
    assert np.abs(found - expected).max() / spread < tolerance


@every_singular_case
@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
def test_rmd_is_mahalanobis_minus_marginal(make, covariance):
    z, y, x = make()
    rmd, classes, background = fitted(z, y, covariance=covariance)
    for probe in (x, z):
        expected = classes.class_scores(probe) - background.predict_features(probe)[:, None]
        assert_close(rmd.class_scores(probe), expected, 1e-7)
        torch.testing.assert_close(rmd.contributions(probe).sum(1), rmd.predict_features(probe))


@every_singular_case
def test_distances_are_those_of_the_textbook_where_the_classes_vary(make):
    z, y, x = make()
    means, sigma, mu_0, sigma_0, _ = oracle.moments(z, y)
    inverse = np.linalg.pinv(sigma, rcond=len(sigma) * 2.3e-16, hermitian=True)
    # an orthonormal basis of the range of Sigma: MD_0 is the ordinary distance in these coordinates
    variances, vectors = np.linalg.eigh(sigma)
    basis = vectors[:, variances > len(sigma) * 2.3e-16 * variances.max()]
    inverse_0 = basis @ np.linalg.inv(basis.T @ sigma_0 @ basis) @ basis.T

    def distance(mu, inverse):
        centred = np.asarray(x) - mu
        return ((centred @ inverse) * centred).sum(1)

    md = np.stack([distance(mu, inverse) for mu in means.values()], 1).min(1)
    md_0 = distance(mu_0, inverse_0)
    rmd, classes, background = fitted(z, y)
    assert_close(classes.predict_features(x), md, 1e-6)
    assert_close(background.predict_features(x), md_0, 1e-6)
    assert_close(rmd.predict_features(x), md - md_0, 1e-6)


def test_with_few_samples_ood_samples_do_not_look_like_id_ones():
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(20, 64, generator=generator)  # half of them are ID classes

    def draw(classes, count):
        y = classes[torch.arange(len(classes) * count) % len(classes)]
        return centres[y] + torch.randn(len(y), 64, generator=generator), y

    z, y = draw(torch.arange(10), 5)  # 50 samples of 64 features
    new, ood = draw(torch.arange(10), 30)[0], draw(torch.arange(10, 20), 30)[0]
    rmd = RMD().fit_features(z, y)
    assert oracle.auroc(rmd.predict_features(new), rmd.predict_features(ood)) > 0.9


def exact(z, y, x):
    """MD and RMD with fifty digits, by the formulas of the paper."""
    with mpmath.workdps(50):
        rows = [mpmath.matrix(row.tolist()) for row in z]
        labels = y.tolist()
        total = len(rows)

        def mean(chosen):
            return sum(chosen[1:], chosen[0]) / len(chosen)

        def covariance(centred):
            return sum((r * r.T for r in centred[1:]), centred[0] * centred[0].T) / total

        means = {k: mean([r for r, label in zip(rows, labels, strict=True) if label == k]) for k in set(labels)}
        mu_0 = mean(rows)
        inverse = covariance([r - means[k] for r, k in zip(rows, labels, strict=True)]) ** -1
        inverse_0 = covariance([r - mu_0 for r in rows]) ** -1
        md, rmd = [], []
        for row in x:
            point = mpmath.matrix(row.tolist())
            nearest = min(((point - mu).T * inverse * (point - mu))[0] for mu in means.values())
            md.append(float(nearest))
            rmd.append(float(nearest - ((point - mu_0).T * inverse_0 * (point - mu_0))[0]))
    return np.array(md), np.array(rmd)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_units_from_1e_minus_8_to_1e8_lose_no_digits(dtype):
    z, y, x = in_units(lambda: make_blobs(num_classes=3, width=5, per_class=12), -8, 8)
    z, x = z.to(dtype), x[:12].to(dtype)
    md, rmd = exact(z, y, x)
    relative, classes, background = fitted(z, y)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    assert_close(classes.predict_features(x), md, tolerance)
    assert_close(relative.predict_features(x), rmd, tolerance)
    assert_close(classes.predict_features(x) - background.predict_features(x), rmd, 2 * tolerance)
    # beside constant features too
    z, x = with_columns(z, x, lambda a: torch.full((len(a), 1), 7.0, dtype=a.dtype))
    for detector, expected in zip(fitted(z, y)[:2], (rmd, md), strict=True):
        assert_close(detector.predict_features(x), expected, tolerance)
