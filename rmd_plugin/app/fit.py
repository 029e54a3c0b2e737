"""``fit(cfg)``, the whole of ``rmd-fit``: one detector on a benchmark, calibrated, written as a guard."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from hydra.utils import get_class
from omegaconf import DictConfig
from torch import Tensor

from rmd_plugin.app import parts
from rmd_plugin.app.compare import compare_detectors
from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.small import Identity
from rmd_plugin.backbones.transforms import ImageProcessor, ImageTransform, Tokenise
from rmd_plugin.benchmarks import Embeddings
from rmd_plugin.benchmarks.base import OODBenchmark
from rmd_plugin.benchmarks.dataset_files import find_path, vector_files
from rmd_plugin.compare.adapters import Factory, NetworkParts, NotSupported, build, detector_class
from rmd_plugin.compare.comparison import Comparison
from rmd_plugin.compare.features import TEST, TRAIN, VAL, Extractor, head_logits
from rmd_plugin.compare.metrics import compare_scores
from rmd_plugin.compare.rows import ACCURACY, AUROC, DETECTED, FALSE_ALARMS, at_level, select, unique
from rmd_plugin.detectors.conformal import Calibrated, bare, required_samples
from rmd_plugin.detectors.moments import Moments
from rmd_plugin.guard.export import require_onnx
from rmd_plugin.guard.guard import Guard, check_target
from rmd_plugin.report.run import current_command
from rmd_plugin.report.tables import comparison_tables, decision_tables, print_tables
from rmd_plugin.tables import check_on_moments, table_moments

log = logging.getLogger(__name__)


def fit(cfg: DictConfig) -> Guard:
    """Fit and calibrate the detector of a config, the composed ``conf/fit.yaml``, and write the guard to its folder."""
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    logging.getLogger("pytorch_ood").setLevel(logging.WARNING)
    # all that can be wrong with the options is said before the data are read
    detectors = parts.make_detectors(cfg)
    if len(detectors) != 1:
        raise ValueError(f"a guard has one detector, got {', '.join(detectors)}. For example detector=fused.")
    out = Path(cfg.out)
    check_target(out)
    onnx = _wants_onnx(cfg.onnx)
    moments = {} if cfg.engine is None else {"moments": train_moments(cfg, *detectors.values())}
    benchmark, by_folds = _with_enough_to_calibrate(cfg, parts.make_benchmark(cfg, **moments), moments)
    backbone = parts.make_backbone(cfg, benchmark)
    preprocessing = parts.say_preprocessing(cfg, backbone, benchmark)
    _prepare_as_deployed(backbone, benchmark)
    extractor = parts.make_extractor(cfg, benchmark, backbone, parts.choose_device(str(cfg.device)))
    if remark := parts.untrained_remark(cfg, backbone):
        log.warning("%s: a guard of it is of little use.", remark[0].upper() + remark[1:])
    result = compare_detectors(cfg, extractor, resamples=0, remark=remark)
    if result.interrupted:
        raise KeyboardInterrupt
    if by_folds:
        calibrate_by_folds(cfg, extractor, result, *detectors.items())
    guard = make_guard(extractor, result, next(iter(detectors)))
    guard.about |= {"command": current_command("rmd-fit"), "seed": cfg.seed, "preprocessing_in_words": preprocessing}
    guard.save(out, onnx=onnx)
    print_tables(comparison_tables(result.rows) + decision_tables(result.rows))
    print(f"Guard: {out}")
    return guard


def _with_enough_to_calibrate(
    cfg: DictConfig, benchmark: OODBenchmark, moments: dict[str, Any]
) -> tuple[OODBenchmark, bool]:
    """The benchmark, with a larger share held out if alpha could not be met otherwise; and whether folds must serve.

    Raises:
        ValueError: if that is not possible either, with the number of samples that are missing.
    """
    needed, count, share = required_samples(cfg.alpha), len(benchmark.val_set()), cfg.benchmark.get("val_fraction")
    trained = cfg.checkpoint is not None or cfg.get("run") is not None or cfg.backbone.get("checkpoint") is not None
    # a sample more for each class, whose shares are rounded
    wider = (share or 1) * (needed + benchmark.num_classes) / max(count, 1)
    if count < needed and share and wider <= 0.5:
        words = "benchmark.val_fraction=%.3g in place of %g: alpha=%g needs %d held-out samples, there were %d."
        log.warning(words, wider, share, cfg.alpha, needed, count)
        benchmark, before = parts.make_benchmark(cfg, val_fraction=wider, **moments), count
        count = len(benchmark.val_set())
        if trained:
            log.warning(
                "A network that was trained with benchmark.val_fraction=%g has seen %d of these %d samples, so that "
                "more new ID samples than alpha may be flagged: train it with benchmark.val_fraction=%.3g.",
                *(share, count - before, count, wider),
            )
    if count >= needed:
        return benchmark, False
    total = count + len(benchmark.fit_set())
    if trained or moments or total < needed:
        why = "The network was trained on the data, so that folds of them cannot stand in. " if trained else ""
        missing = needed - (count if trained or moments else total)
        raise ValueError(
            f"alpha={cfg.alpha:g} needs {needed} held-out samples to calibrate on, there are {count}: {missing} are "
            f"missing. {why}Add data, or take a larger alpha."
        )
    log.warning(
        "Calibrated by folds of the %d training samples (CV+), because alpha=%g needs %d held-out ones and there are "
        "%d: at most %g of ID samples are flagged on average, if the encoder was not trained on these samples.",
        *(total, cfg.alpha, needed, count, 2 * cfg.alpha),
    )
    return benchmark, True


def calibrate_by_folds(cfg: DictConfig, extractor: Extractor, result: Comparison, named: tuple[str, Factory]) -> None:
    """Put the detector, fitted and calibrated on all training samples by folds (CV+), and its numbers into a result.

    It is built without the classifier, which has seen the labels of every fold.

    Raises:
        ValueError: if the detector cannot be calibrated this way, with the reason.
    """
    name, factory = named
    samples = [extractor.features(split) for split in (TRAIN, VAL)]
    z, y = torch.cat([part.features for part in samples]), torch.cat([part.labels for part in samples])
    network = NetworkParts(feature_dim=z.shape[1], num_classes=extractor.benchmark.num_classes, seed=cfg.seed)
    try:
        detector = Calibrated(build(factory, network).detector, cfg.alpha).fit_calibrate_features(z, y, seed=cfg.seed)
    except (NotSupported, TypeError) as error:
        raise ValueError(f"there are too few held-out samples, and {name} cannot do without: {error}") from error
    result.detectors[name] = detector
    result.records = [row for row in result.records if row["detector"] != name]
    scorer: Any = bare(detector)
    test = extractor.features(TEST).features
    false_alarms = float(detector.is_ood_features(test).float().mean())
    reason = "calibrated by folds of the training samples, without the classifier"
    result.records.append(result.row(name, at_level(FALSE_ALARMS, cfg.alpha), false_alarms, reason=reason))
    for ood in extractor.distance:
        features = extractor.features(ood).features
        metrics = compare_scores(scorer.predict_features(test), scorer.predict_features(features))
        metrics[at_level(DETECTED, cfg.alpha)] = detector.is_ood_features(features).float().mean()
        result.records += [result.row(name, metric, float(value), ood=ood) for metric, value in metrics.items()]


def train_moments(cfg: DictConfig, factory: Factory) -> Moments:
    """Moments of the training table of ``benchmark=embeddings``, read by the workers of ``engine``, see docs/scale.md.

    Raises:
        ValueError: with the option that does not go with ``engine``, before any row is read; or if a file is bad.
    """
    node = cfg.benchmark
    for group, kind in (("benchmark", Embeddings), ("backbone", Identity)):
        if not issubclass(get_class(cfg[group]._target_), kind):
            names = "benchmark=embeddings with backbone=identity"
            raise ValueError(f"engine= reads tables of features, {names}, not {group}={cfg.names[group]}.")
    check_on_moments(detector_class(factory) or type(factory))
    detector = build(factory, NetworkParts(seed=cfg.seed)).detector
    in_memory = {
        "detector.NAME.normalize=true": getattr(detector, "normalize", False),
        "head=linear_probe": cfg.head == "linear_probe",
        "limit_train=": node.limit_train is not None,
        "benchmark.features=null or benchmark.labels=null": node.features is None or node.labels is None,
    }
    if wrong := [option for option, is_set in in_memory.items() if is_set]:
        raise ValueError(f"{wrong[0]} needs the training rows in memory, of which engine= keeps the moments alone.")
    path = find_path(node.path, node.data_dir, "file or folder of embeddings")
    tables = vector_files(path, node.labels, node.split)
    if missing := {TRAIN, VAL, TEST} - tables.keys():
        raise ValueError(f"{path}: engine= needs a table for each split; there is none for {', '.join(missing)}.")
    moments = table_moments(detector, tables[TRAIN], node.features, node.labels, cfg.engine, cfg.num_workers or None)
    if empty := (moments.counts == 0).nonzero().flatten().tolist():
        raise ValueError(f"{tables[TRAIN]} has no row of class {empty[0]}; with engine= the labels are 0 to K - 1.")
    return moments


def _wants_onnx(wanted: object) -> bool:
    """Whether to write ``model.onnx``: as the config says, or with ``auto`` if the packages are there."""
    if wanted not in (True, False, "auto"):
        raise ValueError(f"onnx must be true, false or auto, got {wanted!r}.")
    try:
        if wanted:
            require_onnx()
        return bool(wanted)
    except ImportError as error:
        if wanted != "auto":
            raise
        log.warning("model.onnx is left out: %s.", error)
        return False


def _prepare_as_deployed(backbone: Backbone, benchmark: OODBenchmark) -> None:
    """Let the detector see raw items prepared as the guard will prepare them; refuse what a guard cannot hold."""
    if not isinstance(benchmark.test_in.raw(0), Tensor):
        transform = backbone.test_transform or benchmark.test_transform
        if not isinstance(transform, (ImageTransform, ImageProcessor, Tokenise)):
            raise ValueError(
                f"a guard cannot hold the preprocessing {' '.join(repr(transform).split())}. Give one that it can: "
                "+backbone.transform._target_=rmd_plugin.backbones.ImageTransform and its options."
            )
        backbone.test_transform = transform


def make_guard(extractor: Extractor, result: Comparison, name: str) -> Guard:
    """The guard of one detector of a comparison.

    Raises:
        ValueError: if that detector failed, or could not be calibrated; the message says why.
    """
    detector, rows = result.detectors.get(name), select(result.rows, detector=name)
    if detector is None or detector.calibration is None:
        reasons = rows.loc[rows["status"] != "ok", "reason"]
        raise ValueError(f"{name} cannot be made a guard: {'; '.join(reasons) or 'it was not calibrated'}.")
    if result.classifier is None:
        raise ValueError("a guard needs a classifier: head=auto, own, linear_probe or linear_discriminant.")
    backbone, benchmark = cast(Backbone, extractor.backbone), extractor.benchmark
    backbone.head, backbone.head_loaded = result.classifier, True
    sample = cast(Any, extractor.dataset(TEST))[0][0]
    sizes = {split: len(extractor.features(split).labels) for split in (TRAIN, VAL, TEST)}
    if extractor.moments is not None:
        sizes[TRAIN] = extractor.moments.num_samples
    val = extractor.features(VAL)
    right = head_logits(result.classifier, val.features).argmax(1) == val.labels
    measured = {
        "accuracy on the test data": select(result.rows, metric=ACCURACY),
        "flagged of the test data": select(rows, metric=at_level(FALSE_ALARMS, detector.alpha)),
        "AUROC of the OOD set ": select(rows, metric=AUROC, status="ok"),
        "flagged of the OOD set ": select(rows, metric=at_level(DETECTED, detector.alpha)),
    }
    metrics: dict[str, float | None] = {"accuracy on the validation data": float(right.float().mean())}
    for words, part in measured.items():
        metrics |= {f"{words}{row.ood}": row.value if row.status == "ok" else None for row in part.itertuples()}
    about = {
        "benchmark": rows["benchmark"].iloc[0],
        "head": result.head,
        "data": {f"{split} samples": size for split, size in sizes.items()},
        "remarks": unique(rows, "reason"),
        "metrics": metrics,
    }
    classes = benchmark.class_names or [str(label) for label in range(benchmark.num_classes)]
    shape = tuple(sample.shape)
    return Guard(backbone, detector, classes, transform=backbone.test_transform, input_shape=shape, about=about)
