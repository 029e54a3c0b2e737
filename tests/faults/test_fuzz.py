"""Every file that we read, damaged and made up: refused in our own words, in bounded time and memory, or read.

By hand, for as long as you like: ``RMD_FUZZ=2000 pytest -n 0 tests/faults/test_fuzz.py`` tries so many examples of each
(default 15; CI runs the default). ``RMD_FUZZ=2000 pytest tests/faults/test_fuzz.py -k npz`` for one kind.

A target is a function that writes a good file and one that reads it. Only OSError and ValueError (our own errors are
of these kinds) may come out, with a message that names the file.
"""

import gzip
import json
import os
import resource
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from rmd_plugin import RMD, ClassMoments, Moments, load_detector
from rmd_plugin.backbones.checkpoint import read_state_dict
from rmd_plugin.benchmarks import Embeddings, HFDataset, ImageFolder, TextFile
from rmd_plugin.benchmarks.clinc import read_clinc
from rmd_plugin.benchmarks.genomics import read_table_reads, read_tfrecord_reads
from rmd_plugin.benchmarks.readers.arrays import read_npy, read_pt
from rmd_plugin.benchmarks.readers.downloads import unzip
from rmd_plugin.benchmarks.readers.fasta import read_fasta
from rmd_plugin.benchmarks.readers.genomes import read_classes
from rmd_plugin.benchmarks.readers.tfrecord import example_class
from rmd_plugin.benchmarks.sources import ImageFiles
from rmd_plugin.compare.cache import FeatureCache
from rmd_plugin.compare.rows import Row, read_rows, write_rows
from rmd_plugin.npz import read_npz
from rmd_plugin.pictures import read_picture
from rmd_plugin.report.gather import gather_runs
from rmd_plugin.report.page import render_report
from rmd_plugin.report.run_folder import RunFolder
from rmd_plugin.untrusted import read_mapping

EXAMPLES = int(os.environ.get("RMD_FUZZ", "15"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 15,  # CI tries the same files every time
    database=None,
    phases=[Phase.generate],  # a damaged file is small enough to read, and shrinking takes longer than the search
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
PEAK_MIB = 128
HISTORY = {"stage": "fit", "epoch": 0, "step": 1, "detector": "rmd", "ood": "n", "metric": "AUROC"}


class Target(NamedTuple):
    write: Callable[[Path], object]
    read: Callable[[Path], object]


def add_run(place: Path) -> RunFolder:
    folder = RunFolder(place)
    with folder.running(config={"seed": 0, "lr": 0.1, "a": {"b": [1, "x"]}}, about={"benchmark": "d"}, command="x"):
        folder.write_rows([Row("d", "n", "m", name, 0, "AUROC", 0.9, low=0.8, high=1.0) for name in ("rmd", "knn")])
    folder.write_history([{**HISTORY, "value": 0.5}])
    values = np.random.default_rng(0).normal(size=(3, 4))
    folder.write_scores({"rmd": {"test": values[0], "n": values[1]}})
    folder.write_directions({"rmd": {"test": values, "n": values + 1}})
    return folder


def in_run(name: str, read: Callable[[RunFolder], object]) -> Target:
    """A file of a run folder: it stands beside the others."""

    def write(path: Path) -> None:
        path.write_bytes(add_run(path.parent / "made").file(name).read_bytes())

    def read_in_place(path: Path) -> object:
        folder = add_run(path.parent / "run")
        os.replace(path, folder.file(name))
        os.symlink(folder.file(name), path)
        gather_runs([folder.path])  # whatever the file is, the report stands
        return read(folder)

    return Target(write, read_in_place)


def write_tfrecord(path: Path) -> None:
    import google_crc32c

    example = example_class()()
    for key, name, value in (("x", "bytes_list", " ".join("0123" * 62 + "01").encode()), ("y", "int64_list", 3)):
        entry = example.features.feature.add(key=key)
        getattr(entry.value, name).value.append(value)
    data = example.SerializeToString()

    def masked(piece: bytes) -> bytes:
        crc = google_crc32c.value(piece)
        return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")

    length = len(data).to_bytes(8, "little")
    path.write_bytes((length + masked(length) + data + masked(data)) * 2)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/b.txt", "text " * 50)


def write_image(path: Path) -> None:
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(path)


def write_safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3, 2), "b": torch.arange(4)}, path)


def embedded() -> pa.Table:
    lists = pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32()))
    return pa.table({"embedding": lists, "label": ["a", "b"] * 2, "split": ["train", "ood"] * 2})


def write_arrow(path: Path) -> None:
    with pa.ipc.new_file(path, embedded().schema) as writer:
        writer.write_table(embedded(), max_chunksize=2)


def write_arrow_stream(path: Path) -> None:
    with pa.ipc.new_stream(path, embedded().schema) as writer:
        writer.write_table(embedded())


def write_embedding(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"embedding": np.ones((4, 2), np.float32), "label": np.arange(4) % 2}, path)


def read_table(path: Path) -> None:
    """Through the whole benchmark: found, checked, mapped, and each row used."""
    for split in (benchmark := Embeddings(path, test_fraction=0.5)).test_in, benchmark.fit_set():
        assert all(torch.isfinite(item).all() for item, _ in split)


def read_texts(path: Path) -> None:
    assert all(isinstance(text, str) for text, _ in TextFile(path, test_fraction=0.5).fit_set())


def read_picture_table(path: Path) -> None:
    """A table of one picture over and over; what is read lies in its folder."""
    write_image(path.parent / "a.png")
    benchmark = ImageFolder(path, test_fraction=0.5)
    assert {os.path.dirname(file) for file in benchmark.fit_set().source.items} <= {str(path.parent)}


def saved_dataset(path: Path) -> Path:
    """The file of a data set of Hugging Face, in a folder beside the path."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = path.with_name(f"{path.name}.saved")
    content = {"text": [f"é {i}" for i in range(4)], "label": [i % 2 for i in range(4)]}
    datasets.Dataset.from_dict(content).save_to_disk(str(folder))
    (file,) = folder.glob("*.arrow")
    return file


def read_saved_dataset(path: Path) -> None:
    file = saved_dataset(path)
    file.write_bytes(path.read_bytes())
    assert all(isinstance(text, str) for text, _ in HFDataset(file.parent, test_fraction=0.5).fit_set())


def fitted() -> RMD:
    z = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return RMD().fit_features(z, torch.arange(60) % 2)


def moments() -> Moments:
    metric = ClassMoments()
    metric.update(torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2)
    return metric.compute()


def cached(path: Path) -> FeatureCache:
    return FeatureCache(path.parent / "cache")


def fetch(path: Path) -> Path:
    batch = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4)
    return cached(path).fetch("ab12", lambda: [batch], 4).folder


def in_cache(name: str) -> Target:
    """A file of a cached entry: what is damaged is computed again, so nothing but the right features comes back."""

    def write(path: Path) -> None:
        path.write_bytes((fetch(path) / name).read_bytes())

    def read(path: Path) -> None:
        (fetch(path) / name).write_bytes(path.read_bytes())
        found = cached(path).fetch("ab12", lambda: [(np.zeros((4, 3), np.float32), np.arange(4))], 4)
        assert found.features.shape == (4, 3)
        assert found.labels.shape == (4,)

    return Target(write, read)


CLINC = {split: [["é query", "oos" if split.startswith("oos") else "intent"]] for split in
         ("train", "val", "test", "oos_train", "oos_val", "oos_test")}  # fmt: skip
CHECKPOINT = {"state_dict": {"model.a": torch.ones(3, 2)}, "epoch": 3, "hyper_parameters": {"lr": 0.1}}

TARGETS = {
    "npz": Target(lambda path: np.savez_compressed(path, x=np.arange(9.0), y=np.arange(3)), read_npz),
    "npy": Target(lambda path: np.save(path, np.arange(9.0).reshape(3, 3)), read_npy),
    "pt": Target(lambda path: torch.save({"x": torch.arange(9.0)}, path), read_pt),
    "fasta": Target(lambda path: path.write_bytes(b">a one\nACGT\nNNAC\n>b\nGGG\n"), read_fasta),
    "fasta.gz": Target(
        lambda path: path.write_bytes(gzip.compress(b">a one\nACGT\nNNAC\n>b\nGGG\n", mtime=0)), read_fasta
    ),
    "tfrecord": Target(write_tfrecord, read_tfrecord_reads),
    "reads.txt": Target(
        lambda path: path.write_text(f"seq\tlabel\tseq_info\tdomain\n{'ACGTN' * 50}\tEscherichia\tx\ty\n"),
        lambda path: read_table_reads(path, {"Escherichia": 0}),
    ),
    "classes.tsv": Target(
        lambda path: path.write_text("file\tgenus\trole\tkingdom\na.fna\tA\tid\tx\nb.fna\tB\tood\ty\n"), read_classes
    ),
    "clinc.json": Target(lambda path: path.write_text(json.dumps(CLINC)), read_clinc),
    "zip": Target(write_zip, lambda path: unzip(path, path.parent / "into")),
    "png": Target(write_image, lambda path: ImageFiles([path], 8)[0]),
    "jpg": Target(write_image, read_picture),
    "tif": Target(write_image, read_picture),
    "webp": Target(write_image, read_picture),
    "table.parquet": Target(lambda path: pq.write_table(embedded(), path), read_table),
    "table.arrow": Target(write_arrow, read_table),
    "stream.arrow": Target(write_arrow_stream, read_table),
    "table.npz": Target(lambda path: np.savez(path, embedding=np.ones((4, 2)), label=np.arange(4) % 2), read_table),
    "packed.npz": Target(
        lambda path: np.savez_compressed(path, embedding=np.ones((4, 2)), label=np.arange(4) % 2), read_table
    ),
    "table.safetensors": Target(write_embedding, read_table),
    "texts.csv": Target(lambda path: path.write_text('text,label\na,x\nb,x\n"c, d",y\ne,y\n'), read_texts),
    "texts.jsonl": Target(
        lambda path: path.write_text("".join(json.dumps({"text": f"é {i}", "label": i % 2}) + "\n" for i in range(4))),
        read_texts,
    ),
    "pictures.csv": Target(
        lambda path: path.write_text("path,label\na.png,x\n./a.png,x\na.png,y\na.png,y\n"), read_picture_table
    ),
    "hf.arrow": Target(lambda path: path.write_bytes(saved_dataset(path).read_bytes()), read_saved_dataset),
    "ckpt": Target(lambda path: torch.save(CHECKPOINT, path), read_state_dict),
    "old.ckpt": Target(
        lambda path: torch.save(CHECKPOINT, path, _use_new_zipfile_serialization=False), read_state_dict
    ),
    "safetensors": Target(write_safetensors, read_state_dict),
    "detector": Target(lambda path: fitted().save(path), load_detector),
    "RMD": Target(lambda path: fitted().save(path), RMD.load),
    "moments": Target(lambda path: moments().save(path), Moments.load),
    "config.yaml": in_run("config.yaml", RunFolder.read_config),
    "status.json": in_run("status.json", RunFolder.read_status),
    "versions.json": in_run("versions.json", RunFolder.read_versions),
    "rows.csv": in_run("rows.csv", RunFolder.read_rows),
    "history.csv": in_run("history.csv", RunFolder.read_history),
    "scores.npz": in_run("scores.npz", RunFolder.read_scores),
    "directions.npz": in_run("directions.npz", RunFolder.read_directions),
    "features.npy": in_cache("features.npy"),
    "labels.npy": in_cache("labels.npy"),
    "entry.json": in_cache("entry.json"),
}


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """The good file cut, with bytes changed, put in or taken out, doubled; or no part of it at all."""
    content = bytearray(good)
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["flip", "set", "insert", "delete", "cut", "repeat", "number"]))
        if kind == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            content[at : at + 1] = draw(st.binary(min_size=1, max_size=4))
        elif kind == "insert":
            content[at:at] = draw(st.sampled_from(INSERTED) | st.binary(max_size=20))
        elif kind == "delete":
            del content[at : at + draw(st.integers(1, 50))]
        elif kind == "cut":
            del content[at:]
        elif kind == "repeat":
            content[at:at] = content[at : at + 64] * draw(st.integers(1, 50))
        elif kind == "number":
            content[at : at + 8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    return bytes(content)


INSERTED = [b"-", b"9" * 50, b"1e999", b"nan", b"null", b"[", b"[" * 3000, b"{}", b'"', b"&a [*a]", b"*a", b"!!int x",
            b"0x" + b"f" * 5000, b"\x00",
            b"\xff\xfe", b"\n", b"\r", b"\x1b[2J", "\u202e\u2028".encode(), b"=1+1", b"'"]  # fmt: skip


@pytest.fixture(scope="module")
def limited():
    """No more addresses than 8 GiB above what is taken now: what asks for more fails here instead of swapping."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_read_or_refused_by_name(name, tmp_path_factory, limited):
    target = TARGETS[name]
    made = tmp_path_factory.mktemp("good") / f"file.{name}"
    target.write(made)
    good = made.read_bytes()
    assert try_to_read(target, good, tmp_path_factory, name) is None, "the undamaged file must be read"

    @FUZZ
    @given(content=damaged(good))
    def attack(content: bytes) -> None:
        try_to_read(target, content, tmp_path_factory, name)

    attack()


def checked_message(error: Exception, *names: str) -> str:
    text = str(error)
    assert any(name in text for name in names), f"{type(error).__name__} does not name the file: {text}"
    assert len(text) < 5000
    return text


def try_to_read(target: Target, content: bytes, factory: pytest.TempPathFactory, name: str) -> str | None:
    path = factory.mktemp("fuzz") / f"file.{name}"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch, about old formats
            target.read(path)
    except (OSError, ValueError) as error:
        return checked_message(error, path.name, name)
    finally:
        peak = tracemalloc.get_traced_memory()[1] / (1 << 20)
        tracemalloc.stop()
        assert peak < PEAK_MIB, f"{peak:.0f} MiB for a file of {len(content)} bytes"
    return None


def test_the_page_of_a_damaged_run_is_drawn(tmp_path, limited):
    folder = add_run(tmp_path / "run")
    names = ["rows.csv", "history.csv", "scores.npz", "directions.npz", "status.json", "versions.json", "config.yaml"]
    good = {name: folder.file(name).read_bytes() for name in names}

    @settings(FUZZ, max_examples=max(3, EXAMPLES // 5))
    @given(data=st.data())
    def attack(data: st.DataObject) -> None:
        for name in names:
            folder.file(name).write_bytes(data.draw(damaged(good[name])))
        assert render_report(folder).startswith("<!DOCTYPE html>")

    attack()


@FUZZ
@given(
    text=st.text(max_size=300)
    | st.lists(st.sampled_from(INSERTED), max_size=8).map(lambda x: b" ".join(x).decode("latin-1"))
)
@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_any_text_is_a_mapping_or_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        assert isinstance(read_mapping(tmp_path / name), dict)
    except ValueError as error:
        checked_message(error, name)


@FUZZ
@given(names=st.lists(st.text(max_size=20), min_size=6, max_size=6))
def test_rows_of_any_names_read_back(names, tmp_path):
    benchmark, ood, backbone, detector, metric, reason = names
    row = Row(benchmark, ood, backbone, detector, 0, metric, 0.5, low=0.1, high=0.9, reason=reason)
    write_rows([row], tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == [row]
