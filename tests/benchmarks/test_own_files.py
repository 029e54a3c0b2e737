"""The user's own pictures, texts, embeddings and features: one benchmark whatever the files, and clear refusals."""

import json
import logging
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from torchvision.datasets import ImageFolder as TorchvisionFolder

from rmd_plugin.benchmarks import DataFormatError, Embeddings, Features, ImageFolder, TextFile

RNG = np.random.default_rng(0)


def items(split):
    return [item for item, _ in split]


# -- pictures


@pytest.fixture
def photos(tmp_path):
    """Pictures of two classes with a test set, and one OOD set."""
    colours = {"train/red": "red", "train/10": "blue", "test/red": "red", "test/10": "blue", "ood/grey": "grey"}
    for folder, colour in colours.items():
        (tmp_path / folder / "deep").mkdir(parents=True)
        for number in range(6):
            name = f"deep/{number}.png" if number % 2 else f"{number}.JPG"
            Image.new("RGB", (9 + number, 7), colour).save(tmp_path / folder / name)
    (tmp_path / "train/red/notes.txt").write_text("no picture")
    (tmp_path / "train/red/.hidden.png").write_text("no picture")
    return tmp_path


def test_folders_are_read_in_the_order_of_torchvision(photos):
    benchmark = ImageFolder(photos, val_fraction=0, near=["grey"])
    assert repr(benchmark) == "ImageFolder(train=12, val=0, test=12, grey=6)"
    theirs = TorchvisionFolder(photos / "test")
    assert benchmark.class_names == theirs.classes == ["10", "red"]
    assert [path for path, _ in theirs.samples] == [
        benchmark.test_in.source.items[i] for i in benchmark.test_in.indices
    ]
    assert benchmark.distance == {"grey": "near"}
    assert pickle.loads(pickle.dumps(benchmark.test_in))[0][0].size == benchmark.test_in[0][0].size


def test_a_table_of_the_same_pictures_is_the_same_data(photos):
    folders = ImageFolder(photos)
    paths = [path.removeprefix(f"{photos}/") for path in folders.test_in.source.items]
    rows = [f"{path},{path.split('/')[1]},{path.split('/')[0]}" for path in paths]
    rows = [row.replace(",grey,ood", ",,ood:grey") for row in rows]
    (photos / "table.csv").write_text("\n".join(["path,label,split", *rows]))
    table = ImageFolder(photos / "table.csv")
    for split in ("train", "val", "test", "grey"):
        assert table.fingerprint(split) == folders.fingerprint(split)


def test_bad_pictures_are_refused_or_left_out(photos, caplog):
    damage = b"no picture"
    (photos / "train/red/0.JPG").write_bytes(damage)
    (photos / "ood/grey/2.JPG").write_bytes(damage)
    with pytest.raises(DataFormatError, match=r"2 of 30 pictures .*0\.JPG.* benchmark\.on_bad=skip"):
        ImageFolder(photos)
    with caplog.at_level(logging.WARNING):
        benchmark = ImageFolder(photos, on_bad="skip", val_fraction=0)
    assert repr(benchmark) == "ImageFolder(train=11, val=0, test=12, grey=5)"
    assert "2 of 30" in caplog.text


def test_a_class_without_a_readable_picture_is_refused_even_then(photos):
    for path in (photos / "ood/grey").rglob("*.*"):
        path.write_bytes(b"")
    with pytest.raises(DataFormatError, match="grey"):
        ImageFolder(photos, on_bad="skip")


def test_other_layouts_are_refused_with_what_was_expected(photos):
    (photos / "ood" / "empty").mkdir()
    with pytest.raises(DataFormatError, match="empty"):
        ImageFolder(photos)
    with pytest.raises(DataFormatError, match="train"):
        ImageFolder(photos / "test")
    with pytest.raises(FileNotFoundError, match=r"benchmark\.path"):
        ImageFolder("nowhere", data_dir=photos)


# -- texts


def text_rows():
    rows = [(f'é "{i}", yes', "zeta" if i % 2 else "alpha", "train") for i in range(40)]
    rows += [(f"test\u2028{i}", "zeta", "test") for i in range(4)]
    return rows + [(f"ood {i}", None, "ood:fun") for i in range(5)]


def write_texts(path, rows):
    frame = pd.DataFrame(rows, columns=["text", "label", "split"])
    if path.suffix == ".jsonl":
        lines = [json.dumps({k: v for k, v in row.items() if v is not None}) for row in frame.to_dict("records")]
        path.write_text("\n".join(lines) + "\n\n")
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def test_texts_are_the_same_benchmark_in_every_format_and_layout(tmp_path):
    benchmarks = [TextFile(write_texts(tmp_path / f"a{ending}", text_rows())) for ending in (".csv", ".tsv", ".jsonl")]
    benchmarks.append(TextFile(write_texts(tmp_path / "a.parquet", text_rows())))
    (tmp_path / "parts" / "ood").mkdir(parents=True)
    for key, file in (("train", "train.csv"), ("test", "test.jsonl"), ("ood:fun", "ood/fun.tsv")):
        write_texts(tmp_path / "parts" / file, [row for row in text_rows() if row[2] == key])
    benchmarks.append(TextFile(tmp_path / "parts"))
    assert {benchmark.fingerprint() for benchmark in benchmarks} == {benchmarks[0].fingerprint()}
    assert repr(benchmarks[0]) == "TextFile(train=36, val=4, test=4, fun=5)"
    assert benchmarks[0].class_names == ["alpha", "zeta"]
    assert items(benchmarks[0].test_in) == [f"test\u2028{i}" for i in range(4)]


def test_numbers_are_ordered_as_numbers_and_negative_ones_are_ood(tmp_path):
    rows = [{"text": f"t{i}", "label": i % 12 - 1} for i in range(120)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    benchmark = TextFile(tmp_path / "a.jsonl")
    assert benchmark.class_names == [str(number) for number in range(11)]
    assert (benchmark.ood_names, len(benchmark.test_oods[0])) == (["ood"], 10)
    assert repr(benchmark) == "TextFile(train=77, val=11, test=22, ood=10)"


def test_codes_with_leading_zeros_stay_texts(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t{i},{['007', '7'][i % 2]}\n" for i in range(20)))
    assert TextFile(tmp_path / "a.csv").class_names == ["007", "7"]


@pytest.mark.parametrize(
    ("content", "options", "word"),
    [
        ("body,label\nx,a\n", {}, "'text'"),
        ("text,label\nx,a\n ,b\n", {}, "row 2"),
        ("text,label\nx,a\ny,\n", {}, "row 2"),
        ("text,label,split\nx,a,trian\n", {}, "trian"),
        ("text,label\nx,a,b,c\n", {}, r"a\.csv"),
        ("text,label\nx,a\n", {"split": "fold"}, "'fold'"),
        ("text,label\n", {}, "no rows"),
        ("text,label,split\nx,a,train\ny,b,test\n", {}, "no class"),
        ("text,label,split\nx,a,test\n", {}, "no training data"),
        ("text,label,split\nx,1,train\ny,-1,val\nz,1,test\n", {}, "val .*-1"),
        ("text,label,split\nx,1,train\ny,-1,train\nz,1,test\n", {}, "train has labels < 0"),
        ("text,label,split\nx,a,train\nz,a,test\ny,,ood:test\n", {}, "rename"),
    ],
)
def test_wrong_tables_are_refused_with_what_is_wrong(tmp_path, content, options, word):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataFormatError, match=word):
        TextFile(tmp_path / "a.csv", **options)


def test_another_kind_of_file_is_refused_with_the_kinds_that_are_read(tmp_path):
    (tmp_path / "a.xlsx").write_text("text,label\nx,a\n")
    with pytest.raises(DataFormatError, match=r"a\.xlsx.*\.csv"):
        TextFile(tmp_path / "a.xlsx")


def test_wrong_options_are_refused(tmp_path):
    path = write_texts(tmp_path / "a.csv", text_rows())
    for options in ({"near": ["cats"]}, {"near": ["fun"], "far": ["fun"]}, {"val_fraction": 1}):
        with pytest.raises(ValueError, match=r"near|fraction"):
            TextFile(path, **options)


# -- embeddings


def embedded():
    features = RNG.normal(size=(60, 4)).astype(np.float32)
    label = [i // 3 % 3 for i in range(60)]
    return features, np.array(label), np.array((["train", "test", "val"] * 16 + ["ood:far"] * 12)[:60])


def write_embeddings(path, features, label, split):
    table = pa.table({"embedding": pa.array(list(features)), "label": label, "split": split})
    if path.suffix == ".parquet":
        pq.write_table(table, path, write_page_checksum=True)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        np.savez(path, embedding=features, label=label, split=split)
    return path


def test_embeddings_are_the_same_benchmark_in_every_format_and_layout(tmp_path):
    features, label, split = embedded()
    files = [write_embeddings(tmp_path / f"a{e}", features, label, split) for e in (".parquet", ".arrow", ".npz")]
    prints = {Embeddings(file).fingerprint() for file in files}
    (tmp_path / "table").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(60), 3)):
        write_embeddings(tmp_path / "table" / f"{number}.parquet", features[rows], label[rows], split[rows])
    prints.add(Embeddings(tmp_path / "table").fingerprint())
    for ending in (".npy", ".safetensors"):
        folder = tmp_path / ending[1:]
        (folder / "ood").mkdir(parents=True)
        for key in np.unique(split):
            rows, place = split == key, folder / key.replace(":", "/")
            if ending == ".npy":
                np.save(f"{place}.npy", features[rows])
                np.save(f"{place}.label.npy", label[rows])
            else:
                save_file({"embedding": features[rows], "label": label[rows]}, f"{place}.safetensors")
        prints.add(Embeddings(folder).fingerprint())
    wide = pd.DataFrame(features, columns=list("abcd")).assign(label=label, split=split)
    wide.to_parquet(tmp_path / "wide.parquet")
    prints.add(Embeddings(tmp_path / "wide.parquet", features=None).fingerprint())
    assert len(prints) == 1


def test_labels_with_gaps_are_whole_numbers_and_bfloat16_is_read(tmp_path):
    table = pd.DataFrame({"embedding": [[0.0, 1.0]] * 20, "label": [0.0, 1.0] * 9 + [None, None]})
    table.assign(split=["train"] * 18 + ["ood"] * 2).to_parquet(tmp_path / "a.parquet")
    assert Embeddings(tmp_path / "a.parquet").class_names == ["0", "1"]
    from safetensors.torch import save_file as save_tensors

    save_tensors({"embedding": torch.ones(20, 3).bfloat16(), "label": torch.arange(20) % 2}, tmp_path / "a.safetensors")
    assert torch.equal(Embeddings(tmp_path / "a.safetensors").fit_set()[0][0], torch.ones(3))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"features": "vector"}, "'vector'"),
        ({"value": np.nan}, "row 5, column 2"),
        ({"value": 1e300}, "row 5, column 2"),
        ({"labels": "y"}, "'y'"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(tmp_path, change, word):
    features, label, split = embedded()
    features = features.astype(np.float64)
    features[5, 2] = change.pop("value", 0.0)
    path = write_embeddings(tmp_path / "a.parquet", features, label, split)
    with pytest.raises(DataFormatError, match=word):
        Embeddings(path, **change)


def test_lists_of_different_lengths_and_missing_ones_are_refused(tmp_path):
    for lists in ([[1.0, 2.0], [1.0]], [[1.0, 2.0], None], [[1.0, 2.0], [1.0, None]]):
        pq.write_table(pa.table({"embedding": lists, "label": [0, 1]}), tmp_path / "a.parquet")
        with pytest.raises(DataFormatError, match=r"a\.parquet"):
            Embeddings(tmp_path / "a.parquet")


def test_a_damaged_file_of_a_folder_is_refused_and_not_passed_over(tmp_path):
    for name in ("a", "b"):
        path = write_embeddings(tmp_path / f"{name}.parquet", *embedded())
    Embeddings(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataFormatError, match=r"b\.parquet"):
        Embeddings(tmp_path)


def test_a_flipped_bit_of_a_page_with_a_checksum_is_refused_in_a_file_and_in_a_folder(tmp_path):
    path = write_embeddings(tmp_path / "a.parquet", *embedded())
    content = bytearray(path.read_bytes())
    whole = Embeddings(path).fingerprint()
    for place in range(200, 900, 50):
        damaged = content.copy()
        damaged[place] ^= 16
        path.write_bytes(damaged)
        for table in (path, tmp_path):
            try:
                assert Embeddings(table).fingerprint() == whole
            except DataFormatError:
                continue


# -- features of a network


def feature_arrays():
    arrays = {"train_features": RNG.normal(size=(30, 4)), "train_labels": np.arange(30) % 3}
    arrays |= {"test_features": RNG.normal(size=(9, 4)), "test_labels": np.arange(9) % 3, "near_a": np.ones((5, 4))}
    return arrays | {"val_features": RNG.normal(size=(6, 4)), "val_labels": np.arange(6) % 3, "far_b": np.zeros((2, 4))}


def test_features_are_the_same_benchmark_in_every_format(tmp_path):
    arrays = feature_arrays()
    np.savez(tmp_path / "a.npz", **arrays)
    save_file(arrays, tmp_path / "a.safetensors")
    npz, other = (Features(tmp_path / f"a.{ending}") for ending in ("npz", "safetensors"))
    assert repr(npz) == "Features(train=30, val=6, test=9, a=5, b=2)"
    assert npz.distance == {"a": "near", "b": "far"}
    assert other.fingerprint() == npz.fingerprint()
    torch.testing.assert_close(npz.fit_set()[3][0], torch.from_numpy(arrays["train_features"][3]).float())
    double = Features(tmp_path / "a.npz", dtype="float64", limit_train=6)
    assert double.fit_set()[0][0].dtype == torch.float64
    assert len(double.fit_set()) == 6


def test_one_set_is_split_by_seed_and_its_negative_labels_are_ood(tmp_path):
    x, y = RNG.normal(size=(90, 4)), np.arange(90) % 4 - 1
    np.savez(tmp_path / "a.npz", features=x, labels=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    pq.write_table(pa.table({"features": list(x), "labels": y}), tmp_path / "a.parquet")
    npz = Features(tmp_path / "a.npz", ood_distance="far")
    assert repr(npz) == "Features(train=46, val=8, test=13, ood=23)"
    assert Features(tmp_path / "x.npy", labels_path=tmp_path / "y.npy").fingerprint() == npz.fingerprint()
    assert Features(tmp_path / "a.parquet").fingerprint() == npz.fingerprint()
    assert npz.distance == {"ood": "far"}


def test_the_logits_of_a_file_follow_their_rows_and_the_head_is_a_layer(tmp_path):
    arrays = feature_arrays()
    weight, bias = RNG.normal(size=(3, 4)), RNG.normal(size=3)
    np.savez(tmp_path / "head.npz", **arrays, head_weight=weight, head_bias=bias)
    head = Features(tmp_path / "head.npz").head
    assert torch.equal(head.weight, torch.from_numpy(weight).float())
    logits = {
        f"{key.removesuffix('_features')}_logits": arrays[key] @ weight.T + bias
        for key in arrays
        if "labels" not in key
    }
    np.savez(tmp_path / "logits.npz", **arrays, **logits)
    benchmark = Features(tmp_path / "logits.npz", limit_test=4)
    for name, split in benchmark._splits().items():
        rows = torch.stack(items(split))
        torch.testing.assert_close(benchmark.logits(name), head(rows), atol=1e-5, rtol=0)
    np.savez(tmp_path / "both.npz", **arrays, **logits, head_weight=weight, head_bias=bias)
    with pytest.raises(DataFormatError, match="keep one"):
        Features(tmp_path / "both.npz")
    # as many rows in all, but a row of the training samples among those of the test samples
    train, test = logits["train_logits"], logits["test_logits"]
    logits |= {"train_logits": train[:-1], "test_logits": np.concatenate([train[-1:], test])}
    np.savez(tmp_path / "shifted.npz", **arrays, **logits)
    with pytest.raises(DataFormatError, match="rows"):
        Features(tmp_path / "shifted.npz")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ood_x": np.ones((5, 4))}, "'ood_x' would be ignored; known are .*near_NAME"),
        ({"near_x_logits": np.ones((5, 3))}, "'near_x_logits' would be ignored"),
        ({"labels": np.zeros(30)}, "'labels' would be ignored"),
        ({"val_features": None}, "'val_labels' would be ignored"),
        ({"test_labels": None}, "'test_labels'"),
        ({"near_a": np.ones((5, 3))}, "dimension"),
        ({"near_a": np.full((5, 4), np.inf)}, "finite"),
        ({"train_labels": np.zeros(29)}, "length"),
        ({"test_labels": np.zeros(1)}, "length"),
        ({"train_labels": np.arange(30) % 3 - 1}, "train"),
        ({"train_labels": np.arange(30) % 3 * 2}, "no class"),
        ({"head_weight": np.ones((2, 4)), "head_bias": np.ones(3)}, "dimension"),
        ({"head_bias": np.ones(3)}, "'head_weight'"),
        ({"train_logits": np.ones((30, 3))}, "_logits'"),
    ],
)
def test_wrong_arrays_are_refused_with_what_was_expected(tmp_path, change, word):
    arrays = {name: array for name, array in (feature_arrays() | change).items() if array is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataFormatError, match=word):
        Features(tmp_path / "a.npz")


def test_logits_of_splits_are_refused_beside_one_set_that_is_split_by_seed(tmp_path):
    x, y = RNG.normal(size=(90, 4)), np.arange(90) % 3
    np.savez(tmp_path / "a.npz", features=x, labels=y, test_logits=x[:, :3])
    with pytest.raises(DataFormatError, match=r"'test_logits' would be ignored; known are .*features, .*logits"):
        Features(tmp_path / "a.npz")


def test_pickled_objects_are_refused_and_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    np.savez(tmp_path / "a.npz", features=np.array([Evil()], dtype=object), labels=np.zeros(1))
    np.save(tmp_path / "a.npy", np.array([Evil()], dtype=object))
    for read, name in ((Features, "a.npz"), (Embeddings, "a.npy")):
        with pytest.raises(DataFormatError, match="cannot be read"):
            read(tmp_path / name)
    assert not (tmp_path / "ran").exists()


# -- before torch


def test_paths_and_columns_are_checked_without_torch(tmp_path):
    (tmp_path / "a.csv").write_text("body,label\nx,a\n")
    np.savez(tmp_path / "a.npz", train_features=np.ones((2, 2)), ood_x=np.ones((2, 2)))
    (tmp_path / "img" / "train").mkdir(parents=True)
    pq.write_table(pa.table({"vector": [[1.0]], "label": [0]}), tmp_path / "a.parquet")
    code = f"""
import sys
from rmd_plugin.benchmarks import check_data
for kind, path in dict(TextFile="a.csv", Features="a.npz", ImageFolder="img", Embeddings="a.parquet").items():
    try:
        check_data(dict(_target_="rmd_plugin.benchmarks." + kind, path={str(tmp_path)!r} + "/" + path,
                        features="embedding", labels="label", split="split"))
    except ValueError as error:
        print(error)
assert "torch" not in sys.modules
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for word, line in zip(("'text'", "ood_x", "folders", "'embedding'"), output.splitlines(), strict=True):
        assert word in line
