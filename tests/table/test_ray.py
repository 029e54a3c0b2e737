import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from table_kit import truncate, write_parts

from rmd_plugin import RMD, FusedRMD, fit_table, score_table
from rmd_plugin.untrusted import DataFormatError

ray = pytest.importorskip("ray", reason="ray is not installed (extra ray)")
# of Ray's own modules
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]


@pytest.fixture(scope="module", autouse=True)
def two_workers():
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    patch.undo()


@pytest.mark.parametrize("kind", [RMD, FusedRMD])
def test_ray_fits_bitwise_what_one_process_does(tmp_path, blobs, kind):
    z, y, x = blobs
    write_parts(tmp_path, z, y, cuts=(20, 100, 150, 151))
    ours, rays = (fit_table(kind(), tmp_path, engine=engine, workers=1) for engine in ("local", "ray"))
    assert torch.equal(ours.predict_features(x), rays.predict_features(x))


def test_ray_scores_what_the_detector_does(tmp_path, blobs):
    z, y, x = (part.float() if part.is_floating_point() else part for part in blobs)
    detector = RMD().fit_features(z, y)
    write_parts(tmp_path / "new", x, cuts=(3, 50))
    found = score_table(detector, tmp_path / "new", tmp_path / "out", engine="ray")
    scores = np.concatenate([pq.read_table(path)["score"].to_numpy() for path in found])
    np.testing.assert_allclose(scores, detector.predict_features(x).numpy(), rtol=1e-6)


def test_the_actor_of_the_page_scores_the_files_of_a_dataset(tmp_path, blobs):
    z, y, x = (part.float() if part.is_floating_point() else part for part in blobs)
    write_parts(tmp_path / "new", x, cuts=(30,))
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "map_batches" in block]
    for folder in ("new/", "ray_scores"):  # Ray's processes have another working folder
        code = code.replace(f'"{folder}', f'"{tmp_path}/{folder}')
    detector = RMD().fit_features(z, y)
    exec(code, {"detector": detector, "__name__": "page"})
    found = [pq.read_table(tmp_path / "ray_scores" / f"{name}.parquet")["score"].to_numpy() for name in "ab"]
    np.testing.assert_allclose(np.concatenate(found), detector.predict_features(x).numpy(), rtol=1e-5, atol=1e-5)


def test_bad_rows_are_refused_with_our_own_error_or_skipped(tmp_path, blobs, caplog):
    z, y, x = blobs
    broken = z.clone()
    broken[150, 3] = torch.nan
    paths = write_parts(tmp_path / "table", broken, y, cuts=(100, 200))
    with pytest.raises(DataFormatError, match=r"b\.parquet: rows 0 to 99: .*1 NaN"):
        fit_table(RMD(), tmp_path / "table", engine="ray")
    keep = torch.cat([torch.arange(100), torch.arange(200, 300)])
    detector = fit_table(RMD(), tmp_path / "table", engine="ray", on_bad="skip")
    assert "b.parquet" in caplog.text
    expected = RMD().fit_features(z[keep], y[keep]).predict_features(x)
    assert torch.allclose(detector.predict_features(x), expected, rtol=1e-10, atol=1e-10)
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    with pytest.raises(DataFormatError, match=r"b\.parquet"):
        score_table(detector, tmp_path / "table", tmp_path / "out", engine="ray")
    assert len(score_table(detector, tmp_path / "table", tmp_path / "out", engine="ray", on_bad="skip")) == 2


def test_a_truncated_file_is_refused_before_a_task_is_started(tmp_path, blobs):
    z, y, _ = blobs
    paths = write_parts(tmp_path, z, y, cuts=(100,))
    truncate(paths[0])
    with pytest.raises(DataFormatError, match=r"a\.parquet: cannot be read"):
        fit_table(RMD(), tmp_path, engine="ray")
