"""FusedRMD: the relative distance, the energy of the classifier and a guard against far samples, in one score.

All distances are those of the shrunk within-class covariance, in coordinates whose first r are those of RMD: the class
means differ in them alone. So one product with a D x D matrix gives all distances.

Every member is standardised by its mean and standard deviation over training samples that are left out of the fit one
by one: with few samples, training samples lie much closer to their class than new ones. No fit is repeated: without a
sample, Sigma changes by a matrix of rank one (Sherman and Morrison), see :func:`left_out_distances`. These samples are
drawn while the moments are collected (:class:`SampledClassMoments`), so that a fit streams over the data once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from rmd_plugin.detectors import gaussian
from rmd_plugin.detectors.detectors import RMD_INFO, StatefulDetector
from rmd_plugin.detectors.gaussian import Coordinates, Shrinkage, buffer, full_precision
from rmd_plugin.detectors.moments import CHUNK_ROWS, ClassMoments, Gather, Moments, warn, widened

#: samples that are drawn for the standardisation
SAMPLE_SIZE = 10_000
#: smallest distance whose logarithm is taken
_SMALLEST_DISTANCE = 1e-6
#: a sample that alone spans a direction is infinitely far without itself: its distance grows by 1 / this at most
_SMALLEST_LEVERAGE = 1e-2
#: a standard deviation below so many times the largest value is rounding
_CONSTANT = 1e-12
#: of the hash: odd numbers without pattern (those of the generator splitmix64)
_STEP, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SAMPLE = ("keys", "rows", "labels")


# -- moments with a sample --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampledMoments(Moments):
    """Moments, and a sample of what they are the moments of. They add up as moments do.

    The sample is the same for every order, every split into batches and every number of processes: samples are ranked
    by a hash of their content, features and label, and those of the smallest hashes are kept. Samples that are taken
    away are found by their hashes, too.

    Attributes:
        keys: hashes in ascending order, shape (S,), int64.
        rows: features of the sample, shape (S, D), float32, or float64 where the features are.
        labels: shape (S,).
    """

    keys: Tensor = field(kw_only=True)
    rows: Tensor = field(kw_only=True)
    labels: Tensor = field(kw_only=True)

    def _combine(self, other: Moments, sign: int) -> Moments:
        if not isinstance(other, SampledMoments):
            raise ValueError("moments with and without a sample do not add up. Collect both with new_moments().")
        other = other.to(self.device)
        combined = cast(SampledMoments, super()._combine(other, sign))
        pairs = [(getattr(self, name), getattr(other, name)) for name in _SAMPLE]
        if sign > 0:
            sample = _smallest(*map(torch.cat, pairs))
        else:
            stay = self._without(other)
            sample = _smallest(*(own[stay] for own, _ in pairs))
            if len(stay) < min(combined.num_samples, SAMPLE_SIZE) / 2:
                warn(f"the sample for Z has shrunk to {len(stay)} of {combined.num_samples} samples. Fit again.")
        return replace(combined, **sample)  # type: ignore[arg-type]

    def _without(self, other: SampledMoments) -> list[int]:
        """Places of the samples that stay if those of another one are taken away."""
        complete = len(self.keys) == self.num_samples  # else larger hashes were left out
        removed = Counter((other.keys if complete else other.keys[other.keys <= self.keys[-1]]).tolist())
        stay = []
        for place, key in enumerate(self.keys.tolist()):
            if removed[key]:
                removed[key] -= 1  # of several copies, as many as are taken away
            else:
                stay.append(place)
        if missing := removed.total():
            raise ValueError(f"{missing} of the samples were not added before, by every bit of their features.")
        return stay


class SampledClassMoments(ClassMoments):
    """Accumulates :class:`SampledMoments`: the moments of all samples, and a seeded sample of them.

    Args:
        num_classes: K. If None, it grows with the largest label seen.
        num_features: D. If None, it is the width of the first batch.
        seed: decides which samples are kept.
        kwargs: options of :class:`torchmetrics.Metric`.
    """

    sample_keys: list[Tensor]
    sample_rows: list[Tensor]
    sample_labels: list[Tensor]

    def __init__(
        self, num_classes: int | None = None, num_features: int | None = None, *, seed: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(num_classes, num_features, **kwargs)
        self.seed = seed
        for name in _SAMPLE:
            self.add_state(f"sample_{name}", [])

    def _add(self, z: Tensor, y: Tensor) -> None:
        super()._add(z, y)
        for rows, labels in zip(z.split(CHUNK_ROWS), y.split(CHUNK_ROWS), strict=True):
            rows = widened(rows)
            keys = _content_keys(rows, labels, self.seed)
            if self.sample_keys and len(self.sample_keys[0]) == SAMPLE_SIZE:
                near = keys <= self.sample_keys[0][-1]
                keys, rows, labels = keys[near], rows[near], labels[near]
            if len(keys):
                self._extend(keys, rows.clone(), labels.clone())
            if sum(map(len, self.sample_keys)) > 1.25 * SAMPLE_SIZE:
                self._shorten()

    def compute(self) -> SampledMoments:
        """The moments of everything seen so far and the sample of it, on all processes together.

        Raises:
            ValueError: if no sample with a label >= 0 was seen.
        """
        return SampledMoments(**vars(super().compute()), **self._sample())  # type: ignore[arg-type]

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add what another :class:`SampledClassMoments` of the same seed has seen."""
        if not isinstance(incoming_state, SampledClassMoments) or incoming_state.seed != self.seed:
            raise ValueError(f"expected another SampledClassMoments of seed={self.seed} to merge.")
        super().merge_state(incoming_state)
        self._extend(*(tensor.to(self.device) for tensor in incoming_state._sample().values()))
        self._shorten()

    def _extend(self, *sample: Tensor) -> None:
        for name, tensor in zip(_SAMPLE, sample, strict=True):
            getattr(self, f"sample_{name}").append(tensor)

    def _shorten(self) -> None:
        for name, tensor in self._sample().items():
            setattr(self, f"sample_{name}", [tensor])

    def _sample(self) -> dict[str, Tensor]:
        if not len(self.sample_keys):
            none = torch.zeros(0, dtype=torch.long, device=self.device)
            return {"keys": none, "rows": self.shift.new_zeros(0, len(self.shift), dtype=torch.float32), "labels": none}
        return _smallest(*(dim_zero_cat(states) for states in (self.sample_keys, self.sample_rows, self.sample_labels)))

    def _sync_dist(self, dist_sync_fn: Gather = gather_all_tensors, process_group: Any | None = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        group, sample = process_group or self.process_group, self._sample()
        wide = torch.tensor(sample["rows"].dtype == torch.float64, device=self.device)
        if any(dist_sync_fn(wide, group=group)):  # a rank without data has to gather the type of the others
            sample["rows"] = sample["rows"].double()
        for name, tensor in sample.items():
            setattr(self, f"sample_{name}", [part for part in dist_sync_fn(tensor, group=group) if len(part)])


def _smallest(keys: Tensor, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The samples of the smallest keys, in their order."""
    order = keys.argsort(stable=True)[:SAMPLE_SIZE]
    return {"keys": keys[order], "rows": rows[order], "labels": labels[order]}


def _content_keys(rows: Tensor, labels: Tensor, seed: int) -> Tensor:
    """Hashes of features (B, D), float32 or float64, and labels (B,): int64 of shape (B,), the same on every device."""
    words = rows.contiguous().view(torch.int32).long()
    start = (seed * _STEP + _FACTORS[0]) % 2**64
    places = torch.arange(words.shape[1] + 1, device=rows.device) * _signed(_STEP) + _signed(start)
    factors = _scrambled(places) | 1
    # int64 wraps around: sums modulo 2^64
    return _scrambled((words * factors[1:]).sum(1) + labels * factors[0])


def _scrambled(x: Tensor) -> Tensor:
    """A bijection of int64 in which every bit depends on every other."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * _signed(factor)
    return x ^ (x >> 31 & 2**33 - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


# -- the score --------------------------------------------------------------------------------------------------------


class FusedScore(Coordinates):
    """Scores features by the sum of the three members; holds buffers only, so it can be exported, with the head.

    Args:
        parameters: float64 tensors as :func:`fit_fused` returns them.
        dtype: precision of the computation.
    """

    def __init__(self, parameters: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__(parameters["shift"], parameters["projection"], dtype)
        points, w = parameters["points"].double(), parameters["w"].double()
        self.rank, self.has_head = points.shape[1], len(w) > 0
        self.points = buffer(points, dtype)
        self.offsets = buffer(points.square().sum(1), dtype)
        self.complement = buffer(1 - parameters["weights"].double(), dtype)
        self.head = buffer(w, dtype)
        self.head_bias = buffer(parameters["b"] + w @ self.shift.double(), dtype)
        self.location = buffer(parameters["location"], dtype)
        self.rate = buffer(parameters["rate"], dtype)

    def forward(self, z: Tensor) -> Tensor:
        """Scores of shape (B,) for features of shape (B, D) or maps of shape (B, C, H, W); higher is more OOD."""
        return self.scored(z)[0]

    def scored(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the places of the nearest classes, both of shape (B,)."""
        members, place = self._nearest_members(z)
        return members[0] + members[1] + members[2], place

    def members(self, z: Tensor) -> Tensor:
        """The three terms of the score, shape (B, 3)."""
        return torch.stack(self._nearest_members(z)[0], 1)

    def class_scores(self, z: Tensor) -> Tensor:
        """The scores if each class in turn were the nearest one, shape (B, K)."""
        with full_precision(z):
            low, rest, near, energy = self._parts(z)
            inner = near + low.square().sum(1, keepdim=True)
            background = (low.square() @ self.complement).unsqueeze(1)
            members = self._members(inner + rest.unsqueeze(1), inner - background, energy.unsqueeze(1))
            return members[0] + members[1] + members[2]

    def _nearest_members(self, z: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        with full_precision(z):
            low, rest, near, energy = self._parts(z)
            place = near.argmin(1)
            # not the smallest of near: its large terms cancel where classes lie far apart
            inner = (low - self.points[place]).square().sum(1)
            return self._members(inner + rest, inner - low.square() @ self.complement, energy), place

    def _parts(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Coordinates ``low`` of shape (B, r), in which the class means differ, and what follows from all of them.

        That is MD_k in the others (B,), MD_k in these less ``|low|^2`` (B, K), and the energy (B,).
        """
        centred = self.centre(z)
        u = self.project(centred)
        # not slices, whose open ends torch 2.6 cannot export for any batch size
        low, high = u.split([self.rank, u.shape[1] - self.rank], 1)
        near = torch.addmm(self.offsets, low, self.points.T, alpha=-2)
        # a product of its own: a matrix of D + C columns takes longer than two that fit the caches
        logits = torch.addmm(self.head_bias, centred, self.head.T) if self.has_head else -near / 2
        return low, high.square().sum(1), near, _energy(logits)

    def _members(self, distance: Tensor, relative: Tensor, energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three terms from MD_k, MD_k - MD_0 and the energy."""
        locations, rates = self.location.unbind(), self.rate.unbind()
        typical = (_log_distance(distance) - locations[2]) * rates[2]
        members = (relative + locations[0]) * rates[0], (locations[1] - energy) * rates[1]
        return *members, typical.clamp(min=0).square() / 2


def _energy(logits: Tensor) -> Tensor:
    """logsumexp(l) - mean(l), shape (B,): free of what all logits have in common."""
    return logits.logsumexp(1) - logits.mean(1)


def _log_distance(distance: Tensor) -> Tensor:
    return distance.clamp(min=_SMALLEST_DISTANCE).log()


# -- the fit ----------------------------------------------------------------------------------------------------------


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
    size, share = d.square().sum(1), n / ((n - 1) * total)
    c = (1 - shrinkage) * share
    f = c / (1 - c * size).clamp(min=_SMALLEST_LEVERAGE)
    along = torch.addmm((u * d).sum(1, keepdim=True), d[:, :rank], points.T, alpha=-1)  # <z - mu_k, d>
    distances = torch.addmm(u.square().sum(1, keepdim=True), u[:, :rank], points.T, alpha=-2)
    distances += points.square().sum(1)
    distances.addcmul_(along.square_(), f[:, None])
    own = (n / (n - 1)).square() * (size + f * size.square())  # z - mu_y grows to d n / (n - 1)
    distances.scatter_(1, y[:, None], own[:, None])

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
    if int((moments.counts > 0).sum()) == 1:
        warn("FusedRMD of a single class has no relative distance: the class is the background. Use Mahalanobis.")
    intensity = gaussian.oas_shrinkage(moments.covariance, moments.num_samples)
    whitening = gaussian.whiten(gaussian.shrunk_covariance(moments, intensity), moments)
    means = whitening.coordinates(gaussian.class_offsets(moments))
    points, rotation, between = gaussian.discriminant_rotation(means, moments)
    # all directions, those in which the class means differ first: the others are as good in any rotation
    rank = rotation.shape[1]
    others = torch.linalg.qr(rotation, mode="complete")[0][:, rank:] if rank else torch.eye(len(rotation)).to(rotation)
    projection = whitening.directions(torch.cat([rotation, others], 1)).contiguous()
    parameters = gaussian.score_parameters(moments, projection, points, between / (1 + between)) | {
        "w": w.to(points, copy=True),  # the head goes on learning
        "b": b.to(points, copy=True),
        "intensity": points.new_tensor(intensity),
    }
    relative = gaussian.amplification(moments, projection[:, :rank])
    parameters["amplification"] = parameters["amplification"].maximum(relative)
    return parameters | _standardisation(moments, parameters, intensity)


def _standardisation(moments: SampledMoments, parameters: dict[str, Tensor], shrinkage: float) -> dict[str, Tensor]:
    """Mean and 1 / standard deviation of the three members over the sample, shape (3,); 0 for one that is constant."""
    counts, several = moments.counts, moments.counts[moments.labels] > 1
    single = (counts == 1).nonzero().flatten().tolist()
    if single:
        warn(f"{len(single)} classes have one sample and are left out of the standardisation: {single[:8]}.")
    rows, labels = moments.rows[several], moments.labels[several]
    if len(rows) < 2:
        raise ValueError("FusedRMD needs classes of two samples or more. Use RMD(shrinkage='oas').")
    y, present = torch.searchsorted(parameters["classes"], labels), counts[parameters["classes"]]
    points, weights = parameters["points"], parameters["weights"]
    chunks = []
    for part, targets in zip(rows.split(CHUNK_ROWS), y.split(CHUNK_ROWS), strict=True):
        z = part.double()
        u = (z - parameters["shift"]) @ parameters["projection"]
        distances, background = left_out_distances(u, targets, points, weights, present, shrinkage)
        nearest = distances.amin(1)
        logits = z @ parameters["w"].T + parameters["b"] if len(parameters["w"]) else distances.mul_(-0.5)
        chunks.append(torch.stack([background - nearest, _energy(logits), _log_distance(nearest)], 1))
    members = torch.cat(chunks)
    location, deviation = members.mean(0), members.std(0)
    varies = deviation > _CONSTANT * members.abs().amax(0).clamp(min=1)
    if len(parameters["w"]) and not bool(varies[1]):
        warn("the energy of the head is the same for all samples and adds nothing.")
    return {"location": location, "rate": torch.where(varies, 1 / deviation.where(varies, 1.0), 0.0)}


# -- the detector -----------------------------------------------------------------------------------------------------


class Members(NamedTuple):
    """The terms of a score of :class:`FusedRMD`, each of shape (B,); their sum is the score."""

    relative: Tensor  #: -Z(MD_0 - min_k MD_k): nearer to the background than to a class
    energy: Tensor  #: -Z(logsumexp(l) - mean(l)): no logit stands out
    guard: Tensor  #: max(0, Z(log min_k MD_k))^2 / 2: farther from all classes than training samples from theirs


class FusedRMD(StatefulDetector):
    """RMD with what the classifier knows and a guard against far samples; all parts from ID data, nothing to tune.

    With Z for a standardisation over training samples that are left out of the fit, and the head's logits l,

        score = -Z(MD_0 - min_k MD_k) - Z(logsumexp(l) - mean(l)) + max(0, Z(log min_k MD_k))^2 / 2.

    The relative distance finds near-OOD, the energy adds what the head has learned, and the guard brings back the
    far-OOD samples that the relative distance cancels. Without a head, the logits are those of the class Gaussians
    (linear discriminant analysis). Sigma is shrunk by OAS. Why this form, and what else was tried: docs/detectors.md.

    A fit streams over the data once, in constant memory: the moments of all samples and, for Z, 10,000 of them. The
    sample knows its features by every bit: give :meth:`forget` what was added, in the same dtype. With more than 10,000
    samples, what is left of the sample then is smaller than a new fit would draw, so that Z, and nothing else, differs.

    Args:
        encoder: maps inputs to features of shape (B, D), or to maps (B, C, H, W), which are averaged over space. May be
            None where only the feature methods are used.
        head: the classification layer on the features, an ``nn.Linear``; it is read at each fit, and saved and exported
            with the detector. In :class:`rmd_plugin.OODMonitor` a detector without one gets the network's.
        w: weights of the head, shape (C, D), in place of ``head``.
        b: its bias, shape (C,); by default zero.
        seed: decides which samples Z is taken over, if there are more than 10,000.
        keep_moments: save the moments and the sample for Z too, so that a loaded detector has :meth:`update`,
            :meth:`forget` and :meth:`add_class`. The sample holds features of up to 10,000 training samples.

    Example:
        >>> import torch
        >>> from rmd_plugin import FusedRMD
        >>> _ = torch.manual_seed(0)
        >>> y = torch.arange(400) % 2
        >>> z = torch.randn(400, 8)
        >>> z[:, 0] += 8.0 * y
        >>> detector = FusedRMD().fit_features(z, y)
        >>> far_ood = torch.randn(5, 8)
        >>> far_ood[:, 1] += 20.0  # where the classes agree, which RMD cannot see
        >>> bool(detector.predict_features(far_ood).min() > detector.predict_features(z).max())
        True
        >>> detector.members(far_ood).guard.shape
        torch.Size([5])
    """

    info = RMD_INFO
    _kind = SampledMoments
    hyperparameter_space = {}  # noqa: RUF012

    head: nn.Linear | None = None
    w: InitVar[Tensor | None] = None
    b: InitVar[Tensor | None] = None
    _: KW_ONLY
    seed: int = 0
    shrinkage: Shrinkage = field(init=False, default="oas")
    normalize: bool = field(init=False, default=False)
    covariance: Literal["tied", "diagonal"] = field(init=False, default="tied")

    def __post_init__(self, w: Tensor | None, b: Tensor | None) -> None:
        super().__post_init__()
        if (self.head is not None and w is not None) or (w is None and b is not None):
            raise ValueError("give the head as head=, or as w= and b=.")
        self.head = self.head if w is None else _linear(w, b)
        if not isinstance(self.head, nn.Linear | None):
            raise TypeError(f"head must be an nn.Linear on the features, got {type(self.head).__name__}.")

    def new_moments(self, num_classes: int | None = None, **kwargs: Any) -> SampledClassMoments:
        """An empty accumulator with this detector's seed (and torchmetrics' options), to ``compute()`` and fit on."""
        return SampledClassMoments(num_classes, seed=self.seed, **kwargs)

    def _fit_parameters(self, moments: Moments) -> dict[str, Tensor]:
        if not isinstance(moments, SampledMoments):
            raise ValueError("FusedRMD needs a sample beside the moments. Collect them with new_moments().")
        if self.head is None:
            return fit_fused(moments, torch.zeros(0, moments.num_features), torch.zeros(0))
        if self.head.in_features != moments.num_features:
            raise ValueError(f"the head takes {self.head.in_features} features, expected {moments.num_features}.")
        if not all(bool(parameter.isfinite().all()) for parameter in self.head.parameters()):
            raise ValueError("the head has NaN or infinite weights.")
        w = self.head.weight.detach()
        return fit_fused(moments, w, w.new_zeros(len(w)) if self.head.bias is None else self.head.bias.detach())

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave; its head too, if the detector has none."""
        super().load_state_dict(state)
        if self.head is None and len(self._state["w"]):
            self.head = _linear(self._state["w"], self._state["b"]).to(torch.get_default_dtype())
        return self

    def _build_module(self, dtype: torch.dtype) -> nn.Module:
        return FusedScore(self._state, dtype)

    def members(self, z: Tensor) -> Members:
        """The three terms whose sum is the score, of features of shape (B, D) or (B, C, H, W): what made it high."""
        terms = self._map_chunks(z, lambda module, rows: module.members(rows))  # type: ignore[operator]
        return Members(*terms.unbind(1))


def _linear(w: Tensor, b: Tensor | None) -> nn.Linear:
    """A head of weights (C, D) and a bias (C,)."""
    b = w.new_zeros(len(w)) if b is None else b
    if w.ndim != 2 or b.shape != w.shape[:1]:
        raise ValueError(f"a head has w of shape (C, D) and b of (C,), got {tuple(w.shape)} and {tuple(b.shape)}.")
    head: nn.Linear = skip_init(nn.Linear, w.shape[1], len(w), dtype=w.dtype, device=w.device)
    head.load_state_dict({"weight": w, "bias": b})
    return head.requires_grad_(False)
