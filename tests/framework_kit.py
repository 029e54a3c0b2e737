"""Tiny fakes of the folders that the framework's benchmarks read: pictures of one colour, all different."""

import hashlib
import itertools
import pickle

import numpy as np
from PIL import Image
from pytorch_ood.benchmark.img import ssb
from scipy.io import savemat

_COLOURS = itertools.count()


def picture(path, size=(8, 6)):
    """A picture of a colour of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = next(_COLOURS)
    Image.new("RGB", size, (number % 256, number // 256 % 256, 77)).save(path, None if path.suffix != ".gz" else "PNG")


def image_list(root, path, stem, labels, suffix=".png"):
    """A list of pictures and labels, and the pictures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{stem}/{number}{suffix}" for number in range(len(labels))]
    for name in names:
        picture(root / name)  # a converted slice where the list names volumes
    path.write_text("".join(f"{name} {label}\n" for name, label in zip(names, labels, strict=True)))


def openood(kind, root, lists):
    """OpenOOD's layout of a benchmark with two classes; ``lists`` is the folder of all lists."""
    for role, name, labels in (
        ("train", kind._train_imglist, [0, 1] * 10),
        ("val", kind._val_id_imglist, [0, 1, 1]),
        ("test", kind._test_id_imglist, [1, 0, 1, 0]),
        ("val_ood", kind._val_ood_imglist, [-1, -1]),
        *((f"ood_{ood}", name, [-1] * 3) for ood, name in kind._ood_imglists),
    ):
        image_list(root, lists / kind._subdir / name, f"data/{role}", labels)


def mibood(kind, root):
    """OpenMIBOOD's layout of a benchmark with two classes; the shifted ID sets have their labels."""
    suffix = ".nii.gz" if kind._dataset_subdir == "oasis3" else ".png"
    lists = root / "imglists" / kind._dataset_subdir
    image_list(root, lists / kind._train_imglist, "id/train", [0, 1] * 10, suffix)
    image_list(root, lists / kind._test_imglist, "id/test", [1, 0, 1], suffix)
    shifts = len(kind.cs_id_names)
    for place, name in enumerate(kind._ood_imglists):
        image_list(root, lists / name, f"other/{name}", [1, 0, 0, 1] if place < shifts else [-1] * 3, suffix)


#: 1-based numbers of the classes of the fakes below
SPLITS = {"known_classes": [1, 4], "unknown_classes": {"Easy": [2], "Medium": [5], "Hard": [3]}}


def ssb_splits(root, data):
    """The class splits of the Semantic Shift Benchmark; returns the sha256 of the file."""
    # of the three files only that of the cars counts from 1
    first = 0 if data == "scars" else 1
    shifted = {key: [number - first for number in SPLITS["unknown_classes"][key]] for key in SPLITS["unknown_classes"]}
    splits = {"known_classes": [number - first for number in SPLITS["known_classes"]], "unknown_classes": shifted}
    path = root / "ssb_splits" / ssb._SSB_SPLIT_FILES[data]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(splits))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cub(root):
    """CUB-200-2011 with five classes, ten pictures each to train on and two to test."""
    base = root / "CUB_200_2011"
    entries = [(label, part) for label in range(1, 6) for part in [1] * 10 + [0] * 2]
    for number, _ in enumerate(entries, 1):
        picture(base / "images" / f"{number}.png")
    numbered = list(enumerate(entries, 1))
    (base / "images.txt").write_text("".join(f"{n} {n}.png\n" for n, _ in numbered))
    (base / "image_class_labels.txt").write_text("".join(f"{n} {label}\n" for n, (label, _) in numbered))
    (base / "train_test_split.txt").write_text("".join(f"{n} {part}\n" for n, (_, part) in numbered))


def aircraft(root):
    """FGVC-Aircraft with five variants."""
    base = root / "fgvc-aircraft-2013b" / "data"
    variants = ["707-320", "A300B4", "BAE-125", "C-130", "DC-10"]
    base.mkdir(parents=True)
    (base / "variants.txt").write_text("\n".join(reversed(variants)))
    number = itertools.count(100)
    for part, each in (("trainval", 10), ("test", 2)):
        lines = []
        for variant in variants * each:
            name = f"{next(number):07d}"
            picture(base / "images" / f"{name}.jpg")
            lines.append(f"{name} {variant}\n")
        (base / f"images_variant_{part}.txt").write_text("".join(lines))


def cars(root):
    """Stanford Cars with five classes."""
    base = root / "stanford_cars"
    for part, file, each in (("train", "cars_train_annos", 10), ("test", "cars_test_annos_withlabels", 2)):
        labels = [1, 2, 3, 4, 5] * each
        rows = np.array(
            [(f"{n:05d}.jpg", label) for n, label in enumerate(labels)], dtype=[("fname", object), ("class", object)]
        )
        for name in rows["fname"]:
            picture(base / f"cars_{part}" / name)
        (base / "devkit").mkdir(exist_ok=True)
        savemat(base / "devkit" / f"{file}.mat", {"annotations": rows})


def md5(path):
    """As the framework compares it."""
    return hashlib.md5(path.read_bytes()).hexdigest()


def cifar_batches(root, published, monkeypatch, *, classes, key):
    """torchvision's folder of pickled CIFAR batches, a few pictures in each; their md5 become the published ones."""
    rng = np.random.default_rng(classes)

    def write(name, content):
        path = root / published.base_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(content))
        return [name, md5(path)]

    def batch(count):
        labels = [number % classes for number in range(count)]
        return {"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), key: labels}

    train = [write(name, batch(10 * classes // len(published.train_list))) for name, _ in published.train_list]
    test = [write(name, batch(classes)) for name, _ in published.test_list]
    meta = write(published.meta["filename"], {published.meta["key"]: [f"class {n}" for n in range(classes)]})
    monkeypatch.setattr(published, "train_list", train)
    monkeypatch.setattr(published, "test_list", test)
    monkeypatch.setattr(published, "meta", {**published.meta, "md5": meta[1]})


def unpacked(root, kind, monkeypatch, *, count=3, folder=None, size=(40, 32), check="tgz_md5"):
    """An archive beside its unpacked pictures, as the framework leaves them; its md5 becomes the published one."""
    for number in range(count):
        picture(root / (folder or kind.base_folder) / f"{number}.png", size)
    (root / kind.filename).write_bytes(kind.__name__.encode())
    monkeypatch.setattr(kind, check, md5(root / kind.filename))
