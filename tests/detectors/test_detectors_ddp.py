"""Two processes collect what one collects: moments, the sample of FusedRMD and calibration scores."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from conftest import make_blobs
from torch import multiprocessing as mp

from rmd_plugin import RMD, CalibrationScores, FusedRMD

pytestmark = pytest.mark.ddp

# how 30,000 samples, more than FusedRMD draws, are split over two ranks
SPLITS = {"uneven": (0, 11_300, 30_000), "second rank empty": (0, 30_000, 30_000), "first rank empty": (0, 0, 30_000)}
DETECTORS = {"tied": RMD, "diagonal": lambda: RMD(covariance="diagonal"), "fused": FusedRMD}
CASES = list(product(SPLITS, DETECTORS))


def data():
    z, y, x = make_blobs(per_class=6000, dtype=torch.float32)
    # sorted by class: the ranks see different classes, sizes and shifts
    return z[y.argsort()] + 100, y.sort().values, x + 100


def collected(metric, start, stop, *columns):
    if stop > start:
        for parts in zip(*(column[start:stop].split(700) for column in columns), strict=True):
            metric.update(*parts)
    return metric


def calibrated(start, stop, *, per_class):
    z, y, _ = data()
    columns = (z[:, 0], y) if per_class else (z[:, 0],)
    return collected(CalibrationScores(5 if per_class else None), start, stop, *columns).compute().tensors


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results, (z, y, x) = {}, data()
    for split, name in CASES:
        metric = collected(DETECTORS[name]().new_moments(), *SPLITS[split][rank : rank + 2], z, y)
        moments = metric.compute()
        results[split, name] = {
            "scores": DETECTORS[name]().fit_moments(moments).predict_features(x),
            "keys": getattr(moments, "keys", None),
            "own": int(metric.counts.sum()),
        }
    for split, per_class in product(SPLITS, (False, True)):
        results[split, per_class] = calibrated(*SPLITS[split][rank : rank + 2], per_class=per_class)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    mp.spawn(run, (folder,), nprocs=2)  # once for all cases: starting a process costs more than all of them
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_two_processes_give_the_scores_of_one(ranks, case):
    first, second = (results[case] for results in ranks)
    z, y, x = data()
    moments = collected(DETECTORS[case[1]]().new_moments(), 0, len(z), z, y).compute()
    expected = DETECTORS[case[1]]().fit_moments(moments).predict_features(x)
    assert torch.equal(first["scores"], second["scores"])
    torch.testing.assert_close(first["scores"], expected, rtol=1e-5, atol=1e-4)
    if case[1] == "fused":
        assert torch.equal(first["keys"], moments.keys)
    # compute() gives every rank its own state back
    cuts = SPLITS[case[0]]
    assert [first["own"], second["own"]] == [cuts[1] - cuts[0], cuts[2] - cuts[1]]


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_calibrate_as_one(ranks, split, per_class):
    exact = calibrated(0, 30_000, per_class=per_class)
    for results in ranks:
        tensors = results[split, per_class]
        assert torch.equal(tensors["scores"], exact["scores"])
        if per_class:
            assert torch.equal(tensors["class_sizes"], exact["class_sizes"])
