import copy

import guard_kit
import numpy as np
import pytest
import torch
from guard_kit import CLASSES, as_images, feature_guard, picture_guard, pictures
from PIL import Image
from pytorch_ood.detector import KNN, ODIN, MaxSoftmax
from torch import nn

from rmd_plugin import RMD, Calibrated, Guard, Mahalanobis, MarginalMahalanobis
from rmd_plugin.backbones import Identity
from rmd_plugin.untrusted import DataFormatError


@pytest.fixture(scope="module")
def guard():
    return picture_guard()


@pytest.fixture(scope="module")
def features():
    return feature_guard()


def test_a_verdict_is_what_detector_and_head_say_of_the_features(guard):
    items = as_images(pictures(12, (30, 70), seed=2))
    z = guard_kit.encode(guard.backbone, items)
    found = guard(items)
    torch.testing.assert_close(found.score, guard.detector.predict_features(z))
    torch.testing.assert_close(found.p_value, guard.detector.p_value_features(z))
    assert torch.equal(found.is_ood, guard.detector.is_ood_features(z))
    assert found.class_name == [CLASSES[k] for k in guard.backbone.head(z).argmax(1)]
    assert found.nearest_class == [CLASSES[k] for k in guard.detector.nearest_class(z)]


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
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    assert guard(tensor) == one
    for many in ([array] * 3, np.stack([array] * 3), torch.stack([tensor] * 3), [tmp_path / "a.png"] * 3):
        found = guard(many)
        assert found.score.tolist() == pytest.approx([one.score] * 3, rel=1e-5)
        assert found.class_name == ["cat"] * 3


def test_a_grey_picture_is_the_same_with_and_without_an_axis_of_channels(guard):
    grey = pictures(1)[0][..., 0]
    assert guard(grey) == guard(grey[..., None]) == guard(np.repeat(grey[..., None], 3, 2))


def test_features_are_judged_as_lists_arrays_and_tensors(features):
    x = [3.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    one = features(x)
    assert features(np.array(x, dtype=np.float32)) == features(torch.tensor(x)) == one
    assert features(np.array(x)) == one  # float64 as the network takes it
    assert features([x, x]).score.tolist() == pytest.approx([one.score] * 2)
    assert features.kind == "features"


def test_a_feature_that_is_nan_is_flagged(features):
    verdict = features([float("nan")] * 6)
    assert verdict.is_ood
    assert verdict.p_value == pytest.approx(1 / 201)


@pytest.mark.parametrize("make", [RMD, Mahalanobis, MarginalMahalanobis, lambda: KNN(None, k=5)])
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
    found = guard(z[200:])
    torch.testing.assert_close(found.score, -head(z[200:]).softmax(1).amax(1))
    assert found.nearest_class == found.class_name
    guard.save(tmp_path / "guard", onnx=False)
    assert torch.equal(Guard.load(tmp_path / "guard")(z).score, guard(z).score)


def test_a_calibration_per_class_has_a_threshold_for_each(tmp_path):
    guard = feature_guard(per_class=True, alpha=0.1)
    assert guard.threshold.shape == (2,)
    z = torch.randn(50, 6) * 3
    assert torch.equal(guard(z).is_ood, guard.detector.is_ood_features(z))
    guard.save(tmp_path / "guard", onnx=False)
    assert torch.equal(Guard.load(tmp_path / "guard")(z).p_value, guard(z).p_value)


def test_a_guard_judges_in_evaluation_mode_and_leaves_the_mode_alone():
    guard = picture_guard()
    items, before = pictures(8, seed=5), copy.deepcopy(guard.backbone.state_dict())
    expected = guard(items).score
    guard.network.train()
    assert torch.equal(guard(items).score, expected)
    assert guard.network.encoder.training
    assert all(torch.equal(value, before[name]) for name, value in guard.backbone.state_dict().items())


def test_the_alarms_on_held_out_data_are_the_promised_share(guard):
    held_out = guard(pictures(80, seed=1))  # those that it was calibrated on
    assert int(held_out.is_ood.sum()) <= 0.05 * 81


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ([], "the list is empty"),
        (np.zeros((8, 8, 3), dtype=np.float32), "expected a picture of uint8"),
        (np.zeros((8, 8, 4), dtype=np.uint8), "shape \\(8, 8, 4\\)"),
        (3.5, "expected a PIL image"),
        ("missing.png", "missing.png"),
    ],
)
def test_what_is_no_picture_is_refused_with_what_was_expected(guard, what, message):
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        guard(what)


def test_a_broken_picture_is_refused_by_its_name(guard, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(DataFormatError, match=r"broken\.png: is not a readable picture"):
        guard(tmp_path / "broken.png")


def test_features_of_another_width_are_refused(features):
    with pytest.raises(ValueError, match=r"expected values of shape \(6,\), got \(5,\)"):
        features([0.0] * 5)


def test_parts_that_do_not_fit_are_refused():
    z, y = torch.randn(100, 4), torch.arange(100) % 2
    detector = Calibrated(RMD()).fit_features(z, y).calibrate_features(z)
    with pytest.raises(ValueError, match=r"no head, but there are 2 class_names"):
        Guard(Identity(4), detector, ["a", "b"], input_shape=(4,))
    with pytest.raises(ValueError, match=r"a head for 3 classes, but there are 2"):
        Guard(Identity(4, num_classes=3), detector, ["a", "b"], input_shape=(4,))
    with pytest.raises(ValueError, match=r"needs the shape of its inputs"):
        Guard(Identity(4, num_classes=2), detector, ["a", "b"])
    with pytest.raises(ValueError, match=r"detectors on features or logits, which ODIN is not"):
        Guard(Identity(4, num_classes=2), Calibrated(ODIN(nn.Linear(4, 2))), ["a", "b"], input_shape=(4,))
    with pytest.raises(Exception, match=r"not calibrated"):
        Guard(Identity(4, num_classes=2), Calibrated(RMD().fit_features(z, y)), ["a", "b"], input_shape=(4,))
