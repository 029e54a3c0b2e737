"""Guards on a hub that is a folder of the test."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from guard_kit import feature_guard

from rmd_plugin import Guard

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands for the hub: repositories are folders, and calls are recorded."""
    calls = {}

    class FakeApi:
        def __init__(self, token=None):
            calls["token"] = token

        def create_repo(self, repo_id, *, private, exist_ok):
            calls["private"] = private
            assert exist_ok
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def upload_folder(self, *, repo_id, folder_path, commit_message, delete_patterns, create_pr=False):
            shutil.rmtree(tmp_path / repo_id, ignore_errors=True)
            assert delete_patterns == "*"
            shutil.copytree(folder_path, tmp_path / repo_id)
            pr_url = f"hub/{repo_id}/discussions/1" if create_pr else None
            return SimpleNamespace(commit_url=f"hub/{repo_id}/commit/1", pr_url=pr_url)

    def snapshot_download(name, **options):
        calls["download"] = options
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # where no folder has the name of a repository
    return SimpleNamespace(path=tmp_path, calls=calls)


def test_a_guard_comes_back_from_the_hub_with_the_same_verdicts(hub):
    guard = feature_guard()
    assert guard.push_to_hub("digits", onnx=False, private=True, token="secret") == "hub/me/digits/commit/1"
    again = Guard.from_pretrained("me/digits", revision="v1", token="secret")
    items = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    assert np.array_equal(guard(items).score, again(items).score)
    assert hub.calls["private"] is True
    assert hub.calls["token"] == hub.calls["download"]["token"] == "secret"
    assert hub.calls["download"]["revision"] == "v1"


def test_the_model_card_has_metadata_and_says_how_to_load_it(hub):
    feature_guard().push_to_hub("digits", onnx=False, license="mit")
    card = huggingface_hub.ModelCard.load(hub.path / "me/digits/README.md")
    assert card.data.library_name == "rmd-plugin"
    assert card.data.license == "mit"
    assert card.data.pipeline_tag == "tabular-classification"
    assert "out-of-distribution-detection" in card.data.tags
    assert 'Guard.from_pretrained("me/digits")' in card.text
    assert yaml.safe_load((hub.path / "me/digits/README.md").read_text().split("---")[1])


def test_a_pull_request_is_opened_if_asked_for(hub):
    assert feature_guard().push_to_hub("digits", onnx=False, create_pr=True).endswith("discussions/1")


def test_a_local_folder_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    feature_guard().save(tmp_path / "guard", onnx=False)
    assert Guard.from_pretrained(Path(tmp_path / "guard")).kind == "features"
