import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from rmd_plugin import CalibrationScores
from rmd_plugin.detectors.conformal import Calibration

pytestmark = pytest.mark.ddp

# how 1,000 scores are split over two ranks
SPLITS = {"uneven": (0, 313, 1000), "second rank empty": (0, 1000, 1000), "first rank empty": (0, 0, 1000)}
LIMITS = {"exact": 2**17, "sketch": 64}


def scores():
    return torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.arange(1000) % 3


def collected(limit, start, stop, *, per_class=False, **options):
    values, classes = scores()
    metric = CalibrationScores(3 if per_class else None, limit=limit, **options)
    for part in torch.arange(start, stop).split(40):
        if len(part):
            metric.update(values[part], classes[part] if per_class else None)
    return metric.compute()


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for split, cuts in SPLITS.items():
        for kind, limit in LIMITS.items():
            for per_class in (False, True):
                found = collected(limit, *cuts[rank : rank + 2], per_class=per_class)
                results[split, kind, per_class] = found.tensors
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    mp.spawn(run, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric CalibrationScores")
@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_calibrate_as_one(ranks, split, per_class):
    exact = collected(2**17, 0, 1000, per_class=per_class)
    for found in (results[split, "exact", per_class] for results in ranks):
        assert all(torch.equal(found[name], tensor) for name, tensor in exact.tensors.items() if name != "classes")
    first, second = (results[split, "sketch", per_class] for results in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
    values, classes = scores()
    sketch = Calibration.from_tensors(first, smallest_class=1)
    assert len(sketch) == 1000
    for k in range(3) if per_class else [None]:
        queries, own = (values, None) if k is None else (values[classes == k], classes[classes == k])
        gap = sketch.p_value(queries, own) - exact.p_value(queries, own)
        allowed = int(sketch.overcount[k or 0]) / (len(queries) + 1)
        assert 0 <= float(gap.min()) <= float(gap.max()) <= allowed
