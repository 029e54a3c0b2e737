"""The image processors of Hugging Face as transforms of ours, which are exported; what cannot be one is refused."""

from typing import Any

import numpy as np
import torch
from PIL import Image

from rmd_plugin.backbones.transforms import ImageTransform

#: steps that are translated, or that ours do anyway; any other that is switched on is refused
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
#: further settings that change pictures
_CHANGES = ("rescale_offset", "offset", "include_top", "size_divisor", "pad_size")
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  #: numbers of Pillow


def translate_processor(processor: Any, name: str) -> ImageTransform:
    """What an image processor does, as a transform of ours.

    Processors are told apart by their settings, but some do more than these say: so the result is compared with the
    processor itself on two pictures.

    Raises:
        ValueError: names what the processor does that ours cannot.
    """
    settings = processor.to_dict()
    steps = [key for key, value in settings.items() if key.startswith("do_") and value and key not in _STEPS]
    if unknown := [*steps, *(key for key in _CHANGES if settings.get(key))]:
        raise _refused(name, processor, f"{unknown[0]}={settings[unknown[0]]}")
    normalises = bool(settings.get("do_normalize"))
    mean, std = (settings["image_mean"], settings["image_std"]) if normalises else ((0.0,) * 3, (1.0,) * 3)
    # ours divides pixels by 255, whatever the processor multiplies them by
    factor = 255 * float(settings["rescale_factor"]) if settings.get("do_rescale") else 255.0
    mean, std = (tuple(value / factor for value in values) for values in (mean, std))
    transform = ImageTransform(mean=mean, std=std, **_geometry(settings, name, processor))
    _compare(processor, transform, name)
    return transform


def _geometry(settings: dict[str, Any], name: str, processor: Any) -> dict[str, Any]:
    """Size, crop_pct, interpolation and squash."""
    crop = settings.get("crop_size") if settings.get("do_center_crop") else None
    if not settings.get("do_resize"):
        if crop is not None:
            raise _refused(name, processor, f"crop_size={crop} without a resize")
        return {"size": None}
    size, resample = dict(settings["size"]), settings.get("resample")
    interpolation = _RESAMPLE.get(int(resample)) if resample is not None else None
    if interpolation is None:
        raise _refused(name, processor, f"resample={resample}")
    edge, squash = size.get("shortest_edge"), False
    if edge is None:
        edge, squash = size.get("height"), True
    kept = edge if crop is None else crop.get("height")
    if edge is not None and "crop_pct" in settings and crop is None and not squash:  # ConvNeXT
        squash = edge >= 384
        edge, kept = (edge if squash else int(edge / settings["crop_pct"])), edge
    elif not squash and crop is None:
        raise _refused(name, processor, f"size={size} without a crop, which leaves the shape to the picture")
    sides = {size.get("height", edge), size.get("width", edge)} if squash else {edge}
    square = crop is None or crop.get("height") == crop.get("width")
    if len(sides) != 1 or not square or edge is None or kept is None or kept > edge or size.get("longest_edge"):
        raise _refused(name, processor, f"size={size}" + (f" with crop_size={crop}" if crop else ""))
    return {
        "size": kept,
        "crop_pct": kept / edge,
        "interpolation": interpolation,
        "squash": squash,
        "floor_crop": not squash or kept < edge,
    }


def _compare(processor: Any, transform: ImageTransform, name: str) -> None:
    """Refuse a translation that gives other numbers than the processor: a wide and a tall picture of odd sizes."""
    rng = np.random.default_rng(0)
    side = round((transform.size or 32) / transform.crop_pct)
    for height, width in ((side * 5 // 4, side * 7 // 4 | 1), (side * 3 // 2 | 1, side + 2)):
        # of little contrast: the processor may cut off at 0 and 255 in another order
        picture = Image.fromarray(rng.integers(100, 150, (height, width, 3), dtype=np.uint8))
        theirs, ours = processor(images=picture, return_tensors="pt")["pixel_values"][0], transform(picture)
        # two grey levels: it rounds to whole ones, some twice
        limit = 2 / 255 / torch.tensor(transform.std).view(3, 1, 1)
        if theirs.shape != ours.shape or bool(((theirs - ours).abs() > limit).any()):
            raise _refused(name, processor, "more than its settings say")


def _refused(name: str, processor: Any, what: str) -> ValueError:
    return ValueError(
        f"the {type(processor).__name__} of {name} does {what}, which cannot be translated into steps that are "
        "exported. Give the preprocessing yourself: +backbone.transform._target_=package.Class."
    )
