"""Tables of features in every format: the same numbers, in constant memory, and errors with file, row and column."""

import logging
import os

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from rmd_plugin.tables import ENDINGS, Table
from rmd_plugin.untrusted import DataFormatError

N, D = 50, 3
Z = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
Y = np.arange(N) % 4
SPLITS = np.array(["train", "test"], dtype=object)[np.arange(N) % 2]


def lists(z=Z, kind=None):
    return pa.array(list(z), kind or pa.list_(pa.float32()))


def arrow_table(features=None, **more):
    return pa.table({"embedding": lists() if features is None else features, "label": Y, "split": SPLITS, **more})


def write_ipc(path, table, *, stream=False, rows=16, **options):
    open_ = pa.ipc.new_stream if stream else pa.ipc.new_file
    with open_(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)


def columns_table():
    return pa.table({**{f"f{i}": Z[:, i] for i in range(D)}, "label": Y, "split": SPLITS, "id": np.arange(N)})


def write_npy(path):
    np.save(path, Z)
    np.save(path.with_suffix(".label.npy"), Y)
    np.save(path.with_suffix(".split.npy"), SPLITS.astype("U5"))


FIXED = pa.list_(pa.float32(), D)
ARRAYS = {"embedding": Z, "label": Y, "split": SPLITS.astype("U5")}
#: name -> (writes the table, options of Table, whether its numbers can be mapped)
WRITERS = {
    "a.parquet": (lambda path: pq.write_table(arrow_table(), path, row_group_size=7), {}, False),
    "fixed.parquet": (lambda path: pq.write_table(arrow_table(lists(kind=FIXED)), path), {}, False),
    "columns.parquet": (lambda path: pq.write_table(columns_table(), path), {"features": None}, False),
    "only.parquet": (lambda path: pq.write_table(arrow_table(), path), {"features": None}, False),
    "large.arrow": (lambda path: write_ipc(path, arrow_table(lists(kind=pa.large_list(pa.float32())))), {}, True),
    "fixed.arrow": (lambda path: write_ipc(path, arrow_table(lists(kind=FIXED))), {}, True),
    "a.arrow": (lambda path: write_ipc(path, arrow_table()), {}, True),
    "stream.arrow": (lambda path: write_ipc(path, arrow_table(), stream=True), {}, True),
    "packed.arrow": (lambda path: write_ipc(path, arrow_table(), compression="zstd"), {}, False),
    "columns.arrow": (lambda path: write_ipc(path, columns_table()), {"features": None}, False),
    "a.feather": (lambda path: pyarrow.feather.write_feather(arrow_table(), path, "uncompressed"), {}, True),
    "a.npz": (lambda path: np.savez(path, **ARRAYS), {}, True),
    "double.npz": (lambda path: np.savez(path, **{**ARRAYS, "embedding": Z.astype(">f8")}), {}, True),
    "packed.npz": (lambda path: np.savez_compressed(path, **ARRAYS), {}, False),
    "only.npz": (lambda path: np.savez(path, x=Z, label=Y, split=SPLITS.astype("U5")), {"features": None}, True),
    "a.npy": (write_npy, {}, True),
    "a.safetensors": (lambda path: save_file({"label": Y, "embedding": Z}, path), {}, True),
}  # fmt: skip


@pytest.fixture(params=WRITERS)
def table(request, tmp_path):
    write, options, mapped = WRITERS[request.param]
    write(tmp_path / request.param)
    return Table(tmp_path / request.param, **options), mapped


def whole(table, rows=8192):
    batches = list(table.batches(rows))
    assert all(len(batch.features) <= rows for batch in batches)
    assert [batch.start for batch in batches] == np.cumsum([0, *(len(batch.features) for batch in batches)])[
        :-1
    ].tolist()
    splits = None if batches[0].splits is None else np.concatenate([batch.splits for batch in batches])
    return *(np.concatenate([batch[i] for batch in batches]) for i in (0, 1)), splits


@pytest.mark.parametrize("rows", [1, 6, 8192])
def test_every_format_gives_the_same_rows_in_batches_of_any_size(table, rows):
    features, labels, splits = whole(table[0], rows)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features, Z)
    np.testing.assert_array_equal(labels, Y)
    if not table[0].path.name.endswith("safetensors"):  # it has no texts
        np.testing.assert_array_equal(splits, SPLITS)


def test_plain_numbers_are_found_where_they_lie_in_the_file(table):
    table, mapped = table
    layout = table.layout()
    assert (layout is not None) == mapped
    if mapped:
        content = table.path.read_bytes()
        pieces = [
            np.frombuffer(content, layout.dtype, piece.rows * layout.width, piece.offset).reshape(-1, layout.width)
            for piece in layout.pieces
        ]
        np.testing.assert_array_equal(np.concatenate(pieces).astype(np.float32), Z)


def test_half_precision_and_whole_numbers_are_features_too(tmp_path):
    exact = np.round(4 * Z) / 4  # every type below holds these
    save_torch(
        {"embedding": torch.from_numpy(exact).bfloat16(), "label": torch.from_numpy(Y)}, tmp_path / "b.safetensors"
    )
    save_torch({"embedding": torch.from_numpy(exact).half(), "label": torch.from_numpy(Y)}, tmp_path / "h.safetensors")
    np.save(tmp_path / "f.npy", np.asfortranarray(exact))
    pq.write_table(arrow_table(lists(exact, pa.list_(pa.float64()))), tmp_path / "d.parquet")
    pq.write_table(arrow_table(lists(4 * exact, pa.list_(pa.int8()))), tmp_path / "i.parquet")
    for name, scale in {"b.safetensors": 1, "h.safetensors": 1, "f.npy": 1, "d.parquet": 1, "i.parquet": 4}.items():
        found = np.concatenate([batch.features for batch in Table(tmp_path / name).batches(7)])
        np.testing.assert_array_equal(found, scale * exact)


def test_a_folder_of_parquet_files_is_one_table_in_the_order_of_the_names(tmp_path):
    (tmp_path / "part=1").mkdir()
    for name, part in {"a": slice(0, 10), "b": slice(10, 30), "part=1/c": slice(30, 50)}.items():
        pq.write_table(arrow_table()[part], tmp_path / f"{name}.parquet")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "_metadata.parquet").write_bytes(b"of another kind")
    batches = list(Table(tmp_path).batches())
    np.testing.assert_array_equal(np.concatenate([batch.features for batch in batches]), Z)
    assert [(batch.path.name, batch.start) for batch in batches] == [(f"{x}.parquet", 0) for x in "abc"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pa.array(["b", "a"] * 25), ["b", "a"]),
        (pa.array(["b", "a"] * 25).dictionary_encode(), ["b", "a"]),
        (pa.array([3, None] * 25), [3, None]),
        (pa.array([3.0, float("nan")] * 25), [3, None]),
        (pa.array([3, 200] * 25, pa.uint8()), [3, 200]),
        (pa.array(["b", None] * 25, pa.large_string()), ["b", None]),
    ],
)
def test_labels_are_whole_numbers_or_texts_and_may_be_missing(tmp_path, labels, expected):
    pq.write_table(pa.table({"embedding": lists(), "label": labels}), tmp_path / "a.parquet")
    (batch,) = Table(tmp_path / "a.parquet").batches()
    assert batch.labels.tolist() == expected * 25
    assert batch.splits is None


def test_all_columns_of_floats_are_taken_and_named_in_the_log(tmp_path, caplog):
    pq.write_table(columns_table(), tmp_path / "a.parquet")
    with caplog.at_level(logging.INFO):
        list(Table(tmp_path / "a.parquet", None).batches())
    assert [record.getMessage() for record in caplog.records] == [
        f"Features of {tmp_path / 'a.parquet'} are the columns f0, f1, f2."
    ]


def ragged():
    return pa.array([[1.0, 2.0]] * 20 + [[1.0]] + [[1.0, 2.0]] * 29, pa.list_(pa.float32()))


def holed():
    return pa.array([[1.0, 2.0]] * 20 + [[1.0, None]] + [[1.0, 2.0]] * 29, pa.list_(pa.float32()))


def with_nan():
    z = Z.astype(np.float64)
    z[33, 2] = np.nan
    return lists(z, pa.list_(pa.float64()))


def too_large():
    z = Z.astype(np.float64)
    z[33, 2] = 1e300
    return lists(z, pa.list_(pa.float64()))


def missing():
    return pa.array([None if i == 41 else list(row) for i, row in enumerate(Z)], FIXED)


BAD = [
    (ragged(), "row 20, column 'embedding' has 1 numbers; the rows before have 2"),
    (holed(), "row 20, column 'embedding': number 1 is missing"),
    (with_nan(), "row 33, column 2 is nan; finite numbers"),
    (too_large(), r"row 33, column 2 is 1e\+300; finite numbers"),
    (missing(), "row 41, column 'embedding' is missing"),
    (pa.array([[]] * N, pa.list_(pa.float32())), "has 0 numbers"),
    (pa.array(["x"] * N), "column 'embedding' is string; lists of numbers, or floats, are expected"),
    (pa.array([["x"]] * N), r"column 'embedding' is list<.*string>"),
]


@pytest.mark.parametrize(("features", "reason"), BAD)
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_bad_rows_are_refused_with_file_row_and_column(tmp_path, features, reason, ending):
    path = tmp_path / f"a{ending}"
    table = arrow_table(features)
    pq.write_table(table, path, row_group_size=11) if ending == ".parquet" else write_ipc(path, table, rows=11)
    with pytest.raises(DataFormatError, match=reason) as caught:
        list(Table(path).batches(10))
    assert caught.value.path == path


def test_a_row_of_another_width_in_a_later_batch_or_file_is_refused(tmp_path):
    pq.write_table(arrow_table(), tmp_path / "a.parquet")
    pq.write_table(arrow_table(lists(Z[:, :2])), tmp_path / "b.parquet")
    with pytest.raises(DataFormatError, match=r"b\.parquet: row 0 has 2 features, the rows before have 3"):
        list(Table(tmp_path).batches())


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (
            arrow_table().drop_columns("label"),
            "column 'label' is not there; in the first file of the table it is int64",
        ),
        (arrow_table(lists(kind=FIXED)), "column 'embedding' is fixed_size_list"),
    ],
)
def test_files_of_a_folder_that_differ_are_refused(tmp_path, second, reason):
    pq.write_table(arrow_table(), tmp_path / "a.parquet")
    pq.write_table(second, tmp_path / "b.parquet")
    with pytest.raises(DataFormatError, match=reason) as caught:
        list(Table(tmp_path).batches())
    assert caught.value.path.name == "b.parquet"


@pytest.mark.parametrize(
    ("table", "options", "reason"),
    [
        (columns_table(), {}, r"has no column 'embedding'; it has f0 \(float\), .* features=null"),
        (
            columns_table().select(["id", "label"]),
            {"features": None},
            "no column of lists of numbers and none of floats",
        ),
        (
            arrow_table(second=lists()),
            {"features": None},
            r"several columns of lists: embedding, second\. .*features=NAME",
        ),
        (arrow_table().append_column("label", pa.array(Y)), {}, "two columns are called 'label'"),
        (columns_table(), {"features": "id"}, "column 'id' is int64; lists of numbers, or floats"),
        (arrow_table(x=Z[:, 0] + 0.5), {"labels": "x"}, r"row 0, column 'x' is .*; labels are whole numbers"),
        (arrow_table(x=[[1]] * N), {"labels": "x"}, "column 'x' is list.*; labels are whole numbers or texts"),
        (arrow_table(x=Y), {"split": "x"}, "column 'x' is int64; texts are expected"),
        (arrow_table(x=["train", None] * 25), {"split": "x"}, "row 1, column 'x' is missing"),
    ],
)
def test_columns_that_do_not_fit_are_refused_with_what_there_is(tmp_path, table, options, reason):
    write_ipc(tmp_path / "a.arrow", table)
    with pytest.raises(DataFormatError, match=reason):
        list(Table(tmp_path / "a.arrow", **options).batches())


@pytest.mark.parametrize(
    ("arrays", "options", "reason"),
    [
        ({"x": Z}, {}, r"has no array 'embedding'; it has x \(50, 3\)\. Name the features with features="),
        ({"x": Z, "y": Z}, {"features": None}, "must have one array of shape"),
        ({"embedding": Y}, {}, r"must be real numbers of shape \(N, D\), got int64 of shape \(50,\)"),
        ({"embedding": Z.astype(complex)}, {}, "real numbers of shape .* complex128"),
        (
            {"embedding": Z, "label": Y[:-1]},
            {},
            r"'label' must be whole numbers or texts of shape \(50,\), got .*\(49,\)",
        ),
        ({"embedding": Z, "label": Z[:, 0]}, {}, "'label' must be whole numbers or texts"),
        ({"embedding": Z, "split": Y}, {}, "'split' must be texts"),
        ({"embedding": Z, "label": np.full(N, 2**63, np.uint64)}, {}, "9223372036854775808, which is no class number"),
        ({"embedding": np.where(np.arange(N)[:, None] == 9, np.inf, Z)}, {}, "row 9, column 0 is inf"),
        ({"embedding": np.array([[object()]])}, {}, "holds Python objects, which would have to be unpickled"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_what_there_is(tmp_path, arrays, options, reason):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataFormatError, match=reason):
        list(Table(tmp_path / "a.npz", **options).batches())


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("1,2\n")
    with pytest.raises(DataFormatError, match=r"read from \.parquet, "):
        Table(tmp_path / "a.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataFormatError, match="a folder without Parquet files"):
        Table(tmp_path / "empty")
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(DataFormatError, match="not a regular file"):
        Table(tmp_path / "a.npy")
    for ending in ENDINGS:
        (tmp_path / f"b{ending}").write_bytes(b"garbage " * 20)
        with pytest.raises(DataFormatError, match=rf"b\{ending}"):
            list(Table(tmp_path / f"b{ending}").batches())


def test_a_small_file_of_many_rows_is_refused_before_they_are_written(tmp_path):
    pq.write_table(pa.table({"embedding": pa.array(np.zeros(20_000_000, np.float32))}), tmp_path / "a.parquet")
    assert os.path.getsize(tmp_path / "a.parquet") < 100_000
    with pytest.raises(DataFormatError, match="RMD_MAX_GIB=1"):
        list(Table(tmp_path / "a.parquet").batches())


def test_a_small_archive_that_unpacks_to_much_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", embedding=np.zeros((40_000, 512), np.float32))
    with pytest.raises(DataFormatError, match=r"unpacks to more than .*RMD_MAX_GIB=1"):
        list(Table(tmp_path / "a.npz").batches())


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".npz", "packed.npz", ".npy", ".safetensors"])
def test_a_large_table_is_streamed_in_little_memory(tmp_path, ending):
    """200 MB through a process whose own memory, without mapped files, may not grow by a fifth of that."""
    path = tmp_path / f"a{ending}"
    z = np.random.default_rng(0).normal(size=(100_000, 512)).astype(np.float32)
    if ending == ".parquet":
        pq.write_table(pa.table({"embedding": pa.FixedSizeListArray.from_arrays(z.ravel(), 512)}), path)
    elif ending == ".arrow":
        write_ipc(path, pa.table({"embedding": pa.FixedSizeListArray.from_arrays(z.ravel(), 512)}), rows=10_000)
    elif ending == ".npy":
        np.save(path, z)
    elif ending == ".safetensors":
        save_file({"embedding": z}, path)
    else:
        (np.savez_compressed if "packed" in ending else np.savez)(path, embedding=z)
    total = float(z.astype(np.float64).sum())
    del z
    from config_kit import python

    code = (
        "import sys; from rmd_plugin.tables import Table\n"
        "def private():\n"
        "    with open('/proc/self/smaps_rollup') as file:\n"
        "        return sum(int(line.split()[1]) for line in file if line.startswith('Anonymous:'))\n"
        "next(Table(sys.argv[1]).batches(100)); start = private(); most = total = 0\n"
        "for batch in Table(sys.argv[1]).batches(1000):\n"
        "    total += float(batch.features.sum(dtype='f8')); most = max(most, private() - start)\n"
        "print(total, most)"
    )
    done = python("-c", code, str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, kilobytes = map(float, done.stdout.split())
    assert found == pytest.approx(total, rel=1e-9)
    assert kilobytes < 40_000
