"""Every picture data set of the framework as an OOD set, by the name of its class."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from pytorch_ood.dataset import img
from pytorch_ood.dataset.img.noise import NoiseDataset
from torch.utils.data import Dataset
from torchvision.datasets import SVHN

from rmd_plugin import downloads

from ..errors import DataNotFoundError
from ..sources import ImageRows, Pictures
from ..splits import stream

#: how an option is named on the command line beside the Python one
DOWNLOAD = "download=True (benchmark.download=true on the command line)"
#: what a class wants to be told, as a test set
_OPTIONS: dict[str, dict[str, Any]] = {
    "CIFAR10C": {"subset": "all"},
    "CIFAR100C": {"subset": "all"},
    "GaussianNoise": {"length": 1000},
    "ImageNetC": {"subset": "noise"},
    "MNISTC": {"subset": "all", "split": "test"},
    "MVTechAD": {"split": "test"},
    "SVHN": {"split": "test"},
    "SegmentMeIfYouCan": {"subset": "RoadAnomaly21"},
    "StreetHazards": {"subset": "test"},
    "SuMNIST": {"train": False},
    "TinyImageNet": {"subset": "val"},
    "UniformNoise": {"length": 1000},
}
#: name -> class
PICTURE_SETS: dict[str, Any] = {**{name: getattr(img, name) for name in img.__all__}, "SVHN": SVHN}


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
    name, given = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
    if name not in PICTURE_SETS:
        raise ValueError(f"there is no far-OOD set {name!r}; there are {', '.join(sorted(PICTURE_SETS))}")
    kind = PICTURE_SETS[name]
    taken = inspect.signature(kind).parameters
    if unknown := sorted(set(given) - set(taken)):
        raise ValueError(f"{name} has no option {unknown[0]!r}; it has {', '.join(taken)}")
    general = {"root": str(folder), "download": download, "size": (size, size, 3) if size else None}
    options = {key: value for key, value in general.items() if key in taken and value is not None}
    # lists and mappings of Hydra are none of the framework's business
    options |= {**_OPTIONS.get(name, {}), **{key: tuple(v) if _is_list(v) else v for key, v in given.items()}}
    open_ones = [key for key, value in taken.items() if value.default is value.empty and key not in options]
    if open_ones:
        raise ValueError(f"{name} needs {open_ones[0]!r}: give far=[{{{name}: {{{open_ones[0]}: VALUE}}}}]")
    with asking_framework(name, folder, download=download and "download" in taken, file=_file(kind)):
        try:
            dataset = kind(**options)
        except (AssertionError, LookupError, TypeError) as error:
            raise ValueError(
                f"{name} cannot be made with {dict(given)}: {str(error) or type(error).__name__}"
            ) from error
    with asking_framework(name, folder, file=_file(kind)):
        source = pictures(dataset, seed=seed, size=size)
        if len(source) == 0:
            raise FileNotFoundError("no picture is there")
        source[0]  # some list their files without looking for them
    return ":".join([name, *map(str, given.values())]), source


def pictures(dataset: Dataset[Any], *, seed: int, size: int | None = None) -> ImageRows | Pictures:
    """The pictures of a data set of the framework; noise is drawn here, once, by the seed."""
    if not isinstance(dataset, NoiseDataset):
        return Pictures(dataset, size)
    dataset.generator = stream(seed, "noise", type(dataset).__name__)
    drawn: Any = dataset
    return ImageRows(np.stack([np.asarray(drawn[index][0].convert("RGB")) for index in range(len(drawn))]))


@contextmanager
def asking_framework(
    name: str, folder: Path, *, download: bool = False, file: str = "", remedy: str = ""
) -> Iterator[None]:
    """Turn what the framework's classes raise about absent data into one error that names place and remedy."""
    where = f"{name} is not complete in {folder}" + (f" ({file})" if file else "")
    remedy = remedy or f"Set {DOWNLOAD} to let pytorch-ood fetch what it can, or put it there"
    try:
        with downloads.downloading(name, folder) if download else nullcontext():
            yield
    except (DataNotFoundError, downloads.DownloadError) as error:
        if not isinstance(error, downloads.WrongHashError):
            raise
        # what `downloading` takes for a wrong hash may be any RuntimeError, such as one about gdown
        raise DataNotFoundError(f"{where}: {_sentence(error.__cause__)} {remedy}.") from error
    except (RuntimeError, ImportError, OSError) as error:
        raise DataNotFoundError(f"{where}: {_sentence(error)} {remedy}.") from error


def _sentence(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return text if text.endswith(".") else f"{text}."


def _file(kind: Any) -> str:
    """The archive that a class looks for, where it says so."""
    name = getattr(kind, "filename", "")
    return name if isinstance(name, str) else ""


def _is_list(value: object) -> bool:
    return not isinstance(value, str | Mapping) and hasattr(value, "__iter__")
