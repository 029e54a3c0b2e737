"""``fit(cfg)``, the whole of ``rmd-fit``: one detector on a benchmark, calibrated, written as a guard."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor, nn

from rmd_plugin.app.compare import check_required, console_width, untrained_remark
from rmd_plugin.app.device import choose_device
from rmd_plugin.app.errors import whole_number
from rmd_plugin.app.fit_tables import train_moments
from rmd_plugin.app.parts import (
    check_backbone_takes,
    make_backbone,
    make_benchmark,
    make_detectors,
    make_extractor,
    run_names,
)
from rmd_plugin.app.preprocessing import say_preprocessing
from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.transforms import exportable
from rmd_plugin.benchmarks.base import OODBenchmark
from rmd_plugin.compare.comparison import Comparison
from rmd_plugin.compare.comparison import compare as compare_detectors
from rmd_plugin.compare.extraction import TEST, TRAIN, VAL, Extractor
from rmd_plugin.compare.rows import ACCURACY, AUROC, DETECTED, FALSE_ALARMS, Row, at_level, select
from rmd_plugin.guard.export import GuardGraph, require_onnx
from rmd_plugin.guard.folder import check_target
from rmd_plugin.guard.guard import Guard
from rmd_plugin.report.provenance import current_command
from rmd_plugin.report.table import to_terminal
from rmd_plugin.report.tables import comparison_tables, decision_tables

log = logging.getLogger(__name__)


def fit(cfg: DictConfig) -> Guard:
    """Fit and calibrate the detector of a config, the composed ``conf/fit.yaml``, and write the guard to its folder."""
    pl.seed_everything(whole_number(cfg.seed, "seed"), workers=True, verbose=False)
    logging.getLogger("pytorch_ood").setLevel(logging.WARNING)
    # all that can be wrong with the options is said before the data are read
    check_required(cfg)
    detectors = make_detectors(cfg)
    if len(detectors) != 1:
        raise ValueError(f"a guard has one detector, got {', '.join(detectors)}. For example detector=fused.")
    out = Path(cfg.out)
    check_target(out)
    onnx = _wants_onnx(cfg.onnx)
    moments = {} if cfg.engine is None else {"moments": train_moments(cfg, *detectors.values())}
    benchmark = make_benchmark(cfg, **moments)
    backbone = make_backbone(cfg, benchmark, num_classes=benchmark.num_classes if cfg.head == "own" else None)
    check_backbone_takes(cfg, backbone, benchmark)
    preprocessing = say_preprocessing(cfg, backbone, benchmark)
    _prepare_as_deployed(backbone, benchmark)
    extractor = make_extractor(cfg, benchmark, backbone, choose_device(str(cfg.device)))
    remark = untrained_remark(cfg, backbone)
    if remark:
        log.warning("%s: a guard of it is of little use.", remark[0].upper() + remark[1:])
    names = run_names(cfg)
    result = compare_detectors(
        extractor,
        detectors,
        benchmark=names[0],
        backbone=names[1],
        seed=cfg.seed,
        head=cfg.head,
        resamples=0,
        alpha=cfg.alpha,
        remark=remark,
    )
    if result.interrupted:
        raise KeyboardInterrupt
    guard = make_guard(extractor, result, next(iter(detectors)))
    if onnx:
        GuardGraph(guard)  # a detector that cannot be exported is refused before anything is written
    guard.about |= {
        "command": current_command("rmd-fit"),
        "seed": int(cfg.seed),
        "preprocessing_in_words": preprocessing,
    }
    guard.save(out, onnx=onnx)
    console = Console(width=console_width())
    for table in comparison_tables(result.rows) + decision_tables(result.rows):
        console.print(to_terminal(table, width=console.width))
    print(f"Guard: {out}")
    return guard


def _wants_onnx(wanted: object) -> bool:
    """Whether to write ``model.onnx``: as the config says, or with ``auto`` if the packages are there."""
    if wanted not in (True, False, "auto"):
        raise ValueError(f"onnx must be true, false or auto, got {wanted!r}.")
    if wanted:
        try:
            require_onnx()
        except ImportError as error:
            if wanted != "auto":
                raise
            log.warning("model.onnx is left out: %s.", error)
            return False
    return bool(wanted)


def _prepare_as_deployed(backbone: Backbone, benchmark: OODBenchmark) -> None:
    """Let the detector see raw items prepared as the guard will prepare them; refuse what a guard cannot hold."""
    if not isinstance(benchmark.test_in.raw(0), Tensor):
        backbone.test_transform = exportable(backbone.test_transform or benchmark.test_transform)


def make_guard(extractor: Extractor, result: Comparison, name: str) -> Guard:
    """The guard of one detector of a comparison.

    Raises:
        ValueError: if that detector failed, or could not be calibrated; the message says why.
    """
    detector = result.detectors.get(name)
    failed = [row.reason for row in result.rows if row.detector == name and not row.ok]
    if detector is None or detector.calibration is None:
        raise ValueError(f"{name} cannot be made a guard: {'; '.join(failed) or 'it was not calibrated'}.")
    detector.threshold()  # refuses too few calibration samples
    backbone, benchmark = cast(Backbone, extractor.backbone), extractor.benchmark
    if result.classifier is None:
        raise ValueError("a guard needs a classifier: head=auto, own, linear_probe or linear_discriminant.")
    backbone.head, backbone.head_loaded = result.classifier, True
    sample = cast(Any, extractor.dataset(TEST))[0][0]
    sizes = {split: len(extractor.features(split).labels) for split in (TRAIN, VAL, TEST)}
    if extractor.moments is not None:
        sizes[TRAIN] = extractor.moments.num_samples
    classes = benchmark.class_names or [str(label) for label in range(benchmark.num_classes)]
    return Guard(
        backbone,
        detector,
        classes,
        transform=backbone.test_transform,
        input_shape=tuple(sample.shape),
        about={
            "benchmark": result.rows[0].benchmark,
            "head": result.head,
            "data": {f"{split} samples": size for split, size in sizes.items()},
            "remarks": list(dict.fromkeys(row.reason for row in result.rows if row.detector == name and row.reason)),
            "metrics": _metrics(extractor, result.rows, result.classifier, name, detector.alpha),
        },
    )


def _metrics(
    extractor: Extractor, rows: list[Row], head: nn.Linear, name: str, alpha: float
) -> dict[str, float | None]:
    """What was measured, in words: on the validation data, and on the test and OOD data if there are any."""
    val = extractor.features(VAL)
    right = head(val.features.to(head.weight)).argmax(1).cpu() == val.labels
    found: dict[str, float | None] = {"accuracy on the validation data": float(right.float().mean())}
    own = [row for row in rows if row.detector == name and row.ok]
    for row in select(rows, metric=ACCURACY):
        found["accuracy on the test data"] = row.value if row.ok else None
    for row in select(own, metric=at_level(FALSE_ALARMS, alpha)):
        found["flagged of the test data"] = row.value
    for row in select(own, metric=AUROC):
        found[f"AUROC of the OOD set {row.ood}"] = row.value
    for row in select(own, metric=at_level(DETECTED, alpha)):
        found[f"flagged of the OOD set {row.ood}"] = row.value
    return found
