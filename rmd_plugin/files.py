"""Files that appear whole or not at all, pictures, packages that an extra brings, and where the shipped configs are."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

#: endings of files that are taken for pictures, those of torchvision's ImageFolder
PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# those of the endings, and GIF, which is often found under them; Pillow would hand EPS to Ghostscript
_PICTURE_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")

_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class DataFormatError(ValueError):
    """A file is damaged, or not what its name promises: its path, and what was expected and what came."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(path, reason)  # data loader workers send errors by pickle, which calls it with these
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w", *, newline: str | None = None) -> Iterator[IO]:
    """Open a file for writing that takes the place of ``path`` when the block ends without an error.

    A reader sees the old file or the new one, never a part; an error or a kill leaves the old one. The folder must
    exist; the mode is ``"w"`` for text (UTF-8) or ``"wb"`` for bytes.
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    encoding = None if "b" in mode else "utf-8"
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with name_file_in_errors(path), open(aside, mode, newline=newline, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could keep the new name and lose the content
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


@contextmanager
def name_file_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Complete an error of the system: a full disk does not say which file it had no room for."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def one_line(error: BaseException) -> str:
    """What an error says in one line, without where OmegaConf was in its own structure."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=")))


def is_picture(path: str | os.PathLike[str]) -> bool:
    """Whether a file is taken for a picture, by the ending of its name."""
    return os.fspath(path).lower().endswith(PICTURE_ENDINGS)


def read_picture(file: str | os.PathLike[str] | IO[bytes], name: str | os.PathLike[str] | None = None) -> Image.Image:
    """A picture as :func:`upright_rgb` gives it.

    Args:
        file: path, or opened file.
        name: what errors call it; None is the path.

    Raises:
        DataFormatError: it cannot be decoded as a whole.
        OSError: the file cannot be read.
    """
    from PIL import Image, UnidentifiedImageError  # here, because every app of Hydra imports this module

    try:
        with Image.open(file, formats=_PICTURE_FORMATS) as image:
            image.load()
            return upright_rgb(image)
    except Exception as error:  # the decoders raise nearly every kind on garbage
        if isinstance(error, OSError) and error.filename is not None:
            raise
        unknown = isinstance(error, UnidentifiedImageError)  # it names the opened file, not the path
        reason = f"none of {', '.join(_PICTURE_FORMATS)}" if unknown else error
        raise DataFormatError(name or str(file), f"is not a readable picture: {reason}") from None


def upright_rgb(image: Image.Image) -> Image.Image:
    """A picture in RGB, rotated as its EXIF says: alpha is dropped, of 16 bits a channel the upper 8 are taken.

    Raises:
        ValueError: it has other numbers, and which of them is white is unknown.
    """
    from PIL import ImageOps

    if image.mode in ("I", "F"):
        raise ValueError(f"numbers of 8 or 16 bits are expected, got mode {image.mode}")
    with suppress(Exception):  # EXIF that cannot be read rotates nothing
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # Pillow would clip it at 255
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode == "P":  # its transparency would be lost with a warning
        image = image.convert("RGBA")
    return image.convert("RGB")


class MissingExtraError(ImportError):
    """An optional package is not installed; the message says which extra brings it."""


def missing_extra(package: str, extra: str, *, needed_by: str = "this") -> MissingExtraError:
    """The error for a package that is not installed, though a choice of the user needs it.

    Example:
        >>> print(missing_extra("timm", "vision", needed_by="backbone=timm"))
        backbone=timm needs the package timm, which is not installed: pip install "rmd-plugin[vision]", or in a \
checkout pip install -e ".[vision]"
    """
    return MissingExtraError(
        f'{needed_by} needs the package {package}, which is not installed: pip install "rmd-plugin[{extra}]", '
        f'or in a checkout pip install -e ".[{extra}]"',
        name=package,
    )


def require(module: str, extra: str, *, needed_by: str = "this") -> Any:
    """Import an optional module, or raise the error that says which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # a package that is installed but whose own import fails is another story: let it tell it
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise missing_extra(error.name, extra, needed_by=needed_by) from error


def config_path(part: str = "") -> str:
    """Search path of the configs, or of a folder of them: in ``rmd_plugin.conf``, else in the checkout's ``conf``."""
    if find_spec("rmd_plugin.conf") is not None:
        return f"pkg://rmd_plugin.conf{'.' + part if part else ''}"
    return str(Path(__file__).resolve().parents[1] / "conf" / part)


def config_root() -> Path:
    """The folder of the configs."""
    path = config_path()
    return Path(str(files(path.removeprefix("pkg://")))) if path.startswith("pkg://") else Path(path)


def parse_yaml(text: str) -> Any:
    """Content of a YAML text as plain data; nothing in it is executed or resolved. ValueError if it is damaged."""
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:  # of the parser and of OmegaConf, which share no base
        raise ValueError(f"it is not YAML: {error}") from error


def detector_options(choice: str) -> dict[str, dict[str, Any]]:
    """What ``detector=choice`` stands for: by name, the ``_target_`` and options of each detector.

    Example:
        >>> detector_options("msp")
        {'msp': {'_target_': 'pytorch_ood.detector.MaxSoftmax', 't': 1.0}}
    """
    folder = config_root() / "detector"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if choice not in names:
        near = get_close_matches(choice, names) or names
        raise ValueError(f"there is no detector {choice!r}. Did you mean {', '.join(near)}?")
    content = parse_yaml((folder / f"{choice}.yaml").read_text(encoding="utf-8"))
    detectors: dict[str, Any] = {}
    for default in content.pop("defaults", []):
        detectors |= detector_options(default)
    return detectors | content
