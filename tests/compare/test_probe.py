import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from rmd_plugin import NumericalWarning
from rmd_plugin.compare.probe import fit_linear_probe


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    y = torch.arange(150) % 3
    z = torch.randn(150, 6)
    z[:, 0] += 2.0 * y
    z[:, 1] *= 50
    return z + 7, y


def test_logits_are_those_of_scikit_learn_up_to_a_shift(data):
    z, y = data
    head = fit_linear_probe(z, y)
    x = ((z - z.mean(0)) / z.std(0, correction=0)).double().numpy()
    expected = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(x, y.numpy()).decision_function(x)
    found = head(z).double().numpy()
    # softmax does not see a number that is added to all logits
    assert np.allclose(found - found.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), atol=2e-3)


def test_scale_and_shift_of_the_features_do_not_matter(data):
    z, y = data
    scales = torch.logspace(-3, 3, 6)
    one, other = fit_linear_probe(z, y)(z), fit_linear_probe(z * scales - 5, y)(z * scales - 5)
    assert torch.allclose(one.log_softmax(1), other.log_softmax(1), atol=5e-3)


def test_dead_features_get_no_weight(data):
    z, y = data
    dead = torch.cat([z, torch.full((150, 1), 3.0), 1e-32 * torch.randn(150, 1)], dim=1)
    head = fit_linear_probe(dead, y)
    assert head.weight[:, 6:].abs().max() == 0
    assert torch.allclose(head(dead), fit_linear_probe(z, y)(z), atol=1e-4)


def test_samples_with_a_negative_label_are_left_out(data):
    z, y = data
    mixed = fit_linear_probe(torch.cat([z, torch.randn(50, 6)]), torch.cat([y, torch.full((50,), -1)]))
    assert torch.equal(mixed.weight, fit_linear_probe(z, y).weight)


def test_it_works_in_inference_mode_and_leaves_features_and_random_state_alone(data):
    z, y = data
    before, state = z.clone(), torch.random.get_rng_state()
    with torch.inference_mode():
        head = fit_linear_probe(z.clone(), y)
        assert torch.allclose(head.weight, fit_linear_probe(z, y).weight)
    assert torch.equal(z, before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not head.weight.requires_grad


def test_two_classes_and_classes_without_samples_have_their_logits(data):
    z, y = data
    assert fit_linear_probe(z, y.clamp(max=1)).out_features == 2
    assert fit_linear_probe(z, y, num_classes=5).out_features == 5


def test_a_fit_that_stops_early_says_so(data):
    with pytest.warns(NumericalWarning, match="not converged after 1 iterations"):
        fit_linear_probe(*data, max_iter=1)


def test_bad_input_is_refused(data):
    z, y = data
    with pytest.raises(ValueError, match="no ID sample"):
        fit_linear_probe(z, torch.full_like(y, -1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        fit_linear_probe(torch.full_like(z, torch.nan), y)
