"""FusedRMD: the relative distance, the energy of the classifier and a guard against far samples, in one score."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pytorch_ood.api import DetectorInfo, Paper, Task
from torch import Tensor, nn
from torch.nn.utils import skip_init
from typing_extensions import Self

from rmd_plugin.detectors.base import Encoder, check_integer
from rmd_plugin.detectors.files import TensorSpec
from rmd_plugin.detectors.fused_score import FusedScore, fit_fused
from rmd_plugin.detectors.gaussian import class_score_dtype, regularised_covariance, score_dtype
from rmd_plugin.detectors.gaussian_attributes import GaussianAttributes
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.detectors.reservoir import SampledClassMoments, SampledMoments


class Members(NamedTuple):
    """The terms of a score of :class:`FusedRMD`, each of shape (B,); their sum is the score."""

    relative: Tensor  #: -Z(MD_0 - min_k MD_k): nearer to the background than to a class
    energy: Tensor  #: -Z(logsumexp(l) - mean(l)): no logit stands out
    guard: Tensor  #: max(0, Z(log min_k MD_k))^2 / 2: farther from all classes than training samples from theirs


class FusedRMD(GaussianAttributes):
    """RMD with what the classifier knows and a guard against far samples; all parts from ID data, nothing to tune.

    With Z for a standardisation over training samples that are left out of the fit, and the head's logits l,

        score = -Z(MD_0 - min_k MD_k) - Z(logsumexp(l) - mean(l)) + max(0, Z(log min_k MD_k))^2 / 2.

    The relative distance finds near-OOD, the energy adds what the head has learned, and the guard brings back the
    far-OOD samples that the relative distance cancels. Without a head, the logits are those of the class Gaussians
    (linear discriminant analysis). Sigma is shrunk by OAS. Why this form, and what else was tried: docs/detectors.md.

    A fit streams over the data once, in constant memory: the moments of all samples and, for Z, 10,000 of them.

    Args:
        encoder: maps inputs to features of shape (B, D), or to maps (B, C, H, W), which are averaged over space. May be
            None where only the feature methods are used.
        head: the classification layer on the features, an ``nn.Linear``; it is read at each fit, and saved and exported
            with the detector. In :class:`rmd_plugin.OODMonitor` a detector without one gets the network's.
        w: weights of the head, shape (C, D), in place of ``head``.
        b: its bias, shape (C,); by default zero.
        seed: decides which samples Z is taken over, if there are more than 10,000 different ones.
        keep_moments: keep the moments and the sample for Z, in files too, so that the detector has :meth:`update`,
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

    info = DetectorInfo(
        tasks=frozenset({Task.CLASSIFICATION}),
        paper=Paper(
            title="A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection",
            venue="arXiv",
            year=2021,
            url="https://arxiv.org/abs/2106.09022",
        ),
        ai_coded=True,
    )

    _kind = SampledMoments

    def __init__(
        self,
        encoder: Encoder | None = None,
        head: nn.Linear | None = None,
        w: Tensor | None = None,
        b: Tensor | None = None,
        *,
        seed: int = 0,
        keep_moments: bool = False,
    ) -> None:
        super().__init__(encoder)
        if head is not None and not isinstance(head, nn.Linear):
            raise TypeError(f"head must be an nn.Linear on the features, got {type(head).__name__}. Or pass w= and b=.")
        if (head is not None and w is not None) or (w is None and b is not None):
            raise ValueError("give the head as head=, or as w= and b=.")
        self.head = _linear(w, b) if w is not None else head
        self.seed = seed
        self.keep_moments = keep_moments
        self._check_options()

    def fit_moments(self, moments: Moments) -> Self:
        """Fit on moments and a sample, for example those of several processes, collected as :meth:`new_moments` does.

        Raises:
            ValueError: if the moments have no sample, or the head does not fit the features.
        """
        if not isinstance(moments, SampledMoments):
            raise ValueError("FusedRMD needs a sample beside the moments. Collect them with detector.new_moments().")
        self._require_samples(moments)
        with torch.inference_mode(False), torch.no_grad():
            self._warn_missing_classes(moments.counts)
            parameters = fit_fused(moments, *self._head(moments.num_features))
            self._set_fitted(parameters, moments.num_classes, moments.num_features)
            self._moments = moments if self.keep_moments else moments.plain()
            return self

    def forget(self, z: Tensor, y: Tensor) -> Self:
        """Take away samples that were added before, from the moments and from the sample for Z.

        The sample knows its features by every bit: give them as they were added, in the same dtype. What is left of it
        is a fair draw from what remains; with more than 10,000 samples it is a smaller one than a new fit would take,
        so that Z, and nothing else, differs from that of a new fit. If it shrinks to less than half, a warning says so.

        Args:
            z: their features, as they were added.
            y: their labels. Samples with y < 0 are skipped.

        Raises:
            ValueError: if they cannot have been added, if too little is left to fit on, or there is no sample.
        """
        return super().forget(z, y)

    def _require_moments(self) -> Moments:
        moments = super()._require_moments()
        if not isinstance(moments, SampledMoments):
            raise ValueError(
                "this FusedRMD has kept no sample for Z, so nothing can be added or taken away. "
                "Fit it with keep_moments=True."
            )
        return moments

    def _head(self, width: int) -> tuple[Tensor, Tensor]:
        if self.head is None:
            return torch.zeros(0, width), torch.zeros(0)
        if self.head.in_features != width:
            raise ValueError(
                f"the head takes {self.head.in_features} features, but those to fit on are {width}. "
                "Are they those of its input?"
            )
        w, b = self.head.weight.detach(), self.head.bias
        if not bool(w.isfinite().all()) or not (b is None or bool(b.isfinite().all())):
            raise ValueError("the head has NaN or infinite weights.")
        return w, w.new_zeros(len(w)) if b is None else b.detach()

    def new_moments(self, num_classes: int | None = None, **kwargs: Any) -> SampledClassMoments:
        """An empty accumulator with this detector's seed (and torchmetrics' options), to ``compute()`` and fit on."""
        return SampledClassMoments(num_classes, seed=self.seed, **kwargs)

    def members(self, z: Tensor) -> Members:
        """The three terms whose sum is the score, of features of shape (B, D) or (B, C, H, W): what made it high."""
        terms = self._map_chunks(z, lambda module, rows: module.members(rows))  # type: ignore[operator]
        return Members(*terms.unbind(1))

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        """Take over what :meth:`state_dict` gave; its head too, if the detector has none."""
        super().load_state_dict(state)
        if self.head is None and len(self._state["w"]):
            self.head = _linear(self._state["w"], self._state["b"]).to(torch.get_default_dtype())
        return self

    def _sigma(self, moments: Moments) -> Tensor:
        return regularised_covariance(moments, "oas")

    def _layout(self) -> dict[str, TensorSpec]:
        sizes = {"shift": "D", "projection": "D q", "weights": "r", "points": "k r", "amplification": ""}
        sizes |= {"w": "C D", "b": "C", "location": "3", "rate": "3"}
        labels = TensorSpec("k", torch.int64, labels=True)
        return {name: TensorSpec(size) for name, size in sizes.items()} | {"classes": labels}

    def _check_tensors(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        super()._check_tensors(tensors, sizes)
        if sizes["r"] > sizes["q"]:
            raise ValueError(f"the class means have {sizes['r']} of {sizes['q']} coordinates, expected no more.")

    def _build_module(self, dtype: torch.dtype) -> nn.Module:
        return FusedScore(self._state, dtype)

    def _score_dtype(self, dtype: torch.dtype, *, classes: bool = False) -> torch.dtype:
        return (class_score_dtype if classes else score_dtype)(self._state, dtype)

    def _check_options(self) -> None:
        check_integer("seed", self.seed, 0)


def _linear(w: Tensor, b: Tensor | None) -> nn.Linear:
    """A head of given weights."""
    w, b = torch.as_tensor(w), None if b is None else torch.as_tensor(b)
    if not w.is_floating_point():
        raise TypeError(f"expected w of floating-point numbers, got {w.dtype}.")
    if w.ndim != 2 or (b is not None and b.shape != w.shape[:1]):
        found = tuple(w.shape), None if b is None else tuple(b.shape)
        raise ValueError(f"expected w of shape (C, D) and b of shape (C,), got {found[0]} and {found[1]}.")
    head: nn.Linear = skip_init(nn.Linear, w.shape[1], len(w), dtype=w.dtype, device=w.device)
    with torch.no_grad():
        head.weight.copy_(w)
        head.bias.copy_(torch.zeros(len(w)) if b is None else b)
    head.requires_grad_(False)
    return head
