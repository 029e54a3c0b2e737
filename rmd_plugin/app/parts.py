"""Config -> benchmark, backbone, detectors, callbacks and loggers that fit each other."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import Callback, Checkpoint, ModelSummary, ProgressBar
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn

from rmd_plugin.app.last_checkpoint import LastCheckpoint
from rmd_plugin.backbones.base import Backbone, as_backbone
from rmd_plugin.backbones.small import Identity
from rmd_plugin.backbones.transforms import ImageTransform
from rmd_plugin.benchmarks.base import OODBenchmark, as_benchmark
from rmd_plugin.compare.building import Factory
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.extraction import Extractor
from rmd_plugin.encoding.isolation import evaluating

log = logging.getLogger(__name__)

#: side of pictures for a network that has none of its own
_PICTURE_SIZE = 32
#: backbones whose config is for any model of a library: the model's name belongs to the backbone's
_GENERIC = ("bert", "hf", "timm", "torchvision", "open_clip")
#: options of backbones that the first sample of a benchmark decides where the config leaves them open
_FROM_SAMPLE: dict[str, Callable[[Tensor], int]] = {
    "in_features": Tensor.numel,
    "in_channels": lambda sample: sample.shape[0] if sample.dim() > 1 else 1,
    "dims": lambda sample: 2 if sample.dim() > 2 else 1,
}


def make_benchmark(cfg: DictConfig, **changes: Any) -> OODBenchmark:
    """The benchmark of a config, ours or any of the framework's, its reads encoded as the backbone takes them.

    ``changes`` are options that no config can hold.
    """
    node = cfg.benchmark
    wanted = getattr(get_class(cfg.backbone._target_), "encoding", None)
    if wanted is not None and "encoding" in node:
        node = OmegaConf.merge(node, {"encoding": wanted})
    try:
        made = build(node, _partial_=True)(**changes) if changes else build(node)  # Hydra would read into the objects
        return as_benchmark(made, seed=cfg.seed)
    except TypeError as error:
        raise ValueError(f"benchmark={cfg.names.benchmark}: {error}") from error


def make_backbone(cfg: DictConfig, benchmark: OODBenchmark, *, num_classes: int | None = None) -> Backbone:
    """The backbone of a config, a missing input size taken from the first sample of the benchmark.

    Pictures of any size, which a network for tensors could not take, are resized to 32 pixels unless the config says.
    ``num_classes`` is for a new head, where the config does not say; None leaves the head to the checkpoint.
    """
    node, changes = cfg.backbone, {}
    undecided = [str(name) for name in node if name in _FROM_SAMPLE and node.get(name) is None]
    if undecided:
        sample: object = benchmark.train_set()[0][0]
        if hasattr(sample, "convert") and "image_size" in node and not _has_transform(node):
            node = OmegaConf.merge(node, {"image_size": _PICTURE_SIZE})
            log.info("backbone.image_size=%d: the pictures are of any size.", _PICTURE_SIZE)
        if "image_size" in node and _has_transform(node):
            sample = _prepared_sample(node, benchmark)
        if isinstance(sample, Tensor):
            # merged, not passed on: Hydra refuses a config with a missing value even if it is given beside it
            node = OmegaConf.merge(node, {name: _FROM_SAMPLE[name](sample) for name in undecided})
        elif OmegaConf.is_missing(node, "in_features") or "in_channels" in undecided:  # the identity can do without
            raise ValueError(_misfit(cfg, sample))
    # a module of the user's own may take neither
    if num_classes is not None and "num_classes" in node and node.num_classes is None:
        changes["num_classes"] = num_classes
    if cfg.get("checkpoint") is not None:
        changes["checkpoint"] = cfg.checkpoint
    backbone = as_backbone(build(node, **changes))
    head = getattr(benchmark, "head", None)
    if isinstance(head, nn.Linear) and isinstance(backbone, Identity) and not backbone.head_loaded:
        backbone.head, backbone.head_loaded = head, True  # the classifier that came with the features
    return backbone


def _has_transform(node: DictConfig) -> bool:
    return any(node.get(name) is not None for name in ("image_size", "mean", "std", "transform"))


def _prepared_sample(node: DictConfig, benchmark: OODBenchmark) -> object:
    """The first sample, as a network without weights of its own is going to get it."""
    if node.get("transform") is not None:
        transform = build(node.transform)
    else:
        transform = ImageTransform(node.image_size, (0.0,) * 3, (1.0,) * 3)
    return benchmark.fit_set().with_transform(transform)[0][0]


def check_backbone_takes(cfg: DictConfig, backbone: Backbone, benchmark: OODBenchmark) -> None:
    """Encode one sample, so that a backbone for other data is refused before anything is trained or compared.

    Raises:
        ValueError: with both names, what the sample is, and what would take it.
    """
    split, transform = benchmark.fit_set(), backbone.test_transform
    sample: Any = split[0][0]
    try:
        if transform is not None:
            sample = split.with_transform(transform)[0][0]
        like = next(backbone.encoder.parameters(), sample)
        with evaluating(backbone.encoder), torch.no_grad():
            backbone.encoder(sample.unsqueeze(0).to(like.device))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(_misfit(cfg, sample)) from error


def _misfit(cfg: DictConfig, sample: object) -> str:
    what, fits = type(sample).__name__, "bert" if isinstance(sample, str) else "another backbone"
    if hasattr(sample, "convert"):
        what, fits = "pictures", "small_cnn, efficientnet_lite0, timm or torchvision"
    if isinstance(sample, Tensor):
        what, fits = f"{sample.dtype} of shape {tuple(sample.shape)}", "mlp or small_cnn"
    return (
        f"backbone={cfg.names.backbone} cannot take the samples of benchmark={cfg.names.benchmark}, which are "
        f"{what.removeprefix('torch.')}. Choose backbone={fits}, or set the options of the backbone to this input."
    )


def make_detectors(cfg: DictConfig) -> dict[str, Factory]:
    """Detectors of a config by name, each a partial that :mod:`rmd_plugin.compare.building` completes."""
    nodes = cfg.get("detector") or {}
    if not nodes:
        raise ValueError("no detector is chosen: detector=all, detector=paper, or detector=[rmd,mahalanobis].")
    made: dict[str, Factory] = {}
    for name, node in nodes.items():
        options: Any = OmegaConf.to_object(node)
        plain = {key: value for key, value in options.items() if key not in ("_target_", "_partial_", "_convert_")}
        inner = {key: value for key, value in plain.items() if isinstance(value, dict) and "_target_" in value}
        plain |= {key: instantiate(value) for key, value in inner.items()}
        made[str(name)] = functools.partial(get_class(node._target_), **plain)
    return made


def make_extractor(cfg: DictConfig, benchmark: OODBenchmark, backbone: Backbone, device: torch.device) -> Extractor:
    """The benchmark behind the backbone, with the cache of the config."""
    name, network = run_names(cfg)
    return Extractor(
        benchmark,
        backbone,
        cache=None if cfg.cache_dir is None else FeatureCache(cfg.cache_dir),
        batch_size=cfg.batch_size,
        num_workers=cfg.num_workers,
        device=device,
        names={"benchmark": name, "backbone": network},
        progress=bool(cfg.get("progress", True)) and sys.stderr.isatty(),
    )


def make_callbacks(cfg: DictConfig) -> list[Callback]:
    """The callbacks of ``callbacks=``, the one to resume by first; what the trainer's switches turn off is left out."""
    checkpoints = Checkpoint, LastCheckpoint
    switches = {"progress_bar": (ProgressBar,), "model_summary": (ModelSummary,), "checkpointing": checkpoints}
    disabled = [kinds for name, kinds in switches.items() if cfg.trainer.get(f"enable_{name}") is False]
    off = tuple(kind for kinds in disabled for kind in kinds)
    made = []
    for name, node in (cfg.get("callbacks") or {}).items():
        if node is None or (name == "ood_monitor" and not node.detectors):  # monitor=[] watches none
            continue
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise ValueError(f"callbacks.{name} needs a class: +callbacks.{name}._target_=package.Class.")
        callback = build(node)
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks.{name} is a {type(callback).__name__}, expected a Lightning Callback.")
        if not isinstance(callback, off):
            made.append(callback)
    return sorted(made, key=lambda callback: not isinstance(callback, LastCheckpoint))


def make_loggers(cfg: DictConfig) -> list[Logger]:
    """The loggers of ``logger=``."""
    return [build(node) for node in (cfg.get("logger") or {}).values() if node is not None]


def run_names(cfg: DictConfig) -> tuple[str, str]:
    """Names of benchmark and backbone for the rows, with the variant or model where one config has many."""
    benchmark, backbone = str(cfg.names.benchmark), str(cfg.names.backbone)
    for key, usual in (("variant", "full"), ("source", "published")):
        value = cfg.benchmark.get(key)
        if value not in (None, usual):
            benchmark = f"{benchmark}:{value}"
    if benchmark == "framework" and cfg.benchmark.get("name"):
        benchmark = f"framework:{cfg.benchmark.name}"
    if backbone in _GENERIC and cfg.backbone.get("name"):
        backbone = f"{backbone}:{os.path.basename(str(cfg.backbone.name))}"
    return benchmark, backbone


def about(cfg: DictConfig) -> dict[str, str | int]:
    """What a run is, for the status of its folder."""
    benchmark, backbone = run_names(cfg)
    return {"benchmark": benchmark, "backbone": backbone, "seed": int(cfg.seed)}


def build(node: DictConfig, **changes: Any) -> Any:
    """Instantiate a node with changed options, and let errors through as they are: Hydra wraps them in two lines."""
    try:
        return instantiate(node, **changes)
    except InstantiationException as wrapper:
        cause = wrapper.__cause__
        if cause is None:
            raise
        if isinstance(cause, TypeError):  # a value of the wrong type, or an option that there is not
            raise ValueError(f"{node._target_} cannot be made of its options: {cause}.") from cause
        raise cause from None
