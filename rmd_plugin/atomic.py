"""Files that appear whole or not at all: written aside, then renamed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w", *, newline: str | None = None) -> Iterator[IO]:
    """Open a file for writing that takes the place of ``path`` when the block ends without an error.

    A reader sees the old file or the new one, never a part; an error or a kill leaves the old one. The folder must
    exist; the mode is ``"w"`` for text (UTF-8) or ``"wb"`` for bytes. Pipes and devices are written to directly.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    encoding = None if "b" in mode else "utf-8"
    if path.exists() and not path.is_file() and not path.is_dir():  # a device or pipe, of which there is but the one
        with open(path, mode, newline=newline, encoding=encoding) as file:
            yield file
        return
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(aside, mode, newline=newline, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could keep the new name and lose the content
        os.replace(aside, path)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file it had no room for
        raise
