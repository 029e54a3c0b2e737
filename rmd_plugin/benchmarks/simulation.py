"""The Gaussian simulation of the RMD paper's Appendix D, every number a parameter."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .base import OODBenchmark
from .sources import TensorRows
from .splits import OODSet, Parts, Split, stream


@dataclass(kw_only=True, eq=False, repr=False)
class Simulation(OODBenchmark):
    """Gaussian classes that differ in their first coordinate only.

    Class ``k`` is ``N([means[k], 0, ..., 0], sigma^2 I)`` in ``dim`` dimensions; the OOD samples are drawn in the
    same way from ``ood_means`` and form one near-OOD set. All other coordinates are shared and carry no information,
    which is what drowns the Mahalanobis distance. The defaults are the paper's.

    Raw items are float tensors of shape (dim,). Each split has its own random stream: changing one size leaves
    the other splits as they are. The data is generated, ``data_dir`` is ignored.

    Args:
        dim: number of dimensions.
        means: first coordinate of each class mean.
        ood_means: first coordinate of each OOD mean.
        sigma: standard deviation of every coordinate.
        n_train: training samples per class.
        n_val: validation samples per class.
        n_test: test samples per class and per OOD mean.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> from rmd_plugin.benchmarks import Simulation
        >>> Simulation(dim=8, n_train=50)
        Simulation(train=100, val=200, test=200, shifted=200)
    """

    name = "simulation"

    dim: int = 1024
    means: Sequence[float] = (-1.0, 1.0)
    ood_means: Sequence[float] = (-3.0, 3.0)
    sigma: float = 0.25
    n_train: int = 10_000
    n_val: int = 100
    n_test: int = 100

    def load(self) -> Parts:
        """Draw the samples."""
        self.means, self.ood_means = [float(mean) for mean in self.means], [float(mean) for mean in self.ood_means]
        if min(self.dim, self.n_train, self.n_test, len(self.means), len(self.ood_means)) < 1 or self.n_val < 0:
            raise ValueError(
                "dim, n_train, n_test and the numbers of means must be at least 1 and n_val at least 0; got "
                f"dim={self.dim}, n_train={self.n_train}, n_val={self.n_val}, n_test={self.n_test}, "
                f"means={self.means}, ood_means={self.ood_means}"
            )
        if not self.sigma > 0 or not np.isfinite([*self.means, *self.ood_means, self.sigma]).all():
            raise ValueError(
                f"sigma must be above 0 and all numbers finite; got sigma={self.sigma}, {self.means}, {self.ood_means}"
            )
        return Parts(
            class_names=[f"mean {mean:g}" for mean in self.means],
            train=self._draw(self.means, self.n_train, "train"),
            val=self._draw(self.means, self.n_val, "val"),
            test=self._draw(self.means, self.n_test, "test"),
            oods=[OODSet("shifted", "near", self._draw(self.ood_means, self.n_test, "ood"))],
        )

    def _draw(self, means: Sequence[float], count: int, purpose: str) -> Split:
        """``count`` samples of each mean, in the order of ``means``."""
        rng = stream(self.seed, "simulation", purpose)
        x = rng.standard_normal((len(means) * count, self.dim), dtype=np.float32)
        x *= np.float32(self.sigma)
        labels = np.repeat(np.arange(len(means)), count)
        x[:, 0] += np.asarray(means, dtype=np.float32)[labels]
        return Split(TensorRows(x), labels)
