"""RMD with a background of its own: MD_0 is that of another corpus, and no direction cancels."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rmd_plugin.detectors.functional import whiten
from rmd_plugin.detectors.gaussian import (
    class_offsets,
    noise_floor,
    regularised_covariance,
    visible_whitening,
    with_amplification,
)
from rmd_plugin.detectors.moments import Moments


class Gaussian(NamedTuple):
    """A background that does not come from the training samples."""

    mean: Tensor  #: shape (D,)
    covariance: Tensor  #: shape (D, D) or, of diagonal ones, (D,)


def fit_background(moments: Moments, *, shrinkage: float | str = 0.0) -> Gaussian:
    """The Gaussian of all samples, whatever their labels are; its covariance is shrunk as that of the classes is.

    Raises:
        ValueError: if the samples do not vary in all directions.
    """
    plain = moments.plain()
    pooled = replace(plain, counts=plain.counts.sum().reshape(1), sums=plain.sums.sum(0, keepdim=True))
    covariance = regularised_covariance(pooled, shrinkage)
    rank = (
        int((covariance > 0).sum()) if pooled.diagonal else whiten(covariance, noise_floor(pooled)).projection.shape[1]
    )
    if rank < pooled.num_features:
        raise ValueError(
            f"the background of {pooled.num_samples} samples varies in {rank} of {pooled.num_features} directions, so "
            "it gives no distance in the others. Give more background samples, or set shrinkage (for example 'oas')."
        )
    return Gaussian(pooled.background_mean, covariance)


def fit_relative_to(moments: Moments, background: Gaussian, *, shrinkage: float | str = 0.0) -> dict[str, Tensor]:
    """Fit min_k MD_k - MD_0 with a background of its own, by descending variance of it relative to the classes'.

    Sigma_0 is not Sigma + Sigma_B then, so no direction cancels. With coordinates u = (z - mu_0) A in which Sigma is
    the identity and Sigma_0 is diagonal, s, the score has the same form as the others, with weights 1 - 1 / s.
    """
    sigma = regularised_covariance(moments, shrinkage)
    whitening = visible_whitening(sigma, moments, "within-class covariance")
    offsets = class_offsets(moments) + (moments.background_mean - background.mean)
    if moments.diagonal:
        projection, points = whitening, offsets * whitening
        variances = background.covariance * whitening.square()
    else:
        variances, rotation = torch.linalg.eigh(whitening.T @ background.covariance @ whitening)
        variances, projection = variances.flip(0), whitening @ rotation.flip(1)
        points = offsets @ projection
    visible = variances > 0  # a dead feature of a diagonal covariance is in no distance
    parameters = {
        "shift": background.mean,
        "projection": projection.contiguous(),
        "weights": torch.where(visible, 1 - 1 / variances.where(visible, 1.0), 1.0),
        "points": points.contiguous(),
        "classes": moments.counts.nonzero().flatten(),
        "background": background.covariance,
    }
    total = sigma + moments.between_covariance
    size = (total if moments.diagonal else total.diagonal()) + (moments.background_mean - background.mean).square()
    return with_amplification(parameters, size, moments)
