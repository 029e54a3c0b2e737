"""The folder of a guard: what is written, and how it is read back without trusting it.

====================  ===============================================================================================
``weights.safetensors``  encoder and head
``detector.safetensors`` the fitted detector and its calibration
``guard.json``           classes, preprocessing, network, alpha, threshold, metrics, versions, a hash of every file
``README.md``            what the guard is, how it is used, what it does not promise
``model.onnx``           all of it in one graph
``assets/``              config and tokenizer of a network that has such
====================  ===============================================================================================
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pytorch_ood.api import Detector
from safetensors import torch as safetensors
from torch import Tensor, nn

from rmd_plugin import backbones
from rmd_plugin.backbones.base import Backbone, as_backbone
from rmd_plugin.backbones.transforms import ImageTransform
from rmd_plugin.detectors.calibrated import Calibrated
from rmd_plugin.detectors.conformal import Calibration
from rmd_plugin.guard.card import model_card
from rmd_plugin.report.provenance import collect_versions
from rmd_plugin.untrusted import DataFormatError, one_line, read_mapping

if TYPE_CHECKING:
    from rmd_plugin.guard.guard import Guard

FORMAT = 1
ABOUT, WEIGHTS, DETECTOR, CARD, ONNX, ASSETS = (
    "guard.json", "weights.safetensors", "detector.safetensors", "README.md", "model.onnx", "assets",
)  # fmt: skip
_MAX_ABOUT = 1 << 24
_BINS = 40
#: names of files as they stand in ``guard.json``; no name leads out of the folder
_NAME = re.compile(r"(?:assets/)?[A-Za-z0-9_][\w.-]*", flags=re.ASCII)
_REMEDY = "Take a whole copy of the folder, or make it again with rmd-fit."
#: arguments of backbones that say where weights come from: a guard has its own
_SOURCES = ("checkpoint", "pretrained", "pretrained_head", "load_head", "frozen", "num_classes")


class GuardError(ValueError):
    """A folder is no guard, or not the one that was written; the message names it, the fault and the remedy."""


class Loaded(NamedTuple):
    """What a folder holds."""

    made_of: dict[str, Any]  #: arguments of the guard
    digest: str


# -- writing ----------------------------------------------------------------------------------------------------------


def check_target(folder: Path) -> None:
    """Refuse to write a guard over anything but a guard or an empty folder."""
    if folder.is_dir() and not (folder / ABOUT).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and no guard. Give another folder.")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Give the name of a folder.")


def save(guard: Guard, folder: Path, *, onnx: bool) -> Path:
    """Write a guard, see :meth:`rmd_plugin.Guard.save`."""
    check_target(folder)
    if onnx:
        from rmd_plugin.guard.export import export_onnx, require_onnx

        require_onnx()
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        aside.chmod(0o777 & ~_umask())
        # a copy of each: some networks share tensors, which the format refuses
        weights = {k: v.detach().cpu().clone() for k, v in guard.backbone.state_dict().items()}
        (aside / WEIGHTS).write_bytes(safetensors.save(weights))
        guard.detector.save(aside / DETECTOR)
        (aside / ASSETS).mkdir()
        guard.backbone.save_assets(aside / ASSETS)
        if not any((aside / ASSETS).iterdir()):
            (aside / ASSETS).rmdir()
        if onnx:
            export_onnx(guard, aside / ONNX)
        about = _about(guard)
        (aside / CARD).write_text(model_card(about, onnx=onnx), encoding="utf-8")
        names = sorted(path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file())
        about["files"] = {
            name: {"bytes": (aside / name).stat().st_size, "sha256": _hash(aside / name)} for name in names
        }
        about["checksum"] = guard.digest = _checksum(about)
        (aside / ABOUT).write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _swap(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    guard.about = about
    return folder


def _about(guard: Guard) -> dict[str, Any]:
    """What ``guard.json`` says, but for the files."""
    threshold = guard.threshold
    return _plain({
        "format": FORMAT,
        "kind": guard.kind,
        "classes": guard.class_names,
        "alpha": guard.alpha,
        "threshold": threshold.tolist() if isinstance(threshold, Tensor) else threshold,
        "calibration_samples": len(guard.detector.calibration or ()),
        "validation_scores": _histogram(guard.detector.calibration),
        "detector": _detector_in_words(guard.detector.detector),
        "backbone": _describe(guard.backbone),
        "preprocessing": asdict(guard.transform) if isinstance(guard.transform, ImageTransform) else None,
        "input_shape": list(guard.input_shape),
        **{key: value for key, value in guard.about.items() if key not in ("files", "checksum", "versions", "made")},
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": collect_versions(),
    })  # fmt: skip


def _histogram(calibration: Calibration | None) -> dict[str, list[float]] | None:
    """How the scores of the calibration samples are spread, for whoever draws new ones beside them."""
    if calibration is None:
        return None
    finite = calibration.scores.isfinite()
    scores, weights = calibration.scores[finite].cpu().numpy(), calibration.weights[finite].cpu().numpy()
    if not len(scores):
        return None
    counts, edges = np.histogram(scores, bins=_BINS, weights=weights)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _detector_in_words(detector: Detector) -> str:
    options = getattr(detector, "options", {})
    return f"{type(detector).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def _describe(backbone: Backbone) -> dict[str, Any]:
    """Class and options, from which the network is made again; one of the user's own is named only."""
    kind = type(backbone)
    if getattr(backbones, kind.__name__, None) is not kind or kind is Backbone:
        return {"own": f"{kind.__module__}.{kind.__qualname__}"}
    options = {k: v for k, v in backbone.made_with.items() if k not in _SOURCES and v is not None}
    if "transform" in options:  # it stands under preprocessing, as one of ours
        options["transform"] = True
    return {"class": kind.__name__, "options": options}


def _plain(value: Any) -> Any:
    """The same for JSON, which has neither NaN nor tuples nor paths."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _swap(made: Path, folder: Path) -> None:
    """Put a finished folder in the place of an old one."""
    if not folder.exists():
        os.rename(made, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    os.rename(folder, old / "old")
    os.rename(made, folder)
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# -- reading ----------------------------------------------------------------------------------------------------------


def load(folder: Path, backbone: nn.Module | None = None) -> Loaded:
    """Read and check a folder, see :meth:`rmd_plugin.Guard.load`."""
    about = read_about(folder)
    _check_files(folder, about["files"])
    try:
        preparation = about["preprocessing"]
        transform: Any = ImageTransform(**preparation) if preparation is not None else None
        network = as_backbone(backbone) if backbone is not None else _make_backbone(folder, about, transform)
        _load_weights(network, safetensors.load_file(folder / WEIGHTS), folder)
        detector = Calibrated.load(folder / DETECTOR)
        if about["kind"] == "texts":
            transform = network.test_transform
        made_of = {"transform": transform, "input_shape": about["input_shape"], "about": about}
    except GuardError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        # it passed its checksum: another version wrote it, or somebody made one
        raise GuardError(f"{folder} cannot be used: {_sentence(error)} {_REMEDY}") from error
    return Loaded(
        {"backbone": network, "detector": detector, "class_names": about["classes"], **made_of}, about["checksum"]
    )


def read_about(folder: Path) -> dict[str, Any]:
    """The content of ``guard.json``, which must be as it was written."""
    path = folder / ABOUT
    if not path.is_file():
        raise GuardError(f"{folder} is no guard: there is no {ABOUT} in it. Give a folder that rmd-fit has written.")
    try:
        about = read_mapping(path, _MAX_ABOUT)
    except DataFormatError as error:
        raise GuardError(f"{error}. {_REMEDY}") from error
    if about.get("format") != FORMAT:
        raise GuardError(
            f"{path} has format {about.get('format')!r}, expected {FORMAT}. Was it written by a newer version?"
        )
    if about.get("checksum") != _checksum(about) or not isinstance(about.get("files"), dict):
        raise GuardError(f"{path} was altered: its checksum does not fit its content. {_REMEDY}")
    return about


def _check_files(folder: Path, files: Mapping[str, Any]) -> None:
    for name in (WEIGHTS, DETECTOR):
        if name not in files:
            raise GuardError(f"{folder / ABOUT} names no {name}. {_REMEDY}")
    for name, facts in files.items():
        path = folder / name
        if not _NAME.fullmatch(name) or path.is_symlink() or path.parent.is_symlink():
            raise GuardError(f"{folder / ABOUT} names {one_line(name)!r}, which leads out of the folder: not opened.")
        if not path.is_file():
            raise GuardError(f"{path} is missing. {_REMEDY}")
        if path.stat().st_size != facts["bytes"] or _hash(path) != facts["sha256"]:
            raise GuardError(f"{path} was altered: its hash is not the one in {ABOUT}. {_REMEDY}")
    if (folder / ASSETS).is_dir():
        found = {f"{ASSETS}/{path.name}" for path in (folder / ASSETS).iterdir()}
        if extra := sorted(found - files.keys()):  # the libraries that read this folder look for files by themselves
            raise GuardError(f"{folder / extra[0]} was added to the guard. {_REMEDY}")


def _make_backbone(folder: Path, about: Mapping[str, Any], transform: ImageTransform | None) -> Backbone:
    described = about["backbone"]
    name = described.get("class")
    if name is None:
        raise GuardError(
            f"{folder} holds a network of its maker's own, {one_line(described.get('own'))}, which is not made from a "
            "file. In Python: Guard.load(folder, backbone=...) with that network."
        )
    kind = getattr(backbones, str(name), None) if name in backbones.__all__ else None
    if not isinstance(kind, type) or not issubclass(kind, Backbone):
        raise GuardError(f"{folder} names {one_line(name)!r}, which is no backbone of this version. {_REMEDY}")
    options = {key: value for key, value in described["options"].items() if key not in _SOURCES}
    if (folder / ASSETS).is_dir():
        options["name"] = str(folder / ASSETS)
    if "transform" in options:
        options["transform"] = transform
    if "pretrained" in inspect.signature(kind).parameters:
        options["pretrained"] = False
    return kind(num_classes=len(about["classes"]), **options)


def _load_weights(network: Backbone, weights: Mapping[str, Tensor], folder: Path) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise GuardError(
            f"the weights of {folder} do not fit the network ({one_line(str(error).splitlines()[-1])}). Was it made "
            "with another version of its library? Make it again with rmd-fit."
        ) from error
    network.head_loaded = True


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _checksum(about: Mapping[str, Any]) -> str:
    """Hash of all that a guard is, in any order and layout of the file."""
    content = {key: value for key, value in about.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sentence(error: BaseException) -> str:
    return one_line(error).rstrip(".") + "."
