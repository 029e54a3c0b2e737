"""The user's own features: layouts, checks and their messages."""

import io

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytorch_ood.detector import RMD, Mahalanobis
from torch.utils.data import DataLoader

from rmd_plugin.benchmarks import DataFormatError, DataNotFoundError, Features


def splits(dtype=np.float32, seed=0):
    """Two separated classes in three dimensions, with near and far OOD sets."""
    rng = np.random.default_rng(seed)

    def blob(centre, count):
        return (rng.normal(size=(count, 3)) + centre).astype(dtype)

    return {
        "train_features": np.concatenate([blob([-5, 0, 0], 40), blob([5, 0, 0], 40)]),
        "train_labels": np.repeat([0, 1], 40),
        "test_features": np.concatenate([blob([-5, 0, 0], 15), blob([5, 0, 0], 15)]),
        "test_labels": np.repeat([0, 1], 15),
        "near_middle": blob([0, 0, 0], 20),
        "far_away": blob([0, 50, 0], 25),
    }


def one_set():
    content = splits()
    features = np.concatenate([content["train_features"], content["near_middle"]])
    return features, np.concatenate([content["train_labels"], np.full(20, -1)])


def rows(split):
    return torch.stack([x for x, _ in split]).numpy()


def test_ready_splits_are_taken_as_they_are(tmp_path):
    content = splits()
    np.savez(tmp_path / "a.npz", **content)
    benchmark = Features(tmp_path / "a.npz", val_fraction=0)
    np.testing.assert_array_equal(rows(benchmark.fit_set()), content["train_features"])
    np.testing.assert_array_equal(rows(benchmark.test_in), content["test_features"])
    assert (benchmark.ood_names, benchmark.distance) == (["middle", "away"], {"middle": "near", "away": "far"})
    np.testing.assert_array_equal(rows(benchmark.test_oods[1]), content["far_away"])
    assert (benchmark.num_classes, benchmark.class_names, benchmark.feature_dim) == (2, ["0", "1"], 3)
    named = Features(tmp_path / "a.npz", class_names=["cat", "dog"])
    assert named.class_names == ["cat", "dog"]
    assert [len(named.fit_set()), len(named.val_set())] == [72, 8]


def test_npz_and_pt_files_of_the_same_arrays_are_the_same_benchmark(tmp_path):
    content = splits()
    np.savez_compressed(tmp_path / "a.npz", **content)
    torch.save({key: torch.from_numpy(value) for key, value in content.items()}, tmp_path / "a.pt")
    assert Features(tmp_path / "a.npz").fingerprint() == Features(tmp_path / "a.pt").fingerprint()
    half = {
        key: torch.from_numpy(v).bfloat16() if v.dtype.kind == "f" else torch.from_numpy(v)
        for key, v in content.items()
    }
    torch.save(half, tmp_path / "half.pt")
    item, _ = Features(tmp_path / "half.pt").fit_set()[0]
    assert item.dtype == torch.float32


def test_one_set_is_split_by_seed_and_its_negative_labels_are_ood(tmp_path):
    features, labels = one_set()
    np.savez(tmp_path / "a.npz", features=features, labels=labels)
    np.save(tmp_path / "x.npy", features)
    np.save(tmp_path / "y.npy", labels)
    benchmark = Features(tmp_path / "a.npz", ood_distance="far")
    pair = Features(tmp_path / "x.npy", labels_path=tmp_path / "y.npy")
    assert pair.fingerprint() == benchmark.fingerprint() != Features(tmp_path / "a.npz", seed=1).fingerprint()
    assert benchmark.distance == {"ood": "far"}
    assert [len(s) for s in (benchmark.fit_set(), benchmark.val_set(), benchmark.test_in)] == [56, 8, 16]
    np.testing.assert_array_equal(rows(benchmark.test_oods[0]), features[labels < 0])
    parts = np.concatenate([rows(s) for s in (benchmark.fit_set(), benchmark.val_set(), benchmark.test_in)])
    assert sorted(map(tuple, parts)) == sorted(map(tuple, features[labels >= 0]))


def test_validation_data_and_negative_test_labels_of_a_file_are_used(tmp_path):
    content = splits()
    labels = content["test_labels"].copy()
    labels[:3] = [-1, -2, -7]
    np.savez(
        tmp_path / "a.npz", **{**content, "test_labels": labels, "val_features": np.eye(3), "val_labels": [0, 1, 1]}
    )
    benchmark = Features(tmp_path / "a.npz")
    np.testing.assert_array_equal(rows(benchmark.val_set()), np.eye(3))
    assert [len(benchmark.fit_set()), len(benchmark.test_in)] == [80, 27]
    assert benchmark.ood_names == ["ood", "middle", "away"]
    np.testing.assert_array_equal(rows(benchmark.test_oods[0]), content["test_features"][:3])
    assert set(benchmark.test_oods[0].labels.tolist()) == {-1}


def test_float64_is_kept_if_asked_for(tmp_path):
    content = splits(np.float64)
    np.savez(tmp_path / "a.npz", **content)
    exact = Features(tmp_path / "a.npz", dtype="float64", val_fraction=0)
    assert exact.fit_set()[0][0].dtype == torch.float64
    np.testing.assert_array_equal(rows(exact.fit_set()), content["train_features"])
    assert Features(tmp_path / "a.npz").fit_set()[0][0].dtype == torch.float32
    assert exact.fingerprint() != Features(tmp_path / "a.npz", val_fraction=0).fingerprint()


def test_the_framework_evaluates_detectors_and_finds_the_far_set(tmp_path):
    np.savez(tmp_path / "a.npz", **splits())
    benchmark = Features(tmp_path / "a.npz")
    loader = DataLoader(benchmark.fit_set(), batch_size=16)
    identity = torch.nn.Identity()
    table = benchmark.evaluate([Mahalanobis(identity).fit(loader), RMD(identity).fit(loader)], {"batch_size": 16})
    scores = {(row["Detector"], row["Dataset"]): float(row["AUROC"]) for row in table}
    assert scores["Mahalanobis", "away"] == pytest.approx(1.0)
    assert scores["Mahalanobis", "middle"] > 0.9
    assert scores["RMD", "middle"] > 0.9


def test_a_relative_path_is_looked_for_here_and_then_in_the_data_folder(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", **splits())
    monkeypatch.chdir(tmp_path)
    assert Features("a.npz").path.name == "a.npz"
    monkeypatch.chdir("/")
    assert Features("a.npz", data_dir=tmp_path).path == tmp_path / "a.npz"
    monkeypatch.setenv("RMD_DATA_DIR", str(tmp_path))
    assert Features("a.npz").path == tmp_path / "a.npz"
    with pytest.raises(DataNotFoundError, match=r"no file of features: looked for b\.npz; .*Pass path=FILE \(\.npz"):
        Features("b.npz")
    monkeypatch.delenv("RMD_DATA_DIR")
    with pytest.raises(DataNotFoundError, match="RMD_DATA_DIR is not set"):
        Features("b.npz")


def test_ood_samples_are_optional(tmp_path):
    content = {key: value for key, value in splits().items() if not key.startswith(("near", "far"))}
    np.savez(tmp_path / "a.npz", **content)
    assert repr(Features(tmp_path / "a.npz")) == "Features(train=72, val=8, test=30)"
    np.savez(tmp_path / "b.npz", features=content["train_features"], labels=content["train_labels"])
    assert repr(Features(tmp_path / "b.npz")) == "Features(train=56, val=8, test=16)"


def test_the_logits_of_a_file_follow_their_rows_through_splits_and_limits(tmp_path):
    features, labels = one_set()
    weight = np.random.default_rng(1).normal(size=(2, 3))
    np.savez(
        tmp_path / "a.npz", features=features, labels=labels, logits=features @ weight.T,
        near_x=features[:5], near_x_logits=features[:5] @ weight.T,
    )  # fmt: skip
    benchmark = Features(tmp_path / "a.npz", limit_train=20, limit_test=6)
    assert benchmark.ood_names == ["ood", "x"]
    parts = {"train": benchmark.fit_set(), "val": benchmark.val_set(), "test": benchmark.test_in}
    parts |= dict(zip(benchmark.ood_names, benchmark.test_oods, strict=True))
    for name, split in parts.items():
        np.testing.assert_allclose(benchmark.logits(name).numpy(), rows(split) @ weight.T, rtol=1e-4, atol=1e-5)
    np.savez(tmp_path / "b.npz", features=features, labels=labels)
    assert Features(tmp_path / "b.npz").logits("test") is None


def test_the_head_of_a_file_is_a_layer(tmp_path):
    weight, bias = np.arange(6.0).reshape(2, 3), np.array([0.5, -1.0])
    np.savez(tmp_path / "a.npz", **splits(), head_weight=weight, head_bias=bias)
    state = torch.get_rng_state()
    head = Features(tmp_path / "a.npz").head
    assert torch.equal(state, torch.get_rng_state())
    x = torch.tensor([[1.0, 2.0, 3.0]])
    np.testing.assert_allclose(head(x).detach().numpy(), x.numpy() @ weight.T + bias)


def changed(**change):
    content = {**splits(), **change}
    return {key: value for key, value in content.items() if value is not None}


LOGITS = {"train": 80, "test": 30, "near_middle": 20, "far_away": 25}
NAN = splits()["train_features"]
NAN[7, 2] = np.nan
HUGE = splits(np.float64)["train_features"]
HUGE[3, 0] = 1e300


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (changed(train_features=None), "has no array 'train_features'; it has far_away"),
        (changed(train_labels=None), "has no array 'train_labels'"),
        (changed(train_features=NAN), "'train_features', row 7, column 2 is nan"),
        (changed(train_features=HUGE), "row 3, column 0 is 1e.300; finite"),
        (changed(train_features=np.zeros((80, 3, 1))), "real numbers of shape"),
        (changed(train_features=np.zeros((80, 3), complex)), "complex128"),
        (changed(train_features=np.full((80, 3), "x")), "real numbers"),
        (changed(train_labels=np.zeros((80, 1), int)), "integers of shape"),
        (changed(train_labels=np.zeros(80)), "integers of shape"),
        (changed(train_labels=np.zeros(79, int)), "80 rows of 'train_features' but 79"),
        (changed(train_labels=np.repeat([0, 2], 40)), r"missing are \[1\], .* Renumber"),
        (changed(train_labels=np.repeat([0, 10**15], 40)), r"missing are \[1, 2, .* Renumber"),
        (changed(train_labels=np.repeat([-1, 0], 40)), "train_labels has labels < 0"),
        (changed(train_labels=np.full(80, 2**64 - 1, np.uint64)), "no class number"),
        (changed(test_labels=np.repeat([0, 5], 15)), "test labels must lie in 0..1"),
        (changed(val_features=np.eye(3), val_labels=np.array([0, 1, -1])), "validation labels must lie in 0..1"),
        (changed(test_labels=np.full(30, -1)), "no in-distribution samples"),
        (changed(far_away=np.zeros((5, 4))), "has 4 columns, the other arrays have 3"),
        (changed(far_away=np.zeros((0, 3))), "'far_away' is empty"),
        (changed(far_middle=np.zeros((5, 3))), "same name"),
        (changed(head_weight=np.zeros((2, 3))), "has no array 'head_bias'"),
        (changed(head_weight=np.zeros((3, 2)), head_bias=np.zeros(2)), r"of shapes \(2, 3\) and \(2,\), got"),
        (changed(head_weight=np.full((2, 3), np.nan), head_bias=np.zeros(2)), "'head_weight', row 0, column 0 is nan"),
        (changed(train_logits=np.zeros((80, 2))), "has no array 'test_logits'"),
        (changed(**{f"{k}_logits": np.zeros((n, 3)) for k, n in LOGITS.items()}), "logits of 3 classes, .* have 2"),
        (
            changed(**{f"{k}_logits": np.zeros((n + 1, 2)) for k, n in LOGITS.items()}),
            r"'train_logits' must .*\(80, K\)",
        ),
        (
            changed(**{f"{k}_logits": np.zeros((n, 2)) for k, n in LOGITS.items()}, head_weight=np.zeros((2, 3))),
            "keep one of them",
        ),
        ({"features": np.zeros((4, 2)), "labels": np.full(4, -1)}, "no in-distribution samples"),
    ],
)
def test_wrong_arrays_are_refused_with_what_was_expected(tmp_path, content, reason):
    path = tmp_path / "a.npz"
    np.savez(path, **content)
    with pytest.raises(DataFormatError, match=reason) as caught:
        Features(path)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "dtype must be"),
        ({"ood_distance": "middle"}, "ood_distance must be"),
        ({"class_names": ["one"]}, "1 class_names for the 2 classes"),
        ({"labels_path": "a.npz"}, "labels_path belongs to an .npy file"),
        ({"limit_train": 1}, "cannot cover the 2 classes"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, reason, monkeypatch):
    np.savez(tmp_path / "a.npz", **splits())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=reason):
        Features("a.npz", **options)
    (tmp_path / "a.csv").write_text("1,2")
    np.save(tmp_path / "a.npy", np.eye(2))
    with pytest.raises(ValueError, match=r"read from \.npz"):
        Features("a.csv")
    with pytest.raises(ValueError, match="labels_path belongs"):
        Features("a.npy")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.tuples(*(st.lists(st.integers(0, 4), max_size=3).map(tuple) for _ in range(2))),
    dtypes=st.tuples(*(st.sampled_from(["f2", "f4", "f8", "i1", "u8", "c8", "U3", "b1", "M8[s]"]) for _ in range(2))),
    fill=st.integers(-1, 3),
)
def test_arrays_of_any_shape_and_type_are_taken_or_refused_but_never_crash(tmp_path, shapes, dtypes, fill):
    buffer = io.BytesIO()
    features, labels = (np.full(shape, 1, "i8").astype(dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    if labels.dtype.kind == "i":
        labels[...] = fill
    np.savez(buffer, features=features, labels=labels, near_x=np.ones((2, 2)))
    (tmp_path / "a.npz").write_bytes(buffer.getvalue())
    try:
        benchmark = Features(tmp_path / "a.npz")
    except DataFormatError:
        return
    assert benchmark.num_classes >= 1
    assert len(benchmark.fit_set()) > 0
