# %% [markdown]
# # A monitor in training
#
# Three lines, marked with (*), add detectors to a Lightning training. The detectors are refitted at each validation, and the
# trained weights are the same as without them, bit for bit.

# %%
import logging
import warnings

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, Mahalanobis, OODMonitor  # (*)

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*does not have many workers")


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 6)

    def forward(self, x):
        return self.fc(self.body(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


# %%
pl.seed_everything(0, verbose=False)
x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, known = x.float() / 16, y < 6
train = DataLoader(TensorDataset(x[known][:800], y[known][:800]), batch_size=64, shuffle=True)
val = DataLoader(TensorDataset(x[known][800:], y[known][800:]), batch_size=64)
new = DataLoader(TensorDataset(x[~known], -torch.ones(int((~known).sum())).long()), batch_size=64)

monitor = OODMonitor({"rmd": RMD(), "mahalanobis": Mahalanobis()}, head="fc", ood={"6-9": new})  # (*)
trainer = pl.Trainer(
    max_epochs=10, callbacks=[monitor], logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
)  # fmt: skip
trainer.fit(Digits(), train, val)
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items() if "AUROC" in name})

# %% [markdown]
# `monitor.history` has every metric of every epoch. Detection can get worse while the accuracy still rises, so it is worth
# watching both.

# %%
figure = Figure(figsize=(7, 3.6), layout="constrained")
axes = figure.subplots()
for name, colour, dash in (("rmd", "#0072B2", "-"), ("mahalanobis", "#D55E00", "--")):
    rows = [
        row for row in monitor.history if row["detector"] == name and row["metric"] == "AUROC" and row["ood"] == "6-9"
    ]
    axes.plot([row["epoch"] + 1 for row in rows], [100 * row["value"] for row in rows], dash, color=colour, label=name)
axes.set(xlabel="epoch", ylabel="AUROC on 6-9 (%)")
axes.legend(frameon=False)
# alt: AUROC of RMD and of the Mahalanobis distance on the digits 6 to 9 over 10 epochs
figure.savefig("epochs.png", dpi=120)

# %% [markdown]
# ## What this does not show
#
# One seed of one small network proves nothing about which detector is better. If you choose an epoch by its results
# on OOD data, report on other OOD data.
