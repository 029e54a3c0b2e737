import math

import numpy as np
import pytest

from rmd_plugin.compare.bootstrap import Bootstrap, placements
from rmd_plugin.compare.rows import Row
from rmd_plugin.report.choice import advice, choose
from rmd_plugin.report.tables import comparison_tables


def auroc(detector, ood, value, distance, low=math.nan, high=math.nan):
    return Row("b", ood, "net", detector, 0, "AUROC", value, distance=distance, low=low, high=high)


ROWS = [
    auroc("rmd", "cats", 0.90, "near", 0.85, 0.95),
    auroc("rmd", "dogs", 0.80, "near", 0.75, 0.85),
    auroc("rmd", "noise", 0.10, "far", 0.05, 0.15),
    auroc("knn", "cats", 0.86, "near", 0.80, 0.90),
    auroc("knn", "dogs", 0.78, "near", 0.72, 0.84),
    auroc("knn", "noise", 0.02, "far", 0.01, 0.03),
    auroc("msp", "cats", 0.89, "near", 0.84, 0.94),
    auroc("msp", "dogs", 0.60, "near", 0.55, 0.65),
    auroc("msp", "noise", 0.99, "far", 0.98, 1.00),
    Row("b", "", "net", "rmd", 0, "false_alarms@0.05", 0.06, low=0.04, high=0.09),
    Row("b", "cats", "net", "rmd", 0, "detected@0.05", 0.7, distance="near"),
    Row("b", "dogs", "net", "rmd", 0, "detected@0.05", 0.5, distance="near"),
    Row("b", "noise", "net", "rmd", 0, "detected@0.05", 0.0, distance="far"),
]


def test_the_leader_is_judged_by_near_sets():
    choice = choose(ROWS)
    assert (choice.detector, choice.judged) == ("rmd", "near")
    assert choice.auroc == pytest.approx(np.mean([0.9, 0.8]))
    assert choice.rivals is None
    assert "not tested" in " ".join(advice(choice))
    assert (choice.alpha, choice.detected, choice.alarms.value) == (0.05, pytest.approx(0.6), 0.06)


def test_what_each_sample_adds_to_auroc_counts_pairs():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 6, 40).astype(float), rng.integers(2, 9, 25).astype(float)
    above = (outside > inside[:, None]) + 0.5 * (outside == inside[:, None])
    for found, expected in zip(placements(inside, outside), (above.mean(1), above.mean(0)), strict=True):
        np.testing.assert_allclose(found, expected)


def scored(rng, gap, sets=("cats", "dogs"), noise=0.3, size=300, others=("knn",)):
    """Detectors that see the same samples; on OOD samples the first has scores higher by ``gap``."""
    base = {"test": rng.normal(size=size), **{name: rng.normal(1.0, size=size) for name in sets}}
    made = {}
    for name, more in (("rmd", gap), *((name, 0.0) for name in others)):
        made[name] = {key: x + noise * rng.normal(size=size) + more * (key != "test") for key, x in base.items()}
    return made


def rows_of(scores):
    return [
        auroc(name, ood, (x > found["test"][:, None]).mean(), "near")
        for name, found in scores.items() for ood, x in found.items() if ood != "test"
    ]  # fmt: skip


def test_detectors_are_rivals_at_the_rate_that_the_level_says_where_they_are_equally_good():
    rng = np.random.default_rng(0)
    trials = [scored(rng, gap=0.0) for _ in range(300)]
    share = np.mean([bool(choose(rows_of(scores), scores).rivals) for scores in trials])
    assert 0.92 < share < 0.98  # 95 %, with two standard errors and more on both sides


def test_of_many_equally_good_detectors_all_are_rivals_nearly_always():
    rng, others = np.random.default_rng(0), [f"d{number}" for number in range(8)]
    trials = [scored(rng, gap=0.0, others=others) for _ in range(150)]
    complete = [len(choose(rows_of(scores), scores).rivals) == 8 for scores in trials]
    assert np.mean(complete) >= 0.93


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_handful_of_samples_tells_nothing_apart(size):
    scores = {
        "rmd": {"test": np.zeros(size), "cats": np.ones(size)},
        "knn": {"test": np.ones(size), "cats": np.zeros(size)},
    }
    assert choose([auroc("rmd", "cats", 1.0, "near"), auroc("knn", "cats", 0.0, "near")], scores).rivals == ["knn"]


def test_a_paired_difference_is_told_where_the_intervals_overlap():
    scores = scored(np.random.default_rng(0), gap=0.25)
    resampled = {name: Bootstrap(300, 300).interval(found["test"], found["cats"]) for name, found in scores.items()}
    assert resampled["knn"][1] > resampled["rmd"][0]
    choice = choose(rows_of(scores), scores)
    assert (choice.detector, choice.rivals) == ("rmd", [])


def test_without_near_sets_all_count_and_without_any_there_is_no_choice():
    far = [row for row in ROWS if row.distance == "far" and row.metric == "AUROC"]
    assert (choose(far).detector, choose(far).judged) == ("msp", "all")
    assert math.isnan(choose(far).alpha)
    assert choose([row for row in ROWS if row.metric == "false_alarms@0.05"]) is None
    assert choose([]) is None


def test_a_number_below_chance_has_a_remark_that_says_why():
    (table,) = comparison_tables(ROWS)
    remarks = [note for note in table.notes if note.startswith("Below chance")]
    assert [remark.split()[2] for remark in remarks] == ["RMD", "KNN"]
    assert "unit length" in remarks[1]
    assert all("noise" in remark and "cats" not in remark for remark in remarks)
