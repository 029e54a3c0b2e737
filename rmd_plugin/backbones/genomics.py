"""Backbones for DNA reads: the paper's motif CNN, and a compact BERT-style encoder over bases or k-mers."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from rmd_plugin.backbones.base import Backbone, SharedOptions

NUM_BASES = 4
PAD_BASE = 5  # fills reads shorter than the others; 4 is a base that could not be read


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
        self,
        *,
        kmer: int,
        stride: int,
        max_length: int,
        width: int,
        depth: int,
        heads: int,
        feed_forward: int,
        dropout: float,
        pooling: str,
    ) -> None:
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
        place = NUM_BASES ** torch.arange(self.kmer - 1, -1, -1, device=bases.device)
        tokens = (windows.clamp(0, NUM_BASES - 1) * place).sum(dim=2)
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
        kept = (tokens[:, 1:] != self.pad_id).unsqueeze(2).to(hidden.dtype)
        # a read of padding only has no mean: its features are zeros, not NaN
        return (hidden[:, 1:] * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


class GenomicsBERT(Backbone):
    """Compact BERT-style encoder of DNA reads; D = ``width``. Takes base ids, (B, L).

    Made to be pre-trained without labels by ``rmd_plugin.backbones.stages.MaskedTokenPretraining``; that stage's
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
        if not 1 <= kmer <= 8:
            raise ValueError(f"kmer must lie in 1..8 (4^kmer tokens), got {kmer}.")
        stride = kmer if stride is None else stride
        if not 1 <= stride <= kmer:
            raise ValueError(f"stride must lie in 1..kmer={kmer}, so that no base is skipped, got {stride}.")
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}.")
        sizes: dict[str, Any] = {
            "kmer": kmer,
            "stride": stride,
            "max_length": max_length,
            "width": width,
            "depth": depth,
            "heads": heads,
            "feed_forward": 4 * width if feed_forward is None else feed_forward,
            "pooling": pooling,
        }
        super().__init__(ReadEncoder(**sizes, dropout=dropout), width, architecture=sizes, **shared)
