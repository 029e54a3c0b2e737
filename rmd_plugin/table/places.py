"""Files of a table on a disk or in an object store: found, opened, and written whole or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import fs

from rmd_plugin.arrow_columns import ARROW, PARQUET

ENDINGS = (*PARQUET, *ARROW)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class TableFile:
    """One file of a table, as it was when the work began."""

    path: str  #: with its scheme
    name: str  #: below the folder that was given
    version: str  #: size and time of change


def locate(path: str | os.PathLike[str]) -> tuple[fs.FileSystem, str]:
    """The filesystem of a path and the path in it: pyarrow's own (``s3://``, ``gs://``), or one of fsspec."""
    given = os.fspath(path)
    if "://" not in given:
        return fs.LocalFileSystem(), os.path.abspath(given)
    try:
        found, inner = fs.FileSystem.from_uri(given)
    except pa.ArrowInvalid:  # a scheme that pyarrow does not know
        other, inner = fsspec.core.url_to_fs(given)
        found = fs.PyFileSystem(fs.FSSpecHandler(other))
    return found, inner


def list_files(paths: Paths) -> list[TableFile]:
    """All files of a table, by name: those that are given, and those below folders.

    Hidden files and those that begin with ``_`` belong to other programs.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if one is given twice.
    """
    places = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    found: list[tuple[str, fs.FileInfo]] = []
    roots: list[list[str]] = []
    for place in places:
        system, inner = locate(place)
        info = system.get_file_info(inner)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(f"there is no file or folder {place}.")
        inside = [info]
        if info.type == fs.FileType.Directory:
            inside = [item for item in system.get_file_info(fs.FileSelector(inner, recursive=True)) if _is_table(item)]
            inside = [item for item in inside if not _is_hidden(item.path[len(inner) :])]
        folder = inner if info.type == fs.FileType.Directory else os.path.dirname(inner)
        roots.append(folder.rstrip("/").split("/"))
        found += [(_full(place, item.path), item) for item in inside]
    if not found:
        raise FileNotFoundError(f"there is no {' or '.join(ENDINGS)} file in {', '.join(places) or 'no paths'}.")
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*roots, strict=False))
    depth = len(list(shared))
    files = sorted(
        (TableFile(full, "/".join(item.path.split("/")[depth:]), _version(item)) for full, item in found),
        key=lambda file: file.name,
    )
    for before, after in itertools.pairwise(files):
        if before.name == after.name:
            raise ValueError(f"{after.path} is given twice. Its rows would count twice.")
    return files


def _is_table(item: fs.FileInfo) -> bool:
    return item.type == fs.FileType.File and item.path.lower().endswith(ENDINGS)


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _version(item: fs.FileInfo) -> str:
    return f"{item.size} bytes of {item.mtime_ns}"


def _full(place: str, inner: str) -> str:
    """A path in a filesystem with the scheme and the options of the one that was given."""
    if "://" not in place:
        return inner
    scheme, rest = place.split("://", 1)
    _, question, options = rest.partition("?")
    return f"{scheme}://{inner}{question}{options}"


def join(folder: str | os.PathLike[str], name: str) -> str:
    """The path of a file in a folder, which may have a scheme and options."""
    given = os.fspath(folder)
    base, question, options = given.partition("?") if "://" in given else (given, "", "")
    return f"{base.rstrip('/')}/{name}{question}{options}"


def exists(path: str) -> bool:
    """Whether there is such a file."""
    system, inner = locate(path)
    return bool(system.get_file_info(inner).type == fs.FileType.File)


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """A file for reading."""
    system, inner = locate(path)
    with system.open_input_file(inner) as stream:
        yield stream


@contextmanager
def replacing(path: str) -> Iterator[Any]:
    """A stream whose content takes the place of a file when the block ends without an error."""
    system, inner = locate(path)
    folder, name = os.path.split(inner)
    system.create_dir(folder, recursive=True)
    aside = f"{folder}/.{name}.part"  # always the same: a run that goes on writes over what a kill has left
    try:
        with system.open_output_stream(aside) as stream:
            yield stream
        system.move(aside, inner)
    except BaseException:
        with suppress(OSError):
            system.delete_file(aside)
        raise
