"""``rmd-score`` with guards that were really fitted and saved: its table is what the guard says in Python."""

import guard_kit
import numpy as np
import pandas as pd
import pytest
from guard_kit import feature_guard, picture_guard, pictures
from PIL import Image

from rmd_plugin import Guard
from rmd_plugin.app.score import main


def test_pictures_of_a_folder_get_the_verdicts_of_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture_guard().save("guard", onnx=False)
    (tmp_path / "new" / "deep").mkdir(parents=True)
    for number, array in enumerate(pictures(30, (33, 61), seed=9) + pictures(30, (50, 20), seed=9, ood=True)):
        Image.fromarray(array).save(tmp_path / "new" / ("deep" if number % 2 else ".") / f"{number:02}.png")
    (tmp_path / "new" / "broken.png").write_bytes(b"no")
    assert main(["guard", "new", "out=scores", "--fail-on-ood"]) == 3
    table = pd.read_parquet("scores/scores.parquet").set_index("path")
    assert len(table) == 61
    assert "readable" in table.loc["new/broken.png", "reason"]
    table = table.drop("new/broken.png")
    expected = Guard.load("guard")([tmp_path / path for path in table.index])
    np.testing.assert_allclose(table["score"], expected.score, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(table["p_value"].astype(float), expected.p_value)
    assert table["is_ood"].tolist() == expected.is_ood.tolist()
    assert table["class"].tolist() == expected.class_name
    assert table["nearest_class"].tolist() == expected.nearest_class
    assert "Most unknown" in (tmp_path / "scores" / "report.html").read_text()


def test_another_alpha_decides_by_its_own_threshold_and_one_that_is_too_small_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    guard = feature_guard()
    guard.save("guard", onnx=False)
    z = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32) * 1.5
    np.save("z.npy", z)
    assert main(["guard", "z.npy", "out=scores", "alpha=0.2"]) == 0
    found = pd.read_parquet("scores/scores.parquet")["is_ood"].to_numpy(bool)
    assert np.array_equal(found, guard(z).score.numpy() > guard.threshold_at(0.2))
    assert found.sum() > guard(z).is_ood.sum()
    assert main(["guard", "z.npy", "out=other", "alpha=0.001"]) == 1
    assert "alpha=0.001 needs 999" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_guard_that_was_altered_scores_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    feature_guard().save("guard", onnx=False)
    np.save("z.npy", np.zeros((3, 6), dtype=np.float32))
    with open("guard/weights.safetensors", "ab") as file:
        file.write(b"more")
    assert main(["guard", "z.npy", "out=scores"]) == 1
    assert "was altered" in capsys.readouterr().err
    assert not (tmp_path / "scores").exists()


def test_a_guard_of_features_takes_no_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    feature_guard().save("guard", onnx=False)
    Image.fromarray(pictures(1)[0]).save("a.png")
    assert main(["guard", "a.png"]) == 1
    assert "the guard judges features" in capsys.readouterr().err


@pytest.mark.slow
def test_several_processes_prepare_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guard_kit.picture_guard().save("guard", onnx=False)
    (tmp_path / "new").mkdir()
    for number, array in enumerate(pictures(40, seed=3)):
        Image.fromarray(array).save(tmp_path / "new" / f"{number:02}.png")
    assert (
        main(["guard", "new", "out=one", "batch_size=8"])
        == main(["guard", "new", "out=two", "batch_size=8", "num_workers=2"])
        == 0
    )
    pd.testing.assert_frame_equal(pd.read_parquet("one/scores.parquet"), pd.read_parquet("two/scores.parquet"))
