"""The flow engine against nflows itself, against training one by one, and against what a density must be."""

import functools
import math
import sys
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation
from nflows.transforms.made import MADE
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from rmd_plugin import FlowLikelihood
from rmd_plugin.detectors.flows import fitting as flow_training
from rmd_plugin.detectors.flows import optimizer
from rmd_plugin.detectors.flows.fitting import (
    MIN_SAMPLES,
    TrainingOptions,
    epoch_batches,
    flow_generator,
    split_rows,
    train_flows,
)
from rmd_plugin.detectors.flows.scoring import FlowBank
from rmd_plugin.detectors.flows.spec import FlowSpec, stacked_log_prob

SHAPES = {
    "maf": FlowSpec(5, 16),
    "two blocks": FlowSpec(5, 16, num_blocks=2),
    "no block": FlowSpec(5, 16, num_blocks=0),
    "three transforms": FlowSpec(4, 8, transforms=3),
    "narrow": FlowSpec(20, 6),
    "one feature": FlowSpec(1, 8),
    "rqs": FlowSpec(5, 16, kind="rqs", tail_bound=3.0),
    "rqs, two transforms, narrow": FlowSpec(9, 4, transforms=2, kind="rqs", num_bins=4),
}
every_shape = pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES)


def conditional(spec, classes):
    return replace(spec, contexts=classes)


def bent(spec, count, scale=0.1):
    """Parameters away from the start; masked weights stay zero."""
    params, masks = spec.stack(count), spec.masks()
    for name, value in params.items():
        value += scale * torch.randn_like(value)
        if name in masks:
            value *= masks[name]
    return params


def banana(count, seed=0, bend=1.0):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    x[:, 1] = 0.3 * x[:, 1] + bend * (x[:, 0].square() - 1)
    return (x - x.mean(0)) / x.std(0)


def moons(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(count, generator=generator)
    upper = torch.rand(count, generator=generator) < 0.5
    sign = torch.where(upper, 1.0, -1.0)
    x = torch.stack([sign * angle.cos() + torch.where(upper, 0.0, 1.0), sign * angle.sin() + 0.5 * ~upper], dim=1)
    x = x + 0.1 * torch.randn(x.shape, generator=generator)
    return (x - x.mean(0)) / x.std(0)


# -- densities ------------------------------------------------------------------------------------------------------


@every_shape
def test_densities_equal_those_of_nflows_with_the_same_parameters(spec):
    params, centres, u = bent(spec, 3), torch.randn(3, spec.features), 2.5 * torch.randn(200, spec.features)
    with torch.no_grad():
        expected = torch.stack([spec.unstack(params, k).log_prob(u - centres[k]) for k in range(3)], dim=1)
        shifted = (u - centres[:, None]).transpose(1, 2)
        torch.testing.assert_close(stacked_log_prob(spec, params, shifted).T, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(FlowBank(spec, params, centres)(u), expected, rtol=1e-5, atol=1e-5)


@every_shape
def test_conditional_densities_equal_those_of_nflows_with_a_one_hot_context(spec):
    spec = conditional(spec, 4)
    params, centres, u = bent(spec, 1), torch.randn(4, spec.features), 2.5 * torch.randn(100, spec.features)
    flow, contexts = spec.unstack(params, 0), torch.arange(100) % 4
    with torch.no_grad():
        hot = torch.eye(4)
        expected = torch.stack([flow.log_prob(u - centres[k], hot[k].expand(100, 4)) for k in range(4)], dim=1)
        torch.testing.assert_close(FlowBank(spec, params, centres)(u), expected, rtol=1e-5, atol=1e-5)
        own = stacked_log_prob(spec, params, (u - centres[contexts]).T[None], contexts[None])[0]
        torch.testing.assert_close(own, expected.gather(1, contexts[:, None])[:, 0], rtol=1e-5, atol=1e-5)


def test_densities_equal_vmap_over_the_modules_of_nflows():
    spec = FlowSpec(6, 12, transforms=2)
    params, x = bent(spec, 4), torch.randn(4, 30, 6)

    class LogProb(nn.Module):
        def __init__(self, flow):
            super().__init__()
            self.flow = flow

        def forward(self, value):
            return self.flow.log_prob(value)

    modules = [LogProb(spec.unstack(params, k)) for k in range(4)]
    stacked, buffers = stack_module_state(modules)
    expected = vmap(lambda p, b, v: functional_call(modules[0], (p, b), (v,)))(stacked, buffers, x)
    torch.testing.assert_close(stacked_log_prob(spec, params, x.transpose(1, 2)), expected, rtol=1e-5, atol=1e-5)


@every_shape
def test_a_new_flow_is_the_standard_normal(spec):
    x = 3 * torch.randn(2, spec.features, 50)
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1)
    torch.testing.assert_close(stacked_log_prob(spec, spec.stack(2), x), normal, rtol=1e-5, atol=1e-5)


@every_shape
def test_each_coordinate_depends_on_earlier_ones_only_and_on_all_of_them(spec):
    if spec.transforms > 1:
        pytest.skip("the order is reversed between transforms")
    flow = spec.unstack(bent(spec, 1, scale=0.5), 0)
    jacobian = sum(
        torch.autograd.functional.jacobian(lambda x: flow.transform_to_noise(x[None])[0], x).abs()
        for x in 0.5 * torch.randn(20, spec.features)
    )
    assert bool((jacobian.triu(1) == 0).all())
    # a narrow network too must not lose the features at the end, as nflows' own numbering of the units would
    seen = (jacobian[-1, :-1] > 0).float().mean() if spec.features > 1 else 1.0
    assert seen == 1.0


def test_wide_networks_have_the_masks_of_nflows():
    spec = FlowSpec(7, 16, num_blocks=2)
    ours = next(m for m in spec.build().modules() if isinstance(m, MADE))
    theirs = MADE(7, 16, num_blocks=2, output_multiplier=2)
    for (name, mine), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("kind", ["maf", "rqs"])
@pytest.mark.parametrize("transforms", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trained_density_integrates_to_one(kind, transforms):
    spec = FlowSpec(2, 32, transforms=transforms, kind=kind)
    options = TrainingOptions(max_epochs=12, lr=5e-3, patience=12)
    fit = train_flows(spec, banana(400), torch.zeros(400).long(), 1, options)
    assert int(fit.epochs[0]) > 0
    axis = torch.arange(-14, 14, 0.07)
    bank = FlowBank(spec, fit.params, torch.zeros(1, 2))
    with torch.no_grad():
        mass = sum(bank(part).double().exp().sum() for part in torch.cartesian_prod(axis, axis).split(20_000)) * 0.07**2
        # two affine transforms can have heavy tails: what nflows samples beyond the grid is missing on it
        beyond = (spec.unstack(fit.params, 0).sample(20_000).abs().amax(1) > 14).double().mean()
    assert float(mass + beyond) == pytest.approx(1.0, abs=3e-3)
    assert float(mass) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("data", "kind", "gain"), [(banana, "maf", 0.5), (moons, "rqs", 0.2)])
def test_held_out_nats_beat_the_gaussian_on_curved_data(data, kind, gain):
    spec = FlowSpec(2, 32, kind=kind)
    options = TrainingOptions(max_epochs=25, lr=1e-2)
    fit = train_flows(spec, data(600), torch.zeros(600).long(), 1, options)
    fresh = data(4000, seed=1)
    with torch.no_grad():
        flow = stacked_log_prob(spec, fit.params, fresh.T[None]).mean()
    covariance = torch.cov(data(600).T)
    gaussian = torch.distributions.MultivariateNormal(data(600).mean(0), covariance).log_prob(fresh).mean()
    assert flow > gaussian + gain


def plain_nflows(seed):
    torch.manual_seed(seed)
    parts = [MaskedAffineAutoregressiveTransform(2, 64, num_blocks=1) for _ in range(2)]
    return Flow(CompositeTransform([parts[0], ReversePermutation(2), parts[1]]), StandardNormal([2]))


@pytest.mark.slow
def test_two_transforms_reach_the_nats_of_plain_nflows_on_two_moons():
    sizes, nothing, fresh = 1500, torch.zeros(1500).long(), moons(10_000, seed=100)
    ours, theirs = [], []
    for seed in range(3):
        x = moons(sizes, seed)
        detector = FlowLikelihood(transforms=2, progress=False).fit_features(x, nothing)
        ours.append(detector.predict_features(fresh).mean())
        [flow] = train_one_by_one(None, x, nothing, 1, TrainingOptions(seed=seed + 1), build=plain_nflows)[2]
        with torch.no_grad():
            theirs.append(-flow.log_prob(fresh).mean())
    assert torch.stack(ours).mean() < torch.stack(theirs).mean() + 0.02, (ours, theirs)


def test_a_plain_class_has_the_standard_normal_around_its_centre():
    spec = conditional(FlowSpec(3, 8), 3)
    centres, u = torch.randn(3, 3), torch.randn(10, 3)
    bank = FlowBank(spec, bent(spec, 1), centres, torch.tensor([False, True, False]))
    bare = FlowBank(spec, bent(spec, 1), centres, None)
    assert bare.plain is None
    normal = torch.distributions.Normal(centres[1], 1.0).log_prob(u).sum(1)
    torch.testing.assert_close(bank(u)[:, 1], normal)


def test_the_bank_gives_the_same_for_any_chunk_of_classes():
    spec = FlowSpec(4, 8)
    bank, u = FlowBank(spec, bent(spec, 7), torch.randn(7, 4)), torch.randn(20, 4)
    whole = bank(u)
    bank.chunk = 3
    torch.testing.assert_close(bank(u), whole, rtol=1e-6, atol=1e-6)


# -- training -------------------------------------------------------------------------------------------------------


def train_one_by_one(spec, x, y, count, options, contexts=None, *, build=None):
    """The reference: nflows' flow and torch's AdamW, one class after the other. Best losses, their epochs and flows."""
    losses, epochs, flows = [], [], []
    for flow_index in range(count):
        rows = (y == flow_index).nonzero().flatten()
        generator = flow_generator(options.seed, flow_index)
        training, validation = split_rows(rows, options.validation_fraction, generator)
        flow = (build or spec.build)(options.seed)
        weights = [p for p in flow.parameters() if p.ndim > 1]
        biases = [p for p in flow.parameters() if p.ndim == 1]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=options.lr, weight_decay=options.weight_decay)

        def loss(rows, flow=flow):
            hot = None if contexts is None else torch.eye(spec.contexts)[contexts[rows]]
            return -flow.log_prob(x[rows], hot).mean()

        best, best_epoch, stale, kept = loss(validation).item(), 0, 0, deepcopy(flow)
        steps = math.ceil(len(training) / options.batch_size)
        for epoch in range(1, options.max_epochs + 1):
            order = training[torch.randperm(len(training), generator=generator)]
            for step in range(steps):
                optimizer.zero_grad()
                loss(order[step * len(order) // steps : (step + 1) * len(order) // steps]).backward()
                optimizer.step()
            now = loss(validation).item()
            if now < best:
                best, best_epoch, stale, kept = now, epoch, 0, deepcopy(flow)
            else:
                stale += 1
            if stale >= options.patience and epoch * steps >= options.warm_up:
                break
        losses.append(best)
        epochs.append(best_epoch)
        flows.append(kept)
    return torch.tensor(losses), torch.tensor(epochs), flows


def unequal_classes(sizes=(50, 17, 33, 64, 12), width=4, bend=0.7):
    y = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])[torch.randperm(sum(sizes))]
    x = torch.randn(len(y), width)
    x[:, 1] += bend * (x[:, 0].square() - 1)
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(
    "spec", [FlowSpec(4, 12), FlowSpec(4, 12, kind="rqs"), FlowSpec(4, 12, transforms=2)], ids=("maf", "rqs", "twice")
)
def test_training_at_once_equals_training_one_by_one(spec, chunk):
    x, y = unequal_classes(bend=1.5)
    options = TrainingOptions(
        max_epochs=12, batch_size=16, lr=5e-3, weight_decay=0.1, patience=3, warm_up=10, chunk=chunk
    )
    fit = train_flows(spec, x, y, 5, options)
    losses, epochs, _ = train_one_by_one(spec, x, y, 5, options)
    if spec.transforms > 1:  # the better of two starts
        build = functools.partial(spec.build, identity=False)
        others, other_epochs, _ = train_one_by_one(spec, x, y, 5, options, build=build)
        assert 0 < int((others < losses).sum()) < 5, "each start should be the better for some class"
        epochs = torch.where(others < losses, other_epochs, epochs)
        losses = losses.minimum(others)
    torch.testing.assert_close(fit.loss, losses, rtol=1e-4, atol=0)
    assert torch.equal(fit.epochs, epochs)
    assert len(set(epochs.tolist())) > 2, "the classes should stop at different epochs for this test to say much"


def test_conditional_training_equals_nflows_with_a_context():
    x, y = unequal_classes()
    spec = FlowSpec(4, 12, contexts=5)
    options = TrainingOptions(max_epochs=6, batch_size=32, lr=5e-3, patience=3, warm_up=0)
    nothing = torch.zeros_like(y)
    fit = train_flows(spec, x, nothing, 1, options, contexts=y)
    losses, epochs, _ = train_one_by_one(spec, x, nothing, 1, options, contexts=y)
    torch.testing.assert_close(fit.loss, losses, rtol=1e-4, atol=0)
    assert torch.equal(fit.epochs, epochs)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_an_epoch_takes_every_sample_exactly_once(sizes, batch_size):
    sizes = sorted(sizes, reverse=True)
    orders = [100 * k + torch.randperm(size) for k, size in enumerate(sizes)]
    seen, lengths = [[] for _ in sizes], [[] for _ in sizes]
    for rows, weights in epoch_batches(orders, batch_size):
        torch.testing.assert_close(weights.sum(1), torch.ones(len(rows)))
        for k in range(len(rows)):
            real = rows[k][weights[k] > 0]
            seen[k] += real.tolist()
            lengths[k].append(len(real))
    for k, order in enumerate(orders):
        assert seen[k] == order.tolist()
        assert max(lengths[k]) <= batch_size
        assert max(lengths[k]) - min(lengths[k]) <= 1
        assert len(lengths[k]) == math.ceil(sizes[k] / batch_size)


@given(st.integers(MIN_SAMPLES, 300), st.floats(0.0, 0.99))
@settings(max_examples=60, deadline=None)
def test_a_split_loses_no_sample(size, fraction):
    rows = 1000 + torch.arange(size)
    training, validation = split_rows(rows, fraction, torch.Generator().manual_seed(0))
    if fraction == 0:
        assert torch.equal(training, rows)
        assert torch.equal(validation, rows)
    else:
        assert sorted(torch.cat([training, validation]).tolist()) == rows.tolist()
        assert len(training) >= 1
        assert len(validation) >= 2


def test_a_flow_does_not_depend_on_the_others():
    x, y = unequal_classes()
    options = TrainingOptions(max_epochs=5, batch_size=16, lr=5e-3)
    spec = FlowSpec(4, 12)
    together = train_flows(spec, x, y, 5, options)
    alone = train_flows(spec, x[y == 0], y[y == 0], 1, options)
    for name, value in alone.params.items():
        torch.testing.assert_close(value[0], together.params[name][0], rtol=1e-4, atol=1e-6)


def test_the_kept_parameters_are_those_of_the_best_epoch():
    x, y = unequal_classes()
    options = TrainingOptions(max_epochs=30, batch_size=8, lr=2e-2, patience=4, warm_up=0)
    spec = FlowSpec(4, 12)
    fit = train_flows(spec, x, y, 5, options)
    assert bool((fit.loss <= fit.start_loss).all())
    for k in range(5):
        rows = (y == k).nonzero().flatten()
        _, validation = split_rows(rows, options.validation_fraction, flow_generator(0, k))
        own = {name: value[k : k + 1] for name, value in fit.params.items()}
        loss = -stacked_log_prob(spec, own, x[validation].T[None]).mean()
        torch.testing.assert_close(loss, fit.loss[k], rtol=1e-5, atol=0)


def test_a_stopped_flow_leaves_the_stack(monkeypatch):
    x, y = unequal_classes()
    widths = []

    def recorded(spec, params, x, contexts=None):
        widths.append(len(x))
        return stacked_log_prob(spec, params, x, contexts)

    monkeypatch.setattr(flow_training, "stacked_log_prob", recorded)
    options = TrainingOptions(max_epochs=40, batch_size=100, lr=2e-2, patience=3, warm_up=0)
    fit = train_flows(FlowSpec(4, 12), x, y, 5, options)
    assert widths[0] == 5
    assert widths == sorted(widths, reverse=True)
    # the loss at the start, and then for each flow: its best epoch, the patience, one training and one validation each
    assert sum(widths) == 5 + 2 * int((fit.epochs + 3).clamp(max=40).sum())


def test_no_flow_is_stopped_before_it_has_warmed_up(monkeypatch):
    x, y = unequal_classes(sizes=(64, 12))
    epochs = []
    evaluate = flow_training._Stack.evaluate
    monkeypatch.setattr(flow_training._Stack, "evaluate", lambda self: epochs.append(len(self.flows)) or evaluate(self))
    # a learning rate at which nothing gets better: 58 and 10 training samples, that is 8 and 2 steps per epoch
    options = TrainingOptions(max_epochs=40, batch_size=8, lr=1.0, patience=2, warm_up=32)
    fit = train_flows(FlowSpec(4, 12), x, y, 2, options)
    assert fit.epochs.tolist() == [0, 0]
    assert fit.diverged == []
    assert epochs == [2] + 4 * [2] + 12 * [1]


def test_without_a_validation_part_all_epochs_run_on_all_samples():
    x, y = unequal_classes()
    options = TrainingOptions(max_epochs=8, batch_size=64, validation_fraction=0.0, patience=1, lr=1e-3)
    fit = train_flows(FlowSpec(4, 12), x, y, 5, options)
    assert fit.epochs.tolist() == [8] * 5
    assert bool((fit.loss < fit.start_loss).all())


def test_weights_that_the_mask_forbids_stay_zero():
    x, y = unequal_classes()
    spec = FlowSpec(4, 12, num_blocks=2)
    fit = train_flows(spec, x, y, 5, TrainingOptions(max_epochs=3, lr=1e-2))
    for name, mask in spec.masks().items():
        assert bool((fit.params[name][:, mask == 0] == 0).all())
        assert bool((fit.params[name][:, mask == 1] != 0).any())


def test_training_repeats_for_a_seed_and_leaves_the_global_random_state_alone():
    x, y = unequal_classes()
    train = functools.partial(train_flows, FlowSpec(4, 12), x, y, 5)
    state = torch.get_rng_state()
    first = train(TrainingOptions(max_epochs=3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(10)
    second, other = train(TrainingOptions(max_epochs=3)), train(TrainingOptions(max_epochs=3, seed=1))
    for name, value in first.params.items():
        assert torch.equal(value, second.params[name])
    assert not torch.equal(first.loss, other.loss)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_works_where_autograd_is_off(mode):
    x, y = unequal_classes()
    expected = train_flows(FlowSpec(4, 12), x, y, 5, TrainingOptions(max_epochs=3))
    with mode():
        fit = train_flows(FlowSpec(4, 12), x.clone(), y, 5, TrainingOptions(max_epochs=3))
    for name, value in fit.params.items():
        assert torch.equal(value, expected.params[name])
        assert not value.is_inference()
        assert not value.requires_grad


def test_autocast_does_not_reach_the_training():
    x, y = unequal_classes()
    expected = train_flows(FlowSpec(4, 12), x, y, 5, TrainingOptions(max_epochs=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fit = train_flows(FlowSpec(4, 12), x, y, 5, TrainingOptions(max_epochs=2))
    assert torch.equal(fit.loss, expected.loss)


def test_small_flows_are_left_at_their_start():
    x, y = unequal_classes(sizes=(30, MIN_SAMPLES - 1, MIN_SAMPLES, 1, 0))
    spec = FlowSpec(4, 12)
    fit = train_flows(spec, x, y, 5, TrainingOptions(max_epochs=3, lr=1e-2))
    assert fit.skipped == [1, 3, 4]
    assert fit.loss.isnan().tolist() == [False, True, False, True, True]
    for name, value in spec.stack(1).items():
        for flow in fit.skipped:
            assert torch.equal(fit.params[name][flow], value[0])


def test_a_flow_that_diverges_goes_back_to_its_best_and_does_not_touch_the_others(monkeypatch):
    x, y = unequal_classes()
    options = TrainingOptions(max_epochs=12, batch_size=16, lr=5e-3)
    spec = FlowSpec(4, 12)
    healthy = train_flows(spec, x, y, 5, options)
    calls = 0

    def poisoned(spec, params, x, contexts=None):
        nonlocal calls
        calls += torch.is_grad_enabled()
        result = stacked_log_prob(spec, params, x, contexts)
        if calls == 20 and torch.is_grad_enabled():
            # flows are sorted by size: row 0 is flow 3
            result = torch.cat([result[:1] * torch.nan, result[1:]])
        return result

    monkeypatch.setattr(flow_training, "stacked_log_prob", poisoned)
    fit = train_flows(spec, x, y, 5, options)
    assert fit.diverged == [3]
    assert 0 < int(fit.epochs[3]) < 6
    assert fit.start_loss[3] > fit.loss[3]
    assert all(bool(value[3].isfinite().all()) for value in fit.params.values())
    for flow in (0, 1, 2, 4):
        torch.testing.assert_close(fit.loss[flow], healthy.loss[flow], rtol=1e-4, atol=0)


def test_an_absurd_learning_rate_leaves_finite_parameters():
    x, y = unequal_classes()
    fit = train_flows(FlowSpec(4, 12, transforms=2), x, y, 5, TrainingOptions(max_epochs=5, lr=1e20))
    assert sorted(fit.diverged) == [0, 1, 2, 3, 4]
    assert torch.equal(fit.loss, fit.start_loss)
    assert all(bool(value.isfinite().all()) for value in fit.params.values())


def test_an_interrupt_keeps_the_best_so_far(monkeypatch):
    x, y = unequal_classes()
    spec, options = FlowSpec(4, 12), TrainingOptions(max_epochs=40, batch_size=100, lr=5e-3, chunk=3)
    calls = 0

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return adamw(*args, **kwargs)

    adamw = optimizer.adamw
    monkeypatch.setattr(optimizer, "adamw", interrupted)
    fit = train_flows(spec, x, y, 5, options)
    assert fit.interrupted
    assert bool((fit.loss[[0, 2, 3]] < fit.start_loss[[0, 2, 3]]).any())
    assert bool((fit.loss[[0, 2, 3]] <= fit.start_loss[[0, 2, 3]]).all())
    # the second stack had not begun
    assert fit.epochs[[1, 4]].tolist() == [0, 0]
    assert bool(fit.loss[[1, 4]].isnan().all())


def test_an_interrupt_while_the_best_is_stored_does_not_mix_epochs(monkeypatch):
    x, y = unequal_classes()
    spec, options = FlowSpec(4, 12), TrainingOptions(max_epochs=40, batch_size=100, lr=5e-3)
    expected = train_flows(spec, x, y, 5, TrainingOptions(max_epochs=2, batch_size=100, lr=5e-3))
    copy, calls = flow_training._Stack._copy, 0

    def interrupted(self, rows, loss, epoch):
        nonlocal calls
        calls += 1
        if calls == 2:
            name = next(iter(self.params))
            self.fit.params[name][self.flows[rows]] = self.params[name][rows]
            raise KeyboardInterrupt
        copy(self, rows, loss, epoch)

    monkeypatch.setattr(flow_training._Stack, "_copy", interrupted)
    fit = train_flows(spec, x, y, 5, options)
    assert fit.interrupted
    for name, value in fit.params.items():
        assert torch.equal(value, expected.params[name])


def test_the_bar_shows_the_epoch_and_both_losses(capsys, monkeypatch):
    x, y = unequal_classes()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train_flows(FlowSpec(4, 12), x, y, 5, TrainingOptions(max_epochs=2, progress=True), title="class flows")
    shown = capsys.readouterr().err
    for part in ("class flows", "epoch=2", "flows=5", "train=", "val="):
        assert part in shown
    train_flows(FlowSpec(4, 12), x, y, 5, TrainingOptions(max_epochs=2))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_epochs": -1},
        {"max_epochs": 1.5},
        {"batch_size": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"weight_decay": -1.0},
        {"validation_fraction": 1.0},
        {"patience": 0},
        {"warm_up": -1},
        {"seed": -1},
        {"chunk": 0},
        {"batch_size": True},
    ],
    ids=str,
)
def test_wrong_training_options_are_refused(wrong):
    name = "class_chunk" if "chunk" in wrong else next(iter(wrong))
    with pytest.raises(ValueError, match=name):
        TrainingOptions(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_features": 0},
        {"transforms": 0},
        {"num_blocks": -1},
        {"kind": "glow"},
        {"num_bins": 2.5},
        {"tail_bound": 0.0},
    ],
    ids=str,
)
def test_wrong_shapes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FlowSpec(**{"features": 3, "hidden_features": 8, **wrong})
