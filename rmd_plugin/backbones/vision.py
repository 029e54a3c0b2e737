"""Pre-trained image models of timm, open_clip and torchvision under one roof, each imported only when chosen."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.checkpoint import CheckpointError, Notes, read_state_dict
from rmd_plugin.backbones.fetch import WeightsNotFoundError, find_checkpoint, hub_file, url_file
from rmd_plugin.backbones.preprocessing import METADATA, NOT_LOADED, VisionOptions, with_transforms
from rmd_plugin.backbones.transforms import IMAGENET_MEAN, IMAGENET_STD, ImageTransform
from rmd_plugin.extras import require

_TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


class Timm(Backbone):
    """Any model of timm, without its classifier: ``backbone=timm backbone.name=convnext_tiny``.

    Args:
        name: timm's name, with the tag of the weights if there are several.
        pretrained: load the weights that timm points to, from the local cache or the hub.
        pretrained_head: keep the classifier of these weights too.
        image_size: side of the pictures; ``None``: what the model was made for.
        crop_pct: part of the resized picture that is kept; 1 loses nothing of thumbnails such as CIFAR.
        options: further arguments of ``timm.create_model``.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint comes instead of the
            pre-trained weights; the original ``.npz`` files of ViT and BiT are read as well (without their head).
            mean, std, transform; see :class:`VisionOptions`.

    Example:
        >>> from PIL import Image
        >>> backbone = Timm("resnet10t", pretrained=False, image_size=64, num_classes=7).eval()
        >>> backbone(backbone.test_transform(Image.new("RGB", (80, 60)))[None]).shape
        torch.Size([1, 7])
    """

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool = True,
        pretrained_head: bool = False,
        image_size: int | None = None,
        crop_pct: float = 1.0,
        options: Mapping[str, Any] | None = None,
        **shared: Unpack[VisionOptions],
    ) -> None:
        timm = require("timm", "vision", needed_by=f"backbone timm/{name}")
        config = _timm_config(timm, name)
        arguments: dict[str, Any] = dict(options or {})
        if "checkpoint_path" in arguments:
            raise ValueError("options.checkpoint_path may be unpickled by timm. Give checkpoint=FILE instead.")
        if image_size is not None and config is not None and config.fixed_input_size:
            arguments.setdefault("img_size", image_size)  # its position embedding is made for one size
        checkpoint = shared.get("checkpoint")
        numpy_file = checkpoint if str(checkpoint).endswith(".npz") else None
        overlay: dict[str, Any] = {}
        if numpy_file is not None:
            overlay = {"file": str(find_checkpoint(numpy_file)), "custom_load": True}
            shared["checkpoint"] = None
        elif checkpoint is None and pretrained:
            # read here, because older releases of timm unpickle the file
            overlay = {"state_dict": read_state_dict(_timm_weights(name, config)), "custom_load": False}
        keep_head = pretrained_head and "state_dict" in overlay
        if not keep_head:
            arguments["num_classes"] = 0
        try:
            model = timm.create_model(name, pretrained=bool(overlay), pretrained_cfg_overlay=overlay, **arguments)
        except (KeyError, ValueError, OSError) as error:
            if numpy_file is None:
                raise
            raise CheckpointError(f"{numpy_file} does not hold the weights of {name}: {error}") from error
        model.pretrained_cfg.pop("state_dict", None)  # timm keeps what it was given: a second copy of every weight
        classifier = None
        if keep_head:
            classifier = model.get_classifier()
            model.reset_classifier(0)
        data = timm.data.resolve_model_data_config(model)
        size = image_size or data["input_size"][-1]
        usual = _usual(data["input_size"][-1], data["mean"], data["std"], data["interpolation"])
        prepared = with_transforms(
            shared, usual, METADATA if overlay else NOT_LOADED, size=image_size, crop_pct=crop_pct
        )
        super().__init__(
            model,
            _measure(model, data["input_size"][0], size),
            architecture={"name": name, "options": dict(options or {})},
            # timm calls the classifier by a name of its own in each model
            head_names=(str(model.pretrained_cfg.get("classifier")),),
            **prepared,
        )
        if classifier is not None:
            self._take_head(classifier, name)


def _timm_config(timm: Any, name: str) -> Any:
    """What timm knows about the weights of a name, ``None`` if it has none."""
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.split('.')[0].split('_')[0]}*")[:5]
        raise ValueError(f"timm has no model {name!r}" + (f"; close: {', '.join(close)}." if close else "."))
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        tags = ", ".join(timm.list_pretrained(name.split(".")[0])) or "none"
        raise ValueError(f"timm has no weights {name!r}; of this model it has {tags}.") from error


def _timm_weights(name: str, config: Any) -> Path:
    """Local file with timm's weights of a name, downloaded if need be."""
    if config is None or not (config.hf_hub_id or config.url):
        raise WeightsNotFoundError(f"weights {name}", ["timm (it has none for this name)"])
    if config.hf_hub_id:
        return hub_file(config.hf_hub_id, (config.hf_hub_filename,) if config.hf_hub_filename else _TIMM_FILES)
    return url_file(config.url)


class OpenCLIP(Backbone):
    """The image tower of any model of open_clip: ``backbone=open_clip backbone.name=ViT-B-16 backbone.tag=openai``.

    Features are the projected image embedding, not scaled to length one.

    Args:
        name: open_clip's name of the architecture.
        tag: open_clip's name of the weights.
        pretrained: load the weights of ``tag``, from the local cache or the hub.
        image_size: side of the pictures; ``None``: what the model was made for.
        crop_pct: part of the resized picture that is kept.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint of the whole model
            will do. mean, std, transform; see :class:`VisionOptions`.

    Example:
        >>> from PIL import Image
        >>> backbone = OpenCLIP("RN50", pretrained=False).eval()
        >>> backbone.encoder(backbone.test_transform(Image.new("RGB", (80, 60)))[None]).shape
        torch.Size([1, 1024])
    """

    def __init__(
        self,
        name: str,
        *,
        tag: str = "openai",
        pretrained: bool = True,
        image_size: int | None = None,
        crop_pct: float = 1.0,
        **shared: Unpack[VisionOptions],
    ) -> None:
        open_clip = require("open_clip", "vision", needed_by=f"backbone open_clip/{name}")
        if name not in open_clip.list_models():
            raise ValueError(f"open_clip has no model {name!r}; see open_clip.list_models().")
        config = open_clip.get_pretrained_cfg(name, tag) or {}
        weights = None
        if pretrained and shared.get("checkpoint") is None:
            if not config:
                tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none"
                raise ValueError(f"open_clip has no weights {tag!r} of {name}; it has {tags}.")
            weights = str(_clip_weights(config))
        visual = open_clip.create_model(
            name, pretrained=weights, force_image_size=image_size, pretrained_image=False, pretrained_text=False
        ).visual
        if getattr(visual, "output_tokens", False):
            visual.output_tokens = False  # captioning models would give every patch beside the pooled features
        size = int(visual.image_size[0] if isinstance(visual.image_size, Sequence) else visual.image_size)
        mean = config.get("mean") or open_clip.OPENAI_DATASET_MEAN
        std = config.get("std") or open_clip.OPENAI_DATASET_STD
        usual = _usual(open_clip.get_model_config(name)["vision_cfg"].get("image_size"), mean, std, "bicubic")
        origin = METADATA if weights else NOT_LOADED
        prepared = with_transforms(shared, usual, origin, size=size, crop_pct=crop_pct)
        super().__init__(visual, _measure(visual, 3, size), architecture={"name": name}, **prepared)


def _clip_weights(config: Mapping[str, Any]) -> Path:
    """Local file with open_clip's weights, downloaded if need be."""
    if config.get("hf_hub"):
        owner, repository, filename = (*config["hf_hub"].split("/", 2), "")[:3]
        return hub_file(f"{owner}/{repository}", (filename,) if filename else _CLIP_FILES)
    return url_file(config["url"])


def _usual(size: int, mean: Sequence[float], std: Sequence[float], interpolation: str) -> ImageTransform:
    """What a library does to pictures but for its crop, which costs thumbnails their border."""
    # a few models name one at random, or Lanczos, which is closest to the cubic
    return ImageTransform(size, mean, std, interpolation="bilinear" if interpolation == "bilinear" else "bicubic")


def _measure(encoder: nn.Module, channels: int, size: int) -> int:
    """Number of features, by encoding one empty picture: what the libraries declare is not always what comes out."""
    mode = encoder.training
    with torch.no_grad():
        features = encoder.eval()(torch.zeros(1, channels, size, size))
    encoder.train(mode)
    if not isinstance(features, Tensor) or features.dim() != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"the model gives {shape} instead of pooled features (B, D); choose one with pooling.")
    return features.shape[1]


class TorchVision(Backbone):
    """Any classifier of torchvision, without its last layer: ``backbone=torchvision backbone.name=resnet50``.

    Args:
        name: torchvision's name.
        weights: torchvision's name of the weights; ``DEFAULT`` is its best.
        pretrained: load these weights, from torch.hub's cache or by download.
        pretrained_head: keep their classifier of the 1000 ImageNet classes too.
        image_size: side of the pictures; ``None``: what the weights were made for.
        crop_pct: part of the resized picture that is kept.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint comes instead of the
            pre-trained weights. mean, std, transform; see :class:`VisionOptions`.

    Example:
        >>> from PIL import Image
        >>> backbone = TorchVision("resnet18", pretrained=False, image_size=64, num_classes=7).eval()
        >>> backbone(backbone.test_transform(Image.new("RGB", (80, 60)))[None]).shape
        torch.Size([1, 7])
    """

    def __init__(
        self,
        name: str,
        *,
        weights: str = "DEFAULT",
        pretrained: bool = True,
        pretrained_head: bool = False,
        image_size: int | None = None,
        crop_pct: float = 1.0,
        **shared: Unpack[VisionOptions],
    ) -> None:
        from torchvision import models

        if name not in models.list_models(module=models):
            raise ValueError(f"torchvision has no classifier {name!r}; see torchvision.models.list_models().")
        if name in ("googlenet", "inception_v3"):
            raise ValueError(f"{name} gives several outputs while training; use backbone=timm, which has it with one.")
        available = models.get_model_weights(name)
        if weights not in available.__members__:
            raise ValueError(f"{name} has no weights {weights!r}; torchvision has {', '.join(available.__members__)}.")
        described = available[weights]
        model = models.get_model(name, weights=None)
        layers = [(key, layer) for key, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        if not layers or layers[-1][1].out_features != 1000:
            raise ValueError(f"{name} does not end in a linear classifier, so its features cannot be told.")
        classifier_name, classifier = layers[-1]
        model.set_submodule(classifier_name, nn.Identity())
        loaded = pretrained and shared.get("checkpoint") is None
        if loaded:
            # read as any checkpoint, because torchvision itself would unpickle the file
            shared["checkpoint"], shared["load_head"] = url_file(described.url), pretrained_head
        preset = described.transforms()
        mean, std = getattr(preset, "mean", IMAGENET_MEAN), getattr(preset, "std", IMAGENET_STD)
        usual = _usual(int(preset.crop_size[0]), mean, std, preset.interpolation.value)
        prepared = with_transforms(
            shared, usual, METADATA if loaded else NOT_LOADED, size=image_size, crop_pct=crop_pct
        )
        super().__init__(
            model,
            classifier.in_features,
            architecture={"name": name},
            head_names=(classifier_name,),
            **prepared,
        )
        if loaded:
            metrics = described.meta.get("_metrics", {}).get("ImageNet-1K", {})
            self.noted = Notes(accuracy=metrics["acc@1"] / 100 if "acc@1" in metrics else None)

    def rename_key(self, name: str) -> str:
        """Join the names of layers that the oldest densenet files split."""
        return re.sub(r"\.(norm|conv)\.([12])\.", r".\1\2.", name)
