"""Handwritten digits: a real image benchmark inside a dependency, no download, seconds on a laptop."""

from pathlib import Path
from typing import ClassVar

import numpy as np

from .base import Modality, OODBenchmark, OODPool, Pool, Transform
from .sources import TensorRows
from .splits import stratified_split, stream

_MAX_INK = 16.0  # scikit-learn stores the 8 x 8 images with integer values 0..16


class Digits(OODBenchmark):
    """Digits 0-5 in-distribution, 6-9 near-OOD; noise and inverted digits far-OOD.

    scikit-learn's 1,797 images of 8 x 8 pixels. Raw items are float tensors of shape (1, 8, 8) in [0, 1]. Train,
    validation and test parts are stratified by class. The inverted images are those of the ID test set; the noise
    is uniform, as many images as the ID test set has.

    Args:
        data_dir: ignored; the data comes with scikit-learn.
        train_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        test_transform: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_train: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        limit_test: see :class:`~rmd_plugin.benchmarks.base.OODBenchmark`.
        seed: seed of the splits and of the noise.
        val_fraction: share of the in-distribution images held out for validation.
        test_fraction: share of the in-distribution images held out for testing.
        num_classes: digits ``0..num_classes-1`` are in-distribution, the others near-OOD.

    Example:
        >>> from rmd_plugin.benchmarks import Digits
        >>> benchmark = Digits()
        >>> benchmark
        Digits(train=650, val=217, test=216, digits_6_9=714, noise=216, inverted=216)
    """

    name = "digits"
    modality: ClassVar[Modality] = "image"

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        limit_train: int | None = None,
        limit_test: int | None = None,
        seed: int = 0,
        val_fraction: float = 0.2,
        test_fraction: float = 0.2,
        num_classes: int = 6,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            train_transform=train_transform,
            test_transform=test_transform,
            limit_train=limit_train,
            limit_test=limit_test,
            seed=seed,
        )
        if not 2 <= num_classes <= 9:
            raise ValueError(f"num_classes must be 2..9 so that digits are left for OOD, got {num_classes}")
        if not test_fraction > 0:
            raise ValueError(f"test_fraction must be above 0, got {test_fraction}")
        from sklearn.datasets import load_digits

        data = load_digits()
        images = (data.images / _MAX_INK).astype(np.float32)[:, None]
        labels = data.target.astype(np.int64)
        digits = Pool(TensorRows(images), labels)

        known = np.flatnonzero(labels < num_classes)
        parts = stratified_split(labels[known], [test_fraction, val_fraction], stream(seed, "digits"))
        test, val, train = (known[part] for part in parts)
        noise = stream(seed, "noise").random((len(test), *images.shape[1:]), dtype=np.float32)
        self._assemble(
            class_names=[str(digit) for digit in range(num_classes)],
            train=digits.subset(train),
            val=digits.subset(val),
            test=digits.subset(test),
            oods=[
                OODPool(f"digits_{num_classes}_9", "near", digits.subset(np.flatnonzero(labels >= num_classes))),
                OODPool("noise", "far", Pool(TensorRows(noise), np.zeros(len(noise), dtype=np.int64))),
                OODPool("inverted", "far", Pool(TensorRows(1 - images[test]), labels[test])),
            ],
        )
