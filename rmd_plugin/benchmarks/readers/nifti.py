"""NIfTI-1 volumes of medical scanners, of which one slice is read as a picture."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from rmd_plugin.untrusted import check_regular, check_size

from ..errors import DataFormatError

_HEADER = 348
# code in the header -> numpy's name
_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}
# of what is unpacked up to the slice; a scan of 512 x 512 x 512 voxels has 1 GiB in float64
_MAX_BYTES = 1 << 30


def central_slice(path: str | Path) -> Image.Image:
    """The middle slice along the third axis of a volume ``.nii`` or ``.nii.gz``, from its least to its largest value.

    Raises:
        DataFormatError: if it is no NIfTI-1 file of one volume of real numbers, is cut off, or is too large.
    """
    check_regular(path)
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rb") as file:
            header = file.read(_HEADER)
            if len(header) < _HEADER or header[344:347] != b"n+1":
                raise DataFormatError(path, "is not a NIfTI-1 file with header and volume in one")
            order = "<" if struct.unpack_from("<i", header)[0] == _HEADER else ">"
            axes, *shape = struct.unpack_from(f"{order}8h", header, 40)
            (code,) = struct.unpack_from(f"{order}h", header, 70)
            (start,) = struct.unpack_from(f"{order}f", header, 108)
            wanted = f"{shape[:axes]} voxels of type {code}"
            if axes < 3 or min(shape[:axes]) < 1 or math.prod(shape[3:axes]) != 1 or code not in _TYPES:
                raise DataFormatError(path, f"holds {wanted}; one volume of real numbers is expected")
            if not _HEADER <= start < _MAX_BYTES:
                raise DataFormatError(path, f"its volume begins at byte {start}, expected {_HEADER} or later")
            kind = np.dtype(order + _TYPES[code])
            width, height, depth = shape[:3]
            size = width * height * kind.itemsize
            before = int(start) + depth // 2 * size
            check_size(path, before + size, _MAX_BYTES)
            file.seek(before)
            content = file.read(size)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataFormatError(path, f"cannot be unpacked: {error}") from None
    if len(content) < size:
        raise DataFormatError(path, f"is cut off: the middle slice has {len(content)} of {size} bytes")
    # the first axis runs fastest; a slope in the header changes nothing that scaling to 0..255 would leave
    values = np.frombuffer(content, kind).reshape(height, width).astype(np.float64)
    if not np.isfinite(values).all():
        raise DataFormatError(path, "its middle slice holds NaN or infinity")
    values -= values.min()
    return Image.fromarray(np.rint(255 * values / (values.max() or 1.0)).astype(np.uint8))
