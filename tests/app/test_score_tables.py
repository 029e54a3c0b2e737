"""``rmd-score ... engine=``: tables of features, file by file."""

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from guard_kit import feature_guard, picture_guard
from table_kit import write_parts

from rmd_plugin.app.score import main


@pytest.fixture
def guard(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = feature_guard()
    found.save(tmp_path / "guard", onnx=False)
    return found


def test_the_tables_of_a_folder_get_what_the_guard_says_of_each_row(tmp_path, guard, capsys):
    x = torch.cat([torch.randn(30, 6), 20.0 * torch.randn(10, 6)])
    write_parts(tmp_path / "new", x, cuts=(25,))
    words = ["guard", "new", "engine=local", "num_workers=1", "out=scores"]
    assert main(words) == 0
    tables = [pq.read_table(tmp_path / "scores" / f"{name}.parquet") for name in "ab"]
    expected = guard(x)
    found = {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in tables[0].column_names}
    np.testing.assert_allclose(found["score"], expected.score.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["p_value"], expected.p_value.numpy(), rtol=1e-6)
    flagged = int(expected.is_ood.sum())
    assert found["is_ood"].tolist() == expected.is_ood.tolist()
    assert 0 < flagged < 40
    assert f"Scored 40 rows of 2 files; flagged as OOD: {flagged}" in capsys.readouterr().out
    assert main([*words, "--fail-on-ood"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=spark"], "engine must be 'local' or 'ray', got 'spark'"),
        (["engine=local", "id=url"], "id= cannot be used with engine=, which takes out, engine, features"),
        (["engine=local", "features=vector"], "has no column 'vector'; it has embedding"),
    ],
)
def test_words_that_do_not_fit_are_one_sentence(tmp_path, guard, capsys, words, message):
    write_parts(tmp_path / "new", torch.randn(10, 6))
    assert main(["guard", "new", *words, "num_workers=1"]) == 1
    assert message in capsys.readouterr().err


def test_a_guard_of_pictures_takes_no_engine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    picture_guard().save(tmp_path / "guard", onnx=False)
    assert main(["guard", "new", "engine=local"]) == 1
    assert "this guard has a network for images. Leave engine= out" in capsys.readouterr().err


def test_tables_and_scores_may_lie_in_an_object_store(tmp_path, guard, capsys):
    store = fsspec.filesystem("memory")
    (path,) = write_parts(tmp_path, torch.randn(10, 6))
    store.pipe_file("/bucket/new/a.parquet", path.read_bytes())
    words = ["memory://bucket/new", "engine=local", "num_workers=1", "out=memory://bucket/scores"]
    assert main(["guard", *words]) == 0
    assert "Written to memory://bucket/scores" in capsys.readouterr().out
    with store.open("/bucket/scores/a.parquet") as file:
        assert pq.read_table(file).num_rows == 10
    store.rm("/bucket", recursive=True)
    assert not (tmp_path / "memory:").exists()
