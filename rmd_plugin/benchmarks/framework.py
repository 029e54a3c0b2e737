"""The benchmarks of pytorch-ood by their names: OpenOOD, ODIN, the Semantic Shift Benchmark and OpenMIBOOD."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_ood.benchmark as published
from pytorch_ood.benchmark import Benchmark
from pytorch_ood.benchmark.img import ssb
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, TinyImageNetCrop, TinyImageNetResize
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms import ToTensor

from .base import OODBenchmark, framework_parts
from .errors import DataNotFoundError
from .readers.downloads import fetch, resolve_data_dir
from .readers.framework_sets import DOWNLOAD, asking_framework, load_picture_set, pictures
from .readers.nifti import central_slice
from .splits import Distance, OODSet, Parts, Split, Transform

#: benchmarks of the framework that can be chosen
NAMES = [name for name in published.__all__ if name != "Benchmark"]
# these fetch without being asked, so what they would fetch must be there before
_ODIN = (TinyImageNetCrop, TinyImageNetResize, LSUNResize, LSUNCrop)
_FETCH_UNASKED: dict[str, tuple[Any, ...]] = {"CIFAR10_ODIN": (CIFAR10, *_ODIN), "CIFAR100_ODIN": (CIFAR100, *_ODIN)}
# the framework unpickles its file of class splits; these are the sha256 of the published ones, which hold numbers and
# texts only (github.com/Visual-AI/Dissect-OOD-OSR, e2bfcea)
_SPLITS = {
    "CUB_SSB": ("cub", "48bdcaa05603d932037738d3df776ab500945e9b7aeff85f4668305bf71bd1e7"),
    "Aircraft_SSB": ("aircraft", "2a2481307cec7821721d6a73c1a3ca77db7e657649e043d1a83aa7dd81a5a194"),
    "StanfordCars_SSB": ("scars", "28d471f0fb9e2c773e1255b8b447e542974f6617952203056a0635c638513d39"),
}
_PICTURES_OF = "Its pictures are put there by hand"
_BY_HAND = {
    **dict.fromkeys(
        ("ImageNet_OpenOOD", "ImageNet1K_OpenOOD", "ImageNet200_OpenOOD"),
        "ImageNet-1K is put there by hand: imagenet_1k/train/<wnid>/*.JPEG and imagenet_1k/val/ILSVRC2012_val_*.JPEG",
    ),
    **dict.fromkeys(
        ("MIDOG_OpenMIBOOD", "PhaKIR_OpenMIBOOD", "OASIS3_OpenMIBOOD"),
        f"{_PICTURES_OF}, prepared as github.com/remic-othr/OpenMIBOOD describes",
    ),
    "StanfordCars_SSB": f"{_PICTURES_OF}: stanford_cars/ with cars_train/, cars_test/ and devkit/",
}


@dataclass(kw_only=True, eq=False, repr=False)
class Framework(OODBenchmark):
    """A benchmark of pytorch-ood, read by the framework's own class from where that class looks.

    Raw items are PIL pictures in RGB, in front of which the backbone's transform is put. Near and far are as the
    benchmark says: OpenOOD's and OpenMIBOOD's name them, of the Semantic Shift Benchmark ``Hard`` is near and ``Easy``
    far, ODIN's do not say. The ID sets under a covariate shift of OpenMIBOOD, which the framework labels as OOD, stand
    in ``shifts`` with their classes. OpenOOD's ID validation data are used, elsewhere a part of the training data is
    held out. Noise is drawn once, by the seed. Of the volumes of OASIS-3 the middle slice is taken.

    The class splits of the Semantic Shift Benchmark are a pickle, opened only if its sha256 is the published one.

    Args:
        name: class in ``pytorch_ood.benchmark``, for example ``CIFAR10_OpenOOD``.
        near: further near-OOD sets: names of classes in ``pytorch_ood.dataset.img`` or ``SVHN``, or mappings
            ``{name: {option: value}}``.
        far: further far-OOD sets.
        download: let the framework fetch what is absent; without it nothing is fetched.
        val_fraction: share of the training data to hold out where the benchmark has no validation data.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`; ``data_dir`` is the framework's
    ``root``, and the default transform is ``ToTensor``.

    Example:
        >>> import tempfile
        >>> from rmd_plugin.benchmarks import DataNotFoundError, Framework
        >>> try:  # nothing is fetched without being asked; what is absent is named
        ...     Framework(name="CIFAR10_ODIN", data_dir=tempfile.mkdtemp())
        ... except DataNotFoundError as error:
        ...     print(str(error).partition(" in ")[0])
        CIFAR10 is not complete
    """

    name: str  # type: ignore[misc]  # one class serves many
    near: Sequence[str | Mapping[str, Mapping[str, Any]]] = ()
    far: Sequence[str | Mapping[str, Mapping[str, Any]]] = ()
    download: bool = False
    val_fraction: float = 0.1

    def load(self) -> Parts:
        """Let the framework read its benchmark, and add the further sets."""
        if self.name not in NAMES:
            raise ValueError(f"pytorch-ood has no benchmark {self.name!r}; it has {', '.join(NAMES)}")
        folder = resolve_data_dir(self.data_dir, self.name)
        by_hand = _BY_HAND.get(self.name, "")
        remedy = f"Set {DOWNLOAD} to let pytorch-ood fetch what it can. {by_hand}" if by_hand else ""
        if self.name in _SPLITS:
            self._check_splits(folder)
        with asking_framework(self.name, folder, download=self.download, remedy=remedy):
            benchmark = self._build(folder)
        with asking_framework(self.name, folder, remedy=remedy):
            parts = framework_parts(benchmark, val_fraction=self.val_fraction, source=partial(pictures, seed=self.seed))
            splits = [parts.train, parts.test, *(ood.split for ood in parts.oods)]
            for split in splits if parts.val is None else [*splits, parts.val]:
                for index in (0, -1) if len(split) else ():
                    split.raw(index)  # most list their pictures without looking for them
        further: list[OODSet] = []
        kinds: tuple[tuple[Distance, Sequence[Any]], ...] = (("near", self.near), ("far", self.far))
        for distance, entries in kinds:
            for entry in entries:
                name, source = load_picture_set(entry, folder, seed=self.seed, download=self.download)
                further.append(OODSet(name, distance, Split(source, np.zeros(len(source)))))
        parts.oods = sorted([*parts.oods, *further], key=lambda ood: ood.distance == "far")
        return parts

    def default_transform(self) -> Transform:
        """PIL image to a float tensor of shape (3, H, W) in [0, 1]."""
        return ToTensor()

    def _build(self, folder: Path) -> Benchmark:
        kind = getattr(published, self.name)
        options: dict[str, Any] = {"root": str(folder), "transform": _as_it_is}
        taken = inspect.signature(kind).parameters
        if "download" in taken:
            options["download"] = self.download
        elif not self.download:
            if self.name not in _FETCH_UNASKED and self.name not in _SPLITS:
                raise ValueError(f"{self.name} may fetch data without being asked; allow it: {DOWNLOAD}")
            for dataset in _FETCH_UNASKED.get(self.name, ()):
                with asking_framework(dataset.__name__, folder, file=dataset.filename):
                    dataset(str(folder), download=False)
        if self.name == "OASIS3_OpenMIBOOD":
            options["loader"] = central_slice
        benchmark: Benchmark = kind(**options)
        return benchmark

    def _check_splits(self, folder: Path) -> None:
        data, sha256 = _SPLITS[self.name]
        path = folder / "ssb_splits" / ssb._SSB_SPLIT_FILES[data]
        url = f"{ssb._SSB_SPLIT_BASE}/{path.name}"
        if not path.exists() and not self.download:
            raise DataNotFoundError(
                f"{self.name}: its class splits {path} are not there. Set {DOWNLOAD}, or put {url} there. "
                f"{_BY_HAND.get(self.name, '')}".rstrip()
            )
        fetch(url, sha256, path)


def _as_it_is(picture: Any) -> Any:
    return picture
