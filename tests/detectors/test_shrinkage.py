"""``shrinkage="auto"``: OAS where N < 5 D, nothing elsewhere; and the one warning where it would have helped."""

import re

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs
from sklearn.covariance import OAS

from rmd_plugin import (
    RMD,
    Calibrated,
    FlowLikelihood,
    Mahalanobis,
    MarginalMahalanobis,
    Moments,
    NumericalWarning,
    PartialMahalanobis,
    RelativeFlow,
    load_detector,
)

DETECTORS = {
    "rmd": RMD,
    "mahalanobis": Mahalanobis,
    "marginal": MarginalMahalanobis,
    "partial": lambda **options: PartialMahalanobis(components=4, **options),
    "partial smallest": lambda **options: PartialMahalanobis(components=4, largest=False, **options),
    "flow": lambda **options: FlowLikelihood(max_epochs=0, progress=False, **options),
    "relative flow": lambda **options: RelativeFlow(max_epochs=0, progress=False, **options),
}
every_detector = pytest.mark.parametrize("name", DETECTORS)
SUFFERS = ("rmd", "mahalanobis", "partial smallest")
FEW = (
    "55 samples are few for the covariance of 12 features (N < 5 D): scores can be poor. "
    "Set shrinkage='auto' (or 'oas')."
)


def data(samples):
    """Of 12 features: 60 samples are the first that are enough."""
    z, y, x = make_blobs()
    return z[:samples], y[:samples], x


def intensity_of(z, y):
    """OAS around the class means, by scikit-learn."""
    means = {k: z[y == k].mean(0) for k in y.unique().tolist()}
    within = torch.stack([row - means[k] for row, k in zip(z, y.tolist(), strict=True)])
    return OAS(assume_centered=True).fit(within.numpy())


@every_detector
@pytest.mark.parametrize("samples", [50, 59])
def test_auto_is_oas_where_samples_are_fewer_than_five_times_the_features(name, samples):
    z, y, x = data(samples)
    auto, oas = (DETECTORS[name](shrinkage=s).fit_features(z, y) for s in ("auto", "oas"))
    assert torch.equal(auto.predict_features(x), oas.predict_features(x))
    assert auto.intensity == oas.intensity == pytest.approx(intensity_of(z, y).shrinkage_, rel=1e-9)


@every_detector
@pytest.mark.parametrize("samples", [60, 300])
def test_auto_is_the_papers_definition_from_five_times_the_features_on(name, samples):
    z, y, x = data(samples)
    auto, plain = (DETECTORS[name](shrinkage=s).fit_features(z, y) for s in ("auto", 0.0))
    assert torch.equal(auto.predict_features(x), plain.predict_features(x))
    assert auto.intensity == plain.intensity == 0.0


def test_the_scores_of_auto_are_the_textbook_with_the_covariance_of_scikit_learn():
    z, y, x = data(55)
    means, _, mu_0, _, between = oracle.moments(z, y)
    sigma = intensity_of(z, y).covariance_
    nearest = np.min([oracle.distance(x, mu, sigma) for mu in means.values()], axis=0)
    scores = RMD(shrinkage="auto").fit_features(z, y).predict_features(x)
    np.testing.assert_allclose(scores, nearest - oracle.distance(x, mu_0, sigma + between), rtol=1e-8, atol=1e-8)


def test_the_samples_that_count_are_those_of_all_parts():
    z, y, x = data(60)
    detector = RMD(shrinkage="auto")
    parts = [detector.new_moments() for _ in range(2)]
    for part, rows in zip(parts, (slice(0, 31), slice(31, 60)), strict=True):
        part.update(z[rows], y[rows])
        assert detector.fit_moments(part.compute()).intensity > 0
    merged = detector.fit_moments(sum(part.compute() for part in parts))
    assert merged.intensity == 0.0
    torch.testing.assert_close(merged.predict_features(x), RMD().fit_features(z, y).predict_features(x))
    labels = torch.where(torch.arange(60) < 59, y, -1)  # an OOD sample is none of them
    assert detector.fit_features(z, labels).intensity > 0


# -- what was used is kept -------------------------------------------------------------------------------------------


@every_detector
@pytest.mark.parametrize("samples", [55, 60])
def test_a_file_says_what_was_used(name, samples, tmp_path):
    z, y, x = data(samples)
    detector = DETECTORS[name](shrinkage="auto").fit_features(z, y)
    detector.save(tmp_path / "detector.pt")
    loaded = load_detector(tmp_path / "detector.pt")
    assert torch.equal(loaded.predict_features(x), detector.predict_features(x))
    assert loaded.shrinkage == "auto"
    assert loaded.intensity == detector.intensity
    assert repr(loaded) == repr(detector)
    assert repr(loaded).endswith(f"fitted: 5 classes, 12 features, intensity {detector.intensity:.3g}>")


def test_a_file_of_before_loads_and_a_damaged_intensity_does_not():
    z, y, x = data(55)
    detector = RMD(shrinkage="auto").fit_features(z, y)
    state = detector.state_dict()
    rest = {name: tensor for name, tensor in state["tensors"].items() if name != "intensity"}
    older = load_detector(state | {"tensors": rest})
    assert older.intensity is None
    assert repr(older) == "<RMD(shrinkage='auto') fitted: 5 classes, 12 features>"
    assert torch.equal(older.predict_features(x), detector.predict_features(x))
    with pytest.raises(ValueError, match="'intensity' has shape"):
        load_detector(state | {"tensors": rest | {"intensity": torch.zeros(2, dtype=torch.float64)}})


def test_attributes_modules_and_calibration_belong_to_what_was_used():
    z, y, x = data(55)
    detector = RMD(shrinkage="auto").fit_features(z, y)
    np.testing.assert_allclose(detector.cov.double(), intensity_of(z, y).covariance_, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(detector.to_module(torch.float64)(x), detector.predict_features(x))
    calibrated = Calibrated(detector).calibrate_features(z)
    torch.testing.assert_close(calibrated.predict_features(x), detector.predict_features(x))


# -- the warning -----------------------------------------------------------------------------------------------------


@every_detector
def test_few_samples_without_shrinkage_are_told_where_shrinkage_helps(name):
    z, y, _ = data(55)
    if name in SUFFERS:
        with pytest.warns(NumericalWarning, match=re.escape(FEW)) as caught:
            DETECTORS[name]().fit_features(z, y)
        assert len(caught) == 1
    else:
        DETECTORS[name]().fit_features(z, y)


@pytest.mark.parametrize("options", [{"shrinkage": "auto"}, {"shrinkage": "oas"}, {"shrinkage": 0.1}], ids=str)
def test_a_shrinkage_is_the_remedy(options):
    z, y, _ = data(55)
    RMD(**options).fit_features(z, y)  # warnings are errors
    RMD(covariance="diagonal").fit_features(z, y)  # one number per feature: 55 samples are many


def test_the_scores_without_shrinkage_stay_those_of_the_paper():
    z, y, x = data(55)
    with pytest.warns(NumericalWarning, match="55 samples are few"):
        detector = RMD().fit_features(z, y)
    np.testing.assert_allclose(detector.predict_features(x), oracle.rmd(z, y, x), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (10, r"rank 5 of 12 \(10 samples are too few for 12 features\)"),
        (16, r"rank 11 of 12 \(16 samples are too few for 12 features\)"),  # more than features, but five means
        (17, "17 samples are few for the covariance"),
    ],
)
def test_samples_too_few_for_the_rank_are_told_once_as_that(samples, message):
    z, y, _ = data(samples)
    with pytest.warns(NumericalWarning, match=message) as caught:
        RMD().fit_features(z, y)
    assert len(caught) == 1


def test_a_dead_feature_is_another_cause():
    z, y, _ = data(55)
    z = torch.cat([z, z.new_zeros(55, 1)], 1)
    with pytest.warns(NumericalWarning) as caught:
        RMD().fit_features(z, y)
    first, second = (str(warning.message) for warning in caught)
    assert "rank 12 of 13: 1 directions" in first
    assert "55 samples are few for the covariance of 13" in second


def test_moments_from_a_file_are_enough(tmp_path):
    z, y, _ = data(55)
    metric = RMD().new_moments()
    metric.update(z, y)
    metric.compute().save(tmp_path / "moments.pt")
    assert RMD(shrinkage="auto").fit_moments(Moments.load(tmp_path / "moments.pt")).intensity > 0
