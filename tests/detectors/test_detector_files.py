"""Detector files: any suffix, old and new, and everything that is refused."""

import io
import json
import os
import pickle
import traceback
import zipfile

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from conftest import make_blobs

from rmd_plugin import (
    RMD,
    Calibrated,
    ClassMoments,
    Mahalanobis,
    MarginalMahalanobis,
    Moments,
    RelativeFlow,
    load_detector,
)
from rmd_plugin.detectors.files import DetectorFileError, content_digest

FLOW = {"max_epochs": 1, "hidden_features": 4, "space": "features", "background": "flow", "sharing": "per_class"}


@pytest.fixture(scope="module")
def fitted():
    z, y, _ = make_blobs(num_classes=3, width=4, per_class=20)
    return RMD(shrinkage=0.1).fit_features(z, y)


@pytest.fixture(scope="module")
def flow():
    z, y, _ = make_blobs(num_classes=3, width=4, per_class=20)
    return RelativeFlow(**FLOW).fit_features(z, y)


def same(one, other):
    x = torch.randn(20, 4)
    return torch.equal(one.predict_features(x), other.predict_features(x)) and one.options == other.options


@pytest.mark.parametrize("name", ["rmd.pt", "rmd.safetensors", "rmd", "rmd.zip", "rmd.tar.gz"])
def test_any_name_will_do(name, fitted, tmp_path):
    fitted.save(tmp_path / name)
    assert same(RMD.load(str(tmp_path / name)), fitted)
    assert os.listdir(tmp_path) == [name]


def test_the_file_is_safetensors_that_others_can_read(fitted, tmp_path):
    fitted.save(tmp_path / "rmd.pt")
    tensors = safetensors.torch.load_file(tmp_path / "rmd.pt")
    assert all(torch.equal(tensors[name], value) for name, value in fitted.state_dict()["tensors"].items())
    with safetensors.safe_open(tmp_path / "rmd.pt", "pt") as file:
        about = json.loads(file.metadata()["rmd_plugin"])
    assert about == {
        "format": 1,
        "detector": "RMD",
        "options": {
            "shrinkage": 0.1,
            "normalize": False,
            "covariance": "tied",
            "keep_moments": False,
            "num_classes": 3,
            "num_features": 4,
        },
    }


def test_files_from_before_still_load(fitted, flow, tmp_path):
    for detector in (fitted, flow):
        torch.save(detector.state_dict(), tmp_path / "old.pt")
        assert same(type(detector).load(tmp_path / "old.pt"), detector)
        assert same(load_detector(tmp_path / "old.pt"), detector)


def test_detectors_at_the_edges_come_back(tmp_path):
    z, y, _ = make_blobs(num_classes=3, width=4, per_class=20)
    with pytest.warns(UserWarning, match="single class"):
        one = RMD(shrinkage=np.float32(0.5)).fit_features(z, y * 0)  # no direction at all
    with pytest.warns(UserWarning, match="no sample"):
        gap = Mahalanobis().fit_features(z, y * 2)
    with pytest.warns(UserWarning, match="rank"):
        flat = MarginalMahalanobis().fit_features(z * torch.tensor([1.0, 1.0, 0.0, 1.0]), y)
    for detector in (one, gap, flat):
        detector.save(tmp_path / "detector.pt")
        assert same(load_detector(tmp_path / "detector.pt"), detector)


def test_saving_through_a_link_keeps_the_link(fitted, tmp_path):
    (tmp_path / "real.pt").touch()
    (tmp_path / "link.pt").symlink_to("real.pt")
    fitted.save(tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert same(RMD.load(tmp_path / "real.pt"), fitted)


# -- refused --------------------------------------------------------------------------------------------------------


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def refusal(path, load=RMD.load):
    """The one line that a user sees, with everything that Python would print before it."""
    with pytest.raises(DetectorFileError) as caught:
        load(path)
    printed = "".join(traceback.format_exception(caught.value))
    assert "weights_only" not in printed
    message = str(caught.value)
    assert message.startswith(f"{path} cannot be loaded: ")
    assert "Take a whole copy" in message or "expected" in message.lower()
    assert "\n" not in message
    return message


def write_bomb(path, state):
    """A zip of torch, compressed, as torch never writes it."""
    plain = io.BytesIO()
    torch.save(state, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


@pytest.mark.parametrize("load", [RMD.load, load_detector, Moments.load])
@pytest.mark.parametrize("kind", ["pickle", "protocol 0", "zip", "legacy"])
def test_a_pickle_is_not_run_and_nothing_dangerous_is_advised(kind, load, tmp_path):
    path, payload = tmp_path / "evil.pt", Payload(tmp_path / "harm")
    if kind in ("pickle", "protocol 0"):
        path.write_bytes(pickle.dumps(payload, protocol=0 if kind == "protocol 0" else None))
    else:
        torch.save({"detector": payload}, path, _use_new_zipfile_serialization=kind == "zip")
    assert "nothing in it was run" in refusal(path, load)
    assert not (tmp_path / "harm").exists()


FOREIGN = {
    "empty": lambda path, _: path.touch(),
    "text": lambda path, _: path.write_text("rmd"),
    "long text": lambda path, _: path.write_text("rmd " * 1000),
    "foreign safetensors": lambda path, _: safetensors.torch.save_file({"weight": torch.ones(2)}, path),
    "foreign zip": lambda path, _: zipfile.ZipFile(path, "w").writestr("data.pkl", "x"),
    "compressed": write_bomb,
    "foreign tensors": lambda path, _: torch.save({"weight": torch.ones(2)}, path),
    "a list": lambda path, _: torch.save([1, 2], path),
    "deep header": lambda path, _: path.write_bytes((40_000).to_bytes(8, "little") + b"[" * 40_000),
    "odd header": lambda path, _: path.write_bytes((35).to_bytes(8, "little") + b'{"__metadata__": {"rmd_plugin": 1}}'),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_other_files_are_one_clear_error(write, fitted, tmp_path):
    write(tmp_path / "other.pt", fitted.state_dict())
    refusal(tmp_path / "other.pt")
    refusal(tmp_path / "other.pt", load_detector)


@pytest.mark.parametrize("old", [False, True])
def test_a_file_that_was_cut_off_is_one_clear_error(old, fitted, tmp_path):
    path = tmp_path / "rmd.pt"
    torch.save(fitted.state_dict(), path) if old else fitted.save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        refusal(path)


def test_the_wrong_class_is_named_with_the_file(fitted, tmp_path):
    fitted.save(tmp_path / "rmd.pt")
    assert "belongs to RMD, expected Mahalanobis" in refusal(tmp_path / "rmd.pt", Mahalanobis.load)
    with pytest.raises(FileNotFoundError, match=r"no\.pt"):
        RMD.load(tmp_path / "no.pt")


def test_only_detectors_are_made_from_a_state(fitted):
    for name in ("Moments", "__version__", "OODMonitor", "Nothing"):
        with pytest.raises(ValueError, match=f"{name} is no detector of rmd_plugin"):
            load_detector(fitted.state_dict() | {"detector": name})


# -- the content ----------------------------------------------------------------------------------------------------


def changed(state, name, change):
    return state | {"tensors": state["tensors"] | {name: change(state["tensors"][name])}}


def set_first(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


BAD_TENSORS = {
    "NaN": ("projection", set_first(torch.nan), "'projection' has 1 NaN or infinite"),
    "infinity": ("amplification", set_first(torch.inf), "'amplification' has 1 NaN"),
    "width": ("shift", lambda t: t[:3], r"'shift' has shape \(3,\) and type torch.float64, expected \(4,\)"),
    "directions": ("weights", lambda t: t[:1], r"'weights' .*\(1,\).* expected \(2,\)"),
    "dimensions": ("points", lambda t: t[0], r"'points' .*\(2,\).* expected \('k', 2\)"),
    "classes": ("classes", lambda t: t[:2], r"'classes' .*\(2,\).* expected \(3,\)"),
    "type": ("projection", lambda t: t.float(), r"type torch.float32, expected \(4, 2\) and torch.float64"),
    "label too large": ("classes", set_first(7), "'classes' has other labels than 0 to 2"),
    "label below zero": ("classes", set_first(-1), "'classes' has other labels"),
    "label twice": ("classes", set_first(1), "'classes' has other labels"),
    "no tensor": ("points", lambda _: [1.0], "'points' is missing"),
}


@pytest.mark.parametrize(("name", "change", "complaint"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_state_that_no_fit_can_have_left_is_refused_and_changes_nothing(name, change, complaint, fitted, tmp_path):
    state = changed(fitted.state_dict(), name, change)
    z, y, _ = make_blobs(num_classes=3, width=4, per_class=20, seed=1)
    detector = RMD().fit_features(z, y)
    before = detector.state_dict()
    with pytest.raises(ValueError, match=complaint):
        detector.load_state_dict(state)
    assert detector.options == RMD().options
    assert all(torch.equal(value, before["tensors"][key]) for key, value in detector.state_dict()["tensors"].items())
    torch.save(state, tmp_path / "old.pt")
    refusal(tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"shrinkage": 2.0}, "shrinkage must be"),
        ({"shrinkage": [0.1]}, "shrinkage must be"),
        ({"covariance": "diagonal"}, r"'projection' .*\(4, 2\).* expected \(4,\)"),
        ({"num_classes": 2}, "labels than 0 to 1"),
        ({"num_features": 5}, r"'shift' .* expected \(5,\)"),
        ({"num_features": "4"}, "num_features must be an integer"),
        ({"colour": 1}, r"options \['colour', .*newer version"),
    ],
    ids=str,
)
def test_shapes_and_options_must_belong_together(options, complaint, fitted):
    state = fitted.state_dict()
    with pytest.raises(ValueError, match=complaint):
        load_detector(state | {"options": state["options"] | options})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"hidden_features": 5}, r"initial_layer.weight' .*\(3, 4, 4\).* expected \(3, 5, 4\)"),
        ({"transforms": 2}, "_transforms.2.* is missing"),
        ({"num_blocks": 2}, "blocks.1.* is missing"),
        ({"kind": "rqs"}, r"final_layer.weight' .* expected \(3, 92, 4\)"),
        ({"sharing": "conditional"}, r"'class_epochs' .* expected \(1,\)"),
        ({"background": "none"}, "background must be 'flow' or 'gaussian'"),
    ],
    ids=str,
)
def test_shapes_and_options_of_flows_must_belong_together(options, complaint, flow):
    state = flow.state_dict()
    with pytest.raises(ValueError, match=complaint):
        load_detector(state | {"options": state["options"] | options})


def test_a_flow_with_nan_in_a_weight_is_refused_but_not_one_that_was_never_trained(flow):
    name = next(name for name in flow.state_dict()["tensors"] if name.startswith("background_flow."))
    with pytest.raises(ValueError, match="NaN or infinite"):
        load_detector(changed(flow.state_dict(), name, set_first(torch.nan)))
    load_detector(changed(flow.state_dict(), "class_loss", set_first(torch.nan)))


# -- moments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_damaged_moments_are_refused(old, tmp_path):
    metric = ClassMoments(num_classes=2, normalize=True)
    metric.update(torch.randn(8, 3), torch.arange(8) % 2)
    moments, path = metric.compute(), tmp_path / "moments.pt"
    torch.save(moments, path) if old else moments.save(path)
    assert Moments.load(path).normalized
    whole = path.read_bytes()
    place = whole.index(moments.second.numpy().tobytes()) + 3
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    assert "checksum" in refusal(path, Moments.load)
    torch.save(Moments(moments.counts, moments.shift, moments.sums[:1], moments.second), path)
    assert "'sums'" in refusal(path, Moments.load)


def test_a_detector_is_no_moments(fitted, tmp_path):
    fitted.save(tmp_path / "rmd.pt")
    assert "expected moments" in refusal(tmp_path / "rmd.pt", Moments.load)


def test_every_writing_of_one_state_has_one_digest_and_another_state_another():
    z, y = torch.randn(60, 4), torch.arange(60) % 3

    def written(detector):
        content = io.BytesIO()
        detector.save(content)
        return content_digest(content.getvalue())

    detector = Calibrated(RMD()).fit_features(z, y).calibrate_features(z)
    assert len({written(detector) for _ in range(20)}) == 1  # the bytes differ in about half of the writings
    other = Calibrated(RMD(), alpha=0.1).fit_features(z, y).calibrate_features(z)
    assert written(other) != written(detector)
    assert written(RMD().fit_features(2 * z, y)) != written(RMD().fit_features(z, y))
