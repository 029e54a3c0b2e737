"""DriftAlarm: against the definition, the laws of false alarms by simulation, power on real features, restarts."""

import numpy as np
import pytest
import torch
from scipy import stats

from rmd_plugin import RMD, Calibrated, DriftAlarm, FusedRMD
from rmd_plugin.benchmarks import Intents
from rmd_plugin.detectors.moments import read_state, write_state

EXPONENTS = (0.5, 0.7, 0.85, 0.95)


def textbook(calibration, stream, seed, *, every=False):
    """The value after each sample, from the definition: all ranks, all bets and all starts one by one."""
    draws, seen, ranks, values = np.random.Generator(np.random.PCG64(seed)), list(calibration), [], []
    for score in stream:
        above, equal = sum(s > score for s in seen), sum(s == score for s in seen)
        seen.append(score)
        ranks.append((above + (1 - draws.random()) * (equal + 1)) / len(seen))
        total = 0 if every else 1 / (len(ranks) + 1)
        for k in EXPONENTS:
            for side in (np.array(ranks), 1 - np.array(ranks)):
                for start in range(1, len(ranks) + 1):
                    capital = 1 if every else 1 / (start * (start + 1))
                    total += capital * np.prod(k * side[start - 1 :] ** (k - 1)) / (2 * len(EXPONENTS))
        values.append(total)
    return values


@pytest.mark.parametrize("every", [None, 50])
def test_the_martingale_is_the_mixture_of_all_bets_and_starts(every):
    rng = np.random.default_rng(1)
    calibration, stream = rng.integers(0, 9, 12), rng.integers(3, 12, 40)  # with ties
    alarm, values = DriftAlarm(calibration, 0.05, every, seed=3), []
    for score in stream:
        alarm.update([score])
        values.append(alarm.value)
    expected = textbook(calibration, stream, 3, every=every is not None)
    np.testing.assert_allclose(values, expected, rtol=1e-10)
    reached = np.flatnonzero(np.array(expected) >= (every or 20))
    assert alarm.alarm_at == (reached[0] if len(reached) else None)


class FixedSet(DriftAlarm):
    """What not to do: the p-values are against the calibration scores alone."""

    def _rank(self, chunk):
        above = len(self._sorted) - np.searchsorted(self._sorted, chunk)
        return (above + 1 - self._rng.random(len(chunk))) / (len(self._sorted) + 1)


def false_alarms(kind, streams, length, level):
    alarms = 0
    for seed in range(streams):
        scores = np.random.default_rng(seed).normal(size=100 + length)
        alarms += kind(scores[:100], level, seed=seed).update(scores[100:])
    return alarms


@pytest.mark.parametrize(
    ("streams", "length"), [(200, 1000), pytest.param(2000, 2000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_unchanged_streams_raise_an_alarm_as_seldom_as_promised_but_not_against_a_fixed_set(streams, length):
    level = 0.05
    bound = stats.binom.ppf(0.999, streams, level)
    assert false_alarms(DriftAlarm, streams, length, level) <= bound
    assert false_alarms(FixedSet, streams, length, level) > bound


def test_with_every_false_alarms_have_at_least_that_mean_distance():
    times = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        alarm = DriftAlarm(rng.normal(size=50), every=300, seed=seed)
        while not alarm.update(rng.normal(size=256)):
            pass
        times.append(alarm.alarm_at + 1)
    assert np.mean(times) >= 300 - 3 * np.std(times) / np.sqrt(len(times))


@pytest.fixture(scope="module")
def intents():
    """Scores of ID and of OOD samples of real features."""

    def features(split):
        return torch.stack([split[i][0] for i in range(len(split))])

    data = Intents()
    fit_set = data.fit_set()
    labels = torch.tensor([int(fit_set[i][1]) for i in range(len(fit_set))])
    detector = FusedRMD().fit_features(features(fit_set), labels)
    parts = (data.val_set(), data.test_in, data.test_oods[0])
    val, test, ood = (detector.predict_features(features(part)).double().numpy() for part in parts)
    return np.concatenate([val, test]), ood


@pytest.mark.parametrize(("share", "noticed", "delay"), [(0.15, 30, 100), (0.05, 8, np.inf)])
def test_out_of_scope_questions_in_a_stream_of_intents_are_noticed(intents, share, noticed, delay):
    delays = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        pool = rng.permutation(intents[0])
        calibration, stream = pool[:750], pool[750:]
        stream = np.where(rng.random(len(stream)) < share, rng.choice(intents[1], len(stream)), stream)
        alarm = DriftAlarm(calibration, seed=seed)
        alarm.update(stream)
        delays.append(alarm.alarm_at + 1 if alarm.alarm else np.inf)
    assert np.isfinite(delays).sum() >= noticed
    assert np.median(delays) <= delay


@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_a_change_in_either_direction_is_noticed_and_dated(shift):
    rng = np.random.default_rng(0)
    alarm = DriftAlarm(torch.tensor(rng.normal(size=500)))
    assert not alarm.update(rng.normal(size=3000))
    assert alarm.since is None
    assert alarm.update(torch.tensor(rng.normal(shift, size=300)))
    assert 2950 <= alarm.since <= 3030 <= alarm.alarm_at < 3100
    at = alarm.alarm_at
    alarm.update(rng.normal(size=3000))
    assert alarm.alarm
    assert alarm.alarm_at == at
    assert f"since {alarm.since}" in repr(alarm)


def test_a_restart_in_the_middle_and_any_split_give_the_same_value_to_the_last_bit(tmp_path):
    rng = np.random.default_rng(0)
    calibration, stream = rng.normal(size=99).round(1), rng.normal(0.1, size=10_000).round(1)
    whole = DriftAlarm(calibration, seed=5)
    whole.update(stream)
    parts = DriftAlarm(calibration, seed=5)
    for start, stop in ((0, 1), (1, 5000), (5000, 5000), (5000, 10_000)):
        parts.update(stream[start:stop])
        write_state(tmp_path / "state", parts.state_dict())
        parts = DriftAlarm(calibration, seed=5).load_state_dict(read_state(tmp_path / "state"))
    for name, tensor in whole.state_dict()["tensors"].items():
        assert torch.equal(tensor, parts.state_dict()["tensors"][name]), name
    assert parts.value == whole.value
    assert (parts.alarm_at, parts.since) == (whole.alarm_at, whole.since)


def test_after_a_reset_the_stream_begins_anew():
    rng = np.random.default_rng(0)
    alarm = DriftAlarm(rng.normal(size=200))
    assert alarm.update(rng.normal(2, size=200))
    recent = rng.normal(2, size=200)
    alarm.reset(recent)
    assert (alarm.count, alarm.alarm, alarm.since, alarm.value) == (0, False, None, 1.0)
    assert not alarm.update(rng.normal(2, size=500))


def test_a_calibrated_detector_makes_its_alarm(blobs):
    z, y, x = blobs
    detector = Calibrated(RMD()).fit_features(z, y).calibrate_features(z)
    alarm = detector.drift_alarm(level=0.05)
    assert alarm.update(detector.predict_features(10 * x[:60]))


def test_the_curve_is_thinned_out_and_drawn():
    rng = np.random.default_rng(0)
    alarm = DriftAlarm(rng.normal(size=100))
    alarm.update(rng.normal(1, size=9000))
    figure, axes = alarm.plot()
    line = axes.get_lines()[0]
    assert 1000 <= len(line.get_xdata()) <= 2000
    assert line.get_xdata()[-1] > 8990
    assert axes.figure is figure
    assert alarm.plot(axes)[1] is axes


@pytest.mark.parametrize(
    ("use", "key"),
    [
        (lambda scores: DriftAlarm([]), "no calibration"),
        (lambda scores: DriftAlarm(scores, 1.0), "level"),
        (lambda scores: DriftAlarm(scores, every=0), "every"),
        (lambda scores: DriftAlarm([1.0, np.nan]), "NaN"),
        (lambda scores: DriftAlarm(scores).update([np.nan]), "NaN"),
        (lambda scores: DriftAlarm(scores).update(1.0), "shape"),
        (lambda scores: DriftAlarm(scores[1:]).load_state_dict(DriftAlarm(scores).state_dict()), "calibration"),
        (lambda scores: DriftAlarm(scores, 0.1).load_state_dict(DriftAlarm(scores).state_dict()), "level"),
        (lambda scores: DriftAlarm(scores).load_state_dict({}), "state"),
    ],
)
def test_bad_input_is_refused(use, key):
    with pytest.raises(ValueError, match=key):
        use(np.arange(20.0))
