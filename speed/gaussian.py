"""Speed, accuracy and memory of the Gaussian detectors beside pytorch-ood's and a linear layer.

    python speed/gaussian.py            the whole table, on one and on two threads (about 15 minutes)
    python speed/gaussian.py --quick    without the largest shape and with fewer samples for the memory

Every ratio comes from one run: the two sides take turns and the best of several counts. Timings of a single side are
shown only so that the ratio can be judged.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pytorch_ood import detector as framework
from scipy.linalg import solve_triangular
from torch import Tensor, nn

from rmd_plugin import RMD, FusedRMD, Mahalanobis

Features = tuple[Tensor, Tensor, Tensor]


def interleave(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Best time of each, in seconds, taking turns so that both meet the same load of the machine."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for side, action in enumerate((first, second)):
            # a short action gets up to half a second per turn: one interruption would spoil a single try
            turn = time.perf_counter()
            while True:
                start = time.perf_counter()
                action()
                now = time.perf_counter()
                best[side] = min(best[side], now - start)
                if now - turn > 0.5:
                    break
    return best[0], best[1]


def features(
    width: int, classes: int, samples: int, test: int, condition: float = 1e3, apart: float = 1.0, seed: int = 0
) -> Features:
    """Gaussian classes with a decaying, randomly rotated spectrum, as penultimate layers have; float64.

    The class means have a variance of ``apart`` along each direction; half of the test samples are of the classes.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rotation = torch.linalg.qr(normal(width, width))[0]
    mix = (rotation * torch.logspace(0, -0.5 * np.log10(condition), width, dtype=torch.float64)) @ rotation.T
    centres = apart**0.5 * normal(classes, width)
    y = torch.arange(samples) % classes
    z = (normal(samples, width) + centres[y]) @ mix + 0.5
    half = test // 2
    id_samples = normal(half, width) + centres[y[:half]]
    x = torch.cat([id_samples, 1.5 * normal(test - half, width)]) @ mix + 0.5
    return z, y, x


def oracle(z: Tensor, y: Tensor, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """MD and RMD by the textbook in float64: Cholesky and triangular solves, one class at a time."""
    z, x, y = z.double().numpy(), x.double().numpy(), y.numpy()
    means = np.stack([z[y == k].mean(0) for k in range(y.max() + 1)])
    centred, centred_0 = z - means[y], z - z.mean(0)
    lower, lower_0 = (np.linalg.cholesky(c.T @ c / len(z)) for c in (centred, centred_0))
    u = solve_triangular(lower, x.T, lower=True)
    distances = [((u - solve_triangular(lower, m[:, None], lower=True)) ** 2).sum(0) for m in means]
    background = (solve_triangular(lower_0, (x - z.mean(0)).T, lower=True) ** 2).sum(0)
    nearest = np.min(distances, axis=0)
    return nearest, nearest - background


def scoring(width: int, classes: int, threads: int, rounds: int, test: int = 10_000) -> list[str]:
    z, y, x = (
        t.float() if t.is_floating_point() else t for t in features(width, classes, max(20_000, 20 * classes), test)
    )
    ours, theirs = RMD().fit_features(z, y), framework.RMD(None).fit_features(z, y)
    # the framework needs minutes for K = 1000: give it a part of the batch and scale, in its favour (no fixed costs)
    part = max(1, min(1.0, 100 / classes) * test)
    slice_ = x[: int(part)]
    fast, slow = interleave(lambda: ours.predict_features(x), lambda: theirs.predict_features(slice_), rounds)
    slow *= test / len(slice_)
    rows = [
        f"| scoring {test:,} samples vs `pytorch_ood.detector.RMD` | D={width} K={classes} | {threads} "
        f"| {fast * 1e3:.1f} ms vs {slow * 1e3:,.0f} ms | **{slow / fast:.0f}x faster** |"
    ]
    linear = nn.Linear(width, classes)
    with torch.no_grad():
        fast, reference = interleave(lambda: ours.predict_features(x), lambda: linear(x), 10 * rounds)
    rows.append(
        f"| scoring vs `nn.Linear(D, K)` forward | D={width} K={classes} | {threads} "
        f"| {fast * 1e3:.1f} ms vs {reference * 1e3:.1f} ms | **{fast / reference:.2f}x its time** |"
    )
    return rows


def fused(width: int, threads: int, rounds: int, classes: int = 100, test: int = 10_000) -> list[str]:
    z, y, x = (t.float() if t.is_floating_point() else t for t in features(width, classes, 20_000, test))
    head = nn.Linear(width, classes)
    distance = Mahalanobis(shrinkage="oas").fit_features(z, y)
    rows = []
    for name, detector in (("with a head", FusedRMD(head=head)), ("without", FusedRMD())):
        detector.fit_features(z, y)
        fast, reference = interleave(
            lambda fused=detector: fused.predict_features(x), lambda: distance.predict_features(x), 5 * rounds
        )
        rows.append(
            f"| `FusedRMD` {name}, scoring {test:,} samples vs our `Mahalanobis` | D={width} K={classes} | {threads} "
            f"| {fast * 1e3:.0f} ms vs {reference * 1e3:.0f} ms | **{fast / reference:.2f}x its time** |"
        )
    fit, reference = interleave(
        lambda: FusedRMD(head=head).fit_features(z, y),
        lambda: Mahalanobis(shrinkage="oas").fit_features(z, y),
        rounds,
    )
    where = f"20k x {width}, K={classes} | {threads}"
    rows.append(
        f"| `FusedRMD.fit_features` vs that of our `Mahalanobis` | {where} | {fit:.2f} vs {reference:.2f} s "
        f"| **{fit / reference:.2f}x its time** |"
    )
    return rows


def fitting(threads: int, rounds: int) -> list[str]:
    z, y, _ = features(640, 100, 50_000, 2)
    z32 = z.float()
    ours, theirs = (lambda: RMD().fit_features(z32, y)), (lambda: framework.RMD(None).fit_features(z32, y))
    fast, slow = interleave(ours, theirs, rounds)
    fit, gemm = interleave(ours, lambda: z.T @ z, rounds)
    where, product = f"50k x 640, K=100 | {threads}", "`fit_features` vs one float64 product z^T z"
    return [
        f"| `fit_features` vs the framework's | {where} | {fast:.2f} vs {slow:.2f} s | **{slow / fast:.2f}x faster** |",
        f"| {product} | {where} | {fit:.2f} vs {gemm:.2f} s | **{fit / gemm:.2f}x its time** |",
    ]


def moments_fit(width: int, threads: int, rounds: int, classes: int = 100) -> str:
    """``fit_moments`` against what it cannot do without: a Cholesky factor and a solve of the class means."""
    z, y, _ = features(width, classes, 2 * width, 2) if width <= 2048 else unrotated(width, classes)
    moments = RMD().new_moments()
    moments.update(z, y)
    moments = moments.compute()
    covariance, means = moments.covariance, moments.means.T.contiguous()

    def reference() -> None:
        torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), means, upper=False)

    fit, least = interleave(lambda: RMD().fit_moments(moments), reference, rounds)
    return (
        f"| `RMD.fit_moments` vs a Cholesky factor and K solves | D={width} K={classes} | {threads} "
        f"| {fit:.2f} vs {least:.2f} s | **{fit / least:.2f}x its time** |"
    )


def unrotated(width: int, classes: int) -> Features:
    """Features of so large a width that a random rotation would take minutes."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(3 * width // 2) % classes
    z = torch.randn(len(y), width, generator=generator) * torch.logspace(0, -1, width)
    return z + torch.randn(classes, width, generator=generator)[y], y, z[:2]


def fused_classes(classes: int) -> str:
    """Processor time of a fit of FusedRMD beside one of RMD, D=64, N=20,000."""
    z, y, _ = features(64, classes, 20_000, 2, apart=4.0)
    times = []
    for detector in (FusedRMD(), RMD()):
        start = time.process_time()
        detector.fit_features(z.float(), y)
        times.append(time.process_time() - start)
    fit = f"{times[0]:.2f} ({times[1]:.2f}) s"
    return f"| `FusedRMD.fit_features` (`RMD`), processor time | 20k x 64, K={classes:,} | 2 | {fit} | |"


def accuracy(width: int, classes: int, condition: float) -> list[str]:
    z, y, x = features(width, classes, max(10_000, 20 * classes), 1000, condition)
    rows = []
    for dtype in (torch.float32, torch.float64):
        z_, x_ = z.to(dtype), x.to(dtype)
        expected = oracle(z_, y, x_)[1]

        def errors(scores: Tensor, expected: np.ndarray = expected) -> str:
            error = np.abs(scores.double().numpy() - expected).max()
            return f"{error / np.abs(expected).max():.1e} / {error / expected.std():.1e}"

        ours = errors(RMD().fit_features(z_, y).predict_features(x_))
        theirs = "-"
        if dtype == torch.float32 and classes <= 100:
            theirs = errors(framework.RMD(None).fit_features(z_, y).predict_features(x_) * len(z_))
        name = str(dtype).removeprefix("torch.")
        rows.append(f"| D={width} K={classes} | {condition:.0e} | {name} | **{ours}** | {theirs} |")
    return rows


def far_apart(between: float, rounds: int, width: int = 640, classes: int = 100, test: int = 10_000) -> str:
    """Classes that lie far apart, as in collapsed networks: errors on samples of the classes, and the time of a score.

    ``between`` is the variance between the classes along the K - 1 directions that they span, in units of that within.
    """
    z, y, x = features(width, classes, 20_000, test, condition=1e2, apart=between * (classes - 1) / width)
    z, x = z.float(), x.float()
    detector, linear = RMD().fit_features(z, y), nn.Linear(width, classes)
    known = x[:1000]
    expected = oracle(z, y, known)[1]
    error = np.abs(detector.predict_features(known).double().numpy() - expected).max() / expected.std()
    with torch.no_grad():
        ours, reference = interleave(lambda: detector.predict_features(x), lambda: linear(x), 10 * rounds)
    used = str(detector.to_module().points.dtype).removeprefix("torch.")
    timed = f"{ours * 1e3:.1f} ms vs {reference * 1e3:.1f} ms | **{ours / reference:.2f}x its time** |"
    return f"| {between:g} | {used} | {error:.1e} | {timed}"


def memory(samples: int) -> float:
    """Peak memory of fit(loader) above the start, in MB, in a fresh process (Linux); batches are made on the fly."""
    code = f"""
import re, torch
from torch import nn
from rmd_plugin import RMD, FusedRMD, Mahalanobis

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) / 1024

torch.randn(1000, 512) @ torch.randn(512, 512)
generator = torch.Generator().manual_seed(0)
loader = (
    (torch.randn(1000, 512, generator=generator), torch.randint(0, 100, (1000,), generator=generator))
    for _ in range({samples} // 1000)
)
detector = RMD(nn.Identity())
open("/proc/self/clear_refs", "w").write("5")  # resets the peak to what is in use now
before = status("VmRSS")
detector.fit(loader)
print(status("VmHWM") - before)
"""
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def size() -> str:
    z, y, _ = features(2048, 10, 4000, 2)
    with tempfile.TemporaryDirectory() as folder:
        RMD().fit_features(z, y).save(Path(folder, "rmd.safetensors"))
        return f"{Path(folder, 'rmd.safetensors').stat().st_size / 1e6:.2f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two sides take turns")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    quick, rounds = options.quick, options.rounds
    print("| what | at | threads | measured | ratio |\n|---|---|---|---|---|")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for width, classes in [(640, 100), (512, 10)] + ([] if quick else [(768, 1000)]):
            print("\n".join(scoring(width, classes, threads, rounds)), flush=True)
        print("\n".join(fitting(threads, rounds)), flush=True)
        for width in (640, 1280):
            print("\n".join(fused(width, threads, rounds)), flush=True)
    torch.set_num_threads(2)
    for width in (2048,) if quick else (2048, 4096, 8192):
        print(moments_fit(width, 2, rounds if width < 8192 else 1), flush=True)
    for count in (1000, 10_000):
        print(fused_classes(count), flush=True)
    samples = 100_000 if quick else 1_000_000
    for count in (samples // 4, samples):
        print(f"| peak memory of `fit(loader)` above the start | {count:,} x 512 | 2 | {memory(count):.0f} MB | |")
    print(f"| saved RMD | D=2048 K=10 | | {size()} | |")
    print(
        "\nLargest error of RMD scores against a float64 textbook, relative to the largest score / to their spread:\n"
    )
    print("| shape | condition number | features | rmd-plugin | pytorch-ood |\n|---|---|---|---|---|")
    shapes = [(640, 100, 1e3), (512, 10, 1e3), (640, 100, 1e8)] + ([] if quick else [(768, 1000, 1e3)])
    for shape in shapes:
        print("\n".join(accuracy(*shape)), flush=True)
    torch.set_num_threads(options.threads[0])
    print("\nClasses that lie far apart, D=640, K=100, float32 features:\n")
    print("| between-class variance b | scored in | error / spread | scoring vs `nn.Linear(D, K)` | ratio |")
    print("|---:|---|---|---|---|")
    for between in (1.0, 100.0, 1000.0, 10_000.0):
        print(far_apart(between, rounds), flush=True)


if __name__ == "__main__":
    main()
