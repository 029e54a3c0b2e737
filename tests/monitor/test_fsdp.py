"""Under FSDP2 every forward pass is a matter of all processes: none may run one more than the others."""

import warnings
from pathlib import Path

import callback_fsdp_run
import config_kit
import pytest
import torch

pytestmark = pytest.mark.ddp

SCRIPT = Path(__file__).parents[1] / "callback_fsdp_run.py"


def run(scenario, folder):
    # a hang ends in TimeoutExpired
    return config_kit.python(str(SCRIPT), scenario, str(folder), cwd=folder, PL_GLOBAL_SEED="0")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    with warnings.catch_warnings():
        callback_fsdp_run.main("auto", folder)
    return torch.load(folder / "0.pt", weights_only=False)


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    folder = tmp_path_factory.mktemp("double")
    done = run("fsdp2", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return folder, results, [torch.load(folder / f"more-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("prefix", ["ood", "stream"])
def test_sharded_processes_find_the_moments_and_metrics_of_one(single, double, prefix):
    keys = ("epoch", "detector", "ood", "metric")
    expected = {tuple(row[key] for key in keys): row["value"] for row in single[prefix]["rows"]}
    assert len({row["ood"] for row in single[prefix]["rows"]} - {""}) == 3  # two sets, and their mean
    for result in double[1]:
        for mine, theirs in zip(single[prefix]["moments"], result[prefix]["moments"], strict=True):
            assert torch.equal(mine, theirs)
        found = {tuple(row[key] for key in keys): row["value"] for row in result[prefix]["rows"]}
        assert found == pytest.approx(expected, abs=1e-6)


def test_every_sample_counts_once(single, double):
    sizes = {name: callback_fsdp_run.SIZES[name] for name in ("near", "tiny")}
    for result in double[1]:
        assert len(result["scores"]) == len(single["scores"]) == 4  # two monitors, two epochs
        for mine, theirs in zip(single["scores"], result["scores"], strict=True):
            for name, (id_scores, ood_scores) in mine.items():
                assert len(theirs[name][0]) == callback_fsdp_run.SIZES["val"]
                assert {ood: len(found) for ood, found in theirs[name][1].items()} == sizes
                torch.testing.assert_close(theirs[name], (id_scores, ood_scores), rtol=1e-4, atol=1e-4)


def test_sharded_training_is_the_same_with_the_monitor_bit_for_bit(double):
    for more in double[2]:
        (plain, state), (monitored, their_state) = more["plain"], more["monitored"]
        assert len(plain) > 6
        assert state == their_state  # what of the weights is gathered
        for mine, theirs in zip(plain, monitored, strict=True):
            assert torch.equal(mine, theirs)


def test_the_detectors_of_a_sharded_checkpoint_are_evaluated(single, double):
    last = {(row["detector"], row["ood"], row["metric"]): row["value"] for row in single["ood"]["rows"]}
    for more in double[2]:
        rows = [row for row in more["evaluated"] if row["stage"] == "validate" and row["ood"] == "near"]
        assert {row["detector"] for row in rows} == {"rmd", "vim"}
        for row in rows:
            assert row["value"] == pytest.approx(last[row["detector"], "near", row["metric"]], abs=1e-6)


def test_a_forward_pass_that_fails_on_one_process_ends_all(tmp_path):
    done = run("1", tmp_path)
    assert done.returncode != 0
    assert "only here" in done.stderr
