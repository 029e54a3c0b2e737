"""What can go wrong with data: it is not there, it is damaged, or it could not be fetched."""

from rmd_plugin.downloads import DownloadError as DownloadError
from rmd_plugin.untrusted import DataFormatError as DataFormatError


class DataNotFoundError(FileNotFoundError):
    """Data that a benchmark needs is not on disk. The message names what, where, and the remedy."""


class ChecksumError(DataFormatError):
    """A file's checksum is not the published one."""
