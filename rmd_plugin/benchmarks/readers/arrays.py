"""Arrays and tensors of npy and pt files. Nothing here unpickles a Python object."""

import os
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rmd_plugin.npz import brief, check_header
from rmd_plugin.untrusted import load_tensors

from ..errors import DataFormatError

# tensors of 32 GiB do not belong into one file
_MAX_BYTES = 1 << 35


def read_npy(path: str | Path) -> np.ndarray:
    """Array of an npy file, mapped into memory read-only."""
    with open(path, "rb") as stream:
        check_header(stream, os.path.getsize(path), path, "the file")
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:
        raise DataFormatError(path, f"cannot be read: {brief(error)}") from None
    return array


def read_pt(path: str | Path) -> dict[str, Tensor]:
    """Dictionary of tensors of a ``torch.save`` file, loaded with ``weights_only=True``."""
    if not Path(path).is_file():
        raise FileNotFoundError(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = load_tensors(path, _MAX_BYTES)
    except DataFormatError:
        raise
    except Exception:  # torch's legacy reader raises nearly every kind on garbage
        raise DataFormatError(
            path, "is damaged, or holds more than tensors, and torch.load(weights_only=True) refuses it"
        ) from None
    if not isinstance(loaded, dict):
        raise DataFormatError(path, f"holds a {type(loaded).__name__}; a dict of tensors is expected")
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise DataFormatError(path, f"entry {key!r} is a {type(value).__name__}; a tensor is expected")
        if value.layout != torch.strided or value.device.type != "cpu":
            raise DataFormatError(
                path, f"entry {key!r} is a {value.layout} tensor on {value.device}; a plain one is expected"
            )
        # a stride of 0 makes a few bytes look like any size, until the first copy
        if value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise DataFormatError(
                path, f"entry {key!r} of shape {tuple(value.shape)} is larger than what the file holds"
            )
    return dict(loaded)
