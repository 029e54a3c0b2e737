"""What is written as a guard is read back, and nothing else is."""

import json
import os
import shutil
import stat

import guard_kit
import pytest
import torch
from guard_kit import feature_guard, picture_guard, pictures
from torch import nn

from rmd_plugin import Calibrated, FusedRMD, Guard
from rmd_plugin.backbones import Backbone
from rmd_plugin.guard import export, folder
from rmd_plugin.guard.folder import GuardError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    place = tmp_path_factory.mktemp("written") / "guard"
    picture_guard().save(place, onnx=False)
    return place


@pytest.fixture
def copied(written, tmp_path):
    return shutil.copytree(written, tmp_path / "guard")


def rewrite(place, **changes):
    """Somebody who changes ``guard.json`` and knows how to make a checksum."""
    about = json.loads((place / "guard.json").read_text()) | changes
    about["checksum"] = folder._checksum(about)
    (place / "guard.json").write_text(json.dumps(about))


def test_a_guard_comes_back_bitwise_with_all_that_it_says(written):
    guard, items = picture_guard(), pictures(40, (31, 57), seed=7)
    loaded = Guard.load(written)
    for mine, theirs in zip(guard(items), loaded(items), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    assert loaded.kind == "images"
    assert loaded.class_names == guard_kit.CLASSES
    assert loaded.alpha == guard.alpha
    assert loaded.threshold == guard.threshold
    about = json.loads((written / "guard.json").read_text())
    assert about["classes"] == guard_kit.CLASSES
    assert about["threshold"] == guard.threshold
    assert about["preprocessing"]["size"] == 24
    assert about["versions"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert set(about["files"]) == {"weights.safetensors", "detector.safetensors", "README.md"}
    assert loaded.digest == about["checksum"]
    # what others may read of the folder is what the user's mask says
    modes = {stat.S_IMODE((written / name).stat().st_mode) for name in os.listdir(written)}
    assert len(modes) == 1


def test_a_loaded_guard_can_be_saved_again_and_is_the_same(written, tmp_path):
    again = Guard.load(Guard.load(written).save(tmp_path / "again", onnx=False))
    items = pictures(5, seed=8)
    assert torch.equal(again(items).score, Guard.load(written)(items).score)


@pytest.mark.parametrize("name", ["weights.safetensors", "detector.safetensors", "README.md"])
@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_one_flipped_bit_anywhere_is_found(copied, name, part):
    content = bytearray((copied / name).read_bytes())
    content[int(part * len(content))] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(GuardError, match=f"{name} was altered: its hash is not the one in guard.json"):
        Guard.load(copied)


def test_another_threshold_or_class_in_the_json_is_found(copied):
    about = json.loads((copied / "guard.json").read_text())
    for change in ({"threshold": 1e9}, {"classes": ["a", "b", "c", "d"]}, {"alpha": 0.5}):
        (copied / "guard.json").write_text(json.dumps(about | change))
        with pytest.raises(GuardError, match="was altered: its checksum does not fit"):
            Guard.load(copied)
    (copied / "guard.json").write_text(json.dumps(about))  # another layout of the same is the same
    Guard.load(copied)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "assets/../../secret", "a/b", "..", "", "assets/", "x\n"])
def test_names_that_lead_out_of_the_folder_are_not_opened(copied, name):
    (copied.parent / "secret").write_text("x")
    files = json.loads((copied / "guard.json").read_text())["files"]
    rewrite(copied, files={**files, name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(GuardError, match="leads out of the folder: not opened"):
        Guard.load(copied)


def test_links_are_not_followed(copied):
    target = copied.parent / "elsewhere"
    shutil.move(copied / "weights.safetensors", target)
    (copied / "weights.safetensors").symlink_to(target)
    with pytest.raises(GuardError, match="leads out of the folder"):
        Guard.load(copied)


@pytest.mark.parametrize("name", ["os.system", "Unknown", "CheckpointError", "Backbone", 3, None])
def test_only_networks_of_this_package_are_made(copied, name):
    rewrite(copied, backbone={"class": name, "options": {}})
    with pytest.raises(GuardError, match=r"no backbone of this version|cannot be used|not made from a"):
        Guard.load(copied)


@pytest.mark.parametrize(
    "changes",
    [
        {"backbone": {"class": "ResNet", "options": {"blocks": [2, 2], "widths": [8, 16]}}},
        {"backbone": {"class": "ResNet", "options": {"layers": 5}}},
        {"preprocessing": {"size": "big"}},
        {"classes": ["only one"]},
        {"backbone": []},
        {"files": {}},
    ],
)
def test_a_guard_that_does_not_fit_itself_is_refused_in_one_line(copied, changes):
    rewrite(copied, **changes)
    with pytest.raises(GuardError, match="rmd-fit") as caught:
        Guard.load(copied)
    assert "\n" not in str(caught.value)


def test_missing_and_foreign_things_are_named(copied, tmp_path):
    with pytest.raises(GuardError, match=r"nowhere is no guard: there is no guard\.json in it"):
        Guard.load(tmp_path / "nowhere")
    (copied / "weights.safetensors").unlink()
    with pytest.raises(GuardError, match=r"weights\.safetensors is missing"):
        Guard.load(copied)
    rewrite(copied, format=2)
    with pytest.raises(GuardError, match="has format 2, expected 1"):
        Guard.load(copied)
    (copied / "guard.json").write_text("{")
    with pytest.raises(GuardError, match="is not JSON"):
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
    with pytest.raises(
        GuardError, match=r"OwnNet, which is not made from a file.*Guard\.load\(folder, backbone=\.\.\.\)"
    ):
        Guard.load(tmp_path / "guard")
    loaded = Guard.load(tmp_path / "guard", backbone=OwnNet(num_classes=2))
    assert torch.equal(loaded(z).score, guard(z).score)
    assert loaded(z).class_name == guard(z).class_name
    with pytest.raises(GuardError, match="do not fit the network"):
        Guard.load(tmp_path / "guard", backbone=OwnNet(num_classes=3))


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
    with pytest.raises(ValueError, match="photos is not empty and no guard"):
        guard.save(tmp_path / "photos", onnx=False)
    with pytest.raises(ValueError, match="is a file"):
        guard.save(tmp_path / "photos" / "dear.jpg", onnx=False)
    assert sorted(os.listdir(tmp_path)) == ["mine", "photos"]


def test_a_guard_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    guard = feature_guard()
    guard.save(tmp_path / "guard", onnx=False)
    digest = guard.digest

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_hash", full)
    with pytest.raises(OSError, match="No space left"):
        guard.save(tmp_path / "guard", onnx=False)
    monkeypatch.undo()
    assert Guard.load(tmp_path / "guard").digest == digest
    assert os.listdir(tmp_path) == ["guard"]


def test_without_the_packages_the_extra_is_named_before_anything_is_written(tmp_path, monkeypatch):
    def missing(package, extra, needed_by):
        raise ImportError(f"{needed_by} needs {package}: rmd-plugin[{extra}]")

    monkeypatch.setattr(export, "require", missing)
    with pytest.raises(ImportError, match=r"onnx=false.*rmd-plugin\[export\]"):
        feature_guard().save(tmp_path / "guard")
    assert not os.listdir(tmp_path)


def test_the_card_shows_names_of_strangers_as_text(tmp_path):
    guard = feature_guard()
    guard.class_names = ["<script>alert(1)</script>", "a|b\n# Heading ![x](http://example.org/x.png)"]
    guard.save(tmp_path / "guard", onnx=False)
    card = (tmp_path / "guard" / "README.md").read_text()
    assert "\\<script\\>" in card
    assert "a\\|b # Heading" in card
    assert "![x\\](" in card
    assert "written without `model.onnx`" in card
