"""Shares of a loader: limits meet every class, whatever the order of the labels and the number of processes."""

import random

import callback_kit as kit
import numpy as np
import pytest
import torch
from callback_kit import OTHER, fit, loader, samples, values
from torch.utils.data import DataLoader, TensorDataset

from rmd_plugin import RMD
from rmd_plugin.monitor.callback import OODMonitor
from rmd_plugin.monitor.sharding import shard

pytestmark = [pytest.mark.filterwarnings(w) for w in kit.QUIET]

NUMBERS = torch.arange(256)
#: labels of 4 classes in the orders that people's sets have
ORDERS = {
    "interleaved": NUMBERS % 4,
    "interleaved in reverse": 3 - NUMBERS % 4,
    "sorted": NUMBERS // 64,
    "blocks of a batch": NUMBERS // 32 % 4,
    "blocks of a stride": NUMBERS // 4 % 4,
    "pairs": NUMBERS // 2 % 4,
}


def taken(data, **options):
    """Numbers of the samples in the order of all processes."""
    world = options.get("world", 1)
    rows = []
    for rank in range(world):
        share, seen = shard(data, **{**options, "rank": rank}), 0
        for number, (batch,) in enumerate(share.batches):
            rows += zip(share.positions(number, seen, len(batch)).tolist(), batch.tolist(), strict=True)
            seen += len(batch)
    return [sample for _, sample in sorted(rows)]


def numbers(batch_size=32):
    return DataLoader(TensorDataset(NUMBERS), batch_size, shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 3, 0.25, 0.5])
@pytest.mark.parametrize("order", ORDERS)
def test_a_limited_share_holds_every_class_in_about_its_proportion(order, limit):
    chosen = taken(numbers(), limit=limit)
    assert len(chosen) == len(set(chosen)) == 32 * limit if isinstance(limit, int) else 256 * limit
    counts = ORDERS[order][chosen].bincount(minlength=4)
    # five standard deviations of a plain random choice, which a choice in strata does not exceed
    assert (counts - len(chosen) / 4).abs().max() < 5 * (len(chosen) * 3 / 16) ** 0.5
    assert counts.min() > 0


def test_one_sample_is_drawn_from_each_of_equal_strata_anew_for_each_seed():
    picks = np.array([taken(numbers(), limit=2, seed=seed) for seed in range(50)])
    assert (picks // 4 == np.arange(64)).all()
    assert (np.abs(np.bincount((picks % 4).ravel()) - 800) < 100).all()  # each place in a stratum as often
    assert np.array_equal(picks[3], taken(numbers(), limit=2, seed=3))


def test_strata_of_unequal_size_hold_every_sample_once():
    for count in range(1, 8):
        data = DataLoader(TensorDataset(torch.arange(7)), 1)
        chosen = taken(data, limit=count)
        assert len(chosen) == count
        assert chosen == sorted(set(chosen))


def test_the_choice_is_the_same_for_any_number_of_processes():
    for world, limit in ((2, 4), (4, 2), (8, 1)):
        assert taken(numbers(), world=world, limit=limit) == taken(numbers(), limit=8 // world * world)
    for world in (2, 3):
        assert taken(numbers(), world=world, limit=0.3) == taken(numbers(), limit=0.3)
    assert taken(numbers(), limit=99) == taken(numbers(), limit=1.0) == taken(numbers()) == NUMBERS.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_batches_of_a_list_are_chosen_all_over_it_too(world):
    batches = [(torch.full((4,), number),) for number in range(16)]  # sorted by class
    chosen = [taken(batches, world=world, limit=4 // world, seed=seed)[::4] for seed in range(20)]
    assert (np.array(chosen) // 4 == np.arange(4)).all()
    assert len({tuple(numbers) for numbers in chosen}) > 1
    assert taken(batches, world=world, limit=0.25)[::4] == chosen[0]
    assert taken(batches, world=world)[::4] == list(range(16))


def test_no_global_random_state_is_used_or_moved():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before, chosen = states(), taken(numbers(), limit=2)
    assert states() == before
    torch.manual_seed(torch.initial_seed() + 1)
    np.random.seed(5)  # noqa: NPY002
    assert taken(numbers(), limit=2) == chosen


@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("interleaved", {"limit_fit_batches": 2}),
        ("sorted", {"limit_fit_batches": 2}),
        ("blocks of a batch", {"limit_fit_batches": 2}),
        ("interleaved", {"limit_train_batches": 0.25}),
        ("interleaved", {"overfit_batches": 0.5}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*samples are few for the covariance")
def test_a_limited_fit_finds_ood_data_as_the_whole_one_does(order, options):
    x, y = samples(256, 0, shift=-3.0)  # classes far apart, and OOD data between them
    rows = (NUMBERS % 4).argsort(stable=True)[ORDERS[order].argsort(stable=True).argsort()]
    assert torch.equal(y[rows], ORDERS[order])
    given = {"limit_fit_batches": options.pop("limit_fit_batches")} if "limit_fit_batches" in options else {}
    limited, whole = (
        OODMonitor({"rmd": RMD()}, head="model.fc", ood={"far": loader(OTHER)}, prefix=prefix, **limits)
        for prefix, limits in (("limited", given), ("whole", {"limit_fit_batches": 1.0}))
    )
    fit(limited, whole, train=loader((x[rows], y[rows]), 32), val=loader(samples(32, 1, shift=-3.0)), **options)
    found, expected = (values(monitor)["rmd", "far"] for monitor in (limited, whole))
    assert expected > 0.9  # by how much depends on the last bits of the training
    assert found > expected - 0.05
