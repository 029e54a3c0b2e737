"""Where raw items come from: arrays of images, feature rows, texts, DNA reads, image files.

A source is an indexable store of raw items that can also feed its content to a hash, so that a benchmark's
fingerprint depends on the data alone and not on file formats or library versions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from .errors import DataFormatError

_HASH_ROWS = 4096


class Hash(Protocol):
    """The part of a hashlib object that sources need."""

    def update(self, data: bytes, /) -> None:
        """Take in more bytes."""


class Source(Protocol):
    """Indexable raw items with a content hash."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...

    def feed(self, indices: np.ndarray, into: Hash) -> None:
        """Feed the content of the items at ``indices``, shape (N,), into a hash."""


def _feed_rows(kind: str, rows: np.ndarray, indices: np.ndarray, into: Hash) -> None:
    into.update(f"{kind} {rows.dtype.str} {rows.shape[1:]} {len(indices)}\n".encode())
    for start in range(0, len(indices), _HASH_ROWS):
        into.update(np.ascontiguousarray(rows[indices[start : start + _HASH_ROWS]]).tobytes())


class ImageRows:
    """Images as PIL pictures, from a uint8 array of shape (N, H, W, 3)."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index])

    def feed(self, indices: np.ndarray, into: Hash) -> None:
        """Feed pixels into a hash."""
        _feed_rows("image", self.images, indices, into)


class TensorRows:
    """Float tensors, from an array of shape (N, ...); converted to ``dtype`` on access."""

    def __init__(self, rows: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
        self.rows = rows
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        # a copy: rows may be a read-only memory map
        return torch.from_numpy(np.array(self.rows[index])).to(self.dtype)

    def feed(self, indices: np.ndarray, into: Hash) -> None:
        """Feed values into a hash."""
        into.update(f"{self.dtype} ".encode())
        _feed_rows("tensor", self.rows, indices, into)


class Reads:
    """DNA reads as int64 tensors of base ids, from a uint8 array of shape (N, L)."""

    def __init__(self, reads: np.ndarray) -> None:
        self.reads = reads

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.reads[index].astype(np.int64))

    def feed(self, indices: np.ndarray, into: Hash) -> None:
        """Feed bases into a hash."""
        _feed_rows("read", self.reads, indices, into)


class Texts:
    """Strings."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    def feed(self, indices: np.ndarray, into: Hash) -> None:
        """Feed UTF-8 bytes with their lengths into a hash."""
        into.update(f"text {len(indices)}\n".encode())
        for index in indices:
            content = self.texts[index].encode()
            into.update(f"{len(content)}\n".encode() + content)


class ImageFiles:
    """Pictures of any size on disk, scaled and centre-cropped to a square.

    Args:
        paths: the files, in a stable order.
        size: side of the square, in pixels.
    """

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self.paths = list(paths)
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image.Image:
        path = self.paths[index]
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataFormatError(path, f"is not a readable picture: {error}") from None
        if image.size == (self.size, self.size):
            return image
        width, height = image.size
        scale = self.size / min(width, height)
        width, height = max(self.size, round(width * scale)), max(self.size, round(height * scale))
        left, top = (width - self.size) // 2, (height - self.size) // 2
        scaled = image.resize((width, height), Image.Resampling.BILINEAR)
        return scaled.crop((left, top, left + self.size, top + self.size))

    def feed(self, indices: np.ndarray, into: Hash) -> None:
        """Feed the files' bytes into a hash."""
        into.update(f"files {self.size} {len(indices)}\n".encode())
        for index in indices:
            content = self.paths[index].read_bytes()
            into.update(f"{len(content)}\n".encode() + content)
