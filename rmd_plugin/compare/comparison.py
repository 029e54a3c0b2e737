"""Detectors x benchmark -> rows: features once, every detector on them, a failure is a row with its reason."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from pytorch_ood.metrics.functional import accuracy
from torch import Tensor, nn
from torch.utils.data import default_collate
from tqdm.auto import tqdm

from rmd_plugin.compare.adapters import ON_INPUTS, Adapter
from rmd_plugin.compare.bootstrap import Bootstrap
from rmd_plugin.compare.building import Factory, NetworkParts, NotSupported, build, wanted_layers
from rmd_plugin.compare.decisions import decide
from rmd_plugin.compare.extraction import TEST, TRAIN, VAL, Extractor, SplitFeatures
from rmd_plugin.compare.metrics import compare_scores
from rmd_plugin.compare.plausibility import doubt_accuracy
from rmd_plugin.compare.probe import fit_linear_probe, head_logits, linear_discriminant
from rmd_plugin.compare.remarks import collected
from rmd_plugin.compare.rows import (
    ACCURACY,
    AUROC,
    FALSE_ALARMS,
    FIT_SECONDS,
    SCORE_SECONDS,
    SHIFT_ACCURACY,
    Distance,
    Row,
    at_level,
)
from rmd_plugin.detectors.calibrated import Calibrated
from rmd_plugin.detectors.conformal import Calibration, check_level
from rmd_plugin.encoding.batches import Encoded
from rmd_plugin.encoding.isolation import evaluating, isolated_rng

log = logging.getLogger(__name__)

HeadChoice = Literal["auto", "own", "linear_probe", "linear_discriminant"]

#: elements that a detector may hold at once for one chunk: rows x classes x features
_CHUNK_ELEMENTS = 2**27
_CHUNK_ROWS = 4096


@dataclass
class Comparison:
    """What a comparison found."""

    rows: list[Row] = field(default_factory=list)  #: the numbers, and the reasons where there are none
    #: detector -> ``test``, ``val`` where it was calibrated on it, or OOD set -> (N,)
    scores: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    detectors: dict[str, Calibrated] = field(default_factory=dict)  #: fitted, and calibrated where there was ID data
    head: str = ""  #: where the classifier came from, in words
    classifier: nn.Linear | None = None  #: that detectors on logits were fed by
    interrupted: bool = False  #: whether it was stopped before the last detector


def compare(
    extractor: Extractor,
    detectors: Mapping[str, Factory],
    *,
    benchmark: str,
    backbone: str,
    seed: int = 0,
    head: HeadChoice | None = "auto",
    resamples: int = 1000,
    alpha: float = 0.05,
    remark: str = "",
    after_each: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Fit and score every detector on a benchmark.

    Features, and pooled ones of inner layers, are computed once per split and serve all detectors; only detectors that
    perturb the inputs or look at feature maps run the network again. A detector that fails, or that needs what the
    backbone does not give, is a row with its reason. Where the benchmark has validation data, every detector is
    calibrated on them, and its decisions are rated.

    Args:
        extractor: the benchmark behind the backbone.
        detectors: name -> detector class, or a ``functools.partial`` of one with its options.
        benchmark: name for the rows.
        backbone: name for the rows.
        seed: for detectors that are random, and for the bootstrap.
        head: the classifier for detectors that need one: ``own`` (of the backbone), ``linear_probe`` (logistic
            regression on the training features), ``linear_discriminant`` (of their moments), ``auto`` (its own if it
            was loaded and fits, else a probe, or the discriminant where there are only moments), or None.
        resamples: of the bootstrap interval of AUROC; 0 for none.
        alpha: share of ID samples that a decision may flag.
        remark: added to the row of the accuracy, for example that the encoder is untrained.
        after_each: called after every detector with what there is so far.

    Returns:
        The rows and scores. After Ctrl-C, of the detectors that were done.

    Raises:
        ValueError: if ``head`` is ``own`` and the backbone has no fitting one.
    """
    check_level("alpha", alpha)
    result = Comparison()
    try:
        for factory in detectors.values():  # the pass that gives the features gives inner layers, too
            with suppress(Exception):  # whatever is wrong is told when the detector is built
                if (layers := wanted_layers(factory, extractor.encoder)) is not None:
                    extractor.listen(layers)
        run = _Run(extractor, result, benchmark, backbone, seed, resamples, alpha)
        run.choose_head(head, remark)
        built = run.build(detectors)
        bar = tqdm(built.items(), desc="detectors", unit="detector", leave=False, disable=not extractor.progress)
        for name, adapter in bar:
            bar.set_postfix_str(name)
            run.evaluate(name, adapter)
            if after_each is not None:
                after_each(result)
    except KeyboardInterrupt:
        log.warning("Stopped: %d of %d detectors are done.", len(result.scores), len(detectors))
        result.interrupted = True
    return result


class _Run:
    """One comparison while it runs."""

    def __init__(
        self,
        extractor: Extractor,
        result: Comparison,
        benchmark: str,
        backbone: str,
        seed: int,
        resamples: int,
        alpha: float,
    ) -> None:
        self.extractor, self.result, self.seed, self.alpha = extractor, result, seed, alpha
        self.benchmark, self.backbone = benchmark, backbone
        self.train = extractor.features(TRAIN)
        self.ood_names = list(extractor.distance)
        self.shifts = extractor.shifts  # ID: no AUROC is taken of them, but accuracy and false alarms
        sizes = {name: len(extractor.features(name).labels) for name in (TEST, *self.ood_names)}
        self.num_classes = extractor.benchmark.num_classes
        self.bootstraps = {
            name: Bootstrap(sizes[TEST], sizes[name], resamples=resamples, seed=seed)
            for name in (self.ood_names if resamples else ())
        }
        self.head: nn.Linear | None = None
        self.given_logits = False  #: whether the data bring their logits, and no head
        self._encoded: dict[str, Encoded] = {}

    def row(self, detector: str, metric: str, value: float = math.nan, *, ood: str = "", **more: Any) -> Row:
        distance = cast(Distance, "shift" if ood in self.shifts else self.extractor.distance.get(ood, ""))
        return Row(self.benchmark, ood, self.backbone, detector, self.seed, metric, value, distance=distance, **more)

    # -- the head -------------------------------------------------------------------------------------------------

    def choose_head(self, choice: HeadChoice | None, remark: str) -> None:
        """Find the classifier, and note its accuracy and origin."""
        own = getattr(self.extractor.backbone, "head", None)
        fits = isinstance(own, nn.Linear) and own.out_features == self.num_classes
        loaded = bool(getattr(self.extractor.backbone, "head_loaded", fits))
        given = self.extractor.logits(TEST) is not None
        if choice == "own" and not fits and not given:
            found = f"a head for {own.out_features} classes" if isinstance(own, nn.Linear) else "no head"
            raise ValueError(
                f"head=own, but {self.backbone} has {found} and {self.benchmark} has {self.num_classes} classes. "
                "Use head=linear_probe, or set backbone.num_classes and backbone.checkpoint."
            )
        if (choice == "own" and fits) or (choice == "auto" and fits and loaded):
            self.head = cast(nn.Linear, own)
            origin = "the backbone's own head" + ("" if loaded else ", untrained")
        elif choice in ("own", "auto") and given:
            self.given_logits, origin = True, "logits of the data"
        elif choice == "linear_discriminant" or (choice == "auto" and self.extractor.moments is not None):
            self.head = linear_discriminant(self.extractor.train_moments())
            origin = "linear discriminant of the training moments"
        elif choice in ("auto", "linear_probe"):
            self.head = fit_linear_probe(self.train.features, self.train.labels, self.num_classes)
            origin = "linear probe on the training features"
        elif choice is None:
            origin = "no head"
        else:
            raise ValueError(f"head must be auto, own, linear_probe, linear_discriminant or null, got {choice!r}.")
        origin = "; ".join(filter(None, [origin, remark]))
        self.result.head, self.result.classifier = origin, self.head
        test = self.encoded(TEST)
        if test.logits is None:
            self.result.rows.append(self.row("", ACCURACY).failed(origin, "skipped"))
            return
        value = self._accuracy(TEST)
        if self.head is own and loaded:
            noted = getattr(getattr(self.extractor.backbone, "noted", None), "accuracy", None)
            if doubt := doubt_accuracy(value, len(test), self.num_classes, noted):
                log.warning("Accuracy: %s.", doubt)
                origin = f"{origin}; {doubt}"
        self.result.rows.append(self.row("", ACCURACY, value, reason=origin))
        for name in self.shifts:
            if (self.extractor.features(name).labels >= 0).any():
                self.result.rows.append(self.row("", SHIFT_ACCURACY, self._accuracy(name), ood=name))

    def _accuracy(self, split: str) -> float:
        data = self.encoded(split)
        logits, labels = cast(Tensor, data.logits), cast(Tensor, data.labels)
        known = labels >= 0
        return float(accuracy(logits[known].argmax(1), labels[known]))

    def encoded(self, split: str) -> Encoded:
        """A split with its logits, if there is a head: it is linear, so they need no pass through the network."""
        if split not in self._encoded:
            found = self._features(split)
            logits = self.extractor.logits(split if found is not self.train else TRAIN) if self.given_logits else None
            if self.head is not None:
                logits = head_logits(self.head, found.features)
            self._encoded[split] = Encoded(found.features, logits, found.labels)
        return self._encoded[split]

    def _features(self, split: str) -> SplitFeatures:
        if split == VAL and not self.has_val:
            log.info("There is no validation data; what is fitted on it is fitted on the training data.")
            return self.train
        return self.extractor.features(split)

    @functools.cached_property
    def has_val(self) -> bool:
        """Whether the benchmark has validation data."""
        try:
            return bool((self.extractor.features(VAL).labels >= 0).any())
        except (ValueError, KeyError):
            return False

    # -- detectors ------------------------------------------------------------------------------------------------

    def build(self, detectors: Mapping[str, Factory]) -> dict[str, Adapter]:
        """Build the detectors; those that cannot be built become rows."""
        parts = self._parts()
        built = {}
        for name, factory in detectors.items():
            try:
                with isolated_rng(self.seed):  # what it draws does not depend on the detectors before it
                    built[name] = build(factory, parts)
            except NotSupported as reason:
                self.result.rows.append(self.row(name, AUROC).failed(str(reason), "skipped"))
            except Exception as error:  # whatever a detector does wrong, the others stand
                self._failed(name, error)
        for split in {adapter.fit_split for adapter in built.values()}:
            self.encoded(split)  # here, so that it does not count as a detector's time
        return built

    def _parts(self) -> NetworkParts:
        extractor = self.extractor
        sample = extractor.dataset(TEST)[0][0]
        std = getattr(getattr(extractor.dataset(TEST), "transform", None), "std", None)
        embed = getattr(extractor.backbone, "text_embeddings", None)
        names = extractor.benchmark.class_names
        return NetworkParts(
            feature_dim=self.train.features.shape[1],
            num_classes=self.num_classes,
            encoder=extractor.encoder.to(extractor.device),
            head=self.head,
            has_logits=self.given_logits,
            sample=default_collate([sample]).to(extractor.device) if isinstance(sample, Tensor) else None,
            differentiable=isinstance(sample, Tensor) and sample.is_floating_point(),
            norm_std=[float(value) for value in std] if std is not None else None,
            text_embeddings=embed(names) if callable(embed) and names else None,
            seed=self.seed,
            progress=extractor.progress,
        )

    def evaluate(self, name: str, adapter: Adapter) -> None:
        """Fit one detector, score all test sets, add its rows."""
        remarks: list[str] = []
        try:
            with isolated_rng(self.seed), collected(remarks):
                started = time.perf_counter()
                self._fit(adapter)
                fitted = time.perf_counter()
                scores = {split: self._score(adapter, split) for split in (TEST, *self.ood_names)}
                done = time.perf_counter()
                calibrated = Calibrated(adapter.detector, self.alpha)
                decisions = self._decide(name, adapter, calibrated, scores)
            remark = "; ".join(text.rstrip(".") for text in remarks)
            rows = self._rate(name, scores, remark) + decisions
            rows.append(self.row(name, FIT_SECONDS, fitted - started, reason="" if self.ood_names else remark))
            rows.append(self.row(name, SCORE_SECONDS, done - fitted))
        except Exception as error:  # whatever a detector does wrong, the others stand
            self._failed(name, error)
            return
        self.result.rows += rows
        self.result.scores[name] = scores
        self.result.detectors[name] = calibrated

    def _failed(self, name: str, error: Exception) -> None:
        log.debug("%s failed", name, exc_info=error)
        self.result.rows.append(self.row(name, AUROC).failed(_reason(error)))

    def _fit(self, adapter: Adapter) -> None:
        if self.extractor.device.type != "cpu":
            adapter.detector.to(self.extractor.device)
        if adapter.fitted_on in ON_INPUTS:
            with evaluating(self.extractor.encoder):
                adapter.fit(self.extractor.loader(adapter.fit_split))
        elif self.extractor.moments is not None:
            adapter.fit(self.extractor.moments)
        else:
            adapter.fit(self._with_layers(adapter, adapter.fit_split))

    def _with_layers(self, adapter: Adapter, split: str) -> Encoded:
        """A split with the layers that a detector is fed."""
        if adapter.layers is None:
            return self.encoded(split)
        found = self.extractor.layer_features(split, adapter.layers)
        names = adapter.layers.keys()
        return replace(self.encoded(split), layers={names[layer]: z for layer, z in found.items()})

    def _score(self, adapter: Adapter, split: str) -> np.ndarray:
        if adapter.scored_on in ON_INPUTS:
            return self._score_inputs(adapter, split)
        data = self._with_layers(adapter, split)
        width = max(z.shape[1] for z in (data.features, *data.layers.values()))
        rows = max(16, min(_CHUNK_ROWS, _CHUNK_ELEMENTS // (self.num_classes * width)))
        chunks = [data.select(slice(start, start + rows)) for start in range(0, len(data), rows)]
        return np.concatenate([_to_numpy(adapter.score(chunk), len(chunk)) for chunk in chunks])

    def _score_inputs(self, adapter: Adapter, split: str) -> np.ndarray:
        batches = self.extractor.bar(self.extractor.loader(split), f"{type(adapter.detector).__name__} {split}")
        encoder, device = self.extractor.encoder, self.extractor.device
        with evaluating(encoder.to(device)):
            return np.concatenate([_to_numpy(adapter.score_values(x.to(device)), len(x)) for x, _ in batches])

    # -- metrics --------------------------------------------------------------------------------------------------

    def _decide(self, name: str, adapter: Adapter, detector: Calibrated, scores: dict[str, np.ndarray]) -> list[Row]:
        """Calibrate on the validation data, if there are any, add their scores to the others, rate the decisions."""
        metric = at_level(FALSE_ALARMS, self.alpha)
        if not self.has_val:
            return [self.row(name, metric).failed("the benchmark has no ID validation data", "skipped")]
        used = "its fit has seen the validation data that its threshold is from" if adapter.fit_split == VAL else ""
        try:
            held_out = self._score(adapter, VAL)[(self.extractor.features(VAL).labels >= 0).numpy()]
            calibration = detector.calibrate_scores(torch.from_numpy(held_out)).calibration
            shifted = {split: self._score(adapter, split) for split in self.shifts}
            found = decide(
                cast(Calibration, calibration), {**scores, **shifted}, self.alpha, test=TEST, shifts=self.shifts
            )
        except Exception as error:  # the scores stand without a decision
            reason = str(error) if isinstance(error, ValueError) else _reason(error)
            return [self.row(name, metric).failed(reason, "skipped")]
        scores[VAL] = held_out
        return [
            self.row(
                name, item.metric, item.value, ood=item.ood, low=item.low, high=item.high,
                reason=(used or item.remark) if item.metric == metric else "",
            )
            for item in found
        ]  # fmt: skip

    def _rate(self, name: str, scores: dict[str, np.ndarray], remark: str) -> list[Row]:
        rows = []
        for ood in self.ood_names:
            try:
                low = high = math.nan
                if self.bootstraps:
                    low, high = self.bootstraps[ood].interval(scores[TEST], scores[ood])
                values = compare_scores(torch.from_numpy(scores[TEST]), torch.from_numpy(scores[ood]))
                for metric, value in values.items():
                    more: dict[str, Any] = {"low": low, "high": high, "reason": remark} if metric == AUROC else {}
                    rows.append(self.row(name, metric, float(value), ood=ood, **more))
            except ValueError as error:
                rows.append(self.row(name, AUROC, ood=ood).failed(f"{ood}: {error}"))
        return rows


def _reason(error: Exception) -> str:
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__


def _to_numpy(scores: Tensor, count: int) -> np.ndarray:
    if not isinstance(scores, Tensor) or scores.shape != (count,):
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must have shape ({count},), got {found}")
    return scores.detach().cpu().double().numpy()
