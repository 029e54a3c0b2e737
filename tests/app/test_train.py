"""``rmd-train`` as a user runs it: one process per command, on scikit-learn's digits."""

import signal
import time

import config_kit
import pytest
from config_kit import ROOT, choices, composed

from rmd_plugin.compare.rows import read_rows
from rmd_plugin.report.run import RunFolder

#: small enough for seconds, large enough to be a real training
TINY = ["trainer.max_epochs=2", "detector=[rmd,mahalanobis,msp]", "figures=false", "resamples=50"]
DIGITS = ["benchmark=digits", *TINY]


def run(folder, *arguments, check=True):
    done = config_kit.run("rmd_plugin.app.train", folder, *arguments, PYTHONWARNINGS="default")
    if check and done.returncode:
        pytest.fail(
            f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done


@pytest.mark.parametrize("sweep", choices("sweep"))
def test_every_sweep_composes_and_sets_what_it_sweeps(sweep):
    assert composed("train", f"sweep={sweep}").hydra.sweeper.params


@pytest.mark.slow
def test_help_names_the_choices_and_imports_nothing_heavy(tmp_path):
    code = (
        "import sys; sys.argv = ['rmd-train', '--help']\n"
        "from rmd_plugin.app.commands import train\n"
        "try: train()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'pytorch_lightning', 'matplotlib', 'pandas'} & set(sys.modules), 'heavy'\n"
        "import time; print(time.process_time())"
    )
    done = config_kit.python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "benchmark: cifar100_vs_cifar10" in done.stdout
    assert "ood_monitor" in done.stdout
    assert "table1/" in done.stdout
    # the comments of the YAML tell the alternatives
    assert "head: own  # classifier of the comparison: own (trained), linear_probe" in done.stdout
    assert float(done.stdout.splitlines()[-1]) < 1


@pytest.mark.slow
def test_a_run_writes_its_folder_and_can_be_repeated_to_the_last_bit(tmp_path):
    first = run(tmp_path, *DIGITS, "hydra.run.dir=first")
    folder = RunFolder(tmp_path / "first")
    assert folder.done
    assert "RMD" in first.stdout
    for name in ("config.yaml", "rows.csv", "timings.csv", "versions.json", "history.csv", "report.html", "table.md"):
        assert folder.file(name).is_file(), name
    assert (tmp_path / "first/checkpoints/best.ckpt").is_file()
    areas = [row for row in folder.read_rows().itertuples() if row.metric == "AUROC"]
    assert {row.detector for row in areas} == {"rmd", "mahalanobis", "msp"}
    assert all(0.5 < row.value <= 1 for row in areas if row.ood == "digits_6_9")
    # from its own config: bitwise the same rows, in a folder of its own
    run(tmp_path, "--config-dir", "first", "--config-name", "config", "hydra.run.dir=again")
    assert folder.file("rows.csv").read_bytes() == (tmp_path / "again/rows.csv").read_bytes()
    # the best checkpoint alone: the same numbers without training
    run(tmp_path, *DIGITS, "train=false", "checkpoint=first/checkpoints/best.ckpt", "hydra.run.dir=evaluated")
    assert folder.file("rows.csv").read_bytes() == (tmp_path / "evaluated/rows.csv").read_bytes()


@pytest.mark.slow
def test_a_sweep_reports_and_a_stopped_one_goes_on(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    sweep = ["-m", *TINY, "backbone=mlp", "benchmark=digits", "seed=0,1", "hydra/launcher=joblib"]
    run(tmp_path, *sweep)
    jobs = sorted(path.parent for path in (tmp_path / "multirun/train").rglob("rows.csv"))
    assert len(jobs) == 2
    assert all(RunFolder(job).done for job in jobs)
    summary = [path.name for path in (tmp_path / "multirun/train").glob("*.md")]
    assert summary, "the sweep wrote no summary"
    # one job is made undone: only that one runs again
    before = [(job / "rows.csv").stat().st_mtime_ns for job in jobs]
    bytes_before = (jobs[1] / "rows.csv").read_bytes()
    (jobs[1] / "status.json").unlink()
    time.sleep(0.05)
    run(tmp_path, *sweep, "resume=true")
    after = [(job / "rows.csv").stat().st_mtime_ns for job in jobs]
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert (jobs[1] / "rows.csv").read_bytes() == bytes_before


@pytest.mark.slow
def test_ctrl_c_leaves_a_usable_report(tmp_path):
    words = [
        "trainer.max_epochs=500",
        "trainer.enable_progress_bar=false",
        "benchmark=digits",
        *TINY[1:],
        "hydra.run.dir=stopped",
    ]
    process = config_kit.start("rmd_plugin.app.train", tmp_path, *words)
    best, deadline = tmp_path / "stopped/checkpoints/best.ckpt", time.monotonic() + 300
    while not best.is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output = "".join(process.communicate(timeout=300))
    assert best.is_file(), output[-3000:]
    assert (tmp_path / "stopped/report.html").is_file(), output[-3000:]
    assert len(read_rows(tmp_path / "stopped/rows.csv"))


@pytest.mark.ddp
@pytest.mark.parametrize("launcher", ["basic", "submitit_local", "joblib"])
def test_ddp_inside_a_multirun_leaves_one_folder_per_job(tmp_path, launcher):
    # a worker's own program is the launcher's: the second process of a job must not run that
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    options = ["trainer=ddp", "trainer.accelerator=cpu", "limit_train=100", f"hydra/launcher={launcher}"]
    done = run(tmp_path, "-m", *DIGITS, *options, "backbone.widths=[4,8]", "seed=0,1")
    for warning in ("NumericalWarning", "sync_dist", "LeafSpec", "ConfigStore schema"):
        assert warning not in done.stderr
    jobs = sorted(path.parent for path in tmp_path.rglob("rows.csv"))
    assert len(jobs) == 2
    assert all(RunFolder(job).done for job in jobs)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.data
def test_two_stages_in_one_command(tmp_path, data_dir):
    run(
        tmp_path,
        "benchmark=genomics", "benchmark.source=genomes", "backbone=genomics_bert", "pretrain=masked_tokens",
        "pretrain.max_epochs=1", "backbone.width=16", "backbone.depth=1", "backbone.heads=2", "limit_train=200",
        "limit_test=50", *TINY, "trainer.max_epochs=1", f"paths.data_dir={data_dir}", "hydra.run.dir=out",
    )  # fmt: skip
    assert (tmp_path / "out/pretrained/last.ckpt").is_file()
    assert RunFolder(tmp_path / "out").done


@pytest.mark.slow
@pytest.mark.parametrize("script", ["lightning_script.py", "framework_benchmark.py", "decide.py"])
def test_examples_run(tmp_path, script):
    done = config_kit.python(str(ROOT / "examples" / script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "AUROC 0." in done.stdout
