from itertools import product

import pytest
import torch
import torch.distributed as dist
from conftest import make_blobs
from torch import multiprocessing as mp

from rmd_plugin import RMD, ClassMoments

pytestmark = pytest.mark.ddp

# how 300 samples are split over two ranks
SPLITS = {"uneven": (0, 113, 300), "second rank empty": (0, 300, 300), "first rank empty": (0, 0, 300)}
CASES = list(product(SPLITS, ("mixed classes", "sorted by class"), ("tied", "diagonal")))


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for case in CASES:
        split, order, covariance = case
        z, y, x = make_blobs()
        z = z + 1e3
        if order == "sorted by class":  # the ranks then see different classes, sizes and shifts
            z, y = z[y.argsort()], y.sort().values
        start, stop = SPLITS[split][rank : rank + 2]
        metric = ClassMoments(diagonal=covariance == "diagonal")
        if stop > start:
            for rows, labels in zip(z[start:stop].split(16), y[start:stop].split(16), strict=True):
                metric.update(rows, labels)
        detector = RMD(covariance=covariance).fit_moments(metric.compute())
        results[case] = {"scores": detector.predict_features(x + 1e3), "own": int(metric.counts.sum())}
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
    z, y, x = make_blobs()
    expected = RMD(covariance=case[2]).fit_features(z + 1e3, y).predict_features(x + 1e3)
    assert torch.equal(first["scores"], second["scores"])
    torch.testing.assert_close(first["scores"], expected, rtol=1e-9, atol=1e-9)
    # compute() gives every rank its own state back
    cuts = SPLITS[case[0]]
    assert [first["own"], second["own"]] == [cuts[1] - cuts[0], cuts[2] - cuts[1]]
