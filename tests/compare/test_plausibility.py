"""An accuracy that cannot be right is said, one that can is not."""

import re

import numpy as np
import pytest

from rmd_plugin.compare.plausibility import doubt_accuracy


@pytest.mark.parametrize(
    ("accuracy", "samples", "num_classes", "noted"),
    [
        (0.218, 10_000, 10, None),  # a poor network, but one that has learnt
        (0.93, 10_000, 10, 0.94),
        (0.60, 10_000, 2, None),
        (0.03, 10_000, 100, None),
        (0.80, 10_000, 10, 0.95),
        (0.55, 40, 10, 0.75),  # few samples: three standard errors are 20 points
    ],
)
def test_a_plausible_accuracy_is_not_remarked_on(
    accuracy: float, samples: int, num_classes: int, noted: float | None
) -> None:
    assert doubt_accuracy(accuracy, samples, num_classes, noted) == ""


@pytest.mark.parametrize(
    ("accuracy", "samples", "num_classes", "noted", "words"),
    [
        (0.097, 10_000, 10, None, r"9\.7 % is hardly above chance \(10\.0 %\)"),
        (0.015, 10_000, 100, None, r"1\.5 % is hardly above chance \(1\.0 %\)"),
        (0.52, 10_000, 2, None, r"52\.0 % is hardly above chance"),
        (0.20, 20, 10, None, "hardly above chance"),  # four of twenty
        (0.40, 10_000, 10, 0.94, r"40\.0 % is far below the 94\.0 %"),
    ],
)
def test_chance_and_what_is_far_below_the_weights_own_account_are_said_with_what_to_check(
    accuracy: float, samples: int, num_classes: int, noted: float | None, words: str
) -> None:
    found = doubt_accuracy(accuracy, samples, num_classes, noted)
    assert re.search(words + r".*check the preprocessing .*order of the classes", found)


def test_guessing_is_recognised_whatever_the_number_of_classes_and_samples() -> None:
    rng = np.random.default_rng(0)
    for num_classes in (2, 3, 10, 100, 1000):
        for samples in (30, 300, 10_000):
            guesses = rng.binomial(samples, 1 / num_classes, size=200) / samples
            doubted = [bool(doubt_accuracy(float(value), samples, num_classes)) for value in guesses]
            assert np.mean(doubted) > 0.95
