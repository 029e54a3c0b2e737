"""What the commands say about the preprocessing, and that none which was given is ignored."""

import logging
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from config_kit import composed
from PIL import Image
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_ood.benchmark import Benchmark
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms as tv

from rmd_plugin.app.parts import make_backbone, make_benchmark, say_preprocessing
from rmd_plugin.app.train import Classifier
from rmd_plugin.backbones import ResNet, TorchVision
from rmd_plugin.benchmarks import OODBenchmark, OODSet, Parts, Split
from rmd_plugin.benchmarks.framework import DatasetItems, as_benchmark
from rmd_plugin.compare.rows import ACCURACY, read_rows, select


def photographs(count):
    """Pictures of many sizes, of two classes."""
    rng = np.random.default_rng(0)
    shapes = [(20 + 7 * i % 30, 25 + 5 * i % 40, 3) for i in range(count)]
    return [(Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)), i % 2) for i, shape in enumerate(shapes)]


class Photographs(OODBenchmark):
    name = "photographs"

    def load(self):
        def split(count):
            return Split(DatasetItems(photographs(count)), np.arange(count) % 2)

        return Parts(None, split(12), split(6), [OODSet("other", "far", split(6))], val_fraction=0.2)


def said(caplog, config, backbone, benchmark):
    """The line about the preprocessing, and the warnings."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        text = say_preprocessing(config, backbone, benchmark)
    messages = {record.levelname: [] for record in caplog.records}
    for record in caplog.records:
        messages[record.levelname].append(record.getMessage())
    assert messages["INFO"] == [f"Preprocessing: {text}."]
    return text, messages.get("WARNING", [])


@pytest.mark.parametrize("backbone", ["small_cnn", "mlp"])
def test_networks_without_a_size_of_their_own_take_photographs_at_32_pixels_and_say_so(backbone, caplog):
    config, data = composed("compare", f"backbone={backbone}", "head=own"), Photographs()
    with caplog.at_level(logging.INFO):
        network = make_backbone(config, data)
    assert "backbone.image_size=32: the pictures are of any size." in caplog.text
    transform = network.test_transform
    assert network(torch.stack([transform(data.fit_set().raw(i)) for i in range(4)])).shape == (4, 2)
    text, warnings = said(caplog, config, network, data)
    assert text.startswith("resize the shorter side to 32 (bicubic), crop 32 x 32, mean (0, 0, 0), std (1, 1, 1): ")
    assert warnings == []


OWN_TRANSFORM = [
    "_target_=rmd_plugin.backbones.transforms.ImageTransform", "size=20", "mean=[0,0,0]", "std=[1,1,1]"
]  # fmt: skip


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("small_cnn", ["backbone.image_size=20", "backbone.mean=[0.5,0.5,0.5]"]),
        ("mlp", [f"+backbone.transform.{word}" for word in OWN_TRANSFORM]),
    ],
)
def test_a_size_or_transform_that_is_given_decides_the_input_of_a_small_network(backbone, options):
    config = composed("compare", "benchmark=digits", f"backbone={backbone}", *options)
    for data in (Photographs(), make_benchmark(config)):
        network = make_backbone(config, data)
        item = data.fit_set().with_transform(network.test_transform)[0][0]
        assert isinstance(item, torch.Tensor)
        assert item.shape == (3, 20, 20)


def test_a_transform_given_to_the_benchmark_is_used_where_the_backbone_has_none(caplog):
    target = "torchvision.transforms.Lambda"
    config = composed("compare", "backbone=small_cnn", f"+benchmark.test_transform._target_={target}")
    data = Photographs(test_transform=tv.Compose([tv.Resize((9, 9)), tv.ToTensor()]), train_transform=tv.ToTensor())
    network = make_backbone(config, data)
    text, _ = said(caplog, config, network, data)
    assert text.startswith("Compose( Resize(size=(9, 9)")
    assert text.endswith(": transform from the config")
    assert data.fit_set()[0][0].shape == (3, 9, 9)


def test_a_transform_given_to_the_benchmark_is_refused_where_the_backbone_has_its_own():
    for option in ("test_transform", "train_transform"):
        config = composed(
            "compare", "backbone=wrn40_2", f"+benchmark.{option}._target_=torchvision.transforms.ToTensor"
        )
        with pytest.raises(ValueError, match=option):
            say_preprocessing(config, ResNet((1,), (4,)), Photographs())


class Ready(Benchmark):
    """A benchmark of the framework whose data set makes tensors itself."""

    ood_names = ("other",)

    def __init__(self, transform):
        self.items = [(transform(image), label) for image, label in photographs(12)]

    def train_set(self):
        return self.items

    def test_sets(self, known=True, unknown=True):
        return [self.items]

    def evaluate(self, *_, **__):
        raise NotImplementedError


def test_items_that_are_tensors_already_are_said_to_be_and_a_given_preprocessing_is_refused(caplog):
    data = as_benchmark(Ready(tv.Compose([tv.Resize((32, 32)), tv.ToTensor()])))
    network = ResNet((1,), (4,), mean=(0.1,) * 3)
    text, _ = said(caplog, composed("compare", "backbone=resnet18_cifar"), network, data)
    assert text == "none: items are taken as they are"
    config = composed("compare", "backbone=resnet18_cifar", "backbone.mean=[0.1,0.1,0.1]")
    with pytest.raises(ValueError, match=r"backbone\.mean"):
        say_preprocessing(config, network, data)


@pytest.mark.slow
def test_a_foreign_checkpoint_without_mean_and_std_is_a_warning_with_both_remedies(tmp_path, caplog):
    from torchvision.models import resnet18

    path = tmp_path / "best.ckpt"
    torch.save(resnet18(num_classes=2).state_dict(), path)
    words = ["backbone=torchvision", "backbone.name=resnet18", f"checkpoint={path}", "backbone.image_size=32"]
    config = composed("compare", *words)
    network = TorchVision("resnet18", checkpoint=path, image_size=32)
    text, (warning,) = said(caplog, config, network, Photographs())
    assert "std from the metadata of weights that were not loaded" in text
    assert "best.ckpt is normalised by the metadata" in warning
    told = TorchVision("resnet18", checkpoint=path, mean=(0.485, 0.456, 0.4), std=(1, 1, 1))
    assert said(caplog, config, told, Photographs())[1] == []
    scratch = composed("compare", "backbone=torchvision", "backbone.name=resnet18", "backbone.pretrained=false")
    assert said(caplog, scratch, TorchVision("resnet18", pretrained=False), Photographs())[1] == []


@pytest.mark.filterwarnings("ignore:.*treespec.*", "ignore:.*does not have many workers.*")  # of Lightning
def test_a_checkpoint_of_rmd_train_knows_its_preprocessing_and_its_accuracy(tmp_path, caplog):
    backbone = ResNet((1,), (4,), num_classes=2, image_size=8, mean=(0.2,) * 3)
    loader = DataLoader(TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 2), batch_size=4)
    keep = ModelCheckpoint(tmp_path, filename="best", monitor="val/acc", mode="max")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=1, callbacks=[keep], log_every_n_steps=1, **quiet)
    trainer.fit(Classifier(backbone), loader, loader)
    path = tmp_path / "best.ckpt"
    config = composed("compare", "backbone=resnet18_cifar", f"backbone.checkpoint={path}")
    same = ResNet((1,), (4,), image_size=8, mean=(0.2,) * 3, checkpoint=path)
    assert said(caplog, config, same, Photographs())[1] == []
    other = ResNet((1,), (4,), image_size=8, checkpoint=path)
    (warning,) = said(caplog, config, other, Photographs())[1]
    assert "was trained behind ImageTransform(size=8, mean=(0.2, 0.2, 0.2)" in warning


def test_the_command_shows_the_line_keeps_it_and_remarks_on_an_accuracy_of_chance(tmp_path, command):
    from rmd_plugin.backbones import SmallCNN
    from rmd_plugin.report.run import RunFolder

    network = SmallCNN(1, widths=(4, 4), num_classes=6)
    torch.nn.init.zeros_(network.head.weight)
    torch.save(network.state_dict(), tmp_path / "dead.pt")
    words = ["benchmark=digits", "backbone=small_cnn", "backbone.widths=[4,4]", "checkpoint=dead.pt"]
    words += ["detector=[msp]", "resamples=0", "figures=false", "cache_dir=null", "hydra.run.dir=out"]
    printed = command("compare", *words, quiet=False)
    line = "none: items are taken as they are"
    assert f"Preprocessing: {line}." in printed
    assert RunFolder("out").read_versions()["preprocessing"] == line
    (row,) = select(read_rows(Path("out/rows.csv")), metric=ACCURACY).itertuples()
    assert "hardly above chance" in row.reason
