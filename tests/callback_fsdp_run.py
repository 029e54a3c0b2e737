"""Training runs under FSDP2 on two CPU processes, for test_fsdp: python callback_fsdp_run.py SCENARIO FOLDER.

As in callback_ddp_run, all numbers are small integers or dyadic fractions, so what one process finds can be compared.
"""

import sys
import warnings
from functools import partial

import callback_ddp_run as kit
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_ood.detector import KNN, ViM
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import OODMonitor

SIZES = {"train": 257, "val": 37, "near": 65, "tiny": 1}


def data(name, batch_size=8, **options):
    x, y = kit.integers(SIZES[name], list(SIZES).index(name)), torch.arange(SIZES[name]) % 4
    x[:, 0] += 60 * (y == 0)
    x[:, 1] += 60 * (y == 1)
    return DataLoader(TensorDataset(x, y), batch_size, **options)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.LeakyReLU(0.25)), nn.Linear(12, 4)

    def forward(self, x):
        return self.fc(self.body(x))


class Sharded(kit.Integers):
    """Its layers are groups of their own; in a ``training`` the head belongs to the outermost group."""

    def __init__(self, lr=0.0, training=False, bad=None):
        super().__init__()
        self.lr, self.training_run, self.bad = lr, training, bad
        if training:
            self.body = self.fc = nn.Identity()
            torch.manual_seed(0)
            self.model = Net()
        else:
            self.model = nn.Sequential(self.body, self.fc)
            del self.body, self.fc

    def configure_model(self):
        if torch.distributed.is_initialized() and not hasattr(self.model, "reshard"):
            for layer in list(self.model.children())[: 1 if self.training_run else None]:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        if self.bad is not None:
            self.model[0].register_forward_hook(self.fail)  # the next layer is still to be gathered

    def fail(self, layer, args, output):
        if self.trainer.global_rank == self.bad and len(output) == 7:
            raise ArithmeticError("only here")

    def forward(self, x):
        return self.model(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Look(pl.Callback):
    """Whether the weights are sharded where other people's callbacks may look at them."""

    def __init__(self):
        self.sharded = []

    def on_validation_epoch_start(self, trainer, module):
        self.sharded.append([hasattr(p, "full_tensor") for p in module.parameters()])


def trainer_of(strategy, *callbacks, **options):
    single = strategy == "auto"
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy if single else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=1 if single else 2,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "enable_checkpointing": False, **options},
    )


def compare(strategy, folder):
    """Everything that can be compared between one process and two."""
    size = 16 if strategy == "auto" else 8
    ood = {name: data(name, size) for name in ("near", "tiny")}
    detectors = {"rmd": kit.Keeping(shrinkage=0.1), "knn": KNN(None, k=3), "vim": partial(ViM, d=4)}
    found = kit.Recording(detectors, ood=ood)  # finds the head
    stream = kit.Recording({"rmd": kit.Keeping(shrinkage=0.1)}, "model.1", ood, refit="stream", prefix="stream")
    checkpoint = ModelCheckpoint(f"{folder}/checkpoints", save_last=True)
    save = kit.Save(folder)
    run = trainer_of(strategy, found, stream, checkpoint, save, enable_checkpointing=True)
    run.fit(Sharded(), data("train", size), data("val", size))


def train(strategy, folder, *monitors):
    """The weights after a training in which the number of forward passes and running statistics matter."""
    module, look = Sharded(lr=0.01, training=True), Look()
    trainer_of(strategy, *monitors, look).fit(module, data("train", 10, shuffle=True), data("val"))
    sharded = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return [p.detach().clone() for p in (*sharded, *module.buffers())], look.sharded


def evaluate(strategy, folder):
    """The detectors of a sharded checkpoint, which another OODMonitor reads."""
    monitor = kit.Recording(
        {"rmd": kit.Keeping(shrinkage=0.1), "vim": partial(ViM, d=4)}, "model.1", {"near": data("near")}
    )
    trainer_of(strategy, monitor).validate(Sharded(), data("val"), ckpt_path=f"{folder}/checkpoints/last.ckpt")
    return monitor.history


def main(scenario, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if scenario == "auto":
        compare("auto", folder)
    elif scenario == "fsdp2":
        compare("fsdp2", folder)
        monitors = [
            OODMonitor({"rmd": kit.Keeping(shrinkage=0.1), "vim": ViM}, "model.fc", {"near": data("near")}),
            OODMonitor({"rmd": kit.Keeping(shrinkage=0.1)}, "model.fc", refit="stream", prefix="stream"),
        ]
        found = {"plain": train("fsdp2", folder), "monitored": train("fsdp2", folder, *monitors)}
        found["evaluated"] = evaluate("fsdp2", folder)
        torch.save(found, f"{folder}/more-{kit.rank()}.pt")
    else:  # a forward pass fails on this rank, in the middle of an OOD set
        monitor = OODMonitor({"rmd": kit.Keeping(shrinkage=0.1)}, "model.1", {"near": data("near", 7)})
        trainer_of("fsdp2", monitor).fit(Sharded(bad=int(scenario)), data("train"), data("val"))


if __name__ == "__main__":
    main(*sys.argv[1:])
