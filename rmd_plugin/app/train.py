"""``train(cfg)``, the whole of ``rmd-train``: data, network, callbacks, loggers, trainer; fit; compare; report."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning_utilities.core import rank_zero
from omegaconf import DictConfig, read_write
from pytorch_lightning.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from rmd_plugin.app import parts
from rmd_plugin.app.compare import evaluate, run_folder
from rmd_plugin.backbones.base import PREPROCESSING, Backbone
from rmd_plugin.backbones.transforms import ImageTransform
from rmd_plugin.benchmarks import OODBenchmark, Split
from rmd_plugin.compare.features import Extractor
from rmd_plugin.compare.rows import select
from rmd_plugin.detectors.moments import NumericalWarning
from rmd_plugin.monitor.callback import OODMonitor
from rmd_plugin.report.run import RunFolder, job_arguments

log = logging.getLogger(__name__)

#: folders below the output folder, and the file of each from which a job resumes
CHECKPOINTS, PRETRAINED, LAST = "checkpoints", "pretrained", "last.ckpt"
#: under which the folder keeps the number that the job returned, and a checkpoint the random states
OBJECTIVE, RANDOM_STATES = "objective", "random_states"

Transform = Callable[[Any], Tensor]


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Leave out warnings that are no news: the table has those of the detectors, as remarks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        warnings.filterwarnings("ignore", message="OODMonitor: no OOD samples")
        # Lightning's call of torch, its advice about our logging, and what a job that goes on from checkpoints knows
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\('train/")
        warnings.filterwarnings("ignore", message=r"(Experiment logs|Checkpoint) directory .* is not empty")
        warnings.filterwarnings("ignore", message=r"The number of training batches .* logging interval")
        yield


@quiet_warnings()
def train(cfg: DictConfig, *, command: str | None = None) -> float | None:
    """Run the job that a config, the composed ``conf/train.yaml``, describes, and write everything into its folder.

    Args:
        cfg: the job's config.
        command: what one types to repeat it; by default ``rmd-train`` with the words of this call.

    Returns:
        The number of ``objective=`` for sweepers that search, also of a job that was finished before; None if there is
        none, as for ``val/acc`` where nothing was trained.
    """
    check_options(cfg)
    folder = RunFolder(cfg.paths.output_dir)
    if cfg.resume and folder.done:
        log.info("finished before, not run again: %s", folder.path)
        number = folder.read_versions().get(OBJECTIVE)
        return None if number is None else float(number)
    if rank() > 0:
        _fit(cfg, folder)
        return None
    with run_folder(cfg, "train", command) as folder:
        benchmark, backbone, trainer = _fit(cfg, folder)
        logged = {} if trainer is None else _take_weights(cfg, trainer, backbone, folder)
        device = evaluation_device(cfg) if trainer is None else trainer.strategy.root_device
        result = evaluate(cfg, parts.make_extractor(cfg, benchmark, backbone, device), folder)
        if result.interrupted or (trainer is not None and trainer.interrupted):
            raise KeyboardInterrupt
        number = objective(cfg, logged, result.rows)
        if number is not None:
            folder.note(**{OBJECTIVE: repr(number)})
        return number


def load_run(cfg: DictConfig) -> Extractor:
    """The benchmark of a finished run, given by its config, behind the weights that its comparison was of.

    Args:
        cfg: the config, for example ``OmegaConf.load("RUN/config.yaml")``. A config is a program: its ``_target_`` are
            called.
    """
    benchmark = parts.make_benchmark(cfg)
    backbone = parts.make_backbone(cfg, benchmark)
    folder = Path(cfg.paths.output_dir)
    if cfg.train:
        backbone.load_checkpoint(folder / CHECKPOINTS / f"{cfg.weights}.ckpt")
    elif cfg.pretrain:
        checkpoint = torch.load(folder / PRETRAINED / LAST, map_location="cpu", weights_only=True)
        instantiate(cfg.pretrain.stage)(backbone).load_state_dict(checkpoint["state_dict"])
    return parts.make_extractor(cfg, benchmark, backbone, evaluation_device(cfg))


def check_options(cfg: DictConfig) -> None:
    """Refuse choices that there are not, and an objective on OOD data that no detector of the config gives.

    Raises:
        ValueError: with the choices that there are.
    """
    for name, choices in (("weights", ("best", "last")), ("head", ("own", "auto", "linear_probe", None))):
        if cfg[name] not in choices:
            raise ValueError(f"{name} must be {', '.join(map(str, choices))}, got {cfg[name]!r}.")
    parts.make_detectors(cfg)
    words = str(cfg.objective).split("/")
    if words[0] == "ood":
        if len(words) != 4 or words[1] not in cfg.detector:
            raise ValueError(
                f"objective={cfg.objective} must be ood/DETECTOR/SET/METRIC with one of the detectors "
                f"{', '.join(cfg.detector)}, for example ood/{next(iter(cfg.detector))}/mean/AUROC."
            )
        log.warning("objective=%s tunes on OOD data: detectors will look better than on new data", cfg.objective)


def objective(cfg: DictConfig, logged: Mapping[str, float], rows: pd.DataFrame) -> float | None:
    """The number that ``objective=`` names: of the compared weights, or what the training logged last.

    Raises:
        ValueError: if the training logs no such number, with those that it logs.
    """
    name = str(cfg.objective)
    if name.startswith("ood/"):
        _, detector, ood, metric = name.split("/")
        rated = select(rows, detector=detector, metric=metric, **({} if ood == "mean" else {"ood": ood}))
        return float(rated["value"].mean(skipna=False)) if len(rated) else None
    if cfg.train and name not in logged:
        raise ValueError(f"objective={name} was not logged. The training logs {', '.join(sorted(logged))}.")
    return logged.get(name)


# -- the training -----------------------------------------------------------------------------------------------------


def _fit(cfg: DictConfig, folder: RunFolder) -> tuple[OODBenchmark, Backbone, pl.Trainer | None]:
    """Make all parts and train; of a job that is resumed from its last epoch on."""
    rank_zero.log.setLevel(logging.WARNING)  # Lightning's, or the one of `lightning` if something has imported that
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    benchmark = parts.make_benchmark(cfg)
    backbone = parts.make_backbone(cfg, benchmark)
    if rank() == 0:
        folder.note(preprocessing=parts.say_preprocessing(cfg, backbone, benchmark))
    loading = {"seed": cfg.seed, "batch_size": cfg.batch_size, "num_workers": cfg.num_workers}
    trainer = None
    if cfg.train:  # before the first stage: what is wrong with the options is said before hours of training
        module = Classifier(backbone, **instantiate(cfg.optimizer))
        loggers = [parts.build(node) for node in (cfg.get("logger") or {}).values() if node is not None]
        trainer = make_trainer(cfg, callbacks=make_callbacks(cfg), logger=loggers or False)
    elif cfg.head == "own" and not backbone.head_loaded:
        raise ValueError(
            "train=false evaluates trained weights: give checkpoint=FILE with a classifier, or for a backbone without "
            "one head=linear_probe or head=null."
        )
    if cfg.pretrain:
        pretrained_dir, stage = folder.file(PRETRAINED), instantiate(cfg.pretrain.stage)(backbone)
        last_epoch = ModelCheckpoint(pretrained_dir, "last", save_on_train_epoch_end=True, enable_version_counter=False)
        options = {"max_epochs": cfg.pretrain.max_epochs, "callbacks": [RandomStates(), last_epoch], "logger": False}
        pretrainer = make_trainer(cfg, **options)
        # of a stage that was finished before, this loads the weights
        _train_stage(cfg, pretrainer, stage, BenchmarkData(benchmark, backbone, **loading), pretrained_dir)
        if pretrainer.interrupted:
            raise KeyboardInterrupt
    if trainer is not None:
        data = BenchmarkData(benchmark, backbone, **loading)
        _train_stage(cfg, trainer, module, data, folder.file(CHECKPOINTS))
    return benchmark, backbone, trainer


def _train_stage(
    cfg: DictConfig, trainer: pl.Trainer, module: pl.LightningModule, data: BenchmarkData, folder: Path
) -> None:
    """Train, with ``resume=true`` from the last epoch whose checkpoint is in the folder on.

    Ctrl-C ends the training and the job continues: Lightning would end the process and ignore further Ctrl-C.
    """
    last = folder / LAST if cfg.resume and (folder / LAST).is_file() else None
    if last is not None and rank() == 0:
        _continue_logs(trainer.loggers, torch.load(last, map_location="cpu", weights_only=True)["global_step"])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with single_job():
            trainer.fit(module, datamodule=data, ckpt_path=last)
    except SystemExit:
        if not trainer.interrupted:
            raise
        signal.signal(signal.SIGINT, handler)
        log.warning("the training was stopped: what follows is about the best weights so far")


def _continue_logs(loggers: list[Any], step: int) -> None:
    """Give CSV loggers, which begin with an empty file, the lines of the steps that are not trained again."""
    for logger in loggers:
        if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
            lines = pd.read_csv(path, dtype=str).to_dict("records")
            earlier = [line for line in lines if int(line["step"]) < step]
            logger.experiment.metrics = [{key: v for key, v in line.items() if isinstance(v, str)} for line in earlier]


def _take_weights(cfg: DictConfig, trainer: pl.Trainer, backbone: Backbone, folder: RunFolder) -> dict[str, float]:
    """Write the history, put the weights to be compared into the backbone, and return what was logged of them."""
    monitors = [item for item in trainer.callbacks if isinstance(item, OODMonitor)]  # type: ignore[attr-defined]
    if history := [row for monitor in monitors for row in monitor.history]:
        folder.write_history(history)
    best = next((item for item in trainer.checkpoint_callbacks if getattr(item, "monitor", None)), None)
    path = str(getattr(best, "best_model_path", ""))
    if trainer.interrupted and not path:
        raise KeyboardInterrupt
    if cfg.weights == "best" and path:
        backbone.load_checkpoint(path)
    elif cfg.weights == "best":
        log.warning("no callback keeps the best weights (callbacks=checkpoint): the last ones are compared")
    backbone.head_loaded = True
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    score = getattr(best, "best_model_score", None)
    return logged if score is None else logged | {str(best.monitor): float(score)}  # type: ignore[union-attr]


# -- the trainer and what is around it --------------------------------------------------------------------------------


def make_trainer(cfg: DictConfig, **options: Any) -> pl.Trainer:
    """The trainer of a config; ``sync_batchnorm: auto`` is true on GPUs."""
    if cfg.trainer.get("sync_batchnorm") == "auto":
        options["sync_batchnorm"] = evaluation_device(cfg).type != "cpu"
    # partial: Hydra would read into the objects
    trainer: pl.Trainer = parts.build(cfg.trainer, _partial_=True)(**options)
    return trainer


def make_callbacks(cfg: DictConfig) -> list[Callback]:
    """The callbacks of ``callbacks=``; what the trainer's switches turn off is left out."""
    switches = {"enable_progress_bar": ProgressBar, "enable_checkpointing": Checkpoint}
    hidden = tuple(kind for name, kind in switches.items() if cfg.trainer.get(name) is False)
    nodes = {name: node for name, node in (cfg.get("callbacks") or {}).items() if node is not None}
    if "ood_monitor" in nodes and not nodes["ood_monitor"].detectors:  # monitor=[] watches none
        del nodes["ood_monitor"]
    for name in (name for name, node in nodes.items() if "_target_" not in node):
        raise ValueError(f"callbacks.{name} must be a Lightning Callback: give it a _target_.")
    return [callback for callback in map(parts.build, nodes.values()) if not isinstance(callback, hidden)]


def evaluation_device(cfg: DictConfig) -> torch.device:
    """The device of a comparison that no training comes before."""
    return parts.choose_device("cpu" if cfg.trainer.get("accelerator") == "cpu" else "auto")


class RandomStates(Callback):
    """Keeps the random states of every process in checkpoints, and whether the training was stopped early.

    With it a training that is resumed at the end of an epoch ends as if it had never been interrupted.
    """

    _loaded: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Add the random states by process; called in every process at the same time."""
        own = _collect_rng_states()
        algorithm, keys, *position = own["numpy"]
        own["numpy"] = (algorithm, keys.tolist(), *position)  # weights_only=True reads no array
        states = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, own)
        checkpoint[RANDOM_STATES] = {"states": states, "stopped": bool(trainer.should_stop)}

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Take them over when the next epoch begins."""
        self._loaded = checkpoint.get(RANDOM_STATES)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do not continue where the training was over."""
        if self._loaded is not None:
            trainer.should_stop = self._loaded["stopped"]

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with the random states of the epoch before."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and trainer.global_rank < len(loaded["states"]):
            _set_rng_states(loaded["states"][trainer.global_rank])

    #: where no epoch was left to train
    on_fit_end = on_train_epoch_start


def rank() -> int:
    """The number of this process of DDP, also before a trainer has made the group; those above 0 only train."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


@contextmanager
def single_job() -> Iterator[None]:
    """Let DDP start its other processes with the command of this job: Lightning takes that of the whole sweep.

    Afterwards nothing is left of the process group, so that the next job of the sweep can make its own.
    """
    if not HydraConfig.initialized():
        yield
        return
    config: Any = HydraConfig.instance().cfg
    settings, main = config.hydra, sys.modules["__main__"]
    before = sys.argv, main.__spec__, dict(os.environ)
    try:
        sys.argv = [sys.argv[0], *job_arguments()]
        with read_write(settings):
            settings.run.dir = settings.runtime.output_dir
        if settings.mode == RunMode.MULTIRUN and not str(settings.launcher._target_).endswith(".BasicLauncher"):
            main.__spec__ = find_spec(__name__)  # a worker of a launcher, whose own program is none of ours
        yield
    finally:
        sys.argv, main.__spec__, environment = before
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name in os.environ.keys() - environment.keys():  # where Lightning notes the group
            del os.environ[name]


# -- the network and the data -----------------------------------------------------------------------------------------


class Classifier(pl.LightningModule):
    """A backbone trained with cross-entropy; a frozen one trains its head only.

    Samples with a negative label (OOD) are left out. Logs ``train/loss``, ``val/loss`` and the accuracies.

    Args:
        backbone: network with a head, ``backbone(x) -> logits``.
        optimizer: makes the optimizer from the parameters that may learn; by default AdamW.
        scheduler: makes a learning-rate scheduler from the optimizer.
        interval: whether the scheduler steps once per ``"epoch"`` or per ``"step"``.

    Raises:
        ValueError: if the backbone has no head.
    """

    def __init__(
        self, backbone: Backbone, *, optimizer: Any = torch.optim.AdamW, scheduler: Any = None, interval: str = "epoch"
    ) -> None:
        super().__init__()
        if backbone.head is None:
            raise ValueError("the backbone has no head to train. Pass num_classes, or call reset_head(num_classes).")
        self.backbone = backbone
        self._make_optimizer, self._make_scheduler, self._interval = optimizer, scheduler, interval

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, K)."""
        return self.backbone(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        return self._step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        return self._step(batch, "val")

    def _step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        x, y = batch
        logits, is_id = self(x), y >= 0
        # a batch without an ID sample gives a zero that still reaches every weight, as DDP wants
        loss = F.cross_entropy(logits[is_id], y[is_id]) if bool(is_id.any()) else 0.0 * logits.sum()
        if count := int(is_id.sum()):
            accuracy = (logits[is_id].argmax(1) == y[is_id]).float().mean()
            options: Any = {"prog_bar": True, "on_epoch": True, "on_step": False, "sync_dist": stage == "val"}
            self.log_dict({f"{stage}/loss": loss, f"{stage}/acc": accuracy}, batch_size=count, **options)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note how pictures were prepared, for those who load the weights."""
        transform = self.backbone.test_transform
        if isinstance(transform, ImageTransform):
            checkpoint[PREPROCESSING] = repr(transform)

    def configure_optimizers(self) -> Any:
        """Optimizer and scheduler over the parameters that may learn."""
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = self._make_optimizer(learning)
        if self._make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._make_scheduler(optimizer), "interval": self._interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class BenchmarkData(pl.LightningDataModule):
    """The loaders of a benchmark behind the transforms of a backbone.

    It offers ``fit_dataloader`` and ``ood_dataloaders``, which :class:`rmd_plugin.OODMonitor` finds by itself. ``seed``
    is that of the shuffling: the global random state is not used. Further options, such as ``batch_size`` and
    ``num_workers``, are those of the loaders.
    """

    def __init__(self, benchmark: OODBenchmark, backbone: Any = None, *, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self.benchmark, self.seed, self.options = benchmark, seed, options
        self.train_transform: Transform | None = getattr(backbone, "train_transform", None)
        self.test_transform: Transform | None = getattr(backbone, "test_transform", None)
        self._shuffling = torch.Generator().manual_seed(seed)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled training samples behind the training transform."""
        return self._loader(self.benchmark.train_set(), self.train_transform, self._shuffling)

    def state_dict(self) -> dict[str, Any]:
        """Where the shuffling is: between two epochs that says in which order the next one comes."""
        return {"shuffling": self._shuffling.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the training loader continue from there."""
        self._shuffling.set_state(state_dict["shuffling"])

    def val_dataloader(self) -> DataLoader[Any]:
        """Held-out in-distribution samples."""
        return self._loader(self.benchmark.val_set(), self.test_transform)

    def fit_dataloader(self) -> DataLoader[Any]:
        """Training samples behind the clean transform, in order: what detectors are fitted on."""
        return self._loader(self.benchmark.fit_set(), self.test_transform)

    def ood_dataloaders(self) -> dict[str, DataLoader[Any]]:
        """OOD test sets by name. They are only looked at, never trained or selected on."""
        sets = zip(self.benchmark.ood_names, self.benchmark.test_oods, strict=True)
        return {name: self._loader(data, self.test_transform) for name, data in sets}

    def _loader(self, data: Split, transform: Transform | None, shuffling: Any = None) -> DataLoader[Any]:
        return DataLoader(
            data if transform is None else data.with_transform(transform),
            shuffle=shuffling is not None,
            # workers that shuffle and augment begin anew with each epoch: their random states are in no checkpoint
            persistent_workers=self.options.get("num_workers", 0) > 0 and shuffling is None,
            # a generator of its own: other loaders and callbacks cannot change the order of the training data
            generator=shuffling or torch.Generator().manual_seed(self.seed),
            **self.options,
        )


if __name__ == "__main__":
    from rmd_plugin.app import commands

    commands.train()
