"""Masked autoregressive flows on nflows, stacked: many flows of one shape evaluated as one batch of matrices.

The parameters keep the names, shapes and meaning that nflows gives them, with one leading dimension for the flow: every
flow of a stack can be loaded into a plain ``nflows.flows.Flow`` (:meth:`FlowSpec.unstack`). ``fitting`` trains
such stacks, ``scoring`` folds them for many samples.

Tensors inside run *features first*, ``(flows, features, samples)``: each product then reads weights as they are stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.transforms import (
    CompositeTransform,
    MaskedAffineAutoregressiveTransform,
    MaskedPiecewiseRationalQuadraticAutoregressiveTransform,
    ReversePermutation,
    Transform,
)
from nflows.transforms.made import MADE
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from rmd_plugin.detectors.base import check_integer

Kind = Literal["maf", "rqs"]
Parameters = dict[str, Tensor]

KINDS: tuple[Kind, ...] = ("maf", "rqs")
LOG_TWO_PI = math.log(2 * math.pi)
# floors by which nflows keeps scales, bins and slopes positive: with the same numbers our densities equal its own
_MIN_SCALE = 1e-3
_MIN_BIN = 1e-3
_MIN_SLOPE = 1e-3


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))


@dataclass(frozen=True)
class FlowSpec:
    """The shape of a flow: what it takes to read its parameters."""

    features: int  #: D
    hidden_features: int  #: width H of the masked network
    num_blocks: int = 1  #: residual blocks of the masked network
    transforms: int = 1  #: autoregressive; the order of the features is reversed between two of them
    kind: Kind = "maf"  #: affine, or "rqs": rational-quadratic splines
    num_bins: int = 8  #: of a spline
    tail_bound: float = 5.0  #: a spline acts on [-tail_bound, tail_bound] and is the identity outside
    contexts: int = 0  #: number of classes that the flow is conditioned on, 0 for none

    def __post_init__(self) -> None:
        for name in ("features", "hidden_features", "transforms", "num_bins", "num_blocks"):
            check_integer(name, getattr(self, name), 0 if name == "num_blocks" else 1)
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {self.kind!r}.")
        if not self.tail_bound > 0:
            raise ValueError(f"tail_bound must be positive, got {self.tail_bound!r}.")

    @classmethod
    def of(cls, params: Parameters, **options: Any) -> Self:
        """Shape of stacked parameters; what their sizes do not tell (blocks, transforms, splines) is given."""
        net = "_transform._transforms.0.autoregressive_net."
        hidden, features = params[f"{net}initial_layer.weight"].shape[1:]
        context = params.get(f"{net}context_layer.weight")
        return cls(features, hidden, contexts=0 if context is None else context.shape[2], **options)

    @property
    def outputs(self) -> int:
        """Numbers that the network gives for each feature: scale and shift, or the shape of a spline."""
        return 2 if self.kind == "maf" else 3 * self.num_bins - 1

    def prefix(self, transform: int) -> str:
        """Where nflows keeps the masked network of a transform: a reversal stands between two transforms."""
        return f"_transform._transforms.{2 * transform}.autoregressive_net."

    def build(self, seed: int = 0, *, identity: bool = True) -> Flow:
        """A plain nflows flow of this shape that starts as the identity: its density is the standard normal.

        The seed is that of the hidden layers' random start; the global random state is left as it was. Without
        ``identity`` the last layers start at random too, as nflows makes them.
        """
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which would also seed the accelerators
            torch.default_generator.manual_seed(seed)
            parts: list[Transform] = []
            for index in range(self.transforms):
                if index:
                    parts.append(ReversePermutation(self.features))
                parts.append(self._transform())
        flow = Flow(CompositeTransform(parts), StandardNormal([self.features]))
        for made in flow.modules():
            if isinstance(made, MADE):
                _spread_degrees(made, self.features)
                if identity:
                    self._start_at_identity(made)
        return flow

    def _transform(self) -> Transform:
        context = self.contexts or None
        if self.kind == "maf":
            return MaskedAffineAutoregressiveTransform(
                self.features, self.hidden_features, context_features=context, num_blocks=self.num_blocks
            )
        return MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
            self.features,
            self.hidden_features,
            context_features=context,
            num_bins=self.num_bins,
            tails="linear",
            tail_bound=self.tail_bound,
            num_blocks=self.num_blocks,
            min_bin_width=_MIN_BIN,
            min_bin_height=_MIN_BIN,
            min_derivative=_MIN_SLOPE,
        )

    @torch.no_grad()
    def _start_at_identity(self, made: MADE) -> None:
        made.final_layer.weight.zero_()
        bias = made.final_layer.bias.zero_().view(self.features, self.outputs)
        if self.kind == "maf":
            bias[:, 0] = _inverse_softplus(1 - _MIN_SCALE)
        else:
            bias[:, 2 * self.num_bins :] = _inverse_softplus(1 - _MIN_SLOPE)

    def masks(self) -> Parameters:
        """The mask of every masked weight, by the weight's name, each of shape (out, in)."""
        flow = self.build()
        return {f"{name[: -len('mask')]}weight": mask for name, mask in flow.named_buffers() if name.endswith(".mask")}

    def stack(self, count: int, seed: int = 0, *, identity: bool = True) -> Parameters:
        """Parameters of ``count`` flows, all at the same start, see :meth:`build`: each tensor has shape (count, ...).

        Weights are zero where the mask is: with masked gradients they stay so, and no step has to apply the mask again.
        """
        flow, masks = self.build(seed, identity=identity), self.masks()
        stacked = {}
        for name, value in flow.named_parameters():
            start = value.detach() * masks[name] if name in masks else value.detach()
            stacked[name] = start.expand(count, *start.shape).clone()
        return stacked

    def unstack(self, params: Parameters, index: int) -> Flow:
        """Flow ``index`` of a stack as a plain nflows flow."""
        flow = self.build()
        flow.load_state_dict({name: value[index] for name, value in params.items()}, strict=False)
        return flow.to(next(iter(params.values())).device)


def _spread_degrees(made: MADE, features: int) -> None:
    """Let a narrow network see every feature.

    nflows numbers hidden units 1, 2, ..., H: with H < D - 1 no unit would see a feature beyond the H-th. Here their
    degrees are spread over 1, ..., D - 1 instead. Masks are buffers of nflows' layers: the flow stays an nflows flow.
    """
    hidden = made.initial_layer.out_features
    if hidden >= features - 1:
        return
    # up to D - 1: the last coordinate depends on all the others
    degrees = torch.arange(1, hidden + 1) * (features - 1) // hidden
    inputs = torch.arange(1, features + 1)
    outputs = inputs.repeat_interleave(made.final_layer.out_features // features)
    made.initial_layer.degrees.copy_(degrees)
    made.initial_layer.mask.copy_(degrees[:, None] >= inputs)
    for block in made.blocks:
        for layer in block.linear_layers:
            layer.degrees.copy_(degrees)
            layer.mask.copy_(degrees[:, None] >= degrees)
    made.final_layer.mask.copy_(outputs[:, None] > degrees)


def stacked_log_prob(spec: FlowSpec, params: Parameters, x: Tensor, contexts: Tensor | None = None) -> Tensor:
    """Log-density (S, B) in nats of each flow of a stack at its own samples (S, D, B), of classes (S, B) if any.

    Differentiable in parameters and samples. Masked weights are zero where the mask is, as `FlowSpec.stack` makes them.
    """
    hot = None if contexts is None else F.one_hot(contexts, spec.contexts).to(x.dtype).transpose(1, 2)
    total: Tensor | None = None
    for index in range(spec.transforms):
        if index:
            x = x.flip(1)
        outputs = _network(params, spec.prefix(index), spec.num_blocks, x, hot)
        x, logdet = elementwise(spec, x, outputs.unflatten(1, (spec.features, spec.outputs)).movedim(2, 0))
        total = logdet if total is None else total + logdet
    energy = 0.5 * x.square().sum(1) + 0.5 * spec.features * LOG_TWO_PI
    return -energy if total is None else total - energy


def _network(params: Parameters, prefix: str, num_blocks: int, x: Tensor, hot: Tensor | None) -> Tensor:
    """The masked network of nflows over a stack of flows: (S, D, B) -> (S, D * outputs, B)."""

    def linear(name: str, value: Tensor) -> Tensor:
        return torch.baddbmm(params[f"{prefix}{name}.bias"].unsqueeze(-1), params[f"{prefix}{name}.weight"], value)

    hidden = linear("initial_layer", x)
    if hot is not None:
        hidden = hidden + F.relu(linear("context_layer", hot))
    for block in range(num_blocks):
        inner = linear(f"blocks.{block}.linear_layers.0", F.relu(hidden))
        if hot is not None:
            inner = inner + linear(f"blocks.{block}.context_layer", hot)
        hidden = hidden + linear(f"blocks.{block}.linear_layers.1", F.relu(inner))
    return linear("final_layer", hidden)


def elementwise(spec: FlowSpec, x: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the invertible function of each feature, which the network's outputs (spec.outputs, S, D, B) describe.

    Returns:
        New values of shape (S, D, B), as ``x`` has, and the log-determinants of shape (S, B).
    """
    if spec.kind == "maf":
        scale = F.softplus(outputs[0]) + _MIN_SCALE
        return torch.addcmul(outputs[1], scale, x), scale.log().sum(1)
    return _spline(x, outputs, spec.num_bins, spec.tail_bound)


def _spline(x: Tensor, outputs: Tensor, bins: int, bound: float) -> tuple[Tensor, Tensor]:
    """Monotone rational-quadratic splines on [-bound, bound], the identity outside (Durkan et al. 2019).

    No boolean indexing as in nflows: the shapes do not depend on the data, so it can be batched and exported.
    """
    widths, left = _knots(outputs[:bins], bound)
    heights, bottom = _knots(outputs[bins : 2 * bins], bound)
    slopes = F.softplus(outputs[2 * bins :]) + _MIN_SLOPE
    edge = torch.ones_like(slopes[:1])
    slopes = torch.cat((edge, slopes, edge))

    inside = x.clamp(-bound, bound)
    place = (inside >= left[1:]).sum(0, keepdim=True)
    width, height = widths.gather(0, place)[0], heights.gather(0, place)[0]
    start, end = slopes.gather(0, place)[0], slopes.gather(0, place + 1)[0]
    steep = height / width
    theta = (inside - left.gather(0, place)[0]) / width
    mixed = theta * (1 - theta)
    denominator = steep + (start + end - 2 * steep) * mixed
    value = bottom.gather(0, place)[0] + height * (steep * theta.square() + start * mixed) / denominator
    slope = steep.square() * (end * theta.square() + 2 * steep * mixed + start * (1 - theta).square())
    logdet = slope.log() - 2 * denominator.log()

    outer = x.abs() > bound
    return torch.where(outer, x, value), torch.where(outer, torch.zeros_like(logdet), logdet).sum(1)


def _knots(raw: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Sizes of the bins and where each bin begins, both of shape (bins, ...), on [-bound, bound]."""
    bins = raw.shape[0]
    share = _MIN_BIN + (1 - _MIN_BIN * bins) * raw.softmax(0)
    inner = 2 * bound * share.cumsum(0)[:-1] - bound
    low, high = torch.full_like(raw[:1], -bound), torch.full_like(raw[:1], bound)
    begin = torch.cat((low, inner))
    return torch.cat((inner, high)) - begin, begin
