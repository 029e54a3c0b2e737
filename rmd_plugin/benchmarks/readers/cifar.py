"""CIFAR-10 and CIFAR-100: torchvision's checked folders, or npz files."""

import os
import tempfile
from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity

from ..errors import ChecksumError, DataFormatError, DataNotFoundError
from ..sources import ImageRows
from ..splits import Split
from .arrays import read_npz
from .downloads import downloading

SIDE = 32
_TORCHVISION: dict[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}
# published size, only to bound what is read
_MAX_IMAGES = 60_000

# fmt: off
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR100_CLASSES = [
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
]
# fmt: on
CLASSES = {"cifar10": CIFAR10_CLASSES, "cifar100": CIFAR100_CLASSES}


def load_cifar(folder: Path, dataset: str, *, train: bool, download: bool = False) -> Split:
    """Images and labels of one part of CIFAR-10 or CIFAR-100.

    Args:
        folder: where the data sets are.
        dataset: ``cifar10`` or ``cifar100``.
        train: the training images instead of the test images.
        download: fetch the data if it is absent.

    Raises:
        DataNotFoundError: neither layout is there and ``download`` is off.
        DataFormatError: a file is damaged or its md5 is not the published one.
    """
    published = _TORCHVISION[dataset]
    batches, npz = folder / published.base_folder, folder / f"{dataset}.npz"
    if not batches.is_dir() and not npz.is_file():
        if not download:
            raise DataNotFoundError(
                f"{dataset} is not there: looked for torchvision's folder {batches} and for {npz}. Set download=True "
                f"(benchmark.download=true on the command line) to fetch {published.url}, or put one of the two there."
            )
        with downloading(published.url, folder), tempfile.TemporaryDirectory(dir=folder, prefix=".cifar-") as aside:
            published(aside, download=True)
            if not batches.is_dir():  # another job may have been faster; it sees the whole folder or none
                os.rename(Path(aside) / published.base_folder, batches)
    place = batches if batches.is_dir() else npz
    images, labels = (_read_batches if place == batches else _read_npz)(place, published, train)
    count = len(CLASSES[dataset])
    if len(labels) and not 0 <= labels.min() <= labels.max() < count:
        raise DataFormatError(place, f"labels {labels.min()}..{labels.max()}, 0..{count - 1} are expected")
    return Split(ImageRows(images), labels)


def _read_batches(place: Path, published: type[CIFAR10], train: bool) -> tuple[np.ndarray, np.ndarray]:
    # the files are pickles: torchvision opens them only when their md5 is right
    try:
        data = published(place.parent, train=train)
    except RuntimeError as error:
        meta = published.meta
        for name, md5 in [*published.train_list, *published.test_list, [meta["filename"], meta["md5"]]]:
            if not (place / name).is_file():
                raise DataNotFoundError(f"{name} is missing in {place}. Unpack the archive again.") from None
            if not check_integrity(place / name, md5):
                raise ChecksumError(
                    place / name, f"its md5 is not the published {md5}: not opened. Unpack the archive again."
                ) from None
        raise DataFormatError(place, f"is not readable: {error}") from error
    return np.ascontiguousarray(data.data), np.asarray(data.targets, dtype=np.int64)


def _read_npz(path: Path, published: type[CIFAR10], train: bool) -> tuple[np.ndarray, np.ndarray]:
    image_key, label_key = (f"{'train' if train else 'test'}_{what}" for what in ("images", "labels"))
    arrays = read_npz(path, [image_key, label_key], max_bytes=_MAX_IMAGES * SIDE * SIDE * 3)
    images, labels = arrays[image_key], arrays[label_key]
    if images.dtype != np.uint8 or images.shape[1:] != (SIDE, SIDE, 3) or len(images) == 0:
        raise DataFormatError(
            path, f"{image_key!r} must be uint8 of shape (N, 32, 32, 3), got {images.dtype} of shape {images.shape}"
        )
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataFormatError(
            path, f"{label_key!r} must be {len(images)} integers, got {labels.dtype} of shape {labels.shape}"
        )
    return np.ascontiguousarray(images), labels.astype(np.int64)
