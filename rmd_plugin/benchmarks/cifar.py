"""CIFAR-100 vs CIFAR-10 and the reverse, from torchvision's files or from npz files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pytorch_ood.api import BenchmarkInfo, Paper, Task
from torchvision.transforms import ToTensor

from .base import OODBenchmark
from .errors import DataNotFoundError
from .readers.cifar import CLASSES, SIDE, load_cifar
from .readers.downloads import resolve_data_dir
from .readers.far_images import FAR_SETS, load_far_set
from .splits import OODSet, Parts, Split, Transform


@dataclass(kw_only=True, eq=False, repr=False)
class _CIFARBenchmark(OODBenchmark):
    """One CIFAR data set in-distribution, the other one near-OOD."""

    info = BenchmarkInfo(
        paper=Paper(
            title="A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection",
            venue="arXiv",
            year=2021,
            url="https://arxiv.org/abs/2106.09022",
        ),
        tasks=frozenset({Task.CLASSIFICATION}),
    )
    id_data: ClassVar[str]
    ood_data: ClassVar[str]

    val_fraction: float = 0.1
    far: Sequence[str] | None = None
    download: bool = False

    def load(self) -> Parts:
        """Read both data sets and the far-OOD sets."""
        folder = resolve_data_dir(self.data_dir, "CIFAR")
        train = load_cifar(folder, self.id_data, train=True, download=self.download)
        test = load_cifar(folder, self.id_data, train=False)
        near = load_cifar(folder, self.ood_data, train=False, download=self.download)
        oods = [OODSet(self.ood_data.upper(), "near", near), *self._far_sets(folder)]
        return Parts(CLASSES[self.id_data], train, test, oods, val_fraction=self.val_fraction)

    def default_transform(self) -> Transform:
        """PIL image to a float tensor of shape (3, 32, 32) in [0, 1]."""
        return ToTensor()

    def _far_sets(self, folder: Path) -> Iterator[OODSet]:
        for name in FAR_SETS if self.far is None else self.far:
            source = load_far_set(name, folder, size=SIDE, seed=self.seed)
            if source is not None:
                yield OODSet(name, "far", Split(source, np.zeros(len(source))))
            elif self.far is not None:
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
        val_fraction: share of the training images held out for validation; 0 trains on all of them.
        far: names of far-OOD sets, an empty list for none; None takes all that are present.
        download: fetch CIFAR-10 and CIFAR-100 if they are absent; their md5 is checked.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`; the default transform is
    ``ToTensor``.
    """

    name = "cifar100_vs_cifar10"
    id_data = "cifar100"
    ood_data = "cifar10"


class CIFAR10vsCIFAR100(_CIFARBenchmark):
    """CIFAR-10 in-distribution, CIFAR-100 near-OOD. Options as in :class:`CIFAR100vsCIFAR10`."""

    name = "cifar10_vs_cifar100"
    id_data = "cifar10"
    ood_data = "cifar100"
