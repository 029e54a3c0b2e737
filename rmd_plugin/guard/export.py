"""A guard as one graph, from raw pictures, token ids or features to verdicts: for ``torch.export`` and ONNX."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rmd_plugin.backbones.transforms import ImageTransform
from rmd_plugin.extras import require
from rmd_plugin.guard.network import Verdicts, _InPython

if TYPE_CHECKING:
    from rmd_plugin.guard.guard import Guard

#: what the file calls its input, by the kind of guard, and its outputs
INPUTS = {"images": "images", "texts": "ids", "features": "features"}
OUTPUTS = ("logits", "class", "nearest_class", "score", "p_value", "is_ood")
#: by how much the numbers of the file may differ from those in Python, as a share of the largest one
_AGREEMENT = 1e-3


class GuardGraph(nn.Module):
    """Raw items -> verdicts, without what only runs in Python. See :meth:`rmd_plugin.Guard.to_module`."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        if isinstance(guard.network.decision, _InPython):
            name = type(guard.detector.detector).__name__
            raise ValueError(
                f"{name} cannot be exported: its scores are computed in Python. Use detector=fused, rmd, msp or "
                "energy, or write the guard without model.onnx (onnx=false)."
            )
        self.pictures = guard.kind == "images"
        self.prepare = guard.transform.to_module() if isinstance(guard.transform, ImageTransform) else nn.Identity()
        self.network = guard.network
        self.eval()

    def forward(self, items: Tensor) -> Verdicts:
        """Verdicts on pictures (B, H, W, 3) of uint8, token ids (B, L), or features."""
        verdicts: Verdicts = self.network(self.prepare(items.permute(0, 3, 1, 2) if self.pictures else items))
        return verdicts


def export_program(guard: Guard) -> torch.export.ExportedProgram:
    """The graph of a guard as a program of ``torch.export``, for batches of any size and pictures of any size.

    Raises:
        ValueError: if a part of it cannot be exported; the message names it.
    """
    graph, example, axes = GuardGraph(guard), *_example(guard)
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(graph, (example,), dynamic_shapes={"items": axes}, strict=False)
    except Exception as error:  # of every kind, by the part of the network that it stumbles over
        raise _refused(guard, error) from error


def export_onnx(guard: Guard, path: Path) -> None:
    """Write the graph of a guard as an ONNX file, and compare what it gives with the guard itself.

    The input is ``images``, ``ids`` or ``features``; the outputs are ``logits``, ``class``, ``nearest_class``,
    ``score``, ``p_value`` and ``is_ood``. The metadata of the file names the classes, alpha and the threshold.

    Raises:
        ValueError: if a part of it cannot be exported, or the file gives other numbers.
    """
    require_onnx()
    program, (example, axes) = export_program(guard), _example(guard)
    try:
        with _quiet():
            made: Any = torch.onnx.export(
                program, input_names=[INPUTS[guard.kind]], output_names=list(OUTPUTS), dynamo=True, verbose=False
            )
    except Exception as error:
        raise _refused(guard, error) from error
    # the exporter's own names of the axes say nothing
    for value, names in (
        (made.model.graph.inputs[0], axes),
        *((out, {0: "batch"}) for out in made.model.graph.outputs),
    ):
        for axis, name in names.items():
            value.shape[axis] = getattr(name, "__name__", name)
    threshold = guard.threshold
    facts = {"classes": guard.class_names, "alpha": guard.alpha}
    facts["threshold"] = threshold.tolist() if isinstance(threshold, Tensor) else threshold
    made.model.metadata_props.update({name: json.dumps(value) for name, value in facts.items()})
    made.save(str(path))
    _check(guard, path, example)


def _check(guard: Guard, path: Path, example: Tensor) -> None:
    """Refuse a file that does not give what the guard gives."""
    runtime = require("onnxruntime", "export", needed_by="model.onnx (or onnx=false)")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = dict(zip(OUTPUTS, session.run(None, {INPUTS[guard.kind]: example.numpy()}), strict=True))
    with torch.no_grad():
        expected: Verdicts = GuardGraph(guard)(example)
    for name, values in (("logits", expected.logits), ("score", expected.score)):
        size = float(values.abs().max()) or 1.0
        if not np.allclose(found[name], values.numpy(), rtol=_AGREEMENT, atol=_AGREEMENT * size, equal_nan=True):
            apart = float(np.abs(found[name] - values.numpy()).max())
            raise _refused(guard, ValueError(f"the {name} of the file differ by {apart:.2g} from those in Python"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters tell about themselves."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript", "torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def require_onnx() -> None:
    """Refuse in one sentence if the packages are missing that write ONNX."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "export", needed_by="model.onnx (or onnx=false)")


def _example(guard: Guard) -> tuple[Tensor, dict[int, Any]]:
    """Items to trace the graph with, and their axes that may have any length."""
    dims = torch.export.Dim
    if guard.kind == "images":
        # different numbers, so that the exporter takes none for another
        shape, axes = (3, 67, 91, 3), {0: dims("batch"), 1: dims("height"), 2: dims("width")}
        return torch.randint(0, 256, shape, dtype=torch.uint8), axes
    if guard.kind == "texts":
        longest = guard.transform.max_length  # type: ignore[union-attr]
        ids = torch.stack([guard.prepare(text) for text in ("one text", "another text, of more words", "a third")])
        # contiguous: the exporter takes the stride of a part for a length that there may not be
        return ids[:, : min(16, longest)].contiguous(), {0: dims("batch"), 1: dims("length", max=longest)}
    like = next(guard.backbone.encoder.parameters(), torch.empty(0))
    return torch.zeros(3, *guard.input_shape, dtype=like.dtype), {0: dims("batch")}


def _refused(guard: Guard, error: Exception) -> ValueError:
    reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[0].split())
    return ValueError(
        f"{type(guard.backbone).__name__} with {type(guard.detector.detector).__name__} cannot be exported: {reason}. "
        "Choose another network or detector, or write the guard without model.onnx (onnx=false)."
    )
