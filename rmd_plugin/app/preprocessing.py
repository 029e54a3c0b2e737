"""What becomes of raw items before the network sees them: never guessed silently, said in one line."""

from __future__ import annotations

import logging
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.preprocessing import NOT_LOADED
from rmd_plugin.backbones.transforms import ImageTransform
from rmd_plugin.benchmarks.base import OODBenchmark
from rmd_plugin.untrusted import one_line

log = logging.getLogger(__name__)

#: options of a benchmark and of a backbone that ask for a preprocessing
_OF_BENCHMARK, _OF_BACKBONE = ("train_transform", "test_transform"), ("transform", "mean", "std")


def say_preprocessing(cfg: DictConfig, backbone: Backbone, benchmark: OODBenchmark) -> str:
    """Log how items are prepared and where that came from, and warn where it may not be what the weights want.

    Returns:
        The same sentence, for the run folder.

    Raises:
        ValueError: if the user gave a preprocessing that would not be used.
    """
    check_transforms(cfg, backbone, benchmark)
    split, own = benchmark.fit_set(), backbone.test_transform
    if own is not None and not _prepared_already(benchmark):
        origins = backbone.origins or {"transform": f"the backbone {type(backbone).__name__}"}
        text = f"{_words(own)}: {_from(origins)}"
    elif _given(cfg.benchmark, _OF_BENCHMARK):
        text = f"{_words(split.transform)}: transform from the config"
    else:
        text = f"{_words(split.transform)}: the benchmark's own"
        if own is not None:
            text += ", whose items are tensors already; that of the backbone is not used"
    log.info("Preprocessing: %s.", text)
    _warn(cfg, backbone)
    return text


def check_transforms(cfg: DictConfig, backbone: Backbone, benchmark: OODBenchmark) -> None:
    """Refuse a preprocessing that the user gave and that would not be used.

    Raises:
        ValueError: with its option, and the one to use in its place.
    """
    name = cfg.names.backbone
    if (given := _given(cfg.benchmark, _OF_BENCHMARK)) and backbone.test_transform is not None:
        raise ValueError(
            f"benchmark.{given[0]} would not be used: backbone={name} brings its own preprocessing. Give it to the "
            "backbone: +backbone.transform._target_=package.Class, or backbone.mean=[...] and backbone.std=[...]."
        )
    if (given := _given(cfg.backbone, _OF_BACKBONE)) and _prepared_already(benchmark):
        raise ValueError(
            f"backbone.{given[0]} would not be used: the items of benchmark={cfg.names.benchmark} are tensors that its "
            "own transform made. Let it give pictures (no transform), or prepare them there alone."
        )


def _given(node: DictConfig, options: tuple[str, ...]) -> list[str]:
    return [name for name in options if node.get(name) is not None]


def _prepared_already(benchmark: OODBenchmark) -> bool:
    """Whether items are tensors from a transform of the data set's own, which no other one is put in front of."""
    split = benchmark.fit_set()
    return split.source.transformed and isinstance(split.raw(0), Tensor)


def _words(transform: Any) -> str:
    if transform is None:
        return "none, items are taken as they are"
    text = one_line(" ".join(str(transform).split()))
    return text if len(text) <= 300 else f"{text[:297]}..."


def _from(origins: dict[str, str]) -> str:
    """``mean and std from the weights' metadata, size from the config``."""
    parts: dict[str, list[str]] = {}
    for part, origin in origins.items():
        parts.setdefault(origin, []).append(part)
    return ", ".join(f"{_and(names)} from {origin}" for origin, names in parts.items())


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _warn(cfg: DictConfig, backbone: Backbone) -> None:
    """Tell where the weights may have been trained behind another preprocessing."""
    transform, trained = backbone.test_transform, backbone.noted.preprocessing
    if not isinstance(transform, ImageTransform):
        return
    if trained is not None:
        if trained != repr(transform):
            log.warning("The checkpoint was trained behind %s, which is not what is used.", one_line(trained))
        return
    checkpoint = cfg.get("checkpoint") or cfg.backbone.get("checkpoint") or cfg.get("ckpt_path")
    guessed = [name for name in ("mean", "std") if backbone.origins.get(name) == NOT_LOADED]
    if checkpoint is not None and guessed:
        confirmed = " ".join(f"backbone.{name}={list(getattr(transform, name))}".replace(" ", "") for name in guessed)
        log.warning(
            "backbone.checkpoint=%s is normalised by %s from %s. If it was trained otherwise, say how (on pixels in "
            "[0, 1]: backbone.mean=[0,0,0] backbone.std=[1,1,1]); if not, confirm it: %s.",
            checkpoint, _and(guessed), NOT_LOADED, confirmed,
        )  # fmt: skip
