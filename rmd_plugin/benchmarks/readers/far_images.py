"""Far-OOD pictures of 32 x 32 pixels: noise, and data sets that happen to lie in the data folder."""

from pathlib import Path

import numpy as np
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, Textures, TinyImageNetCrop, TinyImageNetResize
from torchvision.datasets import SVHN

from ..errors import ChecksumError
from ..sources import ImageFiles, ImageRows
from ..splits import stream

SIDE = 32
_PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".gif", ".webp"}
_SVHN_FILE = SVHN.split_list["test"][1]
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
    **{name: " or ".join(folders) for name, folders in _FOLDERS.items()},
}


def load_far_set(name: str, folder: Path, *, seed: int) -> ImageRows | ImageFiles | None:
    """One of :data:`FAR_SETS`, pictures scaled and cropped to size; None if it is not there. Nothing is downloaded."""
    shape = (_NOISE_IMAGES, SIDE, SIDE, 3)
    if name == "GaussianNoise":
        # mean and deviation as in the framework's set of that name, which draws anew on every access
        noise = stream(seed, "far", name).normal(128, 128, size=shape)
        return ImageRows(np.clip(noise, 0, 255).astype(np.uint8))
    if name == "UniformNoise":
        return ImageRows(stream(seed, "far", name).integers(0, 256, size=shape, dtype=np.uint8))
    if name == "SVHN":
        found = [root for root in (folder, folder / "svhn") if (root / _SVHN_FILE).is_file()]
        return ImageRows(_read_svhn(found[0])) if found else None
    for place in _FOLDERS[name]:
        pictures = sorted(path for path in (folder / place).rglob("*") if path.suffix.lower() in _PICTURES)
        if pictures:
            return ImageFiles(pictures, SIDE)
    return None


def _read_svhn(root: Path) -> np.ndarray:
    try:
        images = SVHN(str(root), split="test").data
    except RuntimeError:  # torchvision compares the md5 first
        raise ChecksumError(root / _SVHN_FILE, "its md5 is not the published one. Fetch the file again.") from None
    return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
