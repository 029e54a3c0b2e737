import os
import signal
from functools import partial
from pathlib import Path

import pytest

from rmd_plugin.table.engines import map_files, tree_sum


def test_a_tree_over_any_number_of_parts_adds_them_in_order():
    for count in range(1, 20):
        assert tree_sum([[number] for number in range(count)], lambda a, b: a + b) == list(range(count))


def test_a_tree_is_no_higher_than_the_logarithm_of_its_parts():
    assert tree_sum([0] * 1000, lambda a, b: 1 + max(a, b)) == 10


def square_or_die(number, folder, times):
    """A worker that is killed at the third number, so many times."""
    deaths = Path(folder, "deaths")
    if number == 3 and len(deaths.read_text()) < times:
        with deaths.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    return str(number**2)


@pytest.mark.slow
def test_a_worker_that_is_killed_changes_nothing(tmp_path, caplog):
    (tmp_path / "deaths").write_text("")
    found = list(map_files("local", partial(square_or_die, folder=tmp_path, times=1), list(range(8)), 2))
    assert found == [str(number**2) for number in range(8)]
    assert (tmp_path / "deaths").read_text() == "x"
    assert "a worker process was killed" in caplog.text


@pytest.mark.slow
def test_a_file_that_kills_every_worker_is_given_up(tmp_path):
    (tmp_path / "deaths").write_text("")
    with pytest.raises(RuntimeError, match=r"killed 3 times at file . of 8 .*Was there enough memory"):
        list(map_files("local", partial(square_or_die, folder=tmp_path, times=99), list(range(8)), 2))
