"""Detectors x benchmark -> rows: features once, every detector on them, a failure is a row with its reason."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from pytorch_ood.metrics.functional import accuracy, aupr, auroc, fpr_at_tpr
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from rmd_plugin.compare.adapters import Factory, Prepared, Route, Sources, Unserved, prepare
from rmd_plugin.compare.bootstrap import Bootstrap
from rmd_plugin.compare.extraction import TEST, TRAIN, VAL, Extractor, SplitFeatures
from rmd_plugin.compare.probe import fit_linear_probe
from rmd_plugin.compare.rows import ACCURACY, AUPR_IN, AUPR_OUT, AUROC, FIT_SECONDS, FPR95, SCORE_SECONDS, Distance, Row
from rmd_plugin.detectors.base import StatefulDetector, raise_if_interrupted
from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.encoding.isolation import evaluating

log = logging.getLogger(__name__)

HeadChoice = Literal["auto", "own", "linear_probe"]

#: elements that a detector may hold at once for one chunk: rows x classes x features
_CHUNK_ELEMENTS = 2**27
_CHUNK_ROWS = 4096


@dataclass
class Comparison:
    """What a comparison found.

    Attributes:
        rows: the numbers, and the reasons where there are none.
        scores: detector -> ``test`` or OOD set -> outlier scores of shape (N,).
        head: where the classifier came from, in words.
        interrupted: whether it was stopped before the last detector.
    """

    rows: list[Row] = field(default_factory=list)
    scores: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    head: str = ""
    interrupted: bool = False


def compare(
    extractor: Extractor,
    detectors: Mapping[str, Factory],
    *,
    benchmark: str,
    backbone: str,
    seed: int = 0,
    head: HeadChoice | None = "auto",
    resamples: int = 1000,
    remark: str = "",
    after_each: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Fit and score every detector on a benchmark.

    Features are computed once per split and serve all detectors; only detectors that perturb the inputs run the network
    again. A detector that fails, or that the backbone cannot serve, is a row with its reason.

    Args:
        extractor: the benchmark behind the backbone.
        detectors: name -> detector class, or a ``functools.partial`` of one with its options.
        benchmark: name for the rows.
        backbone: name for the rows.
        seed: for detectors that are random, and for the bootstrap.
        head: the classifier for detectors that need one: ``own`` (of the backbone), ``linear_probe`` (logistic
            regression on the training features), ``auto`` (its own if it was loaded and fits, else a probe), or None.
        resamples: of the bootstrap interval of AUROC; 0 for none.
        remark: added to the row of the accuracy, for example that the encoder is untrained.
        after_each: called after every detector with what there is so far.

    Returns:
        The rows and scores. After Ctrl-C, of the detectors that were done.

    Raises:
        ValueError: if ``head`` is ``own`` and the backbone has no fitting one.
    """
    result = Comparison()
    try:
        run = _Run(extractor, result, benchmark, backbone, seed, resamples)
        run.choose_head(head, remark)
        ready = run.prepare(detectors)
        bar = tqdm(ready.items(), desc="detectors", unit="detector", leave=False, disable=not extractor.progress)
        for name, prepared in bar:
            bar.set_postfix_str(name)
            run.evaluate(name, prepared)
            if after_each is not None:
                after_each(result)
    except KeyboardInterrupt:
        log.warning("Stopped: %d of %d detectors are done.", len(result.scores), len(detectors))
        result.interrupted = True
    return result


class _Run:
    """One comparison while it runs."""

    def __init__(
        self, extractor: Extractor, result: Comparison, benchmark: str, backbone: str, seed: int, resamples: int
    ) -> None:
        self.extractor, self.result, self.seed = extractor, result, seed
        self.benchmark, self.backbone = benchmark, backbone
        self.train = extractor.features(TRAIN)
        self.sets = [TEST, *extractor.distance]
        self.tests = {name: extractor.features(name) for name in self.sets}
        self.num_classes = int(getattr(extractor.benchmark, "num_classes", 0)) or int(self.train.labels.max()) + 1
        known = len(self.tests[TEST].labels)
        self.bootstraps = {
            name: Bootstrap(known, len(self.tests[name].labels), resamples=resamples, seed=seed)
            for name in (self.sets[1:] if resamples else ())
        }
        self.head: nn.Linear | None = None
        self.validation = self.train

    def row(self, detector: str, metric: str, value: float = math.nan, *, ood: str = "", **more: Any) -> Row:
        distance = cast(Distance, self.extractor.distance.get(ood, ""))
        return Row(self.benchmark, ood, self.backbone, detector, self.seed, metric, value, distance=distance, **more)

    # -- the head -------------------------------------------------------------------------------------------------

    def choose_head(self, choice: HeadChoice | None, remark: str) -> None:
        """Find the classifier, and note its accuracy and origin."""
        own = getattr(self.extractor.backbone, "head", None)
        fits = isinstance(own, nn.Linear) and own.out_features == self.num_classes
        loaded = bool(getattr(self.extractor.backbone, "head_loaded", fits))
        if choice == "own" and not fits:
            found = f"a head for {own.out_features} classes" if isinstance(own, nn.Linear) else "no head"
            raise ValueError(
                f"head=own, but {self.backbone} has {found} and {self.benchmark} has {self.num_classes} classes. "
                "Use head=linear_probe, or set backbone.num_classes and backbone.checkpoint."
            )
        if choice == "own" or (choice == "auto" and fits and loaded):
            self.head = cast(nn.Linear, own)
            origin = "the backbone's own head" + ("" if loaded else ", untrained")
        elif choice in ("auto", "linear_probe"):
            bar = tqdm(total=1, desc="linear probe", leave=False, disable=not self.extractor.progress)
            with bar:
                self.head = fit_linear_probe(self.train.features, self.train.labels, self.num_classes)
                bar.update()
            origin = "linear probe on the training features"
        elif choice is None:
            origin = "no head"
        else:
            raise ValueError(f"head must be auto, own, linear_probe or null, got {choice!r}.")
        origin = "; ".join(filter(None, [origin, remark]))
        self.result.head = origin
        if self.head is None:
            self.result.rows.append(self.row("", ACCURACY).failed(origin, "skipped"))
            return
        test = self.tests[TEST]
        value = float(accuracy(self.logits(test).argmax(1), test.labels))
        self.result.rows.append(self.row("", ACCURACY, value, reason=origin))

    def logits(self, split: SplitFeatures) -> Tensor:
        """Logits (N, K) of a split: the head is linear, so they need no pass through the network."""
        head = cast(nn.Linear, self.head)
        with torch.no_grad():
            weight = head.weight.detach().cpu()
            bias = None if head.bias is None else head.bias.detach().cpu()
            parts = [nn.functional.linear(z.to(weight.dtype), weight, bias) for z in split.features.split(65_536)]
            return torch.cat(parts)

    # -- detectors ------------------------------------------------------------------------------------------------

    def prepare(self, detectors: Mapping[str, Factory]) -> dict[str, Prepared]:
        """Build the detectors; those that cannot be built become rows."""
        sources = self._sources()
        ready = {}
        for name, factory in detectors.items():
            try:
                ready[name] = prepare(factory, sources)
            except Unserved as reason:
                self.result.rows.append(self.row(name, AUROC).failed(str(reason), "skipped"))
            except Exception as error:  # whatever a detector does wrong, the others stand
                self._failed(name, error)
        if any(prepared.fit_split == VAL for prepared in ready.values()):
            self.validation = self._load_validation()  # here, so that it does not count as a detector's time
        return ready

    def _sources(self) -> Sources:
        extractor = self.extractor
        sample = extractor.dataset(TEST)[0][0]
        transform = getattr(extractor.dataset(TEST), "transform", None)
        std = getattr(transform, "std", None)
        embed = getattr(extractor.backbone, "text_embeddings", None)
        names = getattr(extractor.benchmark, "class_names", None)
        return Sources(
            feature_dim=self.train.features.shape[1],
            num_classes=self.num_classes,
            encoder=extractor.encoder,
            head=self.head,
            differentiable=isinstance(sample, Tensor) and sample.is_floating_point(),
            norm_std=[float(value) for value in std] if std is not None else None,
            text_embeddings=embed(names) if callable(embed) and names else None,
            seed=self.seed,
            progress=extractor.progress,
        )

    def evaluate(self, name: str, prepared: Prepared) -> None:
        """Fit one detector, score all test sets, add its rows."""
        remarks: list[str] = []
        try:
            with _seeded(self.seed), _collected(remarks):
                started = time.perf_counter()
                self._fit(prepared)
                raise_if_interrupted(prepared.detector)
                fitted = time.perf_counter()
                scores = {split: self._score(prepared, split) for split in self.sets}
                done = time.perf_counter()
            rows = self._rate(name, scores, "; ".join(remarks))
            rows.append(self.row(name, FIT_SECONDS, fitted - started))
            rows.append(self.row(name, SCORE_SECONDS, done - fitted))
        except Exception as error:  # whatever a detector does wrong, the others stand
            self._failed(name, error)
            return
        self.result.rows += rows
        self.result.scores[name] = scores

    def _failed(self, name: str, error: Exception) -> None:
        message = str(error).strip()
        reason = f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__
        log.debug("%s failed", name, exc_info=error)
        self.result.rows.append(self.row(name, AUROC).failed(reason))

    def _fit(self, prepared: Prepared) -> None:
        detector, route = prepared.detector, prepared.route
        if self.extractor.device.type != "cpu":
            detector.to(self.extractor.device)
        if not detector.requires_fit:
            return
        split = self.validation if prepared.fit_split == VAL else self.train
        if route is Route.LOGITS:
            detector.fit_logits(self.logits(split), split.labels)  # type: ignore[attr-defined]
        elif route is Route.FEATURES or (route is Route.INPUTS and hasattr(detector, "fit_features")):
            detector.fit_features(split.features, split.labels)  # type: ignore[attr-defined]
        elif route is Route.MAPS:
            detector.fit_feature_maps(_as_maps(split.features), split.labels)  # type: ignore[attr-defined]
        elif route is Route.HEAD:
            data = TensorDataset(split.features.float(), split.labels)
            detector.fit(DataLoader(data, batch_size=self._chunk_rows(), generator=torch.Generator()))
        else:
            with evaluating(self.extractor.encoder):
                detector.fit(self.extractor.loader(prepared.fit_split))

    def _load_validation(self) -> SplitFeatures:
        try:
            return self.extractor.features(VAL)
        except (ValueError, KeyError):
            log.info("There is no validation data; calibrating on the training data.")
            return self.train

    def _score(self, prepared: Prepared, split: str) -> np.ndarray:
        detector, route = prepared.detector, prepared.route
        if route is Route.INPUTS:
            return self._score_inputs(prepared, split)
        data = self.tests[split]
        if route is Route.LOGITS:
            values, score = self.logits(data), detector.predict_logits  # type: ignore[attr-defined]
        elif route is Route.MAPS:
            values, score = _as_maps(data.features), detector.predict_feature_maps  # type: ignore[attr-defined]
        elif route is Route.HEAD:
            values, score = data.features.float(), detector.predict
        else:
            values, score = data.features, detector.predict_features  # type: ignore[attr-defined]
        # ours divide the work themselves
        rows = len(values) if isinstance(detector, StatefulDetector) else self._chunk_rows()
        return np.concatenate([_to_numpy(score(part), len(part)) for part in values.split(max(rows, 1))])

    def _score_inputs(self, prepared: Prepared, split: str) -> np.ndarray:
        loader = self.extractor.loader(split)
        self.extractor.encoder.to(self.extractor.device)
        title = f"{type(prepared.detector).__name__} {split}"
        parts = []
        with evaluating(self.extractor.encoder):
            for x, _ in self.extractor.bar(loader, title):
                parts.append(_to_numpy(prepared.detector.predict(x.to(self.extractor.device)), len(x)))
        return np.concatenate(parts)

    def _chunk_rows(self) -> int:
        return max(16, min(_CHUNK_ROWS, _CHUNK_ELEMENTS // (self.num_classes * self.train.features.shape[1])))

    # -- metrics --------------------------------------------------------------------------------------------------

    def _rate(self, name: str, scores: dict[str, np.ndarray], remark: str) -> list[Row]:
        rows = []
        known = scores[TEST]
        for ood in self.sets[1:]:
            values = torch.from_numpy(np.concatenate([known, scores[ood]]))
            labels = torch.cat([torch.zeros(len(known)), -torch.ones(len(scores[ood]))]).long()
            try:
                low = high = math.nan
                if self.bootstraps:
                    low, high = self.bootstraps[ood].interval(known, scores[ood])
                area = float(auroc(values, labels))
                rows.append(self.row(name, AUROC, area, ood=ood, low=low, high=high, reason=remark))
                rows.append(self.row(name, AUPR_IN, float(aupr(values, labels, "id")), ood=ood))
                rows.append(self.row(name, AUPR_OUT, float(aupr(values, labels, "ood")), ood=ood))
                rows.append(self.row(name, FPR95, float(fpr_at_tpr(values, labels, 0.95)), ood=ood))
            except ValueError as error:
                rows.append(self.row(name, AUROC, ood=ood).failed(f"{ood}: {error}"))
        return rows


def _as_maps(features: Tensor) -> Tensor:
    """Pooled features as maps of one pixel, which is how the framework documents it."""
    return features.float()[:, :, None, None]


def _to_numpy(scores: Tensor, count: int) -> np.ndarray:
    if not isinstance(scores, Tensor) or scores.shape != (count,):
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must have shape ({count},), got {found}")
    return scores.detach().cpu().double().numpy()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The same random numbers for every detector, whoever came before; the caller's generators come back after."""
    state = np.random.get_state()  # noqa: NPY002 - scikit-learn and the framework use the global generator
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


@contextmanager
def _collected(remarks: list[str]) -> Iterator[None]:
    """Warnings of our numerics become remarks in the table; those of the framework go to the log."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = " ".join(str(warning.message).split())
        if not issubclass(warning.category, NumericalWarning):
            log.debug("%s: %s", warning.category.__name__, text)
        elif text not in remarks:
            remarks.append(text)
