"""Where raw items come from: arrays of images, feature rows, DNA reads, texts, image files, other people's data sets.

A source is an indexable store of raw items that can also feed its content to a hash, so that a benchmark's
fingerprint depends on the data alone and not on file formats or library versions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from PIL import Image
from pytorch_ood.dataset.img import ImageListDataset
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import functional as vision

from rmd_plugin.compare.fingerprint import fingerprint
from rmd_plugin.pictures import read_content, read_picture
from rmd_plugin.tables import Layout

_HASH_ROWS = 4096
Items = TypeVar("Items")


class Source(ABC, Generic[Items]):
    """Indexable raw items with a content hash."""

    #: tensors of this source have passed a transform already, so no other one is put in front of them
    transformed: ClassVar[bool] = False

    def __init__(self, items: Items) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    @abstractmethod
    def __getitem__(self, index: int) -> object: ...

    @abstractmethod
    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]: ...

    def feed(self, indices: np.ndarray, update: Callable[[bytes], None]) -> None:
        """Feed the content of the items at ``indices``, shape (N,), to ``update`` of a hash."""
        for chunk in self._chunks(indices):
            update(chunk)


class _Rows(Source[np.ndarray]):
    """Rows of one array, shape (N, ...)."""

    kind: ClassVar[str]

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        yield f"{self.kind} {self.items.dtype.str} {self.items.shape[1:]} {len(indices)}\n".encode()
        for start in range(0, len(indices), _HASH_ROWS):
            yield self.items[indices[start : start + _HASH_ROWS]].tobytes()


class ImageRows(_Rows):
    """Images as PIL pictures, from a uint8 array of shape (N, H, W, 3).

    Example:
        >>> import numpy as np
        >>> ImageRows(np.zeros((5, 32, 32, 3), np.uint8))[0].size
        (32, 32)
    """

    kind = "image"

    def __getitem__(self, index: int) -> Image.Image:
        return Image.fromarray(self.items[index])


class Reads(_Rows):
    """DNA reads as int64 tensors of base ids, from a uint8 array of shape (N, L)."""

    kind = "read"

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.items[index].astype(np.int64))


class TensorRows(_Rows):
    """Float tensors, from an array of shape (N, ...); converted to ``dtype`` on access.

    Example:
        >>> import numpy as np
        >>> TensorRows(np.eye(3, dtype=np.float32))[1]
        tensor([0., 1., 0.])
    """

    kind = "tensor"

    def __init__(self, rows: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(rows)
        self.dtype = dtype

    def __getitem__(self, index: int) -> Tensor:
        # a copy: rows may be a read-only memory map
        return torch.from_numpy(np.array(self.items[index])).to(self.dtype)

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        yield f"{self.dtype} ".encode()
        yield from super()._chunks(indices)


class MappedRows(Source[Layout]):
    """Float tensors of shape (D,), from numbers in files that are mapped into memory when the first one is used.

    Pickled by the paths: a mapped array of numpy's would be sent to a worker process as a whole.
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._ends = np.cumsum([piece.rows for piece in layout.pieces], dtype=np.int64)
        self._views: dict[str | int, np.ndarray] = {}  # of whole files by path, and of the pieces in them by number

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}

    def __getitem__(self, index: int) -> Tensor:
        place = int(np.searchsorted(self._ends, index, side="right"))
        row = index - int(self._ends[place]) + self.items.pieces[place].rows
        return torch.from_numpy(self._view(place)[row].astype(np.float32))  # a copy

    def _take(self, indices: np.ndarray) -> np.ndarray:
        """Copies of some rows, shape (B, D), float32."""
        rows = np.empty((len(indices), self.items.width), dtype="<f4")
        places = np.searchsorted(self._ends, indices, side="right")
        for place in np.unique(places):
            mine = np.flatnonzero(places == place)
            first = self._ends[place] - self.items.pieces[place].rows
            rows[mine] = self._view(int(place))[indices[mine] - first]
        return rows

    def _view(self, place: int) -> np.ndarray:
        if place not in self._views:
            path, offset, rows = self.items.pieces[place]
            if path not in self._views:
                self._views[path] = np.memmap(path, np.uint8, "r")
            dtype = np.dtype(self.items.dtype)
            self._views[place] = np.ndarray((rows, self.items.width), dtype, self._views[path], offset)
        return self._views[place]

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        # as TensorRows of the same numbers, whatever the files are
        yield f"torch.float32 tensor <f4 {(self.items.width,)} {len(indices)}\n".encode()
        for start in range(0, len(indices), _HASH_ROWS):
            yield self._take(indices[start : start + _HASH_ROWS]).tobytes()


class Texts(Source[Sequence[str]]):
    """Strings.

    Example:
        >>> Texts(["no light", "page is slow"])[1]
        'page is slow'
    """

    def __getitem__(self, index: int) -> str:
        return self.items[index]

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        yield f"text {len(indices)}\n".encode()
        for index in indices:
            content = self.items[index].encode()
            yield f"{len(content)}\n".encode() + content


class ImageFiles(Source[Sequence[str | Path]]):
    """Pictures on disk, in RGB; see :mod:`rmd_plugin.pictures` for what becomes of each kind.

    Args:
        paths: the files.
        size: scale and centre-crop to squares of so many pixels; None leaves every picture as it is.
    """

    def __init__(self, paths: Sequence[str | Path], size: int | None = None) -> None:
        super().__init__(paths)
        self.size = size

    def __getitem__(self, index: int) -> Image.Image:
        image = read_picture(self.items[index])
        if self.size is None:
            return image
        cropped: Image.Image = vision.center_crop(vision.resize(image, self.size), self.size)
        return cropped

    def content(self, index: int) -> tuple[bytes, str | Path]:
        """The bytes of a file, and its name."""
        return read_content(self.items[index]), self.items[index]

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        yield f"files {self.size} {len(indices)}\n".encode()
        for index in indices:
            content, _ = self.content(index)
            yield f"{len(content)}\n".encode() + content


class DatasetItems(Source[Dataset[Any]]):
    """Inputs of a data set of pairs ``(x, label)``, as they come out of it."""

    transformed = True

    def __getitem__(self, index: int) -> object:
        return self.items[index][0]

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        yield f"items {len(indices)}\n".encode()
        for index in indices:
            yield fingerprint(self[int(index)]).encode()


class Pictures(DatasetItems):
    """Pictures of a data set of pairs, as PIL images in RGB whatever it gives: PIL images, arrays or tensors.

    Args:
        dataset: the data set, without a transform of its own.
        size: scale and centre-crop to squares of so many pixels; None leaves their size.
    """

    transformed = False

    def __init__(self, dataset: Dataset[Any], size: int | None = None) -> None:
        super().__init__(dataset)
        self.size = size

    def __getitem__(self, index: int) -> Image.Image:
        item = super().__getitem__(index)
        image = (item if isinstance(item, Image.Image) else vision.to_pil_image(item)).convert("RGB")
        return image if self.size is None else vision.center_crop(vision.resize(image, self.size), self.size)

    def _chunks(self, indices: np.ndarray) -> Iterator[bytes]:
        paths = _listed_files(self.items)
        if paths is None:
            yield from super()._chunks(indices)
        else:  # reading is many times faster than decoding, and ImageNet has a million
            yield from ImageFiles([Path(path) for path in paths], self.size or 0)._chunks(indices)


def _listed_files(dataset: Any) -> Sequence[str] | None:
    """Paths of all pictures of those data sets of the framework that list them, in order."""
    if isinstance(dataset, ImageListDataset):
        return dataset.files
    pairs = getattr(dataset, "data", None)  # of files and labels
    return [path for path, _ in pairs] if isinstance(pairs, list) else None
