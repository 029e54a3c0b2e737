"""rmd-reproduce: its experiments, and the command from end to end at toy size."""

import json
import shlex
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import config_kit
import pytest
import torch
from hydra import compose
from hydra.utils import get_class
from pytorch_lightning.utilities.warnings import PossibleUserWarning
from test_studies import TOY_SIMULATION, make_run

from rmd_plugin import NumericalWarning
from rmd_plugin.app.parts import make_detectors
from rmd_plugin.app.train import BenchmarkData, Classifier, make_callbacks
from rmd_plugin.backbones import ResNet, SmallCNN
from rmd_plugin.benchmarks import Digits
from rmd_plugin.compare.rows import read_rows
from rmd_plugin.paper import AccuracyRecorder, jobs, reproduce, studies
from rmd_plugin.paper.jobs import compose_experiment
from rmd_plugin.paper.published import TABLES
from rmd_plugin.paper.reproduce import SCALES, STUDIES, cell_name, chosen_studies, config_name, experiments
from rmd_plugin.report.run import RunFolder

EXPERIMENTS = config_kit.CONF / "experiment"
WEIGHTS = Path(reproduce.__file__).parent / "weights"
QUICK = ("limit_train=120", "limit_test=40", "trainer.max_epochs=1", "resamples=0", "figures=false")


@pytest.fixture
def hydra():
    with config_kit.hydra_initialised():
        yield


@pytest.fixture(autouse=True)
def _known_warnings():
    """Tiny data and Lightning's own deprecations are not what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        yield


def make_config(tmp_path, *overrides):
    usual = [f"output='{tmp_path}/small'", "paths.data_dir=null", "cache_dir=null"]
    return compose("reproduce", overrides=[*usual, *overrides])


def extra(*texts):
    return "extra=[" + ",".join(f'"{text}"' for text in texts) + "]"


def summary_of(tmp_path, study):
    return json.loads((tmp_path / "small" / study / "study.json").read_text())


# -- experiments ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_every_shipped_experiment_composes_and_fits_what_it_names(hydra, tmp_path, scale):
    config = make_config(tmp_path, f"scale={scale}")
    used = dict.fromkeys(name for study in STUDIES for name in experiments(study, scale) if name != "simulation")
    lines = {table: [] for table in (*TABLES, "robustness")}
    for name in used:
        cfg = compose_experiment(name, config)
        assert list(make_detectors(cfg)) == ["rmd", "mahalanobis", "msp"]
        assert cfg.weights == "last"
        assert cfg.paper.reason or scale == "paper"  # another setting than the paper's must say so
        for node in (cfg.benchmark, cfg.backbone):
            kinds = [kind for kind in get_class(node._target_).__mro__ if kind.__module__.startswith("rmd_plugin")]
            known = {argument for kind in kinds for argument in config_kit.arguments(kind)}
            assert {str(key) for key in node if not key.startswith("_")} <= known, name
        if cfg.train:
            assert make_callbacks(cfg)
        lines[name.partition("/")[0]].append(jobs.paper_line(cfg))
    for table, published in TABLES.items():
        assert set(lines[table]) <= set(published)
        assert scale != "paper" or sorted(lines[table]) == sorted(published)


def test_every_experiment_is_used_and_has_its_command_in_the_first_line(hydra):
    files = [path for path in EXPERIMENTS.rglob("*.yaml") if not path.stem.startswith("_")]
    names = {path.relative_to(EXPERIMENTS).with_suffix("").as_posix(): path for path in files}
    for name, path in names.items():
        assert path.read_text().splitlines()[:2] == ["# @package _global_", f"# rmd-train experiment={name}"]
    used = {config_name(name, scale) for scale in SCALES for study in STUDIES for name in experiments(study, scale)}
    small = {name for study in STUDIES for name in experiments(study, "small")}  # where the medium one has its own
    assert used | small == {*names, "simulation", "paper/simulation"}


def test_an_experiment_changes_its_folder_with_what_it_does(hydra, tmp_path):
    def folder(*overrides):
        return Path(compose_experiment("robustness/digits", make_config(tmp_path, *overrides)).paths.output_dir)

    one = folder()
    assert one.parent == tmp_path / "small" / "cells"
    assert len({one, folder("seed=1"), folder(extra("batch_size=8"))}) == 3
    # where data and features lie says nothing about what it does
    assert one == folder("paths.data_dir=elsewhere", "cache_dir=there")


def test_the_shipped_network_of_cifar_100_fits_the_small_experiment(hydra):
    cfg, about = compose("train", overrides=["experiment=table1/cifar100"]), WEIGHTS / "cifar100_resnet16.json"
    about = json.loads(about.read_text())
    assert not cfg.train
    # the network, its data and its preprocessing are those that it was trained with
    for name in ("blocks", "widths", "mean", "std", "shortcut"):
        assert cfg.backbone[name] == about["backbone"][name]
    assert cfg.benchmark.val_fraction == about["benchmark"]["val_fraction"]
    backbone = ResNet(about["backbone"]["blocks"], about["backbone"]["widths"], checkpoint=cfg.backbone.checkpoint)
    assert backbone.num_classes == 100
    assert backbone.head_loaded


def test_the_recorder_takes_the_accuracy_of_clean_training_samples_in_evaluation_mode(tmp_path):
    data = BenchmarkData(Digits(limit_train=60), batch_size=16)
    module = Classifier(SmallCNN(widths=(4, 4), dropout=0.9, num_classes=6))
    trainer = SimpleNamespace(
        callback_metrics={"val/acc": torch.tensor(0.5)}, sanity_checking=False, is_global_zero=True, global_step=7,
        datamodule=data, default_root_dir=str(tmp_path),
    )  # fmt: skip
    recorder, other = AccuracyRecorder(), AccuracyRecorder()
    module.train()
    before = torch.get_rng_state()
    recorder.on_validation_end(trainer, module)
    assert module.backbone.encoder.training
    assert torch.equal(before, torch.get_rng_state())
    x, y = (torch.stack([torch.as_tensor(item[i]) for item in data.benchmark.fit_set()]) for i in (0, 1))
    expected = (module.eval()(x).argmax(1) == y).float().mean()
    other.load_state_dict(recorder.state_dict())
    assert other.points == [(7, pytest.approx(float(expected)), 0.5)]


# -- the command ------------------------------------------------------------------------------------------------------


def test_studies_are_run_in_an_order_in_which_experiments_come_first():
    assert chosen_studies(["spectrum", "table1"]) == ["table1", "spectrum"]
    assert chosen_studies("all") == list(STUDIES)
    assert chosen_studies(None) == []
    with pytest.raises(ValueError, match="table4"):
        chosen_studies("table4")


def test_without_a_study_the_command_lists_all_of_them_without_torch(tmp_path):
    code = (
        "import runpy, sys; sys.argv = ['rmd-reproduce']\n"
        "runpy.run_module('rmd_plugin.paper.reproduce', run_name='__main__')\n"
        "print(sorted({'torch', 'matplotlib', 'pytorch_lightning', 'scipy'} & set(sys.modules)))"
    )
    listing = config_kit.python("-c", code, cwd=tmp_path)
    assert listing.returncode == 0, listing.stderr
    assert all(name in listing.stdout for name in (*STUDIES, "cifar10_efficientnet"))
    assert listing.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("word", ["cells=[cifar10,nope]", extra("nope=1")])
def test_a_mistake_in_what_was_typed_is_refused_before_anything_is_written(hydra, tmp_path, capsys, word):
    with pytest.raises(SystemExit) as end:
        jobs.run(make_config(tmp_path, "study=table1", word))
    assert end.value.code == 1
    assert "nope" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cell_or_a_study_that_fails_does_not_end_the_others(hydra, tmp_path, monkeypatch, capsys):
    def toy(experiment, cfg, scale):
        if cell_name(experiment) == "cifar10":
            raise RuntimeError("out of memory")
        return make_run()

    monkeypatch.setattr(jobs, "finish", toy)
    monkeypatch.setattr(studies, "spectrum_study", lambda runs: 1 / 0)
    with pytest.raises(SystemExit) as end:
        jobs.run(make_config(tmp_path, "study=[partial,spectrum]"))
    assert end.value.code == 1
    assert "1 of 2 studies failed: spectrum" in capsys.readouterr().err
    summary = summary_of(tmp_path, "partial")
    assert any("cifar10" in note and "out of memory" in note for note in summary["notes"])
    assert summary["numbers"]


@pytest.mark.slow
def test_simulation_from_the_command_to_the_document(tmp_path, monkeypatch):
    options = [f"simulation.{name}={value}".replace(" ", "") for name, value in TOY_SIMULATION.items()]
    options = [option.replace("'", "") for option in options]
    words = ["study=simulation", "seed=7", *options, f"document={tmp_path}/docs/R.md", f"output={tmp_path}/small"]
    assert config_kit.call(reproduce.main, monkeypatch, "rmd-reproduce", *words) == 0
    folder = tmp_path / "small" / "simulation"
    for name in ("arrays.npz", "comparison.md", "comparison.tex", "simulation.pdf", "simulation_sweep.png"):
        assert (folder / name).is_file()
    assert set(read_rows(folder / "rows.csv")["seed"]) == {7, 8}  # two seeds, counted up from that of the command
    document = (tmp_path / "docs" / "R.md").read_text()
    assert "](reproduction/simulation_network.png)" in document
    assert (tmp_path / "docs/reproduction/simulation_network.png").is_file()
    assert "rmd-reproduce study=simulation scale=small seed=7 simulation.dim=16" in document


@pytest.mark.slow
def test_a_study_trains_its_cell_once_and_goes_on_without_missing_data(hydra, tmp_path, monkeypatch):
    """Without data the genomics cell is left out and said so; digits is trained, kept, and used the second time."""
    monkeypatch.delenv("RMD_DATA_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["rmd-reproduce", extra(*QUICK)])
    jobs.run(make_config(tmp_path, "study=robustness", extra(*QUICK)))
    folder = tmp_path / "small"
    file = folder / "robustness" / "rows.csv"
    rows, content = read_rows(file), file.read_bytes()
    assert set(rows["detector"]) == {"", "mahalanobis", "rmd", "msp"}
    # two checks in one epoch
    assert rows[rows["detector"] == "rmd"]["reason"].nunique() == rows[rows["metric"] == "ACC"]["reason"].nunique() == 2
    assert any("genomics" in note for note in summary_of(tmp_path, "robustness")["notes"])
    (cell,) = [path for path in (folder / "cells").iterdir() if RunFolder(path).done]
    (weights,) = cell.rglob("last.ckpt")
    before = weights.stat().st_mtime_ns
    # the command that its folder names, typed by hand, uses it
    program, *words = shlex.split(json.loads((cell / "versions.json").read_text())["command"])
    assert program == "rmd-reproduce"
    jobs.run(make_config(tmp_path, *words))
    # a finished cell counts although another one is asked for
    jobs.run(make_config(tmp_path, "study=robustness", "cells=[genomics]", extra(*QUICK)))
    assert [path for path in (folder / "cells").iterdir() if RunFolder(path).done] == [cell]
    assert weights.stat().st_mtime_ns == before
    assert file.read_bytes() == content


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_papers_experiments_run_a_few_steps(hydra, tmp_path, data_dir, table):
    """The paper's networks and stages, two steps each, with random weights where theirs must be fetched."""
    quick = (
        "trainer=cpu", "benchmark.download=false", "limit_test=8", "num_workers=0", "batch_size=2", "monitor=[msp]",
        "trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "resamples=0",
        "figures=false",
    )  # fmt: skip
    # the networks for CIFAR-100 are those for CIFAR-10, and need ten times the samples
    names = [name for name in experiments(table, "paper") if "cifar100" not in name]
    assert len(names) >= 2
    for name in names:
        classes = {"cifar10": 10, "clinc": 150, "genomics": 10}[cell_name(name).split("_")[0]]
        changes = [*quick, f"limit_train={2 * classes}"]
        if name.endswith("genomics"):
            changes += ["trainer.max_steps=2", "trainer.val_check_interval=2"]
            changes += ["pretrain.max_epochs=1"] if table != "table1" else []
        if any(word in name for word in ("vit", "bit", "clip")):
            changes.append("backbone.pretrained=false")
        if name.endswith("clinc"):
            changes.append("backbone.name=sentence-transformers/all-MiniLM-L6-v2")
        config = make_config(tmp_path, "scale=paper", f"paths.data_dir='{data_dir}'", extra(*changes))
        run = jobs.finish(name, compose_experiment(name, config), "paper")
        assert {"mahalanobis", "rmd"} <= set(run.rows["detector"])
