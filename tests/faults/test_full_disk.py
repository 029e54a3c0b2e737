"""A disk that is full or read-only: one clear error, and what was there before stays whole."""

import errno
import io
import os
import resource
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rmd_plugin import Mahalanobis, Moments
from rmd_plugin.compare.cache import CacheError, FeatureCache

KEY, OTHER = "ab" * 32, "cd" * 32


def fitted(width, seed=0):
    generator = torch.Generator().manual_seed(seed)
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
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def read_only(small_disk):
    """A read-only file system with a detector on it: root may write where only permissions forbid it."""
    fitted(4).save(small_disk / "rmd.pt")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    return small_disk


def small_entry():
    return [(np.ones((5, 3), np.float32), np.arange(5))]


def large_entry():
    return ((np.ones((1000, 64), np.float32), np.zeros(1000, int)) for _ in range(9))


@pytest.fixture
def limited():
    """No file may grow over 2000 bytes: what a full disk is to a process without rights."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limit


def test_a_save_over_the_limit_of_a_file_leaves_the_old_detector(tmp_path, limited):
    path, large = tmp_path / "rmd.pt", fitted(200)
    fitted(4).save(path)
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"File too large; .*as it was.*another folder") as caught, limited():
        large.save(path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rmd.pt"]


def test_a_save_into_a_pipe_or_device_does_not_put_a_file_in_its_place(tmp_path):
    pipe, detector = tmp_path / "pipe", fitted(4)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    detector.save(pipe)
    assert pipe.is_fifo()
    found = Mahalanobis.load(io.BytesIO(os.read(reader, 1 << 16)))
    os.close(reader)
    assert torch.equal(found.predict_features(torch.eye(4)), detector.predict_features(torch.eye(4)))


def test_a_cache_entry_over_the_limit_of_a_file_leaves_the_others(tmp_path, limited):
    cache = FeatureCache(tmp_path)
    cache.fetch(OTHER, small_entry, 5)
    with pytest.raises(CacheError, match="is full"), limited():
        cache.fetch(KEY, large_entry, 9000)
    assert os.listdir(tmp_path / "tmp") == []
    assert cache.fetch(OTHER, large_entry, 5).hit


def test_a_save_on_a_full_disk_leaves_the_old_detector(small_disk):
    path = small_disk / "rmd.pt"
    fitted(4).save(path)
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"No space left on device.*as it was") as caught:
        fitted(200).save(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert os.listdir(small_disk) == ["rmd.pt"]
    assert Mahalanobis.load(path).num_features == 4


def test_a_read_only_folder_is_one_clear_error(read_only):
    path = read_only / "rmd.pt"
    with pytest.raises(OSError, match=r"Read-only file system.*as it was.*another folder") as caught:
        fitted(5).save(path)
    assert caught.value.filename == str(path)
    assert Mahalanobis.load(path).num_features == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="another folder"):
        fitted(5).save(tmp_path / "rmd.pt")
    tmp_path.chmod(0o700)


def test_moments_on_a_full_disk_leave_the_old_file(small_disk):
    path = small_disk / "moments.pt"
    one = Moments(*(torch.ones(s, dtype=torch.float64) for s in ((2,), (3,), (2, 3), (3, 3))))
    one.save(path)
    before = path.read_bytes()
    large = Moments(*(torch.ones(s, dtype=torch.float64) for s in ((2,), (300,), (2, 300), (300, 300))))
    with pytest.raises(OSError, match="No space left on device"):
        large.save(path)
    assert path.read_bytes() == before


def test_a_cache_on_a_full_disk_is_one_clear_error_and_leaves_other_entries(small_disk):
    cache = FeatureCache(small_disk)
    cache.fetch(OTHER, small_entry, 5)
    with pytest.raises(CacheError, match="is full") as caught:
        cache.fetch(KEY, large_entry, 9000)
    assert "\n" not in str(caught.value)
    assert os.listdir(small_disk / "tmp") == []
    assert cache.fetch(OTHER, large_entry, 5).hit


def test_a_read_only_cache_serves_what_it_has_and_names_what_it_cannot_write(small_disk):
    cache = FeatureCache(small_disk)
    cache.fetch(KEY, small_entry, 5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert cache.fetch(KEY, large_entry, 5).hit
    with pytest.raises(CacheError, match="Read-only file system") as caught:
        cache.fetch(OTHER, large_entry, 9000)
    assert "cache_dir=" in str(caught.value)
