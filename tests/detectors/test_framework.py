"""Our detectors inside pytorch-ood, with inputs of any structure, and in files that cannot do harm."""

import pickle
from dataclasses import KW_ONLY

import numpy as np
import oracle
import pytest
import pytorch_ood.detector
import torch
from conftest import make_blobs
from pytorch_ood.detector import KNN, MahalanobisODIN, ReAct, ViM
from pytorch_ood.utils import GridSearch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rmd_plugin
from rmd_plugin import RMD, Calibrated, FlowLikelihood, Mahalanobis, PartialMahalanobis, load_detector

NAMES = ("mu", "cov", "precision", "background_mu", "background_cov", "background_precision")


@pytest.mark.filterwarnings("ignore:components=")
def test_its_grid_search_selects_our_options():
    z, y, x = make_blobs(dtype=torch.float32)
    is_id = torch.arange(80) < 40
    fit, validation = (DataLoader(TensorDataset(*pair), 100) for pair in ((z, y), (x, torch.where(is_id, 0, -1))))
    for detector in (RMD(nn.Identity()), PartialMahalanobis(lambda x: x, components=3)):
        best = GridSearch(detector, fit, validation).run()
        assert set(best) == set(detector.hyperparameter_space)
        assert {name: detector.state_dict()["options"][name] for name in best} == best


def test_its_input_preprocessing_works_with_our_distance():
    z, y, x = make_blobs(dtype=torch.float32)
    encoder = nn.Sequential(nn.Linear(12, 8), nn.Tanh())
    theirs = MahalanobisODIN(encoder, eps=0.01).fit_features(encoder(z).detach(), y)
    ours = MahalanobisODIN(encoder, eps=0.01)
    ours._base = Mahalanobis(encoder)
    ours.fit_features(encoder(z).detach(), y)
    torch.testing.assert_close(ours.predict(x), 2 * len(z) * theirs.predict(x), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.bool])
def test_labels_of_any_type_that_holds_integers_give_the_same_fit(dtype):
    z, y, x = make_blobs(num_classes=2)
    for make in (RMD, lambda: FlowLikelihood(max_epochs=1, progress=False)):
        expected = make().fit_features(z, y).predict_features(x)
        assert torch.equal(make().fit_features(z, y.to(dtype)).predict_features(x), expected)


# -- means and covariances --------------------------------------------------------------------------------------------


def test_the_gaussians_are_found_under_the_names_of_the_framework():
    z, y, _ = make_blobs(dtype=torch.float32)
    ours, theirs = (library.RMD(None) for library in (rmd_plugin, pytorch_ood.detector))
    assert [getattr(ours, name) for name in NAMES] == [getattr(theirs, name) for name in NAMES] == [None] * 6
    ours.fit_features(z, y)
    theirs.fit_features(z, y)
    scales = {"mu": 1, "cov": 300, "precision": 1 / 300}
    for name in NAMES:
        mine, their = getattr(ours, name), getattr(theirs, name)
        assert (mine.dtype, mine.device) == (their.dtype, their.device)
        torch.testing.assert_close(scales[name.removeprefix("background_")] * mine, their, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"shrinkage": 0.3}, {"covariance": "diagonal"}], ids=str)
def test_the_scores_are_those_of_the_gaussians_that_can_be_read(options, blobs):
    z, y, x = blobs
    detector = RMD(**options).fit_features(z, y)

    def distance(mu, precision):
        matrix = precision.double() if precision.ndim == 2 else precision.double().diag()
        return ((x - mu) @ matrix * (x - mu)).sum(1)

    nearest = torch.stack([distance(mu, detector.precision) for mu in detector.mu]).amin(0)
    relative = nearest - distance(detector.background_mu, detector.background_precision)
    torch.testing.assert_close(relative, detector.predict_features(x), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore::rmd_plugin.NumericalWarning")
def test_directions_without_variance_have_a_pseudo_inverse(blobs):
    z, y, _ = blobs
    z = torch.cat([z, z[:, :1], torch.full((len(z), 1), 7.0)], 1)
    sigma = oracle.moments(z, y)[1]
    expected = np.linalg.pinv(sigma, rcond=1e-10, hermitian=True)
    np.testing.assert_allclose(Mahalanobis().fit_features(z, y).precision, expected, rtol=1e-3, atol=1e-5)
    diagonal = Mahalanobis(covariance="diagonal").fit_features(z, y)
    np.testing.assert_allclose(diagonal.precision[:-1], 1 / sigma.diagonal()[:-1], rtol=1e-5)
    assert diagonal.precision[-1] == 0


def test_what_is_read_belongs_to_the_last_fit(blobs):
    z, y, _ = blobs
    detector = RMD().fit_features(z, y)
    first = detector.cov
    torch.testing.assert_close(detector.fit_features(3 * z, y).cov, 9 * first)
    detector.shrinkage = 0.9  # an option for the next fit
    torch.testing.assert_close(pickle.loads(pickle.dumps(detector)).cov, 9 * first)
    loaded = RMD().fit_features(z, y).load_state_dict(detector.state_dict())
    for name in NAMES[:3]:
        with pytest.raises(AttributeError, match="keep_moments"):
            getattr(loaded, name)


# -- inputs of any structure ------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """An encoder as those of Hugging Face: takes tokens and mask by name."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def forward(self, batch):
        mask = batch["attention_mask"].unsqueeze(-1)
        return (self.embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1)


def batches(kind):
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = torch.randint(0, 50, (60, 7), generator=generator)
        yield kind({"input_ids": tokens, "attention_mask": (tokens > 5).float()}), torch.arange(60) % 3


def test_dicts_and_batch_encodings_are_inputs_as_tensors_are():
    transformers = pytest.importorskip("transformers")
    encoder = Tokens()
    for kind in (dict, transformers.BatchEncoding):
        inputs, labels = zip(*batches(kind), strict=True)
        with torch.no_grad():
            z, x = torch.cat([encoder(batch) for batch in inputs[:2]]), encoder(inputs[3])
        for per_class in (False, True):
            detector = Calibrated(RMD(encoder).to("cpu"), 0.2, per_class=per_class)
            detector.fit(zip(inputs[:2], labels[:2], strict=True))
            detector.calibrate(zip(inputs[2:3], labels[2:3], strict=True))
            expected = RMD().fit_features(z, torch.cat(labels[:2])).predict_features(x)
            torch.testing.assert_close(detector.detector.predict(inputs[3]), expected)
            torch.testing.assert_close(detector.predict(inputs[3]), expected)
            assert torch.equal(detector.is_ood(inputs[3]), detector.is_ood_features(x))
            assert torch.equal(detector.p_value(inputs[3]), detector.p_value_features(x))
            assert torch.equal(detector.select(inputs[3]), detector.select_features(x))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_in_a_file_is_executed_and_a_damaged_one_is_named(blobs, tmp_path):
    z, y, _ = blobs
    RMD().fit_features(z, y).save(tmp_path / "rmd")
    whole = (tmp_path / "rmd").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "pickle").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    torch.save({"format": 1, "bomb": Bomb(tmp_path / "ran")}, tmp_path / "zip")
    for name in ("cut", "pickle", "zip"):
        for load in (RMD.load, load_detector, Calibrated.load):
            with pytest.raises(ValueError, match=name):
                load(tmp_path / name)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError):
        RMD.load(tmp_path / "nowhere")


def test_others_can_read_the_file_and_saving_again_replaces_it_whole(blobs, tmp_path):
    z, y, x = blobs
    for features in (z, z[:, :6]):
        detector = RMD().fit_features(features, y)
        detector.save(tmp_path / "rmd")
    assert torch.equal(RMD.load(tmp_path / "rmd").predict_features(x[:, :6]), detector.predict_features(x[:, :6]))
    assert [path.name for path in tmp_path.iterdir()] == ["rmd"]
    with safe_open(tmp_path / "rmd", "pt") as file:
        assert any("projection" in name for name in file.keys())  # noqa: SIM118


def test_a_state_of_another_detector_or_format_is_refused(blobs):
    z, y, _ = blobs
    state = Mahalanobis().fit_features(z, y).state_dict()
    for load, content, key in (
        (RMD.from_state, state, "belongs to Mahalanobis"),
        (RMD().load_state_dict, {"weights": torch.zeros(1)}, "not the state"),
        (load_detector, state | {"format": 99}, "format 99"),
        (load_detector, state | {"detector": "ClassMoments"}, "ClassMoments"),
        (Calibrated.from_state, state, "Calibrated"),
    ):
        with pytest.raises(ValueError, match=key):
            load(content)


def test_options_of_a_subclass_are_its_fields(blobs):
    z, y, x = blobs

    class Doubled(RMD):
        _: KW_ONLY
        factor: float = 2.0

    detector = Doubled(shrinkage=0.1, factor=3.0).fit_features(z, y)
    assert repr(detector).startswith("<Doubled(shrinkage=0.1, factor=3.0)")
    loaded = Doubled.from_state(detector.state_dict())
    assert loaded.factor == 3.0
    assert torch.equal(loaded.predict_features(x), detector.predict_features(x))


def test_calibrated_detectors_of_the_framework_are_saved_as_plain_data(tmp_path):
    z, y, x = make_blobs(dtype=torch.float32)
    w, b = torch.randn(5, 12), torch.zeros(5)
    for make in (lambda: KNN(None, k=5), lambda: ViM(None, 6, w, b), lambda: pytorch_ood.detector.Mahalanobis(None)):
        detector = Calibrated(make()).fit_features(z, y).calibrate_features(z)
        detector.save(tmp_path / "detector")
        assert torch.equal(Calibrated.load(tmp_path / "detector").p_value_features(x), detector.p_value_features(x))


def test_a_detector_with_a_head_needs_an_instance_to_be_filled():
    z, y, x = make_blobs(dtype=torch.float32)
    head = nn.Linear(12, 5)
    detector = Calibrated(ReAct(nn.Identity(), head)).fit([(z, y)]).calibrate([(z, y)])
    state = detector.state_dict()
    with pytest.raises(ValueError, match="instance"):
        Calibrated.from_state(state)
    filled = Calibrated(ReAct(nn.Identity(), head)).load_state_dict(state)
    assert torch.equal(filled.p_value(x), detector.p_value(x))
