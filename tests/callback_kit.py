"""A small classifier, its data and a quiet trainer for the tests of the callback."""

import logging
import random

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from rmd_plugin import RMD, OODMonitor

#: Lightning's own complaints about small runs, and about torch's newer pytree
QUIET = (
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*",
    "ignore:.*Checkpoint directory.*exists and is not empty.*",
    "ignore:.*persistent_workers.*",
    "ignore:.*num_workers.*",
    "ignore:.*You're resuming from a checkpoint that ended before the epoch ended.*",
    "ignore:.*fork.*:DeprecationWarning",
    "ignore:.*sampler has shuffling enabled.*",
    "ignore:.*callbacks used to create the checkpoint need to be provided.*",
    "ignore:.*have no `val_dataloader`.*",
)

CLASSES, WIDTH = 4, 8
#: of a trainer
OPTIONS = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
OPTIONS |= {"enable_progress_bar": False, "enable_model_summary": False}

# networks of this size only wait for each other's threads
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2))
        self.fc = nn.Linear(16, CLASSES)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.fc(self.features(x))


def classifier(root):
    """The class of classifiers of a root of Lightning."""

    class Classifier(root.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.model = Net()

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self(batch[0])

        def test_step(self, batch, batch_idx, dataloader_idx=0):
            self(batch[0])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    return Classifier


Classifier = classifier(pl)


def samples(count, seed, *, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    centres = 2.0 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    y = torch.arange(count) % CLASSES
    return centres[y] * (1 - shift) + torch.randn(count, WIDTH, generator=generator), y


TRAIN, VAL, OOD = samples(90, 0), samples(37, 1), samples(23, 2, shift=0.6)
OTHER = samples(18, 3, shift=1.0)


def loader(data, batch_size=16, **kwargs):
    return DataLoader(TensorDataset(*data), batch_size, **kwargs)


def near_loader(batch_size: int) -> DataLoader:
    """For LightningCLI, which needs the types."""
    return loader(OOD, batch_size)


class Augmented(Dataset):
    """Draws from all three global generators, as augmentations do."""

    def __init__(self, data=TRAIN):
        self.x, self.y = data

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        noise = 0.1 * (torch.randn(WIDTH) + float(np.random.rand()) + random.random())  # noqa: NPY002
        return self.x[index] + noise, self.y[index]


def trainer(tmp_path=None, *callbacks, **kwargs):
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    checkpoints = any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks)
    defaults = {"num_sanity_val_steps": 0, "default_root_dir": tmp_path, "enable_checkpointing": checkpoints}
    return pl.Trainer(callbacks=list(callbacks), **(OPTIONS | defaults | kwargs))


def fit(monitor, *callbacks, module=None, train=None, val=None, tmp_path=None, **kwargs):
    """Train the classifier for one epoch (or more) and return trainer and module."""
    module = module or Classifier()
    run = trainer(tmp_path, *(() if monitor is None else (monitor,)), *callbacks, **kwargs)
    run.fit(module, loader(TRAIN) if train is None else train, loader(VAL) if val is None else val)
    return run, module


def monitored(detectors=None, **options):
    """A monitor of RMD, or of other detectors, with the OOD set ``svhn``."""
    detectors = {"rmd": RMD()} if detectors is None else detectors
    return OODMonitor(detectors, **{"head": "model.fc", "ood": {"svhn": loader(OOD)}, **options})


def values(monitor, metric="AUROC", **conditions):
    """Values of the history, by detector and set."""
    rows = [r for r in monitor.history if r["metric"] == metric and all(r[k] == v for k, v in conditions.items())]
    return {(r["detector"], r["ood"]): r["value"] for r in rows}


def told(caught):
    """Messages of the monitor among recorded warnings."""
    return [str(w.message) for w in caught if str(w.message).startswith("OODMonitor")]


@torch.no_grad()
def features_of(module, x):
    module.eval()
    return module.model.features(x)
