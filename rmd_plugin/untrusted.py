"""Files and texts that somebody else wrote: read within limits, shown without tricks. Imports nothing heavy."""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: environment variable that raises every limit here to so many GiB
LIMIT_VARIABLE = "RMD_MAX_GIB"
#: what is packed may unpack to so many times its size, or to so many bytes whatever it was packed to
_RATIO, _SMALL = 100, 1 << 26
#: what a spreadsheet takes for a formula; quotes before it are doubled, so that reading gives back what was written
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


class DataFormatError(ValueError):
    """A file is truncated, garbage, too large, or not what its name promises.

    Args:
        path: the offending file.
        reason: what was expected and what came.
        offset: position of the fault in bytes (of the unpacked stream for a compressed file), if known.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str, offset: int | None = None) -> None:
        self.path = Path(path)
        self._given = path  # a Path would make s3:/ of s3://
        self.reason = reason
        self.offset = offset
        place = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{path}{place}: {reason}")

    def __reduce__(self) -> tuple[type[DataFormatError], tuple[str | os.PathLike[str], str, int | None]]:
        # the default would rebuild it from the message alone; data loader workers send errors by pickle
        return type(self), (self._given, self.reason, self.offset)


# -- limits -----------------------------------------------------------------------------------------------------------


def allowed_bytes(usual: int, packed: int | None = None) -> int:
    """The limit on a size: the usual one, for what is packed a ratio too; ``RMD_MAX_GIB`` raises both."""
    limit = usual if packed is None else min(usual, max(_SMALL, _RATIO * packed))
    given = os.environ.get(LIMIT_VARIABLE)
    if not given:
        return limit
    try:
        return max(limit, math.floor(float(given) * (1 << 30)))
    except (ValueError, OverflowError):
        raise ValueError(f"{LIMIT_VARIABLE} must be a number of GiB, got {given!r}.") from None


def check_size(path: str | os.PathLike[str], size: int, usual: int, *, packed: int | None = None) -> None:
    """Refuse a file whose content takes more than :func:`allowed_bytes`, before memory is taken for it."""
    limit = allowed_bytes(usual, packed)
    if size > limit:
        what = f"is larger than the {limit} bytes" if packed is None else f"unpacks to more than the {limit} bytes"
        raise DataFormatError(
            path, f"{what} expected of such a file ({_gib(size)}). If it is right: {LIMIT_VARIABLE}={_enough(size)}"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB or more"


def _enough(size: int) -> int:
    return math.ceil(size / (1 << 30))


def check_zip(path: str | os.PathLike[str], usual: int, members: list[zipfile.ZipInfo] | None = None) -> None:
    """Refuse members of an archive, by default all, that unpack to too much together; a file of another kind passes."""
    if members is None:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    # of the size of the file, not of its members, which may overlap
    check_size(path, sum(member.file_size for member in members), usual, packed=os.path.getsize(path))


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse what is no regular file, before it is opened: a FIFO waits for ever, and a device may have no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DataFormatError(path, "is not a regular file, and is not opened")


def read_bytes(path: str | os.PathLike[str], usual: int) -> bytes:
    """Content of a regular file of limited size."""
    check_regular(path)
    size = os.path.getsize(path)
    check_size(path, size, usual)
    with open(path, "rb") as file:
        return file.read(size)  # takes memory for so many bytes at once, and some files of the system never end


def load_tensors(path: str | os.PathLike[str], usual: int) -> Any:
    """What a file of ``torch.save`` holds, on the CPU, loaded with ``weights_only=True``; other errors are torch's."""
    import torch

    with open(path, "rb") as file:
        packed = file.read(4) == b"PK\x03\x04"
    check_zip(path, usual)  # torch packs nothing, but unpacks what others packed
    # the old format from memory: its reader takes as much as a length in the file claims
    source = os.fspath(path) if packed else io.BytesIO(read_bytes(path, usual))
    return torch.load(source, map_location="cpu", weights_only=True)


def read_text(path: str | os.PathLike[str], usual: int) -> str:
    """The same as text in UTF-8."""
    try:
        return read_bytes(path, usual).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataFormatError(path, "is not a text file in UTF-8", error.start) from None


def read_mapping(path: str | os.PathLike[str], usual: int = 1 << 20) -> dict[str, Any]:
    """A mapping from a file of JSON or, by its name, of YAML without references: these unfold to any size."""
    language = "YAML" if str(path).endswith(".yaml") else "JSON"
    parse: Callable[[str], Any] = _parse_yaml if language == "YAML" else json.loads
    text = read_text(path, usual)
    try:
        found = parse(text)
    except RecursionError:
        raise DataFormatError(path, f"is not {language} of ours: nested too deeply") from None
    except ValueError as error:
        raise DataFormatError(path, f"is not {language}: {' '.join(str(error).split())}") from None
    if found is not None and not isinstance(found, dict):
        raise DataFormatError(path, f"must hold a mapping, got {type(found).__name__}")
    return found or {}


def _parse_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"line {self.peek_event().start_mark.line + 1} refers to another place (*)")
            return super().compose_node(parent, index)

        def construct_yaml_int(self, node: Any) -> int:
            if len(node.value) > 100:  # of base 60, whose cost is quadratic
                raise ValueError(f"line {node.start_mark.line + 1} holds a number of {len(node.value)} digits")
            return int(super().construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        raise
    except Exception as error:  # its constructors raise nearly every kind on garbage
        raise ValueError(str(error) or type(error).__name__) from None


# -- texts ------------------------------------------------------------------------------------------------------------


def one_line(text: object) -> str:
    r"""A text for people on one line: line breaks are spaces, what steers a terminal or turns the reading is escaped.

    Example:
        >>> one_line("two\nlines, \x1b[2Jclean")
        'two lines, \\x1b[2Jclean'
    """
    plain = " ".join(str(text).splitlines()).replace("\t", " ")
    if plain.isprintable():
        return plain
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else letter.encode("unicode_escape").decode()
        for letter in plain
    )


def to_csv_cell(text: str) -> str:
    """A text for a cell of a CSV file: one that a spreadsheet would take for a formula gets a quote in front."""
    return f"'{text}" if _FORMULA.match(text) else text


def from_csv_cell(cell: str) -> str:
    """The text of a cell that :func:`to_csv_cell` wrote."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
