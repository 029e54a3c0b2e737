import logging
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from omegaconf import OmegaConf

import rmd_plugin.app.report as command
from rmd_plugin.app.commands import ReportCallback
from rmd_plugin.compare.rows import make_row, make_rows
from rmd_plugin.report.figures import cost_figure
from rmd_plugin.report.run import RunFolder
from rmd_plugin.report.summary import (
    NEAR,
    Summary,
    gather_runs,
    overall_tables,
    paired_difference,
    read_run,
    write_summary,
)

RNG = np.random.default_rng(0)
SETS = {"near a": "near", "near b": "near", "noise": "far"}


def rows_of(values, benchmark="digits", backbone="mlp", seed=0, sets=SETS, accuracy="the backbone's own head"):
    """Rows in which a detector has its value on every near set, and 0.05 more on far ones."""
    rows = [make_row(benchmark, "", backbone, "", seed, "ACC", 0.9, reason=accuracy)]
    for detector, value in values.items():
        for ood, distance in sets.items():
            number = value + 0.05 * (distance == "far")
            rows.append(make_row(benchmark, ood, backbone, detector, seed, "AUROC", number, distance=distance))
        rows.append(make_row(benchmark, "", backbone, detector, seed, "fit_seconds", 1 - value))
    return rows


def write_run(path, values, *, config=None, more=(), **key):
    folder = RunFolder(path)
    rows = make_rows([*rows_of(values, **key), *more])
    about = rows.loc[0, ["benchmark", "backbone", "seed"]].to_dict()
    with folder.running(config=config, about=about, command="rmd-train"):
        folder.write_rows(rows)
    return folder


@pytest.fixture
def sweep(tmp_path):
    """Two benchmarks, three seeds; the detectors' numbers by benchmark."""
    numbers, rng, job = {}, np.random.default_rng(1), 0
    for benchmark in ("digits", "simulation"):
        numbers[benchmark] = {name: 0.7 + 0.02 * rng.standard_normal(3) for name in ("rmd", "msp", "knn")}
        for seed in range(3):
            values = {name: float(found[seed]) for name, found in numbers[benchmark].items()}
            config = {"seed": seed, "benchmark": {"name": benchmark, "seed": seed}, "paths": {"output_dir": str(job)}}
            write_run(tmp_path / "sweep" / str(job), values, benchmark=benchmark, seed=seed, config=config)
            job += 1
    return tmp_path / "sweep", numbers


def notes(summary):
    return " ".join(overall_tables(summary)[0].notes)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_t_tests_of_scipy():
    a, b = RNG.standard_normal((2, 6))
    one = paired_difference([a - b])
    expected = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    assert one == pytest.approx(((a - b).mean(), expected.low, expected.high))
    # the mean of two group means is half the difference between one group and the other with its sign changed
    a, b = RNG.standard_normal(4), 5 * RNG.standard_normal(7)
    expected = scipy.stats.ttest_ind(a, -b, equal_var=False).confidence_interval(0.95)
    assert paired_difference([a, b])[1:] == pytest.approx((expected.low / 2, expected.high / 2))
    # benchmarks with one seed are the sample
    expected = scipy.stats.ttest_1samp(a, 0).confidence_interval(0.95)
    assert paired_difference([[value] for value in a])[1:] == pytest.approx((expected.low, expected.high))


def test_too_few_pairs_give_no_interval_and_no_spread_gives_a_point():
    for groups in ([[1.0]], [[0.1, 0.9]], [[1.0], [2.0]], [[1.0], [], [2.0, 3.0]]):
        found = paired_difference(groups)
        assert math.isnan(found.low)
        assert found.difference == np.mean([np.mean(group) for group in groups if group])
    assert math.isnan(paired_difference([[]]).difference)
    assert paired_difference([[0.5, 0.5, 0.5]]) == (0.5, 0.5, 0.5)


def test_a_sweep_is_summarised_by_benchmark_and_over_all(sweep):
    folder, numbers = sweep
    summary = Summary(gather_runs([folder]))
    assert summary.groups["title"].tolist() == ["digits, mlp", "simulation, mlp"]
    for group, benchmark in summary.groups["benchmark"].items():
        for name, values in numbers[benchmark].items():
            assert summary.means.loc[(group, NEAR), name] == pytest.approx(values.mean())
            assert summary.means.loc[(group, "noise"), name] == pytest.approx(values.mean() + 0.05)
    pairs = [found["knn"] - found["rmd"] for found in numbers.values()]
    expected = scipy.stats.ttest_ind(pairs[0], -pairs[1], equal_var=False).confidence_interval(0.95)
    found = summary.difference("knn")
    assert (found.low, found.high) == pytest.approx((expected.low / 2, expected.high / 2))
    names = ["rmd", "msp", "knn"]
    places = [scipy.stats.rankdata([-found[name].mean() for name in names]) for found in numbers.values()]
    assert summary.overall.loc[names, "rank"].tolist() == list(np.mean(places, axis=0))
    assert summary.overall["rank"].is_monotonic_increasing


def test_equal_detectors_share_their_places_and_a_failed_one_is_marked(tmp_path):
    write_run(tmp_path / "0", {"rmd": 0.9, "msp": 0.9, "knn": 0.8})
    bad = make_row("simulation", "x", "mlp", "knn", 0, "AUROC", status="failed", reason="no neighbours")
    write_run(tmp_path / "1", {"rmd": 0.9, "msp": 0.8}, benchmark="simulation", more=[bad])
    summary = Summary(gather_runs([tmp_path]))
    assert summary.overall["rank"].to_dict() == {"rmd": 1.25, "msp": 1.75, "knn": 3.0}
    assert math.isnan(summary.overall.loc["knn", "mean"])
    knn = next(row for row in overall_tables(summary)[0].rows if row[0].text == "KNN")
    assert (knn[2].text, knn[3].detail) == ("–", "(in 1 of 2)")
    assert "simulation, mlp: KNN failed in 1 of 1 runs (no neighbours)." in notes(summary)


def test_seeds_that_change_nothing_are_no_sample(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"same{seed}", {"rmd": 0.9, "msp": 0.8}, seed=seed)
        write_run(tmp_path / f"other{seed}", {"rmd": 0.9, "msp": 0.8 + 0.01 * seed}, benchmark="simulation", seed=seed)
    summary = Summary(gather_runs([tmp_path]))
    counts = summary.values.groupby(level="group").apply(lambda part: part.index.get_level_values("seed").nunique())
    assert dict(zip(summary.groups["benchmark"], counts, strict=True)) == {"simulation": 3, "digits": 1}
    assert "digits, mlp: all seeds gave the same numbers" in notes(summary)


def test_less_is_better_for_times_and_false_alarms_and_thresholds_are_not_compared(tmp_path):
    more = []
    for name, alarms in {"rmd": 0.07, "knn": 0.04}.items():
        more += [make_row("digits", "", "mlp", name, 0, "false_alarms@0.05", alarms)]
        more += [make_row("digits", "", "mlp", name, 0, "threshold@0.05", 1.0)]
    more.append(make_row("digits", "", "mlp", "msp", 0, "false_alarms@0.05", status="skipped", reason="too few"))
    write_run(tmp_path, {"rmd": 0.9, "knn": 0.8}, more=more)
    runs = gather_runs([tmp_path])
    assert Summary(runs, metric="false_alarms@0.05").overall.index.tolist() == ["knn", "rmd"]
    assert Summary(runs, metric="fit_seconds").overall.index.tolist() == ["rmd", "knn"]
    with pytest.raises(ValueError, match=r"there are AUROC, false_alarms@0\.05, fit_seconds"):
        Summary(runs, metric="threshold@0.05")
    assert "MSP without decisions in 1 of 1 runs (too few)" in notes(Summary(runs))


def test_a_network_at_chance_and_a_missing_reference_have_a_remark(tmp_path):
    doubt = "the backbone's own head; 10.0 % is hardly above chance (10.0 %)"
    write_run(tmp_path / "0", {"rmd": 0.5}, seed=3, accuracy=doubt)
    write_run(tmp_path / "1", {"rmd": 0.9}, seed=4)
    text = notes(Summary(gather_runs([tmp_path]), reference="vim"))
    assert "digits, mlp, seed 3: the accuracy is 90.0 % (10.0 % is hardly above chance (10.0 %))." in text
    assert "seed 4: the accuracy" not in text
    assert "ViM" in text


def test_cost_is_the_geometric_mean_of_the_times_beside_the_references(tmp_path):
    times = {"a": {"rmd": 1.0, "msp": 0.5, "knn": 40.0}, "b": {"rmd": 2.0, "msp": 4.0, "knn": 20.0}}
    values = {"a": {"rmd": 0.9, "msp": 0.7, "knn": 0.8}, "b": {"rmd": 0.8, "msp": 0.6, "knn": 0.9}}
    for benchmark, found in times.items():
        more = [make_row(benchmark, "", "mlp", name, 0, "score_seconds", value) for name, value in found.items()]
        write_run(tmp_path / benchmark, values[benchmark], benchmark=benchmark, more=more)
    summary = Summary(gather_runs([tmp_path]))
    assert summary.overall["cost"].to_dict() == pytest.approx({"rmd": 1.0, "knn": math.sqrt(40 * 10), "msp": 1.0})
    axes = cost_figure(summary).axes[0]
    points = {tuple(line.get_xydata()[0].round(6)) for line in axes.lines if line.get_marker() == "o"}
    assert points == {(1.0, 85.0), (1.0, 65.0), (20.0, 85.0)}
    assert write_summary(summary, tmp_path / "out")[-2].name == "summary_cost.png"


# -- runs on disk -----------------------------------------------------------------------------------------------------


def test_what_is_not_done_is_named_and_the_rest_stands(sweep, tmp_path):
    folder, _ = sweep
    with pytest.raises(RuntimeError), RunFolder(folder / "7").running(about={"benchmark": "digits", "seed": 7}):
        raise RuntimeError("CUDA out of memory")
    RunFolder(folder / "9").start()
    (folder / "10").mkdir()
    (folder / "10" / "rows.csv").write_bytes(b"\x00\xff")
    (folder / "11" / ".hydra").mkdir(parents=True)
    (folder / "11" / ".hydra" / "overrides.yaml").write_text("- benchmark=digits\n- seed=11\n- +x.y=3\n")
    RunFolder(folder / "12").finish("done")
    runs = {run.path.name: run for run in gather_runs([folder, tmp_path / "nowhere"])}
    expected = {"7": "failed", "9": "running", "10": "unreadable", "11": "unfinished"}
    expected |= {"12": "unreadable", "nowhere": "unreadable"}
    assert {name: run.outcome for name, run in runs.items() if run.outcome != "done"} == expected
    assert (runs["7"].reason, runs["7"].name) == ("RuntimeError: CUDA out of memory", "digits, seed 7")
    assert "killed" in runs["9"].reason
    assert runs["11"].name == "benchmark=digits, seed=11, +x.y=3"
    summary = Summary(list(runs.values()))
    assert summary.groups["seeds"].map(len).tolist() == [3, 3]
    assert "Not counted: 1 failed, 1 running, 1 unfinished, 3 unreadable of 12 runs." in notes(summary)


def test_jobs_come_in_the_order_of_their_numbers_and_once_and_files_inside_a_run_are_none(tmp_path):
    for number in (10, 9, 2):
        write_run(tmp_path / str(number), {"rmd": 0.9}, seed=number)
    write_run(tmp_path / "2" / "csv" / "copy", {"rmd": 0.1})
    (tmp_path / ".hydra").mkdir()
    runs = gather_runs([tmp_path, tmp_path / "2", str(tmp_path) + "/."])
    assert [run.path.name for run in runs] == ["2", "9", "10"]


def test_runs_with_other_options_are_not_averaged(tmp_path):
    for number, (shrinkage, seed) in enumerate([(0.0, 0), (0.0, 1), (0.5, 0), (0.5, 1)]):
        config = {"seed": seed, "detector": {"rmd": {"shrinkage": shrinkage, "seed": seed}}, "num_workers": number}
        config["format"] = "openood" if seed else None  # writes one more file
        write_run(tmp_path / str(number), {"rmd": 0.9 - shrinkage / 10}, seed=seed, config=config)
    summary = Summary(gather_runs([tmp_path]))
    assert summary.groups["setting"].tolist() == ["detector.rmd.shrinkage=0.0", "detector.rmd.shrinkage=0.5"]
    assert summary.judged["rmd"].tolist() == pytest.approx([0.9, 0.85])


def test_weights_are_a_setting_only_where_nothing_else_tells_runs_apart(tmp_path):
    for seed in (0, 1):
        config = {"seed": seed, "ckpt_path": f"{seed}.ckpt"}
        write_run(tmp_path / "a" / str(seed), {"rmd": 0.9}, seed=seed, config=config)
    assert Summary(gather_runs([tmp_path])).groups["setting"].tolist() == [""]
    for name in "xy":
        write_run(tmp_path / "b" / name, {"rmd": 0.9}, config={"seed": 0, "ckpt_path": f"{name}.ckpt"})
    settings = Summary(gather_runs([tmp_path / "b"])).groups["setting"].tolist()
    assert settings == ["ckpt_path=x.ckpt", "ckpt_path=y.ckpt"]


def test_runs_of_other_detectors_add_up_and_the_newer_of_two_equal_ones_counts(tmp_path):
    for name, detector, value in (("a", "rmd", 0.5), ("b", "knn", 0.8), ("c", "rmd", 0.9)):
        write_run(
            tmp_path / name, {detector: value}, config={"seed": 0, "detector": {detector: {"_target_": detector}}}
        )
    runs = [replace(read_run(tmp_path / name), ended=order) for order, name in enumerate("abc")]
    summary = Summary(runs)
    assert summary.judged.iloc[0].to_dict() == pytest.approx({"rmd": 0.9, "knn": 0.8})
    assert str(tmp_path / "c") in summary.notes[0]
    assert summary.difference("knn").difference == pytest.approx(-0.1)


# -- files and the command --------------------------------------------------------------------------------------------


def test_every_format_is_written_and_reads_back(sweep):
    folder, numbers = sweep
    files = write_summary(Summary(gather_runs([folder])), folder)
    assert [path.name for path in files] == ["summary.html", "summary.md", "summary.tex", "summary.csv", "runs.csv"]
    frame = pd.read_csv(folder / "summary.csv")
    (line,) = frame[
        (frame["benchmark"] == "digits") & (frame["ood"] == NEAR) & (frame["detector"] == "rmd")
    ].itertuples()
    assert line.mean == pytest.approx(numbers["digits"]["rmd"].mean())
    assert line.deviation == pytest.approx(numbers["digits"]["rmd"].std(ddof=1))
    assert (line.count, line.metric) == (3, "AUROC")
    assert frame.query("ood == 'overall'")["detector"].nunique() == 3
    assert pd.read_csv(folder / "runs.csv")["seed"].tolist() == [0, 1, 2] * 2
    best = f"{100 * max(values.mean() for values in numbers['digits'].values()):.2f}"
    assert f"**{best}** ±" in (folder / "summary.md").read_text()
    assert rf"\textbf{{{best}}}" in (folder / "summary.tex").read_text()
    page = (folder / "summary.html").read_text()
    assert f"<strong>{best}</strong>" in page
    assert "OOD detection on digits, simulation" in page
    assert len(gather_runs([folder])) == 6  # a summary is not a run


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
    assert not list(tmp_path.iterdir())
    write_run(tmp_path / "run", {"rmd": 0.9})
    assert command.main([str(tmp_path), "--metric", "AUC"]) == 1
    assert "there are AUROC" in capsys.readouterr().err


def test_a_sweep_reports_once_and_trouble_with_it_never_fails_the_sweep(sweep, monkeypatch, caplog):
    calls = []

    def broken(jobs, path, **options):
        calls.append((path, options))
        raise OSError("disk full")

    monkeypatch.setattr(command, "report_runs", broken)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep[0])}}})
    with caplog.at_level(logging.WARNING):
        callback = ReportCallback(reference="msp")
        callback.on_multirun_start(config)
        callback.report()
    ((path, options),) = calls
    assert (path, options) == (sweep[0], {"metric": "AUROC", "reference": "msp"})
    assert "disk full" in caplog.text
