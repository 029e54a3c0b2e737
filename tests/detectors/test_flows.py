"""Flows against nflows itself and torch's AdamW, equal to the Gaussian detectors before training, better after it."""

import sys
from copy import deepcopy

import numpy as np
import oracle
import pytest
import scipy.linalg
import torch
from conftest import make_blobs
from scipy.spatial.distance import pdist
from scipy.stats import multivariate_normal
from torch import nn

from rmd_plugin import RMD, FlowLikelihood, Mahalanobis, NumericalWarning, RelativeFlow
from rmd_plugin.detectors.flows import FlowSpec, stacked_log_prob

# without a validation part every flow leaves its start, so what is tested are flows and not Gaussians
QUICK = {"hidden_features": 16, "max_epochs": 3, "lr": 1e-2, "validation_fraction": 0.0, "progress": False}
VARIANTS = {
    "per class": {"sharing": "per_class"},
    "two transforms": {"sharing": "per_class", "transforms": 2, "num_blocks": 2},
    "conditional": {"sharing": "conditional"},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
PAPER = {"space": "features", "background": "flow", "sharing": "per_class"}
SPECS = {
    "maf": FlowSpec(5, 16),
    "two blocks, two transforms": FlowSpec(4, 8, num_blocks=2, transforms=2),
    "narrow": FlowSpec(20, 6),
    "one feature": FlowSpec(1, 8),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def arcs(count, seed=0, width=4):
    """Two classes on opposite arcs in the first two features; the others are noise."""
    y = torch.arange(count) % 2
    z = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    z[:, 1] = (1 - 2 * y) * (z[:, 0].square() + 1) + 0.3 * z[:, 1]
    return z, y


# -- densities --------------------------------------------------------------------------------------------------------


def bent(spec, count, scale=0.1):
    """Parameters away from the start; masked weights stay zero."""
    params, masks = spec.stack(count), spec.masks()
    return {
        name: (value + scale * torch.randn_like(value)) * masks.get(name, torch.ones(()))
        for name, value in params.items()
    }


@every_spec
def test_a_stack_of_flows_has_the_densities_of_nflows(spec):
    params, x = bent(spec, 3), 2.5 * torch.randn(3, 100, spec.features)
    flows = [spec.unstack(params, k) for k in range(3)]
    with torch.no_grad():
        expected = torch.stack([flow.log_prob(rows) for flow, rows in zip(flows, x, strict=True)])
    torch.testing.assert_close(stacked_log_prob(spec, params, x.transpose(1, 2)), expected, rtol=1e-5, atol=1e-5)
    start = torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(2)
    torch.testing.assert_close(stacked_log_prob(spec, spec.stack(3), x.transpose(1, 2)), start, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [SPECS["maf"], SPECS["narrow"]], ids=["maf", "narrow"])
def test_each_coordinate_depends_on_earlier_ones_only_and_on_all_of_them(spec):
    flow = spec.unstack(bent(spec, 1, scale=0.5), 0)
    jacobian = sum(
        torch.autograd.functional.jacobian(lambda x: flow.transform_to_noise(x[None])[0], x).abs()
        for x in 0.5 * torch.randn(20, spec.features)
    )
    assert bool((jacobian.triu(1) == 0).all())
    # a narrow network too must not lose the features at the end, as nflows' own numbering of the units would
    assert bool((jacobian[-1, :-1] > 0).all())


@every_variant
def test_class_scores_are_the_densities_of_nflows_at_the_coordinates(variant):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = FlowLikelihood(**QUICK, **variant).fit_features(z, y)
    scores = detector.class_scores(x)
    volumes = []
    for label in (0, 3):
        hot = torch.eye(5)[label].expand(len(x), 5) if variant["sharing"] == "conditional" else None
        with torch.no_grad():
            own = detector.class_flow(label).log_prob(detector.coordinates(x, label), hot)
        # up to the volume of the map, which is that of Sigma^(-1/2)
        torch.testing.assert_close(scores[:, label] + own, (scores[0, label] + own[0]).expand(80), rtol=1e-4, atol=1e-3)
        volumes.append(float((scores[:, label] + own).mean()))
    expected = 0.5 * np.linalg.slogdet(oracle.moments(z, y)[1])[1]
    np.testing.assert_allclose(volumes, expected, rtol=1e-3)


def test_class_densities_integrate_to_one_over_the_features():
    z, y = arcs(300, width=2)
    mixed = z @ torch.tensor([[1.0, 0.4], [-0.3, 0.8]])
    detector = FlowLikelihood(hidden_features=16, max_epochs=10, lr=1e-2, progress=False).fit_features(mixed, y)
    axis = torch.arange(-16, 16, 0.1)
    density = (-detector.class_scores(torch.cartesian_prod(axis, axis)).double()).exp()
    torch.testing.assert_close(density.sum(0) * 0.1**2, torch.ones(2).double(), rtol=0, atol=5e-3)


# -- the Gaussian start -----------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("shape", [{}, {"num_classes": 30, "width": 6, "per_class": 20}], ids=["K<D", "K>D"])
def test_without_training_the_scores_are_those_of_the_gaussian_detectors(variant, shape):
    z, y, x = make_blobs(**shape)
    for flow, gaussian in ((RelativeFlow, RMD), (FlowLikelihood, Mahalanobis)):
        scores = 2 * flow(**(QUICK | variant | {"max_epochs": 0})).fit_features(z, y).predict_features(x)
        expected = gaussian().fit_features(z, y).predict_features(x)
        scores += (expected - scores).mean()
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("space", ["features", "discriminant"])
@pytest.mark.parametrize("background", ["flow", "gaussian"])
def test_without_training_the_options_mean_what_they_mean_for_rmd(space, background, blobs):
    z, y, x = blobs
    for options in ({"shrinkage": 0.3}, {"shrinkage": "oas"}, {"normalize": True}):
        flow = RelativeFlow(max_epochs=0, space=space, background=background, **options)
        scores = 2 * flow.fit_features(z, y).predict_features(x)
        expected = RMD(**options).fit_features(z, y).predict_features(x)
        torch.testing.assert_close(scores - scores.mean(), expected - expected.mean(), rtol=1e-4, atol=1e-4)


def test_dead_and_dependent_features_are_left_out_as_in_rmd(blobs):
    z, y, x = blobs

    def widen(features):
        dead = features.new_full((len(features), 1), 7.0)
        return torch.cat([features[:, :4], dead, features[:, 4:], features[:, :1] - features[:, 1:2], dead], dim=1)

    for options in (PAPER, {}):
        with pytest.warns(NumericalWarning, match="rank 12 of 15"):
            start = RelativeFlow(**(QUICK | {"max_epochs": 0}), **options).fit_features(widen(z), y)
        scores, expected = 2 * start.predict_features(widen(x)), RMD().fit_features(z, y).predict_features(x)
        torch.testing.assert_close(scores - scores.mean(), expected - expected.mean(), rtol=1e-4, atol=1e-4)


def test_coordinates_whiten_each_class_and_keep_the_order_of_the_features(blobs):
    z, y, _ = blobs
    detector = RelativeFlow(max_epochs=0, space="features").fit_features(z, y)
    own = torch.cat([detector.coordinates(z[y == k], k) for k in range(5)])
    torch.testing.assert_close(own.T @ own / len(own), torch.eye(12).double(), rtol=0, atol=1e-9)
    turned = z.clone()
    turned[:, 7:] = torch.randn(300, 5).double()
    # features from the eighth on do not reach the first seven coordinates
    torch.testing.assert_close(detector.coordinates(turned)[:, :7], detector.coordinates(z)[:, :7])


@pytest.mark.parametrize("shape", [{}, {"num_classes": 2}, {"num_classes": 30, "width": 6}], ids=str)
def test_the_discriminant_space_and_its_background_are_the_textbooks(shape):
    z, y, x = make_blobs(**shape)
    options = QUICK | {"space": "discriminant", "sharing": "per_class"}
    relative = RelativeFlow(background="gaussian", **options).fit_features(z, y)
    likelihood = FlowLikelihood(**options).fit_features(z, y)  # of the same class flows
    gaussian = FlowLikelihood(**(options | {"max_epochs": 0})).fit_features(z, y)
    gains = torch.tensor([row["gaussian"] - row["trained"] for row in relative.training_report()])
    log_prob = torch.minimum(-likelihood.class_scores(x), gains - gaussian.class_scores(x))
    # what is left is log p_0, up to the volume of the map
    background = (relative.class_scores(x) + log_prob).numpy()
    _, within, mu_0, _, between = oracle.moments(z, y)
    variances, vectors = scipy.linalg.eigh(between, within)
    w, variances = (x.numpy() - mu_0) @ vectors[:, variances > 1e-9], 1 + variances[variances > 1e-9]
    assert w.shape[1] == min(z.shape[1], len(y.unique()) - 1) == relative.coordinates(x).shape[1]
    expected = multivariate_normal(cov=np.diag(variances)).logpdf(w)
    expected = (expected - expected.mean())[:, None] + 0 * background
    np.testing.assert_allclose(background - background.mean(), expected, atol=2e-3)
    # distances between samples do not depend on how the axes are turned
    np.testing.assert_allclose(pdist(relative.coordinates(x).numpy()), pdist(w), rtol=1e-6)


def test_equal_means_and_a_single_class_have_no_discriminant_space(blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match="discriminant"):
        detector = FlowLikelihood(space="discriminant", **QUICK).fit_features(z[y == 0], y[y == 0])
    assert detector.coordinates(x).shape == (80, 12)
    with pytest.warns(NumericalWarning, match="FlowLikelihood"):
        RelativeFlow(**QUICK, **PAPER).fit_features(z, torch.zeros_like(y))


# -- training ---------------------------------------------------------------------------------------------------------


def train_plain(flow, x, context, epochs, lr, weight_decay):
    """nflows' flow and torch's AdamW on all samples at once: loss at the start and the best, its epoch and the flow."""
    groups = [
        {"params": [p for p in flow.parameters() if p.ndim > 1]},
        {"params": [p for p in flow.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)
    best = start = -flow.log_prob(x, context).mean().item()
    best_epoch, best_flow = 0, deepcopy(flow)
    for epoch in range(1, epochs + 1):
        optimizer.zero_grad()
        (-flow.log_prob(x, context).mean()).backward()
        optimizer.step()
        loss = -flow.log_prob(x, context).mean().item()
        if loss < best:
            best, best_epoch, best_flow = loss, epoch, deepcopy(flow)
    return start, best, best_epoch, best_flow


@every_variant
def test_training_many_flows_at_once_is_training_plain_nflows_one_by_one(variant):
    torch.manual_seed(1)
    y = torch.tensor([0] * 50 + [1] * 17 + [2] * 33)[torch.randperm(100)]
    z = torch.randn(100, 4)
    z[:, 1] += 1.5 * (z[:, 0].square() - 1) + 3 * y
    # a large weight decay, which a mistake in it changes; with larger steps the order of the samples in a sum does, too
    options = QUICK | variant | {"max_epochs": 12, "lr": 1e-3, "weight_decay": 5.0, "batch_size": 100}
    detector = FlowLikelihood(**options).fit_features(z, y)
    shape = {"num_blocks": variant.get("num_blocks", 1), "transforms": variant.get("transforms", 1)}
    conditional = variant["sharing"] == "conditional"
    spec = FlowSpec(4, 16, contexts=3 if conditional else 0, **shape)
    groups = [range(3)] if conditional else [[0], [1], [2]]
    for row, labels in zip(detector.training_report(), groups, strict=True):
        x = torch.cat([detector.coordinates(z[y == k], k) for k in labels])
        context = torch.cat([torch.eye(3)[k].expand(int((y == k).sum()), 3) for k in labels]) if conditional else None
        start, best, epoch, flow = train_plain(spec.build(0), x, context, 12, 1e-3, 5.0)
        assert row["gaussian"] == pytest.approx(start, abs=2e-5)
        assert row["trained"] == pytest.approx(best, abs=2e-5)
        assert row["epoch"] == epoch
        with torch.no_grad():
            expected, trained = (f.log_prob(x, context) for f in (flow, detector.class_flow(labels[0])))
        torch.testing.assert_close(trained, expected, rtol=1e-3, atol=1e-3)


def test_flows_of_unequal_classes_do_not_depend_on_those_trained_beside_them():
    torch.manual_seed(1)
    sizes = (50, 17, 33, 64, 12)
    y = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))[torch.randperm(sum(sizes))]
    z = torch.randn(len(y), 4)
    z[:, 1] += 1.5 * (z[:, 0].square() - 1) + 2 * y
    options = QUICK | {"validation_fraction": 0.2, "batch_size": 8, "max_epochs": 40, "patience": 3}
    together, apart = (FlowLikelihood(class_chunk=c, **options).fit_features(z, y) for c in (100, 1))
    torch.testing.assert_close(together.class_scores(z), apart.class_scores(z), rtol=1e-3, atol=1e-3)
    rows = together.training_report()
    assert [row["epoch"] for row in rows] == [row["epoch"] for row in apart.training_report()]
    assert [row["flow"] for row in rows] == [0, 1, 2, 3, 4]
    assert len({row["epoch"] for row in rows}) > 2, "the classes should stop at different epochs"
    assert all(row["trained"] <= row["gaussian"] for row in rows)  # the best epoch is kept, the start included


def test_a_seed_repeats_the_fit_and_another_does_not(blobs):
    z, y, x = blobs
    scores = [RelativeFlow(seed=s, **QUICK).fit_features(z, y).predict_features(x) for s in (3, 3, 4)]
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])


@pytest.mark.slow
def test_heavy_tails_of_the_classes_do_not_make_far_samples_look_in_distribution():
    y = torch.arange(3000) % 3
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3000, 2, generator=generator) * (1 + 6 * torch.rand(3000, 1, generator=generator) ** 4)
    z[:, 0] += 10.0 * (y == 1)
    z[:, 1] += 10.0 * (y == 2)
    detector = RelativeFlow(progress=False, lr=1e-2).fit_features(z, y)
    [row] = detector.training_report()
    assert row["trained"] < row["gaussian"] - 0.1  # the flow has learned the tails
    directions = torch.randn(100, 2, generator=generator)
    ring = 5 + 100 * directions / directions.norm(dim=1, keepdim=True)
    start = RelativeFlow(progress=False, max_epochs=0).fit_features(z, y).predict_features(ring)
    # no more than its gain below the score that the Gaussians give
    assert (detector.predict_features(ring) > start - (row["gaussian"] - row["trained"]) - 1e-2).all()
    assert (detector.predict_features(ring) > detector.predict_features(z).max()).all()


# -- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["per_class", "conditional"])
def test_a_tiny_class_falls_back_to_its_gaussian_and_is_told(sharing, blobs):
    z, y, x = blobs
    rows = torch.cat([(y != 2).nonzero().flatten(), (y == 2).nonzero().flatten()[:7]])
    options = QUICK | {"sharing": sharing}
    with pytest.warns(NumericalWarning, match="fewer than 8 samples.*: .2"):
        detector = FlowLikelihood(**options).fit_features(z[rows], y[rows])
    with pytest.warns(NumericalWarning, match="fewer than 8 samples"):
        start = FlowLikelihood(**(options | {"max_epochs": 0})).fit_features(z[rows], y[rows])
    scores, gaussian = detector.class_scores(x), start.class_scores(x)
    torch.testing.assert_close(scores[:, 2], gaussian[:, 2])
    assert not any(torch.allclose(scores[:, k], gaussian[:, k], rtol=1e-3) for k in (0, 1, 3, 4))


def test_a_class_without_a_sample_has_no_flow(blobs):
    z, y, _ = blobs
    with pytest.warns(NumericalWarning, match="never nearest: .2, 5"):
        detector = RelativeFlow(**QUICK).fit_features(z, torch.tensor([0, 1, 3, 4, 6])[y])
    detector.class_flow(6)
    with pytest.raises(ValueError, match="class 2"):
        detector.class_flow(2)


def test_divergence_goes_back_to_the_gaussian_with_a_warning(blobs):
    z, y, x = blobs
    options = QUICK | {"lr": 1e20, "transforms": 2}
    with pytest.warns(NumericalWarning, match="learning rate"):
        diverged = FlowLikelihood(**options).fit_features(z, y)
    start = FlowLikelihood(**(options | {"max_epochs": 0})).fit_features(z, y)
    torch.testing.assert_close(diverged.predict_features(x), start.predict_features(x))


@pytest.mark.parametrize(
    "wrong",
    [{"sharing": "all"}, {"validation_fraction": 1.0}, {"shrinkage": 2.0}, {"space": "logits"}, {"background": "none"}],
    ids=str,
)
def test_wrong_options_are_refused_at_once(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RelativeFlow(**wrong)
    with pytest.raises(TypeError, match="background"):
        FlowLikelihood(background="gaussian")


def test_the_bar_is_an_option_and_needs_a_terminal(blobs, capsys, monkeypatch):
    z, y, _ = blobs
    detector = RelativeFlow(nn.Identity(), **(QUICK | PAPER | {"progress": True}))
    detector.fit([(z.float(), y)])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    detector.fit([(z.float(), y)])
    shown = capsys.readouterr().err
    assert all(part in shown for part in ("train 5 flows", "train 1 flows", "epoch=3", "val="))
    RelativeFlow(**QUICK).fit_features(z, y)
    assert capsys.readouterr().err == ""
