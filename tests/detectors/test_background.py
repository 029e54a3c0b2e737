"""RMD with the background of another corpus is the textbook's difference of two distances."""

import numpy as np
import oracle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, Calibrated, ClassMoments, load_detector


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    y = torch.arange(300) % 3
    mix = torch.randn(6, 6, dtype=torch.float64)
    z = torch.randn(300, 6, dtype=torch.float64) @ mix + 4.0 * torch.eye(3, 6, dtype=torch.float64)[y] + 10
    corpus = 3 * torch.randn(500, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64) + 7
    return z, y, corpus, 2 * torch.randn(40, 6, dtype=torch.float64) @ mix + 10


def textbook(data, covariance=lambda sigma: sigma):
    """MD_k - MD_0, shape (40, 3), with the mean and covariance of the corpus."""
    z, y, corpus, new = (part.numpy() for part in data)
    means, sigma, *_ = oracle.moments(z, y)
    sigma_0 = np.cov(corpus, rowvar=False, bias=True)
    near = np.stack([oracle.distance(new, means[k], covariance(sigma)) for k in range(3)], axis=1)
    return near - oracle.distance(new, corpus.mean(0), covariance(sigma_0))[:, None]


def close(found, expected):
    return np.allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def test_scores_are_the_textbooks(data):
    z, y, corpus, new = data
    detector = RMD().fit_features(z, y, background=corpus)
    expected = textbook(data)
    assert close(detector.predict_features(new), expected.min(1))
    assert close(detector.class_scores(new), expected)
    assert close(detector.contributions(new).sum(1), expected.min(1))
    assert np.array_equal(detector.nearest_class(new).numpy(), expected.argmin(1))


def test_float32_features_are_scored_as_well(data):
    z, y, corpus, new = data
    found = RMD().fit_features(z, y, background=corpus).predict_features(new.float())
    expected = textbook(data).min(1)
    assert np.abs(found.numpy() - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize(
    ("options", "covariance"),
    [
        ({"shrinkage": 0.3}, lambda sigma: 0.7 * sigma + 0.3 * np.trace(sigma) / 6 * np.eye(6)),
        ({"covariance": "diagonal"}, lambda sigma: np.diag(np.diag(sigma))),
    ],
)
def test_options_hold_for_both_gaussians(data, options, covariance):
    z, y, corpus, new = data
    found = RMD(**options).fit_features(z, y, background=corpus).class_scores(new)
    assert close(found, textbook(data, covariance))


def test_the_training_samples_as_their_own_background_are_no_background(data):
    z, y, _, new = data
    found = RMD().fit_features(z, y, background=z).predict_features(new)
    assert torch.allclose(found, RMD().fit_features(z, y).predict_features(new), rtol=1e-9, atol=1e-9)


def test_a_single_class_has_a_score_with_another_background(data):
    z, _, corpus, new = data
    y = torch.zeros(300, dtype=torch.long)
    expected = oracle.mahalanobis(z, y, new) - oracle.marginal(corpus, torch.zeros(500), new)
    assert close(RMD().fit_features(z, y, background=corpus).predict_features(new), expected)


def test_a_loader_features_and_moments_give_the_same(data):
    z, y, corpus, new = data
    expected = RMD().fit_features(z, y, background=corpus).predict_features(new)
    ood = torch.full((500,), -1)  # as the framework labels such a corpus
    loaders = [DataLoader(TensorDataset(*pair), 64) for pair in ((z, y), (corpus, ood))]
    metric = ClassMoments()
    metric.update(corpus, torch.arange(500) % 7)
    fits = [
        RMD(nn.Identity()).fit(loaders[0], background=loaders[1]),
        RMD(nn.Identity()).fit(loaders[0], background=metric.compute()),
        RMD().fit_features(z, y, background=metric.compute()),
        Calibrated(RMD()).fit_features(z, y, background=corpus),
    ]
    for detector in fits:
        assert torch.allclose(detector.predict_features(new), expected, rtol=1e-9, atol=1e-9)


def test_saved_exported_and_changed_detectors_keep_the_background(data, tmp_path):
    z, y, corpus, new = data
    detector = RMD(keep_moments=True).fit_features(z[:200], y[:200], background=corpus)
    detector.save(tmp_path / "rmd.safetensors")
    loaded = load_detector(tmp_path / "rmd.safetensors")
    assert torch.equal(loaded.predict_features(new), detector.predict_features(new))
    module = torch.export.export(detector.to_module(torch.float64), (new,)).module()
    assert torch.allclose(module(new), detector.predict_features(new), rtol=1e-12)
    whole = RMD().fit_features(z, y, background=corpus)
    assert torch.allclose(loaded.update(z[200:], y[200:]).predict_features(new), whole.predict_features(new), rtol=1e-8)


def test_the_background_is_among_the_attributes(data):
    z, y, corpus, _ = data
    detector = RMD().fit_features(z, y, background=corpus)
    assert np.allclose(detector.background_mu.numpy(), corpus.mean(0).numpy(), rtol=1e-5)
    assert np.allclose(detector.background_cov.numpy(), np.cov(corpus.numpy(), rowvar=False, bias=True), rtol=1e-4)


def test_backgrounds_that_do_not_fit_are_refused(data):
    z, y, corpus, _ = data
    with pytest.raises(ValueError, match=r"background of 4 samples varies in 3 of 6 directions.*shrinkage"):
        RMD().fit_features(z, y, background=corpus[:4])
    with pytest.raises(ValueError, match=r"background has 5 features, but those to fit on are 6. Take both"):
        RMD().fit_features(z, y, background=corpus[:, :5])
    normalised = ClassMoments(normalize=True)
    normalised.update(corpus, torch.zeros(500, dtype=torch.long))
    with pytest.raises(ValueError, match="collected with normalize=True"):
        RMD().fit_features(z, y, background=normalised.compute())


def test_a_damaged_background_in_a_file_is_refused(data):
    z, y, corpus, _ = data
    state = RMD().fit_features(z, y, background=corpus).state_dict()
    state["tensors"]["background"] = state["tensors"]["background"][:5]
    with pytest.raises(ValueError, match=r"'background' has shape \(5, 6\).*expected \(6, 6\)"):
        load_detector(state)
