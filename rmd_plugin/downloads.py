"""Downloads that end: checked by a hash, whole or not at all, and without waiting for a silent server for ever."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

SILENCE_SECONDS = 20.0
# the hub's client repeats a failing request for 20 s and more; one short question tells whether it is worth starting
PROBE_SECONDS = 4.0


class DownloadError(OSError):
    """A download did not succeed. Nothing is left behind."""


class WrongHashError(DownloadError):
    """The server gave another file than the published one."""


def download(url: str, path: Path, sha256: str | None) -> None:
    """Download a file; its folder is made if need be.

    Args:
        url: where it is.
        path: where it goes; it appears there only when its hash is right.
        sha256: the published hash, or how it begins; with None a connection that breaks off may go unnoticed.

    Raises:
        WrongHashError: the content is not the published one.
        DownloadError: the server could not be reached or fell silent, or the disk is full.
    """
    import torch  # here, so that the errors above cost nothing to import

    with downloading(url, path.parent):
        torch.hub.download_url_to_file(url, str(path), sha256)


@contextmanager
def downloading(url: str, into: Path) -> Iterator[None]:
    """Give what torch and torchvision download in the block a folder, a limit on silence and the two errors above."""
    usual = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_SECONDS)  # the libraries set none
    try:
        into.mkdir(parents=True, exist_ok=True)
        yield
    except RuntimeError as error:  # what both libraries raise on a wrong hash
        raise WrongHashError(f"{url} did not give the published file: {error}. Not kept.") from error
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(
            f"could not download {url} to {into}: {error}. "
            "Download it by hand and put it there, or try again with a connection and enough free disk space."
        ) from error
    finally:
        socket.setdefaulttimeout(usual)


def hub_unavailable(timeout: float = PROBE_SECONDS) -> str | None:
    """Why the Hugging Face hub, whose client is installed, cannot be asked; ``None`` if it answers at all."""
    constants = import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        import_module("huggingface_hub.utils").get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception as error:  # of requests or of httpx, by the hub's version
        return str(error) or type(error).__name__
    return None
