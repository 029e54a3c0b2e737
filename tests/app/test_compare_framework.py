"""``rmd-compare`` on benchmarks of the framework, on tiny fakes of their folders."""

import framework_kit as kit
import pytest
import pytorch_ood.benchmark as published
from pytorch_ood.dataset.img import LSUNCrop

from rmd_plugin.compare.rows import read_rows, select
from rmd_plugin.report.tables import ood_sets

OPTIONS = ["detector=[rmd,msp]", "backbone=small_cnn", "resamples=20", "alpha=0.5", "head=linear_probe"]


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def call(*arguments, code=0):
        words = [*OPTIONS, f"paths.data_dir={tmp_path / 'data'}", f"hydra.run.dir={tmp_path / 'out'}", *arguments]
        printed = command("compare", *words, code=code, quiet=False)
        return printed if code else (read_rows(tmp_path / "out" / "rows.csv"), printed)

    return call


@pytest.mark.slow
def test_a_medical_benchmark_shows_its_shifted_sets_as_a_kind_of_their_own(run, tmp_path):
    kit.mibood(published.MIDOG_OpenMIBOOD, tmp_path / "data")
    rows, printed = run("benchmark=mibood_midog")
    assert set(ood_sets(rows).values()) == {"near", "far"}
    assert set(ood_sets(rows)) == {
        *published.MIDOG_OpenMIBOOD.near_ood_names,
        *published.MIDOG_OpenMIBOOD.far_ood_names,
    }
    shifted = {row.ood for row in select(rows, distance="shift").itertuples()}
    assert shifted == {"midog_csid_1b", "midog_csid_1c"}
    assert {row.metric for row in select(rows, distance="shift").itertuples()} == {
        "ACC_shift",
        "false_alarms_shift@0.5",
    }
    assert "Accuracy on midog_csid_1b, in-distribution under a covariate shift" in " ".join(printed.split())
    assert (tmp_path / "out" / "figures" / "histograms.png").exists()


@pytest.mark.slow
def test_any_benchmark_and_any_further_set_is_a_name_on_the_command_line(run, tmp_path, monkeypatch):
    lists = tmp_path / "torch/hub/openood_benchmark_imglist/benchmark_imglist"
    kit.openood(published.CIFAR10_OpenOOD, tmp_path / "data", lists)
    kit.unpacked(tmp_path / "data", LSUNCrop, monkeypatch, size=(8, 6))
    noise = "{GaussianNoise:{length:5,size:[6,8,3]}}"
    chosen = ["benchmark=framework", "benchmark.name=CIFAR10_OpenOOD", f"benchmark.far=[LSUNCrop,{noise}]"]
    rows, _ = run(*chosen, "figures=false")
    assert {row.benchmark for row in rows.itertuples()} == {"framework:CIFAR10_OpenOOD"}
    kinds = ood_sets(rows)
    assert list(kinds)[:2] == ["CIFAR100", "TinyImageNet"]
    assert [name for name in kinds if name not in dict(published.CIFAR10_OpenOOD._ood_imglists)] == [
        "LSUNCrop",
        "GaussianNoise:5:[6, 8, 3]",
    ]
    error = run("benchmark=framework", code=1)
    assert "benchmark=framework needs benchmark.name" in error
    error = run("benchmark=openood_cifar10", "benchmark.far=[LSUN]", code=1)
    assert "there is no far-OOD set 'LSUN'; there are" in error
