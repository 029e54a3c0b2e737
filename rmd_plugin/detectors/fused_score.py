"""The score of FusedRMD and its fit.

All distances are those of the shrunk within-class covariance, in coordinates whose first r are those of RMD: the class
means differ in them alone. So one product with a D x D matrix gives all distances.

Every member is standardised by its mean and standard deviation over training samples that are left out of the fit one
by one: with few samples, training samples lie much closer to their class than new ones. No fit is repeated: without a
sample, Sigma changes by a matrix of rank one (Sherman and Morrison), see :func:`left_out_distances`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmd_plugin.detectors.functional import (
    class_quadratics,
    full_precision,
    listed,
    oas_shrinkage,
    saturated,
    warn_numerical,
)
from rmd_plugin.detectors.gaussian import Coordinates, fit_coordinates, regularised_covariance, with_amplification
from rmd_plugin.detectors.reservoir import SampledMoments

#: smallest distance whose logarithm is taken
_SMALLEST_DISTANCE = 1e-6
#: a sample that alone spans a direction is infinitely far without itself: its distance grows by 1 / this at most
_SMALLEST_LEVERAGE = 1e-2
#: a standard deviation below so many times the largest value is rounding
_CONSTANT = 1e-12
#: samples that are left out at a time
_CHUNK_ROWS = 1024


class FusedScore(Coordinates):
    """Scores features by the sum of the three members; holds buffers only, so it can be exported, with the head.

    Args:
        parameters: float64 tensors as :func:`fit_fused` returns them.
        dtype: precision of the computation.
    """

    complement: Tensor
    points: Tensor
    offsets: Tensor
    head: Tensor
    head_bias: Tensor
    location: Tensor
    rate: Tensor

    def __init__(self, parameters: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__(parameters["shift"], parameters["projection"], dtype)
        points, w = parameters["points"].double(), parameters["w"].double()
        self.rank, self.has_head = points.shape[1], len(w) > 0
        buffers = {"points": points, "offsets": points.square().sum(1), "head": w}
        buffers |= {"head_bias": parameters["b"] + w @ self.shift.double()}
        buffers |= {"complement": 1 - parameters["weights"].double()}
        buffers |= {name: parameters[name] for name in ("location", "rate")}
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
            members, place, finite = self._nearest_members(z)
            return saturated(members[0] + members[1] + members[2], finite), place

    def members(self, z: Tensor) -> Tensor:
        """The three terms of the score, shape (B, 3)."""
        with full_precision(z):
            members, _, finite = self._nearest_members(z)
            return saturated(torch.stack(members, 1), finite.unsqueeze(1))

    def class_scores(self, z: Tensor) -> Tensor:
        """The scores if each class in turn were the nearest one, shape (B, K)."""
        with full_precision(z):
            low, rest, near, energy, finite = self._parts(z)
            inner = near + low.square().sum(1, keepdim=True)
            background = (low.square() @ self.complement).unsqueeze(1)
            members = self._members(inner + rest.unsqueeze(1), inner - background, energy.unsqueeze(1))
            return saturated(members[0] + members[1] + members[2], finite.unsqueeze(1))

    def _nearest_members(self, z: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
        low, rest, near, energy, finite = self._parts(z)
        place = near.argmin(1)
        # not the smallest of near: its large terms cancel where classes lie far apart
        inner = (low - self.points[place]).square().sum(1)
        return self._members(inner + rest, inner - low.square() @ self.complement, energy), place, finite

    def _parts(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Coordinates ``low`` of shape (B, r), in which the class means differ, and what follows from all of them.

        That is MD_k in the others, MD_k in these less ``|low|^2`` (B, K), the energy, and what is finite as z is.
        """
        centred, finite = self._centre(z)
        u = torch.addmm(self.bias, centred, self.projection)
        # not slices, whose open ends torch 2.6 cannot export for any batch size
        low, high = u.split([self.rank, u.shape[1] - self.rank], 1)
        near = torch.addmm(self.offsets, low, self.points.T, alpha=-2)
        # a product of its own: a matrix of D + C columns takes longer than two that fit the caches
        logits = torch.addmm(self.head_bias, centred, self.head.T) if self.has_head else -near / 2
        return low, high.square().sum(1), near, _energy(logits), finite

    def _members(self, distance: Tensor, relative: Tensor, energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three terms from MD_k, MD_k - MD_0 and the energy."""
        locations, rates = self.location.unbind(), self.rate.unbind()
        typical = (_log_distance(distance) - locations[2]) * rates[2]
        return (
            (relative + locations[0]) * rates[0],
            (locations[1] - energy) * rates[1],
            typical.clamp(min=0).square() / 2,
        )


def _energy(logits: Tensor) -> Tensor:
    """logsumexp(l) - mean(l), shape (B,): free of what all logits have in common."""
    return logits.logsumexp(1) - logits.mean(1)


def _log_distance(distance: Tensor) -> Tensor:
    return distance.clamp(min=_SMALLEST_DISTANCE).log()


def left_out_distances(
    u: Tensor, y: Tensor, points: Tensor, weights: Tensor, counts: Tensor, shrinkage: float
) -> tuple[Tensor, Tensor]:
    """Distances of training samples, each left out of its class mean and of Sigma; the mean of all samples stays.

    With d = z - mu_y and the size n of its class, the sample has a share c d d^T in the shrunk Sigma,
    c = (1 - shrinkage) n / ((n - 1) N), and none in what Sigma is shrunk to. Without it, <a, b> in the metric of Sigma
    becomes <a, b> + f <a, d> <b, d>, f = c / (1 - c <d, d>), and its class mean moves to mu_y - d / (n - 1). In
    Sigma_0 = Sigma + Sigma_B, the sample leaves a share of x x^T / N, x = z - mu_0, of which the part in Sigma was
    shrunk: Sigma_0 - x x^T / N + shrinkage n / ((n - 1) N) d d^T is left.

    Args:
        u: coordinates of the samples around mu_0, shape (B, q), of unit covariance within the classes. The class means
            differ in the first r alone.
        y: class of each sample, which has at least two samples, shape (B,).
        points: class means in the first r coordinates, shape (K, r).
        weights: b / (1 + b) for the between-class variances b along them, shape (r,).
        counts: samples per class, shape (K,).
        shrinkage: intensity that Sigma was shrunk with.

    Returns:
        Distances MD_k to the classes, shape (B, K), and MD_0 to the background, shape (B,).
    """
    rank, total = points.shape[1], counts.sum()
    n = counts[y]
    d = torch.cat([u[:, :rank] - points[y], u[:, rank:]], 1)
    rest = u[:, rank:].square().sum(1, keepdim=True)
    distances = class_quadratics(u[:, :rank], torch.ones_like(weights), points, points.square().sum(1)) + rest
    size, share = d.square().sum(1), n / ((n - 1) * total)
    c = (1 - shrinkage) * share
    f = c / (1 - c * size).clamp(min=_SMALLEST_LEVERAGE)
    along = (u * d).sum(1, keepdim=True) - d[:, :rank] @ points.T  # <z - mu_k, d>
    distances = distances + f[:, None] * along.square()
    own = (n / (n - 1)).square() * (size + f * size.square())  # z - mu_y grows to d n / (n - 1)
    distances = distances.scatter(1, y[:, None], own[:, None])

    def background(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1) - (a * b)[:, :rank] @ weights

    e = shrinkage * share
    rest_0 = background(u, u) - e * background(u, d).square() / (1 + e * background(d, d))
    return distances, rest_0 / (1 - rest_0 / total).clamp(min=_SMALLEST_LEVERAGE)


def fit_fused(moments: SampledMoments, w: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Fit the three members from moments and a sample: the parameters of :class:`FusedScore`.

    Args:
        moments: of the training features.
        w: weights of the head, shape (C, D); without rows, the logits are those of the Gaussians.
        b: its bias, shape (C,).
    """
    intensity = oas_shrinkage(moments.covariance, moments.num_samples)
    fitted = fit_coordinates(moments, shrinkage=intensity)
    points, shares = fitted["points"], fitted["shares"]
    if len(points) == 1:
        message = "FusedRMD of a single class has no relative distance, because the class is the background."
        warn_numerical(f"{message} Use Mahalanobis.", kind="FusedRMD of a single class")
    # all directions, those in which the class means differ first: the others are as good in any rotation
    _, singular, directions = torch.linalg.svd(shares.sqrt()[:, None] * points, full_matrices=True)
    between = singular.square()
    scale = max(1.0, float(between.amax())) if len(between) else 1.0
    rank = int((between > max(points.shape) * torch.finfo(points.dtype).eps * scale).sum())
    parameters = {
        "shift": fitted["shift"],
        "projection": (fitted["projection"] @ directions.T).contiguous(),
        "points": (points @ directions[:rank].T).contiguous(),
        "weights": between[:rank] / (1 + between[:rank]),
        "classes": fitted["classes"],
        "w": w.to(points, copy=True),  # the head goes on learning
        "b": b.to(points, copy=True),
        "intensity": points.new_tensor(intensity),
    }
    parameters |= _standardisation(moments, parameters, intensity)
    sigma_0 = regularised_covariance(moments, intensity) + moments.between_covariance
    whole, low = parameters["projection"], parameters["projection"][:, :rank]
    amplified = [
        with_amplification(parameters | {"projection": projection}, sigma_0, moments)["amplification"]
        for projection in (whole, low)
    ]
    return parameters | {"amplification": torch.stack(amplified).amax()}


def _standardisation(moments: SampledMoments, parameters: dict[str, Tensor], shrinkage: float) -> dict[str, Tensor]:
    """Mean and 1 / standard deviation of the three members over the sample, shape (3,); 0 for one that is constant."""
    sample, counts = moments.sample, moments.counts
    lone = counts[sample.labels] < 2
    single = (counts == 1).nonzero().flatten().tolist()
    if single:
        warn_numerical(
            f"{len(single)} of {int((counts > 0).sum())} classes have one sample and are left out of the "
            f"standardisation, which leaves out one sample of a class at a time: {listed(single)}.",
            kind="classes of one sample",
        )
    rows, labels, copies = sample.rows[~lone], sample.labels[~lone], sample.copies[~lone].double()
    if float(copies.sum()) < 2:
        raise ValueError(
            f"FusedRMD needs samples of classes with at least two, but among {len(lone)} that were drawn from "
            f"{moments.num_samples} there are {len(rows)}. Use RMD(shrinkage='oas')."
        )
    y, present = torch.searchsorted(parameters["classes"], labels), counts[parameters["classes"]]
    found = []
    for part, targets in zip(rows.split(_CHUNK_ROWS), y.split(_CHUNK_ROWS), strict=True):
        z = part.double()
        u = (z - parameters["shift"]) @ parameters["projection"]
        points, weights = parameters["points"], parameters["weights"]
        distances, background = left_out_distances(u, targets, points, weights, present, shrinkage)
        nearest = distances.amin(1)
        logits = z @ parameters["w"].T + parameters["b"] if len(parameters["w"]) else -distances / 2
        found.append(torch.stack([background - nearest, _energy(logits), _log_distance(nearest)], 1))
    members = torch.cat(found)
    location = copies @ members / copies.sum()
    deviation = (copies @ (members - location).square() / (copies.sum() - 1)).sqrt()
    varies = deviation > _CONSTANT * members.abs().amax(0).clamp(min=1)
    if len(parameters["w"]) and not bool(varies[1]):
        warn_numerical("the energy of the head is the same for all samples and adds nothing.", kind="constant energy")
    return {"location": location, "rate": torch.where(varies, 1 / deviation.where(varies, 1.0), 0.0)}
