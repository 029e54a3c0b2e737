"""``rmd-train`` in this process, because torch takes seconds to import: options, callbacks, resume, sweeps."""

import csv
import importlib
import re
import sys

import config_kit
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from config_kit import choices
from filelock import FileLock
from omegaconf import OmegaConf

from rmd_plugin.app import commands
from rmd_plugin.app.commands import job_folder, watched
from rmd_plugin.app.commands import train as main
from rmd_plugin.app.parts import make_backbone, make_benchmark
from rmd_plugin.app.train import BenchmarkData, check_options, make_callbacks
from rmd_plugin.app.train import train as run_job
from rmd_plugin.backbones.small import MLP
from rmd_plugin.benchmarks import Digits
from rmd_plugin.report.run import RunFolder

# a few samples of a narrow network: the detectors and Lightning warn of it, which a user sees and no test
pytestmark = pytest.mark.filterwarnings("default")

TINY = [
    "benchmark=digits", "backbone=mlp", "backbone.hidden=[8]", "backbone.dropout=0.3", "limit_train=80",
    "limit_test=30", "trainer.max_epochs=1", "figures=false", "resamples=5", "detector=[rmd,msp]",
]  # fmt: skip
LAST = "checkpoints/last.ckpt"


class Bomb(pl.Callback):
    """A power cut at the beginning of an epoch, or a user's own callback that only listens."""

    seen: list = []  # noqa: RUF012

    def __init__(self, epoch=None):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, pl_module):
        self.seen.append(trainer.current_epoch)
        if trainer.current_epoch == self.epoch:
            raise RuntimeError("power cut")


def composed(*words):
    cfg = config_kit.composed("train", *TINY, *words)
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])


def job(folder, *words):
    """Run one job without Hydra around it."""
    return run_job(composed(f"paths.output_dir={folder}", *words), command="test")


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Runs the command in this process; gives back its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(*arguments, out="out", check=True):
        # Hydra's parser wants -m before the overrides
        where = ["-m"] if "-m" in arguments else [f"hydra.run.dir={out}"]
        code = config_kit.call(main, monkeypatch, "rmd-train", *where, *TINY, *(w for w in arguments if w != "-m"))
        printed = capfd.readouterr()
        assert not check or code == 0, printed.err
        return code, printed.out, printed.err

    return call


# -- configs ----------------------------------------------------------------------------------------------------------


def test_every_target_of_the_configs_is_a_public_name():
    targets = {
        target
        for path in config_kit.CONF.rglob("*.yaml")
        for target in re.findall(r"_target_: *(rmd_plugin[\w.]*)", path.read_text())
    }
    assert len(targets) > 30
    for target in targets:
        package, _, name = target.rpartition(".")
        assert name in importlib.import_module(package).__all__, target
        assert getattr(importlib.import_module(package), name)


#: an option in a message, and its value or what stands for one
_ADVICE = re.compile(r"(?<![\w./={`-])(\+?[a-z_]+(?:\.[a-z_]+)*)=(FILE|FOLDER|VALUE|[a-z_]+|\[\.\.\.\])")


@pytest.mark.parametrize("module", ["commands", "compare", "parts", "train"])
def test_every_option_that_a_message_names_composes(module):
    text = (config_kit.ROOT / "rmd_plugin" / "app" / f"{module}.py").read_text()
    # texts of errors, remarks and logs: those with a blank
    messages = " ".join(part for part in re.findall(r'"((?:[^"\\]|\\.)*)"', text) if " " in part)
    named = dict(_ADVICE.findall(messages))
    if module == "train":
        assert named.keys() >= {"checkpoint", "head", "train"}
    for name, value in named.items():
        group = name.partition(".")[0].lstrip("+")
        part = {"backbone": "backbone=timm backbone.name=x", "benchmark": "benchmark=image_folder benchmark.path=x"}
        words = part.get(group, "").split() if "." in name else []
        value = "null" if value.isupper() or "." in value else value
        config_kit.composed("train", *words, *([] if name.startswith("hydra") else [f"{name}={value}"]))


@pytest.mark.slow
def test_every_option_of_a_group_that_any_message_names_composes():
    option = re.compile(r"(?<![\w./={`+-])(benchmark|backbone|trainer|detector|paths|callbacks)\.([a-z_.]+)=")
    sources = (config_kit.ROOT / "rmd_plugin").rglob("*.py")
    named = {words for path in sources for words in option.findall(path.read_text())}
    assert len(named) > 15
    for group, name in named:
        line = re.compile(rf"^{name.partition('.')[0]}:", re.MULTILINE)
        files = [path for path in (config_kit.CONF / group).glob("*.yaml") if line.search(path.read_text())]
        assert files, f"no {group} has {name}"
        config_kit.composed("train", f"{group}={files[0].stem}", f"{group}.{name}=null")


def test_the_extra_that_is_missing_is_named_with_its_package(monkeypatch, capsys):
    monkeypatch.setattr(commands, "_is_installed", lambda module: False)
    for word, package in (
        ("hydra/launcher=joblib", "hydra-joblib-launcher"),
        ("hydra/launcher=submitit_slurm", "hydra-submitit-launcher"),
        ("hydra/sweeper=optuna", "hydra-optuna-sweeper"),
    ):
        monkeypatch.setattr(sys, "argv", ["rmd-train", "-m", word])
        with pytest.raises(SystemExit):
            commands.run_command(lambda: None, "rmd-train")
        assert f"needs the package {package}" in capsys.readouterr().err
        assert package in (config_kit.ROOT / "pyproject.toml").read_text()


def test_by_default_something_cheap_is_watched():
    assert watched({"rmd", "msp"}) == ["rmd"]
    assert len(watched(["msp", "knn"])) == 1
    assert watched(["odin"]) == []


def test_folders_of_jobs_can_be_made_and_are_told_apart(tmp_path):
    plain = "backbone=mlp,detector=[rmd,msp],seed=0"
    assert job_folder(plain) == plain
    odd = ["", "..", "a=/x/y", "a=/x-y", "ü" * 200, "x" * 300, "x" * 299 + "y", "a=b c"]
    names = [job_folder(text) for text in odd]
    assert len(set(names)) == len(odd)
    for name in names:
        (tmp_path / name).mkdir()
        assert (tmp_path / name).parent == tmp_path


@pytest.mark.parametrize("backbone", ["small_cnn", "mlp"])
def test_small_backbones_take_pictures_and_vectors_and_refuse_texts(backbone, tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "hello,a\ngood bye,b\n" * 20)
    for words in (["benchmark=digits"], ["benchmark=simulation", "benchmark.dim=8"]):
        cfg = config_kit.composed("train", *words, f"backbone={backbone}")
        make_backbone(cfg, make_benchmark(cfg))
    cfg = config_kit.composed(
        "train", "benchmark=text_file", f"benchmark.path={tmp_path}/a.csv", f"backbone={backbone}"
    )
    with pytest.raises(ValueError, match="bert"):
        make_backbone(cfg, make_benchmark(cfg))


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["benchmark=features"], "benchmark.path=VALUE"),
        (["trainer.bogus=1"], "bogus"),
        (["+backbone.bogus=1"], "bogus"),
        (["monitor=[vim]"], "monitor names vim"),
        (["checkpoint=nowhere.ckpt"], "nowhere.ckpt"),
        (["checkpoint=other.ckpt", "train=false"], "does not fit MLP"),
        (["train=false"], "checkpoint=FILE"),
        (["hydra.run.dir=other.ckpt/run"], "Not a directory"),
        (["detector=[rmd,knnn]"], "knnn"),
        (["+callbacks.mine.patience=3"], "callbacks.mine"),
        (["weights=first"], "best, last"),
        (["objective=ood/knn/mean/AUROC"], "rmd, msp"),
        (["objective=val/f1"], "val/acc"),
    ],
)
def test_what_the_user_can_fix_is_told_without_a_traceback(train, tmp_path, options, message):
    torch.save({"state_dict": MLP(64, (5,), num_classes=6).state_dict()}, tmp_path / "other.ckpt")
    code, _, printed = train("logger=none", *options, check=False)
    assert code == 1
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_fault_of_the_program_keeps_its_traceback(train, monkeypatch):
    def fail(cfg):
        raise KeyError("a bug")

    monkeypatch.setattr("rmd_plugin.app.parts.make_benchmark", fail)
    with pytest.raises(KeyError):
        train(check=False)


@pytest.mark.slow
def test_without_ood_data_the_table_says_so_and_no_warning(tmp_path, capsys):
    rng = np.random.default_rng(0)
    arrays = {f"{split}_features": rng.normal(size=(60, 4)).astype("f4") for split in ("train", "test")}
    labels = {f"{split}_labels": np.arange(60) % 3 for split in ("train", "test")}
    np.savez(tmp_path / "mine.npz", **arrays, **labels)
    job(tmp_path / "out", "benchmark=features", f"benchmark.path={tmp_path}/mine.npz")  # a warning would be an error
    assert "There is no OOD data" in capsys.readouterr().out


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    with FileLock(tmp_path / ".lock"), pytest.raises(ValueError, match="another run"):
        job(tmp_path)
    assert not (tmp_path / "config.yaml").exists()


# -- callbacks and what is printed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", choices("callbacks"))
def test_every_shipped_callback_is_made(choice, tmp_path):
    cfg = composed(f"callbacks={choice}", f"paths.output_dir={tmp_path}", "trainer.enable_progress_bar=true")
    assert len(make_callbacks(cfg)) == len(cfg.callbacks)


def test_switches_of_the_trainer_turn_callbacks_off_and_bars_need_a_terminal(tmp_path):
    def made(*words):
        return {type(item).__name__ for item in make_callbacks(composed(f"paths.output_dir={tmp_path}", *words))}

    assert made() == {"OODMonitor", "ModelCheckpoint", "RandomStates"}
    assert made("trainer.enable_progress_bar=true") == made() | {"TQDMProgressBar"}
    assert made("trainer.enable_checkpointing=false") == made() - {"ModelCheckpoint"}
    assert made("monitor=[]") == {"ModelCheckpoint", "RandomStates"}


@pytest.mark.slow
def test_a_run_tells_results_and_says_a_remark_once(train):
    Bomb.seen.clear()
    mine = "+callbacks.mine._target_=test_train_options.Bomb"
    _, out, err = train("trainer.max_epochs=3", "backbone.hidden=[128]", mine)
    assert Bomb.seen == [0, 1, 2]
    lines = (out + err).splitlines()
    assert all("Preprocessing: " in line for line in lines if "INFO" in line)
    assert not any(".py:" in line or "Params" in line or "it/s" in line for line in lines)
    assert sum("covariance has rank" in line for line in lines) == 1


# -- objective and resume ---------------------------------------------------------------------------------------------


def test_a_finished_job_is_skipped_and_returns_its_number_again(tmp_path):
    accuracy = job(tmp_path)
    assert 0 < accuracy <= 1
    before = (tmp_path / "rows.csv").stat().st_mtime_ns
    assert job(tmp_path, "resume=true") == accuracy
    assert (tmp_path / "rows.csv").stat().st_mtime_ns == before
    assert RunFolder(tmp_path).read_status().state == "done"


def test_an_auroc_can_be_the_objective_with_a_warning(tmp_path, caplog):
    number = job(tmp_path, "objective=ood/rmd/mean/AUROC")
    rows = RunFolder(tmp_path).read_rows()
    expected = rows[(rows["detector"] == "rmd") & (rows["metric"] == "AUROC")]["value"].mean()
    assert number == pytest.approx(expected)
    assert "tunes on OOD data" in caplog.text
    with pytest.raises(ValueError, match="rmd, msp"):
        check_options(composed("objective=ood/knn/mean/AUROC"))


def test_optuna_looks_for_the_highest_objective_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(commands, "_is_installed", lambda module: True)

    def words(*more):
        monkeypatch.setattr(sys, "argv", ["rmd-train", "-m", "hydra/sweeper=optuna", *more])
        commands.run_command(lambda: None, "rmd-train")
        return sys.argv[3:]

    assert words() == ["hydra.sweeper.direction=maximize"]
    assert words("hydra.sweeper.direction=minimize") == ["hydra.sweeper.direction=minimize"]


def logged(folder):
    with open(folder / "csv/metrics.csv", newline="") as file:
        rows = csv.DictReader(file)
        return [{key: value for key, value in row.items() if not key.endswith("fit_seconds")} for row in rows]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_training_that_was_cut_off_ends_as_the_uninterrupted_one_did(tmp_path, workers):
    words = ["trainer.max_epochs=3", "batch_size=16", f"num_workers={workers}"]
    bomb = ["+callbacks.bomb._target_=test_train_options.Bomb", "+callbacks.bomb.epoch=2"]
    number = job(tmp_path / "whole", *words)
    with pytest.raises(RuntimeError, match="power cut"):
        job(tmp_path / "cut", *words, *bomb)
    assert RunFolder(tmp_path / "cut").read_status().state == "failed"
    torch.rand(7)  # another random state than the one that it was cut off with
    assert job(tmp_path / "cut", *words, "resume=true") == number
    weights = [torch.load(tmp_path / name / LAST, weights_only=True) for name in ("whole", "cut")]
    assert weights[0]["global_step"] == weights[1]["global_step"] == 15
    assert all(map(torch.equal, weights[0]["state_dict"].values(), weights[1]["state_dict"].values()))
    assert (tmp_path / "whole/rows.csv").read_bytes() == (tmp_path / "cut/rows.csv").read_bytes()
    assert logged(tmp_path / "whole") == logged(tmp_path / "cut")


def test_the_order_is_new_in_every_epoch_and_goes_on_from_a_saved_state():
    def order(data):
        return torch.cat([x for x, _ in data.train_dataloader()])

    first, second = (BenchmarkData(Digits(limit_train=40), batch_size=10) for _ in range(2))
    before = order(first)
    second.load_state_dict(first.state_dict())
    after = order(first)
    assert not torch.equal(before, after)
    assert torch.equal(order(second), after)


@pytest.mark.slow
def test_a_training_that_stopped_early_stays_stopped(tmp_path):
    options = [
        "callbacks=[default,early_stopping]", "callbacks.early_stopping.patience=1", "optimizer.optimizer.lr=0",
        "trainer.max_epochs=9",
    ]  # fmt: skip
    job(tmp_path, *options)
    (tmp_path / "status.json").unlink()
    job(tmp_path, *options, "resume=true")
    assert torch.load(tmp_path / LAST, weights_only=True)["global_step"] == 4
    assert {row["epoch"] for row in RunFolder(tmp_path).read_history()} == {0, 1}


# -- sweeps -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_reports_its_own_jobs_and_those_it_found_finished(train, tmp_path):
    def seeds():
        with open(tmp_path / "multirun/train/runs.csv", encoding="utf-8") as file:
            return sorted(record["seed"] for record in csv.DictReader(file))

    train("-m", "seed=0,1", "logger=none")
    assert seeds() == ["0", "1"]
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows.csv")}
    train("-m", "seed=2", "logger=none")
    assert seeds() == ["2"]
    train("-m", "seed=0,1", "resume=true", "logger=none")
    assert seeds() == ["0", "1"]
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.mark.slow
def test_a_failed_job_of_a_sweep_is_told_and_the_others_run(train, tmp_path):
    code, out, err = train("-m", "weights=first,best", check=False)
    assert code == 1
    assert "Traceback" not in out + err
    assert "best, last" in err
    assert sum(RunFolder(path.parent).done for path in tmp_path.rglob("rows.csv")) == 1
    assert "best, last" in out  # the summary of the sweep has it too


@pytest.mark.slow
def test_a_sweep_over_a_kept_config_is_reported_too(train, tmp_path, monkeypatch):
    train(out="first")
    kept = ["--config-dir", "first", "--config-name", "config", "-m", "seed=3,4"]
    assert config_kit.call(main, monkeypatch, "rmd-train", *kept) == 0
    assert len(list(tmp_path.glob("multirun/train/seed=[34]/rows.csv"))) == 2
    assert list(tmp_path.glob("multirun/train/summary.html"))


def test_joblib_runs_two_jobs_at_a_time():
    node = OmegaConf.load(config_kit.CONF / "hydra/launcher/joblib.yaml")
    assert node.n_jobs == 2
    conf = pytest.importorskip("hydra_plugins.hydra_joblib_launcher.config").JobLibLauncherConf
    assert set(node) == set(OmegaConf.structured(conf))
