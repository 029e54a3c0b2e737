"""The same command twice gives the same rows, whatever was drawn before, for every shipped benchmark and backbone."""

import json
import random
from contextlib import suppress

import config_kit
import framework_kit as kit
import genomics_kit
import numpy as np
import pandas
import pytest
import torch
from config_kit import choices
from PIL import Image
from pytorch_ood.dataset.img import LSUNCrop, LSUNResize, TinyImageNetCrop, TinyImageNetResize
from torchvision.datasets import CIFAR10

from rmd_plugin.app.commands import compare, train
from rmd_plugin.compare.rows import read_rows

QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none", "figures=false", "resamples=20"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(20))]
# of 60 images 6 are validation data, too few for alpha=0.05
IMAGES = ["benchmark=cifar10_vs_cifar100", "benchmark.far=[]", "limit_test=12", "limit_train=40", "alpha=0.4"]
READS = ["benchmark=genomics", "limit_train=40", "limit_test=24"]
VECTORS = ["benchmark=simulation", "benchmark.dim=6", "limit_train=80", "limit_test=30"]

#: backbone -> what it is run on, and how it is made here: without downloads, and small where that is an option
BACKBONES = {
    "identity": VECTORS,
    "mlp": ["benchmark=intents", "limit_train=300", "limit_test=150"],
    "small_cnn": ["benchmark=digits", "limit_train=120", "limit_test=30"],
    "bert": ["benchmark=clinc150", "backbone.name=DATA/bert", "backbone.max_length=16"],
    "hf": ["benchmark=clinc150", "backbone.name=DATA/bert", "backbone.max_length=16"],
    "genomics_cnn": [*READS, "backbone.filters=20", "backbone.hidden=16"],
    "genomics_bert": [*READS, "backbone.width=16", "backbone.depth=1"],
    "resnet56_cifar": [*IMAGES, "backbone.checkpoint=null"],
    "resnet18_cifar": IMAGES,
    "wrn40_2": IMAGES,
    "wrn28_10": [*IMAGES, "backbone.width=1"],
    "efficientnet_lite0": [
        *("benchmark=cifar100_vs_cifar10", "benchmark.far=[]", "limit_train=100", "limit_test=100"),
        "backbone.pretrained=false",
    ],
    "timm": [*IMAGES, "backbone.name=resnet10t", "backbone.pretrained=false"],
    "torchvision": [*IMAGES, "backbone.name=resnet18", "backbone.pretrained=false"],
    "open_clip": [*IMAGES, "backbone.name=RN50", "backbone.pretrained=false"],
    "bit_r50x1": [*IMAGES, "backbone.pretrained=false"],
    "vit_b16": [*IMAGES, "backbone.pretrained=false"],
    "clip_vit_b32": [*IMAGES, "backbone.pretrained=false"],
}
#: benchmark of the user's own data -> its path, and what it is run with
OWN = {
    "features": ["features.npz", "backbone=mlp"],
    "embeddings": ["table.parquet", "backbone=mlp"],
    "text_file": ["texts.csv", "backbone.name=DATA/bert", "backbone.max_length=16", "alpha=0.5"],
    "image_folder": ["photos", "backbone=small_cnn", "alpha=0.5"],
    "hf_dataset": [
        "saved",
        "backbone.name=DATA/bert",
        "backbone.max_length=16",
        "benchmark.ood=[intent2]",
        "alpha=0.5",
    ],
}
TRAINED = ["bert", "genomics_cnn", "genomics_bert", "resnet18_cifar", "wrn40_2", "mlp", "small_cnn"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tiny data of every benchmark, and a tiny BERT."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for classes in (10, 100):
        labels = np.tile(np.arange(classes), 6)
        images = rng.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
        parts = {
            f"{part}_{name}": x for part in ("train", "test") for name, x in (("images", images), ("labels", labels))
        }
        np.savez(folder / f"cifar{classes}.npz", **parts)
    np.savez(folder / "features.npz", features=rng.normal(size=(400, 4)), labels=np.arange(400) % 4 - 1)

    def texts(intents, count):
        return [
            [" ".join(rng.choice(WORDS[5:], 4)), f"intent{intent}"] for intent in range(intents) for _ in range(count)
        ]

    known = {"train": texts(3, 12), "val": texts(3, 8), "test": texts(3, 6)}
    unknown = {f"oos_{name}": [[text, "oos"] for text, _ in texts(3, 4)] for name in ("train", "val", "test")}
    rows = texts(3, 30)
    csv = "".join(f"{text},{intent},{'ood' if intent == 'intent2' else 'train'}\n" for text, intent in rows)
    (folder / "texts.csv").write_text(f"text,label,split\n{csv}")
    pandas.DataFrame({"embedding": list(rng.normal(size=(400, 4))), "label": np.arange(400) % 4 - 1}).to_parquet(
        folder / "table.parquet"
    )
    for place in ("train/a", "train/b", "ood/c"):
        (folder / "photos" / place).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(
                folder / "photos" / place / f"{number}.png"
            )
    with suppress(ImportError):
        import datasets

        named = {"text": [text for text, _ in rows], "label": [intent for _, intent in rows]}
        datasets.DatasetDict({"train": datasets.Dataset.from_dict(named)}).save_to_disk(str(folder / "saved"))
    (folder / "clinc150").mkdir()
    (folder / "clinc150" / "data_full.json").write_text(json.dumps(known | unknown))
    genomics_kit.write_published(folder / "genomics_ood", genomics_kit.SPLITS)
    return folder


@pytest.fixture
def bert(data):
    transformers = pytest.importorskip("transformers")
    folder = data / "bert"
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


@pytest.fixture
def rows(tmp_path, data, monkeypatch):
    """Runs a command in this process, after unforeseeable draws, and gives its rows without those of times."""
    monkeypatch.chdir(tmp_path)
    count = iter(range(99))

    def call(main, *words):
        torch.seed(), random.seed(), np.random.seed()  # noqa: NPY002
        folder = tmp_path / f"run{next(count)}"
        words = [word.replace("DATA", str(data)) for word in words]
        paths = [f"paths.data_dir={data}", f"hydra.run.dir={folder}"]
        assert config_kit.call(main, monkeypatch, "rmd", *words, *QUIET, *paths) == 0
        return sorted(read_rows(folder / "rows.csv").itertuples(index=False), key=repr)

    return call


def of(detector, rows):
    own = [repr(row) for row in rows if row.detector == detector]
    assert own
    assert all("status='ok'" in row for row in own), own
    return own


def same_rows_whatever_else(rows, *words):
    """Cold and warm cache, no cache, another order of the detectors, worker processes."""
    words = [compare, *words, "batch_size=8"]
    cold = rows(*words, "detector=[rmd,msp,knn]", "detector.knn.k=3", "cache_dir=cache")
    warm = rows(*words, "detector=[rmd,msp,knn]", "detector.knn.k=3", "cache_dir=cache")
    none = rows(*words, "detector=[knn,rmd]", "detector.knn.k=3", "cache_dir=null", "num_workers=2")
    assert list(map(repr, cold)) == list(map(repr, warm))
    for detector in ("rmd", "knn"):
        assert of(detector, none) == of(detector, cold)


def test_every_backbone_is_among_them():
    assert set(BACKBONES) == set(choices("backbone"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*enable_nested_tensor.*")
@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_comparison_repeats_itself_with_every_backbone(backbone, rows, request):
    if backbone in ("bert", "hf"):
        request.getfixturevalue("bert")
    for package in {"timm": ["timm", "bit_r50x1", "vit_b16"], "open_clip": ["open_clip", "clip_vit_b32"]}.items():
        if backbone in package[1]:
            pytest.importorskip(package[0])
    same_rows_whatever_else(rows, f"backbone={backbone}", *BACKBONES[backbone])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("benchmark", ["cifar100_vs_cifar10", *OWN])
def test_a_comparison_repeats_itself_on_the_other_benchmarks(benchmark, rows, bert):
    if benchmark == "hf_dataset":
        pytest.importorskip("datasets")
    words = {name: [f"benchmark.path=DATA/{path}", *more] for name, (path, *more) in OWN.items()}
    images = ["benchmark.far=[]", "limit_train=200", "limit_test=100", "backbone=small_cnn"]
    same_rows_whatever_else(rows, f"benchmark={benchmark}", *words.get(benchmark, images))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_comparison_repeats_itself_on_a_benchmark_of_the_framework_with_noise(rows, tmp_path, monkeypatch):
    kit.cifar_batches(tmp_path, CIFAR10, monkeypatch, classes=10, key="labels")
    for kind in (TinyImageNetCrop, TinyImageNetResize, LSUNCrop, LSUNResize):
        kit.unpacked(tmp_path, kind, monkeypatch, size=(32, 32))
    words = [f"benchmark.data_dir={tmp_path}", "benchmark.download=true", "limit_test=10", "alpha=0.5"]
    words.append("backbone=small_cnn")
    same_rows_whatever_else(rows, "benchmark=odin_cifar10", *words)


def test_every_benchmark_is_among_them():
    used = {word.partition("=")[2] for words in BACKBONES.values() for word in words if word.startswith("benchmark=")}
    files = {name: (config_kit.CONF / "benchmark" / f"{name}.yaml").read_text() for name in choices("benchmark")}
    of_the_framework = {name for name, text in files.items() if name == "framework" or "  - framework\n" in text}
    assert "odin_cifar10" in of_the_framework  # one class serves them all
    assert used | {*OWN} | of_the_framework == set(files)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "ignore:.*does not have many workers.*", "ignore:.*fork.*")
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor.*", "ignore:.*log_every_n_steps.*")
@pytest.mark.filterwarnings("ignore::rmd_plugin.NumericalWarning")
@pytest.mark.parametrize(("backbone", "workers"), [*((name, 0) for name in TRAINED), ("mlp", 2), ("wrn40_2", 2)])
def test_a_training_repeats_itself_whatever_detectors_there_are(backbone, workers, rows, request):
    if backbone == "bert":
        request.getfixturevalue("bert")
    words = [train, f"backbone={backbone}", *BACKBONES[backbone], "trainer.max_epochs=2", "batch_size=8"]
    words += [f"num_workers={workers}", "trainer.enable_progress_bar=false", "logger=none"]
    if backbone == "genomics_bert":
        words += ["pretrain=masked_tokens", "pretrain.max_epochs=1"]
    first = rows(*words, "detector=[rmd,knn]", "detector.knn.k=3")
    again = rows(*words, "detector=[rmd,knn]", "detector.knn.k=3")
    other = rows(*words, "detector=[gmm,relative_flow,rmd]", "detector.relative_flow.max_epochs=1")
    assert list(map(repr, first)) == list(map(repr, again))
    assert of("rmd", other) == of("rmd", first)
    assert of("", other) == of("", first)
