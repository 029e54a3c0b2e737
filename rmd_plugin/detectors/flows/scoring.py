"""Scoring by flows: every class's flow sees every sample, and features are whitened first.

What a scoring pass can do once is done when its module is made: masks, contexts, reversals and class centres are folded
into the weights, and the first layer of all flows becomes one matrix product.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rmd_plugin.detectors.flows.spec import LOG_TWO_PI, FlowSpec, Parameters, elementwise
from rmd_plugin.detectors.functional import full_precision, saturated, unit_length, warn_numerical
from rmd_plugin.detectors.gaussian import fit_coordinates, fit_relative
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.encoding.features import pool_features

Space = Literal["features", "discriminant"]

#: samples that a CPU should score at a time, and numbers that a pass over some classes then makes at its widest: the
#: pass stays in the cores' caches, which is worth a factor of two
PASS_SAMPLES = 256
_PASS_NUMBERS = 2**20


def fit_start(moments: Moments, shrinkage: float | str, space: Space) -> dict[str, Tensor]:
    """Fit the Gaussians that the flows start from, in coordinates u in which every class has unit covariance.

    With ``background`` (q, q), ``v = u @ background`` has unit covariance over all classes; the log-volumes are what
    the two maps add to a log-density.
    """
    state = _discriminant(moments, shrinkage) if space == "discriminant" else _features(moments, shrinkage)
    projection, points = state["projection"], state["points"]
    shares = moments.counts[state["classes"]] / moments.num_samples
    covariance = points.T @ (shares[:, None] * points)
    covariance.diagonal().add_(1.0)
    factor = torch.linalg.cholesky(covariance)
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    return state | {
        "log_volume": torch.linalg.qr(projection)[1].diagonal().abs().log().sum(),
        "background": inverse.T.contiguous(),
        "background_log_volume": -factor.diagonal().log().sum(),
    }


def _features(moments: Moments, shrinkage: float | str) -> dict[str, Tensor]:
    """All coordinates of ``gaussian.fit_coordinates``, turned.

    The i-th is made to depend on the first i features only (with dead ones left out), so the order in which an
    autoregressive flow goes through the coordinates is the order of the features, and nothing of their shape is lost:
    a feature that is a curved function of an earlier one remains that.
    """
    state = fit_coordinates(moments, shrinkage=shrinkage)
    del state["shares"]
    projection = state["projection"]
    alive = projection.abs().amax(1) > 0
    # RQ decomposition: rows and columns in reverse turn the lower triangle of QR into an upper one
    turn = torch.linalg.qr(projection[alive].flip(0).T)[0].flip(1)
    # QR leaves the signs open: the last feature of a coordinate counts upwards
    last = (projection @ turn)[alive][-projection.shape[1] :].diagonal()
    turn = turn * torch.where(last < 0, -1.0, 1.0)
    return state | {"projection": projection @ turn, "points": state["points"] @ turn}


def _discriminant(moments: Moments, shrinkage: float | str) -> dict[str, Tensor]:
    """Those in which the class means differ, at most K - 1: RMD's, by descending between-class variance."""
    several = int((moments.counts > 0).sum()) > 1
    state = fit_relative(moments, shrinkage=shrinkage) if several else {}
    if not several or not len(state["weights"]):
        message = "the class means do not differ, so there is no discriminant space: that of the features is taken."
        warn_numerical(message, kind="no discriminant space")
        return _features(moments, shrinkage)
    projection = state["projection"]
    # SVD leaves the signs open: the feature of the largest coefficient counts upwards
    largest = projection.gather(0, projection.abs().argmax(0, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0)
    moved = {"projection": projection * sign, "points": state["points"] * sign}
    return moved | {name: state[name] for name in ("shift", "classes")}


def project(z: Tensor, state: dict[str, Tensor], normalize: bool) -> Tensor:
    """Coordinates u of :func:`fit_start`, shape (B, q), float64, of features of shape (B, D) or (B, C, H, W)."""
    # float64: whitening gathers the rounding errors of wide features in narrow directions, and costs little here
    z = pool_features(z.double())
    return ((unit_length(z) if normalize else z) - state["shift"]) @ state["projection"]


class FlowScore(nn.Module):
    """Scores features by flows (without a background by the class densities alone); buffers only, for export."""

    shift: Tensor
    projection: Tensor
    log_volume: Tensor
    background: Tensor
    background_log_volume: Tensor

    def __init__(
        self, state: dict[str, Tensor], classes: FlowBank, background: nn.Module | None, *, normalize: bool
    ) -> None:
        super().__init__()
        self.normalize = normalize
        for name in ("shift", "projection", "log_volume", "background", "background_log_volume"):
            self.register_buffer(name, state[name].clone())
        self.class_bank = classes
        self.background_bank = background

    def forward(self, z: Tensor) -> Tensor:
        """Scores of shape (B,) for features of shape (B, D) or maps of shape (B, C, H, W); higher is more OOD."""
        return self.class_scores(z).amin(1)

    def scored(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and the places of the nearest classes, both of shape (B,)."""
        scores, place = self.class_scores(z).min(1)
        return scores, place

    def class_scores(self, z: Tensor) -> Tensor:
        """Score of every class, shape (B, K): -log p_k, or log p_0 - log p_k."""
        u = self.whiten(z)
        dtype = self.class_bank.centers.dtype
        with full_precision(z):
            scores = -self.class_bank(u.to(dtype))
            if self.background_bank is None:
                scores = scores - self.log_volume.to(dtype)
            else:
                # the volume of the whitening itself is in both densities and cancels
                v = (u @ self.background).to(dtype)
                scores = scores + self.background_bank(v) + self.background_log_volume.to(dtype)
        # tiny parts: this sum overflows only if a feature is infinite
        return saturated(scores, (z.flatten(1) * 1e-20).sum(1, keepdim=True))

    def whiten(self, z: Tensor) -> Tensor:
        """Coordinates u of shape (B, q), float64."""
        with full_precision(z):
            return project(z, {"shift": self.shift, "projection": self.projection}, self.normalize)


class GaussianBank(nn.Module):
    """The standard normal in the place of a flow."""

    def forward(self, v: Tensor) -> Tensor:
        """Log-density of shape (B, 1) at samples of shape (B, D)."""
        return -0.5 * (v.square().sum(1, keepdim=True) + v.shape[1] * LOG_TWO_PI)


class FlowBank(nn.Module):
    """Densities of K flows at the same samples: buffers only, with everything folded into the weights.

    Args:
        spec: shape of the flows.
        params: stacked parameters of K flows, or of one flow with K contexts.
        centers: class k's flow acts on ``u - centers[k]``, shape (K, D).
        plain: classes whose density is the standard normal instead of a flow, shape (K,), or None for no such class.
        gain: by how much, at most, a flow's log-density is above that of the standard normal, shape (K,) or (1,); None
            for no limit.
    """

    centers: Tensor
    plain: Tensor | None
    gain: Tensor | None

    def __init__(
        self,
        spec: FlowSpec,
        params: Parameters,
        centers: Tensor,
        plain: Tensor | None = None,
        gain: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("centers", centers.to(next(iter(params.values())).dtype))
        self.register_buffer("plain", plain if plain is not None and bool(plain.any()) else None)
        self.register_buffer("gain", None if gain is None else gain.to(self.centers).expand(len(centers)).contiguous())
        self.networks = nn.ModuleList(
            _FoldedNetwork(spec, params, index, centers if index == 0 else None) for index in range(spec.transforms)
        )
        self.chunk = max(1, _PASS_NUMBERS // (PASS_SAMPLES * spec.features * spec.outputs))

    def forward(self, u: Tensor) -> Tensor:
        """Log-density of every class, shape (B, K), at whitened features of shape (B, D)."""
        columns = u.t().contiguous()
        parts = [
            self._log_prob(columns, slice(start, start + self.chunk))
            for start in range(0, len(self.centers), self.chunk)
        ]
        return torch.cat(parts).t()

    def _log_prob(self, u: Tensor, part: slice) -> Tensor:
        """Log-density of some classes, shape (k, B), at samples of shape (D, B)."""
        start = u - self.centers[part].unsqueeze(-1)
        value = start
        total = value.new_zeros(())
        for index, network in enumerate(self.networks):
            outputs = network(u if index == 0 else value, part)
            value, logdet = elementwise(self.spec, value, outputs)
            total = total + logdet
        log_prob = total - 0.5 * value.square().sum(1)
        normal = -0.5 * start.square().sum(1) if self.plain is not None or self.gain is not None else log_prob
        if self.gain is not None:
            log_prob = torch.minimum(log_prob, normal + self.gain[part].unsqueeze(-1))
        if self.plain is not None:
            log_prob = torch.where(self.plain[part].unsqueeze(-1), normal, log_prob)
        return log_prob - 0.5 * self.spec.features * LOG_TWO_PI


class _FoldedNetwork(nn.Module):
    """The masked network of one transform for K classes, without masks, contexts, reversals and centres."""

    def __init__(self, spec: FlowSpec, params: Parameters, index: int, centers: Tensor | None) -> None:
        super().__init__()
        prefix = spec.prefix(index)
        self.outputs = spec.outputs
        self.num_blocks = spec.num_blocks
        own = {name[len(prefix) :]: value.detach() for name, value in params.items() if name.startswith(prefix)}
        first, final = own["initial_layer.weight"], own["final_layer.weight"]
        # output-major: all scales, then all shifts, so that each is one block of memory
        final = final.unflatten(1, (spec.features, spec.outputs)).transpose(1, 2)
        final_bias = own["final_layer.bias"].unflatten(1, (spec.features, spec.outputs)).transpose(1, 2)
        if index % 2:
            first, final, final_bias = first.flip(2), final.flip(2), final_bias.flip(2)
        bias = own["initial_layer.bias"]
        if spec.contexts:
            bias = bias + F.relu(_context(own, "context_layer"))
        if centers is not None:
            # float64: a centre may be far away, and its product is subtracted from another large one
            moved = (first.double() @ centers.double().unsqueeze(-1)).squeeze(-1)
            bias = (bias.double() - moved).to(bias.dtype)
        self._add("initial", first, bias)
        for block in range(spec.num_blocks):
            for layer in (0, 1):
                name = f"blocks.{block}.linear_layers.{layer}"
                bias = own[f"{name}.bias"]
                if spec.contexts and layer == 0:
                    bias = bias + _context(own, f"blocks.{block}.context_layer")
                self._add(f"block_{block}_{layer}", own[f"{name}.weight"], bias)
        self._add("final", final.flatten(1, 2), final_bias.flatten(1, 2))

    def _add(self, name: str, weight: Tensor, bias: Tensor) -> None:
        self.register_buffer(f"{name}_weight", weight.contiguous())
        self.register_buffer(f"{name}_bias", bias.unsqueeze(-1).contiguous())

    def _layer(self, name: str, part: slice) -> tuple[Tensor, Tensor]:
        """Weights (k, out, in) and biases (k, out, 1) of some classes; k = 1 where all classes share them."""
        # not get_buffer: torch.export of torch 2.6 cannot trace it
        weight: Tensor = getattr(self, f"{name}_weight")
        bias: Tensor = getattr(self, f"{name}_bias")
        return weight if len(weight) == 1 else weight[part], bias if len(bias) == 1 else bias[part]

    def _linear(self, name: str, value: Tensor, part: slice) -> Tensor:
        weight, bias = self._layer(name, part)
        return torch.baddbmm(bias, weight.expand(len(value), -1, -1), value)

    def forward(self, value: Tensor, part: slice) -> Tensor:
        """What the networks of some classes say about (D, B) or (k, D, B) values: (outputs, k, D, B)."""
        if value.ndim == 2:
            # the same samples for all classes: one product gives every class its first layer
            weight, bias = self._layer("initial", part)
            hidden = (weight.flatten(0, 1) @ value).unflatten(0, (len(weight), -1)) + bias
        else:
            hidden = self._linear("initial", value, part)
        for block in range(self.num_blocks):
            inner = self._linear(f"block_{block}_0", F.relu(hidden), part)
            hidden = hidden + self._linear(f"block_{block}_1", F.relu(inner), part)
        outputs: Tensor = self._linear("final", hidden, part).unflatten(1, (self.outputs, -1))
        return outputs.movedim(1, 0)


def _context(own: Parameters, name: str) -> Tensor:
    """What a context layer adds for each class, shape (K, H)."""
    return own[f"{name}.weight"][0].t() + own[f"{name}.bias"]
