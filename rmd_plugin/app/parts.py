"""Config -> device, benchmark, backbone, detectors and extractor that fit each other; how items are prepared."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from rmd_plugin.backbones.base import Backbone, as_backbone
from rmd_plugin.backbones.small import Identity
from rmd_plugin.backbones.transforms import NOT_LOADED, ImageTransform
from rmd_plugin.benchmarks import OODBenchmark, as_benchmark
from rmd_plugin.compare.adapters import Factory
from rmd_plugin.compare.features import Extractor, FeatureCache
from rmd_plugin.detectors.detectors import evaluating

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
    # partial: Hydra would read into the objects
    benchmark = build(node, _partial_=True)(**changes) if changes else build(node)
    try:
        return as_benchmark(benchmark, seed=cfg.seed)
    except TypeError as error:
        raise ValueError(f"benchmark={cfg.names.benchmark}: {error}") from error


def make_backbone(cfg: DictConfig, benchmark: OODBenchmark) -> Backbone:
    """The backbone of a config, a missing input size taken from the first sample of the benchmark, which it encodes.

    Pictures of any size, which a network for tensors could not take, are resized to 32 pixels unless the config says.
    It gets a new head if it is to be trained, or with ``head=own``, where the checkpoint brings none.

    Raises:
        ValueError: if the backbone is for other data, with both names, what the sample is, and what would take it.
    """
    node, changes, split = cfg.backbone, {}, benchmark.fit_set()
    undecided = [str(name) for name in node if name in _FROM_SAMPLE and node.get(name) is None]
    sample: Any = split[0][0]
    if undecided:
        has_transform = any(node.get(name) is not None for name in ("image_size", "mean", "std", "transform"))
        if hasattr(sample, "convert") and "image_size" in node and not has_transform:
            node, has_transform = OmegaConf.merge(node, {"image_size": _PICTURE_SIZE}), True
            log.info("backbone.image_size=%d: the pictures are of any size.", _PICTURE_SIZE)
        if "image_size" in node and has_transform:  # as a network without weights of its own is going to get it
            own = node.get("transform") and build(node.transform)
            sample = split.with_transform(own or ImageTransform(node.image_size, (0.0,) * 3, (1.0,) * 3))[0][0]
        if isinstance(sample, Tensor):
            # merged, not passed on: Hydra refuses a config with a missing value even if it is given beside it
            node = OmegaConf.merge(node, {name: _FROM_SAMPLE[name](sample) for name in undecided})
        elif OmegaConf.is_missing(node, "in_features") or "in_channels" in undecided:  # the identity can do without
            raise ValueError(_misfit(cfg, sample))
    # a module of the user's own may take neither
    if (cfg.get("train") or cfg.head == "own") and "num_classes" in node and node.num_classes is None:
        changes["num_classes"] = benchmark.num_classes
    if cfg.get("checkpoint") is not None:
        changes["checkpoint"] = cfg.checkpoint
    backbone = as_backbone(build(node, **changes))
    head = getattr(benchmark, "head", None)
    if isinstance(head, nn.Linear) and isinstance(backbone, Identity) and not backbone.head_loaded:
        backbone.head, backbone.head_loaded = head, True  # the classifier that came with the features
    try:
        sample = (split if backbone.test_transform is None else split.with_transform(backbone.test_transform))[0][0]
        like = next(backbone.encoder.parameters(), sample)
        with evaluating(backbone.encoder), torch.no_grad():
            backbone.encoder(sample.unsqueeze(0).to(like.device))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(_misfit(cfg, sample)) from error
    return backbone


def _misfit(cfg: DictConfig, sample: object) -> str:
    kind, fits = type(sample).__name__, "bert" if isinstance(sample, str) else "another backbone"
    if hasattr(sample, "convert"):
        kind, fits = "pictures", "small_cnn, efficientnet_lite0, timm or torchvision"
    if isinstance(sample, Tensor):
        kind, fits = f"{sample.dtype} of shape {tuple(sample.shape)}", "mlp or small_cnn"
    return (
        f"backbone={cfg.names.backbone} cannot take the samples of benchmark={cfg.names.benchmark}, which are "
        f"{kind.removeprefix('torch.')}. Choose backbone={fits}, or set the options of the backbone to this input."
    )


def make_detectors(cfg: DictConfig) -> dict[str, Factory]:
    """Detectors of a config by name, each a partial that :mod:`rmd_plugin.compare.adapters` completes."""
    if not cfg.get("detector"):
        raise ValueError("no detector is chosen: detector=all, detector=paper, or detector=[rmd,mahalanobis].")
    return {str(name): build(node, _partial_=True, _convert_="all") for name, node in cfg.detector.items()}


def make_extractor(cfg: DictConfig, benchmark: OODBenchmark, backbone: Backbone, device: torch.device) -> Extractor:
    """The benchmark behind the backbone, with the cache of the config."""
    options = {name: cfg[name] for name in ("batch_size", "num_workers", "progress") if name in cfg}
    cache = None if cfg.cache_dir is None else FeatureCache(cfg.cache_dir)
    return Extractor(benchmark, backbone, cache=cache, device=device, **options)


def run_names(cfg: DictConfig) -> tuple[str, str]:
    """Names of benchmark and backbone for the rows, with the variant or model where one config has many."""
    benchmark, backbone = str(cfg.names.benchmark), str(cfg.names.backbone)
    for key, usual in (("variant", "full"), ("source", "published")):
        if (value := cfg.benchmark.get(key)) not in (None, usual):
            benchmark = f"{benchmark}:{value}"
    if benchmark == "framework" and cfg.benchmark.get("name"):
        benchmark = f"framework:{cfg.benchmark.name}"
    if backbone in _GENERIC and cfg.backbone.get("name"):
        backbone = f"{backbone}:{os.path.basename(str(cfg.backbone.name))}"
    return benchmark, backbone


def build(node: DictConfig, **changes: Any) -> Any:
    """Instantiate a node with changed options, and let errors through as they are: Hydra wraps them in two lines."""
    try:
        return instantiate(node, **changes)
    except InstantiationException as wrapper:
        cause = wrapper.__cause__
        # what is wrong with the options themselves Hydra says best
        raise wrapper if cause is None or isinstance(cause, TypeError) else cause from None


def choose_device(wanted: str) -> torch.device:
    """The device of a config; ``auto`` takes the accelerator if there is one.

    Raises:
        ValueError: if there is no such device here.
    """
    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={wanted} cannot be used here: {str(error).splitlines()[0]}") from error


def untrained_remark(cfg: DictConfig, backbone: Backbone) -> str:
    """That the encoder is untrained, if it is; else nothing. Features of the user's own come without one."""
    node = cfg.backbone
    trained = node.get("pretrained", False) or (cfg.checkpoint or node.get("checkpoint")) is not None
    has_weights = next(backbone.encoder.parameters(), None) is not None
    return "the encoder is untrained: checkpoint=FILE loads a trained one" if has_weights and not trained else ""


def say_preprocessing(cfg: DictConfig, backbone: Backbone, benchmark: OODBenchmark) -> str:
    """Log how items are prepared and where that came from, and warn where it may not be what the weights want.

    Returns:
        The same sentence, for the run folder.

    Raises:
        ValueError: if the user gave a preprocessing that would not be used.
    """
    split, own = benchmark.fit_set(), backbone.test_transform
    # tensors from a transform of the data set's own, which no other one is put in front of
    prepared = split.source.transformed and isinstance(split.raw(0), Tensor)
    of_benchmark = [name for name in ("train_transform", "test_transform") if cfg.benchmark.get(name) is not None]
    of_backbone = [name for name in ("transform", "mean", "std") if cfg.backbone.get(name) is not None]
    if of_benchmark and own is not None:
        reason = "the backbone brings its own preprocessing. Give backbone.mean=[...] and backbone.std=[...]."
        raise ValueError(f"benchmark.{of_benchmark[0]} would not be used: {reason}")
    if of_backbone and prepared:
        reason = "the benchmark's own transform makes tensors. Let it give pictures, or prepare them there alone."
        raise ValueError(f"backbone.{of_backbone[0]} would not be used: {reason}")
    if own is not None and not prepared:
        origins = backbone.origins or {"transform": f"the backbone {type(backbone).__name__}"}
        text = f"{own}: {', '.join(f'{part} from {origin}' for part, origin in origins.items())}"
    elif split.transform is None:
        text = "none: items are taken as they are"
    else:
        text = f"{split.transform}: " + ("transform from the config" if of_benchmark else "the benchmark's own")
    text = " ".join(text.split())
    log.info("Preprocessing: %s.", text)
    checkpoint, trained = cfg.checkpoint or cfg.backbone.get("checkpoint"), backbone.trained_transform
    if isinstance(own, ImageTransform) and trained not in (None, repr(own)):
        log.warning("The checkpoint was trained behind %s, which is not what is used.", trained)
    elif checkpoint is not None and trained is None and NOT_LOADED in map(backbone.origins.get, ("mean", "std")):
        words = "%s is normalised by %s. If it was trained otherwise, give backbone.mean=[...] backbone.std=[...]."
        log.warning(words, checkpoint, NOT_LOADED)
    return text
