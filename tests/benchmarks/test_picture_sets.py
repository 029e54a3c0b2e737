"""Picture data sets of the framework as OOD sets, by the names of their classes."""

import urllib.request

import framework_kit as kit
import numpy as np
import pytest
from pytorch_ood.dataset import img
from torchvision.datasets import SVHN

from rmd_plugin.benchmarks import DataNotFoundError
from rmd_plugin.benchmarks.framework import load_picture_set


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a download was started")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def load(name, folder, **options):
    return load_picture_set(name, folder, seed=0, **options)[1]


#: options that a user must give, because the files may be anywhere
TOLD = {
    "FishyScapes": {"cs_root": "nowhere"},
    "ImageListDataset": {"imglist_path": "nowhere.txt"},
    "TinyImages": {"datafile": "nowhere.bin", "cifar_index_file": "nowhere.txt"},
}


@pytest.mark.parametrize("name", [*TOLD, "LSUNCrop", "SVHN", "Textures", "NINCO", "ImageNetC", "MVTechAD"])
def test_an_absent_set_is_one_error_with_the_remedy_and_never_a_download(name, tmp_path):
    if name in TOLD:
        with pytest.raises(ValueError, match=next(iter(TOLD[name]))):
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


def test_options_that_the_class_refuses_and_empty_folders_are_told(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="AssertionError"):
        load({"OpenImagesO": {"subset": "all"}}, tmp_path)
    with pytest.raises(ValueError, match="sigma"):
        load({"CIFAR100GAN": {"sigma": 3}}, tmp_path)
    kit.unpacked(tmp_path, img.LSUNCrop, monkeypatch, count=0)
    (tmp_path / img.LSUNCrop.base_folder).mkdir(parents=True)
    with pytest.raises(DataNotFoundError, match=r"LSUNCrop is not complete in .*: no picture is there\."):
        load("LSUNCrop", tmp_path)


def _flat(kind, check="tgz_md5", folder=None):
    def make(root, monkeypatch):
        kit.unpacked(root, kind, monkeypatch, folder=folder, check=check)
        return 3, (40, 32)

    return make


def _gan(root, monkeypatch):
    np.savez(root / img.CIFAR100GAN.filename[50.0], x=np.zeros((5, 3, 32, 32), np.uint8))
    return 5, (32, 32)


def _svhn(root, monkeypatch):
    from scipy.io import savemat

    savemat(root / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 5), np.uint8), "y": np.ones((5, 1))})
    listed = [*SVHN.split_list["test"][:2], kit.md5(root / "test_32x32.mat")]
    monkeypatch.setitem(SVHN.split_list, "test", listed)
    return 5, (32, 32)


def _ninco(root, monkeypatch):
    kit.unpacked(root, img.NINCO, monkeypatch, folder="NINCO/NINCO_OOD_classes/cat", check="md5hash")
    return 3, (40, 32)


SETS = {
    "LSUNCrop": _flat(img.LSUNCrop),
    "Textures": _flat(img.Textures, folder="dtd/images/banded"),
    "NINCO": _ninco,
    "CIFAR100GAN": _gan,
    "SVHN": _svhn,
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_in_the_folder_gives_pictures_of_any_size_or_of_the_benchmark_s(name, tmp_path, monkeypatch):
    count, size = SETS[name](tmp_path, monkeypatch)
    whole, cropped = load(name, tmp_path), load(name, tmp_path, size=20)
    assert len(whole) == len(cropped) == count
    assert (whole[0].mode, whole[0].size) == ("RGB", size)
    assert (cropped[count - 1].mode, cropped[count - 1].size) == ("RGB", (20, 20))
