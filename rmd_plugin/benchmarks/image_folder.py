"""The user's own pictures: folders of classes, or a CSV of paths and labels."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rmd_plugin.pictures import EXTENSIONS, is_picture

from .errors import DataFormatError
from .own import OOD, TEST, TRAIN, VAL, OnBad, OwnData, Rows, find_path, rows_by_split, without_bad
from .readers.records import read_records
from .sources import ImageFiles


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(OwnData):
    """Pictures that the user brings, as PIL images in RGB of any size; the backbone's transform makes tensors of them.

    Two layouts are understood:

    1. A folder with ``train/CLASS/**`` and, if there are any, ``val/CLASS/**``, ``test/CLASS/**`` and OOD sets
       ``ood/NAME/**``, read as torchvision's ``ImageFolder`` does: classes sorted by name, files by their ending, in
       folders of any depth. What begins with a dot is passed over.
    2. A CSV file with the columns ``path`` and ``label``, and if you like ``split``: train, val, test, ood or
       ood:NAME. Paths are relative to the folder of the file and cannot leave it.

    :mod:`rmd_plugin.pictures` says what becomes of each kind of picture. All are decoded once when the benchmark is
    made, so that none stops a training in the middle; after that a picture is read whenever it is used.

    Args:
        on_bad: what to do with pictures that cannot be read: ``refuse`` the data and list them, or list and ``skip``
            them.

    The other options are those of :class:`~rmd_plugin.benchmarks.own.OwnData` and
    :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from rmd_plugin.benchmarks import ImageFolder
        >>> folder = Path(tempfile.mkdtemp())
        >>> for place, colour in (("train/red", "red"), ("train/blue", "blue"), ("ood/green", "green")):
        ...     (folder / place).mkdir(parents=True)
        ...     for number in range(10):
        ...         Image.new("RGB", (16, 16), colour).save(folder / place / f"{number}.png")
        >>> benchmark = ImageFolder(path=folder)
        >>> benchmark, benchmark.class_names
        (ImageFolder(train=14, val=2, test=4, green=10), ['blue', 'red'])
    """

    name = "image_folder"

    on_bad: OnBad = "refuse"

    def read(self) -> Mapping[str, Rows]:
        """Find the pictures and check that each can be read."""
        self.path = find_path(self.path, self.data_dir, "folder or CSV of pictures")
        found = self._from_folders(self.path) if self.path.is_dir() else self._from_table(self.path)
        return without_bad(found, self.on_bad, self.path)

    def are_numbers(self, labels: Iterable[object]) -> bool:
        """Names of folders stay texts: torchvision puts 10 before 2, and so do checkpoints trained with it."""
        return not Path(self.path).is_dir() and super().are_numbers(labels)

    def _from_folders(self, folder: Path) -> dict[str, Rows]:
        if not (folder / TRAIN).is_dir():
            raise DataFormatError(folder, "has no folder train; expected is train/CLASS/*.png, and ood/NAME/*.png")
        found = {}
        for key in (TRAIN, VAL, TEST):
            if (folder / key).is_dir():
                classes = _folders(folder / key)
                paths = [path for members in classes.values() for path in members]
                labels = np.array([name for name, members in classes.items() for _ in members], dtype=object)
                found[key] = Rows(ImageFiles(paths), labels, folder / key)
        if (folder / "ood").is_dir():
            for name, members in _folders(folder / "ood").items():
                found[OOD + name] = Rows(
                    ImageFiles(members), np.full(len(members), name, dtype=object), folder / "ood" / name
                )
        return found

    def _from_table(self, table: Path) -> dict[str, Rows]:
        paths, labels, splits, lines = [], [], [], []
        for line, (given, label, split) in read_records(table, ["path"], ["label", "split"]):
            word = TRAIN if split is None else str(split)
            if not label and not word.strip().startswith("ood"):
                raise DataFormatError(table, f"line {line} has no label; only rows of the split ood can do without")
            paths.append(str(table.parent / _inside(table, line, str(given))))
            labels.append(str(label))
            splits.append(word)
            lines.append(line)
        source, classes = ImageFiles(paths), np.array(labels, dtype=object)
        return {
            key: Rows(source, classes[places], table, places)
            for key, places in rows_by_split(splits, table, lines).items()
        }


def _folders(folder: Path) -> dict[str, list[str]]:
    """The pictures below each folder of a folder, sorted."""
    items = sorted(item for item in folder.iterdir() if not item.name.startswith("."))
    loose = [item.name for item in items if item.is_file() and is_picture(item)]
    if loose:
        raise DataFormatError(folder, f"holds pictures that lie in no folder of their own, such as {loose[0]!r}")
    found = {item.name: _pictures(item) for item in items if item.is_dir()}
    empty = [name for name, pictures in found.items() if not pictures]
    if empty or not found:
        what = f"the folder {empty[0]!r} holds no picture" if empty else "holds no folders"
        raise DataFormatError(folder, f"{what}; endings of pictures are {', '.join(EXTENSIONS)}")
    return found


def _pictures(folder: Path) -> list[str]:
    found: list[str] = []
    seen = set()  # links may lead back
    for place, below, names in os.walk(folder, followlinks=True, onerror=_raise):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            below.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        below[:] = [name for name in below if not name.startswith(".")]
        found += [os.path.join(place, name) for name in names if is_picture(name) and not name.startswith(".")]
    return sorted(found, key=os.path.split)  # the order of torchvision


def _raise(error: OSError) -> None:
    raise error


def _inside(table: Path, line: int, given: str) -> str:
    """A path of a table as it is, if it stays in the folder of the table."""
    plain = os.path.normpath(given)
    if not given or "\0" in given or os.path.isabs(given) or os.path.splitdrive(given)[0] or ".." in Path(plain).parts:
        raise DataFormatError(
            table, f"line {line}: the path {given[:200]!r} is not one inside of the table's folder; others are not read"
        )
    return plain
