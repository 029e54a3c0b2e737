"""Far-OOD pictures for small-image benchmarks: noise, and data sets that happen to lie in the data folder."""

from pathlib import Path

import numpy as np
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, Textures, TinyImageNetCrop, TinyImageNetResize
from torchvision.datasets import SVHN

from .errors import DataFormatError
from .files import check_hash
from .sources import ImageFiles, ImageRows
from .splits import stream

_PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".gif", ".webp"}
_SVHN_FILE, _SVHN_MD5 = SVHN.split_list["test"][1:]
_NOISE_IMAGES = 1000
# folders in which the framework unpacks its data sets
_FOLDERS = {
    "Textures": [Textures.base_folder, "dtd/dtd/images"],  # the second one is torchvision's DTD
    "LSUNCrop": [LSUNCrop.base_folder],
    "LSUNResize": [LSUNResize.base_folder],
    "TinyImageNetCrop": [TinyImageNetCrop.base_folder],
    "TinyImageNetResize": [TinyImageNetResize.base_folder],
}

#: far-OOD set -> where it is looked for in the data folder
FAR_SETS: dict[str, str] = {
    "GaussianNoise": "nothing, it is generated",
    "UniformNoise": "nothing, it is generated",
    "SVHN": f"{_SVHN_FILE} or svhn/{_SVHN_FILE}",
    **{name: " or ".join(places) for name, places in _FOLDERS.items()},
}


def load_far_set(name: str, folder: Path, *, size: int, seed: int) -> ImageRows | ImageFiles | None:
    """A far-OOD set of RGB pictures of ``size`` x ``size`` pixels.

    Args:
        name: one of :data:`FAR_SETS`.
        folder: the data folder.
        size: side of the pictures; larger ones are scaled and centre-cropped.
        seed: seed of the noise.

    Returns:
        The pictures, or None if they are not in the folder. Nothing is ever downloaded.
    """
    if name not in FAR_SETS:
        raise ValueError(f"far-OOD set {name!r} is not known; known are {', '.join(FAR_SETS)}")
    shape = (_NOISE_IMAGES, size, size, 3)
    if name == "GaussianNoise":
        # mean and deviation as in the framework's set of that name, which draws anew on every access
        noise = stream(seed, "far", name).normal(128, 128, size=shape)
        return ImageRows(np.clip(noise, 0, 255).astype(np.uint8))
    if name == "UniformNoise":
        return ImageRows(stream(seed, "far", name).integers(0, 256, size=shape, dtype=np.uint8))
    if name == "SVHN":
        for path in (folder / _SVHN_FILE, folder / "svhn" / _SVHN_FILE):
            if path.is_file():
                return ImageRows(_read_svhn(path, size))
        return None
    for place in _FOLDERS[name]:
        pictures = sorted(path for path in (folder / place).rglob("*") if path.suffix.lower() in _PICTURES)
        if pictures:
            return ImageFiles(pictures, size)
    return None


def _read_svhn(path: Path, size: int) -> np.ndarray:
    from scipy.io import loadmat

    check_hash(path, _SVHN_MD5, "md5")
    images = loadmat(path, variable_names=["X"])["X"]
    if images.dtype != np.uint8 or images.shape[:3] != (size, size, 3):
        raise DataFormatError(path, f"'X' must be uint8 of shape ({size}, {size}, 3, N), got {images.shape}")
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2))
