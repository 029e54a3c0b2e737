"""A linear head for an encoder that has none: fitted on its features, or from their moments; logits of a head."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.detectors.gaussian import fit_coordinates
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.encoding.features import check_features, check_labels

#: problems of up to so many samples x features x classes are solved in float64, larger ones in float32
_FLOAT64_SIZE = 2**28
#: a feature counts as dead if its standard deviation is below so many times the largest one
_DEAD = 1e-7


def fit_linear_probe(
    features: Tensor, labels: Tensor, num_classes: int | None = None, *, strength: float = 1.0, max_iter: int = 300
) -> nn.Linear:
    """Fit a linear classifier on features, by L-BFGS from zero: nothing in it is random.

    Minimises the cross-entropy plus |W|^2 / (2 N strength) in standardised features, as
    ``sklearn.linear_model.LogisticRegression(C=strength)`` does. Dead features get no weight.

    Args:
        features: shape (N, D).
        labels: shape (N,); samples with a label below zero are left out.
        num_classes: K; by default the largest label + 1.
        strength: inverse of the regularisation.
        max_iter: largest number of L-BFGS iterations.

    Returns:
        A ``nn.Linear`` from D features to K logits, without gradients, in float32.

    Raises:
        ValueError: if there is no ID sample, or features are not finite.
    """
    check_features(features, None)
    labels = check_labels(labels, len(features))
    is_id = labels >= 0
    if not bool(is_id.any()):
        raise ValueError("there is no ID sample (label >= 0) to fit a linear probe on.")
    # inference mode and no_grad may be on where this is called
    with torch.inference_mode(False), torch.enable_grad():
        z = features.detach()[is_id] if not bool(is_id.all()) else features.detach()
        y = labels[is_id].to(z.device)
        classes = int(y.max()) + 1 if num_classes is None else num_classes
        exact = z.numel() * classes <= _FLOAT64_SIZE and z.device.type != "mps"
        z = z.to(torch.float64 if exact else torch.float32, copy=True)
        if not bool(torch.isfinite(z).all()):
            raise ValueError("features are NaN or infinite; a linear probe cannot be fitted on them.")
        mean, std = z.mean(0), z.std(0, correction=0)
        alive = std > _DEAD * std.max()
        scale = torch.where(alive, 1 / std.where(alive, torch.ones_like(std)), torch.zeros_like(std))
        z.sub_(mean).mul_(scale)
        weight, bias = _minimise(z, y, classes, 1 / (len(z) * strength), max_iter)
    with torch.no_grad():
        # without the random start, which would move the global random state
        head = skip_init(nn.Linear, z.shape[1], classes, device=z.device)
        # back to the features as they come: W s (z - m) + b
        head.weight.copy_(weight * scale)
        head.bias.copy_(bias - (weight * scale) @ mean)
    return head.requires_grad_(False).eval()


def head_logits(head: nn.Linear, features: Tensor) -> Tensor:
    """Logits (N, K) of features (N, D) on the CPU."""
    weight = head.weight.detach().cpu()
    bias = None if head.bias is None else head.bias.detach().cpu()
    return torch.cat([F.linear(z.to(weight.dtype), weight, bias) for z in features.split(65_536)])


def linear_discriminant(moments: Moments) -> nn.Linear:
    """The classifier of Gaussian classes of one covariance, shrunk by OAS where samples are few; needs no sample.

    Args:
        moments: of features as they come, with samples of all K classes. Of diagonal ones it is naive Bayes.

    Returns:
        A ``nn.Linear`` from D features to K logits, without gradients, in float32.
    """
    found = fit_coordinates(moments, shrinkage="auto")
    points, projection = found["points"], found["projection"]
    weight = points * projection if moments.diagonal else points @ projection.T
    head = skip_init(nn.Linear, moments.num_features, moments.num_classes, device=moments.device)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(found["shares"].log() - points.square().sum(1) / 2 - weight @ found["shift"])
    return head.requires_grad_(False).eval()


def _minimise(z: Tensor, y: Tensor, classes: int, decay: float, max_iter: int) -> tuple[Tensor, Tensor]:
    weight = z.new_zeros(classes, z.shape[1], requires_grad=True)
    bias = z.new_zeros(classes, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iter,
        history_size=10,
        tolerance_grad=1e-5 if z.dtype == torch.float64 else 1e-4,
        # a mean cross-entropy that changes by less has nothing more to tell in float32
        tolerance_change=1e-9 if z.dtype == torch.float64 else 1e-6,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(F.linear(z, weight, bias), y) + 0.5 * decay * weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    gradient = max(float(part.grad.abs().max()) for part in (weight, bias) if part.grad is not None)
    if gradient > 1e-3:
        warnings.warn(
            f"the linear probe has not converged after {max_iter} iterations (largest gradient {gradient:.1e}).",
            NumericalWarning,
            stacklevel=3,
        )
    return weight.detach(), bias.detach()
