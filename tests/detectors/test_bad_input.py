"""Every kind of input that real life brings: each has its own error or its documented behaviour."""

import re

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs
from pytorch_ood.api import ModelNotSetException, RequiresFittingException
from torch import nn

from rmd_plugin import (
    RMD,
    ClassMoments,
    FusedRMD,
    Mahalanobis,
    MarginalMahalanobis,
    NumericalWarning,
    PartialMahalanobis,
    RelativeFlow,
)

GAUSSIAN = [RMD, Mahalanobis, MarginalMahalanobis]


@pytest.mark.parametrize(
    "use",
    [
        lambda d: d.predict_features(torch.zeros(1, 2)),
        lambda d: d.predict(torch.zeros(1, 2)),
        lambda d: d.class_scores(torch.zeros(1, 2)),
        lambda d: d.nearest_class(torch.zeros(1, 2)),
        lambda d: d.contributions(torch.zeros(1, 2)),
        lambda d: d.state_dict(),
        lambda d: d.to_module(),
        lambda d: d.n_classes,
    ],
)
def test_unfitted_use(use):
    with pytest.raises(RequiresFittingException, match=r"RMD is not fitted\. Call fit"):
        use(RMD())


def test_missing_encoder(blobs):
    with pytest.raises(ModelNotSetException, match="use fit_features"):
        RMD().fit([])
    with pytest.raises(ModelNotSetException, match="use predict_features"):
        RMD().fit_features(*blobs[:2]).predict(torch.zeros(1, 3))


def test_wrong_width_rank_and_dtype(blobs):
    z, y, x = blobs
    detector = RMD().fit_features(z, y)
    with pytest.raises(ValueError, match=r"shape \(B, 12\), got \(80, 5\). Was the detector fitted on another layer"):
        detector.predict_features(x[:, :5])
    with pytest.raises(ValueError, match="flattened feature maps"):
        detector.predict_features(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="Pool tokens"):
        detector.predict_features(torch.zeros(2, 7, 12))
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch\.int64"):
        detector.predict_features(torch.zeros(2, 12).long())


@pytest.mark.parametrize(
    ("z", "y", "remedy"),
    [
        (np.zeros((4, 3)), torch.zeros(4).long(), "got ndarray. Convert it with torch.from_numpy(z).float()."),
        ([[0.0, 1.0]], torch.zeros(1).long(), "got list. Convert it with torch.tensor(z).float()."),
        (torch.zeros(4, 3).int(), torch.zeros(4).long(), "got torch.int32. Convert it with z.float()."),
        (torch.zeros(4, 3), np.zeros(4, dtype=int), "got ndarray. Convert it with torch.from_numpy(y).long()."),
        (torch.zeros(4, 3), [0, 0, 1, 1], "got list. Convert it with torch.tensor(y).long()."),
        (torch.zeros(4, 3), torch.zeros(4).cfloat(), "got torch.complex64. Convert it with y.long()."),
    ],
)
def test_what_is_no_tensor_is_told_how_to_become_one(z, y, remedy):
    for detector in (RMD(), RelativeFlow(progress=False)):
        with pytest.raises(TypeError, match=re.escape(remedy)):
            detector.fit_features(z, y)


def test_an_empty_batch_gives_an_empty_score(blobs):
    z, y, x = blobs
    detector = RMD().fit_features(z, y)
    assert detector.predict_features(x[:0]).shape == (0,)
    assert detector.class_scores(x[:0]).shape == (0, 5)
    assert detector.nearest_class(x[:0]).shape == (0,)
    assert detector.contributions(x[:0]).shape == (0, 4)
    fused = FusedRMD().fit_features(z, y)
    assert fused.predict_features(x[:0]).shape == fused.members(x[:0]).guard.shape == (0,)
    assert fused.class_scores(x[:0]).shape == (0, 5)


@pytest.mark.parametrize("detector", [*GAUSSIAN, FusedRMD])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_score_nan_for_their_own_sample_only(detector, bad, blobs):
    z, y, x = blobs
    fitted = detector().fit_features(z, y)
    broken = x.clone()
    broken[3, 5] = bad
    scores = fitted.predict_features(broken)
    assert not scores[3].isfinite()
    assert scores.isfinite().sum() == len(x) - 1


def test_bad_values_in_a_fit_name_the_batch():
    z, y, _ = make_blobs(dtype=torch.float32)
    batches = [(z[:100], y[:100]), (z[100:200].clone(), y[100:200])]
    batches[1][0][7, 3] = torch.nan
    with pytest.raises(ValueError, match="batch 1 has 1 NaN and 0 infinite feature values in 1 of 100 samples"):
        RMD(nn.Identity()).fit(batches)


def test_no_in_distribution_sample():
    with pytest.raises(ValueError, match="no in-distribution sample"):
        RMD().fit_features(torch.randn(5, 3), torch.full((5,), -1))
    with pytest.raises(ValueError, match="no in-distribution sample"):
        RMD(nn.Identity()).fit([(torch.randn(5, 3), torch.full((5,), -1))])


def test_a_loader_that_does_not_yield_pairs():
    with pytest.raises(ValueError, match=r"must yield pairs \(x, y\), got a Tensor of length 4"):
        RMD(nn.Identity()).fit([torch.zeros(4, 3)])


def test_a_single_class_makes_rmd_zero_and_warns():
    z, _, x = make_blobs()
    with pytest.warns(NumericalWarning, match="RMD of a single class is zero everywhere"):
        detector = RMD().fit_features(z, torch.zeros(len(z), dtype=torch.long))
    assert torch.equal(detector.predict_features(x), torch.zeros(len(x), dtype=x.dtype))
    assert detector.nearest_class(x).unique().tolist() == [0]


def test_classes_that_never_occur_are_never_nearest(blobs):
    z, y, x = blobs
    labels = torch.tensor([2, 3, 5, 7, 11])[y]
    for detector in (RMD, Mahalanobis):
        with pytest.warns(NumericalWarning, match="7 of 12 classes have no sample and are never nearest: 0, 1, 4"):
            sparse = detector().fit_features(z, labels)
        dense = detector().fit_features(z, y)
        torch.testing.assert_close(sparse.predict_features(x), dense.predict_features(x))
        scores = sparse.class_scores(x)
        assert scores.shape == (len(x), 12)
        assert scores[:, [0, 1, 4, 6, 8, 9, 10]].isinf().all()
        assert torch.equal(sparse.nearest_class(x), torch.tensor([2, 3, 5, 7, 11])[dense.nearest_class(x)])


def test_malformed_labels_in_fit_features(blobs):
    z, y, _ = blobs
    for wrong in (0.5, torch.nan, torch.inf):
        with pytest.raises(TypeError, match=rf"labels must be integers.*got torch\.float64 with the value {wrong}"):
            RMD().fit_features(z, y.double().index_fill(0, torch.tensor([7]), wrong))
    with pytest.raises(ValueError, match="one per sample"):
        RMD().fit_features(z, y[:-1])


@pytest.mark.parametrize("detector", GAUSSIAN)
def test_fewer_samples_than_features_is_a_warning_with_its_amount(detector):
    z, y, x = make_blobs(num_classes=3, width=30, per_class=6)
    message = "rank 15 of 30 .18 samples are too few for 30 features.: 15 directions"
    with pytest.warns(NumericalWarning, match=message):
        fitted = detector().fit_features(z, y)
    assert fitted.predict_features(x).isfinite().all()
    # in the training data's own span nothing is lost: the pseudo-inverse of the textbook
    if detector is Mahalanobis:
        means, sigma, *_ = oracle.moments(z, y)
        inverse = np.linalg.pinv(sigma, rcond=1e-12, hermitian=True)
        terms = [np.einsum("bi,ij,bj->b", np.asarray(z) - m, inverse, np.asarray(z) - m) for m in means.values()]
        np.testing.assert_allclose(fitted.predict_features(z), np.min(terms, axis=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shrinkage", ["oas", 0.1])
def test_shrinkage_keeps_all_directions(shrinkage):
    z, y, x = make_blobs(num_classes=3, width=30, per_class=6)
    for detector in GAUSSIAN:  # no warning: warnings are errors here
        assert detector(shrinkage=shrinkage).fit_features(z, y).predict_features(x).isfinite().all()


@pytest.mark.parametrize("detector", GAUSSIAN)
@pytest.mark.parametrize("covariance", ["tied", "diagonal"])
def test_dead_features_are_left_out(detector, covariance, blobs):
    # real sentence embeddings hold dimensions of standard deviation 1e-32 beside ones of 0.05
    z, y, x = blobs
    tiny = 1e-32 * torch.randn(len(z), 2, dtype=z.dtype)
    dead = torch.cat([z, torch.full((len(z), 1), 0.3, dtype=z.dtype), tiny], 1)
    probe = torch.cat(
        [x, torch.full((len(x), 1), 0.3, dtype=z.dtype), 1e-32 * torch.randn(len(x), 2, dtype=z.dtype)], 1
    )
    with pytest.warns(NumericalWarning, match="rank 12 of 15: 3 directions with variance at or below"):
        fitted = detector(covariance=covariance).fit_features(dead, y)
    alive = detector(covariance=covariance).fit_features(z, y)
    torch.testing.assert_close(fitted.predict_features(probe), alive.predict_features(x), rtol=1e-7, atol=1e-7)
    # a dead feature that wakes up is not seen, and does not break anything
    probe[:, -1] = 5.0
    torch.testing.assert_close(fitted.predict_features(probe), alive.predict_features(x), rtol=1e-7, atol=1e-7)


def test_duplicated_features_count_once(blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match="rank 12 of 15"):
        twice = RMD().fit_features(torch.cat([z, z[:, :3]], 1), y)
    scores = twice.predict_features(torch.cat([x, x[:, :3]], 1))
    torch.testing.assert_close(scores, RMD().fit_features(z, y).predict_features(x), rtol=1e-6, atol=1e-6)


def test_no_variance_at_all_is_an_error():
    z, y = torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([0, 1])
    for detector in (*GAUSSIAN, FusedRMD, lambda: PartialMahalanobis(components=1)):
        with pytest.raises(ValueError, match=r"no feature varies within the classes .2 samples, 2 classes"):
            detector().fit_features(z, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shrinkage": 1.5}, r"number in \[0, 1\], 'oas' or 'auto', got 1.5"),
        ({"shrinkage": "ledoit"}, "'oas' or 'auto', got 'ledoit'"),
        ({"covariance": "full"}, "must be 'tied' or 'diagonal', got 'full'"),
        ({"covariance": "diagonal", "shrinkage": "oas"}, "'oas' needs covariance='tied'"),
        ({"covariance": "diagonal", "shrinkage": "auto"}, "'auto' needs covariance='tied'"),
    ],
)
def test_options_are_checked_when_they_are_given(options, message):
    with pytest.raises(ValueError, match=message):
        RMD(**options)


@pytest.mark.parametrize("components", [0, -1, 1.5, True])
def test_components_must_be_a_positive_integer(components):
    with pytest.raises(ValueError, match="components must be an integer of at least 1"):
        PartialMahalanobis(components=components)


def test_components_must_leave_a_direction(blobs):
    with pytest.raises(ValueError, match="leaves none of the 12 eigen-directions"):
        PartialMahalanobis(components=12, largest=False).fit_features(*blobs[:2])


def test_moments_of_another_kind_are_refused(blobs):
    z, y, _ = blobs

    def moments(**options):
        metric = ClassMoments(**options)
        metric.update(z, y)
        return metric.compute()

    with pytest.raises(ValueError, match="normalize=True, but the moments were collected with normalize=False"):
        RMD(normalize=True).fit_moments(moments())
    with pytest.raises(ValueError, match="only its diagonal was collected"):
        RMD().fit_moments(moments(diagonal=True))
    full, diagonal = (RMD(covariance="diagonal").fit_moments(moments(diagonal=d)) for d in (False, True))
    torch.testing.assert_close(full.predict_features(z), diagonal.predict_features(z))
