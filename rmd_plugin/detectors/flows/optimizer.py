"""AdamW for stacked flows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rmd_plugin.detectors.flows.spec import Parameters

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


class StackedAdamW:
    """AdamW over stacked parameters, equal to one AdamW per flow.

    Flows with the same number of batches per epoch have taken the same number of steps, and lie next to each other:
    each such run is one call of torch's AdamW on views of the stack.
    """

    def __init__(self, params: Parameters, *, lr: float, weight_decay: float) -> None:
        self.params, self.lr, self.weight_decay = params, lr, weight_decay
        self.means = {name: torch.zeros_like(value) for name, value in params.items()}
        self.squares = {name: torch.zeros_like(value) for name, value in params.items()}
        self.taken = [0] * len(next(iter(params.values())))

    def step(self, gradients: Parameters) -> None:
        """Move the first flows of the stack, as many as there are gradients."""
        active = len(next(iter(gradients.values())))
        start = 0
        while start < active:
            stop = start + 1
            while stop < active and self.taken[stop] == self.taken[start]:
                stop += 1
            run = slice(start, stop)
            self._update(gradients, run, lambda value: value.ndim > 2, self.weight_decay)
            self._update(gradients, run, lambda value: value.ndim == 2, 0.0)
            self.taken[run] = [self.taken[start] + 1] * (stop - start)
            start = stop

    def _update(self, gradients: Parameters, run: slice, chosen: Callable[[Tensor], bool], decay: float) -> None:
        names = [name for name, value in self.params.items() if chosen(value)]
        device = gradients[names[0]].device
        adamw(
            [self.params[name][run] for name in names],
            [gradients[name][run] for name in names],
            [self.means[name][run] for name in names],
            [self.squares[name][run] for name in names],
            [],
            # one tensor per parameter: torch counts each of them up itself
            list(torch.full((len(names),), float(self.taken[run.start]), device=device).unbind()),
            fused=device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=self.lr,
            weight_decay=decay,
            eps=_EPSILON,
            maximize=False,
        )

    def keep(self, rows: Tensor) -> Parameters:
        """Drop all flows but ``rows``; the new stacked parameters."""
        self.taken = [self.taken[i] for i in rows.tolist()]
        for values in (self.params, self.means, self.squares):
            for name, value in values.items():
                values[name] = value[rows.to(value.device)]
        return self.params
