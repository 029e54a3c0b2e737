"""CIFAR-100 vs CIFAR-10 and the reverse, from torchvision's files or from npz files."""

import hashlib
import io
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from pytorch_ood.api import BenchmarkInfo, Paper, Task
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms import ToTensor

from .archives import extract
from .base import Modality, OODBenchmark, OODPool, Pool, Transform
from .download import Remote, fetch
from .errors import ChecksumError, DataFormatError, DataNotFoundError
from .far_images import FAR_SETS, load_far_set
from .files import read_npz, resolve_data_dir
from .sources import ImageRows

_SIDE = 32
_TORCHVISION: dict[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}
# published sizes, only to bound what is read
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
_CLASSES = {"cifar10": CIFAR10_CLASSES, "cifar100": CIFAR100_CLASSES}

_PAPER = BenchmarkInfo(
    paper=Paper(
        title="A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection",
        venue="arXiv",
        year=2021,
        url="https://arxiv.org/abs/2106.09022",
    ),
    tasks=frozenset({Task.CLASSIFICATION}),
)


class _CIFARBenchmark(OODBenchmark):
    """One CIFAR data set in-distribution, the other one near-OOD."""

    modality: ClassVar[Modality] = "image"
    info = _PAPER
    known: ClassVar[str]
    unknown: ClassVar[str]

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        limit_train: int | None = None,
        limit_test: int | None = None,
        seed: int = 0,
        val_fraction: float = 0.1,
        far: Sequence[str] | None = None,
        download: bool = False,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            train_transform=train_transform,
            test_transform=test_transform,
            limit_train=limit_train,
            limit_test=limit_test,
            seed=seed,
        )
        folder = resolve_data_dir(data_dir, "CIFAR")
        train = load_cifar(folder, self.known, train=True, download=download)
        test = load_cifar(folder, self.known, train=False)
        near = load_cifar(folder, self.unknown, train=False, download=download)
        self._assemble(
            class_names=_CLASSES[self.known],
            train=train,
            test=test,
            oods=[OODPool(self.unknown.upper(), "near", near), *self._far_sets(folder, far)],
            val_fraction=val_fraction,
        )

    def default_transform(self) -> Transform:
        """PIL image to a float tensor of shape (3, 32, 32) in [0, 1]."""
        return ToTensor()

    def _far_sets(self, folder: Path, wanted: Sequence[str] | None) -> Iterable[OODPool]:
        for name in FAR_SETS if wanted is None else wanted:
            source = load_far_set(name, folder, size=_SIDE, seed=self.seed)
            if source is not None:
                yield OODPool(name, "far", Pool(source, np.zeros(len(source), dtype=np.int64)))
            elif wanted is not None:
                raise DataNotFoundError(
                    f"the far-OOD set {name} is not in {folder}. Looked for {FAR_SETS[name]}. Put it there, or leave "
                    f"{name} out of far=[...]."
                )


class CIFAR100vsCIFAR10(_CIFARBenchmark):
    """CIFAR-100 in-distribution, CIFAR-10 near-OOD.

    Raw items are 32 x 32 PIL images. Each data set is read from torchvision's folder (``cifar-100-python``,
    ``cifar-10-batches-py``; the md5 of every file is checked before it is opened) or else from ``cifar100.npz`` and
    ``cifar10.npz`` with ``train_images`` (uint8, N x 32 x 32 x 3), ``train_labels``, ``test_images``, ``test_labels``.

    Far-OOD sets: Gaussian and uniform noise, and those of SVHN, Textures, LSUN and TinyImageNet that lie in the data
    folder where torchvision or the framework put them. They are never downloaded.

    Args:
        data_dir: folder of the data sets; None reads ``RMD_DATA_DIR``.
        train_transform: applied to PIL images for training; None is ``ToTensor``.
        test_transform: applied to PIL images elsewhere; None is ``ToTensor``.
        limit_train: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_test: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        seed: seed of the validation split, the subsets and the noise.
        val_fraction: share of the training images held out for validation; 0 trains on all of them.
        far: names of far-OOD sets, an empty list for none; None takes all that are present.
        download: fetch CIFAR-10 and CIFAR-100 if they are absent; their md5 is checked.
    """

    name = "cifar100_vs_cifar10"
    known: ClassVar[str] = "cifar100"
    unknown: ClassVar[str] = "cifar10"


class CIFAR10vsCIFAR100(_CIFARBenchmark):
    """CIFAR-10 in-distribution, CIFAR-100 near-OOD. Arguments as in :class:`CIFAR100vsCIFAR10`."""

    name = "cifar10_vs_cifar100"
    known: ClassVar[str] = "cifar10"
    unknown: ClassVar[str] = "cifar100"


def load_cifar(folder: Path, dataset: str, *, train: bool, download: bool = False) -> Pool:
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
        archive = folder / published.filename
        fetch(Remote(published.url, published.tgz_md5, "md5", size=1 << 28), archive)
        extract(archive, folder)
    if batches.is_dir():
        parts = [
            read_batch(batches / name, md5) for name, md5 in (published.train_list if train else published.test_list)
        ]
        images = np.concatenate([part[0] for part in parts])
        labels = np.concatenate([part[1] for part in parts])
    else:
        images, labels = _read_npz_part(npz, "train" if train else "test")
    count = len(_CLASSES[dataset])
    if len(labels) and not 0 <= labels.min() <= labels.max() < count:
        raise DataFormatError(
            batches if batches.is_dir() else npz, f"labels {labels.min()}..{labels.max()}, 0..{count - 1} are expected"
        )
    return Pool(ImageRows(images), labels)


def _read_npz_part(path: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    image_key, label_key = f"{part}_images", f"{part}_labels"
    arrays = read_npz(path, [image_key, label_key], max_bytes=_MAX_IMAGES * _SIDE * _SIDE * 3)
    images, labels = arrays[image_key], arrays[label_key]
    if images.dtype != np.uint8 or images.shape[1:] != (_SIDE, _SIDE, 3) or len(images) == 0:
        raise DataFormatError(
            path, f"{image_key!r} must be uint8 of shape (N, 32, 32, 3), got {images.dtype} of shape {images.shape}"
        )
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        raise DataFormatError(
            path, f"{label_key!r} must be {len(images)} integers, got {labels.dtype} of shape {labels.shape}"
        )
    return np.ascontiguousarray(images), labels.astype(np.int64)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and built-in containers, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            # the public way to numpy's own function: its module was renamed in numpy 2
            return np.empty(0).__reduce__()[0]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR batch")


def read_batch(path: Path, md5: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one of torchvision's CIFAR batch files, which are pickles.

    The bytes are compared with the published md5 first, and these very bytes are then read by an unpickler that knows
    numpy arrays only.

    Args:
        path: the file.
        md5: its published hash.

    Returns:
        Images (N, 32, 32, 3), uint8, and fine labels (N,), int64.

    Raises:
        ChecksumError: the file is not the published one; it is not opened.
    """
    if not path.is_file():
        raise DataNotFoundError(f"{path.name} is missing in {path.parent}. Unpack the archive again.")
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ChecksumError(
            path, f"its md5 is {found}, the published one is {md5}: not opened. Unpack the archive again."
        )
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
        labels = batch["labels"] if "labels" in batch else batch["fine_labels"]
        images = np.asarray(batch["data"], dtype=np.uint8).reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataFormatError(path, f"is not a CIFAR batch: {error}") from None
    if len(labels) != len(images):
        raise DataFormatError(path, f"{len(images)} images but {len(labels)} labels")
    return np.ascontiguousarray(images), np.asarray(labels, dtype=np.int64)
