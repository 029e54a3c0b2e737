"""Detectors x benchmark -> rows: features once, every detector on them, a failure is a row with its reason."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from pytorch_ood.metrics.functional import accuracy
from scipy.stats import betabinom, binomtest
from torch import Tensor, nn

from rmd_plugin.compare import features, rows
from rmd_plugin.compare.adapters import Adapter, Encoded, Factory, NetworkParts, NotSupported, Representation, build
from rmd_plugin.compare.features import TEST, TRAIN, VAL, Extractor, seeded
from rmd_plugin.compare.metrics import aurc, compare_scores, joint_metrics
from rmd_plugin.detectors.conformal import Calibrated, Calibration, allowed_alarms
from rmd_plugin.detectors.detectors import evaluating
from rmd_plugin.detectors.drift import check_level
from rmd_plugin.detectors.moments import NumericalWarning

log = logging.getLogger(__name__)

HeadChoice = Literal["auto", "own", "linear_probe", "linear_discriminant"]

#: elements that a detector may hold at once for one chunk: rows x classes x features
_CHUNK_ELEMENTS = 2**27
_CHUNK_ROWS = 4096
#: probability, if test and calibration data are alike, below which so many false alarms are remarked on
_SURPRISING = 1e-3


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

    Features are computed once per split and serve all detectors; only detectors that perturb the inputs or look at
    feature maps run the network again. A detector that fails, or that needs what the backbone does not give, is a row
    with its reason. Where the benchmark has validation data, every detector is calibrated on them, and its decisions
    are rated.

    Args:
        extractor: the benchmark behind the backbone.
        detectors: name -> detector class, or a ``functools.partial`` of one with its options.
        benchmark: name for the rows.
        backbone: name for the rows.
        seed: for detectors that are random, and for the bootstrap.
        head: the classifier for detectors that need one: ``own`` (of the backbone), ``linear_probe`` (logistic
            regression on the training features), ``linear_discriminant`` (of their moments), ``auto`` (its own if it
            was loaded and fits, else a probe, or the discriminant where there are only moments), or None.
        resamples: of the bootstrap interval of AUROC, see :func:`rmd_plugin.compare.rows.auroc_interval`; 0 for
            no interval.
        alpha: share of ID samples that a decision may flag.
        remark: added to the row of the accuracy, for example that the encoder is untrained.
        after_each: called after every detector with what there is so far.

    Returns:
        The rows and scores. After Ctrl-C, of the detectors that were done.

    Raises:
        ValueError: if ``head`` is ``own`` and the backbone has no fitting one.
    """
    check_level("alpha", alpha)
    comparison = Comparison(extractor, benchmark, backbone, seed, resamples, alpha)
    try:
        comparison.encode()
        comparison.choose_head(head, remark)
        parts = comparison.network_parts()
        for name, factory in extractor.bar(detectors.items(), "detectors"):
            comparison.evaluate(name, factory, parts)
            if after_each is not None:
                after_each(comparison)
    except KeyboardInterrupt:
        log.warning("Stopped: %d of %d detectors are done.", len(comparison.scores), len(detectors))
        comparison.interrupted = True
    return comparison


@dataclass
class Comparison:
    """What is compared, and what a comparison has found by now."""

    extractor: Extractor = field(repr=False)
    benchmark: str
    backbone: str
    seed: int
    resamples: int
    alpha: float
    records: list[dict[str, Any]] = field(default_factory=list)  #: the rows, one by one
    #: detector -> ``test``, ``val`` where it was calibrated on it, or OOD set -> (N,)
    scores: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    detectors: dict[str, Calibrated] = field(default_factory=dict)  #: fitted, and calibrated where there was ID data
    head: str = ""  #: where the classifier came from, in words
    classifier: nn.Linear | None = None  #: that detectors on logits were fed by
    interrupted: bool = False  #: whether it was stopped before the last detector
    has_val: bool = False  #: whether there are ID validation data
    has_logits: bool = False  #: whether the data bring their logits, and no head
    _encoded: dict[str, Encoded] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> pd.DataFrame:
        """The numbers, and the reasons where there are none. See :data:`rmd_plugin.compare.rows.COLUMNS`."""
        return rows.make_rows(self.records)

    def row(self, detector: str, metric: str, value: float = math.nan, *, ood: str = "", **more: Any) -> dict[str, Any]:
        """A row of this comparison, see :func:`rmd_plugin.compare.rows.make_row`."""
        distance = "shift" if ood in self.extractor.shifts else self.extractor.distance.get(ood, "")
        about = (self.benchmark, ood, self.backbone, detector, self.seed, metric, value)
        return rows.make_row(*about, distance=distance, **more)

    def encode(self) -> None:
        """Encode all splits, so that it does not count as a detector's time."""
        for name in (TRAIN, TEST, *self.extractor.distance):
            self.extractor.features(name)
        try:
            self.has_val = bool((self.extractor.features(VAL).labels >= 0).any())
        except ValueError:
            log.info("There is no validation data; what is fitted on it is fitted on the training data.")

    # -- the head -------------------------------------------------------------------------------------------------

    def choose_head(self, choice: HeadChoice | None, remark: str) -> None:
        """Find the classifier, and note its accuracy and origin."""
        extractor, own = self.extractor, getattr(self.extractor.backbone, "head", None)
        fits = isinstance(own, nn.Linear) and own.out_features == extractor.num_classes
        loaded = bool(getattr(extractor.backbone, "head_loaded", fits))
        if fits and (choice == "own" or (choice == "auto" and loaded)):
            self.classifier, origin = own, "the backbone's own head" + ("" if loaded else ", untrained")
        elif choice in ("own", "auto") and extractor.logits(TEST) is not None:
            self.has_logits, origin = True, "logits of the data"
        elif choice == "own":
            raise ValueError(
                f"head=own, but {self.backbone} has no head for the {extractor.num_classes} classes of "
                f"{self.benchmark}. Use head=linear_probe, or give checkpoint=FILE with one."
            )
        elif choice == "linear_discriminant" or (choice == "auto" and extractor.moments is not None):
            self.classifier = features.linear_discriminant(extractor.train_moments())
            origin = "linear discriminant of the training moments"
        elif choice in ("auto", "linear_probe"):
            train = extractor.features(TRAIN)
            self.classifier = features.fit_linear_probe(train.features, train.labels, extractor.num_classes)
            origin = "linear probe on the training features"
        elif choice is None:
            origin = "no head"
        else:
            raise ValueError(f"head must be auto, own, linear_probe, linear_discriminant or null, got {choice!r}.")
        self.head = origin = "; ".join(filter(None, [origin, remark]))
        value, chance = self._accuracy(TEST), 1 / extractor.num_classes
        if value is None:
            self.records.append(self.row("", rows.ACCURACY, status="skipped", reason=origin))
            return
        if value < chance + 3 * math.sqrt(chance * (1 - chance) / len(self.encoded(TEST))):
            origin += f"; hardly above chance, {100 * chance:.1f} %"
        self.records.append(self.row("", rows.ACCURACY, value, reason=origin))
        for name in extractor.shifts:
            if (extractor.features(name).labels >= 0).any():
                self.records.append(self.row("", rows.SHIFT_ACCURACY, self._accuracy(name), ood=name))

    def _accuracy(self, split: str) -> Any:
        """Share of the ID samples of a split that are classified correctly; None without logits."""
        data = self.encoded(split).select(self.extractor.features(split).labels >= 0)
        return None if data.logits is None else float(accuracy(data.logits.argmax(1), cast(Tensor, data.labels)))

    def encoded(self, split: str) -> Encoded:
        """A split with its logits, if there is a head: it is linear, so they need no pass through the network."""
        split = TRAIN if split == VAL and not self.has_val else split
        if split not in self._encoded:
            data, logits = self.extractor.features(split), None
            if self.classifier is not None:
                logits = features.head_logits(self.classifier, data.features)
            elif self.has_logits:
                logits = self.extractor.logits(split)
            self._encoded[split] = Encoded(data.features, logits, data.labels)
        return self._encoded[split]

    # -- detectors ------------------------------------------------------------------------------------------------

    def network_parts(self) -> NetworkParts:
        """What there is to build detectors from."""
        extractor, names = self.extractor, self.extractor.benchmark.class_names
        dataset: Any = extractor.dataset(TEST)
        sample, std = dataset[0][0], getattr(getattr(dataset, "transform", None), "std", None)
        embed = getattr(extractor.backbone, "text_embeddings", None)
        return NetworkParts(
            feature_dim=extractor.features(TRAIN).features.shape[1],
            num_classes=extractor.num_classes,
            encoder=extractor.encoder.to(extractor.device),
            head=self.classifier,
            has_logits=self.has_logits,
            sample=sample.unsqueeze(0).to(extractor.device) if isinstance(sample, Tensor) else None,
            differentiable=isinstance(sample, Tensor) and sample.is_floating_point(),
            norm_std=[float(value) for value in std] if std is not None else None,
            text_embeddings=embed(names) if callable(embed) and names else None,
            seed=self.seed,
            progress=extractor.progress,
        )

    def evaluate(self, name: str, factory: Factory, parts: NetworkParts) -> None:
        """Build and fit one detector, score all test sets, add its rows."""
        try:
            with seeded(self.seed):  # what it draws does not depend on the detectors before it
                adapter = build(factory, parts)
            self.encoded(adapter.fit_split)  # here, so that it does not count as the detector's time
            with seeded(self.seed), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                started = time.perf_counter()
                self._fit(adapter)
                fitted = time.perf_counter()
                scores = {split: self._score(adapter, split) for split in (TEST, *self.extractor.distance)}
                done = time.perf_counter()
                calibrated = Calibrated(adapter.detector, self.alpha)
                decisions = self._decide(name, adapter, calibrated, scores)
            # those of our numerics are remarks for the table
            texts = [str(warning.message) for warning in caught if issubclass(warning.category, NumericalWarning)]
            remark = "; ".join(dict.fromkeys(" ".join(text.split()).rstrip(".") for text in texts))
            records = self._rate(name, scores, remark) + decisions
        except Exception as error:  # whatever a detector does wrong, the others stand
            log.debug("%s has no numbers", name, exc_info=error)
            status = "skipped" if isinstance(error, NotSupported) else "failed"
            self.records.append(self.row(name, rows.AUROC, status=status, reason=_reason(error)))
            return
        reason = "" if self.extractor.distance else remark
        records.append(self.row(name, rows.FIT_SECONDS, fitted - started, reason=reason))
        records.append(self.row(name, rows.SCORE_SECONDS, done - fitted))
        self.records += records
        self.scores[name], self.detectors[name] = scores, calibrated

    def _fit(self, adapter: Adapter) -> None:
        extractor = self.extractor
        if extractor.device.type != "cpu":
            adapter.detector.to(extractor.device)
        if adapter.fitted_on is Representation.INPUTS:
            with evaluating(extractor.encoder):
                adapter.fit(extractor.loader(adapter.fit_split))
        else:
            adapter.fit(self.encoded(adapter.fit_split) if extractor.moments is None else extractor.moments)

    def _score(self, adapter: Adapter, split: str) -> np.ndarray:
        extractor, data = self.extractor, self.encoded(split)
        if adapter.scored_on is Representation.INPUTS:
            batches = extractor.bar(extractor.loader(split), f"{type(adapter.detector).__name__} {split}")
            with evaluating(extractor.encoder.to(extractor.device)):
                parts = [adapter.score(x.to(extractor.device)).cpu() for x, _ in batches]
        else:
            size = max(16, min(_CHUNK_ROWS, _CHUNK_ELEMENTS // (extractor.num_classes * data.features.shape[1])))
            chunks = (data.select(slice(start, start + size)) for start in range(0, len(data), size))
            parts = [adapter.score(chunk.take(adapter.scored_on)).cpu() for chunk in chunks]
        scores = torch.cat(parts).detach().double().numpy()
        if scores.shape != (len(data),):
            raise ValueError(f"scores must have shape ({len(data)},), got {scores.shape}")
        return scores

    # -- metrics --------------------------------------------------------------------------------------------------

    def _decide(
        self, name: str, adapter: Adapter, detector: Calibrated, scores: dict[str, np.ndarray]
    ) -> list[dict[str, Any]]:
        """Calibrate on the validation data, if there are any, add their scores to the others, rate the decisions.

        These are the threshold, the share of the ID test set that is flagged (false alarms), and that of each OOD set.
        """
        try:
            if not self.has_val:
                raise ValueError("the benchmark has no ID validation data")
            held_out = self._score(adapter, VAL)[(self.extractor.features(VAL).labels >= 0).numpy()]
            calibration = cast(Calibration, detector.calibrate_scores(torch.from_numpy(held_out)).calibration)
            threshold = float(calibration.threshold(self.alpha))
            shifted = {split: self._score(adapter, split) for split in self.extractor.shifts}
        except Exception as error:  # the scores stand without a decision
            metric = rows.at_level(rows.FALSE_ALARMS, self.alpha)
            return [self.row(name, metric, status="skipped", reason=_reason(error))]
        records = [self.row(name, rows.at_level(rows.THRESHOLD, self.alpha), threshold)]
        for split, values in {**scores, **shifted}.items():
            flagged = int(calibration.is_ood(torch.from_numpy(values), alpha=self.alpha).sum())
            low, high = binomtest(flagged, len(values)).proportion_ci(0.95)  # Clopper and Pearson's
            metric, more = rows.SHIFT_ALARMS if split in shifted else rows.DETECTED, {"ood": split}
            if split == TEST:
                reason = too_many_alarms(flagged, len(values), len(calibration), self.alpha)
                if adapter.fit_split == VAL:
                    reason = "its fit has seen the validation data that its threshold is from"
                metric, more = rows.FALSE_ALARMS, {"reason": reason}
            metric = rows.at_level(metric, self.alpha)
            records.append(self.row(name, metric, flagged / len(values), low=low, high=high, **more))
        scores[VAL] = held_out
        return records

    def _rate(self, name: str, scores: dict[str, np.ndarray], remark: str) -> list[dict[str, Any]]:
        data, id_scores = self.encoded(TEST), torch.from_numpy(scores[TEST])
        right = None if data.logits is None else data.logits.argmax(1).cpu() == cast(Tensor, data.labels).cpu()
        records = []
        if right is not None and not id_scores.isnan().any():
            records.append(self.row(name, rows.AURC, float(aurc(id_scores, ~right))))
        for ood in self.extractor.distance:
            try:
                ood_scores = torch.from_numpy(scores[ood])
                more: dict[str, Any] = {"reason": remark}
                values = {key: float(value) for key, value in compare_scores(id_scores, ood_scores).items()}
                values |= joint_metrics(id_scores, ood_scores, right)
                if self.resamples:
                    low, high = rows.auroc_interval(scores[TEST], scores[ood], resamples=self.resamples, seed=self.seed)
                    more |= {"low": low, "high": high}
                for metric, value in values.items():
                    records.append(self.row(name, metric, value, ood=ood, **(more if metric == rows.AUROC else {})))
            except ValueError as error:
                records.append(self.row(name, rows.AUROC, ood=ood, status="failed", reason=f"{ood}: {error}"))
        return records


def too_many_alarms(flagged: int, tested: int, calibrated: int, alpha: float) -> str:
    """A remark if more ID test samples are flagged than data like the calibration samples would give; else nothing."""
    alarms = allowed_alarms(calibrated, alpha)
    # the law of their number if all samples are exchangeable; ties only make it smaller
    if betabinom.sf(flagged - 1, tested, alarms, calibrated + 1 - alarms) >= _SURPRISING:
        return ""
    return (
        "more false alarms than promised: the validation data are unlike the test data. Was the network trained on "
        "them? Calibrate on ID data that it has not seen"
    )


def _reason(error: Exception) -> str:
    """Why there is no number, in a line; a ValueError speaks for itself."""
    kind, message = type(error).__name__, str(error).strip()
    if not message:
        return kind
    return message.splitlines()[0] if isinstance(error, ValueError) else f"{kind}: {message.splitlines()[0]}"
