"""last.ckpt by itself, without the commands, so that it can be tested with every release of Lightning."""

import errno
from pathlib import Path
from types import SimpleNamespace

import callback_kit as kit
import pytest
import pytorch_lightning as pl
import torch
from callback_kit import VAL, Augmented, Classifier, trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import TensorDataset

from rmd_plugin.app.data import BenchmarkData
from rmd_plugin.app.last_checkpoint import LastCheckpoint

pytestmark = [
    pytest.mark.filterwarnings(w) for w in (*kit.QUIET, "ignore:.*logging interval.*", "ignore:.*not empty.*")
]

LENGTHS = [{"max_epochs": 4}, {"max_epochs": 4, "val_check_interval": 0.4}, {"max_epochs": -1, "max_steps": 20}]


class Logging(Classifier):
    """Logs its loss, and may fail; dropout, shuffling and augmentation draw from all generators."""

    fails_at = -1

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails_at:
            raise RuntimeError("a lost connection")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, on_step=True)
        return loss

    def on_validation_epoch_end(self):
        self.log("never_better", 0.0)


def run(folder, *, fails_at=-1, **options):
    """Train, from last.ckpt if there is one."""
    pl.seed_everything(0, verbose=False)
    benchmark = SimpleNamespace(train_set=Augmented, val_set=lambda: TensorDataset(*VAL))
    best = ModelCheckpoint(folder, "best", monitor="never_better", enable_version_counter=False)
    last = LastCheckpoint(folder)
    logger = CSVLogger(folder, name="csv", version="")
    module = Logging()
    module.fails_at = fails_at
    made = trainer(folder, last, best, logger=logger, log_every_n_steps=1, **options)
    start = last.path if last.path.is_file() else None
    made.fit(module, datamodule=BenchmarkData(benchmark, batch_size=16), ckpt_path=start)
    return made, (folder / "csv/metrics.csv").read_bytes()


@pytest.mark.parametrize("options", LENGTHS)
def test_the_step_of_the_last_checkpoint_is_the_final_one(tmp_path, options):
    made, _ = run(tmp_path, **options)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == made.global_step > 18
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] < made.global_step


@pytest.mark.slow
@pytest.mark.parametrize("options", LENGTHS)
def test_a_training_goes_on_as_if_it_had_never_failed(tmp_path, options):
    whole, logs = run(tmp_path / "whole", **options)
    with pytest.raises(RuntimeError, match="a lost connection"):
        run(tmp_path / "parts", fails_at=15, **options)  # in the third epoch of six batches
    assert torch.load(tmp_path / "parts/last.ckpt", weights_only=True)["global_step"] == 12
    resumed, logs_resumed = run(tmp_path / "parts", **options)
    states = [made.lightning_module.state_dict().values() for made in (whole, resumed)]
    assert all(map(torch.equal, *states))
    assert logs_resumed == logs
    # and a training that is over stays as it is
    again, logs_again = run(tmp_path / "parts", **options)
    assert (again.global_step, logs_again) == (whole.global_step, logs)


def test_a_full_disk_leaves_the_checkpoint_before_and_no_part_of_a_new_one(tmp_path, monkeypatch):
    save, steps = pl.Trainer.save_checkpoint, []

    def full(self, path, *arguments, **options):
        save(self, path, *arguments, **options)
        if Path(path).name == ".last.ckpt.tmp":
            steps.append(self.global_step)
            if len(steps) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, max_epochs=4)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == steps[0] < steps[1]
    assert not (tmp_path / ".last.ckpt.tmp").exists()
