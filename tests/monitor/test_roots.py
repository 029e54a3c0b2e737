"""``pytorch_lightning`` and ``lightning`` are two class hierarchies; the monitor is at home in both."""

import importlib
import math
import subprocess
import sys

import pytest
import torch
import yaml
from callback_kit import OOD, QUIET, TRAIN, VAL, Net, loader
from torch.nn import functional as F

from rmd_plugin import RMD, OODMonitor
from rmd_plugin.encoding.batches import EncodingError

pytestmark = [pytest.mark.filterwarnings(*QUIET), pytest.mark.filterwarnings("ignore:.*GPU available.*")]

ROOTS = ["pytorch_lightning", "lightning.pytorch"]
OPTIONS = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def classifier(root):
    """A class of modules of a root."""

    class Classifier(root.LightningModule):
        def __init__(self, width: int = 16):
            super().__init__()
            torch.manual_seed(1)
            self.model = Net()
            self.model.body[3].p = 0.0  # releases of Lightning draw differently when they resume

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Classifier


@pytest.fixture(params=ROOTS)
def root(request):
    return pytest.importorskip(request.param)


def fit(root, *callbacks, module=None, epochs=1, ckpt_path=None, **options):
    module = classifier(root)() if module is None else module
    trainer = root.Trainer(**(OPTIONS | {"max_epochs": epochs, "callbacks": list(callbacks)} | options))
    trainer.fit(module, loader(TRAIN), loader(VAL), ckpt_path=ckpt_path)
    return trainer, module


def monitor(**options):
    return OODMonitor({"rmd": RMD()}, **({"head": "model.fc", "ood": {"near": loader(OOD)}} | options))


def plain(history):
    return [row for row in history if row["metric"] != "fit_seconds"]


def test_the_monitor_is_a_callback_of_the_root(root):
    assert issubclass(OODMonitor, root.Callback)


@pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with")  # the roots may be of different versions
def test_it_watches_without_a_trace_and_its_checkpoint_goes_on_in_the_other_root(root, tmp_path):
    watched, straight = monitor(), monitor()
    trainer, module = fit(root, watched)
    _, alone = fit(root)
    for name, value in alone.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
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


def test_a_wrong_head_is_refused_with_the_candidates(root):
    with pytest.raises(EncodingError, match=r"no layer named 'model\.fd'.*model\.fc"):
        fit(root, monitor(head="model.fd"))


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_a_module_that_builds_itself_is_waited_for(root, hook):
    def build(self, stage=None):
        self.model = Net()

    built = type("Built", (classifier(root),), {hook: build})()
    del built.model
    watched = monitor()
    fit(root, watched, module=built)
    assert plain(watched.history)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_alone_scores_the_detectors_of_a_checkpoint(root, stage, tmp_path):
    trainer, module = fit(root, monitor())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    type(module).test_step = type(module).validation_step
    again = monitor()
    alone = root.Trainer(**OPTIONS, callbacks=[again])
    getattr(alone, stage)(module, loader(VAL), ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert plain(again.history)[-1]["stage"] == stage


def test_lightnings_own_demo_module_whose_forward_is_defined_in_lightning_is_monitored(root):
    demo = importlib.import_module(f"{root.__name__}.demos.boring_classes").BoringModel

    class Boring(demo):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

        def validation_step(self, batch, batch_idx):
            return super().validation_step(batch[0], batch_idx)

    batches = loader((torch.randn(32, 32), torch.arange(32) % 2))
    watched = OODMonitor({"rmd": RMD(shrinkage=0.5)}, ood={"near": batches})
    root.Trainer(**OPTIONS, max_epochs=1, callbacks=[watched]).fit(Boring(), batches, batches)
    assert watched.head == "layer"
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
            "named": "RMD",
            "built": "pytorch_ood.detector.ViM",
        },
        "head": "model.fc",
        "ood": {"near": {"class_path": "callback_kit.near_loader", "init_args": {"batch_size": 8}}},
        "limit_fit_batches": 5,
    }
    callbacks = [{"class_path": "rmd_plugin.OODMonitor", "init_args": init_args}]
    config = tmp_path / "given.yaml"  # Lightning saves its own as config.yaml
    trainer = OPTIONS | {"max_epochs": 1, "callbacks": callbacks, "default_root_dir": str(tmp_path)}
    config.write_text(yaml.safe_dump({"seed_everything": False, "trainer": trainer}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's calls
    done = cli.LightningCLI(classifier(root), Data, args=["fit", "--config", str(config)])
    [watched] = [callback for callback in done.trainer.callbacks if isinstance(callback, OODMonitor)]
    assert watched.detectors["rmd"].options["shrinkage"] == 0.1
    assert type(watched.detectors["named"]) is RMD  # not the framework's
    assert {row["detector"] for row in plain(watched.history)} == init_args["detectors"].keys()
    assert not any(math.isnan(row["value"]) for row in watched.history)


# -- imports -----------------------------------------------------------------------------------------------------------

SILENCED = """
import logging
{before}
logging.getLogger("{root}").setLevel(logging.ERROR)
from rmd_plugin import OODMonitor
{after}
assert logging.getLogger("{root}").level == logging.ERROR
root.Trainer(accelerator="cpu", logger=False, callbacks=[OODMonitor(["RMD"])])
"""


def run(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options)


@pytest.mark.slow
# before the user has imported a root, the one that is not a dependency is taken to be in use
@pytest.mark.parametrize(("root", "first"), [(ROOTS[0], True), (ROOTS[1], True), (ROOTS[1], False)])
def test_importing_it_leaves_the_logging_of_the_root_in_use_alone(root, first):
    pytest.importorskip(root)
    statement = f"import {root} as root"
    done = run(SILENCED.format(root=root, before=statement if first else "", after="" if first else statement))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_file_of_the_users_that_is_named_lightning_is_left_alone(tmp_path):
    (tmp_path / "lightning.py").write_text("raise SystemExit('the script of the user has been run')")
    done = run("import sys; from rmd_plugin import OODMonitor; sys.exit('lightning' in sys.modules)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
