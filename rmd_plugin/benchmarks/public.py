"""Public benchmarks: CIFAR, CLINC150 as texts and as packaged embeddings, digits, the simulation of the RMD paper."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from pytorch_ood.api import BenchmarkInfo, Paper, Task
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms import ToTensor

from rmd_plugin import RMD

from .base import OOD_LABEL, ImageRows, OODBenchmark, OODSet, Parts, Source, Split, TensorRows, Texts, Transform, stream
from .dataset_files import DOWNLOAD, DataNotFoundError, fetch, naming, read_columns, resolve_data_dir
from .framework import load_picture_set

_DATA = Path(__file__).parent / "data"
_SIDE = 32
_NOISE = (1000, _SIDE, _SIDE, 3)
#: far-OOD sets of CIFAR that are taken if they are in the data folder; noise is generated
FAR_SETS = (
    *("GaussianNoise", "UniformNoise", "SVHN", "Textures"),
    *("LSUNCrop", "LSUNResize", "TinyImageNetCrop", "TinyImageNetResize"),
)
_CLINC_FOLDER = "clinc150"
_CLINC_URL = "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data"
_CLINC_SHA256 = {
    "full": "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
    "small": "050e17476e6b4fa88f8518edaf09921c8f5e3a86dc8b63615361102a20b2ac01",
    "imbalanced": "4886730b20c51eece26aa392ecae2717bfe9908680419e96255351c6148eb4cc",
    "oos_plus": "bfcca9ae515623541dc1983c94c4ed7cae9d26b42ae47d74b972e51bb6f7a21f",
}
_MAX_INK = 16.0  # scikit-learn stores the 8 x 8 images with integer values 0..16


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
        names = json.loads((_DATA / "cifar.json").read_text())[self.id_data]
        return Parts(names, train, test, oods, val_fraction=self.val_fraction)

    def default_transform(self) -> Transform:
        """PIL image to a float tensor of shape (3, 32, 32) in [0, 1]."""
        return ToTensor()

    def _far_sets(self, folder: Path) -> Iterator[OODSet]:
        for entry in FAR_SETS if self.far is None else self.far:
            name, rng = str(entry), stream(self.seed, "far", str(entry))
            source: Source[Any]
            # mean and deviation as in the framework's set of that name, which draws anew on every access
            if name == "GaussianNoise":
                source = ImageRows(np.clip(rng.normal(128, 128, size=_NOISE), 0, 255).astype(np.uint8))
            elif name == "UniformNoise":
                source = ImageRows(rng.integers(0, 256, size=_NOISE, dtype=np.uint8))
            else:
                try:
                    download = self.download and self.far is not None
                    name, source = load_picture_set(entry, folder, seed=self.seed, download=download, size=_SIDE)
                except DataNotFoundError:
                    if self.far is not None:
                        raise
                    continue
            yield OODSet(name, "far", Split(source, np.zeros(len(source))))


class CIFAR100vsCIFAR10(_CIFARBenchmark):
    """CIFAR-100 in-distribution, CIFAR-10 near-OOD.

    Raw items are 32 x 32 PIL images. Each data set is read from torchvision's folder (``cifar-100-python``,
    ``cifar-10-batches-py``; the md5 of every file is checked before it is opened) or else from ``cifar100.npz`` and
    ``cifar10.npz`` with ``train_images`` (uint8, N x 32 x 32 x 3), ``train_labels``, ``test_images``, ``test_labels``.

    Far-OOD sets: Gaussian and uniform noise, and those of SVHN, Textures, LSUN and TinyImageNet that the framework
    finds in the data folder. Any other picture data set of the framework is one by name, such as ``far=["NINCO"]``,
    scaled and cropped to 32 pixels.

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
    """Training or test part of ``cifar10`` or ``cifar100``, from torchvision's folder or from an npz file."""
    published = {"cifar10": CIFAR10, "cifar100": CIFAR100}[dataset]
    batches, npz = folder / published.base_folder, folder / f"{dataset}.npz"
    if npz.is_file() and not batches.is_dir():
        arrays = read_columns(npz)
        with naming(npz):
            images, labels = (arrays[f"{'train' if train else 'test'}_{part}"] for part in ("images", "labels"))
            return Split(ImageRows(np.ascontiguousarray(images)), labels)
    try:
        # the files are pickles: torchvision opens them only when their md5 is right
        data = published(folder, train=train, download=download)
    except (RuntimeError, OSError) as error:
        raise DataNotFoundError(
            f"{dataset} is not there or damaged: looked for torchvision's folder {batches} and for {npz} ({error}). "
            f"Set {DOWNLOAD} to fetch {published.url}, or put one of the two there."
        ) from error
    return Split(ImageRows(np.ascontiguousarray(data.data)), np.asarray(data.targets))


@dataclass(kw_only=True, eq=False, repr=False)
class CLINC150(OODBenchmark):
    """Intent classification with out-of-scope queries (Larson et al., 2019).

    Raw items are strings. To run the framework's ``evaluate`` or any default ``DataLoader``, give transforms that
    turn a string into a tensor of fixed size, as the text backbones do. Labels follow the sorted intent names, so
    they are the same for all variants. The splits are the published ones as they are: a handful of queries occur
    in two of them. Reads ``clinc150/data_VARIANT.json`` in the data folder.

    Args:
        variant: ``full`` (100 training queries per intent), ``small`` (50), ``imbalanced`` (25 to 100) or
            ``oos_plus`` (250 out-of-scope training queries).
        download: fetch the file if it is absent; its sha256 is checked.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from rmd_plugin.benchmarks import CLINC150
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "clinc150").mkdir()
        >>> known = [["what is my balance", "balance"], ["wire 5 euros to ann", "transfer"]]
        >>> queries = {part: known for part in ("train", "val", "test")}
        >>> queries |= {f"oos_{part}": [["how tall is a giraffe", "oos"]] for part in queries}
        >>> _ = (folder / "clinc150" / "data_full.json").write_text(json.dumps(queries))
        >>> benchmark = CLINC150(data_dir=folder)
        >>> benchmark, benchmark.class_names
        (CLINC150(train=2, val=2, test=2, oos_test=1), ['balance', 'transfer'])
    """

    name = "clinc150"
    info = BenchmarkInfo(
        paper=Paper(
            title="An Evaluation Dataset for Intent Classification and Out-of-Scope Prediction",
            venue="EMNLP",
            year=2019,
            url="https://aclanthology.org/D19-1131",
            code="https://github.com/clinc/oos-eval",
        ),
        tasks=frozenset({Task.CLASSIFICATION}),
    )

    variant: Literal["full", "small", "imbalanced", "oos_plus"] = "full"
    download: bool = False

    def load(self) -> Parts:
        """Read the file of the variant, downloaded first if that is asked for."""
        file = f"data_{self.variant}.json"
        path = resolve_data_dir(self.data_dir, f"{_CLINC_FOLDER}/{file}") / _CLINC_FOLDER / file
        if not path.is_file():
            url, sha256 = f"{_CLINC_URL}/{file}", _CLINC_SHA256[self.variant]
            fetch(url, sha256, path, download=self.download, kind=f"CLINC150 ({self.variant})")
        with naming(path):
            queries = json.loads(path.read_text(encoding="utf-8"))
            intents = sorted({intent for _, intent in queries["train"]})
            splits = {}
            for split in ("train", "val", "test", "oos_test"):
                texts, names = zip(*queries[split], strict=True)
                # -1 is what is no intent of the training data: out of scope
                splits[split] = Split(Texts(texts), pd.Index(intents).get_indexer(names))
        oods = [OODSet("oos_test", "near", splits["oos_test"])]
        return Parts(intents, splits["train"], splits["test"], oods, val=splits["val"])


@dataclass(kw_only=True, eq=False, repr=False)
class Intents(OODBenchmark):
    """A part of CLINC150, each query as a sentence embedding: 150 intents, out-of-scope queries near-OOD.

    Of each intent 20 training, 5 validation and 10 test queries, and 500 out-of-scope test queries, drawn at random
    from the published splits (Larson et al., 2019, CC BY 3.0). Raw items are float tensors of shape (384,): the mean
    token of MiniLM (all-MiniLM-L6-v2), rounded to 8 bits. The data comes with the package, ``data_dir`` is ignored.
    All queries, as texts: :class:`~rmd_plugin.benchmarks.CLINC150`.

    The options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> from rmd_plugin.benchmarks import Intents
        >>> benchmark = Intents()
        >>> benchmark
        Intents(train=3000, val=750, test=1500, out_of_scope=500)
        >>> benchmark.class_names[:2]
        ['accept_reservations', 'account_blocked']
    """

    name = "intents"
    info = CLINC150.info

    def load(self) -> Parts:
        """Read the packaged file."""
        arrays = read_columns(_DATA / "intents.npz")

        def part(split: str, labels: np.ndarray) -> Split:
            return Split(TensorRows(arrays[split] * arrays["step"]), labels)

        train, val, test = (
            part(split, arrays[f"{split}_labels"].astype(np.int64)) for split in ("train", "val", "test")
        )
        outside = part("out_of_scope", np.full(len(arrays["out_of_scope"]), OOD_LABEL))
        return Parts(arrays["names"].tolist(), train, test, [OODSet("out_of_scope", "near", outside)], val=val)


@dataclass(kw_only=True, eq=False, repr=False)
class Digits(OODBenchmark):
    """Digits 0-5 in-distribution, 6-9 near-OOD; noise and inverted digits far-OOD.

    scikit-learn's 1,797 images of 8 x 8 pixels. Raw items are float tensors of shape (1, 8, 8) in [0, 1]. Train,
    validation and test parts are stratified by class. The inverted images are those of the ID test set; the noise
    is uniform, as many images as the ID test set has. The data comes with scikit-learn, ``data_dir`` is ignored.

    Args:
        val_fraction: share of the ID images held out for validation.
        test_fraction: share of the ID images held out for testing.
        num_classes: digits ``0..num_classes-1`` are in-distribution, the others near-OOD.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> from rmd_plugin.benchmarks import Digits
        >>> benchmark = Digits()
        >>> benchmark
        Digits(train=650, val=217, test=216, digits_6_9=714, noise=216, inverted=216)
    """

    name = "digits"

    val_fraction: float = 0.2
    test_fraction: float = 0.2
    num_classes: int = 6

    def load(self) -> Parts:
        """Read the images of scikit-learn and make the noise."""
        if not 2 <= self.num_classes <= 9:
            raise ValueError(f"num_classes must be 2..9 so that digits are left for OOD, got {self.num_classes}")
        from sklearn.datasets import load_digits

        data = load_digits()
        images = (data.images / _MAX_INK).astype(np.float32)[:, None]
        labels = data.target.astype(np.int64)
        digits = Split(TensorRows(images), labels)
        inside = digits.subset(np.flatnonzero(labels < self.num_classes))
        near = digits.subset(np.flatnonzero(labels >= self.num_classes))
        fractions = [self.test_fraction, self.val_fraction]
        test, val, train = inside.stratified(fractions, stream(self.seed, "digits"))
        noise = stream(self.seed, "noise").random((len(test), *images.shape[1:]), dtype=np.float32)
        oods = [
            OODSet(f"digits_{self.num_classes}_9", "near", near),
            OODSet("noise", "far", Split(TensorRows(noise), np.zeros(len(noise)))),
            OODSet("inverted", "far", Split(TensorRows(1 - images[test.indices]), test.labels)),
        ]
        return Parts([str(digit) for digit in range(self.num_classes)], train, test, oods, val=val)


@dataclass(kw_only=True, eq=False, repr=False)
class Simulation(OODBenchmark):
    """Gaussian classes that differ in their first coordinate only.

    Class ``k`` is ``N([means[k], 0, ..., 0], sigma^2 I)`` in ``dim`` dimensions; the OOD samples are drawn in the
    same way from ``ood_means`` and form one near-OOD set. All other coordinates are shared and carry no information,
    which is what drowns the Mahalanobis distance. The defaults are the paper's.

    Raw items are float tensors of shape (dim,). Each split has its own random stream: changing one size leaves
    the other splits as they are. The data is generated, ``data_dir`` is ignored.

    Args:
        dim: number of dimensions.
        means: first coordinate of each class mean.
        ood_means: first coordinate of each OOD mean.
        sigma: standard deviation of every coordinate.
        n_train: training samples per class.
        n_val: validation samples per class.
        n_test: test samples per class and per OOD mean.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> from rmd_plugin.benchmarks import Simulation
        >>> Simulation(dim=8, n_train=50)
        Simulation(train=100, val=200, test=200, shifted=200)
    """

    name = "simulation"

    dim: int = 1024
    means: Sequence[float] = (-1.0, 1.0)
    ood_means: Sequence[float] = (-3.0, 3.0)
    sigma: float = 0.25
    n_train: int = 10_000
    n_val: int = 100
    n_test: int = 100

    def load(self) -> Parts:
        """Draw the samples."""
        self.means, self.ood_means = [float(mean) for mean in self.means], [float(mean) for mean in self.ood_means]
        if not 0 < self.sigma < np.inf:
            raise ValueError(f"sigma must be above 0 and finite; got {self.sigma}")
        sizes = {"train": self.n_train, "val": self.n_val, "test": self.n_test}
        train, val, test = (self._draw(self.means, count, purpose) for purpose, count in sizes.items())
        oods = [OODSet("shifted", "near", self._draw(self.ood_means, self.n_test, "ood"))]
        return Parts([f"mean {mean:g}" for mean in self.means], train, test, oods, val=val)

    def _draw(self, means: Sequence[float], count: int, purpose: str) -> Split:
        """``count`` samples of each mean, in the order of ``means``."""
        rng = stream(self.seed, "simulation", purpose)
        x = rng.standard_normal((len(means) * count, self.dim), dtype=np.float32)
        x *= np.float32(self.sigma)
        labels = np.repeat(np.arange(len(means)), count)
        x[:, 0] += np.asarray(means, dtype=np.float32)[labels]
        return Split(TensorRows(x), labels)
