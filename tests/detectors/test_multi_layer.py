"""MultiLayer: the sum of each layer's score on the scale of samples that its fit has not seen."""

import numpy as np
import oracle
import pytest
import torch
from pytorch_ood.api import ModelNotSetException, RequiresFittingException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, Calibrated, FusedRMD, Mahalanobis, MultiLayer, load_detector
from rmd_plugin.detectors.reservoir import content_keys

WIDTHS = {"first": 4, "second": 7}


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    y = torch.arange(150) % 3
    train = {name: torch.randn(150, width) + 2.0 * torch.eye(3, width)[y] for name, width in WIDTHS.items()}
    return train, y, {name: 2 * torch.randn(40, width) for name, width in WIDTHS.items()}


def left_out(z, y):
    """Textbook scores of each sample by a fit without its fifth: every fifth sample of its class, in a random order."""
    order = content_keys(z, y, 0).argsort()
    fold = np.empty(len(y), dtype=int)
    for label in range(3):
        mine = order[y[order] == label].numpy()
        fold[mine] = np.arange(len(mine)) % 5
    scores = np.empty(len(y))
    for number in range(5):
        out = fold == number
        scores[out] = oracle.rmd(z.numpy()[~out], y.numpy()[~out], z.numpy()[out])
    return scores


def test_scores_are_the_textbooks_on_the_scale_of_left_out_samples(data):
    train, y, new = data
    expected = 0
    for name, z in train.items():
        scores = left_out(z, y)
        expected = expected + (oracle.rmd(z, y, new[name]) - scores.mean()) / scores.std(ddof=1)
    found = MultiLayer(RMD()).fit_layers(train, y).predict_layers(new)
    assert np.allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_p_values_are_fused_as_fisher_does(data):
    train, y, new = data
    expected = 0
    for name, z in train.items():
        scores, found = left_out(z, y), oracle.rmd(z, y, new[name])
        p_values = (1 + (scores[None] >= found[:, None]).sum(1)) / 151
        expected = expected - 2 * np.log(p_values)
    detector = MultiLayer(RMD(), fusion="p-values").fit_layers(train, y)
    assert np.allclose(detector.predict_layers(new).numpy(), expected, rtol=1e-4)


def test_one_layer_ranks_as_its_detector_does(data):
    train, y, new = ({"only": part["second"]} if isinstance(part, dict) else part for part in data)
    for detector in (RMD(shrinkage=0.2), Mahalanobis(normalize=True), RMD(covariance="diagonal")):
        found = MultiLayer(detector).fit_layers(train, y).predict_layers(new)
        expected = detector.fit_features(train["only"], y).predict_features(new["only"])
        assert torch.equal(found.argsort(), expected.argsort())


def test_few_samples_do_not_make_new_ones_look_far():
    torch.manual_seed(0)
    y = torch.arange(240) % 3
    centres = 3.0 * torch.eye(3, 30)
    train, new = torch.randn(240, 30) + centres[y], torch.randn(600, 30) + centres[torch.arange(600) % 3]
    detector = MultiLayer(Mahalanobis(shrinkage=0.01)).fit_layers({"layer": train}, y)
    seen, unseen = (float(detector.predict_layers({"layer": z}).mean()) for z in (train, new))
    assert abs(unseen) < 0.3
    assert seen < -0.45  # what a scale from the training samples would have taken for zero


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.layer2 = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU())

    def forward(self, x):
        return self.layer2(self.drop(self.layer1(x))).mean(dim=(2, 3))


@pytest.fixture(scope="module")
def pictures():
    torch.manual_seed(0)
    y = torch.arange(240) % 3 - (torch.arange(240) >= 210).long() * 5  # the last ones are OOD
    return Net(), torch.randn(240, 1, 9, 9) * (1 + y.clamp(min=0))[:, None, None, None], y


def test_a_loader_through_the_network_gives_what_its_layers_give(pictures, tmp_path):
    net, x, y = pictures
    detector = MultiLayer(RMD(), net).fit(DataLoader(TensorDataset(x, y), 50))
    assert net.training
    net.eval()
    with torch.no_grad():
        first = net.layer1(x)
        layers = {"layer1": first.mean(dim=(2, 3)), "layer2": net(x)}
    expected = MultiLayer(RMD()).fit_layers(layers, y).predict_layers(layers)
    assert torch.allclose(detector.predict(x), expected, rtol=1e-3, atol=1e-3)
    detector.save(tmp_path / "it.safetensors")
    loaded = MultiLayer.load(tmp_path / "it.safetensors", net)
    assert torch.equal(loaded.predict(x), detector.predict(x))
    assert torch.equal(
        load_detector(tmp_path / "it.safetensors").predict_layers(layers), detector.predict_layers(layers)
    )
    net.train()


def test_decisions_and_files_of_calibrated_ones(pictures, tmp_path):
    net, x, y = pictures
    net.eval()
    loader = DataLoader(TensorDataset(x[:120], y[:120]), 50)
    held_out = DataLoader(TensorDataset(x[120:], y[120:]), 50)
    detector = Calibrated(MultiLayer(RMD(), net)).fit(loader).calibrate(held_out)
    decisions = detector.is_ood(torch.cat([x[120:210], 30 * x[:20]]))
    assert float(decisions[:90].float().mean()) <= 0.05
    detector.save(tmp_path / "it.safetensors")
    loaded = Calibrated.load(tmp_path / "it.safetensors", net)
    assert torch.equal(loaded.p_value(x), detector.p_value(x))


def test_what_does_not_fit_is_told(data):
    train, y, new = data
    with pytest.raises(TypeError, match="fitted on moments, got FusedRMD"):
        MultiLayer(FusedRMD())
    with pytest.raises(ValueError, match="fusion must be 'sum' or 'p-values', got 'max'"):
        MultiLayer(fusion="max")
    with pytest.raises(ModelNotSetException, match="fit_layers"):
        MultiLayer().fit([])
    with pytest.raises(RequiresFittingException, match="fit_layers"):
        MultiLayer().predict_layers(new)
    with pytest.raises(ValueError, match="no in-distribution sample"):
        MultiLayer(RMD(), nn.Identity()).fit([])
    with pytest.raises(ValueError, match="second are missing"):
        MultiLayer().fit_layers(train, y).predict_layers({"first": new["first"]})
    with pytest.raises(ValueError, match="at least two samples"):
        MultiLayer(Mahalanobis(shrinkage=0.5)).fit_layers({"a": train["first"][:4]}, torch.tensor([0, 0, 1, 2]))


def test_damaged_states_are_refused(data):
    train, y, _ = data
    state = MultiLayer().fit_layers(train, y).state_dict()
    with pytest.raises(ValueError, match="not one detector for each"):
        load_detector({**state, "names": ["first"]})
    with pytest.raises(ValueError, match=r"'left_out.1' is missing"):
        load_detector({**state, "tensors": {"left_out.0": state["tensors"]["left_out.0"]}})
    with pytest.raises(ValueError, match="belongs to RMD"):
        MultiLayer().load_state_dict(state["detectors"][0])


FUSIONS = pytest.mark.parametrize("fusion", ["sum", "p-values"])


def exported(detector, new):
    """The module, its example, and the sizes that may change."""
    shapes = {"layers": {name: {0: torch.export.Dim("batch")} for name in new}}
    return detector.to_module(), ({name: z[:3] for name, z in new.items()},), shapes


@pytest.mark.slow
@FUSIONS
def test_torch_export_gives_the_scores_for_any_batch_size(fusion, data):
    train, y, new = data
    detector = MultiLayer(fusion=fusion).fit_layers(train, y)
    module, example, shapes = exported(detector, new)
    assert not list(module.parameters())
    program = torch.export.export(module, example, dynamic_shapes=shapes)
    expected = detector.predict_layers(new)
    torch.testing.assert_close(program.module()(new), expected)
    detector.fit_layers(new, torch.arange(40) % 2)  # of which the module is independent
    torch.testing.assert_close(module(new), expected)


@pytest.mark.slow
@FUSIONS
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnxruntime_agrees_with_eager(fusion, data, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    train, y, new = data
    detector = MultiLayer(fusion=fusion).fit_layers(train, y)
    module, example, shapes = exported(detector, new)
    given = {"kwargs": {"layers": example[0]}, "dynamic_shapes": shapes}
    torch.onnx.export(module, (), tmp_path / "it.onnx", dynamo=True, verbose=False, **given)
    session = onnxruntime.InferenceSession(tmp_path / "it.onnx", providers=["CPUExecutionProvider"])
    inputs = {given.name: z.numpy() for given, z in zip(session.get_inputs(), new.values(), strict=True)}
    (scores,) = session.run(None, inputs)
    expected = detector.predict_layers(new).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-4 * expected.std())


def test_calibrated_ones_are_one_graph(data):
    train, y, new = data
    detector = Calibrated(MultiLayer().fit_layers(train, y), alpha=0.1)
    detector.calibrate_scores(detector.predict_layers({name: z.flip(0) for name, z in train.items()}))
    scores, p_values, decisions = detector.to_module()(new)
    expected = detector.predict_layers(new)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(p_values, detector.calibration.p_value(expected))
    assert torch.equal(decisions, expected > detector.threshold())


def test_maps_are_averaged_before_they_are_scaled():
    torch.manual_seed(0)
    maps, y = torch.randint(1, 9, (60, 4, 2, 2)).double(), torch.arange(60) % 2  # their means are exact
    unit = MultiLayer(Mahalanobis(normalize=True, shrinkage=0.1))
    found = unit.fit_layers({"a": maps}, y).predict_layers({"a": maps})
    z = {"a": maps.mean(dim=(2, 3))}
    assert torch.allclose(unit.fit_layers(z, y).predict_layers(z), found, atol=1e-4)


def test_a_state_is_loaded_by_what_has_other_layers_which_a_later_fit_takes(data):
    train, y, _ = data
    state = MultiLayer(Mahalanobis()).fit_layers(train, y).state_dict()
    detector = MultiLayer(layers="layer*").load_state_dict(state)
    assert (detector.layers, list(detector.detectors)) == ("layer*", list(train))
    assert isinstance(detector.detector, Mahalanobis)
    assert load_detector(state).layers == list(train)


def test_samples_that_are_left_out_cause_no_warning_of_their_own():
    z = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    z[1:, 0] = 0.0  # without the first sample this feature is constant
    detector = MultiLayer(RMD(shrinkage="oas")).fit_layers({"a": z}, torch.arange(40) % 2)  # warnings are errors
    assert torch.isfinite(detector.predict_layers({"a": z + 1})).all()
