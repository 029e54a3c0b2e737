"""CIFAR and CLINC150 on small files of the published layouts, and on the real data where it is present."""

import hashlib
import io
import json
import os
import pickle
import struct
import tarfile
import urllib.request
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pytorch_ood.detector import KNN, Mahalanobis
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10, CIFAR100, SVHN

from rmd_plugin.benchmarks import (
    CLINC150,
    ChecksumError,
    CIFAR10vsCIFAR100,
    CIFAR100vsCIFAR10,
    DataFormatError,
    DataNotFoundError,
    DownloadError,
    clinc,
)


def arrays(num_classes, train=4, test=2, seed=0):
    rng = np.random.default_rng(seed)

    def images(per_class):
        labels = np.tile(np.arange(num_classes), per_class)
        return rng.integers(0, 256, size=(len(labels), 32, 32, 3), dtype=np.uint8), labels

    content = {}
    for part, count in (("train", train), ("test", test)):
        content[f"{part}_images"], content[f"{part}_labels"] = images(count)
    return content


@pytest.fixture(scope="module")
def npz_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("npz")
    np.savez(folder / "cifar10.npz", **arrays(10, train=10, test=3))
    np.savez(folder / "cifar100.npz", **arrays(100, seed=1))
    return folder


def as_images(split):
    return np.stack([np.asarray(split.raw(index)) for index in range(len(split))])


# CIFAR


def test_cifar_from_npz_has_the_images_and_labels_of_the_file(npz_folder):
    benchmark = CIFAR10vsCIFAR100(data_dir=npz_folder, val_fraction=0.2, far=[])
    content = arrays(10, train=10, test=3)
    np.testing.assert_array_equal(as_images(benchmark.test_in), content["test_images"])
    np.testing.assert_array_equal(benchmark.test_in.labels, content["test_labels"])
    train, val = benchmark.fit_set(), benchmark.val_set()
    assert sorted([*train.indices, *val.indices]) == list(range(100))
    assert np.bincount(train.labels).tolist() == [8] * 10
    assert np.bincount(val.labels).tolist() == [2] * 10
    np.testing.assert_array_equal(content["train_labels"][val.indices], val.labels)
    assert benchmark.ood_names == ["CIFAR100"]
    np.testing.assert_array_equal(as_images(benchmark.test_oods[0]), arrays(100, seed=1)["test_images"])
    assert (benchmark.num_classes, benchmark.class_names[:2]) == (10, ["airplane", "automobile"])
    image, label = train[0]
    assert isinstance(train.raw(0), Image.Image)
    assert (image.shape, image.dtype, type(label)) == ((3, 32, 32), torch.float32, int)
    assert image.max() <= 1


def test_the_reverse_benchmark_swaps_the_roles(npz_folder):
    benchmark = CIFAR100vsCIFAR10(data_dir=npz_folder, val_fraction=0, far=[], limit_test=50)
    assert (benchmark.num_classes, len(benchmark.train_set()), benchmark.ood_names) == (100, 400, ["CIFAR10"])
    assert len(set(benchmark.class_names)) == 100
    # the OOD subset is balanced over the classes of its own source
    chosen = arrays(10, train=10, test=3)["test_labels"][benchmark.test_oods[0].indices]
    assert set(np.bincount(chosen, minlength=10).tolist()) <= {3}
    assert set(benchmark.test_oods[0].labels.tolist()) == {-1}
    with pytest.raises(ValueError, match="val_fraction > 0"):
        benchmark.val_set()


def test_the_framework_evaluates_a_detector_on_cifar(npz_folder):
    benchmark = CIFAR10vsCIFAR100(data_dir=npz_folder, far=["UniformNoise"], limit_test=20)
    encoder = torch.nn.Sequential(torch.nn.AvgPool2d(16), torch.nn.Flatten())
    detectors = [d.fit(DataLoader(benchmark.fit_set(), batch_size=32)) for d in (KNN(encoder), Mahalanobis(encoder))]
    rows = benchmark.evaluate(detectors, loader_kwargs={"batch_size": 16})
    assert [row["Dataset"] for row in rows] == ["CIFAR100", "CIFAR100", "UniformNoise", "UniformNoise"]
    assert all(0 <= float(row["AUROC"]) <= 1 for row in rows)


def test_noise_is_far_ood_and_repeatable(npz_folder):
    one, again = (CIFAR10vsCIFAR100(data_dir=npz_folder, limit_test=25) for _ in range(2))
    assert one.distance == {"CIFAR100": "near", "GaussianNoise": "far", "UniformNoise": "far"}
    for left, right in zip(one.test_oods, again.test_oods, strict=True):
        np.testing.assert_array_equal(as_images(left), as_images(right))
    assert one.fingerprint() == again.fingerprint()
    assert CIFAR10vsCIFAR100(data_dir=npz_folder, limit_test=25, seed=1).fingerprint(
        "GaussianNoise"
    ) != one.fingerprint("GaussianNoise")


def test_far_sets_in_the_folder_are_found_and_brought_to_size(tmp_path, monkeypatch):
    np.savez(tmp_path / "cifar10.npz", **arrays(10))
    np.savez(tmp_path / "cifar100.npz", **arrays(100))
    textures = tmp_path / "dtd" / "images" / "banded"
    textures.mkdir(parents=True)
    wide = np.zeros((40, 90, 3), np.uint8)
    wide[:, 25:65] = 255  # the centre that is left after cropping
    Image.fromarray(wide).save(textures / "banded_1.png")
    Image.fromarray(np.full((50, 50), 7, np.uint8)).save(textures / "grey.png")
    (textures / "notes.txt").write_text("not a picture")
    svhn = np.random.default_rng(0).integers(0, 256, size=(32, 32, 3, 5), dtype=np.uint8)
    from scipy.io import savemat

    savemat(tmp_path / "test_32x32.mat", {"X": svhn, "y": np.ones((5, 1))})
    with pytest.raises(ChecksumError, match="md5"):
        CIFAR10vsCIFAR100(data_dir=tmp_path)
    md5 = hashlib.md5((tmp_path / "test_32x32.mat").read_bytes()).hexdigest()
    monkeypatch.setitem(SVHN.split_list, "test", [*SVHN.split_list["test"][:2], md5])

    benchmark = CIFAR10vsCIFAR100(data_dir=tmp_path, far=["SVHN", "Textures"])
    assert benchmark.ood_names == ["CIFAR100", "SVHN", "Textures"]
    np.testing.assert_array_equal(as_images(benchmark.test_oods[1]), svhn.transpose(3, 0, 1, 2))
    banded, grey = (np.asarray(benchmark.test_oods[2].raw(index)) for index in range(2))
    assert banded.shape == grey.shape == (32, 32, 3)
    assert (banded[:, 2:-2] == 255).all()
    assert (grey == 7).all()
    before = benchmark.fingerprint("Textures")
    (textures / "banded_1.png").write_bytes(b"garbage")
    damaged = CIFAR10vsCIFAR100(data_dir=tmp_path, far=["Textures"])
    assert damaged.fingerprint("Textures") != before
    with pytest.raises(DataFormatError, match="not a readable picture"):
        damaged.test_oods[1][0]


def test_a_far_set_that_was_asked_for_but_is_absent_is_an_error_and_never_a_download(npz_folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a download was started")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(DataNotFoundError, match=r"SVHN is not in .* test_32x32\.mat"):
        CIFAR10vsCIFAR100(data_dir=npz_folder, far=["SVHN"])
    with pytest.raises(ValueError, match="there is no far-OOD set 'svhn'; there are"):
        CIFAR10vsCIFAR100(data_dir=npz_folder, far=["svhn"])


def test_absent_cifar_is_one_error_with_both_places_and_the_remedy(tmp_path):
    with pytest.raises(DataNotFoundError) as caught:
        CIFAR100vsCIFAR10(data_dir=tmp_path)
    message = str(caught.value)
    assert all(word in message for word in ("cifar-100-python", "cifar100.npz", "download=True", str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"train_images": np.zeros((40, 3, 32, 32), np.uint8)}, r"must be uint8 of shape \(N, 32, 32, 3\)"),
        ({"train_images": np.zeros((40, 32, 32, 3))}, "float64"),
        ({"train_labels": np.zeros(39, np.int64)}, "must be 40 integers"),
        ({"train_labels": np.zeros(40)}, "must be 40 integers"),
        ({"train_labels": np.full(40, 10)}, r"labels 10\.\.10, 0\.\.9 are expected"),
        ({"train_labels": np.zeros(40, np.int64)}, "missing are"),
    ],
)
def test_an_npz_with_wrong_arrays_is_refused(tmp_path, change, reason):
    np.savez(tmp_path / "cifar10.npz", **{**arrays(10), **change})
    np.savez(tmp_path / "cifar100.npz", **arrays(100, train=0, test=1))
    with pytest.raises(ValueError, match=reason):
        CIFAR10vsCIFAR100(data_dir=tmp_path)


def python2_pickle(batch):
    """The batch as Python 2 pickled it: byte strings, and an array by numpy.core.multiarray._reconstruct."""
    out = io.BytesIO()

    def text(value):
        out.write(
            b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
        )

    out.write(b"\x80\x02}(")
    for key, value in batch.items():
        text(key.encode())
        if isinstance(value, np.ndarray):
            out.write(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85")
            text(b"b")
            out.write(
                b"tR(K\x01"
                + b"J"
                + struct.pack("<i", value.shape[0])
                + b"J"
                + struct.pack("<i", value.shape[1])
                + b"\x86"
            )
            out.write(b"cnumpy\ndtype\n(")
            text(b"u1")
            out.write(b"K\x00K\x01tR(K\x03")
            text(b"|")
            out.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
            text(value.tobytes())
            out.write(b"tb")
        elif isinstance(value, list):
            out.write(b"]")
            out.write(b"(" + b"".join(b"J" + struct.pack("<i", item) for item in value) + b"e")
        else:
            text(value)
    out.write(b"u.")
    return out.getvalue()


@pytest.fixture
def batch_folder(tmp_path, monkeypatch):
    """torchvision's folders with small batches, and their md5 in place of the published ones."""
    folder = tmp_path / "batches"
    content = {"cifar10": arrays(10, seed=2), "cifar100": arrays(100, seed=3)}
    for name, published, key in (("cifar10", CIFAR10, "labels"), ("cifar100", CIFAR100, "fine_labels")):
        base = folder / published.base_folder
        base.mkdir(parents=True)
        for attribute, part in (("train_list", "train"), ("test_list", "test")):
            names = [file for file, _ in getattr(published, attribute)]
            hashes = []
            images_and_labels = (content[name][f"{part}_{kind}"] for kind in ("images", "labels"))
            pieces = zip(*(np.array_split(array, len(names)) for array in images_and_labels), strict=True)
            for file, (images, labels) in zip(names, pieces, strict=True):
                rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
                packed = python2_pickle({"batch_label": b"a batch", key: labels.tolist(), "data": rows})
                (base / file).write_bytes(packed)
                hashes.append([file, hashlib.md5(packed).hexdigest()])
            monkeypatch.setattr(published, attribute, hashes)
        packed = pickle.dumps({published.meta["key"]: []})
        (base / published.meta["filename"]).write_bytes(packed)
        monkeypatch.setitem(published.meta, "md5", hashlib.md5(packed).hexdigest())
    return folder, content


def test_cifar_from_torchvision_s_files_has_their_images_and_the_fingerprint_of_the_npz(batch_folder):
    folder, content = batch_folder
    benchmark = CIFAR10vsCIFAR100(data_dir=folder, val_fraction=0, far=[])
    np.testing.assert_array_equal(as_images(benchmark.fit_set()), content["cifar10"]["train_images"])
    np.testing.assert_array_equal(benchmark.fit_set().labels, content["cifar10"]["train_labels"])
    np.testing.assert_array_equal(as_images(benchmark.test_oods[0]), content["cifar100"]["test_images"])
    # the same pictures give the same fingerprint, whatever file they come from
    for name in content:
        np.savez(folder / f"{name}.npz", **content[name])
        (folder / {"cifar10": CIFAR10, "cifar100": CIFAR100}[name].base_folder).rename(folder / f"hidden-{name}")
    assert CIFAR10vsCIFAR100(data_dir=folder, val_fraction=0, far=[]).fingerprint() == benchmark.fingerprint()


def test_a_batch_with_another_md5_is_refused_without_being_opened(batch_folder, tmp_path):
    folder, _ = batch_folder
    target = tmp_path / "boom"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(target),)

    path = folder / CIFAR10.base_folder / "test_batch"
    path.write_bytes(pickle.dumps({"data": Bomb(), "labels": []}))
    with pytest.raises(ChecksumError, match="not opened"):
        CIFAR10vsCIFAR100(data_dir=folder)
    assert not target.exists()
    path.unlink()
    with pytest.raises(DataNotFoundError, match="test_batch is missing"):
        CIFAR10vsCIFAR100(data_dir=folder)


def test_download_fetches_checks_and_unpacks_the_archives(batch_folder, server, tmp_path, monkeypatch):
    folder, content = batch_folder
    served, url = server
    for published in (CIFAR10, CIFAR100):
        with tarfile.open(served / published.filename, "w:gz") as archive:
            archive.add(folder / published.base_folder, published.base_folder)
        monkeypatch.setattr(published, "url", f"{url}/{published.filename}")
        monkeypatch.setattr(published, "tgz_md5", hashlib.md5((served / published.filename).read_bytes()).hexdigest())
    target = tmp_path / "fresh"
    benchmark = CIFAR100vsCIFAR10(data_dir=target, download=True, far=[], val_fraction=0)
    np.testing.assert_array_equal(as_images(benchmark.fit_set()), content["cifar100"]["train_images"])
    assert {item.name for item in target.iterdir()} == {CIFAR10.base_folder, CIFAR100.base_folder}
    monkeypatch.setattr(CIFAR100, "tgz_md5", "0" * 32)
    with pytest.raises(ChecksumError, match="Not kept"):
        CIFAR100vsCIFAR10(data_dir=tmp_path / "other", download=True)
    monkeypatch.setattr(CIFAR100, "url", "http://127.0.0.1:9/gone")
    with pytest.raises(DownloadError, match="by hand"):
        CIFAR100vsCIFAR10(data_dir=tmp_path / "other", download=True)
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.data
@pytest.mark.parametrize(
    ("make", "train", "val", "test", "near"),
    [(CIFAR10vsCIFAR100, 450, 50, 1000, 5000), (CIFAR100vsCIFAR10, 135, 15, 50, 10000)],
)
def test_the_real_cifar_files_have_their_documented_counts_per_class(data_dir, make, train, val, test, near):
    benchmark = make(data_dir=data_dir)
    for split, count in ((benchmark.fit_set(), train), (benchmark.val_set(), val), (benchmark.test_in, test)):
        assert np.bincount(split.labels).tolist() == [count] * benchmark.num_classes
    assert len(benchmark.test_oods[0]) == near
    assert set(benchmark.fit_set().indices).isdisjoint(benchmark.val_set().indices)
    # published channel means of CIFAR-10 and CIFAR-100, on the test images
    means = {10: (0.4914, 0.4822, 0.4465), 100: (0.5071, 0.4865, 0.4409)}[benchmark.num_classes]
    found = as_images(benchmark.test_in).mean((0, 1, 2)) / 255
    np.testing.assert_allclose(found, means, atol=0.01)


# CLINC150


INTENTS = ["weather", "alarm", "balance"]


def clinc_content(train=8):
    def queries(split, count):
        return [[f"{split} {intent} query {number}", intent] for number in range(count) for intent in INTENTS]

    oos = {
        f"oos_{split}": [[f"{split} something else {n}", "oos"] for n in range(6)] for split in ("train", "val", "test")
    }
    return {"train": queries("train", train), "val": queries("val", 2), "test": queries("test", 4), **oos}


def write_clinc(folder, content, variant="full"):
    (folder / "clinc150").mkdir(exist_ok=True)
    path = folder / "clinc150" / f"data_{variant}.json"
    path.write_text(json.dumps(content))
    return path


def bag_of_words(text):
    counts = torch.zeros(64)
    for word in text.split():
        counts[zlib.crc32(word.encode()) % 64] += 1
    return counts


def test_clinc_labels_follow_the_sorted_intents_and_texts_are_raw_strings(tmp_path):
    write_clinc(tmp_path, clinc_content())
    benchmark = CLINC150(data_dir=tmp_path)
    assert benchmark.class_names == ["alarm", "balance", "weather"]
    assert benchmark.train_set()[0] == ("train weather query 0", 2)
    assert benchmark.test_in[1] == ("test alarm query 0", 0)
    assert (benchmark.ood_names, benchmark.distance) == (["oos_test"], {"oos_test": "near"})
    assert benchmark.test_oods[0][0] == ("test something else 0", -1)
    for name in ("oos_train", "oos_val"):
        split = getattr(benchmark, name)
        assert set(split.labels.tolist()) == {-1}
        # never part of anything that is fitted or evaluated
        texts = {x for part in (benchmark.train_set(), benchmark.val_set(), *benchmark.test_sets()) for x, _ in part}
        assert texts.isdisjoint(x for x, _ in split)


def test_the_framework_evaluates_a_detector_on_clinc_with_a_text_transform(tmp_path):
    write_clinc(tmp_path, clinc_content())
    benchmark = CLINC150(data_dir=tmp_path, train_transform=bag_of_words, test_transform=bag_of_words)
    detector = KNN(torch.nn.Identity(), k=3).fit(DataLoader(benchmark.fit_set(), batch_size=8))
    (row,) = benchmark.evaluate(detector, loader_kwargs={"batch_size": 8})
    assert row["Dataset"] == "oos_test"
    # the out-of-scope queries share few words with the training queries
    assert float(row["AUROC"]) > 0.9


def test_absent_clinc_is_one_error_with_the_place_and_the_remedy(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"data_small\.json.*download=True"):
        CLINC150(data_dir=tmp_path, variant="small")
    with pytest.raises(ValueError, match="variant must be one of full, small, imbalanced, oos_plus"):
        CLINC150(data_dir=tmp_path, variant="large")


def test_clinc_is_downloaded_only_when_asked_and_checked(server, tmp_path, monkeypatch):
    folder, url = server
    content = json.dumps(clinc_content()).encode()
    (folder / "data_full.json").write_bytes(content)
    monkeypatch.setattr(clinc, "_URL", url)
    with pytest.raises(ChecksumError, match="Not kept"):
        CLINC150(data_dir=tmp_path, download=True)
    monkeypatch.setitem(clinc._SHA256, "full", hashlib.sha256(content).hexdigest())
    assert len(CLINC150(data_dir=tmp_path, download=True).train_set()) == 24
    (folder / "data_full.json").unlink()
    CLINC150(data_dir=tmp_path, download=True)
    with pytest.raises(DownloadError, match=r"404.*by hand"):
        CLINC150(data_dir=tmp_path, variant="small", download=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"train": None}, "non-empty list"),
        ({"train": []}, "non-empty list"),
        ({"val": [["text"]]}, r"split 'val', row 0: expected \[query, intent\]"),
        ({"val": [["text", 3]]}, "row 0"),
        ({"val": [["text", "cooking"]]}, r"not in 'train': \['cooking'\]"),
        ({"test": [["text", "oos"]]}, "'oos' does not belong there"),
        ({"oos_test": [["text", "alarm"]]}, "'alarm' does not belong there"),
    ],
)
def test_a_clinc_file_of_another_form_is_refused(tmp_path, change, reason):
    write_clinc(tmp_path, {**clinc_content(), **change})
    with pytest.raises(DataFormatError, match=reason):
        CLINC150(data_dir=tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*clinc_content()]), inner, max_size=6),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON)
def test_any_other_json_is_refused_as_clinc_data(tmp_path, value):
    path = write_clinc(tmp_path, value)
    with pytest.raises(DataFormatError) as caught:
        CLINC150(data_dir=tmp_path)
    assert caught.value.path == path


@pytest.mark.data
@pytest.mark.parametrize(
    ("variant", "train", "per_class", "oos_train"),
    [
        ("full", 15_000, {100}, 100),
        ("small", 7_500, {50}, 100),
        ("imbalanced", 10_525, {25, 50, 75, 100}, 100),
        ("oos_plus", 15_000, {100}, 250),
    ],
)
def test_the_real_clinc_files_have_the_published_counts(data_dir, variant, train, per_class, oos_train):
    benchmark = CLINC150(data_dir=data_dir, variant=variant)
    assert benchmark.num_classes == 150
    assert [len(s) for s in (benchmark.train_set(), benchmark.val_set(), benchmark.test_in)] == [train, 3000, 4500]
    assert len(benchmark.test_oods[0]) == 1000
    assert [len(benchmark.oos_train), len(benchmark.oos_val)] == [oos_train, 100]
    assert set(np.bincount(benchmark.train_set().labels).tolist()) == per_class
    assert set(np.bincount(benchmark.val_set().labels).tolist()) == {20}
    assert set(np.bincount(benchmark.test_in.labels).tolist()) == {30}
    assert benchmark.class_names == sorted(benchmark.class_names)
    path = data_dir / "clinc150" / f"data_{variant}.json"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == clinc._SHA256[variant]


@pytest.mark.data
def test_the_real_clinc_variants_share_their_labels_and_test_queries(data_dir):
    full, small = CLINC150(data_dir=data_dir), CLINC150(data_dir=data_dir, variant="small")
    assert full.class_names == small.class_names
    domains = json.loads((data_dir / "clinc150" / "domains.json").read_text())
    assert sorted(intent for intents in domains.values() for intent in intents) == full.class_names
    assert Counter(full.test_in) == Counter(small.test_in)
    limited = CLINC150(data_dir=data_dir, limit_train=450, limit_test=300)
    assert set(np.bincount(limited.train_set().labels).tolist()) == {3}
    assert [len(limited.val_set()), len(limited.test_in), len(limited.test_oods[0])] == [300, 300, 300]
