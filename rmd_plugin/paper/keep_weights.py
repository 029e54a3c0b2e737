"""Weights of a finished run, kept in the package with a note of how they were made.

    python -m rmd_plugin.paper.keep_weights outputs/reproduce/medium/cells/table1-cifar100-... cifar100_resnet16

An experiment takes them by ``backbone.checkpoint=pkg://rmd_plugin.paper/weights/NAME.safetensors``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import cast

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save

from rmd_plugin.app.parts import make_benchmark
from rmd_plugin.app.resume import CHECKPOINTS
from rmd_plugin.atomic import replacing
from rmd_plugin.backbones.checkpoint import read_state_dict
from rmd_plugin.compare.rows import ACCURACY
from rmd_plugin.report.run_folder import CONFIG, RunFolder

WEIGHTS = Path(__file__).parent / "weights"


def keep_weights(run: Path, name: str, folder: Path = WEIGHTS) -> Path:
    """Write ``NAME.safetensors`` with the last weights of a run in half precision, and ``NAME.json`` about them.

    Raises:
        ValueError: if the run is not finished.
    """
    source = RunFolder(run)
    if not source.done:
        raise ValueError(f"{run} is not a finished run: its weights are not kept. Finish it, or name another one.")
    state = read_state_dict(run / CHECKPOINTS / "last.ckpt")
    # half precision: the file is half as large, and the accuracy the same
    half = {key: value.half().contiguous() if value.is_floating_point() else value for key, value in state.items()}
    content = save({key.removeprefix("backbone."): value for key, value in half.items()})
    config, versions = source.read_config(), source.read_versions()
    benchmark = make_benchmark(cast(DictConfig, OmegaConf.load(source.file(CONFIG))))
    about = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "command": versions["command"],
        "commit": versions["commit"],
        "packages": {package: versions["packages"][package] for package in ("torch", "pytorch-lightning")},
        "backbone": config["backbone"],
        "preprocessing": versions["preprocessing"],
        "epochs": config["trainer"]["max_epochs"],
        "precision": config["trainer"]["precision"],
        "optimizer": config["optimizer"],
        "batch_size": config["batch_size"],
        "benchmark": config["benchmark"],
        "data": repr(benchmark),  # how many samples there were
        "seed": config["seed"],
        "test_accuracy": next(row.value for row in source.read_rows() if row.metric == ACCURACY and row.ok),
        "licence": f"trained by the rmd-plugin developers on {config['names']['benchmark']}: Apache-2.0, as the "
        "package; the data have their own terms",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    with replacing(path, "wb") as file:
        file.write(content)
    with replacing(path.with_suffix(".json")) as file:
        json.dump(about, file, indent=2)
        file.write("\n")
    return path


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(keep_weights(Path(sys.argv[1]), sys.argv[2]))
