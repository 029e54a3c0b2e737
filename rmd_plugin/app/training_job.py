"""One job of ``rmd-train``: assemble, pre-train, train, compare, report. Composed by :mod:`rmd_plugin.app.train`."""

from __future__ import annotations

import logging
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_only

from rmd_plugin.app.assembly import (
    check_backbone_takes,
    instantiate_plainly,
    make_backbone,
    make_benchmark,
    make_detectors,
    one_clear_error,
    run_names,
)
from rmd_plugin.app.compare_job import print_tables, write_outputs
from rmd_plugin.app.options import whole_number
from rmd_plugin.app.relaunch import single_job
from rmd_plugin.app.trainer_options import evaluation_device, make_trainer
from rmd_plugin.app.training import BenchmarkData, Classifier
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.fetch import find_checkpoint
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.comparison import compare
from rmd_plugin.compare.extraction import TEST, TRAIN, Extractor
from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.detectors.mahalanobis import RMD, Mahalanobis
from rmd_plugin.monitor.callback import OODMonitor
from rmd_plugin.monitor.roster import Spec
from rmd_plugin.report.page import write_report
from rmd_plugin.report.provenance import current_command
from rmd_plugin.report.run_folder import RunFolder

log = logging.getLogger(__name__)

#: folders below the output folder
CHECKPOINTS, PRETRAINED = "checkpoints", "pretrained"
#: of conf/train.yaml, for sweeps over a kept config: one folder per job, and a report at the end
_SWEEPS = {
    "job": {"config": {"override_dirname": {"exclude_keys": ["resume", "num_workers"]}}},
    "sweep": {"subdir": "${rmd_job_folder:${hydra.job.override_dirname}}"},
    "callbacks": {
        "output": {"_target_": "rmd_plugin.app.output_folder.OutputFolderCallback", "command": "rmd-train"},
        "report": {"_target_": "rmd_plugin.app.multirun.ReportCallback"},
    },
}


def run(config: DictConfig) -> float | None:
    """Run the job that a config describes.

    Args:
        config: the composed ``conf/train.yaml``.

    Returns:
        The best validation accuracy, None where nothing was trained.
    """
    with one_clear_error("rmd-train"), brief_warnings():
        folder = RunFolder(HydraConfig.get().runtime.output_dir)
        if config.resume and folder.done:
            log.info("finished before, not run again: %s", folder.path)
            return None
        # which devices were found, advertisements, how fits went: the table at the end is what the user waits for
        for chatty in ("pytorch_lightning.utilities.rank_zero", "pytorch_ood"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        pl.seed_everything(whole_number(config.seed, "seed"), workers=True, verbose=False)
        if getattr(rank_zero_only, "rank", 0):  # a further process of DDP: it only helps to train
            Job(config, folder).train()
            return None
        benchmark, backbone = run_names(config)
        about: dict[str, str | int] = {"benchmark": benchmark, "backbone": backbone, "seed": int(config.seed)}
        with folder.running(config=repeatable(config), about=about, command=current_command("rmd-train")):
            job = Job(config, folder)
            accuracy = job.train()
            job.compare(benchmark, backbone)
            return accuracy


def repeatable(config: DictConfig) -> str:
    """The config as text from which the run can be repeated: ``rmd-train --config-dir OUT --config-name config``.

    References to the output folder stay references, so that the repetition writes to a folder of its own.
    """
    plain = OmegaConf.create(OmegaConf.to_container(config, resolve=False))
    plain.names = OmegaConf.to_container(config.names, resolve=True)  # known to Hydra only while it composes
    plain.hydra = _SWEEPS
    return OmegaConf.to_yaml(plain)


class Job:
    """Benchmark, backbone and detectors of a config, put together.

    Args:
        config: the composed config.
        folder: where everything is written.
    """

    def __init__(self, config: DictConfig, folder: RunFolder) -> None:
        self.config, self.folder, self.interrupted = config, folder, False
        self.detectors = make_detectors(config)
        self.benchmark = make_benchmark(config)
        self.backbone = make_backbone(config, self.benchmark, num_classes=self.benchmark.num_classes)
        self.module = Classifier(self.backbone, **instantiate(config.optimizer))
        self.data = BenchmarkData(
            self.benchmark,
            train_transform=self.backbone.train_transform,
            test_transform=self.backbone.test_transform,
            batch_size=config.batch_size,
            num_workers=config.num_workers,
            seed=config.seed,
        )
        check_backbone_takes(config, self.backbone, self.data.fit_dataloader().dataset[0][0])

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self) -> float | None:
        """Train in one or two stages and leave the weights with the best validation accuracy in the module.

        Returns:
            That accuracy; None with ``train=false``.
        """
        config = self.config
        if not config.train:
            if config.ckpt_path is not None:
                self._load(Path(config.ckpt_path))
            elif not self.backbone.head_loaded:
                raise ValueError(
                    "train=false evaluates trained weights: give ckpt_path=FILE or backbone.checkpoint=FILE."
                )
            return None
        if config.pretrain:
            self._pretrain()
        self._check_optimizer()
        watched = self._monitored()
        monitor = OODMonitor(watched, head="backbone.head", seed=config.seed) if watched else None
        keep = self._checkpointing(CHECKPOINTS, "val/acc", "max")
        trainer = self._trainer([keep] if monitor is None else [monitor, keep])
        start = self._resumable(self._last(CHECKPOINTS) or config.ckpt_path)
        with stoppable(trainer), single_job():
            trainer.fit(self.module, datamodule=self.data, ckpt_path=start)
        if trainer.is_global_zero and monitor is not None:
            self.folder.write_history(monitor.history)
        self.interrupted = trainer.interrupted
        if self.interrupted and not keep.best_model_path:
            raise KeyboardInterrupt
        if keep.best_model_path:
            self._load(Path(keep.best_model_path))
        return None if keep.best_model_score is None else float(keep.best_model_score)

    def _pretrain(self) -> None:
        """First stage: train the encoder without labels. A finished stage is loaded instead when the job resumes."""
        config, done = self.config, self.folder.path / PRETRAINED / "done.ckpt"
        stage = instantiate(config.pretrain.stage)(self.backbone)
        if config.resume and done.is_file():
            log.info("pre-training was finished before: %s", done)
            stage.load_state_dict(torch.load(done, map_location="cpu", weights_only=True)["state_dict"])
            return
        keep = self._checkpointing(PRETRAINED, "val/loss", "min")
        trainer = self._trainer([keep], max_epochs=config.pretrain.max_epochs, logger=False)
        with stoppable(trainer), single_job():
            trainer.fit(stage, datamodule=self.data, ckpt_path=self._last(PRETRAINED))
        if trainer.interrupted:
            raise KeyboardInterrupt
        trainer.save_checkpoint(done)

    def _check_optimizer(self) -> None:
        try:
            self.module.configure_optimizers()
        except (TypeError, ValueError) as error:
            raise ValueError(f"the optimizer cannot be made of the options of optimizer=: {error}.") from error

    def _monitored(self) -> dict[str, Spec]:
        """The detectors that are watched; none if the config names none."""
        names = list(self.config.monitor or ())
        unknown = [name for name in names if name not in self.detectors]
        if unknown:
            raise ValueError(
                f"monitor names {', '.join(unknown)}, which detector= does not choose. "
                f"Chosen are {', '.join(self.detectors)}."
            )
        return {name: self.detectors[name] for name in names}

    def _trainer(self, callbacks: list[Callback], **changes: Any) -> pl.Trainer:
        """The trainer of the config, whose arguments pass straight through to Lightning."""
        loggers = [instantiate_plainly(node) for node in self.config.logger.values()]
        usual = {"logger": loggers or False, "default_root_dir": self.folder.path}
        return make_trainer(self.config.trainer, callbacks=callbacks, **(usual | changes))

    def _checkpointing(self, name: str, metric: str, mode: str) -> ModelCheckpoint:
        """Keep the best weights by a metric of the validation data, and the last ones to go on from."""
        return ModelCheckpoint(
            dirpath=self.folder.path / name,
            filename="best",
            monitor=metric,
            mode=mode,
            save_last=True,
            enable_version_counter=False,
        )

    def _last(self, name: str) -> Path | None:
        path = self.folder.path / name / "last.ckpt"
        return path if self.config.resume and path.is_file() else None

    def _load(self, path: Path) -> None:
        """Take over the weights of a checkpoint; nothing in the file is executed."""
        self.backbone.load_checkpoint(path)
        if not self.backbone.head_loaded:
            raise CheckpointError(f"{path} holds no classifier. Train one: backbone.checkpoint={path} train=true.")

    def _resumable(self, path: str | Path | None) -> Path | None:
        """A checkpoint that Lightning can go on from, looked at before: Lightning's own errors are long."""
        if path is None:
            return None
        self._load(found := find_checkpoint(path))
        content = torch.load(found, map_location="cpu", weights_only=True)
        if "optimizer_states" not in content or "loops" not in content:
            raise CheckpointError(
                f"{found} holds weights, but not the state of a training to go on from. "
                f"To start from these weights: backbone.checkpoint={path} ckpt_path=null."
            )
        return found

    # -- what came out ------------------------------------------------------------------------------------------------

    def compare(self, benchmark: str, backbone: str) -> None:
        """Compare the detectors on the trained weights; write and show the results.

        Args:
            benchmark: name for the rows.
            backbone: name for the rows.
        """
        config = self.config
        self.backbone.head_loaded = True  # it was trained, or came with the checkpoint
        extractor = Extractor(
            self.benchmark,
            self.backbone,
            cache=None if config.cache_dir is None else FeatureCache(config.cache_dir),
            batch_size=config.batch_size,
            num_workers=config.num_workers,
            device=evaluation_device(config.trainer),
            names={"benchmark": benchmark, "backbone": backbone},
            progress=sys.stderr.isatty(),
        )
        result = compare(
            extractor,
            self.detectors,
            benchmark=benchmark,
            backbone=backbone,
            seed=config.seed,
            head="own",
            resamples=config.resamples,
            after_each=lambda so_far: self.folder.write_rows(so_far.rows),
        )
        write_outputs(result, self.folder, figures=bool(config.figures))
        self.folder.write_directions(contributions(extractor))
        page = write_report(self.folder)
        print_tables(result)
        print(f"Report: {page}")
        if result.interrupted or self.interrupted:
            raise KeyboardInterrupt


@contextmanager
def brief_warnings() -> Iterator[None]:
    """Log what our detectors warn of, each kind once: they are refitted every epoch, and where says nothing."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, NumericalWarning):
            before(message, category, *place, **more)
        elif (kind := re.sub(r"[\d.e+-]+", "", str(message))) not in seen:
            seen.add(kind)
            log.warning("%s", message)

    with warnings.catch_warnings():
        # Lightning's own call of torch
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        before, warnings.showwarning = warnings.showwarning, show
        yield


@contextmanager
def stoppable(trainer: pl.Trainer) -> Iterator[None]:
    """Let a job go on after Ctrl-C in its training: Lightning would end the process and ignore further Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        if not trainer.interrupted:
            raise
        log.warning("the training was stopped: what follows is about the best weights so far")
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def contributions(extractor: Extractor) -> dict[str, dict[str, np.ndarray]]:
    """What every direction adds to the scores of MD and RMD: the picture of why they differ.

    Args:
        extractor: the benchmark behind the backbone.

    Returns:
        Detector -> ``test`` or OOD set -> terms of shape (N, r).
    """
    fit = extractor.features(TRAIN)
    found = {}
    for name, detector in (("mahalanobis", Mahalanobis()), ("rmd", RMD())):
        detector.fit_features(fit.features, fit.labels)
        splits = (TEST, *extractor.distance)
        found[name] = {split: detector.contributions(extractor.features(split).features).numpy() for split in splits}
    return found
