"""What it costs to verify an entry of the feature cache when it is opened.

python speed/cache.py            seconds; 400 MB on disk
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from rmd_plugin.compare.cache import _checksum


def best_of(rounds: int, run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with TemporaryDirectory() as folder:
        path = Path(folder, "features.npy")
        np.save(path, np.random.default_rng(0).random((200_000, 512), dtype=np.float32))
        verify, load = best_of(7, lambda: _checksum(path)), best_of(7, lambda: np.load(path))
        print(f"200,000 x 512 float32, {path.stat().st_size / 1e6:.0f} MB, file in memory:")
        print(f"verify {verify * 1e3:.0f} ms, np.load {load * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
