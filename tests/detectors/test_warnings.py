"""Numerical warnings: at the user's line, once per kind where Python's filters want them once, always where not."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from conftest import make_blobs
from pytorch_ood.utils import GridSearch
from torch import nn

from rmd_plugin import RMD, Mahalanobis, NumericalWarning, RelativeFlow


def deficient(seed=0):
    """Features of which three hardly vary; the numbers in the warning change with the seed."""
    z, y, _ = make_blobs(seed=seed)
    return torch.cat([z, 1e-30 * torch.randn(len(z), 3, dtype=z.dtype)], 1), y


def epoch(seed):
    with warnings.catch_warnings():  # makes Python forget what it has shown, as Lightning and torch do
        pass
    RMD().fit_features(*deficient(seed))


@contextmanager
def shown(action):
    """What reaches the user's screen under a filter: message, file and line."""
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        warnings.showwarning = lambda message, category, file, line, *_: seen.append((str(message), file, line))
        yield seen


@pytest.mark.parametrize("action", ["default", "module", "once"])
def test_many_epochs_warn_once(action):
    with shown(action) as seen:
        for seed in range(4):
            epoch(seed)
    assert len(seen) == 1
    assert "rank 12 of 15" in seen[0][0]


def test_other_kinds_and_other_lines_have_warnings_of_their_own():
    z, y = deficient()
    with shown("default") as seen:
        for labels in (y, torch.zeros_like(y), y):
            RMD().fit_features(z, labels)
        RMD().fit_features(z, y)
    starts = [message.split()[0] for message, *_ in seen]
    assert sorted(starts) == ["RMD", "the", "the"]
    assert len({(start, line) for start, (_, _, line) in zip(starts, seen, strict=True)}) == 3


def test_a_filter_that_says_always_or_error_sees_every_warning():
    with shown("always") as seen:
        for seed in range(3):
            epoch(seed)
    assert len(seen) == 3
    for seed in range(3):
        with pytest.warns(NumericalWarning, match="rank 12 of 15"):
            epoch(seed)
        with pytest.raises(NumericalWarning, match="rank 12 of 15"):  # warnings are errors in these tests
            epoch(seed)


def test_a_block_that_records_sees_what_was_shown_outside_of_it():
    with shown("default") as outside:
        for seed in range(3):
            epoch(seed)
            with warnings.catch_warnings(record=True) as caught:
                epoch(seed)
                epoch(seed)
            assert len(caught) == 1
    assert len(outside) == 1


def test_ignored_warnings_are_not_remembered():
    with shown("ignore") as seen:
        for action in ("ignore", "default"):
            warnings.simplefilter(action)
            epoch(0)
    assert len(seen) == 1


@pytest.mark.parametrize("detector", [RMD, Mahalanobis, lambda e: RelativeFlow(e, max_epochs=0, progress=False)])
def test_warnings_point_at_the_line_of_the_user(detector):
    z, y = deficient()
    made = detector(nn.Identity())
    for fit in (lambda: made.fit_features(z, y), lambda: made.fit([(z, y)])):
        with pytest.warns(NumericalWarning) as caught:
            fit()
        line = fit.__code__.co_firstlineno
        assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_the_framework_between_is_passed_over():
    z, y = deficient()
    mixed = torch.where(torch.arange(len(y)) % 2 == 0, y, -1)
    with pytest.warns(NumericalWarning) as caught:
        GridSearch(RMD(nn.Identity()), [(z, y)], [(z, mixed)]).run()
    assert {warning.filename for warning in caught} == {__file__}
