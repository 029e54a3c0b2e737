import csv
import logging
import math
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import scipy.stats
from omegaconf import OmegaConf

from rmd_plugin.app import report as command
from rmd_plugin.app.hydra_callbacks import ReportCallback
from rmd_plugin.compare.rows import Row
from rmd_plugin.report.aggregate import FAR, NEAR, Group, estimate, paired_difference, ranks, summarise
from rmd_plugin.report.document import render
from rmd_plugin.report.figures import cost_figure, difference_figure
from rmd_plugin.report.gather import Run, gather_runs, read_run
from rmd_plugin.report.run_folder import RunFolder
from rmd_plugin.report.summary import overall_tables, runs_table, summary_tables, write_summary
from rmd_plugin.report.table import to_html

RNG = np.random.default_rng(0)
SETS = {"near a": "near", "near b": "near", "noise": "far"}


def rows_of(values, benchmark="digits", backbone="mlp", seed=0, sets=SETS):
    """Rows in which a detector has its value on every near set, and 0.05 more on far ones."""
    rows = [Row(benchmark, "", backbone, "", seed, "ACC", 0.9)]
    for detector, value in values.items():
        for ood, distance in sets.items():
            number = value + 0.05 * (distance == "far")
            rows.append(Row(benchmark, ood, backbone, detector, seed, "AUROC", number, distance=distance))
        rows.append(Row(benchmark, "", backbone, detector, seed, "fit_seconds", 1 - value))
    return rows


def write_run(path, values, *, config=None, **key):
    folder = RunFolder(path)
    rows = rows_of(values, **key)
    about = {"benchmark": rows[0].benchmark, "backbone": rows[0].backbone, "seed": rows[0].seed}
    with folder.running(config=config, about=about, command="rmd-train"):
        folder.write_rows(rows)
    return folder


@pytest.fixture
def sweep(tmp_path):
    """Two benchmarks, three seeds; the detectors' numbers by benchmark."""
    numbers = {}
    rng = np.random.default_rng(1)
    job = 0
    for benchmark in ("digits", "simulation"):
        numbers[benchmark] = {name: 0.7 + 0.02 * rng.standard_normal(3) for name in ("rmd", "msp", "knn")}
        for seed in range(3):
            values = {name: float(found[seed]) for name, found in numbers[benchmark].items()}
            config = {"seed": seed, "benchmark": {"name": benchmark, "seed": seed}, "paths": {"output_dir": str(job)}}
            write_run(tmp_path / "sweep" / str(job), values, benchmark=benchmark, seed=seed, config=config)
            job += 1
    return tmp_path / "sweep", numbers


def test_mean_and_deviation_are_those_of_numpy():
    values = list(RNG.standard_normal(7))
    found = estimate(values)
    assert (found.mean, found.deviation) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert math.isnan(estimate([1.0]).deviation)
    assert math.isnan(estimate([]).mean)


def test_one_benchmark_gives_the_paired_t_interval():
    a, b = RNG.standard_normal((2, 6))
    found = paired_difference([list(a - b)])
    expected = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.value, found.low, found.high) == pytest.approx(((a - b).mean(), expected.low, expected.high))
    assert found.over == "seeds"


def test_two_benchmarks_give_half_of_welchs_interval():
    # the mean of two group means is half the difference between one group and the other with its sign changed
    a, b = RNG.standard_normal(4), 5 * RNG.standard_normal(7)
    found = paired_difference([list(a), list(b)])
    expected = scipy.stats.ttest_ind(a, -b, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low / 2, expected.high / 2))


def test_benchmarks_with_one_seed_are_the_sample():
    values = list(RNG.standard_normal(5))
    found = paired_difference([[value] for value in values])
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high, found.over) == pytest.approx((expected.low, expected.high, "benchmarks"))


def test_too_few_pairs_give_no_interval_and_no_spread_gives_a_point():
    for groups in ([[1.0]], [[0.1, 0.9]], [[1.0], [2.0]], [[1.0], [], [2.0, 3.0]]):
        found = paired_difference(groups)
        assert math.isnan(found.low)
        assert found.value == np.mean([np.mean(group) for group in groups if group])
    assert math.isnan(paired_difference([[]]).value)
    same = paired_difference([[0.5, 0.5, 0.5]])
    assert (same.low, same.high) == (0.5, 0.5)


def test_seeds_that_change_nothing_are_no_sample(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"same{seed}", {"rmd": 0.9, "msp": 0.8}, seed=seed)
        write_run(tmp_path / f"other{seed}", {"rmd": 0.9, "msp": 0.8 + 0.01 * seed}, benchmark="simulation", seed=seed)
    alone = summarise(gather_runs([tmp_path / f"same{seed}" for seed in range(3)]))
    (group,) = alone.seedless
    assert group.benchmark == "digits"
    assert (alone.estimate(group, "msp").mean, alone.estimate(group, "msp").count) == (pytest.approx(0.8), 1)
    assert math.isnan(alone.difference("msp").low)
    assert any("All seeds gave the same numbers" in note for note in overall_tables(alone)[0].notes)
    both = summarise(gather_runs([tmp_path]))
    assert [group.benchmark for group in both.seedless] == ["digits"]  # one detector that is equal does not make one
    assert both.estimate(next(g for g in both.groups if g.benchmark == "simulation"), "rmd").count == 3


def test_ranks_are_those_of_scipy():
    values = dict(enumerate([0.9, 0.5, 0.9, 0.1, 0.5, 0.5]))
    expected = scipy.stats.rankdata([-value for value in values.values()])
    assert list(ranks(values).values()) == list(expected)
    assert list(ranks(values, lower=True).values()) == list(scipy.stats.rankdata(list(values.values())))


def test_a_sweep_is_summarised_by_benchmark_and_over_all(sweep):
    folder, numbers = sweep
    summary = summarise(gather_runs([folder]))
    assert list(summary.groups) == [Group("digits", "mlp"), Group("simulation", "mlp")]
    for group in summary.groups:
        for name, values in numbers[group.benchmark].items():
            found = summary.estimate(group, name)
            assert (found.mean, found.deviation) == pytest.approx((values.mean(), values.std(ddof=1)))
            assert summary.estimate(group, name, FAR).mean == pytest.approx(values.mean() + 0.05)
            assert summary.estimate(group, name, ood="noise").mean == pytest.approx(values.mean() + 0.05)
    pairs = [numbers[group.benchmark]["knn"] - numbers[group.benchmark]["rmd"] for group in summary.groups]
    expected = scipy.stats.ttest_ind(pairs[0], -pairs[1], equal_var=False).confidence_interval(0.95)
    found = summary.difference("knn")
    assert (found.low, found.high) == pytest.approx((expected.low / 2, expected.high / 2))
    places = [
        scipy.stats.rankdata([-numbers[group.benchmark][name].mean() for name in ("rmd", "msp", "knn")])
        for group in summary.groups
    ]
    assert [summary.mean_rank(name)[0] for name in ("rmd", "msp", "knn")] == list(np.mean(places, axis=0))


def test_the_best_of_every_column_is_bold(sweep):
    folder, numbers = sweep
    table = overall_tables(summarise(gather_runs([folder])))[0]
    for column, benchmark in ((1, "digits"), (2, "simulation")):
        best = max(values.mean() for values in numbers[benchmark].values())
        assert [row[column].text for row in table.rows if row[column].bold] == [f"{100 * best:.2f}"]
    assert "±" in table.rows[0][1].detail


def test_less_is_better_for_times(sweep):
    folder, _ = sweep
    runs = gather_runs([folder])
    auroc, times = summarise(runs), summarise(runs, metric="fit_seconds")
    assert times.ordered() == auroc.ordered()  # the fixture makes the better detector the faster one
    with pytest.raises(ValueError, match="there are AUROC, fit_seconds"):
        summarise(runs, metric="AUC")


def test_fewer_false_alarms_are_better_and_thresholds_are_not_compared(tmp_path):
    folder = RunFolder(tmp_path / "run")
    decided = {"rmd": (0.07, 12.0), "knn": (0.04, 0.3)}
    rows = rows_of({"rmd": 0.9, "knn": 0.8})
    for name, (alarms, threshold) in decided.items():
        rows.append(Row("digits", "", "mlp", name, 0, "false_alarms@0.05", alarms))
        rows.append(Row("digits", "", "mlp", name, 0, "threshold@0.05", threshold))
    rows.append(Row("digits", "", "mlp", "msp", 0, "false_alarms@0.05", math.nan).failed("too few", "skipped"))
    with folder.running(config=None, about={"benchmark": "digits", "backbone": "mlp", "seed": 0}, command="rmd-train"):
        folder.write_rows(rows)
    runs = gather_runs([tmp_path])
    assert summarise(runs, metric="false_alarms@0.05").ordered() == ["knn", "rmd"]
    with pytest.raises(ValueError, match=r"there are AUROC, false_alarms@0\.05, fit_seconds"):
        summarise(runs, metric="threshold@0.05")
    [table] = overall_tables(summarise(runs))
    assert any("MSP without decisions in 1 of 1 runs (too few)" in note for note in table.notes)


def test_what_is_not_done_is_named_and_the_rest_stands(sweep, tmp_path):
    folder, _ = sweep
    with pytest.raises(RuntimeError), RunFolder(folder / "7").running(about={"benchmark": "digits", "seed": 7}):
        raise RuntimeError("CUDA out of memory")
    with pytest.raises(KeyboardInterrupt), RunFolder(folder / "8").running():
        raise KeyboardInterrupt
    RunFolder(folder / "9").start()
    (folder / "10").mkdir()
    (folder / "10" / "rows.csv").write_bytes(b"\x00\xff")
    (folder / "11" / ".hydra").mkdir(parents=True)
    (folder / "11" / ".hydra" / "overrides.yaml").write_text("- benchmark=digits\n- seed=11\n- +x.y=3\n")
    RunFolder(folder / "12").finish("done")
    runs = {run.path.name: run for run in gather_runs([folder, tmp_path / "nowhere"])}
    expected = {"7": "failed", "8": "unfinished", "9": "unfinished", "10": "unreadable", "11": "unfinished"}
    expected |= {"12": "unreadable", "nowhere": "unreadable"}
    assert {name: run.outcome for name, run in runs.items() if run.outcome != "done"} == expected
    assert runs["7"].reason == "RuntimeError: CUDA out of memory"
    assert "still running" in runs["9"].reason
    assert runs["7"].name == "digits, seed 7"
    assert runs["11"].name == "digits, seed 11, x.y=3"
    summary = summarise(list(runs.values()))
    assert [len(seeds) for seeds in summary.groups.values()] == [3, 3]
    shown = summary_tables(summary, folder)[-1]
    assert [row[2].text for row in shown.rows] == list(expected.values())
    notes = " ".join(overall_tables(summary)[0].notes)
    assert "Not counted: 1 failed, 3 unfinished, 3 unreadable of 13 runs." in notes


def test_long_names_of_runs_break_so_that_the_reason_stays_in_sight(tmp_path):
    run = Run(tmp_path / ("seed=0," * 40), "failed", "because")
    (row,) = [line for line in to_html(runs_table([run], "Runs", tmp_path)).splitlines() if "because" in line]
    assert row.startswith('<tr><td class="left wrap">')
    assert row.endswith('<td class="left">failed</td><td class="left">because</td></tr>')
    assert "td.wrap" in render("style.css")


def test_a_folder_without_permission_is_one_line(sweep, monkeypatch):
    folder, _ = sweep
    (folder / "secret").mkdir()
    scandir = os.scandir

    def refuse(path):
        if os.path.basename(path) == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything, so that a mode would not do
    bad = [run for run in gather_runs([folder]) if run.outcome != "done"]
    assert [(run.path.name, run.outcome, run.reason) for run in bad] == [("secret", "unreadable", "Permission denied")]


def test_jobs_come_in_the_order_of_their_numbers_and_once(tmp_path):
    for number in (10, 9, 2):
        write_run(tmp_path / str(number), {"rmd": 0.9}, seed=number)
    runs = gather_runs([tmp_path, tmp_path / "2", str(tmp_path) + "/."])
    assert [run.path.name for run in runs] == ["2", "9", "10"]


def test_files_inside_a_run_are_not_runs(tmp_path):
    write_run(tmp_path / "run", {"rmd": 0.9})
    write_run(tmp_path / "run" / "csv" / "copy", {"rmd": 0.1})
    (tmp_path / ".hydra").mkdir()
    assert [run.path.name for run in gather_runs([tmp_path])] == ["run"]


def test_runs_with_other_options_are_not_averaged(tmp_path):
    for number, (shrinkage, seed) in enumerate([(0.0, 0), (0.0, 1), (0.5, 0), (0.5, 1)]):
        config = {"seed": seed, "detector": {"rmd": {"shrinkage": shrinkage, "seed": seed}}, "num_workers": number}
        write_run(tmp_path / str(number), {"rmd": 0.9 - shrinkage / 10}, seed=seed, config=config)
    summary = summarise(gather_runs([tmp_path]))
    assert [group.setting for group in summary.groups] == ["shrinkage=0", "shrinkage=0.5"]
    assert [summary.estimate(group, "rmd").mean for group in summary.groups] == pytest.approx([0.9, 0.85])


def test_weights_are_a_setting_only_where_nothing_else_tells_runs_apart(tmp_path):
    for seed in (0, 1):
        write_run(
            tmp_path / "a" / str(seed), {"rmd": 0.9}, seed=seed, config={"seed": seed, "ckpt_path": f"{seed}.ckpt"}
        )
    assert [group.setting for group in summarise(gather_runs([tmp_path])).groups] == [""]
    for name in "xy":
        write_run(tmp_path / "b" / name, {"rmd": 0.9}, config={"seed": 0, "ckpt_path": f"{name}.ckpt"})
    found = summarise(gather_runs([tmp_path / "b"])).groups
    assert [group.setting for group in found] == ["ckpt_path=x.ckpt", "ckpt_path=y.ckpt"]


def test_runs_of_other_detectors_stand_in_one_table(tmp_path):
    for name, value in (("rmd", 0.9), ("knn", 0.8)):
        config = {"seed": 0, "detector": {name: {"_target_": name}}}
        write_run(tmp_path / name, {name: value}, config=config)
    summary = summarise(gather_runs([tmp_path]))
    assert list(summary.groups) == [Group("digits", "mlp")]
    assert summary.ordered() == ["rmd", "knn"]
    assert summary.difference("knn").value == pytest.approx(-0.1)
    assert not summary.notes


def test_the_newer_of_two_equal_runs_counts(tmp_path):
    old, new = rows_of({"rmd": 0.5}), rows_of({"rmd": 0.9})
    runs = [Run(tmp_path / "b", "done", rows=new, ended=2.0), Run(tmp_path / "a", "done", rows=old, ended=1.0)]
    summary = summarise(runs)
    assert summary.estimate(Group("digits", "mlp"), "rmd").mean == pytest.approx(0.9)
    assert str(tmp_path / "b") in summary.notes[0]


def test_a_set_may_be_called_near(tmp_path):
    write_run(tmp_path, {"rmd": 0.8}, sets={"near": "far", "x": "near"})
    summary = summarise([read_run(tmp_path)])
    group = Group("digits", "mlp")
    assert summary.estimate(group, "rmd", ood="near").mean == pytest.approx(0.85)
    assert summary.estimate(group, "rmd", NEAR).mean == pytest.approx(0.8)


def test_a_detector_that_failed_somewhere_is_marked(tmp_path):
    write_run(tmp_path / "0", {"rmd": 0.9, "knn": 0.8})
    folder = write_run(tmp_path / "1", {"rmd": 0.9}, benchmark="simulation")
    bad = Row("simulation", "x", "mlp", "knn", 0, "AUROC", math.nan, status="failed", reason="no neighbours")
    folder.write_rows([*folder.read_rows(), bad])
    table = overall_tables(summarise(gather_runs([tmp_path])))[0]
    knn = next(row for row in table.rows if row[0].text == "KNN")
    assert (knn[2].text, knn[3].detail) == ("–", "(in 1 of 2)")
    assert "simulation, mlp: KNN failed in 1 of 1 runs (no neighbours)." in table.notes


def test_without_the_reference_there_is_no_difference(sweep):
    summary = summarise(gather_runs([sweep[0]]), reference="vim")
    assert any("ViM" in note for note in overall_tables(summary)[0].notes)
    assert difference_figure(summary) is None


def test_every_format_is_written_and_reads_back(sweep):
    folder, numbers = sweep
    summary = summarise(gather_runs([folder]))
    files = write_summary(summary, folder)
    assert [path.name for path in files] == ["summary.html", "summary.md", "summary.tex", "summary.csv", "runs.csv"]
    with open(folder / "summary.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    (line,) = [
        line for line in lines if (line["benchmark"], line["ood"], line["detector"]) == ("digits", "mean (near)", "rmd")
    ]
    assert float(line["mean"]) == summary.estimate(Group("digits", "mlp"), "rmd").mean
    assert float(line["mean"]) == pytest.approx(numbers["digits"]["rmd"].mean())
    with open(folder / "runs.csv", newline="") as file:
        assert [line["outcome"] for line in csv.DictReader(file)] == ["done"] * 6
    best = f"{100 * max(values.mean() for values in numbers['digits'].values()):.2f}"
    assert f"**{best}** ±" in (folder / "summary.md").read_text()
    assert rf"\textbf{{{best}}}" in (folder / "summary.tex").read_text()
    page = (folder / "summary.html").read_text()
    assert f"<strong>{best}</strong>" in page
    assert "<script" not in page
    # a summary is not a run: the next one finds the same
    assert len(gather_runs([folder])) == 6


def test_many_benchmarks_are_split_to_fit(tmp_path):
    for number in range(8):
        write_run(tmp_path / str(number), {"rmd": 0.9, "knn": 0.8}, benchmark=f"benchmark{number}")
    summary = summarise(gather_runs([tmp_path]))
    widths = [len(table.columns) for table in overall_tables(summary)]
    assert widths == [7, 3, 4]  # detector and groups; detector, rank, mean and difference
    assert overall_tables(summary)[-1].rows[1][3].detail.startswith("[")  # eight benchmarks with one seed: an interval


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_what_failed(sweep, capsys):
    folder, _ = sweep
    with pytest.raises(RuntimeError), RunFolder(folder / "7").running(about={"benchmark": "digits"}):
        raise RuntimeError("no memory")
    assert command.main([str(folder), str(folder / "missing"), "-o", str(folder / "out")]) == 0
    out = capsys.readouterr().out
    assert "RMD" in out
    assert f"failed: {folder / '7'} (digits): RuntimeError: no memory" in out
    assert f"unreadable: {folder / 'missing'}: there is no such folder" in out
    assert (folder / "out" / "summary.html").is_file()


def test_the_command_without_runs_says_so(tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 1
    assert "no runs below" in capsys.readouterr().err
    assert command.main([str(tmp_path / "nowhere")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    write_run(tmp_path / "run", {"rmd": 0.9})
    assert command.main([str(tmp_path), "--metric", "AUC"]) == 1
    assert "there are AUROC" in capsys.readouterr().err


@pytest.mark.slow
def test_help_comes_at_once_and_torch_is_never_imported(sweep):
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "rmd_plugin.app.report", "--help"], capture_output=True, text=True)
    assert time.perf_counter() - start < 3
    assert "DIR" in done.stdout
    code = "import sys; from rmd_plugin.app.report import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(sweep[0])], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# -- in a sweep -------------------------------------------------------------------------------------------------------

APP = """
import hydra
from omegaconf import OmegaConf

from rmd_plugin.report.provenance import current_command
from rmd_plugin.compare.rows import Row
from rmd_plugin.report.run_folder import RunFolder

@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(config):
    if config.seed == 1:
        raise ValueError("seed 1 is unlucky")  # before the folder knows of the run
    folder = RunFolder(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    with folder.running(config=config, about={"benchmark": "b", "backbone": "n"}, command=current_command("rmd-train")):
        values = {"rmd": 0.9, "knn": 0.8}
        folder.write_rows([Row("b", "x", "n", d, config.seed, "AUROC", v, distance="near") for d, v in values.items()])

from hydra.core.config_store import ConfigStore
callback = {"_target_": "rmd_plugin.app.hydra_callbacks.ReportCallback"}
ConfigStore.instance().store("app", {"seed": 0, "hydra": {"callbacks": {"report": callback}}})
main()
"""


@pytest.mark.slow
def test_a_sweep_with_a_failed_job_reports_by_itself(tmp_path):
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    arguments = [sys.executable, "app.py", "-m", "seed=0,1,2", "hydra.sweep.dir=sweep"]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "seed 1 is unlucky" in done.stderr
    runs = {run.path.name: run for run in gather_runs([tmp_path / "sweep"])}
    assert [run.outcome for run in runs.values()] == ["done", "failed", "done"]
    assert runs["1"].reason == "ValueError: seed 1 is unlucky"
    assert runs["1"].name == "seed 1"
    assert RunFolder(runs["2"].path).read_versions()["command"] == "rmd-train seed=2"
    assert "failed:" in done.stdout
    page = (tmp_path / "sweep" / "summary.html").read_text()
    assert "seed 1 is unlucky" in page
    assert "90.00" in page


def test_a_sweep_that_ends_well_reports_once(sweep, monkeypatch):
    folder, _ = sweep
    calls = []
    monkeypatch.setattr(command, "report_runs", lambda jobs, path, **options: calls.append((path, options)))
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})
    callback = ReportCallback(reference="msp")
    callback.on_multirun_start(config)
    callback.on_multirun_end(config)
    ((path, options),) = calls
    assert (path, options["metric"], options["reference"]) == (folder, "AUROC", "msp")


def test_trouble_with_the_report_never_fails_the_sweep(sweep, monkeypatch, caplog):
    def broken(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(command, "report_runs", broken)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep[0])}}})
    with caplog.at_level(logging.WARNING):
        callback = ReportCallback()
        callback.on_multirun_start(config)
        callback.on_multirun_end(config)
    (record,) = caplog.records
    assert "disk full" in record.getMessage()


@pytest.mark.slow
def test_cost_is_the_geometric_mean_of_the_times_beside_the_references(tmp_path):
    times = {"a": {"rmd": 1.0, "msp": 0.5, "knn": 40.0}, "b": {"rmd": 2.0, "msp": 4.0, "knn": 20.0}}
    values = {"a": {"rmd": 0.9, "msp": 0.7, "knn": 0.8}, "b": {"rmd": 0.8, "msp": 0.6, "knn": 0.9}}
    for benchmark, found in times.items():
        folder = write_run(tmp_path / benchmark, values[benchmark], benchmark=benchmark)
        scored = [Row(benchmark, "", "mlp", name, 0, "score_seconds", value) for name, value in found.items()]
        folder.write_rows([*folder.read_rows(), *scored])
    summary = summarise(gather_runs([tmp_path]))
    assert summary.relative_cost("msp") == pytest.approx(1.0)
    assert summary.relative_cost("knn") == pytest.approx(math.sqrt(40 * 10))
    assert summary.mean_number("knn") == pytest.approx(0.85)
    axes = cost_figure(summary).axes[0]
    points = {tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "o"}
    assert {(round(x, 6), round(y, 6)) for x, y in points} == {(1.0, 85.0), (1.0, 65.0), (20.0, 85.0)}
    assert {text.get_text() for text in axes.texts} == {"RMD", "MSP", "KNN"}
    [table] = overall_tables(summary)
    assert [cells[-2].text for cells in table.rows][:1] == ["85.00"]
    assert (write_summary(summary, tmp_path / "out")[-2]).name == "summary_cost.png"


def test_there_is_no_picture_of_costs_without_times(sweep):
    assert cost_figure(summarise(gather_runs([sweep[0]]))) is None
