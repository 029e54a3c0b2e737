"""What users bring along: benchmarks, backbones, detectors of their own package, from a ``--config-dir`` of theirs."""

import config_kit
import pytest

from rmd_plugin.report.run import RunFolder

CODE = '''
import numpy as np
import torch
from PIL import Image
from pytorch_ood.api import FeaturesDetector
from pytorch_ood.benchmark import Benchmark
from torch import nn
from torch.utils.data import Dataset
from rmd_plugin.backbones.base import Backbone


class Pictures(Dataset):
    """Grey squares as a data set of the framework gives them: PIL pictures behind a transform."""

    def __init__(self, levels, count, label=None, transform=None):
        self.items = [(level, number) for number in range(count) for level in levels]
        self.levels, self.label, self.transform = levels, label, transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        level, number = self.items[index]
        noise = np.random.default_rng(number).integers(0, 60, size=(8, 8))
        picture = Image.fromarray((level + noise).astype("uint8"))
        label = self.levels.index(level) if self.label is None else self.label
        return (picture if self.transform is None else self.transform(picture)), label


class Squares(Benchmark):
    """A plain benchmark of pytorch-ood: nothing of rmd-plugin in it."""

    ood_names = ["white"]

    def __init__(self, transform=None):
        self.transform = transform

    def train_set(self):
        return Pictures([0, 90], 40, transform=self.transform)

    def test_sets(self, known=True, unknown=True):
        inside, outside = Pictures([0, 90], 15, None, self.transform), Pictures([190], 20, -1, self.transform)
        if known and unknown:
            return [inside + outside]
        return [inside] if known else [outside]


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 5)

    def forward(self, x):
        return self.layer(x.flatten(1))


def to_tensor(picture):
    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)


class Tiny(Backbone):
    """The network of the user."""

    def __init__(self, **options):
        super().__init__(Mean(), 5, train_transform=to_tensor, test_transform=to_tensor, **options)


class Norm(FeaturesDetector):
    """Scores by the length of the features."""

    requires_fit = False

    def __init__(self, encoder=None, power=1.0):
        super().__init__()
        self.encoder, self.power = encoder, power

    def fit(self, data_loader):
        return self

    def fit_features(self, z, y):
        return self

    def predict(self, x):
        return self.predict_features(self.encoder(x))

    def predict_features(self, z):
        return z.norm(dim=1) ** self.power
'''
CONFIGS = {
    "benchmark/squares.yaml": "defaults:\n  - override /backbone@_global_.backbone: tiny\n  - _self_\n"
    "_target_: mine.Squares\n",
    "backbone/tiny.yaml": "_target_: mine.Tiny\nnum_classes: null\n",
    "detector/norm.yaml": "norm:\n  _target_: mine.Norm\n  power: 2.0\n",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    for name, text in CONFIGS.items():
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(command, folder, *words):
    # as the console script does it: only what the command itself puts there can be imported from the current folder
    code = f"import sys; sys.path.remove(''); from rmd_plugin.app.commands import {command}; {command}()"
    arguments = ["--config-dir", "configs", "benchmark=squares", "detector=[rmd,norm,msp]", "figures=false", *words]
    cache = str(folder / "cache")
    done = config_kit.python("-c", code, *arguments, "hydra.run.dir=out", cwd=folder, RMD_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr[-3000:]
    return RunFolder(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_benchmark_backbone_and_detector_of_the_users_own(folder, command):
    words = ["trainer.max_epochs=1", "trainer.enable_progress_bar=false"] if command == "train" else []
    rows = run(command, folder, *words).read_rows()
    assert {(row.benchmark, row.backbone) for row in rows.itertuples()} == {("squares", "tiny")}
    found = {row.detector: row.value for row in rows.itertuples() if row.metric == "AUROC" and row.ood == "white"}
    assert set(found) == {"rmd", "norm", "msp"}
    assert all(0 <= value <= 1 for value in found.values())
