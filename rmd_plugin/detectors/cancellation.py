"""What a subtraction leaves of a scatter matrix: whether it is one, and how many of its digits are left.

Sums in float64 are right to about eps times their size, and so is a difference of them, however small it is. So
everything here is measured in units of what was subtracted from. A direction in which no more than rounding remains
counts as one without variance: as a variance of 1e-16 it would decide every score.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmd_plugin.detectors.functional import warn_numerical

#: of a variance: fewer right digits than these are warned of
_DIGITS = 6
#: share of what was taken away that may be wrong: float32 features that were computed anew differ by about 1e-7
_MAX_MISMATCH = 1e-3
#: a variance of which so much is left has lost no digit
_LARGE_SHARE = 0.1


def never_added(what: str) -> ValueError:
    """The error about samples that are taken away but cannot be part of what they are taken from."""
    return ValueError(
        f"{what}: these samples were not all added before. Take away what was added, with the same features and labels."
    )


def remaining_scatter(after: Tensor, before: Tensor, size: Tensor, samples: int, freedom: int) -> Tensor:
    """The within-class scatter that is left after a subtraction, without directions of nothing but rounding.

    Args:
        after: the difference, as it was computed, shape (D, D), or its diagonal, shape (D,).
        before: what was subtracted from, of the same shape.
        size: second moments of the features before, shape (D,): rounding errors are eps times these.
        samples: how many there were before.
        freedom: samples minus classes that are left, the largest rank that the scatter can have.

    Raises:
        ValueError: if the difference is not positive semi-definite, or has no digit left.
    """
    dim, scale = len(size), torch.where(size > 0, size, 1.0).rsqrt()
    units = scale.square() if after.ndim == 1 else torch.outer(scale, scale)
    # the errors of sums grow as the square root of the number of terms
    scaled, rounding = after * units, (max(64, dim) + samples**0.5) * torch.finfo(after.dtype).eps
    rank = min(dim, freedom) if after.ndim == 2 else dim * (freedom > 0)
    if rank == dim and _above(scaled, rounding * 10**_DIGITS, size):  # the usual case, which costs little
        return after
    shares, vectors = (scaled, None) if after.ndim == 1 else torch.linalg.eigh(scaled)
    taken = (before - after) * units
    decrease = float(taken.amax() if taken.ndim == 1 else taken.diagonal().sum())
    # no variance is negative, and no more of them than the rank are positive: what is beyond shows how large errors are
    excess = [-shares.amin(), *([shares.sort(descending=True).values[rank]] if rank < dim else [])]
    wrong = max(map(float, excess))
    if wrong > max(rounding, _MAX_MISMATCH * decrease):
        found = wrong / max(decrease, rounding)
        raise never_added(f"variances would be left that no samples have, wrong by {found:.2g} of what was taken away")
    if wrong > rounding:
        warn_numerical(
            f"the samples taken away differ from those added by about {wrong / decrease:.1g} of their variance, as "
            "features do that were computed anew. Directions of no more variance than that count as empty.",
            kind="samples taken away differ",
        )
    # errors of one sign are about as large as those of the other
    floor = max(rounding, 4 * wrong)
    kept = shares > floor
    earlier = before * units if vectors is None else ((before * units) @ vectors * vectors).sum(0)
    _tell_losses(shares, earlier, kept, floor, rank)
    if bool(kept.all()):
        return after
    clean: Tensor = shares * kept if vectors is None else (vectors * (shares * kept)) @ vectors.T
    return clean / units


def _above(scaled: Tensor, limit: float, size: Tensor) -> bool:
    """Whether all eigenvalues are above a limit, but those of features that are constant."""
    if scaled.ndim == 1:
        return bool(((scaled > limit) | (size == 0)).all())
    lowered = scaled.clone()
    lowered.diagonal().sub_(limit)
    lowered.diagonal()[size == 0] = 1.0
    return int(torch.linalg.cholesky_ex(lowered).info) == 0


def _tell_losses(shares: Tensor, earlier: Tensor, kept: Tensor, floor: float, rank: int) -> None:
    """Warn of digits that are lost, and refuse what has none left.

    Args:
        shares: what is left along each direction, shape (D,).
        earlier: what was there, shape (D,).
        kept: directions in which there is more than rounding, shape (D,).
        floor: the size of rounding.
        rank: directions that can have variance.
    """
    remedy = "Fit again on the samples that remain."
    number = int(kept.sum())
    if rank and not number:
        raise ValueError(
            f"nothing is left of the variance within the classes: it was cancelled to {floor:.1g} of what the samples "
            f"taken away had, which is rounding. {remedy}"
        )
    gone = ~kept & (earlier > floor / _LARGE_SHARE)
    if bool(gone.any()) and number < rank:
        warn_numerical(
            f"{int(gone.sum())} of {len(shares)} directions have lost all variance but rounding ({floor:.1g} of "
            "what it was) and count as empty. If the samples that remain vary there, fit again on them.",
            kind="variance was cancelled",
        )
    weak = kept & (shares < floor * 10**_DIGITS) & (shares < _LARGE_SHARE * earlier)
    if bool(weak.any()):
        digits = math.log10(float(shares[weak].amin()) / floor)
        warn_numerical(
            f"variances along {int(weak.sum())} of {len(shares)} directions were nearly cancelled: the smallest keeps "
            f"about {digits:.0f} digits, {float((shares / earlier)[weak].amin()):.1g} of what it was. {remedy}",
            kind="variance was nearly cancelled",
        )
