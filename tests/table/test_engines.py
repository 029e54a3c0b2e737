"""Ray, and the recipes of docs/scale.md for other engines, give what one process gives."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from table_kit import flip, write_parts

from rmd_plugin import RMD, FusedRMD, fit_table, score_table

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()


@pytest.fixture(scope="module")
def ray():
    module = pytest.importorskip("ray", reason="ray is not installed (extra ray)")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    module.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    yield module
    module.shutdown()
    patch.undo()


def floats(blobs):
    return [part.float() if part.is_floating_point() else part for part in blobs]


def recipe(word):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if word in block]
    return code


# of Ray's own modules
ray_test = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]


class TestRay:
    pytestmark = ray_test

    @pytest.mark.parametrize("kind", [RMD, FusedRMD])
    def test_ray_fits_bitwise_what_one_process_does(self, ray, tmp_path, blobs, kind):
        z, y, x = blobs
        write_parts(tmp_path, z, y, cuts=(20, 100, 150, 151))
        local, remote = (fit_table(kind(), tmp_path, engine=engine, workers=1) for engine in ("local", "ray"))
        assert torch.equal(local.predict_features(x), remote.predict_features(x))

    def test_ray_scores_what_the_detector_does_and_names_a_bad_file(self, ray, tmp_path, blobs, caplog):
        z, y, x = floats(blobs)
        detector = RMD().fit_features(z, y)
        files = write_parts(tmp_path / "new", x, cuts=(3, 50), write_page_checksum=True, compression="none")
        paths = score_table(detector, tmp_path / "new", tmp_path / "out", engine="ray")
        scores = np.concatenate([pq.read_table(path)["score"].to_numpy() for path in paths])
        np.testing.assert_allclose(scores, detector.predict_features(x).numpy(), rtol=1e-6)
        flip(files[1], at=500)
        with pytest.raises(ValueError, match=r"b\.parquet"):
            score_table(detector, tmp_path / "new", tmp_path / "out", engine="ray")
        assert len(score_table(detector, tmp_path / "new", tmp_path / "out", engine="ray", on_bad="skip")) == 2
        assert "b.parquet" in caplog.text

    def test_the_actor_of_the_page_scores_the_files_of_a_dataset(self, ray, tmp_path, blobs):
        z, y, x = floats(blobs)
        write_parts(tmp_path / "new", x, cuts=(30,))
        code = recipe("map_batches")
        for folder in ("new/", "ray_scores"):  # Ray's processes have another working folder
            code = code.replace(f'"{folder}', f'"{tmp_path}/{folder}')
        detector = RMD().fit_features(z, y)
        exec(code, {"detector": detector, "__name__": "page"})
        scores = [pq.read_table(tmp_path / "ray_scores" / f"{name}.parquet")["score"].to_numpy() for name in "ab"]
        np.testing.assert_allclose(np.concatenate(scores), detector.predict_features(x).numpy(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def spark():
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("Spark needs Java")
    builder = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
    yield session
    session.stop()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dask", "spark"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Spark leaves its sockets open
def test_the_recipe_for_another_engine_fits_and_scores_as_one_process_does(
    tmp_path, blobs, monkeypatch, request, engine
):
    z, y, x = floats(blobs)
    write_parts(tmp_path / "embeddings", z, y, cuts=(100, 250))
    write_parts(tmp_path / "new", x, cuts=(30,))
    monkeypatch.chdir(tmp_path)
    names = {} if engine == "dask" else {"spark": request.getfixturevalue("spark")}
    exec(recipe("dask") if engine == "dask" else recipe("parallelize"), names)
    expected = RMD().fit_features(z, y).predict_features(x.double())
    assert torch.allclose(names["detector"].predict_features(x.double()), expected, rtol=1e-10, atol=1e-10)
    scores = [pq.read_table(tmp_path / "scores" / f"{name}.parquet")["score"].to_numpy() for name in "ab"]
    np.testing.assert_allclose(np.concatenate(scores), expected.numpy(), rtol=1e-5, atol=1e-4)


def test_a_state_has_the_size_that_the_page_states():
    width, classes = 20, 30
    state = RMD().fit_features(torch.randn(500, width), torch.arange(500) % classes).moments
    size = sum(getattr(state, name).nbytes for name in ("counts", "shift", "sums", "second"))
    assert size == 8 * (width**2 + width * classes + classes + width)
