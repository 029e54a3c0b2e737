"""Tables in many files give what the same rows in memory give, and a bad file is named."""

import errno
import os
import resource

import fsspec
import numpy as np
import oracle
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from pytorch_ood.api import RequiresFittingException
from pytorch_ood.detector import RMD as FrameworkRMD
from table_kit import flip, to_table, truncate, write_parts

from rmd_plugin import RMD, Calibrated, FusedRMD, Mahalanobis, RelativeFlow, fit_table, score_table, table_state


def close(first, second):
    return torch.allclose(first, second, rtol=1e-10, atol=1e-10)


def read(path, column="score"):
    return pq.read_table(path)[column].to_numpy()


@pytest.fixture
def detector(blobs):
    z, y, _ = blobs
    return RMD().fit_features(z.float(), y)


def test_a_table_in_three_files_gives_the_scores_of_the_textbook(tmp_path, blobs):
    z, y, x = blobs
    write_parts(tmp_path, z, y, cuts=(10, 200))
    scores = fit_table(RMD(), tmp_path, workers=1).predict_features(x)
    np.testing.assert_allclose(scores.numpy(), oracle.rmd(z, y, x), rtol=1e-8)


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
    write_parts(tmp_path / "table", z, y, cuts=(20, 100, 150, 151))
    fitted = [fit_table(FusedRMD(), tmp_path / "table", workers=workers) for workers in (1, 2)]
    assert torch.equal(*(detector.predict_features(x) for detector in fitted))
    one, two = (score_table(fitted[0], tmp_path / "table", tmp_path / str(count), workers=count) for count in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert pq.read_table(first).equals(pq.read_table(second))


def test_lists_of_any_kind_and_every_format_are_read(tmp_path, blobs):
    z, y, x = blobs
    columns = [f"z{number}" for number in range(12)]
    pq.write_table(to_table(z, y, pa.large_list(pa.float64())), tmp_path / "lists.parquet")
    pyarrow.feather.write_feather(to_table(z, y, pa.list_(pa.float64(), 12)), tmp_path / "lists.feather")
    with pa.ipc.new_file(tmp_path / "lists.arrow", (table := to_table(z, y)).schema) as writer:
        writer.write_table(table, max_chunksize=70)
    wide = pa.table(dict(zip(columns, z.T.numpy(), strict=True)) | {"label": y.numpy()})
    pyarrow.csv.write_csv(wide, tmp_path / "wide.csv")
    expected = RMD().fit_features(z, y).predict_features(x)
    for path in tmp_path.glob("lists.*"):
        assert close(fit_table(RMD(), path, workers=1).predict_features(x), expected)
    assert close(fit_table(RMD(), tmp_path / "wide.csv", columns, workers=1).predict_features(x), expected)
    whole = torch.arange(48).view(12, 4) % 7
    pq.write_table(to_table(whole, y[:12], pa.list_(pa.int16())), tmp_path / "integers.parquet")
    assert table_state(RMD(), f"{tmp_path}/integers.parquet").means.sum() > 0


def test_folders_files_and_globs_name_a_table_and_a_file_counts_once(tmp_path, blobs):
    z, y, x = blobs
    paths = write_parts(tmp_path, z, y, cuts=(100, 200))
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "a.parquet").write_bytes(b"of another program")
    expected = RMD().fit_features(z, y).predict_features(x)
    for table in (tmp_path, f"{tmp_path}/?.parquet", [*paths, tmp_path]):
        assert close(fit_table(RMD(), table, workers=1).predict_features(x), expected)


def test_rows_below_zero_and_files_without_other_rows_do_not_count(tmp_path, blobs):
    z, y, x = blobs
    both, labels = torch.cat([z, 1e3 * torch.ones(50, 12)]), torch.cat([y, torch.full((50,), -1)])
    write_parts(tmp_path, both, labels, cuts=(100, 300, 340))
    pq.write_table(to_table(z[:0], y[:0], pa.list_(pa.float64())), tmp_path / "0.parquet")
    expected = RMD().fit_features(z, y).predict_features(x)
    assert close(fit_table(RMD(), tmp_path, workers=1).predict_features(x), expected)


def test_a_fit_takes_the_calibration_of_another_one_away(tmp_path, blobs):
    z, y, _ = blobs
    write_parts(tmp_path, z, y)
    detector = Calibrated(RMD()).fit_features(z, y).calibrate_features(z)
    assert fit_table(detector, tmp_path, workers=1) is detector
    assert detector.calibration is None
    assert detector.detector.fitted


class Bucket(MemoryFileSystem):
    """A store of its own."""

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
    detector = fit_table(RMD(), "bucket://table", workers=1)
    assert close(detector.predict_features(x), RMD().fit_features(z, y).predict_features(x))
    paths = score_table(detector, "bucket://table/*.parquet", "bucket://scores", workers=1)
    assert sorted(Bucket.store) == ["/scores/a.parquet", "/scores/b.parquet", "/table/a.parquet", "/table/b.parquet"]
    with fsspec.open(paths[0]) as file:
        assert pq.read_table(file).num_rows == 100


def test_states_of_files_add_up_to_the_fit(tmp_path, blobs):
    z, y, x = blobs
    first, second = (table_state(RMD(), path) for path in write_parts(tmp_path, z, y, cuts=(77,)))
    expected = RMD().fit_features(z, y).predict_features(x)
    assert close(RMD().fit_moments(first + second).predict_features(x), expected)


# -- scores -----------------------------------------------------------------------------------------------------------


def test_each_file_gets_a_file_of_the_scores_of_its_rows_in_order(tmp_path, blobs, detector):
    x = blobs[2].float()
    write_parts(tmp_path / "new", x, cuts=(3, 50), row_group_size=7)
    (tmp_path / "new" / "deeper").mkdir()
    (tmp_path / "new" / "c.parquet").rename(tmp_path / "new" / "deeper" / "c.parquet")
    paths = score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    assert paths == [str(tmp_path / "out" / name) for name in ("a.parquet", "b.parquet", "deeper/c.parquet")]
    scores = np.concatenate([read(path) for path in paths])
    np.testing.assert_allclose(scores, detector.predict_features(x).numpy(), rtol=1e-6)
    assert len([path for path in (tmp_path / "out").rglob("*") if path.is_file()]) == 3


@pytest.mark.parametrize("per_class", [False, True])
def test_a_calibrated_detector_gives_p_values_and_decisions(tmp_path, blobs, per_class):
    z, y, x = (part.float() if part.is_floating_point() else part for part in blobs)
    detector = Calibrated(RMD(), alpha=0.1, per_class=per_class).fit_features(z, y).calibrate_features(z, y)
    write_parts(tmp_path / "new", x)
    (path,) = score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    np.testing.assert_allclose(read(path, "p_value"), detector.p_value_features(x).numpy(), rtol=1e-6)
    assert read(path, "is_ood").tolist() == detector.is_ood_features(x).tolist()
    assert 0 < read(path, "is_ood").mean() < 1


def test_a_row_with_nan_scores_nan_and_no_other_does(tmp_path, blobs, detector):
    x = blobs[2].float()
    x[5, 2] = torch.nan
    write_parts(tmp_path / "new", x)
    (path,) = score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    assert np.flatnonzero(np.isnan(read(path))).tolist() == [5]


def test_finished_files_are_not_scored_again_but_changed_and_damaged_ones_are(tmp_path, blobs, detector):
    x = blobs[2].float()
    new = write_parts(tmp_path / "new", x, cuts=(10, 50))

    def run(detector=detector):
        return [
            os.stat(path).st_mtime_ns for path in score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
        ]

    before = run()
    whole = (tmp_path / "out" / "c.parquet").read_bytes()
    assert run() == before
    pq.write_table(to_table(x[:10] + 1), new[0])
    flip(tmp_path / "out" / "c.parquet", at=150)  # in a page
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(tmp_path / "out" / "c.parquet", page_checksum_verification=True)
    after = run()
    assert [first == second for first, second in zip(before, after, strict=True)] == [False, True, False]
    assert (tmp_path / "out" / "c.parquet").read_bytes() == whole
    assert not set(run(RMD(shrinkage=0.5).fit_features(blobs[0].float(), blobs[1]))) & set(after)


def test_a_table_is_never_written_over(tmp_path, blobs, detector):
    (path,) = write_parts(tmp_path / "new", blobs[2].float())
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"a\.parquet"):
        score_table(detector, tmp_path / "new", tmp_path / "new", workers=1, on_bad="skip")
    assert path.read_bytes() == before
    (scores,) = score_table(detector, path, tmp_path / "out", workers=1)
    truncate(tmp_path / "out" / os.path.basename(scores))
    with pytest.raises(FileExistsError, match="damaged"):
        score_table(detector, path, tmp_path / "out", workers=1)


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_none(tmp_path, blobs, detector):
    write_parts(tmp_path / "new", torch.randn(2000, 12))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"a\.parquet") as caught:
            score_table(detector, tmp_path / "new", tmp_path / "out", workers=1, on_bad="skip")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path / "out") == []


# -- files that are wrong ---------------------------------------------------------------------------------------------


def broken_file(path, z):
    truncate(path)


def broken_page(path, z):
    flip(path, at=2000)


def broken_row(path, z):
    z = z[100:200].clone()
    z[99, 3] = torch.nan
    pq.write_table(to_table(z, torch.arange(100) % 5), path, row_group_size=30)


@pytest.mark.parametrize("spoil", [broken_file, broken_page, broken_row])
def test_a_bad_file_is_named_and_refused_or_skipped_as_a_whole(tmp_path, blobs, caplog, spoil):
    z, y, x = blobs
    paths = write_parts(tmp_path / "table", z, y, cuts=(100, 200), write_page_checksum=True, compression="none")
    spoil(paths[1], z)
    with pytest.raises(ValueError, match=r"b\.parquet"):
        fit_table(RMD(), tmp_path / "table", workers=1)
    detector = fit_table(RMD(), tmp_path / "table", workers=1, on_bad="skip")
    assert "skipped" in caplog.text
    good = torch.cat([torch.arange(100), torch.arange(200, 300)])
    assert close(detector.predict_features(x), RMD().fit_features(z[good], y[good]).predict_features(x))
    if spoil is not broken_row:
        with pytest.raises(ValueError, match=r"b\.parquet"):
            score_table(detector, tmp_path / "table", tmp_path / "out", workers=1)
        paths = score_table(detector, tmp_path / "table", tmp_path / "out", workers=1, on_bad="skip")
        assert [os.path.basename(path) for path in paths] == ["a.parquet", "c.parquet"]
        assert sorted(os.listdir(tmp_path / "out")) == ["a.parquet", "c.parquet"]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"embedding": [[1.0], None], "label": [0, 1]}, "row 1 of column 'embedding'"),
        ({"embedding": [[1.0, 2.0], [3.0, None]], "label": [0, 1]}, "numbers"),
        ({"embedding": [[1.0], [2.0]], "label": [0, None]}, "row 1 of column 'label'"),
        ({"embedding": [[1.0, 2.0], [3.0]], "label": [0, 1]}, "row 1 .* 2 numbers"),
        ({"embedding": [[1.0], [2.0]], "label": ["a", "b"]}, "integers"),
        ({"embedding": [1.0, 2.0], "label": [0, 1]}, "lists"),
        ({"vector": [[1.0]], "label": [0]}, "features="),
    ],
)
def test_a_wrong_table_is_refused_with_its_file_and_column(tmp_path, table, reason):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"a\.parquet: .*{reason}"):
        fit_table(RMD(), tmp_path, workers=1)


def test_files_of_another_width_are_refused_with_their_name(tmp_path, blobs, detector):
    z, y, _ = blobs
    write_parts(tmp_path, z, y)
    write_parts(tmp_path, z[:, :11], y, names="b")
    with pytest.raises(ValueError, match=r"b\.parquet: .*11"):
        fit_table(RMD(), tmp_path, workers=1)
    with pytest.raises(ValueError, match=r"b\.parquet: .*12"):
        score_table(detector, tmp_path / "b.parquet", tmp_path / "out", workers=1)


def test_what_cannot_be_is_refused(tmp_path, blobs, detector):
    z, y, _ = blobs
    (path,) = write_parts(tmp_path / "table", z, -1 - y)
    with pytest.raises(ValueError, match="label >= 0"):
        fit_table(RMD(), path, workers=1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fit_table(RMD(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="spark"):
        fit_table(RMD(), path, engine="spark")
    with pytest.raises(ValueError, match="moments"):
        fit_table(RelativeFlow(), path)
    with pytest.raises(RequiresFittingException, match="fitted"):
        score_table(RMD(), path, tmp_path / "out")
    with pytest.raises(RequiresFittingException, match="calibrated"):
        score_table(Calibrated(detector), path, tmp_path / "out")
    with pytest.raises(ValueError, match="no detector of rmd_plugin"):
        score_table(FrameworkRMD(None).fit_features(z.float(), y), path, tmp_path / "out")


# -- a run that goes on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RMD, FusedRMD])
def test_a_run_goes_on_from_the_states_of_finished_files(tmp_path, blobs, kind, caplog):
    z, y, x = blobs
    paths = write_parts(tmp_path / "table", z, y, cuts=(100, 200))
    whole = paths[2].read_bytes()
    truncate(paths[2])
    fit_table(kind(), tmp_path / "table", workers=1, state_dir=tmp_path / "states", on_bad="skip")
    paths[2].write_bytes(whole)
    finished = sorted((tmp_path / "states").iterdir())
    before = [path.stat().st_mtime_ns for path in finished]
    assert len(finished) == 2
    expected = kind().fit_features(z, y).predict_features(x)
    detector = fit_table(kind(), tmp_path / "table", workers=1, state_dir=tmp_path / "states")
    assert close(detector.predict_features(x), expected)
    assert [path.stat().st_mtime_ns for path in finished] == before
    truncate(finished[0])
    detector = fit_table(kind(), tmp_path / "table", workers=1, state_dir=tmp_path / "states")
    assert "computed again" in caplog.text
    assert close(detector.predict_features(x), expected)


def test_states_of_other_files_or_options_are_not_used(tmp_path, blobs):
    z, y, x = blobs
    states = tmp_path / "states"
    write_parts(tmp_path / "table", z, y, cuts=(100,))
    fit_table(RMD(), tmp_path / "table", workers=1, state_dir=states)
    detector = fit_table(RMD(normalize=True), tmp_path / "table", workers=1, state_dir=states)
    assert close(detector.predict_features(x), RMD(normalize=True).fit_features(z, y).predict_features(x))
    write_parts(tmp_path / "table", 2 * z + 1, y, cuts=(100,))
    detector = fit_table(RMD(), tmp_path / "table", workers=1, state_dir=states)
    assert close(detector.predict_features(x), RMD().fit_features(2 * z + 1, y).predict_features(x))
