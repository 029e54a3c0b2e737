"""Detectors whose densities are masked autoregressive flows on nflows: FlowLikelihood and RelativeFlow.

They start from the Gaussian fit. In coordinates u in which every class has unit covariance, the flow of class k acts on
u - c_k and begins as the identity, so p_k begins as the Gaussian of the Mahalanobis distance. A background flow acts
on v = L^-1 u, where L L^T is the background covariance in these coordinates, so p_0 begins as the Gaussian of MD_0.
The coordinates are as many as there are features, or only the K - 1 of RMD, in which the class means differ: p_k and
p_0 are equal Gaussians in all others, which cancel in the ratio.
Training can only improve on that: each flow keeps the epoch with the best held-out likelihood, the start included.

Many flows of one shape are a stack: parameters keep the names, shapes and meaning that nflows gives them, with one
leading dimension for the flow, and every flow of a stack can be loaded into a plain ``nflows.flows.Flow``. One forward
pass, one backward pass and one optimiser step serve all of them, yet flows never mix: each has its own samples,
batches, optimiser state and early stopping, so the result is that of training them one by one. Tensors inside run
*features first*, ``(flows, features, samples)``: each product then reads weights as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from rmd_plugin.detectors import gaussian
from rmd_plugin.detectors.detectors import RMD_INFO, StatefulDetector
from rmd_plugin.detectors.gaussian import Coordinates, Shrinkage, full_precision
from rmd_plugin.detectors.moments import Moments, check_features, pool_features, warn

if TYPE_CHECKING:
    from nflows.flows import Flow
    from nflows.transforms.made import MADE

Parameters = dict[str, Tensor]
Split = tuple[Tensor, Tensor, torch.Generator]  #: samples to train on, held-out ones, random numbers
Role = Literal["class", "background"]
Space = Literal["features", "discriminant"]
Sharing = Literal["per_class", "conditional"]
Background = Literal["flow", "gaussian"]

#: a flow with fewer samples is not trained: half a dozen points say nothing about a shape
MIN_SAMPLES = 8
#: steps before which no flow is stopped: its last layer is zero at the start, where the loss is flat, and small
#: classes, with few steps per epoch, would be stopped before they have left it
_WARM_UP = 100
#: numbers at the widest place of a pass without gradients
_EVALUATION_NUMBERS = 2**22
#: samples that a CPU scores at a time, and numbers that a pass over some classes then makes at its widest: the pass
#: stays in the cores' caches, which is worth a factor of two
_PASS_SAMPLES, _PASS_NUMBERS = 256, 2**20
#: rows that are widened to float64 at a time
_CHUNK_ROWS = 8192
#: floor by which nflows keeps scales positive: with the same number our densities equal its own
_MIN_SCALE = 1e-3
_LOG_TWO_PI = math.log(2 * math.pi)


# -- stacks of flows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlowSpec:
    """The shape of a flow: what it takes to read its parameters."""

    features: int  #: D
    hidden_features: int  #: width H of the masked network
    num_blocks: int = 1  #: residual blocks of the masked network
    transforms: int = 1  #: autoregressive; the order of the features is reversed between two of them
    contexts: int = 0  #: number of classes that the flow is conditioned on, 0 for none

    def prefix(self, transform: int) -> str:
        """Where nflows keeps the masked network of a transform: a reversal stands between two transforms."""
        return f"_transform._transforms.{2 * transform}.autoregressive_net."

    def build(self, seed: int = 0) -> Flow:
        """A plain nflows flow of this shape that starts as the identity: its density is the standard normal.

        The seed is that of the hidden layers' random start; the global random state is left as it was.
        """
        # nflows takes a second to import
        from nflows.distributions import StandardNormal
        from nflows.flows import Flow
        from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation
        from nflows.transforms.made import MADE

        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed, which would also seed the accelerators
            torch.default_generator.manual_seed(seed)
            sizes = {"context_features": self.contexts or None, "num_blocks": self.num_blocks}
            steps: list[Any] = []
            for _ in range(self.transforms):
                steps.append(MaskedAffineAutoregressiveTransform(self.features, self.hidden_features, **sizes))
                steps.append(ReversePermutation(self.features))
        flow = Flow(CompositeTransform(steps[:-1]), StandardNormal([self.features]))
        for network in flow.modules():
            if isinstance(network, MADE):
                _spread_degrees(network, self.features)
                with torch.no_grad():
                    network.final_layer.weight.zero_()
                    scales = network.final_layer.bias.zero_().view(self.features, 2)[:, 0]
                    scales.fill_(math.log(math.expm1(1 - _MIN_SCALE)))  # softplus gives 1 - _MIN_SCALE
        return flow

    def masks(self) -> Parameters:
        """The mask of every masked weight, by the weight's name, each of shape (out, in)."""
        buffers = self.build().named_buffers()
        return {f"{name.removesuffix('mask')}weight": mask for name, mask in buffers if name.endswith(".mask")}

    def stack(self, count: int, seed: int = 0) -> Parameters:
        """Parameters of ``count`` flows, all at the same start: each tensor has shape (count, ...).

        Weights are zero where the mask is: with masked gradients they stay so, and no step has to apply the mask again.
        """
        masks = self.masks()
        start = {name: value.detach() for name, value in self.build(seed).named_parameters()}
        start |= {name: start[name] * mask for name, mask in masks.items()}
        return {name: value.expand(count, *value.shape).clone() for name, value in start.items()}

    def unstack(self, params: Parameters, index: int) -> Flow:
        """Flow ``index`` of a stack as a plain nflows flow."""
        flow = self.build()
        flow.load_state_dict({name: value[index] for name, value in params.items()}, strict=False)
        return flow.to(next(iter(params.values())).device)


def _spread_degrees(network: MADE, features: int) -> None:
    """Let a narrow network see every feature.

    nflows numbers hidden units 1, 2, ..., H: with H < D - 1 no unit would see a feature beyond the H-th. Here their
    degrees are spread over 1, ..., D - 1 instead. Masks are buffers of nflows' layers: the flow stays an nflows flow.
    """
    hidden = network.initial_layer.out_features
    if hidden >= features - 1:
        return
    # up to D - 1: the last coordinate depends on all the others
    degrees = torch.arange(1, hidden + 1) * (features - 1) // hidden
    before = torch.arange(1, features + 1)
    outputs = before.repeat_interleave(2)  # a scale and a shift of each feature
    for layer in (network.initial_layer, *(layer for block in network.blocks for layer in block.linear_layers)):
        layer.degrees.copy_(degrees)
        layer.mask.copy_(degrees[:, None] >= before)
        before = degrees
    network.final_layer.mask.copy_(outputs[:, None] > degrees)


def stacked_log_prob(spec: FlowSpec, params: Parameters, x: Tensor, contexts: Tensor | None = None) -> Tensor:
    """Log-density (S, B) in nats of each flow of a stack at its own samples (S, D, B), of classes (S, B) if any.

    Differentiable in parameters and samples. Masked weights are zero where the mask is, as `FlowSpec.stack` makes them.
    """
    hot = None if contexts is None else F.one_hot(contexts, spec.contexts).to(x.dtype).transpose(1, 2)
    total = x.new_zeros(())
    for index in range(spec.transforms):
        x = x.flip(1) if index else x
        outputs = _network(params, spec.prefix(index), spec.num_blocks, x, hot)
        scale, shift = outputs.unflatten(1, (spec.features, 2)).unbind(2)
        scale = F.softplus(scale) + _MIN_SCALE
        x = torch.addcmul(shift, scale, x)
        total = total + scale.log().sum(1)
    return total + _normal_log_prob(x)


def _normal_log_prob(x: Tensor) -> Tensor:
    """Log-density of the standard normal over dimension 1 of (S, D, B) or (B, D)."""
    return -0.5 * x.square().sum(1) - 0.5 * x.shape[1] * _LOG_TWO_PI


def _network(params: Parameters, prefix: str, num_blocks: int, x: Tensor, hot: Tensor | None) -> Tensor:
    """The masked network of nflows over a stack of flows: (S, D, B) -> (S, 2 D, B)."""

    def linear(name: str, value: Tensor) -> Tensor:
        weight, bias = params[f"{prefix}{name}.weight"], params[f"{prefix}{name}.bias"]
        return torch.baddbmm(bias.unsqueeze(-1), weight.expand(len(value), -1, -1), value)

    hidden = linear("initial_layer", x)
    if hot is not None:
        hidden = hidden + F.relu(linear("context_layer", hot))
    for block in range(num_blocks):
        inner = linear(f"blocks.{block}.linear_layers.0", F.relu(hidden))
        if hot is not None:
            inner = inner + linear(f"blocks.{block}.context_layer", hot)
        hidden = hidden + linear(f"blocks.{block}.linear_layers.1", F.relu(inner))
    return linear("final_layer", hidden)


def fold_contexts(spec: FlowSpec, params: Parameters) -> tuple[FlowSpec, Parameters]:
    """One flow with K contexts as K flows without: their biases differ, and their weights are those of the one."""
    folded = {name: value for name, value in params.items() if "context_layer" not in name}
    layers = {"initial_layer": "context_layer"}
    layers |= {f"blocks.{i}.linear_layers.0": f"blocks.{i}.context_layer" for i in range(spec.num_blocks)}
    for net in map(spec.prefix, range(spec.transforms if spec.contexts else 0)):
        for layer, context in layers.items():
            added = params[f"{net}{context}.weight"][0].t() + params[f"{net}{context}.bias"]
            added = F.relu(added) if layer == "initial_layer" else added
            folded[f"{net}{layer}.bias"] = params[f"{net}{layer}.bias"] + added
    return replace(spec, contexts=0), folded


# -- training ---------------------------------------------------------------------------------------------------------


def train_flows(
    spec: FlowSpec, samples: Tensor, flows: Tensor, count: int, options: FlowDetector, contexts: Tensor | None = None
) -> FlowTraining:
    """Train ``count`` flows, each on its own samples, from the identity; those of few samples are left there.

    Works inside ``no_grad`` and ``inference_mode``; the global random state is left as it was.

    Args:
        spec: shape of the flows.
        samples: shape (N, D), on the device to train on.
        flows: flow of each sample, shape (N,), values in 0 .. count - 1.
        count: number of flows S.
        options: the detector, for how to train.
        contexts: class of each sample, shape (N,), for flows with a context.
    """
    flows = flows.cpu()
    rows = flows.argsort(stable=True).split(torch.bincount(flows, minlength=count).tolist())
    # flows that are trained together take the same number of steps in an epoch
    equal: dict[int, list[tuple[int, Split]]] = {}
    for flow in sorted(range(count), key=lambda flow: -len(rows[flow])):
        if len(rows[flow]) >= MIN_SAMPLES and options.max_epochs:
            split = split_rows(rows[flow], options, flow)
            equal.setdefault(-(-len(split[0]) // options.batch_size), []).append((flow, split))
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(samples.device.type, enabled=False):
        samples = samples.clone() if samples.is_inference() else samples.detach()  # for autograd
        contexts = None if contexts is None else contexts.to(samples.device)
        training = FlowTraining(spec, samples, contexts, options, count)
        for steps, members in equal.items():
            for start in range(0, len(members), options.class_chunk):
                numbers, splits = zip(*members[start : start + options.class_chunk], strict=True)
                training.train(torch.tensor(numbers), splits, steps)
    if training.diverged:
        warn(f"{training.diverged} of {count} flows ran into NaN: try a learning rate below {options.lr:g}.")
    return training


class FlowTraining:
    """Flows of one shape, how they are trained, and how that went; losses are mean negative log-densities, in nats.

    Attributes:
        params: of all flows, each flow's at its best epoch.
        epochs: that epoch, shape (S,); 0 where the start was never beaten.
        start_loss: of held-out samples at the start, shape (S,); NaN where the flow was not trained.
        loss: the same at the best epoch.
        diverged: number of flows that ran into NaN or infinity and are back at their best.
    """

    def __init__(
        self, spec: FlowSpec, samples: Tensor, contexts: Tensor | None, options: FlowDetector, count: int
    ) -> None:
        self.spec, self.samples, self.contexts, self.options = spec, samples, contexts, options
        self.masks = {name: mask.to(samples) for name, mask in spec.masks().items()}
        self.params = {name: value.to(samples) for name, value in spec.stack(count, options.seed).items()}
        self.epochs = torch.zeros(count, dtype=torch.long)
        self.start_loss, self.loss = torch.full((count,), torch.nan), torch.full((count,), torch.nan)
        self.diverged = 0

    def tensors(self, role: Role) -> dict[str, Tensor]:
        """The part of a detector's state that the flows make up."""
        return {f"{role}_flow.{name}": value for name, value in self.params.items()} | {
            f"{role}_{name}": getattr(self, name) for name in ("epochs", "start_loss", "loss")
        }

    def train(self, flows: Tensor, splits: Sequence[Split], steps: int) -> None:
        """Train some of the flows (k,) together, until the last of them has stopped.

        Args:
            flows: their numbers, shape (k,).
            splits: their samples and random numbers.
            steps: of an epoch.
        """
        options, params = self.options, {name: value[flows].requires_grad_() for name, value in self.params.items()}
        groups: list[dict[str, Any]] = [
            {"params": [value for value in params.values() if value.ndim > 2]},
            {"params": [value for value in params.values() if value.ndim == 2], "weight_decay": 0.0},
        ]
        fused = self.samples.device.type in ("cpu", "cuda")
        optimizer = torch.optim.AdamW(groups, options.lr, weight_decay=options.weight_decay, fused=fused)
        self.start_loss[flows] = self.loss[flows] = self._evaluate(params, splits)
        stopped, stale = torch.zeros_like(flows, dtype=torch.bool), torch.zeros_like(flows)
        title, hidden = f"train {len(flows)} flows", None if options.progress else True  # None: on a terminal
        bar = tqdm(range(1, options.max_epochs + 1), desc=title, unit="epoch", disable=hidden, leave=False)
        for epoch in bar:
            training, validation = self._epoch(params, optimizer, splits, steps), self._evaluate(params, splits)
            losses = {"train": f"{training.mean():.2f}", "val": f"{validation.mean():.2f}"}
            bar.set_postfix(epoch=epoch, flows=int((~stopped).sum()), **losses)
            finite = training.isfinite() & validation.isfinite()
            better = finite & ~stopped & (validation < self.loss[flows])
            for name, value in params.items():
                self.params[name][flows[better].to(value.device)] = value.detach()[better.to(value.device)]
            self.loss[flows[better]], self.epochs[flows[better]] = validation[better], epoch
            self.diverged += int((~finite & ~stopped).sum())
            stale = torch.where(better, 0, stale + 1)
            stopped |= ~finite
            if options.validation_fraction and epoch * steps >= _WARM_UP:
                stopped |= stale >= options.patience
            if bool(stopped.all()):
                return

    def _epoch(
        self, params: Parameters, optimizer: torch.optim.Optimizer, splits: Sequence[Split], steps: int
    ) -> Tensor:
        """One pass over the training part; the mean loss of each flow, shape (k,)."""
        orders = [rows[torch.randperm(len(rows), generator=generator)] for rows, _, generator in splits]
        losses = []
        for rows, weights in epoch_batches(orders, steps):
            loss = (self._loss(params, rows) * weights.to(self.samples)).sum(1)
            optimizer.zero_grad()
            # a sum of independent losses: no flow's gradient contains another flow, not even its NaN
            loss.sum().backward()
            for name, mask in self.masks.items():
                params[name].grad *= mask  # type: ignore[operator]
            optimizer.step()
            losses.append(loss.detach().cpu())
        return torch.stack(losses).mean(0)

    @torch.no_grad()
    def _evaluate(self, params: Parameters, splits: Sequence[Split]) -> Tensor:
        """Mean loss of each flow on its validation part, shape (k,)."""
        held_out = [rows for _, rows, _ in splits]
        sizes = torch.tensor([len(rows) for rows in held_out])
        width = max(16, _EVALUATION_NUMBERS // (len(sizes) * self.spec.features * 2))
        total = torch.zeros(len(sizes), dtype=torch.float64)
        for rows, weights in epoch_batches(held_out, -(-int(sizes.max()) // width)):
            total += torch.where(weights > 0, self._loss(params, rows).cpu(), 0.0).sum(1)
        return (total / sizes).float()

    def _loss(self, params: Parameters, rows: Tensor) -> Tensor:
        """Negative log-density of each flow at its samples ``rows`` of shape (k, b); shape (k, b)."""
        rows = rows.to(self.samples.device)
        x = self.samples[rows].transpose(1, 2).contiguous()
        return -stacked_log_prob(self.spec, params, x, None if self.contexts is None else self.contexts[rows])


def split_rows(rows: Tensor, options: FlowDetector, flow: int) -> Split:
    """Training and validation part (at least two) of a flow's samples, given by index, and its random numbers.

    These depend on nothing but the seed and the flow. Without a validation fraction both parts are all samples.
    """
    # neighbouring seeds must not give neighbouring flows the same stream
    generator = torch.Generator().manual_seed((options.seed * 0x9E3779B1 + flow * 0x85EBCA6B + 1) % 2**63)
    if options.validation_fraction == 0:
        return rows, rows, generator
    held = min(max(2, round(options.validation_fraction * len(rows))), len(rows) - 1)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    return rows[held:], rows[:held], generator


def epoch_batches(orders: Sequence[Tensor], steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split the samples of each flow into batches of equal sizes (within one); every sample comes exactly once.

    Yields:
        Samples (S, b) of the flows, and their weights (S, b): 1 / size of the flow's batch, 0 for padding.
    """
    sizes = torch.tensor([len(order) for order in orders])
    padded = pad_sequence(list(orders), batch_first=True)
    for step in range(steps):
        start = step * sizes // steps
        size = (step + 1) * sizes // steps - start
        place = torch.arange(int(size.max()))
        weights = (place < size[:, None]) / size[:, None]
        # padding repeats the flow's last sample, whose weight there is 0
        yield padded.gather(1, (start[:, None] + place).minimum(sizes[:, None] - 1)), weights


# -- the Gaussian start -----------------------------------------------------------------------------------------------


def fit_start(moments: Moments, shrinkage: Shrinkage, space: Space) -> dict[str, Tensor]:
    """Fit the Gaussians that the flows start from, in coordinates u in which every class has unit covariance.

    In the coordinates ``v = u @ background_projection`` all classes together have unit covariance. The log-volumes are
    what the two maps add to a log-density.
    """
    projection = _discriminant(moments, shrinkage) if space == "discriminant" else None
    projection = _features(moments, shrinkage) if projection is None else projection
    points = gaussian.class_offsets(moments) @ projection
    covariance = points.T @ (gaussian.class_shares(moments)[:, None] * points)
    covariance.diagonal().add_(1.0)
    factor = torch.linalg.cholesky(covariance)
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    return {
        "shift": moments.background_mean,
        "projection": projection.contiguous(),
        "points": points,
        "classes": moments.counts.nonzero().flatten(),
        "log_volume": torch.linalg.qr(projection)[1].diagonal().abs().log().sum(),
        "background_projection": inverse.T.contiguous(),
        "background_log_volume": -factor.diagonal().log().sum(),
    }


def _features(moments: Moments, shrinkage: Shrinkage) -> Tensor:
    """All directions, turned so that the i-th coordinate depends on the first i features only (dead ones left out).

    The order in which an autoregressive flow goes through the coordinates is then the order of the features, and
    nothing of their shape is lost: a feature that is a curved function of an earlier one remains that.
    """
    whitening = gaussian.whiten(gaussian.shrunk_covariance(moments, shrinkage), moments)
    if whitening.scale is not None:
        return whitening.directions(torch.eye(moments.num_features).to(whitening.scale))
    alive = whitening.matrix.abs().amax(1) > 0
    # RQ decomposition: rows and columns in reverse turn the lower triangle of QR into an upper one
    projection: Tensor = whitening.matrix @ torch.linalg.qr(whitening.matrix[alive].flip(0).T)[0].flip(1)
    # QR leaves the signs open: the last feature of a coordinate counts upwards
    last = projection[alive][-projection.shape[1] :].diagonal()
    return projection * torch.where(last < 0, -1.0, 1.0)


def _discriminant(moments: Moments, shrinkage: Shrinkage) -> Tensor | None:
    """Those in which the class means differ, at most K - 1: RMD's, by descending between-class variance."""
    several = int((moments.counts > 0).sum()) > 1
    projection = gaussian.fit_relative(moments, shrinkage)["projection"] if several else moments.second[:, :0]
    if not projection.shape[1]:
        warn("the class means do not differ, so there is no discriminant space: that of the features is taken.")
        return None
    # SVD leaves the signs open: the feature of the largest coefficient counts upwards
    largest = projection.gather(0, projection.abs().argmax(0, keepdim=True))
    return projection * torch.where(largest < 0, -1.0, 1.0)


# -- scoring ----------------------------------------------------------------------------------------------------------


class FlowScore(Coordinates):
    """Scores features by flows; holds buffers only, so it can be exported.

    Args:
        state: of the detector.
        classes: class densities.
        background: background density; None for the Gaussian one.
        relative: score the ratio to the background, else the class densities alone.
        normalize: scale the features to unit length first.
    """

    def __init__(
        self, state: Parameters, classes: FlowBank, background: FlowBank | None, *, relative: bool, normalize: bool
    ) -> None:
        super().__init__(state["shift"], state["projection"], torch.float64, normalize=normalize)
        self.relative = relative
        self.background_projection = nn.Buffer(state["background_projection"].clone())
        # the volume of the whitening itself is in both densities of a ratio and cancels
        self.log_volume = nn.Buffer(state["background_log_volume"] if relative else -state["log_volume"])
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
        dtype = self.class_bank.points.dtype
        with full_precision(z):
            scores: Tensor = -self.class_bank(u.to(dtype))
            if self.relative:
                v = (u @ self.background_projection).to(dtype)
                bank = self.background_bank
                scores = scores + (_normal_log_prob(v).unsqueeze(1) if bank is None else bank(v))
            return scores + self.log_volume.to(dtype)

    def whiten(self, z: Tensor) -> Tensor:
        """Coordinates u of shape (B, q), float64."""
        with full_precision(z):
            return self.project(self.centre(z))


class FlowBank(nn.Module):
    """Densities of K flows at the same samples; holds buffers only.

    Args:
        spec: shape of the flows.
        params: stacked parameters of K flows, or of one flow with K contexts.
        points: class k's flow acts on ``u - points[k]``, shape (K, D).
        plain: classes whose density is the standard normal instead of a flow, shape (K,), or None for no such class.
        gain: by how much, at most, a flow's log-density is above that of the standard normal, shape (K,) or (1,); None
            for no limit.
    """

    def __init__(
        self,
        spec: FlowSpec,
        params: Parameters,
        points: Tensor,
        plain: Tensor | None = None,
        gain: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.spec, params = fold_contexts(spec, params)
        self.names = {name: name.replace(".", "_") for name in params}  # the name of a buffer has no dots
        for name, value in params.items():
            self.register_buffer(self.names[name], value)
        self.points = nn.Buffer(points.to(next(iter(params.values())).dtype))
        self.plain = nn.Buffer(plain) if plain is not None and bool(plain.any()) else None
        self.gain = None if gain is None else nn.Buffer(gain.to(self.points).expand(len(points)).contiguous())
        self.chunk = max(1, _PASS_NUMBERS // (_PASS_SAMPLES * spec.features * 2))

    def forward(self, u: Tensor) -> Tensor:
        """Log-density of every class, shape (B, K), at whitened features of shape (B, D)."""
        starts = range(0, len(self.points), self.chunk)
        return torch.cat([self._log_prob(u.t(), slice(start, start + self.chunk)) for start in starts]).t()

    def _log_prob(self, u: Tensor, part: slice) -> Tensor:
        """Log-density of some classes, shape (k, B), at samples of shape (D, B)."""
        params = {name: getattr(self, place) for name, place in self.names.items()}
        params = {name: value if len(value) == 1 else value[part] for name, value in params.items()}
        x = u - self.points[part].unsqueeze(-1)
        log_prob, normal = stacked_log_prob(self.spec, params, x), _normal_log_prob(x)
        if self.gain is not None:
            log_prob = torch.minimum(log_prob, normal + self.gain[part].unsqueeze(-1))
        if self.plain is not None:
            log_prob = torch.where(self.plain[part].unsqueeze(-1), normal, log_prob)
        return log_prob


# -- the detectors ----------------------------------------------------------------------------------------------------


class FlowDetector(StatefulDetector):
    """Base class of the detectors that are made of flows.

    Features are kept in memory while the flows are trained (in their own dtype, plus one or two float32 copies). They
    are trained on the device of the detector (``.to(device)``), else of the encoder or the features.

    Args:
        encoder: maps inputs to features of shape (B, D), or to maps (B, C, H, W), which are averaged over space. May be
            None where only the feature methods are used.
        space: where the flows act: ``"features"``, in all directions, as in the paper, or ``"discriminant"``, in the
            min(D, K - 1) in which the class means differ (those of :class:`rmd_plugin.RMD`).
        transforms: autoregressive transforms of a flow; the paper has one.
        hidden_features: width of the masked networks. None takes as many as there are features, within 64 and 128.
        num_blocks: residual blocks of the masked networks.
        sharing: ``"per_class"``, a flow for each class as in the paper, or ``"conditional"``, one flow that is given
            the class as context: it is trained on all samples, for classes too small for flows of their own.
        max_epochs: largest number of passes over the training part; 0 gives the Gaussian detectors.
        batch_size: samples of one class in one step. All classes take their steps at the same time. The background flow
            and a conditional flow, which see all classes, take up to four times as many where that leaves 200 steps.
        lr: learning rate of AdamW.
        weight_decay: weight decay of AdamW, on weights, not on biases.
        validation_fraction: part of each class that is held out to find the best epoch of its flow. With 0 the training
            part decides, and only ``max_epochs`` ends the training.
        patience: epochs without a better held-out likelihood after which a flow is frozen, though not before its first
            100 steps.
        class_chunk: classes whose flows are trained together, which bounds the memory (100 flows of 640 features take
            about 1 GiB). It does not change the result.
        seed: of everything random. The global random state is neither used nor changed.
        shrinkage: of the within-class covariance, see :class:`rmd_plugin.RMD`.
        normalize: scale the features to unit length first.
        progress: show a bar with the epoch, and training and validation loss in nats, if there is a terminal.
    """

    info = RMD_INFO
    from_moments = False
    _chunk_rows = _PASS_SAMPLES
    hyperparameter_space = {"transforms": [1, 2], "shrinkage": [0.0, 0.1]}  # noqa: RUF012
    _relative: ClassVar[bool]
    _choices: ClassVar = {"sharing": ("per_class", "conditional"), "space": ("features", "discriminant")}

    _: KW_ONLY
    space: Space = "features"
    transforms: int = 1
    hidden_features: int | None = None
    num_blocks: int = 1
    sharing: Sharing = "per_class"
    max_epochs: int = 100
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 1e-4
    validation_fraction: float = 0.1
    patience: int = 10
    class_chunk: int = 100
    seed: int = 0
    progress: bool = True
    background: Background | None = field(init=False, default=None)
    covariance: Literal["tied", "diagonal"] = field(init=False, default="tied")
    keep_moments: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie in [0, 1), got {self.validation_fraction!r}.")
        for name, choices in self._choices.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")

    # -- fitting --------------------------------------------------------------------------------------------------

    def _fit_batches(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:  # type: ignore[override]
        with torch.inference_mode(False), torch.no_grad():
            metric = self.new_moments(sync_on_compute=False)
            rows, labels = [], []
            for z, y in batches:
                metric.update(z, y)  # also refuses what cannot be fitted
                is_id = y >= 0
                rows.append(pool_features(check_features(z).detach())[is_id.to(z.device)])
                labels.append(y[is_id].cpu().long())
            moments, samples = metric.compute(), (torch.cat(rows), torch.cat(labels))
            del rows  # they take as much memory as the flows
        return self.fit_moments(moments, samples=samples)

    def _encode(self, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        # all of them are kept until the flows are trained
        return ((z.cpu(), y.cpu()) for z, y in super()._encode(loader))

    def _fit_parameters(self, moments: Moments, samples: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        if samples is None:
            return super()._fit_parameters(moments)
        z, y = samples
        if self._relative and int((moments.counts > 0).sum()) == 1:
            warn("a single class is its own background, so the ratio says little. Use FlowLikelihood.")
        state = fit_start(moments, self.shrinkage, self.space)
        labels, points = state["classes"].cpu(), state["points"]
        index = torch.searchsorted(labels, y)
        counts = torch.bincount(index, minlength=len(labels))
        device = z.device if self.device is None else self.device
        own = torch.empty(len(z), points.shape[1], dtype=torch.float32, device=device)
        everywhere = torch.empty_like(own if self.background == "flow" else own[:0])
        # float64: whitening gathers the rounding errors of wide features in narrow directions, and costs little here
        coordinates = Coordinates(state["shift"], state["projection"], torch.float64, normalize=self.normalize)
        for start in range(0, len(z), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            u = coordinates.project(coordinates.centre(z[part].to(points.device)))
            own[part] = (u - points[index[part].to(u.device)]).to(own)
            if self.background == "flow":
                everywhere[part] = (u @ state["background_projection"]).to(own)
        plain = counts < MIN_SAMPLES
        if few := labels[plain].tolist():
            warn(f"classes of fewer than {MIN_SAMPLES} samples keep their Gaussian: {few[:8]}.")
        spec = _spec(self.options, points.shape[1])
        if self.sharing == "conditional":
            # a class with a handful of samples must not bend the shared flow
            large = ~plain[index]
            fit = self._train_shared(replace(spec, contexts=len(labels)), own[large.to(device)], index[large])
        else:
            fit = train_flows(spec, own, index, len(labels), self)
        state |= {"counts": counts, "plain": plain, **fit.tensors("class")}
        if self.background == "flow":
            state |= self._train_shared(spec, everywhere).tensors("background")
        return {name: tensor.to(device) for name, tensor in state.items()}

    def _train_shared(self, spec: FlowSpec, x: Tensor, contexts: Tensor | None = None) -> FlowTraining:
        """Train one flow on the samples of all classes, in larger batches: thousands of small steps take longer."""
        options = copy(self)
        options.batch_size = min(max(self.batch_size, len(x) // 200), 4 * self.batch_size)
        return train_flows(spec, x, torch.zeros(len(x), dtype=torch.long), 1, options, contexts)

    # -- scoring --------------------------------------------------------------------------------------------------

    def _build_module(self, dtype: torch.dtype) -> nn.Module:
        state, options, gain, background = self._state, self._fitted_options, None, None
        if options.get("background") == "flow":
            background = FlowBank(*self._flows("background", dtype), torch.zeros_like(state["points"][:1]))
        elif self._relative:
            # on average over held-out samples; none where nothing was trained
            gain = (state["class_start_loss"] - state["class_loss"]).nan_to_num(0.0)
        classes = FlowBank(*self._flows("class", dtype), state["points"], state["plain"], gain)
        return FlowScore(state, classes, background, relative=self._relative, normalize=options["normalize"])

    def _flows(self, role: Role, dtype: torch.dtype = torch.float32) -> tuple[FlowSpec, Parameters]:
        """Shape and stacked parameters of the fitted flows, under the names of nflows."""
        prefix, state = f"{role}_flow.", self._state
        params = {name.removeprefix(prefix): state[name].to(dtype) for name in state if name.startswith(prefix)}
        contexts = len(state["classes"]) if role == "class" and self._conditional else 0
        return _spec(self._fitted_options, state["points"].shape[1], contexts), params

    @property
    def _conditional(self) -> bool:
        return bool(self._fitted_options["sharing"] == "conditional")

    def _score_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32  # of the flows; features are always whitened in float64

    def class_flow(self, label: int) -> Flow:
        """The flow of a class as a new ``nflows.flows.Flow``: of u - c_k, see :meth:`coordinates`.

        With ``sharing="conditional"`` it is the same for every class and takes the one-hot class, among those that
        have samples, as context.
        """
        position = self._position(label)
        spec, params = self._flows("class")
        return spec.unstack(params, 0 if self._conditional else position)

    def coordinates(self, z: Tensor, label: int | None = None) -> Tensor:
        """Where the flows act: features in coordinates in which each class has mean zero and unit covariance.

        Args:
            z: features of shape (B, D) or (B, C, H, W).
            label: the class whose centre is subtracted; None subtracts the background mean.

        Returns:
            Coordinates of shape (B, q); q < D where features are constant or linearly dependent.
        """
        centre = 0.0 if label is None else self._state["points"][self._position(label)]
        return self._map_chunks(z, lambda module, rows: module.whiten(rows) - centre)  # type: ignore[operator]

    def _position(self, label: int) -> int:
        """Place of a class among those that have samples."""
        classes = self._require_classes().tolist()
        if label not in classes:
            raise ValueError(f"no flow for class {label!r}. Classes with samples: {classes}.")
        return int(classes.index(label))

    def training_report(self) -> list[dict[str, int | float | str]]:
        """How the training of each flow went, one row per flow.

        Returns:
            Rows with ``flow`` (the label, "conditional" or "background"), ``epoch`` (whose parameters are kept, 0 for
            the Gaussian start), ``gaussian`` and ``trained`` (mean negative log-density of the held-out samples at the
            start and at that epoch, in nats, lower is better; NaN where nothing was trained).
        """
        labels = self._require_classes().tolist()
        flows = {"class": ["conditional"] if self._conditional else labels}
        if self._fitted_options.get("background") == "flow":
            flows["background"] = ["background"]
        rows: list[dict[str, int | float | str]] = []
        for role, names in flows.items():
            columns = (self._state[f"{role}_{name}"].tolist() for name in ("epochs", "start_loss", "loss"))
            for row in zip(names, *columns, strict=True):
                rows.append(dict(zip(("flow", "epoch", "gaussian", "trained"), row, strict=True)))
        return rows


def _spec(options: Mapping[str, Any], width: int, contexts: int = 0) -> FlowSpec:
    hidden = options["hidden_features"]
    hidden = min(max(width, 64), 128) if hidden is None else hidden
    return FlowSpec(width, hidden, options["num_blocks"], options["transforms"], contexts)


class FlowLikelihood(FlowDetector):
    """Negative log-density under the best class, -max_k log p_k(z), where each p_k is a flow.

    Without training (``max_epochs=0``) it is a Mahalanobis distance: in the space of the features it ranks as
    :class:`rmd_plugin.Mahalanobis` does. Densities are in nats, over the directions that the flows see. There is no
    background; for the options see :class:`FlowDetector`.

    Example:
        >>> import torch
        >>> from rmd_plugin import FlowLikelihood
        >>> z, y = torch.randn(200, 2), torch.arange(200) % 2
        >>> detector = FlowLikelihood(max_epochs=2).fit_features(z, y)
        >>> detector
        <FlowLikelihood(max_epochs=2) fitted: 2 classes, 2 features>
        >>> [row["flow"] for row in detector.training_report()]
        [0, 1]
    """

    _relative = False


class RelativeFlow(FlowDetector):
    """Negative log-ratio of the best class and the background, -max_k (log p_k(z) - log p_0(z)); each p_k is a flow.

    Without training (``max_epochs=0``) it ranks as :class:`rmd_plugin.RMD` does in either space: its score is then
    RMD / 2 plus a constant. The defaults are what was best on development data (docs/detectors.md); the paper's own
    setting is ``background="flow", space="features", sharing="per_class"``. Classes that are curved in directions in
    which their means agree, as the two below, need ``space="features"``.

    Args:
        encoder: see :class:`FlowDetector`.
        background: p_0, ``"flow"``, trained on all classes, or ``"gaussian"``, the one of RMD. A flow that fits well
            makes of the ratio a class posterior, which no longer tells how far a sample is from all classes. Beside a
            Gaussian, log p_k is at most that of the class's Gaussian plus what its flow has gained over it on held-out
            samples (with one flow for all classes, on those of all): flows learn heavy tails, and next to thin ones
            whatever is far away would look in-distribution.
        space: see :class:`FlowDetector`.
        sharing: see :class:`FlowDetector`.

    The other options are those of :class:`FlowDetector`.

    Example:
        >>> import torch
        >>> from rmd_plugin import RelativeFlow
        >>> _ = torch.manual_seed(0)
        >>> y = torch.arange(600) % 2
        >>> z = torch.randn(600, 2)
        >>> z[:, 1] = (1 - 2 * y) * (z[:, 0] ** 2 + 1) + 0.3 * z[:, 1]  # two arcs, back to back
        >>> detector = RelativeFlow(space="features", max_epochs=20, lr=1e-2).fit_features(z, y)
        >>> on_an_arc, behind_it = detector.predict_features(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
        >>> bool(on_an_arc < 0 < behind_it)
        True
    """

    _relative = True
    _choices: ClassVar = {**FlowDetector._choices, "background": ("flow", "gaussian")}

    _: KW_ONLY
    background: Background = "gaussian"
    space: Space = "discriminant"
    sharing: Sharing = "conditional"
