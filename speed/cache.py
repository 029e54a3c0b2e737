"""What it costs to open a split in the feature cache, and to write it.

python speed/cache.py            seconds; 400 MB on disk
"""

import argparse
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

import numpy as np
import torch

from rmd_plugin.compare.features import FeatureCache

KEY = "ab" * 16


def best_of(rounds: int, run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    features, labels = torch.rand(200_000, 512), torch.arange(200_000)
    with TemporaryDirectory() as folder:
        cache = FeatureCache(folder)
        cache.path(KEY).parent.mkdir()
        batches = [(features[i : i + 256], labels[i : i + 256]) for i in range(0, len(features), 256)]
        write = best_of(3, lambda: cache.write(KEY, batches, len(features)))
        opened, load = best_of(7, lambda: cache.read(KEY)), best_of(7, lambda: np.load(cache.path(KEY)))
        print(f"200,000 x 512 float32, {cache.path(KEY).stat().st_size / 1e6:.0f} MB, file in memory:")
        print(f"open {opened * 1e3:.1f} ms, np.load {load * 1e3:.0f} ms, write {write * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
