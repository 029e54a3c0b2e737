import os

import fsspec
import numpy as np
import oracle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from table_kit import to_table, truncate, write_parts

from rmd_plugin import RMD, Calibrated, FusedRMD, Mahalanobis, RelativeFlow, fit_table, score_table, table_state
from rmd_plugin.untrusted import DataFormatError


def close(first, second):
    return torch.allclose(first, second, rtol=1e-10, atol=1e-10)


def test_a_table_in_three_files_gives_the_scores_of_the_textbook(tmp_path, blobs):
    z, y, x = blobs
    write_parts(tmp_path, z, y, cuts=(10, 200))
    found = fit_table(RMD(), tmp_path, workers=1).predict_features(x)
    np.testing.assert_allclose(found.numpy(), oracle.rmd(z, y, x), rtol=1e-8)


@pytest.mark.parametrize("kind", [RMD, FusedRMD, lambda: Mahalanobis(normalize=True)])
def test_neither_order_nor_sizes_nor_row_groups_of_the_files_change_the_numbers(tmp_path, blobs, kind):
    z, y, x = blobs
    expected = kind().fit_features(z, y).predict_features(x)
    write_parts(tmp_path / "few", z, y, cuts=(1, 150))
    write_parts(tmp_path / "many", z, y, cuts=(7, 8, 90, 200, 299), names="fbdace", row_group_size=5)
    for folder in ("few", "many"):
        assert close(fit_table(kind(), tmp_path / folder, workers=1).predict_features(x), expected)


@pytest.mark.slow
def test_two_processes_give_bitwise_what_one_does(tmp_path, blobs):
    z, y, x = blobs
    write_parts(tmp_path, z, y, cuts=(20, 100, 150, 151))
    for kind in (RMD, FusedRMD):
        one, two = (fit_table(kind(), tmp_path, workers=workers).predict_features(x) for workers in (1, 2))
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.float64()), pa.large_list(pa.float64()), pa.list_(pa.float64(), 12), pa.list_(pa.float32())],
    ids=str,
)
@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
def test_lists_of_any_kind_are_read_from_parquet_and_arrow(tmp_path, blobs, kind, ending):
    z, y, x = blobs
    for name, rows in (("a", slice(0, 100)), ("b", slice(100, None))):
        table = to_table(z[rows], y[rows], kind)
        if ending == ".parquet":
            pq.write_table(table, tmp_path / f"{name}.parquet")
        else:
            with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=30)
    expected = RMD().fit_features(z.to(getattr(torch, {"float": "float32"}.get(str(kind.value_type), "float64"))), y)
    assert close(fit_table(RMD(), tmp_path, workers=1).predict_features(x), expected.predict_features(x))


def test_rows_below_zero_and_files_without_other_rows_do_not_count(tmp_path, blobs):
    z, y, x = blobs
    both, labels = torch.cat([z, 1e3 * torch.ones(50, 12)]), torch.cat([y, torch.full((50,), -1)])
    write_parts(tmp_path, both, labels, cuts=(100, 300, 340))
    pq.write_table(to_table(z[:0], y[:0], pa.list_(pa.float64())), tmp_path / "empty.parquet")
    expected = RMD().fit_features(z, y).predict_features(x)
    assert close(fit_table(RMD(), tmp_path, workers=1).predict_features(x), expected)


def test_a_fit_takes_the_calibration_of_another_one_away(tmp_path, blobs):
    z, y, _ = blobs
    write_parts(tmp_path, z, y)
    detector = Calibrated(RMD()).fit_features(z, y).calibrate_features(z)
    assert fit_table(detector, tmp_path, workers=1) is detector
    assert detector.calibration is None
    assert detector.detector.fitted


def test_a_memory_filesystem_is_read_through_fsspec(tmp_path, blobs):
    z, y, x = blobs
    paths = write_parts(tmp_path, z, y, cuts=(100,))
    memory = fsspec.filesystem("memory")
    try:
        for path in paths:
            memory.pipe(f"/fit_table/{path.name}", path.read_bytes())
        found = fit_table(RMD(), "memory://fit_table", workers=1, state_dir="memory://fit_states")
        assert len(memory.ls("/fit_states")) == 2
    finally:
        for folder in ("/fit_table", "/fit_states"):
            if memory.exists(folder):
                memory.rm(folder, recursive=True)
    assert close(found.predict_features(x), RMD().fit_features(z, y).predict_features(x))


class Bucket(MemoryFileSystem):
    """A store of its own under a scheme that pyarrow does not know."""

    protocol = "bucket"
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bucket:/"))


def test_any_store_that_fsspec_knows_is_read_and_written_by_its_scheme(tmp_path, blobs):
    z, y, x = blobs
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    for path in write_parts(tmp_path, z, y, cuts=(100,)):
        Bucket().pipe(f"/table/{path.name}", path.read_bytes())
    found = fit_table(RMD(), "bucket://table", workers=1)
    assert close(found.predict_features(x), RMD().fit_features(z, y).predict_features(x))
    assert score_table(found, "bucket://table", "bucket://scores", workers=1)
    assert sorted(Bucket.store) == ["/scores/a.parquet", "/scores/b.parquet", "/table/a.parquet", "/table/b.parquet"]


def test_integers_and_arrow_streams_are_read_too(tmp_path):
    z, y = torch.randint(0, 100, (90, 4)), torch.arange(90) % 3
    table = to_table(z, y, pa.list_(pa.int16()))
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    x = torch.randn(20, 4, dtype=torch.float64)
    found = fit_table(RMD(), tmp_path, workers=1).predict_features(x)
    assert close(found, RMD().fit_features(z.double(), y).predict_features(x))


def test_states_of_files_add_up_to_the_fit(tmp_path, blobs):
    z, y, x = blobs
    first, second = (table_state(RMD(), path) for path in write_parts(tmp_path, z, y, cuts=(77,)))
    expected = RMD().fit_features(z, y).predict_features(x)
    assert close(RMD().fit_moments(first + second).predict_features(x), expected)


# -- files that are wrong ---------------------------------------------------------------------------------------------


def test_a_truncated_file_is_named_and_refused_or_skipped(tmp_path, blobs, caplog):
    z, y, x = blobs
    paths = write_parts(tmp_path, z, y, cuts=(100, 200))
    truncate(paths[1])
    with pytest.raises(DataFormatError, match=r"b\.parquet: cannot be read"):
        fit_table(RMD(), tmp_path, workers=1)
    found = fit_table(RMD(), tmp_path, workers=1, on_bad="skip")
    assert "b.parquet" in caplog.text
    keep = torch.cat([torch.arange(100), torch.arange(200, 300)])
    assert close(found.predict_features(x), RMD().fit_features(z[keep], y[keep]).predict_features(x))


def test_no_row_of_a_file_counts_whose_last_rows_are_bad(tmp_path, blobs, caplog):
    z, y, x = blobs
    broken = z.clone()
    broken[299, 3] = torch.nan
    write_parts(tmp_path, broken, y, cuts=(100,), row_group_size=50)
    with pytest.raises(DataFormatError, match=r"b\.parquet: rows 0 to 199: .*1 NaN"):
        fit_table(RMD(), tmp_path, workers=1)
    found = fit_table(RMD(), tmp_path, workers=1, on_bad="skip")
    assert "b.parquet" in caplog.text
    assert close(found.predict_features(x), RMD().fit_features(z[:100], y[:100]).predict_features(x))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda z, y: to_table(z.float(), y), "column 'embedding' is list<.*: float>, but list<.*: double>"),
        (lambda z, y: to_table(z, y.int()), "column 'label' is int32, but int64"),
        (lambda z, y: to_table(z[:, :11], y), "column 'embedding' has 11 numbers a row, 12 are expected"),
        (lambda z, y: to_table(z), r"has no column 'label'; it has embedding \(list.*Name it by labels="),
    ],
)
def test_columns_that_differ_are_refused_before_the_work_starts(tmp_path, blobs, other, message):
    z, y, _ = blobs
    write_parts(tmp_path / "table", z, y, cuts=(100,))
    pq.write_table(other(z, y), tmp_path / "table" / "z.parquet")
    with pytest.raises(DataFormatError, match=rf"z\.parquet: {message}"):
        fit_table(RMD(), tmp_path / "table", workers=1, on_bad="skip", state_dir=str(tmp_path / "states"))
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"embedding": [[1.0], None], "label": [0, 1]}, "row 1, column 'embedding' is missing"),
        ({"embedding": [[1.0, 2.0], [3.0, None]], "label": [0, 1]}, "row 1, column 'embedding': number 1 is missing"),
        ({"embedding": [[1.0], [2.0]], "label": [0, None]}, "row 1, column 'label' is missing. Mark rows .* by -1"),
        ({"embedding": [[1.0, 2.0], [3.0]], "label": [0, 1]}, "has 1.5 numbers a row, 1 are expected"),
        ({"embedding": [[1.0, 2.0], [3.0], [1.0, 2.0, 3.0]], "label": [0, 1, 0]}, "row 1, .* has 1 numbers; .* have 2"),
        ({"embedding": [[1.0], [2.0]], "label": ["a", "b"]}, "labels are integers"),
        ({"embedding": [1.0, 2.0], "label": [0, 1]}, "is double; lists of numbers are expected"),
        ({"vector": [[1.0]], "label": [0]}, r"has no column 'embedding'; it has vector .*features="),
    ],
)
def test_a_wrong_table_is_refused_with_file_row_and_column(tmp_path, table, message):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataFormatError, match=rf"a\.parquet: .*{message}"):
        fit_table(RMD(), tmp_path, workers=1)


def test_a_table_without_labelled_rows_says_so(tmp_path, blobs):
    z, y, _ = blobs
    write_parts(tmp_path, z, -1 - y)
    with pytest.raises(ValueError, match="no row of the 1 files has a label >= 0 in column 'label'"):
        fit_table(RMD(), tmp_path, workers=1)


def test_paths_and_options_that_cannot_be_are_refused(tmp_path, blobs):
    z, y, _ = blobs
    (path,) = write_parts(tmp_path / "table", z, y)
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere"):
        fit_table(RMD(), tmp_path / "nowhere")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no \.parquet or .* file in"):
        fit_table(RMD(), tmp_path / "nothing")
    with pytest.raises(ValueError, match="is given twice"):
        fit_table(RMD(), [path, path])
    with pytest.raises(ValueError, match="engine must be 'local' or 'ray', got 'spark'"):
        fit_table(RMD(), path, engine="spark")
    with pytest.raises(ValueError, match="on_bad must be 'raise' or 'skip', got 'ignore'"):
        fit_table(RMD(), path, on_bad="ignore")
    with pytest.raises(ValueError, match="workers must be at least 1"):
        fit_table(RMD(), path, workers=0)
    with pytest.raises(ValueError, match=r"RelativeFlow is not fitted on moments.*Take RMD"):
        fit_table(RelativeFlow(), path)


# -- a run that goes on -----------------------------------------------------------------------------------------------


def keep_time(path, content):
    """Replace the content of a file, unseen by its size and time."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("kind", [RMD, FusedRMD])
def test_a_run_goes_on_from_the_states_of_finished_files(tmp_path, blobs, kind):
    z, y, x = blobs
    states = str(tmp_path / "states")
    paths = write_parts(tmp_path / "table", z, y, cuts=(100, 200))
    whole = paths[2].read_bytes()
    truncate(paths[2])
    fit_table(kind(), tmp_path / "table", workers=1, state_dir=states, on_bad="skip")
    paths[2].write_bytes(whole)
    first = paths[0].read_bytes()
    # the footer stays: only who reads the rows again would stumble
    keep_time(paths[0], first[:4] + bytes(len(first) // 2) + first[4 + len(first) // 2 :])
    found = fit_table(kind(), tmp_path / "table", workers=1, state_dir=states)
    assert close(found.predict_features(x), kind().fit_features(z, y).predict_features(x))
    with pytest.raises(DataFormatError, match=r"a\.parquet"):
        fit_table(kind(), tmp_path / "table", workers=1)


def test_states_of_other_files_or_options_are_not_used(tmp_path, blobs):
    z, y, x = blobs
    states = str(tmp_path / "states")
    write_parts(tmp_path / "table", z, y, cuts=(100,))
    fit_table(RMD(), tmp_path / "table", workers=1, state_dir=states)
    found = fit_table(RMD(normalize=True), tmp_path / "table", workers=1, state_dir=states)
    assert close(found.predict_features(x), RMD(normalize=True).fit_features(z, y).predict_features(x))
    write_parts(tmp_path / "table", 2 * z + 1, y, cuts=(100,))
    found = fit_table(RMD(), tmp_path / "table", workers=1, state_dir=states)
    assert close(found.predict_features(x), RMD().fit_features(2 * z + 1, y).predict_features(x))


def test_a_damaged_state_is_made_again(tmp_path, blobs):
    z, y, x = blobs
    states = tmp_path / "states"
    write_parts(tmp_path / "table", z, y, cuts=(100,))
    expected = fit_table(RMD(), tmp_path / "table", workers=1, state_dir=str(states)).predict_features(x)
    damaged = next(states.iterdir())
    truncate(damaged)
    found = fit_table(RMD(), tmp_path / "table", workers=1, state_dir=str(states))
    assert torch.equal(found.predict_features(x), expected)
    assert len(list(states.iterdir())) == 2
