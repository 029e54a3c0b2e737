import copy

import guard_kit
import numpy as np
import pytest
import torch
from guard_kit import CLASSES, as_images, feature_guard, picture_guard, pictures
from PIL import Image
from pytorch_ood.detector import KNN, ODIN, MaxSoftmax
from torch import nn

from rmd_plugin import RMD, Calibrated, Guard, Mahalanobis
from rmd_plugin.backbones import Identity


@pytest.fixture(scope="module")
def guard():
    return picture_guard()


@pytest.fixture(scope="module")
def features():
    return feature_guard()


def test_a_verdict_is_what_detector_and_head_say_of_the_features(guard):
    items = as_images(pictures(12, (30, 70), seed=2))
    z = guard_kit.encode(guard.backbone, items)
    verdict = guard(items)
    torch.testing.assert_close(verdict.score, guard.detector.predict_features(z))
    torch.testing.assert_close(verdict.p_value, guard.detector.p_value_features(z))
    assert torch.equal(verdict.is_ood, guard.detector.is_ood_features(z))
    assert verdict.class_name == [CLASSES[k] for k in guard.backbone.head(z).argmax(1)]
    assert verdict.nearest_class == [CLASSES[k] for k in guard.detector.nearest_class(z)]


def test_what_it_knows_passes_and_what_it_does_not_is_flagged(guard):
    known, unknown = guard(pictures(100, seed=3)), guard(pictures(100, seed=3, ood=True))
    assert known.is_ood.float().mean() < 0.2
    assert unknown.is_ood.float().mean() > 0.9
    assert known.class_name == [CLASSES[k % 4] for k in range(100)]


def test_one_picture_is_the_same_by_path_image_array_and_in_any_batch(guard, tmp_path):
    array = pictures(3, seed=4)[1]
    Image.fromarray(array).save(tmp_path / "a.png")
    one = guard(tmp_path / "a.png")
    assert isinstance(one.score, float)
    assert isinstance(one.is_ood, bool)
    assert one.class_name == "cat"
    assert guard(str(tmp_path / "a.png")) == guard(Image.fromarray(array)) == guard(array) == one
    grey = array[..., 0]
    assert guard(grey) == guard(grey[..., None]) == guard(np.repeat(grey[..., None], 3, 2))
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    assert guard(tensor) == one
    for many in ([array] * 3, np.stack([array] * 3), torch.stack([tensor] * 3), [tmp_path / "a.png"] * 3):
        verdict = guard(many)
        assert verdict.score.tolist() == pytest.approx([one.score] * 3, rel=1e-5)
        assert verdict.class_name == ["cat"] * 3


def test_features_are_judged_as_lists_arrays_and_tensors(features):
    x = [3.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    one = features(x)
    assert features(np.array(x, dtype=np.float32)) == features(torch.tensor(x)) == one
    assert features(np.array(x)) == one  # float64 as the network takes it
    assert features([x, x]).score.tolist() == pytest.approx([one.score] * 2)
    assert features.kind == "features"
    verdict = features([float("nan")] * 6)
    assert verdict.is_ood  # NaN is flagged
    assert verdict.p_value == pytest.approx(1 / 201)


@pytest.mark.parametrize("make", [Mahalanobis, lambda: KNN(None, k=5)])
def test_any_detector_on_features_guards(make, tmp_path):
    guard = feature_guard(make)
    z = torch.randn(20, 6) * torch.tensor([[1.0], [9.0]]).repeat(10, 1)
    expected = guard.detector.is_ood_features(z)
    assert torch.equal(guard(z).is_ood, expected)
    assert 0 < expected.sum() < 20
    guard.save(tmp_path / "guard", onnx=False)
    assert torch.equal(Guard.load(tmp_path / "guard")(z).score, guard(z).score)


def test_a_detector_on_logits_guards_and_names_the_predicted_class(tmp_path):
    guard = feature_guard()
    head = guard.backbone.head
    z = torch.randn(300, 6) * 4
    detector = Calibrated(MaxSoftmax(None)).calibrate_logits(head(z[:200]))
    guard = Guard(guard.backbone, detector, ["left", "right"], input_shape=(6,))
    verdict = guard(z[200:])
    torch.testing.assert_close(verdict.score, -head(z[200:]).softmax(1).amax(1))
    assert verdict.nearest_class == verdict.class_name
    guard.save(tmp_path / "guard", onnx=False)
    assert torch.equal(Guard.load(tmp_path / "guard")(z).score, guard(z).score)


def test_a_guard_judges_in_evaluation_mode():
    guard = picture_guard()
    items, before = pictures(8, seed=5), copy.deepcopy(guard.backbone.state_dict())
    expected = guard(items).score
    guard.network.train()
    assert torch.equal(guard(items).score, expected)
    assert all(torch.equal(value, before[name]) for name, value in guard.backbone.state_dict().items())


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([], "empty"),
        (np.zeros((8, 8, 3), dtype=np.float32), "data type"),
        (np.zeros((8, 8), dtype=np.float32), "mode F"),
        (3.5, "PIL image"),
        ("missing.png", "missing.png"),
        ("broken.png", "broken.png"),
    ],
)
def test_what_is_no_picture_is_refused(guard, item, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        guard(item)


def test_parts_that_do_not_fit_are_refused(features):
    with pytest.raises(ValueError, match="shape"):
        features([0.0] * 5)
    z, y = torch.randn(100, 4), torch.arange(100) % 2
    fitted = Calibrated(RMD()).fit_features(z, y)
    detector = Calibrated(RMD()).fit_features(z, y).calibrate_features(z)
    for network, wrong, options, message in (
        (Identity(4), detector, {"input_shape": (4,)}, "no head"),
        (Identity(4, num_classes=3), detector, {"input_shape": (4,)}, "3 classes"),
        (Identity(4, num_classes=2), detector, {}, "input_shape"),
        (Identity(4, num_classes=2), Calibrated(ODIN(nn.Linear(4, 2))), {"input_shape": (4,)}, "ODIN"),
        (Identity(4, num_classes=2), fitted, {"input_shape": (4,)}, "calibrated"),
    ):
        with pytest.raises(Exception, match=message):
            Guard(network, wrong, ["a", "b"], **options)


def test_a_watched_guard_notices_that_its_items_have_changed():
    guard = feature_guard()
    alarm = guard.watch(level=0.01)
    y = torch.arange(300) % 2
    z = torch.randn(300, 6)
    z[:, 0] += 8.0 * y
    guard(z)
    assert (alarm.count, alarm.alarm) == (300, False)
    guard([float("nan")] * 6)
    guard(3 * z[:100])
    assert alarm.alarm
    assert alarm.since >= 290


def test_a_guard_carries_the_folds_of_a_calibration_without_held_out_data(tmp_path):
    torch.manual_seed(0)
    y = torch.arange(400) % 2
    z = torch.randn(400, 6)
    z[:, 0] += 8.0 * y
    backbone = Identity(6)
    backbone.head = guard_kit.fit_linear_probe(z, y, 2)
    detector = Calibrated(RMD()).fit_calibrate_features(z, y, folds=3)
    guard = Guard(backbone, detector, ["left", "right"], input_shape=(6,))
    guard.save(tmp_path / "guard", onnx=False)
    loaded = Guard.load(tmp_path / "guard")
    items = torch.cat([z[:50], 9 * z[:50]])
    for verdict in (guard(items), loaded(items)):
        assert torch.equal(verdict.p_value, detector.p_value_features(items))
        assert torch.equal(verdict.is_ood, detector.is_ood_features(items))
    assert loaded.threshold is None
    assert loaded.about["threshold"] is None
    with pytest.raises(ValueError, match="held-out"):
        loaded.watch()
