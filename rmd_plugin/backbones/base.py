"""The common shape of every backbone: an encoder, a linear head, transforms, and weights that load and hash."""

import hashlib
import inspect
import json
import os
import pickle
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, TypedDict

import safetensors.torch
import torch
from torch import Tensor, nn

Transform: TypeAlias = Callable[[Any], Tensor]
Checkpoint: TypeAlias = str | os.PathLike[str] | None

#: how the address of a file inside an installed package begins
PACKAGED = "pkg://"
#: under which ``rmd-train`` keeps the ``repr`` of the test transform
PREPROCESSING = "rmd_preprocessing"
# names under which training programs put the weights beside optimiser state and counters
_CONTAINERS = ("state_dict", "model_state_dict", "model")
# what checkpoints of other projects call the classifier
_HEAD_NAMES = ("head", "fc", "linear", "classifier")


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not belong to the backbone it was given to."""


class WeightsNotFoundError(FileNotFoundError):
    """A file of weights is in none of the places looked in, which the message lists."""


class SharedOptions(TypedDict, total=False):
    """The options that every backbone takes and hands on; :class:`Backbone` says what they mean."""

    num_classes: int | None
    checkpoint: Checkpoint
    load_head: bool
    frozen: bool


# -- checkpoints ------------------------------------------------------------------------------------------------------


def packaged_path(address: str) -> Path:
    """Where ``pkg://PACKAGE/PATH`` lies."""
    package, _, inside = address.removeprefix(PACKAGED).partition("/")
    return Path(str(files(package))) / inside


def find_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """Locate a file: the path as it is, then below ``RMD_DATA_DIR``; ``pkg://PACKAGE/PATH`` lies in a package.

    Raises:
        WeightsNotFoundError: if it is in neither place.
    """
    packaged = str(checkpoint).startswith(PACKAGED)
    candidates = [packaged_path(str(checkpoint)) if packaged else Path(checkpoint).expanduser().absolute()]
    if data_dir := os.environ.get("RMD_DATA_DIR"):
        candidates.append(Path(data_dir).expanduser().absolute() / checkpoint)
    for path in candidates:
        if path.is_file():
            return path
    raise WeightsNotFoundError(
        f"checkpoint {str(checkpoint)!r} not found; looked in {' and '.join(map(str, candidates))}. "
        "Give the path of a file (a relative one may lie below RMD_DATA_DIR), or null to go without."
    )


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Tensors by name, on the CPU, of a plain state_dict, a Lightning checkpoint or a safetensors file.

    Anything beyond tensors and plain containers is refused with a CheckpointError, never executed.

    Returns:
        The tensors, and the ``repr`` of the transform that they were trained with, if ``rmd-train`` wrote the file.
    """
    content: Any
    try:
        if path.suffix == ".safetensors":
            content = safetensors.torch.load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage shows in many classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's own words advise to turn the protection off
            reason = "it holds more than tensors and plain values, or is damaged: refused, loading it could run code"
        raise CheckpointError(f"{path} is not a readable checkpoint: {reason}") from error
    content = content if isinstance(content, Mapping) else {}
    weights = next((content[name] for name in _CONTAINERS if isinstance(content.get(name), Mapping)), content)
    state = {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(f"{path} holds no state_dict (name -> tensor); its entries are {[*weights][:5]}.")
    return state, content.get(PREPROCESSING)


def match_names(
    state: Mapping[str, Tensor], encoder_names: Sequence[str], head_names: Sequence[str], rename: Callable[[str], str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Find which prefix of a file holds the network, and translate its names.

    The network may be stored as a whole backbone (``encoder.*``, ``head.*``) or as the original project names it
    (no ``encoder.``, the classifier under one of ``head_names``), under any prefix (``model.``, ``module.``, ...).
    Other parts of the file (losses, metrics, other towers) are ignored.

    Returns:
        The weights of the encoder and those of the head, under their own names. Weights inside the network that the
        encoder does not have are among those of the encoder.
    """
    expected = set(encoder_names)

    def translate(name: str) -> str | None:
        module, _, leaf = name.rpartition(".")
        bare = name.removeprefix("encoder.")
        if bare in expected:
            return f"encoder.{bare}"
        if module in head_names:
            return f"head.{leaf}"
        return f"encoder.{rename(bare)}" if rename(bare) in expected else None

    hits: Counter[str] = Counter()
    for name in state:
        prefixes = accumulate((f"{part}." for part in name.split(".")[:-1]), initial="")
        hits.update(prefix for prefix in prefixes if translate(name.removeprefix(prefix)))
    # the shortest prefix wins a tie, so that a file that fits as it is keeps its names
    prefix = min(hits, key=lambda p: (-hits[p], len(p), p), default="")
    inside = {name.split(".")[0] for name in expected} | {"encoder", "head"}
    weights: dict[str, dict[str, Tensor]] = {"encoder": {}, "head": {}}
    for name, tensor in state.items():
        if name.startswith(prefix):
            part, _, own = (translate(name[len(prefix) :]) or "").partition(".")
            if part:
                weights[part][own] = tensor
            elif name[len(prefix) :].split(".")[0] in inside:
                weights["encoder"][name] = tensor
    return weights["encoder"], weights["head"]


# -- the backbone -----------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """A network in two parts, ``head(encoder(x))``, as the detectors see it.

    A subclass builds an encoder and passes it on; head, checkpoint, freezing and fingerprint come with this class. For
    a backbone of your own, name the subclass as ``_target_`` in a file ``backbone/my_net.yaml`` of your own config
    folder, list the four shared options there as well, and choose it with
    ``rmd-train --config-dir my_conf backbone=my_net``.

    Args:
        encoder: maps a batch of inputs to pooled features of shape (B, D).
        feature_dim: D.
        num_classes: classes of the head. ``None``: as many as the checkpoint's head has, or no head at all.
        checkpoint: file to load, or ``None``; a relative path is also looked for under ``RMD_DATA_DIR``.
            A state_dict, a Lightning checkpoint or a safetensors file, under any prefix.
        load_head: whether to load the head of the checkpoint, too; ``False`` starts a new one, for other classes.
        frozen: whether the encoder is kept as it is: no gradients, and evaluation mode even after ``.train()``.
        train_transform: raw item to tensor with augmentation; ``None`` leaves it to the benchmark.
        test_transform: raw item to tensor; ``None`` leaves it to the benchmark.
        origins: part of the preprocessing -> where it came from, in words: ``{"mean": "the config"}``.
        architecture: what besides the weights decides the output; enters the fingerprint.
        head_names: further names of the classifier in checkpoints of other projects.

    Attributes:
        encoder: the feature extractor.
        head: the classifier, or ``None``.
        head_loaded: whether the head's weights came from a checkpoint or a pre-trained source.
        origins: where the preprocessing came from.
        trained_transform: ``repr`` of the transform that the checkpoint was trained with, if ``rmd-train`` wrote it.
        frozen: whether the encoder is frozen.
        encoding: what a genomics benchmark must deliver, ``"one_hot"`` or ``"tokens"``; ``None`` elsewhere.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class MyNet(Backbone):
        ...     def __init__(self, width: int = 32, **options):
        ...         encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        ...         super().__init__(encoder, width, architecture={"width": width}, **options)
        >>> backbone = MyNet(num_classes=6)
        >>> backbone.encoder(torch.rand(5, 1, 8, 8)).shape, backbone(torch.rand(5, 1, 8, 8)).shape
        (torch.Size([5, 32]), torch.Size([5, 6]))
    """

    encoding: ClassVar[str | None] = None

    encoder: nn.Module
    head: nn.Linear | None
    init_options: dict[str, Any]  #: the arguments of the constructor by name, for a guard to build it again

    def __new__(cls, *values: Any, **options: Any) -> Self:  # noqa: D102
        backbone = super().__new__(cls)
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        # not by nn.Module, which is not set up yet
        object.__setattr__(backbone, "init_options", dict(zip(names, values, strict=False)) | options)
        return backbone

    def __init__(
        self,
        encoder: nn.Module,
        feature_dim: int,
        *,
        num_classes: int | None = None,
        checkpoint: Checkpoint = None,
        load_head: bool = True,
        frozen: bool = False,
        train_transform: Transform | None = None,
        test_transform: Transform | None = None,
        origins: Mapping[str, str] | None = None,
        architecture: Mapping[str, object] | None = None,
        head_names: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = None
        self.head_loaded = False
        self._feature_dim = feature_dim
        self.train_transform = train_transform
        self.test_transform = test_transform
        self.origins = dict(origins or {})
        self.trained_transform: str | None = None
        self.architecture = dict(architecture or {})
        self._head_names = (*_HEAD_NAMES, *head_names)
        self.frozen = frozen
        self.reset_head(num_classes)
        if checkpoint is not None:
            self.load_checkpoint(checkpoint, load_head=load_head)
        if frozen:
            self.encoder.requires_grad_(False)
        # some libraries hand their models over in evaluation mode, and Lightning trains them as they come
        self.train()

    @property
    def feature_dim(self) -> int:
        """Number of features D."""
        return self._feature_dim

    @property
    def num_classes(self) -> int | None:
        """Classes of the head, ``None`` without a head."""
        return None if self.head is None else self.head.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes) of a batch."""
        if self.head is None:
            raise RuntimeError(f"{type(self).__name__} has no head: set num_classes, or use its .encoder for features.")
        logits: Tensor = self.head(self.encoder(x))
        return logits

    def reset_head(self, num_classes: int | None) -> None:
        """Replace the head by an untrained one; ``None`` removes it."""
        like = next((p for p in self.encoder.parameters() if p.is_floating_point()), torch.empty(0))
        self.head, self.head_loaded = None, False
        if num_classes is not None:
            self.head = nn.Linear(self.feature_dim, num_classes, device=like.device, dtype=like.dtype)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.frozen:
            # batch statistics and dropout would move the features although no weight learns
            self.encoder.eval()
        return self

    def load_checkpoint(self, checkpoint: str | os.PathLike[str], *, load_head: bool = True) -> None:
        """Load weights from a file, with its classifier if it has one and ``load_head`` wants it.

        Raises:
            WeightsNotFoundError: if there is no such file.
            CheckpointError: if it cannot be read, or does not fit this network.
        """
        path = find_checkpoint(checkpoint)
        state, self.trained_transform = read_checkpoint(path)
        self._load_weights(state, str(path), load_head=load_head)

    def _load_weights(self, state: Mapping[str, Tensor], source: str, *, load_head: bool) -> None:
        """Load weights under any names; ``source`` is what error messages call them."""
        names = list(self.encoder.state_dict())
        encoder, head = match_names(state, names, self._head_names, self.rename_key)
        try:
            self.encoder.load_state_dict(encoder)
        except RuntimeError as error:
            reason = textwrap.shorten(str(error).partition("\n")[2], 500)
            network = f"{type(self).__name__} with {self.architecture}"
            raise CheckpointError(f"{source} does not fit {network}: {reason}. Is it of other sizes?") from error
        if load_head and "weight" in head:
            self._load_head(head["weight"], head.get("bias"), source)

    def _load_head(self, weight: Tensor, bias: Tensor | None, source: str) -> None:
        """Take a classifier over, linear or a 1x1 convolution; a head for other classes is refused."""
        weight = weight.flatten(1)
        if self.num_classes is None:
            self.reset_head(len(weight))
        shape = (self.num_classes, self.feature_dim)
        if weight.shape != shape:
            raise CheckpointError(
                f"the classifier of {source} has (classes, features) {tuple(weight.shape)}, expected {shape}. "
                "For a new one: backbone.load_head=false (backbone.pretrained_head=false for pre-trained weights)."
            )
        state = {"weight": weight, "bias": torch.zeros(len(weight)) if bias is None else bias}
        self.get_submodule("head").load_state_dict(state)
        self.head_loaded = True

    def save_assets(self, folder: Path) -> None:
        """Write what ``name`` must point to if the network is made again on another machine; here there is nothing."""

    def rename_key(self, name: str) -> str:
        """Translate an encoder name of another project's checkpoint; here it stays as it is."""
        return name

    def fingerprint(self) -> str:
        """Hash of everything that decides the output (weights, architecture, test transform), as 64 hexadecimal digits.

        Equal for equal networks, in any process and on any device.
        """
        identity = [type(self).__qualname__, self.architecture, repr(self.test_transform)]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.state_dict().items()):
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{name}{plain.dtype}{tuple(plain.shape)}".encode())
            # bytes, not values: bfloat16 has no numpy type
            digest.update(plain.reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def as_backbone(module: nn.Module) -> Backbone:
    """A plain module with ``.encoder`` and ``.head`` as a backbone, with its transforms if it has any.

    Its head counts as trained, and may be missing where there are only features. Backbones stay as they are.
    """
    if isinstance(module, Backbone):
        return module
    encoder, head = getattr(module, "encoder", None), getattr(module, "head", None)
    if not isinstance(encoder, nn.Module) or not isinstance(head, nn.Linear | None):
        raise ValueError(
            f"{type(module).__name__} cannot serve as a backbone: expected an .encoder, a module, and a .head, "
            f"an nn.Linear or None, got {type(encoder).__name__} and {type(head).__name__}."
        )
    transforms: Any = {name: getattr(module, name, None) for name in ("train_transform", "test_transform")}
    width = getattr(module, "feature_dim", 0) if head is None else head.in_features
    backbone = Backbone(encoder, width, architecture={"module": type(module).__qualname__}, **transforms)
    backbone.head, backbone.head_loaded = head, head is not None
    return backbone
