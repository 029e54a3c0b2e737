"""FusedRMD against the textbook: refits without each sample, the formula of its score, and what it is for."""

import io

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs
from scipy.special import logsumexp
from torch import nn

from rmd_plugin import RMD, Calibrated, FusedRMD, Mahalanobis, NumericalWarning, load_detector
from rmd_plugin.detectors.fused_score import left_out_distances
from rmd_plugin.detectors.gaussian import MAX_FLOAT32_AMPLIFICATION


def head_of(width=12, classes=5, seed=3):
    torch.manual_seed(seed)
    return nn.Linear(width, classes).double().requires_grad_(False)


def shrinkage_of(sigma, count):
    """OAS by its formula, for covariances divided by the number of samples."""
    width, power, mean = len(sigma), (sigma**2).mean(), np.trace(sigma) / len(sigma)
    return min(1.0, (power + mean**2) / ((count + 1) * (power - mean**2 / width)))


def textbook(z, y):
    """Class means, shrunk Sigma and Sigma_0 around mu_0, and the intensity."""
    means, sigma, mu_0, _, between = oracle.moments(z, y)
    rho = shrinkage_of(sigma, len(z))
    shrunk = (1 - rho) * sigma + rho * np.trace(sigma) / len(sigma) * np.eye(len(sigma))
    return means, shrunk, mu_0, shrunk + between, rho


def refitted(z, y, i):
    """MD_k and MD_0 of sample i, whose own part is taken out of its class mean, of Sigma and of Sigma_B.

    N, mu_0 and what Sigma is shrunk to stay.
    """
    _, sigma, mu_0, _, _ = oracle.moments(z, y)
    rho, count, width = shrinkage_of(sigma, len(z)), len(z), z.shape[1]
    others, labels = np.delete(z, i, 0), np.delete(y, i)
    means = {k: others[labels == k].mean(0) for k in np.unique(labels)}
    within = sum(np.outer(r - means[k], r - means[k]) for r, k in zip(others, labels, strict=True))
    between = sum((labels == k).sum() * np.outer(m - mu_0, m - mu_0) for k, m in means.items())
    shrunk = (1 - rho) * within / count + rho * np.trace(sigma) / width * np.eye(width)
    classes = np.array([oracle.distance(z[i : i + 1], means[k], shrunk)[0] for k in sorted(means)])
    return classes, oracle.distance(z[i : i + 1], mu_0, shrunk + between / count)[0]


def energy(logits):
    return logsumexp(logits, axis=1) - logits.mean(1)


def expected_scores(z, y, x, head=None):
    """The score as the formula says, with a refit for each training sample."""
    z, y, x = np.asarray(z, dtype=np.float64), np.asarray(y), np.asarray(x, dtype=np.float64)
    means, sigma, mu_0, sigma_0, _ = textbook(z, y)

    def members(distances, background, features):
        logits = -distances / 2 if head is None else head(torch.from_numpy(features)).numpy()
        nearest = distances.min(1)
        return np.stack([background - nearest, energy(logits), np.log(nearest)])

    left_out = [refitted(z, y, i) for i in range(len(z)) if (y == y[i]).sum() > 1]
    kept = z[[i for i in range(len(z)) if (y == y[i]).sum() > 1]]
    train = members(np.stack([found[0] for found in left_out]), np.stack([found[1] for found in left_out]), kept)
    distances = np.stack([oracle.distance(x, means[k], sigma) for k in sorted(means)], 1)
    test = members(distances, oracle.distance(x, mu_0, sigma_0), x)
    relative, surplus, typical = (test - train.mean(1)[:, None]) / train.std(1, ddof=1)[:, None]
    return -relative - surplus + np.maximum(0, typical) ** 2 / 2


@pytest.mark.parametrize(("width", "classes", "per_class"), [(5, 3, 8), (12, 3, 4), (4, 7, 2)])
def test_distances_of_left_out_samples_are_those_of_a_refit_without_them(width, classes, per_class):
    z, y, _ = make_blobs(num_classes=classes, width=width, per_class=per_class)
    z, y = z[1:], y[1:]  # classes of different sizes
    if per_class == 2:
        z, y = z[y > 0], y[y > 0] - 1
    means, sigma, mu_0, _, rho = textbook(z, y)
    whitening = np.linalg.inv(np.linalg.cholesky(sigma)).T
    shares = np.bincount(y) / len(y)
    points = np.stack([(means[k] - mu_0) @ whitening for k in sorted(means)])
    _, singular, rotation = np.linalg.svd(np.sqrt(shares)[:, None] * points)
    rank = int((singular > 1e-9).sum())
    u, points = (z.numpy() - mu_0) @ whitening @ rotation.T, points @ rotation[:rank].T
    between = singular[:rank] ** 2
    arrays = (u, np.asarray(y), points, between / (1 + between), np.bincount(y).astype(float))
    distances, background = left_out_distances(*map(torch.from_numpy, arrays), rho)
    brute = [refitted(z.numpy(), y.numpy(), i) for i in range(len(z))]
    np.testing.assert_allclose(distances, np.stack([found[0] for found in brute]), rtol=1e-8)
    np.testing.assert_allclose(background, [found[1] for found in brute], rtol=1e-8)


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("shape", [{"per_class": 12}, {"num_classes": 3, "width": 20, "per_class": 5}], ids=str)
def test_scores_are_those_of_the_formula_with_refits(shape, with_head):
    z, y, x = make_blobs(**shape)
    head = head_of(z.shape[1]) if with_head else None
    expected = expected_scores(z, y, x, head)
    np.testing.assert_allclose(FusedRMD(head=head).fit_features(z, y).predict_features(x), expected, rtol=1e-7)
    single = FusedRMD(head=head).fit_features(z.float(), y).predict_features(x.float())
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, expected, rtol=1e-4, atol=1e-4)


def test_without_a_head_the_logits_are_those_of_linear_discriminants(blobs):
    z, y, x = blobs
    means, sigma, mu_0, _, _ = textbook(z, y)
    slopes = np.stack([np.linalg.solve(sigma, means[k] - mu_0) for k in sorted(means)])
    bias = [-s @ (means[k] - mu_0) / 2 - s @ mu_0 for k, s in enumerate(slopes)]
    head = FusedRMD(w=torch.from_numpy(slopes), b=torch.tensor(bias, dtype=torch.float64)).fit_features(z, y)
    own = FusedRMD().fit_features(z, y)
    # the head's own logits know the training samples, so only the standardisation differs
    theirs, ours = head.members(x).energy, own.members(x).energy
    np.testing.assert_allclose(np.corrcoef(theirs, ours)[0, 1], 1, atol=1e-9)
    assert abs(theirs - ours).max() < 0.5


def test_what_all_logits_have_in_common_changes_nothing(blobs):
    z, y, x = blobs
    head, moved = head_of(), head_of()
    common = torch.randn(12, dtype=torch.float64)
    moved.weight += common
    moved.bias += 7.0
    plain, offset = (FusedRMD(head=h).fit_features(z, y).predict_features(x) for h in (head, moved))
    torch.testing.assert_close(plain, offset)


def test_a_head_as_a_layer_or_as_weights_is_the_same(blobs):
    z, y, x = blobs
    head = head_of()
    scores = FusedRMD(head=head).fit_features(z, y).predict_features(x)
    assert torch.equal(FusedRMD(None, w=head.weight, b=head.bias).fit_features(z, y).predict_features(x), scores)
    bare = nn.Linear(12, 5, bias=False).double()
    one, other = FusedRMD(head=bare), FusedRMD(w=bare.weight.detach().numpy())
    assert torch.equal(*(detector.fit_features(z, y).predict_features(x) for detector in (one, other)))


def test_it_shows_what_it_is_and_how_much_it_shrinks(blobs):
    z, y, _ = blobs
    detector = FusedRMD().fit_features(z, y)
    assert repr(detector) == "<FusedRMD() fitted: 5 classes, 12 features>"
    assert detector.intensity == RMD(shrinkage="oas").fit_features(z, y).intensity > 0


def test_a_head_whose_energy_is_constant_is_named(blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match="energy of the head is the same for all samples and adds nothing"):
        detector = FusedRMD(head=nn.Linear(12, 1)).fit_features(z, y)
    assert not detector.members(x).energy.any()


def test_the_head_is_read_at_each_fit_and_only_then(blobs):
    z, y, x = blobs
    head = head_of()
    detector = FusedRMD(head=head).fit_features(z, y)
    before = detector.predict_features(x)
    head.weight.mul_(2)
    assert torch.equal(detector.predict_features(x), before)
    assert not torch.allclose(detector.fit_features(z, y).predict_features(x), before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"head": nn.Sequential(nn.Linear(12, 5))}, TypeError, "must be an nn.Linear on the features, got Sequential"),
        ({"head": nn.Linear(12, 5), "w": torch.ones(5, 12)}, ValueError, "as head=, or as w= and b="),
        ({"b": torch.ones(5)}, ValueError, "as head=, or as w= and b="),
        ({"w": torch.ones(12)}, ValueError, r"w of shape \(C, D\) and b of shape \(C,\), got \(12,\) and None"),
        ({"w": torch.ones(5, 12), "b": torch.ones(4)}, ValueError, r"got \(5, 12\) and \(4,\)"),
        ({"w": [[1, 2], [3, 4]]}, TypeError, "w of floating-point numbers, got torch.int64"),
        ({"seed": -1}, ValueError, "seed must be an integer of at least 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        FusedRMD(**options)


def test_a_head_that_does_not_fit_the_features_is_refused(blobs):
    with pytest.raises(ValueError, match="the head takes 7 features, but those to fit on are 12"):
        FusedRMD(head=nn.Linear(7, 5)).fit_features(*blobs[:2])
    with pytest.raises(ValueError, match="the head has NaN or infinite weights"):
        FusedRMD(w=torch.full((5, 12), torch.nan)).fit_features(*blobs[:2])


def test_members_sum_to_the_score_and_class_scores_hold_it(blobs):
    z, y, x = blobs
    for head in (None, head_of()):
        detector = FusedRMD(head=head).fit_features(z, y)
        scores, members = detector.predict_features(x), detector.members(x)
        torch.testing.assert_close(members.relative + members.energy + members.guard, scores)
        assert (members.guard >= 0).all()
        torch.testing.assert_close(detector.class_scores(x).amin(1), scores)
        assert torch.equal(detector.nearest_class(x), RMD(shrinkage="oas").fit_features(z, y).nearest_class(x))
        relative = RMD(shrinkage="oas").fit_features(z, y).predict_features(x)
        np.testing.assert_allclose(np.corrcoef(members.relative, relative)[0, 1], 1, atol=1e-9)


def test_far_samples_that_rmd_cancels_are_caught():
    z, y, _ = make_blobs()
    _, sigma, mu_0, *_ = textbook(z, y)
    means = np.stack([z[y == k].mean(0).numpy() for k in range(5)]) - mu_0
    # a direction in which the class means agree, in the metric of Sigma: RMD does not see it
    hidden = torch.from_numpy(np.linalg.svd(means @ np.linalg.inv(sigma))[2][-1])
    far = z[:50] + 40 * hidden * (z @ hidden).std()
    cancelled = RMD(shrinkage="oas").fit_features(z, y)
    torch.testing.assert_close(cancelled.predict_features(far), cancelled.predict_features(z[:50]))
    detector = FusedRMD().fit_features(z, y)
    assert detector.predict_features(far).min() > detector.predict_features(z).max()
    assert detector.members(far).guard.min() > 10


def test_standardised_members_of_new_samples_are_centred_though_training_samples_are_few():
    torch.manual_seed(0)
    centres = 2 * torch.randn(10, 60, dtype=torch.float64)
    y, new = torch.arange(100) % 10, torch.arange(5000) % 10
    z, x = (centres[labels] + torch.randn(len(labels), 60, dtype=torch.float64) for labels in (y, new))
    detector = FusedRMD().fit_features(z, y)
    for term in (detector.members(x).relative, detector.members(x).energy):
        assert abs(term.mean()) < 0.3
    naive = detector.members(z).relative  # training samples lie too near
    assert naive.mean() < -0.8


def test_classes_of_one_sample_are_left_out_of_the_standardisation_and_said_so(blobs):
    z, y, x = blobs
    more, labels = torch.cat([z[:60], x[-2:]]), torch.cat([y[:60], torch.tensor([5, 6])])
    with pytest.warns(NumericalWarning, match="2 of 7 classes have one sample and are left out .*: 5, 6"):
        detector = FusedRMD().fit_features(more, labels)
    np.testing.assert_allclose(detector.predict_features(x[:60]), expected_scores(more, labels, x[:60]), rtol=1e-7)
    assert detector.nearest_class(x[-2:]).tolist() == [5, 6]


def test_classes_that_never_occur_are_never_nearest(blobs):
    z, y, x = blobs
    labels = torch.tensor([2, 3, 5, 7, 11])[y]
    with pytest.warns(NumericalWarning, match="7 of 12 classes have no sample"):
        sparse = FusedRMD().fit_features(z, labels)
    dense = FusedRMD().fit_features(z, y)
    torch.testing.assert_close(sparse.predict_features(x), dense.predict_features(x))
    assert sparse.class_scores(x)[:, [0, 1, 4, 6, 8, 9, 10]].isinf().all()
    assert torch.equal(sparse.nearest_class(x), torch.tensor([2, 3, 5, 7, 11])[dense.nearest_class(x)])


def test_a_single_class_leaves_the_guard(blobs):
    z, _, x = blobs
    with pytest.warns(NumericalWarning, match="FusedRMD of a single class has no relative distance"):
        detector = FusedRMD().fit_features(z, torch.zeros(len(z), dtype=torch.long))
    members = detector.members(x)
    for constant in (members.relative, members.energy):
        assert torch.equal(constant, constant[:1].expand(len(x)))
    distance = Mahalanobis(shrinkage="oas").fit_features(z, torch.zeros(len(z), dtype=torch.long)).predict_features(x)
    caught = members.guard > 0
    assert caught.any()
    assert torch.equal(members.guard[caught].argsort(), distance[caught].argsort())


def test_copies_of_a_sample_count_as_often_as_they_occur(blobs):
    z, y, x = blobs
    z, y = torch.cat([z[:60], z[:20], z[:20]]), torch.cat([y[:60], y[:20], y[:20]])
    np.testing.assert_allclose(FusedRMD().fit_features(z, y).predict_features(x), expected_scores(z, y, x), rtol=1e-7)


def test_a_direction_that_one_sample_spans_alone_stays_finite():
    z, y, x = make_blobs(num_classes=3, width=6, per_class=2000, dtype=torch.float64)
    lone = torch.zeros(len(z), 1, dtype=z.dtype)
    lone[0] = 1e6
    detector = FusedRMD().fit_features(torch.cat([z, lone], 1), y)
    scores = detector.predict_features(torch.cat([x, torch.zeros(len(x), 1, dtype=z.dtype)], 1))
    assert scores.isfinite().all()
    assert scores.std() > 0.1


@pytest.mark.parametrize("with_head", [False, True])
def test_a_saved_detector_gives_bitwise_the_same_scores_with_its_head(with_head, blobs, tmp_path):
    z, y, x = blobs
    detector = FusedRMD(head=head_of() if with_head else None, seed=3).fit_features(z.float(), y)
    detector.save(tmp_path / "fused.pt")
    for loaded in (FusedRMD.load(tmp_path / "fused.pt"), load_detector(tmp_path / "fused.pt")):
        assert torch.equal(loaded.predict_features(x.float()), detector.predict_features(x.float()))
        assert loaded.options == {"seed": 3, "keep_moments": False}
        again = loaded.fit_features(z.float(), y)  # with the head of the file
        torch.testing.assert_close(again.predict_features(x.float()), detector.predict_features(x.float()))
    given = head_of(seed=9)
    assert FusedRMD(head=given).load_state_dict(detector.state_dict()).head is given


def test_a_state_whose_shapes_do_not_belong_together_is_refused(blobs):
    state = FusedRMD(head=head_of()).fit_features(*blobs[:2]).state_dict()
    for name, change, message in (
        ("w", lambda t: t[:, :3], r"'w' .*expected \(5, 12\)"),
        ("rate", lambda t: t[:2], r"'rate' .*expected \(3,\)"),
        ("projection", lambda t: t[:, :2], "4 of 2 coordinates"),
        ("location", lambda t: t * torch.nan, "'location' has 3 NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            load_detector(state | {"tensors": state["tensors"] | {name: change(state["tensors"][name])}})


def test_far_classes_are_scored_in_float64():
    z, y, x = make_blobs(separation=200.0)
    detector = FusedRMD().fit_features(z.float(), y)
    assert float(detector.state_dict()["tensors"]["amplification"]) > MAX_FLOAT32_AMPLIFICATION
    exact = FusedRMD().fit_features(z.float().double(), y).predict_features(x.float().double())
    torch.testing.assert_close(detector.predict_features(x.float()), exact.float())


def test_gaussians_under_the_names_of_the_framework(blobs):
    z, y, _ = blobs
    detector, rmd = FusedRMD().fit_features(z, y), RMD(shrinkage="oas").fit_features(z, y)
    for name in ("mu", "cov", "precision", "background_mu", "background_cov", "background_precision"):
        assert torch.equal(getattr(detector, name), getattr(rmd, name))


def test_moments_of_a_loader_are_those_of_all_features_at_once(blobs):
    z, y, x = blobs
    head = head_of()
    whole = FusedRMD(head=head).fit_features(z, y).predict_features(x)
    batches = list(zip(z.split(7), y.split(7), strict=True))
    loader = FusedRMD(nn.Identity(), head=head).fit(batches)
    torch.testing.assert_close(loader.predict(x), whole)
    backwards = FusedRMD(nn.Identity(), head=head).fit(batches[::-1])
    torch.testing.assert_close(backwards.predict(x), whole)
    mixed = torch.cat([z, x]), torch.cat([y, torch.full((len(x),), -1)])
    torch.testing.assert_close(FusedRMD(head=head).fit_features(*mixed).predict_features(x), whole)


def test_moments_without_a_sample_are_refused(blobs):
    metric = RMD().new_moments()
    metric.update(*blobs[:2])
    with pytest.raises(ValueError, match="needs a sample beside the moments"):
        FusedRMD().fit_moments(metric.compute())


def test_one_pass_serves_rmd_and_fused(blobs):
    z, y, x = blobs
    metric = FusedRMD().new_moments()
    metric.update(z, y)
    for detector in (FusedRMD(), RMD(), Mahalanobis(covariance="diagonal")):
        fresh = type(detector)(**detector.options).fit_features(z, y).predict_features(x)
        torch.testing.assert_close(detector.fit_moments(metric.compute()).predict_features(x), fresh)


@pytest.mark.parametrize("per_class", [False, True])
def test_calibrated_decides_and_is_one_module(per_class):
    z, y, x = make_blobs(per_class=200)
    detector = Calibrated(FusedRMD(head=head_of()), per_class=per_class).fit_features(z[:500], y[:500])
    detector.calibrate_features(z[500:])
    scores, p_values, decisions = detector.to_module(torch.float64)(x)
    torch.testing.assert_close(scores, detector.predict_features(x))
    torch.testing.assert_close(p_values, detector.p_value_features(x))
    assert torch.equal(decisions, detector.is_ood_features(x))
    buffer = io.BytesIO()
    detector.save(buffer)
    buffer.seek(0)
    assert torch.equal(Calibrated.load(buffer).is_ood_features(x), decisions)
