import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rmd_plugin.report.score_axis import score_axis

RNG = np.random.default_rng(0)


def test_scores_that_stay_together_stand_on_a_linear_axis():
    crowd, others = RNG.standard_normal(500), RNG.standard_normal(500) + 3
    axis = score_axis([crowd, others], crowd)
    assert axis.width == 0
    assert np.ptp(np.diff(axis.edges)) == pytest.approx(0, abs=1e-12)


def test_a_far_set_neither_squeezes_the_crowd_nor_leaves_the_axis():
    crowd, far = RNG.standard_normal(500), 1000 + 100 * RNG.standard_normal(500)
    axis = score_axis([crowd, far], crowd)
    filled = [np.count_nonzero(np.histogram(values, axis.edges)[0]) for values in (crowd, far)]
    assert min(filled) >= 3
    assert np.histogram(crowd, np.linspace(*axis.edges[[0, -1]], len(axis.edges)))[0].max() > 490  # a linear axis would


def test_softmax_scores_that_crowd_at_one_end_are_spread():
    crowd = -1 / (1 + np.exp(-RNG.normal(9, 2, 500)))
    axis = score_axis([crowd, np.linspace(-1, -0.2, 300)], crowd)
    assert np.histogram(crowd, axis.edges)[0].max() < 250


@example([0.0, 5e-324], 0.0)
@example([1e6, 1e6 + 2e-10], 1e6)
@example([1e6, 1e6 + 1e-9, 1e6 + 2e-9], 1e6 + 1e-2)
@example([1e20, 1e20], 1e20)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60), st.floats(-1e9, 1e9))
def test_places_keep_the_order_and_ticks_stand_where_they_say(values, other):
    crowd = np.array(values)
    axis = score_axis([crowd, np.array([other])], crowd)
    assert (np.diff(axis.edges) > 0).all()
    assert (np.diff(axis.place(axis.edges)) > 0).all()
    places, texts = axis.ticks()
    assert len(places) == len(texts)
    numbers = [float(text.replace("−", "-")) for text in texts]
    np.testing.assert_allclose(axis.place(np.array(numbers)), places)
