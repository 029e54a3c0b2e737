"""Where raw items come from: arrays of images, feature rows, DNA reads, texts, image files, other people's data sets.

A source is an indexable store of raw items that can also feed its content to a hash, so that a benchmark's
fingerprint depends on the data alone and not on file formats or library versions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import functional as vision
from typing_extensions import override

from rmd_plugin.compare.fingerprint import fingerprint

from .errors import DataFormatError

_HASH_ROWS = 4096
Update = Callable[[bytes], None]


class Source(ABC):
    """Indexable raw items with a content hash."""

    #: tensors of this source have passed a transform already, so no other one is put in front of them
    transformed: ClassVar[bool] = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> object: ...

    @abstractmethod
    def feed(self, indices: np.ndarray, update: Update) -> None:
        """Feed the content of the items at ``indices``, shape (N,), to ``update`` of a hash."""


class _Rows(Source):
    """Rows of one array, shape (N, ...)."""

    kind: ClassVar[str]

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def feed(self, indices: np.ndarray, update: Update) -> None:
        update(f"{self.kind} {self.rows.dtype.str} {self.rows.shape[1:]} {len(indices)}\n".encode())
        for start in range(0, len(indices), _HASH_ROWS):
            update(np.ascontiguousarray(self.rows[indices[start : start + _HASH_ROWS]]).tobytes())


class ImageRows(_Rows):
    """Images as PIL pictures, from a uint8 array of shape (N, H, W, 3)."""

    kind = "image"

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.rows[index])


class Reads(_Rows):
    """DNA reads as int64 tensors of base ids, from a uint8 array of shape (N, L)."""

    kind = "read"

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))


class TensorRows(_Rows):
    """Float tensors, from an array of shape (N, ...); converted to ``dtype`` on access."""

    kind = "tensor"

    def __init__(self, rows: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(rows)
        self.dtype = dtype

    def __getitem__(self, index: int) -> Tensor:
        # a copy: rows may be a read-only memory map
        return torch.from_numpy(np.array(self.rows[index])).to(self.dtype)

    @override
    def feed(self, indices: np.ndarray, update: Update) -> None:
        update(f"{self.dtype} ".encode())
        super().feed(indices, update)


class Texts(Source):
    """Strings."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    @override
    def feed(self, indices: np.ndarray, update: Update) -> None:
        update(f"text {len(indices)}\n".encode())
        for index in indices:
            content = self.texts[index].encode()
            update(f"{len(content)}\n".encode() + content)


class ImageFiles(Source):
    """Pictures of any size on disk, scaled and centre-cropped to squares of ``size`` pixels."""

    def __init__(self, paths: Sequence[Path], size: int) -> None:
        self.paths, self.size = list(paths), size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Image.Image:
        try:
            with Image.open(self.paths[index]) as opened:
                image = opened.convert("RGB")
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataFormatError(self.paths[index], f"is not a readable picture: {error}") from None
        cropped: Image.Image = vision.center_crop(vision.resize(image, self.size), self.size)
        return cropped

    @override
    def feed(self, indices: np.ndarray, update: Update) -> None:
        update(f"files {self.size} {len(indices)}\n".encode())
        for index in indices:
            content = self.paths[index].read_bytes()
            update(f"{len(content)}\n".encode() + content)


class DatasetItems(Source):
    """Inputs of a data set of pairs ``(x, label)``, as they come out of it."""

    transformed = True

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> object:
        return self.dataset[index][0]

    @override
    def feed(self, indices: np.ndarray, update: Update) -> None:
        update(f"items {len(indices)}\n".encode())
        for index in indices:
            update(fingerprint(self[int(index)]).encode())
