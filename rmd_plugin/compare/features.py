"""A benchmark's splits through a backbone's encoder, each once, from the cache or from the network; and linear heads.

The cache is a folder with one file per split, ``CACHE_DIR/ab/abcdef....npy``, readable by plain numpy: the features
(N, D), then the labels (N,). Files are written aside and renamed, so they are there whole or not at all.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import joblib.hashing  # type: ignore[import-untyped]
import numpy as np
import torch
from filelock import AcquireReturnProxy, FileLock, Timeout
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm.auto import tqdm

from rmd_plugin.detectors.detectors import evaluating
from rmd_plugin.detectors.gaussian import class_shares, fit_mahalanobis
from rmd_plugin.detectors.moments import ClassMoments, Moments, pool_features, warn, widened
from rmd_plugin.files import replacing

log = logging.getLogger(__name__)

TRAIN, VAL, TEST = "train", "val", "test"

#: enters every key: another layout of the files, or another meaning of the keys, finds no old file
_KEY_VERSION = "rmd-features-2"
#: samples that are encoded again to see whether cached features are still true
_PROBES = 4
#: problems of up to so many samples x features x classes are solved in float64, larger ones in float32
_FLOAT64_SIZE = 2**28
#: a feature counts as dead if its standard deviation is below so many times the largest one
_DEAD = 1e-7


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch while the block runs, then give them their states back."""
    with isolate_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  the generators that other people's code draws from
        torch.manual_seed(seed)
        yield


class _Hasher(joblib.hashing.NumpyHasher):
    """joblib's, for tensors too: what torch pickles of a tensor differs from process to process."""

    def save(self, obj: Any) -> None:
        if isinstance(obj, Tensor):
            # bytes, not values: numpy has no bfloat16
            content = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            obj = ["tensor", str(obj.dtype), *obj.shape, content]
        super().save(obj)


def fingerprint(*content: object) -> str:
    """Hash of what objects are made of, as pickle sees it, equal in every process.

    Raises:
        pickle.PicklingError: if an object cannot be pickled, as a lambda.

    Example:
        >>> fingerprint(torch.zeros(2), "a") == fingerprint(torch.zeros(3)[:2], "a")
        True
    """
    return str(_Hasher(hash_name="md5").hash(content))


@dataclass(frozen=True, eq=False)
class SplitFeatures:
    """One split after the encoder, on the CPU."""

    features: Tensor  #: shape (N, D), memory-mapped where there is a cache
    labels: Tensor  #: shape (N,), below zero for OOD samples
    cached: bool = False  #: whether they came from the disk


class FeatureCache:
    """A folder of features, keyed by what they were computed from, for any number of processes.

    Args:
        root: the folder; it is made when the first file is written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser()

    def path(self, key: str) -> Path:
        """The file of a key, whether it is there or not."""
        return self.root / key[:2] / f"{key}.npy"

    def read(self, key: str) -> tuple[Tensor, Tensor] | None:
        """Features (N, D), memory-mapped, and labels (N,) of a key; None if there are none."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            # mode c: torch wants writable memory, and writing to it must not change the file
            features = np.load(path, mmap_mode="c", allow_pickle=False)
            with path.open("rb") as file:
                file.seek(features.offset + features.nbytes)
                labels = np.load(file, allow_pickle=False)
            return torch.from_numpy(features), torch.from_numpy(labels)
        except (ValueError, EOFError) as error:
            log.warning("The cached features in %s are damaged (%s) and computed again.", path, error)
            return None

    def write(self, key: str, batches: Iterable[tuple[Tensor, Tensor]], count: int) -> None:
        """Write batches of features (B, D) and labels (B,), ``count`` samples together, one after the other."""
        labels: list[np.ndarray] = []
        with replacing(self.path(key), "wb") as file:
            for features, batch_labels in batches:
                array = features.numpy()
                if not labels:
                    header = {"descr": array.dtype.str, "fortran_order": False, "shape": (count, array.shape[1])}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(np.ascontiguousarray(array).data)
                labels.append(batch_labels.numpy())
            np.save(file, np.concatenate(labels))

    def lock(self, key: str) -> AcquireReturnProxy:
        """Take the lock of a key: the first job that needs features computes them, the others wait."""
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path(key).with_suffix(".lock"))
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            log.info("Another job is computing the features %s; waiting for it.", key)
            return lock.acquire()


class Extractor:
    """Features of a benchmark's splits.

    Splits are ``train`` (without augmentation), ``val``, ``test``, the names of the OOD sets and those of ``shifts``. A
    split is encoded when it is first asked for, in evaluation mode and without gradients.

    Args:
        benchmark: the data, an :class:`rmd_plugin.benchmarks.OODBenchmark`.
        backbone: a module with ``.encoder``; its ``test_transform`` is put in front of the data if it has one.
        cache: where to keep features, or None.
        batch_size: samples per forward pass.
        num_workers: processes that prepare the data.
        device: where the encoder runs.
        progress: show a bar with the time left for every pass, on a terminal.

    Attributes:
        num_classes: K.
        distance: OOD set -> ``near``, ``far`` or, where the benchmark does not say, an empty text.
        shifts: names of the ID sets under a covariate shift, which only some benchmarks have.
        moments: those of the training data, where a benchmark brings them in place of its samples.
    """

    def __init__(
        self,
        benchmark: Any,
        backbone: nn.Module,
        *,
        cache: FeatureCache | None = None,
        batch_size: int = 256,
        num_workers: int = 0,
        device: str | torch.device = "cpu",
        progress: bool = True,
    ) -> None:
        self.benchmark, self.backbone, self.cache = benchmark, backbone, cache
        self.encoder = cast(nn.Module, getattr(backbone, "encoder", backbone))
        self.batch_size, self.num_workers, self.device = batch_size, num_workers, torch.device(device)
        self.progress = progress
        self.num_classes: int = benchmark.num_classes
        self.distance: dict[str, str] = benchmark.distance
        self.shifts = list(benchmark.shifts)
        self.moments: Moments | None = getattr(benchmark, "moments", None)
        self._splits: dict[str, SplitFeatures] = {}

    def train_moments(self) -> Moments:
        """Moments of the training data, those that the benchmark brings or of their features."""
        if self.moments is not None:
            return self.moments
        train, metric = self.features(TRAIN), ClassMoments(self.num_classes, sync_on_compute=False)
        metric.update(train.features, train.labels)
        return metric.compute()

    def dataset(self, split: str) -> Dataset[Any]:
        """The data of a split behind the backbone's transform."""
        dataset: Any = self._raw(split)
        transform = getattr(self.backbone, "test_transform", None)
        return dataset if transform is None else dataset.with_transform(transform)

    def loader(self, split: str) -> DataLoader[Any]:
        """Batches of a split in order. The global random state is neither used nor changed."""
        return DataLoader(
            self.dataset(split),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
        )

    def bar(self, items: Iterable[Any], title: str) -> Iterator[Any]:
        """Items, such as the batches of a loader, behind a progress bar."""
        # leave=False: a finished bar would stand between the tables; disable=None: only on a terminal
        return iter(tqdm(items, desc=title, leave=False, disable=None if self.progress else True))

    def features(self, split: str) -> SplitFeatures:
        """Features and labels of a split, computed or read the first time and kept from then on."""
        if split not in self._splits:
            # random transforms draw the same, whatever was drawn before and whichever split comes first
            with seeded(0):
                self._splits[split] = self._fetch(split)
        return self._splits[split]

    def raw(self, split: str, position: int) -> tuple[object, str]:
        """A sample before any transform, None where the data keep none, and the name of its class or nothing."""
        dataset: Any = self._raw(split)
        names, label = self.benchmark.class_names, int(dataset.labels[position])
        return dataset.raw(position), str(names[label]) if names is not None and label >= 0 else ""

    def logits(self, split: str) -> Tensor | None:
        """Logits of a split of shape (N, K) where the data bring them, as a file of features may; else None."""
        logits = getattr(self.benchmark, "logits", None)
        return logits(split) if callable(logits) else None

    def _raw(self, split: str) -> Dataset[Any]:
        benchmark = self.benchmark
        if split in (TRAIN, VAL):
            return cast(Dataset[Any], benchmark.fit_set() if split == TRAIN else benchmark.val_set())
        oods = dict(zip(benchmark.ood_names, benchmark.test_oods, strict=True))
        return cast(Dataset[Any], {TEST: benchmark.test_in, **oods, **benchmark.shifts}[split])

    def _fetch(self, split: str) -> SplitFeatures:
        dataset: Any = self.dataset(split)
        if not len(dataset):
            raise ValueError(f"the split {split!r} holds no sample.")
        batches = self._encode(self.bar(self.loader(split), f"encode {split}"))
        key = None if self.cache is None else self._key(dataset)
        if self.cache is None or key is None:
            features, labels = zip(*batches, strict=True)
            return SplitFeatures(torch.cat(features), torch.cat(labels))
        arrays = self._read(key, dataset)
        cached = arrays is not None
        if arrays is None:
            with self.cache.lock(key):
                arrays = self._read(key, dataset)  # another job may have written them while this one waited
                if arrays is None:
                    self.cache.write(key, batches, len(dataset))
                    arrays = self.cache.read(key)
        return SplitFeatures(*cast(tuple[Tensor, Tensor], arrays), cached)

    def _encode(self, loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        with evaluating(self.encoder.to(self.device)):
            for x, labels in loader:
                with torch.no_grad():
                    features = pool_features(self.encoder(x.to(self.device)))
                yield widened(features).cpu(), labels.long()

    def _read(self, key: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor] | None:
        """Features from the cache, if there are any that are true: code and libraries change without changing a hash.

        A few samples are encoded again.
        """
        arrays = cast(FeatureCache, self.cache).read(key)
        if arrays is None:
            return None
        positions = sorted({round(part * (len(arrays[0]) - 1) / (_PROBES - 1)) for part in range(_PROBES)})
        fresh = torch.cat([features for features, _ in self._encode(DataLoader(Subset(dataset, positions)))])
        cached = arrays[0][positions]
        # other batch sizes and thread counts round differently, in the last digits only
        if fresh.shape == cached.shape and torch.allclose(
            fresh, cached, rtol=1e-3, atol=1e-4 * float(cached.abs().max())
        ):
            return arrays
        log.warning("The cached features are not what the network gives today, and are computed again.")
        return None

    def _key(self, dataset: Any) -> str | None:
        """Hash of weights, data and transform; None if the transform cannot be hashed."""
        dataset[0]  # some transforms settle their state in the first call: tokenizers remember how they padded
        release = ".".join(torch.__version__.split(".")[:2])
        try:
            return fingerprint(_KEY_VERSION, self._encoder_hash, dataset.digest(), dataset.transform, release)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            log.warning("Features are not cached, because the transform cannot be pickled: %s", error)
            return None

    @cached_property
    def _encoder_hash(self) -> str:
        """Hash of all that decides features: weights, structure and options. The head does not count."""
        encoder = self.encoder
        # named_buffers: a buffer that is not persistent is in no state_dict, but may enter the forward pass
        tensors = {**dict(encoder.named_parameters()), **dict(encoder.named_buffers()), **encoder.state_dict()}
        # strides, paddings and rates are in no tensor, but in the text of the modules
        structure = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(encoder))
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in (type(self.backbone), type(encoder))]
        return fingerprint(kinds, structure, getattr(self.backbone, "architecture", {}), tensors)


# -- linear heads for an encoder that has none ------------------------------------------------------------------------


def fit_linear_probe(features: Tensor, labels: Tensor, num_classes: int, *, max_iter: int = 300) -> nn.Linear:
    """Fit a linear classifier on features, by L-BFGS from zero: nothing in it is random.

    Minimises the cross-entropy plus |W|^2 / (2 N) in standardised features, as
    ``sklearn.linear_model.LogisticRegression`` does. Dead features get no weight.

    Args:
        features: shape (N, D), on the CPU.
        labels: shape (N,), from 0 to K - 1.
        num_classes: K.
        max_iter: largest number of L-BFGS iterations.

    Returns:
        A ``nn.Linear`` from D features to K logits, without gradients, in float32.

    Raises:
        ValueError: if features are not finite.
    """
    exact = features.numel() * num_classes <= _FLOAT64_SIZE
    z = features.to(torch.float64 if exact else torch.float32, copy=True)
    if not bool(torch.isfinite(z).all()):
        raise ValueError("features are NaN or infinite; a linear probe cannot be fitted on them.")
    mean, std = z.mean(0), z.std(0, correction=0)
    scale = torch.where(std > _DEAD * std.max(), 1 / std, 0.0)
    z.sub_(mean).mul_(scale)
    weight = z.new_zeros(num_classes, z.shape[1], requires_grad=True)
    bias = z.new_zeros(num_classes, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iter,
        history_size=10,
        tolerance_grad=1e-5 if exact else 1e-4,
        # a mean cross-entropy that changes by less has nothing more to tell in float32
        tolerance_change=1e-9 if exact else 1e-6,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(F.linear(z, weight, bias), labels) + 0.5 / len(z) * weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    gradient = max(float(part.grad.abs().max()) for part in (weight, bias) if part.grad is not None)
    if gradient > 1e-3:
        warn(f"the linear probe has not converged after {max_iter} iterations (largest gradient {gradient:.1e}).")
    matrix = weight.detach() * scale  # back to the features as they come: W s (z - m) + b
    return _linear(matrix, bias.detach() - matrix @ mean)


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
    fit = fit_mahalanobis(moments, "auto")
    points, projection = fit["points"], fit["projection"]
    weight = points * projection if moments.diagonal else points @ projection.T
    return _linear(weight, class_shares(moments).log() - points.square().sum(1) / 2 - weight @ fit["shift"])


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    # without the random start, which would move the global random state
    head = skip_init(nn.Linear, weight.shape[1], weight.shape[0])
    head.load_state_dict({"weight": weight, "bias": bias})
    return head.requires_grad_(False).eval()
