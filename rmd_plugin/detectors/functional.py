"""Tensor maths of the Gaussian detectors (shrinkage, whitening, quadratic class scores), and how fallbacks are told.

The maths works on plain tensors, and the formulas use the paper's names: features ``z``, labels ``y``, class means
``mu_k``, background mean ``mu_0``, covariances ``Sigma`` (within classes) and ``Sigma_0``.
"""

import re
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

#: packages that stand between the user's line and the detector: a warning is about the user's line
_BETWEEN = {"rmd_plugin", "pytorch_ood", "pytorch_lightning", "lightning", "torchmetrics", "torch", "hydra"}
#: kinds and lines that were warned of, for each list of warning filters (by its id; the list is kept with it)
_warned: dict[int, tuple[object, set[tuple[str, str, int]]]] = {}


#: smallest eigenvalue, relative to the largest, that an eigendecomposition in float64 gives six digits of
_ACCURATE_EIGENVALUE = 1e-10
#: ratio of standard deviations above which features have different units
_WIDE_UNITS = 1e3


class NumericalWarning(UserWarning):
    """A numerical fallback was used; the message says which one and how large it is."""


def warn_numerical(message: str, *, kind: str) -> None:
    """Warn of a numerical fallback at the caller's line, once for each kind and line.

    Detectors are fitted again every epoch, with other numbers in the message, and every ``warnings.catch_warnings`` in
    between makes Python forget what it has shown: so this function remembers it. Filters that say "always" or "error"
    see each warning, and each ``catch_warnings`` block (which may record) sees the first one again. The ``kind`` is
    what stays the same when the fit is repeated.
    """
    frame = _caller()
    module, file, line = str(frame.f_globals.get("__name__")), frame.f_code.co_filename, frame.f_lineno
    if _filter_action(message, module, line) in ("default", "module", "once"):
        filters = warnings.filters  # catch_warnings puts a copy in its place
        if len(_warned) > 100:  # blocks that have long ended
            _warned.clear()
        warned = _warned.setdefault(id(filters), (filters, set()))[1]
        if (kind, file, line) in warned:
            return
        warned.add((kind, file, line))
    warnings.warn_explicit(message, NumericalWarning, file, line, module)


def _caller() -> FrameType:
    """The innermost frame outside of this package and of those that call it back."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    return frame


def _filter_action(message: str, module: str, line: int) -> str:
    """What Python's filters want to be done with a :class:`NumericalWarning`."""
    for action, text, category, where, number in warnings.filters:
        if (
            issubclass(NumericalWarning, category)
            and (text is None or re.match(text, message))
            and (where is None or re.match(where, module))
            and number in (0, line)
        ):
            return action
    return "default"


def listed(names: Iterable[object]) -> str:
    """Names for a message, the first eight of them."""
    names = list(names)
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")


class Whitening(NamedTuple):
    """Directions in which a covariance is the identity, see :func:`whiten`."""

    projection: Tensor  #: A of shape (D, q) with A^T Sigma A = I and A A^T = Sigma^+
    cutoff: float  #: directions of at most this variance were left out


def oas_shrinkage(covariance: Tensor, num_samples: float) -> float:
    """Oracle-approximating intensity in [0, 1] for :func:`shrink` (Chen et al., 2010).

    It needs only the empirical covariance of shape (D, D), divided by N, and N.
    """
    dim = covariance.shape[0]
    scale = covariance.diagonal().mean().square()
    power = covariance.square().mean()
    denominator = (num_samples + 1) * (power - scale / dim)
    # a multiple of the identity has denominator zero: it is its own target, so any intensity will do
    return 1.0 if denominator <= 0 else min(1.0, float((power + scale) / denominator))


def shrink(covariance: Tensor, intensity: float) -> Tensor:
    """Pull a covariance (D, D), or its diagonal (D,), towards the multiple of the identity that has the same trace.

    Intensity 0 leaves it as it is, 1 gives the multiple of the identity.
    """
    if covariance.ndim == 1:
        return torch.lerp(covariance, covariance.mean().expand_as(covariance), intensity)
    shrunk = covariance * (1 - intensity)
    shrunk.diagonal().add_(covariance.diagonal().mean() * intensity)
    return shrunk


def whiten(covariance: Tensor, noise: Tensor | None = None, *, eigenvectors: bool = False) -> Whitening:
    """Directions in which a covariance is the identity; those without variance are left out.

    The distances are those of the (Moore-Penrose) pseudo-inverse Sigma^+ in the features' own units, which is the
    inverse where Sigma is invertible: as in numpy, scikit-learn and OpenOOD, eigenvalues at or below ``D * eps`` times
    the largest one count as zero. Units alone make no matrix singular: where they differ widely, features are scaled to
    unit variance first, and if they are independent then, the inverse is exact.

    Args:
        covariance: symmetric positive semi-definite, shape (D, D), float64.
        noise: features whose variance is at most this are constant, shape (D,). By default those of variance zero.
        eigenvectors: never scale the features, so that the columns are eigenvectors of the covariance in any case.

    Returns:
        The whitening; its columns are eigenvectors by descending eigenvalue, unless the features had to be scaled.
    """
    variances = covariance.diagonal()
    alive = variances > (0.0 if noise is None else noise)
    cutoff = float(variances[~alive].amax()) if not bool(alive.all()) else 0.0
    projection = covariance.new_zeros(len(covariance), 0)
    if bool(alive.any()):
        block, scale = covariance[alive][:, alive], variances[alive].rsqrt()
        inner, smallest, cut = _whiten_block(block)
        # an eigenvalue is right to about eps times the largest one: below 1e-10 of it the sixth digit is lost
        if smallest < _ACCURATE_EIGENVALUE and not eigenvectors and bool(scale.amax() > _WIDE_UNITS * scale.amin()):
            scaled = _whiten_block(scale[:, None] * block * scale)
            if scaled[0].shape[1] == len(block):
                inner, cut = scale[:, None] * scaled[0], 0.0
        if inner.shape[1] < len(block):
            cutoff = max(cutoff, cut)
        projection = covariance.new_zeros(len(covariance), inner.shape[1])
        projection[alive] = inner
    return Whitening(projection, cutoff)


def _whiten_block(covariance: Tensor) -> tuple[Tensor, float, float]:
    """Scaled eigenvectors by descending eigenvalue, the smallest eigenvalue over the largest, and the cut-off."""
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    largest = float(eigenvalues[-1])
    cutoff = len(covariance) * torch.finfo(covariance.dtype).eps * largest
    keep = eigenvalues > cutoff
    eigenvalues, vectors, smallest = eigenvalues[keep].flip(0), vectors[:, keep].flip(1), float(eigenvalues[0])
    return vectors * eigenvalues.rsqrt(), smallest / largest, cutoff


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


def nearest(u: Tensor, points: Tensor, offsets: Tensor) -> Tensor:
    """Place of the class whose :func:`class_quadratics` are smallest, of each sample, shape (B,)."""
    return torch.addmm(offsets, u, points.T, alpha=-2).argmin(dim=1)


def unit_length(z: Tensor) -> Tensor:
    """Features of shape (B, D) scaled to unit length; zeros stay zeros."""
    # squares overflow or vanish far inside the range of a dtype: powers of two bring such samples back
    limit, factor = (1e15, 2.0**-100) if z.dtype == torch.float32 else (1e150, 2.0**-800)
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
    z = z * torch.ones_like(length).masked_fill(length > limit, factor).masked_fill(length < 1 / limit, 1 / factor)
    length = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
    return torch.div(z, length)


def saturated(scores: Tensor, finite: Tensor) -> Tensor:
    """Scores that overflow become the largest number of their dtype; NaN where ``finite`` is NaN or infinite."""
    largest = torch.finfo(scores.dtype).max
    return torch.where(scores.isfinite(), scores, largest) + (finite - finite).to(scores.dtype)


def full_precision(z: Tensor) -> torch.autocast:
    """A block without autocast, which would run matrix products in half precision; part of exported graphs too."""
    return torch.autocast(z.device.type, enabled=False)
