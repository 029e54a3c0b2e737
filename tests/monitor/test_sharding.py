"""Shares of a loader: limits meet every class, whatever the order of the labels and the number of processes."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin.monitor.fitting import FeatureRows, Share

NUMBERS = torch.arange(256)
#: labels of 4 classes in the orders that people's sets have
ORDERS = {"interleaved": NUMBERS % 4, "sorted": NUMBERS // 64, "blocks of a batch": NUMBERS // 32 % 4}


def taken(data, **options):
    """Numbers of the samples in the order of all processes."""
    world = options.get("world", 1)
    rows = []
    for rank in range(world):
        samples = [
            n for (batch,), counting in Share(data, **{**options, "rank": rank}) for n in batch[counting].tolist()
        ]
        rows += [(number * world + rank, sample) for number, sample in enumerate(samples)]
    return [sample for _, sample in sorted(rows)]


def numbers(batch_size=32):
    return DataLoader(TensorDataset(NUMBERS), batch_size, shuffle=True)


@pytest.mark.parametrize(("order", "limit"), [("interleaved", 1), ("sorted", 3), ("blocks of a batch", 0.25)])
def test_a_limited_share_holds_every_class_in_about_its_proportion(order, limit):
    chosen = taken(numbers(), limit=limit)
    assert len(chosen) == len(set(chosen)) == 32 * limit if isinstance(limit, int) else 256 * limit
    counts = ORDERS[order][chosen].bincount(minlength=4)
    # five standard deviations of a plain random choice, which a choice in strata does not exceed
    assert (counts - len(chosen) / 4).abs().max() < 5 * (len(chosen) * 3 / 16) ** 0.5
    assert counts.min() > 0


def test_the_choice_is_the_same_for_any_number_of_processes():
    assert taken(numbers(), world=4, limit=2) == taken(numbers(), limit=8)
    assert taken(numbers(), world=3, limit=0.3) == taken(numbers(), limit=0.3)
    assert taken(numbers(), limit=99) == taken(numbers(), limit=1.0) == taken(numbers()) == NUMBERS.tolist()


def test_every_process_gets_as_many_batches_and_a_repeated_sample_does_not_count():
    data = DataLoader(TensorDataset(torch.arange(13)), 2)
    shares = [list(Share(data, rank, 4)) for rank in range(4)]
    assert {len(share) for share in shares} == {2}
    assert sorted(n for share in shares for (batch,), counting in share for n in batch[counting].tolist()) == list(
        range(13)
    )
    assert [len(batch[counting]) for (batch,), counting in shares[3]] == [2, 1]


def test_of_a_list_each_process_takes_every_other_batch():
    batches = [(torch.full((4,), number),) for number in range(5)]
    assert [int(batch[0]) for (batch,), _ in Share(batches, 1, 2)] == [1, 3]
    assert taken(batches, limit=2) == [0] * 4 + [1] * 4


def test_a_loader_that_one_process_runs_whole_is_used_as_it_is_and_persistent_workers_are_kept():
    own, workers = DataLoader(NUMBERS, 32), DataLoader(NUMBERS, 32, num_workers=1, persistent_workers=True)
    assert Share(own, rebuild=False)._rebuilt is None
    assert Share(workers, 0, 2, rebuild=False)._rebuilt.persistent_workers


def test_no_global_random_state_is_used_or_moved():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before, chosen = states(), taken(numbers(), limit=2)
    assert states() == before
    torch.manual_seed(torch.initial_seed() + 1)
    np.random.seed(5)  # noqa: NPY002
    assert taken(numbers(), limit=2) == chosen


def test_rows_come_back_in_the_order_of_their_index():
    metric = FeatureRows()
    z, y = torch.randn(9, 3), torch.tensor([0, 1, -1, 2, 0, 1, -5, 2, 0])
    order = torch.randperm(9)
    for index in order.split(4):
        metric.update(z[index], y[index], index)
    encoded = metric.compute()
    is_id = y >= 0
    assert torch.equal(encoded.features, z[is_id])
    assert torch.equal(encoded.labels, y[is_id])


def test_rows_that_are_not_finite_are_refused_and_not_kept():
    metric = FeatureRows()
    z, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    metric.update(z, y, torch.arange(4))
    z[2, 1] = torch.inf
    with pytest.raises(ValueError, match="1 of 4 samples have NaN or infinite"):
        metric.update(z, y, torch.arange(4))
    assert len(metric.compute()) == 4
    metric = FeatureRows()
    metric.update(torch.randn(2, 3), torch.tensor([-1, -1]), torch.arange(2))
    with pytest.raises(ValueError, match="nothing to fit"):
        metric.compute()
