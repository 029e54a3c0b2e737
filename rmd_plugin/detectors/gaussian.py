"""From moments to fitted Gaussians: the D x D family (MD, MMD, PMD) and the low-rank form (RMD).

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

Every ``fit_*`` takes the moments of the training features and the shrinkage of Sigma (:func:`regularised_covariance`;
Sigma_0 is the regularised Sigma plus Sigma_B), and returns parameters, most of them those of :class:`QuadraticScore`.
"""

import torch
from torch import Tensor, nn

from rmd_plugin.detectors.functional import (
    class_quadratics,
    full_precision,
    nearest,
    oas_shrinkage,
    saturated,
    shrink,
    unit_length,
    warn_numerical,
    whiten,
)
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.encoding.features import pool_features

#: Samples per feature below which the covariance is estimated so badly that the scores suffer.
ENOUGH_PER_FEATURE = 5
#: Above this amplification of rounding errors (see ``with_amplification``) float32 features are scored in float64.
#: Below it the errors of float32 stay under about 5e-5 of the spread of the scores.
MAX_FLOAT32_AMPLIFICATION = 30.0
#: Features of a smaller variance, relative to the largest, are dead: sentence embeddings hold some of size 1e-32.
_DEAD_VARIANCE = 1e-40
#: Factor that lets a sum over features overflow only if they are infinite.
_PROBE = 1e-20
#: Variances of features between which float32 has room for squares.
_FLOAT32_VARIANCES = (1e-30, 1e30)


class Coordinates(nn.Module):
    """Projects features to coordinates u = (z - shift) A; holds buffers only.

    Args:
        shift: shape (D,), float64.
        projection: A of shape (D, q) or, for a diagonal one, (D,), float64.
        dtype: precision of the computation.
        normalize: scale the features to unit length first.
    """

    shift: Tensor
    projection: Tensor
    bias: Tensor

    def __init__(self, shift: Tensor, projection: Tensor, dtype: torch.dtype, *, normalize: bool = False) -> None:
        super().__init__()
        self.normalize = normalize
        exact_shift, projection = shift.double(), projection.double()
        shift = exact_shift.to(dtype)
        # What the rounded shift misses goes into the bias: features of mean 1e4 lose no digits in float32.
        missing = exact_shift - shift.double()
        bias = -missing * projection if projection.ndim == 1 else -missing @ projection
        # a mean over a map has more digits than float32 has: with a large shift, that is taken off before
        gathered = (exact_shift.square() @ projection.square()).sum() / max(1, projection.shape[-1])
        self.centre_maps = bool(gathered.sqrt() > MAX_FLOAT32_AMPLIFICATION)
        for name, value in {"shift": shift, "projection": projection, "bias": bias}.items():
            self.register_buffer(name, value.to(dtype))

    def project(self, z: Tensor) -> Tensor:
        """Coordinates u of shape (B, q)."""
        with full_precision(z):
            return self._project(z)[0]

    def _project(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates u of shape (B, q), and numbers of shape (B,) that are finite where the features are."""
        centred, finite = self._centre(z)
        if self.projection.ndim == 1:
            return centred * self.projection + self.bias, finite
        return torch.addmm(self.bias, centred, self.projection), finite

    def _centre(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, D) without the shift, as it is rounded, and numbers as above."""
        z = z.to(self.shift.dtype)
        if z.ndim == 4:
            before = self.shift[:, None, None] if self.centre_maps and not self.normalize else None
            # weights instead of a sum, which can overflow where the mean does not
            share = z.new_full((z.shape[2] * z.shape[3],), 1 / (z.shape[2] * z.shape[3]))
            z = (z if before is None else z - before).flatten(2) @ share
            centred = unit_length(z) - self.shift if self.normalize else z if before is not None else z - self.shift
        else:
            z = pool_features(z)  # refuses other shapes
            centred = (unit_length(z) if self.normalize else z) - self.shift
        return centred, centred @ torch.full_like(self.shift, _PROBE)


class QuadraticScore(Coordinates):
    """Scores features by their smallest class quadratic; holds buffers only, so it can be exported.

    Args:
        parameters: float64 tensors ``shift`` (D,), ``projection`` (D, q) or, for a diagonal one, (D,), ``weights`` (q,)
            and ``points`` (K, q), as the ``fit_*`` functions of this module return them.
        dtype: precision of the computation.
        normalize: scale the features to unit length first.
    """

    weights: Tensor
    complement: Tensor
    points: Tensor
    offsets: Tensor

    def __init__(self, parameters: dict[str, Tensor], dtype: torch.dtype, *, normalize: bool = False) -> None:
        super().__init__(parameters["shift"], parameters["projection"], dtype, normalize=normalize)
        points = parameters["points"].double()
        weights = parameters["weights"].double()
        buffers = {"points": points, "offsets": points.square().sum(1), "weights": weights, "complement": 1 - weights}
        for name, value in buffers.items():
            self.register_buffer(name, value.to(dtype))

    def forward(self, z: Tensor) -> Tensor:
        """Scores of shape (B,) for features of shape (B, D) or maps of shape (B, C, H, W); higher is more OOD.

        The largest number of the dtype where a score of finite features overflows; NaN for NaN and infinite features.
        """
        return self.scored(z)[0]

    def scored(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the places of the nearest classes, both of shape (B,)."""
        with full_precision(z):
            u, finite = self._project(z)
            place = nearest(u, self.points, self.offsets)
            # without the large terms of class_quadratics, which cancel where classes lie far apart
            distance = (u - self.points[place]).square().sum(1)
            return saturated(distance - u.square() @ self.complement, finite), place

    def class_scores(self, z: Tensor) -> Tensor:
        """Score of every class point, shape (B, K)."""
        with full_precision(z):
            u, finite = self._project(z)
            return saturated(class_quadratics(u, self.weights, self.points, self.offsets), finite.unsqueeze(1))

    def contributions(self, z: Tensor) -> Tensor:
        """Terms of the score along each direction, shape (B, q)."""
        with full_precision(z):
            u, finite = self._project(z)
            distances = (u - self.points[nearest(u, self.points, self.offsets)]).square()
            return saturated(distances - u.square() * self.complement, finite.unsqueeze(1))


def fit_mahalanobis(moments: Moments, *, shrinkage: float | str = 0.0, eigenvectors: bool = False) -> dict[str, Tensor]:
    """Fit min_k MD_k: one column per eigen-direction of Sigma, by descending variance.

    Where units differ so widely that eigenvectors would lose features, other directions take their place, unless
    ``eigenvectors`` insists.
    """
    sigma = regularised_covariance(moments, shrinkage)
    projection = visible_whitening(sigma, moments, "within-class covariance", eigenvectors=eigenvectors)
    return _with_class_points(moments, sigma, projection)


def fit_partial(
    moments: Moments, components: int, *, largest: bool = True, shrinkage: float | str = 0.0
) -> dict[str, Tensor]:
    """Fit the Mahalanobis distance within the ``components`` leading eigen-directions of Sigma, or all the others."""
    sigma = regularised_covariance(moments, shrinkage)
    projection = visible_whitening(sigma, moments, "within-class covariance", eigenvectors=True)
    rank = projection.shape[1]
    if components >= rank and not largest:
        raise ValueError(
            f"components={components} with largest=False leaves none of the {rank} eigen-directions. "
            f"Choose components < {rank}."
        )
    if components > rank:
        message = f"components={components} exceeds the {rank} eigen-directions with variance: all of them are used."
        warn_numerical(message, kind=f"{components} components are too many")
    projection = projection[:, :components] if largest else projection[:, components:]
    return _with_class_points(moments, sigma, projection.contiguous())


def fit_marginal(moments: Moments, *, shrinkage: float | str = 0.0) -> dict[str, Tensor]:
    """Fit MD_0: one column per eigen-direction of Sigma_0, a single point at the background mean."""
    sigma = regularised_covariance(moments, shrinkage)
    sigma_0 = sigma + moments.between_covariance
    whitening = visible_whitening(sigma, moments, "within-class covariance")
    if moments.diagonal:
        projection = torch.where(whitening > 0, sigma_0, 1.0).rsqrt() * (whitening > 0)
    elif whitening.shape[1] == moments.num_features:
        projection = whiten(sigma_0, noise_floor(moments)).projection
    else:
        # only in directions in which the classes vary, as the other distances: there Sigma_0 is I + B
        rows = _class_shares(moments).sqrt()[:, None] * (class_offsets(moments) @ whitening)
        variances, rotation = torch.linalg.eigh(torch.eye(rows.shape[1]).to(rows) + rows.T @ rows)
        projection = (whitening @ rotation) * variances.rsqrt()
        projection = projection[:, projection.square().sum(0).argsort()]
    width = projection.shape[-1]
    parameters = {
        "shift": moments.background_mean,
        "projection": projection.contiguous(),
        "weights": projection.new_ones(width),
        "points": projection.new_zeros(1, width),
    }
    return with_amplification(parameters, sigma_0, moments)


def fit_relative(moments: Moments, *, shrinkage: float | str = 0.0) -> dict[str, Tensor]:
    """Fit min_k MD_k - MD_0: one column per discriminative direction, by descending between-class variance."""
    sigma = regularised_covariance(moments, shrinkage)
    offsets = class_offsets(moments)
    shares = _class_shares(moments)
    if len(offsets) == 1:
        message = "RMD of a single class is zero everywhere, because the class is the background. Use Mahalanobis."
        warn_numerical(message, kind="RMD of a single class")
    whitening = visible_whitening(sigma, moments, "within-class covariance")
    sigma_0 = sigma + moments.between_covariance
    if moments.diagonal:
        projection, points = whitening, offsets * whitening
        between = (shares[:, None] * points.square()).sum(0)
    else:
        points = offsets @ whitening
        # The class means span the only directions in which MD_k and MD_0 differ.
        _, singular, directions = torch.linalg.svd(shares.sqrt()[:, None] * points, full_matrices=False)
        between = singular.square()
        scale = max(1.0, float(between.amax())) if len(between) else 1.0
        rank = int((between > max(points.shape) * torch.finfo(points.dtype).eps * scale).sum())
        rotation = directions[:rank].T
        projection, points, between = whitening @ rotation, points @ rotation, between[:rank]
    parameters = {
        "shift": moments.background_mean,
        "projection": projection.contiguous(),
        "weights": between / (1 + between),
        "points": points.contiguous(),
        "classes": moments.counts.nonzero().flatten(),
    }
    return with_amplification(parameters, sigma_0, moments)


def fit_coordinates(moments: Moments, *, shrinkage: float | str = 0.0) -> dict[str, Tensor]:
    """Fit coordinates u = (z - shift) @ projection in which every class has unit covariance, for flows.

    Of the classes that occur: ``points`` (K', q), their means in u; ``shares`` (K',) of the samples; ``classes`` (K',).
    """
    sigma = regularised_covariance(moments, shrinkage)
    projection = visible_whitening(sigma, moments, "within-class covariance")
    return {
        "shift": moments.background_mean,
        "projection": projection,
        "points": class_offsets(moments) @ projection,
        "shares": _class_shares(moments),
        "classes": moments.counts.nonzero().flatten(),
    }


def score_dtype(state: dict[str, Tensor], dtype: torch.dtype) -> torch.dtype:
    """In which precision features of a dtype are scored."""
    exact = dtype == torch.float64 or float(state["amplification"]) > MAX_FLOAT32_AMPLIFICATION
    return torch.float64 if exact else torch.float32


def class_score_dtype(state: dict[str, Tensor], dtype: torch.dtype) -> torch.dtype:
    """The same for the scores of all classes, of which large terms cancel where the classes lie far apart."""
    points = state["points"]
    # the size of the terms over the spread of the scores; the sixth of it was measured to add to the amplification
    size = (points.square().sum(1).mean() + points.shape[1]) / (2 * max(1, points.shape[1])) ** 0.5
    exact = float(state["amplification"] + size / 6) > MAX_FLOAT32_AMPLIFICATION
    return torch.float64 if exact else score_dtype(state, dtype)


def regularised_covariance(moments: Moments, shrinkage: float | str) -> Tensor:
    """Within-class covariance Sigma, (D, D) or its diagonal (D,), shrunk towards a multiple of the identity.

    By an intensity in [0, 1], or what ``"oas"`` or ``"auto"`` come to.
    """
    sigma = moments.covariance
    if not bool(sigma.isfinite().all()):
        raise ValueError("the squares of the features overflow float64. Scale the features to a size below 1e150.")
    variance = sigma if moments.diagonal else sigma.diagonal()
    if not bool((variance > 0).any()):
        raise ValueError(
            f"no feature varies within the classes ({moments.num_samples} samples, "
            f"{int((moments.counts > 0).sum())} classes), so no distance can be fitted. "
            "At least one class needs two different samples."
        )
    intensity = shrinkage_intensity(moments, shrinkage)
    return shrink(sigma, intensity) if intensity else sigma


def shrinkage_intensity(moments: Moments, shrinkage: float | str) -> float:
    """The number in [0, 1] that a shrinkage stands for: ``"auto"`` is ``"oas"`` where N < 5 D, else 0."""
    if shrinkage == "oas" or (shrinkage == "auto" and _few_samples(moments)):
        return oas_shrinkage(moments.covariance, moments.num_samples)
    return 0.0 if shrinkage == "auto" else float(shrinkage)


def warn_few_samples(moments: Moments) -> None:
    """Warn of N < 5 D without shrinkage, unless Sigma is singular for this reason: its rank has been told then."""
    if _few_samples(moments) and not moments.diagonal and not _singular_by_number(moments):
        dim = moments.num_features
        warn_numerical(
            f"{moments.num_samples} samples are few for the covariance of {dim} features (N < {ENOUGH_PER_FEATURE} D): "
            "scores can be poor. Set shrinkage='auto' (or 'oas').",
            kind=f"few samples for {dim} features",
        )


def _few_samples(moments: Moments) -> bool:
    return moments.num_samples < ENOUGH_PER_FEATURE * moments.num_features


def _singular_by_number(moments: Moments) -> bool:
    """Whether the samples are too few for a Sigma of full rank, which each class mean lowers by one."""
    rank = moments.num_samples - int((moments.counts > 0).sum())
    return not moments.diagonal and rank < moments.num_features


def noise_floor(moments: Moments) -> Tensor:
    """Variance, shape (D,), that rounding alone gives to each feature, or that is nothing beside the largest one's."""
    second = (moments.second if moments.diagonal else moments.second.diagonal()) / moments.num_samples
    rounding = max(64, moments.num_features) * torch.finfo(second.dtype).eps * second
    return rounding.clamp(min=_DEAD_VARIANCE * float(second.amax()))


def visible_whitening(covariance: Tensor, moments: Moments, name: str, *, eigenvectors: bool = False) -> Tensor:
    """Whitening matrix (D, q), or for a diagonal covariance the vector (D,) with zeros for dead features."""
    dim, noise = moments.num_features, noise_floor(moments)
    if covariance.ndim == 1:
        alive = covariance > noise
        projection, rank = torch.where(alive, covariance, 1.0).rsqrt() * alive, int(alive.sum())
        cutoff = float(covariance[~alive].amax()) if rank < dim else 0.0
    else:
        projection, cutoff = whiten(covariance, noise, eigenvectors=eigenvectors)
        rank = projection.shape[1]
    if rank < dim:
        reason = f" ({moments.num_samples} samples are too few for {dim} features)"
        warn_numerical(
            f"the {name} has rank {rank} of {dim}{reason if _singular_by_number(moments) else ''}: {dim - rank} "
            f"directions with variance at or below {cutoff:.2g} are left out of the score. "
            "Set shrinkage (for example 'oas') to keep them.",
            kind=f"rank of the {name} of {dim} features",
        )
    return projection


def class_offsets(moments: Moments) -> Tensor:
    """mu_k - mu_0 of the classes that occur, shape (K', D)."""
    present = moments.counts > 0
    # from the sums: the difference of two means of size 1e4 would lose the digits that the shift has saved
    centre = moments.sums.sum(0) / moments.counts.sum()
    return moments.sums[present] / moments.counts[present, None] - centre


def _class_shares(moments: Moments) -> Tensor:
    """N_k / N of the classes that occur, shape (K',)."""
    return moments.counts[moments.counts > 0] / moments.counts.sum()


def _with_class_points(moments: Moments, sigma: Tensor, projection: Tensor) -> dict[str, Tensor]:
    offsets = class_offsets(moments)
    points = offsets * projection if projection.ndim == 1 else offsets @ projection
    parameters = {
        "shift": moments.background_mean,
        "projection": projection,
        "weights": points.new_ones(points.shape[1]),
        "points": points,
        "classes": moments.counts.nonzero().flatten(),
    }
    return with_amplification(parameters, sigma + moments.between_covariance, moments)


def with_amplification(parameters: dict[str, Tensor], sigma_0: Tensor, moments: Moments) -> dict[str, Tensor]:
    """Add by how much rounding errors of relative size eps grow in the scores, relative to the scores' spread.

    Two things amplify: directions of small variance gather rounding errors of features of large variance, that between
    the classes too; and features that are computed, as those of unit length, are rounded before their mean is taken
    off. All sizes follow from the fit alone. Where float32 has no room for the features' squares the amplification is
    infinite.
    """
    projection = parameters["projection"]
    variance = sigma_0 if sigma_0.ndim == 1 else sigma_0.diagonal()
    rounded = variance + parameters["shift"].square() if moments.normalized else variance
    gathered = rounded * projection.square() if projection.ndim == 1 else rounded @ projection.square()
    amplification = gathered.sum().div(max(1, gathered.numel())).sqrt()
    used = variance[projection.reshape(len(variance), -1).abs().amax(1) > 0] if projection.numel() else variance
    if not bool(((used > _FLOAT32_VARIANCES[0]) & (used < _FLOAT32_VARIANCES[1])).all()):
        amplification = torch.full_like(amplification, torch.inf)
    return {**parameters, "amplification": amplification}
