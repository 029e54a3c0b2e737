"""Pictures that somebody else made: one way to read them, with one result for every kind of file.

==================  =================================================================================================
kind                result
==================  =================================================================================================
grey, palette       RGB; a palette's transparency is dropped
alpha               dropped, as torchvision does: the colours below it stay
CMYK, YCbCr, Lab    RGB by Pillow
16 bits a channel   the upper 8 of them
other numbers       refused (12, signed 16, 32 bits): nobody says what is white
EXIF rotation       applied; EXIF that cannot be read rotates nothing
animated            the first frame
truncated, bombs    refused, and so are strips longer than 100 times their width, which a resize makes huge
other formats       refused, whatever the ending says: one of them starts a program
==================  =================================================================================================
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm.auto import tqdm

from rmd_plugin.untrusted import DataFormatError, check_size, read_bytes

#: endings of files that are taken for pictures in a folder, those of torchvision's ImageFolder
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: of a file, and of what it unpacks to, in bytes: 89 million pixels, where Pillow begins to warn
_MAX_FILE = _MAX_PIXELS = 1 << 28
_LONGEST_STRIP = 100
_BLOCK = 32  # pictures that a thread checks at once
# those of the endings, and GIF, which is often found under them; EPS would be handed to Ghostscript
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
_BITS, _NUMBERS = 258, 339  # tags of TIFF: BitsPerSample and SampleFormat


def is_picture(path: str | os.PathLike[str]) -> bool:
    """Whether a file is taken for a picture, by the ending of its name."""
    return os.fspath(path).lower().endswith(EXTENSIONS)


def read_picture(path: str | os.PathLike[str]) -> Image.Image:
    """A picture in RGB, upright; the table above says what becomes of each kind.

    Raises:
        DataFormatError: if it cannot be decoded as a whole, or is larger than ``RMD_MAX_GIB`` and Pillow allow.
        OSError: if the file cannot be read.
    """
    return decode_picture(read_content(path), path)


def read_content(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file that may be a picture, of limited size."""
    return read_bytes(path, _MAX_FILE)


def decode_picture(content: bytes, path: str | os.PathLike[str] = "the picture") -> Image.Image:
    """The same from the content of a file; ``path`` names it in errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes, which are looked at here, and metadata, which is not used
        return _decode(content, path)


def bad_pictures(count: int, read: Callable[[int], tuple[bytes, str | os.PathLike[str]]]) -> dict[int, str]:
    """Which of many pictures :func:`decode_picture` would refuse, or cannot be read, each with the reason.

    All are decoded, on as many threads as there are processors and behind a bar on a terminal; JPEG to the last byte,
    but at an eighth of its size, which takes a half to a fifth of the time.

    Args:
        count: number of pictures.
        read: content and name of the one at an index.
    """

    def check(start: int) -> dict[int, str]:
        found = {}
        for index in range(start, min(start + _BLOCK, count)):
            try:
                content, path = read(index)
                _decode(content, path, small=True)
            except (DataFormatError, OSError) as error:
                found[index] = str(error)
        return found

    pool = ThreadPoolExecutor(os.cpu_count())
    bad: dict[int, str] = {}
    try:
        # once for all threads: the filters of warnings are those of the process
        with warnings.catch_warnings(), tqdm(total=count, desc="check pictures", leave=False, disable=None) as bar:
            warnings.simplefilter("ignore")
            for found in pool.map(check, range(0, count, _BLOCK)):
                bad |= found
                bar.update(_BLOCK)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the rest
    return bad


def _decode(content: bytes, path: str | os.PathLike[str], *, small: bool = False) -> Image.Image:
    try:
        # from memory: a chunk that claims a gigabyte would be given one
        with Image.open(io.BytesIO(content), formats=_FORMATS) as opened:
            check_size(path, 3 * opened.width * opened.height, _MAX_PIXELS)
            if max(opened.size) > _LONGEST_STRIP * min(opened.size):
                raise ValueError(f"a strip of {opened.width} x {opened.height} pixels")
            if small:
                opened.draft("RGB", (max(1, opened.width // 8), max(1, opened.height // 8)))
            opened.load()
            return upright_rgb(opened)
    except DataFormatError:
        raise
    except Exception as error:  # the decoders raise nearly every kind on garbage
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"none of {', '.join(_FORMATS)}"
        raise DataFormatError(Path(path), f"is not a readable picture: {reason}") from None


def upright_rgb(image: Image.Image) -> Image.Image:
    """A picture that was opened already, in RGB and upright; ValueError if nobody says what is white."""
    _check_numbers(image)
    return _as_rgb(_upright(image))


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # its parser raises nearly every kind; the pixels are whole
        return image


def _check_numbers(image: Image.Image) -> None:
    """Refuse whole numbers whose white is unknown; only TIFF has others than of 16 bits, and says so."""
    tags = getattr(image, "tag_v2", {})
    bits, numbers = tags.get(_BITS, (16,)), tags.get(_NUMBERS, (1,))
    if image.mode == "F" or (image.mode.startswith("I") and (bits, numbers) != ((16,), (1,))):
        kind = {"F": "floating-point "}.get(image.mode, "signed " if numbers == (2,) else "")
        raise ValueError(f"{kind}numbers of {bits[0]} bits; 8 or 16 are expected")


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "P":  # its transparency would be lost with a warning
        image = image.convert("RGBA")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    return image.convert("RGB")
