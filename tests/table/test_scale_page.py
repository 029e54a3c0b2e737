"""The page docs/scale.md does what it says."""

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from table_kit import write_parts

from rmd_plugin import RMD

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


@pytest.mark.slow
def test_the_example_with_dask_fits_and_scores_as_one_process_does(tmp_path, blobs, monkeypatch):
    z, y, x = (part.float() if part.is_floating_point() else part for part in blobs)
    write_parts(tmp_path / "embeddings", z, y, cuts=(100, 250))
    write_parts(tmp_path / "new", x, cuts=(30,))
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "dask" in block]
    names = {}
    exec(code, names)
    expected = RMD().fit_features(z, y).predict_features(x.double())
    assert torch.allclose(names["detector"].predict_features(x.double()), expected, rtol=1e-10, atol=1e-10)
    scores = [pq.read_table(tmp_path / "scores" / f"{name}.parquet")["score"].to_numpy() for name in "ab"]
    np.testing.assert_allclose(np.concatenate(scores), expected.numpy(), rtol=1e-5, atol=1e-4)


def test_a_state_has_the_size_that_the_page_states():
    width, classes = 20, 30
    state = RMD().fit_features(torch.randn(500, width), torch.arange(500) % classes).moments
    size = sum(getattr(state, name).nbytes for name in ("counts", "shift", "sums", "second"))
    assert size == 8 * (width**2 + width * classes + classes + width)
