"""A disk that is full or read-only: one error that names the file, and what was there before stays whole."""

import errno
import os
import resource
import subprocess

import pytest
import torch
from guard_kit import feature_guard

from rmd_plugin import RMD, Guard, Mahalanobis


def fitted(width):
    generator = torch.Generator().manual_seed(0)
    return Mahalanobis().fit_features(torch.randn(5 * width, width, generator=generator), torch.arange(5 * width) % 3)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 KiB, where this process may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # loaded tensors may still be mapped


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


def test_a_full_disk_leaves_the_old_files(small_disk):
    before = write_small(small_disk / "rmd.safetensors")
    with pytest.raises(OSError, match=r"rmd\.safetensors") as caught:
        fitted(200).save(small_disk / "rmd.safetensors")
    assert caught.value.errno == errno.ENOSPC
    feature_guard(make=RMD).save(small_disk / "guard", onnx=False)
    disk = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(disk.f_bavail * disk.f_bsize - 4096))
    with pytest.raises(OSError, match="guard"):
        feature_guard(make=RMD).save(small_disk / "guard", onnx=False)
    assert (small_disk / "rmd.safetensors").read_bytes() == before
    assert Guard.load(small_disk / "guard").input_shape == (6,)
    assert sorted(os.listdir(small_disk)) == ["filler", "guard", "rmd.safetensors"]
