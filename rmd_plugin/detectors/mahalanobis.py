"""The Gaussian detectors: RMD, Mahalanobis, MarginalMahalanobis, PartialMahalanobis.

All of them are pytorch-ood detectors, take the encoder as their first argument and score higher = more OOD. They are
fitted from :class:`rmd_plugin.Moments`, so a fit streams over the data once and never holds it.

Distances are those of the paper, with covariances divided by N, the number of training samples. pytorch-ood does not
divide, so a threshold of its detectors has to be scaled: ``N * threshold`` for its RMD, ``2 * N * threshold`` for its
Mahalanobis, which halves the distance as well. Rankings, and so AUROC, AUPR and FPR95, are the same. The attributes of
its detectors (``mu``, ``cov``, ``precision``, ...) are there too, see :class:`.gaussian_attributes.GaussianAttributes`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pytorch_ood.api import DetectorInfo, Paper, Task
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.detectors.background import Gaussian, fit_background, fit_relative_to
from rmd_plugin.detectors.base import Encoder, check_integer
from rmd_plugin.detectors.class_moments import ClassMoments
from rmd_plugin.detectors.files import TensorSpec, check_tensors
from rmd_plugin.detectors.gaussian import (
    QuadraticScore,
    class_score_dtype,
    fit_mahalanobis,
    fit_marginal,
    fit_partial,
    fit_relative,
    score_dtype,
)
from rmd_plugin.detectors.gaussian_attributes import GaussianAttributes
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.detectors.shrinkage import Shrinkage
from rmd_plugin.encoding.loop import as_pair

_TASKS = frozenset({Task.CLASSIFICATION})
_RMD_PAPER = Paper(
    title="A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection",
    venue="arXiv",
    year=2021,
    url="https://arxiv.org/abs/2106.09022",
)
_MD_PAPER = Paper(
    title="A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks",
    venue="NeurIPS",
    year=2018,
    url="https://arxiv.org/abs/1807.03888",
)
_PMD_PAPER = Paper(
    title="Why is the Mahalanobis Distance Effective for Anomaly Detection?",
    venue="arXiv",
    year=2020,
    url="https://arxiv.org/abs/2003.00402",
)


class GaussianDetector(GaussianAttributes):
    """Base class of the detectors that are fitted from class moments.

    Args:
        encoder: maps inputs to features of shape (B, D), or to maps (B, C, H, W), which are averaged over space. May be
            None where only the feature methods are used.
        shrinkage: pulls the within-class covariance towards a multiple of the identity: an intensity in [0, 1], or
            ``"oas"`` to estimate it, or ``"auto"``: ``"oas"`` where N < 5 D, else 0. The background covariance is
            derived from the result. With N < 5 D and no shrinkage, detectors that suffer from it warn.
        normalize: scale the features to unit length first (Mahalanobis++).
        covariance: ``"tied"``, one covariance matrix for all classes as in the paper, or ``"diagonal"``, only its
            diagonal: O(D) memory and no matrix product in the fit, for very wide features.
        keep_moments: save the moments too, so that a loaded detector has :meth:`update`, :meth:`forget` and
            :meth:`add_class`: a file of K x D + D x D further numbers. Scoring does not use them.
    """

    hyperparameter_space: dict[str, list[Any]] = {"shrinkage": [0.0, 0.01, 0.1, 0.5], "normalize": [False, True]}  # noqa: RUF012

    def __init__(
        self,
        encoder: Encoder | None = None,
        *,
        shrinkage: Shrinkage = 0.0,
        normalize: bool = False,
        covariance: Literal["tied", "diagonal"] = "tied",
        keep_moments: bool = False,
    ) -> None:
        super().__init__(encoder)
        self.shrinkage = shrinkage
        self.normalize = normalize
        self.covariance = covariance
        self.keep_moments = keep_moments
        self._check_options()

    @abstractmethod
    def _fit_parameters(self, moments: Moments, **background: Gaussian) -> dict[str, Tensor]:
        """Parameters of the scoring module; only RMD takes a background."""

    def fit_moments(self, moments: Moments) -> Self:
        """Fit on moments, for example those of several processes, collected as :meth:`new_moments` does.

        Raises:
            ValueError: if the moments were collected with other options than the detector's.
        """
        return self._fit_gaussians(moments)

    def _fit_gaussians(self, moments: Moments, **background: Gaussian) -> Self:
        moments = self._fitting(moments)
        with torch.inference_mode(False), torch.no_grad():
            self._warn_missing_classes(moments.counts)
            state = self._fit_parameters(moments, **background) | self._intensity(moments)
            self._set_fitted(state, moments.num_classes, moments.num_features)
            self._moments = moments
            return self

    def _fitting(self, moments: Moments) -> Moments:
        """The moments as the detector's options want them, if they can be that."""
        self._check_options()
        self._require_samples(moments)
        if moments.normalized != self.normalize:
            raise ValueError(
                f"the detector has normalize={self.normalize}, but the moments were collected with "
                f"normalize={moments.normalized}. Collect them with detector.new_moments()."
            )
        if self.covariance == "diagonal":
            moments = moments.to_diagonal()
        elif moments.diagonal:
            raise ValueError("covariance='tied' needs the whole second moment, but only its diagonal was collected.")
        return moments

    def new_moments(self, num_classes: int | None = None, **kwargs: Any) -> ClassMoments:
        """An empty accumulator with this detector's options (and torchmetrics'), to ``compute()`` and fit on."""
        diagonal = self.covariance == "diagonal"
        return ClassMoments(num_classes, diagonal=diagonal, normalize=self.normalize, **kwargs)

    def contributions(self, z: Tensor) -> Tensor:
        """Terms of the score along each of the detector's directions; their sum is the score.

        The directions are ordered: for RMD by how much the classes differ along them, for the others by variance.
        Features (B, D) or (B, C, H, W) give terms of shape (B, q), where q is the number of directions.
        """
        return self._map_chunks(z, lambda module, rows: module.contributions(rows))  # type: ignore[operator]

    def _layout(self) -> dict[str, TensorSpec]:
        q = "D" if self.covariance == "diagonal" else "q"
        sizes = {"shift": "D", "projection": "D" if q == "D" else "D q", "weights": q, "points": f"k {q}"}
        return {name: TensorSpec(size) for name, size in {**sizes, "amplification": ""}.items()} | {
            "classes": TensorSpec("k", torch.int64, labels=True)
        }

    def _build_module(self, dtype: torch.dtype) -> nn.Module:
        return QuadraticScore(self._state, dtype, normalize=self._fitted_options["normalize"])

    def _score_dtype(self, dtype: torch.dtype, *, classes: bool = False) -> torch.dtype:
        return (class_score_dtype if classes else score_dtype)(self._state, dtype)

    def _check_options(self) -> None:
        super()._check_options()
        if self.covariance not in ("tied", "diagonal"):
            raise ValueError(f"covariance must be 'tied' or 'diagonal', got {self.covariance!r}.")
        if self.shrinkage in ("oas", "auto") and self.covariance == "diagonal":
            raise ValueError(f"shrinkage={self.shrinkage!r} needs covariance='tied'. Give a number in [0, 1] instead.")


class RMD(GaussianDetector):
    """Relative Mahalanobis distance: the distance to the nearest class minus the distance to the background.

    The score is min_k MD_k(z) - MD_0(z). A fitted RMD is one D x r projection and K points in r <= min(D, K - 1)
    dimensions: directions in which the class means agree cancel exactly and are not computed at all.

    Scores are N times those of ``pytorch_ood.detector.RMD``, where N is the number of training samples: its threshold t
    becomes ``N * t``.

    The background is all training samples, or another corpus that a fit is given: ``fit(loader, background=corpus)``.
    Then MD_0 is that of the corpus, no direction cancels, and a fitted RMD is a D x D projection: docs/detectors.md.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD
        >>> _ = torch.manual_seed(0)
        >>> y = torch.arange(400) % 2
        >>> z = torch.randn(400, 8)
        >>> z[:, 0] += 8.0 * y
        >>> detector = RMD().fit_features(z, y)
        >>> near_ood = torch.randn(5, 8)
        >>> near_ood[:, 0] += 4.0  # half-way between the classes
        >>> bool(detector.predict_features(near_ood).min() > detector.predict_features(z).median())
        True
        >>> corpus = 3.0 * torch.randn(1000, 8)
        >>> RMD().fit_features(z, y, background=corpus).contributions(near_ood).shape
        torch.Size([5, 8])
    """

    info = DetectorInfo(tasks=_TASKS, paper=_RMD_PAPER, ai_coded=True)

    def fit(
        self,
        data_loader: Iterable[Any],
        *,
        progress: bool | None = None,
        background: Iterable[Any] | Moments | None = None,
    ) -> Self:
        """Fit on a loader in one pass, see :meth:`StatefulDetector.fit`.

        Args:
            data_loader: yields pairs (x, y). Samples with y < 0 are skipped.
            progress: show progress bars; None for the detector's own option, or else none.
            background: another corpus that MD_0 is fitted to, in place of all training samples: a loader of pairs
                (x, y), whose labels do not matter, or its moments.
        """
        if background is None:
            return super().fit(data_loader, progress=progress)
        shown = self.progress if progress is None else progress
        if not isinstance(background, Moments):
            # a label below zero is OOD, and the corpus may be just that
            corpus = ((x, torch.zeros_like(torch.as_tensor(y))) for x, y in map(as_pair, background))
            background = self._moments_of(self._encoded_batches(corpus, progress=shown))
        moments = self._moments_of(self._encoded_batches(data_loader, progress=shown))
        return self.fit_moments(moments, background=background)

    def fit_features(self, z: Tensor, y: Tensor, *, background: Tensor | Moments | None = None) -> Self:
        """Fit on features, see :meth:`StatefulDetector.fit_features`.

        Args:
            z: features of shape (N, D), or maps of shape (N, C, H, W), which are averaged over space.
            y: class labels of shape (N,), integers of any type. Samples with y < 0 are skipped.
            background: features of another corpus, shape (M, D) or (M, C, H, W), that MD_0 is fitted to in place of all
                training samples; or their moments.
        """
        if background is None:
            return super().fit_features(z, y)
        if not isinstance(background, Moments):
            background = self._moments_of([(background, torch.zeros(len(background), dtype=torch.long))])
        return self.fit_moments(self._moments_of([(z, y)]), background=background)

    def fit_moments(self, moments: Moments, *, background: Moments | None = None) -> Self:
        """Fit on moments, for example those of several processes, collected as :meth:`new_moments` does.

        Args:
            moments: of the training features.
            background: of the features of another corpus, whatever its labels are, that MD_0 is fitted to in place of
                all training samples. Its covariance is shrunk as Sigma is.

        Raises:
            ValueError: if the moments were collected with other options than the detector's, or the background does not
                vary in all directions.
        """
        if background is None:
            return super().fit_moments(moments)
        around = self._fitting(background).to(moments.device)
        if around.num_features != moments.num_features:
            raise ValueError(
                f"the background has {around.num_features} features, but those to fit on are {moments.num_features}. "
                "Take both from the same layer."
            )
        with torch.inference_mode(False), torch.no_grad():
            gaussian = fit_background(around, shrinkage=self.shrinkage)
        return self._fit_gaussians(moments, background=gaussian)

    def _fit_parameters(self, moments: Moments, **background: Gaussian) -> dict[str, Tensor]:
        if background:
            return fit_relative_to(moments, **background, shrinkage=self.shrinkage)
        return fit_relative(moments, shrinkage=self.shrinkage)

    def _fit_changed(self, moments: Moments) -> Self:
        around = self._state.get("background")
        if around is None:
            return super()._fit_changed(moments)
        gaussian = Gaussian(*(part.to(moments.device) for part in (self._state["shift"], around)))
        return self._fit_gaussians(moments, background=gaussian)

    def _mu_0(self, moments: Moments) -> Tensor:
        return self._state["shift"] if "background" in self._state else super()._mu_0(moments)

    def _sigma_0(self, moments: Moments) -> Tensor:
        return self._state["background"] if "background" in self._state else super()._sigma_0(moments)

    def _check_tensors(self, tensors: dict[str, Tensor], sizes: dict[str, int]) -> None:
        super()._check_tensors(tensors, sizes)
        if "background" in tensors:
            size = "D" if self.covariance == "diagonal" else "D D"
            check_tensors(tensors, {"background": TensorSpec(size)}, sizes)

    def _needs_many_samples(self) -> bool:
        return True


class Mahalanobis(GaussianDetector):
    """Squared Mahalanobis distance to the nearest class mean, min_k MD_k(z), with one covariance for all classes.

    Scores are 2 N times those of ``pytorch_ood.detector.Mahalanobis``, where N is the number of training samples: its
    threshold t becomes ``2 * N * t``.

    Example:
        >>> import torch
        >>> from rmd_plugin import Mahalanobis
        >>> z, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> detector = Mahalanobis(shrinkage="oas").fit_features(z, y)
        >>> detector
        <Mahalanobis(shrinkage='oas') fitted: 2 classes, 4 features>
        >>> bool(detector.predict_features(100 + z).min() > detector.predict_features(z).max())
        True
    """

    info = DetectorInfo(tasks=_TASKS, paper=_MD_PAPER, ai_coded=True)

    def _fit_parameters(self, moments: Moments, **background: Gaussian) -> dict[str, Tensor]:
        return fit_mahalanobis(moments, shrinkage=self.shrinkage)

    def _needs_many_samples(self) -> bool:
        return True


class MarginalMahalanobis(GaussianDetector):
    """Squared Mahalanobis distance MD_0(z) to one Gaussian that is fitted to all classes together.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD, Mahalanobis, MarginalMahalanobis
        >>> z, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> detectors = RMD(), Mahalanobis(), MarginalMahalanobis()
        >>> rmd, md, md_0 = (detector.fit_features(z, y).predict_features(z) for detector in detectors)
        >>> torch.allclose(rmd, md - md_0, atol=1e-4)
        True
    """

    info = DetectorInfo(tasks=_TASKS, paper=_PMD_PAPER, ai_coded=True)

    def _fit_parameters(self, moments: Moments, **background: Gaussian) -> dict[str, Tensor]:
        return fit_marginal(moments, shrinkage=self.shrinkage)

    def _layout(self) -> dict[str, TensorSpec]:
        layout = super()._layout()
        del layout["classes"]
        return layout | {"points": TensorSpec(layout["points"].sizes.replace("k", "1"))}


class PartialMahalanobis(GaussianDetector):
    """Mahalanobis distance within part of the eigen-directions of the within-class covariance.

    Args:
        encoder: see :class:`GaussianDetector`.
        components: d, the number of leading eigen-directions.
        largest: sum over the d directions of largest variance; if False, over the D - d remaining ones.
        shrinkage: see :class:`GaussianDetector`.
        normalize: see :class:`GaussianDetector`.
        keep_moments: see :class:`GaussianDetector`.

    Example:
        >>> import torch
        >>> from rmd_plugin import PartialMahalanobis
        >>> z, y = torch.randn(200, 4), torch.arange(200) % 2
        >>> detector = PartialMahalanobis(components=3).fit_features(z, y)
        >>> detector.contributions(z).shape
        torch.Size([200, 3])
    """

    info = DetectorInfo(tasks=_TASKS, paper=_PMD_PAPER, ai_coded=True)
    hyperparameter_space: dict[str, list[Any]] = {"components": [1, 2, 4, 8, 16, 32, 64, 128, 256]}  # noqa: RUF012

    def __init__(
        self,
        encoder: Encoder | None = None,
        *,
        components: int,
        largest: bool = True,
        shrinkage: Shrinkage = 0.0,
        normalize: bool = False,
        keep_moments: bool = False,
    ) -> None:
        self.components = components
        self.largest = largest
        super().__init__(encoder, shrinkage=shrinkage, normalize=normalize, keep_moments=keep_moments)

    def _fit_parameters(self, moments: Moments, **background: Gaussian) -> dict[str, Tensor]:
        return fit_partial(moments, self.components, largest=self.largest, shrinkage=self.shrinkage)

    def _needs_many_samples(self) -> bool:
        return not self.largest

    def _check_options(self) -> None:
        super()._check_options()
        check_integer("components", self.components, 1 if self.largest else 0)
