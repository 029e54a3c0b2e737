"""A disk that is full or read-only: one error that names the file, and what was there before stays whole."""

import errno
import os
import resource

import pytest
import torch
from guard_kit import feature_guard

from rmd_plugin import RMD, Mahalanobis


def fitted(width):
    generator = torch.Generator().manual_seed(0)
    return Mahalanobis().fit_features(torch.randn(5 * width, width, generator=generator), torch.arange(5 * width) % 3)


@pytest.fixture
def limited():
    """No file may grow over 2000 bytes: what a full disk is to a process without rights."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_small(path):
    fitted(4).save(path)
    return path.read_bytes()


def test_a_file_over_the_limit_is_named_and_the_old_detector_stays(tmp_path, limited):
    before = write_small(tmp_path / "rmd.safetensors")
    with pytest.raises(OSError, match=r"rmd\.safetensors") as caught:
        fitted(200).save(tmp_path / "rmd.safetensors")
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "rmd.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["rmd.safetensors"]


def test_a_guard_over_the_limit_is_named_and_leaves_nothing(tmp_path, limited):
    guard = feature_guard(make=RMD, width=40)
    with pytest.raises(OSError, match="guard") as caught:
        guard.save(tmp_path / "guard", onnx=False)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []
