"""Appendix D: two Gaussian classes that differ in one coordinate of 1,024. MD drowns, RMD does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rmd_plugin.backbones.small import MLP
from rmd_plugin.benchmarks import Simulation
from rmd_plugin.compare.rows import Row
from rmd_plugin.paper.published import TEXT
from rmd_plugin.paper.result import Arrays, FeatureSet, PaperNumber, StudyResult, under
from rmd_plugin.paper.studies import SIMULATION, SimulationOptions
from rmd_plugin.report.names import label

_DETECTORS = ("mahalanobis", "rmd")


def simulated_features(
    *, dim: int = 1024, sigma: float = 0.25, n_train: int = 10_000, n_test: int = 100, seed: int = 0
) -> FeatureSet:
    """The simulation's samples, which are their own features; see :class:`SimulationOptions`."""
    data = Simulation(dim=dim, sigma=sigma, n_train=n_train, n_val=1, n_test=n_test, seed=seed)

    def stacked(split: Any) -> Tensor:
        return torch.stack([split.raw(i) for i in range(len(split))])

    train = data.fit_set()
    return FeatureSet(
        benchmark=SIMULATION,
        backbone="identity",
        ood_name=data.ood_names[0],
        seed=seed,
        setting=f"{len(train):,} training samples, D={dim}",
        train=stacked(train),
        train_labels=train.labels,
        test=stacked(data.test_in),
        ood=stacked(data.test_oods[0]),
    )


def limit_auroc(dim: int, shift: float) -> float:
    """AUROC of MD for infinitely many samples: P(X < Y), X chi-square, Y non-central chi-square, both of D degrees.

    Holds where a sample's nearest class is its own (ID) or the one next to it (OOD), as in the simulation. ``shift`` is
    the distance between an OOD mean and the nearest class mean, in standard deviations.
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


def network_features(features: FeatureSet, *, activation: str, width: int, epochs: int) -> FeatureSet:
    """Train a one-layer network on the samples with Adam, and take its hidden units as features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(features.seed)
        classes = int(features.train_labels.max()) + 1
        network = MLP(features.train.shape[1], (width,), activation=activation, num_classes=classes)
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(features.train)).split(128):
                loss = F.cross_entropy(network(features.train[rows]), features.train_labels[rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
    with torch.no_grad():
        train, test, ood = (network.encoder(x) for x in (features.train, features.test, features.ood))
    return replace(features, backbone=f"one_layer_{activation}", train=train, test=test, ood=ood)


def sweep(name: str, values: Sequence[float], *, seeds: Sequence[int], **options: Any) -> tuple[list[Row], Arrays]:
    """AUROC of MD and RMD over a range of one parameter, ``dim`` or ``sigma``; the options are of what is not swept.

    Returns:
        One row for each value, detector and seed, and arrays: ``values`` (V,), ``mahalanobis`` and ``rmd`` (V, S), and
        ``limit`` (V,), the AUROC of MD for infinitely many samples.
    """
    rows: list[Row] = []
    found = {detector: np.empty((len(values), len(seeds))) for detector in _DETECTORS}
    limits = []
    for place, value in enumerate(values):
        here = {**options, name: value}
        limits.append(limit_auroc(here["dim"], 2.0 / here["sigma"]))
        for column, seed in enumerate(seeds):
            features = simulated_features(**here, seed=seed)
            for detector, (area, _) in features.rate_gaussians(*_DETECTORS).items():
                found[detector][place, column] = area
                rows.append(features.row(detector, area, reason=f"{name}={value:g}, n_train={here['n_train']}"))
    return rows, {"values": np.asarray(values, dtype=float), "limit": np.asarray(limits), **found}


def run(options: SimulationOptions, *, seed: int = 0) -> StudyResult:
    """The whole study: histograms, the AUROC over seeds (counted up from ``seed``), both sweeps, the network."""
    result = StudyResult(SIMULATION)
    sizes: dict[str, Any] = {name: getattr(options, name) for name in ("dim", "sigma", "n_train", "n_test")}
    width, epochs = options.network_width, options.network_epochs
    # activation (empty for the inputs themselves) and detector -> AUROC of every seed
    areas: dict[tuple[str, str], list[float]] = {}
    for count in range(options.seeds):
        inputs = simulated_features(**sizes, seed=seed + count)
        learned = options.network_activations if count < options.network_seeds else []
        if count == 0:
            result.arrays |= _coordinates(inputs)
        for activation in ("", *learned):
            features = (
                network_features(inputs, activation=activation, width=width, epochs=epochs) if activation else inputs
            )
            for name, (area, scores) in features.rate_gaussians(*_DETECTORS).items():
                areas.setdefault((activation, name), []).append(area)
                result.rows.append(features.row(name, area))
                if count == 0:
                    result.arrays |= under(f"{activation}/{name}" if activation else name, scores)

    common = {**sizes, "n_train": options.sweep_n_train, "seeds": range(seed, seed + options.sweep_seeds)}
    for name, values in (("dim", options.sweep_dims), ("sigma", options.sweep_sigmas)):
        rows, arrays = sweep(name, values, **common)
        result.rows += rows
        result.arrays |= under(f"sweep_{name}", arrays)

    same = all(TEXT[f"simulation/{name}"] == value for name, value in sizes.items())
    for (activation, name), found in areas.items():
        if activation:
            what = f"Simulation, one-layer network ({activation})"
            setting = f"{width} hidden units, epochs: {epochs}, {len(found)} seeds"
            reason = "the paper gives no number: it says that MD overlaps and RMD separates perfectly"
        else:
            what = "Simulation, features = inputs"
            setting = f"D={options.dim}, sigma={options.sigma:g}, {options.n_train} per class, {options.seeds} seeds"
            reason = "one draw in the paper, mean over seeds here" if same else "another size than the paper's"
        result.comparisons.append(
            PaperNumber(
                what,
                f"AUROC of {label(name)}",
                paper=math.nan if activation else TEXT[f"simulation/{name}"],
                ours=100 * float(np.mean(found)),
                spread=100 * float(np.std(found, ddof=1)) if len(found) > 1 else math.nan,
                setting=setting,
                reason=reason,
            )
        )
    limit = 100 * limit_auroc(options.dim, 2.0 / options.sigma)
    result.notes.append(f"With the true means and covariance, MD has an AUROC of {limit:.2f} % (closed form).")
    return result


def _coordinates(features: FeatureSet) -> Arrays:
    """The coordinates that the first two histograms of figure 5 draw."""
    arrays = {}
    for kind, part in (("id", features.test), ("ood", features.ood)):
        arrays[f"x1/{kind}"] = part[:, 0].numpy()
        # the shared coordinates are alike: two hundred values of each of eight are enough for a histogram
        arrays[f"rest/{kind}"] = part[:, 1:9].flatten().numpy()
    return arrays
