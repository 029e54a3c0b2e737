"""Small guards of every kind, and the data that they know."""

import numpy as np
import torch
from PIL import Image

from rmd_plugin import Calibrated, FusedRMD, Guard
from rmd_plugin.backbones import Identity, ResNet
from rmd_plugin.compare.features import fit_linear_probe

CLASSES = ["bird", "cat", "dog", "fish"]


def pictures(count, size=(40, 50), *, seed=0, ood=False):
    """Arrays (H, W, 3) of four classes, each a coarse pattern of its own in noise; OOD ones have other patterns."""
    patterns = np.random.default_rng(100 if ood else 0).integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    noise = np.random.default_rng([seed, 1])
    found = []
    for number in range(count):
        smooth = Image.fromarray(patterns[number % 4]).resize(size[::-1], Image.Resampling.BICUBIC)
        noisy = np.asarray(smooth).astype(int) + noise.integers(-60, 61, (*size, 3))
        found.append(np.clip(noisy, 0, 255).astype(np.uint8))
    return found


def labels(count):
    return torch.arange(count) % 4


def encode(backbone, items):
    backbone.eval()
    inputs = [backbone.test_transform(item) for item in items]
    with torch.no_grad():
        return torch.cat(
            [backbone.encoder(torch.stack(inputs[start : start + 64])) for start in range(0, len(items), 64)]
        )


def guard_of(backbone, train, held_out, classes=CLASSES, make=FusedRMD, **options):
    """A guard behind an untrained network: random features tell these classes apart well enough."""
    z, y = encode(backbone, train), torch.arange(len(train)) % len(classes)
    backbone.head = fit_linear_probe(z, y, len(classes))
    detector = Calibrated(make(), **options).fit_features(z, y).calibrate_features(encode(backbone, held_out))
    return Guard(backbone, detector, classes, transform=backbone.test_transform)


def as_images(arrays):
    return [Image.fromarray(array) for array in arrays]


def picture_guard(**options):
    torch.manual_seed(0)
    backbone = ResNet((1, 1), (8, 16), image_size=24)
    return guard_of(backbone, as_images(pictures(160)), as_images(pictures(80, seed=1)), **options)


def feature_guard(make=FusedRMD, width=6, **options):
    torch.manual_seed(0)
    y = torch.arange(400) % 2
    z = torch.randn(400, width)
    z[:, 0] += 8.0 * y
    backbone = Identity(width)
    backbone.head = fit_linear_probe(z[:200], y[:200], 2)
    detector = Calibrated(make(), **options).fit_features(z[:200], y[:200]).calibrate_features(z[200:])
    return Guard(backbone, detector, ["left", "right"], input_shape=(width,))
