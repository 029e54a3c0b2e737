"""Own embeddings: every format is the same benchmark, mapped, and as good as benchmark=features."""

import functools
import gc
import glob
import multiprocessing
import os
import pickle
import tempfile
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file
from torch.utils.data import DataLoader

from rmd_plugin.benchmarks import DataFormatError, DataNotFoundError, Embeddings, Features, embeddings

D = 4
NAMES = np.array(["cat", "dog", "eel"], dtype=object)


def blobs(count, seed, shift=0.0):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    centres = 5 * np.eye(3, D)
    return (rng.normal(size=(count, D)) + centres[labels] + shift).astype(np.float32), labels


Z, Y = blobs(36, 2)
PARTS = {"train": blobs(90, 0), "val": blobs(30, 1), "test": (Z, Y), "ood:far": blobs(24, 3, 20.0)}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files of its own; at the end none is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    # of this module alone: the sockets of worker processes need short paths
    here = functools.partial(tempfile.NamedTemporaryFile, dir=folder)
    monkeypatch.setattr(embeddings, "tempfile", types.SimpleNamespace(NamedTemporaryFile=here))
    yield folder
    if any(folder.iterdir()):
        gc.collect()
    assert list(folder.iterdir()) == []


def as_table(z, y, **more):
    return pa.table({"embedding": pa.array(list(z), pa.list_(pa.float32())), "label": y, **more})


def write_part(path, z, y):
    if path.suffix == ".parquet":
        pq.write_table(as_table(z, y), path, row_group_size=10)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, as_table(z, y).schema) as writer:
            writer.write_table(as_table(z, y), max_chunksize=10)
    elif path.suffix == ".npz":
        np.savez(path, embedding=z, label=y)
    elif path.suffix == ".safetensors":
        save_file({"embedding": z, "label": y}, path)
    else:
        np.save(path, z)
        np.save(path.with_suffix(".label.npy"), y)


def write_folder(folder, ending, parts=PARTS):
    (folder / "ood").mkdir(parents=True)
    for key, (z, y) in parts.items():
        write_part(folder / f"{key.replace('ood:', 'ood/')}{ending}", z, y)
    return folder


def whole(splits=True, parts=PARTS):
    """All parts in one table, shuffled, with a column that says where each row belongs."""
    z, y = (np.concatenate([part[i] for part in parts.values()]) for i in (0, 1))
    words = np.repeat([*parts], [len(part[1]) for part in parts.values()]).astype(object)
    return as_table(z, y, **({"split": words} if splits else {}))


def rows(split):
    return torch.stack([x for x, _ in split]).numpy()


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".npz", ".npy", ".safetensors"])
def test_a_folder_of_files_has_the_fingerprint_of_the_same_features(tmp_path, ending):
    benchmark = Embeddings(write_folder(tmp_path / "all", ending), far=["far"])
    assert repr(benchmark) == "Embeddings(train=90, val=30, test=36, far=24)"
    assert (benchmark.class_names, benchmark.feature_dim, benchmark.distance) == (["0", "1", "2"], D, {"far": "far"})
    arrays = {f"{key}_features": z for key, (z, _) in PARTS.items() if key != "ood:far"}
    arrays |= {f"{key}_labels": y for key, (_, y) in PARTS.items() if key != "ood:far"}
    np.savez(tmp_path / "a.npz", **arrays, far_far=PARTS["ood:far"][0])
    features = Features(tmp_path / "a.npz")
    for split in ("train", "val", "test", "far"):
        assert benchmark.fingerprint(split) == features.fingerprint(split)
    np.testing.assert_array_equal(rows(benchmark.fit_set()), PARTS["train"][0])
    np.testing.assert_array_equal(rows(benchmark.test_oods[0]), PARTS["ood:far"][0])
    assert benchmark.fit_set()[0][0].dtype == torch.float32


def test_a_column_says_the_split_of_each_row(tmp_path):
    pq.write_table(whole(), tmp_path / "a.parquet")
    separate = Embeddings(write_folder(tmp_path / "all", ".npy"))
    assert Embeddings(tmp_path / "a.parquet").fingerprint() == separate.fingerprint()
    pq.write_table(whole().rename_columns(["x", "y", "part"]), tmp_path / "b.parquet")
    other = Embeddings(tmp_path / "b.parquet", features="x", labels="y", split="part")
    assert other.fingerprint() == separate.fingerprint()
    with pytest.raises(DataFormatError, match="has no column or array 'fold' for the splits"):
        Embeddings(tmp_path / "a.parquet", split="fold")


def test_a_folder_of_parquet_files_is_one_table(tmp_path):
    (tmp_path / "parts").mkdir()
    for number in range(3):
        pq.write_table(whole()[60 * number : 60 * number + 60], tmp_path / "parts" / f"{number}.parquet")
    pq.write_table(whole(), tmp_path / "a.parquet")
    assert Embeddings(tmp_path / "parts").fingerprint() == Embeddings(tmp_path / "a.parquet").fingerprint()
    (tmp_path / "each" / "train").mkdir(parents=True)
    pq.write_table(whole(parts={"train": PARTS["train"]}), tmp_path / "each" / "train" / "0.parquet")
    assert len(Embeddings(tmp_path / "each", test_fraction=0.5).test_in) == 45


def test_without_splits_rows_are_held_out_by_seed_and_negative_labels_are_ood(tmp_path):
    z, y = PARTS["train"]
    np.savez(tmp_path / "a.npz", embedding=z, label=np.where(np.arange(90) < 9, -1, y))
    benchmark = Embeddings(tmp_path / "a.npz")
    assert repr(benchmark) == "Embeddings(train=57, val=9, test=15, ood=9)"
    np.testing.assert_array_equal(rows(benchmark.test_oods[0]), z[:9])
    assert benchmark.fingerprint() != Embeddings(tmp_path / "a.npz", seed=1).fingerprint()


def test_texts_are_classes_in_the_order_of_the_alphabet_and_ood_rows_need_no_label(tmp_path):
    parts = {key: (z, None if key == "ood:far" else NAMES[y]) for key, (z, y) in PARTS.items()}
    labels = np.concatenate([np.full(len(z), None) if y is None else y for z, y in parts.values()])
    pq.write_table(whole().set_column(1, "label", pa.array(labels)), tmp_path / "a.parquet")
    benchmark = Embeddings(tmp_path / "a.parquet")
    assert benchmark.class_names == ["cat", "dog", "eel"]
    assert benchmark.fit_set().labels.tolist() == PARTS["train"][1].tolist()


def test_many_columns_of_floats_are_the_features(tmp_path):
    z, y = PARTS["train"]
    pq.write_table(pa.table({**{f"f{i}": z[:, i] for i in range(D)}, "label": y}), tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", embedding=z, label=y)
    wide = Embeddings(tmp_path / "a.parquet", features=None)
    assert wide.fingerprint() == Embeddings(tmp_path / "a.npz").fingerprint()


@pytest.mark.parametrize("ending", [".parquet", ".npy", ".arrow"])
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_get_paths_and_not_the_rows(tmp_path, ending, start, temporary):
    parts = {"train": (np.random.default_rng(0).normal(size=(3000, D)).astype(np.float32), np.arange(3000) % 2)}
    benchmark = Embeddings(write_folder(tmp_path / "all", ending, parts), val_fraction=0)
    split = benchmark.fit_set()
    split[0]  # the files are mapped from here on
    assert len(pickle.dumps(split.source)) < 30_000 < split.source.items.width * 4 * len(split.source)
    context = multiprocessing.get_context(start)
    loader = DataLoader(split, 500, num_workers=1, multiprocessing_context=context, generator=torch.Generator())
    np.testing.assert_array_equal(torch.cat([x for x, _ in loader]).numpy(), rows(split))
    assert bool(list(temporary.iterdir())) == (ending == ".parquet")  # the workers left it


@pytest.mark.slow
def test_a_decoded_table_is_removed_with_the_benchmark_and_when_decoding_fails(tmp_path, temporary):
    pq.write_table(whole(), tmp_path / "a.parquet")
    benchmark = Embeddings(tmp_path / "a.parquet")
    (file,) = glob.glob(f"{temporary}/rmd-embeddings-*.f32")
    assert os.path.getsize(file) == 180 * D * 4
    split = benchmark.fit_set()
    del benchmark
    gc.collect()
    assert rows(split).shape == (90, D)  # it lives as long as somebody uses it
    z, y = PARTS["train"]
    z = z.copy()
    z[50, 1] = np.nan
    pq.write_table(as_table(z, y), tmp_path / "b.parquet")
    with pytest.raises(DataFormatError, match=r"b\.parquet: row 50, column 1 is nan"):
        Embeddings(tmp_path / "b.parquet")
    assert len(list(temporary.iterdir())) == 1


@pytest.mark.parametrize(
    ("write", "options", "reason"),
    [
        (lambda f: np.save(f / "train.npy", PARTS["train"][0]), {}, r"train\.npy: has no labels: there is no 'label'"),
        (lambda f: write_part(f / "test.npy", *PARTS["test"]), {}, "has no training data; it has test"),
        (lambda f: write_part(f / "test.npz", Z, Y + 1), {}, "1 classes .* not in train: '3'"),
        (lambda f: write_part(f / "test.npz", Z[:, :2], Y), {}, "test.npz: has 2 features, the other tables have 4"),
        (lambda f: [write_part(f / f"{key}.npz", Z, Y - 1) for key in ("val", "test")], {}, "val has labels < 0"),
        (lambda f: write_part(f / "train.npy", *PARTS["train"]), {}, "two files for train: train.npy and train.npz"),
        (lambda f: None, {"far": ["x"]}, "x is none of them. There are: none"),
        (lambda f: None, {"limit_train": 1}, "cannot cover"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_refused_with_the_file(tmp_path, write, options, reason):
    folder = tmp_path / "all"
    folder.mkdir()
    if "train.npy: has no" not in reason.replace("\\", "") and "no training" not in reason:
        write_part(folder / "train.npz", *PARTS["train"])
    write(folder)
    with pytest.raises(ValueError, match=reason):
        Embeddings(folder, **options)


def test_rows_without_a_label_or_with_a_strange_split_are_refused(tmp_path):
    z, y = PARTS["train"]
    pq.write_table(as_table(z, pa.array([None if i == 7 else int(v) for i, v in enumerate(y)])), tmp_path / "a.parquet")
    with pytest.raises(DataFormatError, match="row 7 of train has no label; only OOD rows can do without"):
        Embeddings(tmp_path / "a.parquet")
    pq.write_table(as_table(z, y, split=["train"] * 89 + ["dev"]), tmp_path / "b.parquet")
    with pytest.raises(DataFormatError, match="row 89: the split is 'dev'"):
        Embeddings(tmp_path / "b.parquet")
    np.savez(tmp_path / "c.npz", embedding=z[:0], label=y[:0])
    pq.write_table(as_table(z, y)[:0], tmp_path / "c.parquet")
    for name in ("c.npz", "c.parquet"):
        with pytest.raises(DataFormatError, match="has no rows"):
            Embeddings(tmp_path / name)
    with pytest.raises(DataNotFoundError, match=r"no file or folder of embeddings: looked for .*Pass path=FILE"):
        Embeddings(tmp_path / "nowhere.parquet")
