import math
import warnings
from pathlib import Path

import callback_ddp_run
import config_kit
import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from rmd_plugin.monitor.callback import OODMonitor, unpack_history
from rmd_plugin.monitor.fitting import FeatureRows

pytestmark = pytest.mark.ddp

SCRIPT = Path(__file__).parents[1] / "callback_ddp_run.py"
SETS = {"near": 23, "tiny": 1, "extra": 9, "unknown": 4}


def run(strategy, folder):
    folder.mkdir()
    # a hang ends in TimeoutExpired
    done = config_kit.python(str(SCRIPT), strategy, str(folder), cwd=folder, PL_GLOBAL_SEED="0")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [torch.load(f, weights_only=False) for f in sorted(folder.glob("?.pt"))]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    with warnings.catch_warnings():
        callback_ddp_run.main("auto", folder)
    return torch.load(folder / "0.pt", weights_only=False) | {"predictions": torch.load(folder / "predictions-0.pt")}


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    folder, results = run("ddp", tmp_path_factory.mktemp("ddp") / "run")
    assert [result["rank"] for result in results] == [0, 1]
    return folder, results


def values(result, prefix):
    return {(r["epoch"], r["detector"], r["ood"], r["metric"]): r["value"] for r in result[prefix]["rows"]}


@pytest.mark.parametrize("prefix", ["ood", "stream"])
def test_two_processes_find_the_moments_and_metrics_of_one(single, double, prefix):
    expected = values(single, prefix)
    assert not any(math.isnan(value) for value in expected.values())
    for result in double[1]:
        for mine, theirs in zip(single[prefix]["moments"], result[prefix]["moments"], strict=True):
            assert torch.equal(mine, theirs)
        found = values(result, prefix)
        assert found == pytest.approx(expected, rel=1e-5)
        # thresholds are scores, which float32 rounds by batch; ranks of scores are exact
        exact = [key for key in expected if key[-1] != "threshold"]
        assert {key: found[key] for key in exact} == {key: expected[key] for key in exact}
        assert result[prefix]["fits"] == single[prefix]["fits"]


def test_two_processes_find_the_scores_of_one_and_every_sample_counts_once(single, double):
    for result in double[1]:
        assert len(result["scores"]) == len(single["scores"]) == 6  # three monitors, two epochs
        for mine, theirs in zip(single["scores"], result["scores"], strict=True):
            for name in theirs:
                (id_scores, ood_scores), (id_2, ood_2) = mine.get(name, theirs[name]), theirs[name]
                assert len(id_2) == 37 - SETS["unknown"]
                assert {ood: len(found) for ood, found in ood_2.items()} == {ood: SETS[ood] for ood in ood_scores}
                torch.testing.assert_close(id_2, id_scores, rtol=1e-5, atol=1e-5)
                for ood in ood_scores:
                    torch.testing.assert_close(ood_2[ood], ood_scores[ood], rtol=1e-5, atol=1e-5)


def test_predictions_of_all_processes_come_in_the_order_of_the_loader(single, double):
    expected = single["predictions"]
    assert {"rmd/score", "rmd/p_value", "rmd/is_ood"} <= expected.keys()
    for rank in range(2):
        predictions = torch.load(double[0] / f"predictions-{rank}.pt")
        assert predictions.keys() == expected.keys()
        for name, column in expected.items():
            # scores are rounded by batch, which may swap two of the ranks behind p-values
            tolerance = 0.06 if name.endswith("p_value") else 1e-4
            torch.testing.assert_close(predictions[name].double(), column.double(), rtol=1e-4, atol=tolerance)


def test_fits_that_draw_are_the_same_on_every_process(single, double):
    for result in double[1]:
        for name, tensor in single["ood"]["flow"].items():
            assert torch.equal(result["ood"]["flow"][name], tensor), name
        mine, theirs = (run["stream"]["fused"] for run in (single, result))
        for name in ("location", "rate", "w", "b"):  # the moments of two parts are rounded once more
            torch.testing.assert_close(theirs[name], mine[name], rtol=1e-12, atol=0)


def test_what_callbacks_see_is_the_same_on_every_process(single, double):
    first, second = (result["metrics"] for result in double[1])
    assert first.keys() == second.keys() == single["metrics"].keys()
    for name, value in first.items():
        assert second[name] == value or (math.isnan(value) and math.isnan(second[name]))
        if not name.startswith("failing"):
            assert value == single["metrics"][name]


def test_a_failure_on_one_process_is_a_failure_on_all_and_nothing_hangs(double):
    for result in double[1]:
        for (_, detector, _, _), value in values(result, "failing").items():
            assert math.isnan(value) == (detector != "good")


def test_the_checkpoint_holds_the_detectors_of_all_processes(double):
    folder, _ = double
    own = {"rmd": callback_ddp_run.Keeping()}
    detector = OODMonitor.load_detectors(folder / "checkpoints" / "last.ckpt", prefix="stream", detectors=own)["rmd"]
    assert detector.fitted
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]
    monitor = next(s for key, s in state.items() if "'ood'" in key)
    assert set(monitor["detectors"]) >= {"rmd", "flow", "knn"}
    assert unpack_history(monitor["history"])[0]["detector"] == "rmd"


def gather_rows(rank, store, folder):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = FeatureRows()
    if rank == 0:
        rows.update(torch.arange(8.0).view(4, 2).double(), torch.tensor([1, -1, 0, 1]), torch.tensor([3, 2, 1, 0]))
    encoded = rows.compute()
    torch.save((encoded.features, encoded.labels), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_a_process_without_data_takes_part(tmp_path):
    mp.spawn(gather_rows, (tmp_path / "store", tmp_path), nprocs=2)
    for rank in range(2):
        rows, labels = torch.load(tmp_path / f"{rank}.pt")
        assert (rows.tolist(), labels.tolist()) == ([[6.0, 7.0], [4.0, 5.0], [0.0, 1.0]], [1, 0, 1])
