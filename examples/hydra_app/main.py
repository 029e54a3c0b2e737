"""A Hydra app of somebody else, in the style of lightning-hydra-template. It does not know rmd-plugin.

python examples/hydra_app/main.py                                   trains with its own callbacks
python examples/hydra_app/main.py callbacks=[default,ood_monitor]   and watches OOD detectors too
"""

import hydra
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DigitsData(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        self.x, self.y, self.batch_size = x.float() / 16, y, batch_size

    def _loader(self, chosen, **options) -> DataLoader:
        labels = torch.where(self.y < 6, self.y, -1)
        return DataLoader(TensorDataset(self.x[chosen], labels[chosen]), batch_size=self.batch_size, **options)

    def train_dataloader(self) -> DataLoader:
        return self._loader((self.y < 6).nonzero().flatten()[:800], shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader((self.y < 6).nonzero().flatten()[800:])

    def ood_dataloaders(self) -> dict[str, DataLoader]:
        return {"digits_6_9": self._loader((self.y >= 6).nonzero().flatten())}


class Net(pl.LightningModule):
    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.net, self.lr = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 6)), lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    pl.seed_everything(config.seed, verbose=False)
    callbacks = [hydra.utils.instantiate(node) for node in config.callbacks.values()]
    trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks)
    trainer.fit(hydra.utils.instantiate(config.model), datamodule=hydra.utils.instantiate(config.data))
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name}: {float(value):.3f}")


if __name__ == "__main__":
    main()
