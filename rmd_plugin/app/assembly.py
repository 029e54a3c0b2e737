"""Config -> benchmark, backbone and detectors that fit each other."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from torch import Tensor

from rmd_plugin.app.configs import TRAINED_BACKBONES
from rmd_plugin.compare.adapters import Factory
from rmd_plugin.encoding.isolation import evaluating

if TYPE_CHECKING:
    from rmd_plugin.backbones.base import Backbone

log = logging.getLogger(__name__)

#: backbones whose config is for any model of a library: the model's name belongs to the backbone's
_GENERIC = ("bert", "timm", "torchvision", "open_clip")
#: options of backbones that the first sample of a benchmark decides where the config leaves them open
_FROM_SAMPLE: dict[str, Callable[[Tensor], int]] = {
    "in_features": Tensor.numel,
    "in_channels": lambda sample: sample.shape[0] if sample.dim() > 1 else 1,
    "dims": lambda sample: 2 if sample.dim() > 2 else 1,
}


def make_benchmark(config: DictConfig) -> Any:
    """The benchmark of a config, its reads encoded as the backbone takes them."""
    node = config.benchmark
    wanted = getattr(get_class(config.backbone._target_), "encoding", None)
    if wanted is not None and "encoding" in node:
        node = OmegaConf.merge(node, {"encoding": wanted})
    return instantiate_plainly(node, {})


def make_backbone(config: DictConfig, benchmark: Any, *, num_classes: int | None = None) -> Any:
    """The backbone of a config.

    Args:
        config: the job's config.
        benchmark: what it is for: a missing input size is taken from its first sample.
        num_classes: classes of a new head, where the config does not say; None leaves the head to the checkpoint.
    """
    node, changes = config.backbone, {}
    undecided = [str(name) for name in node if name in _FROM_SAMPLE and node.get(name) is None]
    if undecided:
        sample = benchmark.train_set()[0][0]
        if isinstance(sample, Tensor):
            # merged, not passed on: Hydra refuses a config with a missing value even if it is given beside it
            node = OmegaConf.merge(node, {name: _FROM_SAMPLE[name](sample) for name in undecided})
        elif OmegaConf.is_missing(node, "in_features") or "in_channels" in undecided:  # the identity can do without
            raise ValueError(_misfit(config, sample))
    if num_classes is not None and node.get("num_classes") is None:
        changes["num_classes"] = num_classes
    if config.get("checkpoint") is not None:
        changes["checkpoint"] = config.checkpoint
    return instantiate_plainly(node, changes)


def check_backbone_takes(config: DictConfig, backbone: Backbone, sample: Any) -> None:
    """Encode one sample, so that a backbone for other data is refused before anything is trained.

    Args:
        config: the job's config.
        backbone: the backbone.
        sample: one item, as the loaders give it.

    Raises:
        ValueError: with both names, what the sample is, and what would take it.
    """
    if not isinstance(sample, Tensor):
        raise ValueError(_misfit(config, sample))
    like = next(backbone.encoder.parameters(), sample)
    try:
        with evaluating(backbone.encoder), torch.no_grad():
            backbone.encoder(sample.unsqueeze(0).to(like.device))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(_misfit(config, sample)) from error


def _misfit(config: DictConfig, sample: Any) -> str:
    benchmark, backbone = str(config.names.benchmark), str(config.names.backbone)
    fits = TRAINED_BACKBONES.get(benchmark, "small_cnn")
    if fits == backbone:
        fits = "mlp"
    what = f"{sample.dtype} of shape {tuple(sample.shape)}" if isinstance(sample, Tensor) else type(sample).__name__
    return (
        f"backbone={backbone} cannot take the samples of benchmark={benchmark}, which are "
        f"{what.removeprefix('torch.')}. Choose backbone={fits}, or set the options of the backbone to this input."
    )


def make_detectors(config: DictConfig) -> dict[str, Factory]:
    """Detectors of a config by name, each a partial that :func:`rmd_plugin.compare.adapters.build` completes."""
    nodes = config.get("detector") or {}
    if not nodes:
        raise ValueError("no detector is chosen: detector=all, detector=paper, or detector=[rmd,mahalanobis].")
    # a plain dict: instantiating the whole group at once would give a DictConfig
    return {str(name): _partial(node) for name, node in nodes.items()}


def _partial(node: DictConfig) -> Factory:
    options = {str(key): value for key, value in node.items() if key not in ("_target_", "_partial_", "_convert_")}
    plain = {key: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for key, value in options.items()}
    return functools.partial(get_class(node._target_), **plain)


def run_names(config: DictConfig) -> tuple[str, str]:
    """Names of benchmark and backbone for the rows, with the variant or model where one config has many."""
    benchmark, backbone = str(config.names.benchmark), str(config.names.backbone)
    for key, usual in (("variant", "full"), ("source", "published")):
        value = config.benchmark.get(key)
        if value not in (None, usual):
            benchmark = f"{benchmark}:{value}"
    if backbone in _GENERIC and config.backbone.get("name"):
        backbone = f"{backbone}:{os.path.basename(str(config.backbone.name))}"
    return benchmark, backbone


def choose_device(wanted: str) -> torch.device:
    """The device of a config; ``auto`` takes the accelerator if there is one.

    Raises:
        ValueError: if there is no such device here.
    """
    if wanted == "auto":
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if current is None else current
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={wanted} cannot be used here: {reason}. Try device=cpu or device=auto.") from error
    return device


def instantiate_plainly(node: DictConfig, changes: dict[str, Any] | None = None) -> Any:
    """Instantiate with changed options, and let errors through as they are: Hydra wraps them in two more lines."""
    try:
        return instantiate(node, **(changes or {}))
    except InstantiationException as wrapper:
        cause = wrapper.__cause__
        if cause is None:
            raise
        if isinstance(cause, TypeError):  # a value of the wrong type, or an option that there is not
            raise ValueError(f"{node._target_} cannot be made of its options: {cause}.") from cause
        raise cause from None


class JobError(CompactHydraException):
    """What stops one job of a sweep, in one sentence: Hydra shows no traceback for its kind."""


@contextmanager
def one_clear_error(command: str) -> Iterator[None]:
    """End a command with one sentence where data, weights, disk or options are at fault.

    Errors of other kinds are faults of the program and keep their traceback, as does everything under
    ``HYDRA_FULL_ERROR=1``. In a multirun the sentence is logged and goes to Hydra, which runs the other jobs first.
    """
    try:
        yield
    except Exception as error:
        if not _of_the_user(error) or os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
            raise
        sentence = f"{command}: {_sentence(error)}"
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            log.error("%s", sentence)
            raise JobError(sentence) from None
        print(sentence, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        # what a shell expects of a program that was stopped, instead of a traceback
        sys.exit(130)


def _of_the_user(error: Exception) -> bool:
    """Whether data, weights, disk, devices or options are at fault."""
    kinds = (OSError, ValueError, ImportError, MissingMandatoryValue, InterpolationResolutionError)
    # by name: the other commands do not import Lightning
    return isinstance(error, kinds) or type(error).__name__ == "MisconfigurationException"


def _sentence(error: Exception) -> str:
    if isinstance(error, MissingMandatoryValue):
        name = error.full_key or str(error).splitlines()[0].rpartition(" ")[2]
        return f"{name} must be given: add {name}=VALUE."
    if isinstance(error, OmegaConfBaseException):
        return str(error).splitlines()[0]
    return " ".join(str(error).split()) or type(error).__name__
