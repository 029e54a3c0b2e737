"""The common shape of every backbone: an encoder, a linear head, transforms, and weights that load and hash."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.backbones.checkpoint import CheckpointError, Notes, check_fit, match_names, read_checkpoint
from rmd_plugin.backbones.fetch import find_checkpoint

Transform: TypeAlias = Callable[[Any], Tensor]
Checkpoint: TypeAlias = str | os.PathLike[str] | None

# what checkpoints of other projects call the classifier
_HEAD_NAMES = ("head", "fc", "linear", "classifier")


class SharedOptions(TypedDict, total=False):
    """The options that every backbone takes and hands on; :class:`Backbone` says what they mean."""

    num_classes: int | None
    checkpoint: Checkpoint
    load_head: bool
    frozen: bool


class Backbone(nn.Module):
    """A network in two parts, ``head(encoder(x))``, as the detectors see it.

    A subclass builds an encoder and hands it over; head, checkpoint, freezing and fingerprint are here. For a backbone
    of your own, name the subclass as ``_target_`` in a file ``backbone/my_net.yaml`` of your own config folder, list
    the four shared options there as well, and choose it: ``rmd-train --config-dir my_conf backbone=my_net``.

    Args:
        encoder: maps a batch of inputs to pooled features of shape (B, D).
        feature_dim: D.
        num_classes: classes of the head. ``None``: as many as the checkpoint's head has, or no head at all.
        checkpoint: file to load, or ``None``; a relative path is also looked for under ``RMD_DATA_DIR``.
            A state_dict, a Lightning checkpoint or a safetensors file, under any prefix.
        load_head: whether the checkpoint's head is wanted too; ``False`` starts a new one, for other classes.
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
        noted: what the checkpoint says about itself, see :class:`~rmd_plugin.backbones.checkpoint.Notes`.
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
    made_with: dict[str, Any]  #: the arguments of the constructor by name, for a guard to make it from again

    def __new__(cls, *values: Any, **options: Any) -> Self:  # noqa: D102
        made = super().__new__(cls)
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        # not by nn.Module, which is not set up yet
        object.__setattr__(made, "made_with", dict(zip(names, values, strict=False)) | options)
        return made

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
        self.noted = Notes()
        self.architecture = dict(architecture or {})
        self._head_names = (*_HEAD_NAMES, *head_names)
        self._frozen_names: list[str] | None = None
        self.reset_head(num_classes)
        if checkpoint is not None:
            self.load_checkpoint(checkpoint, load_head=load_head)
        if frozen:
            self.freeze()
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

    @property
    def frozen(self) -> bool:
        """Whether the encoder is frozen."""
        return self._frozen_names is not None

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes) of a batch."""
        if self.head is None:
            raise RuntimeError(
                f"{type(self).__name__} has no head, so there are no logits: pass num_classes=..., "
                "call reset_head(num_classes), or use its .encoder for the features."
            )
        logits: Tensor = self.head(self.encoder(x))
        return logits

    def reset_head(self, num_classes: int | None) -> None:
        """Replace the head by an untrained one; ``None`` removes it."""
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, or None for no head, got {num_classes}.")
        like = next((p for p in self.encoder.parameters() if p.is_floating_point()), torch.empty(0))
        self.head, self.head_loaded = None, False
        if num_classes is not None:
            self.head = nn.Linear(self.feature_dim, num_classes, device=like.device, dtype=like.dtype)

    def _take_head(self, classifier: nn.Module, name: str) -> None:
        """Keep a pre-trained classifier, linear or a 1x1 convolution, as the head."""
        weight, bias = getattr(classifier, "weight", None), getattr(classifier, "bias", None)
        if not isinstance(weight, Tensor) or weight.flatten(1).shape[1] != self.feature_dim:
            raise ValueError(
                f"the classifier of {name} is a {type(classifier).__name__}, not linear: pretrained_head=false."
            )
        self._make_room(len(weight), name)
        state = {"weight": weight.flatten(1), "bias": torch.zeros(len(weight)) if bias is None else bias}
        self.get_submodule("head").load_state_dict(state)
        self.head_loaded = True

    def freeze(self) -> Self:
        """Keep the encoder as it is; the head stays trainable."""
        if self._frozen_names is None:
            self._frozen_names = [name for name, p in self.encoder.named_parameters() if p.requires_grad]
        self.encoder.requires_grad_(False)
        self.encoder.eval()
        return self

    def unfreeze(self) -> Self:
        """Let the encoder learn again: the parameters that did before ``freeze``."""
        for name in self._frozen_names or ():
            self.encoder.get_parameter(name).requires_grad_(True)
        self._frozen_names = None
        self.encoder.train(self.training)
        return self

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
        state, noted = read_checkpoint(path)
        matched = match_names(state, self.encoder.state_dict(), head_names=self._head_names, rename=self.rename_key)
        weight = matched.state.get("head.weight")
        if weight is not None and weight.dim() == 4 and weight.shape[2:] == (1, 1):
            matched.state["head.weight"] = weight = weight.flatten(1)
        with_head = load_head and weight is not None
        if weight is not None and with_head:
            self._make_room(len(weight), path)
        own = self.state_dict()
        wanted = {name: own[name] for name in own if with_head or not name.startswith("head.")}
        sizes = ", ".join(f"{name}={value}" for name, value in self.architecture.items())
        check_fit(matched, wanted, path=path, what=f"{type(self).__name__}({sizes})")
        self.load_state_dict({name: matched.state[name] for name in wanted if name in matched.state}, strict=False)
        self.head_loaded, self.noted = with_head, noted

    def _make_room(self, classes: int, source: object) -> None:
        """A head of as many classes as the pre-trained one has, which is refused where another number is wanted."""
        if self.num_classes is None:
            self.reset_head(classes)
        elif self.num_classes != classes:
            raise CheckpointError(
                f"{source} was trained on {classes} classes, num_classes is {self.num_classes}. "
                f"Pass num_classes={classes} (or null) for its head, or load_head=false for a new one "
                "(pretrained_head=false where the weights came with the backbone)."
            )

    def save_assets(self, folder: Path) -> None:
        """Write what ``name`` must point to if the network is made again on another machine; here there is nothing."""

    def rename_key(self, name: str) -> str:
        """Translate an encoder name of another project's checkpoint; here it stays as it is."""
        return name

    def fingerprint(self) -> str:
        """Hash of everything that decides the output (weights, architecture, test transform), as 64 hexadecimal digits.

        Equal for equal networks, in any process and on any device.
        """
        digest = hashlib.sha256()
        identity = {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "architecture": self.architecture,
            "transform": repr(self.test_transform),
        }
        digest.update(json.dumps(identity, sort_keys=True, default=str).encode())
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
            f"{type(module).__name__} cannot serve as a backbone: its .encoder must be a module, got "
            f"{type(encoder).__name__}, and its .head an nn.Linear or None, got {type(head).__name__}. "
            "Name them so, or subclass rmd_plugin.backbones.Backbone."
        )
    backbone = Backbone(
        encoder,
        getattr(module, "feature_dim", 0) if head is None else head.in_features,
        train_transform=getattr(module, "train_transform", None),
        test_transform=getattr(module, "test_transform", None),
        architecture={"module": type(module).__qualname__},
    )
    backbone.head, backbone.head_loaded = head, head is not None
    return backbone
