"""What features and labels must look like, and how feature maps become features."""

import math

import numpy as np
import torch
from torch import Tensor

#: numbers of a feature map that are widened at a time
_WIDENED_NUMBERS = 2**22


def widened(z: Tensor) -> Tensor:
    """Half precision as float32: numpy has no bfloat16, and covariances would be lost. Other types stay."""
    return z.float() if z.is_floating_point() and torch.finfo(z.dtype).bits < 32 else z


def pool_features(z: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bring features to shape (B, D): maps of shape (B, C, H, W) are averaged over space.

    A mean has more digits than what it is taken of: that of half precision is float32, or of the ``dtype`` that is
    given. Features (B, D) stay as they are.
    """
    if z.ndim == 2:
        return z
    if z.ndim == 4:
        if z.shape[1] == z.shape[2] < z.shape[3]:
            raise ValueError(
                f"features of shape {tuple(z.shape)} look like maps (B, H, W, C), but expected are (B, D), or maps "
                "(B, C, H, W) to be averaged over space. Average or permute them in the encoder."
            )
        wide = dtype or widened(z[:0]).dtype
        if wide == z.dtype:
            return z.mean(dim=(2, 3))
        # torch widens a copy of all that it is given at once
        rows = max(1, _WIDENED_NUMBERS // max(1, math.prod(z.shape[1:])))
        return torch.cat([part.mean(dim=(2, 3), dtype=wide) for part in z.split(rows)])
    raise ValueError(
        f"features must have shape (B, D), or (B, C, H, W) to be averaged over space, got {tuple(z.shape)}. "
        "Pool tokens or time steps in the encoder."
    )


def check_features(z: Tensor, num_features: int | None) -> None:
    """Refuse features that are not floating point or whose width is not ``num_features``, if that is given."""
    if not isinstance(z, Tensor) or not z.is_floating_point():
        raise TypeError(f"features must be a floating-point tensor, {_found(z, 'z', 'float')}")
    if z.ndim not in (2, 4):
        pool_features(z)  # raises the error that explains the accepted shapes
    width = z.shape[1]
    if num_features is not None and width != num_features:
        remedy = "Was the detector fitted on another layer?"
        if z.ndim == 2 and num_features and width % num_features == 0:
            remedy = "These look like flattened feature maps: let the encoder average them over space."
        raise ValueError(f"features must have shape (B, {num_features}), got {tuple(z.shape)}. {remedy}")


def check_labels(y: Tensor, num_samples: int) -> Tensor:
    """Labels as int64; refuse those that are not one integer for each of ``num_samples`` samples.

    Floating-point labels are accepted where every one is integral, as pytorch-ood accepts them.
    """
    kinds = "labels must be integers (of an integer type, or integral floating-point numbers)"
    if not isinstance(y, Tensor) or y.is_complex():
        raise TypeError(f"{kinds}, {_found(y, 'y', 'long')}")
    if y.shape != (num_samples,):
        raise ValueError(f"labels must have shape ({num_samples},), one per sample, got {tuple(y.shape)}.")
    labels = y.long()
    if y.is_floating_point() and not torch.equal(y, labels.to(y.dtype)):
        wrong = y[y != labels.to(y.dtype)][0].item()
        raise TypeError(f"{kinds}, got {y.dtype} with the value {wrong:g}. Are these the targets of a regression?")
    return labels


def _found(value: object, name: str, method: str) -> str:
    """What came instead of a tensor of the right dtype, and how to make one of it."""
    if isinstance(value, Tensor):
        return f"got {value.dtype}. Convert it with {name}.{method}()."
    make = "torch.from_numpy" if isinstance(value, np.ndarray) else "torch.tensor"
    return f"got {type(value).__name__}. Convert it with {make}({name}).{method}()."
