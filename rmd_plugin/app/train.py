"""``train(cfg)``, the whole of ``rmd-train``: data, network, callbacks, loggers, trainer; fit; compare; report."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytorch_lightning as pl
from hydra.utils import instantiate
from omegaconf import DictConfig

from rmd_plugin.app.classifier import Classifier
from rmd_plugin.app.compare import evaluate
from rmd_plugin.app.configs import repeatable
from rmd_plugin.app.data import BenchmarkData
from rmd_plugin.app.ddp import helps_to_train, single_job
from rmd_plugin.app.errors import whole_number
from rmd_plugin.app.fitting import check_optimizer, logged_warnings, pretrain, stoppable
from rmd_plugin.app.parts import (
    about,
    check_backbone_takes,
    make_backbone,
    make_benchmark,
    make_callbacks,
    make_detectors,
    make_extractor,
    make_loggers,
)
from rmd_plugin.app.preprocessing import say_preprocessing
from rmd_plugin.app.resume import CHECKPOINTS, nothing_left, resume_point
from rmd_plugin.app.trainer import evaluation_device, make_trainer
from rmd_plugin.app.trust import check_config
from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.fetch import find_checkpoint
from rmd_plugin.benchmarks.base import OODBenchmark
from rmd_plugin.compare.extraction import Extractor
from rmd_plugin.monitor.callback import OODMonitor
from rmd_plugin.report.provenance import current_command
from rmd_plugin.report.run_folder import RunFolder

log = logging.getLogger(__name__)


def train(cfg: DictConfig, *, command: str | None = None) -> float | None:
    """Run the job that a config, the composed ``conf/train.yaml``, describes, and write everything into its folder.

    Args:
        cfg: the job's config.
        command: what one types to repeat it; by default ``rmd-train`` with the words of this call.

    Returns:
        The best value of what the checkpoints are chosen by, the validation accuracy; None where nothing was trained.
    """
    if cfg.weights not in ("best", "last"):
        raise ValueError(f"weights must be best or last, got {cfg.weights!r}.")
    if cfg.head not in ("own", "auto", "linear_probe", None):
        raise ValueError(f"head must be own, auto, linear_probe or null, got {cfg.head!r}.")
    folder = RunFolder(cfg.paths.output_dir)
    if cfg.resume and nothing_left(cfg, folder):
        return None
    for chatty in ("pytorch_lightning.utilities.rank_zero", "pytorch_ood"):
        logging.getLogger(chatty).setLevel(logging.WARNING)  # the table at the end is what the user waits for
    pl.seed_everything(whole_number(cfg.seed, "seed"), workers=True, verbose=False)
    command = command or current_command("rmd-train")
    running = folder.running(config=repeatable(cfg, "train"), about=about(cfg), command=command)
    with logged_warnings(resumed=cfg.resume), nullcontext() if helps_to_train() else running:
        make_detectors(cfg)
        benchmark = make_benchmark(cfg)
        backbone = _new_backbone(cfg, benchmark)
        data = BenchmarkData(
            benchmark,
            train_transform=backbone.train_transform,
            test_transform=backbone.test_transform,
            batch_size=cfg.batch_size,
            num_workers=cfg.num_workers,
            seed=cfg.seed,
        )
        check_backbone_takes(cfg, backbone, benchmark)
        if cfg.train and not helps_to_train():
            folder.note(preprocessing=say_preprocessing(cfg, backbone, benchmark))
        # all that can be wrong with the options is said before hours of training
        if cfg.train:
            module = Classifier(backbone, **instantiate(cfg.optimizer))
            check_optimizer(module)
            trainer = make_trainer(cfg.trainer, callbacks=make_callbacks(cfg), logger=make_loggers(cfg) or False)
            start = resume_point(cfg, backbone, folder)
        if cfg.pretrain:
            pretrain(cfg, backbone, data, folder)

        score, interrupted = None, False
        if cfg.train:
            with stoppable(trainer), single_job():
                trainer.fit(module, datamodule=data, ckpt_path=start)
            score, interrupted = _after_fit(cfg, trainer, backbone, folder), trainer.interrupted
            if helps_to_train():  # a further process of DDP
                return None
        else:
            _load_trained(cfg, backbone)
            folder.note(preprocessing=say_preprocessing(cfg, backbone, benchmark))

        extractor = make_extractor(cfg, benchmark, backbone, evaluation_device(cfg.trainer))
        result = evaluate(cfg, extractor, folder)
        if interrupted or result.interrupted:
            raise KeyboardInterrupt
        return score


def load_run(cfg: DictConfig, *, trust_config: bool = False) -> Extractor:
    """The benchmark of a finished run, given by its config, behind the weights that its comparison was of.

    Args:
        cfg: the config, for example ``OmegaConf.load("RUN/config.yaml")``. A config is a program: its ``_target_`` are
            called.
        trust_config: call them all. By default only classes of this package, of the detectors of pytorch-ood, and of
            torch.nn, torch.optim, torchvision and Lightning (see :mod:`rmd_plugin.app.trust`).

    Raises:
        UntrustedConfigError: if the config names others; the message says which.
    """
    if not trust_config:
        check_config(cfg, "the config", "load_run(cfg, trust_config=True)")
    benchmark = make_benchmark(cfg)
    backbone = _new_backbone(cfg, benchmark)
    folder = RunFolder(cfg.paths.output_dir)
    if cfg.train:
        _load(backbone, folder.path / CHECKPOINTS / f"{cfg.weights}.ckpt")
    else:
        if cfg.pretrain:
            pretrain(cfg, backbone, None, folder)
        _load_trained(cfg, backbone)
    return make_extractor(cfg, benchmark, backbone, evaluation_device(cfg.trainer))


def _new_backbone(cfg: DictConfig, benchmark: OODBenchmark) -> Backbone:
    own_head = cfg.train or cfg.head == "own"
    return make_backbone(cfg, benchmark, num_classes=benchmark.num_classes if own_head else None)


def _after_fit(cfg: DictConfig, trainer: pl.Trainer, backbone: Backbone, folder: RunFolder) -> float | None:
    """Write the history, put the weights to be compared into the backbone, and return their score."""
    monitors = [item for item in trainer.callbacks if isinstance(item, OODMonitor)]  # type: ignore[attr-defined]
    history = [row for monitor in monitors for row in monitor.history]
    if trainer.is_global_zero and history:
        folder.write_history(history)
    kept = next((item for item in trainer.checkpoint_callbacks if getattr(item, "monitor", None)), None)
    best = str(getattr(kept, "best_model_path", ""))
    if trainer.interrupted and not best:
        raise KeyboardInterrupt
    if cfg.weights == "best" and best:
        _load(backbone, Path(best))
    elif cfg.weights == "best":
        log.warning("no callback keeps the best weights (callbacks=checkpoint): the last ones are compared")
    backbone.head_loaded = True
    score = getattr(kept, "best_model_score", None)
    return None if score is None else float(score)


def _load_trained(cfg: DictConfig, backbone: Backbone) -> None:
    """With ``train=false``: the weights that are evaluated."""
    if cfg.ckpt_path is not None:
        _load(backbone, Path(cfg.ckpt_path))
    elif cfg.head == "own" and not backbone.head_loaded:
        raise ValueError(
            "train=false evaluates trained weights: give ckpt_path=FILE or backbone.checkpoint=FILE, "
            "or for a backbone without a classifier head=linear_probe or head=null."
        )


def _load(backbone: Backbone, path: Path) -> None:
    """Take over the weights of a checkpoint; nothing in the file is executed."""
    backbone.load_checkpoint(find_checkpoint(path, option="ckpt_path"))
    if not backbone.head_loaded:
        raise CheckpointError(f"{path} holds no classifier. Train one: backbone.checkpoint={path} train=true.")


if __name__ == "__main__":
    from rmd_plugin.app import commands

    commands.train()
