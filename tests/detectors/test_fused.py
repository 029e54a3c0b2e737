"""FusedRMD against the textbook: refits without each sample, the formula of its score, and the sample that it draws."""

import re

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs
from scipy.special import logsumexp
from torch import nn

from rmd_plugin import RMD, FusedRMD, Mahalanobis, NumericalWarning
from rmd_plugin.detectors import fused
from rmd_plugin.detectors.fused import left_out_distances


def head_of(width=12, classes=5, seed=3):
    torch.manual_seed(seed)
    return nn.Linear(width, classes).double().requires_grad_(False)


def shrinkage_of(sigma, count):
    """OAS by its formula, for covariances divided by the number of samples."""
    width, power, mean = len(sigma), (sigma**2).mean(), np.trace(sigma) / len(sigma)
    return min(1.0, (power + mean**2) / ((count + 1) * (power - mean**2 / width)))


def textbook(z, y):
    """Class means, shrunk Sigma, mu_0, Sigma_0 and the intensity."""
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


def expected_scores(z, y, x, head=None):
    """The score as the formula says, with a refit for each training sample."""
    z, y, x = np.asarray(z, dtype=np.float64), np.asarray(y), np.asarray(x, dtype=np.float64)
    means, sigma, mu_0, sigma_0, _ = textbook(z, y)

    def members(distances, background, features):
        logits = -distances / 2 if head is None else head(torch.from_numpy(features)).numpy()
        nearest = distances.min(1)
        return np.stack([background - nearest, logsumexp(logits, axis=1) - logits.mean(1), np.log(nearest)])

    several = [i for i in range(len(z)) if (y == y[i]).sum() > 1]
    left_out = [refitted(z, y, i) for i in several]
    train = members(np.stack([near for near, _ in left_out]), np.stack([far for _, far in left_out]), z[several])
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
    np.testing.assert_allclose(distances, np.stack([near for near, _ in brute]), rtol=1e-8)
    np.testing.assert_allclose(background, [far for _, far in brute], rtol=1e-8)


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("shape", [{"per_class": 12}, {"num_classes": 3, "width": 20, "per_class": 5}], ids=str)
def test_scores_are_those_of_the_formula_with_refits(shape, with_head):
    z, y, x = make_blobs(**shape)
    head = head_of(z.shape[1]) if with_head else None
    expected = expected_scores(z, y, x, head)
    np.testing.assert_allclose(FusedRMD(head=head).fit_features(z, y).predict_features(x), expected, rtol=1e-7)
    single = FusedRMD(head=head).fit_features(z.float(), y).predict_features(x.float())
    np.testing.assert_allclose(single, expected, rtol=1e-4, atol=1e-4)


def test_classes_of_one_sample_are_told_and_copies_count_as_often_as_they_occur(blobs):
    z, y, x = blobs
    z, y = torch.cat([z[:60], z[:20], z[:20], x[-2:]]), torch.cat([y[:60], y[:20], y[:20], torch.tensor([5, 6])])
    with pytest.warns(NumericalWarning, match="2 classes have one sample"):
        detector = FusedRMD().fit_features(z, y)
    np.testing.assert_allclose(detector.predict_features(x[:60]), expected_scores(z, y, x[:60]), rtol=1e-7)
    assert detector.nearest_class(x[-2:]).tolist() == [5, 6]


def test_what_all_logits_have_in_common_changes_nothing(blobs):
    z, y, x = blobs
    head, moved = head_of(), head_of()
    moved.weight += torch.randn(12, dtype=torch.float64)
    moved.bias += 7.0
    plain, offset = (FusedRMD(head=h).fit_features(z, y).predict_features(x) for h in (head, moved))
    torch.testing.assert_close(plain, offset)


def test_a_head_is_a_layer_or_weights_is_read_at_each_fit_and_saved(blobs, tmp_path):
    z, y, x = blobs
    head = head_of()
    detector = FusedRMD(head=head, seed=3).fit_features(z, y)
    before = detector.predict_features(x)
    weights = FusedRMD(w=head.weight.clone(), b=head.bias.clone(), seed=3).fit_features(z, y)
    assert torch.equal(weights.predict_features(x), before)
    detector.save(tmp_path / "fused")
    head.weight.mul_(2)
    assert torch.equal(detector.predict_features(x), before)
    assert not torch.allclose(detector.fit_features(z, y).predict_features(x), before)
    loaded = FusedRMD.load(tmp_path / "fused").fit_features(z, y)  # with the head of the file
    torch.testing.assert_close(loaded.predict_features(x), before, rtol=1e-5, atol=1e-5)


def test_a_detector_with_a_head_keeps_it_when_it_takes_over_a_fit_with_another_one(blobs):
    z, y, x = blobs
    own, other = head_of(), head_of()
    other.weight.mul_(2)
    saved = FusedRMD(head=other).fit_features(z, y)
    detector = FusedRMD(head=own).load_state_dict(saved.state_dict())
    assert torch.equal(detector.predict_features(x), saved.predict_features(x))
    # the layer of a network that goes on learning, which a copy would not
    expected = FusedRMD(head=own).fit_features(z, y).predict_features(x)
    assert torch.equal(detector.fit_features(z, y).predict_features(x), expected)


def test_what_was_fitted_can_be_updated_without_an_option(blobs):
    z, y, x = blobs
    detector = FusedRMD().fit_features(z[:200], y[:200]).update(z[200:], y[200:])
    expected = FusedRMD().fit_features(z, y).predict_features(x)
    torch.testing.assert_close(detector.predict_features(x), expected)


@pytest.mark.parametrize(
    ("options", "error", "key"),
    [
        ({"head": nn.Sequential(nn.Linear(12, 5))}, TypeError, "Sequential"),
        ({"head": nn.Linear(12, 5), "w": torch.ones(5, 12)}, ValueError, "head="),
        ({"b": torch.ones(5)}, ValueError, "w="),
        ({"w": torch.ones(5, 12), "b": torch.ones(4)}, ValueError, "(C,)"),
        ({"w": torch.ones(12)}, ValueError, "(C, D)"),
        ({"w": torch.ones(12, 5)}, ValueError, "5 features"),
        ({"head": nn.Linear(7, 5)}, ValueError, "7 features"),
        ({"w": torch.full((5, 12), torch.nan)}, ValueError, "NaN"),
    ],
)
def test_heads_and_options_that_do_not_fit_are_refused(options, error, key, blobs):
    with pytest.raises(error, match=re.escape(key)):
        FusedRMD(**options).fit_features(*blobs[:2])


def test_a_head_whose_energy_is_constant_is_told(blobs):
    with pytest.warns(NumericalWarning, match="adds nothing"):
        detector = FusedRMD(head=nn.Linear(12, 1)).fit_features(*blobs[:2])
    assert not detector.members(blobs[2]).energy.any()


def test_members_sum_to_the_score_and_the_first_is_rmd(blobs):
    z, y, x = blobs
    detector, rmd = FusedRMD(head=head_of()).fit_features(z, y), RMD(shrinkage="oas").fit_features(z, y)
    members = detector.members(x)
    torch.testing.assert_close(members.relative + members.energy + members.guard, detector.predict_features(x))
    assert (members.guard >= 0).all()
    np.testing.assert_allclose(np.corrcoef(members.relative, rmd.predict_features(x))[0, 1], 1, atol=1e-9)
    assert torch.equal(detector.nearest_class(x), rmd.nearest_class(x))
    assert detector.intensity == rmd.intensity > 0
    assert torch.equal(detector.background_precision, rmd.background_precision)


def test_far_samples_that_rmd_cancels_are_caught(blobs):
    z, y, _ = blobs
    means, sigma, mu_0, *_ = textbook(z, y)
    offsets = np.stack([means[k] - mu_0 for k in range(5)])
    # a direction in which the class means agree, in the metric of Sigma: RMD does not see it
    hidden = torch.from_numpy(np.linalg.svd(offsets @ np.linalg.inv(sigma))[2][-1])
    far = z[:50] + 40 * hidden * (z @ hidden).std()
    cancelled = RMD(shrinkage="oas").fit_features(z, y)
    torch.testing.assert_close(cancelled.predict_features(far), cancelled.predict_features(z[:50]))
    detector = FusedRMD().fit_features(z, y)
    assert detector.predict_features(far).min() > detector.predict_features(z).max()


def test_a_single_class_leaves_the_guard(blobs):
    z, _, x = blobs
    y = torch.zeros(len(z), dtype=torch.long)
    with pytest.warns(NumericalWarning, match="single class"):
        members = FusedRMD().fit_features(z, y).members(x)
    for constant in (members.relative, members.energy):
        assert torch.equal(constant, constant[:1].expand(len(x)))
    assert members.guard.max() > 0


def test_a_direction_that_one_sample_spans_alone_stays_finite():
    z, y, x = make_blobs(num_classes=3, width=6, per_class=2000)
    lone = torch.zeros(len(z), 1, dtype=z.dtype)
    lone[0] = 1e6
    detector = FusedRMD().fit_features(torch.cat([z, lone], 1), y)
    assert detector.predict_features(torch.cat([x, 0 * x[:, :1]], 1)).isfinite().all()


def test_far_classes_are_scored_as_in_float64():
    z, y, x = make_blobs(separation=200.0, dtype=torch.float32)
    exact = FusedRMD().fit_features(z.double(), y).predict_features(x.double())
    torch.testing.assert_close(FusedRMD().fit_features(z, y).predict_features(x), exact.float())


def test_one_pass_serves_rmd_and_fused_and_moments_alone_do_not(blobs):
    z, y, x = blobs
    metric, plain = FusedRMD().new_moments(), RMD().new_moments()
    metric.update(z, y)
    plain.update(z, y)
    for detector in (FusedRMD(), RMD(), Mahalanobis(covariance="diagonal")):
        fresh = type(detector)(**detector.options).fit_features(z, y).predict_features(x)
        torch.testing.assert_close(detector.fit_moments(metric.compute()).predict_features(x), fresh)
    with pytest.raises(ValueError, match="new_moments"):
        FusedRMD().fit_moments(plain.compute())
    with pytest.raises(ValueError, match="new_moments"):
        metric.compute() + plain.compute()


# -- the sample for the standardisation -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    """More samples than are drawn, some of them several times."""
    torch.manual_seed(0)
    z, y = torch.randn(26_000, 3), torch.arange(26_000) % 7
    return torch.cat([z, z[:4000], z[:1000]]), torch.cat([y, y[:4000], y[:1000]])


def collected(z, y, batch=1000, seed=0):
    metric = FusedRMD(seed=seed).new_moments()
    for rows, labels in zip(z.split(batch), y.split(batch), strict=True):
        metric.update(rows, labels)
    return metric


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("keys", "rows", "labels"))


def content(moments):
    return [(*row, label) for row, label in zip(moments.rows.tolist(), moments.labels.tolist(), strict=True)]


def test_the_sample_does_not_depend_on_order_batches_or_parts(many):
    z, y = many
    whole = collected(z, y, len(z)).compute()
    assert len(whole.keys) == 10_000
    order = torch.randperm(len(z))
    for rows, labels, batch in ((z, y, 777), (z[order], y[order], 2048), (z.flip(0), y.flip(0), 9999)):
        assert same(collected(rows, labels, batch).compute(), whole)
    parts = [
        collected(rows, labels) for rows, labels in zip(z.split([500, 30_500]), y.split([500, 30_500]), strict=True)
    ]
    assert same(parts[1].compute() + parts[0].compute(), whole)
    parts[0].merge_state(parts[1])
    assert same(parts[0].compute(), whole)
    with pytest.raises(ValueError, match="seed"):
        parts[0].merge_state(collected(z[:9], y[:9], seed=5))


def test_the_draw_is_fair_and_the_seed_changes_it(many):
    z, y = many[0][:26_000], many[1][:26_000]
    first, second = (collected(z, y, seed=seed).compute() for seed in (0, 1))
    share = 10_000 / len(z)
    for sample in (first, second):
        counts = torch.bincount(sample.labels) / torch.bincount(y)
        assert (abs(counts - share) < 4 * (share * (1 - share) / len(z) * 7) ** 0.5).all()
        assert abs(sample.rows.mean(0)).max() < 4 / 10_000**0.5
    both = set(content(first)) & set(content(second))
    assert len(both) == pytest.approx(10_000 * share, rel=0.05)


def test_samples_that_differ_in_one_bit_or_in_their_label_are_drawn_apart(many):
    z, y = many[0][:5000], many[1][:5000]
    whole, wrong = collected(z, y).compute(), z[:3].clone()
    wrong[1, 0] = torch.nextafter(wrong[1, 0], torch.tensor(9.0))
    for rows, labels in ((wrong, y[:3]), (z[[0, 0]], y[[0, 0]]), (z[7:8], y[:1] + 1)):
        with pytest.raises(ValueError, match="1 of"):
            whole - collected(rows, labels).compute()


def test_memory_is_bounded_and_the_sample_a_copy(monkeypatch):
    monkeypatch.setattr(fused, "SAMPLE_SIZE", 100)
    metric = FusedRMD().new_moments()
    for _ in range(100):
        z = torch.randn(32, 2)
        metric.update(z, torch.randint(0, 3, (32,)))
        z.zero_()
        assert sum(map(len, metric.sample_rows)) <= 232
    assert metric.compute().rows.abs().sum(1).all()
    assert len(metric.compute().keys) == 100


def test_what_is_forgotten_is_gone_from_the_sample_and_a_sample_that_has_shrunk_is_told(many):
    z, y = many[0][:26_000], many[1][:26_000]
    whole, gone = collected(z, y).compute(), collected(z[:12_000], y[:12_000]).compute()
    forgotten = set(content(collected(z[:6000], y[:6000]).compute())) | set(
        content(collected(z[6000:12_000], y[6000:12_000]).compute())
    )
    assert set(content(whole - gone)) == set(content(whole)) - forgotten
    with pytest.warns(NumericalWarning, match="shrunk"):
        whole - collected(z[:6000], y[:6000]).compute() - collected(z[6000:20_000], y[6000:20_000]).compute()
