"""Masked-token pre-training without labels; fine-tuning with labels starts from its checkpoint, as any training."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from rmd_plugin.backbones.genomics import GenomicsBERT

Batch: TypeAlias = Tensor | Sequence[Tensor]


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
        if not 0 < mask_probability < 1:
            raise ValueError(f"mask_probability must lie in (0, 1), got {mask_probability}.")
        if backbone.frozen:
            raise ValueError("the backbone is frozen, so there is nothing to pre-train: pass frozen=false.")
        self.save_hyperparameters(ignore=["backbone"])
        self.encoder = backbone.encoder
        self.mask_probability, self.seed = mask_probability, seed
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps
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
        starts = uniform() < 1 - (1 - self.mask_probability) ** (1 / span)
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
            self.log_dict(
                {f"{stage}/loss": loss, f"{stage}/masked_accuracy": accuracy},
                prog_bar=True,
                batch_size=targets.numel(),
                sync_dist=stage == "val",
            )
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch with fresh masks."""
        return self._step(batch, "train", None)

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one batch with the masks that belong to its index."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + batch_idx)
        return self._step(batch, "val", generator)

    def configure_optimizers(self) -> Any:
        """AdamW with linear warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        if self.warmup_steps <= 0:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / self.warmup_steps, total_iters=self.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
