"""A benchmark's splits through a backbone's encoder: each split once, from the cache or from the network."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm.auto import tqdm

from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.fingerprint import (
    FingerprintError,
    dataset_fingerprint,
    encoder_fingerprint,
    fingerprint,
    hash_items,
)
from rmd_plugin.detectors.class_moments import ClassMoments
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.encoding.isolation import isolated_rng
from rmd_plugin.encoding.layer_encoder import LayerEncoder, LayersBeside, Pooling
from rmd_plugin.encoding.layers import LayerNames
from rmd_plugin.encoding.loop import PairEncoder, encode_batches

log = logging.getLogger(__name__)

TRAIN, VAL, TEST = "train", "val", "test"

_KEY_VERSION = "rmd-features-1"
#: name of the features among those of inner layers
_FEATURES = ""
#: samples that are encoded again to see whether cached features are still true
_PROBES = 4


class BenchmarkLike(Protocol):
    """What a comparison needs of a benchmark, as :class:`rmd_plugin.benchmarks.base.OODBenchmark` has it.

    The sets have ``with_transform(transform)``, for backbones with a transform of their own.
    """

    @property
    def num_classes(self) -> int:
        """K."""

    @property
    def class_names(self) -> Sequence[str] | None:
        """Names of the classes, if they have any."""

    @property
    def ood_names(self) -> Sequence[str]:
        """Names of the OOD sets."""

    @property
    def distance(self) -> Mapping[str, str]:
        """OOD set -> ``near``, ``far`` or an empty text."""

    def fit_set(self) -> Dataset[Any]:
        """ID training data without augmentation."""

    def val_set(self) -> Dataset[Any]:
        """ID validation data."""

    def test_sets(self, known: bool = True, unknown: bool = True) -> list[Dataset[Any]]:
        """Test sets, see ``pytorch_ood.benchmark.Benchmark``."""


@dataclass(frozen=True, eq=False)
class SplitFeatures:
    """One split after the encoder, on the CPU."""

    features: Tensor  #: shape (N, D)
    labels: Tensor  #: shape (N,), below zero for OOD samples
    cached: bool = False  #: whether they came from the disk


class Extractor:
    """Features of a benchmark's splits.

    Splits are ``train`` (without augmentation where the benchmark offers that), ``val``, ``test``, the names of the
    OOD sets and those of ``shifts``. A split is encoded when it is first asked for, in evaluation mode and without
    gradients.

    Args:
        benchmark: the data.
        backbone: a module with ``.encoder``; its ``test_transform`` is put in front of the data if it has one.
        cache: where to keep features, or None.
        batch_size: samples per forward pass.
        num_workers: processes that prepare the data.
        device: where the encoder runs.
        names: what ``entry.json`` of the cache says besides, for people.
        progress: show a bar with the time left for every pass.
        layers: inner layers whose pooled features are wanted, too: names, patterns or ``"auto"``, see
            :class:`rmd_plugin.encoding.layer_encoder.LayerEncoder`. They are encoded in the pass that gives the
            features, and kept as these are, each layer on its own.
        pooling: of their tokens.
    """

    def __init__(
        self,
        benchmark: BenchmarkLike,
        backbone: nn.Module,
        *,
        cache: FeatureCache | None = None,
        batch_size: int = 256,
        num_workers: int = 0,
        device: str | torch.device = "cpu",
        names: dict[str, str] | None = None,
        progress: bool = True,
        layers: LayerNames | None = None,
        pooling: Pooling | Mapping[str, Pooling] = "mean",
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ValueError(f"batch_size must be >= 1 and num_workers >= 0, got {batch_size} and {num_workers}.")
        self.benchmark, self.backbone, self.cache = benchmark, backbone, cache
        self.encoder = cast(nn.Module, getattr(backbone, "encoder", backbone))
        self.batch_size, self.num_workers, self.device = batch_size, num_workers, torch.device(device)
        self.names, self.progress = dict(names or {}), progress
        self._given = None if layers is None else LayerEncoder(self.encoder, layers, pooling=pooling)
        self._listened: dict[str, tuple[str, str]] = {}  # name of an entry -> layer and pooling
        self._parts: dict[str, dict[str, Tensor]] = {}  # split -> name of an entry -> (N, D)
        self._found: dict[str, SplitFeatures] = {}
        self._weights: str | None = None

    @property
    def distance(self) -> dict[str, str]:
        """OOD set -> ``near``, ``far`` or, where the benchmark does not say, an empty text."""
        return {name: str(self.benchmark.distance.get(name, "")) for name in self.benchmark.ood_names}

    @property
    def shifts(self) -> list[str]:
        """Names of the ID sets under a covariate shift, which only some benchmarks have."""
        return list(getattr(self.benchmark, "shifts", ()))

    @property
    def moments(self) -> Moments | None:
        """Those of the training data, where a benchmark brings them in place of its samples."""
        return getattr(self.benchmark, "moments", None)

    def train_moments(self) -> Moments:
        """Moments of the training data, those that the benchmark brings or of their features."""
        if self.moments is not None:
            return self.moments
        found, metric = self.features(TRAIN), ClassMoments(self.benchmark.num_classes, sync_on_compute=False)
        metric.update(found.features, found.labels)
        return metric.compute()

    def dataset(self, split: str) -> Dataset[Any]:
        """The data of a split behind the backbone's transform; refuses a name that there is not."""
        dataset: Any = self._raw(split)
        transform = getattr(self.backbone, "test_transform", None)
        return dataset if transform is None else dataset.with_transform(transform)

    def loader(self, split: str) -> DataLoader[Any]:
        """Batches of a split in order. The global random state is neither used nor changed."""
        return self._loader(self.dataset(split))

    def bar(self, loader: DataLoader[Any], title: str) -> Iterator[Any]:
        """The batches of a loader behind a progress bar."""
        # leave=False: a finished bar would stand between the tables
        return iter(tqdm(loader, desc=title, unit="batch", leave=False, disable=not self.progress))

    def features(self, split: str) -> SplitFeatures:
        """Features and labels of a split, computed or read the first time and kept from then on."""
        if split not in self._found:
            self._fetch(split)
        return self._found[split]

    def raw(self, split: str, position: int) -> tuple[object, str]:
        """A sample before any transform, None where the data keep none, and the name of its class or nothing."""
        dataset: Any = self._raw(split)
        names, label = self.benchmark.class_names, int(dataset.labels[position]) if hasattr(dataset, "labels") else -1
        item = dataset.raw(position) if hasattr(dataset, "raw") else None
        return item, str(names[label]) if names is not None and 0 <= label < len(names) else ""

    def layer_features(self, split: str, layers: LayerEncoder | None = None) -> dict[str, Tensor]:
        """Pooled features of inner layers of a split: layer -> (N, D_l), memory-mapped where there is a cache.

        Args:
            split: the split.
            layers: which ones; by default those that the extractor was made with. Others cost a pass of their own if
                the features are there already, see :meth:`listen`.

        Raises:
            EncodingError: if there are no such layers, or they take no part in the forward pass.
            ValueError: if no layers are given, here or before.
        """
        wanted = self._given if layers is None else layers
        if wanted is None:
            raise ValueError("no layers were asked for. Make the Extractor with layers='auto', or with their names.")
        self.listen(wanted)
        names = wanted.keys()
        if any(name not in self._parts.get(split, {}) for name in names.values()):
            self._fetch(split)
        return {layer: self._parts[split][name] for layer, name in names.items()}

    def listen(self, layers: LayerEncoder) -> None:
        """Encode these layers, too, in every pass from now on. They are tried on one sample.

        Raises:
            EncodingError: if there are no such layers, or they take no part in the forward pass.
        """
        if layers.keys() and set(layers.keys().values()) <= self._listened.keys():
            return
        sample = DataLoader(Subset(self.dataset(TEST), [0]))
        with isolated_rng(0):
            self.encoder.to(self.device)
            for _ in encode_batches(PairEncoder(LayersBeside(self.encoder, [layers])), sample, device=self.device):
                pass
        self._listened |= {name: (layer, layers.found[layer]) for layer, name in layers.keys().items()}

    def logits(self, split: str) -> Tensor | None:
        """Logits of a split of shape (N, K) where the data bring them, as a file of features may; else None."""
        given = getattr(self.benchmark, "logits", None)
        return given(split) if callable(given) else None

    def _raw(self, split: str) -> Dataset[Any]:
        if split == TRAIN:
            return self.benchmark.fit_set()
        if split == VAL:
            return self.benchmark.val_set()
        if split == TEST:
            return self.benchmark.test_sets(known=True, unknown=False)[0]
        if split in self.shifts:
            return cast(Dataset[Any], cast(Any, self.benchmark).shifts[split])
        names = list(self.benchmark.ood_names)
        if split not in names:
            others = ", ".join([*names, *self.shifts])
            raise KeyError(f"there is no split {split!r}; there are train, val, test and {others}.")
        return self.benchmark.test_sets(known=False, unknown=True)[names.index(split)]

    def _loader(self, dataset: Dataset[Any]) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
        )

    def _fetch(self, split: str) -> None:
        """Compute or read all that is wanted of a split and not there yet."""
        if self._given is not None:
            self.listen(self._given)
        # random transforms draw the same, whatever was drawn before and whichever split comes first
        with isolated_rng(0):
            names = [name for name in (_FEATURES, *self._listened) if name not in self._parts.get(split, {})]
            dataset = self.dataset(split)
            count = len(dataset)  # type: ignore[arg-type]
            if count == 0:
                raise ValueError(f"the split {split!r} holds no sample.")
            keys = None if self.cache is None else self._keys(dataset, split, names)
            if self.cache is None or keys is None:
                batches = list(self._encode(dataset, names, f"encode {split}"))
                labels = np.concatenate([part for _, part in batches])
                arrays = {name: np.concatenate([parts[name] for parts, _ in batches]) for name in names}
                cached = False
            else:
                found = self.cache.fetch_together(
                    keys,
                    lambda missing: self._encode(dataset, missing, f"encode {split}"),
                    count,
                    about={"split": split, **self.names},
                    still_true=_Probe(self, dataset, names),
                )
                for entry in found.values():
                    log.debug("%s: %s features in %s", split, "found" if entry.hit else "wrote", entry.folder)
                arrays = {name: entry.features for name, entry in found.items()}
                labels, cached = found[names[0]].labels, all(entry.hit for entry in found.values())
        parts = self._parts.setdefault(split, {})
        parts |= {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._found.setdefault(split, SplitFeatures(parts[_FEATURES], torch.from_numpy(labels), cached))

    def _encode(
        self, dataset: Dataset[Any], names: Sequence[str], title: str | None
    ) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        self.encoder.to(self.device)
        shown = title if self.progress else None
        loader = self._loader(dataset)
        network: nn.Module = self.encoder
        layers: dict[str, list[str]] = {}  # pooling -> layers
        for layer, way in (self._listened[name] for name in names if name != _FEATURES):
            layers.setdefault(way, []).append(layer)
        if layers:
            beside = [LayerEncoder(network, found, pooling=cast(Pooling, way)) for way, found in layers.items()]
            network = LayersBeside(network, beside)
        for encoded in encode_batches(PairEncoder(network), loader, device=self.device, title=shown):
            parts = {**encoded.layers, _FEATURES: encoded.features}
            arrays = {name: parts[name].cpu().numpy() for name in names}
            yield arrays, cast(Tensor, encoded.labels).cpu().numpy().astype(np.int64)

    def _keys(self, dataset: Dataset[Any], split: str, names: Sequence[str]) -> dict[str, str] | None:
        """Hashes of weights, data, transform and layer; None if the transform has no content to hash."""
        try:
            data = dataset_fingerprint(dataset)
            if data is None:
                data = hash_items(cast(DataLoader[Any], self.bar(self._loader(dataset), f"hash {split}")))
            if self._weights is None:
                self._weights = encoder_fingerprint(self.backbone)
            # some transforms settle their state in the first call (tokenizers remember how they padded)
            dataset[0]
            transform = fingerprint(getattr(dataset, "transform", None))
            release = ".".join(torch.__version__.split(".")[:2])
            common = [_KEY_VERSION, self._weights, data, transform, release]
            return {name: fingerprint([*common, *self._listened.get(name, ())]) for name in names}
        except FingerprintError as error:
            log.warning("Features are not cached: %s", error)
            return None


class _Probe:
    """Encodes a few samples again, once: code and libraries change without changing any hash."""

    def __init__(self, extractor: Extractor, dataset: Dataset[Any], names: Sequence[str]) -> None:
        self.extractor, self.dataset, self.names = extractor, dataset, names
        self._fresh: dict[str, np.ndarray] = {}

    def __call__(self, name: str, features: np.ndarray) -> bool:
        """Whether features from the cache are what the network gives today."""
        positions = sorted({round(part * (len(features) - 1) / (_PROBES - 1)) for part in range(_PROBES)})
        if not self._fresh:
            self._fresh = self._encode(positions)
        fresh, kept = self._fresh[name], np.asarray(features[positions])
        if fresh.shape != kept.shape or fresh.dtype != kept.dtype:
            return False
        # other batch sizes and thread counts round differently, in the last digits only
        size = float(np.abs(kept).max()) or 1.0
        return bool(np.allclose(fresh, kept, rtol=1e-3, atol=1e-4 * size))

    def _encode(self, positions: list[int]) -> dict[str, np.ndarray]:
        extractor = self.extractor
        workers, extractor.num_workers = extractor.num_workers, 0
        try:
            found = [parts for parts, _ in extractor._encode(Subset(self.dataset, positions), self.names, None)]
        finally:
            extractor.num_workers = workers
        return {name: np.concatenate([parts[name] for parts in found]) for name in self.names}
