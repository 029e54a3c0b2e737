"""What OODMonitor costs: time beside a training without it, and memory.

    python speed/callback.py            about 3 minutes on an idle core

A ResNet-18 for 32x32 images (stem of one 3x3 convolution) is trained on random images for one epoch, with validation
on an ID and an OOD set in every case. The sides take turns, the best of several rounds counts, and every ratio comes
from one run. Times are CPU times of one thread, which other people's load disturbs less than the clock on the wall.
"""

import argparse
import logging
import resource
import time
import warnings
from collections.abc import Callable

import pytorch_lightning as pl
import torch
from pytorch_ood.detector import KNN
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, ClassMoments, Mahalanobis, OODMonitor
from rmd_plugin.compare.adapters import Encoded
from rmd_plugin.monitor.fitting import Fit, Watched

CLASSES = 100


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out))
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        same = stride == 1 and width == out
        short = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.short = nn.Identity() if same else short

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps (B, C, H, W) to feature maps."""
        return F.relu(self.second(F.relu(self.first(x))) + self.short(x))


class Net(pl.LightningModule):
    """ResNet-18 with the stem for small images: 11 million parameters, 512 features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        width = 64
        for out, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            layers.append(Block(width, out, stride))
            width = out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, 32, 32) to logits."""
        return self.fc(self.body(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Only the forward pass."""
        self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Clock(pl.Callback):
    """CPU time of the epoch, validation included."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin."""
        self.start = time.process_time()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """End."""
        self.seconds = time.process_time() - self.start


class TimedMonitor(OODMonitor):
    """CPU time of the refit alone."""

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where the monitor refits."""
        start = time.process_time()
        super().on_validation_epoch_start(trainer, pl_module)
        self.refit_seconds = time.process_time() - start


def images(count: int, seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 3, 32, 32, generator=generator), torch.arange(count) % CLASSES
    return DataLoader(TensorDataset(x, y), 64)


def epoch(train: DataLoader, val: list[DataLoader], monitor: OODMonitor | None) -> float:
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[clock] if monitor is None else [clock, monitor],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Net(), train, val)
    return clock.seconds


def bare_forward(train: DataLoader) -> float:
    module = Net().eval()
    start = time.process_time()
    with torch.no_grad():
        for x, _ in train:
            module(x)
    return time.process_time() - start


def monitor(refit: str) -> TimedMonitor:
    detectors = {"rmd": RMD(shrinkage=0.1), "md": Mahalanobis(shrinkage=0.1)}
    return TimedMonitor(detectors, "fc", ood_dataloaders={1: "ood"}, refit=refit)  # type: ignore[arg-type]


def measure_time(count: int, rounds: int) -> list[str]:
    train, val = images(count, 0), [images(64, 1), images(64, 2)]
    passes: list[float] = []

    def with_pass() -> float:
        watched = monitor("pass")
        seconds = epoch(train, val, watched)
        passes.append(watched.refit_seconds)
        return seconds

    sides: list[Callable[[], float]] = [
        lambda: epoch(train, val, None),
        lambda: epoch(train, val, monitor("stream")),
        with_pass,
        lambda: bare_forward(train),
    ]
    best = [float("inf")] * len(sides)
    for _ in range(rounds + 1):  # the first round warms up and may still be the best
        best = [min(old, side()) for old, side in zip(best, sides, strict=True)]
    alone, stream, watched, forward = best
    refit = min(passes)
    return [
        f"| epoch without the monitor | {alone:.2f} s | 1 | |",
        f'| epoch with `refit="stream"` | {stream:.2f} s | {stream / alone:.3f} of the epoch | <= 1.05 |',
        f'| epoch with `refit="pass"` | {watched:.2f} s | {watched / alone:.3f} of the epoch | |',
        f"| bare forward pass over the training set | {forward:.2f} s | 1 | |",
        f'| the refit of `refit="pass"`, 2 detectors | {refit:.2f} s | {refit / forward:.3f} of the pass | <= 1.1 |',
    ]


def measure_fit(samples: int = 8_000, width: int = 2_048) -> str:
    moments = ClassMoments()
    for start in range(0, samples, 1_000):
        y = torch.arange(start, start + 1_000) % CLASSES
        moments.update(torch.randn(1_000, width) + y[:, None] / CLASSES, y)
    gathered, seconds = moments.compute(), []
    for _ in range(3):
        start_time = time.process_time()
        RMD(shrinkage=0.1).fit_moments(gathered)
        seconds.append(time.process_time() - start_time)
    return f"| the fit of RMD after the pass, D={width} | {min(seconds):.2f} s | | <= 0.3 s |"


def measure_memory(counts: tuple[int, ...], width: int = 512) -> list[str]:
    rows = []
    for label, detectors in (
        ("RMD and Mahalanobis", {"rmd": RMD(), "md": Mahalanobis()}),
        ("KNN, for comparison", {"knn": KNN(None)}),
    ):
        for count in counts:
            watched = {name: Watched(detector) for name, detector in detectors.items()}
            refit, before = Fit(watched, torch.device("cpu")), None
            for start in range(0, count, 500):
                z, y = torch.randn(500, width), torch.arange(500) % CLASSES
                refit.update(Encoded(z, None, y), torch.arange(start, start + 500))
                before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - (before or 0)) / 1024
            rows.append(f"| {label} | {count:,} | {grown:.1f} MiB |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=512, help="training images")
    parser.add_argument("--rounds", type=int, default=3, help="0: only the memory")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    # memory first: after the training of a network the peak would hide what the accumulators add
    print("| detectors, 512 features | training samples | growth of the peak RSS |\n|---|---|---|")
    print("\n".join(measure_memory((2_000, 20_000, 100_000))))
    if arguments.rounds:
        print(f"\nResNet-18, 32x32, {arguments.images} training images, one thread, best of {arguments.rounds + 1}\n")
        print("| what | CPU time | ratio | promised |\n|---|---|---|---|")
        print("\n".join([*measure_time(arguments.images, arguments.rounds), measure_fit()]))


if __name__ == "__main__":
    main()
