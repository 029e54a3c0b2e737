"""One wrong bit on the disk: a detector file or a cache entry never passes for what was written."""

import os

import numpy as np
import pytest
import torch
from conftest import make_blobs

from rmd_plugin import RMD, FlowLikelihood, FusedRMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis, RelativeFlow
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.detectors.files import DetectorFileError

QUICK = {"max_epochs": 1, "hidden_features": 4, "progress": False}
FAMILIES = {
    "rmd": RMD,  # the others among the slow tests
    "diagonal": lambda: RMD(covariance="diagonal"),
    "mahalanobis": Mahalanobis,
    "marginal": MarginalMahalanobis,
    "partial": lambda: PartialMahalanobis(components=2),
    "fused": lambda: FusedRMD(w=torch.eye(3, 4)),
    "kept": lambda: FusedRMD(keep_moments=True),
    "likelihood": lambda: FlowLikelihood(**QUICK),
    "relative": lambda: RelativeFlow(space="features", background="flow", sharing="per_class", **QUICK),
    "conditional": lambda: RelativeFlow(**QUICK),
}
#: as save writes them, and as it wrote them before
WRITERS = {
    "safetensors": lambda detector, path: detector.save(path),
    "zip": lambda detector, path: torch.save(detector.state_dict(), path),
}
KEY = "ab" * 32
FEATURES = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
LABELS = np.arange(40) % 4


def flipped(content, seed):
    """The bytes with one random bit turned."""
    rng = np.random.default_rng(seed)
    place, bit = int(rng.integers(len(content))), int(rng.integers(8))
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.slow] * (make is not RMD)) for name, make in FAMILIES.items()],
)
def test_no_flipped_bit_changes_a_detector_silently(make, write, tmp_path):
    z, y, x = make_blobs(num_classes=3, width=4, per_class=20)
    detector = make().fit_features(z, y)
    path = tmp_path / "detector.pt"
    write(detector, path)
    whole, expected = path.read_bytes(), detector.predict_features(x)
    messages = []
    for seed in range(400):
        path.write_bytes(flipped(whole, seed))
        try:
            loaded = type(detector).load(path)
        except DetectorFileError as error:
            messages.append(str(error))
            continue
        # padding of a zip, blanks of a header: nothing that was read
        assert torch.equal(loaded.predict_features(x), expected)
        found, whole_state = loaded.state_dict(), detector.state_dict()
        assert found["options"] == whole_state["options"]
        assert all(torch.equal(tensor, found["tensors"][name]) for name, tensor in whole_state["tensors"].items())
    assert len(messages) > 100
    assert all(text.startswith(f"{path} cannot be loaded: ") and "\n" not in text for text in messages)
    assert not any("weights_only" in text for text in messages)


def fetch(cache):
    """A fresh look at the entry; the second value says whether it was computed for it."""
    computed = []

    def compute():
        computed.append(True)
        return [(FEATURES, LABELS)]

    found = cache.fetch(KEY, compute, len(LABELS))
    return found, bool(computed)


@pytest.mark.parametrize("name", ["features.npy", "labels.npy", "entry.json"])
def test_no_flipped_bit_changes_cached_features_silently(name, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of them take a minute
    cache = FeatureCache(tmp_path)
    path = fetch(cache)[0].folder / name
    whole, anew = path.read_bytes(), 0
    for seed in range(100):
        path.write_bytes(flipped(whole, seed))
        caplog.clear()
        found, computed = fetch(cache)
        assert np.array_equal(found.features, FEATURES)
        assert np.array_equal(found.labels, LABELS)
        assert len(caplog.records) == computed  # one line for each
        anew += computed
        if not computed:
            path.write_bytes(whole)
    assert anew > (20 if name == "entry.json" else 99)


def test_labels_set_to_zero_are_found_out(tmp_path, caplog):
    cache = FeatureCache(tmp_path)
    path = fetch(cache)[0].folder / "labels.npy"
    labels = np.load(path)
    labels[::5] = 0
    np.save(path, labels)
    found, computed = fetch(cache)
    assert computed
    assert np.array_equal(found.labels, LABELS)
    assert "labels" in caplog.text
    assert not fetch(cache)[1]
