"""Appendix D: two Gaussian classes that differ in one coordinate of 1,024. MD drowns, RMD does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rmd_plugin.backbones.small import MLP
from rmd_plugin.benchmarks import Simulation
from rmd_plugin.compare.rows import Row
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis
from rmd_plugin.paper.published import TEXT
from rmd_plugin.paper.result import (
    Comparison,
    FeatureSet,
    StudyResult,
    area_under_roc,
    as_array,
    mean_and_spread,
    percent,
)

_DETECTORS = {"mahalanobis": Mahalanobis, "rmd": RMD}


def simulated_features(
    *,
    dim: int = 1024,
    sigma: float = 0.25,
    n_train: int = 10_000,
    n_test: int = 100,
    seed: int = 0,
) -> FeatureSet:
    """The simulation's samples, which are their own features.

    Args:
        dim: D.
        sigma: standard deviation of every coordinate.
        n_train: training samples per class.
        n_test: test samples per class and per OOD mean.
        seed: seed of the samples.
    """
    data = Simulation(dim=dim, sigma=sigma, n_train=n_train, n_val=1, n_test=n_test, seed=seed)

    def stacked(split: object) -> tuple[Tensor, Tensor]:
        rows = torch.stack([split.raw(i) for i in range(len(split))])  # type: ignore[attr-defined, arg-type]
        return rows, split.labels  # type: ignore[attr-defined]

    train, train_labels = stacked(data.fit_set())
    test, test_labels = stacked(data.test_in)
    unknown, _ = stacked(data.test_oods[0])
    name = data.ood_names[0]
    return FeatureSet("simulation", name, "identity", train, train_labels, test, test_labels, unknown, seed=seed)


def score_both(features: FeatureSet) -> dict[str, tuple[Tensor, Tensor]]:
    """Scores of MD and RMD, fitted on one pass of moments.

    Returns:
        detector -> scores of the ID test set (M,) and of the OOD set (L,).
    """
    moments = Mahalanobis().new_moments(sync_on_compute=False)
    moments.update(features.train, features.train_labels)
    fitted = moments.compute()
    scores = {}
    for name, kind in _DETECTORS.items():
        detector = kind().fit_moments(fitted)
        scores[name] = detector.predict_features(features.test), detector.predict_features(features.unknown)
    return scores


def limit_auroc(dim: int, shift: float) -> float:
    """AUROC of MD for infinitely many samples: P(X < Y), X chi-square, Y non-central chi-square, both of D degrees.

    Holds where a sample's nearest class is its own (ID) or the one next to it (OOD), as in the simulation.

    Args:
        dim: D.
        shift: distance between an OOD mean and the nearest class mean, in standard deviations.
    """
    from scipy.stats import chi2, ncx2

    upper = dim + shift**2 + 12 * (2 * dim + 4 * shift**2) ** 0.5 + 40
    grid = np.linspace(0.0, upper, 20_001)
    density = chi2.pdf(grid, dim)
    # a chi-square of one degree has an infinite density at zero, and no mass there
    density[0] = 0.0 if not np.isfinite(density[0]) else density[0]
    mass = chi2.cdf(grid, dim)
    # P(X < Y) = 1 - int F_Y dF_X, with the exact mass of every cell
    below = ncx2.cdf((grid[1:] + grid[:-1]) / 2, dim, shift**2)
    return float(1 - np.sum(below * np.diff(mass)))


def network_features(
    features: FeatureSet,
    *,
    activation: str = "tanh",
    width: int = 1024,
    epochs: int = 1,
    batch_size: int = 128,
    lr: float = 1e-3,
) -> FeatureSet:
    """Train a one-layer network on the samples and take its hidden units as features.

    Args:
        features: the samples.
        activation: ``tanh``, ``relu``, ``gelu`` or ``silu``; the paper does not name its own.
        width: hidden units.
        epochs: passes over the training samples.
        batch_size: samples per step.
        lr: learning rate of Adam.

    Returns:
        The hidden units of the same samples.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(features.seed)
        classes = int(features.train_labels.max()) + 1
        network = MLP(features.train.shape[1], (width,), activation=activation, num_classes=classes)
        optimiser = torch.optim.Adam(network.parameters(), lr=lr)
        for _ in range(epochs):
            for rows in torch.randperm(len(features.train)).split(batch_size):
                loss = F.cross_entropy(network(features.train[rows]), features.train_labels[rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
    with torch.no_grad():
        train, test, unknown = (network.encoder(x) for x in (features.train, features.test, features.unknown))
    labels = features.train_labels, features.test_labels
    about = (features.benchmark, features.ood, f"one_layer_{activation}")
    return FeatureSet(*about, train, labels[0], test, labels[1], unknown, seed=features.seed)


def sweep(
    name: str,
    values: Sequence[float],
    *,
    dim: int,
    sigma: float,
    seeds: Sequence[int],
    n_train: int,
    n_test: int,
) -> tuple[list[Row], dict[str, np.ndarray]]:
    """AUROC of MD and RMD over a range of one parameter.

    Args:
        name: ``dim`` or ``sigma``.
        values: its values.
        dim: D, where it is not swept.
        sigma: standard deviation, where it is not swept.
        seeds: seeds of the samples.
        n_train: training samples per class.
        n_test: test samples per class and per OOD mean.

    Returns:
        One row for each value, detector and seed, and arrays: ``values`` (V,), ``mahalanobis`` and ``rmd`` (V, S), and
        ``limit`` (V,), the AUROC of MD for infinitely many samples.
    """
    if name not in ("dim", "sigma"):
        raise ValueError(f"name must be 'dim' or 'sigma', got {name!r}.")
    rows: list[Row] = []
    found = {detector: np.empty((len(values), len(seeds))) for detector in _DETECTORS}
    limits = []
    for place, value in enumerate(values):
        width, scale = (int(value), sigma) if name == "dim" else (dim, float(value))
        limits.append(limit_auroc(width, 2.0 / scale))
        for column, seed in enumerate(seeds):
            features = simulated_features(dim=width, sigma=scale, n_train=n_train, n_test=n_test, seed=seed)
            for detector, (known, unknown) in score_both(features).items():
                found[detector][place, column] = area_under_roc(known, unknown)
                remark = f"{name}={value:g}, n_train={n_train}"
                rows.append(features.row(detector, found[detector][place, column], reason=remark))
    return rows, {"values": np.asarray(values, dtype=float), "limit": np.asarray(limits), **found}


def run(
    *,
    dim: int = 1024,
    sigma: float = 0.25,
    n_train: int = 10_000,
    n_test: int = 100,
    seeds: int = 20,
    sweep_dims: Sequence[int] = (4, 16, 64, 256, 1024, 2048),
    sweep_sigmas: Sequence[float] = (0.1, 0.15, 0.25, 0.35, 0.5, 0.75),
    sweep_seeds: int = 5,
    sweep_n_train: int = 10_000,
    network_activations: Sequence[str] = ("tanh", "relu"),
    network_width: int = 1024,
    network_epochs: int = 1,
    network_seeds: int = 3,
    seed: int = 0,
) -> StudyResult:
    """The whole study: histograms, the AUROC over seeds, both sweeps, the one-layer network.

    Args:
        dim: D.
        sigma: standard deviation of every coordinate.
        n_train: training samples per class.
        n_test: test samples per class and per OOD mean.
        seeds: number of repetitions.
        sweep_dims: values of D for the first sweep.
        sweep_sigmas: values of sigma for the second.
        sweep_seeds: repetitions of each value.
        sweep_n_train: training samples per class in the sweeps.
        network_activations: one network with each.
        network_width: hidden units of the one-layer network.
        network_epochs: passes over its training samples.
        network_seeds: repetitions with the network.
        seed: seed of the first repetition; the others count up from it.
    """
    result = StudyResult("simulation")
    areas: dict[str, list[float]] = {name: [] for name in _DETECTORS}
    hidden: dict[tuple[str, str], list[float]] = {}
    for count in range(seeds):
        features = simulated_features(dim=dim, sigma=sigma, n_train=n_train, n_test=n_test, seed=seed + count)
        scores = score_both(features)
        for name, (known, unknown) in scores.items():
            areas[name].append(area_under_roc(known, unknown))
            result.rows.append(features.row(name, areas[name][-1]))
        if count == 0:
            result.arrays |= _first_seed(features, scores)
        for activation in network_activations if count < network_seeds else ():
            learned = network_features(features, activation=activation, width=network_width, epochs=network_epochs)
            for name, (known, unknown) in score_both(learned).items():
                area = area_under_roc(known, unknown)
                hidden.setdefault((activation, name), []).append(area)
                result.rows.append(learned.row(name, area))
                if count == 0:
                    result.arrays[f"{activation}/{name}/known"] = as_array(known)
                    result.arrays[f"{activation}/{name}/unknown"] = as_array(unknown)

    common = {"seeds": range(seed, seed + sweep_seeds), "n_train": sweep_n_train, "n_test": n_test}
    for name, values in (("dim", sweep_dims), ("sigma", sweep_sigmas)):
        rows, arrays = sweep(name, values, dim=dim, sigma=sigma, **common)  # type: ignore[arg-type]
        result.rows += rows
        result.arrays |= {f"sweep_{name}/{key}": value for key, value in arrays.items()}

    same = all(
        TEXT[f"simulation/{key}"] == value
        for key, value in {"dim": dim, "sigma": sigma, "n_train": n_train, "n_test": n_test}.items()
    )
    for name, values in areas.items():
        mean, spread = mean_and_spread(values)
        result.comparisons.append(
            Comparison(
                "Simulation, features = inputs",
                f"AUROC of {'MD' if name == 'mahalanobis' else 'RMD'}",
                paper=TEXT[f"simulation/{name}"],
                ours=percent(mean),
                spread=percent(spread),
                setting=f"D={dim}, sigma={sigma:g}, {n_train} per class, {seeds} seeds",
                reason="one draw in the paper, mean over seeds here" if same else "another size than the paper's",
            )
        )
    for (activation, name), values in hidden.items():
        mean, spread = mean_and_spread(values)
        result.comparisons.append(
            Comparison(
                f"Simulation, one-layer network ({activation})",
                f"AUROC of {'MD' if name == 'mahalanobis' else 'RMD'}",
                ours=percent(mean),
                spread=percent(spread),
                setting=f"{network_width} hidden units, epochs: {network_epochs}, {len(values)} seeds",
                reason="the paper gives no number: it says that MD overlaps and RMD separates perfectly",
            )
        )
    limit = percent(limit_auroc(dim, 2.0 / sigma))
    result.notes.append(f"With the true means and covariance, MD has an AUROC of {limit:.2f} % (closed form).")
    return result


def _first_seed(features: FeatureSet, scores: dict[str, tuple[Tensor, Tensor]]) -> dict[str, np.ndarray]:
    """What the four histograms of figure 5 draw."""
    arrays = {}
    for name, part in (("known", features.test), ("unknown", features.unknown)):
        arrays[f"x1/{name}"] = as_array(part[:, 0])
        # the shared coordinates are alike: two hundred values of each of eight are enough for a histogram
        arrays[f"rest/{name}"] = as_array(part[:, 1:9].flatten())
    for name, (known, unknown) in scores.items():
        arrays[f"{name}/known"], arrays[f"{name}/unknown"] = as_array(known), as_array(unknown)
    return arrays
