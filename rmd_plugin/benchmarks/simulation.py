"""The Gaussian simulation of the RMD paper's Appendix D, every number a parameter."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Modality, OODBenchmark, OODPool, Pool, Transform
from .sources import TensorRows
from .splits import stream


class Simulation(OODBenchmark):
    """Gaussian classes that differ in their first coordinate only.

    Class ``k`` is ``N([means[k], 0, ..., 0], sigma^2 I)`` in ``dim`` dimensions; the OOD samples are drawn in the
    same way from ``ood_means`` and form one near-OOD set. All other coordinates are shared and carry no information,
    which is what drowns the Mahalanobis distance. The defaults are the paper's.

    Raw items are float tensors of shape (dim,). Each split has its own random stream: changing one size leaves
    the other splits as they are.

    Args:
        data_dir: ignored; the data is generated.
        train_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        test_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_train: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_test: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        seed: seed of the samples.
        dim: number of dimensions.
        means: first coordinate of each class mean.
        ood_means: first coordinate of each OOD mean.
        sigma: standard deviation of every coordinate.
        n_train: training samples per class.
        n_val: validation samples per class.
        n_test: test samples per class and per OOD mean.

    Example:
        >>> from rmd_plugin.benchmarks import Simulation
        >>> Simulation(dim=8, n_train=50)
        Simulation(train=100, val=200, test=200, shifted=200)
    """

    name = "simulation"
    modality: ClassVar[Modality] = "features"

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        limit_train: int | None = None,
        limit_test: int | None = None,
        seed: int = 0,
        dim: int = 1024,
        means: Sequence[float] = (-1.0, 1.0),
        ood_means: Sequence[float] = (-3.0, 3.0),
        sigma: float = 0.25,
        n_train: int = 10_000,
        n_val: int = 100,
        n_test: int = 100,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            train_transform=train_transform,
            test_transform=test_transform,
            limit_train=limit_train,
            limit_test=limit_test,
            seed=seed,
        )
        if min(dim, n_train, n_test, len(means), len(ood_means)) < 1 or n_val < 0:
            raise ValueError(
                "dim, n_train, n_test and the numbers of means must be at least 1 and n_val at least 0; got "
                f"dim={dim}, n_train={n_train}, n_val={n_val}, n_test={n_test}, means={list(means)}, "
                f"ood_means={list(ood_means)}"
            )
        if not sigma > 0 or not np.isfinite([*means, *ood_means, sigma]).all():
            raise ValueError(f"sigma must be above 0 and all numbers finite; got sigma={sigma}, {means}, {ood_means}")
        self.dim, self.sigma = dim, float(sigma)
        self.means, self.ood_means = [float(mean) for mean in means], [float(mean) for mean in ood_means]
        self._assemble(
            class_names=[f"mean {mean:g}" for mean in self.means],
            train=self._draw(self.means, n_train, "train"),
            val=self._draw(self.means, n_val, "val"),
            test=self._draw(self.means, n_test, "test"),
            oods=[OODPool("shifted", "near", self._draw(self.ood_means, n_test, "ood"))],
        )

    def _draw(self, means: Sequence[float], count: int, purpose: str) -> Pool:
        """``count`` samples of each mean, in the order of ``means``."""
        rng = stream(self.seed, "simulation", purpose)
        x = rng.standard_normal((len(means) * count, self.dim), dtype=np.float32)
        x *= np.float32(self.sigma)
        labels = np.repeat(np.arange(len(means)), count)
        x[:, 0] += np.asarray(means, dtype=np.float32)[labels]
        return Pool(TensorRows(x), labels)
