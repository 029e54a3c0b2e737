"""The Gaussians of detectors that are fitted on moments, under the names that pytorch-ood gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import Self

from rmd_plugin.detectors.gaussian import regularised_covariance
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.detectors.updating import UpdatingDetector


class GaussianAttributes(UpdatingDetector):
    """Means, covariances and their inverses, named as in ``pytorch_ood.detector.Mahalanobis`` and ``RMD``.

    As there, they are None before the fit and of torch's default dtype (:class:`rmd_plugin.Moments` has float64). They
    belong to our scores: covariances are divided by the number N of training samples and include the shrinkage. Those
    of pytorch-ood are not divided: its ``cov`` is N times ours plus 1e-6 on the diagonal, its ``precision`` is ours
    divided by N. With ``covariance="diagonal"`` they are diagonals, of shape (D,).

    They are computed from the moments when they are asked for. Without ``keep_moments=True`` a file that ``save`` wrote
    has only what scoring needs, so a detector that was loaded from it raises an AttributeError.
    """

    _gaussians: dict[str, Tensor]

    def _set_fitted(self, state: dict[str, Tensor], num_classes: int, num_features: int) -> Self:
        self._gaussians = {}
        return super()._set_fitted(state, num_classes, num_features)

    @property
    def mu(self) -> Tensor | None:
        """Class means mu_k, shape (K, D); NaN for classes without a sample."""
        return self._on_demand("mu", lambda moments: moments.means)

    @property
    def cov(self) -> Tensor | None:
        """Covariance Sigma around the class means, shape (D, D)."""
        return self._on_demand("cov", self._sigma)

    @property
    def precision(self) -> Tensor | None:
        """Inverse of Sigma, shape (D, D); its pseudo-inverse where directions have no variance."""
        return self._on_demand("precision", lambda moments: _inverse(self._sigma(moments)))

    @property
    def background_mu(self) -> Tensor | None:
        """Mean mu_0 of all samples, or of the background that the fit was given, shape (D,)."""
        return self._on_demand("background_mu", self._mu_0)

    @property
    def background_cov(self) -> Tensor | None:
        """Covariance Sigma_0 around that mean, shape (D, D)."""
        return self._on_demand("background_cov", self._sigma_0)

    @property
    def background_precision(self) -> Tensor | None:
        """Inverse of Sigma_0, shape (D, D); its pseudo-inverse where directions have no variance."""
        return self._on_demand("background_precision", lambda moments: _inverse(self._sigma_0(moments)))

    def _sigma(self, moments: Moments) -> Tensor:
        return regularised_covariance(moments, self._fitted_options["shrinkage"])

    def _mu_0(self, moments: Moments) -> Tensor:
        return moments.background_mean

    def _sigma_0(self, moments: Moments) -> Tensor:
        return self._sigma(moments) + moments.between_covariance

    def _on_demand(self, name: str, compute: Callable[[Moments], Tensor]) -> Tensor | None:
        if not self.fitted:
            return None
        if self._moments is None:
            raise AttributeError(
                f"{type(self).__name__}.{name} is not in a saved state, which has only what scoring needs. Keep the "
                "moments too, with keep_moments=True or on their own (new_moments(), Moments.save): they have means, "
                "covariance, background_mean and background_covariance, and fit_moments(Moments.load(path)) makes the "
                "detector anew."
            )
        if name not in self._gaussians:
            with torch.inference_mode(False), torch.no_grad():  # the framework differentiates through some of them
                self._gaussians[name] = compute(self._moments).to(self.device, torch.get_default_dtype())
        return self._gaussians[name]


def _inverse(covariance: Tensor) -> Tensor:
    if covariance.ndim == 1:
        cutoff = len(covariance) * torch.finfo(covariance.dtype).eps * covariance.amax()
        return torch.where(covariance > cutoff, 1 / covariance, 0.0)
    inverse: Tensor = torch.linalg.pinv(covariance, hermitian=True)
    return inverse
