"""Fitting and scoring a table in files, beside reading the same files and the least arithmetic that could do.

    python speed/table.py             2,000,000 x 256, K=100, 16 files, on processes with one thread each, local and
                                      with Ray; memory of a worker at D=768 (Linux); speed/update.py
    python speed/table.py --growth growth.png       cost as N, D and K grow, drawn, with the exponents

The sides of a ratio take turns in one run and the best of several counts, so both meet the same load of the machine;
on a busy one the processor time of one worker is nearer to the truth.
Processes are started once before: what starting them costs is shown apart.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker has one thread; read when torch is imported

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from rmd_plugin import RMD, FusedRMD, fit_table, score_table

BATCH = 4096


def write_table(folder: Path, rows: int, width: int, classes: int, files: int) -> Path:
    """Files of float32 features with class means, as fixed-size lists without compression."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    centres = generator.standard_normal((classes, width), dtype=np.float32)
    for number, count in enumerate(np.diff(np.linspace(0, rows, files + 1).astype(int))):
        schema = pa.schema([("embedding", pa.list_(pa.float32(), width)), ("label", pa.int64())])
        with pq.ParquetWriter(folder / f"{number:03}.parquet", schema, compression="none", use_dictionary=False) as out:
            for start in range(0, count, 50_000):
                y = generator.integers(0, classes, min(50_000, count - start))
                z = generator.standard_normal((len(y), width), dtype=np.float32) + centres[y]
                values = pa.FixedSizeListArray.from_arrays(pa.array(z.ravel()), width)
                out.write_table(pa.table([values, pa.array(y)], schema))
    return folder


def read(folder: Path):
    """Features of all files in batches, with pyarrow alone."""
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH, use_threads=False):
                yield path, torch.from_dlpack(batch.column("embedding").flatten()).view(len(batch), -1)


def gemm(folder: Path, width: int) -> torch.Tensor:
    total = torch.zeros(width, width, dtype=torch.float64)
    for _, z in read(folder):
        wide = z.double()
        total.addmm_(wide.T, wide)
    return total


def linear(folder: Path, layer: nn.Linear, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    schema, writer, before = pa.schema([("score", pa.float32())]), None, None
    for path, z in read(folder):
        if path != before:
            if writer is not None:
                writer.close()
            writer, before = pq.ParquetWriter(out / path.name, schema), path
        writer.write_batch(pa.record_batch([pa.array(layer(z).amax(1).numpy())], schema))
    writer.close()


def take_turns(first: Callable[[], object], second: Callable[[], object], rounds: int) -> np.ndarray:
    """Best seconds and best processor seconds of each; the second is nearly the same on a busy machine."""
    best = np.full((2, 2), np.inf)
    for _ in range(rounds):
        for side, action in enumerate((first, second)):
            clock, used = time.perf_counter(), time.process_time()
            action()
            best[side] = np.minimum(best[side], (time.perf_counter() - clock, time.process_time() - used))
    return best


def ratios(folder: Path, width: int, classes: int, rounds: int) -> None:
    out, layer = folder.parent / "scores", nn.Linear(width, classes).requires_grad_(False)
    start = time.perf_counter()
    detector = fit_table(RMD(), folder, workers=2)

    def score(**options) -> None:
        shutil.rmtree(out, ignore_errors=True)
        score_table(detector, folder, out, **options)

    score(workers=2)
    print(f"first fit and score, with the start of two processes: {time.perf_counter() - start:.1f} s\n")
    pairs = [
        ("fit, 1 worker vs reading and a float64 product per batch", lambda: fit_table(RMD(), folder, workers=1),
         lambda: gemm(folder, width)),
        ("score, 1 worker vs reading, nn.Linear and writing", lambda: score(workers=1),
         lambda: linear(folder, layer, folder.parent / "linear")),
        ("fit, 1 worker vs 2", lambda: fit_table(RMD(), folder, workers=1),
         lambda: fit_table(RMD(), folder, workers=2)),
        ("score, 1 worker vs 2", lambda: score(workers=1), lambda: score(workers=2)),
    ]  # fmt: skip
    if find_spec("ray") is not None:
        import ray

        ray.init(num_cpus=2, object_store_memory=500 << 20, include_dashboard=False, log_to_driver=False)
        start = time.perf_counter()
        fit_table(RMD(), folder, engine="ray")
        score(engine="ray")
        print(f"first fit and score with Ray, with the start of its processes: {time.perf_counter() - start:.1f} s\n")
        pairs.append(("fit, Ray vs local, 2 workers each", lambda: fit_table(RMD(), folder, engine="ray"),
                      lambda: fit_table(RMD(), folder, workers=2)))  # fmt: skip
        pairs.append(("score, Ray vs local, 2 workers each", lambda: score(engine="ray"),
                      lambda: score(workers=2)))  # fmt: skip
    print("| what | seconds | ratio | of processor time |\n|---|---|---|---|")
    for name, first, second in pairs:
        (a, used), (b, other) = take_turns(first, second, rounds)
        # of the work in this process alone: the time of workers is not seen here
        ratio = f"{used / other:.2f}" if "2" not in name else ""
        print(f"| {name} | {a:.2f} vs {b:.2f} | {a / b:.2f} | {ratio} |", flush=True)
    if find_spec("ray") is not None:
        ray.shutdown()


def growth(picture: str, rounds: int) -> None:
    """Processor time of a fit and of a score as one of N, D and K grows, with the exponents over the whole range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    base = {"rows": 50_000, "width": 128, "classes": 100}
    steps = {"rows": [50_000, 158_000, 500_000], "width": [128, 256, 512], "classes": [100, 316, 1000]}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), sharey=True, constrained_layout=True)
    print("| grows | from, to | exponent of the fit | of the score |\n|---|---|---|---|")
    for axis, (name, values) in zip(axes, steps.items(), strict=True):
        found = []
        for value in values:
            with tempfile.TemporaryDirectory() as scratch:
                folder, out = write_table(Path(scratch) / "table", **(base | {name: value}), files=4), Path(scratch)
                detector = fit_table(RMD(), folder, workers=1)

                def score(detector=detector, folder=folder, out=out) -> None:
                    shutil.rmtree(out / "out", ignore_errors=True)
                    score_table(detector, folder, out / "out", workers=1)

                found.append(take_turns(lambda folder=folder: fit_table(RMD(), folder, workers=1), score, rounds)[:, 1])
        exponents = np.log(np.divide(found[-1], found[0])) / np.log(values[-1] / values[0])
        print(f"| {name} | {values[0]:,} to {values[-1]:,} | {exponents[0]:.2f} | {exponents[1]:.2f} |", flush=True)
        for side, label in enumerate(("fit_table", "score_table")):
            axis.loglog(values, [pair[side] for pair in found], "o-", label=f"{label}: {exponents[side]:.2f}")
        axis.set_xlabel({"rows": "N", "width": "D", "classes": "K"}[name])
        axis.set_xticks(values, [f"{value:,}" for value in values])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.legend(title="exponent", frameon=False)
    axes[0].set_ylabel("processor seconds, one worker")
    figure.savefig(picture, dpi=110)


#: what a worker does, in a process of its own
WORKER = """
import re, sys, torch

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024

torch.randn(1000, 512) @ torch.randn(512, 512)
alone = status("VmRSS")
from rmd_plugin import RMD, FusedRMD, load_detector, score_table, table_state
what, kind, folder, *files = sys.argv[1:]
open("/proc/self/clear_refs", "w").write("5")  # resets the peak to what is in use now
before = status("VmRSS")
if what == "score":
    score_table(load_detector(folder + "/_detector"), files, folder + "/_out", workers=1)
else:
    for file in files:
        table_state({"RMD": RMD, "FusedRMD": FusedRMD}[kind](), file)
peak = status("VmHWM")
print(f"{peak:.0f} | {peak - alone:.0f} | {peak - before:.0f} |")
"""


def memory(rows: int) -> None:
    """Peak memory of what a worker does, in a fresh process: in all, and above what ``import torch`` takes alone."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_table(Path(scratch) / "table", rows, 768, 1000, 2)
        files = [str(path) for path in sorted(folder.iterdir())]
        for kind in (RMD, FusedRMD):
            fit_table(kind(), files, workers=1).save(folder / "_detector")
            for what in ("fit", "score"):
                print(f"| {what}, {kind.__name__} | {rows:,} | ", end="", flush=True)
                words = [sys.executable, "-c", WORKER, what, kind.__name__, str(folder), *files]
                subprocess.run(words, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="how often the sides take turns")
    parser.add_argument("--growth", metavar="PICTURE")
    options = parser.parse_args()
    if options.growth:
        growth(options.growth, options.rounds)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_table(Path(scratch) / "table", options.rows, options.width, options.classes, options.files)
        ratios(folder, options.width, options.classes, options.rounds)
    print("\n| a worker at D=768, K=1000 | rows | MB in all | above import torch | above all imports |")
    print("|---|---|---|---|---|", flush=True)
    for rows in (50_000, 200_000):
        memory(rows)
    print(flush=True)
    subprocess.run([sys.executable, str(Path(__file__).with_name("update.py"))], check=True)


if __name__ == "__main__":
    main()
