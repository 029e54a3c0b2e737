"""The studies that need features only: simulation, spectrum, partial."""

import numpy as np
import pytest
import torch
from oracle import mahalanobis, rmd
from scipy.stats import ortho_group

from rmd_plugin import PartialMahalanobis
from rmd_plugin.compare.bootstrap import auroc
from rmd_plugin.paper import partial, simulation, spectrum
from rmd_plugin.paper.result import FeatureSet
from rmd_plugin.paper.studies import SimulationOptions


def make_features(seed: int = 0, *, dim: int = 12, classes: int = 4, count: int = 400) -> FeatureSet:
    """Classes that differ in the directions of largest variance; OOD between them."""
    rng = np.random.default_rng(seed)
    scale = np.geomspace(3.0, 0.05, dim) @ np.diag(np.ones(dim))
    rotation = ortho_group.rvs(dim, random_state=seed)
    centres = np.zeros((classes, dim))
    centres[:, :3] = rng.normal(size=(classes, 3)) * 8

    def draw(means: np.ndarray, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = np.arange(number) % len(means)
        z = (means[y] + rng.normal(size=(number, dim)) * scale) @ rotation
        return torch.from_numpy(z), torch.from_numpy(y)

    (train, labels), (test, _), (ood, _) = (
        draw(centres, count), draw(centres, 150), draw(centres.mean(0, keepdims=True), 120)
    )  # fmt: skip
    about = {"benchmark": "toy", "backbone": "identity", "ood_name": "middle"}
    return FeatureSet(**about, train=train, train_labels=labels, test=test, ood=ood)


# -- partial ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("components", [1, 2, 5, 11, 12])
def test_cumulative_pmd_of_the_largest_directions_is_the_detector(components):
    features = make_features()
    largest, _ = partial.cumulative_scores(features.moments, features.ood)
    detector = PartialMahalanobis(components=components).fit_features(features.train, features.train_labels)
    torch.testing.assert_close(largest[:, components - 1], detector.predict_features(features.ood))


@pytest.mark.parametrize("components", [0, 1, 4, 11])
def test_cumulative_pmd_of_the_smallest_directions_is_the_detector(components):
    features = make_features()
    _, smallest = partial.cumulative_scores(features.moments, features.test)
    detector = PartialMahalanobis(components=components, largest=False)
    detector.fit_features(features.train, features.train_labels)
    torch.testing.assert_close(smallest[:, components], detector.predict_features(features.test))


def test_cumulative_pmd_does_not_depend_on_the_block_size(monkeypatch):
    features = make_features()
    whole = partial.cumulative_scores(features.moments, features.test)
    monkeypatch.setattr(partial, "_BLOCK", 4 * 12 * 7)
    for one, other in zip(whole, partial.cumulative_scores(features.moments, features.test), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_partial_study_ends_at_md_and_finds_the_discriminative_directions():
    features = make_features()
    result = partial.run([features])
    curve = result.arrays["toy, identity//largest"]
    found = {(row.detector, row.metric): row.value for row in result.rows}
    assert len(curve) == 12
    assert curve[-1] == pytest.approx(found["mahalanobis", "AUROC"], abs=1e-12)
    assert result.arrays["toy, identity//smallest"][0] == pytest.approx(curve[-1], abs=1e-12)
    assert found["partial", "AUROC"] == curve.max()
    assert found["rmd", "AUROC"] > found["mahalanobis", "AUROC"]


# -- spectrum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discriminative", [False, True])
def test_terms_of_md_add_up_to_md(discriminative):
    features = make_features()
    directions = spectrum.fit_directions(features.moments, discriminative=discriminative)
    terms, _ = spectrum.contributions(directions, features.ood)
    expected = mahalanobis(features.train.numpy(), features.train_labels.numpy(), features.ood.numpy())
    np.testing.assert_allclose(terms.double().sum(1).numpy(), expected, rtol=1e-5)


def test_terms_of_rmd_add_up_to_rmd_along_discriminative_directions():
    features = make_features()
    directions = spectrum.fit_directions(features.moments, discriminative=True)
    _, terms = spectrum.contributions(directions, features.ood)
    expected = rmd(features.train.numpy(), features.train_labels.numpy(), features.ood.numpy())
    np.testing.assert_allclose(terms.double().sum(1).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_the_background_of_a_direction_is_the_gaussian_of_all_samples_along_it():
    features = make_features()
    directions = spectrum.fit_directions(features.moments)
    along = directions.module.project(features.train)
    torch.testing.assert_close(along.var(0, correction=0), directions.background)
    torch.testing.assert_close(along.mean(0), torch.zeros(12, dtype=torch.float64), atol=1e-9, rtol=0)


def test_directions_are_eigenvectors_of_the_within_class_covariance_by_size():
    features = make_features()
    module = spectrum.fit_directions(features.moments).module
    z, y = features.train.numpy(), features.train_labels.numpy()
    centred = np.concatenate([z[y == k] - z[y == k].mean(0) for k in np.unique(y)])
    values, vectors = np.linalg.eigh(centred.T @ centred / len(z))
    cosine = np.abs((module.projection.numpy() * np.sqrt(values[::-1])).T @ vectors[:, ::-1])
    np.testing.assert_allclose(np.diag(cosine), 1.0, atol=1e-6)


def test_spectrum_of_the_simulation_has_one_leading_direction():
    features = simulation.simulated_features(dim=64, n_train=500, n_test=100)
    result = spectrum.run([features])
    assert int(result.arrays["simulation, identity//threshold"]) == 1
    relative = result.arrays["simulation, identity//rmd/ood/mean"]
    # the other directions cancel exactly
    assert relative[0] > 20
    assert np.abs(relative[1:]).max() < 1e-6


def test_quantile_band_surrounds_the_median_not_the_mean():
    features = make_features()
    _, arrays = spectrum.analyse(features)
    directions = spectrum.fit_directions(features.moments)
    terms = spectrum.contributions(directions, features.test)[0].numpy()
    np.testing.assert_allclose(arrays["mahalanobis/id/low"], np.quantile(terms, 0.1, axis=0), rtol=1e-5)
    np.testing.assert_allclose(arrays["mahalanobis/id/high"], np.quantile(terms, 0.9, axis=0), rtol=1e-5)


# -- simulation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "shift"), [(1, 1.0), (4, 2.0), (64, 4.0)])
def test_limit_of_md_agrees_with_sampling(dim, shift):
    rng = np.random.default_rng(1)
    id_scores = rng.chisquare(dim, 40_000)
    ood_scores = rng.noncentral_chisquare(dim, shift**2, 40_000)
    assert simulation.limit_auroc(dim, shift) == pytest.approx(auroc(id_scores, ood_scores), abs=0.006)


def test_limit_of_md_at_the_papers_setting_is_near_the_papers_number():
    assert 100 * simulation.limit_auroc(1024, 8.0) == pytest.approx(83.13, abs=0.5)


def test_rmd_separates_where_md_breaks():
    """A quarter of the paper's dimensions, with sigma such that MD is as bad as in the paper."""
    areas = {"mahalanobis": [], "rmd": []}
    for seed in range(4):
        features = simulation.simulated_features(dim=256, sigma=0.35, n_train=2000, n_test=200, seed=seed)
        for name, (area, _) in features.rate_gaussians("mahalanobis", "rmd").items():
            areas[name].append(area)
    assert np.mean(areas["rmd"]) > 0.999
    assert np.mean(areas["mahalanobis"]) == pytest.approx(simulation.limit_auroc(256, 2 / 0.35), abs=0.02)
    assert np.mean(areas["mahalanobis"]) < 0.86


def test_simulation_study_at_toy_size_gives_rows_comparisons_and_arrays():
    options = SimulationOptions(
        dim=32, n_train=200, n_test=60, seeds=2, sweep_dims=[4, 32], sweep_sigmas=[0.25, 0.75], sweep_seeds=2,
        sweep_n_train=200, network_width=32, network_seeds=1,
    )  # fmt: skip
    result = simulation.run(options)
    assert {c.metric for c in result.comparisons} == {"AUROC of MD", "AUROC of RMD"}
    assert all(c.run for c in result.comparisons)
    # at another size than the paper's, the table must say so
    assert "another size" in result.comparisons[0].reason
    assert result.arrays["sweep_dim/mahalanobis"].shape == (2, 2)
    assert {"x1/id", "rest/ood", "rmd/id", "tanh/rmd/ood", "relu/mahalanobis/id"} <= set(result.arrays)
    # 2 seeds x 2 detectors, 2 networks x 2 detectors, 2 sweeps x 2 values x 2 detectors x 2 seeds
    assert len(result.rows) == 4 + 4 + 16


@pytest.mark.slow
def test_the_papers_simulation_comes_out_within_its_tolerance():
    areas = {"mahalanobis": [], "rmd": []}
    for seed in range(20):
        for name, (area, _) in simulation.simulated_features(seed=seed).rate_gaussians("mahalanobis", "rmd").items():
            areas[name].append(area)
    assert 100 * np.mean(areas["mahalanobis"]) == pytest.approx(83.1, abs=1.5)
    assert np.mean(areas["rmd"]) == pytest.approx(1.0, abs=1e-4)
