"""A guard: a classifier with its preprocessing and a calibrated detector, in one folder. ``Guard.load(folder)(x)``.

The folder is written whole or not at all, and read without executing anything in it:

========================  ==================================================================================
``weights.safetensors``   encoder and head
``detector.safetensors``  the fitted detector and its calibration
``guard.json``            classes, preprocessing, network, alpha, the threshold that decides, metrics, versions
``README.md``             what the guard is, how it is used, what it does not promise
``model.onnx``            all of it in one graph
``assets/``               config and tokenizer of a network that has such
========================  ==================================================================================
"""

from __future__ import annotations

import html
import inspect
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import safetensors.torch
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from pytorch_ood.api import FeaturesDetector, LogitsDetector
from torch import Tensor, nn

from rmd_plugin import backbones
from rmd_plugin.backbones.base import Backbone, Transform, as_backbone
from rmd_plugin.backbones.transforms import ImageTransform, Tokenise
from rmd_plugin.detectors.conformal import Calibrated
from rmd_plugin.detectors.drift import DriftAlarm
from rmd_plugin.detectors.moments import pool_features, widened
from rmd_plugin.files import name_file_in_errors, read_picture, require, upright_rgb
from rmd_plugin.guard import ABOUT, FORMAT, read_about
from rmd_plugin.report.run import collect_versions

Kind = Literal["images", "texts", "features"]
Threshold = float | Tensor | Sequence[float]

WEIGHTS, DETECTOR, ASSETS = "weights.safetensors", "detector.safetensors", "assets"
CARD, ONNX = "README.md", "model.onnx"
#: arguments of backbones that say where weights come from: a guard has its own
_SOURCES = ("checkpoint", "pretrained", "pretrained_head", "load_head", "frozen", "num_classes")
#: what the hub calls them
_TASKS = {"images": "image-classification", "texts": "text-classification", "features": "tabular-classification"}
#: items that go through the network at once if a guard is called with many
_BATCH = 64


class Verdict(NamedTuple):
    """What a guard says: plain values of one item; tensors of shape (B,) and lists of many."""

    score: float | Tensor  #: higher is more OOD
    p_value: float | Tensor  #: small: unlike the data that the guard was calibrated on
    is_ood: bool | Tensor  #: whether the p-value is at most alpha
    class_name: str | list[str]  #: the classifier's answer
    nearest_class: str | list[str]  #: the class that the detector finds nearest


class Verdicts(NamedTuple):
    """What a guard says of a batch; each of shape (B,) but the logits."""

    logits: Tensor  #: shape (B, K)
    label: Tensor  #: the predicted class, of the largest logit
    nearest: Tensor  #: the class that the detector finds nearest; the predicted one for detectors without classes
    score: Tensor  #: higher is more OOD
    p_value: Tensor  #: float64
    is_ood: Tensor  #: bool: whether the score lies above the threshold


class GuardNetwork(nn.Module):
    """Encoder, head and calibrated detector in one module: prepared inputs to verdicts.

    Args:
        encoder: maps prepared inputs to features.
        head: maps features to logits.
        detector: fitted on such features, or on such logits, and calibrated.
        threshold: the score above which an item is OOD; one for each of the K classes of a calibration per class; None
            where the detector itself decides, by its folds.
    """

    threshold: Tensor | None

    def __init__(self, encoder: nn.Module, head: nn.Linear, detector: Calibrated, threshold: Threshold | None) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head
        self.on_logits = isinstance(detector.detector, LogitsDetector)
        #: whether the scores are a graph; those of some detectors of the framework are computed in Python
        self.exportable = self.on_logits or hasattr(detector.detector, "to_module")
        self.decision: Any = detector.to_module() if self.exportable else detector
        limit = None if threshold is None else torch.as_tensor(threshold, dtype=torch.float64)
        self.register_buffer("threshold", limit)

    def forward(self, batch: Tensor) -> Verdicts:
        """Verdicts on a batch of prepared inputs."""
        features = widened(pool_features(self.encoder(batch)))
        logits = self.head(features.to(self.head.weight.dtype))
        label = logits.argmax(1)
        score, nearest, p_value, is_ood = self.decision.judge(logits if self.on_logits else features)
        nearest = label if nearest is None else nearest
        if self.threshold is not None:
            is_ood = ~(score.double() <= (self.threshold[nearest] if self.threshold.ndim else self.threshold))
        return Verdicts(logits, label, nearest, score, p_value, is_ood)


class _ChannelsFirst(nn.Module):
    """Pictures (B, H, W, 3) to (B, 3, H, W)."""

    def forward(self, items: Tensor) -> Tensor:
        return items.permute(0, 3, 1, 2)


class Guard:
    """A classifier with an OOD detector: score, p-value, decision and class of each input.

    ``rmd-fit`` writes one, ``rmd-score`` and ``Guard.load(folder)`` use it. Depending on the data that it was fitted
    on, inputs are images (a path, a PIL image, an array (H, W, 3) of uint8, a tensor (3, H, W)), texts, or vectors of
    features. A list or a batch of inputs gives one verdict each.

    Args:
        backbone: the network with its head, a :class:`rmd_plugin.backbones.Backbone` or a module with ``.encoder`` and
            ``.head``.
        detector: a detector on its features or logits, fitted and calibrated.
        class_names: names of the classes, as many as the head has.
        transform: raw picture or text to input of the network; None if inputs are tensors.
        input_shape: shape of one input, where there is no transform.
        about: further entries of ``guard.json``: metrics, data, command.
        threshold: the score above which an item is flagged; by default that of the detector's alpha.

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
        threshold: Threshold | None = None,
    ) -> None:
        self.backbone: Backbone = as_backbone(backbone)
        head = self.backbone.head
        if head is None or head.out_features != len(class_names):
            size = "no head" if head is None else f"a head for {head.out_features} classes"
            raise ValueError(f"the network has {size}, but there are {len(class_names)} class_names.")
        if not isinstance(detector.detector, (FeaturesDetector, LogitsDetector)):
            name = type(detector.detector).__name__
            raise ValueError(f"a guard takes detectors on features or logits, which {name} is not: detector=fused.")
        if transform is None and not input_shape:
            raise ValueError("a guard without a transform needs the shape of its inputs: input_shape=(D,).")
        self.detector = detector
        self.class_names = [str(name) for name in class_names]
        self.transform: Transform | None = transform
        self.input_shape = tuple(input_shape)
        self.about = dict(about or {})
        self.device = torch.device("cpu")
        self.drift: DriftAlarm | None = None
        if threshold is None and not detector.fold_detectors:
            threshold = detector.threshold()  # refuses one that is not calibrated
        self.network = GuardNetwork(self.backbone.encoder, head, detector, threshold).requires_grad_(False)

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
    def threshold(self) -> float | list[float] | None:
        """The score above which an item is flagged; with a calibration per class one for each of the K classes."""
        return None if self.network.threshold is None else self.network.threshold.tolist()

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
        values = item if isinstance(item, Tensor) else torch.tensor(np.asarray(item))
        if tuple(values.shape) != self.input_shape:
            raise ValueError(f"expected values of shape {self.input_shape}, got {tuple(values.shape)}.")
        like = next(self.backbone.encoder.parameters(), torch.empty(0))
        return values.to(like.dtype) if values.is_floating_point() else values

    def judge(self, batch: Tensor) -> Verdicts:
        """Verdicts on a batch of prepared items, stacked."""
        with torch.no_grad():
            verdicts: Verdicts = self.network.eval()(batch.to(self.device))
        if self.drift is not None:
            self.drift.update(verdicts.score.masked_fill(verdicts.score.isnan(), torch.inf))
        return verdicts

    def watch(self, level: float = 0.01, every: int | None = None, seed: int = 0) -> DriftAlarm:
        """An alarm that every verdict from now on updates: are the items still like those of the calibration?

        Args:
            level: chance of ever raising a false alarm.
            every: in place of it, the mean number of items between false alarms. See :class:`rmd_plugin.DriftAlarm`.
            seed: draws the order among equal scores.
        """
        self.drift = self.detector.drift_alarm(level, every, seed)
        return self.drift

    def __call__(self, items: Any) -> Verdict:
        """Judge one item, a list of items, or a batch: an array or tensor with one axis more than an item has."""
        if not self._is_batch(items):
            columns: Any = self([items])
            return Verdict(*(column[0] if isinstance(column, list) else column[0].item() for column in columns))
        if not len(items):
            raise ValueError("there is nothing to judge: the list is empty.")
        chunks = (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
        judged = [self.judge(torch.stack([self.prepare(item) for item in chunk])) for chunk in chunks]
        verdicts = Verdicts(*(torch.cat(column).cpu() for column in zip(*judged, strict=True)))
        names = ([self.class_names[k] for k in labels.tolist()] for labels in (verdicts.label, verdicts.nearest))
        return Verdict(verdicts.score, verdicts.p_value, verdicts.is_ood, *names)

    def _is_batch(self, items: Any) -> bool:
        if self.kind == "features" and not isinstance(items, (np.ndarray, Tensor)):
            items = np.asarray(items)
        if isinstance(items, (np.ndarray, Tensor)):
            return items.ndim == (len(self.input_shape) + 1 if self.kind == "features" else 4)
        return isinstance(items, Sequence) and not isinstance(items, (str, bytes))

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], *, onnx: bool = True) -> Path:
        """Write the guard into a folder of its own, which appears whole or not at all.

        Args:
            folder: a guard that is there is replaced; any other folder that is not empty is refused.
            onnx: write ``model.onnx`` too, see :func:`rmd_plugin.guard.export.export_onnx`.

        Raises:
            ValueError: if it cannot be exported; the message says what is at fault.
        """
        from rmd_plugin.guard.export import export_onnx

        folder = Path(folder)
        check_target(folder)
        aside, old = (folder.absolute().with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}") for _ in range(2))
        try:
            with name_file_in_errors(folder):
                (aside / ASSETS).mkdir(parents=True)
                # a copy of each: some networks share tensors, which the format refuses
                weights = {key: value.detach().cpu().clone() for key, value in self.backbone.state_dict().items()}
                (aside / WEIGHTS).write_bytes(safetensors.torch.save(weights))
                self.detector.save(aside / DETECTOR)
                self.backbone.save_assets(aside / ASSETS)
                if not any((aside / ASSETS).iterdir()):
                    (aside / ASSETS).rmdir()
                onnx_input = export_onnx(self, aside / ONNX) if onnx else None
                self.about = _about(self)
                (aside / CARD).write_text(_card(self.about, onnx_input), encoding="utf-8")
                content = json.dumps(self.about, indent=2, ensure_ascii=False, default=str)
                (aside / ABOUT).write_text(content + "\n", encoding="utf-8")
                if folder.exists():
                    os.rename(folder, old)
                os.rename(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        return folder

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], *, backbone: nn.Module | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Read what :meth:`save` wrote; nothing in the folder is executed. ``threshold`` in ``guard.json`` decides.

        Args:
            folder: of the guard.
            backbone: the network of a guard whose network class is not of this package; its weights are taken from the
                folder.
            device: where it is to run.

        Raises:
            ValueError: if the folder is no guard, or is damaged.
        """
        folder = Path(folder)
        about = read_about(folder)
        preparation = about["preprocessing"]
        transform: Any = None if preparation is None else ImageTransform(**preparation)
        network = as_backbone(backbone) if backbone is not None else _make_backbone(folder, about, transform)
        try:
            network.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
        except (safetensors.SafetensorError, RuntimeError) as error:
            raise ValueError(f"{folder / WEIGHTS} is damaged or does not fit the network: {error}") from error
        network.head_loaded = True
        if transform is None and about["kind"] != "features":
            transform = network.test_transform
        shape, threshold = about["input_shape"], about["threshold"]
        options = {"transform": transform, "input_shape": shape, "about": about, "threshold": threshold}
        return cls(network, Calibrated.load(folder / DETECTOR), about["classes"], **options).to(device)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        onnx: bool = True,
        license: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        **options: Any,
    ) -> str:
        """Upload the folder of the guard to the Hugging Face hub (extra ``hf``), with a model card.

        Args:
            repo_id: ``USER/NAME``; created if it does not exist. Files of an earlier guard are replaced.
            onnx: with ``model.onnx``, see :meth:`save`.
            license: of the weights, as the hub names it, for example ``apache-2.0``.
            private: whether a new repository is private; None is the default of the account.
            token: by default that of ``hf auth login``.
            options: of ``huggingface_hub.HfApi.upload_folder``, for example ``commit_message`` or ``create_pr=True``.

        Returns:
            Address of the commit, or of the pull request.
        """
        hub = require("huggingface_hub", "hf", needed_by="push_to_hub")
        api = hub.HfApi(token=token)
        repo_id = str(api.create_repo(repo_id, private=private, exist_ok=True).repo_id)  # with the user's name in front
        metadata = hub.ModelCardData(
            library_name="rmd-plugin",
            pipeline_tag=_TASKS[self.kind],
            tags=["out-of-distribution-detection", "rmd-plugin", "pytorch"],
            license=license,
        )
        with TemporaryDirectory() as folder:
            path = self.save(Path(folder) / "guard", onnx=onnx)
            card = (path / CARD).read_text(encoding="utf-8")
            card = card.replace('Guard.load("FOLDER_OF_THIS_GUARD")', f'Guard.from_pretrained("{repo_id}")')
            (path / CARD).write_text(f"---\n{metadata.to_yaml()}\n---\n\n{card}", encoding="utf-8")
            # a file that an earlier guard had, such as model.onnx, would not belong to this one
            options = {"commit_message": "Upload a guard of rmd-plugin", "delete_patterns": "*", **options}
            commit = api.upload_folder(repo_id=repo_id, folder_path=path, **options)
        return str(commit.pr_url or commit.commit_url)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        backbone: nn.Module | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Self:
        """Load a guard from a folder, or from a repository of the Hugging Face hub (extra ``hf``).

        Nothing in it is executed, see :meth:`load`; pin what you deploy with a commit as ``revision``.

        Args:
            name: a folder, or ``USER/NAME``.
            backbone: as in :meth:`load`.
            device: where it is to run.
            options: of ``huggingface_hub.snapshot_download``, for example ``revision`` (branch, tag or commit),
                ``token``, ``cache_dir`` or ``local_files_only=True``.
        """
        if not Path(name).is_dir():
            hub = require("huggingface_hub", "hf", needed_by="from_pretrained")
            name = hub.snapshot_download(os.fspath(name), **options)
        return cls.load(name, backbone=backbone, device=device)

    def to_module(self) -> nn.Module:
        """One graph from raw items to verdicts, for ``torch.export`` and ONNX.

        Pictures are uint8 of shape (B, H, W, 3), of any height and width; texts are token ids of shape (B, L); features
        are as they are.

        Raises:
            ValueError: if a part of it cannot be exported; the message names it.
        """
        if not self.network.exportable:
            name = type(self.detector.detector).__name__
            raise ValueError(
                f"{name} cannot be exported: its scores are computed in Python. Use detector=fused, rmd, msp or "
                "energy, or write the guard without model.onnx (onnx=false)."
            )
        if not isinstance(self.transform, ImageTransform):
            return self.network.eval()
        return nn.Sequential(_ChannelsFirst(), self.transform.to_module(), self.network).eval()


def _picture(item: Any) -> Image.Image | Tensor:
    """A picture as the transform takes it: RGB, or a tensor (3, H, W) of uint8 or of floats in [0, 1]."""
    if isinstance(item, (str, os.PathLike)):
        return read_picture(item)
    if isinstance(item, np.ndarray):
        item = Image.fromarray(item[..., 0] if item.ndim == 3 and item.shape[2] == 1 else item)
    return upright_rgb(item) if isinstance(item, Image.Image) else item


# -- the folder -------------------------------------------------------------------------------------------------------


def check_target(folder: Path) -> None:
    """Refuse to write a guard over anything but a guard or an empty folder."""
    occupied = not folder.is_dir() or (any(folder.iterdir()) and not (folder / ABOUT).is_file())
    if folder.exists() and occupied:
        raise ValueError(f"{folder} is no guard and not empty. Give another folder.")


def _about(guard: Guard) -> dict[str, Any]:
    """What ``guard.json`` says."""
    detector, calibration, backbone = guard.detector.detector, guard.detector.calibration, guard.backbone
    options = ", ".join(f"{name}={value!r}" for name, value in getattr(detector, "options", {}).items())
    scores = calibration.scores.cpu().numpy() if calibration is not None else np.empty(0)
    counts, edges = np.histogram(scores[np.isfinite(scores)], bins=40)
    kind = type(backbone)
    if getattr(backbones, kind.__name__, None) is not kind or kind is Backbone:
        network: dict[str, Any] = {"own": f"{kind.__module__}.{kind.__qualname__}"}
    else:
        init_options = {name: v for name, v in backbone.init_options.items() if name not in _SOURCES and v is not None}
        if "transform" in init_options:  # it stands under preprocessing, as one of ours
            init_options["transform"] = True
        network = {"class": kind.__name__, "options": init_options}
    about: dict[str, Any] = {
        "format": FORMAT,
        "kind": guard.kind,
        "classes": guard.class_names,
        "alpha": guard.alpha,
        "threshold": guard.threshold,
        "calibration_samples": len(scores),
        "validation_scores": {"edges": edges.tolist(), "counts": counts.tolist()},
        "detector": f"{type(detector).__name__}({options})",
        "backbone": network,
        "preprocessing": asdict(guard.transform) if isinstance(guard.transform, ImageTransform) else None,
        "input_shape": list(guard.input_shape),
    }
    about |= {key: value for key, value in guard.about.items() if key not in about}
    return about | {"made": datetime.now(UTC).isoformat(timespec="seconds"), "versions": collect_versions()}


def _card(about: Mapping[str, Any], onnx_input: str | None) -> str:
    """The model card as Markdown, from what ``guard.json`` says and the name of the input of ``model.onnx``."""
    loader = PackageLoader("rmd_plugin.guard")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = lambda text: html.escape(" ".join(str(text).split())).replace("|", "&#124;")
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    template = environment.get_template("card.md")
    return template.render(about=about, onnx_input=onnx_input, listed=50, metrics=about.get("metrics") or {})


def _make_backbone(folder: Path, about: Mapping[str, Any], transform: Any) -> Backbone:
    """A network of ours from its class and options; one of the user's own is named only."""
    name, options = about["backbone"].get("class"), dict(about["backbone"].get("options", {}))
    if name is None or ("transform" in options and transform is None):
        raise ValueError(
            f"{folder} holds a network or preprocessing of its maker's own ({name or about['backbone']['own']}), which "
            "is not made from a file. In Python: Guard.load(folder, backbone=...) with that network."
        )
    kind = getattr(backbones, name) if name in backbones.__all__ else None
    if not isinstance(kind, type) or not issubclass(kind, Backbone):
        raise ValueError(f"{folder} names {name!r}, which is no backbone of this version.")
    if (folder / ASSETS).is_dir():
        options["name"] = str(folder / ASSETS)
    if "transform" in options:
        options["transform"] = transform
    if "pretrained" in inspect.signature(kind).parameters:
        options["pretrained"] = False
    network: Backbone = kind(num_classes=len(about["classes"]), **options)
    return network
