"""A life after the fit: update, forget and add_class give what a new fit on the same samples would have given."""

import copy

import numpy as np
import oracle
import pytest
import torch
from conftest import make_blobs
from pytorch_ood.api import RequiresFittingException
from torch import nn

from rmd_plugin import (
    RMD,
    Calibrated,
    FlowLikelihood,
    FusedRMD,
    Mahalanobis,
    MarginalMahalanobis,
    Moments,
    NumericalWarning,
    PartialMahalanobis,
    RelativeFlow,
    load_detector,
)
from rmd_plugin.detectors import reservoir

KINDS = {
    "rmd": RMD,
    "mahalanobis": Mahalanobis,
    "marginal": MarginalMahalanobis,
    "partial": lambda **options: PartialMahalanobis(components=4, **options),
    "rest": lambda **options: PartialMahalanobis(components=4, largest=False, **options),
    "normalized": lambda **options: RMD(normalize=True, **options),
    "diagonal": lambda **options: RMD(covariance="diagonal", shrinkage=0.1, **options),
    "oas": lambda **options: Mahalanobis(shrinkage="oas", **options),
    "fused": lambda **options: FusedRMD(**{"keep_moments": True, **options}),
    "fused with a head": lambda **options: FusedRMD(w=torch.eye(5, 12), **{"keep_moments": True, **options}),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
ORACLES = {RMD: oracle.rmd, Mahalanobis: oracle.mahalanobis, MarginalMahalanobis: oracle.marginal}


def assert_same(one, other, x, tolerance):
    scores = other.predict_features(x)
    torch.testing.assert_close(
        one.predict_features(x), scores, rtol=tolerance, atol=tolerance * float(scores.abs().max())
    )
    assert (one.n_classes, one.num_features) == (other.n_classes, other.num_features)


@every_kind
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_an_update_equals_a_fit_on_everything_and_forgetting_gives_back_the_old_scores(make, offset):
    z, y, x = make_blobs()
    z, x = z + offset, x + offset
    if make is KINDS["normalized"] and offset:
        offset = 1e2  # unit vectors of mean 1e4 have lost half of their digits before they are added
        z, x = z - 1e4 + offset, x - 1e4 + offset
    detector, everything = make().fit_features(z[:200], y[:200]), make().fit_features(z, y)
    before = copy.deepcopy(detector)
    assert detector.update(z[200:], y[200:]) is detector
    assert_same(detector, everything, x, 1e-10)
    assert detector.forget(z[200:], y[200:]) is detector
    assert_same(detector, before, x, 1e-8)
    assert_same(everything.forget(z[:150], y[:150]), make().fit_features(z[150:], y[150:]), x, 1e-8)


@pytest.mark.parametrize("make", ORACLES)
def test_the_scores_after_a_life_are_those_of_the_textbook(make):
    z, y, x = make_blobs()
    detector = make().fit_features(z[:100], y[:100])
    detector.update(z[100:], y[100:]).forget(z[:60], y[:60]).update(z[20:60], y[20:60])
    np.testing.assert_allclose(detector.predict_features(x), ORACLES[make](z[20:], y[20:], x), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(detector.cov, oracle.moments(z[20:], y[20:])[1], rtol=1e-5, atol=1e-5)


@every_kind
def test_nearly_everything_can_be_forgotten(make):
    z, y, x = make_blobs(per_class=2000)
    detector = make().fit_features(z, y).forget(z[100:], y[100:])
    assert_same(detector, make().fit_features(z[:100], y[:100]), x, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("make", [RMD, KINDS["fused"]], ids=["rmd", "fused"])
def test_many_small_updates_do_not_drift(make):
    z, y, x = make_blobs(per_class=200)
    detector = make().fit_features(z[:500], y[:500])
    for rows, labels in zip(z[500:].split(2), y[500:].split(2), strict=True):
        detector.update(rows, labels)
    assert_same(detector, make().fit_features(z, y), x, 1e-10)
    for rows, labels in zip(z[500:].split(2), y[500:].split(2), strict=True):
        detector.forget(rows, labels)
    assert_same(detector, make().fit_features(z[:500], y[:500]), x, 1e-8)


@every_kind
def test_a_class_that_is_added_has_the_next_label(make):
    z, y, x = make_blobs()
    detector = make().fit_features(z[y < 4], y[y < 4])
    assert detector.add_class(z[y == 4]) == 4
    assert_same(detector, make().fit_features(z, y), x, 1e-10)
    if make is not KINDS["marginal"]:
        assert (detector.nearest_class(z[y == 4]) == 4).float().mean() > 0.5


@pytest.mark.filterwarnings("ignore:.*classes have no sample")
def test_a_class_can_be_forgotten_and_learned_again():
    z, y, x = make_blobs()
    detector = RMD().fit_features(z, y)
    with pytest.warns(NumericalWarning, match="1 of 5 classes have no sample and are never nearest: 1"):
        detector.forget(z[y == 1], y[y == 1])
    assert detector.n_classes == 5
    assert detector.class_scores(x)[:, 1].isinf().all()
    np.testing.assert_allclose(detector.predict_features(x), oracle.rmd(z[y != 1], y[y != 1], x), rtol=1e-8, atol=1e-8)
    assert detector.add_class(z[y == 1]) == 5  # the label of the old one stays its own
    np.testing.assert_allclose(detector.predict_features(x), oracle.rmd(z, y, x), rtol=1e-8, atol=1e-8)
    detector.forget(z[y == 1], y[y == 1] + 4).update(z[y == 1], y[y == 1])
    assert_same(detector.fit_moments(detector.moments.with_classes(5)), RMD().fit_features(z, y), x, 1e-8)


def test_a_class_can_be_taken_out_of_the_moments_without_its_samples():
    z, y, x = make_blobs()
    detector = FusedRMD(keep_moments=True).fit_features(z, y)
    with pytest.warns(NumericalWarning, match="never nearest: 2"):
        detector.fit_moments(detector.moments.without([2]))
    assert not (detector.nearest_class(x) == 2).any()
    assert not (detector.moments.sample.labels == 2).any()


def test_classes_have_names_that_are_saved(tmp_path):
    z, y, _ = make_blobs()
    detector = RMD(keep_moments=True).fit_features(z[y < 3], y[y < 3])
    assert detector.class_names == ["0", "1", "2"]
    assert "class_names" not in detector.state_dict()
    assert detector.add_class(z[y == 3], "cat") == 3
    assert detector.update(z[y == 0], y[y == 0]).class_names == ["0", "1", "2", "cat"]
    detector.save(tmp_path / "rmd.pt")
    loaded = RMD.load(tmp_path / "rmd.pt")
    assert loaded.add_class(z[y == 4], "dog") == 4
    assert loaded.class_names == ["0", "1", "2", "cat", "dog"]
    with pytest.raises(ValueError, match=r"class 3 is named 'cat' already. Use update\(z, y\)"):
        loaded.add_class(z, "cat")
    assert loaded.fit_features(z, y).class_names == ["0", "1", "2", "3", "4"]
    for names in (["a"], "abcd", [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="names of"):
            RMD.from_state(detector.state_dict() | {"class_names": names})


@every_kind
def test_samples_that_are_marked_as_ood_change_nothing(make):
    z, y, x = make_blobs()
    detector = make().fit_features(z, y)
    before = detector.predict_features(x)
    marked = torch.full((len(x),), -1)
    for change in (detector.update, detector.forget):
        assert change(x, marked) is detector
        assert change(x[:0], marked[:0]) is detector
        assert torch.equal(detector.predict_features(x), before)
    mixed = torch.cat([x, z[:50]]), torch.cat([marked, y[:50]])
    assert_same(detector.forget(*mixed), make().fit_features(z[50:], y[50:]), x, 1e-8)


def test_maps_and_other_types_are_added_as_they_are_fitted():
    maps, y = torch.randn(60, 4, 3, 3), torch.arange(60) % 3
    x = torch.randn(20, 4)
    detector = RMD().fit_features(maps[:40], y[:40]).update(maps[40:], y[40:].float())
    assert_same(detector, RMD().fit_features(maps, y), x, 1e-5)
    half = maps.bfloat16()
    detector = RMD().fit_features(half[:40], y[:40])
    with torch.inference_mode():
        detector.update(half[40:], y[40:].to(torch.uint8))
    detector.forget(half[:7], y[:7])
    assert_same(detector, RMD().fit_features(half[7:], y[7:]), x, 1e-5)


BAD = {
    "width": (torch.zeros(2, 5), torch.zeros(2).long(), r"shape \(B, 12\), got \(2, 5\)"),
    "labels": (torch.zeros(2, 12), torch.zeros(3).long(), r"labels"),
    "NaN": (torch.full((2, 12), torch.nan), torch.zeros(2).long(), "NaN"),
    "never added": (torch.full((2, 12), 1e3), torch.zeros(2).long(), "not all added before"),
}


@pytest.mark.parametrize("make", [RMD, KINDS["fused"]], ids=["rmd", "fused"])
@pytest.mark.parametrize(("z", "y", "message"), BAD.values(), ids=BAD)
def test_what_is_refused_leaves_the_detector_as_it_was(make, z, y, message):
    known, labels, x = make_blobs()
    detector = make().fit_features(known, labels)
    before, moments = detector.predict_features(x), detector.moments
    with pytest.raises(ValueError, match=message):
        detector.forget(z, y)
    if "added" not in message:
        with pytest.raises(ValueError, match=message):
            detector.update(z, y)
    with pytest.raises(ValueError, match="there is nothing to fit"):
        detector.forget(known, labels)
    with pytest.raises(ValueError, match=r"a new class needs at least one sample, got features of shape \(0, 12\)"):
        detector.add_class(known[:0])
    assert torch.equal(detector.predict_features(x), before)
    assert detector.moments is moments


def test_options_that_were_changed_since_the_fit_are_refused():
    z, y, _ = make_blobs()
    detector = RMD().fit_features(z, y)
    detector.normalize = True
    with pytest.raises(ValueError, match="normalized=False and normalized=True do not add up"):
        detector.update(z, y)


# -- what cannot be updated -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [RelativeFlow, FlowLikelihood])
def test_flows_say_that_they_keep_no_sample(make):
    z, y, _ = make_blobs()
    detector = make(max_epochs=1)
    for change in (lambda: detector.update(z, y), lambda: detector.forget(z, y), lambda: detector.add_class(z)):
        with pytest.raises(NotImplementedError, match=rf"{make.__name__} is trained on samples.*Fit it again.*RMD"):
            change()


def test_detectors_without_moments_say_how_to_keep_them(tmp_path):
    z, y, _ = make_blobs()
    with pytest.raises(RequiresFittingException):
        RMD().update(z, y)
    assert RMD().moments is None
    loaded = RMD.from_state(RMD().fit_features(z, y).state_dict())
    assert loaded.moments is None
    for change in (lambda: loaded.update(z, y), lambda: loaded.forget(z, y), lambda: loaded.add_class(z)):
        with pytest.raises(ValueError, match=r"this RMD has no moments.*Fit it with keep_moments=True"):
            change()
    with pytest.raises(ValueError, match=r"FusedRMD has kept no sample for Z.*keep_moments=True"):
        FusedRMD().fit_features(z, y).update(z, y)


# -- the sample of FusedRMD -------------------------------------------------------------------------------------------


def test_with_more_samples_than_it_keeps_fused_forgets_all_the_same(monkeypatch):
    monkeypatch.setattr(reservoir, "RESERVOIR_SIZE", 200)
    z, y, x = make_blobs()
    detector = FusedRMD(keep_moments=True).fit_features(z, y).forget(z[:80], y[:80])
    fresh = FusedRMD(keep_moments=True).fit_features(z[80:], y[80:])
    torch.testing.assert_close(detector.cov, fresh.cov)
    rows = set(map(tuple, detector.moments.sample.rows.tolist()))
    assert rows < set(map(tuple, fresh.moments.sample.rows.tolist()))
    assert not rows & set(map(tuple, z[:80].tolist()))
    # Z is taken over another draw of the same samples
    torch.testing.assert_close(detector.predict_features(x), fresh.predict_features(x), rtol=0.1, atol=0.2)


def test_fused_refuses_to_forget_what_it_cannot_find_in_its_sample():
    z, y, _ = make_blobs()
    detector = FusedRMD(keep_moments=True).fit_features(z.float(), y)
    with pytest.raises(ValueError, match=r"5 of the 5 samples that can be looked up.*every bit"):
        detector.forget(z[:5], y[:5])


# -- saving -----------------------------------------------------------------------------------------------------------


@every_kind
def test_a_saved_detector_with_moments_goes_on(make, tmp_path):
    z, y, x = make_blobs()
    detector = make(keep_moments=True).fit_features(z[:200], y[:200])
    detector.save(tmp_path / "detector.pt")
    torch.save(detector.state_dict(), tmp_path / "old.pt")
    for path in (tmp_path / "detector.pt", tmp_path / "old.pt"):
        loaded = load_detector(path)
        assert torch.equal(loaded.predict_features(x), detector.predict_features(x))
        assert loaded.keep_moments
        torch.testing.assert_close(loaded.mu, detector.mu)
        loaded = load_detector(loaded.update(z[200:], y[200:]).state_dict())
        assert_same(loaded, make().fit_features(z, y), x, 1e-10)
        assert_same(loaded.forget(z[:50], y[:50]), make().fit_features(z[50:], y[50:]), x, 1e-8)


def test_without_the_option_files_are_as_small_as_before_and_it_can_be_set_later(tmp_path):
    z, y, x = make_blobs(width=64)
    detector = Mahalanobis(shrinkage="oas").fit_features(z, y)
    detector.save(tmp_path / "small.pt")
    detector.keep_moments = True
    detector.save(tmp_path / "large.pt")
    small, large = ((tmp_path / name).stat().st_size for name in ("small.pt", "large.pt"))
    assert large - small == pytest.approx(8 * (64 * 64 + 64 * 5 + 64 + 5), abs=1000)
    loaded = Mahalanobis.load(tmp_path / "large.pt")
    assert loaded.keep_moments
    assert_same(loaded.update(z, y), Mahalanobis(shrinkage="oas").fit_features(z.repeat(2, 1), y.repeat(2)), x, 1e-10)
    module = {name: tensor.shape for name, tensor in loaded.to_module().named_buffers()}
    assert module == {
        name: tensor.shape for name, tensor in Mahalanobis.load(tmp_path / "small.pt").to_module().named_buffers()
    }


def test_states_from_before_load():
    z, y, x = make_blobs()
    for detector in (RMD().fit_features(z, y), FusedRMD().fit_features(z, y)):
        state = detector.state_dict()
        del state["options"]["keep_moments"]
        loaded = load_detector(state)
        assert torch.equal(loaded.predict_features(x), detector.predict_features(x))
        assert not loaded.keep_moments


DAMAGE = {
    "missing": ("moments.second", None, "the moments lack second"),
    "no tensor": ("moments.counts", [1.0], "the moments lack counts"),
    "width": ("moments.shift", torch.zeros(3).double(), r"'shift' has shape \(3,\)"),
    "classes": ("moments.counts", torch.ones(4).double(), r"'counts' has shape \(4,\).* expected \(5,\)"),
    "diagonal": ("moments.second", torch.ones(12).double(), "not those that it was made from"),
    "NaN": ("moments.sums", torch.full((5, 12), torch.nan).double(), "'sums' has 60 NaN"),
    "negative": ("moments.counts", -torch.ones(5).double(), "other than 0, 1, 2"),
    "none": ("moments.counts", torch.zeros(5).double(), "not those that it was made from"),
    "sample": ("moments.sample.rows", None, "moments without a sample"),
    "limit": ("moments.sample.limit", torch.zeros(2), "'sample.limit' has shape"),
}


@pytest.mark.parametrize(("name", "value", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_moments_are_refused_and_change_nothing(name, value, message):
    z, y, x = make_blobs()
    kind = KINDS["fused" if "sample" in name else "rmd"]
    state = kind(keep_moments=True).fit_features(z, y).state_dict()
    state["tensors"] = {key: tensor for key, tensor in state["tensors"].items() if key != name}
    if value is not None:
        state["tensors"][name] = value
    detector = kind().fit_features(z[:100], y[:100])
    before = detector.predict_features(x)
    with pytest.raises(ValueError, match=message):
        detector.load_state_dict(state)
    assert torch.equal(detector.predict_features(x), before)
    assert detector.moments.num_samples == 100


def test_a_state_can_be_looked_at_without_its_content(tmp_path):
    z, y, _ = make_blobs()
    FusedRMD(keep_moments=True).fit_features(z, y).save(tmp_path / "fused.pt")
    assert FusedRMD.load(tmp_path / "fused.pt", map_location="meta").moments is None


# -- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["update", "forget", "add_class"])
def test_a_change_forgets_the_calibration_and_says_how_to_calibrate_again(change):
    z, y, x = make_blobs()
    detector = Calibrated(RMD(nn.Identity())).fit_features(z[:200], y[:200]).calibrate_features(z[200:])
    arguments = (z[:20],) if change == "add_class" else (z[:20], y[:20])
    found = getattr(detector, change)(*arguments)
    assert found == 5 if change == "add_class" else found is detector
    with pytest.raises(RequiresFittingException, match=r"calibrate_features\(z\).*after its last fit or update"):
        detector.is_ood_features(x)
    assert detector.calibrate_features(z[200:]).is_ood_features(x).any()


def test_a_change_that_is_refused_keeps_the_calibration():
    z, y, x = make_blobs()
    detector = Calibrated(RMD()).fit_features(z[:200], y[:200]).calibrate_features(z[200:])
    flags = detector.is_ood_features(x)
    with pytest.raises(ValueError, match="not all added before"):
        detector.forget(z[:300], y[:300])
    assert torch.equal(detector.is_ood_features(x), flags)


def test_a_calibrated_detector_is_saved_with_its_moments(tmp_path):
    z, y, x = make_blobs()
    detector = Calibrated(RMD(keep_moments=True)).fit_features(z[:200], y[:200]).calibrate_features(z[200:])
    detector.save(tmp_path / "detector.pt")
    loaded = Calibrated.load(tmp_path / "detector.pt")
    assert isinstance(loaded.moments, Moments)
    assert torch.equal(loaded.is_ood_features(x), detector.is_ood_features(x))
    assert_same(loaded.update(z[200:], y[200:]).detector, RMD().fit_features(z, y), x, 1e-10)
