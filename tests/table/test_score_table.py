import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pytorch_ood.api import RequiresFittingException
from pytorch_ood.detector import RMD as FrameworkRMD
from table_kit import to_table, truncate, write_parts

from rmd_plugin import RMD, Calibrated, FusedRMD, score_table
from rmd_plugin.untrusted import DataFormatError


def read(path, column="score"):
    return pq.read_table(path)[column].to_numpy()


@pytest.fixture
def detector(blobs):
    z, y, _ = blobs
    return RMD().fit_features(z.float(), y)


@pytest.mark.parametrize("kind", [RMD, FusedRMD])
def test_each_file_gets_a_file_of_the_scores_of_its_rows_in_order(tmp_path, blobs, kind):
    z, y, x = (part.float() if part.is_floating_point() else part for part in blobs)
    detector = kind().fit_features(z, y)
    write_parts(tmp_path / "new", x, cuts=(3, 50), row_group_size=7)
    (tmp_path / "new" / "deeper").mkdir()
    (tmp_path / "new" / "c.parquet").rename(tmp_path / "new" / "deeper" / "c.parquet")
    found = score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    assert found == [str(tmp_path / "out" / name) for name in ("a.parquet", "b.parquet", "deeper/c.parquet")]
    scores = np.concatenate([read(path) for path in found])
    np.testing.assert_allclose(scores, detector.predict_features(x).numpy(), rtol=1e-6)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_two_processes_write_bytewise_what_one_does(tmp_path, blobs, detector):
    write_parts(tmp_path / "new", blobs[2].float(), cuts=(3, 50))
    one, two = (score_table(detector, tmp_path / "new", tmp_path / str(count), workers=count) for count in (1, 2))
    for first, second in zip(one, two, strict=True):
        assert pq.read_table(first).equals(pq.read_table(second))


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


def test_scores_are_written_to_a_memory_filesystem(tmp_path, blobs, detector):
    x = blobs[2].float()
    (path,) = write_parts(tmp_path, x)
    memory = fsspec.filesystem("memory")
    try:
        memory.pipe("/score_table/new/a.parquet", path.read_bytes())
        (found,) = score_table(detector, "memory://score_table/new", "memory://score_table/out", workers=1)
        assert found == "memory://score_table/out/a.parquet"
        with memory.open(found) as stream:
            np.testing.assert_allclose(read(stream), detector.predict_features(x).numpy(), rtol=1e-6)
    finally:
        memory.rm("/score_table", recursive=True)


def test_arrow_files_and_files_of_several_folders_keep_their_names(tmp_path, blobs, detector):
    x = blobs[2].float()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        table = to_table(x)
        with pa.ipc.new_file(tmp_path / name / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    found = score_table(detector, [tmp_path / "one", tmp_path / "two" / "a.arrow"], tmp_path / "out", workers=1)
    assert found == [str(tmp_path / "out" / name / "a.arrow.parquet") for name in ("one", "two")]


# -- a run that goes on -----------------------------------------------------------------------------------------------


def test_finished_files_are_not_scored_again_and_changed_ones_are(tmp_path, blobs, detector):
    z, y, x = blobs
    paths = write_parts(tmp_path / "new", x.float(), cuts=(10, 50))
    found = score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    before = [(tmp_path / "out" / path.name).stat().st_mtime_ns for path in paths]
    (tmp_path / "out" / "c.parquet").unlink()
    pq.write_table(to_table(3 * x[10:50].float()), paths[1])
    assert score_table(detector, tmp_path / "new", tmp_path / "out", workers=1) == found
    after = [(tmp_path / "out" / path.name).stat().st_mtime_ns for path in paths]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]
    np.testing.assert_allclose(read(found[1]), detector.predict_features(3 * x[10:50].float()).numpy(), rtol=1e-6)
    other = RMD(shrinkage=0.5).fit_features(z, y)
    score_table(other, tmp_path / "new", tmp_path / "out", workers=1)
    np.testing.assert_allclose(read(found[0]), other.predict_features(x[:10].float()).numpy(), rtol=1e-6)


def test_a_table_is_never_written_over(tmp_path, blobs, detector):
    (path,) = write_parts(tmp_path / "new", blobs[2].float())
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"a\.parquet is there and was not written by score_table"):
        score_table(detector, tmp_path / "new", tmp_path / "new", workers=1)
    assert path.read_bytes() == before


def test_a_truncated_file_is_named_and_refused_or_skipped(tmp_path, blobs, detector, caplog):
    paths = write_parts(tmp_path / "new", blobs[2].float(), cuts=(10, 50))
    truncate(paths[1])
    with pytest.raises(DataFormatError, match=r"b\.parquet: cannot be read"):
        score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    found = score_table(detector, tmp_path / "new", tmp_path / "out", workers=1, on_bad="skip")
    assert [path[-9:] for path in found] == ["a.parquet", "c.parquet"]
    assert "b.parquet" in caplog.text


def test_a_file_with_broken_pages_leaves_no_scores(tmp_path, blobs, detector, caplog):
    paths = write_parts(tmp_path / "new", blobs[2].float(), cuts=(10,), row_group_size=20, compression="zstd")
    content = paths[1].read_bytes()
    middle = len(content) // 4
    paths[1].write_bytes(content[:middle] + bytes(middle) + content[2 * middle :])
    with pytest.raises(DataFormatError, match=r"b\.parquet: cannot be read"):
        score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.parquet"]
    assert len(score_table(detector, tmp_path / "new", tmp_path / "out", workers=1, on_bad="skip")) == 1
    assert "b.parquet" in caplog.text


def test_what_cannot_score_a_table_is_refused(tmp_path, blobs, detector):
    z, y, x = blobs
    write_parts(tmp_path / "new", x[:, :11])
    with pytest.raises(DataFormatError, match="column 'embedding' has 11 numbers a row, 12 are expected"):
        score_table(detector, tmp_path / "new", tmp_path / "out", workers=1)
    with pytest.raises(RequiresFittingException, match="not fitted"):
        score_table(RMD(), tmp_path / "new", tmp_path / "out")
    with pytest.raises(RequiresFittingException, match="not calibrated"):
        score_table(Calibrated(detector), tmp_path / "new", tmp_path / "out")
    with pytest.raises(ValueError, match="no detector of rmd_plugin"):
        score_table(FrameworkRMD(None).fit_features(z.float(), y), tmp_path / "new", tmp_path / "out")
