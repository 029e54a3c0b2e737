"""Add RMD to a Lightning training of your own: the three lines marked with (*).

python examples/lightning_script.py
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD, Mahalanobis, OODMonitor  # (*)


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 6)

    def forward(self, x):
        return self.fc(self.body(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, is_id = x.float() / 16, y < 6
x_id, y_id = x[is_id], y[is_id]
train = DataLoader(TensorDataset(x_id[:800], y_id[:800]), batch_size=64, shuffle=True)
val = DataLoader(TensorDataset(x_id[800:], y_id[800:]), batch_size=64)
ood = DataLoader(TensorDataset(x[~is_id], -torch.ones(int((~is_id).sum())).long()), batch_size=64)

monitor = OODMonitor({"rmd": RMD(), "md": Mahalanobis()}, head="fc", ood={"6-9": ood})  # (*)
trainer = pl.Trainer(max_epochs=5, callbacks=[monitor], logger=False, enable_checkpointing=False)  # (*)
trainer.fit(Digits(), train, val)
for name in ("rmd", "md"):
    print(f"{name}: AUROC {float(trainer.callback_metrics[f'ood/{name}/6-9/AUROC']):.3f}")
