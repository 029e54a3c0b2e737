"""Pure tensor maths of the Gaussian detectors: pooling, shrinkage, whitening, quadratic class scores.

No state and no I/O. Everything here works on plain tensors, and the formulas use the paper's names: features ``z``,
labels ``y``, class means ``mu_k``, background mean ``mu_0``, covariances ``Sigma`` (within classes) and ``Sigma_0``.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class NumericalWarning(UserWarning):
    """A numerical fallback was used; the message says which one and how large it is."""


class Whitening(NamedTuple):
    """Directions in which a covariance is the identity, see :func:`whiten`."""

    projection: Tensor  #: A of shape (D, q) with A^T Sigma A = I
    variances: Tensor  #: eigenvalues that belong to the columns of A, descending, shape (q,)
    cutoff: float  #: directions with an eigenvalue at or below this were left out


def pool_features(z: Tensor) -> Tensor:
    """Bring features to shape (B, D): feature maps are averaged over space.

    Args:
        z: features of shape (B, D) or feature maps of shape (B, C, H, W).

    Returns:
        Features of shape (B, D); for maps D = C.

    Raises:
        ValueError: for any other number of dimensions.
    """
    if z.ndim == 2:
        return z
    if z.ndim == 4:
        return z.mean(dim=(2, 3))
    raise ValueError(
        f"features must have shape (B, D), or (B, C, H, W) to be averaged over space, got {tuple(z.shape)}. "
        "Pool tokens or time steps in the encoder."
    )


def check_features(z: Tensor, num_features: int | None) -> None:
    """Refuse features that are not floating point or whose width is not ``num_features``.

    Args:
        z: features of shape (B, D) or (B, C, H, W).
        num_features: the expected D (or C), None if any width will do.

    Raises:
        TypeError: if the features are not a floating-point tensor.
        ValueError: if their shape does not fit.
    """
    if not isinstance(z, Tensor) or not z.is_floating_point():
        found = z.dtype if isinstance(z, Tensor) else type(z).__name__
        raise TypeError(f"features must be a floating-point tensor, got {found}. Convert them with .float().")
    if z.ndim not in (2, 4):
        pool_features(z)  # raises the error that explains the accepted shapes
    width = z.shape[1]
    if num_features is not None and width != num_features:
        remedy = "Was the detector fitted on another layer?"
        if z.ndim == 2 and num_features and width % num_features == 0:
            remedy = "These look like flattened feature maps: let the encoder average them over space."
        raise ValueError(f"features must have shape (B, {num_features}), got {tuple(z.shape)}. {remedy}")


def check_labels(y: Tensor, num_samples: int) -> None:
    """Refuse labels that are not one integer per sample.

    Args:
        y: class labels of shape (B,); negative labels mark out-of-distribution samples.
        num_samples: B.

    Raises:
        TypeError: if the labels are not an integer tensor.
        ValueError: if there is not exactly one label per sample.
    """
    if not isinstance(y, Tensor) or y.is_floating_point() or y.is_complex():
        found = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(f"labels must be an integer tensor, got {found}. Convert class indices with .long().")
    if y.shape != (num_samples,):
        raise ValueError(f"labels must have shape ({num_samples},), one per sample, got {tuple(y.shape)}.")


def oas_shrinkage(covariance: Tensor, num_samples: float) -> float:
    """Oracle-approximating shrinkage intensity (Chen et al., 2010), which needs the covariance only.

    Args:
        covariance: empirical covariance of shape (D, D), divided by N.
        num_samples: N.

    Returns:
        The intensity in [0, 1] for :func:`shrink`.
    """
    dim = covariance.shape[0]
    scale = covariance.diagonal().mean().square()
    power = covariance.square().mean()
    denominator = (num_samples + 1) * (power - scale / dim)
    # a multiple of the identity has denominator zero: it is its own target, so any intensity will do
    return 1.0 if denominator <= 0 else min(1.0, float((power + scale) / denominator))


def shrink(covariance: Tensor, intensity: float) -> Tensor:
    """Pull a covariance towards the multiple of the identity that has the same trace.

    Args:
        covariance: shape (D, D), or its diagonal of shape (D,).
        intensity: 0 leaves it as it is, 1 gives the multiple of the identity.

    Returns:
        A new tensor of the same shape.
    """
    if covariance.ndim == 1:
        return torch.lerp(covariance, covariance.mean().expand_as(covariance), intensity)
    shrunk = covariance * (1 - intensity)
    shrunk.diagonal().add_(covariance.diagonal().mean() * intensity)
    return shrunk


def whiten(covariance: Tensor, *, equilibrate: bool = False) -> Whitening:
    """Directions in which a covariance is the identity; those without variance are left out.

    Args:
        covariance: symmetric positive semi-definite, shape (D, D), float64.
        equilibrate: scale every feature to unit variance before the eigendecomposition. The result is then exact for
            features of very different scales, but its columns are no longer eigenvectors of the covariance itself.

    Returns:
        The whitening with its columns ordered by descending eigenvalue. It has fewer than D columns where eigenvalues
        are at or below ``D * eps`` times the largest one, the usual cut of a pseudo-inverse.
    """
    dim = covariance.shape[0]
    tolerance = dim * torch.finfo(covariance.dtype).eps
    variances = covariance.diagonal()
    cutoff = tolerance * float(variances.amax()) if dim else 0.0
    if equilibrate:
        alive = variances > cutoff
        scale = torch.where(alive, variances, 1.0).rsqrt() * alive  # dead features get a zero row
        covariance = scale[:, None] * covariance * scale
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        vectors = scale[:, None] * vectors
        keep = eigenvalues > (tolerance * float(eigenvalues[-1]) if dim else 0.0)
    else:
        eigenvalues, vectors = torch.linalg.eigh(covariance)
        cutoff = tolerance * float(eigenvalues[-1]) if dim else 0.0
        keep = eigenvalues > cutoff
    eigenvalues, vectors = eigenvalues[keep].flip(0), vectors[:, keep].flip(1)
    return Whitening(vectors * eigenvalues.rsqrt(), eigenvalues, cutoff)


def class_quadratics(u: Tensor, weights: Tensor, points: Tensor, offsets: Tensor) -> Tensor:
    """Scores ``sum_i a_i u_i^2 - 2 u . m_k + |m_k|^2`` of every sample for every class.

    With unit weights this is the squared distance from ``u`` to the point of class k; with ``a_i = b_i / (1 + b_i)`` it
    is the relative Mahalanobis distance in the coordinates of :func:`rmd_plugin.gaussian.fit_relative`.

    Args:
        u: coordinates of the samples, shape (B, q).
        weights: ``a``, shape (q,).
        points: ``m``, one row per class, shape (K, q).
        offsets: ``|m_k|^2``, shape (K,).

    Returns:
        Scores of shape (B, K).
    """
    return torch.addmm(offsets, u, points.T, alpha=-2) + (u.square() @ weights).unsqueeze(1)


def nearest_quadratic(u: Tensor, weights: Tensor, points: Tensor, offsets: Tensor) -> Tensor:
    """Smallest of the :func:`class_quadratics` of each sample, without a second pass over the (B, K) scores.

    Args:
        u: coordinates of the samples, shape (B, q).
        weights: ``a``, shape (q,).
        points: ``m``, one row per class, shape (K, q).
        offsets: ``|m_k|^2``, shape (K,).

    Returns:
        Scores of shape (B,).
    """
    return torch.addmm(offsets, u, points.T, alpha=-2).amin(dim=1) + u.square() @ weights
