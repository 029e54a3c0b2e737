"""The benchmarks of pytorch-ood by name, each against the framework's own class on a tiny fake of its folders."""

import os
import pickle
import urllib.request

import framework_kit as kit
import numpy as np
import pytest
import pytorch_ood.benchmark as published
import torch
from PIL import Image
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, TinyImageNetCrop, TinyImageNetResize
from torch.utils.data import ConcatDataset
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms import ToTensor

from rmd_plugin.benchmarks import ChecksumError, DataNotFoundError, Framework, as_benchmark, framework

ODIN = {"CIFAR10_ODIN": (CIFAR10, "labels", 10), "CIFAR100_ODIN": (CIFAR100, "fine_labels", 100)}
SSB = {"CUB_SSB": ("cub", kit.cub), "Aircraft_SSB": ("aircraft", kit.aircraft), "StanfordCars_SSB": ("scars", kit.cars)}
#: near, far and shifted sets, as the papers of the benchmarks name them
CIFAR_FAR = "MNIST SVHN Textures Places365"
IMAGENET = ("SSBHard NINCO", "iNaturalist Textures OpenImagesO", "")
KINDS = {
    "CIFAR10_OpenOOD": ("CIFAR100 TinyImageNet", CIFAR_FAR, ""),
    "CIFAR100_OpenOOD": ("CIFAR10 TinyImageNet", CIFAR_FAR, ""),
    "ImageNet200_OpenOOD": IMAGENET,
    "ImageNet1K_OpenOOD": IMAGENET,
    "CIFAR10_ODIN": ("", "", ""),
    "CIFAR100_ODIN": ("", "", ""),
    **dict.fromkeys(SSB, ("Hard", "Easy", "")),
    "MIDOG_OpenMIBOOD": (
        "midog_2 midog_3 midog_4 midog_5 midog_6a midog_6b midog_7",
        "midog_ccagt midog_fnac2019",
        "midog_csid_1b midog_csid_1c",
    ),
    "PhaKIR_OpenMIBOOD": (
        "phakir_cholec phakir_endovis2015 phakir_endovis2018",
        "phakir_kvasir phakir_cataracts",
        "phakir_medium_smoke phakir_heavy_smoke",
    ),
    "OASIS3_OpenMIBOOD": (
        "oasis3_atlas oasis3_brats oasis3_ct",
        "oasis3_heart oasis3_chaos_inPhase",
        "oasis3_scanner oasis3_t2w",
    ),
}
NOISE = ("Uniform", "Gaussian", "UniformNoise", "GaussianNoise")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path, request):
    def refuse(*args, **kwargs):
        raise AssertionError("a download was started")

    if "server" not in request.fixturenames:
        monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))  # where the framework keeps OpenOOD's lists


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Make the fake of a benchmark's folders and give its root."""

    def make(name):
        root, kind = tmp_path / "data", getattr(published, name)
        if name in ODIN:
            data, key, classes = ODIN[name]
            kit.cifar_batches(root, data, monkeypatch, classes=classes, key=key)
            for other in (TinyImageNetCrop, TinyImageNetResize, LSUNCrop, LSUNResize):
                kit.unpacked(root, other, monkeypatch)
        elif name in SSB:
            data, write = SSB[name]
            write(root)
            monkeypatch.setitem(framework._SPLITS, name, (data, kit.ssb_splits(root, data)))
        elif "OpenMIBOOD" in name:
            kit.mibood(kind, root)
        else:
            kit.openood(kind, root, tmp_path / "torch/hub/openood_benchmark_imglist/benchmark_imglist")
        return root

    return make


def theirs(name, root):
    """The framework's own benchmark; what it takes besides root and transform."""
    options = {} if name in ODIN or name == "StanfordCars_SSB" else {"download": False}
    return getattr(published, name)(str(root), ToTensor(), **options)


def same(split, dataset):
    assert len(split) == len(dataset)
    for (x, _), (expected, _) in zip(split, dataset, strict=True):
        assert torch.equal(x, expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_benchmark_of_the_framework_has_its_pictures_labels_and_kinds(name, fake):
    root = fake(name)
    ours, expected = Framework(name=name, data_dir=root, seed=3, download=name in ODIN), theirs(name, root)
    near, far, shift = (kinds.split() for kinds in KINDS[name])
    oods = dict(zip(expected.ood_names, expected.test_sets(known=False), strict=True))
    assert set(ours.ood_names) | set(ours.shifts) == set(oods)
    assert set(ours.shifts) == set(shift)
    assert [n for n in ours.ood_names if ours.distance[n] == "near"] == near
    assert [n for n in ours.ood_names if ours.distance[n] == "far"] == far
    for ood, split in zip(ours.ood_names, ours.test_oods, strict=True):
        assert set(split.labels.tolist()) == {-1}
        if ood not in NOISE:
            same(split, oods[ood])
    for other, split in ours.shifts.items():
        assert split.labels.tolist() == [1, 0, 0, 1]  # which the framework gives as -1
        same(split, oods[other])
    (test,) = expected.test_sets(unknown=False)
    same(ours.test_in, test)
    assert ours.test_in.labels.tolist() == [label for _, label in test]
    train = expected.train_set()
    if "OpenOOD" in name:
        same(ours.fit_set(), train)
        same(ours.val_set(), expected.val_in)
        assert ours.val_set().labels.tolist() == [0, 1, 1]
    else:  # a part is held out
        both = ConcatDataset([ours.fit_set(), ours.val_set()])
        assert len(both) == len(train)
        assert sorted(float(x.sum()) for x, _ in both) == sorted(float(x.sum()) for x, _ in train)
        assert sorted(label for _, label in both) == sorted(label for _, label in train)
        assert 0 < len(ours.val_set()) < len(ours.fit_set())


def test_noise_follows_the_seed_and_does_not_change_between_two_looks(fake):
    options = {"name": "CIFAR10_ODIN", "data_dir": fake("CIFAR10_ODIN"), "limit_test": 20, "download": True}
    one, again, other = (Framework(**options, seed=seed) for seed in (1, 1, 2))
    for noise in set(one.ood_names) & set(NOISE):
        assert one.fingerprint(noise) == again.fingerprint(noise) != other.fingerprint(noise)
        split = one.test_oods[one.ood_names.index(noise)]
        assert torch.equal(split[5][0], split[5][0])
        assert not torch.equal(split[0][0], split[1][0])


def test_the_fingerprint_follows_the_pictures_and_nothing_is_decoded_for_it(fake, monkeypatch):
    root = fake("CIFAR10_OpenOOD")
    benchmark = Framework(name="CIFAR10_OpenOOD", data_dir=root)
    before = {part: benchmark.fingerprint(part) for part in ("train", "test", "SVHN")}
    monkeypatch.setattr(Image, "open", None)
    assert benchmark.fingerprint("train") == before["train"]
    kit.picture(root / "data" / "test" / "2.png")
    assert benchmark.fingerprint("test") != before["test"]
    assert benchmark.fingerprint("SVHN") == before["SVHN"]


def test_a_file_of_class_splits_with_another_hash_is_never_opened(fake, tmp_path):
    name = "CUB_SSB"
    root = fake(name)
    path = next((root / "ssb_splits").iterdir())
    target = tmp_path / "boom"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(target),)

    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ChecksumError, match="its sha256 is"):
        Framework(name=name, data_dir=root)
    assert not target.exists()
    path.unlink()
    with pytest.raises(DataNotFoundError, match=r"class splits .*_osr_splits\.pkl.*download=True"):
        Framework(name=name, data_dir=root)


@pytest.mark.parametrize(
    ("name", "victim"), [("CUB_SSB", "CUB_200_2011/images/1.png"), ("CIFAR10_OpenOOD", "data/train/0.png")]
)
def test_absent_pictures_are_one_error_with_place_and_remedy_and_never_a_download(name, victim, fake):
    root = fake(name)
    (root / victim).unlink()
    with pytest.raises(DataNotFoundError) as caught:
        Framework(name=name, data_dir=root)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in (str(root), victim.rpartition("/")[2], "benchmark.download=true"))


def test_an_unknown_benchmark_is_refused_with_the_names_that_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"no benchmark 'CIFAR'; it has CIFAR10_ODIN, .*Aircraft_SSB"):
        Framework(name="CIFAR", data_dir=tmp_path)


def test_a_benchmark_that_fetches_unasked_is_not_even_constructed(fake, monkeypatch):
    root = fake("CIFAR10_ODIN")
    monkeypatch.setattr(published, "CIFAR10_ODIN", lambda root, transform: pytest.fail("constructed"))
    with pytest.raises(DataNotFoundError, match="without being asked"):
        Framework(name="CIFAR10_ODIN", data_dir=root)


def test_every_benchmark_of_the_framework_can_be_chosen():
    assert set(framework.NAMES) - {"ImageNet_OpenOOD"} == set(KINDS)  # the same class as ImageNet1K_OpenOOD


def test_the_framework_s_own_object_gets_the_same_kinds(fake):
    root = fake("MIDOG_OpenMIBOOD")
    wrapped = as_benchmark(theirs("MIDOG_OpenMIBOOD", root))
    named = Framework(name="MIDOG_OpenMIBOOD", data_dir=root)
    assert wrapped.distance == named.distance
    assert [s.labels.tolist() for s in wrapped.shifts.values()] == [s.labels.tolist() for s in named.shifts.values()]
    assert named.fingerprint("midog_csid_1b") != named.fingerprint("midog_csid_1c")
    with pytest.raises(ValueError, match=r"no split 'midog'; it has train, val, test, .*midog_csid_1c"):
        named.fingerprint("midog")


def test_further_near_and_far_sets_stand_beside_the_benchmark_s_own(fake, monkeypatch):
    root = fake("CIFAR10_OpenOOD")
    kit.unpacked(root, LSUNCrop, monkeypatch)
    benchmark = Framework(
        name="CIFAR10_OpenOOD",
        data_dir=root,
        near=["LSUNCrop"],
        far=[{"GaussianNoise": {"length": 4, "size": [9, 9, 3]}}],
    )
    assert benchmark.ood_names[:3] == ["CIFAR100", "TinyImageNet", "LSUNCrop"]
    assert benchmark.distance["LSUNCrop"] == "near"
    noise = benchmark.ood_names[-1]
    assert (noise, benchmark.distance[noise]) == ("GaussianNoise:4:[9, 9, 3]", "far")
    assert np.asarray(benchmark.test_oods[-1].raw(0)).shape == (9, 9, 3)
    # the picture as it is, not cropped
    assert benchmark.test_oods[2].raw(0).size == (40, 32)
