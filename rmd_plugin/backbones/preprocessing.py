"""The preprocessing of the backbones for pictures: what the user gave, what the weights say, and which was which."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from rmd_plugin.backbones.base import SharedOptions, Transform
from rmd_plugin.backbones.transforms import ImageTransform

#: where a part of the preprocessing came from
CONFIG, METADATA = "the config", "the weights' metadata"
NOT_LOADED = "the metadata of weights that were not loaded"


class VisionOptions(SharedOptions, total=False):
    """The options that every backbone for pictures takes.

    ``mean`` and ``std`` are per channel, of pixels in [0, 1]; None is what the weights or the backbone were made with.
    ``transform`` replaces the whole preprocessing, in training too: raw item -> tensor.
    """

    mean: Sequence[float] | None
    std: Sequence[float] | None
    transform: Transform | None


class PreparedOptions(SharedOptions, total=False):
    """Keyword arguments of :class:`Backbone`: the shared ones, and how pictures are prepared."""

    train_transform: Transform
    test_transform: Transform
    origins: dict[str, str]


def with_transforms(options: VisionOptions, usual: ImageTransform, origin: str, **given: Any) -> PreparedOptions:
    """Options with the transforms of a backbone: its usual ones, changed as the user wants them. Training augments.

    Args:
        options: of the backbone; those about pictures become transforms.
        usual: what is done to pictures if nobody says anything.
        origin: where that came from, :data:`METADATA` for example.
        **given: further fields of the transform that the user gave, ``size`` or ``crop_pct``; None where not.

    Raises:
        ValueError: if ``transform`` is given beside what it replaces, or is none.
    """
    transform = options.get("transform")
    given |= {"mean": options.get("mean"), "std": options.get("std")}
    # a value that is the usual one anyway may be from anywhere
    changes = {name: value for name, value in given.items() if value is not None and value != getattr(usual, name)}
    if transform is not None:
        if extra := sorted(changes.keys() - {"size"}):
            raise ValueError(
                f"transform replaces the whole preprocessing, {' and '.join(extra)} would be ignored. Leave out one of "
                "them; transform itself can normalise."
            )
        if not callable(transform):
            raise ValueError(
                f"transform must take a raw item to a tensor, got a {type(transform).__name__}. In a config: "
                "+backbone.transform._target_=package.Class and its arguments."
            )
        origins = {"transform": CONFIG}
        return {**shared_only(options), "train_transform": transform, "test_transform": transform, "origins": origins}
    test = replace(usual, **changes)
    origins = {name: CONFIG if name in changes else origin for name in ("size", "mean", "std")}
    train = replace(test, augment=test.size is not None)
    return {**shared_only(options), "train_transform": train, "test_transform": test, "origins": origins}


def shared_only(options: VisionOptions) -> PreparedOptions:
    """The options without those about pictures; TypeError if there are others."""
    if unknown := sorted(options.keys() - VisionOptions.__annotations__.keys()):
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    return cast(PreparedOptions, {name: options[name] for name in SharedOptions.__annotations__ if name in options})  # type: ignore[literal-required]
