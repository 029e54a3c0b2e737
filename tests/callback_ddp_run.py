"""One training run on one or two CPU processes, for test_callback_ddp: python callback_ddp_run.py STRATEGY FOLDER.

All numbers are small integers or dyadic fractions, and the learning rate is zero: sums are exact, whatever their order,
so that what one process finds and what two find can be compared bit by bit.
"""

import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.detector import KNN, ODIN, MaxSoftmax
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, FusedRMD, Mahalanobis, OODMonitor, RelativeFlow

SIZES = {"train": 91, "val": 37, "near": 23, "tiny": 1, "extra": 9}  # none of them even


def integers(count, seed, low=-40, high=41):  # so many that scores do not tie
    return torch.randint(low, high, (count, 8), generator=torch.Generator().manual_seed(seed)).float()


def data(name):
    seed = sorted(SIZES).index(name)
    x, y = integers(SIZES[name], seed), torch.arange(SIZES[name]) % 4
    x[:, 0] += 60 * (y == 0)
    x[:, 1] += 60 * (y == 1)
    if name == "val":
        y[5::9] = -1  # only their label marks some OOD samples
    return DataLoader(TensorDataset(x, y), 16)


class Integers(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.LeakyReLU(0.25))
        self.fc = nn.Linear(12, 4)
        for number, parameter in enumerate(self.parameters()):
            drawn = torch.randint(-2, 3, parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data = drawn.float() / 64

    def forward(self, x):
        return self.fc(self.body(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Keeping(RMD):
    """Keeps the moments."""

    def fit_moments(self, moments):
        self.kept = moments.with_shift(torch.zeros_like(moments.shift))
        return super().fit_moments(moments)


def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 1


class FitFails(Mahalanobis):
    def fit_moments(self, moments):
        if rank() == 1:
            raise ArithmeticError("only here")
        return super().fit_moments(moments)


class UpdateFails(Mahalanobis):
    def new_moments(self, *args, **kwargs):
        metric = super().new_moments(*args, **kwargs)
        update = metric.update

        def fails(*batch):
            if rank() == 1:
                raise ArithmeticError("only here")
            return update(*batch)

        metric.update = fails
        return metric


class ScoreFails(MaxSoftmax):
    def predict_logits(self, logits):
        if rank() == 1:
            raise ArithmeticError("only here")
        return super().predict_logits(logits)


class Recording(OODMonitor):
    """Keeps the scores of each evaluation, sorted."""

    def setup(self, trainer, module, stage):
        super().setup(trainer, module, stage)
        self.scores = []

    def _publish(self, trainer, gathered):
        ordered = {
            name: (id_scores.sort().values, {ood: scores.sort().values for ood, scores in ood_scores.items()})
            for name, (id_scores, ood_scores) in gathered.items()
        }
        self.scores.append(ordered)


class Save(pl.Callback):
    """What each process has at the end."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_end(self, trainer, module):
        monitors = [c for c in trainer.callbacks if isinstance(c, OODMonitor)]
        result = {"scores": [scores for m in monitors for scores in m.scores], "rank": trainer.global_rank}
        for monitor in monitors:
            rows = [row for row in monitor.history if row["metric"] != "fit_seconds"]
            fits = [row for row in monitor.history if row["metric"] == "fit_seconds"]
            kept = getattr(monitor.detectors.get("rmd"), "kept", None)
            moments = None if kept is None else (kept.counts, kept.sums, kept.second)
            states = {
                name: monitor.detectors[name].state_dict() for name in ("flow", "fused") if name in monitor.detectors
            }
            result[monitor.prefix] = {
                "rows": rows,
                "fits": len(fits),
                "moments": moments,
                **{name: state["tensors"] for name, state in states.items()},
            }
        result["metrics"] = {k: float(v) for k, v in trainer.callback_metrics.items() if "seconds" not in k}
        torch.save(result, f"{self.folder}/{trainer.global_rank}.pt")


def monitors():
    ood = {"near": data("near"), "tiny": data("tiny")}
    options = {"head": "fc", "ood": ood, "ood_dataloaders": {1: "extra"}}
    detectors = {
        "rmd": Keeping(shrinkage=0.1),
        "fused": FusedRMD(),
        "knn": KNN(None, k=3),
        "flow": RelativeFlow(max_epochs=2, shrinkage=0.1, progress=False),
        "odin": ODIN,
    }
    stream = {"rmd": Keeping(shrinkage=0.1), "fused": FusedRMD()}
    failing = {"fit": FitFails(shrinkage=0.1), "score": ScoreFails(None)}
    failing["update"] = UpdateFails(shrinkage=0.1, normalize=True)  # with an accumulator of its own
    failing["good"] = Mahalanobis(shrinkage=0.1)
    return [
        Recording(detectors, **options),
        Recording(stream, refit="stream", prefix="stream", **options),
        Recording(failing, prefix="failing", **options),
    ]


def main(strategy, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(rank())  # what the processes draw on their own must not matter
    checkpoint = ModelCheckpoint(Path(folder) / "checkpoints", monitor="ood/rmd/mean/AUROC", mode="max", save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1 if strategy == "auto" else 2,
        max_epochs=2,
        callbacks=[*monitors(), checkpoint, Save(folder)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Integers()
    trainer.fit(module, data("train"), [data("val"), data("extra")])
    trainer.predict(module, DataLoader(data("val").dataset.tensors[0], 4))
    predictions = trainer.callbacks[0].predictions
    torch.save({name: torch.tensor(column.to_numpy()) for name, column in predictions.items()},
               f"{folder}/predictions-{trainer.global_rank}.pt")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
