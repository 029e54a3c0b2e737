"""A benchmark of a few vectors and a small network, for tests that need both."""

import numpy as np
import torch
from torch import nn

from rmd_plugin.benchmarks import OODBenchmark, OODSet, Parts, Split, TensorRows

WIDTH, CLASSES = 6, 3


def vectors(x, y):
    """Vectors and labels as a split."""
    return Split(TensorRows(x.numpy()), y)


class Tiny(OODBenchmark):
    """Three classes; ``near`` lies between them, ``far`` lies far away."""

    name = "tiny"

    def load(self):
        generator = torch.Generator().manual_seed(self.seed)

        def draw(n, centre):
            return torch.randn(n, WIDTH, generator=generator) + centre

        centres, y = 4 * torch.eye(CLASSES, WIDTH), torch.arange(240) % CLASSES
        train, val, test = (vectors(draw(n, centres[y[:n]]), y[:n]) for n in (240, 90, 60))
        near = vectors(draw(50, centres.mean(0)), np.full(50, -1))
        far = vectors(draw(40, torch.full((WIDTH,), 9.0)), np.full(40, -1))
        return Parts(["a", "b", "c"], train, test, [OODSet("near", "near", near), OODSet("far", "far", far)], val=val)

    def items(self, name):
        """The vectors of ``test`` or of an OOD set."""
        split = self.test_in if name == "test" else self.test_oods[self.ood_names.index(name)]
        return torch.from_numpy(split.source.items)


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
