"""Backbones for DNA reads: the paper's motif CNN, and a compact BERT-style encoder with its pre-training."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, Unpack

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from rmd_plugin.backbones.base import Backbone, SharedOptions

NUM_BASES = 4
PAD_BASE = 5  # fills reads shorter than the others; 4 is a base that could not be read
Batch: TypeAlias = Tensor | Sequence[Tensor]


class _MotifEncoder(nn.Module):
    """Motif filters, the strongest match of each along the read, one dense layer."""

    def __init__(self, filters: int, filter_length: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.motifs = nn.Conv1d(NUM_BASES, filters, filter_length)
        self.dense = nn.Linear(filters, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            x = one_hot(x).to(self.motifs.weight.dtype)
        if x.dim() != 3 or x.shape[1] != NUM_BASES:
            raise ValueError(f"expected one-hot reads (B, 4, L) or base ids (B, L), got {tuple(x.shape)}.")
        strongest = F.relu(self.motifs(x)).amax(dim=2)
        features: Tensor = self.dropout(F.relu(self.dense(strongest)))
        return features


def one_hot(bases: Tensor) -> Tensor:
    """One-hot encoding of base ids A, C, G, T = 0..3, anything else zeros: (B, L) -> (B, 4, L), or (L,) -> (4, L).

    Example:
        >>> one_hot(torch.tensor([0, 3, 4])).tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    letters = torch.arange(NUM_BASES, device=bases.device)
    return (bases.unsqueeze(-2) == letters.unsqueeze(-1)).float()


class GenomicsCNN(Backbone):
    """The paper's 1D CNN: motif filters on one-hot reads, global max-pooling, a dense layer; D = ``hidden``.

    Reads come one-hot, (B, 4, L); base ids (B, L) are accepted as well.

    Args:
        filters: number of motifs, 2000 in the paper.
        filter_length: bases per motif, 20 in the paper.
        hidden: size of the dense layer.
        dropout: probability on the dense layer's output.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`.

    Example:
        >>> import torch
        >>> backbone = GenomicsCNN(filters=8, filter_length=5, hidden=16, num_classes=10)
        >>> backbone(one_hot(torch.randint(0, 4, (3, 250)))).shape
        torch.Size([3, 10])
    """

    encoding = "one_hot"

    def __init__(
        self,
        filters: int = 2000,
        filter_length: int = 20,
        hidden: int = 2000,
        *,
        dropout: float = 0.1,
        **shared: Unpack[SharedOptions],
    ) -> None:
        architecture = {"filters": filters, "filter_length": filter_length, "hidden": hidden}
        super().__init__(_MotifEncoder(**architecture, dropout=dropout), hidden, architecture=architecture, **shared)


class ReadEncoder(nn.Module):
    """Transformer over the k-mers of a read; the sizes are those of :class:`GenomicsBERT`.

    Token ids: 0 .. 4^k - 1 are the k-mers (first base most significant), then ``pad``, ``cls``, ``mask``, ``unknown``.
    """

    def __init__(
        self, *, kmer: int, stride: int, max_length: int, width: int, depth: int, heads: int, feed_forward: int,
        dropout: float, pooling: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kmer, self.stride, self.max_length, self.pooling = kmer, stride, max_length, pooling
        self.num_kmers = NUM_BASES**kmer
        self.pad_id, self.cls_id, self.mask_id, self.unknown_id = range(self.num_kmers, self.num_kmers + 4)
        self.tokens = nn.Embedding(self.num_kmers + 4, width)
        self.positions = nn.Parameter(torch.empty(1 + (max_length - kmer) // stride + 1, width))
        self.norm_in = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            width, heads, feed_forward, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def tokenise(self, bases: Tensor) -> Tensor:
        """Cut reads into k-mers, (B, L) -> (B, 1 + T) with ``cls`` first; bases that fill no whole k-mer are left out.

        Base ids are A, C, G, T = 0..3 and 5 = padding; anything else is unknown.
        """
        if bases.dim() != 2 or bases.is_floating_point():
            raise ValueError(
                f"expected base ids as integers of shape (B, L), got {tuple(bases.shape)} of {bases.dtype}. "
                "This backbone takes reads with encoding='tokens'."
            )
        if not self.kmer <= bases.shape[1] <= self.max_length:
            raise ValueError(
                f"reads must have {self.kmer} to {self.max_length} bases, got {bases.shape[1]}; raise max_length."
            )
        windows = bases.unfold(1, self.kmer, self.stride)
        powers = NUM_BASES ** torch.arange(self.kmer - 1, -1, -1, device=bases.device)
        tokens = (windows.clamp(0, NUM_BASES - 1) * powers).sum(dim=2)
        tokens = tokens.masked_fill(((windows < 0) | (windows >= NUM_BASES)).any(dim=2), self.unknown_id)
        tokens = tokens.masked_fill((windows == PAD_BASE).any(dim=2), self.pad_id)
        return F.pad(tokens, (1, 0), value=self.cls_id)

    def contextual(self, tokens: Tensor) -> Tensor:
        """Features of every token, shape (B, T, width), of ids as :meth:`tokenise` gives them, shape (B, T)."""
        embedded = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        padding = tokens == self.pad_id
        mask = padding if bool(padding.any()) else None
        hidden: Tensor = self.layers(self.dropout(self.norm_in(embedded)), src_key_padding_mask=mask)
        return hidden

    def forward(self, bases: Tensor) -> Tensor:
        """Pooled features of shape (B, width) of reads of shape (B, L)."""
        tokens = self.tokenise(bases)
        hidden = self.contextual(tokens)
        if self.pooling == "cls":
            return hidden[:, 0]
        valid = (tokens[:, 1:] != self.pad_id).unsqueeze(2).to(hidden.dtype)
        # a read of padding only has no mean: its features are zeros, not NaN
        return (hidden[:, 1:] * valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1)


class GenomicsBERT(Backbone):
    """Compact BERT-style encoder of DNA reads; D = ``width``. Takes base ids, (B, L).

    Made to be pre-trained without labels by :class:`MaskedTokenPretraining`; that stage's
    checkpoint is then given here as ``checkpoint`` for the fine-tuning.

    Args:
        kmer: bases per token: 1 predicts single bases as in the paper, 3 to 6 make shorter sequences.
        stride: bases from one token to the next; ``None``: side by side.
        max_length: longest read, in bases.
        width: features per token.
        depth: transformer layers.
        heads: attention heads per layer.
        feed_forward: hidden size inside the layers; ``None``: four times ``width``.
        dropout: probability throughout.
        pooling: ``mean`` over the read's tokens, or the ``cls`` token.
        **shared: num_classes, checkpoint, load_head, frozen; see :class:`Backbone`.

    Example:
        >>> import torch
        >>> backbone = GenomicsBERT(kmer=3, width=16, depth=1, heads=2, num_classes=10)
        >>> backbone(torch.randint(0, 4, (3, 250))).shape
        torch.Size([3, 10])
    """

    encoding = "tokens"
    encoder: ReadEncoder

    def __init__(
        self,
        *,
        kmer: int = 1,
        stride: int | None = None,
        max_length: int = 250,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        feed_forward: int | None = None,
        dropout: float = 0.1,
        pooling: Literal["mean", "cls"] = "mean",
        **shared: Unpack[SharedOptions],
    ) -> None:
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling must be 'mean' or 'cls', got {pooling!r}.")
        stride = kmer if stride is None else stride
        if not 1 <= stride <= kmer:
            raise ValueError(f"stride must lie in 1..kmer={kmer}, so that no base is skipped, got {stride}.")
        feed_forward = 4 * width if feed_forward is None else feed_forward
        sizes: dict[str, Any] = {"kmer": kmer, "stride": stride, "max_length": max_length, "pooling": pooling}
        sizes |= {"width": width, "depth": depth, "heads": heads, "feed_forward": feed_forward}
        super().__init__(ReadEncoder(**sizes, dropout=dropout), width, architecture=sizes, **shared)


class MaskedTokenPretraining(LightningModule):
    """Hide some tokens of each read and learn to restore them, as BERT does.

    Of the chosen tokens 80 % become the mask token, 10 % a random k-mer, 10 % stay. Where tokens overlap, as many
    neighbours are chosen together as share a base: a single hidden token could be read off the others.

    A checkpoint of this module goes into ``GenomicsBERT(checkpoint=path)``. Batches are reads, or reads first and
    labels after, which are ignored. Logs ``train/loss``, ``train/masked_accuracy`` and the same under ``val/``.

    Args:
        backbone: the network whose encoder is trained.
        mask_probability: share of the tokens that are chosen.
        lr: peak learning rate of AdamW.
        weight_decay: of AdamW.
        warmup_steps: steps of linear warm-up.
        seed: of the masks in validation, the same in every epoch.

    Example:
        >>> from rmd_plugin.backbones import GenomicsBERT
        >>> backbone = GenomicsBERT(width=16, depth=1)
        >>> stage = MaskedTokenPretraining(backbone, lr=3e-4)  # for a Trainer
        >>> stage.encoder is backbone.encoder  # what is learnt stays in the backbone
        True
    """

    def __init__(
        self,
        backbone: GenomicsBERT,
        *,
        mask_probability: float = 0.15,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if backbone.frozen:
            raise ValueError("the backbone is frozen, so there is nothing to pre-train: pass frozen=false.")
        self.save_hyperparameters(ignore=["backbone"])
        self.encoder = backbone.encoder
        width = self.encoder.tokens.embedding_dim
        self.mlm_transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.mlm_bias = nn.Parameter(torch.zeros(self.encoder.num_kmers))

    def corrupt(self, tokens: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The tokens (B, T) with some hidden, and which were chosen, (B, T); ``None`` draws from the global state."""
        device = tokens.device

        def uniform() -> Tensor:
            # a generator lives on the CPU, so that validation masks are the same on every device
            return torch.rand(tokens.shape, generator=generator, device="cpu" if generator else device).to(device)

        span = -(-self.encoder.kmer // self.encoder.stride)
        # a token is chosen if any of `span` start points hits it: solve 1 - (1 - p)^span = mask_probability
        starts = uniform() < 1 - (1 - self.hparams["mask_probability"]) ** (1 / span)
        padded = F.pad(starts.float().unsqueeze(1), (span - 1, 0))
        chosen = F.max_pool1d(padded, span, stride=1).squeeze(1) > 0
        chosen &= tokens < self.encoder.num_kmers
        fate = uniform()
        hidden = torch.where(chosen & (fate < 0.8), self.encoder.mask_id, tokens)
        random_kmers = (uniform() * self.encoder.num_kmers).long().clamp(max=self.encoder.num_kmers - 1)
        return torch.where(chosen & (fate >= 0.9), random_kmers, hidden), chosen

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Logits over the k-mers for the chosen tokens, shape (number chosen, 4^k); ids and choice are (B, T).

        The output layer shares its weights with the token embedding.
        """
        # only for the chosen: with long k-mers the output layer is the widest of all
        hidden = self.mlm_transform(self.encoder.contextual(tokens)[chosen])
        return F.linear(hidden, self.encoder.tokens.weight[: self.encoder.num_kmers], self.mlm_bias)

    def _step(self, batch: Batch, stage: str, generator: torch.Generator | None) -> Tensor:
        tokens = self.encoder.tokenise(batch if isinstance(batch, Tensor) else batch[0])
        corrupted, chosen = self.corrupt(tokens, generator)
        logits, targets = self(corrupted, chosen), tokens[chosen]
        # short reads may draw no mask: then a zero that still reaches every weight, as DDP wants, instead of NaN
        loss = F.cross_entropy(logits, targets) if targets.numel() else logits.sum()
        if targets.numel():
            accuracy = (logits.argmax(dim=1) == targets).float().mean()
            metrics = {f"{stage}/loss": loss, f"{stage}/masked_accuracy": accuracy}
            self.log_dict(metrics, prog_bar=True, batch_size=targets.numel(), sync_dist=stage == "val")
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch with fresh masks."""
        return self._step(batch, "train", None)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch with the masks that belong to its index."""
        generator = torch.Generator().manual_seed(self.hparams["seed"] * 1_000_003 + batch_idx)
        return self._step(batch, "val", generator)

    def configure_optimizers(self) -> Any:
        """AdamW with linear warm-up."""
        options: Any = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), lr=options.lr, weight_decay=options.weight_decay)
        steps = options.warmup_steps
        if steps <= 0:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / steps, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
