"""Files that appear whole or not at all: written aside, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w", *, newline: str | None = None) -> Iterator[IO]:
    """Open a file for writing that takes the place of ``path`` when the block ends without an error.

    A reader sees the old file or the new one, never a part; an error or a kill leaves the old one.

    Args:
        path: file to write; its folder must exist.
        mode: ``"w"`` for text (UTF-8) or ``"wb"`` for bytes.
        newline: as for ``open``.

    Yields:
        The open file, which lies beside ``path`` until then.
    """
    path = Path(path)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(descriptor, mode, newline=newline, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def _umask() -> int:
    # mkstemp makes private files; there is no way to ask for the umask but to set it
    umask = os.umask(0)
    os.umask(umask)
    return umask
