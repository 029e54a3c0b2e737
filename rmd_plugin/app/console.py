"""A console that cannot fail: what a run has computed counts, not whether somebody could read about it."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Lossy(io.FileIO):
    """Drops what cannot be written: to a pipe that nobody reads any more, or to a full disk."""

    def write(self, data: Buffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def protect_console() -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` of this process raise no error, whatever is printed from here on.

    Characters that the console does not know are escaped. What somebody else has put in the place of a stream stays.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # closed; the null device takes its number, or the next file would get what others print
            number, encoding = os.open(os.devnull, os.O_WRONLY), "utf-8"
        else:
            number, encoding = stream.fileno(), stream.encoding
            with suppress(OSError, ValueError):
                stream.flush()
        lines = name == "stderr" or os.isatty(number)
        buffer = io.BufferedWriter(_Lossy(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=lines))
