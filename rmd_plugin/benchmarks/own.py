"""What the benchmarks of one's own data share: where files lie, which rows belong to which split, labels to classes."""

import logging
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from rmd_plugin.pictures import bad_pictures

from .base import OODBenchmark
from .errors import DataFormatError, DataNotFoundError
from .readers.downloads import resolve_data_dir
from .sources import Source
from .splits import Distance, OODSet, Parts, Split, stream

log = logging.getLogger(__name__)

OnBad = Literal["refuse", "skip"]
TRAIN, VAL, TEST, OOD = "train", "val", "test", "ood:"
#: names of an OOD set that mean something else in results
_TAKEN = (TRAIN, VAL, TEST, "mean", "unknown")
#: bad pictures that are named, of however many there are
_NAMED = 5
# without leading zeros: 7 and 007 are two classes
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


@dataclass
class Rows:
    """Items of one split, with labels as they stand in the data."""

    source: Source[Any]
    labels: np.ndarray  #: shape (N,), int64 or texts as objects; unused for OOD
    where: Path  #: the file or folder that they come from
    indices: np.ndarray | None = None  #: which items of the source, shape (N,); None means all


@dataclass(kw_only=True, eq=False, repr=False)
class OwnData(OODBenchmark):
    """Base of the benchmarks that read the user's own files: a subclass finds the rows of each split.

    The classes are those of the training data: in numeric order where all labels are whole numbers, else sorted as
    text. Without test data a part of the training data is held out, stratified by class, and without validation data
    another one. OOD data are optional: a detector is fitted without them.

    Args:
        path: file or folder, relative to the working folder or else to ``data_dir``.
        val_fraction: share of the ID rows held out for validation, if there are no validation data.
        test_fraction: share of the ID rows held out for testing, if there are no test data.
        near: names of OOD sets that count as near-OOD.
        far: names of OOD sets that count as far-OOD; those in neither list have no distance.
    """

    path: str | Path = field(kw_only=False)
    val_fraction: float = 0.1
    test_fraction: float = 0.2
    near: Sequence[str] = ()
    far: Sequence[str] = ()

    @abstractmethod
    def read(self) -> Mapping[str, Rows]:
        """The rows of ``train``, of ``val`` and ``test`` if there are any, and of each OOD set as ``ood:NAME``."""

    def are_numbers(self, labels: Iterable[object]) -> bool:
        """Whether the distinct training labels are whole numbers, or texts of such."""
        return all(_WHOLE_NUMBER.fullmatch(str(label)) for label in labels)

    def class_name(self, label: Any) -> str:
        """What a class is called."""
        return str(label)

    def load(self) -> Parts:
        """Read the files, number the classes, split what comes unsplit."""
        if not 0 < self.test_fraction < 1 or not 0 <= self.val_fraction < 1:
            raise ValueError(
                "test_fraction must lie above 0 and below 1, val_fraction in [0, 1); "
                f"got {self.test_fraction} and {self.val_fraction}"
            )
        found = dict(self.read())
        if TRAIN not in found or len(found[TRAIN].labels) == 0:
            raise DataFormatError(self.path, f"has no training data; it has {', '.join(found) or 'nothing'}")
        labels = {key: _distinct(rows.labels) for key, rows in found.items() if not key.startswith(OOD)}
        if self.are_numbers(labels[TRAIN][0]):
            labels = {key: (list(map(_as_number, values)), inverse) for key, (values, inverse) in labels.items()}
        known = sorted(label for label in labels[TRAIN][0] if not _negative(label))
        classes = {label: number for number, label in enumerate(known)}
        splits = {key: self._numbered(found[key], *labels[key], classes) for key in labels}
        oods = [(key.removeprefix(OOD), rows.source, rows.indices) for key, rows in found.items() if key not in labels]

        # rows of a label < 0 are an OOD set, where they can neither be trained on nor decide anything
        mixed = splits[TEST] if TEST in splits else splits[TRAIN]
        for key in {TRAIN, VAL} & set(splits):
            if (splits[key].labels < 0).any() and splits[key] is not mixed:
                raise DataFormatError(found[key].where, f"{key} has labels < 0; OOD rows belong to test or ood")
        outside = np.flatnonzero(mixed.labels < 0)
        if len(outside):
            oods.append(("ood", mixed.source, mixed.indices[outside]))
        inside = mixed.subset(np.flatnonzero(mixed.labels >= 0))
        names = [self.class_name(label) for label in classes]
        sets = self._ood_sets(oods)
        if TEST in splits:
            return Parts(names, splits[TRAIN], inside, sets, val=splits.get(VAL), val_fraction=self.val_fraction)
        fractions = [self.test_fraction, 0.0 if VAL in splits else self.val_fraction]
        test, val, train = inside.stratified(fractions, stream(self.seed, "own"))
        if len(test) == 0:
            raise self._error(
                f"has too few rows to hold out test_fraction={self.test_fraction} of each class. Add more, or test data"
            )
        return Parts(names, train, test, sets, val=splits.get(VAL, val))

    def _error(self, reason: str) -> DataFormatError:
        return DataFormatError(self.path, reason)

    def _numbered(self, rows: Rows, values: list[Any], inverse: np.ndarray, classes: Mapping[Any, int]) -> Split:
        new = [value for value in values if value not in classes and not _negative(value)]
        if new:
            shown = ", ".join(repr(str(value)[:60]) for value in new[:5]) + (", ..." if len(new) > 5 else "")
            raise DataFormatError(
                rows.where,
                f"has {len(new)} classes that are not in train: {shown}. The classes are those of the training data; "
                "what the network does not know belongs to an OOD set (ood)",
            )
        numbers = np.array([classes.get(value, -1) for value in values], dtype=np.int64)
        return Split(rows.source, numbers[inverse], rows.indices)

    def _ood_sets(self, found: Iterable[tuple[str, Source[Any], np.ndarray | None]]) -> list[OODSet]:
        tags: dict[str, Distance] = {str(name): "far" for name in self.far}
        tags.update({str(name): "near" for name in self.near})
        sets = []
        for name, source, indices in found:
            count = len(source) if indices is None else len(indices)
            if name in _TAKEN or not name or "/" in name:
                raise self._error(f"an OOD set cannot be named {name[:60]!r}: rename it")
            if count == 0:
                raise self._error(f"the OOD set {name!r} is empty")
            sets.append(OODSet(name, tags.get(name, ""), Split(source, np.zeros(count), indices)))
        names = [item.name for item in sets]
        twice = {str(name) for name in self.near} & {str(name) for name in self.far}
        if twice or set(tags) - set(names):
            wrong = sorted(twice or set(tags) - set(names))
            raise ValueError(
                f"near and far name OOD sets, each once; {', '.join(wrong)} "
                f"{'stands in both' if twice else 'is none of them'}. There are: {', '.join(names) or 'none'}."
            )
        return sorted(sets, key=lambda item: ("near", "", "far").index(item.distance))


def _distinct(labels: np.ndarray) -> tuple[list[Any], np.ndarray]:
    """The distinct labels as texts, and for each row which one it has, shape (N,)."""
    values, inverse = np.unique(labels, return_inverse=True)
    return [str(value) for value in values], inverse


def _as_number(text: str) -> int | str:
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else text


def _negative(label: Any) -> bool:
    return isinstance(label, int) and label < 0


def find_path(path: str | Path, data_dir: str | Path | None, what: str, kinds: str = "") -> Path:
    """A file or folder of the user's: as given, or else in the data folder; ``kinds`` says which would do, in errors.

    Raises:
        DataNotFoundError: with the places looked in.
    """
    path = Path(path).expanduser()
    places = [path]
    if not path.is_absolute() and not path.exists():
        places.append(resolve_data_dir(data_dir, f"no {what}: looked for {path}; else it") / path)
    for place in places:
        if place.exists():
            return place
    option = f"path={what.partition(' ')[0].upper()}{f' ({kinds})' if kinds else ''}"
    raise DataNotFoundError(f"no {what}: looked for {'; '.join(map(str, places))}. Pass {option}.")


def without_bad(found: Mapping[str, Rows], on_bad: str, where: str | Path) -> dict[str, Rows]:
    """The rows without pictures that cannot be read, if these may be skipped; the sources have ``content(index)``.

    Raises:
        DataFormatError: with the first of them, and how many there are.
    """
    if on_bad not in get_args(OnBad):
        raise ValueError(f"on_bad must be refuse or skip, got {on_bad!r}")
    sources: dict[int, Any] = {id(rows.source): rows.source for rows in found.values()}
    bad = {key: bad_pictures(len(source), source.content) for key, source in sources.items()}
    reasons = [reason for reasons in bad.values() for reason in reasons.values()]
    if not reasons:
        return dict(found)
    listed = "; ".join(reasons[:_NAMED]) + ("; ..." if len(reasons) > _NAMED else "")
    what = f"{len(reasons)} of {sum(map(len, sources.values()))} pictures cannot be read"
    if on_bad == "refuse":
        raise DataFormatError(where, f"{what}: {listed}. on_bad=skip leaves them out")
    log.warning("%s and are left out: %s", what, listed)
    kept = {}
    for key, rows in found.items():
        indices = np.arange(len(rows.source)) if rows.indices is None else rows.indices
        good = ~np.isin(indices, list(bad[id(rows.source)]))
        gone = set(rows.labels) - set(rows.labels[good])
        if gone:
            name = key if key.startswith(OOD) else f"the class {min(gone)[:60]!r}"
            raise DataFormatError(rows.where, f"no picture of {name} can be read: {listed}")
        kept[key] = Rows(rows.source, rows.labels[good], rows.where, indices[good])
    return kept


def split_name(value: str) -> str | None:
    """The split that a word of a table names: train, val (or validation), test, ood:NAME, where ood is ood:ood."""
    word = value.strip()
    if word in (TRAIN, VAL, TEST):
        return word
    if word == "ood":
        return f"{OOD}ood"
    return VAL if word == "validation" else word if word.startswith(OOD) and word != OOD else None


def rows_by_split(
    splits: Sequence[str] | np.ndarray, path: Path, lines: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """The positions of each split, from the word of every row; ``lines`` says where these stand, for errors."""
    values, inverse = np.unique(np.asarray(splits, dtype=object), return_inverse=True)
    found: dict[str, list[np.ndarray]] = {}
    for number, value in enumerate(values):
        places = np.flatnonzero(inverse == number)
        key = split_name(str(value))
        if key is None:
            place = f"row {places[0]}" if lines is None else f"line {lines[places[0]]}"
            raise DataFormatError(
                path, f"{place}: the split is {str(value)[:60]!r}; train, val, test, ood or ood:NAME is expected"
            )
        found.setdefault(key, []).append(places)
    order = sorted(found, key=lambda key: (key.startswith(OOD), key))
    return {key: np.sort(np.concatenate(found[key])) for key in order}


def split_files(folder: Path, endings: Sequence[str], *, folders: bool = False) -> dict[str, Path]:
    """``train.*``, ``val.*``, ``test.*`` and ``ood/NAME.*`` of a folder, by split; where allowed, folders of that name.

    Raises:
        DataFormatError: if a split has two files.
    """
    found: dict[str, Path] = {}
    names = {f"{key}{ending}": key for key in (TRAIN, VAL, TEST) for ending in endings}
    names |= {key: key for key in (TRAIN, VAL, TEST)} if folders else {}
    places = [(names[item.name], item) for item in _listed(folder) if item.name in names]
    for item in _listed(folder / "ood") if (folder / "ood").is_dir() else ():
        ending = next((ending for ending in endings if item.name.endswith(ending)), None)
        if ending is not None or (folders and item.is_dir()):
            places.append((OOD + item.name.removesuffix(ending or ""), item))
    for key, item in places:
        if key in found:
            raise DataFormatError(folder, f"has two files for {key}: {found[key].name} and {item.name}. Keep one")
        found[key] = item
    order = [key for key in (TRAIN, VAL, TEST) if key in found]
    return {key: found[key] for key in (*order, *sorted(found.keys() - set(order)))}


def _listed(folder: Path) -> list[Path]:
    return sorted(item for item in folder.iterdir() if not item.name.startswith("."))
