"""Do the detectors, commands and benchmarks give the numbers that they gave before the package was rebuilt?

The numbers beside this file are those of commit ad814d8 (``make.py`` wrote them). Scores agree to 1e-6 of their spread,
trained weights bit for bit.
"""

import csv
import json

import numpy as np
import pytest
from make import (
    BENCHMARKS,
    DETECTORS,
    FOLDER,
    REFITS,
    comparison,
    compute,
    data_fingerprints,
    fingerprints,
    guard,
    machine,
    training,
)

TRAININGS = json.loads((FOLDER / "trainings.json").read_text())
FINGERPRINTS = json.loads((FOLDER / "fingerprints.json").read_text())
NEEDS_DATA = ("cifar10_vs_cifar100", "cifar100_vs_cifar10", "clinc150", "genomics")

needs_the_same_machine = pytest.mark.skipif(
    machine() != TRAININGS["machine"],
    reason=f"trained weights depend on torch and the processor: {machine()}, not {TRAININGS['machine']}",
)


def golden_numbers(case):
    with np.load(FOLDER / "numbers.npz", allow_pickle=False) as numbers:
        return {name.removeprefix(f"{case}/"): numbers[name] for name in numbers.files if name.startswith(f"{case}/")}


def check_numbers(computed, golden, tolerance=1e-6):
    """Every golden array is there and equal, up to a share of its spread (of its size if it is a single number)."""
    assert computed.keys() == golden.keys()
    wrong = {}
    for name, expected in golden.items():
        spread = expected.std() if expected.size > 1 and expected.std() > 0 else np.abs(expected).max()
        error = np.abs(computed[name] - expected).max()
        if not error <= tolerance * max(spread, 1e-12):  # NaN is wrong too
            wrong[name] = f"{error / spread:.1e} of the spread"
    assert not wrong


@pytest.mark.parametrize("case", [case for case in DETECTORS if case != "flows"])
def test_detectors_score_as_they_did(case):
    check_numbers(compute(case), golden_numbers(case))


@needs_the_same_machine
def test_flows_score_as_they_did():
    check_numbers(compute("flows"), golden_numbers("flows"))


def test_benchmarks_have_the_splits_that_they_had():
    assert fingerprints() == {name: hashes for name, hashes in FINGERPRINTS.items() if name not in NEEDS_DATA}


@pytest.mark.data
def test_public_benchmarks_have_the_splits_that_they_had(data_dir):
    assert data_fingerprints() == {name: FINGERPRINTS[name] for name in NEEDS_DATA}


@pytest.mark.slow
def test_a_guard_judges_as_it_did_in_python_and_onnx():
    check_numbers(guard(), golden_numbers("guard"), tolerance=1e-5)  # a network and a detector in float32


#: detectors whose scores may differ in their last digits, which can swap two samples
OURS = ("rmd", "mahalanobis", "marginal", "partial", "fused")


def tolerance(benchmark, row):
    """How far a row may be off: exactness of the scores does not carry over to ranks, where two samples can swap."""
    counted = row["metric"].split("@")[0] in ("FPR95TPR", "detected", "false_alarms")
    if row["metric"].startswith("threshold"):
        return abs(float(row["value"])) * (1e-2 if benchmark == "intents" and row["detector"] in OURS else 1e-5)
    if row["detector"] not in OURS:
        return 1e-6
    if benchmark == "intents":  # has columns of hardly any variance, which no longer count as features
        return 5e-3 if counted else 1e-3
    return 5e-3 if counted else 1e-5


def check_rows(computed, golden, keys, allowed):
    """Every golden row is there and has its value; rows of what has been added since are not looked at."""
    values = {tuple(row[key] for key in keys): row for row in computed}
    wrong = {}
    for row in golden:
        key = tuple(row[key] for key in keys)
        now = values.get(key, {"value": "nan", "status": "no such row"})
        if row.get("status") != now.get("status") or (row["value"] == "") != (now["value"] == ""):
            wrong[key] = (row, now)
        elif row["value"] and not abs(float(now["value"]) - float(row["value"])) <= allowed(row):
            wrong[key] = (row["value"], now["value"])
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_rmd_compare_gives_the_rows_that_it_gave(benchmark):
    with (FOLDER / f"rows_{benchmark}.csv").open(newline="") as file:
        golden = list(csv.DictReader(file))
    check_rows(comparison(benchmark), golden, ("ood", "detector", "metric"), lambda row: tolerance(benchmark, row))


@pytest.mark.slow
@needs_the_same_machine
@pytest.mark.parametrize("refit", REFITS)
def test_rmd_train_ends_with_the_same_weights_bit_for_bit_and_the_same_curves(refit):
    computed, golden = training(refit), TRAININGS[refit]
    assert computed["weights"] == golden["weights"]
    keys = ("epoch", "detector", "ood", "metric")
    golden["history"] = [row for row in golden["history"] if row["metric"] != "FPR@alpha"]  # renamed
    check_rows(computed["history"], golden["history"], keys, lambda row: 1e-5 * max(1.0, abs(float(row["value"]))))
