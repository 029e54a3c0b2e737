"""A benchmark, a backbone, a detector and a callback of your own; the YAML files in conf/ name them.

cd examples/own_parts && rmd-compare --config-dir conf benchmark=wine backbone=wine_net "detector=[rmd,nearest_mean]"
"""

import pytorch_lightning as pl
import torch
from pytorch_ood.api import FeaturesDetector
from pytorch_ood.benchmark import Benchmark
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from rmd_plugin.backbones import Backbone


class Wine(Benchmark):
    """Wines of two cultivars are in-distribution, those of the third are OOD: 13 measurements each."""

    ood_names = ("third_cultivar",)
    num_classes = 2

    def __init__(self) -> None:
        x, y = (torch.from_numpy(array) for array in load_wine(return_X_y=True))
        x, self.y = ((x - x.mean(dim=0)) / x.std(dim=0)).float(), torch.where(y < 2, y, -1)
        test = torch.arange(len(y)) % 4 == 0
        self.parts = [TensorDataset(x[chosen], self.y[chosen]) for chosen in ((y < 2) & ~test, (y < 2) & test, y == 2)]

    def train_set(self) -> Dataset:
        return self.parts[0]

    def test_sets(self, known: bool = True, unknown: bool = True) -> list[Dataset]:
        if not known and not unknown:
            raise ValueError("test_sets needs known=True or unknown=True, both are False")
        return [ConcatDataset(self.parts[1:])] if known and unknown else [self.parts[1 if known else 2]]


class WineNet(Backbone):
    """A hidden layer and a linear head."""

    def __init__(self, width: int = 32, num_classes: int | None = None) -> None:
        super().__init__(nn.Sequential(nn.Linear(13, width), nn.ReLU()), width, num_classes=num_classes)


class NearestMean(FeaturesDetector):
    """Distance to the nearest class mean."""

    requires_fit = True

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.means = encoder, torch.empty(0)

    def fit_features(self, x: Tensor, y: Tensor) -> "NearestMean":
        self.means = torch.stack([x[y == label].mean(dim=0) for label in y[y >= 0].unique()])
        return self

    def predict_features(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.means).amin(dim=1)

    def predict(self, x: Tensor) -> Tensor:
        return self.predict_features(self.encoder(x))


class SayEpoch(pl.Callback):
    """Prints a line after each epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"epoch {trainer.current_epoch} is over")
