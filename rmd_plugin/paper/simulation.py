"""Appendix D: two Gaussian classes that differ in one coordinate of 1,024. MD drowns, RMD does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from scipy.stats import chi2, ncx2
from torch import Tensor
from torch.nn import functional as F

from rmd_plugin.backbones.small import MLP
from rmd_plugin.benchmarks import Simulation
from rmd_plugin.paper.published import SIMULATION_SIZES
from rmd_plugin.paper.reproduce import SIMULATION
from rmd_plugin.paper.studies import Arrays, Record, Run, StudyResult
from rmd_plugin.report.tables import label

_DETECTORS = ("mahalanobis", "rmd")


def simulated_run(
    *, dim: int = 1024, sigma: float = 0.25, n_train: int = 10_000, n_test: int = 100, seed: int = 0
) -> Run:
    """The simulation's samples, which are their own features; the defaults are the paper's."""
    data = Simulation(dim=dim, sigma=sigma, n_train=n_train, n_val=1, n_test=n_test, seed=seed)

    def stacked(split: Any) -> Tensor:
        return torch.stack([split[i][0] for i in range(len(split))])

    train = data.fit_set()
    return Run(
        benchmark=SIMULATION,
        backbone="identity",
        ood_name=data.ood_names[0],
        seed=seed,
        setting=f"{len(train):,} training samples, D={dim}, sigma={sigma:g}",
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
    upper = dim + shift**2 + 12 * (2 * dim + 4 * shift**2) ** 0.5 + 40
    grid = np.linspace(0.0, upper, 20_001)
    # P(X < Y) = 1 - int F_Y dF_X, with the exact mass of every cell
    below = ncx2.cdf((grid[1:] + grid[:-1]) / 2, dim, shift**2)
    return float(1 - np.sum(below * np.diff(chi2.cdf(grid, dim))))


def network_run(run: Run, *, activation: str, width: int, epochs: int) -> Run:
    """Train a one-layer network on the samples with Adam, and take its hidden units as features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        classes = int(run.train_labels.max()) + 1
        network = MLP(run.train.shape[1], (width,), activation=activation, num_classes=classes)
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(run.train)).split(128):
                loss = F.cross_entropy(network(run.train[rows]), run.train_labels[rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
    with torch.no_grad():
        features = {name: network.encoder(getattr(run, name)) for name in ("train", "test", "ood")}
    setting = f"{run.setting}, {width} hidden units, epochs: {epochs}"
    reason = "the paper gives no number: it says that MD overlaps and RMD separates perfectly"
    return replace(run, backbone=f"one_layer_{activation}", setting=setting, reason=reason, **features)


def sweep(name: str, values: Sequence[float], *, seeds: Sequence[int], **options: Any) -> tuple[list[Record], Arrays]:
    """AUROC of MD and RMD over a range of one parameter, ``dim`` or ``sigma``; the options are of what is not swept.

    Returns:
        One row for each value, seed and detector, and arrays: ``values`` (V,), ``mahalanobis`` and ``rmd`` (V, S), and
        ``limit`` (V,), the AUROC of MD for infinitely many samples.
    """
    records = []
    limits = []
    for value in values:
        here = {**options, name: value}
        limits.append(limit_auroc(here["dim"], 2.0 / here["sigma"]))
        for seed in seeds:
            run = simulated_run(**here, seed=seed)
            remark = f"{name}={value:g}, n_train={here['n_train']}"
            records += [run.row(key, area, reason=remark) for key, (area, _) in run.rate_gaussians(*_DETECTORS).items()]
    areas = np.array([record["value"] for record in records]).reshape(len(values), len(seeds), len(_DETECTORS))
    arrays = dict(zip(_DETECTORS, np.moveaxis(areas, 2, 0), strict=True))
    return records, {"values": np.array(list(values), dtype=float), "limit": np.array(limits), **arrays}


def simulation_study(options: DictConfig, *, seed: int = 0) -> StudyResult:
    """The whole study: histograms, the AUROC over seeds (counted up from ``seed``), both sweeps, the network.

    The options are those of ``conf/scale/_simulation.yaml``.
    """
    result = StudyResult(SIMULATION)
    sizes: dict[str, Any] = {name: options[name] for name in SIMULATION_SIZES}
    network = {"width": options.network_width, "epochs": options.network_epochs}
    same = "one draw in the paper, mean over seeds here"
    first: dict[str, Run] = {}
    areas: dict[tuple[str, str], list[float]] = {}
    for count in range(options.seeds):
        inputs = simulated_run(**sizes, seed=seed + count)
        inputs = replace(inputs, reason=same if sizes == SIMULATION_SIZES else "another size than the paper's")
        activations = options.network_activations if count < options.network_seeds else ()
        for run in (inputs, *(network_run(inputs, activation=name, **network) for name in activations)):
            first.setdefault(run.backbone, run)
            for name, (area, scores) in run.rate_gaussians(*_DETECTORS).items():
                areas.setdefault((run.backbone, name), []).append(area)
                result.records.append(run.row(name, area))
                if count == 0:
                    result.add_arrays(f"{run.backbone}/{name}", scores)
    for (backbone, name), values in areas.items():
        run, spread = first[backbone], 100 * float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        about = {"spread": spread, "setting": f"{run.setting}, {len(values)} seeds"}
        about |= {} if backbone == "identity" else {"paper": math.nan}
        result.add_number(run, f"AUROC of {label(name)}", 100 * float(np.mean(values)), name, **about)
    for kind, part in (("id", first["identity"].test), ("ood", first["identity"].ood)):
        result.arrays[f"x1/{kind}"] = part[:, 0].numpy()
        # the shared coordinates are alike: eight of them are enough for a histogram
        result.arrays[f"rest/{kind}"] = part[:, 1:9].flatten().numpy()

    common = {**sizes, "n_train": options.sweep_n_train, "seeds": range(seed, seed + options.sweep_seeds)}
    for name in ("dim", "sigma"):
        records, arrays = sweep(name, options[f"sweep_{name}s"], **common)
        result.records += records
        result.add_arrays(f"sweep_{name}", arrays)
    limit = 100 * limit_auroc(options.dim, 2.0 / options.sigma)
    result.notes.append(f"With the true means and covariance, MD has an AUROC of {limit:.2f} % (closed form).")
    return result
