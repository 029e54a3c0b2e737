"""Picture data sets of the framework as OOD sets, by the names of their classes; and slices of medical volumes."""

import gzip
import struct
import sys
import tarfile
import urllib.request

import framework_kit as kit
import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_ood.dataset import img
from pytorch_ood.dataset.img.pixmix import PixMixExampleDatasets
from torchvision.datasets import SVHN

from rmd_plugin.benchmarks import CIFAR10vsCIFAR100, DataFormatError, DataNotFoundError, DownloadError
from rmd_plugin.benchmarks.readers.framework_sets import PICTURE_SETS, load_picture_set
from rmd_plugin.benchmarks.readers.nifti import central_slice


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, request):
    def refuse(*args, **kwargs):
        raise AssertionError("a download was started")

    if "server" not in request.fixturenames:
        monkeypatch.setattr(urllib.request, "urlopen", refuse)


def load(name, folder, **options):
    return load_picture_set(name, folder, seed=0, **options)[1]


def test_every_picture_class_of_the_framework_is_a_name():
    assert set(PICTURE_SETS) == {*img.__all__, "SVHN"}


#: options that a user must give, because the files may be anywhere
TOLD = {
    "FishyScapes": {"cs_root": "nowhere"},
    "ImageListDataset": {"imglist_path": "nowhere.txt"},
    "TinyImages": {"datafile": "nowhere.bin", "cifar_index_file": "nowhere.txt"},
}


@pytest.mark.parametrize("name", [name for name in sorted(PICTURE_SETS) if "Noise" not in name])
def test_an_absent_set_is_one_error_with_the_remedy_and_never_a_download(name, tmp_path):
    if name in TOLD:
        with pytest.raises(ValueError, match=rf"{name} needs '{next(iter(TOLD[name]))}': give far=\[\{{{name}: "):
            load(name, tmp_path)
    with pytest.raises(DataNotFoundError) as caught:
        load({name: TOLD[name]} if name in TOLD else name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{name} is not complete in {tmp_path}")
    assert "benchmark.download=true" in message
    assert "\n" not in message


def test_an_unknown_name_and_an_unknown_option_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no far-OOD set 'Texture'; there are CIFAR100C, .*Textures"):
        load("Texture", tmp_path)
    with pytest.raises(ValueError, match=r"MNISTC has no option 'kind'; it has root, subset, split"):
        load({"MNISTC": {"kind": "fog"}}, tmp_path)


def test_options_that_the_class_refuses_and_empty_folders_are_told(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"OpenImagesO cannot be made with \{'subset': 'all'\}: AssertionError"):
        load({"OpenImagesO": {"subset": "all"}}, tmp_path)
    with pytest.raises(ValueError, match=r"CIFAR100GAN cannot be made with \{'sigma': 3\}: 3"):
        load({"CIFAR100GAN": {"sigma": 3}}, tmp_path)
    kit.unpacked(tmp_path, img.LSUNCrop, monkeypatch, count=0)
    (tmp_path / img.LSUNCrop.base_folder).mkdir(parents=True)
    with pytest.raises(DataNotFoundError, match=r"LSUNCrop is not complete in .*: no picture is there\."):
        load("LSUNCrop", tmp_path)


def test_a_set_is_fetched_by_the_framework_if_that_is_asked_for(server, tmp_path, monkeypatch):
    served, url = server
    for number in range(2):
        kit.picture(tmp_path / "packed" / img.LSUNCrop.base_folder / f"{number}.png")
    with tarfile.open(served / img.LSUNCrop.filename, "w:gz") as archive:
        archive.add(tmp_path / "packed" / "LSUN", "LSUN")
    monkeypatch.setattr(img.LSUNCrop, "url", f"{url}/{img.LSUNCrop.filename}")
    with pytest.raises(DataNotFoundError, match="not found or corrupted"):
        load("LSUNCrop", tmp_path / "wrong", download=True)  # its md5 is not the published one
    monkeypatch.setattr(img.LSUNCrop, "tgz_md5", kit.md5(served / img.LSUNCrop.filename))
    assert len(load("LSUNCrop", tmp_path / "fresh", download=True)) == 2
    monkeypatch.setattr(img.LSUNCrop, "url", "http://127.0.0.1:9/gone")
    with pytest.raises(DownloadError, match="could not download LSUNCrop"):
        load("LSUNCrop", tmp_path / "other", download=True)


def test_what_the_framework_needs_to_fetch_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gdown", None)
    with pytest.raises(DataNotFoundError, match=r"Places365 is not complete .*You have to install 'gdown'"):
        load("Places365", tmp_path, download=True)


@pytest.mark.parametrize("name", ["GaussianNoise", "UniformNoise"])
def test_noise_is_drawn_once_by_the_seed(name, tmp_path):
    one, again, other = (load_picture_set(name, tmp_path, seed=seed, size=16)[1] for seed in (0, 0, 1))
    assert one.items.shape == (1000, 16, 16, 3)
    assert np.array_equal(one.items, again.items)
    assert not np.array_equal(one.items, other.items)
    # spread over all values; the mean of the clipped normal distribution is that of the uniform one
    assert one.items.mean() == pytest.approx(127.5, abs=1)
    assert (one.items.min(), one.items.max() >= 254) == (0, True)


def _flat(kind, check="tgz_md5", folder=None):
    def make(root, monkeypatch):
        kit.unpacked(root, kind, monkeypatch, folder=folder, check=check)
        return 3, (40, 32)

    return make


def _tiny_images(root, monkeypatch):
    np.save(root / img.TinyImages300k.filename, np.zeros((4, 32, 32, 3), np.uint8))
    return 4, (32, 32)


def _gan(root, monkeypatch):
    np.savez(root / img.CIFAR100GAN.filename[50.0], x=np.zeros((5, 3, 32, 32), np.uint8))
    return 5, (32, 32)


def _sumnist(root, monkeypatch):
    (root / "sumnist").mkdir()
    for part in ("train", "test"):
        np.savez(root / f"sumnist/x-{part}.npz", np.zeros((6, 56, 56), np.uint8))
        np.savez(root / f"sumnist/y-{part}.npz", np.ones((6, 4), np.int64))
        np.savez(root / f"sumnist/b-{part}.npz", np.ones((6, 4, 4), np.int64))
    monkeypatch.setattr(img.SuMNIST, "files", {p.name: kit.md5(p) for p in (root / "sumnist").iterdir()})
    return 6, (56, 56)


def _svhn(root, monkeypatch):
    from scipy.io import savemat

    savemat(root / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.ones((5, 1))})
    listed = [*SVHN.split_list["test"][:2], kit.md5(root / "test_32x32.mat")]
    monkeypatch.setitem(SVHN.split_list, "test", listed)
    return 5, (32, 32)


def _grey_corruptions(root, monkeypatch):
    for subset in img.MNISTC.subsets:
        (root / "mnist_c" / subset).mkdir(parents=True)
        np.save(root / "mnist_c" / subset / "test_images.npy", np.zeros((2, 28, 28, 1), np.uint8))
        np.save(root / "mnist_c" / subset / "test_labels.npy", np.zeros(2, np.int64))
    (root / "mnist_c.zip").write_bytes(b"")
    return 2 * len(img.MNISTC.subsets), (28, 28)


def _corruptions(root, monkeypatch):
    (root / img.CIFAR10C.base_folder).mkdir()
    for name in [*img.CIFAR10C.subsets, "labels"]:
        shape = (3,) if name == "labels" else (3, 32, 32, 3)
        np.save(root / img.CIFAR10C.base_folder / f"{name}.npy", np.zeros(shape, np.uint8))
    (root / img.CIFAR10C.filename).write_bytes(b"")
    monkeypatch.setattr(img.CIFAR10C, "md5hash", kit.md5(root / img.CIFAR10C.filename))
    return 3 * len(img.CIFAR10C.subsets), (32, 32)


def _ninco(root, monkeypatch):
    kit.unpacked(root, img.NINCO, monkeypatch, folder="NINCO/NINCO_OOD_classes/cat", check="md5hash")
    return 3, (40, 32)


def _tiny_imagenet(root, monkeypatch):
    base = root / "tiny-imagenet-200"
    (base / "train" / "n01").mkdir(parents=True)
    for number in range(3):
        kit.picture(base / "val" / "images" / f"{number}.png", (64, 64))
    lines = "".join(f"{number}.png\tn01\t0\t0\t1\t1\n" for number in range(3))
    (base / "val" / "val_annotations.txt").write_text(lines)
    return 3, (64, 64)


SETS = {
    "LSUNCrop": _flat(img.LSUNCrop),
    "LSUNResize": _flat(img.LSUNResize),
    "TinyImageNetCrop": _flat(img.TinyImageNetCrop),
    "Textures": _flat(img.Textures, folder="dtd/images/banded"),
    "iNaturalist": _flat(img.iNaturalist, check="md5hash"),
    "Places365": _flat(img.Places365, check="md5hash", folder="places365/airfield"),
    "SSBHard": _flat(img.SSBHard, check="md5hash", folder="ssb_hard/n01"),
    "ImageNetV2": _flat(img.ImageNetV2, check="md5hash", folder="imagenet_v2/0"),
    "FractalDataset": lambda root, patch: (
        kit.unpacked(root, PixMixExampleDatasets, patch, folder="fractals_and_fvis/fractals/images", check="md5sum")
        or (3, (40, 32))
    ),
    "NINCO": _ninco,
    "TinyImageNet": _tiny_imagenet,
    "TinyImages300k": _tiny_images,
    "CIFAR100GAN": _gan,
    "CIFAR10C": _corruptions,
    "SuMNIST": _sumnist,
    "SVHN": _svhn,
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_in_the_folder_gives_pictures_of_any_size_or_of_the_benchmark_s(name, tmp_path, monkeypatch):
    count, size = SETS[name](tmp_path, monkeypatch)
    whole, cropped = load(name, tmp_path), load(name, tmp_path, size=20)
    assert len(whole) == len(cropped) == count
    assert (whole[0].mode, whole[0].size) == ("RGB", size)
    assert (cropped[count - 1].mode, cropped[count - 1].size) == ("RGB", (20, 20))


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")  # of Pillow, about the framework's own call
def test_a_set_with_options_is_named_after_them(tmp_path, monkeypatch):
    count, size = _grey_corruptions(tmp_path, monkeypatch)
    name, fog = load_picture_set({"MNISTC": {"subset": "fog"}}, tmp_path, seed=0)
    assert (name, len(fog), fog[0].size, fog[0].mode) == ("MNISTC:fog", 2, size, "RGB")
    name, every = load_picture_set("MNISTC", tmp_path, seed=0)
    assert (name, len(every)) == ("MNISTC", count)


def test_our_cifar_benchmarks_take_any_of_them(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        arrays = {}
        for part, each in (("train", 2), ("test", 1)):
            arrays[f"{part}_images"] = rng.integers(0, 256, (each * classes, 32, 32, 3), dtype=np.uint8)
            arrays[f"{part}_labels"] = np.arange(each * classes) % classes
        np.savez(tmp_path / f"{name}.npz", **arrays)
    _ninco(tmp_path, monkeypatch)
    kit.unpacked(tmp_path, img.LSUNCrop, monkeypatch)
    kit.unpacked(tmp_path, img.Textures, monkeypatch, folder="dtd/images/banded")
    benchmark = CIFAR10vsCIFAR100(data_dir=tmp_path, far=["Textures", "LSUNCrop", "NINCO"])
    assert benchmark.ood_names == ["CIFAR100", "Textures", "LSUNCrop", "NINCO"]
    assert set(list(benchmark.distance.values())[1:]) == {"far"}
    assert all(ood[0][0].shape == (3, 32, 32) for ood in benchmark.test_oods)
    with pytest.raises(DataNotFoundError, match=r"Places365 is not complete in .*places365\.zip"):
        CIFAR10vsCIFAR100(data_dir=tmp_path, far=["Places365"])


# -- volumes ----------------------------------------------------------------------------------------------------------


def test_the_middle_slice_of_a_volume_is_scaled_to_grey_values(tmp_path):
    values = kit.volume(tmp_path / "a.nii.gz")[:, :, 2].T
    scaled = (values - values.min()) / (values.max() - values.min())
    picture = central_slice(tmp_path / "a.nii.gz")
    assert (picture.mode, picture.size) == ("L", (4, 3))
    np.testing.assert_allclose(np.asarray(picture) / 255, scaled, atol=0.5 / 255 + 1e-6)
    (tmp_path / "a.nii").write_bytes(gzip.decompress((tmp_path / "a.nii.gz").read_bytes()))
    assert np.array_equal(np.asarray(central_slice(tmp_path / "a.nii")), np.asarray(picture))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:100], "not a NIfTI-1 file"),
        (lambda content: content[:-150], "cut off: the middle slice has"),
        (lambda content: content[:344] + b"ni1\0" + content[348:], "header and volume in one"),
        (lambda content: content[:40] + struct.pack("<h", 2) + content[42:], "one volume of real numbers"),
        (lambda content: content[:42] + struct.pack("<h", -4) + content[44:], "one volume of real numbers"),
        (lambda content: content[:70] + struct.pack("<h", 32) + content[72:], "one volume of real numbers"),
        (lambda content: content[:108] + struct.pack("<f", float("nan")) + content[112:], "begins at byte nan"),
        (lambda content: content[:42] + struct.pack("<3h", 30000, 30000, 30000) + content[48:], "larger than"),
        (lambda content: content[:352] + np.full(60, np.nan, "<f4").tobytes(), "NaN or infinity"),
    ],
)
def test_what_is_no_volume_is_refused(change, message, tmp_path):
    kit.volume(tmp_path / "a.nii.gz")
    (tmp_path / "b.nii").write_bytes(change(gzip.decompress((tmp_path / "a.nii.gz").read_bytes())))
    with pytest.raises(DataFormatError, match=message):
        central_slice(tmp_path / "b.nii")


def test_a_damaged_archive_of_a_volume_is_refused(tmp_path):
    kit.volume(tmp_path / "a.nii.gz")
    content = (tmp_path / "a.nii.gz").read_bytes()
    for name, damaged in (("cut", content[:-200]), ("garbage", b"no archive"), ("bits", content[:20] + b"\xff" * 99)):
        (tmp_path / f"{name}.nii.gz").write_bytes(damaged)
        with pytest.raises(DataFormatError):
            central_slice(tmp_path / f"{name}.nii.gz")


def test_a_picture_may_come_as_an_array_or_a_tensor(tmp_path):
    from rmd_plugin.benchmarks.sources import Pictures

    values = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for item in (values, torch.from_numpy(values).permute(2, 0, 1), Image.fromarray(values)):
        assert np.array_equal(np.asarray(Pictures([(item, -1)])[0]), values)
