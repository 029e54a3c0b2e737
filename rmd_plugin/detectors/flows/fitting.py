"""Training of many flows at once: one forward pass, one backward pass and one optimiser step serve every flow.

Flows never mix: each has its own samples, its own batches, its own optimiser state and its own early stopping, so the
result is that of training them one by one. A flow that has stopped leaves the stack and costs nothing more.

A single transform is trained from the identity. Several transforms then often end in a poor optimum (on two moons 0.1
nats behind nflows' own start, which is wider than the data), but small classes of many features need it: so they are
trained from both starts, and the better held-out likelihood is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from rmd_plugin.detectors.base import check_integer
from rmd_plugin.detectors.flows.optimizer import StackedAdamW
from rmd_plugin.detectors.flows.spec import FlowSpec, Parameters, stacked_log_prob

Role = Literal["class", "background"]

#: a flow with fewer samples is not trained: half a dozen points say nothing about a shape
MIN_SAMPLES = 8
#: numbers that a stack of flows may hold in memory at a time where the user sets no ``class_chunk`` (1 GiB in float32)
_STACK_NUMBERS = 2**28
#: numbers at the widest place of a pass without gradients
_EVALUATION_NUMBERS = 2**22


@dataclass(frozen=True)
class TrainingOptions:
    """How flows are trained; see ``FlowDetector`` for what is not said here."""

    max_epochs: int = 100
    batch_size: int = 64  #: at most: the batches of an epoch have equal sizes (within one)
    lr: float = 2e-3
    weight_decay: float = 1e-4
    validation_fraction: float = 0.1
    patience: int = 10
    #: steps before which no flow is stopped: its last layer is zero at the start, where the loss is flat, and small
    #: classes, with few steps per epoch, would be stopped before they have left it
    warm_up: int = 100
    seed: int = 0  #: flow s has the same start and batches, whatever other flows there are
    chunk: int | None = None  #: flows that are trained together, None to derive it from the memory they need
    progress: bool = False  #: on a terminal

    def __post_init__(self) -> None:
        lowest_values = {"max_epochs": 0, "batch_size": 1, "patience": 1, "warm_up": 0, "seed": 0, "chunk": 1}
        for name, lowest in lowest_values.items():
            if name != "chunk" or self.chunk is not None:
                check_integer("class_chunk" if name == "chunk" else name, getattr(self, name), lowest)
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr!r}.")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay!r}.")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must lie in [0, 1), got {self.validation_fraction!r}.")


@dataclass
class FlowFit:
    """Trained flows and how the training went; losses are mean negative log-densities of held-out samples, in nats."""

    params: Parameters  #: of all flows, each flow's at its best epoch
    epochs: Tensor  #: that epoch, shape (S,); 0 where the start was never beaten
    start_loss: Tensor  #: shape (S,); NaN where the flow was not trained
    loss: Tensor  #: with the kept parameters, shape (S,)
    skipped: list[int] = field(default_factory=list)  #: too few samples, left at their start
    diverged: list[int] = field(default_factory=list)  #: ran into NaN or infinity, back at their best
    interrupted: bool = False  #: by Ctrl-C

    def tensors(self, role: Role) -> dict[str, Tensor]:
        """What a detector keeps of it, under the names that its state gives them."""
        return {f"{role}_flow.{name}": value for name, value in self.params.items()} | {
            f"{role}_{name}": getattr(self, name) for name in ("epochs", "start_loss", "loss")
        }


def flow_generator(seed: int, flow: int) -> torch.Generator:
    """Random numbers of one flow: they depend on nothing but the seed and the flow's index."""
    # neighbouring seeds must not give neighbouring flows the same stream
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + flow * 0x85EBCA6B + 1) % 2**63)


def split_rows(rows: Tensor, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Training and validation part (at least two) of a flow's samples, given by index; for fraction 0 both are all."""
    if fraction == 0:
        return rows, rows
    held = min(max(2, round(fraction * len(rows))), len(rows) - 1)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    return rows[held:], rows[:held]


def epoch_batches(orders: Sequence[Tensor], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one epoch for a stack of flows; every sample of every flow comes exactly once.

    A flow with n samples takes ceil(n / batch_size) steps with batches of equal sizes (within one). Flows are sorted by
    descending n (``orders`` has the samples of each), so those that still have a batch are the first of the stack.

    Yields:
        Samples (m, b) of the first m flows, and their weights (m, b): 1 / size of the flow's batch, 0 for padding.
    """
    sizes = torch.tensor([len(order) for order in orders])
    steps = (sizes + batch_size - 1) // batch_size
    padded = pad_sequence(list(orders), batch_first=True)
    for step in range(int(steps.max())):
        active = int((steps > step).sum())
        start = step * sizes[:active] // steps[:active]
        size = (step + 1) * sizes[:active] // steps[:active] - start
        place = torch.arange(int(size.max()))
        weights = (place < size[:, None]) / size[:, None]
        # padding repeats the flow's last sample, whose weight there is 0
        place = (start[:, None] + place).minimum(sizes[:active, None] - 1)
        yield padded[:active].gather(1, place), weights


def train_flows(
    spec: FlowSpec,
    samples: Tensor,
    flows: Tensor,
    count: int,
    options: TrainingOptions,
    *,
    contexts: Tensor | None = None,
    title: str = "flows",
) -> FlowFit:
    """Train ``count`` flows, each on its own samples, from the identity, or something better.

    Works inside ``no_grad`` and ``inference_mode``; the global random state is left as it was. Ctrl-C ends the
    training, and every flow keeps the best parameters it has had so far.

    Args:
        spec: shape of the flows.
        samples: shape (N, D), on the device to train on.
        flows: flow of each sample, shape (N,), values in 0 .. count - 1.
        count: number of flows S.
        options: how to train.
        contexts: class of each sample, shape (N,), for flows with a context.
        title: of the progress bar.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(samples.device.type, enabled=False):
        if samples.is_inference():
            samples = samples.clone()  # autograd refuses tensors made in inference mode
        return _Trainer(spec, samples, contexts, options).run(flows.cpu(), count, title)


class _Trainer:
    """Everything that stays the same while the stacks of flows are trained one after the other."""

    def __init__(self, spec: FlowSpec, samples: Tensor, contexts: Tensor | None, options: TrainingOptions) -> None:
        self.spec, self.samples, self.options = spec, samples.detach(), options
        self.contexts = None if contexts is None else contexts.to(samples.device)
        self.masks = {name: mask.to(samples) for name, mask in spec.masks().items()}

    def run(self, flows: Tensor, count: int, title: str) -> FlowFit:
        rows = flows.argsort(stable=True).split(torch.bincount(flows, minlength=count).tolist())
        params = self.start(count, identity=True)
        nan = torch.full((count,), torch.nan)
        fit = FlowFit(params, torch.zeros(count, dtype=torch.long), start_loss=nan, loss=nan.clone())
        fit.skipped = [flow for flow in range(count) if len(rows[flow]) < MIN_SAMPLES]
        trained = [flow for flow in range(count) if len(rows[flow]) >= MIN_SAMPLES]
        if not trained or not self.options.max_epochs:
            return fit
        # flows of similar size share a stack: less padding, and full stacks until the end of an epoch
        trained.sort(key=lambda flow: -len(rows[flow]))
        chunk = self.options.chunk or self._chunk()
        parts = [trained[i : i + chunk] for i in range(0, len(trained), chunk)]
        runs = list(product(parts, (True, False) if self.spec.transforms > 1 else (True,)))
        # None: only on a terminal
        epochs, hidden = self.options.max_epochs, None if self.options.progress else True
        with tqdm(total=len(runs) * epochs, desc=title, unit="epoch", disable=hidden, leave=False) as bar:
            try:
                for number, (part, identity) in enumerate(runs):
                    _Stack(self, fit, part, [rows[flow] for flow in part], identity=identity).train(bar)
                    bar.update((number + 1) * epochs - bar.n)
            except KeyboardInterrupt:
                fit.interrupted = True
        return fit

    def start(self, count: int, *, identity: bool) -> Parameters:
        start = self.spec.stack(1, self.options.seed, identity=identity)
        return {name: value.to(self.samples).repeat_interleave(count, 0) for name, value in start.items()}

    def _chunk(self) -> int:
        spec = self.spec
        # parameters, gradients, two moments, a copy of the best and room for temporaries; then the activations
        fixed = 6 * sum(mask.numel() for mask in self.masks.values())
        sample = spec.transforms * (
            spec.features * (spec.outputs + 6) + spec.hidden_features * (4 * spec.num_blocks + 3)
        )
        return max(1, _STACK_NUMBERS // (fixed + self.options.batch_size * sample))

    def loss(self, params: Parameters, rows: Tensor) -> Tensor:
        """Negative log-density of each flow at its samples ``rows`` of shape (S, b); shape (S, b)."""
        rows = rows.to(self.samples.device)
        x = self.samples[rows].transpose(1, 2).contiguous()
        contexts = None if self.contexts is None else self.contexts[rows]
        return -stacked_log_prob(self.spec, params, x, contexts)


class _Stack:
    """Flows that are trained together, longest first, until the last of them has stopped."""

    def __init__(
        self, trainer: _Trainer, fit: FlowFit, flows: list[int], rows: Sequence[Tensor], *, identity: bool
    ) -> None:
        options = trainer.options
        self.trainer, self.fit, self.options = trainer, fit, options
        self.generators = [flow_generator(options.seed, flow) for flow in flows]
        parts = [split_rows(r, options.validation_fraction, g) for r, g in zip(rows, self.generators, strict=True)]
        self.training, self.validation = ([part[i] for part in parts] for i in (0, 1))
        self.flows = torch.tensor(flows)
        self.params = trainer.start(len(flows), identity=identity)
        self.optimizer = StackedAdamW(self.params, lr=options.lr, weight_decay=options.weight_decay)
        self.stale = torch.zeros(len(flows), dtype=torch.long)
        self.best = self.evaluate()
        if identity:
            fit.start_loss[self.flows] = fit.loss[self.flows] = self.best

    def _steps(self) -> list[int]:
        return [-(-len(rows) // self.options.batch_size) for rows in self.training]

    def train(self, bar: tqdm) -> None:
        for epoch in range(1, self.options.max_epochs + 1):
            if not len(self.flows):
                return
            training = self.epoch()
            validation = self.evaluate()
            bar.update()
            losses = {"train": f"{training.mean():.2f}", "val": f"{validation.mean():.2f}"}
            bar.set_postfix(epoch=epoch, flows=len(self.flows), **losses)
            finite = training.isfinite() & validation.isfinite()
            better = finite & (validation < self.best)
            # from another start, a flow may become better for long before it beats what is kept
            self._commit(better & (validation < self.fit.loss[self.flows]), validation, epoch)
            self.best = torch.where(better, validation, self.best)
            self.stale = torch.where(better, 0, self.stale + 1)
            stop = ~finite
            if self.options.validation_fraction:
                warm = epoch * torch.tensor(self._steps()) >= self.options.warm_up
                stop |= warm & (self.stale >= self.options.patience)
            self.fit.diverged.extend(flow for flow in self.flows[~finite].tolist() if flow not in self.fit.diverged)
            if bool(stop.any()):
                self._keep((~stop).nonzero().flatten())

    def epoch(self) -> Tensor:
        """One pass over the training part; the mean loss of each flow, shape (S,)."""
        orders = [
            rows[torch.randperm(len(rows), generator=generator)]
            for rows, generator in zip(self.training, self.generators, strict=True)
        ]
        total, steps = torch.zeros(len(orders)), torch.tensor(self._steps())
        for rows, weights in epoch_batches(orders, self.options.batch_size):
            active = len(rows)
            leaves = {name: value[:active].detach().requires_grad_() for name, value in self.params.items()}
            losses = (self.trainer.loss(leaves, rows) * weights.to(self.trainer.samples)).sum(1)
            # a sum of independent losses: no flow's gradient contains another flow, not even its NaN
            gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
            masked = {
                name: gradient.mul_(self.trainer.masks[name]) if name in self.trainer.masks else gradient
                for name, gradient in zip(leaves, gradients, strict=True)
            }
            self.optimizer.step(masked)
            total[:active] += losses.detach().cpu()
        return total / steps

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Mean loss of each flow on its validation part, shape (S,)."""
        sizes = torch.tensor([len(rows) for rows in self.validation])
        rows = pad_sequence(self.validation, batch_first=True)
        spec = self.trainer.spec
        width = max(16, _EVALUATION_NUMBERS // (len(sizes) * spec.features * spec.outputs))
        total = torch.zeros(len(sizes), dtype=torch.float64)
        for start in range(0, rows.shape[1], width):
            part = rows[:, start : start + width]
            real = torch.arange(start, start + part.shape[1]) < sizes[:, None]  # the others are padding
            total += torch.where(real, self.trainer.loss(self.params, part).cpu(), 0.0).sum(1)
        return (total / sizes).float()

    def _commit(self, better: Tensor, loss: Tensor, epoch: int) -> None:
        """Keep the current parameters of the flows that have become better."""
        rows = better.nonzero().flatten()
        if not len(rows):
            return
        try:
            self._copy(rows, loss, epoch)
        except KeyboardInterrupt:
            # copied again from the start, since half of a flow's tensors may belong to an older epoch
            self._copy(rows, loss, epoch)
            raise

    def _copy(self, rows: Tensor, loss: Tensor, epoch: int) -> None:
        flows = self.flows[rows]
        for name, value in self.params.items():
            self.fit.params[name][flows.to(value.device)] = value[rows.to(value.device)]
        self.fit.loss[flows] = loss[rows]
        self.fit.epochs[flows] = epoch

    def _keep(self, rows: Tensor) -> None:
        """Go on with some of the flows."""
        kept = rows.tolist()
        self.flows, self.stale, self.best = self.flows[rows], self.stale[rows], self.best[rows]
        self.generators, self.training, self.validation = (
            [values[i] for i in kept] for values in (self.generators, self.training, self.validation)
        )
        self.params = self.optimizer.keep(rows)
