"""Benchmarks and picture sets of pytorch-ood: any benchmark of it behind our interface, and its own by their names."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import numpy as np
import pytorch_ood.benchmark as published
from PIL import Image
from pytorch_ood.benchmark import Benchmark
from pytorch_ood.benchmark.img import ssb
from pytorch_ood.dataset import img
from pytorch_ood.dataset.img import ImageListDataset
from pytorch_ood.dataset.img.noise import NoiseDataset
from torch import nn
from torch.utils.data import Dataset, Subset
from torchvision.datasets import SVHN
from torchvision.transforms import ToTensor
from torchvision.transforms import functional as vision

from .base import Distance, ImageRows, OODBenchmark, OODSet, Parts, Source, Split, Transform, stream, with_lengths
from .dataset_files import DOWNLOAD, DataNotFoundError, fetch, resolve_data_dir

#: what a class is told about its part, as a test set
_SUBSETS = {
    "CIFAR10C": "all", "CIFAR100C": "all", "ImageNetC": "noise", "MNISTC": "all", "SegmentMeIfYouCan": "RoadAnomaly21",
    "StreetHazards": "test", "TinyImageNet": "val",
}  # fmt: skip
#: name -> class
PICTURE_SETS: dict[str, Any] = {**{name: getattr(img, name) for name in img.__all__}, "SVHN": SVHN}
#: benchmarks of the framework that can be chosen
NAMES = [name for name in published.__all__ if name != "Benchmark"]
# the framework unpickles its file of class splits; these are the sha256 of the published ones, which hold numbers and
# texts only (github.com/Visual-AI/Dissect-OOD-OSR, e2bfcea)
_SPLITS = {
    "CUB_SSB": ("cub", "48bdcaa05603d932037738d3df776ab500945e9b7aeff85f4668305bf71bd1e7"),
    "Aircraft_SSB": ("aircraft", "2a2481307cec7821721d6a73c1a3ca77db7e657649e043d1a83aa7dd81a5a194"),
    "StanfordCars_SSB": ("scars", "28d471f0fb9e2c773e1255b8b447e542974f6617952203056a0635c638513d39"),
}


class DatasetItems(Source[Dataset[Any]]):
    """Inputs of a data set of pairs ``(x, label)``, as they come out of it."""

    transformed = True

    def __getitem__(self, index: int) -> object:
        return self.items[index][0]

    def chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        """A hash of each item."""
        yield f"items {len(indices)}\n".encode()
        for index in indices:
            yield joblib.hash(self[int(index)]).encode()


class Pictures(DatasetItems):
    """Pictures of a data set of pairs, as PIL images in RGB whatever it gives: PIL images, arrays or tensors.

    Args:
        dataset: the data set, without a transform of its own.
        size: scale and centre-crop to squares of so many pixels; None leaves their size.
    """

    transformed = False

    def __init__(self, dataset: Dataset[Any], size: int | None = None) -> None:
        super().__init__(dataset)
        self.size = size

    def __getitem__(self, index: int) -> Image.Image:
        item = super().__getitem__(index)
        picture = (item if isinstance(item, Image.Image) else vision.to_pil_image(item)).convert("RGB")
        return picture if self.size is None else vision.center_crop(vision.resize(picture, self.size), self.size)

    def chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        """The files where the data set lists them: reading is many times faster than decoding."""
        dataset: Any = self.items
        if isinstance(dataset, ImageListDataset):
            paths = dataset.files
        elif isinstance(pairs := getattr(dataset, "data", None), list):  # of files and labels
            paths = [path for path, _ in pairs]
        else:
            return super().chunks(indices)
        files = (Path(paths[index]).read_bytes() for index in indices)
        return with_lengths(f"files {self.size or 0} {len(indices)}", files)


def as_benchmark(benchmark: Benchmark, *, seed: int = 0, val_fraction: float = 0.1) -> OODBenchmark:
    """Any benchmark of the framework, with the interface of :class:`OODBenchmark`.

    There are two ways to use your own data: a subclass of :class:`OODBenchmark` (below), which has
    everything, or any ``pytorch_ood.benchmark.Benchmark``, which is wrapped. Of the latter, ``val_set()``,
    ``class_names`` and ``distance`` (OOD set -> ``near``, ``far`` or ``shift``) are used where they exist, and what the
    framework's own benchmarks say of near, far and covariate-shifted sets. Without a ``val_set`` a part of the training
    set is held out, stratified by class. A backbone's transform is put in front of items that are no tensors, such as
    PIL images; tensors come from a transform of the data set's own and stay as they are.

    Args:
        benchmark: the benchmark; an :class:`OODBenchmark` is returned as it is.
        seed: seed of the held-out part.
        val_fraction: share of the training set to hold out.

    Raises:
        TypeError: it is no benchmark.
        ValueError: the training labels are not ``0..K-1``, or the OOD sets do not match ``ood_names``.

    Example:
        >>> import numpy as np
        >>> from rmd_plugin.benchmarks import OODBenchmark, OODSet, Parts, Split, TensorRows
        >>> class Shifted(OODBenchmark):
        ...     name = "shifted"
        ...
        ...     def load(self) -> Parts:
        ...         draw = lambda n, mean: np.random.default_rng(self.seed).normal(mean, size=(n, 4))
        ...         train, test = (Split(TensorRows(draw(n, 0)), np.arange(n) % 2) for n in (80, 20))
        ...         ood = Split(TensorRows(draw(20, 5)), np.zeros(20))
        ...         return Parts(["even", "odd"], train, test, [OODSet("moved", "far", ood)], val_fraction=0.1)
        >>> benchmark = Shifted(seed=1)
        >>> benchmark
        Shifted(train=72, val=8, test=20, moved=20)
        >>> as_benchmark(benchmark) is benchmark
        True
    """
    if isinstance(benchmark, OODBenchmark):
        return benchmark
    absent = [name for name in ("train_set", "test_sets", "ood_names") if not hasattr(benchmark, name)]
    if absent:
        raise TypeError(
            f"a {type(benchmark).__name__} lacks {', '.join(absent)}: subclass rmd_plugin.benchmarks.OODBenchmark, or "
            "the framework's Benchmark, and set ood_names to the names of its OOD sets, in the order of test_sets()."
        )
    return _Wrapped(benchmark=benchmark, seed=seed, val_fraction=val_fraction)


@dataclass(kw_only=True, eq=False, repr=False)
class _Wrapped(OODBenchmark):
    """A benchmark of the framework behind the interface of ours."""

    benchmark: Benchmark
    val_fraction: float = 0.1

    def load(self) -> Parts:
        self.name = str(getattr(self.benchmark, "name", type(self.benchmark).__name__))  # type: ignore[misc]
        return framework_parts(self.benchmark, val_fraction=self.val_fraction)


def framework_parts(
    benchmark: Benchmark, *, val_fraction: float, source: Callable[[Dataset[Any]], Source[Any]] = DatasetItems
) -> Parts:
    """The sets of a benchmark of the framework.

    Args:
        benchmark: the benchmark.
        val_fraction: share of the training set to hold out where the benchmark has no ID validation data.
        source: how raw items are taken from its data sets.
    """
    data: Any = benchmark  # the framework declares neither ood_names nor what we may find besides
    (test,) = data.test_sets(known=True, unknown=False)
    oods = data.test_sets(known=False, unknown=True)
    if len(data.ood_names) != len(oods):
        raise ValueError(f"there are {len(oods)} OOD sets but {len(data.ood_names)} ood_names: {data.ood_names}")
    train = _labelled(data.train_set(), source)
    classes = getattr(data, "class_names", getattr(data.train_set(), "classes", None))
    if classes is not None and len(classes) != int(train.labels.max()) + 1:
        classes = None
    # of OpenOOD's, whose validation_set() has OOD samples too
    val = data.val_set() if hasattr(data, "val_set") else getattr(data, "val_in", None)
    parts = Parts(classes, train, _labelled(test, source), [], val_fraction=val_fraction)
    parts.val = None if val is None else _labelled(val, source)
    distances = _distances(data)
    for name, ood in zip(data.ood_names, oods, strict=True):
        # OOD sets need no labels of their own, which saves a pass over them; the framework hides those of shifted ID
        # sets behind -1
        labels: Any = np.zeros(len(ood))
        if distances.get(name) == "shift":
            labels = ood.labels if hasattr(ood, "labels") else _labelled(ood).labels
        parts.oods.append(OODSet(name, distances.get(name, ""), Split(source(ood), labels)))
    return parts


def _distances(benchmark: Any) -> dict[str, Distance]:
    """What a benchmark says about its sets; the framework's own say it in three ways."""
    if hasattr(benchmark, "distance"):
        return dict(benchmark.distance)
    # of the Semantic Shift Benchmark Easy is the least like the ID classes
    tags: dict[str, Distance] = {"Hard": "near", "Easy": "far"} if hasattr(benchmark, "_test_easy") else {}
    names: dict[str, Distance] = {"_near_ood": "near", "_far_ood": "far", "cs_id_names": "shift"}
    names |= {"near_ood_names": "near", "far_ood_names": "far"}
    return tags | {name: kind for attribute, kind in names.items() for name in getattr(benchmark, attribute, ())}


def _labelled(dataset: Dataset[Any], source: Callable[[Dataset[Any]], Source[Any]] = DatasetItems) -> Split:
    labels = _stored_labels(dataset)
    if labels is None:
        try:
            labels = np.array([int(dataset[index][1]) for index in range(len(dataset))])  # type: ignore[arg-type]
        except (TypeError, ValueError, LookupError) as error:
            raise ValueError(f"items of a {type(dataset).__name__} must be (x, label), a whole number") from error
    return Split(source(dataset), labels)


def _stored_labels(dataset: Any) -> np.ndarray | None:
    """Labels that a data set keeps besides its items, which saves loading them all; None if there are none."""
    if isinstance(dataset, Subset):
        labels = _stored_labels(dataset.dataset)
        return None if labels is None else labels[np.asarray(dataset.indices)]
    stored = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if isinstance(pairs := getattr(dataset, "data", None), list):  # as the Semantic Shift Benchmark has them
        stored = [label for _, label in pairs]
    labels = np.asarray(stored)
    if labels.shape != (len(dataset),) or labels.dtype.kind not in "iu":
        return None
    # a target_transform, say, makes them differ from what the data set gives
    same = all(int(dataset[index][1]) == labels[index] for index in (0, len(dataset) // 2, -1))
    return labels if same else None


@dataclass(kw_only=True, eq=False, repr=False)
class Framework(OODBenchmark):
    """A benchmark of pytorch-ood, read by the framework's own class from where that class looks.

    Raw items are PIL pictures in RGB, in front of which the backbone's transform is put. Near and far are as the
    benchmark says: OpenOOD's and OpenMIBOOD's name them, of the Semantic Shift Benchmark ``Hard`` is near and ``Easy``
    far, ODIN's do not say. The ID sets under a covariate shift of OpenMIBOOD, which the framework labels as OOD, stand
    in ``shifts`` with their classes. OpenOOD's ID validation data are used, elsewhere a part of the training data is
    held out. Noise is drawn once, by the seed.

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
        ...     Framework(name="CUB_SSB", data_dir=tempfile.mkdtemp())
        ... except DataNotFoundError as error:
        ...     print(str(error).partition(":")[0])
        no class splits of CUB_SSB
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
        if self.name in _SPLITS:
            self._check_splits(folder)
        with asking_framework(self.name, folder):
            benchmark = self._build(folder)
            parts = framework_parts(benchmark, val_fraction=self.val_fraction, source=partial(pictures, seed=self.seed))
            for split in filter(None, [parts.train, parts.val, parts.test, *(ood.split for ood in parts.oods)]):
                split.raw(0), split.raw(-1)  # most list their pictures without looking for them
        further: dict[Distance, Any] = {"near": self.near, "far": self.far}
        for distance, entries in further.items():
            for entry in entries:
                name, source = load_picture_set(entry, folder, seed=self.seed, download=self.download)
                parts.oods.append(OODSet(name, distance, Split(source, np.zeros(len(source)))))
        parts.oods.sort(key=lambda ood: ood.distance == "far")
        return parts

    def default_transform(self) -> Transform:
        """PIL image to a float tensor of shape (3, H, W) in [0, 1]."""
        return ToTensor()

    def _build(self, folder: Path) -> Benchmark:
        kind = getattr(published, self.name)
        options: dict[str, Any] = {"root": str(folder), "transform": nn.Identity()}
        if "download" in inspect.signature(kind).parameters:
            options["download"] = self.download
        elif not self.download and self.name not in _SPLITS:
            raise DataNotFoundError(
                f"{self.name} looks in {folder} and fetches what is absent without being asked. Allow it: {DOWNLOAD}."
            )
        return kind(**options)

    def _check_splits(self, folder: Path) -> None:
        data, sha256 = _SPLITS[self.name]
        path = folder / "ssb_splits" / ssb._SSB_SPLIT_FILES[data]
        url = f"{ssb._SSB_SPLIT_BASE}/{path.name}"
        fetch(url, sha256, path, download=self.download, kind=f"class splits of {self.name}")


def load_picture_set(
    entry: str | Mapping[str, Mapping[str, Any]],
    folder: Path,
    *,
    seed: int,
    download: bool = False,
    size: int | None = None,
) -> tuple[str, ImageRows | Pictures]:
    """A picture data set of the framework, read by its own class from where it would put it.

    Args:
        entry: name of the class, or a mapping ``{name: {option: value}}`` with further options of it.
        folder: the data folder.
        seed: of noise, which the framework draws anew on every access.
        download: let the framework fetch it if it is absent.
        size: scale and centre-crop to squares of so many pixels.

    Returns:
        The name for results, with the options if some were given; and the pictures.

    Raises:
        DataNotFoundError: it is not there; the message says what to do.
    """
    name, chosen = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    if name not in PICTURE_SETS:
        raise ValueError(f"there is no far-OOD set {name!r}; there are {', '.join(sorted(PICTURE_SETS))}")
    kind = PICTURE_SETS[name]
    taken = inspect.signature(kind).parameters
    usual: dict[str, Any] = {"root": str(folder), "download": download, "split": "test", "train": False, "length": 1000}
    usual |= {"subset": _SUBSETS[name]} if name in _SUBSETS else {}
    usual |= {"size": (size, size, 3)} if size else {}
    # lists of Hydra are none of the framework's business
    plain = {key: value if isinstance(value, str | int | float) else tuple(value) for key, value in chosen.items()}
    with asking_framework(name, folder, file=getattr(kind, "filename", "")):
        try:
            dataset = kind(**{key: value for key, value in usual.items() if key in taken} | plain)
        except (AssertionError, LookupError, TypeError) as error:
            raise ValueError(f"{name} does not take {dict(chosen)}: {error!r}; it has {', '.join(taken)}") from error
        source = pictures(dataset, seed=seed, size=size)
        if len(source) == 0:
            raise FileNotFoundError("no picture is there")
        source[0]  # some list their files without looking for them
    return ":".join([name, *map(str, chosen.values())]), source


def pictures(dataset: Dataset[Any], *, seed: int, size: int | None = None) -> ImageRows | Pictures:
    """The pictures of a data set of the framework; noise is drawn here, once, by the seed."""
    if not isinstance(dataset, NoiseDataset):
        return Pictures(dataset, size)
    dataset.generator = stream(seed, "noise", type(dataset).__name__)
    drawn: Any = dataset
    return ImageRows(np.stack([np.asarray(drawn[index][0].convert("RGB")) for index in range(len(drawn))]))


@contextmanager
def asking_framework(name: str, folder: Path, *, file: object = "") -> Iterator[None]:
    """Turn what the framework's classes raise about absent data into one error that names place and remedy."""
    try:
        yield
    except DataNotFoundError:
        raise
    except (RuntimeError, ImportError, OSError) as error:
        where = f"{folder} ({file})" if file and isinstance(file, str) else folder
        reason = " ".join(str(error).split()).removesuffix(".")
        raise DataNotFoundError(
            f"{name} is not complete in {where}: {reason}. Set {DOWNLOAD} to let pytorch-ood fetch what it can, or "
            "put it there: docs/benchmarks.md says what belongs where."
        ) from error
