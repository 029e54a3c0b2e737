"""Image networks against independent implementations of the same weights, and how each prepares its pictures."""

import pytest
import torch
from torch import nn
from torchvision import transforms as tv
from torchvision.models import resnet18

from rmd_plugin.backbones import MLP, CheckpointError, ImageTransform, ResNet, SmallCNN, Timm, TorchVision, WideResNet
from rmd_plugin.backbones.transforms import CIFAR_MEAN


def stir(model):
    """Give the batch statistics values that are not their start, so that a lost buffer shows."""
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            noise = torch.rand(buffer.shape, generator=generator)
            buffer.copy_(noise + 0.5 if name.endswith("running_var") else noise - 0.5)
    return model.eval()


def test_the_wide_resnet_agrees_with_the_frameworks_on_its_own_checkpoint(tmp_path):
    from pytorch_ood.model import WideResNet as Reference

    reference = stir(Reference(num_classes=7, depth=16, widen_factor=2))
    torch.save(reference.state_dict(), tmp_path / "wrn.pt")
    ours = WideResNet(16, 2, checkpoint=tmp_path / "wrn.pt").eval()
    x = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(ours.encoder(x), reference.features(x))
    torch.testing.assert_close(ours(x), reference(x))


def test_a_checkpoint_of_openood_s_resnet18_is_loaded_by_its_names(tmp_path):
    # torchvision's network under a small stem, with shortcut for downsample (openood/networks/resnet18_32x32.py)
    reference = resnet18(num_classes=10)
    reference.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    stir(reference)
    theirs = {name.replace("downsample", "shortcut"): value for name, value in reference.state_dict().items()}
    torch.save(theirs, tmp_path / "best.ckpt")
    ours = ResNet(checkpoint=tmp_path / "best.ckpt", interpolation="bilinear").eval()
    assert (ours.num_classes, ours.head_loaded) == (10, True)
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), reference(x), rtol=1e-4, atol=1e-4)
    theirs["layer2.0.shortcut.0.bias"] = torch.zeros(128)
    torch.save(theirs, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match=r"layer2\.0\.shortcut\.0\.bias"):
        ResNet(checkpoint=tmp_path / "other.ckpt")


def test_the_padded_shortcut_keeps_every_second_pixel_between_zero_channels():
    block = ResNet((1, 1), (4, 8), shortcut="pad").encoder.get_submodule("layer2.0.downsample")
    x = torch.rand(1, 4, 6, 6)
    out = block(x)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, [0, 1, 6, 7]].any()
    assert not list(block.parameters())


# -- preprocessing ----------------------------------------------------------------------------------------------------


def timm_model(**options):
    pytest.importorskip("timm", reason="timm is not installed (extra vision)")
    return Timm("test_resnet.r160_in1k", pretrained=False, **options)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
NOT_LOADED = "the metadata of weights that were not loaded"
# constructor, and the usual size, mean and where they come from
BACKBONES = {
    "timm": (timm_model, 160, (0.5,) * 3, NOT_LOADED),
    "torchvision": (lambda **kw: TorchVision("resnet18", pretrained=False, **kw), 224, IMAGENET_MEAN, NOT_LOADED),
    "resnet": (lambda **kw: ResNet((1,), (4,), **kw), 32, CIFAR_MEAN, "the default of ResNet"),
    "wide_resnet": (lambda **kw: WideResNet(10, 1, **kw), 32, CIFAR_MEAN, "the default of WideResNet"),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_pictures_are_prepared_as_usual_or_as_the_user_says_and_the_origin_is_known(name):
    build, size, mean, origin = BACKBONES[name]
    usual = build().test_transform
    assert (usual.size, usual.mean, usual.augment) == (size, mean, False)
    assert build().origins == {"size": origin, "mean": origin, "std": origin}
    backbone = build(mean=[0.1, 0.2, 0.3], std=[0.5, 0.5, 0.4], image_size=48)
    for transform, augment in ((backbone.train_transform, True), (backbone.test_transform, False)):
        assert isinstance(transform, ImageTransform)
        assert (transform.size, transform.mean, transform.augment) == (48, (0.1, 0.2, 0.3), augment)
    assert set(backbone.origins.values()) == {"the config"}


@pytest.mark.parametrize("name", ["timm", "wide_resnet"])
def test_a_transform_of_the_user_replaces_all_preprocessing(name):
    build = BACKBONES[name][0]
    transform = tv.Compose([tv.Resize((16, 16)), tv.ToTensor()])
    backbone = build(transform=transform)
    assert backbone.train_transform is transform
    assert backbone.test_transform is transform
    assert backbone.origins == {"transform": "the config"}
    with pytest.raises(ValueError, match="mean and std would be ignored"):
        build(transform=transform, mean=[0, 0, 0], std=[1, 1, 2])


def test_networks_for_tensors_leave_them_alone_unless_pictures_are_spoken_of():
    for backbone in (MLP(4), SmallCNN(widths=(4,), mean=None, std=None, transform=None)):
        assert backbone.test_transform is None
        assert backbone.origins == {}
    pictures = SmallCNN(widths=(4,), image_size=20)
    transform = pictures.test_transform
    assert transform == ImageTransform(20, (0,) * 3, (1,) * 3)
    assert pictures.encoder(transform(torch.rand(3, 50, 31))[None]).shape == (1, 4)
    assert MLP(3 * 20 * 20, (5,), image_size=20).encoder(transform(torch.rand(3, 9, 9))[None]).shape == (1, 5)
