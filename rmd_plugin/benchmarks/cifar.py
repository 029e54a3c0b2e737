"""CIFAR-100 vs CIFAR-10 and the reverse, from torchvision's checked folders or from npz files."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pytorch_ood.api import BenchmarkInfo
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity
from torchvision.transforms import ToTensor

from rmd_plugin.detectors.mahalanobis import RMD
from rmd_plugin.npz import read_npz

from .base import OODBenchmark
from .errors import ChecksumError, DataFormatError, DataNotFoundError
from .readers.downloads import downloading, resolve_data_dir
from .readers.far_images import FAR_SETS, SIDE, load_far_set
from .readers.framework_sets import DOWNLOAD, load_picture_set
from .sources import ImageRows, Source
from .splits import OODSet, Parts, Split, Transform

_TORCHVISION: dict[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}
# published size, only to bound what is read
_MAX_IMAGES = 60_000

# fmt: off
_CLASSES = {
    "cifar10": ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    "cifar100": [
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
    ],
}
# fmt: on


@dataclass(kw_only=True, eq=False, repr=False)
class _CIFARBenchmark(OODBenchmark):
    """One CIFAR data set in-distribution, the other one near-OOD."""

    info = BenchmarkInfo(RMD.info.paper, RMD.info.tasks)  # type: ignore[arg-type]  # a detector may have no paper
    id_data: ClassVar[str]
    ood_data: ClassVar[str]

    val_fraction: float = 0.1
    far: Sequence[str | Mapping[str, Mapping[str, Any]]] | None = None
    download: bool = False

    def load(self) -> Parts:
        """Read both data sets and the far-OOD sets."""
        folder = resolve_data_dir(self.data_dir, "CIFAR")
        train = load_cifar(folder, self.id_data, train=True, download=self.download)
        test = load_cifar(folder, self.id_data, train=False)
        near = load_cifar(folder, self.ood_data, train=False, download=self.download)
        oods = [OODSet(self.ood_data.upper(), "near", near), *self._far_sets(folder)]
        return Parts(_CLASSES[self.id_data], train, test, oods, val_fraction=self.val_fraction)

    def default_transform(self) -> Transform:
        """PIL image to a float tensor of shape (3, 32, 32) in [0, 1]."""
        return ToTensor()

    def _far_sets(self, folder: Path) -> Iterator[OODSet]:
        for entry in FAR_SETS if self.far is None else self.far:
            name, ours = str(entry), isinstance(entry, str) and entry in FAR_SETS
            source: Source[Any] | None = load_far_set(name, folder, seed=self.seed) if ours else None
            if source is None and self.far is not None and (self.download or not ours):
                name, source = load_picture_set(entry, folder, seed=self.seed, download=self.download, size=SIDE)
            if source is not None:
                yield OODSet(name, "far", Split(source, np.zeros(len(source))))
            elif self.far is not None:
                raise DataNotFoundError(
                    f"the far-OOD set {name} is not in {folder}. Looked for {FAR_SETS[name]}. Put it there, set "
                    f"{DOWNLOAD}, or leave {name} out of far=[...]."
                )


class CIFAR100vsCIFAR10(_CIFARBenchmark):
    """CIFAR-100 in-distribution, CIFAR-10 near-OOD.

    Raw items are 32 x 32 PIL images. Each data set is read from torchvision's folder (``cifar-100-python``,
    ``cifar-10-batches-py``; the md5 of every file is checked before it is opened) or else from ``cifar100.npz`` and
    ``cifar10.npz`` with ``train_images`` (uint8, N x 32 x 32 x 3), ``train_labels``, ``test_images``, ``test_labels``.

    Far-OOD sets: Gaussian and uniform noise, and those of SVHN, Textures, LSUN and TinyImageNet that lie in the data
    folder where torchvision or the framework put them. Any other picture data set of the framework is one by name, such
    as ``far=["NINCO"]``, scaled and cropped to 32 pixels.

    Args:
        val_fraction: share of the training images held out for validation; 0 trains on all of them.
        far: names of far-OOD sets, an empty list for none; None takes all of the above that are present. A class of
            ``pytorch_ood.dataset.img`` may have options: ``{"MNISTC": {"subset": "fog"}}``.
        download: fetch CIFAR-10 and CIFAR-100 if they are absent, their md5 checked, and let the framework fetch what
            ``far`` names.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`; the default transform is
    ``ToTensor``.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import CIFAR100vsCIFAR10
        >>> folder = tempfile.mkdtemp()
        >>> for name, classes in (("cifar10", 10), ("cifar100", 100)):  # black pictures in the layout of the npz files
        ...     x, y = np.zeros((5 * classes, 32, 32, 3), np.uint8), np.arange(5 * classes) % classes
        ...     np.savez(f"{folder}/{name}.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
        >>> CIFAR100vsCIFAR10(data_dir=folder, far=[])
        CIFAR100vsCIFAR10(train=500, val=0, test=500, CIFAR10=50)
    """

    name = "cifar100_vs_cifar10"
    id_data = "cifar100"
    ood_data = "cifar10"


class CIFAR10vsCIFAR100(_CIFARBenchmark):
    """CIFAR-10 in-distribution, CIFAR-100 near-OOD. Options as in :class:`CIFAR100vsCIFAR10`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import CIFAR10vsCIFAR100
        >>> folder = tempfile.mkdtemp()
        >>> for name, classes in (("cifar10", 10), ("cifar100", 100)):  # black pictures in the layout of the npz files
        ...     x, y = np.zeros((5 * classes, 32, 32, 3), np.uint8), np.arange(5 * classes) % classes
        ...     np.savez(f"{folder}/{name}.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
        >>> CIFAR10vsCIFAR100(data_dir=folder, far=[])
        CIFAR10vsCIFAR100(train=50, val=0, test=50, CIFAR100=500)
    """

    name = "cifar10_vs_cifar100"
    id_data = "cifar10"
    ood_data = "cifar100"


def load_cifar(folder: Path, dataset: str, *, train: bool, download: bool = False) -> Split:
    """Training or test part of ``cifar10`` or ``cifar100``, whichever layout lies in the folder."""
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
    images, labels = _read_batches(batches, published, train) if place == batches else _read_npz(npz, train)
    count = len(_CLASSES[dataset])
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


def _read_npz(path: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    image_key, label_key = (f"{'train' if train else 'test'}_{what}" for what in ("images", "labels"))
    arrays = read_npz(path, [image_key, label_key], max_bytes=_MAX_IMAGES * (SIDE * SIDE * 3 + 8))
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
