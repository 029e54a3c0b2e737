"""A guard as one graph, from raw pictures, token ids or features to verdicts: for ``torch.export`` and ONNX."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rmd_plugin.backbones.transforms import ImageTransform, Tokenise
from rmd_plugin.files import require

if TYPE_CHECKING:
    from rmd_plugin.guard.guard import Guard

log = logging.getLogger(__name__)

#: what the file calls its outputs
OUTPUTS = ("logits", "class", "nearest_class", "score", "p_value", "is_ood")
#: by how much the numbers of the file may differ from those in Python, as a share of the largest one
_AGREEMENT = 1e-3


def export_program(guard: Guard) -> torch.export.ExportedProgram:
    """The graph of a guard as a program of ``torch.export``, for batches of any size and pictures of any size.

    Raises:
        ValueError: if a part of it cannot be exported; the message names it.
    """
    graph, (_, example, axes) = guard.to_module(), _example(guard)
    with _exporting(guard):
        return torch.export.export(graph, (example,), dynamic_shapes=(axes,), strict=False)


def export_onnx(guard: Guard, path: Path) -> str:
    """Write the graph of a guard as an ONNX file, and compare what it gives with the guard itself.

    The input is ``images``, ``ids`` or ``features``, or ``pixels`` (B, 3, H, W) where the preprocessing of the pictures
    runs in Python only, such as an image processor of Hugging Face; the outputs are ``logits``, ``class``,
    ``nearest_class``, ``score``, ``p_value`` and ``is_ood``. The metadata of the file names the classes, alpha and the
    threshold.

    Returns:
        The name of the input.

    Raises:
        ValueError: if a part of it cannot be exported, or the file gives other numbers.
    """
    require_onnx()
    name, example, axes = _example(guard)
    if name == "pixels":
        log.warning("model.onnx takes pixels that %s has prepared, not raw pictures.", guard.transform)
    program = export_program(guard)
    with _exporting(guard):
        outputs = list(OUTPUTS)
        exported: Any = torch.onnx.export(program, input_names=[name], output_names=outputs, dynamo=True, verbose=False)
        graph = exported.model.graph
        # the exporter's own names of the axes say nothing
        for value, names in ((graph.inputs[0], axes), *((output, {0: "batch"}) for output in graph.outputs)):
            for axis, dim in names.items():
                value.shape[axis] = getattr(dim, "__name__", dim)
        facts = {"classes": guard.class_names, "alpha": guard.alpha, "threshold": guard.threshold}
        exported.model.metadata_props.update({key: json.dumps(value) for key, value in facts.items()})
        exported.save(str(path))
        session = import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
        verdicts = guard.to_module()(example)
        for output in ("logits", "score"):
            values = getattr(verdicts, output).numpy()
            (there,) = session.run([output], {name: example.numpy()})
            tolerance = _AGREEMENT * (float(np.abs(values).max()) or 1.0)
            if not np.allclose(there, values, rtol=_AGREEMENT, atol=tolerance, equal_nan=True):
                apart = float(np.abs(there - values).max())
                raise ValueError(f"the {output} of the file differ by {apart:.2g} from those in Python")
    return name


@contextmanager
def _exporting(guard: Guard) -> Iterator[None]:
    """Without what the exporters tell about themselves, and with the remedy in their errors."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # of every kind, by the part of the network that they stumble over
        reason = " ".join((str(error).strip() or type(error).__name__).splitlines()[0].split())
        raise ValueError(
            f"{type(guard.backbone).__name__} with {type(guard.detector.detector).__name__} cannot be exported: "
            f"{reason}. Choose another network or detector, or write the guard without model.onnx (onnx=false)."
        ) from error
    finally:
        logging.disable(level)


def require_onnx() -> None:
    """Refuse in one sentence if the packages are missing that write ONNX."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "export", needed_by="model.onnx (or onnx=false)")


def _example(guard: Guard) -> tuple[str, Tensor, dict[int, Any]]:
    """What the file calls its input, items to trace the graph with, and their axes that may have any length."""
    axes = {0: (dim := torch.export.Dim)("batch")}
    if isinstance(guard.transform, ImageTransform):
        # different numbers, so that the exporter takes none for another
        items = torch.randint(0, 256, (3, 67, 91, 3), dtype=torch.uint8)
        return "images", items, axes | {1: dim("height"), 2: dim("width")}
    if isinstance(guard.transform, Tokenise):
        longest = guard.transform.max_length
        ids = torch.stack([guard.prepare(text) for text in ("one text", "another text, of more words", "a third")])
        # contiguous: the exporter takes the stride of a part for a length that there may not be
        return "ids", ids[:, : min(16, longest)].contiguous(), axes | {1: dim("length", max=longest)}
    if guard.transform is not None:
        return "pixels", torch.rand(3, *guard.prepare(np.zeros((67, 91, 3), np.uint8)).shape), axes
    like = next(guard.backbone.encoder.parameters(), torch.empty(0))
    return "features", torch.zeros(3, *guard.input_shape, dtype=like.dtype), axes
