"""Cells of the paper's tables: each is the config of ``rmd-train`` with a few overrides, run once and kept.

A cell's folder holds its weights, history and rows. A finished cell is not run again; an unfinished one goes on from
its last checkpoint. Studies share cells, and features lie in a cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from rmd_plugin.app.assembly import make_detectors
from rmd_plugin.app.trainer_options import evaluation_device
from rmd_plugin.app.training_job import CHECKPOINTS, Job
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.comparison import compare
from rmd_plugin.compare.extraction import TEST, TRAIN, Extractor
from rmd_plugin.compare.rows import ACCURACY, Distance, Row
from rmd_plugin.encoding.isolation import evaluating
from rmd_plugin.paper.experiments import reproduce_command
from rmd_plugin.paper.result import FeatureSet
from rmd_plugin.paper.robustness import TrainingCurves
from rmd_plugin.report.run_folder import RunFolder

log = logging.getLogger(__name__)

_ACCURACIES = "accuracies.json"
#: samples of the training data whose accuracy is taken at every check
_TRAIN_SAMPLES = 1000


@dataclass(frozen=True)
class Cell:
    """One setting: what ``rmd-train`` is to do, and which line of which table it stands beside.

    Attributes:
        name: for its folder.
        overrides: as typed after ``rmd-train``.
        benchmark: the benchmark as the paper calls it; empty if it is none of the paper's.
        backbone: the network of the paper that it stands beside.
        reason: why it is not the paper's own setting; empty if it is.
        seed: seed of data and training.
        study: the study whose config describes it; empty if none does.
        scale: the scale of that study.
        extra: those of the overrides that were given on top of the study's.
    """

    name: str
    overrides: tuple[str, ...]
    benchmark: str = ""
    backbone: str = ""
    reason: str = ""
    seed: int = 0
    study: str = ""
    scale: str = ""
    extra: tuple[str, ...] = ()

    @classmethod
    def from_config(
        cls, node: Mapping[str, Any], *, study: str, scale: str, seed: int = 0, extra: Sequence[str] = ()
    ) -> Cell:
        """The cell of a config node with ``name``, ``overrides`` and, if it belongs to a line, ``line``.

        Args:
            node: the node.
            study: the study that it belongs to.
            scale: the scale of that study.
            seed: seed of data and training.
            extra: further overrides, which win.
        """
        benchmark, backbone = node.get("line") or ("", "")
        more = tuple(map(str, extra))
        overrides = (*map(str, node["overrides"]), *more)
        reason = str(node.get("reason") or "")
        return cls(str(node["name"]), overrides, benchmark, backbone, reason, seed, study, scale, more)

    @property
    def command(self) -> str:
        """The command that runs this cell alone; empty if it belongs to no study."""
        if not self.study:
            return ""
        return reproduce_command(self.study, self.scale, seed=self.seed, cells=[self.name], extra=self.extra)

    def choice(self, group: str) -> str:
        """The config chosen from a group."""
        found = [
            o.value() for o in OverridesParser.create().parse_overrides(list(self.overrides)) if o.key_or_group == group
        ]
        if not found:
            raise ValueError(f"cell {self.name}: its overrides do not choose a {group}: {list(self.overrides)}.")
        return str(found[-1])

    @property
    def key(self) -> str:
        """Name of its folder: changes whenever the overrides or the seed do."""
        content = json.dumps([list(self.overrides), self.seed]).encode()
        return f"{self.name}-{hashlib.sha256(content).hexdigest()[:10]}"


class CellConfigError(ValueError):
    """The overrides of a cell do not compose: a mistake in what was typed, not of data or machine."""


class AccuracyRecorder(Callback):
    """Notes the accuracy on training and held-out samples whenever the held-out ones are evaluated.

    Attributes:
        points: step, training accuracy, held-out accuracy.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.points: list[tuple[int, float, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add a point."""
        held_out = trainer.callback_metrics.get("val/acc")
        if trainer.sanity_checking or held_out is None or not trainer.is_global_zero:
            return
        self.points.append((trainer.global_step, self._train_accuracy(pl_module), float(held_out)))

    def _train_accuracy(self, pl_module: pl.LightningModule) -> float:
        right = seen = 0
        split = self.data.fit_dataloader()
        with evaluating(pl_module), torch.no_grad():
            # every class is in it: the training data may be sorted by class
            places = torch.linspace(0, len(split.dataset) - 1, min(_TRAIN_SAMPLES, len(split.dataset))).long()
            for part in places.split(split.batch_size):
                items = [split.dataset[int(place)] for place in part]
                x = torch.stack([item[0] for item in items]).to(pl_module.device)
                y = torch.tensor([item[1] for item in items], device=pl_module.device)
                right += int((cast(Tensor, pl_module(x)).argmax(1) == y).sum())
                seen += len(y)
        return right / max(seen, 1)

    def state_dict(self) -> dict[str, Any]:
        """The points, so that a training that goes on keeps them."""
        return {"points": [list(point) for point in self.points]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the points of a checkpoint."""
        self.points = [(int(step), float(train), float(val)) for step, train, val in state_dict["points"]]


class CellJob(Job):
    """The job of ``rmd-train`` up to the weights: those at the end, as in the paper, not the best on held-out data."""

    def __init__(self, config: DictConfig, folder: RunFolder) -> None:
        super().__init__(config, folder)
        self.recorder = AccuracyRecorder(self.data)

    def prepare(self) -> None:
        """Train, pre-train or load, as the config says."""
        if self.config.train:
            self.train()
            if self.interrupted:  # unfinished: the next call goes on from the last checkpoint
                raise KeyboardInterrupt
            self._load(self.folder.path / CHECKPOINTS / "last.ckpt")
            self.folder.path.joinpath(_ACCURACIES).write_text(json.dumps(self.recorder.points), encoding="utf-8")
        elif self.config.pretrain:
            self._pretrain()
        elif self.config.ckpt_path is not None:
            self._load(Path(self.config.ckpt_path))

    def reload(self) -> None:
        """Take over the weights that :meth:`prepare` left behind."""
        if self.config.train:
            self._load(self.folder.path / CHECKPOINTS / "last.ckpt")
        elif self.config.pretrain:
            self._pretrain()  # with resume it loads the finished stage
        elif self.config.ckpt_path is not None:
            self._load(Path(self.config.ckpt_path))

    def _load(self, path: Path) -> None:
        try:
            super()._load(path)
        except FileNotFoundError:
            raise
        except Exception as error:  # torch's readers raise nearly every kind on garbage
            raise self._damaged(path) from error

    def _last(self, name: str) -> Path | None:
        path = super()._last(name)
        # the end of the archive is what a killed process or a full disk leaves out
        if path is not None and not zipfile.is_zipfile(path):
            raise self._damaged(path)
        return path

    def _damaged(self, path: Path) -> CheckpointError:
        own = self.folder.path.resolve() in path.resolve().parents
        remedy = f"Delete {self.folder.path} to run the cell again" if own else "Fetch or train it again"
        return CheckpointError(f"{path} is damaged, or belongs to another network. {remedy}.")

    def _trainer(self, callbacks: list[Callback], **changes: Any) -> pl.Trainer:
        pretraining = "max_epochs" in changes
        return super()._trainer(callbacks if pretraining else [*callbacks, self.recorder], **changes)


@dataclass
class CellResult:
    """What a cell gives to the studies.

    Attributes:
        cell: the cell.
        features: features with the first near-OOD set.
        rows: MD, RMD and, where there is a trained head, MSP on every OOD set, and the accuracy.
        curves: what was seen while it trained, None if it was not trained.
        setting: what was run, in a few words.
    """

    cell: Cell
    features: FeatureSet
    rows: list[Row]
    curves: TrainingCurves | None
    setting: str


@dataclass
class CellRunner:
    """Runs cells, each at most once.

    Args:
        root: folder of the cells.
        data_dir: folder of the data sets; None reads ``RMD_DATA_DIR``.
        cache_dir: folder of the features, shared with ``rmd-compare``; None keeps them beside the cells.
        resamples: of the bootstrap intervals.
    """

    root: Path
    data_dir: str | None = None
    cache_dir: str | None = None
    resamples: int = 200
    _done: dict[str, CellResult] = field(default_factory=dict)

    def run(self, cell: Cell) -> CellResult:
        """Run a cell, or take what it has left behind.

        Raises:
            OSError, ValueError, ImportError: if data, weights or libraries are missing; the message says which.
            CellConfigError: if its overrides do not fit the config.
        """
        if cell.key not in self._done:
            self._done[cell.key] = self._run(cell)
        return self._done[cell.key]

    def finished(self, cell: Cell) -> bool:
        """Whether a cell was run before, to its end."""
        return RunFolder(self.root / "cells" / cell.key).done

    def compose(self, cell: Cell) -> DictConfig:
        """The config of a cell; Hydra must be initialised, as it is inside a command.

        Raises:
            CellConfigError: if its overrides do not fit the config.
        """
        folder = self.root / "cells" / cell.key
        names = [f"names.benchmark={cell.choice('benchmark')}", f"names.backbone={cell.choice('backbone')}"]
        quiet = [] if sys.stderr.isatty() else ["+trainer.enable_progress_bar=false"]
        ours = [
            f"seed={cell.seed}",
            "logger=none",
            "resume=true",
            f"paths.output_dir='{folder}'",
            "+trainer.enable_model_summary=false",
            *([f"paths.data_dir='{self.data_dir}'"] if self.data_dir else []),
        ]
        try:
            return compose("train", overrides=[*ours, *names, *quiet, *cell.overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise CellConfigError(f"cell {cell.name}: {' '.join(str(error).split())}") from error

    def _run(self, cell: Cell) -> CellResult:
        folder = RunFolder(self.root / "cells" / cell.key)
        config = self.compose(cell)
        pl.seed_everything(config.seed, workers=True, verbose=False)
        benchmark, backbone = str(config.names.benchmark), str(config.names.backbone)
        job = CellJob(config, folder)
        finished = folder.done
        log.info("cell %s: %s", cell.name, "found" if finished else "running")
        if finished:
            job.reload()
        else:
            about: dict[str, str | int] = {"benchmark": benchmark, "backbone": backbone, "seed": cell.seed}
            with folder.running(config=OmegaConf.to_yaml(config), about=about, command=cell.command):
                job.prepare()
                folder.write_rows(self._rate(job, benchmark, backbone))
        extractor = self._extractor(job)
        train, test = extractor.features(TRAIN), extractor.features(TEST)
        ood, distance = next(((name, d) for name, d in extractor.distance.items() if d == "near"))
        features = FeatureSet(
            benchmark,
            ood,
            backbone,
            train.features,
            train.labels,
            test.features,
            test.labels,
            extractor.features(ood).features,
            cast(Distance, distance),
            cell.seed,
        )
        rows = folder.read_rows()
        return CellResult(cell, features, rows, self._curves(job, features), describe(config, features, rows))

    def _rate(self, job: CellJob, benchmark: str, backbone: str) -> list[Row]:
        detectors = make_detectors(job.config)
        trained = bool(job.config.train) or job.config.ckpt_path is not None or job.backbone.head_loaded
        chosen = {name: detectors[name] for name in ("mahalanobis", "rmd", *(["msp"] if trained else []))}
        if trained:
            job.backbone.head_loaded = True
        result = compare(
            self._extractor(job),
            chosen,
            benchmark=benchmark,
            backbone=backbone,
            seed=job.config.seed,
            head="own" if trained else None,
            resamples=self.resamples,
        )
        if result.interrupted:
            raise KeyboardInterrupt
        return result.rows

    def _extractor(self, job: CellJob) -> Extractor:
        return Extractor(
            job.benchmark,
            job.backbone,
            cache=FeatureCache(self.root / "features" if self.cache_dir is None else self.cache_dir),
            batch_size=job.config.batch_size,
            num_workers=job.config.num_workers,
            device=evaluation_device(job.config.trainer),
            progress=sys.stderr.isatty(),
        )

    @staticmethod
    def _curves(job: CellJob, features: FeatureSet) -> TrainingCurves | None:
        history = job.folder.read_history()
        if not history:
            return None
        file = job.folder.file(_ACCURACIES)
        points = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        about = (features.benchmark, features.ood, features.backbone)
        accuracies = [(int(step), float(train), float(val)) for step, train, val in points]
        return TrainingCurves(*about, history, accuracies, features.distance, features.seed)


def describe(config: DictConfig, features: FeatureSet, rows: Sequence[Row]) -> str:
    """What was run, in a few words: backbone, data, training, accuracy.

    Args:
        config: the cell's config.
        features: its features.
        rows: its rows.
    """
    name = str(config.names.backbone)
    if config.backbone.get("name"):
        name = f"{name} ({config.backbone.name})"
    parts = [f"{name}, D={features.train.shape[1]}", f"{len(features.train):,} training samples"]
    if config.pretrain:
        parts.append(f"{config.pretrain.max_epochs} epochs of masked tokens")
    if config.train:
        steps, epochs = config.trainer.get("max_steps") or -1, config.trainer.max_epochs
        parts.append(f"{steps:,} steps" if steps > 0 else "1 epoch" if epochs == 1 else f"{epochs} epochs")
    elif config.backbone.get("checkpoint"):
        parts.append("published weights")
    accuracy = [row.value for row in rows if row.metric == ACCURACY and row.ok]
    if accuracy:
        parts.append(f"accuracy {100 * accuracy[0]:.1f} %")
    return ", ".join(parts)
