"""What it costs to add or to forget samples after the fit, beside a fit on all samples again.

    python speed/update.py            RMD on 1,000,000 x 512, K=100, 1,000 rows to add, on one thread (about 3 minutes)

The two sides take turns in one run and the best of several counts (of an update five a turn), in wall time and in CPU
time, to which other jobs on the machine add little. The refit streams over one block of float32 features again and
again, so that 2 GB of them need not fit into memory: reading them from a disk would come on top.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from gaussian import features

from rmd_plugin import RMD

BLOCK = 50_000


def seconds(action: Callable[[], object], times: int) -> np.ndarray:
    """Least wall time and least CPU time of several runs."""
    found = []
    for _ in range(times):
        clock, used = time.perf_counter(), time.process_time()
        action()
        found.append((time.perf_counter() - clock, time.process_time() - used))
    return np.min(found, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="rows that the detector was fitted on")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--rows", type=int, default=1000, help="rows to add or to forget")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two sides take turns")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    block = min(BLOCK, options.samples)
    z, y, _ = features(options.width, options.classes, block + options.rows, 2)
    (z, new), (y, labels) = (part.split([block, options.rows]) for part in (z.float(), y))

    def refit() -> RMD:
        detector = RMD()
        metric = detector.new_moments()
        for start in range(0, options.samples, block):
            rows = min(block, options.samples - start)
            metric.update(z[:rows], y[:rows])
        return detector.fit_moments(metric.compute())

    detector = refit()
    before = detector.moments
    longer = RMD().fit_moments(before).update(new, labels)
    after = longer.moments

    def update() -> None:
        detector._moments = before  # each time from the same start
        detector.update(new, labels)

    def forget() -> None:
        longer._moments = after
        longer.forget(new, labels)

    def add_class() -> None:
        detector._moments = before
        detector._fitted_options["num_classes"] = options.classes
        detector.add_class(new)

    refitted = f"{options.samples:,} x {options.width}, K={options.classes}"
    print(f"| {options.rows:,} rows vs a refit of {refitted} | wall | CPU |")
    print("|---|---|---|")
    for name, action in (("update", update), ("forget", forget), ("add_class", add_class)):
        turns = [(seconds(action, 5), seconds(refit, 1)) for _ in range(options.rounds)]
        changed, fitted = (np.min(side, axis=0) for side in zip(*turns, strict=True))
        cells = [
            f"{short * 1e3:.1f} ms vs {long:.3g} s: **{long / short:.0f}x faster**"
            for short, long in zip(changed, fitted, strict=True)
        ]
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
