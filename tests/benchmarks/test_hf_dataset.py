"""Data sets of Hugging Face, saved by the test: pictures, texts and features; splits and classes as OOD sets."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from rmd_plugin.benchmarks import DataFormatError, HFDataset

datasets = pytest.importorskip("datasets")
COLOURS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


def save(path, features=None, **splits):
    made = {name: datasets.Dataset.from_dict(columns, features=features) for name, columns in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(path))
    return path


def texts(count, word):
    return {"text": [f"{word} {i}" for i in range(count)], "label": [i % 3 for i in range(count)]}


def classes(*names):
    return datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))})


def encoded(colour, seed=0):
    noise = np.random.default_rng(seed).integers(-20, 20, (10, 8, 3))
    stream = io.BytesIO()
    Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def pictures(count):
    values = [encoded(list(COLOURS.values())[i % 3], i) for i in range(count)]
    return {
        "image": [{"bytes": value, "path": None} for value in values],
        "label": [[*COLOURS][i % 3] for i in range(count)],
    }


PICTURES = {"image": datasets.Image(), "label": datasets.Value("string")}


def items(split):
    return [item for item, _ in split]


def test_texts_keep_the_order_of_named_classes(tmp_path):
    splits = {"train": texts(30, "a"), "validation": texts(6, "b"), "test": texts(9, "c")}
    path = save(tmp_path / "a", classes("zebra", "ant", "bee"), **splits)
    benchmark = HFDataset(path)
    assert repr(benchmark) == "HFDataset(train=30, val=6, test=9)"
    assert benchmark.class_names == ["zebra", "ant", "bee"]
    assert items(benchmark.test_in) == [f"c {i}" for i in range(9)]
    assert benchmark.test_in.labels.tolist() == [0, 1, 2] * 3
    split = pickle.loads(pickle.dumps(benchmark.fit_set()))
    assert items(split) == items(benchmark.fit_set())


def test_splits_and_classes_can_be_ood_sets(tmp_path):
    path = save(
        tmp_path / "a", classes("zebra", "ant", "bee"), train=texts(30, "a"), test=texts(9, "c"), odd=texts(5, "d")
    )
    benchmark = HFDataset(path, ood=["odd", "ant"], near=["ant"])
    assert repr(benchmark) == "HFDataset(train=18, val=2, test=6, ant=3, odd=5)"
    assert (benchmark.class_names, benchmark.distance) == (["zebra", "bee"], {"ant": "near", "odd": ""})
    assert items(benchmark.test_oods[0]) == ["c 1", "c 4", "c 7"]
    assert items(benchmark.test_oods[1]) == [f"d {i}" for i in range(5)]
    assert not {f"a {i}" for i in range(1, 30, 3)} & set(items(benchmark.fit_set()) + items(benchmark.val_set()))
    with pytest.raises(DataFormatError, match="cow"):
        HFDataset(path, ood=["cow"])


def test_one_data_set_without_splits_is_split_by_seed(tmp_path):
    datasets.Dataset.from_dict(texts(60, "a")).save_to_disk(str(tmp_path / "a"))
    benchmark = HFDataset(tmp_path / "a")
    assert repr(benchmark) == "HFDataset(train=42, val=6, test=12)"
    assert benchmark.class_names == ["0", "1", "2"]
    assert len(HFDataset(tmp_path / "a", ood=["2"]).test_oods[0]) == 20


def test_feature_lists_become_tensors(tmp_path):
    z = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    path = save(tmp_path / "a", train={"vector": z.tolist(), "label": [i % 2 for i in range(30)]})
    benchmark = HFDataset(path, val_fraction=0, test_fraction=0.5)
    features = np.stack([x.numpy() for split in (benchmark.fit_set(), benchmark.test_in) for x in items(split)])
    assert sorted(map(tuple, features)) == sorted(map(tuple, z))
    z[7, 2] = np.nan
    path = save(tmp_path / "b", train={"vector": z.tolist(), "label": [0] * 30})
    with pytest.raises(DataFormatError, match="row 7, column 2"):
        HFDataset(path)
    path = save(tmp_path / "c", train={"vector": [[1.0, 2.0], [1.0]], "label": [0, 1]})
    with pytest.raises(DataFormatError, match="vector"):
        HFDataset(path)


def test_pictures_are_decoded_by_our_rules(tmp_path):
    grey = io.BytesIO()
    Image.new("L", (5, 4), 77).save(grey, "PNG")
    content = pictures(30)
    content["image"][0]["bytes"] = grey.getvalue()
    benchmark = HFDataset(save(tmp_path / "a", datasets.Features(PICTURES), train=content), val_fraction=0, seed=1)
    assert benchmark.class_names == ["blue", "green", "red"]
    everything = items(benchmark.fit_set()) + items(benchmark.test_in)
    assert {image.mode for image in everything} == {"RGB"}
    assert [image.getpixel((0, 0)) for image in everything if image.size == (5, 4)] == [(77, 77, 77)]


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        ({"text": ["a", "b"], "label": [0, 1], "more": ["c", "d"]}, {}, "text, more"),
        ({"x": [1, 2], "label": [0, 1]}, {}, r"it has x \(Value\)"),
        ({"text": ["a", "b"], "label": [0, 1]}, {"input": "label"}, "'label'"),
        ({"text": ["a", "b"], "label": [0, 1]}, {"test": "probe"}, "'probe'"),
        ({"text": ["a", "b"], "y": [0, 1]}, {}, "'label'"),
        ({"text": ["a", None], "label": [0, 1]}, {}, "row 2"),
        ({"text": ["a", "b"], "label": [0, None]}, {}, "row 2"),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit_are_refused_with_what_there_is(tmp_path, columns, options, reason):
    with pytest.raises(DataFormatError, match=reason):
        HFDataset(save(tmp_path / "a", train=columns), **options)


def test_a_test_split_whose_labels_are_kept_secret_is_refused_unless_it_is_left_out(tmp_path):
    secret = {"text": ["x", "y"], "label": [-1, -1]}
    path = save(tmp_path / "a", classes("a", "b", "c"), train=texts(30, "a"), test=secret)
    with pytest.raises(DataFormatError, match="needs labels"):
        HFDataset(path)
    assert repr(HFDataset(path, test=None)) == "HFDataset(train=21, val=3, test=6)"


def test_a_name_is_loaded_without_its_code(monkeypatch, tmp_path):
    asked = {}

    def load(name, config, **options):
        asked.update(options, name=name, config=config)
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict(texts(30, "a"))})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    assert HFDataset("somebody/something", config="small").num_classes == 3
    assert (asked["name"], asked["config"]) == ("somebody/something", "small")
    assert asked.get("trust_remote_code", False) is False
