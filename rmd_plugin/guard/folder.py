"""The folder of a guard: written whole or not at all, read without executing anything in it.

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
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import nn

from rmd_plugin import backbones
from rmd_plugin.backbones import Backbone
from rmd_plugin.backbones.base import as_backbone
from rmd_plugin.backbones.transforms import ImageTransform
from rmd_plugin.detectors.conformal import Calibrated
from rmd_plugin.files import name_file_in_errors
from rmd_plugin.guard import ABOUT, FORMAT, read_about
from rmd_plugin.report.run import collect_versions

if TYPE_CHECKING:
    from rmd_plugin.guard.guard import Guard

WEIGHTS, DETECTOR, ASSETS = "weights.safetensors", "detector.safetensors", "assets"
CARD, ONNX = "README.md", "model.onnx"
#: arguments of backbones that say where weights come from: a guard has its own
_SOURCES = ("checkpoint", "pretrained", "pretrained_head", "load_head", "frozen", "num_classes")


def check_target(folder: Path) -> None:
    """Refuse to write a guard over anything but a guard or an empty folder."""
    occupied = not folder.is_dir() or (any(folder.iterdir()) and not (folder / ABOUT).is_file())
    if folder.exists() and occupied:
        raise ValueError(f"{folder} is neither a guard nor an empty folder. Give another one.")


def save(guard: Guard, folder: Path, *, onnx: bool) -> Path:
    """Write a guard, see :meth:`rmd_plugin.Guard.save`."""
    from rmd_plugin.guard.export import export_onnx

    check_target(folder)
    aside, old = (folder.absolute().with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}") for _ in range(2))
    try:
        with name_file_in_errors(folder):
            (aside / ASSETS).mkdir(parents=True)
            # a copy of each: some networks share tensors, which the format refuses
            weights = {key: value.detach().cpu().clone() for key, value in guard.backbone.state_dict().items()}
            (aside / WEIGHTS).write_bytes(to_bytes(weights))
            guard.detector.save(aside / DETECTOR)
            guard.backbone.save_assets(aside / ASSETS)
            if not any((aside / ASSETS).iterdir()):
                (aside / ASSETS).rmdir()
            if onnx:
                export_onnx(guard, aside / ONNX)
            guard.about = _about(guard)
            (aside / CARD).write_text(_card(guard.about, onnx=onnx), encoding="utf-8")
            content = json.dumps(guard.about, indent=2, ensure_ascii=False, default=str)
            (aside / ABOUT).write_text(content + "\n", encoding="utf-8")
            if folder.exists():
                os.rename(folder, old)
            os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return folder


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


def _card(about: Mapping[str, Any], *, onnx: bool) -> str:
    """The model card as Markdown, from what ``guard.json`` says."""
    loader = PackageLoader("rmd_plugin.guard")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = lambda text: html.escape(" ".join(str(text).split())).replace("|", "&#124;")
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    template = environment.get_template("card.md")
    return template.render(about=about, onnx=onnx, listed=50, metrics=about.get("metrics") or {})


def load(folder: Path, backbone: nn.Module | None = None) -> dict[str, Any]:
    """The arguments of the guard in a folder, see :meth:`rmd_plugin.Guard.load`."""
    about = read_about(folder)
    preparation = about["preprocessing"]
    transform: Any = None if preparation is None else ImageTransform(**preparation)
    network = as_backbone(backbone) if backbone is not None else _make_backbone(folder, about, transform)
    try:
        network.load_state_dict(load_file(folder / WEIGHTS))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged or does not fit the network: {error}") from error
    network.head_loaded = True
    return {
        "backbone": network,
        "detector": Calibrated.load(folder / DETECTOR),
        "class_names": about["classes"],
        "transform": transform if preparation or about["kind"] == "features" else network.test_transform,
        "input_shape": about["input_shape"],
        "about": about,
        "threshold": about["threshold"],
    }


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
