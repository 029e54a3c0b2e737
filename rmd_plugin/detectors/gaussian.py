"""From moments to fitted Gaussians: pure fits, and the one module that scores with them.

Every score here has one form. With coordinates ``u = (z - shift) A``,

    score(z) = min_k  sum_i a_i u_i^2 - 2 u . m_k + |m_k|^2,

and a fit only chooses the projection A, the weights a and one point m_k per class. For the Mahalanobis distance A
whitens Sigma, a = 1 and m_k is the whitened class mean. For the relative distance MD_k - MD_0 the two quadratic forms
cancel in every direction in which the class means do not differ, because Sigma_0 = Sigma + Sigma_B, so A has only
r <= K - 1 columns and a_i = b_i / (1 + b_i), where b_i is the between-class variance along column i in units of the
within-class one.

Where Sigma is singular (N - K < D, or features that depend on each other), no scale is known in the directions in which
no class varies: all distances leave them out (and warn), so MD is that of the pseudo-inverse of Sigma, and
RMD = MD - MMD holds in every case. The pseudo-inverse of Sigma_0 would count in MD_0 the directions in which the class
means differ but no class varies, where MD_k is zero: far samples would then look ID (on MiniLM features with 10 to 19
samples a class AUROC falls from 68..81 to 37..45).

Every ``fit_*`` takes the moments of the training features and the shrinkage of Sigma (a number in [0, 1], ``"oas"`` or
``"auto"``), and returns the float64 parameters of :class:`QuadraticScore`, and some more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rmd_plugin.detectors.moments import Moments, pool_features, unit_length, warn

Shrinkage = float | Literal["oas", "auto"]
Parameters = dict[str, Tensor]

#: Samples per feature below which the covariance is estimated so badly that the scores suffer.
ENOUGH_PER_FEATURE = 5
#: Above this amplification of rounding errors (see ``amplification``) float32 features are scored in float64.
#: Below it the errors of float32 stay under about 5e-5 of the spread of the scores.
MAX_FLOAT32_AMPLIFICATION = 30.0
#: Features of a smaller variance, relative to the largest, are dead: sentence embeddings hold some of size 1e-32.
_DEAD_VARIANCE = 1e-40
#: The smallest positive number of float16, and the standard deviation, in these steps, below which it resolves nothing.
_HALF_STEP, _RESOLVED = 2.0**-24, 4.0
#: Smallest share of a feature's variance that the features before it leave unexplained, for a Cholesky factor to serve.
_SMALLEST_PIVOT = 1e-8
#: Smallest eigenvalue, relative to the largest, of which an eigendecomposition in float64 gives six digits.
_ACCURATE_EIGENVALUE = 1e-10
#: Ratio of standard deviations above which features have different units.
_WIDE_UNITS = 1e3


def buffer(value: Tensor, dtype: torch.dtype) -> nn.Buffer:
    """A copy of a tensor as a buffer of a module."""
    return nn.Buffer(value.to(dtype, copy=True))


class Coordinates(nn.Module):
    """Projects features to coordinates u = (z - shift) A; holds buffers only.

    Args:
        shift: shape (D,), float64.
        projection: A of shape (D, q) or, for a diagonal one, (D,), float64.
        dtype: precision of the computation.
        normalize: scale the features to unit length first.
    """

    def __init__(self, shift: Tensor, projection: Tensor, dtype: torch.dtype, *, normalize: bool = False) -> None:
        super().__init__()
        self.normalize = normalize
        # What the rounded shift misses goes into the bias: features of mean 1e4 lose no digits in float32.
        missing = shift.double() - shift.to(dtype).double()
        self.shift = buffer(shift, dtype)
        self.projection = buffer(projection, dtype)
        self.bias = buffer(-_times(missing, projection.double()), dtype)

    def project(self, centred: Tensor) -> Tensor:
        """Coordinates u of shape (B, q) of features (B, D) without the shift."""
        if self.projection.ndim == 1:
            return centred * self.projection + self.bias
        return torch.addmm(self.bias, centred, self.projection)

    def centre(self, z: Tensor) -> Tensor:
        """Features (B, D) without the shift."""
        z = z.to(self.shift.dtype)
        if z.ndim == 4 and not self.normalize:
            # before the mean, which has more digits than float32 where the features have a large mean
            return pool_features(z - self.shift[:, None, None])
        z = pool_features(z) if z.ndim == 4 else z
        return (unit_length(z) if self.normalize else z) - self.shift


class QuadraticScore(Coordinates):
    """Scores features by their smallest class quadratic; holds buffers only, so it can be exported.

    Args:
        parameters: float64 tensors ``shift`` (D,), ``projection`` (D, q) or, for a diagonal one, (D,), ``weights`` (q,)
            and ``points`` (K, q), as the ``fit_*`` functions of this module return them.
        dtype: precision of the computation.
        normalize: scale the features to unit length first.
    """

    def __init__(self, parameters: Parameters, dtype: torch.dtype, *, normalize: bool) -> None:
        super().__init__(parameters["shift"], parameters["projection"], dtype, normalize=normalize)
        self.points = buffer(parameters["points"], dtype)
        self.offsets = buffer(parameters["points"].double().square().sum(1), dtype)
        self.weights = buffer(parameters["weights"], dtype)
        self.complement = buffer(1 - parameters["weights"].double(), dtype)

    def forward(self, z: Tensor) -> Tensor:
        """Scores of shape (B,) for features of shape (B, D) or maps of shape (B, C, H, W); higher is more OOD."""
        return self.scored(z)[0]

    def scored(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the places of the nearest classes, both of shape (B,)."""
        with full_precision(z):
            u = self.project(self.centre(z))
            place = torch.addmm(self.offsets, u, self.points.T, alpha=-2).argmin(dim=1)
            # without the large terms of class_scores, which cancel where classes lie far apart
            distance = (u - self.points[place]).square().sum(1)
            return distance - u.square() @ self.complement, place

    def class_scores(self, z: Tensor) -> Tensor:
        """Score of every class point, shape (B, K)."""
        with full_precision(z):
            u = self.project(self.centre(z))
            return torch.addmm(self.offsets, u, self.points.T, alpha=-2) + (u.square() @ self.weights).unsqueeze(1)

    def contributions(self, z: Tensor) -> Tensor:
        """Terms of the score along each direction, shape (B, q)."""
        with full_precision(z):
            u, place = self.project(self.centre(z)), self.scored(z)[1]
            return (u - self.points[place]).square() - u.square() * self.complement


def full_precision(z: Tensor) -> torch.autocast:
    """A block without autocast, which would run matrix products in half precision; part of exported graphs too."""
    return torch.autocast(z.device.type, enabled=False)


# -- fits -----------------------------------------------------------------------------------------------------------


def fit_mahalanobis(moments: Moments, shrinkage: Shrinkage) -> Parameters:
    """Fit min_k MD_k: one column per eigen-direction of Sigma, by descending variance.

    Where units differ so widely that eigenvectors would lose features, other directions take their place.
    """
    return score_parameters(moments, _eigen_whitening(shrunk_covariance(moments, shrinkage), moments))


def fit_partial(moments: Moments, components: int, *, largest: bool, shrinkage: Shrinkage) -> Parameters:
    """Fit the Mahalanobis distance within the ``components`` leading eigen-directions of Sigma, or all the others."""
    projection = _eigen_whitening(shrunk_covariance(moments, shrinkage), moments, eigenvectors=True)
    rank = projection.shape[1]
    if components >= rank and not largest:
        raise ValueError(f"components={components} with largest=False leaves none of the {rank} eigen-directions.")
    if components > rank:
        warn(f"components={components} exceeds the {rank} eigen-directions with variance: all of them are used.")
    return score_parameters(moments, projection[:, :components] if largest else projection[:, components:])


def score_parameters(
    moments: Moments, projection: Tensor, points: Tensor | None = None, weights: Tensor | None = None
) -> Parameters:
    """Parameters of :class:`QuadraticScore`, by default of the distance to the nearest class mean."""
    points = _times(class_offsets(moments), projection) if points is None else points
    return {
        "shift": moments.background_mean,
        "projection": projection.contiguous(),
        "weights": points.new_ones(points.shape[1]) if weights is None else weights,
        "points": points.contiguous(),
        "classes": moments.counts.nonzero().flatten(),
        "amplification": amplification(moments, projection),
    }


def fit_marginal(moments: Moments, shrinkage: Shrinkage) -> Parameters:
    """Fit MD_0: one column per eigen-direction of Sigma_0, a single point at the background mean."""
    sigma = shrunk_covariance(moments, shrinkage)
    sigma_0 = sigma + moments.between_covariance
    if moments.diagonal:
        alive = _eigen_whitening(sigma, moments) > 0
        projection = torch.where(alive, sigma_0, 1.0).rsqrt() * alive
    elif (whitening := whiten(sigma, moments)).scale is not None:
        projection = _eigen_whitening(sigma_0, moments)
    else:
        # only in directions in which the classes vary, as the other distances: there Sigma_0 is I + B
        rows = class_shares(moments).sqrt()[:, None] * (class_offsets(moments) @ whitening.matrix)
        variances, rotation = torch.linalg.eigh(torch.eye(rows.shape[1]).to(rows) + rows.T @ rows)
        projection = (whitening.matrix @ rotation) * variances.rsqrt()
        projection = projection[:, projection.square().sum(0).argsort()]
    parameters = score_parameters(moments, projection, projection.new_zeros(1, projection.shape[-1]))
    del parameters["classes"]  # the one point belongs to all of them
    return parameters


def fit_relative(moments: Moments, shrinkage: Shrinkage) -> Parameters:
    """Fit min_k MD_k - MD_0: one column per discriminative direction, by descending between-class variance."""
    sigma = shrunk_covariance(moments, shrinkage)
    if int((moments.counts > 0).sum()) == 1:
        warn("RMD of a single class is zero everywhere, because the class is the background. Use Mahalanobis.")
    if moments.diagonal:
        projection = _eigen_whitening(sigma, moments)
        points = class_offsets(moments) * projection
        between = (class_shares(moments)[:, None] * points.square()).sum(0)
    else:
        whitening = whiten(sigma, moments)
        points, rotation, between = discriminant_rotation(whitening.coordinates(class_offsets(moments)), moments)
        projection = whitening.directions(rotation)
    return score_parameters(moments, projection, points, between / (1 + between))


def fit_relative_to(moments: Moments, mean: Tensor, covariance: Tensor, shrinkage: Shrinkage) -> Parameters:
    """Fit min_k MD_k - MD_0 where MD_0 is the distance of another corpus, of which mean and covariance are given.

    Sigma_0 is not Sigma + Sigma_B then, so no direction cancels. With coordinates u = (z - mu_0) A in which Sigma is
    the identity and Sigma_0 is diagonal, s, the score has the same form as the others, with weights 1 - 1 / s.
    """
    whitening = _eigen_whitening(shrunk_covariance(moments, shrinkage), moments)
    if moments.diagonal:
        projection, variances = whitening, covariance * whitening.square()
    else:
        variances, rotation = torch.linalg.eigh(whitening.T @ covariance @ whitening)
        variances, projection = variances.flip(0), whitening @ rotation.flip(1)
    visible = variances > 0  # a dead feature of a diagonal covariance is in no distance
    weights = torch.where(visible, 1 - 1 / variances.where(visible, 1.0), 1.0)
    apart = _times(moments.background_mean - mean, projection)
    parameters = score_parameters(moments, projection, _times(class_offsets(moments), projection) + apart, weights)
    # coordinates are as large as the corpus is far: their squares cancel where the nearest class is looked for
    size = parameters["amplification"] + apart.norm()
    return parameters | {"shift": mean, "background": covariance, "amplification": size}


def fit_background(moments: Moments, shrinkage: Shrinkage) -> tuple[Tensor, Tensor]:
    """Mean (D,) and covariance (D, D) or (D,) of all samples, whatever their labels are, shrunk as Sigma is.

    Raises:
        ValueError: if the samples do not vary in all directions.
    """
    pooled = replace(moments, counts=moments.counts.sum().reshape(1), sums=moments.sums.sum(0, keepdim=True))
    covariance = shrunk_covariance(pooled, shrinkage)
    scale = _diagonal(covariance).clamp(min=torch.finfo(covariance.dtype).tiny).rsqrt()  # units make no matrix singular
    correlation = (covariance * scale * scale).diag() if pooled.diagonal else scale[:, None] * covariance * scale
    rank = int(torch.linalg.matrix_rank(correlation, hermitian=True))
    if rank < pooled.num_features:
        varies = f"{rank} of {pooled.num_features} directions"
        raise ValueError(f"the background varies in {varies}: give more samples, or set shrinkage (for example 'oas').")
    return pooled.background_mean, covariance


# -- covariances ----------------------------------------------------------------------------------------------------


def shrunk_covariance(moments: Moments, shrinkage: Shrinkage) -> Tensor:
    """Within-class covariance Sigma, (D, D) or (D,), shrunk towards the multiple of the identity of the same trace."""
    sigma = moments.covariance
    variance = _diagonal(sigma)
    if not bool((variance > 0).any()):
        raise ValueError("no feature varies within the classes. At least one class needs two different samples.")
    intensity = shrinkage_intensity(moments, shrinkage, sigma)
    target = intensity * variance.mean()
    sigma *= 1 - intensity
    _diagonal(sigma).add_(target)
    return sigma


def shrinkage_intensity(moments: Moments, shrinkage: Shrinkage, sigma: Tensor | None = None) -> float:
    """The number in [0, 1] that a shrinkage stands for: ``"auto"`` is ``"oas"`` where N < 5 D, else 0."""
    few = moments.num_samples < ENOUGH_PER_FEATURE * moments.num_features
    if shrinkage == "oas" or (shrinkage == "auto" and few):
        return oas_shrinkage(moments.covariance if sigma is None else sigma, moments.num_samples)
    return 0.0 if shrinkage == "auto" else float(shrinkage)


def oas_shrinkage(covariance: Tensor, num_samples: float) -> float:
    """Oracle-approximating intensity in [0, 1] of a covariance (D, D) that is divided by N (Chen et al., 2010)."""
    dim = covariance.shape[0]
    scale = covariance.diagonal().mean().square()
    power = torch.linalg.matrix_norm(covariance).square() / dim**2
    denominator = (num_samples + 1) * (power - scale / dim)
    # a multiple of the identity has denominator zero: it is its own target, so any intensity will do
    return 1.0 if denominator <= 0 else min(1.0, float((power + scale) / denominator))


def warn_few_samples(moments: Moments) -> None:
    """Warn where N < 5 D, unless Sigma is singular for this reason: its rank has been told then."""
    few = moments.num_samples < ENOUGH_PER_FEATURE * moments.num_features
    if few and not moments.diagonal and not _singular_by_number(moments):
        limit = f"(N < {ENOUGH_PER_FEATURE} D): scores can be poor. Set shrinkage='auto' (or 'oas')."
        warn(f"{moments.num_samples} samples are few for the covariance of {moments.num_features} features {limit}")


def _singular_by_number(moments: Moments) -> bool:
    """Whether the samples are too few for a Sigma of full rank, which each class mean lowers by one."""
    return moments.num_samples - int((moments.counts > 0).sum()) < moments.num_features


# -- whitening ------------------------------------------------------------------------------------------------------


class Whitening(NamedTuple):
    """Directions A of shape (D, q) in which a covariance is the identity: eigenvectors, or a Cholesky factor's inverse.

    The inverse of a factor is never formed: what is asked of it takes one triangular solve.
    """

    matrix: Tensor  #: A, or the lower triangular factor (D, D) of the correlation matrix
    scale: Tensor | None = None  #: 1 / standard deviation of each feature, shape (D,), beside a factor

    def coordinates(self, rows: Tensor) -> Tensor:
        """Rows (B, D) times A."""
        if self.scale is None:
            return rows @ self.matrix
        solved: Tensor = torch.linalg.solve_triangular(self.matrix, (rows * self.scale).T, upper=False)
        return solved.T

    def directions(self, rotation: Tensor) -> Tensor:
        """A times a matrix (q, r)."""
        if self.scale is None:
            return self.matrix @ rotation
        solved: Tensor = torch.linalg.solve_triangular(self.matrix.T, rotation, upper=True)
        return self.scale[:, None] * solved


def whiten(sigma: Tensor, moments: Moments) -> Whitening:
    """Directions in which Sigma (D, D) is the identity, in any rotation.

    By a Cholesky factor of the correlation matrix, unless a feature is dead or explained by those before it.
    """
    variance = sigma.diagonal()
    if bool(_alive(variance, moments).all()):
        scale = variance.rsqrt()
        lower, info = torch.linalg.cholesky_ex((sigma * scale).mul_(scale[:, None]))
        if int(info) == 0 and float(lower.diagonal().amin()) ** 2 > _SMALLEST_PIVOT:
            return Whitening(lower, scale)
    return Whitening(_eigen_whitening(sigma, moments))


def discriminant_rotation(points: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Turn whitened class means (K', q) so that the first r coordinates are those in which they differ.

    Returns:
        The means (K', r), the rotation (q, r) and the between-class variances (r,), in descending order.
    """
    weighted = class_shares(moments).sqrt()[:, None] * points
    # QR first: LAPACK's own route takes many times as long
    if len(points) <= points.shape[1]:
        basis, triangle = torch.linalg.qr(weighted.T)
        left, singular, _ = torch.linalg.svd(triangle)
        directions = basis @ left
    else:
        _, singular, right = torch.linalg.svd(torch.linalg.qr(weighted, mode="r")[1])
        directions = right.T
    between = singular.square()
    scale = max(1.0, float(between.amax())) if len(between) else 1.0
    rank = int((between > max(points.shape) * torch.finfo(points.dtype).eps * scale).sum())
    rotation = directions[:, :rank]
    return points @ rotation, rotation, between[:rank]


def _eigen_whitening(sigma: Tensor, moments: Moments, *, eigenvectors: bool = False) -> Tensor:
    """Whitening matrix (D, q) by descending eigenvalue, or for a diagonal covariance the vector (D,), zero if dead.

    Distances are those of the pseudo-inverse Sigma^+ in the features' own units: as in numpy, scikit-learn and OpenOOD,
    eigenvalues at or below ``D * eps`` times the largest one count as zero. Units alone make no matrix singular: where
    they differ widely, and unless ``eigenvectors`` insists, features are scaled to unit variance first.
    """
    variance = _diagonal(sigma)
    alive, dim = _alive(variance, moments), len(variance)
    if sigma.ndim == 1:
        projection, rank = torch.where(alive, sigma, 1.0).rsqrt() * alive, int(alive.sum())
    else:
        block, scale = sigma if bool(alive.all()) else sigma[alive][:, alive], variance[alive].rsqrt()
        inner, smallest = _whiten_block(block)
        # an eigenvalue is right to about eps times the largest one: below 1e-10 of it the sixth digit is lost
        if smallest < _ACCURATE_EIGENVALUE and not eigenvectors and float(scale.amax() / scale.amin()) > _WIDE_UNITS:
            scaled, _ = _whiten_block(scale[:, None] * block * scale)
            inner = scale[:, None] * scaled if scaled.shape[1] == len(block) else inner
        rank = inner.shape[1]
        projection = sigma.new_zeros(dim, rank)
        projection[alive] = inner
    if rank < dim:
        too_few = sigma.ndim == 2 and _singular_by_number(moments)
        reason = f" ({moments.num_samples} samples are too few)" if too_few else ""
        remedy = "Directions without variance are left out. Set shrinkage (for example 'oas') to keep them."
        warn(f"the within-class covariance has rank {rank} of {dim}{reason}. {remedy}")
    return projection


def _whiten_block(covariance: Tensor) -> tuple[Tensor, float]:
    """Scaled eigenvectors by descending eigenvalue, and the smallest eigenvalue over the largest."""
    if not len(covariance):  # no feature varies by more than rounding
        return covariance, 1.0
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    keep = eigenvalues > len(covariance) * torch.finfo(covariance.dtype).eps * eigenvalues[-1]
    smallest = float(eigenvalues[0] / eigenvalues[-1])
    return vectors[:, keep].flip(1) * eigenvalues[keep].flip(0).rsqrt(), smallest


def _alive(variance: Tensor, moments: Moments) -> Tensor:
    """Features that vary by more than rounding, shape (D,).

    Dead are constant features, those that are nothing beside the largest one, and what is left of features that are
    too small for the half precision in which they were stored: zeros among which single samples have the smallest
    numbers of float16. Features of small units are none of these: they lie between those numbers.
    """
    second = _diagonal(moments.second) / moments.num_samples
    rounding = max(64, moments.num_features) * torch.finfo(second.dtype).eps * second
    alive = variance > rounding.clamp(min=_DEAD_VARIANCE * float(second.amax()))
    tiny = alive & (variance < (_RESOLVED * _HALF_STEP) ** 2)
    if bool(tiny.any()) and not moments.normalized:
        steps = (moments.sums[:, tiny] + moments.counts[:, None] * moments.shift[tiny]) / _HALF_STEP
        # relative where all sums are below one step: features of size 1e-20 are small units, not dust
        alive[tiny] = ((steps - steps.round()).abs() > 1e-6 * steps.abs().amax(0).clamp(max=1)).any(0)
    return alive


def class_offsets(moments: Moments) -> Tensor:
    """mu_k - mu_0 of the classes that occur, shape (K', D)."""
    present = moments.counts > 0
    # from the sums: the difference of two means of size 1e4 would lose the digits that the shift has saved
    centre = moments.sums.sum(0) / moments.counts.sum()
    return moments.sums[present] / moments.counts[present, None] - centre


def class_shares(moments: Moments) -> Tensor:
    """N_k / N of the classes that occur, shape (K',)."""
    return moments.counts[moments.counts > 0] / moments.counts.sum()


def amplification(moments: Moments, projection: Tensor) -> Tensor:
    """By how much rounding errors of relative size eps grow in the scores, relative to the scores' spread.

    Two things amplify: directions of small variance gather rounding errors of features of large variance, that between
    the classes too; and features that are computed, as those of unit length, are rounded before their mean is taken
    off.
    """
    size = _diagonal(moments.second) / moments.num_samples - (moments.sums.sum(0) / moments.counts.sum()).square()
    if moments.normalized:
        size = size + moments.background_mean.square()
    gathered = _times(size, projection.square())
    return gathered.sum().div(max(1, gathered.numel())).sqrt()


def _diagonal(covariance: Tensor) -> Tensor:
    return covariance if covariance.ndim == 1 else covariance.diagonal()


def _times(rows: Tensor, projection: Tensor) -> Tensor:
    return rows * projection if projection.ndim == 1 else rows @ projection
