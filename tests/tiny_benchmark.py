"""A benchmark of a few vectors and a small network, for tests that need both."""

import torch
from pytorch_ood.benchmark import Benchmark
from torch import nn
from torch.utils.data import Dataset

from rmd_plugin.compare.features import fingerprint

WIDTH, CLASSES = 6, 3


class Vectors(Dataset):
    """Vectors and labels behind a transform, as the splits of our benchmarks are."""

    def __init__(self, x, y, transform=None):
        self.x, self.y, self.transform = x, y, transform

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        x = self.x[index]
        return (x if self.transform is None else self.transform(x)), int(self.y[index])

    def with_transform(self, transform):
        return Vectors(self.x, self.y, transform)

    def digest(self):
        return fingerprint([self.x, self.y])


class Tiny(Benchmark):
    """Three classes; ``near`` lies between them, ``far`` lies far away."""

    num_classes = CLASSES
    ood_names = ("near", "far")
    class_names = ("a", "b", "c")
    distance = {"near": "near", "far": "far"}  # noqa: RUF012

    def __init__(self, seed=0, count=240):
        generator = torch.Generator().manual_seed(seed)

        def draw(n, centre):
            return torch.randn(n, WIDTH, generator=generator) + centre

        centres = 4 * torch.eye(CLASSES, WIDTH)
        y = torch.arange(count) % CLASSES
        self.parts = {
            "train": Vectors(draw(count, centres[y]), y),
            "val": Vectors(draw(90, centres[y[:90]]), y[:90]),
            "test": Vectors(draw(60, centres[y[:60]]), y[:60]),
            "near": Vectors(draw(50, centres.mean(0)), torch.full((50,), -1)),
            "far": Vectors(draw(40, torch.full((WIDTH,), 9.0)), torch.full((40,), -1)),
        }

    def train_set(self):
        return self.parts["train"]

    fit_set = train_set

    def val_set(self):
        return self.parts["val"]

    def test_sets(self, known=True, unknown=True):
        if known and unknown:
            return [self.parts["test"] + self.parts[name] for name in self.ood_names]
        return [self.parts["test"]] if known else [self.parts[name] for name in self.ood_names]


class TinyNet(nn.Module):
    """Encoder and head; it counts the samples that pass."""

    test_transform = None

    def __init__(self, seed=0, head=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
            self.head = nn.Linear(8, CLASSES) if head else None
        self.head_loaded = False
        self.seen = 0
        self.encoder.register_forward_hook(self._count)

    def _count(self, _module, inputs, _output):
        self.seen += len(inputs[0])
