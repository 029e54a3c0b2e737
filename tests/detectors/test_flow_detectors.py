"""FlowLikelihood and RelativeFlow: equal to the Gaussian detectors before training, better on curved data after it."""

import re
import sys

import numpy as np
import pytest
import scipy.linalg
import torch
from conftest import make_blobs
from pytorch_ood.api import ModelNotSetException, RequiresFittingException
from pytorch_ood.utils import GridSearch
from scipy.spatial.distance import pdist
from scipy.stats import multivariate_normal
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, FlowLikelihood, Mahalanobis, NumericalWarning, RelativeFlow, load_detector
from rmd_plugin.detectors.flows import optimizer
from rmd_plugin.detectors.flows.fitting import MIN_SAMPLES

DETECTORS = [FlowLikelihood, RelativeFlow]
every_detector = pytest.mark.parametrize("detector", DETECTORS)
# without a validation part every flow leaves its start, so what is tested are flows and not Gaussians
QUICK = {"hidden_features": 16, "max_epochs": 3, "lr": 1e-2, "validation_fraction": 0.0, "progress": False}
VARIANTS = {
    "maf": {"sharing": "per_class"},
    "rqs": {"sharing": "per_class", "kind": "rqs", "num_bins": 4},
    "two transforms": {"sharing": "per_class", "transforms": 2, "num_blocks": 2},
    "conditional": {"sharing": "conditional"},
    "conditional rqs": {"sharing": "conditional", "kind": "rqs", "transforms": 2},
}
PAPER = {"space": "features", "background": "flow", "sharing": "per_class"}
SETTINGS = [{"space": s, "background": b} for s in ("features", "discriminant") for b in ("flow", "gaussian")]
every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: " ".join(setting.values()))
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def arcs(count, seed=0, width=4):
    """Two classes on opposite arcs in the first two features; the others are noise."""
    y = torch.arange(count) % 2
    z = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    z[:, 1] = (1 - 2 * y) * (z[:, 0].square() + 1) + 0.3 * z[:, 1]
    return z, y


def torn_arcs(count, seed):
    """The same two features within each class, each as before, but no longer on an arc."""
    z, y = arcs(count, seed)
    for label in (0, 1):
        rows = (y == label).nonzero().flatten()
        z[rows, 1] = z[rows.roll(7), 1]
    return z


def auroc(detector, test_id, test_ood):
    labels = np.r_[np.zeros(len(test_id)), np.ones(len(test_ood))]
    return roc_auc_score(labels, detector.predict_features(torch.cat([test_id, test_ood])))


# -- the Gaussian start ---------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("shape", [{}, {"num_classes": 30, "width": 6, "per_class": 20}, {"separation": 20.0}], ids=str)
def test_without_training_the_scores_are_those_of_the_gaussian_detectors(variant, shape):
    z, y, x = make_blobs(**shape)
    for flow, gaussian in ((RelativeFlow, RMD), (FlowLikelihood, Mahalanobis)):
        scores = flow(**(QUICK | variant | {"max_epochs": 0})).fit_features(z, y).predict_features(x)
        expected = gaussian().fit_features(z, y).predict_features(x)
        offset = (2 * scores - expected).mean()
        torch.testing.assert_close(2 * scores - offset, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert torch.equal(scores.argsort()[::8], expected.argsort()[::8])


@every_setting
@pytest.mark.parametrize("options", [{}, {"shrinkage": 0.3}, {"shrinkage": "oas"}, {"normalize": True}], ids=str)
def test_without_training_the_options_mean_what_they_mean_for_rmd(options, setting, blobs):
    z, y, x = blobs
    scores = 2 * RelativeFlow(max_epochs=0, **setting, **options).fit_features(z, y).predict_features(x)
    expected = RMD(**options).fit_features(z, y).predict_features(x)
    torch.testing.assert_close(scores - scores.mean(), expected - expected.mean(), rtol=1e-4, atol=1e-4)


def test_dead_and_dependent_features_are_left_out_as_in_rmd(blobs):
    z, y, x = blobs

    def widen(features):
        dead = features.new_full((len(features), 1), 7.0)
        return torch.cat([features[:, :4], dead, features[:, 4:], features[:, :1] - features[:, 1:2], dead], dim=1)

    with pytest.warns(NumericalWarning, match="rank 12 of 15"):
        detector = RelativeFlow(**QUICK, **PAPER).fit_features(widen(z), y)
    assert detector.coordinates(widen(x)).shape == (80, 12)
    assert bool(detector.predict_features(widen(x)).isfinite().all())
    with pytest.warns(NumericalWarning, match="rank 12 of 15"):
        start = RelativeFlow(max_epochs=0).fit_features(widen(z), y)
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
    assert bool((detector._state["projection"].diagonal() > 0).all())


# -- the discriminant space -----------------------------------------------------------------------------------------


def discriminant_coordinates(z, y, x):
    """Textbook: coordinates of generalised eigenvectors of Sigma_B and Sigma, and the background's variances there."""
    means = np.stack([z[y == k].mean(0) for k in range(y.max() + 1)])
    within = np.cov((z - means[y]).T, bias=True)
    between, vectors = scipy.linalg.eigh(np.cov(z.T, bias=True) - within, within)
    kept = between > 1e-9
    return (x - z.mean(0)) @ vectors[:, kept], 1 + between[kept]


@pytest.mark.parametrize("shape", [{}, {"num_classes": 2}, {"num_classes": 30, "width": 6}], ids=str)
@pytest.mark.parametrize("sharing", ["per_class", "conditional"])
def test_the_background_is_the_gaussian_of_all_samples_in_the_discriminant_space(sharing, shape):
    z, y, x = make_blobs(**shape)
    options = QUICK | {"space": "discriminant", "sharing": sharing}
    relative = RelativeFlow(background="gaussian", **options).fit_features(z, y)
    likelihood = FlowLikelihood(**options).fit_features(z, y)  # of the same class flows
    gaussian = FlowLikelihood(**(options | {"max_epochs": 0})).fit_features(z, y)
    gains = torch.tensor([row["gaussian"] - row["trained"] for row in relative.training_report()])
    log_prob = torch.minimum(-likelihood.class_scores(x), gains - gaussian.class_scores(x))
    # what is left is log p_0, up to the volume of the map
    found = (relative.class_scores(x) + log_prob).numpy()
    w, variances = discriminant_coordinates(z.numpy(), y.numpy(), x.numpy())
    assert w.shape[1] == min(z.shape[1], len(y.unique()) - 1) == relative.coordinates(x).shape[1]
    expected = multivariate_normal(cov=np.diag(variances)).logpdf(w)
    np.testing.assert_allclose(found - found.mean(), (expected - expected.mean())[:, None] + 0 * found, atol=2e-3)
    # distances between samples do not depend on how the axes are turned
    np.testing.assert_allclose(pdist(relative.coordinates(x).numpy()), pdist(w), rtol=1e-6)


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
    far, rmd = detector.predict_features(ring), RMD().fit_features(z, y).predict_features(ring)
    # no more than its gain below the score that the Gaussians give, which is RMD / 2 plus a constant
    start = RelativeFlow(progress=False, max_epochs=0).fit_features(z, y).predict_features(ring)
    torch.testing.assert_close(start - start.mean(), (rmd - rmd.mean()) / 2, rtol=1e-3, atol=1e-3)
    assert (far > start - (row["gaussian"] - row["trained"]) - 1e-2).all()
    assert (far > detector.predict_features(z).max()).all()


@pytest.mark.parametrize("kind", ["maf", "rqs"])
def test_two_classes_have_one_direction(kind):
    z, y, x = make_blobs(num_classes=2, dtype=torch.float32)
    for setting in ({"background": "flow"}, {"background": "gaussian", "transforms": 2}):
        detector = RelativeFlow(space="discriminant", kind=kind, **QUICK, **setting).fit_features(z, y)
        assert detector.coordinates(x).shape == (80, 1)
        # half-way between the means the score is higher than at either
        means = torch.stack([z[y == k].mean(0) for k in (0, 1)])
        first, second, middle = detector.predict_features(torch.cat([means, means.mean(0, keepdim=True)]))
        assert middle > max(first, second)


def test_means_on_a_line_leave_one_direction_and_equal_means_that_of_the_features(blobs):
    z, y, x = blobs
    own = z - torch.stack([z[y == k].mean(0) for k in range(5)])[y]
    line = own + y[:, None] * torch.ones(12)
    detector = RelativeFlow(space="discriminant", **QUICK).fit_features(line, y)
    assert detector.coordinates(x).shape == (80, 1)
    with pytest.warns(NumericalWarning, match="there is no discriminant space"):
        detector = FlowLikelihood(space="discriminant", **QUICK).fit_features(z[y == 0], y[y == 0])
    assert detector.coordinates(x).shape == (80, 12)


@pytest.mark.slow
@every_setting
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_settings_are_saved_loaded_and_exported(setting, tmp_path):
    z, y, x = make_blobs(dtype=torch.float32)
    fitted = RelativeFlow(**QUICK, **setting).fit_features(z, y)
    fitted.save(tmp_path / "flow.pt")
    loaded = load_detector(tmp_path / "flow.pt")
    assert {name: loaded.options[name] for name in setting} == setting
    assert torch.equal(loaded.predict_features(x), fitted.predict_features(x))
    program = torch.export.export(loaded.to_module(), (x[:3],), dynamic_shapes={"z": {0: torch.export.Dim("batch")}})
    torch.testing.assert_close(program.module()(x), fitted.predict_features(x))
    # options that are changed later belong to the next fit
    fitted.background = "flow" if fitted.background == "gaussian" else "gaussian"
    assert torch.equal(fitted.to_module()(x), loaded.to_module()(x))


@every_detector
def test_states_from_before_the_settings_keep_their_meaning(detector):
    z, y, x = make_blobs(dtype=torch.float32)
    setting = PAPER if detector is RelativeFlow else {"space": "features"}
    fitted = detector(**QUICK, **setting).fit_features(z, y)
    state = fitted.state_dict()
    for name in ("space", "background"):
        state["options"].pop(name, None)
    for loaded in (load_detector(state), detector().load_state_dict(state)):
        assert loaded.options == fitted.options
        assert torch.equal(loaded.predict_features(x), fitted.predict_features(x))


def test_a_likelihood_has_no_background():
    with pytest.raises(TypeError, match="background"):
        FlowLikelihood(background="gaussian")


# -- after training -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_relative_flow_finds_what_only_a_curved_density_can_tell_apart():
    (z, y), (fresh, _), torn = arcs(600), arcs(400, seed=1), torn_arcs(400, seed=2)
    options = {"hidden_features": 32, "lr": 1e-2, "max_epochs": 20, "progress": False}
    relative = RelativeFlow(**options, **PAPER).fit_features(z, y)
    plain = FlowLikelihood(**options).fit_features(z, y)
    assert auroc(RMD().fit_features(z, y), fresh, torn) < 0.55
    assert auroc(Mahalanobis().fit_features(z, y), fresh, torn) < 0.55
    assert auroc(relative, fresh, torn) > 0.75
    assert auroc(plain, fresh, torn) > 0.68
    for row in relative.training_report():
        assert row["trained"] < row["gaussian"] - 0.2
    # nats of fresh samples, in the space of the features
    gaussian = FlowLikelihood(max_epochs=0).fit_features(z, y)
    assert plain.predict_features(fresh).mean() < gaussian.predict_features(fresh).mean() - 0.5


def test_class_densities_integrate_to_one_over_the_features():
    z, y = arcs(300, width=2)
    mixed = z @ torch.tensor([[1.0, 0.4], [-0.3, 0.8]])
    detector = FlowLikelihood(hidden_features=16, max_epochs=10, lr=1e-2, progress=False).fit_features(mixed, y)
    axis = torch.arange(-16, 16, 0.08)
    density = (-detector.class_scores(torch.cartesian_prod(axis, axis)).double()).exp()
    torch.testing.assert_close(density.sum(0) * 0.08**2, torch.ones(2).double(), rtol=0, atol=3e-3)


def test_conditional_and_per_class_flows_agree_on_easy_data():
    z, y, _ = make_blobs(separation=6.0, dtype=torch.float32)
    noise = 3 * torch.randn(100, 12)
    options = QUICK | {"lr": 2e-3}
    separate, shared = (RelativeFlow(sharing=s, **options).fit_features(z, y) for s in ("per_class", "conditional"))
    for detector in (separate, shared):
        assert (detector.nearest_class(z) == y).float().mean() > 0.99
        assert auroc(detector, z, noise) > 0.97
    both = torch.stack([separate.predict_features(z), shared.predict_features(z)])
    assert torch.corrcoef(both)[0, 1] > 0.9


@every_variant
def test_class_flows_are_flows_of_nflows(variant):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = FlowLikelihood(**(QUICK | variant)).fit_features(z, y)
    scores = detector.class_scores(x)
    for label in (0, 3):
        hot = torch.eye(5)[label].expand(len(x), 5) if variant["sharing"] == "conditional" else None
        with torch.no_grad():
            own = detector.class_flow(label).log_prob(detector.coordinates(x, label), hot)
        expected = -own - detector._state["log_volume"].float()
        torch.testing.assert_close(scores[:, label], expected, rtol=1e-5, atol=1e-4)


# -- the interface of the detectors ---------------------------------------------------------------------------------


@every_detector
def test_class_scores_and_nearest_class_belong_to_the_score(detector):
    z, y, x = make_blobs(dtype=torch.float32)
    fitted = detector(**QUICK).fit_features(z, y)
    scores = fitted.class_scores(x)
    assert scores.shape == (80, 5)
    assert torch.equal(scores.amin(1), fitted.predict_features(x))
    assert torch.equal(scores.argmin(1), fitted.nearest_class(x))
    assert fitted.predict_features(x.double()).dtype == torch.float64
    assert fitted.predict_features(x.bfloat16()).dtype == torch.float32
    assert next(iter(type(fitted).__init__.__annotations__)) == "encoder"


@every_detector
def test_fitting_on_a_loader_equals_fitting_on_features(detector):
    z, y, x = make_blobs(dtype=torch.float32)
    model = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Tanh())
    labels = torch.where(torch.arange(len(y)) % 10 == 0, -1, y)
    loader = DataLoader(TensorDataset(z, labels), batch_size=64)
    fitted = detector(model, **QUICK).fit(loader)
    assert model.training
    model.eval()
    with torch.no_grad():
        expected = detector(**QUICK).fit_features(model(z), labels).predict_features(model(x))
    torch.testing.assert_close(fitted.predict(x), expected, rtol=1e-4, atol=1e-4)


def test_samples_below_zero_have_no_influence(blobs):
    z, y, x = blobs
    expected = RelativeFlow(**QUICK).fit_features(z, y).predict_features(x)
    mixed_z, mixed_y = torch.cat([z, 100 + z]), torch.cat([y, torch.full_like(y, -1)])
    torch.testing.assert_close(RelativeFlow(**QUICK).fit_features(mixed_z, mixed_y).predict_features(x), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fitting_and_scoring_inside_the_hooks_of_lightning(mode):
    z, y, x = make_blobs(dtype=torch.float32)
    expected = RelativeFlow(**QUICK).fit_features(z, y).predict_features(x)
    state = torch.get_rng_state()
    with mode():
        inside = RelativeFlow(**QUICK).fit_features(z * 1, y)
        assert torch.equal(inside.predict_features(x), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inside.predict_features(x), expected)
    assert inside.fit_features(z, y) is inside


def test_the_chunk_of_classes_does_not_change_the_result(blobs):
    z, y, x = blobs
    whole, part = (RelativeFlow(class_chunk=c, **QUICK).fit_features(z, y) for c in (None, 2))
    torch.testing.assert_close(part.predict_features(x), whole.predict_features(x), rtol=1e-4, atol=1e-4)


def test_a_seed_repeats_the_fit_and_another_does_not(blobs):
    z, y, x = blobs
    scores = [RelativeFlow(seed=s, **QUICK).fit_features(z, y).predict_features(x) for s in (3, 3, 4)]
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])


@every_detector
@every_variant
def test_a_saved_detector_scores_bitwise_the_same(detector, variant, tmp_path):
    z, y, x = make_blobs(dtype=torch.float32)
    fitted = detector(**(QUICK | variant | {"hidden_features": None})).fit_features(z, y)
    fitted.save(tmp_path / "flow.pt")
    assert load_detector(tmp_path / "flow.pt").num_features == 12
    assert torch.equal(load_detector(tmp_path / "flow.pt").predict_features(x), fitted.predict_features(x))
    loaded = detector.load(tmp_path / "flow.pt")
    assert torch.equal(loaded.predict_features(x), fitted.predict_features(x))
    assert torch.equal(loaded.class_scores(x), fitted.class_scores(x))
    assert str(loaded.training_report()) == str(fitted.training_report())
    assert loaded.options == fitted.options
    other = RelativeFlow if detector is FlowLikelihood else FlowLikelihood
    with pytest.raises(ValueError, match=f"belongs to {detector.__name__}, expected {other.__name__}"):
        other().load_state_dict(fitted.state_dict())


@pytest.mark.parametrize(
    ("detector", "variant"),
    [
        (FlowLikelihood, "maf"),
        (RelativeFlow, "maf"),
        (RelativeFlow, "conditional"),
        pytest.param(RelativeFlow, "rqs", marks=pytest.mark.slow),
        pytest.param(RelativeFlow, "two transforms", marks=pytest.mark.slow),
        pytest.param(RelativeFlow, "conditional rqs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torch_export_equals_eager_for_any_batch_size(detector, variant):
    z, y, x = make_blobs(dtype=torch.float32)
    fitted = detector(**(QUICK | VARIANTS[variant])).fit_features(z, y)
    module = fitted.to_module()
    assert not list(module.parameters())
    torch.testing.assert_close(module(x), fitted.predict_features(x))
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (x[:3],), dynamic_shapes={"z": {0: batch}})
    torch.testing.assert_close(program.module()(x), fitted.predict_features(x))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["maf", "rqs", "conditional"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnxruntime_agrees_with_eager(variant, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    z, y, x = make_blobs(dtype=torch.float32)
    detector = RelativeFlow(**(QUICK | VARIANTS[variant])).fit_features(z, y)
    path, batch = tmp_path / "flow.onnx", torch.export.Dim("batch")
    torch.onnx.export(
        detector.to_module(), (x[:3],), path, dynamo=True, dynamic_shapes={"z": {0: batch}}, verbose=False
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = detector.predict_features(x).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@every_detector
def test_the_module_is_differentiable(detector):
    z, y, x = make_blobs()
    module = detector(**QUICK).fit_features(z, y).to_module(torch.float64)
    assert torch.autograd.gradcheck(module, (x[:3].clone().requires_grad_(),))


def test_the_grid_search_of_the_framework_fits_flows(monkeypatch):
    z, y, x = make_blobs(dtype=torch.float32)
    monkeypatch.setattr(RelativeFlow, "hyperparameter_space", {"kind": ["maf", "rqs"]})
    detector = RelativeFlow(nn.Identity(), **QUICK)
    train = DataLoader(TensorDataset(z, y), batch_size=100)
    validation = DataLoader(TensorDataset(x, (torch.arange(80) < 40).long() - 1), batch_size=40)
    best = GridSearch(detector, train, validation).run()
    assert set(best) == {"kind"}
    assert detector.state_dict()["options"]["kind"] == best["kind"]


def test_the_detector_stays_on_the_device_it_is_given(blobs):
    z, y, x = blobs
    detector = RelativeFlow(device="cpu", **QUICK).fit_features(z, y)
    assert detector.device == torch.device("cpu")
    assert torch.equal(detector.to("cpu").predict_features(x), detector.predict_features(x))
    if torch.cuda.is_available():
        moved = RelativeFlow(device="cuda", **QUICK).fit_features(z, y)
        torch.testing.assert_close(moved.predict_features(x).cpu(), detector.predict_features(x), rtol=1e-3, atol=1e-2)


def test_the_bar_is_an_option_and_needs_a_terminal(blobs, capsys, monkeypatch):
    z, y, _ = blobs
    loader = DataLoader(TensorDataset(z.float(), y), batch_size=100)
    detector = RelativeFlow(nn.Identity(), **(QUICK | PAPER | {"progress": True}))
    detector.fit(loader)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    detector.fit(loader)
    shown = capsys.readouterr().err
    titles = ("fit RelativeFlow", "class flows", "background flow")
    assert all(part in shown for part in (*titles, "epoch=3", "train=", "val="))
    RelativeFlow(**QUICK).fit_features(z, y)
    assert capsys.readouterr().err == ""


def test_the_report_has_a_row_per_flow(blobs):
    z, y, _ = blobs
    rows = RelativeFlow(**QUICK, **PAPER).fit_features(z, y).training_report()
    assert [row["flow"] for row in rows] == [0, 1, 2, 3, 4, "background"]
    assert all(row["trained"] < row["gaussian"] for row in rows)
    assert all(row["epoch"] == 3 for row in rows)
    for detector in (FlowLikelihood(sharing="conditional", **QUICK), RelativeFlow(background="gaussian", **QUICK)):
        assert [row["flow"] for row in detector.fit_features(z, y).training_report()] == ["conditional"]


# -- trouble --------------------------------------------------------------------------------------------------------


@every_detector
def test_unfitted_use_and_missing_encoder(detector, blobs):
    name = detector.__name__
    for use in ("predict_features", "class_scores", "nearest_class", "coordinates"):
        with pytest.raises(RequiresFittingException, match=f"{name} is not fitted"):
            getattr(detector(), use)(torch.zeros(1, 2))
    for use in ("state_dict", "to_module", "training_report"):
        with pytest.raises(RequiresFittingException, match=f"{name} is not fitted"):
            getattr(detector(), use)()
    with pytest.raises(ModelNotSetException, match="use fit_features"):
        detector().fit([])
    with pytest.raises(ModelNotSetException, match="use predict_features"):
        detector(**QUICK).fit_features(*blobs[:2]).predict(torch.zeros(1, 3))


@every_detector
def test_bad_features_and_labels_are_refused(detector, blobs):
    z, y, x = blobs
    make = detector(**QUICK)
    for value in (torch.nan, torch.inf):
        broken = z.clone()
        broken[3, 2] = value
        with pytest.raises(ValueError, match=r"NaN and . infinite feature values in 1 of 300"):
            make.fit_features(broken, y)
    with pytest.raises(TypeError, match="labels must be integers"):
        make.fit_features(z, y + 0.5)
    with pytest.raises(ValueError, match=r"labels must have shape \(300,\)"):
        make.fit_features(z, y[:-1])
    with pytest.raises(TypeError, match="floating-point tensor"):
        make.fit_features(z.long(), y)
    with pytest.raises(ValueError, match="Pool tokens"):
        make.fit_features(z[:, None], y)
    with pytest.raises(ValueError, match="no in-distribution sample"):
        make.fit_features(z, torch.full_like(y, -1))
    with pytest.raises(ValueError, match="no feature varies within the classes"):
        make.fit_features(torch.ones_like(z), y)
    assert not make.fitted
    make.fit_features(z, y)
    with pytest.raises(ValueError, match=r"shape \(B, 12\), got \(80, 5\)"):
        make.predict_features(x[:, :5])


@every_variant
def test_samples_that_are_not_finite_score_nan_and_an_empty_batch_nothing(variant, blobs):
    z, y, x = blobs
    detector = RelativeFlow(**(QUICK | variant)).fit_features(z, y)
    x = x[:5].clone()
    x[1, 0], x[3, 4] = torch.nan, -torch.inf
    assert detector.predict_features(x).isnan().tolist() == [False, True, False, True, False]
    assert detector.predict_features(x[:0]).shape == (0,)
    assert detector.class_scores(x[:0]).shape == (0, 5)
    assert detector.nearest_class(x[:0]).shape == (0,)


def test_feature_maps_are_averaged(blobs):
    z, y, x = blobs
    spread = torch.randn(1, 1, 2, 3).double()
    spread = spread - spread.mean()
    fitted = RelativeFlow(**QUICK).fit_features(z[..., None, None] + spread, y)
    expected = RelativeFlow(**QUICK).fit_features(z, y).predict_features(x)
    torch.testing.assert_close(fitted.predict_features(x[..., None, None] + spread), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharing", ["per_class", "conditional"])
def test_a_tiny_class_falls_back_to_its_gaussian_and_is_named(sharing, blobs):
    z, y, x = blobs
    rows = torch.cat([(y != 2).nonzero().flatten(), (y == 2).nonzero().flatten()[: MIN_SAMPLES - 1]])
    options = QUICK | {"sharing": sharing}
    with pytest.warns(NumericalWarning, match=r"fewer than 8 samples, .* the Gaussian is used: class 2\."):
        detector = FlowLikelihood(**options).fit_features(z[rows], y[rows])
    with pytest.warns(NumericalWarning, match="class 2"):
        start = FlowLikelihood(**(options | {"max_epochs": 0})).fit_features(z[rows], y[rows])
    scores, gaussian = detector.class_scores(x), start.class_scores(x)
    torch.testing.assert_close(scores[:, 2], gaussian[:, 2])
    assert not any(torch.allclose(scores[:, k], gaussian[:, k], rtol=1e-3) for k in (0, 1, 3, 4))
    assert bool(scores.isfinite().all())


def test_classes_without_a_sample_are_never_nearest(blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match=r"2 of 7 classes have no sample and are never nearest: 2, 5\."):
        detector = RelativeFlow(**QUICK).fit_features(z, torch.tensor([0, 1, 3, 4, 6])[y])
    scores = detector.class_scores(x)
    assert scores.shape == (80, 7)
    assert bool((scores[:, [2, 5]] == torch.inf).all())
    assert set(detector.nearest_class(x).tolist()) <= {0, 1, 3, 4, 6}
    detector.class_flow(6)
    with pytest.raises(ValueError, match="no flow for class 2"):
        detector.class_flow(2)


def test_a_single_class_has_no_ratio(blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match="Use FlowLikelihood"):
        RelativeFlow(**QUICK, **PAPER).fit_features(z, torch.zeros_like(y))
    assert FlowLikelihood(**QUICK).fit_features(z, torch.zeros_like(y)).predict_features(x).shape == (80,)


def test_one_feature_is_enough():
    z, y = torch.randn(100, 1), torch.arange(100) % 2
    detector = RelativeFlow(**(QUICK | {"max_epochs": 10})).fit_features(z + 5.0 * y[:, None], y)
    near, far = detector.predict_features(torch.tensor([[5.0], [2.5]]))
    assert near < far


@pytest.mark.slow
@every_detector
def test_divergence_goes_back_to_the_gaussian_with_a_warning(detector, blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match=r"went back to the best parameters before: .*Try a learning rate below"):
        fitted = detector(**(QUICK | {"lr": 1e20, "transforms": 2})).fit_features(z, y)
    start = detector(**(QUICK | {"max_epochs": 0, "transforms": 2})).fit_features(z, y)
    torch.testing.assert_close(fitted.predict_features(x), start.predict_features(x))


@pytest.mark.slow
@pytest.mark.parametrize("when", [1, 9])
def test_an_interrupt_leaves_a_detector_that_scores(when, blobs, monkeypatch):
    z, y, x = blobs
    adamw, calls = optimizer.adamw, 0

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == when:
            raise KeyboardInterrupt
        return adamw(*args, **kwargs)

    monkeypatch.setattr(optimizer, "adamw", interrupted)
    with pytest.warns(UserWarning, match="interrupted"):
        detector = RelativeFlow(**(QUICK | PAPER | {"max_epochs": 50})).fit_features(z, y)
    assert detector.interrupted
    scores = detector.predict_features(x)
    assert bool(scores.isfinite().all())
    report = detector.training_report()
    assert report[-1]["epoch"] == 0
    if when == 1:
        start = RelativeFlow(**(QUICK | PAPER | {"max_epochs": 0})).fit_features(z, y)
        assert torch.equal(scores, start.predict_features(x))
    assert not detector.fit_features(z, y).interrupted


@pytest.mark.parametrize(
    "wrong",
    [
        {"transforms": 0},
        {"hidden_features": 0},
        {"num_blocks": -1},
        {"kind": "glow"},
        {"sharing": "all"},
        {"max_epochs": -1},
        {"batch_size": 0},
        {"lr": 0.0},
        {"weight_decay": -1.0},
        {"validation_fraction": 1.0},
        {"patience": 0},
        {"class_chunk": 0},
        {"seed": -1},
        {"shrinkage": 2.0},
        {"shrinkage": "ledoit"},
        {"space": "logits"},
        {"background": "none"},
    ],
    ids=str,
)
def test_wrong_options_are_refused_at_once(wrong):
    with pytest.raises(ValueError, match=re.escape(next(iter(wrong)))):
        RelativeFlow(**wrong)
