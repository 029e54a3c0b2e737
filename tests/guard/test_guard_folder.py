"""What is written as a guard is read back; a folder appears whole or not at all."""

import json
import os
import shutil

import guard_kit
import pytest
import torch
from guard_kit import feature_guard, picture_guard, pictures
from torch import nn

from rmd_plugin import Calibrated, FusedRMD, Guard
from rmd_plugin.backbones import Backbone
from rmd_plugin.guard import export


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    place = tmp_path_factory.mktemp("written") / "guard"
    picture_guard().save(place, onnx=False)
    return place


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written, tmp_path / "guard")


def rewrite(place, **changes):
    about = json.loads((place / "guard.json").read_text()) | changes
    (place / "guard.json").write_text(json.dumps(about))


def test_a_guard_comes_back_bitwise_with_all_that_it_says(written, tmp_path):
    guard, items = picture_guard(), pictures(40, (31, 57), seed=7)
    loaded = Guard.load(written)
    again = Guard.load(loaded.save(tmp_path / "again", onnx=False))
    for mine, theirs, thirds in zip(guard(items), loaded(items), again(items), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs == thirds
    assert (loaded.kind, loaded.class_names) == ("images", guard_kit.CLASSES)
    assert (loaded.alpha, loaded.threshold) == (guard.alpha, guard.threshold)
    about = json.loads((written / "guard.json").read_text())
    assert about["threshold"] == guard.threshold
    assert about["preprocessing"]["size"] == 24
    assert about["versions"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert sorted(os.listdir(written)) == ["README.md", "detector.safetensors", "guard.json", "weights.safetensors"]


@pytest.mark.parametrize("per_class", [False, True])
def test_the_threshold_in_the_json_is_the_one_that_decides(tmp_path, per_class):
    feature_guard(per_class=per_class).save(tmp_path / "guard", onnx=False)
    z = torch.randn(50, 6) * 3
    guard = Guard.load(tmp_path / "guard")
    verdict = guard(z)
    assert 0 < verdict.is_ood.sum() < 50
    threshold = json.loads((tmp_path / "guard" / "guard.json").read_text())["threshold"]
    assert isinstance(threshold, list) == per_class
    if not per_class:
        assert torch.equal(verdict.is_ood, verdict.score > threshold)
    lowered = [-1e9] * 2 if per_class else float(verdict.score.median())
    rewrite(tmp_path / "guard", threshold=lowered)
    changed = Guard.load(tmp_path / "guard")(z)
    assert torch.equal(changed.score, verdict.score)
    assert changed.is_ood.sum() == (50 if per_class else 25)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"backbone": {"class": "ResNet", "options": {"transform": True}}, "preprocessing": None}, "backbone="),
        ({"backbone": {"class": "os.system", "options": {}}}, "os.system"),
        ({"backbone": {"class": "ResNet", "options": {"blocks": [2, 2], "widths": [8, 16]}}}, "weights.safetensors"),
        ({"format": 9}, "format"),
    ],
)
def test_a_guard_that_does_not_fit_itself_is_refused(copied, changes, error):
    rewrite(copied, **changes)
    with pytest.raises((ValueError, TypeError), match=error):
        Guard.load(copied)


def test_missing_and_damaged_files_are_named(copied, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        Guard.load(tmp_path / "nowhere")
    for name in ("detector.safetensors", "weights.safetensors"):
        os.truncate(copied / name, 100)
        with pytest.raises(ValueError, match=name):
            Guard.load(copied)
    (copied / "weights.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="weights"):
        Guard.load(copied)
    (copied / "guard.json").write_text("{")
    with pytest.raises(ValueError, match=r"guard\.json"):
        Guard.load(copied)


class OwnNet(Backbone):
    def __init__(self, **options):
        super().__init__(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), 5, **options)


def test_a_network_of_ones_own_is_given_in_python(tmp_path):
    torch.manual_seed(0)
    net = OwnNet(num_classes=2)
    z, y = torch.randn(200, 6), torch.arange(200) % 2
    with torch.no_grad():
        features = net.encoder(z)
    detector = Calibrated(FusedRMD()).fit_features(features, y).calibrate_features(features)
    guard = Guard(net, detector, ["a", "b"], input_shape=(6,))
    guard.save(tmp_path / "guard", onnx=False)
    with pytest.raises(ValueError, match=r"OwnNet.*backbone="):
        Guard.load(tmp_path / "guard")
    loaded = Guard.load(tmp_path / "guard", backbone=OwnNet(num_classes=2))
    assert torch.equal(loaded(z).score, guard(z).score)
    assert loaded(z).class_name == guard(z).class_name


# -- writing ----------------------------------------------------------------------------------------------------------


def test_a_guard_replaces_a_guard_and_nothing_else(tmp_path):
    guard = feature_guard()
    (tmp_path / "mine").mkdir()
    guard.save(tmp_path / "mine", onnx=False)  # empty before
    (tmp_path / "mine" / "note.txt").write_text("of the old one")
    guard.save(tmp_path / "mine", onnx=False)
    assert not (tmp_path / "mine" / "note.txt").exists()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "dear.jpg").write_text("")
    for path in (tmp_path / "photos", tmp_path / "photos" / "dear.jpg"):
        with pytest.raises(ValueError, match="not empty"):
            guard.save(path, onnx=False)
    assert sorted(os.listdir(tmp_path)) == ["mine", "photos"]


def test_without_the_packages_the_extra_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    def missing(package, extra, needed_by):
        raise ImportError(f"{needed_by} needs {package}: rmd-plugin[{extra}]")

    monkeypatch.setattr(export, "require", missing)
    with pytest.raises(ImportError, match=r"rmd-plugin\[export\]"):
        feature_guard().save(tmp_path / "guard")
    assert not os.listdir(tmp_path)


def test_the_card_shows_names_of_strangers_as_text(tmp_path):
    guard = feature_guard()
    guard.class_names = ["<script>alert(1)</script>", "a|b\n# Heading"]
    guard.save(tmp_path / "guard", onnx=False)
    card = (tmp_path / "guard" / "README.md").read_text()
    assert "<script" not in card
    assert "a&#124;b # Heading" in card
    assert "written without `model.onnx`" in card
