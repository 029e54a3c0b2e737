"""Samples on a page: a thumbnail or the beginning of a text, with a few lines about each."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rmd_plugin.report.document import Picture
from rmd_plugin.untrusted import one_line

if TYPE_CHECKING:
    from PIL import Image

#: longer side of a thumbnail in pixels, the one up to which nothing may be lost, letters of a text
_SIDE, _TINY, _LETTERS = 160, 64, 280


@dataclass(frozen=True)
class Card:
    """One sample on a page: its name, some lines about it, whether it was flagged, and how it looks or what it says."""

    name: str
    details: Sequence[str]
    flagged: bool = False
    picture: Picture | None = None
    text: str = ""


def make_card(name: str, details: Sequence[str], flagged: bool, seen: Picture | str | None) -> Card:
    """A card for a sample that is a picture, a text, or something that cannot be shown."""
    text = one_line(seen) if isinstance(seen, str) else ""
    return Card(
        name=one_line(name),
        details=[one_line(detail) for detail in details],
        flagged=flagged,
        picture=seen if isinstance(seen, Picture) else None,
        text=text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…",
    )


def thumbnail(image: Image.Image, alt: str) -> Picture:
    """A small copy of a picture for a page: a JPEG, or every pixel of one that is tiny."""
    small = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    tiny = max(small.size) <= _TINY
    buffer = io.BytesIO()
    small.save(buffer, "PNG" if tiny else "JPEG", **({} if tiny else {"quality": 80}))
    source = f"data:image/{'png' if tiny else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return Picture(source, alt, small.width, small.height)


def preview(item: Any, alt: str) -> Picture | str | None:
    """What a raw item of a data set looks like: a thumbnail, a text, or None for what neither is.

    Pictures are those of Pillow, arrays (H, W), (H, W, 3) and tensors (1 or 3, H, W) of uint8 or of numbers in [0, 1].
    """
    from PIL import Image

    if isinstance(item, str):
        return item
    if isinstance(item, Image.Image):
        return thumbnail(item, alt)
    if hasattr(item, "detach"):  # a tensor; torch takes seconds to import
        item = item.detach().cpu().numpy()
        item = np.moveaxis(item, 0, -1) if item.ndim == 3 else item
    if not isinstance(item, np.ndarray) or not item.size:
        return None
    item = item[..., 0] if item.ndim == 3 and item.shape[2] == 1 else item
    if item.ndim not in (2, 3) or (item.ndim == 3 and item.shape[2] != 3):
        return None
    if item.dtype.kind == "f":
        if not (np.isfinite(item).all() and item.min() >= 0 and item.max() <= 1):
            return None  # normalised: nobody says what is black
        item = np.rint(255 * item).astype(np.uint8)
    return thumbnail(Image.fromarray(item), alt) if item.dtype == np.uint8 else None
