"""Detectors whose densities are masked autoregressive flows: FlowLikelihood and RelativeFlow."""

from __future__ import annotations

from typing import Literal

import torch

from rmd_plugin.detectors.base import Encoder
from rmd_plugin.detectors.flows.base import FlowDetector, Sharing, check_choice
from rmd_plugin.detectors.flows.scoring import Space
from rmd_plugin.detectors.flows.spec import Kind
from rmd_plugin.detectors.shrinkage import Shrinkage

Background = Literal["flow", "gaussian"]


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

    All other options, with other defaults for ``space`` and ``sharing``: :class:`FlowDetector`.

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
    _before = FlowDetector._before | {"background": "flow"}

    def __init__(
        self,
        encoder: Encoder | None = None,
        *,
        background: Background = "gaussian",
        space: Space = "discriminant",
        transforms: int = 1,
        hidden_features: int | None = None,
        num_blocks: int = 1,
        kind: Kind = "maf",
        num_bins: int = 8,
        tail_bound: float = 5.0,
        sharing: Sharing = "conditional",
        max_epochs: int = 100,
        batch_size: int = 64,
        lr: float = 2e-3,
        weight_decay: float = 1e-4,
        validation_fraction: float = 0.1,
        patience: int = 10,
        class_chunk: int | None = None,
        seed: int = 0,
        shrinkage: Shrinkage = 0.0,
        normalize: bool = False,
        device: str | torch.device | None = None,
        progress: bool = True,
    ) -> None:
        self.background: Background = background
        super().__init__(
            encoder,
            space=space,
            transforms=transforms,
            hidden_features=hidden_features,
            num_blocks=num_blocks,
            kind=kind,
            num_bins=num_bins,
            tail_bound=tail_bound,
            sharing=sharing,
            max_epochs=max_epochs,
            batch_size=batch_size,
            lr=lr,
            weight_decay=weight_decay,
            validation_fraction=validation_fraction,
            patience=patience,
            class_chunk=class_chunk,
            seed=seed,
            shrinkage=shrinkage,
            normalize=normalize,
            device=device,
            progress=progress,
        )

    def _check_options(self) -> None:
        super()._check_options()
        check_choice("background", self.background, Background)
