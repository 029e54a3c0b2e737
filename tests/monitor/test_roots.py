"""``pytorch_lightning`` and ``lightning`` are two class hierarchies; the monitor is at home in both."""

import importlib
import math
import subprocess
import sys

import pytest
import torch
from callback_kit import OOD, OPTIONS, QUIET, TRAIN, VAL, Net, classifier, loader
from omegaconf import OmegaConf

from rmd_plugin import RMD, OODMonitor

pytestmark = [pytest.mark.filterwarnings(*QUIET), pytest.mark.filterwarnings("ignore:.*GPU available.*")]

ROOTS = ["pytorch_lightning", "lightning.pytorch"]


@pytest.fixture(params=ROOTS)
def root(request):
    return pytest.importorskip(request.param)


def fit(root, *callbacks, module=None, epochs=1, ckpt_path=None, **options):
    module = classifier(root)() if module is None else module
    if hasattr(module, "model"):
        module.model.body[3].p = 0.0  # releases of Lightning draw differently when they resume
    trainer = root.Trainer(**(OPTIONS | {"max_epochs": epochs, "callbacks": list(callbacks)} | options))
    trainer.fit(module, loader(TRAIN), loader(VAL), ckpt_path=ckpt_path)
    return trainer, module


def monitor(**options):
    return OODMonitor({"rmd": RMD()}, **({"head": "model.fc", "ood": {"near": loader(OOD)}} | options))


def plain(history):
    return [row for row in history if row["metric"] != "fit_seconds"]


@pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with")  # the roots may be of different versions
def test_it_watches_without_a_trace_and_its_checkpoint_goes_on_in_the_other_root(root, tmp_path):
    watched, straight = monitor(), monitor()
    trainer, module = fit(root, watched)
    _, alone = fit(root)
    for name, value in alone.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert isinstance(watched, root.Callback)
    assert trainer.callback_metrics["ood/rmd/near/AUROC"] == watched.history[1]["value"]
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    loaded = OODMonitor.load_detectors(tmp_path / "one.ckpt")["rmd"]
    z = torch.randn(5, 16)
    assert torch.equal(loaded.predict_features(z), watched.detectors["rmd"].predict_features(z))

    other = pytest.importorskip(next(name for name in ROOTS if name != root.__name__))
    resumed = monitor()
    module, rest = classifier(other)(), {"epochs": 2, "ckpt_path": tmp_path / "one.ckpt"}
    fit(other, resumed, module=module, **rest)
    fit(root, straight, **rest)
    assert plain(resumed.history) == plain(straight.history)
    assert [row["epoch"] for row in plain(resumed.history)[::11]] == [0, 1]


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_a_module_that_builds_itself_is_waited_for(root, hook):
    def build(self, stage=None):
        self.model = Net()

    built = type("Built", (classifier(root),), {hook: build})()
    del built.model
    watched = monitor()
    fit(root, watched, module=built)
    assert plain(watched.history)


# -- LightningCLI ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_line_of_lightning_builds_it_from_yaml(root, tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")
    cli = importlib.import_module(f"{root.__name__}.cli")

    class Data(root.LightningDataModule):
        def train_dataloader(self):
            return loader(TRAIN)

        def val_dataloader(self):
            return loader(VAL)

    init_args = {
        "detectors": {
            "rmd": {"class_path": "rmd_plugin.RMD", "init_args": {"shrinkage": 0.1}},
            "knn": {"class_path": "pytorch_ood.detector.KNN", "init_args": {"k": 3}},
            "named": "vim",
        },
        "head": "model.fc",
        "ood": {"near": {"class_path": "callback_kit.near_loader", "init_args": {"batch_size": 8}}},
        "limit_fit_batches": 5,
    }
    callbacks = [{"class_path": "rmd_plugin.OODMonitor", "init_args": init_args}]
    config = tmp_path / "given.yaml"  # Lightning saves its own as config.yaml
    trainer = OPTIONS | {"max_epochs": 1, "callbacks": callbacks, "default_root_dir": str(tmp_path)}
    config.write_text(OmegaConf.to_yaml({"seed_everything": False, "trainer": trainer}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's calls
    done = cli.LightningCLI(classifier(root), Data, args=["fit", "--config", str(config)])
    [watched] = [callback for callback in done.trainer.callbacks if isinstance(callback, OODMonitor)]
    assert watched.detectors["rmd"].options["shrinkage"] == 0.1
    assert {row["detector"] for row in plain(watched.history)} == init_args["detectors"].keys()
    assert not any(math.isnan(row["value"]) for row in watched.history)


# -- imports -----------------------------------------------------------------------------------------------------------

SILENCED = """
import logging, {root} as root
logging.getLogger("{root}").setLevel(logging.ERROR)
from rmd_plugin import OODMonitor
root.Trainer(accelerator="cpu", logger=False, callbacks=[OODMonitor(["rmd"])])
"""


@pytest.mark.slow
def test_importing_it_leaves_the_logging_of_the_root_in_use_alone(root):
    code = SILENCED.format(root=root.__name__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
