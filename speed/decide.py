"""What a decision costs beside the score that it stands on, of any detector: `is_ood` against `predict`.

    python speed/decide.py            10,000 samples, D=640, K=100, on one thread (about 3 minutes)

Both sides take turns in one run and the best of several counts. The detectors get features or logits, so no network
hides the cost of the decision.
"""

import argparse
from collections.abc import Iterator

import torch
from gaussian import features, interleave
from pytorch_ood.detector import KNN, MaxSoftmax
from torch import Tensor, nn

from rmd_plugin import RMD, Calibrated

WIDTH, CLASSES, TEST = 640, 100, 10_000


def cases() -> Iterator[tuple[str, Calibrated, str, Tensor, float | None]]:
    """What it is, a calibrated detector, what it is fed, what it decides, and with which confidence."""
    z, y, _ = features(WIDTH, CLASSES, 4 * TEST, 2)
    fit, held_out, x = z.float().split([2 * TEST, TEST, TEST])
    with torch.no_grad():
        head = nn.Linear(WIDTH, CLASSES)
        held_out_logits, logits = head(held_out), head(x)
    rmd, knn = RMD().fit_features(fit, y[: len(fit)]), KNN(None, k=50).fit_features(fit[:2000], y[:2000])
    calibrated = Calibrated(rmd).calibrate_features(held_out)
    yield "RMD", calibrated, "features", x, None
    yield "RMD, `confidence=0.95`", calibrated, "features", x, 0.95
    many = Calibrated(rmd).calibrate_scores(torch.randn(1_000_000))
    yield "RMD, 1,000,000 calibration samples", many, "features", x, None
    per_class = Calibrated(rmd, per_class=True).calibrate_features(held_out)
    yield "RMD, `per_class=True`", per_class, "features", x, None
    yield "MaxSoftmax", Calibrated(MaxSoftmax(None)).calibrate_logits(held_out_logits), "logits", logits, None
    yield "KNN, a bank of 2,000", Calibrated(knn).calibrate_features(held_out), "features", x, None


def row(name: str, detector: Calibrated, kind: str, x: Tensor, confidence: float | None, rounds: int) -> str:
    decide, score = getattr(detector, f"is_ood_{kind}"), getattr(detector.detector, f"predict_{kind}")
    with torch.no_grad():
        decided, scored = interleave(lambda: decide(x, confidence=confidence), lambda: score(x), rounds)
        scores, classes = detector._scored(kind, x)  # type: ignore[arg-type]
        level = {"alpha": detector.alpha, "confidence": confidence}
        alone, _ = interleave(lambda: detector.calibration.is_ood(scores, classes, **level), lambda: None, 1)
    ratio = f"**{decided / scored:.2f}x its time**"
    return f"| {name} | {decided * 1e3:.2f} vs {scored * 1e3:.2f} ms | {ratio} | {alone * 1e3:.2f} ms |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often the two sides take turns")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| `is_ood` vs `predict` | measured | ratio | given the scores |\n|---|---|---|---|")
    for case in cases():
        print(row(*case, options.rounds), flush=True)


if __name__ == "__main__":
    main()
