"""What all detectors share: one test for each promise of the base class, for every public detector.

A new detector is found by its public name. The last one here is the example of CONTRIBUTING.md, read from that page.
"""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_blobs
from pytorch_ood.api import FeaturesDetector, ModelNotSetException, RequiresFittingException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rmd_plugin
from rmd_plugin import RMD, Calibrated, FlowLikelihood, FusedRMD, NumericalWarning, RelativeFlow, load_detector
from rmd_plugin.detectors.detectors import StatefulDetector


def example():
    """The detector that CONTRIBUTING.md shows how to add."""
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"## Add a detector\n.*?```python\n(.*?)```", page, re.DOTALL)[1], names)
    return names["Cosine"]


Cosine = example()
# without a validation part every flow leaves its start, so what is tested are flows and not Gaussians
QUICK = {"hidden_features": 8, "max_epochs": 2, "lr": 1e-2, "validation_fraction": 0.0, "progress": False}
PAPER = {"background": "flow", "space": "features", "sharing": "per_class", "transforms": 2}
PUBLIC = [getattr(rmd_plugin, name) for name in rmd_plugin.__all__]
#: options without which a detector cannot be made, or takes long
OPTIONS = {"PartialMahalanobis": {"components": 4}, "FlowLikelihood": QUICK, "RelativeFlow": QUICK}
DETECTORS = {
    kind.__name__: partial(kind, **OPTIONS.get(kind.__name__, {}))
    for kind in PUBLIC
    if isinstance(kind, type) and issubclass(kind, StatefulDetector)
} | {
    "normalized": partial(RMD, normalize=True, shrinkage=0.1),
    "diagonal": partial(RMD, covariance="diagonal"),
    "head": partial(FusedRMD, w=torch.linspace(-1, 1, 60).view(5, 12)),
    "paper's flow": partial(RelativeFlow, **QUICK, **PAPER),
    "example of CONTRIBUTING": partial(Cosine),
}
FLOWS = [name for name, make in DETECTORS.items() if not make.func.from_moments]


@pytest.fixture(params=DETECTORS)
def make(request):
    """Makes the detector, with an encoder and options."""
    return DETECTORS[request.param]


@pytest.fixture(params=[name for name in DETECTORS if name not in FLOWS])
def make_from_moments(request):
    return DETECTORS[request.param]


def has_classes(detector):
    return "classes" in detector.state_dict()["tensors"]


def test_the_example_of_contributing_is_the_textbook(blobs):
    z, y, x = (part.numpy() for part in blobs)
    means = np.stack([z[y == k].mean(0) for k in range(5)])
    cosine = (x @ means.T) / np.linalg.norm(x, axis=1, keepdims=True) / np.linalg.norm(means, axis=1)
    np.testing.assert_allclose(Cosine().fit_features(*blobs[:2]).predict_features(blobs[2]), 1 - cosine.max(1))


def test_it_is_a_detector_of_the_framework(make):
    detector = make()
    assert isinstance(detector, FeaturesDetector)
    assert detector.requires_fit
    assert not detector.fitted
    assert set(detector.get_hyperparameters()) == set(detector.hyperparameter_space)


def test_before_the_fit_and_without_an_encoder_it_says_so(make, blobs):
    z, y, x = blobs
    detector = make()
    for use in (detector.predict_features, detector.predict, detector.class_scores, detector.nearest_class):
        with pytest.raises(RequiresFittingException, match="fit"):
            use(x)
    for use in (detector.state_dict, detector.to_module):
        with pytest.raises(RequiresFittingException, match="fit"):
            use()
    with pytest.raises(ModelNotSetException, match="encoder"):
        detector.fit([(z, y)])
    with pytest.raises(ModelNotSetException, match="encoder"):
        detector.fit_features(z, y).predict(x)


@pytest.mark.parametrize(
    "name", ["is_ood", "p_value", "select", "threshold", "calibrate", "is_ood_features", "calibrate_features"]
)
def test_decisions_of_a_bare_detector_are_told_how_to_calibrate(name, blobs):
    for detector in (RMD(), FusedRMD().fit_features(*blobs[:2])):
        with pytest.raises(AttributeError, match="Calibrated"):
            getattr(detector, name)(blobs[2])


def test_a_loader_in_batches_gives_what_one_call_gives(make):
    z, y, x = make_blobs(dtype=torch.float32)
    encoder = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.BatchNorm1d(12))
    encoder[2].eval()
    labels = torch.where(torch.arange(len(y)) % 10 == 0, -1, y)  # OOD samples have no influence
    streamed = make(encoder).fit(DataLoader(TensorDataset(z, labels), 64))
    assert [part.training for part in encoder.modules()] == [True, True, True, False]
    with torch.no_grad():
        z, x = encoder.eval()(z), encoder(x)
    expected = make().fit_features(z[labels >= 0], y[labels >= 0]).predict_features(x)
    torch.testing.assert_close(streamed.predict_features(x), expected, rtol=1e-4, atol=1e-4)


def test_parts_in_any_order_merge_to_the_whole(make_from_moments, blobs):
    z, y, x = blobs
    detector = make_from_moments()
    parts = [detector.new_moments() for _ in range(3)]
    for part, rows in zip(parts, torch.randperm(300).split([20, 130, 150]), strict=True):
        part.update(z[rows], y[rows])
    expected = make_from_moments().fit_features(z, y).predict_features(x)
    added = detector.fit_moments(sum(part.compute() for part in parts)).predict_features(x)
    parts[0].merge_state(parts[1])
    parts[0].merge_state(parts[2])
    merged = detector.fit_moments(parts[0].compute()).predict_features(x)
    for scores in (added, merged):
        torch.testing.assert_close(scores, expected, rtol=1e-8, atol=1e-8)


def test_one_batch_is_scored_as_many_and_maps_as_their_means(make, blobs):
    z, y, x = blobs
    detector = make().fit_features(z, y)
    scores = detector.predict_features(x)
    in_parts = torch.cat([detector.predict_features(part) for part in x.split(7)])
    torch.testing.assert_close(in_parts, scores, rtol=1e-5, atol=1e-5)
    spread = torch.tensor([[-1.0, 1.0], [2.0, -2.0]], dtype=x.dtype)
    torch.testing.assert_close(detector.predict_features(x[..., None, None] + spread), scores, rtol=1e-4, atol=1e-4)
    mapped = make().fit_features(z[..., None, None] + spread, y)
    torch.testing.assert_close(mapped.predict_features(x), scores, rtol=1e-4, atol=1e-4)


def test_class_scores_hold_the_score_and_the_nearest_class(make, blobs):
    z, y, x = blobs
    with pytest.warns(NumericalWarning, match="never nearest: .3, 4"):
        detector = make().fit_features(z, y + 2 * (y > 2))
    if not has_classes(detector):
        with pytest.raises(NotImplementedError, match="class scores"):
            detector.class_scores(x)
        return
    scores = detector.class_scores(x)
    assert scores.shape == (80, 7)
    assert scores[:, 3:5].isinf().all()
    torch.testing.assert_close(scores.amin(1), detector.predict_features(x), rtol=1e-5, atol=1e-4)  # flows are float32
    assert torch.equal(scores.argmin(1), detector.nearest_class(x))
    without_gaps = make().fit_features(z, y)
    torch.testing.assert_close(detector.predict_features(x), without_gaps.predict_features(x), rtol=1e-5, atol=1e-4)
    assert torch.equal(detector.nearest_class(x), torch.tensor([0, 1, 2, 5, 6])[without_gaps.nearest_class(x)])


def test_samples_that_are_not_finite_score_nan_alone_and_an_empty_batch_nothing(make, blobs):
    z, y, x = blobs
    detector = make().fit_features(z, y)
    broken = x[:5].clone()
    broken[1, 0], broken[3, 4] = torch.nan, -torch.inf
    assert detector.predict_features(broken).isnan().tolist() == [False, True, False, True, False]
    assert detector.predict_features(x[:0]).shape == (0,)
    if has_classes(detector):
        assert detector.class_scores(x[:0]).shape == (0, 5)
        assert detector.nearest_class(x[:0]).shape == (0,)


def test_features_and_labels_that_cannot_be_used_are_refused_where_they_enter(make, blobs):
    z, y, x = blobs
    broken = z.clone()
    broken[3, 2] = torch.nan
    for features, labels, error, key in (
        (z.numpy(), y, TypeError, "ndarray"),
        (z.long(), y, TypeError, "floating"),
        (z[:, None], y, ValueError, "Pool"),
        (broken, y, ValueError, "NaN"),
        (z, y + 0.5, TypeError, "integers"),
        (z, y.tolist(), TypeError, "list"),
        (z, y[:-1], ValueError, "one per sample"),
        (z, torch.full_like(y, -1), ValueError, "in-distribution"),
    ):
        detector = make()
        with pytest.raises(error, match=key):
            detector.fit_features(features, labels)
        assert not detector.fitted
    with pytest.raises(ValueError, match="layer"):
        make().fit_features(z, y).predict_features(x[:, :5])
    with pytest.raises(ValueError, match="pairs"):
        make(nn.Identity()).fit([z])


class Tagged(torch.Tensor):
    """A tensor of another class, as MONAI's MetaTensor: what is computed from it is one, too."""


def test_features_of_a_tensor_subclass_are_plain_features(make, blobs):
    z, y, x = blobs
    expected = make().fit_features(z, y).predict_features(x)
    scores = make(lambda batch: batch.as_subclass(Tagged)).fit([(z, y)]).predict(x)
    assert type(scores) is torch.Tensor
    assert torch.equal(scores, expected)
    assert torch.equal(make().fit_features(z.clone().as_subclass(Tagged), y).predict_features(x), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_fit_inside_the_hooks_of_lightning_is_that_outside_of_them(make, mode, blobs):
    z, y, x = blobs
    expected, state = make().fit_features(z, y).predict_features(x), torch.get_rng_state()
    with mode():
        detector = make().fit_features(z + 0.0, y)
        inside = detector.predict_features(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inside, expected)
    probe = x.clone().requires_grad_()
    detector.to_module(torch.float64)(probe).sum().backward()
    assert probe.grad.isfinite().all()
    assert detector.fit_features(z, y) is detector


# -- saving and export ------------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_scores_bitwise_the_same(make, blobs, tmp_path):
    z, y, x = blobs
    detector = make().fit_features(z, y)
    detector.save(tmp_path / "detector.safetensors")
    copies = [type(detector).load(tmp_path / "detector.safetensors"), make().load_state_dict(detector.state_dict())]
    if type(detector) in PUBLIC:  # only these are made from files
        copies.append(load_detector(tmp_path / "detector.safetensors"))
    for loaded in copies:
        assert loaded.options == detector.options
        assert repr(loaded) == repr(detector)
        assert (loaded.n_classes, loaded.num_features, loaded.intensity) == (5, 12, detector.intensity)
        for probe in (x, x.float()):
            assert torch.equal(loaded.predict_features(probe), detector.predict_features(probe))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in FLOWS[1:] else n for n in DETECTORS])
def test_the_module_is_exported_for_any_batch_size_and_goes_its_own_way(name):
    z, y, x = make_blobs(dtype=torch.float32)
    detector = DETECTORS[name]().fit_features(z, y)
    module, expected = detector.to_module(), detector.predict_features(x)
    assert not list(module.parameters())
    program = torch.export.export(module, (x[:3],), dynamic_shapes={"z": {0: torch.export.Dim("batch")}}).module()
    detector.fit_features(z + torch.randn_like(z), y)
    for graph in (module, program):
        torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-5)
    if type(detector) in (RMD, FusedRMD, FlowLikelihood, RelativeFlow):  # one of each module that takes care of it
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for graph in (module, program):
                torch.testing.assert_close(graph(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnxruntime_gives_the_scores(make, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    z, y, x = make_blobs(dtype=torch.float32)
    detector = make().fit_features(z, y)
    shapes = {"z": {0: torch.export.Dim("batch")}}
    module, path = detector.to_module(torch.float32), tmp_path / "detector.onnx"
    torch.onnx.export(module, (x[:3],), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = detector.predict_features(x).numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


# -- changes after the fit --------------------------------------------------------------------------------------------


def assert_same_scores(detector, other, x):
    torch.testing.assert_close(detector.predict_features(x), other.predict_features(x), rtol=1e-8, atol=1e-8)


def test_updated_and_without_what_was_forgotten_it_is_a_new_fit(make_from_moments, blobs, tmp_path):
    z, y, x = blobs
    detector = make_from_moments(keep_moments=True).fit_features(z[:200], y[:200])
    assert_same_scores(detector.update(z[200:], y[200:]), make_from_moments().fit_features(z, y), x)
    detector.save(tmp_path / "detector.safetensors")
    loaded = type(detector).load(tmp_path / "detector.safetensors")
    marked = torch.cat([y[:150], torch.full((80,), -1)])  # OOD samples change nothing
    loaded.forget(torch.cat([z[:150], x]), marked)
    assert_same_scores(loaded, make_from_moments().fit_features(z[150:], y[150:]), x)


def test_a_class_that_is_added_has_the_next_label_and_its_name(make_from_moments, blobs, tmp_path):
    z, y, x = blobs
    detector = make_from_moments(keep_moments=True).fit_features(z[y < 4], y[y < 4])
    assert detector.add_class(z[y == 4], "cat") == 4
    assert_same_scores(detector, make_from_moments().fit_features(z, y), x)
    detector.save(tmp_path / "detector.safetensors")
    loaded = type(detector).load(tmp_path / "detector.safetensors").update(z[:20], y[:20])
    assert loaded.class_names == ["0", "1", "2", "3", "cat"]
    for samples, name, key in ((z, "cat", "already"), (z[:0], "dog", "at least one")):
        with pytest.raises(ValueError, match=key):
            loaded.add_class(samples, name)
    assert loaded.fit_features(z, y).class_names == ["0", "1", "2", "3", "4"]


@pytest.mark.filterwarnings("ignore::rmd_plugin.NumericalWarning")  # little is left
def test_a_change_that_is_refused_leaves_it_as_it_was(make_from_moments, blobs):
    z, y, x = blobs
    detector = make_from_moments(keep_moments=True).fit_features(z, y)
    before, moments = detector.predict_features(x), detector.moments
    for change, features, labels, key in (
        (detector.update, z[:, :5], y, "layer"),
        (detector.update, z * torch.nan, y, "NaN"),
        (detector.forget, z.repeat(2, 1), y.repeat(2), "more samples|added before"),
        (detector.forget, z, y, "nothing to fit"),
    ):
        with pytest.raises(ValueError, match=key):
            change(features, labels)
    assert torch.equal(detector.predict_features(x), before)
    assert detector.moments is moments


@pytest.mark.parametrize("name", FLOWS)
def test_flows_say_that_they_keep_no_sample(name, blobs):
    z, y, _ = blobs
    detector = DETECTORS[name]().fit_features(z, y)
    for change in (lambda: detector.update(z, y), lambda: detector.forget(z, y), lambda: detector.add_class(z)):
        with pytest.raises(NotImplementedError, match="Fit it again"):
            change()
    metric = RMD().new_moments()
    metric.update(z, y)
    with pytest.raises(NotImplementedError, match="samples"):
        detector.fit_moments(metric.compute())


def test_without_its_moments_it_says_how_to_keep_them(make_from_moments, blobs):
    z, y, _ = blobs
    with pytest.raises(RequiresFittingException, match="fit"):
        make_from_moments().update(z, y)
    loaded = make_from_moments().load_state_dict(make_from_moments().fit_features(z, y).state_dict())
    for change in (lambda: loaded.update(z, y), lambda: loaded.add_class(z)):
        with pytest.raises(ValueError, match="keep_moments"):
            change()


# -- decisions --------------------------------------------------------------------------------------------------------


def test_calibrated_it_decides_by_counting_and_a_file_keeps_the_decisions(make, tmp_path):
    z, y, _ = make_blobs(per_class=200, dtype=torch.float32)
    detector = Calibrated(make()).fit_features(z[:400], y[:400]).calibrate_features(z[400:700])
    scores, own = detector.predict_features(z[700:]), detector.predict_features(z[400:700])
    expected = (1 + (own[None] >= scores[:, None]).sum(1)).double() / 301
    assert torch.equal(detector.p_value_features(z[700:]), expected)
    assert torch.equal(detector.is_ood_features(z[700:]), expected <= 0.05)
    if type(detector.detector) in PUBLIC:
        detector.save(tmp_path / "detector.safetensors")
        loaded = load_detector(tmp_path / "detector.safetensors")
        assert torch.equal(loaded.p_value_features(z[700:]), expected)
