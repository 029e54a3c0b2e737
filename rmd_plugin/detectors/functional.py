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
    is the relative Mahalanobis distance in the coordinates of :func:`rmd_plugin.detectors.gaussian.fit_relative`.

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
