"""What can go wrong with data: it is not there, it is damaged, or it could not be fetched."""

from pathlib import Path

from rmd_plugin.downloads import DownloadError as DownloadError


class DataNotFoundError(FileNotFoundError):
    """Data that a benchmark needs is not on disk. The message names what, where, and the remedy."""


class DataFormatError(ValueError):
    """A file is truncated, garbage, or not what its name promises.

    Args:
        path: the offending file.
        reason: what was expected and what came.
        offset: position of the fault in bytes (of the unpacked stream for a compressed file), if known.
    """

    def __init__(self, path: str | Path, reason: str, offset: int | None = None) -> None:
        self.path = Path(path)
        self.reason = reason
        self.offset = offset
        place = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{path}{place}: {reason}")

    def __reduce__(self) -> tuple[type["DataFormatError"], tuple[Path, str, int | None]]:
        # the default would rebuild it from the message alone; data loader workers send errors by pickle
        return type(self), (self.path, self.reason, self.offset)


class ChecksumError(DataFormatError):
    """A file's checksum is not the published one."""
