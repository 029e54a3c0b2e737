import pytest
import torch
import torch.distributed as dist
from conftest import make_blobs
from torch import multiprocessing as mp

from rmd_plugin import RMD, ClassMoments

pytestmark = pytest.mark.ddp

# how 300 samples are split over two ranks
SPLITS = {"uneven": (0, 113, 300), "one rank without data": (0, 300, 300), "first rank without data": (0, 0, 300)}


def run(rank, store, split, order_by_class, diagonal, out):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    z, y, x = make_blobs()
    z = z + 1e3
    if order_by_class:  # the ranks then see different classes, sizes and shifts
        order = y.argsort()
        z, y = z[order], y[order]
    cuts = SPLITS[split]
    metric = ClassMoments(diagonal=diagonal)
    for rows, labels in zip(
        z[cuts[rank] : cuts[rank + 1]].split(16), y[cuts[rank] : cuts[rank + 1]].split(16), strict=True
    ):
        metric.update(rows, labels)
    detector = RMD(covariance="diagonal" if diagonal else "tied").fit_moments(metric.compute())
    own = int(metric.counts.sum()) if len(metric.counts) else 0  # compute() must give the rank its own state back
    torch.save({"scores": detector.predict_features(x + 1e3), "own": own}, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("order_by_class", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_give_the_scores_of_one(tmp_path, split, order_by_class):
    for diagonal in (False, True):
        folder = tmp_path / str(diagonal)
        folder.mkdir()
        mp.spawn(run, (folder / "store", split, order_by_class, diagonal, folder), nprocs=2)
        z, y, x = make_blobs()
        expected = RMD(covariance="diagonal" if diagonal else "tied").fit_features(z + 1e3, y)
        results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
        assert torch.equal(results[0]["scores"], results[1]["scores"])
        torch.testing.assert_close(results[0]["scores"], expected.predict_features(x + 1e3), rtol=1e-9, atol=1e-9)
        cuts = SPLITS[split]
        assert [r["own"] for r in results] == [cuts[1] - cuts[0], cuts[2] - cuts[1]]
