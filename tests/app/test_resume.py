"""``resume=true``: last.ckpt is the last, what may have changed, what is refused, damaged checkpoints."""

import csv
import os

import config_kit
import numpy as np
import pytest
import torch

from rmd_plugin.app.classifier import Classifier
from rmd_plugin.app.commands import train as main
from rmd_plugin.report.run_folder import RunFolder

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]

TINY = [
    "benchmark=digits", "backbone=mlp", "backbone.hidden=[8]",
    "backbone.dropout=0.3", "limit_train=80", "limit_test=30", "figures=false",
    "resamples=5", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "detector=[rmd,msp]",
    "trainer.max_epochs=3",
]  # fmt: skip
LAST, BEST = "checkpoints/last.ckpt", "checkpoints/best.ckpt"


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Runs the command in this process; gives back its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*words, out="out", check=True):
        code = config_kit.call(main, monkeypatch, "rmd-train", *TINY, f"hydra.run.dir={out}", *words)
        printed = "".join(capfd.readouterr())
        assert not check or code == 0, printed
        return code, printed

    return call


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def same(one, other):
    return all(map(torch.equal, weights(one).values(), weights(other).values()))


def logged(folder):
    with open(f"{folder}/csv/metrics.csv", newline="") as file:
        rows = csv.DictReader(file)
        return [{key: value for key, value in row.items() if not key.endswith("fit_seconds")} for row in rows]


@pytest.mark.parametrize(
    ("options", "step"),
    [
        (["trainer.val_check_interval=0.4"], 15),  # 5 batches: the last validation is not at the end of the epoch
        (["trainer.max_steps=7", "trainer.max_epochs=-1"], 7),
        (["weights=last"], 15),
        (["optimizer.optimizer.lr=0"], 15),  # the metric never improves
    ],
)
def test_the_last_checkpoint_is_of_the_final_step(train, options, step):
    train("batch_size=16", *options)
    assert torch.load(f"out/{LAST}", weights_only=True)["global_step"] == step


def test_changed_options_of_the_training_are_refused_by_name_and_nothing_is_touched(train):
    train()
    before = RunFolder("out").file("config.yaml").read_bytes()
    code, printed = train("resume=true", "seed=1", "optimizer.optimizer.lr=0.5", check=False)
    assert code == 1
    for words in ("seed=1 (was 0)", "optimizer.optimizer.lr=0.5 (was 0.003)", "hydra.run.dir=FOLDER", "Give the old"):
        assert words in printed
    assert RunFolder("out").done
    assert RunFolder("out").file("config.yaml").read_bytes() == before


def test_changed_detectors_are_compared_on_the_weights_that_there_are(train):
    train()
    before = RunFolder("out").file(LAST).read_bytes()
    _, printed = train("resume=true", "detector=[rmd,msp,energy]", "resamples=3")
    assert "detector.energy" in printed
    assert {row.detector for row in RunFolder("out").read_rows()} >= {"rmd", "msp", "energy"}
    assert RunFolder("out").file(LAST).read_bytes() == before
    assert [row["epoch"] for row in logged("out") if row["train/loss"]] == ["0", "1", "2"]
    train("detector=[rmd,msp,energy]", "resamples=3", out="anew")
    assert RunFolder("out").file("rows.csv").read_bytes() == RunFolder("anew").file("rows.csv").read_bytes()
    # and now it is finished
    _, printed = train("resume=true", "detector=[rmd,msp,energy]", "resamples=3", "logger=none")
    assert "finished before, not run again" in printed


def test_more_epochs_give_the_same_as_if_they_had_been_there_from_the_start(train):
    train()
    train("resume=true", "trainer.max_epochs=5")
    train("trainer.max_epochs=5", out="whole")
    assert same(f"out/{LAST}", f"whole/{LAST}")
    assert logged("out") == logged("whole")
    assert RunFolder("out").file("rows.csv").read_bytes() == RunFolder("whole").file("rows.csv").read_bytes()


def test_more_epochs_are_refused_where_the_learning_rate_would_have_been_another(train):
    train("optimizer=sgd")
    code, printed = train("optimizer=sgd", "resume=true", "trainer.max_epochs=5", check=False)
    assert code == 1
    assert "optimizer.scheduler.T_max=5 (was 3)" in printed


def test_a_training_that_stopped_early_stays_stopped(train):
    options = [
        "callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=1", "optimizer.optimizer.lr=0",
        "trainer.max_epochs=9",
    ]  # fmt: skip
    train(*options)
    train(*options, "resume=true", "resamples=3")
    assert torch.load(f"out/{LAST}", weights_only=True)["global_step"] == 4
    assert {row["epoch"] for row in RunFolder("out").read_history()} == {0, 1}


@pytest.mark.parametrize("damage", ["truncated", "one bit"])
def test_a_damaged_last_checkpoint_gives_way_to_the_best_one(train, damage):
    train(out="whole")
    train()
    content = bytearray(RunFolder("out").file(LAST).read_bytes())
    if damage == "truncated":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    RunFolder("out").file(LAST).write_bytes(content)
    RunFolder("out").file("status.json").unlink()
    _, printed = train("resume=true")
    assert "last.ckpt is damaged: going on from" in printed
    assert "best.ckpt" in printed
    assert same(f"out/{LAST}", f"whole/{LAST}")
    assert RunFolder("out").file("rows.csv").read_bytes() == RunFolder("whole").file("rows.csv").read_bytes()


def test_a_run_that_was_moved_goes_on_with_its_own_best_weights(train):
    options = ["optimizer.optimizer.lr=0.02"]
    train(*options, "trainer.max_epochs=5", out="whole")
    train(*options)
    os.rename("out", "moved")
    train(*options, "seed=1")  # another run takes its place
    train(*options, "trainer.max_epochs=5", "resume=true", out="moved")
    assert same(f"moved/{BEST}", f"whole/{BEST}")
    assert RunFolder("moved").file("rows.csv").read_bytes() == RunFolder("whole").file("rows.csv").read_bytes()
    os.rename("moved", "again")
    train(*options, "trainer.max_epochs=5", "resume=true", "resamples=6", out="again")
    with np.load("whole/scores.npz") as whole, np.load("again/scores.npz") as again:
        assert all(np.array_equal(whole[name], again[name]) for name in whole)


def test_weights_without_a_config_that_says_how_they_were_trained_are_refused(train):
    train()
    RunFolder("out").file("config.yaml").unlink()
    code, printed = train("resume=true", "seed=1", check=False)
    assert code == 1
    assert "no config.yaml" in printed
    assert "ckpt_path=" in printed


@pytest.mark.parametrize("text", ["- a list", "a: [1", "a: ${"])
def test_a_damaged_config_is_one_sentence(train, text):
    train()
    RunFolder("out").file("config.yaml").write_text(text)
    code, printed = train("resume=true", check=False)
    assert code == 1
    assert "config.yaml is damaged: " in printed
    assert "Traceback" not in printed


def test_if_no_checkpoint_is_whole_the_training_begins_again(train):
    train(out="whole")
    train()
    for name in (LAST, BEST):
        RunFolder("out").file(name).write_bytes(b"not a checkpoint")
    RunFolder("out").file("status.json").unlink()
    _, printed = train("resume=true")
    assert "the training begins again" in printed
    assert same(f"out/{LAST}", f"whole/{LAST}")


def test_a_run_that_failed_before_it_trained_may_be_resumed_with_other_options(train):
    code, _ = train("optimizer.optimizer.lr=abc", check=False)
    assert code == 1
    train("resume=true", "optimizer.optimizer.lr=0.01")
    assert RunFolder("out").done


@pytest.mark.parametrize(
    "options",
    [
        ["trainer.max_steps=17", "trainer.max_epochs=-1"],
        ["callbacks=[default,swa]", "callbacks.swa.swa_epoch_start=1", "weights=last"],
        ["trainer.accumulate_grad_batches=2", "callbacks.ood_monitor.refit=stream"],
        ["num_workers=1", "trainer.check_val_every_n_epoch=2", "optimizer=sgd"],
    ],
)
def test_a_training_that_failed_goes_on_as_if_it_had_not(train, monkeypatch, options):
    options = ["batch_size=16", "trainer.max_epochs=4", *options]
    train(*options, out="whole")
    step, calls = Classifier.training_step, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 13:  # in the third epoch
            raise RuntimeError("a lost connection")
        return step(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Classifier, "training_step", failing)
        assert train(*options, check=False)[0] == 1
    train(*options, "resume=true")
    assert same(f"out/{LAST}", f"whole/{LAST}")
    assert same(f"out/{BEST}", f"whole/{BEST}")
    assert logged("out") == logged("whole")
    assert RunFolder("out").file("rows.csv").read_bytes() == RunFolder("whole").file("rows.csv").read_bytes()
    history = [[row for row in RunFolder(x).read_history() if row["metric"] != "fit_seconds"] for x in ("out", "whole")]
    assert history[0] == history[1]
