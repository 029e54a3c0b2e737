"""Options of ``rmd-train`` in this process, because torch takes seconds to import: errors, monitor, sweeps."""

import csv
from types import SimpleNamespace

import config_kit
import pytest
import torch
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from rmd_plugin.app.commands import train as main
from rmd_plugin.app.configs import job_folder, watched_by_default
from rmd_plugin.app.errors import explain
from rmd_plugin.backbones.small import MLP
from rmd_plugin.report.run_folder import RunFolder

# a few samples of a narrow network: the detectors and Lightning warn of it, which a user sees and no test
pytestmark = pytest.mark.filterwarnings("default")

TINY = [
    "benchmark=digits", "backbone=mlp", "backbone.hidden=[8]",
    "limit_train=80", "limit_test=30", "trainer.max_epochs=1", "figures=false",
    "resamples=5", "logger=none", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
    "detector=[rmd,mahalanobis,msp]",
]  # fmt: skip


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


def watched(folder):
    return {record["detector"] for record in RunFolder(folder).read_history()}


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["benchmark=features"], "benchmark.path must be given: add benchmark.path=VALUE."),
        (["seed=abc"], "seed must be a whole number, got 'abc'."),
        (["+trainer.bogus=1"], "trainer.bogus is no argument"),
        (["trainer.max_epochs=x"], "trainer.max_epochs must be int"),
        (["optimizer.optimizer.lr=abc"], "the optimizer cannot be made"),
        (["+backbone.bogus=1"], "MLP cannot be made of its options"),
        (["monitor=[vim]"], "monitor names vim, which detector= does not choose"),
        (["detector=[rmd,gram]", "monitor=[gram]"], "'gram' cannot be monitored while the network trains"),
        (["ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
        (["ckpt_path=damaged.ckpt"], "damaged.ckpt"),
        (["ckpt_path=damaged.ckpt", "train=false"], "damaged.ckpt"),
        (["ckpt_path=other.ckpt"], "does not fit MLP(in_features=64, hidden=[8]"),
        (["ckpt_path=other.ckpt", "train=false"], "does not fit MLP(in_features=64, hidden=[8]"),
        (["ckpt_path=weights.ckpt"], "backbone.checkpoint=weights.ckpt"),
        (["hydra.run.dir=damaged.ckpt/run"], "cannot write to"),
        (["detector=[rmd,knnn]"], "there is no detector=knnn. Did you mean knn? There are: all, ash, "),
        (["trainer.max_epoch=1"], "there is no option trainer.max_epoch. Did you mean trainer.max_epochs?"),
        (["callbacks=[default,early_stoping]"], "Did you mean early_stopping?"),
        (["+callbacks.mine.patience=3"], "callbacks.mine needs a class: +callbacks.mine._target_=package.Class."),
        (["+callbacks.mine._target_=builtins.dict"], "callbacks.mine is a dict, expected a Lightning Callback"),
        (["weights=first"], "weights must be best or last, got 'first'"),
        (["head=nope"], "head must be own, auto, linear_probe or null, got 'nope'"),
        (["+trainer.callbacks=[1]"], "trainer.callbacks comes from callbacks=: add one by +callbacks.NAME._target_="),
        (["optimizer.lr=0.1"], "there is no option optimizer.lr. Did you mean optimizer.optimizer.lr?"),
        (["callbacks.early_stopping.patience=3"], 'Choose it first: "callbacks=[default,early_stopping]"'),
    ],
)
def test_what_the_user_can_fix_is_one_line(train, tmp_path, options, message):
    (tmp_path / "damaged.ckpt").write_bytes(b"PK\x03\x04 not a checkpoint")
    torch.save({"state_dict": MLP(64, (5,), num_classes=6).state_dict()}, tmp_path / "other.ckpt")
    torch.save(MLP(64, (8,), num_classes=6).state_dict(), tmp_path / "weights.ckpt")
    code, _, printed = train(*options, check=False)
    assert code == 1
    lines = [line for line in printed.splitlines() if line]
    assert len(lines) == 1, printed
    assert lines[0].startswith("rmd-train: ")
    assert message in lines[0]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_line(train):
    code, _, printed = train("trainer=gpu", check=False)
    assert (code, printed.count("\n")) == (1, 1)
    assert "trainer=cpu runs everywhere" in printed


@pytest.mark.slow
def test_a_fault_of_the_program_keeps_its_traceback(train, monkeypatch):
    def fail(self):
        raise KeyError("a bug")

    monkeypatch.setattr("rmd_plugin.app.train.make_benchmark", fail)
    code, _, printed = train(check=False)
    assert code == 1
    assert "Traceback" in printed


def test_the_whole_story_is_told_on_demand(train, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="optimizer"):
        train("optimizer.optimizer.lr=abc", check=False)


def test_an_unknown_choice_lists_those_there_are(train):
    for choice, known in (("sweep=nope", ("seeds", "shrinkage")), ("backbone=alexnet", ("small_cnn", "wrn28_10"))):
        code, _, printed = train(choice, check=False)
        assert code == 1
        assert all(name in printed for name in known)
    code, _, printed = train("experiment=tabel1/cifar100", check=False)
    assert code == 1
    assert "Did you mean table1/cifar100?" in printed


def test_a_launcher_that_is_not_installed_names_its_extra():
    def sentence(name):
        return explain(RuntimeError(f"Unknown plugin class : 'hydra_plugins.hydra_{name}_launcher.x.Launcher'"))

    assert "joblib needs the package hydra_plugins.hydra_joblib_launcher" in sentence("joblib")
    assert 'pip install "rmd-plugin[sweep]", or in a checkout pip install -e ".[sweep]"' in sentence("joblib")
    assert "[sweep]" in sentence("submitit")
    assert "[optuna]" in explain(MissingConfigException("", missing_cfg_file="hydra/sweeper/optuna"))


# -- monitor ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_detectors_on_logits_and_with_weights_of_the_head_can_be_watched(train):
    train("detector=[rmd,mahalanobis,msp,vim]", "monitor=[rmd,mahalanobis,msp,vim]")
    assert watched("out") == {"rmd", "mahalanobis", "msp", "vim"}
    values = [r["value"] for r in RunFolder("out").read_history() if r["metric"] == "AUROC" and r["detector"] == "vim"]
    assert values
    assert all(0 <= value <= 1 for value in values), values


@pytest.mark.slow
def test_the_monitor_follows_the_choice_of_detectors_and_can_be_empty(train):
    train("detector=[rmd,msp]")
    assert watched("out") == {"rmd"}
    _, printed, _ = train("monitor=[]", out="none")
    assert "RMD" in printed
    assert not watched("none")
    assert RunFolder("none").done
    assert RunFolder("none").file("report.html").is_file()
    assert RunFolder("none").file("checkpoints/best.ckpt").is_file()


def test_by_default_something_cheap_is_watched():
    assert watched_by_default({"rmd", "mahalanobis", "msp"}) == ["rmd", "mahalanobis"]
    assert watched_by_default(["msp", "knn"]) == ["msp"]
    assert watched_by_default(["odin"]) == []


@pytest.mark.slow
def test_the_default_run_tells_results_not_how_libraries_are_doing(train):
    _, out, err = train("detector=[rmd,mahalanobis,vim]", "backbone.hidden=[128]", "trainer.max_epochs=3")
    printed = out + err
    assert all("Preprocessing: " in line for line in printed.splitlines() if "INFO" in line)
    assert ".py:" not in printed
    # refitted in every epoch, said once
    assert 1 <= printed.count("[WARNING] - the within-class covariance has rank") <= 2


# -- sweeps -------------------------------------------------------------------------------------------------------


def test_folders_of_jobs_can_be_made_and_are_told_apart(tmp_path):
    plain = "backbone=mlp,detector=[rmd,msp],seed=0"
    assert job_folder(plain) == plain
    odd = ["", ".", "..", "a=/x/y", "a=/x-y", "a=-x/y", "ü" * 200, "x" * 300, "x" * 299 + "y", "a=b c", "a='b'"]
    names = [job_folder(text) for text in odd]
    assert len(set(names)) == len(odd)
    for name in names:
        (tmp_path / name).mkdir()
        assert (tmp_path / name).parent == tmp_path
        assert name not in (".", "..")


@pytest.mark.slow
def test_a_sweep_reports_its_own_jobs_and_those_it_found_finished(train, tmp_path):
    def seeds():
        with open(tmp_path / "multirun/train/runs.csv", encoding="utf-8") as file:
            return sorted(record["seed"] for record in csv.DictReader(file))

    train("-m", "seed=0,1")
    assert seeds() == ["0", "1"]
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows.csv")}
    train("-m", "seed=2")
    assert seeds() == ["2"]
    train("-m", "seed=0,1", "resume=true")
    assert seeds() == ["0", "1"]
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.mark.slow
def test_many_options_and_paths_make_no_impossible_folders(train, tmp_path):
    many = [f"+names.option_{number}={'x' * 20}" for number in range(12)]
    train("-m", *many, f"cache_dir={tmp_path}/a/b", "seed=0,1")
    jobs = [path.parent for path in tmp_path.rglob("rows.csv")]
    assert len(jobs) == 2
    assert {job.parent for job in jobs} == {tmp_path / "multirun/train"}


@pytest.mark.slow
def test_a_failed_job_of_a_sweep_is_one_line_and_the_others_run(train, tmp_path, monkeypatch, capfd):
    at_exit = []
    monkeypatch.setattr("rmd_plugin.app.hydra_callbacks.atexit", SimpleNamespace(register=at_exit.append))
    code, out, err = train("-m", "optimizer.optimizer.lr=abc,0.01", check=False)
    assert code == 1
    assert "Traceback" not in out + err
    # when it happens, and at the end
    assert (out.count("the optimizer cannot be made"), err.count("the optimizer cannot be made")) == (1, 1)
    assert sum(RunFolder(path.parent).done for path in tmp_path.rglob("rows.csv")) == 1
    at_exit[0]()
    assert "the optimizer cannot be made" in capfd.readouterr().out


@pytest.mark.slow
def test_a_sweep_over_a_kept_config_is_reported_too(train, tmp_path, monkeypatch):
    train(out="first")
    assert "hydra" not in OmegaConf.to_yaml(OmegaConf.load("first/config.yaml").names)
    kept = ["--config-dir", "first", "--config-name", "config", "-m", "seed=3,4"]
    assert config_kit.call(main, monkeypatch, "rmd-train", *kept) == 0
    assert len(list(tmp_path.glob("multirun/train/seed=[34]/rows.csv"))) == 2
    assert list(tmp_path.glob("multirun/train/summary.html"))


def test_joblib_runs_two_jobs_at_a_time():
    node = OmegaConf.load(config_kit.CONF / "hydra/launcher/joblib.yaml")
    assert node.n_jobs == 2
    conf = pytest.importorskip("hydra_plugins.hydra_joblib_launcher.config").JobLibLauncherConf
    assert set(node) == set(OmegaConf.structured(conf))
