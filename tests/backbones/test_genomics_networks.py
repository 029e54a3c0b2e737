"""Backbones for DNA reads, and their pre-training up to the fine-tuning."""

import logging
import math

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin.app.train import Classifier
from rmd_plugin.backbones import GenomicsBERT, GenomicsCNN, MaskedTokenPretraining
from rmd_plugin.backbones.genomics import PAD_BASE, one_hot


def tiny_bert(**options):
    torch.manual_seed(0)
    sizes = {"kmer": 1, "max_length": 24, "width": 32, "depth": 2, "heads": 4, "dropout": 0.0} | options
    return GenomicsBERT(**sizes)


def test_the_motif_cnn_is_the_strongest_match_of_each_filter_then_a_dense_layer():
    backbone = GenomicsCNN(filters=3, filter_length=4, hidden=2).eval()
    bases = torch.randint(0, 5, (2, 15))
    weights = {name: value.numpy() for name, value in backbone.encoder.state_dict().items()}
    expected = []
    for read in one_hot(bases).numpy():
        windows = np.stack([read[:, i : i + 4] for i in range(12)])
        matches = np.einsum("wcl,fcl->wf", windows, weights["motifs.weight"]) + weights["motifs.bias"]
        strongest = np.maximum(matches, 0).max(axis=0)
        expected.append(np.maximum(weights["dense.weight"] @ strongest + weights["dense.bias"], 0))
    features = backbone.encoder(one_hot(bases)).detach().numpy()
    np.testing.assert_allclose(features, np.stack(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(backbone.encoder(bases), backbone.encoder(one_hot(bases)))


def test_each_genomics_backbone_says_what_it_reads():
    assert GenomicsCNN(2, 4, 2).encoding == "one_hot"
    assert tiny_bert().encoding == "tokens"
    with pytest.raises(ValueError, match="one-hot"):
        GenomicsCNN(2, 4, 2).encoder(torch.rand(2, 3, 9))
    with pytest.raises(ValueError, match="tokens"):
        tiny_bert().encoder(torch.rand(2, 4, 20))
    with pytest.raises(ValueError, match="max_length"):
        tiny_bert().encoder(torch.zeros(2, 25, dtype=torch.long))


@pytest.mark.parametrize(("kmer", "stride"), [(1, 1), (3, 2)])
def test_tokens_are_the_kmers_in_base_four(kmer, stride):
    encoder = tiny_bert(kmer=kmer, stride=stride).encoder
    bases = torch.randint(0, 4, (3, 20))
    bases[0, 5], bases[1, 17:] = 4, PAD_BASE
    tokens = encoder.tokenise(bases)
    assert tokens[:, 0].tolist() == [encoder.cls_id] * 3
    for row, read in enumerate(bases.tolist()):
        expected = []
        for start in range(0, 20 - kmer + 1, stride):
            window = read[start : start + kmer]
            if PAD_BASE in window:
                expected.append(encoder.pad_id)
            elif 4 in window:
                expected.append(encoder.unknown_id)
            else:
                expected.append(int("".join(map(str, window)), 4))
        assert tokens[row, 1:].tolist() == expected


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_does_not_change_the_features_of_a_read(pooling):
    backbone = tiny_bert(pooling=pooling).eval()
    read = torch.randint(0, 4, (2, 15))
    padded = torch.nn.functional.pad(read, (0, 9), value=PAD_BASE)
    torch.testing.assert_close(backbone.encoder(padded), backbone.encoder(read), rtol=1e-4, atol=1e-5)
    assert backbone.encoder(torch.full((2, 15), PAD_BASE)).isfinite().all()


def test_masking_hides_the_chosen_share_in_berts_proportions():
    stage = MaskedTokenPretraining(tiny_bert(max_length=250, kmer=3))
    tokens = stage.encoder.tokenise(torch.randint(0, 4, (400, 250)))
    tokens[:, 10] = stage.encoder.unknown_id
    hidden, chosen = stage.corrupt(tokens)
    assert not chosen[:, [0, 10]].any()
    assert torch.equal(hidden[~chosen], tokens[~chosen])
    share = chosen[:, 11:].float().mean()
    assert share == pytest.approx(0.15, abs=0.01)
    masked = (hidden[chosen] == stage.encoder.mask_id).float().mean()
    same = (hidden[chosen] == tokens[chosen]).float().mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    # a random k-mer is the right one once in 4^3 times
    assert same == pytest.approx(0.1 + 0.1 / 64, abs=0.02)
    assert hidden.max() < stage.encoder.num_kmers + 4


def test_overlapping_tokens_are_hidden_together():
    stage = MaskedTokenPretraining(tiny_bert(max_length=250, kmer=4, stride=1))
    tokens = stage.encoder.tokenise(torch.randint(0, 4, (200, 250)))
    _, chosen = stage.corrupt(tokens)
    assert chosen[:, 10:].float().mean() == pytest.approx(0.15, abs=0.01)
    for row in chosen[:, 1:].int().tolist():
        runs = [len(run) for run in "".join(map(str, row))[4:-4].strip("1").split("0") if run]
        assert all(run >= 4 for run in runs)


def test_a_batch_without_any_mask_has_a_zero_loss_that_reaches_every_weight():
    stage = MaskedTokenPretraining(tiny_bert(), mask_probability=1e-9)
    loss = stage.training_step(torch.randint(0, 4, (2, 8)), 0)
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is not None for p in stage.parameters())


def lightning_fit(test):
    """Let Lightning's own complaints pass: torch's newest names, small loaders, and a frozen encoder at rest."""
    for message in (".*LeafSpec", ".*does not have many workers", ".*in eval mode at the start of training"):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return test


def train(module, x, y, folder, epochs):
    """Fit on everything, return the last validation metrics, leave ``stage.ckpt`` in the folder."""
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = pl.Trainer(default_root_dir=folder, max_epochs=epochs, accelerator="cpu", **quiet)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer.fit(module, loader, DataLoader(TensorDataset(x, y), batch_size=64))
    trainer.save_checkpoint(folder / "stage.ckpt")
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def periodic_reads(count, length=24):
    """Reads that repeat a motif of their class: a hidden base follows from its place and from the other bases."""
    motifs = torch.tensor([[0, 0, 1, 2], [3, 1, 3, 0]])
    y = torch.arange(count) % 2
    return motifs[y][:, torch.arange(length) % 4], y


@pytest.mark.slow
@lightning_fit
def test_pretraining_learns_the_language_and_its_checkpoint_starts_the_fine_tuning(tmp_path):
    x, y = periodic_reads(192)
    pretraining = MaskedTokenPretraining(tiny_bert(), lr=5e-3, warmup_steps=10)
    metrics = train(pretraining, x, y, tmp_path, epochs=12)
    # untrained: log(4) and one in four
    assert metrics["val/loss"] < 0.4 * math.log(4)
    assert metrics["val/masked_accuracy"] > 0.85

    backbone = tiny_bert(checkpoint=tmp_path / "stage.ckpt", num_classes=2, frozen=True)
    assert not backbone.head_loaded
    for name, value in pretraining.encoder.state_dict().items():
        assert torch.equal(backbone.encoder.state_dict()[name], value)

    before = backbone.encoder.state_dict()["tokens.weight"].clone()
    fine_tuning = Classifier(backbone, optimizer=lambda learning: torch.optim.AdamW(learning, lr=5e-2))
    metrics = train(fine_tuning, x, y, tmp_path, epochs=3)
    assert metrics["val/acc"] > 0.95
    assert torch.equal(backbone.encoder.state_dict()["tokens.weight"], before)
    again = tiny_bert(checkpoint=tmp_path / "stage.ckpt")
    assert again.fingerprint() == backbone.fingerprint()
    assert again.head_loaded
