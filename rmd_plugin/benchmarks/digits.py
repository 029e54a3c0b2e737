"""Handwritten digits: a real image benchmark inside a dependency, no download, seconds on a laptop."""

from dataclasses import dataclass

import numpy as np

from .base import OODBenchmark
from .sources import TensorRows
from .splits import OODSet, Parts, Split, stream

_MAX_INK = 16.0  # scikit-learn stores the 8 x 8 images with integer values 0..16


@dataclass(kw_only=True, eq=False, repr=False)
class Digits(OODBenchmark):
    """Digits 0-5 in-distribution, 6-9 near-OOD; noise and inverted digits far-OOD.

    scikit-learn's 1,797 images of 8 x 8 pixels. Raw items are float tensors of shape (1, 8, 8) in [0, 1]. Train,
    validation and test parts are stratified by class. The inverted images are those of the ID test set; the noise
    is uniform, as many images as the ID test set has. The data comes with scikit-learn, ``data_dir`` is ignored.

    Args:
        val_fraction: share of the ID images held out for validation.
        test_fraction: share of the ID images held out for testing.
        num_classes: digits ``0..num_classes-1`` are in-distribution, the others near-OOD.

    The other options are those of :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.

    Example:
        >>> from rmd_plugin.benchmarks import Digits
        >>> benchmark = Digits()
        >>> benchmark
        Digits(train=650, val=217, test=216, digits_6_9=714, noise=216, inverted=216)
    """

    name = "digits"

    val_fraction: float = 0.2
    test_fraction: float = 0.2
    num_classes: int = 6

    def load(self) -> Parts:
        """Read the images of scikit-learn and make the noise."""
        if not 2 <= self.num_classes <= 9:
            raise ValueError(f"num_classes must be 2..9 so that digits are left for OOD, got {self.num_classes}")
        if not self.test_fraction > 0:
            raise ValueError(f"test_fraction must be above 0, got {self.test_fraction}")
        from sklearn.datasets import load_digits

        data = load_digits()
        images = (data.images / _MAX_INK).astype(np.float32)[:, None]
        labels = data.target.astype(np.int64)
        digits = Split(TensorRows(images), labels)
        inside = digits.subset(np.flatnonzero(labels < self.num_classes))
        near = digits.subset(np.flatnonzero(labels >= self.num_classes))
        fractions = [self.test_fraction, self.val_fraction]
        test, val, train = inside.stratified(fractions, stream(self.seed, "digits"))
        noise = stream(self.seed, "noise").random((len(test), *images.shape[1:]), dtype=np.float32)
        return Parts(
            class_names=[str(digit) for digit in range(self.num_classes)],
            train=train,
            val=val,
            test=test,
            oods=[
                OODSet(f"digits_{self.num_classes}_9", "near", near),
                OODSet("noise", "far", Split(TensorRows(noise), np.zeros(len(noise)))),
                OODSet("inverted", "far", Split(TensorRows(1 - images[test.indices]), test.labels)),
            ],
        )
