"""CIFAR and CLINC150 on small files of the published layouts, and on the real data where it is present."""

import hashlib
import json
import os
import pickle

import framework_kit as kit
import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_ood.dataset.img import LSUNCrop
from torchvision.datasets import CIFAR10, CIFAR100

from rmd_plugin.benchmarks import (
    CLINC150,
    ChecksumError,
    CIFAR10vsCIFAR100,
    CIFAR100vsCIFAR10,
    DataFormatError,
    DownloadError,
    public,
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


def test_labels_between_two_classes_are_refused_with_the_file(tmp_path):
    np.savez(tmp_path / "cifar10.npz", **arrays(10) | {"train_labels": np.tile(np.arange(10), 4) + 0.5})
    with pytest.raises(DataFormatError, match=r"cifar10\.npz.*whole numbers"):
        CIFAR10vsCIFAR100(data_dir=tmp_path)


def test_noise_is_far_ood_and_repeatable(npz_folder):
    one, again = (CIFAR10vsCIFAR100(data_dir=npz_folder, limit_test=25) for _ in range(2))
    assert one.distance == {"CIFAR100": "near", "GaussianNoise": "far", "UniformNoise": "far"}
    for left, right in zip(one.test_oods, again.test_oods, strict=True):
        np.testing.assert_array_equal(as_images(left), as_images(right))
    other = CIFAR10vsCIFAR100(data_dir=npz_folder, limit_test=25, seed=1)
    assert other.fingerprint("GaussianNoise") != one.fingerprint("GaussianNoise")


def test_any_picture_set_of_the_framework_is_a_far_set_cropped_to_32_pixels(npz_folder, tmp_path, monkeypatch):
    for path in npz_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    kit.unpacked(tmp_path, LSUNCrop, monkeypatch)
    benchmark = CIFAR10vsCIFAR100(data_dir=tmp_path, far=["LSUNCrop"])
    assert benchmark.distance == {"CIFAR100": "near", "LSUNCrop": "far"}
    assert benchmark.test_oods[1][0][0].shape == (3, 32, 32)
    with pytest.raises(FileNotFoundError, match=r"Places365 is not complete in .*places365\.zip"):
        CIFAR10vsCIFAR100(data_dir=tmp_path, far=["Places365"])


def test_cifar_from_torchvision_s_files_has_their_images_and_the_fingerprint_of_the_npz(tmp_path, monkeypatch):
    contents = {}
    for name, published, classes, key in (
        ("cifar10", CIFAR10, 10, "labels"),
        ("cifar100", CIFAR100, 100, "fine_labels"),
    ):
        kit.cifar_batches(tmp_path, published, monkeypatch, classes=classes, key=key)
        parts = {"train": published(tmp_path), "test": published(tmp_path, train=False)}
        contents[name] = {f"{part}_images": data.data for part, data in parts.items()}
        contents[name] |= {f"{part}_labels": np.array(data.targets) for part, data in parts.items()}
    benchmark = CIFAR10vsCIFAR100(data_dir=tmp_path, val_fraction=0, far=[])
    np.testing.assert_array_equal(as_images(benchmark.fit_set()), contents["cifar10"]["train_images"])
    np.testing.assert_array_equal(as_images(benchmark.test_oods[0]), contents["cifar100"]["test_images"])
    # the same pictures give the same fingerprint, whatever file they come from
    (tmp_path / "npz").mkdir()
    for name, content in contents.items():
        np.savez(tmp_path / "npz" / f"{name}.npz", **content)
    assert CIFAR10vsCIFAR100(data_dir=tmp_path / "npz", val_fraction=0, far=[]).fingerprint() == benchmark.fingerprint()

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    (tmp_path / CIFAR10.base_folder / "test_batch").write_bytes(pickle.dumps({"data": Bomb(), "labels": []}))
    with pytest.raises(FileNotFoundError, match="damaged"):
        CIFAR10vsCIFAR100(data_dir=tmp_path)
    assert not (tmp_path / "boom").exists()


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
    channel_means = as_images(benchmark.test_in).mean((0, 1, 2)) / 255
    np.testing.assert_allclose(channel_means, means, atol=0.01)


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


def test_clinc_labels_follow_the_sorted_intents_and_texts_are_raw_strings(tmp_path):
    write_clinc(tmp_path, clinc_content())
    benchmark = CLINC150(data_dir=tmp_path)
    assert benchmark.class_names == ["alarm", "balance", "weather"]
    assert benchmark.train_set()[0] == ("train weather query 0", 2)
    assert benchmark.test_in[1] == ("test alarm query 0", 0)
    assert (benchmark.ood_names, benchmark.distance) == (["oos_test"], {"oos_test": "near"})
    assert benchmark.test_oods[0][0] == ("test something else 0", -1)
    # the out-of-scope training queries are never part of anything that is fitted or evaluated
    texts = {x for part in (benchmark.train_set(), benchmark.val_set(), *benchmark.test_sets()) for x, _ in part}
    assert texts.isdisjoint(text for split in ("oos_train", "oos_val") for text, _ in clinc_content()[split])


def test_clinc_is_downloaded_only_when_asked_and_checked(server, tmp_path, monkeypatch):
    folder, url = server
    content = json.dumps(clinc_content()).encode()
    (folder / "data_full.json").write_bytes(content)
    monkeypatch.setattr(public, "_CLINC_URL", url)
    with pytest.raises(ChecksumError, match="Not kept"):
        CLINC150(data_dir=tmp_path, download=True)
    monkeypatch.setitem(public._CLINC_SHA256, "full", hashlib.sha256(content).hexdigest())
    assert len(CLINC150(data_dir=tmp_path, download=True).train_set()) == 24
    (folder / "data_full.json").unlink()
    CLINC150(data_dir=tmp_path, download=True)
    with pytest.raises(DownloadError, match=r"404.*by hand"):
        CLINC150(data_dir=tmp_path, variant="small", download=True)


@pytest.mark.data
@pytest.mark.parametrize(
    ("variant", "train", "per_class"),
    [("full", 15_000, {100}), ("imbalanced", 10_525, {25, 50, 75, 100}), ("oos_plus", 15_000, {100})],
)
def test_the_real_clinc_files_have_the_published_counts(data_dir, variant, train, per_class):
    benchmark = CLINC150(data_dir=data_dir, variant=variant)
    assert benchmark.num_classes == 150
    assert [len(s) for s in (benchmark.train_set(), benchmark.val_set(), benchmark.test_in)] == [train, 3000, 4500]
    assert len(benchmark.test_oods[0]) == 1000
    assert set(np.bincount(benchmark.train_set().labels).tolist()) == per_class
    assert set(np.bincount(benchmark.val_set().labels).tolist()) == {20}
    assert set(np.bincount(benchmark.test_in.labels).tolist()) == {30}
    assert benchmark.class_names == sorted(benchmark.class_names)
    path = data_dir / "clinc150" / f"data_{variant}.json"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == public._CLINC_SHA256[variant]
