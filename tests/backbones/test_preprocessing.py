"""The preprocessing of every vision backbone: what is given is used or refused, and where it came from is known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import transforms as tv

from rmd_plugin.backbones import (
    MLP,
    Backbone,
    EfficientNetLite0,
    OpenCLIP,
    ResNet,
    SmallCNN,
    Timm,
    TorchVision,
    WideResNet,
)
from rmd_plugin.backbones.checkpoint import read_checkpoint
from rmd_plugin.backbones.transforms import CIFAR_MEAN, IMAGENET_MEAN, ImageTransform

Build = Callable[..., Backbone]


def timm_model(**options: Any) -> Backbone:
    pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    return Timm("test_resnet.r160_in1k", pretrained=False, **options)


def clip_model(**options: Any) -> Backbone:
    pytest.importorskip("open_clip", reason="open_clip is not installed (extra vision)")
    return OpenCLIP("RN50", pretrained=False, **options)


BUILDERS: dict[str, Build] = {
    "timm": timm_model,
    "open_clip": clip_model,
    "torchvision": lambda **options: TorchVision("resnet18", pretrained=False, **options),
    "resnet": lambda **options: ResNet((1,), (4,), **options),
    "wide_resnet": lambda **options: WideResNet(10, 1, **options),
    "efficientnet": lambda **options: EfficientNetLite0(pretrained=False, **options),
    "small_cnn": lambda **options: SmallCNN(widths=(4,), **options),
    "mlp": lambda **options: MLP(3 * 16 * 16, (4,), **options),
}
slow = {"open_clip"}
every_backbone = pytest.mark.parametrize(
    "build", [pytest.param(b, id=n, marks=pytest.mark.slow if n in slow else ()) for n, b in BUILDERS.items()]
)


@every_backbone
def test_mean_and_std_of_the_user_are_used_in_training_and_testing(build: Build) -> None:
    backbone = build(mean=[0.1, 0.2, 0.3], std=[0.5, 0.5, 0.4], num_classes=2)
    for transform in (backbone.train_transform, backbone.test_transform):
        assert isinstance(transform, ImageTransform)
        assert (transform.mean, transform.std) == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.4))
    assert {backbone.origins["mean"], backbone.origins["std"]} == {"the config"}


@every_backbone
def test_a_transform_of_the_user_replaces_all_preprocessing(build: Build) -> None:
    transform = tv.Compose([tv.Resize((16, 16)), tv.ToTensor()])
    backbone = build(transform=transform)
    assert backbone.train_transform is transform
    assert backbone.test_transform is transform
    assert backbone.origins == {"transform": "the config"}
    with pytest.raises(ValueError, match=r"transform replaces the whole preprocessing, mean and std would be ignored"):
        build(transform=transform, mean=[0, 0, 0], std=[1, 1, 2])
    with pytest.raises(ValueError, match=r"must take a raw item to a tensor, got a str.*_target_=package.Class"):
        build(transform="resize")


@pytest.mark.parametrize(
    ("build", "size", "mean", "origin"),
    [
        (BUILDERS["torchvision"], 224, IMAGENET_MEAN, "the metadata of weights that were not loaded"),
        (BUILDERS["timm"], 160, (0.5,) * 3, "the metadata of weights that were not loaded"),
        (BUILDERS["resnet"], 32, CIFAR_MEAN, "the default of ResNet"),
        (BUILDERS["wide_resnet"], 32, CIFAR_MEAN, "the default of WideResNet"),
        (BUILDERS["efficientnet"], 224, (127 / 255,) * 3, "the default of EfficientNetLite0"),
    ],
)
def test_without_a_word_the_backbones_own_is_used_and_its_origin_known(
    build: Build, size: int, mean: tuple[float, ...], origin: str
) -> None:
    transform: Any = build().test_transform
    assert (transform.size, transform.mean) == (size, mean)
    assert build().origins == {"size": origin, "mean": origin, "std": origin}
    assert build(image_size=48).origins == {"size": "the config", "mean": origin, "std": origin}


def test_loaded_weights_bring_their_metadata_and_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import ResNet18_Weights, resnet18

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(resnet18().state_dict(), tmp_path / "checkpoints" / Path(ResNet18_Weights.DEFAULT.url).name)
    backbone = TorchVision("resnet18", pretrained_head=True)
    assert set(backbone.origins.values()) == {"the weights' metadata"}
    assert backbone.noted.accuracy == pytest.approx(0.69758)


def test_networks_for_tensors_leave_them_alone_unless_pictures_are_spoken_of() -> None:
    for backbone in (SmallCNN(widths=(4,)), MLP(4), SmallCNN(widths=(4,), mean=None, std=None, transform=None)):
        assert backbone.test_transform is None
        assert backbone.origins == {}
    pictures = SmallCNN(widths=(4,), image_size=20)
    transform: Any = pictures.test_transform
    assert transform == ImageTransform(20, (0,) * 3, (1,) * 3)
    assert pictures.encoder(transform(torch.rand(3, 50, 31))[None]).shape == (1, 4)
    assert MLP(3 * 20 * 20, (5,), image_size=20).encoder(transform(torch.rand(3, 9, 9))[None]).shape == (1, 5)


def test_a_checkpoint_tells_its_accuracy_where_lightning_kept_one(tmp_path: Path) -> None:
    weights = {"head.weight": torch.ones(2, 3)}
    kept = {"monitor": "val/acc", "current_score": torch.tensor(0.75), "best_model_score": torch.tensor(0.9)}
    cases: list[tuple[object, float | None]] = [
        ({"ModelCheckpoint": kept}, 0.75),
        ({"ModelCheckpoint": {"monitor": "val_accuracy", "best_model_score": torch.tensor(0.5)}}, 0.5),
        ({"ModelCheckpoint": {"monitor": "val/loss", "current_score": torch.tensor(0.5)}}, None),
        ({"ModelCheckpoint": {"monitor": "val/acc", "current_score": torch.tensor(75.0)}}, None),
        ({"ModelCheckpoint": {"monitor": "val/acc", "current_score": None}, "Other": [1]}, None),
        ("garbage", None),
    ]
    for callbacks, accuracy in cases:
        torch.save({"state_dict": weights, "callbacks": callbacks, "rmd_preprocessing": 7}, tmp_path / "a.ckpt")
        state, noted = read_checkpoint(tmp_path / "a.ckpt")
        assert (noted.accuracy, noted.preprocessing) == (accuracy, None)
        assert torch.equal(state["head.weight"], weights["head.weight"])
