"""A small run of ``rmd-train`` that can be killed at any moment, and all that it leaves behind, to compare."""

import csv
import multiprocessing
import os
import signal
import sys

import numpy as np
import pytorch_lightning as pl
import torch
from config_kit import hydra_initialised
from torch.nn import functional as F

from rmd_plugin.report.run import RunFolder

#: dropout, shuffling, a learning rate that changes, validation inside of epochs, all of it in seconds
OPTIONS = [
    "benchmark=digits", "backbone=mlp", "backbone.hidden=[8]",
    "backbone.dropout=0.3", "optimizer=sgd", "optimizer.optimizer.lr=0.05",
    "callbacks=[default,lr_monitor]", "detector=[rmd,mahalanobis,msp]", "weights=last", "trainer.max_epochs=4",
    "trainer.val_check_interval=0.5", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
    "trainer.log_every_n_steps=1", "limit_train=150", "limit_test=40", "batch_size=32", "figures=false", "resamples=5",
]  # fmt: skip
#: and before it a stage without labels
PRETRAIN = [
    "+pretrain.max_epochs=2", "+pretrain.stage._target_=fault_kit.Contrast", "+pretrain.stage._partial_=true",
]  # fmt: skip

#: forks of a process that has imported everything: a run takes a second instead of ten
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["fault_kit", "rmd_plugin.app.train", "rmd_plugin.report.page"])


class Contrast(pl.LightningModule):
    """A first stage without labels: two noisy views of a sample lie close."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.project = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        one, other = (self.project(self.backbone.encoder(batch[0] + torch.randn_like(batch[0]))) for _ in range(2))
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def job(folder, *options):
    """Run ``rmd-train`` in this process."""
    import warnings

    from rmd_plugin.app.commands import compose_train
    from rmd_plugin.app.train import train
    from rmd_plugin.report import page
    from rmd_plugin.report.page import Picture

    warnings.simplefilter("ignore")
    page.picture = lambda figure, alt: Picture("", alt)  # drawing would take half of the time, and leaves no file
    torch.set_num_threads(1)
    os.makedirs(folder, exist_ok=True)
    sys.stdout = sys.stderr = open(os.path.join(folder, "output.txt"), "a")  # noqa: SIM115
    with hydra_initialised():
        cfg = compose_train([*OPTIONS, *PRETRAIN, f"paths.output_dir={folder}", *options])
    train(cfg, command="rmd-train")


def _killed_at(event, folder, *options):
    """The same, killed by itself when it opens, renames or removes a file of its folder for the n-th time."""
    seen = 0

    def count(name, arguments):
        nonlocal seen
        if name in ("open", "os.rename", "os.remove", "os.mkdir") and str(arguments[0]).startswith(str(folder)):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    job(folder, *options)
    print(f"events: {seen}", flush=True)


def run(folder, *options, event=0, seconds=None):
    """Run the job in a process of its own, kill it at an event or after some seconds; its exit code."""
    process = _processes.Process(target=_killed_at, args=(event, str(folder), *options))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def left_behind(folder):
    """Everything that a run left behind, but times and paths: rows, scores, history, logs, checkpoints."""
    place = RunFolder(folder)
    found = {"rows.csv": place.file("rows.csv").read_bytes(), "state": place.read_status().state}
    with np.load(place.file("scores.npz")) as arrays:
        found["scores"] = {key: (value.dtype.str, value.shape, value.tobytes()) for key, value in arrays.items()}
    found["history"] = [row for row in place.read_history() if row["metric"] != "fit_seconds"]
    if place.file("csv/metrics.csv").is_file():
        with open(place.file("csv/metrics.csv"), newline="") as file:
            found["logs"] = [
                {name: value for name, value in row.items() if not name.endswith("fit_seconds")}
                for row in csv.DictReader(file)
                if not row["train/loss"]  # Lightning logs it behind the epoch's checkpoint: a kill in between loses it
            ]
    for path in sorted(place.path.glob("*/*.ckpt")):
        content = torch.load(path, weights_only=True)
        kept = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")
        found[f"{path.parent.name}/{path.name}"] = plain({name: content[name] for name in kept})
    return found


def plain(value):
    """A checkpoint as values that compare: bytes for tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
