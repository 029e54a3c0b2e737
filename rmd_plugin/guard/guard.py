"""A guard: a classifier with its preprocessing and a calibrated detector, in one folder. ``Guard.load(folder)(x)``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from pytorch_ood.api import FeaturesDetector, LogitsDetector
from torch import Tensor, nn
from typing_extensions import Self

from rmd_plugin.backbones.base import Backbone, as_backbone
from rmd_plugin.backbones.transforms import ImageTransform, Tokenise, exportable
from rmd_plugin.detectors.calibrated import Calibrated
from rmd_plugin.encoding.isolation import evaluating
from rmd_plugin.guard import folder as guard_folder
from rmd_plugin.guard.network import GuardNetwork, Verdicts
from rmd_plugin.pictures import read_picture, upright_rgb

Kind = Literal["images", "texts", "features"]

#: items that go through the network at once if a guard is called with many
_BATCH = 64


class Verdict(NamedTuple):
    """What a guard says: plain values of one item; tensors of shape (B,) and lists of many."""

    score: float | Tensor  #: higher is more OOD
    p_value: float | Tensor  #: small: unlike the data that the guard was calibrated on
    is_ood: bool | Tensor  #: whether the p-value is at most alpha
    class_name: str | list[str]  #: the classifier's answer
    nearest_class: str | list[str]  #: the class that the detector finds nearest


class Guard:
    """A classifier that says when it does not know: score, p-value, decision and class of anything that is shown to it.

    ``rmd-fit`` makes one and ``rmd-score`` uses it; in Python, ``Guard.load(folder)`` does. What it takes follows from
    how it was made: pictures (a path, a PIL image, an array (H, W, 3) of uint8, a tensor (3, H, W)), texts, or vectors
    of features. A list or a batch of these gives a verdict on each.

    Args:
        backbone: the network with its head, a :class:`rmd_plugin.backbones.Backbone` or a module with ``.encoder`` and
            ``.head``.
        detector: a detector on its features or logits, fitted and calibrated.
        class_names: names of the classes, as many as the head has.
        transform: raw picture or text to input of the network; None if inputs are tensors. One that cannot be written
            to a file is refused with the step that is at fault.
        input_shape: shape of one input, where there is no transform.
        about: what else is to stand in ``guard.json``: metrics, data, command.

    Example:
        >>> import torch
        >>> from rmd_plugin import RMD, Calibrated, Guard
        >>> from rmd_plugin.backbones import Identity
        >>> _ = torch.manual_seed(0)
        >>> z, y = torch.randn(1000, 4), torch.arange(1000) % 2
        >>> z[:, 0] += 6.0 * y
        >>> detector = Calibrated(RMD()).fit_features(z[:500], y[:500]).calibrate_features(z[500:])
        >>> guard = Guard(Identity(4, num_classes=2), detector, ["left", "right"], input_shape=(4,))
        >>> guard([3.0, 0.0, 0.0, 0.0]).is_ood
        True
    """

    def __init__(
        self,
        backbone: nn.Module,
        detector: Calibrated,
        class_names: Sequence[str],
        *,
        transform: Any = None,
        input_shape: Sequence[int] = (),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.backbone: Backbone = as_backbone(backbone)
        head = self.backbone.head
        if head is None or head.out_features != len(class_names):
            found = "no head" if head is None else f"a head for {head.out_features} classes"
            raise ValueError(f"the network has {found}, but there are {len(class_names)} class_names.")
        if not isinstance(detector.detector, (FeaturesDetector, LogitsDetector)):
            raise ValueError(
                f"a guard takes detectors on features or logits, which {type(detector.detector).__name__} is not. "
                "Take detector=fused, rmd, msp or energy."
            )
        if transform is None and not input_shape:
            raise ValueError("a guard without a transform needs the shape of its inputs: input_shape=(D,).")
        self.detector = detector
        self.class_names = [str(name) for name in class_names]
        self.transform: ImageTransform | Tokenise | None = None if transform is None else exportable(transform)
        self.input_shape = tuple(input_shape)
        self.about = dict(about or {})
        self.digest = ""  #: of the folder that it was saved to or loaded from: the identity of the guard
        self.device = torch.device("cpu")
        self.network = GuardNetwork(self.backbone.encoder, head, detector).requires_grad_(False)

    @property
    def kind(self) -> Kind:
        """What it takes: ``images``, ``texts`` or ``features``."""
        if self.transform is None:
            return "features"
        return "texts" if isinstance(self.transform, Tokenise) else "images"

    @property
    def alpha(self) -> float:
        """Share of in-distribution samples that may be flagged."""
        return self.detector.alpha

    @property
    def threshold(self) -> float | Tensor:
        """The score above which an item is flagged; with a calibration per class one for each, shape (K,)."""
        return self.threshold_at(self.alpha)

    def threshold_at(self, alpha: float) -> float | Tensor:
        """The same for another share of false alarms; ValueError if there were too few calibration samples for it."""
        return self.detector.threshold(alpha)

    def __repr__(self) -> str:
        return f"<Guard of {self.kind}: {len(self.class_names)} classes, {self.detector!r}>"

    def to(self, device: torch.device | str) -> Self:
        """Move the guard."""
        self.device = torch.device(device)
        self.network.to(self.device)
        self.detector.to(self.device)
        return self

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def prepare(self, item: Any) -> Tensor:
        """One raw item as the network takes it, without a batch axis.

        Raises:
            DataFormatError: if the file of a picture cannot be read.
            ValueError: if the item has another shape.
            TypeError: if it is something else.
        """
        if isinstance(self.transform, Tokenise):
            return self.transform(item)
        if self.transform is not None:
            return self.transform(_picture(item))
        values = torch.as_tensor(np.asarray(item) if not isinstance(item, Tensor) else item)
        if tuple(values.shape) != self.input_shape:
            raise ValueError(f"expected values of shape {self.input_shape}, got {tuple(values.shape)}.")
        like = next(self.backbone.encoder.parameters(), torch.empty(0))
        return values.to(like.dtype) if values.is_floating_point() else values

    def judge(self, batch: Tensor) -> Verdicts:
        """Verdicts on a batch of prepared items, stacked."""
        with torch.no_grad(), evaluating(self.network):
            return self.network(batch.to(self.device))

    def __call__(self, what: Any) -> Verdict:
        """Judge one item, a list of items, or a batch: an array or tensor with one axis more than an item has."""
        items = self._items(what)
        if items is None:
            verdicts = self.judge(self.prepare(what).unsqueeze(0))
            return Verdict(
                verdicts.score.item(),
                verdicts.p_value.item(),
                bool(verdicts.is_ood),
                self.class_names[int(verdicts.label)],
                self.class_names[int(verdicts.nearest)],
            )
        if not len(items):
            raise ValueError("there is nothing to judge: the list is empty.")
        chunks = (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
        parts = [self.judge(torch.stack([self.prepare(item) for item in chunk])) for chunk in chunks]
        found = Verdicts(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))
        names = ([self.class_names[k] for k in labels.tolist()] for labels in (found.label, found.nearest))
        return Verdict(found.score, found.p_value, found.is_ood, *names)

    def _items(self, what: Any) -> Any:
        """The items of a list or batch; None if it is one item."""
        arrays = isinstance(what, (np.ndarray, Tensor))
        if self.kind == "features":
            values = what if arrays else np.asarray(what)
            return values if values.ndim == len(self.input_shape) + 1 else None
        if arrays:
            return what if what.ndim == 4 else None
        return what if isinstance(what, Sequence) and not isinstance(what, (str, bytes)) else None

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], *, onnx: bool = True) -> Path:
        """Write the guard into a folder of its own, which appears whole or not at all.

        Args:
            folder: a guard that is there is replaced; any other folder that is not empty is refused.
            onnx: write ``model.onnx`` too, see :func:`rmd_plugin.guard.export.export_onnx`.

        Raises:
            ValueError: if it cannot be exported; the message says what is at fault.
        """
        return guard_folder.save(self, Path(folder), onnx=onnx)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, backbone: nn.Module | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Read what :meth:`save` wrote. Nothing in the folder is executed, and one that was altered is refused.

        Args:
            folder: of the guard.
            backbone: the network of a guard that was made with a class of one's own; its weights are taken from the
                folder.
            device: where it is to run.

        Raises:
            GuardError: a ValueError; if the folder is no guard, is not whole or was altered.
        """
        parts = guard_folder.load(Path(folder), backbone)
        guard = cls(**parts.made_of)
        guard.digest = parts.digest
        return guard.to(device)

    def to_module(self) -> nn.Module:
        """One graph from raw items to verdicts, for ``torch.export`` and ONNX.

        Pictures are uint8 of shape (B, H, W, 3), of any height and width; texts are token ids of shape (B, L); features
        are as they are.

        Raises:
            ValueError: if a part of it cannot be exported; the message names it.
        """
        from rmd_plugin.guard.export import GuardGraph

        return GuardGraph(self)


def _picture(item: Any) -> Image.Image | Tensor:
    """A picture as the transform takes it: RGB, or a tensor (3, H, W) of uint8 or of floats in [0, 1]."""
    if isinstance(item, (str, os.PathLike)):
        return read_picture(item)
    if isinstance(item, np.ndarray):
        if item.dtype != np.uint8 or not (item.ndim == 2 or (item.ndim == 3 and item.shape[2] in (1, 3))):
            raise ValueError(
                f"expected a picture of uint8 and shape (H, W, 3), (H, W, 1) or (H, W), got {item.dtype} of shape "
                f"{item.shape}."
            )
        item = Image.fromarray(np.squeeze(item, 2) if item.ndim == 3 and item.shape[2] == 1 else item)
    return upright_rgb(item) if isinstance(item, Image.Image) else item
