"""Pictures that somebody else made: one way to read them, with one result for every kind of file.

==================  =================================================================================================
kind                result
==================  =================================================================================================
grey, palette       RGB; a palette's transparency is dropped
alpha               dropped, as torchvision does: the colours below it stay
CMYK, YCbCr, Lab    RGB by Pillow
16 bits a channel   the upper 8 of them
32-bit numbers      refused, unless they are whole numbers of 16 bits: nobody says what is white
EXIF rotation       applied
animated            the first frame
truncated, bombs    refused with :class:`DataFormatError`
==================  =================================================================================================
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from rmd_plugin.untrusted import DataFormatError, check_size, read_bytes

#: endings of files that are taken for pictures in a folder, those of torchvision's ImageFolder
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: of a file, and of what it unpacks to, in bytes: 89 million pixels, where Pillow begins to warn
_MAX_FILE = _MAX_PIXELS = 1 << 28


def is_picture(path: str | os.PathLike[str]) -> bool:
    """Whether a file is taken for a picture, by the ending of its name."""
    return os.fspath(path).lower().endswith(EXTENSIONS)


def read_picture(path: str | os.PathLike[str]) -> Image.Image:
    """A picture in RGB, upright; the table above says what becomes of each kind.

    Raises:
        DataFormatError: if it cannot be decoded as a whole, or is larger than ``RMD_MAX_GIB`` and Pillow allow.
        OSError: if the file cannot be read.
    """
    return decode_picture(read_bytes(path, _MAX_FILE), path)


def decode_picture(content: bytes, path: str | os.PathLike[str] = "the picture") -> Image.Image:
    """The same from the content of a file; ``path`` names it in errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are looked at here, and metadata, which is not used
            # from memory: a chunk that claims a gigabyte would be given one
            with Image.open(io.BytesIO(content)) as opened:
                check_size(path, 3 * opened.width * opened.height, _MAX_PIXELS)
                opened.load()
                return upright_rgb(opened)
    except DataFormatError:
        raise
    except Exception as error:  # the decoders raise nearly every kind on garbage
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataFormatError(Path(path), f"is not a readable picture: {reason}") from None


def upright_rgb(image: Image.Image) -> Image.Image:
    """A picture that was opened elsewhere, by the same rules."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "P":  # its transparency would be lost with a warning
        image = image.convert("RGBA")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.size and not 0 <= values.min() <= values.max() < 1 << 16:
            raise ValueError(f"whole numbers from {values.min()} to {values.max()}; 8 or 16 bits are expected")
        image = Image.fromarray((values.astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("32-bit floating-point numbers; 8 or 16 bits are expected")
    return image.convert("RGB")
