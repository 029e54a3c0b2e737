"""Golden numbers: what this package computed before it was rebuilt, and the one definition of each case.

python tests/golden/make.py    writes the numbers of the installed package beside this file

``test_golden.py`` computes the same cases from the current tree and compares. Inputs come from seeded numpy generators,
which give the same numbers with every version of torch. Only public names and commands are used.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from pytorch_ood.detector import MaxSoftmax
from torch import Tensor

import rmd_plugin
from rmd_plugin import (
    RMD,
    Calibrated,
    FlowLikelihood,
    FusedRMD,
    Mahalanobis,
    MarginalMahalanobis,
    PartialMahalanobis,
    RelativeFlow,
    benchmarks,
)

FOLDER = Path(__file__).parent
ROOT = Path(rmd_plugin.__file__).parents[1]
EXAMPLES = FOLDER.parents[1] / "examples"

Arrays = dict[str, np.ndarray]
Row = dict[str, Any]


# -- detectors --------------------------------------------------------------------------------------------------------


def blobs(
    n: int,
    d: int,
    k: int,
    dtype: torch.dtype,
    *,
    maps: bool = False,
    decades: float = 1.0,
    mean: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Training features (n, d), labels (n,), five of them below zero, and 40 test features, half of them far away."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % k)
    centres, scales = 3 * rng.standard_normal((k, d)), np.logspace(0, -decades, d)
    z = rng.standard_normal((n, d)) * scales + centres[y] + mean
    x = np.concatenate(
        [rng.standard_normal((20, d)) * scales + centres[np.arange(20) % k], 2 * rng.standard_normal((20, d))]
    )
    x += mean
    if maps:
        z, x = (part[:, :, None, None] + 0.1 * rng.standard_normal((*part.shape, 3, 3)) for part in (z, x))
    y[:5] = -1
    return torch.from_numpy(z).to(dtype), torch.from_numpy(y), torch.from_numpy(x).to(dtype)


GAUSSIAN: dict[str, type] = {
    "RMD": RMD,
    "Mahalanobis": Mahalanobis,
    "MarginalMahalanobis": MarginalMahalanobis,
    "PartialMahalanobis": PartialMahalanobis,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"shrinkage": 0.1},
    {"shrinkage": "oas"},
    {"shrinkage": "auto"},
    {"normalize": True},
    {"covariance": "diagonal"},
]
SHAPES = [(400, 16, 5), (60, 40, 3), (30, 40, 3), (1500, 64, 100)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def gaussian_fits() -> Arrays:
    """Scores of the Gaussian detectors: every shape with every dtype, the other choices in turn."""
    scores = {}
    for turn, ((n, d, k), dtype) in enumerate(product(SHAPES, DTYPES)):
        exact = dtype != torch.bfloat16  # its steps of 0.5 at 100 would leave columns of dust
        maps, decades, mean = turn % 3 == 2, (1.0, 3.0)[exact and turn % 2], (0.0, 100.0)[exact and turn // 2 % 2]
        z, y, x = blobs(n, d, k, dtype, maps=maps, decades=decades, mean=mean, seed=turn)
        for number, (name, kind) in enumerate(GAUSSIAN.items()):
            for step in (0, 3):
                options = dict(OPTIONS[(turn + number + step) % len(OPTIONS)])
                if name == "PartialMahalanobis":
                    options = {**options, "components": 4}
                    options.pop("covariance", None)
                if n < d:  # without shrinkage the old fits kept single directions of rounding errors
                    options.setdefault("shrinkage", 0.2)
                detector = kind(**options).fit_features(z, y)
                words = " ".join(f"{key}={value}" for key, value in options.items())
                # the features in float64: rounding of the scoring itself is no part of the fit
                scores[f"{name} {words} {n}x{d}x{k} {dtype} {turn}"] = detector.predict_features(x.double())
    return as_arrays(scores)


def gaussian_details() -> Arrays:
    """Classes, terms, scores in the dtype of the features, and a background of another corpus."""
    scores = {}
    z, y, x = blobs(400, 16, 5, torch.float32, seed=50)
    for name, kind in GAUSSIAN.items():
        detector = kind(components=4) if name == "PartialMahalanobis" else kind()
        detector.fit_features(z, y)
        scores[f"{name} float32"] = detector.predict_features(x)
        scores[f"{name} contributions"] = detector.contributions(x.double())
        if name != "MarginalMahalanobis":
            scores[f"{name} class_scores"] = detector.class_scores(x.double())
            scores[f"{name} nearest_class"] = detector.nearest_class(x)
    corpus = blobs(500, 16, 9, torch.float64, seed=51)[0] * 2
    for options in OPTIONS:
        words = " ".join(f"{key}={value}" for key, value in options.items())
        scores[f"background {words}"] = (
            RMD(**options).fit_features(z.double(), y, background=corpus).predict_features(x.double())
        )
    scores["remainder"] = (
        PartialMahalanobis(components=4, largest=False).fit_features(z, y).predict_features(x.double())
    )
    return as_arrays(scores)


def changed_fits() -> Arrays:
    """Scores after ``update``, ``forget`` and ``add_class``."""
    scores = {}
    z, y, x = blobs(600, 16, 5, torch.float64, seed=60)
    corpus = blobs(500, 16, 9, torch.float64, seed=61)[0] * 2
    head = blobs(5, 16, 5, torch.float64, seed=62)[0]
    detectors = {
        "RMD": RMD(),
        "RMD oas": RMD(shrinkage="oas"),
        "RMD normalize": RMD(normalize=True),
        "Mahalanobis": Mahalanobis(),
        "FusedRMD": FusedRMD(keep_moments=True),
        "FusedRMD head": FusedRMD(w=torch.cat([head, head[:1]]), keep_moments=True),
        "RMD background": RMD(),
    }
    for name, detector in detectors.items():
        extra = {"background": corpus} if name == "RMD background" else {}
        detector.fit_features(z[:300], y[:300], **extra)
        scores[f"{name} update"] = detector.update(z[300:], y[300:]).predict_features(x)
        scores[f"{name} forget"] = detector.forget(z[100:200], y[100:200]).predict_features(x)
        detector.add_class(x[:20] + 7)
        scores[f"{name} add_class"] = detector.predict_features(x)
    return as_arrays(scores)


def fused_fits() -> Arrays:
    """FusedRMD with and without a head, its terms, few samples, and more samples than it keeps."""
    scores = {}
    for number, (shape, dtype) in enumerate(product(SHAPES, (torch.float32, torch.float64))):
        z, y, x = blobs(*shape, dtype, seed=70 + number)
        w = blobs(shape[2], shape[1], 1, torch.float64, seed=80)[0].to(dtype)
        scores[f"alone {shape} {dtype}"] = FusedRMD().fit_features(z, y).predict_features(x.double())
        detector = FusedRMD(w=w, b=torch.linspace(-1, 1, len(w), dtype=dtype)).fit_features(z, y)
        scores[f"head {shape} {dtype}"] = detector.predict_features(x.double())
        scores |= {f"{term} {shape} {dtype}": value for term, value in detector.members(x.double())._asdict().items()}
    z, y, x = blobs(12_000, 8, 4, torch.float32, seed=90)
    scores["sampled"] = FusedRMD().fit_features(z, y).predict_features(x.double())
    return as_arrays(scores)


def flow_fits() -> Arrays:
    """Flows after a few epochs: the defaults, and the paper's own setting."""
    z, y, x = blobs(400, 6, 4, torch.float32, seed=100)
    paper = {"space": "features", "sharing": "per_class"}
    detectors = {
        "RelativeFlow": RelativeFlow(max_epochs=3, progress=False),
        "RelativeFlow paper": RelativeFlow(background="flow", **paper, max_epochs=3, progress=False),
        "RelativeFlow untrained": RelativeFlow(max_epochs=0, progress=False),
        "FlowLikelihood": FlowLikelihood(max_epochs=3, progress=False),
        "FlowLikelihood conditional": FlowLikelihood(sharing="conditional", max_epochs=3, progress=False),
    }
    return as_arrays({name: detector.fit_features(z, y).predict_features(x) for name, detector in detectors.items()})


def decisions() -> Arrays:
    """P-values, thresholds and decisions of calibrated detectors."""
    values: dict[str, Any] = {}
    z, y, x = blobs(1500, 16, 5, torch.float64, seed=110)
    z, y, held_out, classes = z[:900], y[:900], z[900:], y[900:]
    detectors = {"RMD": RMD(), "FusedRMD": FusedRMD(), "Mahalanobis": Mahalanobis(shrinkage=0.1)}
    for (name, detector), per_class in product(detectors.items(), (False, True)):
        calibrated = Calibrated(detector, alpha=0.1, per_class=per_class).fit_features(z, y)
        calibrated.calibrate_features(held_out, classes if per_class else None)
        key = f"{name} per_class" if per_class else name
        values |= {f"{key} p_value": calibrated.p_value_features(x), f"{key} threshold": calibrated.threshold()}
        values |= {f"{key} is_ood": calibrated.is_ood_features(x), f"{key} select": calibrated.select_features(x, 0.2)}
        values[f"{key} threshold confidence"] = calibrated.threshold(0.2, confidence=0.9)
        values[f"{key} threshold 0.05"] = calibrated.threshold(0.05)
    logits = held_out[:, :5]
    for per_class in (False, True):
        softmax = Calibrated(MaxSoftmax(None), per_class=per_class).calibrate_logits(logits)
        key = "MaxSoftmax per_class" if per_class else "MaxSoftmax"
        values |= {f"{key} p_value": softmax.p_value_logits(x[:, :5]), f"{key} threshold": softmax.threshold()}
    return as_arrays(values)


def table_fits() -> Arrays:
    """Moments of four Parquet files, alone and together, and what is fitted on them."""
    values: dict[str, Any] = {}
    z, y, x = blobs(800, 12, 4, torch.float32, seed=120)
    with TemporaryDirectory() as folder:
        for number, rows in enumerate(torch.arange(800).split([100, 350, 50, 300])):
            table = pa.table({"embedding": z[rows].tolist(), "label": y[rows].tolist()})
            pq.write_table(table, Path(folder, f"{number}.parquet"), row_group_size=64)
            state = rmd_plugin.table_state(RMD(), str(Path(folder, f"{number}.parquet")))
            values |= {f"state {number} counts": state.counts, f"state {number} means": state.means}
            values[f"state {number} covariance"] = state.covariance
        for detector in (RMD(), Mahalanobis(), FusedRMD(), RMD(normalize=True), RMD(covariance="diagonal")):
            name = repr(detector).split(")")[0].lstrip("<")
            values[name] = rmd_plugin.fit_table(detector, folder, workers=1).predict_features(x.double())
    return as_arrays(values)


def as_arrays(values: dict[str, Any]) -> Arrays:
    """Tensors and numbers as float64 arrays; float32 where nothing is lost."""
    return {name: np.asarray(torch.as_tensor(value).double().numpy()) for name, value in values.items()}


DETECTORS: dict[str, Callable[[], Arrays]] = {
    "gaussian": gaussian_fits,
    "details": gaussian_details,
    "changed": changed_fits,
    "fused": fused_fits,
    "decisions": decisions,
    "table": table_fits,
    "flows": flow_fits,
}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread and no warnings: singular covariances are among the cases."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def compute(case: str) -> Arrays:
    """The numbers of a case of :data:`DETECTORS`."""
    with one_thread():
        return DETECTORS[case]()


def machine() -> dict[str, str]:
    """What trained weights depend on, beside the code."""
    return {"torch": torch.__version__.split("+")[0], "cpu": torch.backends.cpu.get_cpu_capability()}


# -- data -------------------------------------------------------------------------------------------------------------


def as_it_is(item: object) -> object:
    """A transform that changes nothing: fingerprints are of raw items."""
    return item


def sha256(dataset: Any) -> str:
    """Hash of the items and labels of a data set, in order."""
    content = hashlib.sha256()
    for item, label in dataset:
        if isinstance(item, str):
            content.update(item.encode())
        else:
            array = item.numpy() if isinstance(item, Tensor) else np.asarray(item)
            content.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        content.update(f"{int(label)};".encode())
    return content.hexdigest()


def split_hashes(benchmark: Any) -> dict[str, str]:
    """Hash of each split of a benchmark by its name."""
    (test,) = benchmark.test_sets(known=True, unknown=False)
    splits = {"train": benchmark.fit_set(), "val": benchmark.val_set(), "test": test}
    splits |= dict(zip(benchmark.ood_names, benchmark.test_sets(known=False, unknown=True), strict=True))
    return {name: sha256(split) for name, split in splits.items()}


def own_files(folder: Path) -> dict[str, tuple[type, Path]]:
    """Data of one's own, as docs/own_data.md describes it, for each benchmark that reads some."""
    z, y, _ = blobs(120, 6, 3, torch.float32, seed=130)
    words = [
        f"text {number} of {'abc'[label]}" if label >= 0 else f"odd {number}" for number, label in enumerate(y.tolist())
    ]
    names = ["abc"[label] if label >= 0 else "" for label in y.tolist()]
    splits = ["train" if number % 4 else "test" for number in range(120)]
    splits = [split if name else "ood:odd" for split, name in zip(splits, names, strict=True)]
    pq.write_table(pa.table({"embedding": z.tolist(), "label": names, "split": splits}), folder / "table.parquet")
    lines = [",".join(row) for row in zip(words, names, splits, strict=True)]
    (folder / "texts.csv").write_text("\n".join(["text,label,split", *lines]))
    np.savez(folder / "features.npz", features=z.numpy(), labels=y.numpy(), near_shifted=z[:10].numpy() + 1)
    run([sys.executable, str(EXAMPLES / "make_pictures.py")], folder)
    return {
        "embeddings": (benchmarks.Embeddings, folder / "table.parquet"),
        "text_file": (benchmarks.TextFile, folder / "texts.csv"),
        "features": (benchmarks.Features, folder / "features.npz"),
        "image_folder": (benchmarks.ImageFolder, folder / "photos"),
    }


def fingerprints() -> dict[str, dict[str, str]]:
    """Hashes of the splits of each benchmark that needs no download."""
    raw: dict[str, Any] = {"train_transform": as_it_is, "test_transform": as_it_is}
    hashes = {
        "digits": split_hashes(benchmarks.Digits(**raw)),
        "digits limited": split_hashes(benchmarks.Digits(**raw, limit_train=100, limit_test=20, seed=1)),
        "intents": split_hashes(benchmarks.Intents()),
        "intents limited": split_hashes(benchmarks.Intents(limit_train=300, limit_test=50, seed=1)),
        "simulation": split_hashes(benchmarks.Simulation(dim=64)),
        "simulation limited": split_hashes(benchmarks.Simulation(dim=8, n_train=50, limit_train=20, seed=1)),
    }
    with TemporaryDirectory() as folder:
        for name, (kind, path) in own_files(Path(folder)).items():
            hashes[name] = split_hashes(kind(path=path, **raw))
    return hashes


def data_fingerprints() -> dict[str, dict[str, str]]:
    """The same of the benchmarks that read ``RMD_DATA_DIR``, limited: hashing all of CIFAR takes a while."""
    raw: dict[str, Any] = {"train_transform": as_it_is, "test_transform": as_it_is}
    limits = {"limit_train": 1000, "limit_test": 300}
    kinds = {"cifar10_vs_cifar100": benchmarks.CIFAR10vsCIFAR100, "cifar100_vs_cifar10": benchmarks.CIFAR100vsCIFAR10}
    kinds |= {"clinc150": benchmarks.CLINC150, "genomics": benchmarks.Genomics}
    return {name: split_hashes(kind(**raw, **limits)) for name, kind in kinds.items()}


# -- commands ---------------------------------------------------------------------------------------------------------


def run(words: list[str], folder: Path) -> None:
    """Run a program in a folder, with one thread and the package of this process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "1"}
    environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")


def command(name: str, folder: Path, *words: str) -> None:
    """Run one of the package's commands as pyproject.toml of this tree names it, installed or not."""
    target = re.search(rf'^{name} = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert target is not None
    module, function = target.groups()
    program = f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; sys.exit({function}())"
    run([sys.executable, "-c", program, *words], folder)


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def comparison(benchmark: str) -> list[Row]:
    """Rows of ``rmd-compare``: ood, detector, metric, value and status."""
    with TemporaryDirectory() as folder:
        words = ["detector=all", "seed=0", "resamples=0", "figures=false", "cache_dir=null", "hydra.run.dir=out"]
        command("rmd-compare", Path(folder), f"benchmark={benchmark}", *words)
        rows = read_rows(Path(folder, "out/rows.csv"))
    columns = ("ood", "detector", "metric", "value", "status")
    return [{column: row[column] for column in columns} for row in rows if row["detector"] != "multi_layer"]


def training(refit: str) -> dict[str, Any]:
    """Hashes of the last weights of ``rmd-train`` on digits, and the detectors' curves over its epochs."""
    with TemporaryDirectory() as folder:
        words = ["benchmark=digits", "seed=0", "trainer.max_epochs=3", f"callbacks.ood_monitor.refit={refit}"]
        command("rmd-train", Path(folder), *words, "resamples=0", "figures=false", "hydra.run.dir=out")
        (last,) = Path(folder, "out").rglob("last.ckpt")
        weights = torch.load(last, map_location="cpu", weights_only=True)["state_dict"].values()
        history = read_rows(Path(folder, "out/history.csv"))
    hashes = sorted(hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in weights)
    columns = ("epoch", "detector", "ood", "metric", "value")
    rows = [{column: row[column] for column in columns} for row in history if row["metric"] != "fit_seconds"]
    return {"weights": hashes, "history": rows}


def guard() -> Arrays:
    """Verdicts of a guard on pictures, in Python and by its ONNX file.

    The network is an untrained one of a fixed seed with a linear probe: a training would add nothing but time.
    """
    import onnxruntime

    with TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, str(EXAMPLES / "make_pictures.py")], folder)
        words = ["benchmark=image_folder", "benchmark.path=photos", "backbone=small_cnn", "head=linear_probe", "seed=0"]
        command("rmd-fit", folder, *words, "cache_dir=null", "out=guard")
        paths = sorted(path for path in folder.glob("photos_new/*.png") if path.name != "broken.png")
        loaded = rmd_plugin.Guard.load(folder / "guard")
        with one_thread():
            verdict = loaded([str(path) for path in paths])
        session = onnxruntime.InferenceSession(str(folder / "guard/model.onnx"), providers=["CPUExecutionProvider"])
        pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
        outputs = ["score", "p_value", "is_ood", "class", "nearest_class"]
        results = session.run(outputs, {"images": pixels})
    names = loaded.class_names
    values = {
        "score": verdict.score,
        "p_value": verdict.p_value,
        "is_ood": verdict.is_ood,
        "threshold": loaded.threshold,
    }
    values["class"] = torch.tensor([names.index(name) for name in verdict.class_name])
    values["nearest_class"] = torch.tensor([names.index(name) for name in verdict.nearest_class])
    values |= {f"onnx {name}": torch.from_numpy(result) for name, result in zip(outputs, results, strict=True)}
    return as_arrays(values)


BENCHMARKS = ("intents", "simulation", "digits")
REFITS = ("pass", "stream")


def main() -> None:
    """Write the numbers of all cases."""
    detectors = {f"{case}/{name}": array for case in DETECTORS for name, array in compute(case).items()}
    detectors |= {f"guard/{name}": array for name, array in guard().items()}
    np.savez_compressed(FOLDER / "numbers.npz", **detectors)
    for benchmark in BENCHMARKS:
        write_rows(FOLDER / f"rows_{benchmark}.csv", comparison(benchmark))
    trainings = {refit: training(refit) for refit in REFITS}
    write_json(FOLDER / "trainings.json", {"machine": machine(), **trainings})
    hashes = fingerprints()
    if os.environ.get("RMD_DATA_DIR"):
        hashes |= data_fingerprints()
    write_json(FOLDER / "fingerprints.json", hashes)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    rows = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
