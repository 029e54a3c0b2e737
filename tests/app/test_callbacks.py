"""``callbacks=``: any Lightning callback can join a training, and the options of the shipped ones are reached."""

import config_kit
import pytest
import pytorch_lightning as pl
import torch
from config_kit import choices, composed

from rmd_plugin.app.commands import train
from rmd_plugin.app.parts import make_callbacks
from rmd_plugin.report.run_folder import RunFolder

pytestmark = pytest.mark.filterwarnings("default")

TINY = [
    "benchmark=digits", "backbone=mlp", "backbone.hidden=[8]",
    "limit_train=80", "limit_test=30", "figures=false", "resamples=5",
    "logger=none", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "detector=[rmd,msp]",
]  # fmt: skip


class Recorder(pl.Callback):
    """A user's own callback."""

    seen: list = []  # noqa: RUF012

    def __init__(self, word):
        self.word = word

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append((self.word, trainer.current_epoch))


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = config_kit.call(train, monkeypatch, "rmd-train", *TINY, "hydra.run.dir=out", *words)
        assert code == 0, capfd.readouterr().err
        return RunFolder(tmp_path / "out")

    return call


def epochs(folder):
    return {row["epoch"] for row in folder.read_history()}


@pytest.mark.slow
def test_early_stopping_stops_early(run):
    # nothing gets better at a learning rate of zero: one epoch, and then patience
    folder = run(
        "callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=2", "optimizer.optimizer.lr=0",
        "trainer.max_epochs=40",
    )  # fmt: skip
    assert epochs(folder) == {0, 1, 2}
    assert folder.done


@pytest.mark.slow
def test_a_callback_of_the_users_own_joins_and_gets_its_options(run):
    Recorder.seen.clear()
    run("+callbacks.mine._target_=test_callbacks.Recorder", "+callbacks.mine.word=hello", "trainer.max_epochs=2")
    assert Recorder.seen == [("hello", 0), ("hello", 1)]


@pytest.mark.slow
def test_the_options_of_the_monitor_are_reached(run):
    folder = run("callbacks.ood_monitor.every_n_epochs=2", "callbacks.ood_monitor.refit=stream", "trainer.max_epochs=4")
    assert epochs(folder) == {1, 3}
    streamed = [row["value"] for row in folder.read_history() if row["metric"] == "AUROC" and row["epoch"] == 3]
    folder = run("callbacks.ood_monitor.every_n_epochs=2", "trainer.max_epochs=4")
    passed = [row["value"] for row in folder.read_history() if row["metric"] == "AUROC" and row["epoch"] == 3]
    assert len(streamed) == len(passed)
    assert streamed != passed


@pytest.mark.slow
def test_callbacks_leave_by_a_tilde_or_all_together(run):
    folder = run("~callbacks.ood_monitor", "trainer.max_epochs=1")
    assert not folder.read_history()
    assert folder.file("checkpoints/best.ckpt").is_file()
    folder = run("callbacks=none", "trainer.max_epochs=1", "trainer.enable_checkpointing=false", "hydra.run.dir=none")
    assert RunFolder("none").done
    assert not RunFolder("none").file("checkpoints").exists()


@pytest.mark.slow
def test_averaged_weights_are_the_last_ones(run):
    run("callbacks=[default,swa]", "callbacks.swa.swa_epoch_start=1", "trainer.max_epochs=4", "weights=last")
    content = torch.load("out/checkpoints/last.ckpt", weights_only=True)
    assert content["global_step"] == 8  # 80 samples in batches of 64, four times
    plain = run("trainer.max_epochs=4", "weights=last", "hydra.run.dir=plain")
    assert plain is not None
    other = torch.load("plain/checkpoints/last.ckpt", weights_only=True)
    assert other["global_step"] == 8
    assert any(not torch.equal(content["state_dict"][key], other["state_dict"][key]) for key in other["state_dict"])


@pytest.mark.slow
@pytest.mark.parametrize("choice", [name for name in choices("callbacks") if name not in ("default", "none")])
def test_every_shipped_callback_is_made(choice, tmp_path):
    cfg = composed("train", f"callbacks=[default,{choice}]", "detector=[rmd]", f"paths.output_dir={tmp_path}")
    made = make_callbacks(cfg)
    assert all(isinstance(callback, pl.Callback) for callback in made)
    assert sum(isinstance(callback, pl.callbacks.ProgressBar) for callback in made) == 1


def test_switches_of_the_trainer_turn_callbacks_off(tmp_path):
    words = ["callbacks=[default,model_summary]", "detector=[rmd]", f"paths.output_dir={tmp_path}"]
    switches = [f"trainer.enable_{name}=false" for name in ("progress_bar", "model_summary", "checkpointing")]
    made = make_callbacks(composed("train", *words, *switches))
    assert [type(callback).__name__ for callback in made] == ["OODMonitor"]
