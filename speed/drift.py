"""False alarms, delays and cost of DriftAlarm, and the picture of docs/watch.md.

python speed/drift.py docs/watch.png
"""

import argparse
import time

import numpy as np
import torch
from matplotlib.figure import Figure

from rmd_plugin import DriftAlarm, FusedRMD
from rmd_plugin.benchmarks import Intents


class FixedSet(DriftAlarm):
    """What not to do: p-values against the calibration scores alone, as if they were independent."""

    def _rank(self, chunk: np.ndarray) -> np.ndarray:
        above = len(self._sorted) - np.searchsorted(self._sorted, chunk)
        return (above + 1 - self._rng.random(len(chunk))) / (len(self._sorted) + 1)


def false_alarms(kind: type[DriftAlarm], streams: int, length: int) -> np.ndarray:
    """Share of unchanged streams with an alarm by each sample, at level 5 % with 100 calibration scores."""
    alarms = np.zeros(length)
    for seed in range(streams):
        scores = np.random.default_rng(seed).normal(size=100 + length)
        alarm = kind(scores[:100], 0.05, seed=seed)
        if alarm.update(scores[100:]):
            alarms[alarm.alarm_at :] += 1
    return alarms / streams


def delays(calibrated: int, share: float, before: int, **options: float) -> np.ndarray:
    """Samples from the change of a stream of intents to the alarm, over 200 draws; infinite without an alarm."""
    data = Intents()
    fitted, val, test, ood = (
        [split[i] for i in range(len(split))]
        for split in (data.fit_set(), data.val_set(), data.test_in, data.test_oods[0])
    )
    detector = FusedRMD().fit_features(torch.stack([z for z, _ in fitted]), torch.tensor([int(y) for _, y in fitted]))
    inlier, outlier = (
        detector.predict_features(torch.stack([z for z, _ in part])).double().numpy() for part in (val + test, ood)
    )
    times = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        stream = rng.permutation(inlier)
        alarm = DriftAlarm(stream[:calibrated], seed=seed, **options)
        changed = stream[calibrated + before :]
        changed = np.where(rng.random(len(changed)) < share, rng.choice(outlier, len(changed)), changed)
        alarm.update(stream[calibrated : calibrated + before])
        alarm.update(changed)
        times.append(alarm.alarm_at + 1 - before if alarm.alarm else np.inf)
    return np.array(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture")
    options = parser.parse_args()
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    for kind, name in ((FixedSet, "p-values against a fixed set"), (DriftAlarm, "DriftAlarm")):
        shares = false_alarms(kind, 2000, 2000)
        print(f"{name}: {shares[-1]:.1%} of 2,000 unchanged streams of 2,000 raise an alarm")
        axes.plot(np.arange(1, len(shares) + 1), 100 * shares, label=name)
    axes.axhline(5, color="C3", linestyle="--", label="level")
    axes.set(xlabel="samples of an unchanged stream", ylabel="false alarms by now, %")
    axes.legend()
    figure.savefig(options.picture, dpi=100)
    for calibrated in (200, 750, 1500):
        for share in (0.15, 0.05):
            times = delays(calibrated, share, 0)
            print(
                f"{calibrated} calibration scores, {share:.0%} OOD: {np.isfinite(times).mean():.1%} noticed, ", end=""
            )
            print(f"median delay {np.median(times):.0f}" if np.isfinite(np.median(times)) else "median beyond the end")
    rng = np.random.default_rng(0)
    stream = rng.normal(size=1_000_000)
    alarm, start = DriftAlarm(rng.normal(size=1000)), time.perf_counter()
    alarm.update(stream)
    print(f"a million scores in one call: {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    for score in stream[:10_000]:
        alarm.update([score])
    print(f"one at a time behind a million: {(time.perf_counter() - start) * 100:.0f} us each")


if __name__ == "__main__":
    main()
